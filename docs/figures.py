"""Draws pictures of the docs from data in the repository.

python docs/figures.py

`speed.png` shows ratios of the tables of docs/benchmarks.md, `learning.png`
curves of docs/returns.csv, `aggregates.png` scores over several of its tasks,
and `self_play.png` ratings of the table of docs/how-to/self-play.md.
"""

from collections.abc import Sequence
import pathlib
import sys

from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np

_DOCS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(_DOCS.parent / 'experiments' / 'benchmarks'))
import scores  # noqa: E402

# Tasks of the picture of curves, and the titles of the panels.
_TASKS = {
  'anakin_cartpole CartPole-v1': 'CartPole-v1',
  'anakin_pendulum Pendulum-v1': 'Pendulum-v1',
  'anakin_breakout conv Breakout-MinAtar': 'Breakout-MinAtar',
  'anakin_breakout conv Asterix-MinAtar': 'Asterix-MinAtar',
  'anakin_pong Pong-misc': 'Pong-misc',
  'anakin_memory_chain MemoryChain-bsuite': 'MemoryChain-bsuite',
}
# Pairs of agents whose results are compared.
_PAIRS = (
  ('ppo', 'impala'),
  ('ppo', 'a2c'),
  ('impala', 'a2c'),
  ('pqn', 'ppo'),
  ('rainbow', 'dqn'),
  ('dqn', 'ppo'),
  ('sac', 'ppo'),
)
_COLORS = {
  'rejax': '#c44e00',
  'PureJaxRL': '#2f8f4e',
  'Cleanba': '#8a4fbf',
  'InstaDeep': '#b8860b',
}


def _tables(page: str) -> list[list[list[str]]]:
  """Returns the tables of a page, as rows of cells; the header comes first."""
  tables: list[list[list[str]]] = [[]]
  for line in page.splitlines():
    if line.startswith('|'):
      tables[-1].append([cell.strip() for cell in line.strip('|').split('|')])
    elif tables[-1]:
      tables.append([])
  return [table for table in tables if table]


def ratios(page: str) -> dict[str, dict[str, float]]:
  """Returns podrl's speed with PPO as a multiple of a peer's, by task and peer.

  With environments in JAX, it is that of one device, as the peers have, and of
  1,024 environments. `page` is the text of docs/benchmarks.md.
  """
  found: dict[str, dict[str, float]] = {}
  hosts = iter(['CartPole-v1, envpool', 'Pong-v5, envpool'])
  for header, _, *rows in _tables(page):
    if header[1] == 'trainer':
      task = next(hosts)
      for agent, trainer, _, ratio, *_ in rows:
        if agent == 'PPO' and trainer in _COLORS:
          found.setdefault(task, {})[trainer] = float(ratio.split()[0])
    for peer in _COLORS:
      if header[0] == 'environment' and f'{peer}, steps/s' in header:
        for row in rows:
          task, _, number = row[0].partition(' x ')
          if number == '1,024':  # The first table has one device.
            ratio = float(row[header.index('ratio')].split()[0])
            found.setdefault(task, {}).setdefault(peer, ratio)
  return found


def draw_speed(page: str) -> Figure:
  """Draws a bar for each ratio."""
  groups = ratios(page)
  figure = Figure(figsize=(7, 3.2), layout='constrained')
  axes = figure.subplots()
  labels, position = {}, 0.0
  for task, peers in groups.items():
    places = []
    for peer, ratio in peers.items():
      bar = axes.barh(position, ratio, 0.8, color=_COLORS[peer])
      axes.bar_label(bar, [f' {ratio:.1f}'], fontsize=9)
      labels.setdefault(peer, bar)
      places.append(position)
      position -= 1
    axes.text(-0.1, sum(places) / len(places), task, ha='right', va='center')
    position -= 0.6
  axes.axvline(1, color='#5a5a5a', lw=1)
  axes.set_yticks([])
  axes.set_xlim(0, 1.08 * max(max(x.values()) for x in groups.values()))
  axes.set_xlabel("podrl's training speed with PPO, as a multiple of a peer's")
  axes.spines[['top', 'right', 'left']].set_visible(False)
  figure.legend(
    labels.values(), labels, loc='outside upper center', ncols=4, frameon=False
  )
  return figure


def draw_learning() -> Figure:
  """Draws the curves of a few tasks, as `returns.py` draws all of them."""
  import returns

  rows = [row for row in returns.read_rows() if row['task'] in _TASKS]
  figure = returns.draw(rows)
  for axes in figure.axes:
    axes.set_title(_TASKS[axes.get_title()], fontsize=9)
  return figure


_Scores = dict[str, dict[str, np.ndarray]]  # By agent and environment.


def _common(found: _Scores, agents: Sequence[str]) -> list[str]:
  """Returns the environments that all of some agents have."""
  return [x for x in found[agents[0]] if all(x in found[a] for a in agents)]


def _draw_profiles(axes: Axes, found: _Scores, agents: Sequence[str]) -> None:
  """Draws the performance profile of each agent, over the tasks of all."""
  import returns

  names, points = _common(found, agents), np.linspace(0, 1.6, 161)
  for agent in agents:
    tasks, color = [found[agent][x] for x in names], returns._COLORS[agent]
    mean = scores.interquartile_mean(tasks)
    label = f'{agent}, IQM {mean:.2f}'
    low, high = scores.interval(lambda x: scores.profile(x, points), tasks)
    axes.plot(points, scores.profile(tasks, points), color=color, label=label)
    axes.fill_between(points, low, high, color=color, alpha=0.2, lw=0)
  axes.set_title(f'{", ".join(agents)}: {len(names)} tasks', fontsize=9)
  axes.set_xlabel('score')
  axes.set_ylabel('share of runs with a higher score')
  axes.set_ylim(0, 1.05)
  axes.legend(fontsize=8, frameon=False, loc='lower left')
  axes.grid(alpha=0.3)


def draw_aggregates() -> Figure:
  """Draws performance profiles, and probabilities of improvement."""
  found = scores.scores()
  figure = Figure(figsize=(11, 3.6), layout='constrained')
  left, middle, right = figure.subplots(1, 3)
  _draw_profiles(left, found, ['ppo', 'impala', 'a2c'])
  _draw_profiles(middle, found, ['ppo', 'impala', 'a2c', 'pqn'])
  labels = []
  for i, pair in enumerate(_PAIRS):
    names = _common(found, pair)
    agents = [[found[agent][x] for x in names] for agent in pair]
    share = scores.improvement(*agents)
    low, high = scores.interval(scores.improvement, *agents)
    right.barh(-i, high - low, 0.5, low, color='#1f5fa8', alpha=0.3)
    right.plot([share, share], [-i - 0.25, -i + 0.25], color='#1f5fa8')
    labels.append(f'{" > ".join(pair)} ({len(names)})')
  right.set_yticks(-np.arange(len(labels)), labels, fontsize=8)
  right.axvline(0.5, color='#5a5a5a', lw=1)
  right.set_xlim(0, 1)
  right.set_title('probability of improvement (tasks)', fontsize=9)
  right.grid(axis='x', alpha=0.3)
  for axes in figure.axes:
    axes.spines[['top', 'right']].set_visible(False)
  return figure


def draw_ratings(page: str) -> Figure:
  """Draws the ratings of the checkpoints of a run in Connect Four.

  `page` is the text of docs/how-to/self-play.md.
  """
  (table,) = [x for x in _tables(page) if x[0][0] == 'steps of PPO']
  rows = [
    (
      float(steps.removesuffix('M')),
      float(elo),
      *map(float, ends.split(' to ')),
    )
    for steps, elo, ends in table[2:]
    if steps.endswith('M')
  ]
  steps, elo, low, high = zip(*rows)
  figure = Figure(figsize=(6, 3), layout='constrained')
  axes = figure.add_subplot()
  axes.fill_between(steps, low, high, color='#1f5fa8', alpha=0.25, linewidth=0)
  axes.plot(steps, elo, 'o-', color='#1f5fa8')
  axes.set_xlabel('environment steps (millions)')
  axes.set_ylabel('Elo, with 95 % interval')
  axes.set_xlim(left=0)
  axes.grid(alpha=0.3)
  axes.spines[['top', 'right']].set_visible(False)
  return figure


def main() -> None:
  page = (_DOCS / 'benchmarks.md').read_text()
  draw_speed(page).savefig(_DOCS / 'images' / 'speed.png', dpi=110)
  draw_learning().savefig(_DOCS / 'images' / 'learning.png', dpi=110)
  draw_aggregates().savefig(_DOCS / 'images' / 'aggregates.png', dpi=110)
  page = (_DOCS / 'how-to' / 'self-play.md').read_text()
  draw_ratings(page).savefig(_DOCS / 'images' / 'self_play.png', dpi=110)


if __name__ == '__main__':
  main()
