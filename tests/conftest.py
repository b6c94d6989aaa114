"""Four CPU devices, and no silent broadcasting between ranks."""

import jax

from podrl import spmd

jax.config.update('jax_platforms', 'cpu')
spmd.set_num_cpu_devices(4)
jax.config.update('jax_numpy_rank_promotion', 'raise')
