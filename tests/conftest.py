"""Sets up JAX for the tests: four CPU devices and no silent broadcasting.

All runs of one session share a cache of compiled programs.
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
sys.path += [
  str(x) for x in sorted((_ROOT / 'tests').glob('**')) if x.name != 'stubs'
]
_STUBS = str(_ROOT / 'tests' / 'stubs')  # See the files there.
sys.path.insert(0, _STUBS)
_PYTHONPATH = [_STUBS, os.environ.get('PYTHONPATH')]
os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, _PYTHONPATH))
os.environ['XDG_CACHE_HOME'] = tempfile.mkdtemp(prefix='podrl-tests-')
atexit.register(shutil.rmtree, os.environ['XDG_CACHE_HOME'], True)
# The tests compile much and compute little: LLVM's optimisations do not pay.
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_backend_optimization_level=0'
)
jax.config.update('jax_platforms', 'cpu')
spmd.set_num_cpu_devices(4)
jax.config.update('jax_numpy_rank_promotion', 'raise')
