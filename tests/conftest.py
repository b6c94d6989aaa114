"""Four CPU devices, no silent broadcasting between ranks, one cache of programs.

Runs that the tests make find what earlier ones compiled, in this session alone.
"""

import atexit
import os
import pathlib
import shutil
import sys
import tempfile

import jax

from podrl.drivers import spmd

# Experiments import one another, as they do when run as scripts.
_ROOT = pathlib.Path(__file__).parents[1]
sys.path += [str(_ROOT / x) for x in ('experiments', 'experiments/benchmarks')]
sys.path += [str(x) for x in sorted((_ROOT / 'tests').glob('**'))]
os.environ['XDG_CACHE_HOME'] = tempfile.mkdtemp(prefix='podrl-tests-')
atexit.register(shutil.rmtree, os.environ['XDG_CACHE_HOME'], True)
# The tests compile much and compute little: LLVM's optimisations do not pay.
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_backend_optimization_level=0'
)
jax.config.update('jax_platforms', 'cpu')
spmd.set_num_cpu_devices(4)
jax.config.update('jax_numpy_rank_promotion', 'raise')
