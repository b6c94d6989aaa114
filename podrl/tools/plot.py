"""Draws the learning curves of runs and prints their final returns.

  podrl plot RUN [RUN ...] [--x=env_steps|wall_seconds] [--out=FILE]

A directory of runs stands for all of them. Runs that differ only in the seed
(and in what they evaluate and log) form one group. A group's line is the mean
of its runs, and the band is a bootstrap 95 % interval of that mean. Dots are
evaluations. FILE ends in .png or .svg. By default it is curve.png, in the
directory RUN or in the one that contains all the runs.
"""

from collections.abc import Sequence
import glob
import json
import os
from typing import Any, NamedTuple

from absl import flags
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.records import workdir
from podrl.records.terminal import compact
from podrl.run.evaluation import bootstrap

_AXES = {'env_steps': 'environment steps', 'wall_seconds': 'wall time (s)'}
# Fields (or prefixes of fields) in which the runs of a group may differ.
_SEEDS = ('seed', 'num_seeds') + workdir.MOVABLE
_NUM_POINTS = 200  # Points of one curve.
_COLORS = ('#1f5fa8', '#c44e00', '#2f8f4e', '#8a4fbf', '#b8860b', '#5a5a5a')


class Run(NamedTuple):
  """A run as read from its directory."""

  config: dict[str, Any]  # Values by dotted name: `env.num_envs`.
  records: list[dict[str, Any]]  # The lines of `metrics.jsonl`, in order.

  def series(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of two keys in the records that have both."""
    points = [(r[x], r[y]) for r in self.records if r.get(y) is not None]
    xs, ys = np.asarray(points, np.float64).reshape(-1, 2).T
    return xs, ys


class Group(NamedTuple):
  """Runs that differ only in their seeds."""

  task: str
  label: str  # The agent, and the fields that differ from other groups.
  runs: list[Run]


def find_runs(path: str) -> list[str]:
  """Returns the runs at a path.

  They are the run's agents if it has several, else the run itself, else the
  runs in the directory. If there is none, the path itself is returned.
  """
  pattern = os.path.join(glob.escape(path), '*', 'config.json')
  inside = sorted(map(os.path.dirname, glob.glob(pattern)))
  agents = [x for x in inside if workdir.run_of_agent(x)]
  return agents or ([path] if workdir.is_run(path) else inside or [path])


def read_run(path: str) -> Run:
  """Reads a run, which may still be under way.

  Raises a ValueError if the path is not a run, or one of its files is damaged.
  """
  config = workdir.flatten(workdir.read_config(path).to_dict())
  records = workdir.read_records(path)
  if not any('episode_return' in r or 'eval_return' in r for r in records):
    raise ValueError(f'{path} has no return yet')
  return Run(config, records)


def group_runs(runs: Sequence[Run]) -> list[Group]:
  """Groups runs that differ only in their seeds; the order stays."""
  members: dict[str, list[Run]] = {}
  for run in runs:
    compared = {k: v for k, v in run.config.items() if not k.startswith(_SEEDS)}
    members.setdefault(json.dumps(compared, sort_keys=True), []).append(run)
  configs = [runs[0].config for runs in members.values()]
  groups = []
  for config, runs in zip(configs, members.values()):
    task, *label = _name(config)
    alike = [x for x in configs if _name(x) == _name(config)]
    for key, value in config.items():
      # Fields that only one architecture has would fill the legend.
      is_shared = not key.startswith(_SEEDS) and all(key in x for x in alike)
      if is_shared and any(x[key] != value for x in alike):
        label.append(f'{key.rpartition(".")[2]}={value}')
    groups.append(Group(task, ', '.join(label), runs))
  return groups


def _name(config: dict[str, Any]) -> tuple[str, str]:
  """The task and the agent of a configuration."""
  return str(config.get('env.name')), str(config.get('agent.name'))


def training_curve(
  runs: Sequence[Run], x: str
) -> tuple[np.ndarray, np.ndarray]:
  """Interpolates the training returns of a group's runs at common points.

  Returns the points `[P]` that all runs have reached, and the returns `[N, P]`.
  """
  series = [run.series(x, 'episode_return') for run in runs]
  series = [s for s in series if len(s[0])]
  if not series:
    return np.zeros(0), np.zeros((0, 0))
  if len(series) == 1:
    return series[0][0], series[0][1][None]
  start = max(s[0][0] for s in series)
  end = min(s[0][-1] for s in series)
  points = np.linspace(start, end, _NUM_POINTS)
  return points, np.stack([np.interp(points, *s) for s in series])


def draw(groups: Sequence[Group], x: str, path: str) -> None:
  """Draws the curves of the groups, one panel per task, into a file."""
  import matplotlib  # The import takes a second.

  matplotlib.use('Agg')
  from matplotlib import pyplot
  from matplotlib.ticker import EngFormatter

  tasks = list(dict.fromkeys(g.task for g in groups))
  figure, panels = pyplot.subplots(
    len(tasks), figsize=(6.4, 3.6 * len(tasks)), dpi=110, squeeze=False
  )
  for task, axes in zip(tasks, panels[:, 0]):
    members = [g for g in groups if g.task == task]
    for i, group in enumerate(members):
      _draw_group(axes, group, x, _COLORS[i % len(_COLORS)])
    axes.set_title(task, fontsize=10)
    axes.set(xlabel=_AXES[x], ylabel='episode return', xlim=(0, None))
    axes.xaxis.set_major_formatter(EngFormatter(sep=''))
    axes.spines[['top', 'right']].set_visible(False)
    place: Any = {'loc': 'upper left', 'bbox_to_anchor': (0, -0.2)}
    axes.legend(frameon=False, fontsize=8, **place)
  figure.tight_layout()
  figure.savefig(path, bbox_inches='tight')
  pyplot.close(figure)


def _draw_group(axes: Any, group: Group, x: str, color: str) -> None:
  """Draws a group's training curve, its interval and its evaluations."""
  points, returns = training_curve(group.runs, x)
  if len(points):
    label = f'{group.label}: training'
    axes.plot(points, returns.mean(0), color=color, lw=1.8, label=label)
  if len(returns) > 1:
    label = f'95 % interval, {len(returns)} seeds'
    low, high = bootstrap(returns)
    style = {'color': color, 'alpha': 0.2, 'lw': 0, 'label': label}
    axes.fill_between(points, low, high, **style)
  evaluated = [run.series(x, 'eval_return') for run in group.runs]
  style = {'ms': 5, 'mec': 'white', 'clip_on': False, 'zorder': 3}
  style |= {'color': color, 'label': f'{group.label}: evaluation'}
  axes.plot(*np.concatenate(evaluated, 1), 'o', **style)


def table(groups: Sequence[Group]) -> Table:
  """Makes a table of the final returns of the groups.

  The final return of a run is its last evaluation. Where a run of the group has
  none, it is the last training return.
  """
  rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
  rows.add_column('group', overflow='fold')
  for name in ('seeds', 'return', '95 %', 'steps', 'time'):
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
    raise ValueError('no run is named; try podrl plot RUN')
  paths = [os.path.normpath(path) for path in paths]
  directory = paths[0]
  if len(paths) > 1:
    directory = os.path.commonpath([os.path.abspath(x) for x in paths])
  out = values.out or os.path.join(directory, 'curve.png')
  if not out.endswith(('.png', '.svg')):
    raise ValueError(f'--out={out} must end in .png or .svg')
  found = dict.fromkeys(run for path in paths for run in find_runs(path))
  groups = group_runs([read_run(path) for path in found])
  draw(groups, values.x, out)
  console = Console(highlight=False, markup=False)
  console.print(table(groups))
  console.print(f'drawn: {out}', soft_wrap=True)


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = flags.FlagValues()
  text = 'The horizontal axis.'
  flags.DEFINE_enum('x', 'env_steps', list(_AXES), text, flag_values=values)
  text = 'The file to write, .png or .svg.'
  flags.DEFINE_string('out', '', text, flag_values=values)
  return tools.run_command(argv, __doc__, values, _act)
