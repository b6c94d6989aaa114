"""Draws pictures of the docs from data in the repository.

python docs/figures.py

`speed.png` shows ratios of the tables of docs/benchmarks.md, `learning.png`
curves of docs/returns.csv, and `self_play.png` ratings of the table of
docs/how-to/self-play.md.
"""

import pathlib
import sys

from matplotlib.figure import Figure

_DOCS = pathlib.Path(__file__).resolve().parent
# Tasks of the picture of curves, and the titles of the panels.
_TASKS = {
  'anakin_cartpole CartPole-v1': 'CartPole-v1',
  'anakin_pendulum Pendulum-v1': 'Pendulum-v1',
  'anakin_breakout conv Breakout-MinAtar': 'Breakout-MinAtar',
  'anakin_breakout conv Asterix-MinAtar': 'Asterix-MinAtar',
  'anakin_pong Pong-misc': 'Pong-misc',
  'anakin_memory_chain MemoryChain-bsuite': 'MemoryChain-bsuite',
}
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
  sys.path.insert(0, str(_DOCS.parent / 'experiments' / 'benchmarks'))
  import returns

  rows = [row for row in returns.read_rows() if row['task'] in _TASKS]
  figure = returns.draw(rows)
  for axes in figure.axes:
    axes.set_title(_TASKS[axes.get_title()], fontsize=9)
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
  page = (_DOCS / 'how-to' / 'self-play.md').read_text()
  draw_ratings(page).savefig(_DOCS / 'images' / 'self_play.png', dpi=110)


if __name__ == '__main__':
  main()
