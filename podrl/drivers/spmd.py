"""Maps programs over devices: a mesh of devices, and jit(shard_map) over it.

Since JAX 0.8, `jax.pmap` works in the same way. Only this file makes meshes and
decides how arrays are split over them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import functools
import glob
import importlib.util
import math
import os
import resource
from typing import Any

import jax
from jax._src import (
  distributed,  # JAX has no public API for the address.
  xla_bridge,  # `backends_are_initialized` is not public.
)
from jax.extend import backend
import jax.numpy as jnp
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)
import numpy as np

from podrl.core.memory import SizeError
from podrl.messages import one_line
from podrl.types import (
  DEVICE_AXIS,
  MEMBER_AXIS,
  Array,
  Learner,
  LearnerState,
  Trajectory,
  Tree,
)

# These specs are typed as Any, so that the state of a run can contain them.
REPLICATED: Any = PartitionSpec()
BATCH: Any = PartitionSpec(DEVICE_AXIS)  # Axis 0 is the batch.
TRAJECTORY: Any = PartitionSpec(None, DEVICE_AXIS)  # Axis 1 is the batch.
# For several agents: axis 0 is the agent, and is split.
MEMBERS: Any = PartitionSpec(MEMBER_AXIS)
MEMBERS_BATCH: Any = PartitionSpec(MEMBER_AXIS, DEVICE_AXIS)

_LIMIT = '/sys/fs/cgroup/memory.max'  # Limit of a container, in bytes.
_MEMORY = '/proc/meminfo'
_config: Any = jax.config  # mypy does not know its fields.
# The platform in `compiling_for`, or empty.
_target = contextvars.ContextVar('target', default='')


def make_mesh(devices: Sequence[jax.Device], member_groups: int = 1) -> Mesh:
  """Makes a mesh of devices.

  Its axes are `MEMBER_AXIS` and `DEVICE_AXIS`. If there are several processes,
  each has all agents, and the same number of devices.

  Args:
    devices: all devices of the mesh. The devices of one process must be next
      to each other.
    member_groups: into how many groups the agents are split. It divides the
      number of devices of a process.
  """
  grid = np.asarray(devices).reshape(-1, member_groups).T
  return Mesh(grid, (MEMBER_AXIS, DEVICE_AXIS))


def specs(split_axes: Tree, has_members: bool = False) -> Tree:
  """Returns partition specs for `Learner.split_axes`.

  If `has_members` is true, the arrays have one more axis in front.
  """
  first = [MEMBER_AXIS] if has_members else []

  def spec(axis: int) -> PartitionSpec:
    if axis < 0:
      return PartitionSpec(*first)
    return PartitionSpec(*first, *[None] * axis, DEVICE_AXIS)

  return jax.tree.map(spec, split_axes)


def record_specs(has_members: bool) -> tuple[Any, Any]:
  """Returns the specs of an Anakin program's records.

  The arrays of the first have the axes (time, agent), and those of the second
  (time, device, agent), without the last axis for a single agent.
  """
  members = [MEMBER_AXIS] if has_members else []
  rows = PartitionSpec(None, *members)
  return rows, PartitionSpec(None, DEVICE_AXIS, *members)


def call_in_order(init: Callable, *arguments: Tree) -> Any:
  """Compiles and calls a function that initialises networks.

  The orthogonal initialisation uses batched QR factorisations. With jaxlib
  0.10.2, two of them at the same time can deadlock in XLA's CPU threads. So the
  operations of the program run one after the other.
  """
  return jax.jit(init, compiler_options=in_order_options())(*arguments)


def init_learner(
  init: Callable[..., LearnerState],
  learner: Learner,
  mesh: Mesh,
  *arguments: Tree,
  has_members: bool = False,
) -> LearnerState:
  """Makes a learner's state on the devices of a mesh.

  Args:
    init: `(*arguments) -> LearnerState`. It does not communicate.
    learner: the learner, for its `split_axes`.
    has_members: whether the arguments and the state have an axis of agents.

  Raises:
    SizeError: if a device has too little space for the learner's memory.
  """

  def without_memory(*arguments: Tree) -> LearnerState:
    return init(*arguments)._replace(memory=())

  def memory(*arguments: Tree) -> Tree:
    return init(*arguments).memory

  state = call_in_order(without_memory, *arguments)
  same = MEMBERS if has_members else REPLICATED
  state = place(state, mesh, same)
  shapes = jax.tree.leaves(jax.eval_shape(memory, *arguments))
  if not shapes:
    return state
  needed = sum(x.size * x.dtype.itemsize for x in shapes)
  needed //= mesh.shape[MEMBER_AXIS]
  if (free := _bytes_per_device()) < needed:
    raise SizeError(
      f'the memory needs {needed / 2**30:.3g} GiB on each device, which has '
      f'{free / 2**30:.3g} GiB left; divide the capacity by '
      f'{math.ceil(needed / max(free, 1.0))}'
    )
  memory_specs = specs(learner.split_axes.memory, has_members)
  # Each device makes its own part: the whole memory may not fit on one device.
  placed = place(arguments, mesh, same)
  make = device_map(memory, mesh, (same,) * len(placed), memory_specs)
  return state._replace(memory=make(*placed))


def _bytes_per_device() -> float:
  """Returns the bytes that a device of this process can have, or infinity."""
  local = jax.local_devices()
  if local[0].platform == 'cpu':
    return _available_bytes() / (len(local) * _processes_here())
  return (local[0].memory_stats() or {}).get('bytes_limit', math.inf)


def _available_bytes() -> int:
  """Returns the bytes of this host that programs can still use."""
  page = os.sysconf('SC_PAGE_SIZE')
  size = os.sysconf('SC_PHYS_PAGES') * page
  with contextlib.suppress(OSError, ValueError):  # Only Linux has this file.
    with open(_MEMORY, encoding='ascii') as file:
      lines = dict(line.split(':') for line in file)
    size = min(size, 1024 * int(lines.get('MemAvailable', '').split()[0]))
  # If a container has no limit, the file is missing or contains 'max'.
  with contextlib.suppress(OSError, ValueError):
    with open(_LIMIT, encoding='ascii') as file:
      size = min(size, int(file.read()))
  limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # From `ulimit -v`.
  if limit != resource.RLIM_INFINITY:
    with contextlib.suppress(OSError):
      with open('/proc/self/statm', encoding='ascii') as file:
        limit -= page * int(file.read().split()[0])
    # Each process has this limit, but `_bytes_per_device` divides the result by
    # the number of processes, so multiply.
    size = min(size, max(limit, 0) * _processes_here())
  return size


def _processes_here() -> int:
  """Returns how many processes of the run share the memory of this host.

  With an address of the host itself, no other host can take part.
  """
  address = distributed.global_state.coordinator_address or ''
  host = address.rpartition(':')[0].strip('[]')
  is_alone = host == 'localhost' or host == '::1' or host.startswith('127.')
  return jax.process_count() if is_alone else 1


def device_map(
  function: Callable,
  mesh: Mesh,
  in_specs: Tree,
  out_specs: Tree,
  donate: tuple[int, ...] = (),
) -> jax.stages.Wrapped:
  """Maps a function over a mesh and compiles it.

  Args:
    function: takes the shards of one device; it may average over `DEVICE_AXIS`.
    in_specs: a partition spec, or a tree prefix of specs, for each argument.
    out_specs: the same for the results.
    donate: positions of the arguments whose buffers the results may reuse.
  """
  # check_vma=False: with the default, pmean(grad(...)) of replicated
  # parameters returns the sum of the per-device gradients.
  # The inner `jit` keeps constants inside: with JAX 0.11.2, a constant without
  # elements that enters `shard_map` from outside crashes the compiler.
  mapped = jax.shard_map(
    jax.jit(function),
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    check_vma=False,
  )
  return jax.jit(mapped, donate_argnums=donate)


def global_map(
  function: Callable, mesh: Mesh, out_specs: Tree, donate: tuple[int, ...] = ()
) -> jax.stages.Wrapped:
  """Compiles a function of whole arrays; XLA splits its work over the mesh.

  For the other arguments, see `device_map`.
  """
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
  return jax.jit(function, out_shardings=shardings, donate_argnums=donate)


def in_order_options() -> dict[str, str]:
  """Returns compiler options that make a CPU run a program's steps in order.

  If such a program has no donated arguments, it runs in the calling thread.
  """
  if platform() != 'cpu':
    return {}
  return {'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}


def join_unrolls(trajectories: Sequence[Trajectory]) -> Trajectory:
  """Joins unrolls on the batch axis."""
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *trajectories)


def map_update(learner: Learner, mesh: Mesh) -> jax.stages.Wrapped:
  """Maps `Learner.update` over the learner devices of Sebulba.

  Returns:
    `(variables, rest, trajectories, rng_key) -> (LearnerState, metrics)`.
    `rest` is the learner's state without variables. The call donates `rest`,
    but not the variables, because actors may still use them. `trajectories` is
    a tuple; each device joins its shards on the batch axis.
  """

  def update(variables, rest, trajectories, rng_key):
    trajectory = join_unrolls(trajectories)
    rng_key = jax.random.fold_in(rng_key, rest.num_updates)
    state = rest._replace(variables=variables)
    return learner.update(state, trajectory, rng_key)

  state = specs(learner.split_axes)
  in_specs = REPLICATED, state._replace(variables=()), TRAJECTORY, REPLICATED
  out_specs = state, REPLICATED
  return device_map(update, mesh, in_specs, out_specs, donate=(1,))


def lower_update(
  learner: Learner, mesh: Mesh, inputs: tuple[Any, ...], is_sliced: bool
) -> dict[str, jax.stages.Lowered]:
  """Lowers Sebulba's update, as one program or in parts.

  Args:
    inputs: the arguments of `map_update`'s function, or their shapes.
    is_sliced: whether to use `Learner.parts`, if the learner has them.

  Returns:
    'update', or the functions 'begin', 'steps' and 'end' of `Learner.parts`.
    'begin' has the arguments of 'update', and donates the same. The others
    donate the state, and 'steps' also the means.
  """
  if not is_sliced or learner.parts is None:
    return {'update': map_update(learner, mesh).lower(*inputs)}
  parts, state = learner.parts, specs(learner.split_axes)

  def begin(variables, rest, trajectories, rng_key):
    trajectory = join_unrolls(trajectories)
    rng_key = jax.random.fold_in(rng_key, rest.num_updates)
    state = rest._replace(variables=variables)
    state, work, means = parts.begin(state, trajectory, rng_key)
    # Each device has its own work, so add an axis of devices.
    return state, jax.tree.map(lambda x: x[None], work), means

  def steps(state, work, means, first, last):
    work = jax.tree.map(lambda x: x[0], work)
    return parts.steps(state, work, means, first, last)

  in_specs = REPLICATED, state._replace(variables=()), TRAJECTORY, REPLICATED
  made = state, BATCH, REPLICATED
  begins = device_map(begin, mesh, in_specs, made, donate=(1,))
  takes = device_map(
    steps, mesh, (*made, REPLICATED, REPLICATED), (state, REPLICATED), (0, 2)
  )
  ends = device_map(
    parts.end, mesh, (state, REPLICATED), (state, REPLICATED), (0,)
  )

  def placed(spec: PartitionSpec, tree: Tree) -> Tree:
    own = NamedSharding(mesh, spec)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), tree
    )

  shapes = jax.tree.map(placed, made, jax.eval_shape(begins, *inputs))
  number = np.int32(0)
  return {
    'begin': begins.lower(*inputs),
    'steps': takes.lower(*shapes, number, number),
    'end': ends.lower(shapes[0], shapes[2]),
  }


def place(tree: Tree, mesh: Mesh, specs: Tree) -> Tree:
  """Copies a tree of arrays to a mesh.

  The partition specs, `specs`, are a tree prefix of `tree`. If several
  processes have devices of the mesh, each process passes the whole tree.
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
  """Places an array, which every process has, on devices of all processes."""
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    # numpy has no dtype for keys, so place the numbers that they contain.
    return jax.random.wrap_key_data(
      _spread(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x)
    )
  host = np.asarray(x)
  return jax.make_array_from_callback(
    host.shape, sharding, lambda index: host[index]
  )


def like(tree: Tree, arrays: Tree) -> Tree:
  """Copies each array of a tree to the devices of the same leaf in `arrays`."""

  def copy(x: jax.Array, old: jax.Array) -> jax.Array:
    put: Callable = jax.device_put if old.is_fully_addressable else _spread
    # `put` may return the same buffer, and a donation would then delete `x`.
    return put(jnp.copy(x), old.sharding)

  return jax.tree.map(copy, tree, arrays)


def fetch(tree: Tree) -> Tree:
  """Copies a tree to numpy; a split array keeps only this process's part."""

  def to_numpy(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable or x.is_fully_replicated:
      return np.asarray(x)
    parts = {  # Keyed by the place of the first element.
      tuple(i.start or 0 for i in shard.index): np.asarray(shard.data)
      for shard in x.addressable_shards
    }
    return _join(parts, 0)

  for x in jax.tree.leaves(tree):
    x.copy_to_host_async()
  return jax.tree.map(to_numpy, tree)


def _join(parts: Mapping[tuple[int, ...], np.ndarray], axis: int) -> np.ndarray:
  """Joins the parts of an array along the axes from `axis` on."""
  if len(parts) == 1:
    return next(iter(parts.values()))
  groups: dict[int, dict[tuple[int, ...], np.ndarray]] = {}
  for place, part in parts.items():
    groups.setdefault(place[axis], {})[place] = part
  joined = [_join(groups[start], axis + 1) for start in sorted(groups)]
  return np.concatenate(joined, axis)


def set_num_cpu_devices(num_devices: int, num_processes: int = 1) -> None:
  """Sets the number of CPU devices of this process.

  Call it before the first use of a device. `num_processes` is the number of
  processes of the run.
  """
  if num_processes > 1 and hasattr(os, 'SCHED_BATCH'):
    # The threads of a gloo collective must not preempt one another. With one
    # core per process, an all-reduce then takes 0.12 ms instead of 3.6 ms.
    with contextlib.suppress(PermissionError):  # A sandbox may forbid it.
      os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
  jax.config.update('jax_num_cpu_devices', num_devices)


# Platforms, the packages that JAX needs for them, and files of their devices.
_ACCELERATORS = (
  ('tpu', 'libtpu', '/dev/accel*'),
  ('tpu', 'libtpu', '/dev/vfio/[0-9]*'),
  ('cuda', 'jax_cuda12_plugin', '/dev/nvidiactl'),
  ('cuda', 'jax_cuda13_plugin', '/dev/nvidiactl'),
  ('rocm', 'jax_rocm60_plugin', '/dev/kfd'),
  ('rocm', 'jax_rocm7_plugin', '/dev/kfd'),
)


def _find_accelerators() -> list[str]:
  """Returns the platforms whose devices and packages are on this machine."""
  return [
    platform
    for platform, package, device in _ACCELERATORS
    if importlib.util.find_spec(package) and glob.glob(device)
  ]


def has_gpu_packages() -> bool:
  """Returns whether packages are installed with which JAX can use GPUs."""
  packages = [x for platform, x, _ in _ACCELERATORS if platform != 'tpu']
  return any(map(importlib.util.find_spec, packages))


def is_in_use() -> bool:
  """Returns whether JAX already has devices; their number is then fixed."""
  return xla_bridge.backends_are_initialized()


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
  """Inside the context, programs are compiled for `platform`.

  This machine does not need to have the platform.
  """
  token = _target.set(platform)
  try:
    yield
  finally:
    _target.reset(token)


def platform() -> str:
  """Returns the platform that programs are compiled for."""
  return _target.get() or jax.default_backend()


def _ignore_libtpu() -> None:
  """Makes JAX skip TPUs if libtpu is installed and the machine has no TPU.

  Without this function, JAX would load libtpu, and libtpu would print errors.
  libtpu may be installed on such a machine because `podrl compile` needs it.
  """
  platforms = dict.fromkeys([*_find_accelerators(), 'cpu'])
  has_libtpu = importlib.util.find_spec('libtpu') is not None
  is_free = not _config.jax_platforms and not is_in_use()
  if is_free and has_libtpu and 'tpu' not in platforms:
    jax.config.update('jax_platforms', ','.join(platforms))


_ignore_libtpu()  # Do it now: JAX looks for devices only once.


def has_accelerator() -> bool:
  """Whether the programs of this process run on an accelerator.

  In `compiling_for`, the result depends on the target platform. Otherwise, it
  depends on the devices that JAX finds. If JAX finds no accelerator,
  `set_num_cpu_devices` still works afterwards, unless it was called or a device
  was used before.

  Raises:
    ValueError: if the machine does not have the platform in JAX_PLATFORMS.
  """
  if _target.get():
    return _target.get() != 'cpu'
  if jax.distributed.is_initialized():
    # `default_backend` would fix the devices of this process for the whole run.
    if _config.jax_platforms:
      return not _config.jax_platforms.startswith('cpu')
    return bool(_find_accelerators())
  was_in_use = is_in_use()
  try:
    found = jax.default_backend()
  except (RuntimeError, AssertionError) as error:
    name = _config.jax_platforms
    raise ValueError(
      f'JAX_PLATFORMS={name}: JAX finds no {name.upper()} on this machine; '
      f'unset it, or use cpu ({one_line(error)})'
    ) from error
  if found != 'cpu':
    return True
  if not was_in_use and _config.jax_num_cpu_devices < 1:
    backend.clear_backends()
  return False


def copy_to_first_device(tree: Tree) -> Tree:
  """Returns a copy of a tree on its first device in this process.

  The devices of this process must have the whole tree.
  """

  def copy(x: jax.Array) -> jax.Array:
    if x.is_fully_replicated:
      return jnp.copy(x.addressable_data(0))
    first = x.addressable_shards[0].device
    return jax.device_put(fetch(x), first)

  return jax.tree.map(copy, tree)


def gather(tree: Tree, into: Tree = None) -> Tree:
  """Returns an unsharded copy of a tree on this process's first device.

  All processes call it together, because it gathers what is split over them,
  first on each device. PRNG keys become their key data, uint32. The call
  deletes `into`, an earlier copy, and uses its memory: to get new memory can
  take longer than to copy.
  """
  leaves, structure = jax.tree.flatten(tree)
  split = {i: x for i, x in enumerate(leaves) if not x.is_fully_replicated}
  whole = {
    i: x.addressable_data(0) for i, x in enumerate(leaves) if i not in split
  }
  old = {i: x for i, x in enumerate(jax.tree.leaves(into)) if i in whole}
  copies = _copy(whole, old)
  if split:
    mesh = next(iter(split.values())).sharding.mesh
    gathered = _gather(mesh)(split)
    copies |= {i: x.addressable_data(0) for i, x in gathered.items()}
  return jax.tree.unflatten(structure, [copies[i] for i in range(len(leaves))])


@functools.cache
def _gather(mesh: Mesh) -> Callable[[Tree], Tree]:
  """Makes the program of `gather`, which compiles once for each mesh."""
  whole = NamedSharding(mesh, REPLICATED)
  return jax.jit(
    lambda arrays: jax.tree.map(_numbers, arrays), out_shardings=whole
  )


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copy(arrays: dict[int, Array], into: dict[int, Array]) -> dict[int, Array]:
  """Copies arrays into the buffers of others, which are of the same kind."""
  del into
  return jax.tree.map(_numbers, arrays)


def _numbers(x: Array) -> Array:
  is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jnp.copy(jax.random.key_data(x) if is_key else x)


def to_device(tree: Tree, device: jax.Device) -> Tree:
  """Returns a replicated tree on `device`; copies it only if necessary."""
  sharding = SingleDeviceSharding(device)

  def part(x: jax.Array) -> jax.Array:
    first = x.addressable_data(0)
    if first.sharding == sharding:  # `device_put` is slow even without a copy.
      return first
    parts = {shard.device: shard.data for shard in x.addressable_shards}
    return jax.device_put(parts.get(device, first), device)

  return jax.tree.map(part, tree)


def join_shards(shards: list[Tree], mesh: Mesh, spec: PartitionSpec) -> Tree:
  """Joins shards, one on each device of a mesh, into arrays over the mesh.

  `shards` has a tree for each mesh device of this process, in the mesh's order.
  """
  if mesh.size == 1:
    return shards[0]
  axis = spec.index(DEVICE_AXIS)

  def join(*parts: jax.Array) -> jax.Array:
    shape = list(parts[0].shape)
    shape[axis] *= mesh.size
    return jax.make_array_from_single_device_arrays(
      tuple(shape), NamedSharding(mesh, spec), list(parts)
    )

  return jax.tree.map(join, *shards)
