"""Mapping over devices: one mesh of one axis, and jit(shard_map) over it.

This is what `jax.pmap` itself has been since JAX 0.8. It is the only file that
makes a mesh or says how arrays lie on one.
"""

from collections.abc import Callable, Sequence
import contextlib
import glob
import importlib.util
import os

import jax
from jax.extend import backend
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from podrl.types import DEVICE_AXIS, Learner, LearnerState, Tree

REPLICATED = PartitionSpec()
BATCH = PartitionSpec(DEVICE_AXIS)  # Axis 0 is the batch.
TRAJECTORY = PartitionSpec(None, DEVICE_AXIS)  # Time, then the batch.
LEARNER_STATE = LearnerState(
  *[REPLICATED] * 5, memory=PartitionSpec(None, None, DEVICE_AXIS)
)  # Of remembered trajectories.


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
  """A one-axis mesh over devices."""
  return Mesh(np.asarray(devices), (DEVICE_AXIS,))


def device_map(
  function: Callable,
  mesh: Mesh,
  in_specs: Tree,
  out_specs: Tree,
  donate: tuple[int, ...] = (),
) -> Callable:
  """Maps a function over a mesh and compiles it.

  Args:
    function: of per-device shards; it may average over `DEVICE_AXIS`.
    mesh: of `make_mesh`.
    in_specs: a partition spec, or a tree prefix of them, for each argument.
    out_specs: the same for what it returns.
    donate: positions of arguments whose buffers the outputs may reuse.
  """
  # check_vma=False: with the default, pmean(grad(...)) of replicated
  # parameters returns the sum of the per-device gradients.
  mapped = jax.shard_map(
    function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )
  return jax.jit(mapped, donate_argnums=donate)


def map_update(learner: Learner, mesh: Mesh) -> Callable:
  """Maps `Learner.update`, for a driver whose actors use the parameters.

  Args:
    learner: whose `update` it is.
    mesh: of the learner devices.

  Returns:
    `(params, rest, trajectories, rng_key) -> (LearnerState, metrics)`. `rest`
    is the learner's state without its parameters and is donated; these are not,
    so that actors may go on using them. The trajectories, a tuple, are joined
    on the batch axis on each device.
  """

  def update(params, rest, trajectories, rng_key):
    trajectory = jax.tree.map(
      lambda *x: jnp.concatenate(x, axis=1), *trajectories
    )
    state = rest._replace(params=params)
    return learner.update(
      state, trajectory, jax.random.fold_in(rng_key, state.num_updates)
    )

  return device_map(
    update,
    mesh,
    (REPLICATED, LEARNER_STATE, TRAJECTORY, REPLICATED),
    (LEARNER_STATE, REPLICATED),
    donate=(1,),
  )


def place(tree: Tree, mesh: Mesh, specs: Tree) -> Tree:
  """Copies a tree of arrays onto a mesh, by a tree prefix of specs.

  Where the mesh spans processes, each has the whole of the tree.
  """
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  if mesh.is_multi_process:
    return jax.tree.map(
      lambda sharding, part: jax.tree.map(lambda x: _spread(x, sharding), part),
      shardings,
      tree,
    )
  return jax.device_put(tree, shardings)


def _spread(x: jax.Array, sharding: NamedSharding) -> jax.Array:
  """An array that this process has, over several processes' devices."""
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    # Its data has an axis more, behind the key's.
    return jax.random.wrap_key_data(
      _spread(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x)
    )
  host = np.asarray(x)
  return jax.make_array_from_callback(
    host.shape, sharding, lambda index: host[index]
  )


def like(tree: Tree, arrays: Tree) -> Tree:
  """Copies a tree to where the arrays of another one lie."""
  return jax.tree.map(
    lambda x, old: (
      jax.device_put(x, old.sharding)
      if old.is_fully_addressable
      else _spread(x, old.sharding)
    ),
    tree,
    arrays,
  )


def fetch(tree: Tree) -> Tree:
  """This process's parts of arrays, in numpy.

  An array that is split over devices is joined on the split axis.
  """

  def one(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable or x.is_fully_replicated:
      return np.asarray(x)
    axis = x.sharding.spec.index(DEVICE_AXIS)
    parts = sorted(x.addressable_shards, key=lambda s: s.index[axis].start or 0)
    return np.concatenate([s.data for s in parts], axis)

  for x in jax.tree.leaves(tree):
    x.copy_to_host_async()
  return jax.tree.map(one, tree)


def set_num_cpu_devices(num_devices: int, num_processes: int = 1) -> None:
  """Makes so many CPU devices; call it before the first use of a device.

  Args:
    num_devices: of this process.
    num_processes: of the run.
  """
  if num_processes > 1 and hasattr(os, 'SCHED_BATCH'):
    # The threads of a collective over gloo else preempt one another: where each
    # process has one core, an all-reduce took 3.6 ms and takes 0.12.
    with contextlib.suppress(PermissionError):  # A sandbox may forbid it.
      os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
  jax.config.update('jax_num_cpu_devices', num_devices)


def _sees_accelerator() -> bool:
  """Whether the machine has one, and JAX a package for it."""
  if jax.config.jax_platforms:
    return not jax.config.jax_platforms.startswith('cpu')
  return any(
    importlib.util.find_spec(package) and glob.glob(device)
    for package, device in (
      ('libtpu', '/dev/accel*'),
      ('libtpu', '/dev/vfio/[0-9]*'),
      ('jax_cuda12_plugin', '/dev/nvidiactl'),
      ('jax_cuda13_plugin', '/dev/nvidiactl'),
      ('jax_rocm60_plugin', '/dev/kfd'),
      ('jax_rocm7_plugin', '/dev/kfd'),
    )
  )


def has_accelerator() -> bool:
  """Whether JAX finds one; where not, `set_num_cpu_devices` may still follow.

  Arrays made before are lost then: call it first.

  Raises:
    ValueError: if what JAX_PLATFORMS asks for is not there.
  """
  if jax.distributed.is_initialized():
    # To ask JAX would tell the other processes of this one's devices, for good.
    return _sees_accelerator()
  try:
    platform = jax.default_backend()
  except (RuntimeError, AssertionError) as error:  # The latter says nothing.
    raise ValueError(
      f'JAX_PLATFORMS={jax.config.jax_platforms} is not to be had here '
      f'{" ".join(str(error).split())}'.rstrip()
    ) from error
  if platform != 'cpu':
    return True
  if jax.config.jax_num_cpu_devices < 1:
    backend.clear_backends()
  return False


def copy_to_first_device(tree: Tree) -> Tree:
  """A copy of a replicated tree on this process's first device of it."""
  return jax.tree.map(lambda x: jnp.copy(x.addressable_data(0)), tree)


def to_device(tree: Tree, device: jax.Device) -> Tree:
  """A replicated tree on one device: its own part there, else a copy."""

  def one(x: jax.Array) -> jax.Array:
    parts = {shard.device: shard.data for shard in x.addressable_shards}
    return (
      parts[device]
      if device in parts
      else jax.device_put(x.addressable_data(0), device)
    )

  return jax.tree.map(one, tree)


def join_shards(
  shards: Sequence[Tree], mesh: Mesh, spec: PartitionSpec
) -> Tree:
  """One tree of arrays over a mesh, of the parts that lie on its devices.

  Args:
    shards: for each of this process's devices of the mesh, in its order.
    mesh: of `make_mesh`.
    spec: how the arrays are split, on one axis.
  """
  axis = spec.index(DEVICE_AXIS)

  def join(*parts: jax.Array) -> jax.Array:
    shape = list(parts[0].shape)
    shape[axis] *= mesh.size
    return jax.make_array_from_single_device_arrays(
      tuple(shape), NamedSharding(mesh, spec), list(parts)
    )

  return jax.tree.map(join, *shards)
