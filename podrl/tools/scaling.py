"""The `podrl scaling` command: an experiment's speed on 1 to 2,048 cores.

  podrl scaling EXPERIMENT|NAME [FLAGS] [--chip=v5e] [--out=DIR]

Each core (a device of JAX) has config.env.num_envs environments. The command
compiles the experiment as podrl compile does, for the smallest, a middle and
the largest number n of cores, and interpolates the time for all other numbers.

  update(n) = time of the compiled program
      + number of all-reduces x time of one all-reduce

The time of an all-reduce over n cores depends on the links of the chip: it is
2 (n - 1) / n x bytes / bandwidth + hops x latency. If n is larger than a pod,
the cores are in several pods. The estimate excludes Sebulba's environments,
which run on the host.
"""

from collections.abc import Sequence
import os
from typing import Any, NamedTuple

from absl import flags
import numpy as np
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.messages import check_choice
from podrl.records.terminal import compact
from podrl.run import lowering
from podrl.run.lowering import CHIPS, Target, all_reduce_seconds
from podrl.tools.compile import (
  CompiledRun,
  compile_command,
  format_seconds,
  set_up_process,
)
from podrl.tools.hlo import REDUCE

CORES = tuple(2**i for i in range(12))

# Published steps or frames per second, by number of cores. Hessel et al. 2021,
# arXiv:2104.06272, has Anakin and Sebulba. InstaDeep used TPU v4-8 to v4-128.
PUBLISHED = {
  'Anakin': {8: 5e6},
  'Sebulba': {8: 0.2e6, 2048: 43e6},
  'InstaDeep': {8: 0.31e6, 16: 0.60e6, 32: 1.22e6, 64: 2.41e6, 128: 4.79e6},
}


class Row(NamedTuple):
  """An update on n cores, in seconds."""

  num_cores: int
  seconds: float
  all_reduce: float  # Time in the all-reduces of all optimiser steps.
  steps_per_second: float  # Environment steps of all cores.
  efficiency: float  # Steps per second and core, relative to the first row.
  is_compiled: bool  # Otherwise, the row is interpolated.


def find_target(kind: str, num_cores: int) -> Target | None:
  """Returns the target with this number of cores; None if there is none."""
  chip = CHIPS[kind]
  sizes = lowering.sizes(chip)
  size = num_cores * chip.size_of_chip // chip.devices_of_chip
  slices = max(1, size // sizes[-1])
  if size // slices not in sizes:
    return None
  name = f'{kind}{"-" if chip.clock else ":"}{size // slices}'
  return lowering.parse_target(name if slices == 1 else f'{slices}x{name}')


def predict(
  reports: dict[int, CompiledRun], all_targets: dict[int, Target]
) -> list[Row]:
  """Makes a row for each target, from the reports of some of them."""
  sizes = sorted(reports)
  rows: list[Row] = []
  for n, target in all_targets.items():
    # With Sebulba, a single core acts and learns in turn, unlike several cores.
    like = reports[min((x for x in sizes if x >= n), default=sizes[-1])]
    times, all_reduce = [], 0.0
    for name, program in like.programs.items():
      # A core that acts and learns splits the update into other programs.
      alike = [size for size in sizes if name in reports[size].programs]
      analyses = [reports[size].programs[name] for size in alike]
      own = [sum(x.seconds.values()) - x.seconds[REDUCE] for x in analyses]
      devices = n * program.num_devices // like.num_devices
      reducing = sum(
        x.times * all_reduce_seconds(x.num_bytes, devices, target.chip)
        for x in analyses[-1].collectives
      )
      now = float(np.interp(np.log2(n), np.log2(alike), own))
      times.append(now + reducing)
      all_reduce += reducing
    seconds = max(times) if like.overlaps else sum(times)
    rate = like.num_steps * n / like.num_devices / seconds
    best = rows[0].steps_per_second / rows[0].num_cores if rows else rate / n
    rows.append(
      Row(n, seconds, all_reduce, rate, rate / n / best, n in reports)
    )
  return rows


def table(rows: Sequence[Row], title: str) -> Table:
  """Makes a table of predictions and published rates."""
  result = tools.make_table(
    *('cores', 'update', 'all-reduce', 'steps/s', 'efficiency', *PUBLISHED),
    title=title,
    caption='* compiled; the other rows are interpolated',
  )
  for row in rows:
    n = row.num_cores
    result.add_row(
      f'{n:,}{"*" if row.is_compiled else " "}',
      format_seconds(row.seconds),
      format_seconds(row.all_reduce),
      compact(row.steps_per_second),
      f'{row.efficiency:.1%}',
      *(compact(x[n]) if n in x else '' for x in PUBLISHED.values()),
    )
  return result


def draw(rows: Sequence[Row], title: str, path: str) -> None:
  """Draws rates and efficiency as a PNG file."""
  from matplotlib.ticker import EngFormatter, PercentFormatter

  cores = [row.num_cores for row in rows]
  rates = [row.steps_per_second for row in rows]
  linear = [rates[0] * n / cores[0] for n in cores]
  compiled = [i for i, row in enumerate(rows) if row.is_compiled]
  blue: dict[str, Any] = {'color': '#1f5fa8', 'markevery': compiled, 'ms': 5}
  orange = {'color': '#c44e00', 'mfc': 'none', 'ls': ''}
  with tools.figure(path, 6.4, 7.2) as figure:
    upper, lower = figure.subplots(2)
    upper.plot(cores, linear, ':', color='#5a5a5a', label='linear')
    label = 'estimated (dots: compiled)'
    upper.plot(cores, rates, '-o', **blue, label=label)
    lower.plot(cores, [row.efficiency for row in rows], '-o', **blue)
    for (name, points), mark in zip(PUBLISHED.items(), 'sD^'):
      label = f'{name}, published'
      upper.plot(*zip(*points.items()), marker=mark, label=label, **orange)
    upper.set(yscale='log', ylabel='steps or frames per second')
    upper.yaxis.set_major_formatter(EngFormatter(sep=''))
    upper.set_title(title, fontsize=10)
    upper.legend(frameon=False, fontsize=8)
    lower.set(ylim=(0, 1.1), ylabel='efficiency')
    lower.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (upper, lower):
      axes.set_xscale('log', base=2)
      axes.set_xticks(CORES, CORES, fontsize=8)
      axes.set_xlabel('cores')


def _act(arguments: list[str], values: flags.FlagValues) -> None:
  """Compiles the experiment for three sizes; prints and draws the rows."""
  check_choice('--chip', values.chip, CHIPS)
  tools.make_directory(values.out)
  console = Console(highlight=False, markup=False)
  found = {n: find_target(values.chip, n) for n in CORES}
  all_targets = {n: x for n, x in found.items() if x}
  sizes = list(all_targets)
  set_up_process([all_targets[sizes[0]]])
  reports = {}
  for n in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
    target = all_targets[n]
    console.print(f'compiling for {target.name}', style='dim')
    config, reports[n], _ = compile_command(arguments, target, own=[*values])
  rows = predict(reports, all_targets)
  task = f'{config["env.name"]}, {config["agent.name"]}'
  num_envs = config['env.num_envs'] // sizes[-1]
  title = f'{task}, {num_envs} environments per core, {values.chip}'
  console.print(table(rows, title))
  path = os.path.join(values.out, 'scaling.png')
  draw(rows, title, path)
  console.print(f'drawn: {path}', soft_wrap=True)


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = flags.FlagValues()
  text = f'the chip: {", ".join(CHIPS)}.'
  flags.DEFINE_string('chip', 'v5e', text, flag_values=values)
  text = 'directory for scaling.png.'
  flags.DEFINE_string('out', '.', text, flag_values=values)
  return tools.run_command(argv, __doc__, values, _act, known_only=True)
