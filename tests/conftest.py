"""Four CPU devices, and no silent broadcasting between ranks."""

import pathlib
import sys

import jax

from podrl import spmd

# Experiments import one another, as they do when run as scripts.
sys.path.append(str(pathlib.Path(__file__).parent.parent / 'experiments'))
jax.config.update('jax_platforms', 'cpu')
spmd.set_num_cpu_devices(4)
jax.config.update('jax_numpy_rank_promotion', 'raise')
