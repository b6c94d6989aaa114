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
from typing import Any

from absl import flags
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.drivers import spmd
from podrl.envs import find_task
from podrl.fields import Fields
from podrl.messages import check_choice, format_size, three_digits
from podrl.records import workdir
from podrl.records.terminal import compact
from podrl.run import build, defaults, lowering
from podrl.run.command_line import parse_command_line
from podrl.run.config import check
from podrl.run.devices import Machine
from podrl.run.lowering import Chip, Program, Target
from podrl.tools import experiments, hlo
from podrl.tools.hlo import Collective, Costly, analyse

_COLORS = '#4c9a5f #1f5fa8 #e0a030 #c44e00 #9a9a9a #7b4ea3'.split()


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
  kernels: dict[str, float]  # By part; empty on TPUs.


@dataclasses.dataclass(frozen=True)
class CompiledRun:
  """A run that was compiled for a target."""

  target: str
  num_devices: int
  num_envs: int
  programs: dict[str, Analysis]
  num_steps: int  # Environment steps of an update, reset steps included.
  num_params: int
  overlaps: bool  # Whether the programs run at the same time.
  warnings: Sequence[str]
  num_acting_steps: int  # Of an environment, in an update.
  num_sgd_steps: int  # Optimiser steps of an update.

  def kernels_per_step(self, program: str) -> dict[str, float]:
    """Kernels that a GPU starts in a step of a program, by kind of step."""
    parts = self.programs[program].kernels
    acting = parts.get('acting', 0.0) + parts.get('environment', 0.0)
    found = {
      'acting step': acting / self.num_acting_steps,
      'optimiser step': parts.get('update', 0.0) / self.num_sgd_steps,
    }
    return {name: x for name, x in found.items() if x}

  @property
  def seconds(self) -> float:
    """Seconds of an update, without Sebulba's environments."""
    times = [sum(x.seconds.values()) for x in self.programs.values()]
    return max(times) if self.overlaps else sum(times)

  @property
  def steps_per_second(self) -> float:
    """Environment steps per second of the whole target."""
    return self.num_steps / self.seconds


class TooLarge(ValueError):
  """A program does not fit into the memory of a target.

  The arguments are the bytes that one device needs, and the bytes that it has.
  The first number is infinite if it is unknown.
  """


def compile_program(
  program: Program, chip: Chip, options: dict[str, str | bool] | None = None
) -> tuple[dict[str, int], str]:
  """Compiles a program; returns its bytes on one device, by kind, and its text.

  `options` are those of XLA. It raises `TooLarge` if the program does not fit.
  """
  limit = chip.memory * 2**30
  try:
    compiled: Any = program.lowered.compile(options)
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
) -> tuple[CompiledRun, dict[str, str]]:
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
) -> tuple[CompiledRun, dict[str, str]]:
  """Compiles like `compile_for`; raises `TooLarge` if the run does not fit."""
  lowered = lowering.lower(config, machine)
  # XLA cannot measure kernels of a GPU that is not here.
  options = build.GPU_DETERMINISTIC if target.platform == 'cuda' else None
  analyses, texts = {}, {}
  for name, program in lowered.programs.items():
    start = time.perf_counter()
    memory, texts[name] = compile_program(program, target.chip, options)
    seconds = time.perf_counter() - start
    default = 'acting' if name == 'act' else hlo.REST
    found = analyse(texts[name], program, target, default)
    analyses[name] = Analysis(program.num_devices, seconds, memory, *found)
  num_devices, num_envs = len(machine.devices), config['env.num_envs']
  return CompiledRun(
    target.name,
    num_devices,
    num_envs,
    analyses,
    *lowered[1:],
    config['unroll_length'],
    build.sgd_steps_per_update(config),
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


def lines(report: CompiledRun, target: Target) -> Iterator[str]:
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
    found = report.kernels_per_step(name)
    if counts := [f'{v:.1f} per {k}' for k, v in found.items()]:
      yield f'  kernels: {", ".join(counts)}'
  rate = report.steps_per_second
  yield (
    f'{compact(rate)} steps/s: {report.num_devices:,} {device}s x '
    f'{compact(rate / report.num_devices)}'
  )


def slowest_table(report: CompiledRun) -> Table:
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


def draw(reports: Sequence[CompiledRun], title: str, path: str) -> None:
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
    for part, color in zip(hlo.ROWS, _COLORS):
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
) -> tuple[Fields, CompiledRun, dict[str, str]]:
  """Compiles a run for a target; `arguments` are those of a training command.

  If `scale` is true, each device has config.env.num_envs environments. If
  `num_members` is above 1, the run is a program of a sweep. Hints may name the
  flags `own`. The function returns the configuration, and the results of
  `compile_for`.
  """
  argv = ['podrl compile', *arguments]
  command_line = parse_command_line(argv, has_task=True, own=own)
  name = command_line.task
  # The configuration may depend on the platform.
  with spmd.compiling_for(target.platform):
    if name.endswith('.py') or not name:
      config = experiments.read_config(command_line)
    else:
      check_choice('variant', command_line.flags.variant, ('',))
      task, agent = find_task(name), command_line.flags.agent
      config = defaults.base(task, agent)
      config, _ = command_line.apply(config, is_complete=False)
      spec, chosen = build.make_spec(config), command_line.fields()
      config, _ = defaults.specialise(config, spec, chosen)
      config, _ = command_line.apply(config)  # Other parts may lack a field.
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
  all_targets = [lowering.parse_target(x) for x in values.target]
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
