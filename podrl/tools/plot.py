"""Draws learning curves of runs, and prints their final returns.

  podrl plot RUN [RUN ...] [--x=env_steps|wall_seconds] [--out=FILE]

A directory that holds runs stands for them all. Runs that differ in nothing but
the seed (and in what they evaluate and log) are one group: a line is their mean,
its band a bootstrap 95 % interval of it. Dots are evaluations. FILE ends in .png
or .svg; by default it is curve.png, in the run's directory or in the one that
holds all of several runs.
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
from podrl.records.workdir import MOVABLE, flatten
from podrl.run.evaluation import bootstrap

_AXES = {'env_steps': 'environment steps', 'wall_seconds': 'wall time (s)'}
# Fields in which the runs of a group may differ.
_SEEDS = ('seed', 'num_seeds') + MOVABLE
_NUM_POINTS = 200  # Of a curve.
_COLORS = ('#1f5fa8', '#c44e00', '#2f8f4e', '#8a4fbf', '#b8860b', '#5a5a5a')


class Run(NamedTuple):
  """One run, as read.

  Attributes:
    path: its directory.
    config: fields by their dotted names.
    records: of `metrics.jsonl`, in their order.
  """

  path: str
  config: dict[str, Any]
  records: list[dict[str, Any]]


class Group(NamedTuple):
  """Runs that differ in their seeds alone.

  Attributes:
    task: the environment.
    label: the agent, and what tells it from the task's others of that agent.
    runs: one or more.
  """

  task: str
  label: str
  runs: list[Run]


def find(path: str) -> list[str]:
  """The runs at a path: itself, its several agents', or those in it."""
  inside = sorted(
    map(
      os.path.dirname,
      glob.glob(os.path.join(glob.escape(path), '*', 'config.json')),
    )
  )
  agents = [x for x in inside if workdir.run_of_agent(x)]
  return agents or ([path] if workdir.is_run(path) else inside or [path])


def read(path: str) -> Run:
  """Reads a run, which may still be under way.

  Args:
    path: its directory.

  Raises:
    ValueError: if it is not a run, or a file of it is damaged.
  """
  config = flatten(workdir.read_config(path).to_dict())
  records = workdir.read_records(path)
  if not any('episode_return' in r or 'eval_return' in r for r in records):
    raise ValueError(f'{path} has no return yet')
  return Run(path, config, records)


def group(runs: Sequence[Run]) -> list[Group]:
  """Runs by what they learn, in the order in which they came."""
  groups: dict[str, list[Run]] = {}
  for run in runs:
    key = json.dumps(
      {k: v for k, v in run.config.items() if not k.startswith(_SEEDS)},
      sort_keys=True,
    )
    groups.setdefault(key, []).append(run)
  configs = [members[0].config for members in groups.values()]

  def describe(config: dict[str, Any]) -> tuple[str, str]:
    task, agent = config.get('env.name'), config.get('agent.name')
    alike = [
      c
      for c in configs
      if (c.get('env.name'), c.get('agent.name')) == (task, agent)
    ]
    # What only one architecture has would fill the legend.
    differing = [
      k
      for k in config
      if not k.startswith(_SEEDS)
      and all(k in c for c in alike)
      and len({json.dumps(c[k]) for c in alike}) > 1
    ]
    return str(task), ', '.join(
      [str(agent)] + [f'{k.rpartition(".")[2]}={config[k]}' for k in differing]
    )

  return [
    Group(*describe(config), members)
    for config, members in zip(configs, groups.values())
  ]


def _series(run: Run, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
  """The points of a run that have both."""
  points = [(r[x], r[y]) for r in run.records if r.get(y) is not None]
  return tuple(np.asarray(points, np.float64).reshape(-1, 2).T)


def curve(runs: Sequence[Run], x: str) -> tuple[np.ndarray, np.ndarray]:
  """Training returns of runs at common points.

  Args:
    runs: of one group.
    x: 'env_steps' or 'wall_seconds'.

  Returns:
    The points `[P]`, where all runs have been, and the returns there, `[N, P]`.
  """
  series = [
    s for s in (_series(r, x, 'episode_return') for r in runs) if len(s[0])
  ]
  if not series:
    return np.zeros(0), np.zeros((0, 0))
  if len(series) == 1:
    return series[0][0], series[0][1][None]
  points = np.linspace(
    max(s[0][0] for s in series), min(s[0][-1] for s in series), _NUM_POINTS
  )
  return points, np.stack([np.interp(points, *s) for s in series])


def draw(groups: Sequence[Group], x: str, path: str) -> None:
  """Draws the groups' curves into a file."""
  import matplotlib  # Takes a second.

  matplotlib.use('Agg')
  from matplotlib import pyplot
  from matplotlib.ticker import EngFormatter

  tasks = list(dict.fromkeys(g.task for g in groups))
  figure, panels = pyplot.subplots(
    len(tasks), figsize=(6.4, 3.6 * len(tasks)), dpi=110, squeeze=False
  )
  for task, axes in zip(tasks, panels[:, 0]):
    members = [g for g in groups if g.task == task]
    for i, g in enumerate(members):
      _draw_group(axes, g, x, _COLORS[i % len(_COLORS)])
    axes.set_title(task, fontsize=10)
    axes.set_xlabel(_AXES[x])
    axes.set_ylabel('episode return')
    axes.set_xlim(0, None)
    axes.xaxis.set_major_formatter(EngFormatter(sep=''))
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(
      frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(0, -0.2)
    )
  figure.tight_layout()
  figure.savefig(path, bbox_inches='tight')
  pyplot.close(figure)


def _draw_group(axes: Any, group: Group, x: str, color: str) -> None:
  """Draws one group's curve, interval and evaluations."""
  points, returns = curve(group.runs, x)
  if len(points):
    axes.plot(
      points,
      returns.mean(0),
      lw=1.8,
      color=color,
      label=f'{group.label}: training',
    )
  if len(returns) > 1:
    axes.fill_between(
      points,
      *bootstrap(returns),
      color=color,
      alpha=0.2,
      lw=0,
      label=f'95 % interval, {len(returns)} seeds',
    )
  evaluated = [_series(run, x, 'eval_return') for run in group.runs]
  axes.plot(
    *np.concatenate(evaluated, 1),
    'o',
    ms=5,
    color=color,
    mec='white',
    clip_on=False,
    zorder=3,
    label=f'{group.label}: evaluation',
  )


def table(groups: Sequence[Group]) -> Table:
  """The final returns: the last evaluation of each run, else training's."""
  rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
  rows.add_column('group', overflow='fold')
  for name in ('seeds', 'return', '95 %', 'steps', 'time'):
    rows.add_column(name, justify='right', no_wrap=True)
  for task, label, runs in groups:
    is_evaluated = all(
      len(_series(r, 'env_steps', 'eval_return')[0]) for r in runs
    )
    key = 'eval_return' if is_evaluated else 'episode_return'
    finals = [_series(r, 'env_steps', key)[1] for r in runs]
    finals = np.asarray([y[-1] for y in finals if len(y)])
    low, high = bootstrap(finals)
    last = [r.records[-1] for r in runs]
    rows.add_row(
      f'{task}, {label}' + ('' if is_evaluated else ' (training)'),
      str(len(runs)),
      f'{finals.mean():.2f}',
      f'{low:.2f} to {high:.2f}' if len(finals) > 1 else '',
      compact(np.mean([r['env_steps'] for r in last])),
      f'{np.mean([r["wall_seconds"] for r in last]):.0f} s',
    )
  return rows


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Reads, draws, prints."""
  if not paths:
    raise ValueError('no run is named; try podrl plot RUN')
  paths = [os.path.normpath(path) for path in paths]
  out = values.out or os.path.join(
    paths[0]
    if len(paths) == 1
    else os.path.commonpath(list(map(os.path.abspath, paths))),
    'curve.png',
  )
  if not out.endswith(('.png', '.svg')):
    raise ValueError(f'--out={out} must end in .png or .svg')
  groups = group(
    [
      read(path)
      for path in dict.fromkeys(run for path in paths for run in find(path))
    ]
  )
  draw(groups, values.x, out)
  console = Console(highlight=False, markup=False)
  console.print(table(groups))
  console.print(f'drawn: {out}', soft_wrap=True)


def run(argv: Sequence[str]) -> int:
  """The command; returns its exit code, as `tools.run_command`."""
  values = flags.FlagValues()
  flags.DEFINE_enum(
    'x', 'env_steps', list(_AXES), 'the horizontal axis.', flag_values=values
  )
  flags.DEFINE_string(
    'out', '', 'the picture, .png or .svg.', flag_values=values
  )
  return tools.run_command(argv, __doc__, values, _act)
