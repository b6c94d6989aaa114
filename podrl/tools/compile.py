"""The `podrl compile` command: compiles a run for other machines.

  podrl compile EXPERIMENT|NAME [FLAGS] --target=v5e-16[,v4-8 ...] [--scale]
      [--members=N] [--out=DIR]

EXPERIMENT is a file such as experiments/anakin_breakout.py, and NAME is an
environment as for podrl train. FLAGS are those of the run, such as --agent. The
names of the targets are those of Google Cloud, such as v2-8, v3-2048, v4-8,
v5e-256, v5p-8, v6e-8 or tpu7x-8. 2xv5e-256 means two slices, and h100:8 means
eight GPUs. --scale multiplies config.env.num_envs by the number of devices of
the target. --members compiles the program of a sweep with N members; each has
config.env.num_envs environments. A core is a device of JAX.

The command prints the memory that the run needs on each core, the collectives
of the run, and an estimate of the time of one update. For TPUs, the estimate is
the sum of the cycles that the compiler estimates for each instruction. For
GPUs, the compiler estimates nothing, so the command uses a roofline: the time
of an instruction is the longest of the time for the bytes that it reads and
writes, the time for its FLOPs, and 3 us to start it. The estimate includes the
all-reduces; podrl scaling --help has their formula. It excludes Sebulba's
environments, which run on the host.
"""

from collections.abc import Collection, Iterator, Sequence
import dataclasses
import math
import os
import re
import signal
import time
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.core.learner import CALIBRATE
from podrl.drivers import spmd
from podrl.envs import find_task
from podrl.fields import Fields
from podrl.messages import check_choice, format_size, three_digits
from podrl.records import workdir
from podrl.records.terminal import compact
from podrl.run import build, defaults, lowering
from podrl.run.command_line import apply_overrides, parse_command_line
from podrl.run.config import check
from podrl.run.devices import Machine
from podrl.run.lowering import Chip, Program, Target, all_reduce_seconds
from podrl.tools import experiments

# Scopes of the programs, then all other instructions.
PARTS = ('environment', 'acting', 'prepare', 'update')
_REST, REDUCE = 'rest', 'all-reduce'
_ROWS = (*PARTS, _REST, REDUCE)
_COLORS = '#4c9a5f #1f5fa8 #e0a030 #c44e00 #9a9a9a #7b4ea3'.split()
_COLLECTIVES = (
  'all-reduce',
  'all-gather',
  'all-to-all',
  'reduce-scatter',
  'collective-permute',
  'collective-broadcast',
)


def _find(pattern: str, text: str) -> str:
  """Returns the first group of the first match, or ''."""
  found = re.search(pattern, text)
  return found[1] if found else ''


class Instruction(NamedTuple):
  """An instruction of a compiled program."""

  name: str
  shape: str  # Type of its result, for example f32[8,128]{1,0:T(8,128)}.
  kind: str  # For example fusion or while.
  text: str  # Operands and attributes.

  def called(self, *attributes: str) -> list[str]:
    """Returns the computations that these attributes name, such as `calls`."""
    pattern = rf'\b(?:{"|".join(attributes)})=(\{{.*?\}}|[^,]*)'
    names = ' '.join(re.findall(pattern, self.text))
    return re.findall(r'[\w.-]+', names)


# The computations of a compiled program by name; the first to run is _ENTRY.
Module = dict[str, list[Instruction]]
_ENTRY = 'ENTRY'


def parse(text: str) -> Module:
  """Parses the text of a compiled program."""
  module: Module = {}
  body: list[Instruction] = []
  for line in text.splitlines():
    if header := re.match(r'(ENTRY )?%?([\w.-]+) \(.*\{$', line):
      body = module[_ENTRY if header[1] else header[2]] = []
    elif found := re.match(
      r'\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)', line
    ):
      body.append(Instruction(*found.groups()))
  return module


def _arrays(shape: str) -> list[tuple[str, int]]:
  """Returns the type and the number of elements of each array in a shape."""
  return [
    (kind, math.prod(int(x) for x in dims.split(',') if x))
    for kind, dims in re.findall(r'\b([a-z]+\d*)\[([\d,]*)\]', shape)
  ]


def num_bytes(shape: str) -> int:
  """Returns the bytes of an array, or of a tuple of arrays, without padding."""
  total = 0
  for kind, size in _arrays(shape):  # Of types such as f32 or pred.
    bits = 8 if kind == 'pred' else int(re.sub(r'\D', '', kind) or 0)
    total += size * bits // 8
  return total


def num_trips(loop: Instruction, module: Module, default: int) -> int:
  """Returns how often a loop runs, or `default` if that is not a constant."""
  if known := _find(r'known_trip_count.{,5}n.{,5}?(\d+)', loop.text):
    return int(known)
  names, found = loop.called('condition'), []
  for name in names:
    for instruction in module[name]:
      names += instruction.called('calls')
      if instruction.kind == 'constant' and 's32[]' in instruction.shape:
        found.append(int(instruction.text.split(')')[0]))
  return max(found, default=default)


def part_of(instruction: Instruction) -> str:
  """Returns the innermost of `PARTS` in an instruction's name, or ''."""
  # A transformation makes names such as vmap(acting); jit(update) is a program.
  words = [
    x.rstrip(')').split('(')[-1]
    for x in _find(r'op_name="([^"]*)"', instruction.text).split('/')
    if not x.startswith('jit(')
  ]
  return next((x for x in reversed(words) if x in PARTS), '')


def sources(text: str) -> dict[str, str]:
  """Returns FILE:LINE of each stack frame, from the tables before a program."""

  def section(name: str, pattern: str) -> dict[str, tuple[str, ...]]:
    table = text.partition(f'\n{name}\n')[2].partition('\n\n')[0]
    return {
      x: rest for x, *rest in re.findall(rf'^(\d+) {pattern}', table, re.M)
    }

  files = section('FileNames', '"(.*)"')
  locations = section('FileLocations', r'.*file_name_id=(\d+).*\bline=(\d+)')
  frames = section('StackFrames', r'.*file_location_id=(\d+)()')
  found = {}
  for frame, (location, _) in frames.items():
    file, line = locations.get(location, ('', ''))
    path = ''.join(files.get(file, ''))
    path = re.sub(r'.*/(?=podrl/)|.*/site-packages/', '', path)
    found[frame] = f'{path}:{line}'
  return found


class Run(NamedTuple):
  """An instruction, how often one call of the program runs it, and its part."""

  instruction: Instruction
  computation: str
  times: int
  part: str

  @property
  def cycles(self) -> int:
    """The compiler's estimate for all `times` together."""
    found = _find(r'"estimated_cycles":"(\d+)"', self.instruction.text)
    return self.times * int(found or 0)


def walk(
  module: Module,
  num_updates: int = 1,
  computation: str = _ENTRY,
  times: int = 1,
  part: str = _REST,
) -> Iterator[Run]:
  """Yields the instructions that run.

  Only the longest branch of a conditional counts, or the shortest one if the
  longest runs only in the first update. If the number of iterations of a loop
  is not a constant, the loop counts once. But the outermost loop is Anakin's
  loop over updates, and counts `num_updates` times.
  """
  for instruction in module[computation]:
    own = part_of(instruction) or part
    yield Run(instruction, computation, times, own)
    if instruction.kind == 'while':
      trips = times * num_trips(instruction, module, num_updates)
      for name in instruction.called('condition', 'body'):
        yield from walk(module, 1, name, trips, own)
    elif instruction.kind == 'conditional':
      names = instruction.called(
        'branch_computations', 'true_computation', 'false_computation'
      )
      branches = [list(walk(module, 1, name, times, own)) for name in names]
      choose = min if f'/{CALIBRATE}/' in instruction.text else max
      yield from choose(branches, key=lambda runs: sum(x.cycles for x in runs))
    elif instruction.kind in ('call', 'async-start'):
      for name in instruction.called('to_apply', 'calls'):
        yield from walk(module, num_updates, name, times, own)


def _operands(instruction: Instruction, body: list[Instruction]) -> list[str]:
  """Returns the shapes of an instruction's operands; `body` contains it."""
  shapes = {x.name: x.shape for x in body}
  names = re.findall(r'%([\w.-]+)', instruction.text.split('), ')[0])
  return [shapes.get(name, '') for name in names]


_FREE = (
  'parameter constant tuple get-tuple-element bitcast while conditional call '
  'after-all iota partition-id replica-id'
).split()
_START_SECONDS = 3e-6  # A GPU needs about this time to start a kernel.


def roofline_seconds(run: Run, module: Module, chip: Chip) -> float:
  """Estimates an instruction's time on a GPU, from its bytes and its FLOPs.

  A product of matrices `[M, K]` and `[K, N]` has 2 M K N FLOPs. This is twice
  the square root of (M K) (K N) (M N), where each factor is the number of
  elements of one matrix. For a convolution, the root has one more factor: the
  number of elements of the convolution's window.
  """
  instruction = run.instruction
  if instruction.kind in _FREE or instruction.kind.startswith(_COLLECTIVES):
    return 0.0
  body = module[run.computation]
  read = sum(map(num_bytes, _operands(instruction, body)))
  seconds = (read + num_bytes(instruction.shape)) / chip.memory_bandwidth / 1e9
  inside = [(instruction, body)]
  for name in instruction.called('calls'):
    inside += [(x, module[name]) for x in module.get(name, ())]
  flops = 0.0
  for x, body in inside:
    if x.kind in ('dot', 'convolution') or '="__cu' in x.text:  # Or a library.
      shapes = [x.shape, *_operands(x, body)[:2]]
      sizes = [_arrays(shape)[0][1] for shape in shapes if _arrays(shape)]
      window = _find(r'window=\{size=([\dx]+)', x.text)
      sizes += map(int, window.split('x')) if window else []
      flops += 2 * math.sqrt(math.prod(sizes))
  # JAX multiplies float32 as TF32, at half the rate of bfloat16.
  is_float32 = 'f32[' in instruction.shape
  seconds = max(seconds, flops * (1 + is_float32) / chip.peak / 1e12)
  return run.times * max(seconds, _START_SECONDS)


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective, and how often it runs in an update."""

  kind: str
  num_bytes: int
  times: float


@dataclasses.dataclass(frozen=True)
class Costly:
  """An instruction that takes much of the time of an update."""

  share: float
  cycles: float  # 0 on GPUs.
  part: str
  kind: str
  shape: str
  source: str  # FILE:LINE, or empty.


@dataclasses.dataclass(frozen=True)
class Analysis:
  """The memory and the time that one device needs for a program per update."""

  num_devices: int
  compile_seconds: float
  memory: dict[str, int]  # Bytes by kind; 'total' is the sum.
  collectives: list[Collective]
  cycles: int  # Without collectives; 0 on GPUs.
  seconds: dict[str, float]  # By part; the all-reduces are a part.
  slowest: list[Costly]


@dataclasses.dataclass(frozen=True)
class Report:
  """A run that was compiled for a target."""

  target: str
  num_devices: int
  num_envs: int
  programs: dict[str, Analysis]
  num_steps: int  # Environment steps of an update, reset steps included.
  num_params: int
  overlaps: bool  # Whether the programs run at the same time.
  warnings: Sequence[str]

  @property
  def seconds(self) -> float:
    """Seconds of an update, without Sebulba's environments."""
    times = [sum(x.seconds.values()) for x in self.programs.values()]
    return max(times) if self.overlaps else sum(times)

  @property
  def steps_per_second(self) -> float:
    """Environment steps per second of the whole target."""
    return self.num_steps / self.seconds


def analyse(
  text: str, program: Program, target: Target, default: str = _REST
) -> tuple[list[Collective], int, dict[str, float], list[Costly]]:
  """Returns the collectives, cycles, seconds by part and slowest instructions.

  `default` is the part of instructions without a scope.
  """
  module, chip = parse(text), target.chip
  lines_of = sources(text)
  collectives, rows, cycles = [], [], 0
  seconds = dict.fromkeys(_ROWS, 0.0)

  def per_update(value: float) -> float:
    return value * program.calls / program.num_updates

  for run in walk(module, program.num_updates, part=default):
    kind = run.instruction.kind.removesuffix('-start')
    if kind in _COLLECTIVES:
      size, times = num_bytes(run.instruction.shape), per_update(run.times)
      collectives.append(Collective(kind, size, times))
      one = all_reduce_seconds(size, program.num_devices, chip)
      seconds[REDUCE] += times * one
      continue
    if chip.clock:
      cycles += run.cycles
      spent = per_update(run.cycles) / chip.clock / 1e9
    else:
      spent = per_update(roofline_seconds(run, module, chip))
    seconds[run.part] += spent
    rows.append((spent, run))
  total = sum(spent for spent, _ in rows) or 1.0
  rows.sort(key=lambda row: -row[0])
  slowest = [
    Costly(
      spent / total,
      per_update(x.cycles),
      x.part,
      x.instruction.kind,
      x.instruction.shape.split('{')[0].lstrip('('),
      lines_of.get(_find(r'stack_frame_id=(\d+)', x.instruction.text), ''),
    )
    for spent, x in rows[:10]
  ]
  return collectives, round(per_update(cycles)), seconds, slowest


class TooLarge(ValueError):
  """A program does not fit into the memory of a target.

  The arguments are the bytes that one device needs, and the bytes that it has.
  The first number is infinite if it is unknown.
  """


def compile_program(program: Program, chip: Chip) -> tuple[dict[str, int], str]:
  """Compiles a program; returns its bytes on one device, by kind, and its text.

  Raises `TooLarge` if the program does not fit.
  """
  limit = chip.memory * 2**30
  try:
    compiled: Any = program.lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    # It says for example: (65.04G) exceeds available HBM (15.75G).
    sizes = [
      float(number) * 1024 ** (1 + 'KMGT'.index(unit))
      for number, unit in re.findall(r'([\d.]+)([KMGT])\b', str(error))[:2]
    ]
    raise TooLarge(
      *(sizes if len(sizes) == 2 else (math.inf, limit))
    ) from error
  x = compiled.memory_analysis()
  memory = {
    'arguments': x.argument_size_in_bytes,
    'results': x.output_size_in_bytes - x.alias_size_in_bytes,
    'temporaries': x.temp_size_in_bytes,
    'code': x.generated_code_size_in_bytes,
  }
  memory['total'] = sum(memory.values())
  if memory['total'] > limit:
    raise TooLarge(memory['total'], limit)
  return memory, compiled.as_text()


def compile_for(
  config: Fields,
  target: Target,
  machine: Machine | None = None,
  factor: int = 1,
) -> tuple[Report, dict[str, str]]:
  """Compiles a run for a target; call this inside `spmd.compiling_for`.

  `config.env.num_envs` is `factor` times the number that the user gave.

  Returns:
    The report, and the text of each compiled program by name.

  Raises:
    ValueError: for a user's mistake, or if the run needs too much memory.
  """
  machine = machine or lowering.make_machine(target)
  try:
    return compile_once(config, target, machine)
  except TooLarge as error:
    needed, limit = error.args
    fits = _largest(config, target, machine, needed / limit)
    needs = format_size(needed) if needed < math.inf else 'more'
    raise ValueError(
      f'config.env.num_envs={config["env.num_envs"] // factor} does not fit on '
      f'{target.name}: a core has {format_size(limit)} but needs {needs}; '
      + (f'{fits // factor} fits' if fits else 'no smaller number fits')
    ) from error


def compile_once(
  config: Fields, target: Target, machine: Machine
) -> tuple[Report, dict[str, str]]:
  """Compiles like `compile_for`; raises `TooLarge` if the run does not fit."""
  lowered = lowering.lower(config, machine)
  analyses, texts = {}, {}
  for name, program in lowered.programs.items():
    start = time.perf_counter()
    memory, texts[name] = compile_program(program, target.chip)
    seconds = time.perf_counter() - start
    default = 'acting' if name == 'act' else _REST
    found = analyse(texts[name], program, target, default)
    analyses[name] = Analysis(program.num_devices, seconds, memory, *found)
  num_devices, num_envs = len(machine.devices), config['env.num_envs']
  return Report(
    target.name, num_devices, num_envs, analyses, *lowered[1:]
  ), texts


def _largest(
  config: Fields, target: Target, machine: Machine, share: float
) -> int:
  """Returns a large number of environments that fits, or 0 if none is found.

  It halves the configured number until the run fits, and then tries 15/8 to 9/8
  of the result. `share` is the memory that a device needs for the configured
  number, divided by the memory that it has, or infinity if the need is unknown.
  """

  def try_number(num_envs: int) -> float:
    """Compiles the run with `num_envs`; returns the new value of `share`."""
    own = {**config, 'env.num_envs': num_envs}
    try:
      report, _ = compile_once(own, target, machine)
    except TooLarge as error:
      needed, limit = error.args
      return needed / limit
    used = max(x.memory['total'] for x in report.programs.values())
    return used / (target.chip.memory * 2**30)

  num_envs = config['env.num_envs']
  try:
    while share > 1:
      if num_envs % 2:
        return 0
      num_envs //= 2
      # Memory grows almost linearly with the environments.
      share = share / 2 if 2 < share < math.inf else try_number(num_envs)
  except ValueError:  # Fewer environments do not divide over the devices.
    return 0
  for eighths in range(min(15, int(8 / share)), 8, -1):
    try:
      if try_number(num_envs * eighths // 8) <= 1:
        return num_envs * eighths // 8
    except ValueError:
      continue
  return num_envs


def format_seconds(value: float) -> str:
  """Formats a number of seconds, for example as 1.5 ms."""
  for unit, size in (('s', 1.0), ('ms', 1e-3)):
    if value >= 0.9995 * size:
      return f'{three_digits(value / size)} {unit}'
  return f'{value * 1e6:.3g} us'


def lines(report: Report, target: Target) -> Iterator[str]:
  """Describes a report in lines of at most 80 characters."""
  device = 'core' if target.chip.clock else 'GPU'
  for name, x in report.programs.items():
    yield (
      f'{name}: compiled in {x.compile_seconds:.0f} s for {x.num_devices} '
      f'{device}s'
    )
    total, limit = x.memory['total'], target.chip.memory
    yield f'  memory per {device}: {format_size(total)} of {limit:g} GiB'
    kinds = [f'{k} {format_size(v)}' for k, v in x.memory.items() if v]
    yield f'    {", ".join(kinds[:-1])}'
    for one in x.collectives:
      yield f'  {one.times:,.0f} x {one.kind} of {one.num_bytes:,} bytes'
    seconds = sum(x.seconds.values())
    cycles = f'{compact(x.cycles)} cycles, ' if x.cycles else ''
    yield f'  an update: {cycles}{format_seconds(seconds)}'
    parts = [f'{k} {v / seconds:.0%}' for k, v in x.seconds.items() if v]
    yield f'    {", ".join(parts)}'
  rate = report.steps_per_second
  yield (
    f'{compact(rate)} steps/s: {report.num_devices:,} {device}s x '
    f'{compact(rate / report.num_devices)}'
  )


def slowest_table(report: Report) -> Table:
  """Makes a table of the ten instructions that take the most time."""
  columns = ('part', 'instruction', 'line')
  table = tools.make_table('share', *columns, left=columns)
  for x in report.programs.values():
    for row in x.slowest[: 10 // len(report.programs)]:
      text = f'{row.kind} {row.shape}'
      source = row.source
      while len(source) > 33 and '/' in source:
        source = source.partition('/')[2]
      table.add_row(f'{row.share:.1%}', row.part, text[:28], source)
  return table


def draw(reports: Sequence[Report], title: str, path: str) -> None:
  """Draws the time of an update by part, a bar for each program and target."""
  from matplotlib.ticker import EngFormatter

  bars = {
    f'{x.target}\n{name}': program.seconds
    for x in reports
    for name, program in x.programs.items()
  }
  places, bottom = range(len(bars)), np.zeros(len(bars))
  with tools.figure(path, max(4.8, 1.2 + 0.9 * len(bars)), 4.2) as figure:
    axes = figure.subplots()
    for part, color in zip(_ROWS, _COLORS):
      heights = np.asarray([seconds[part] for seconds in bars.values()])
      if heights.any():
        axes.bar(places, heights, 0.6, bottom, color=color, label=part)
        bottom += heights
    axes.set_xticks(places, list(bars), fontsize=8)
    axes.set_ylabel('time of an update')
    axes.yaxis.set_major_formatter(EngFormatter('s'))
    figure.suptitle(title, fontsize=10)
    place = 'outside lower center'
    figure.legend(loc=place, ncols=6, frameon=False, fontsize=8)


def compile_command(
  arguments: Sequence[str],
  target: Target,
  scale: bool = True,
  num_members: int = 0,
  own: Collection[str] = (),
) -> tuple[Fields, Report, dict[str, str]]:
  """Compiles a run for a target; `arguments` are those of a training command.

  If `scale` is true, each device has config.env.num_envs environments. If
  `num_members` is above 1, the run is a program of a sweep. Hints may name the
  flags `own`. The function returns the configuration, and the results of
  `compile_for`.
  """
  argv = ['podrl compile', *arguments]
  command_line = parse_command_line(argv, has_task=True, own=own)
  name, overrides = command_line.task, command_line.overrides
  # The configuration may depend on the platform.
  with spmd.compiling_for(target.platform):
    if name.endswith('.py') or not name:
      config = experiments.read_config(command_line)
    else:
      check_choice('variant', command_line.flags.variant, ('',))
      task, agent = find_task(name), command_line.flags.agent
      config = defaults.base(task, agent)
      config, _ = apply_overrides(config, overrides, is_complete=False)
      spec, chosen = build.make_spec(config), command_line.fields()
      config, _ = defaults.specialise(config, spec, chosen)
      # Other parts may lack a field.
      config, _ = apply_overrides(config, overrides)
    factor = target.num_devices if scale else 1
    config['env.num_envs'] *= factor
    if num_members > 1:
      if 'sebulba.mode' in config:
        raise ValueError('--members does not work with Sebulba')
      config['members'] = tuple({'seed': i} for i in range(num_members))
    check(config)
    return config, *compile_for(config, target, factor=factor)


def set_up_process(all_targets: Sequence[Target]) -> None:
  """Loads the compilers of the targets; the process itself uses only a CPU."""
  jax.config.update('jax_platforms', 'cpu')
  for target in all_targets:
    lowering.make_machine(target)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libtpu would print a stack.


def _act(arguments: list[str], values: flags.FlagValues) -> None:
  """Compiles for each target; prints, writes and draws the reports."""
  if not values.target:
    raise ValueError('--target is empty; try --target=v5e-16')
  all_targets = [lowering.parse(x) for x in values.target]
  set_up_process(all_targets)
  console = Console(highlight=False, markup=False)
  if values.out:
    tools.make_directory(values.out)
  reports, task, path = [], '', ''
  for target in all_targets:
    config, report, texts = compile_command(
      arguments, target, values.scale, values.members, [*values]
    )
    reports.append(report)
    task = f'{config["env.name"]}, {config["agent.name"]}'
    title = f'{task}, {config["env.num_envs"]:,} environments, {target.name}'
    if values.members:
      title = f'{values.members:,} members: {title}'
    console.print(title, style='bold')
    for warning in report.warnings:
      console.print(f'warning: {warning}')
    for line in lines(report, target):
      console.print(line)
    console.print(slowest_table(report))
    default = f'{workdir.task_name(config)}-{workdir.agent_name(config)}'
    out = values.out or os.path.join('runs', 'compile', default)
    tools.make_directory(out)
    path = os.path.join(out, 'compile')
    for program, text in texts.items():
      name = f'{target.name}-{program}'.replace(':', '-')
      workdir.write_text(f'{path}-{name}.txt', text)
  fields = [
    dataclasses.asdict(x)
    | {'seconds': x.seconds, 'steps_per_second': x.steps_per_second}
    for x in reports
  ]
  workdir.write_json(f'{path}.json', fields)
  draw(reports, task, f'{path}.png')
  console.print(f'written: {path}.json, {path}.png', soft_wrap=True)


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = flags.FlagValues()
  text = 'the machines, for example v5e-16,h100:8.'
  flags.DEFINE_list('target', 'v5e-16', text, flag_values=values)
  text = 'Members of a sweep; 0 compiles a run.'
  tools.define_integer('members', 0, text, 0, None, values)
  text = "multiplies config.env.num_envs by the target's number of devices."
  flags.DEFINE_bool('scale', False, text, flag_values=values)
  text = 'directory for the results; empty means runs/compile/TASK-AGENT.'
  flags.DEFINE_string('out', '', text, flag_values=values)
  return tools.run_command(argv, __doc__, values, _act, known_only=True)
