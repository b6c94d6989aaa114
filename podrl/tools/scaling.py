"""The `podrl scaling` command: predicts the speed of an experiment on a pod.

  podrl scaling EXPERIMENT [--chip=local] [--agent=ppo] [--variant=NAME]
      [--out=DIR] [--config.FIELD=VALUE ...]

EXPERIMENT is a file such as experiments/anakin_breakout.py. The prediction is
for weak scaling: each core has `config.env.num_envs` environments. A core is
what JAX calls a device.

  update(n) = update(1) + optimiser steps x all-reduce(n) + waiting(n)

The command measures update(1) here, on one CPU core. For two cores and more it
measures while another core does the same work, because cores share caches and
memory. For another chip it multiplies by the ratio of the rooflines (FLOPs and
bytes of the compiled program), with a least time per operation. waiting(n) is
the time until the slowest of n cores is ready: the expected maximum of n
normals. Between cores of this machine, each of an update's k all-reduces waits,
with the deviation of the measured updates divided by sqrt(k). On another chip
only the host's environments vary, so one update waits once. --chip=local links
the cores in a ring, as the two processes measured here are linked. The table
gives seconds of one update: in total, in its all-reduces, and waiting.
"""

from collections.abc import Callable, Sequence
import contextlib
import ctypes
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.core.learner import make_learner
from podrl.drivers import spmd
from podrl.drivers.anakin import make_programs, make_unroll
from podrl.records import workdir
from podrl.records.terminal import compact
from podrl.run import build, cluster
from podrl.run.config import check, check_choice
from podrl.types import Agent, EnvSpec, TimeStep, Trajectory, Tree


class Chip(NamedTuple):
  """One core and how it is linked.

  Attributes:
    peak_bfloat16: FLOP/s of matrix products.
    peak_float32: the same, as JAX computes them by default.
    memory_bandwidth: bytes/s.
    operation_seconds: the least time of one operation of a program.
    link_bandwidth: bytes/s that a core sends to its pod in an all-reduce.
    hop_seconds: latency between neighbours.
    torus_dims: dimensions of the pod's torus; 1 is a ring, 0 is a switch that
      is used as a tree.
    pod_size: cores in a pod.
    far_bandwidth: bytes/s that a core sends to other pods.
    far_hop_seconds: latency between pods.
    host_cpus: virtual CPUs of a host for each core.
  """

  peak_bfloat16: float
  peak_float32: float
  memory_bandwidth: float
  operation_seconds: float
  link_bandwidth: float
  hop_seconds: float
  torus_dims: int
  pod_size: int
  far_bandwidth: float
  far_hop_seconds: float
  host_cpus: float


# A core is what JAX calls a device: half a chip of TPU v3, a whole chip of the
# others. Figures of a chip with two cores are halved. A TPU multiplies float32
# in one bfloat16 pass by default, so its two peaks are equal. The letters below
# name the sources:
#   [G] Google Cloud, Cloud TPU documentation, pages "TPU v3" to "TPU v6e": peak
#     in bfloat16, memory bandwidth, size of a pod. Interconnect: all-reduce
#     bandwidth of a pod over its chips (v5p: 4,800 Gbps a chip). Between pods:
#     data-centre bandwidth of a pod over its chips.
#   [S] Austin et al. 2025, How to Scale Your Model: 1 us a hop between TPUs.
#   [M] Google Cloud, machine types: vCPUs of a host over its chips (n1 of v3-8;
#     ct4p, ct5lp, ct5p, ct6e; a2-highgpu, a3-highgpu).
#   [A] NVIDIA A100 datasheet; NVLink's 600 GB/s count both directions; DGX
#     A100: 200 Gb/s of network for each GPU.
#   [H] NVIDIA H100 SXM datasheet; NVLink 900 GB/s; DGX H100: 400 Gb/s.
#   [N] NCCL, src/graph/tuning.cc: about 5 us for a hop over a network.
# Nobody publishes three of the figures, so they are assumed: 1 us for an
# operation on a TPU, 3 us on a GPU, and 20 us for a hop between TPU pods.
CHIPS = {
  # [G] 123 TFLOP/s, 900 GB/s, 340 TB/s over 1,024 chips; [M] 96 on 8 cores.
  'tpu_v3': Chip(
    61.5e12, 61.5e12, 450e9, 1e-6, 166e9, 1e-6, 2, 2048, 1e9, 20e-6, 12.0
  ),
  # [G] 1.1 PB/s over 4,096 chips; [M] 240 on 4 chips.
  'tpu_v4': Chip(
    275e12, 275e12, 1200e9, 1e-6, 268e9, 1e-6, 3, 4096, 1e9, 20e-6, 60.0
  ),
  # [G] 51.2 TB/s and 6.4 Tbps over 256 chips; [M] 224 on 8.
  'tpu_v5e': Chip(
    197e12, 197e12, 819e9, 1e-6, 200e9, 1e-6, 2, 256, 3.1e9, 20e-6, 28.0
  ),
  # [G] 4,800 Gbps a chip, 8,960 chips; [M] 208 on 4.
  'tpu_v5p': Chip(
    459e12, 459e12, 2765e9, 1e-6, 600e9, 1e-6, 3, 8960, 1e9, 20e-6, 52.0
  ),
  # [G] 102.4 TB/s and 25.6 Tbps over 256 chips; [M] 180 on 8.
  'tpu_v6e': Chip(
    918e12, 918e12, 1638e9, 1e-6, 400e9, 1e-6, 2, 256, 12.5e9, 20e-6, 22.5
  ),
  # [A] 40 GB; TF32 is JAX's default for float32. [M] 12 a GPU.
  'a100': Chip(
    312e12, 156e12, 1555e9, 3e-6, 300e9, 5e-6, 0, 8, 25e9, 5e-6, 12.0
  ),
  # [H] dense; [M] 208 on 8 GPUs.
  'h100': Chip(
    989e12, 494e12, 3350e9, 3e-6, 450e9, 5e-6, 0, 8, 50e9, 5e-6, 26.0
  ),
}


def _hops(num_cores: int, torus_dims: int) -> float:
  """Hops of an all-reduce: both ways along each axis, or up and down a tree."""
  if not torus_dims:
    return 2 * math.log2(num_cores)
  side = num_cores ** (1 / torus_dims)
  return 2 * torus_dims * (side - 1)


def all_reduce_seconds(num_bytes: float, num_cores: int, chip: Chip) -> float:
  """Returns the time of one all-reduce.

  In a pod it is 2 (n - 1) / n x bytes / bandwidth + hops x latency. Between k
  pods of m cores, a tree does the same with the bytes / m that each core holds
  after its pod's reduce-scatter.

  Args:
    num_bytes: size of the vector.
    num_cores: number of cores that it is summed over, n.
    chip: the chip of every core.

  Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms; for
  tori, How to Scale Your Model, Sharded Matrices.
  """
  inside = min(num_cores, chip.pod_size)
  seconds = 2 * (inside - 1) / inside * num_bytes / chip.link_bandwidth + (
    _hops(inside, chip.torus_dims) * chip.hop_seconds
  )
  pods = math.ceil(num_cores / chip.pod_size)
  if pods > 1:
    seconds += 2 * (pods - 1) / pods * num_bytes / inside / chip.far_bandwidth
    seconds += _hops(pods, 0) * chip.far_hop_seconds
  return seconds


_BYTES = dict(pred=1, s8=1, u8=1, bf16=2, f16=2, s32=4, u32=4, f32=4, s64=8)
_BYTES |= dict(u64=8, f64=8)
_NO_OPERATION = 'parameter constant tuple get-tuple-element bitcast'.split()


class Work(NamedTuple):
  """The work of one core in an update, or in a part of an update.

  Attributes:
    flops: floating-point operations.
    num_bytes: bytes read and written, as XLA counts them.
    operations: number of instructions that run one after another.
    all_reduce_bytes: size of the largest all-reduce.
    num_all_reduces: number of optimiser steps; each has one all-reduce.
  """

  flops: float
  num_bytes: float
  operations: int
  all_reduce_bytes: int = 0
  num_all_reduces: int = 0


def all_reduces(text: str) -> list[int]:
  """Returns the bytes of each all-reduce in a compiled program's text."""
  found = []
  for line in text.splitlines():
    if match := re.search(r'= (.*?) all-reduce(-start)?\(', line):
      found.append(
        sum(
          _BYTES[dtype] * int(np.prod([int(x) for x in dims.split(',') if x]))
          for dtype, dims in re.findall(r'(\w+)\[([\d,]*)\]', match[1])
        )
      )
  return found


def num_operations(text: str) -> int:
  """Counts the instructions of a compiled program's entry that do work."""
  entry = text[text.index('ENTRY') :].partition('\n}')[0]
  kinds = re.findall(r'^\s+(?:ROOT )?%?\S+ = .*?([\w-]+)\(', entry, re.M)
  return sum(kind not in _NO_OPERATION for kind in kinds)


def _read(compiled: Any, times: float) -> Work:
  """Returns the work of a program that runs `times` times."""
  cost, text = compiled.cost_analysis(), compiled.as_text()
  return Work(
    times * cost['flops'],
    times * cost['bytes accessed'],
    round(times * num_operations(text)),
    max(all_reduces(text), default=0),
  )


def _timestep(spec: EnvSpec, *shape: int) -> TimeStep:
  """Returns the shapes of time steps whose leading axes are `shape`."""

  def of(dtype: Any, *tail: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*shape, *tail), dtype)

  return TimeStep(
    jax.tree.map(lambda x: of(x.dtype, *x.shape), spec.obs),
    of(jnp.float32),
    of(jnp.float32),
    of(jnp.bool_),
  )


def _trajectory(
  agent: Agent, spec: EnvSpec, params: Tree, length: int, num_envs: int
) -> Trajectory:
  """Returns the shapes of an unroll."""
  carry = jax.eval_shape(lambda: agent.initial_carry(num_envs))
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
  action, extras, _ = jax.eval_shape(
    agent.act, params, keys, _timestep(spec, num_envs), carry
  )

  def lead(tree: Tree, size: int) -> Tree:
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), tree
    )

  return Trajectory(
    _timestep(spec, length + 1, num_envs),
    lead(action, length),
    lead(extras, length),
    lead(carry, 1),
  )


def read_work(config: Any) -> tuple[Work, Work]:
  """Returns the work of acting and of learning in an update of one core.

  XLA counts the body of a loop once, however often it runs. So one step of
  acting and one step of the optimiser are compiled alone, and their work is
  multiplied. Loops inside them (a recurrent core's, an environment's) still
  count once.

  Args:
    config: the experiment; one core has all of its environments.

  Raises:
    ValueError: if the environment is unknown.
  """
  is_sebulba = build.architecture(config) == 'sebulba'
  spec = build.make_spec(config)
  agent = build.make_agent(config, spec)
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = jax.eval_shape(agent.init, key)
  length, num_envs = config.unroll_length, config.env.num_envs

  if is_sebulba:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
    act = jax.jit(agent.act).lower(
      params,
      keys,
      _timestep(spec, num_envs),
      jax.eval_shape(lambda: agent.initial_carry(num_envs)),
    )
  else:
    env = build.make_env(config)
    driver = make_programs(
      env,
      agent,
      build.learner_for(config, agent, 1),
      spmd.make_mesh(jax.devices()[:1]),
      num_envs=num_envs,
      unroll_length=1,
      max_updates=1,
    )
    actors = jax.eval_shape(lambda: driver.init(jax.random.key(0))).actors
    act = jax.jit(make_unroll(env, agent, 1)).lower(params, actors, 0)

  # One minibatch on each of two cores; `share` corrects for rounding.
  num_steps = config.num_epochs * config.num_minibatches
  envs = max(1, num_envs // config.num_minibatches)
  share = num_envs / (config.num_minibatches * envs)
  step = config.copy_and_resolve_references()
  step.num_epochs = step.num_minibatches = 1
  learner = build.learner_for(step, agent, 1)
  example: Any = None
  state = jax.eval_shape(lambda key: learner.init(key, example), key)
  update: Any = spmd.map_update(learner, spmd.make_mesh(jax.devices()[:2]))
  lowered = update.lower(
    state.params,
    state._replace(params=()),
    (_trajectory(agent, spec, params, length, 2 * envs),),
    key,
  )
  learn = _read(lowered.compile(), num_steps * share)
  return _read(act.compile(), length), learn._replace(num_all_reduces=num_steps)


MESSAGE_SIZES = (256, 65_536, 262_144, 1_048_576)  # In float32.
_NUM_STEPS = 20  # All-reduces in one call of the probe.
_PR_SET_PDEATHSIG = 1  # Of Linux's prctl.

Row = dict[str, float]


def _join(coordinator: str, process: int) -> None:
  """Connects a pair of processes; an empty coordinator leaves them alone."""
  if coordinator:
    cluster.start(
      coordinator,
      2,
      process,
      start_seconds=60.0,
      heartbeat_seconds=30.0,
      hang_seconds=3600.0,
    )


def _train(
  fields: dict[str, Any], coordinator: str = '', process: int = 0
) -> Callable[[int], list[Row]]:
  """Makes `count -> rows`, which runs updates and returns a row for each."""
  _join(coordinator, process)
  config = workdir.as_config(fields)
  build.set_up_jax(config, 2 if coordinator else 1)
  driver: Any = build.make_run(config).driver
  driver.start()

  def run(count: int) -> list[Row]:
    reports = [driver.advance(1)[0] for _ in range(count)]
    if not all(x.is_finite for x in reports):
      raise ValueError('the loss is NaN or infinite')
    return [{'seconds': x.seconds, **x.stages} for x in reports]

  return run


def _measure_all_reduces(
  coordinator: str = '', process: int = 0
) -> Callable[[int], list[Row]]:
  """Makes updates of the learner with a loss that costs almost nothing.

  The all-reduces take the time that two connected processes need more than one.
  """
  spmd.set_num_cpu_devices(1, 2)
  _join(coordinator, process)
  mesh = spmd.make_mesh(jax.devices())

  def make(size: int) -> Callable[[], float]:
    nothing: Any = None

    def loss(params: Any, target_params, batch: Any, rng_key):
      return jnp.sum(params * params) * jnp.mean(batch), {}

    agent = Agent(
      init=lambda key: jnp.ones(size),
      initial_carry=lambda n: (),
      act=nothing,
      prepare=lambda params, trajectory, mean: trajectory,
      loss=loss,
    )
    learner = make_learner(agent, optax.sgd(1e-6), num_epochs=_NUM_STEPS)
    update = spmd.map_update(learner, mesh)
    key = spmd.place(jax.random.key(0), mesh, spmd.REPLICATED)
    state = spmd.place(
      learner.init(jax.random.key(0), nothing), mesh, spmd.LEARNER_STATE
    )
    data = spmd.place(jnp.ones((1, 2)), mesh, spmd.TRAJECTORY)

    def call() -> float:
      nonlocal state
      start = time.perf_counter()
      state, _ = jax.block_until_ready(
        update(state.params, state._replace(params=()), (data,), key)
      )
      return (time.perf_counter() - start) / _NUM_STEPS

    return call

  calls = {str(size): make(size) for size in MESSAGE_SIZES}
  return lambda count: [
    {size: call() for size, call in calls.items()} for _ in range(count)
  ]


def _peaks() -> Callable[[int], list[Row]]:
  """Measures one core: FLOP/s of matrix products and bytes/s of memory."""
  spmd.set_num_cpu_devices(1)
  side, size = 1024, 1 << 24
  matrix, vector = jnp.ones((side, side)), jnp.ones(size)
  multiply = jax.jit(lambda x: x @ x)
  add = jax.jit(lambda x: x + 1, donate_argnums=0)  # New pages would cost time.

  def timed(function: Callable, x: jax.Array) -> tuple[float, jax.Array]:
    start = time.perf_counter()
    y = function(x).block_until_ready()
    return time.perf_counter() - start, y

  def run(count: int) -> list[Row]:
    nonlocal vector
    rows = []
    for _ in range(count):
      multiplying, _ = timed(multiply, matrix)
      adding, vector = timed(add, vector)
      rows.append(
        {'flops': 2 * side**3 / multiplying, 'bytes': 2 * 4 * size / adding}
      )
    return rows

  return run


_TASKS: dict[str, Callable] = {
  'train': _train,
  'all_reduces': _measure_all_reduces,
  'peaks': _peaks,
}


def probe(task: str, core: str) -> None:
  """Runs a process that measures; `_Process` starts it.

  It is pinned to one core. It reads the task's arguments as a line of JSON from
  its standard input and makes the task ready. Then it runs the task as often as
  each further line says, and answers with rows of measurements.
  """
  os.sched_setaffinity(0, {int(core)})  # Before JAX starts its threads.
  # Without its parent, an all-reduce would wait for ever.
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  # Libraries print to standard output too; only `replies` goes to the parent.
  replies = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)

  def reply(rows: list[Row]) -> None:
    print(json.dumps(rows), file=replies, flush=True)

  run = _TASKS[task](**json.loads(sys.stdin.readline()))
  reply(run(1))
  for line in sys.stdin:
    reply(run(json.loads(line)))


_SECONDS = 1.5  # One measurement of updates takes about this long.


class Times(NamedTuple):
  """Seconds of single-device updates, one number for each update.

  Attributes:
    alone: `[N]`, while the other core is idle.
    busy: `[N]`, while the other core does the same work, not connected.
    stages: medians of Sebulba's stages, measured without overlap.
  """

  alone: np.ndarray
  busy: np.ndarray
  stages: Row


class _Process:
  """A process that runs `probe`, pinned to a core, for a task of `_TASKS`."""

  def __init__(self, core: int, task: str, arguments: dict[str, Any]):
    self._errors = tempfile.TemporaryFile('w+')
    self._process: Any = subprocess.Popen(
      [sys.executable, '-m', 'podrl.tools.scaling', task, str(core)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''},
    )
    self.begin(arguments)

  def begin(self, order: Any) -> None:
    """Sends an order; call `end` next."""
    self._process.stdin.write(json.dumps(order) + '\n')
    self._process.stdin.flush()

  def end(self) -> list[Row]:
    """Waits for the rows.

    Raises:
      ValueError: if the process ended instead.
    """
    line = self._process.stdout.readline()
    if not line:
      self._errors.seek(0)
      lines = self._errors.read().strip().splitlines() or ['it printed nothing']
      raise ValueError(f'a measuring process ended: {lines[-1]}')
    return json.loads(line)

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.communicate()
    self._errors.close()


def run_processes(processes: Sequence[_Process], count: int) -> list[Row]:
  """Runs processes at the same time and returns their rows."""
  for process in processes:
    process.begin(count)
  return [row for process in processes for row in process.end()]


def open_processes(
  exit_stack: contextlib.ExitStack, tasks: Sequence[tuple[str, dict[str, Any]]]
) -> list[_Process]:
  """Starts the i-th task on the i-th core and waits until all are ready."""
  cores = sorted(os.sched_getaffinity(0))
  processes = []
  for i, (task, arguments) in enumerate(tasks):
    processes.append(_Process(cores[i % len(cores)], task, arguments))
    exit_stack.callback(processes[-1].close)
  for process in processes:
    process.end()
  return processes


def one_core(config: Any, **changes: Any) -> dict[str, Any]:
  """Returns the configuration for one device, as JSON."""
  fields = json.loads(json.dumps(config.to_dict()))
  if build.architecture(config) == 'sebulba':
    fields['sebulba'] |= {'actor_devices': [], 'learner_devices': []} | changes
  else:
    fields['num_devices'] = 1
  return fields


def measure_updates(config: Any, repeats: int) -> Times:
  """Measures an experiment's updates on one core.

  Args:
    config: the experiment; one core has all of its environments.
    repeats: how often one process and then two processes are measured.
  """
  rows: dict[str, list[Row]] = {'alone': [], 'busy': []}
  with contextlib.ExitStack() as exit_stack:
    pair = open_processes(
      exit_stack, [('train', {'fields': one_core(config)})] * 2
    )
    seconds = np.median([x['seconds'] for x in run_processes(pair, 2)])
    count = max(3, round(_SECONDS / seconds))
    for _ in range(repeats):
      rows['alone'] += run_processes(pair[:1], count)
      rows['busy'] += run_processes(pair, count)
  stages: Row = {}
  if build.architecture(config) == 'sebulba':
    with contextlib.ExitStack() as exit_stack:
      single = open_processes(
        exit_stack, [('train', {'fields': one_core(config, max_lag=0)})]
      )
      found = run_processes(single, repeats * count)
      stages = {
        k.removeprefix('time_'): float(np.median([x[k] for x in found]))
        for k in found[0]
      }
  alone, busy = (np.asarray([x['seconds'] for x in rows[k]]) for k in rows)
  return Times(alone, busy, stages)


def fit(
  num_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
  """Fits latency (s) and bandwidth (bytes/s) to the times of messages.

  seconds = latency + bytes / bandwidth. The fit minimises the squares of
  relative errors, so that short messages count too.

  Args:
    num_bytes: `[N]` sizes of the messages.
    seconds: `[N]` their times.
  """
  x, y = np.asarray(num_bytes, float), np.asarray(seconds, float)
  (latency, slope), *_ = np.linalg.lstsq(
    np.stack([1 / y, x / y], 1), np.ones(len(y)), rcond=None
  )
  return max(float(latency), 0.0), 1 / max(float(slope), 1e-15)


def connected(task: str, **arguments: Any) -> list[tuple[str, dict[str, Any]]]:
  """Returns the tasks of two connected processes."""
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{found.getsockname()[1]}'
  return [
    (task, arguments | {'coordinator': address, 'process': i}) for i in range(2)
  ]


def link(pair: Sequence[Row], single: Sequence[Row]) -> tuple[float, float]:
  """Fits latency and bandwidth to the all-reduces of a pair and of singles."""
  seconds = [
    max(
      1e-9,
      np.median([x[str(n)] for x in pair])
      - np.median([x[str(n)] for x in single]),
    )
    for n in MESSAGE_SIZES
  ]
  return fit([4 * n for n in MESSAGE_SIZES], seconds)


def measure_chip(repeats: int) -> Chip:
  """Measures a core of this machine and the link of two processes on it.

  Args:
    repeats: how often connected and separate processes are measured in turn.
  """
  with contextlib.ExitStack() as exit_stack:
    single = open_processes(exit_stack, [('peaks', {})])
    peak = {
      k: max(x[k] for x in run_processes(single, 5)) for k in ('flops', 'bytes')
    }
  pair_rows, single_rows = [], []
  with contextlib.ExitStack() as exit_stack:
    pair = open_processes(exit_stack, connected('all_reduces'))
    others = open_processes(exit_stack, [('all_reduces', {})] * 2)
    for _ in range(repeats):
      pair_rows += run_processes(pair, 10)
      single_rows += run_processes(others, 10)
  latency, bandwidth = link(pair_rows, single_rows)
  return Chip(
    peak['flops'],
    peak['flops'],
    peak['bytes'],
    operation_seconds=0.0,
    link_bandwidth=bandwidth,
    hop_seconds=latency / 2,
    torus_dims=1,
    pod_size=2**31,
    far_bandwidth=bandwidth,
    far_hop_seconds=0.0,
    host_cpus=1.0,
  )


CORES = tuple(2**i for i in range(12))


class Single(NamedTuple):
  """The update of one core.

  Attributes:
    alone: seconds while the other cores are idle.
    busy: seconds while other cores work too.
    deviation: standard deviation in seconds; the slowest of n cores is late by
      `expected_maximum(n)` times this.
    limit: what takes most of the time.
  """

  alone: float
  busy: float
  deviation: float
  limit: str


class Prediction(NamedTuple):
  """An update on n cores.

  Attributes:
    num_cores: number of cores, n.
    seconds: time of the whole update.
    all_reduce: seconds in the all-reduces of all optimiser steps.
    waiting: seconds of waiting for the slowest core.
    efficiency: time of one core alone divided by `seconds`.
    steps_per_second: environment steps of all cores.
    limit: what takes most of the time.
  """

  num_cores: int
  seconds: float
  all_reduce: float
  waiting: float
  efficiency: float
  steps_per_second: float
  limit: str


def expected_maximum(num_draws: int) -> float:
  """Expected maximum of n standard normals: integral of x d(Phi(x)^n)."""
  if num_draws == 1:
    return 0.0
  x = np.linspace(-8.0, 8.0, 4001)
  power = np.asarray([statistics.NormalDist().cdf(v) for v in x]) ** num_draws
  return float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(power)))


def robust_deviation(values: np.ndarray) -> float:
  """Standard deviation of the normal that has the quartiles of `values`."""
  low, high = np.percentile(values, [25, 75])
  return float(high - low) / 1.349


def roofline(work: Work, chip: Chip, dtype: str) -> tuple[float, str]:
  """Returns the least time of a program in seconds, and its limit.

  max(FLOPs / peak, bytes / bandwidth, operations x the least time of one).

  Source: Williams et al. 2009, Roofline, without the term of operations.
  """
  peak = chip.peak_bfloat16 if dtype == 'bfloat16' else chip.peak_float32
  return max(
    (work.flops / peak, 'compute'),
    (work.num_bytes / chip.memory_bandwidth, 'memory'),
    (work.operations * chip.operation_seconds, 'operations'),
  )


def scale(
  seconds: float, work: Work, local: Chip, chip: Chip, dtype: str
) -> tuple[float, str]:
  """Scales seconds measured here to another chip; returns its limit too."""
  least, limit = roofline(work, chip, dtype)
  ratio = (
    roofline(work._replace(operations=0), chip, dtype)[0]
    / (roofline(work, local, 'float32')[0])
  )
  return max(
    (seconds * ratio, limit if limit != 'operations' else 'compute'),
    (least, limit),
  )


def single(
  times: Times,
  act: Work,
  learn: Work,
  local: Chip,
  chip: Chip,
  dtype: str,
  overlaps: bool,
) -> Single:
  """Predicts the update of one core of a chip.

  An accelerator runs nothing else: only the host's share varies there, and an
  update waits for it once. On this machine, other work disturbs a core for less
  than the time between two of an update's k all-reduces. So the time between
  two deviates by 1 / sqrt(k) of the update's deviation, and each all-reduce
  waits for the slowest core. (This is too much for longer disturbances. For two
  processes here it was nearer than waiting once.)

  Args:
    times: measurements of this machine.
    act: work of an unroll.
    learn: work of the learner's update.
    local: a core of this machine.
    chip: the chip to predict; it may be `local`.
    dtype: number type of the network.
    overlaps: whether Sebulba's environments step while the learner learns.
  """
  alone, busy = float(np.median(times.alone)), float(np.median(times.busy))
  deviation = robust_deviation(times.busy)
  if chip is local:
    deviation *= math.sqrt(max(1, learn.num_all_reduces))
  both = Work(*np.add(act, learn))
  if not times.stages:  # Anakin.
    if chip is local:
      return Single(alone, busy, deviation, roofline(both, local, 'float32')[1])
    parts = [roofline(x, local, 'float32')[0] for x in (act, learn)]
    scaled = [
      scale(alone * part / sum(parts), work, local, chip, dtype)
      for part, work in zip(parts, (act, learn))
    ]
    seconds = sum(x for x, _ in scaled)
    return Single(seconds, seconds, 0.0, max(scaled)[1])
  environment, inference = (
    times.stages[x] for x in ('environment', 'inference')
  )
  update = times.stages['update'] + times.stages['hand_off']
  if chip is local:
    return Single(
      alone,
      busy,
      deviation,
      'environments'
      if (environment > inference + update)
      else roofline(both, local, 'float32')[1],
    )
  environment /= chip.host_cpus
  inference, _ = scale(inference, act, local, chip, dtype)
  update, limit = scale(update, learn, local, chip, dtype)
  device = inference + update
  seconds = (
    max(environment + inference, device) if overlaps else (environment + device)
  )
  is_host = environment > (update if overlaps else device)
  return Single(
    seconds,
    seconds,
    deviation / busy * environment,
    'environments' if is_host else limit,
  )


def predict(
  base: Single,
  learn: Work,
  chip: Chip,
  steps_per_core: int,
  sizes: Sequence[int] = CORES,
) -> list[Prediction]:
  """Predicts the update for several numbers of cores.

  Args:
    base: the update of one core.
    learn: work of the learner, with its all-reduces.
    chip: the chip of all cores.
    steps_per_core: environment steps of one core in one update.
    sizes: numbers of cores.
  """
  rows = []
  for n in sizes:
    own = base.alone if n == 1 else base.busy
    reducing = learn.num_all_reduces * all_reduce_seconds(
      learn.all_reduce_bytes, n, chip
    )
    waiting = base.deviation * expected_maximum(n)
    seconds = own + reducing + waiting
    _, limit = max(
      (own, base.limit), (reducing, 'interconnect'), (waiting, 'waiting')
    )
    rows.append(
      Prediction(
        n,
        seconds,
        reducing,
        waiting,
        base.alone / seconds,
        n * steps_per_core / seconds,
        limit,
      )
    )
  return rows


# Published steps or frames per second, by number of cores. Hessel et al. 2021,
# arXiv:2104.06272: Anakin and Sebulba. InstaDeep: TPU v4-8 to v4-128.
_ANAKIN = {8: 5e6}
_SEBULBA = {8: 0.2e6, 2048: 43e6}
_INSTADEEP = {8: 0.31e6, 16: 0.60e6, 32: 1.22e6, 64: 2.41e6, 128: 4.79e6}


def _relative(rates: dict[int, float]) -> dict[int, float]:
  """Returns rates per core, relative to the rate of the fewest cores."""
  first = min(rates)
  return {n: rate / n / (rates[first] / first) for n, rate in rates.items()}


def _time(seconds: float) -> str:
  """Formats seconds in few characters: 0.0123 is 12.3m."""
  for unit, size in (('', 1.0), ('m', 1e-3)):
    if seconds >= size:
      return f'{seconds / size:.3g}{unit}'
  return f'{seconds * 1e6:.3g}u' if seconds > 1e-9 else '0'


def table(rows: Sequence[Prediction], title: str) -> Table:
  """Makes a table of predictions and published rates."""
  lines = Table(
    title=title,
    box=box.SIMPLE_HEAD,
    padding=(0, 1, 0, 0),
    show_edge=False,
    caption=('update, reduce, wait: seconds (m: milli, u: micro)'),
  )
  for name in ('cores', 'update', 'reduce', 'wait', 'steps/s', 'eff.'):
    lines.add_column(name, justify='right', no_wrap=True)
  lines.add_column('limit', no_wrap=True)
  for name in ('Podracer', 'InstaDeep'):
    lines.add_column(name, justify='right', no_wrap=True)
  for row in rows:
    n = row.num_cores
    podracer = [
      f'{name} {compact(rates[n])}'
      for name, rates in (('A', _ANAKIN), ('S', _SEBULBA))
      if n in rates
    ]
    lines.add_row(
      f'{n:,}',
      *(_time(x) for x in (row.seconds, row.all_reduce, row.waiting)),
      compact(row.steps_per_second),
      f'{row.efficiency:.0%}',
      row.limit,
      '\n'.join(podracer),
      compact(_INSTADEEP[n]) if n in _INSTADEEP else '',
    )
  return lines


def verdict(rows: Sequence[Prediction]) -> str:
  """Says where the predictions and the published rates agree."""
  found = {row.num_cores: row.efficiency for row in rows}

  def compare(who: str, rates: dict[int, float]) -> str:
    last = max(rates)
    published, predicted = _relative(rates)[last], found[last] / found[8]
    agree = 'agree' if abs(predicted - published) <= 0.1 else 'differ'
    return (
      f'8 to {last:,} cores: {who} keeps {published:.1%} of its rate per core, '
      f'this model predicts {predicted:.1%}: they {agree}.'
    )

  return '\n'.join(
    (
      compare('InstaDeep', _INSTADEEP),
      compare("Podracer's Sebulba", _SEBULBA),
      "A and S are Podracer's Anakin (close to linear from 16 to 128 cores) "
      'and Sebulba. Their networks, environments and chips differ from yours.',
    )
  )


def draw(rows: Sequence[Prediction], title: str, path: str) -> None:
  """Draws rates and efficiency as a PNG file."""
  import matplotlib  # The import takes a second.

  matplotlib.use('Agg')
  from matplotlib import pyplot
  from matplotlib.ticker import EngFormatter, PercentFormatter, ScalarFormatter

  cores = [row.num_cores for row in rows]
  found = {row.num_cores: row.efficiency for row in rows}
  linear = [n * rows[0].steps_per_second for n in cores]
  blue = {'ms': 4, 'color': '#1f5fa8', 'label': 'predicted'}
  orange = {'color': '#c44e00', 'mfc': 'none'}
  figure, (rates, shares) = pyplot.subplots(2, figsize=(6.4, 7.2), dpi=110)
  rates.plot(cores, [row.steps_per_second for row in rows], '-o', **blue)
  rates.plot(cores, linear, ':', color='#5a5a5a', label='linear')
  shares.plot(cores, list(found.values()), '-o', **blue)
  for name, points, style in (
    ("Podracer's Anakin", _ANAKIN, 's'),
    ("Podracer's Sebulba", _SEBULBA, 'D'),
    ('InstaDeep', _INSTADEEP, '^'),
  ):
    rates.plot(*zip(*points.items()), style, label=name, **orange)
    if len(points) > 1:
      relative = {n: x * found[8] for n, x in _relative(points).items()}
      label = f'{name}, set equal at 8 cores'
      shares.plot(*zip(*relative.items()), style, label=label, **orange)
  rates.set_yscale('log')
  rates.yaxis.set_major_formatter(EngFormatter(sep=''))
  rates.set_ylabel('steps or frames per second')
  rates.set_title(title, fontsize=10)
  shares.yaxis.set_major_formatter(PercentFormatter(1.0))
  shares.set_ylim(0, 1.1)
  shares.set_ylabel('efficiency')
  for axes in (rates, shares):
    axes.set_xscale('log', base=2)
    axes.set_xticks(cores)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.tick_params(axis='x', labelsize=8)
    axes.set_xlabel('cores')
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  figure.savefig(path)
  pyplot.close(figure)


def _act(
  overrides: Sequence[str], paths: list[str], values: flags.FlagValues
) -> None:
  """Measures the experiment and prints and draws the prediction."""
  path = tools.single_path(
    paths, 'experiment', 'scaling experiments/anakin_breakout.py'
  )
  check_choice('--chip', values.chip, ('local', *CHIPS))
  config = tools.read_config(path, overrides, values)
  check(config)
  tools.make_directory(values.out)
  jax.config.update('jax_platforms', 'cpu')
  if getattr(jax.config, 'jax_num_cpu_devices') < 1:
    spmd.set_num_cpu_devices(2)  # XLA may remove an all-reduce of one core.
  console = Console(highlight=False, markup=False)
  act, learn = read_work(config)
  console.print('measuring this machine for about a minute', style='dim')
  local = measure_chip(values.repeats)
  times = measure_updates(config, values.repeats)
  chip = CHIPS.get(values.chip, local)
  is_sebulba = build.architecture(config) == 'sebulba'
  overlaps = is_sebulba and config.sebulba.max_lag > 0
  base = single(times, act, learn, local, chip, config.network.dtype, overlaps)
  rows = predict(base, learn, chip, config.unroll_length * config.env.num_envs)
  title = (
    f'{config.env.name}, {config.agent.name}, {config.env.num_envs} '
    f'environments a core, {values.chip}'
  )
  console.print(
    f'an update: {(act.flops + learn.flops) / 1e9:.3g} GFLOP, '
    f'{(act.num_bytes + learn.num_bytes) / 1e9:.3g} GB; '
    f'{learn.num_all_reduces} all-reduces of {learn.all_reduce_bytes:,} bytes\n'
    f'a core here: {local.peak_float32 / 1e9:.3g} GFLOP/s, '
    f'{local.memory_bandwidth / 1e9:.3g} GB/s\nan update here: '
    f'{np.median(times.alone):.4g} s; beside a busy core '
    f'{np.median(times.busy):.4g} s\nan all-reduce of two processes here: '
    f'{2e6 * local.hop_seconds:.0f} us + bytes / '
    f'{local.link_bandwidth / 1e9:.3g} GB/s'
  )
  console.print(table(rows, title))
  console.print(verdict(rows))
  path = os.path.join(values.out, 'scaling.png')
  draw(rows, title, path)
  console.print(f'drawn: {path}', soft_wrap=True)


def run(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code, as `tools.run_command`."""
  values = flags.FlagValues()
  flags.DEFINE_string(
    'chip',
    'local',
    f'one of {", ".join(("local", *CHIPS))}.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'out', '.', 'directory of scaling.png.', flag_values=values
  )
  flags.DEFINE_integer(
    'repeats',
    3,
    'number of repeats of each measurement.',
    1,
    flag_values=values,
  )
  return tools.run_experiment_command(argv, __doc__, values, _act)


if __name__ == '__main__':  # As `_Process` starts it.
  probe(*sys.argv[1:])
