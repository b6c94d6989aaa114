"""Compiles the programs of a run for TPU slices and GPUs of other machines.

The compilers for TPUs and GPUs do not need these devices: they create device
objects for a target, and the inputs of a program are only shapes.
"""

from collections.abc import Sequence
import functools
import math
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
import numpy as np

from podrl.drivers import spmd
from podrl.drivers.actor import make_actor_functions
from podrl.fields import Fields
from podrl.messages import check_choice
from podrl.records.workdir import num_agents
from podrl.run import build
from podrl.run.devices import Machine, make_layout, on_all_hosts
from podrl.types import EnvSpec, TimeStep, Tree


class Chip(NamedTuple):
  """A device of JAX and its links; bandwidths are in GB/s."""

  memory: float  # GiB.
  memory_bandwidth: float
  peak: float  # TFLOP/s of matrix products in bfloat16.
  clock: float  # GHz; 0 if the compiler does not count cycles.
  # Bandwidth from one device to its pod, in an all-reduce.
  link_bandwidth: float
  torus_dims: int  # 0 means a switch, used as a tree.
  pod_size: int  # Devices of a pod; the network between pods is slower.
  far_bandwidth: float  # Bandwidth from one device to other pods.
  host_cpus: float  # Virtual CPUs of the host per device.
  hop_seconds: float  # Latency between neighbours in a pod.
  far_hop_seconds: float  # Latency between pods.
  size_of_chip: int = 1  # How much a chip adds to the size in a name.
  devices_of_chip: int = 1  # Devices of JAX in a whole chip.


# A device of v2, v3 and tpu7x is half a chip, with half of its figures. For the
# others, it is a whole chip. The figures have these sources.
# TPUs: Google Cloud, Cloud TPU documentation, pages "TPU v2" to "TPU7x" for
# memory, peak and pod size. The link bandwidth is the all-reduce bandwidth of a
# pod divided by its chips (v3: 340 TB/s / 1,024; v4: 1.1 PB/s / 4,096; v5e:
# 51.2 TB/s / 256; v6e: 102.4 TB/s / 256), 4,800 Gbps per chip for v5p and
# tpu7x, and 4 links of 496 Gbps for v2: Jouppi et al. 2020, A Domain-Specific
# Supercomputer for Training Deep Neural Networks. Between pods, it is the
# data-centre bandwidth of a pod divided by its chips (v5e: 6.4 Tbps / 256; v6e:
# 25.6 Tbps / 256), or per chip (v5p: 50 Gbps; tpu7x: 100 Gbps). A hop takes
# 1 us: Austin et al. 2025, How to Scale Your Model. The clock is the peak
# divided by 2 FLOPs for each cell of the matrix units. For v6e and tpu7x, it is
# half of that, because the result is twice the clock of earlier chips.
# a100: NVIDIA's datasheet for 40 GB. NVLink's 600 GB/s count both directions.
# DGX A100 has 200 Gb/s per GPU. h100, h200, b200: NVIDIA's datasheets for SXM,
# dense products. NVLink has 900 GB/s (b200: 1,800), DGX systems 400 Gb/s per
# GPU. A network hop takes 5 us: NCCL, src/graph/tuning.cc.
# CPUs: Google Cloud, machine types: vCPUs of a host divided by its devices (n1
# of v2-8 and v3-8; ct4p, ct5lp, ct5p, ct6e, tpu7x; a2-highgpu, a3-highgpu,
# a3-ultragpu, a4-highgpu).
# Some figures are assumed, because nobody publishes them: 20 us for a hop
# between TPU pods, and the bandwidth between pods of v2, v3 and v4.
_TPU, _GPU = (1e-6, 20e-6), (5e-6, 5e-6)
CHIPS = {
  'v2': Chip(8, 350, 23, 0.70, 124, 2, 512, 1, 12, *_TPU, 2, 2),
  'v3': Chip(16, 450, 61.5, 0.94, 166, 2, 2048, 1, 12, *_TPU, 2, 2),
  'v4': Chip(32, 1200, 275, 1.05, 268, 3, 4096, 1, 60, *_TPU, 2),
  'v5e': Chip(16, 819, 197, 1.50, 200, 2, 256, 3.1, 28, *_TPU),
  'v5p': Chip(95, 2765, 459, 1.75, 600, 3, 8960, 6.25, 52, *_TPU, 2),
  'v6e': Chip(32, 1638, 918, 1.75, 400, 2, 256, 12.5, 22.5, *_TPU),
  'tpu7x': Chip(96, 3690, 1153, 2.20, 300, 3, 18432, 6.25, 28, *_TPU, 2, 2),
  'a100': Chip(40, 1555, 312, 0, 300, 0, 8, 25, 12, *_GPU),
  'h100': Chip(80, 3350, 989, 0, 450, 0, 8, 50, 26, *_GPU),
  'h200': Chip(141, 4800, 989, 0, 450, 0, 8, 50, 28, *_GPU),
  'b200': Chip(180, 7700, 2250, 0, 900, 0, 8, 50, 28, *_GPU),
}


def _hops(num_devices: int, torus_dims: int) -> float:
  """Counts all-reduce hops: twice along each axis, or up and down a tree."""
  if not torus_dims:
    return 2 * math.log2(num_devices)
  return 2 * torus_dims * (num_devices ** (1 / torus_dims) - 1)


def all_reduce_seconds(num_bytes: float, num_devices: int, chip: Chip) -> float:
  """Returns the time of one all-reduce of a vector over n devices.

  In one pod, the time is 2 (n - 1) / n x bytes / bandwidth + hops x latency.
  For k pods of m devices, the time has two parts. The first is this formula for
  the m devices of a pod. The second is this formula for k devices, with bytes /
  m and with the hops of a tree: after the reduce-scatter in its pod, each
  device has bytes / m.

  Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms; for
  tori, How to Scale Your Model, Sharded Matrices.
  """
  inside = min(num_devices, chip.pod_size)
  pods = math.ceil(num_devices / chip.pod_size)
  gigabytes = num_bytes / 1e9
  seconds = 2 * (inside - 1) / inside * gigabytes / chip.link_bandwidth
  seconds += _hops(inside, chip.torus_dims) * chip.hop_seconds
  if pods > 1:
    seconds += 2 * (pods - 1) / pods * gigabytes / inside / chip.far_bandwidth
    seconds += _hops(pods, 0) * chip.far_hop_seconds
  return seconds


class Target(NamedTuple):
  """A machine to compile for; `parse` makes one from its name."""

  name: str
  kind: str  # A key of `CHIPS`.
  num_slices: int
  size: int  # The size in the name.

  @property
  def num_chips(self) -> int:
    """Chips of one slice."""
    return self.size // CHIPS[self.kind].size_of_chip

  @property
  def chip(self) -> Chip:
    """One device, whose pod is a slice of the target."""
    chip = CHIPS[self.kind]
    if self.platform == 'cuda':
      return chip
    return chip._replace(pod_size=self.num_chips * chip.devices_of_chip)

  @property
  def num_devices(self) -> int:
    """Devices of all slices."""
    return self.num_slices * self.num_chips * CHIPS[self.kind].devices_of_chip

  @property
  def platform(self) -> str:
    """The platform, as JAX calls it."""
    return 'tpu' if CHIPS[self.kind].clock else 'cuda'


def sizes(chip: Chip) -> list[int]:
  """Returns the sizes in the names of a chip's targets, such as 8 for v4-8."""
  if not chip.clock:
    return [2**i for i in range(12)]
  low = 4 * chip.size_of_chip
  high = chip.pod_size * chip.size_of_chip // chip.devices_of_chip
  found = [2**i for i in range(high.bit_length()) if 2**i >= low]
  return [1, *found] if chip.size_of_chip == 1 else found


NAMES = [
  f'{kind}{"-" if chip.clock else ":"}{size}'
  for kind, chip in CHIPS.items()
  for size in sizes(chip)
]


def parse_target(text: str) -> Target:
  """Parses the name of a target, such as v4-8, 2xv5e-256 or h100:8.

  As in Google Cloud, the size counts cores for v2, v3, v4, v5p and tpu7x, and
  chips for v5e and v6e.

  It raises a ValueError if the target does not exist.
  """
  match = re.fullmatch(r'(?:([1-9]\d?)x)?(.*)', text)
  assert match is not None
  slices, name = match.groups()
  name = name.replace('v5litepod', 'v5e')
  check_choice('--target', name, NAMES)
  kind, size = re.split('[-:]', name)
  if slices and ':' in name:
    raise ValueError(f'--target={text}: only TPUs have slices; use {name}')
  return Target(text, kind, int(slices or 1), int(size))


def slice_shape(num_chips: int, torus_dims: int) -> tuple[int, ...]:
  """Returns the chips along each axis of a slice, as equal as possible."""
  if (num_chips, torus_dims) == (4, 3):
    return 2, 2, 1
  exponent = num_chips.bit_length() - 1
  return tuple(2 ** ((exponent + i) // torus_dims) for i in range(torus_dims))


# libtpu reads these variables; without them, it looks for a TPU.
_TPU_VARIABLES = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v4-8',  # Any valid name works; it is not the target.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # Otherwise, libtpu locks a file.
}


def _tpu_devices(target: Target) -> list[jax.Device]:
  """Asks libtpu for the devices of a target."""
  chip = target.chip
  shape = slice_shape(target.num_chips, chip.torus_dims)
  # v5e and v6e have single hosts of up to eight chips; other hosts have four.
  is_single = chip.size_of_chip == 1 and target.num_chips <= 8
  host = shape if is_single else (2, 2)
  options: dict[str, Any] = {'chips_per_host_bounds': (*host, 1, 1)[:3]}
  if chip.size_of_chip > chip.devices_of_chip:  # Two cores form one device.
    options['chip_config_name'] = 'megacore'
  for name, value in _TPU_VARIABLES.items():
    os.environ.setdefault(name, value)
  name = f'{target.kind}:{"x".join(map(str, shape))}'
  return topologies.get_topology_desc(
    name, 'tpu', num_slices=target.num_slices, **options
  ).devices


class _Gpu(NamedTuple):
  """Fields of XLA's message GpuDeviceInfoProto that `Chip` does not have."""

  generation: int  # Major number of the compute capability.
  core_count: int
  fpus_per_core: int
  clock_rate_ghz: float
  shared_memory_per_core: int  # Bytes.
  l2_cache_size: int  # Bytes.


# From the descriptions of these GPUs in XLA's repository, in the directory
# xla/backends/gpu/target_config/specs.
_GPUS = {
  'a100': _Gpu(8, 108, 64, 1.41, 167936, 41943040),
  'h100': _Gpu(9, 132, 128, 1.98, 233472, 52428800),
  'h200': _Gpu(9, 132, 128, 1.98, 233472, 52428800),
  'b200': _Gpu(10, 148, 128, 1.965, 233472, 132644864),
}


def _gpu_devices(target: Target) -> list[jax.Device]:
  """Asks the compiler of GPUs for the devices of a target."""
  gpu, chip = _GPUS[target.kind], target.chip
  extension = 'NONE' if gpu.generation < 9 else 'ACCELERATED_FEATURES'
  fields = gpu._asdict() | {
    'threads_per_block_limit': 1024,
    'threads_per_warp': 32,
    'shared_memory_per_block': 49152,
    'shared_memory_per_block_optin': gpu.shared_memory_per_core - 1024,
    'threads_per_core_limit': 2048,
    'block_dim_limit_x': 2**31 - 1,
    'block_dim_limit_y': 65535,
    'block_dim_limit_z': 65535,
    'memory_bandwidth': int(chip.memory_bandwidth * 1e9),
    'device_memory_size': int(chip.memory * 1e9),
    'registers_per_core_limit': 65536,
    'registers_per_block_limit': 65536,
  }
  generation = fields.pop('generation')
  info = ' '.join(f'{name}: {value}' for name, value in fields.items())
  text = (
    f'gpu_device_info {{ {info} cuda_compute_capability {{ major: {generation} '
    f'feature_extension: {extension} }} }} platform_name: "CUDA" '
    'dnn_version_info { major: 9 minor: 10 }'
  )
  hosts, gpus = max(1, target.size // 8), min(8, target.size)
  return topologies.get_topology_desc(
    'target', 'cuda', target_config=text, topology=f'1x{hosts}x{gpus}'
  ).devices


def make_machine(target: Target) -> Machine:
  """Makes the devices of a target, for programs that are compiled but not run.

  It raises a ValueError if the compiler is not installed.
  """
  is_tpu = target.platform == 'tpu'
  try:
    devices = (_tpu_devices if is_tpu else _gpu_devices)(target)
  except (RuntimeError, ValueError, KeyError) as error:
    extra, name = ('tpu', 'TPUs') if is_tpu else ('cuda', 'GPUs')
    raise ValueError(
      f"--target={target.name} needs the compiler of {name}; install podrl's "
      f"extra, pip install -e '.[{extra}]' ({error})"
    ) from error
  machine = Machine(devices, 0, 1)
  cores = target.chip.host_cpus * len(machine.local_devices)
  return machine._replace(num_cores=int(cores))


class Program(NamedTuple):
  """A program of a run, before it is compiled."""

  lowered: jax.stages.Lowered
  num_devices: int  # Devices that run it.
  calls: float  # Calls in `num_updates` updates, on each of these devices.
  # Rounds of its outermost loop, if the compiler does not know them. Anakin's
  # loop is one over updates.
  num_updates: int = 1


class Lowered(NamedTuple):
  """The programs of a run by name, and numbers that describe an update."""

  programs: dict[str, Program]
  num_steps: int  # Environment steps of an update, reset steps included.
  num_params: int
  # Whether the programs run at the same time, on different devices.
  overlaps: bool
  warnings: Sequence[str]


def lower(config: Fields, machine: Machine) -> Lowered:
  """Lowers the programs of a run, for this machine or another one.

  Call this inside `spmd.compiling_for`. Anakin has one program, 'train'.
  Sebulba has those of `spmd.lower_update` on the learner devices, and 'act',
  one step of an actor. A user's mistake raises a ValueError, as in
  `build.make_run`.
  """
  run = build.make_run(config, machine=machine)
  if build.architecture(config) == 'sebulba':
    programs, overlaps = _lower_sebulba(config, run.spec, machine)
  else:
    # The shapes of the state do not depend on the devices.
    alone = {**config, 'num_devices': 1}
    here = build.make_run(alone, machine=Machine(jax.devices(), 0, 1))
    driver: Any = here.driver
    init = functools.partial(
      driver.programs.init, driver.rng_key, driver.hyperparams
    )
    driver = run.driver
    train = driver.programs.train.lower(jax.eval_shape(init), np.int32(1))
    program = Program(train, len(run.devices), 1, driver.max_updates)
    programs, overlaps = {'train': program}, False
  num_steps = run.steps_per_update
  num_steps *= num_agents(config) if build.has_axis(config) else 1
  num_params = sum(x.size for x in jax.tree.leaves(run.variables.params))
  return Lowered(programs, num_steps, num_params, overlaps, run.warnings)


def _lower_sebulba(
  config: Fields, spec: EnvSpec, machine: Machine
) -> tuple[dict[str, Program], bool]:
  """Lowers Sebulba's programs; says whether they run at the same time."""
  layout = make_layout(config, spec, machine)
  agent = build.make_agent(config, spec)
  devices = on_all_hosts(layout.learner_devices, machine)
  learner = build.make_learner(config, agent, spec, len(devices), 1, layout)
  length, unrolls = config['unroll_length'], layout.unrolls_per_update
  # `spec` has the converted observations, so the actor need not convert them.
  functions = make_actor_functions(agent, lambda obs: obs, 1)
  key = jax.eval_shape(jax.random.key, 0)
  number: Any = jax.ShapeDtypeStruct((), np.float32)
  num_steps = jax.ShapeDtypeStruct((), np.int32)
  is_first: Any = jax.ShapeDtypeStruct((), bool)
  timestep = TimeStep(spec.obs, number, number, is_first)

  def step_arguments(num_envs: int) -> tuple[Tree, ...]:
    """Returns the shapes that `step` takes after the variables."""
    env_index = jax.ShapeDtypeStruct((num_envs,), np.int32)
    carry = jax.eval_shape(agent.initial_carry, env_index)
    keys, timesteps = _batched((key, timestep), num_envs)
    return keys, num_steps, timesteps, carry

  hyperparams = build.hyperparams(config, agent, 1)
  variables = jax.eval_shape(
    lambda key: agent.init(key).with_hyperparams(hyperparams), key
  )
  per_actor = config['env.num_envs'] // layout.num_actors
  row, carry = jax.eval_shape(
    functions.step, variables, *step_arguments(per_actor)
  )
  timesteps = _batched(timestep, length + 1, per_actor)
  timesteps = timesteps._replace(obs=_batched(spec.obs, per_actor))
  env_index = jax.ShapeDtypeStruct((per_actor,), np.int32)
  rows = [_batched(row, length)]
  (trajectory,), _ = jax.eval_shape(
    functions.finish, rows, timesteps, carry, num_steps, env_index
  )
  # One device would have the whole memory. Its shapes are those of all devices.
  joined = jax.eval_shape(spmd.join_unrolls, [trajectory] * unrolls)
  alone = build.make_learner(config, agent, spec, 1, 1, layout)
  state = jax.eval_shape(alone.init, key, joined)
  inputs = variables, state._replace(variables=()), (trajectory,) * unrolls, key
  updates = spmd.lower_update(
    learner, spmd.make_mesh(devices), inputs, layout.is_sliced
  )
  actor = machine.local_devices[layout.actor_devices[0]]
  sharding = jax.sharding.SingleDeviceSharding(actor)
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    (variables, *step_arguments(per_actor // len(machine.hosts))),
  )
  step: Any = functions.step
  act = step.lower(*arguments)
  num_actors = len(layout.actor_devices)
  overlaps = not {*layout.actor_devices} & {*layout.learner_devices}
  programs = {k: Program(x, len(devices), 1) for k, x in updates.items()}
  if learner.parts and 'steps' in programs:  # As one slice: one call an update.
    rounds = learner.parts.num_steps
    programs['steps'] = Program(updates['steps'], len(devices), rounds, rounds)
  return programs | {
    'act': Program(
      act, num_actors * len(machine.hosts), length * unrolls / num_actors
    )
  }, overlaps and config['sebulba.max_lag'] > 0


def _batched(tree: Tree, *sizes: int) -> Tree:
  """Adds axes of these sizes in front of the shapes in a tree."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((*sizes, *x.shape), x.dtype), tree
  )
