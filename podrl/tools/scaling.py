"""The `podrl scaling` command: predicts the speed of an experiment on a pod.

  podrl scaling EXPERIMENT [--chip=local] [--agent=ppo] [--variant=NAME]
      [--out=DIR] [--config.FIELD=VALUE ...]

EXPERIMENT is a file such as experiments/anakin_breakout.py. The prediction is
for weak scaling: each core has `config.env.num_envs` environments. Here, a core
is one device of JAX.

  update(n) = update(1) + optimiser steps x all-reduce(n) + waiting(n)

The command measures update(1) on one CPU core of this machine. For two or more
cores, it uses an update that was measured while another core did the same work,
because cores share caches and memory. For another chip, it multiplies by the
ratio of the rooflines (from FLOPs and bytes of the compiled program, with a
minimum time for each operation). waiting(n) is the time until the slowest of n
cores is ready: the expected maximum of n normal variables. Between cores of
this machine, each of the k all-reduces of an update waits; the deviation is
that of the measured updates divided by sqrt(k). On another chip, only the
environments of the host vary, so each update waits once. --chip=local connects
the cores in a ring, like the two measured processes. The table shows the
seconds of one update: the total, the all-reduces, and the waiting.
"""

from collections.abc import Callable, Iterator, Sequence
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
from ml_collections import ConfigDict
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.core.learner import all_mean
from podrl.drivers import spmd
from podrl.drivers.anakin import Actors, make_unroll
from podrl.records import workdir
from podrl.records.terminal import compact
from podrl.run import build, cluster
from podrl.run.config import check, check_choice
from podrl.types import Array, DeviceEnv, TimeStep, Tree


class Chip(NamedTuple):
  """One core and its links, in seconds, bytes/s and FLOP/s."""

  peak: float  # FLOP/s of matrix products in bfloat16.
  float32_passes: int  # A product in float32 takes this many times longer.
  memory_bandwidth: float
  link_bandwidth: float  # From one core to its pod, in an all-reduce.
  torus_dims: int  # 1 means a ring; 0 means a switch, used as a tree.
  pod_size: int  # Number of cores in a pod.
  far_bandwidth: float  # From one core to other pods.
  host_cpus: float  # Virtual CPUs of the host per core.
  operation_seconds: float  # Minimum time of one operation of a program.
  hop_seconds: float  # Latency between neighbours in a pod.
  far_hop_seconds: float  # Latency between pods.


# For TPU v3, a core is half a chip, with half of its figures. For the others,
# it is a whole chip. The figures have these sources.
# TPUs: Google Cloud, Cloud TPU documentation, pages "TPU v3" to "TPU v6e" for
# peak, memory bandwidth and pod size. The link bandwidth is the all-reduce
# bandwidth of a pod divided by its chips (v3: 340 TB/s / 1,024; v4: 1.1 PB/s /
# 4,096; v5e: 51.2 TB/s / 256; v6e: 102.4 TB/s / 256), and 4,800 Gbps per chip
# for v5p. Between pods, it is the data-centre bandwidth of a pod divided by its
# chips (v5e: 6.4 Tbps / 256; v6e: 25.6 Tbps / 256). By default, a TPU
# multiplies float32 in one bfloat16 pass. A hop takes 1 us: Austin et al. 2025,
# How to Scale Your Model.
# a100: NVIDIA's datasheet for 40 GB. By default, JAX multiplies float32 as
# TF32. NVLink's 600 GB/s count both directions. DGX A100 has 200 Gb/s per GPU.
# h100: NVIDIA's datasheet for SXM, dense products. NVLink has 900 GB/s, DGX
# H100 400 Gb/s. A network hop takes 5 us: NCCL, src/graph/tuning.cc.
# CPUs: Google Cloud, machine types: vCPUs of a host divided by its chips (n1 of
# v3-8; ct4p, ct5lp, ct5p, ct6e; a2-highgpu, a3-highgpu).
# Three figures are assumed, because nobody publishes them: 1 us for an
# operation on a TPU, 3 us on a GPU, and 20 us for a hop between TPU pods.
_TPU, _GPU = (1e-6, 1e-6, 20e-6), (3e-6, 5e-6, 5e-6)
CHIPS = {
  'tpu_v3': Chip(61.5e12, 1, 450e9, 166e9, 2, 2048, 1e9, 12.0, *_TPU),
  'tpu_v4': Chip(275e12, 1, 1200e9, 268e9, 3, 4096, 1e9, 60.0, *_TPU),
  'tpu_v5e': Chip(197e12, 1, 819e9, 200e9, 2, 256, 3.1e9, 28.0, *_TPU),
  'tpu_v5p': Chip(459e12, 1, 2765e9, 600e9, 3, 8960, 1e9, 52.0, *_TPU),
  'tpu_v6e': Chip(918e12, 1, 1638e9, 400e9, 2, 256, 12.5e9, 22.5, *_TPU),
  'a100': Chip(312e12, 2, 1555e9, 300e9, 0, 8, 25e9, 12.0, *_GPU),
  'h100': Chip(989e12, 2, 3350e9, 450e9, 0, 8, 50e9, 26.0, *_GPU),
}


def _hops(num_cores: int, torus_dims: int) -> float:
  """Hops of an all-reduce: twice along each axis, or up and down a tree."""
  if not torus_dims:
    return 2 * math.log2(num_cores)
  return 2 * torus_dims * (num_cores ** (1 / torus_dims) - 1)


def all_reduce_seconds(num_bytes: float, num_cores: int, chip: Chip) -> float:
  """Returns the time of one all-reduce of a vector over n cores.

  In a pod, it is 2 (n - 1) / n x bytes / bandwidth + hops x latency. Between k
  pods of m cores, the same formula holds for a tree and for bytes / m, because
  a core holds this part after the reduce-scatter in its pod.

  Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms; for
  tori, How to Scale Your Model, Sharded Matrices.
  """
  inside = min(num_cores, chip.pod_size)
  pods = math.ceil(num_cores / chip.pod_size)
  seconds = 2 * (inside - 1) / inside * num_bytes / chip.link_bandwidth
  seconds += _hops(inside, chip.torus_dims) * chip.hop_seconds
  if pods > 1:
    seconds += 2 * (pods - 1) / pods * num_bytes / inside / chip.far_bandwidth
    seconds += _hops(pods, 0) * chip.far_hop_seconds
  return seconds


_NO_OPERATION = 'parameter constant tuple get-tuple-element bitcast'.split()


class Work(NamedTuple):
  """The work of one core in an update, or in a part of an update."""

  flops: float
  num_bytes: float  # Read and written, as XLA counts them.
  operations: float  # Instructions that run one after another.
  all_reduce_bytes: int = 0  # Size of the gradients.
  num_all_reduces: int = 0  # One for each optimiser step.


def num_operations(text: str) -> int:
  """Counts the instructions of a compiled program's entry that do work."""
  entry = text[text.index('ENTRY') :].partition('\n}')[0]
  kinds = re.findall(r'^\s+(?:ROOT )?%?\S+ = .*?([\w-]+)\(', entry, re.M)
  return sum(kind not in _NO_OPERATION for kind in kinds)


def _read(lowered: Any, times: float) -> Work:
  """Compiles a program and returns the work of running it `times` times."""
  compiled = lowered.compile()
  cost, text = compiled.cost_analysis(), compiled.as_text()
  counts = cost['flops'], cost['bytes accessed'], num_operations(text)
  flops, num_bytes, operations = (times * x for x in counts)
  return Work(flops, num_bytes, operations)


def _make_env(config: ConfigDict) -> DeviceEnv:
  """Makes the environments; replaces host environments by empty ones."""
  if build.architecture(config) == 'anakin':
    return build.make_env(config)
  spec = build.make_spec(config)

  def step(keys: Array, action: Any = None) -> tuple[Tree, TimeStep]:
    n = len(keys)
    obs = jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), spec.obs)
    return keys, TimeStep(obs, jnp.zeros(n), jnp.ones(n), jnp.zeros(n, bool))

  return DeviceEnv(spec, step, step)


def read_work(config: ConfigDict) -> tuple[Work, Work]:
  """Returns the work of acting and of learning in an update of one core.

  XLA counts the body of a loop only once, even if it runs many times. So this
  function compiles one step of acting and one step of the optimiser, and
  multiplies their work. Loops inside them (in a recurrent core or in an
  environment) still count once.
  """
  env = _make_env(config)
  agent = build.make_agent(config, env.spec)
  key = jax.eval_shape(lambda: jax.random.key(0))
  variables = jax.eval_shape(agent.init, key)
  variables = variables.with_hyperparams(build.hyperparams(config, agent, 1))
  length, num_envs = config.unroll_length, config.env.num_envs

  def reset(n: int) -> Actors:
    keys = jax.random.split(jax.random.key(0), n)
    carry, zeros = agent.initial_carry(n), jnp.zeros(n)
    return Actors(*env.reset(keys), carry, keys, zeros, zeros.astype(int))

  actors = jax.eval_shape(lambda: reset(num_envs))
  function: Any = agent.act
  inputs: Any = (variables, actors.rng_key, actors.timestep, actors.carry)
  if build.architecture(config) == 'anakin':
    function, inputs = make_unroll(env, agent, 1), (variables, actors, 0)
  act = _read(jax.jit(function).lower(*inputs), length)
  # Compile one step on one minibatch; `share` corrects for its rounded size.
  num_steps = config.num_epochs * config.num_minibatches
  envs = max(1, num_envs // config.num_minibatches)
  share = num_envs / (config.num_minibatches * envs)
  step = config.copy_and_resolve_references()
  step.num_epochs = step.num_minibatches = 1
  learner = build.make_learner(step, agent)
  actors = jax.eval_shape(lambda: reset(envs))
  unroll = make_unroll(env, agent, length)
  _, trajectory, _ = jax.eval_shape(unroll, variables, actors, 0)
  state = jax.eval_shape(learner.init, key, trajectory)
  update: Any = spmd.map_update(learner, spmd.make_mesh(jax.devices()[:1]))
  rest = state._replace(variables=())
  lowered = update.lower(variables, rest, (trajectory,), key)
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(variables[:2]))
  learn = _read(lowered, num_steps * share)._replace(all_reduce_bytes=size)
  return act, learn._replace(num_all_reduces=num_steps)


MESSAGE_SIZES = (256, 65_536, 262_144, 1_048_576)  # Numbers of float32 values.
_NUM_STEPS = 20  # One measurement runs this many all-reduces.
_SECONDS = 1.5  # One measurement of updates takes about this long.

Row = dict[str, float]
Task = tuple[str, dict[str, Any]]  # (key of `_TASKS`, its arguments)


def _train(fields: dict[str, Any]) -> Callable[[], Row]:
  """Prepares an experiment; each call runs one update."""
  config = workdir.as_config(fields)
  is_pair = jax.distributed.is_initialized()
  build.set_up_jax(config, 2 if is_pair else 1)
  driver: Any = build.make_run(config).driver
  driver.start()

  def run() -> Row:
    report = driver.advance(1)[0]
    if not report.is_finite:
      raise ValueError('the loss is NaN or infinite')
    return {'seconds': report.seconds, **report.stages}

  return run


def _all_reduces() -> Callable[[], Row]:
  """Prepares all-reduces; each call returns the seconds for each size."""
  spmd.set_num_cpu_devices(1, 2)
  mesh = spmd.make_mesh(jax.devices())

  def reduce(x: Array) -> Array:
    for _ in range(_NUM_STEPS):
      x = all_mean(x)
    return x

  function = spmd.device_map(reduce, mesh, spmd.REPLICATED, spmd.REPLICATED)
  vectors = [jnp.ones(n) for n in MESSAGE_SIZES]
  vectors = spmd.place(vectors, mesh, spmd.REPLICATED)
  return lambda: {
    str(x.size): _seconds(function, x)[0] / _NUM_STEPS for x in vectors
  }


def _seconds(function: Callable, x: jax.Array) -> tuple[float, jax.Array]:
  """Returns the seconds of a call, and its result."""
  start = time.perf_counter()
  y = jax.block_until_ready(function(x))
  return time.perf_counter() - start, y


def _peaks() -> Callable[[], Row]:
  """Prepares a product and an addition; a call returns FLOP/s and bytes/s."""
  spmd.set_num_cpu_devices(1)
  side, size = 1024, 1 << 24
  matrix, vector = jnp.ones((side, side)), jnp.ones(size)
  multiply = jax.jit(lambda x: x @ x)
  add = jax.jit(lambda x: x + 1, donate_argnums=0)  # Allocation takes time.

  def run() -> Row:
    nonlocal vector
    multiplying, _ = _seconds(multiply, matrix)
    adding, vector = _seconds(add, vector)
    return {'flops': 2 * side**3 / multiplying, 'bytes': 2 * 4 * size / adding}

  return run


_TASKS: dict[str, Callable] = dict(
  train=_train, all_reduces=_all_reduces, peaks=_peaks
)


def probe(core: str, task: str, arguments: str) -> None:
  """Runs in a process that `start` started, on one core.

  First, it prepares the task. Each line of its standard input is a number. It
  then runs the task this many times, and prints the rows as one line of JSON.
  """
  os.sched_setaffinity(0, {int(core)})  # JAX must not have threads yet.
  # PR_SET_PDEATHSIG ends this process with its parent, even in an all-reduce.
  ctypes.CDLL(None).prctl(1, signal.SIGKILL)
  # Libraries may print to standard output. Only `replies` goes to the parent.
  replies = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  values = json.loads(arguments)
  if 'coordinator' in values:
    address, process = values.pop('coordinator'), values.pop('process')
    times = dict(start_seconds=60.0, heartbeat_seconds=30.0)
    cluster.start(address, 2, process, hang_seconds=3600.0, **times)
  run = _TASKS[task](**values)
  for line in sys.stdin:
    rows = [run() for _ in range(int(line))]
    print(json.dumps(rows), file=replies, flush=True)


@contextlib.contextmanager
def start(*tasks: Task) -> Iterator[Callable[..., list[Row]]]:
  """Starts a process for each task; the i-th process runs on the i-th core.

  Yields `(count, num_processes=len(tasks)) -> rows`. This function runs the
  tasks of the first processes at the same time, `count` times each.
  """
  cores = sorted(os.sched_getaffinity(0))
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  processes: list[Any] = []
  pipe = subprocess.PIPE
  with contextlib.ExitStack() as exit_stack:
    errors = exit_stack.enter_context(tempfile.TemporaryFile('w+'))
    files: Any = dict(stdin=pipe, stdout=pipe, stderr=errors)
    for i, (task, arguments) in enumerate(tasks):
      command = [sys.executable, '-m', 'podrl.tools.scaling']
      command += [str(cores[i % len(cores)]), task, json.dumps(arguments)]
      process = subprocess.Popen(command, text=True, env=environment, **files)
      exit_stack.callback(process.communicate)
      exit_stack.callback(process.kill)
      processes.append(process)

    def run(count: int, num_processes: int = len(tasks)) -> list[Row]:
      for process in processes[:num_processes]:
        print(count, file=process.stdin, flush=True)
      rows = []
      for process in processes[:num_processes]:
        line = process.stdout.readline()
        if not line:
          errors.seek(0)
          lines = errors.read().strip().splitlines() or ['it printed nothing']
          raise ValueError(f'a measuring process failed: {lines[-1]}')
        rows += json.loads(line)
      return rows

    run(1)  # The first run compiles, in every process.
    yield run


def one_core(config: ConfigDict, **changes: Any) -> dict[str, Any]:
  """Returns the fields of the configuration for one device, as JSON values."""
  fields = json.loads(json.dumps(config.to_dict()))
  if build.architecture(config) == 'sebulba':
    fields['sebulba'] |= {'actor_devices': [], 'learner_devices': []} | changes
  else:
    fields['num_devices'] = 1
  return fields


def connected(task: str, **arguments: Any) -> list[Task]:
  """Returns a task for each of two connected processes."""
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{found.getsockname()[1]}'
  arguments['coordinator'] = address
  return [(task, {**arguments, 'process': i}) for i in range(2)]


class Times(NamedTuple):
  """Seconds of single-device updates."""

  alone: np.ndarray  # `[N]`, measured while the other core is idle.
  busy: np.ndarray  # `[N]`, measured while the other core does the same.
  # Sebulba without overlap: median seconds of environments, acting, learning.
  stages: Sequence[float] = ()


def measure_updates(config: ConfigDict, repeats: int) -> Times:
  """Measures updates on one core, alone and beside a busy core."""
  alone, busy, stages = [], [], []
  with start(*[('train', {'fields': one_core(config)})] * 2) as run:
    count = max(3, round(_SECONDS / np.median([x['seconds'] for x in run(2)])))
    for _ in range(repeats):
      alone += [x['seconds'] for x in run(count, 1)]
      busy += [x['seconds'] for x in run(count)]
  if build.architecture(config) == 'sebulba':
    with start(('train', {'fields': one_core(config, max_lag=0)})) as run:
      rows = run(repeats * count)
    names = 'environment inference update hand_off'.split()
    *stages, update, hand_off = (
      float(np.median([x[f'time_{name}'] for x in rows])) for name in names
    )
    stages.append(update + hand_off)
  return Times(np.asarray(alone), np.asarray(busy), stages)


def link(rows: Sequence[Row]) -> tuple[float, float]:
  """Fits latency (s) and bandwidth (bytes/s) to the times of all-reduces.

  seconds = latency + bytes / bandwidth. The fit minimises the squares of
  relative errors, so that short messages count as much as long ones.
  """
  x = 4.0 * np.asarray(MESSAGE_SIZES)
  y = np.median([[row[str(n)] for n in MESSAGE_SIZES] for row in rows], 0)
  columns = np.stack([1 / y, x / y], 1)
  latency, slope = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0]
  return max(float(latency), 0.0), 1 / max(float(slope), 1e-15)


def measure_chip(repeats: int) -> Chip:
  """Measures a core of this machine, and the link between two processes."""
  with start(('peaks', {})) as run:
    rows = run(5)
  peak, memory = (max(x[key] for x in rows) for key in ('flops', 'bytes'))
  with start(*connected('all_reduces')) as run:
    latency, bandwidth = link(run(10 * repeats))
  ring = (1, 2**31, bandwidth, 1.0, 0.0, latency / 2, 0.0)
  return Chip(peak, 1, memory, bandwidth, *ring)


CORES = tuple(2**i for i in range(12))


class Single(NamedTuple):
  """The update of one core, in seconds."""

  alone: float  # Measured while other cores are idle.
  busy: float  # Measured while other cores work too.
  deviation: float  # The slowest core is late by this x expected_maximum(n).
  limit: str  # The part that takes most of the time.


class Prediction(NamedTuple):
  """An update on n cores, in seconds."""

  num_cores: int
  seconds: float
  all_reduce: float  # Time in the all-reduces of all optimiser steps.
  waiting: float  # Time until the slowest core is ready.
  efficiency: float  # The time of one core alone, divided by `seconds`.
  steps_per_second: float  # Environment steps of all cores.
  limit: str  # The part that takes most of the time.


def expected_maximum(num_draws: int) -> float:
  """Expected maximum of n standard normal variables: integral x d(Phi(x)^n)."""
  if num_draws == 1:
    return 0.0
  x = np.linspace(-8.0, 8.0, 4001)
  power = np.asarray([statistics.NormalDist().cdf(v) for v in x]) ** num_draws
  return float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(power)))


def roofline(work: Work, chip: Chip) -> tuple[float, str]:
  """Returns the minimum time of a program in seconds, and its limit.

  max(FLOPs / peak, bytes / bandwidth, operations x minimum time of one).

  Source: Williams et al. 2009, Roofline. The term for operations is new here.
  """
  return max(
    (work.flops / chip.peak, 'compute'),
    (work.num_bytes / chip.memory_bandwidth, 'memory'),
    (work.operations * chip.operation_seconds, 'operations'),
  )


def scale(
  seconds: float, work: Work, local: Chip, chip: Chip
) -> tuple[float, str]:
  """Scales a measured time to another chip; returns seconds and the limit."""
  here, _ = roofline(work, local)
  there, limit = roofline(work._replace(operations=0), chip)
  return max((seconds * there / here, limit), roofline(work, chip))


def single(
  times: Times, act: Work, learn: Work, local: Chip, chip: Chip, overlaps: bool
) -> Single:
  """Predicts the update of one core of a chip, which may be `local`."""
  alone, busy = float(np.median(times.alone)), float(np.median(times.busy))
  # Deviation of the normal distribution with these quartiles; ignores outliers.
  deviation = float(np.subtract(*np.percentile(times.busy, [75, 25]))) / 1.349
  if times.stages:
    environment, acting, learning = times.stages
  else:  # Anakin is one program: split its time like its parts' rooflines.
    parts = [roofline(x, local)[0] for x in (act, learn)]
    environment = 0.0
    acting, learning = (alone * part / sum(parts) for part in parts)
  environment /= chip.host_cpus
  scaled = scale(acting, act, local, chip), scale(learning, learn, local, chip)
  (acting, _), (learning, _) = scaled
  # On this machine, environments and learner share the core.
  overlaps = overlaps and chip is not local
  beside = learning if overlaps else acting + learning
  limit = 'environments' if environment > beside else max(scaled)[1]
  if chip is local:
    deviation *= math.sqrt(max(1, learn.num_all_reduces))
    return Single(alone, busy, deviation, limit)
  waited = max(environment, learning) if overlaps else environment + learning
  seconds = acting + waited
  return Single(seconds, seconds, deviation / busy * environment, limit)


def predict(
  base: Single, learn: Work, chip: Chip, num_steps: int, sizes: tuple = CORES
) -> list[Prediction]:
  """Predicts the update for several numbers of cores."""
  rows = []
  for n in sizes:
    own = base.alone if n == 1 else base.busy
    one = all_reduce_seconds(learn.all_reduce_bytes, n, chip)
    reducing = learn.num_all_reduces * one
    waiting = base.deviation * expected_maximum(n)
    seconds = own + reducing + waiting
    reduced = (reducing, 'interconnect')
    _, limit = max((own, base.limit), reduced, (waiting, 'waiting'))
    rates = base.alone / seconds, n * num_steps / seconds
    rows.append(Prediction(n, seconds, reducing, waiting, *rates, limit))
  return rows


# Published steps or frames per second, by number of cores. Hessel et al. 2021,
# arXiv:2104.06272, has Anakin and Sebulba. InstaDeep used TPU v4-8 to v4-128.
PUBLISHED = {
  'Anakin': {8: 5e6},
  'Sebulba': {8: 0.2e6, 2048: 43e6},
  'InstaDeep': {8: 0.31e6, 16: 0.60e6, 32: 1.22e6, 64: 2.41e6, 128: 4.79e6},
}


def _time(seconds: float) -> str:
  """Formats seconds in few characters: 0.0123 becomes 12.3m."""
  for unit, size in (('', 1.0), ('m', 1e-3)):
    if seconds >= size:
      return f'{seconds / size:.3g}{unit}'
  return f'{seconds * 1e6:.3g}u' if seconds > 1e-9 else '0'


def table(rows: Sequence[Prediction], title: str) -> Table:
  """Makes a table of predictions and published rates."""
  caption = 'update, reduce, wait: seconds (m: milli, u: micro)'
  lines = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0)
  lines.show_edge = False
  names = 'cores update reduce wait steps/s eff. limit'.split()
  for name in (*names, *PUBLISHED):
    justify: Any = 'left' if name == 'limit' else 'right'
    lines.add_column(name, justify=justify, no_wrap=True)
  for row in rows:
    n = row.num_cores
    lines.add_row(
      f'{n:,}',
      *map(_time, (row.seconds, row.all_reduce, row.waiting)),
      compact(row.steps_per_second),
      f'{row.efficiency:.0%}',
      row.limit,
      *(compact(x[n]) if n in x else '' for x in PUBLISHED.values()),
    )
  return lines


def verdict(rows: Sequence[Prediction]) -> str:
  """Says where the predictions and the published rates agree."""
  found = {row.num_cores: row.efficiency for row in rows}
  lines = []
  for who in ('InstaDeep', 'Sebulba'):
    rates = PUBLISHED[who]
    last = max(rates)
    published = rates[last] / rates[8] * 8 / last
    predicted = found[last] / found[8]
    agree = 'agree' if abs(predicted - published) <= 0.1 else 'differ'
    lines.append(
      f'8 to {last:,} cores: {who} keeps {published:.1%} of its rate per core, '
      f'this model predicts {predicted:.1%}: they {agree}.'
    )
  lines.append(
    "The Anakin and Sebulba rates are Podracer's; its Anakin is nearly linear "
    'from 16 to 128 cores. Networks, environments and chips differ from yours.'
  )
  return '\n'.join(lines)


def draw(rows: Sequence[Prediction], title: str, path: str) -> None:
  """Draws rates and efficiency as a PNG file."""
  import matplotlib  # The import takes a second.

  matplotlib.use('Agg')
  from matplotlib import pyplot
  from matplotlib.ticker import EngFormatter, PercentFormatter

  cores, _, _, _, efficiency, rates, _ = zip(*rows)
  linear = [n * rates[0] for n in cores]
  at_8 = efficiency[cores.index(8)]
  blue = {'ms': 4, 'color': '#1f5fa8', 'label': 'predicted'}
  figure, (upper, lower) = pyplot.subplots(2, figsize=(6.4, 7.2), dpi=110)
  upper.plot(cores, rates, '-o', **blue)
  upper.plot(cores, linear, ':', color='#5a5a5a', label='linear')
  lower.plot(cores, efficiency, '-o', **blue)
  for (name, points), mark in zip(PUBLISHED.items(), 'sD^'):
    style = {'color': '#c44e00', 'mfc': 'none', 'ls': '', 'marker': mark}
    upper.plot(*zip(*points.items()), label=name, **style)
    relative = {n: at_8 * x / points[8] * 8 / n for n, x in points.items()}
    if len(points) > 1:
      label = f'{name}, scaled to match at 8 cores'
      lower.plot(*zip(*relative.items()), label=label, **style)
  upper.set(yscale='log', ylabel='steps or frames per second')
  upper.yaxis.set_major_formatter(EngFormatter(sep=''))
  upper.set_title(title, fontsize=10)
  lower.set(ylim=(0, 1.1), ylabel='efficiency')
  lower.yaxis.set_major_formatter(PercentFormatter(1.0))
  for axes in (upper, lower):
    axes.set_xscale('log', base=2)
    axes.set_xticks(cores, cores, fontsize=8)
    axes.set_xlabel('cores')
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  figure.savefig(path)
  pyplot.close(figure)


def _act(
  overrides: Sequence[str], paths: list[str], values: flags.FlagValues
) -> None:
  """Measures the experiment, and prints and draws the prediction."""
  example = 'scaling experiments/anakin_breakout.py'
  path = tools.single_path(paths, 'experiment', example)
  check_choice('--chip', values.chip, ('local', *CHIPS))
  config = tools.read_config(path, overrides, values)
  check(config)
  tools.make_directory(values.out)
  jax.config.update('jax_platforms', 'cpu')
  console = Console(highlight=False, markup=False)
  act, learn = read_work(config)
  console.print('measuring this machine for about a minute', style='dim')
  local = measure_chip(values.repeats)
  times = measure_updates(config, values.repeats)
  chip = CHIPS.get(values.chip, local)
  if config.network.dtype == 'float32' and chip is not local:
    chip = chip._replace(peak=chip.peak / chip.float32_passes)
  overlaps = bool(times.stages) and config.sebulba.max_lag > 0
  base = single(times, act, learn, local, chip, overlaps)
  num_envs = config.env.num_envs
  rows = predict(base, learn, chip, config.unroll_length * num_envs)
  console.print(
    f'an update: {(act.flops + learn.flops) / 1e9:.3g} GFLOP, '
    f'{(act.num_bytes + learn.num_bytes) / 1e9:.3g} GB; '
    f'{learn.num_all_reduces} all-reduces of {learn.all_reduce_bytes:,} bytes\n'
    f'a core here: {local.peak / 1e9:.3g} GFLOP/s, '
    f'{local.memory_bandwidth / 1e9:.3g} GB/s\nan update here: '
    f'{np.median(times.alone):.4g} s; beside a busy core '
    f'{np.median(times.busy):.4g} s\nan all-reduce of two processes here: '
    f'{2e6 * local.hop_seconds:.0f} us + bytes / '
    f'{local.link_bandwidth / 1e9:.3g} GB/s'
  )
  task = f'{config.env.name}, {config.agent.name}'
  title = f'{task}, {num_envs} environments per core, {values.chip}'
  console.print(table(rows, title))
  console.print(verdict(rows))
  path = os.path.join(values.out, 'scaling.png')
  draw(rows, title, path)
  console.print(f'drawn: {path}', soft_wrap=True)


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = flags.FlagValues()
  text = f'the chip: {", ".join(("local", *CHIPS))}.'
  flags.DEFINE_string('chip', 'local', text, flag_values=values)
  text = 'directory for scaling.png.'
  flags.DEFINE_string('out', '.', text, flag_values=values)
  text = 'number of repeats of each measurement.'
  flags.DEFINE_integer('repeats', 3, text, 1, flag_values=values)
  return tools.run_experiment_command(argv, __doc__, values, _act)


if __name__ == '__main__':  # `start` runs this file.
  probe(*sys.argv[1:])
