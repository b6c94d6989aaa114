"""Sets up JAX for the tests: four CPU devices and no silent broadcasting.

All tests of one session share a cache of compiled programs and a key that signs
runs, and so do the processes that they start.
"""

import atexit
import ctypes
import gc
import os
import pathlib
import shutil
import sys
import tempfile

# Experiments import one another, as they do when run as scripts.
_ROOT = pathlib.Path(__file__).parents[1]
sys.path += [str(_ROOT / x) for x in ('experiments', 'experiments/benchmarks')]
sys.path += [str(x) for x in sorted((_ROOT / 'tests').glob('**'))]
_IS_WORKER = 'PYTEST_XDIST_WORKER' in os.environ
if not _IS_WORKER:  # Workers inherit the variable.
  os.environ['XDG_CACHE_HOME'] = tempfile.mkdtemp(prefix='podrl-tests-')
  os.environ['XDG_STATE_HOME'] = os.environ['XDG_CACHE_HOME']
  atexit.register(shutil.rmtree, os.environ['XDG_CACHE_HOME'], True)


def pytest_configure(config):
  # A process that only hands tests to workers does not need JAX.
  if _IS_WORKER or not config.getoption('numprocesses', None):
    _set_up_jax()


def pytest_runtest_teardown(item, nextitem):
  """Frees the programs of a file, or a process would need gigabytes."""
  if 'jax' in sys.modules and (nextitem is None or nextitem.path != item.path):
    sys.modules['jax'].clear_caches()
    gc.collect()
    if sys.platform == 'linux':  # glibc would keep most of the memory.
      ctypes.CDLL(None).malloc_trim(0)


def _set_up_jax() -> None:
  """Sets up JAX here and, where possible, in the processes that tests start."""
  import jax

  from podrl import signals
  from podrl.drivers import spmd
  from podrl.envs.gymnax import import_gymnax

  # The tests compile much and compute little, so skip LLVM's optimisations, and
  # do not divide a program between threads, which share the cores of the tests.
  flags = [os.environ.get('XLA_FLAGS'), '--xla_backend_optimization_level=0']
  flags.append('--xla_cpu_parallel_codegen_split_count=1')
  if jax.__version_info__ < (0, 11):  # Later versions need fusion emitters.
    flags.append('--xla_cpu_use_fusion_emitters=false')  # It doubles the speed.
  os.environ['XLA_FLAGS'] = ' '.join(filter(None, flags))
  signals.PATIENCE_SECONDS = float('inf')  # A signal must not end the tests.
  jax.config.update('jax_platforms', 'cpu')
  spmd.set_num_cpu_devices(4)
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  cache = os.path.join(os.environ['XDG_CACHE_HOME'], 'podrl', 'xla')
  jax.config.update('jax_compilation_cache_dir', cache)  # A run has one too.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  gc.set_threshold(100_000, 20, 20)  # A trace makes many objects that stay.
  import_gymnax()  # The tests that import it themselves would wait for seconds.
  gc.collect()
  gc.freeze()  # The modules stay, so no later collection looks at them.
