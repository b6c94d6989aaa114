"""Draws the learning curves of runs and prints their final returns.

  podrl plot RUN [RUN ...] [--x=env_steps|wall_seconds] [--y=METRIC,...]
      [--out=FILE]

RUN may be a directory that contains runs, at any depth. The command skips a run
that it cannot draw. Each task has a panel for each METRIC of `metrics.jsonl`;
the default is the return. Runs that differ only in the seed,
or in settings of evaluation and records, form one group. A group's line is the
mean of its runs, and the band is a bootstrap 95 % interval of that mean. Dots
are evaluations. FILE ends in .png or .svg. By default, FILE is curve.png in the
directory RUN, or in the directory that contains all the runs.
"""

from collections.abc import Sequence
import math
import os
import re
import sys
import textwrap
from typing import Any, NamedTuple

from absl import flags
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.messages import printable, suggest
from podrl.records import workdir
from podrl.records.merging import bootstrap
from podrl.records.terminal import compact

_AXES = {'env_steps': 'environment steps', 'wall_seconds': 'wall time (s)'}
_RETURNS = 'episode_return', 'eval_return'
_NUM_POINTS = 200  # Points of one curve.
_COLORS = ('#1f5fa8', '#c44e00', '#2f8f4e', '#8a4fbf', '#b8860b', '#5a5a5a')


class PlottedRun(NamedTuple):
  """The configuration and the records of a run."""

  config: dict[str, Any]  # Values by dotted name: `env.num_envs`.
  records: list[dict[str, Any]]  # The lines of `metrics.jsonl`, in order.

  def series(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values of two metrics, from the records that have both."""
    points = [(r[x], r[y]) for r in self.records if r.get(y) is not None]
    xs, ys = np.asarray(points, np.float64).reshape(-1, 2).T
    return xs, ys


class Group(NamedTuple):
  """Runs that differ only in the fields of `workdir.SEEDS`."""

  task: str
  label: str  # The agent, and the fields that differ from other groups.
  runs: list[PlottedRun]


def find_runs(paths: Sequence[str]) -> tuple[list[str], list[str]]:
  """Finds the runs at paths; a path is a run or a directory that contains runs.

  Returns:
    The directories of the runs, and a sentence for each path without a readable
    run. A run of several agents is replaced by their directories.
  """
  found: list[str] = []
  problems: list[str] = []
  seen: set[str] = set()
  is_agent = re.compile(r'.*/(seed|member)_\d+').fullmatch
  for path in paths:
    is_new = os.path.realpath(path) not in seen
    before = len(found) + len(problems)
    remaining = [path]  # No recursion: a tree can be very deep.
    while remaining:
      directory = remaining.pop()
      real_path = os.path.realpath(directory)  # Links may form a circle.
      if real_path in seen:
        continue
      seen.add(real_path)
      try:
        names = sorted(os.listdir(directory))
      except OSError as error:
        problems.append(f'{directory} cannot be read: {error.strerror}')
        continue
      inside = [os.path.join(directory, x) for x in names]
      if not workdir.is_run(directory):
        remaining += filter(os.path.isdir, reversed(inside))
        continue
      agents = [x for x in inside if is_agent(x) and workdir.is_run(x)]
      seen.update(map(os.path.realpath, agents))
      found += agents or [directory]
    if is_new and len(found) + len(problems) == before:
      problems.append(f'{path} is not a run and contains no run')
  return found, problems


def read_run(path: str) -> PlottedRun:
  """Reads a run, which may still be training.

  Raises a ValueError if the path is not a run, or one of its files is damaged.
  """
  config = workdir.read_config(path)
  records = workdir.read_records(path)
  if not any(r.get(y) is not None for r in records for y in _RETURNS):
    raise ValueError(f'{path} has no return yet')
  kinds = [(k, x) for r in records for k, x in r.items()]
  numbers = {*_RETURNS, *(k for k, x in kinds if isinstance(x, int | float))}
  for number, record in enumerate(records, 1):
    values = [record.get(x) for x in _AXES]
    values += [record[y] for y in numbers if record.get(y) is not None]
    if not all(isinstance(x, int | float) for x in values):
      raise ValueError(f'{path}/metrics.jsonl is damaged in line {number}')
  return PlottedRun(config, records)


def group_runs(runs: Sequence[PlottedRun]) -> list[Group]:
  """Groups runs that `workdir.compared` finds alike; keeps their order."""
  members: dict[str, list[PlottedRun]] = {}
  for run in runs:
    members.setdefault(workdir.compared(run.config), []).append(run)
  configs = [runs[0].config for runs in members.values()]
  tasks = {_task(x) for x in configs}
  groups = []
  for config, runs in zip(configs, members.values()):
    (task, suite), agent = _task(config), config['agent.name']
    alike = [x for x in configs if _task(x) == (task, suite)]
    alike = [x for x in alike if x['agent.name'] == agent]
    if sum(name == task for name, _ in tasks) > 1:
      task += f' ({suite})'
    label = [str(agent)]
    for key, value in config.items():
      # Fields that only one architecture has would fill the legend.
      is_shared = all(key in x for x in alike)
      is_shared = is_shared and not key.startswith(workdir.SEEDS)
      if is_shared and any(x[key] != value for x in alike):
        label.append(f'{key.rpartition(".")[2]}={value}')
    names = printable(task), printable(', '.join(label))
    groups.append(Group(*names, runs))
  order = list(dict.fromkeys(group.task for group in groups))
  return sorted(groups, key=lambda group: order.index(group.task))


def _task(config: dict[str, Any]) -> tuple[str, str]:
  """Returns the name and the suite of the task."""
  return str(config['env.name']), str(config.get('env.suite'))


def training_curve(
  runs: Sequence[PlottedRun], x: str, y: str = _RETURNS[0]
) -> tuple[np.ndarray, np.ndarray]:
  """Interpolates a metric of a group's runs at common points.

  Returns the points `[P]` that all runs have reached, and the values `[N, P]`.
  """
  series = [run.series(x, y) for run in runs]
  series = [s for s in series if len(s[0])]
  if not series:
    return np.zeros(0), np.zeros((0, 0))
  if len(series) == 1:
    return series[0][0], series[0][1][None]
  end = min(s[0][-1] for s in series)
  start = min(end, max(s[0][0] for s in series))
  points = np.linspace(start, end, _NUM_POINTS if start < end else 1)
  return points, np.stack([np.interp(points, *s) for s in series])


def draw(
  groups: Sequence[Group],
  x: str,
  path: str,
  metrics: Sequence[str] = _RETURNS[:1],
) -> None:
  """Draws the groups' curves into a file, a panel per task and metric."""
  import matplotlib
  from matplotlib.ticker import EngFormatter
  from matplotlib.transforms import ScaledTranslation

  matplotlib.rcParams['text.parse_math'] = False  # Names may contain a $.
  tasks = list(dict.fromkeys(group.task for group in groups))
  panels = [(task, y) for y in metrics for task in tasks]
  num_columns = 1 if len(panels) < 4 else min(4, math.ceil(len(panels) ** 0.5))
  if min(len(tasks), len(metrics)) > 1:  # A row for each metric.
    num_columns = len(tasks)
  labels = []
  for group in groups:
    number = f', mean of {len(group.runs)} runs' if len(group.runs) > 1 else ''
    labels.append(textwrap.fill(group.label + number, 85))
  num_lines = dict.fromkeys(tasks, 0)
  for group, label in zip(groups, labels):
    num_lines[group.task] += 1 + label.count('\n')
  rows = [
    panels[i : i + num_columns] for i in range(0, len(panels), num_columns)
  ]
  height = sum(3.1 + 0.17 * max(num_lines[x] for x, _ in row) for row in rows)
  with tools.figure(path, 6.4 * num_columns, height + 0.2) as figure:
    grid = figure.subplots(len(rows), num_columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
      axes.remove()
    below = ScaledTranslation(0, -0.5, figure.dpi_scale_trans)  # In inches.
    for (task, y), axes in zip(panels, grid.flat):
      members = [(g, x) for g, x in zip(groups, labels) if g.task == task]
      for i, (group, label) in enumerate(members):
        _draw_group(axes, group, x, y, label, i)
      axes.set_title(task, fontsize=10)
      axes.set(xlabel=_AXES[x], ylabel=y.replace('_', ' '), xlim=(0, None))
      axes.xaxis.set_major_formatter(EngFormatter(sep=''))
      axes.ticklabel_format(axis='y', useOffset=False)
      axes.legend(
        loc='upper left',
        bbox_to_anchor=(0, 0),
        bbox_transform=axes.transAxes + below,
        borderaxespad=0,
        frameon=False,
        fontsize=8,
      )
    is_training = any(name != _RETURNS[1] for name in metrics)
    text = f'lines: {"training" if is_training else "evaluation"}'
    if any(len(group.runs) > 1 for group in groups):
      text += '; bands: 95 % intervals of the mean'
    runs = [run for group in groups for run in group.runs]
    has_dots = any(len(run.series(x, 'eval_return')[0]) for run in runs)
    if has_dots and _RETURNS[0] in metrics:
      text += '; dots: evaluation'
    figure.supxlabel(text, fontsize=8, color='#606060')


def _draw_group(
  axes: Any, group: Group, x: str, y: str, label: str, index: int
) -> None:
  """Draws a group's curve, its interval and, for returns, its evaluations."""
  style, number = divmod(index, len(_COLORS))
  color, styles = _COLORS[number], ('-', '--', ':', '-.')
  points, returns = training_curve(group.runs, x, y)
  axes.plot(
    points,
    returns.mean(0) if len(points) else [],
    color=color,
    ls=styles[style % len(styles)],
    marker='x' if len(points) == 1 else '',
    lw=1.8,
    label=label,
  )
  if len(returns) > 1:
    band = bootstrap(returns)
    axes.fill_between(points, *band, color=color, alpha=0.2, lw=0)
  if y != _RETURNS[0]:
    return
  evaluated = np.concatenate(
    [r.series(x, 'eval_return') for r in group.runs], 1
  )
  dots = {'ms': 5, 'mec': 'white', 'clip_on': False, 'zorder': 3}
  axes.plot(*evaluated, 'o', color=color, **dots)


def table(groups: Sequence[Group]) -> Table:
  """Makes a table of the final returns of the groups.

  The final return of a run is its last evaluation. If a run of the group has no
  evaluation, the group shows the last training returns of all its runs.
  """
  rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
  rows.add_column('group', overflow='fold')
  for name in ('runs', 'return', '95 %', 'steps', 'time'):
    rows.add_column(name, justify='right', no_wrap=True)
  for task, label, runs in groups:
    finals = [run.series('env_steps', 'eval_return')[1] for run in runs]
    note = ''
    if not all(map(len, finals)):
      finals = [run.series('env_steps', 'episode_return')[1] for run in runs]
      note = ' (training)'
    values = np.asarray([y[-1] for y in finals if len(y)])
    low, high = bootstrap(values)
    last = [run.records[-1] for run in runs]
    rows.add_row(
      f'{task}, {label}{note}',
      str(len(runs)),
      f'{values.mean():.2f}',
      f'{low:.2f} to {high:.2f}' if len(values) > 1 else '',
      compact(np.mean([r['env_steps'] for r in last])),
      f'{np.mean([r["wall_seconds"] for r in last]):.0f} s',
    )
  return rows


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Reads the runs, draws their curves and prints the table."""
  if not paths:
    raise ValueError('no run is given; try podrl plot RUN')
  paths = [os.path.normpath(path) for path in paths]
  directory = tools.common_directory(paths)
  out = values.out or os.path.join(directory, 'curve.png')
  if not out.endswith(('.png', '.svg')):
    raise ValueError(f'--out={out} must end in .png or .svg')
  found, problems = find_runs(paths)
  runs = []
  for path in found:
    try:
      runs.append(read_run(path))
    except ValueError as error:
      problems.append(str(error))
  if not runs and len(problems) == 1:
    raise ValueError(problems[0])
  for problem in problems:
    print(printable(f'skipped: {problem}'), file=sys.stderr)
  if not runs:
    raise ValueError('none of these runs can be drawn')
  known = {
    name
    for run in runs
    for record in run.records
    for name, value in record.items()
    if isinstance(value, int | float)
  }
  if values['y'].present and not values.y:
    raise ValueError('--y names no metric, for example --y=episode_return')
  # A short run may have evaluations only.
  metrics = values.y or [x for x in _RETURNS if x in known][:1]
  for name in metrics:
    if name not in known or not any(
      len(run.series(values.x, name)[0]) for run in runs
    ):
      raise ValueError(
        f'--y={name} is in no record; {suggest(name, sorted(known))}'
      )
  tools.check_out(out)
  groups = group_runs(runs)
  with tools.writing(out):
    draw(groups, values.x, out, metrics)
  console = Console(highlight=False, markup=False)
  console.print(table(groups))
  console.print(printable(f'drawn: {out}'), soft_wrap=True)


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = flags.FlagValues()
  text = 'The horizontal axis.'
  flags.DEFINE_enum('x', 'env_steps', list(_AXES), text, flag_values=values)
  text = 'The metrics on the vertical axis; by default, the return.'
  flags.DEFINE_list('y', [], text, flag_values=values)
  text = 'The .png or .svg file to write.'
  flags.DEFINE_string('out', '', text, flag_values=values)
  return tools.run_command(argv, __doc__, values, _act)
