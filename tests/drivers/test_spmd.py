"""Tests the mapping over devices."""

import glob
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np
import pytest

from podrl.drivers import spmd


def test_replicated_gradients_are_averaged_not_summed():
  # The gradient of p * mean(x) is mean(x) = 3.5 on any number of devices.
  mesh = spmd.make_mesh(jax.devices()[:4])
  grad = spmd.device_map(
    lambda p, x: jax.lax.pmean(
      jax.grad(lambda p: p * jnp.mean(x))(p), 'devices'
    ),
    mesh,
    (spmd.REPLICATED, spmd.BATCH),
    spmd.REPLICATED,
  )
  assert float(grad(jnp.ones(()), jnp.arange(8.0))) == 3.5


def test_shards_are_split_on_the_batch():
  mesh = spmd.make_mesh(jax.devices()[:4])
  x = spmd.place(np.arange(24).reshape(3, 8), mesh, spmd.TRAJECTORY)
  shapes = {shard.data.shape for shard in x.addressable_shards}
  assert shapes == {(3, 2)}


@pytest.mark.parametrize('num_learners', [1, 2])
@pytest.mark.parametrize('target', range(3))
def test_variables_reach_any_device(num_learners, target):
  mesh = spmd.make_mesh(jax.devices()[:num_learners])
  variables = {'w': spmd.place(jnp.arange(4.0), mesh, spmd.REPLICATED)}
  device = jax.devices()[target]
  copy = spmd.to_device(variables, device)['w']
  assert copy.tolist() == [0.0, 1.0, 2.0, 3.0]
  # An actor's program compiles again if only the kind of sharding changes.
  assert copy.sharding == SingleDeviceSharding(device)
  if target < num_learners:  # There is no copy.
    shards = variables['w'].addressable_shards
    pointers = [x.data.unsafe_buffer_pointer() for x in shards]
    assert copy.unsafe_buffer_pointer() == pointers[target]


def test_a_constant_may_be_without_elements():
  # JAX 0.11.2 crashes here if the constant enters `shard_map` from outside.
  code = """
jax.config.update("jax_num_cpu_devices", 2)
none = jax.numpy.zeros(0)
add = spmd.device_map(
  lambda x: x + none.sum(),
  spmd.make_mesh(jax.devices()),
  (spmd.BATCH,),
  spmd.BATCH,
)
print(add(jax.numpy.arange(4)).tolist())
"""
  assert _print_on_cpu(code) == '[0.0, 1.0, 2.0, 3.0]'


def test_a_copy_outlives_the_donation_of_its_source():
  mesh = spmd.make_mesh(jax.devices()[:2])
  x = spmd.place(jnp.arange(4.0), mesh, spmd.REPLICATED)
  copy = spmd.copy_to_first_device(x)
  bump = spmd.device_map(
    lambda x: x + 1.0, mesh, (spmd.REPLICATED,), spmd.REPLICATED, donate=(0,)
  )
  bump(x)
  assert x.is_deleted()
  np.testing.assert_array_equal(copy, np.arange(4.0))
  assert copy.devices() == {jax.devices()[0]}


def _print_on_cpu(code):
  """Runs code in a new process on CPUs; returns what it prints."""
  start = (
    'import jax; from podrl.drivers import spmd; '
    'jax.config.update("jax_platforms", "cpu"); '
  )
  command = [sys.executable, '-c', start + code]
  outcome = subprocess.run(command, capture_output=True, text=True, check=True)
  return outcome.stdout.strip()


def test_a_look_for_accelerators_leaves_the_number_of_cpu_devices_open():
  printed = _print_on_cpu(
    'assert not spmd.has_accelerator(); spmd.set_num_cpu_devices(3); '
    'print(len(jax.devices()))'
  )
  assert printed == '3'


def test_a_look_for_accelerators_keeps_the_arrays_of_a_session():
  printed = _print_on_cpu(
    'x = jax.numpy.arange(3); client = jax.devices()[0].client; '
    'assert not spmd.has_accelerator(); '
    'assert jax.devices()[0].client is client; print((x + 1).sum())'
  )
  assert printed == '6'


@pytest.mark.skipif(
  bool(glob.glob('/dev/accel*') + glob.glob('/dev/vfio/[0-9]*')),
  reason='this machine has a TPU',
)
def test_libtpu_without_a_tpu_is_left_alone(tmp_path):
  (tmp_path / 'libtpu.py').write_text(
    'def get_library_path():\n  return "/no/such/libtpu.so"\n'
  )
  path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
  environment = {k: x for k, x in os.environ.items() if k != 'JAX_PLATFORMS'}
  code = (
    'import podrl.drivers.spmd, jax; '
    'print(jax.config.jax_platforms, "tpu" in jax.devices()[0].platform)'
  )
  outcome = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    env=environment | {'PYTHONPATH': path},
  )
  assert outcome.stdout.endswith('cpu False\n') and outcome.stderr == ''


def test_a_platform_to_compile_for():
  assert spmd.platform() == 'cpu' and not spmd.has_accelerator()
  with spmd.compiling_for('tpu'):
    assert spmd.platform() == 'tpu' and spmd.has_accelerator()
    assert spmd.in_order_options() == {}
  assert spmd.platform() == 'cpu' and spmd.in_order_options()


@pytest.mark.parametrize(
  'available,container,ulimit,address,expected',
  [
    (8000, 'max', None, None, 8000 / 4),  # This process has four devices.
    (8000, '6000', None, None, 6000 / 4),
    (8000, '9000', None, None, 8000 / 4),
    (8000, 'max', None, '127.0.0.1:80', 8000 / 8),  # There are two processes.
    (8000, 'max', None, '[::1]:80', 8000 / 8),
    (8000, 'max', None, '10.0.0.1:80', 8000 / 4),
    (8000, 'max', 400, '127.0.0.1:80', 400 / 4),  # Each process has this much.
    (8000, 'max', -1, None, 0),
  ],
)
def test_the_memory_of_a_host_is_shared(
  available, container, ulimit, address, expected, tmp_path, monkeypatch
):
  text = f'MemTotal: 9999999 kB\nMemAvailable: {available}000 kB\n'
  (tmp_path / 'meminfo').write_text(text)
  text = container if container == 'max' else str(1_024_000 * int(container))
  (tmp_path / 'memory.max').write_text(text)
  monkeypatch.setattr(spmd, '_MEMORY', str(tmp_path / 'meminfo'))
  monkeypatch.setattr(spmd, '_LIMIT', str(tmp_path / 'memory.max'))
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  state = spmd.distributed.global_state
  monkeypatch.setattr(state, 'coordinator_address', address)
  limit = -1
  if ulimit is not None:
    page = os.sysconf('SC_PAGE_SIZE')
    used = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * page
    limit = used + 1_024_000 * ulimit
  monkeypatch.setattr(spmd.resource, 'getrlimit', lambda kind: (limit, limit))
  found = spmd._bytes_per_device() / 1_024_000
  assert found == pytest.approx(expected, abs=30)  # The process may grow.
