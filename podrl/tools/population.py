"""Reads, prints and draws what the population of a sweep did."""

import math
import os
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.fields import short
from podrl.records import workdir

_CONSOLE = Console(highlight=False, markup=False)


class Population(NamedTuple):
  """What a population did."""

  fields: list[str]  # The fields that evolve.
  # `[P]`, the steps at which members changed; the first is 0.
  steps: np.ndarray
  # `[M, P]`, the values of each field from then on.
  values: dict[str, np.ndarray]
  # Int `[M, P]`; the first column has the members themselves.
  parents: np.ndarray
  returns: np.ndarray  # `[M]`, the last evaluations.


def read(directory: str) -> Population:
  """Reads the run of a population."""
  config = workdir.read_config(directory)
  agents = workdir.agents(directory, config)
  decisions = workdir.read_records(directory, 'decisions.jsonl')
  fields = [field for field, *_ in config['population.ranges']]
  values = {
    field: np.array(
      [[x[field] for x in agents.values()]]
      + [x['hyperparams'][short(field)] for x in decisions]
    ).T
    for field in fields
  }
  number = len(agents)
  parents = [list(range(number)), *(x['parents'] for x in decisions)]
  steps = [0, *(x['env_steps'] for x in decisions)]
  last = [workdir.read_records(x)[-1]['eval_return'] for x in agents]
  # None stands for NaN, which is the lowest.
  returns = np.array([-math.inf if x is None else x for x in last])
  return Population(
    fields, np.array(steps), values, np.array(parents).T, returns
  )


def ancestors(population: Population) -> list[int]:
  """Returns the first ancestor of each member."""
  found = []
  for member in range(len(population.returns)):
    for parents in population.parents[:, ::-1].T:
      member = int(parents[member])
    found.append(member)
  return found


def table(population: Population) -> Table:
  """Makes a table with a row for each member, the best one first."""
  names = [*map(short, population.fields)]
  ends = [f'{x}\n({when})' for x in names for when in ('first', 'last')]
  rows = tools.make_table('member', 'return', 'copies', 'ancestor', *ends)
  own = np.arange(len(population.returns))[:, None]
  num_copies = np.sum(population.parents != own, axis=1)
  first = ancestors(population)
  for i in np.argsort(-population.returns, kind='stable'):
    cells = [
      f'{population.values[field][i, column]:.6g}'
      for field in population.fields
      for column in (0, -1)
    ]
    score = f'{population.returns[i]:,.2f}'
    rows.add_row(str(i), score, str(num_copies[i]), str(first[i]), *cells)
  return rows


def draw(population: Population, directory: str, title: str, path: str) -> None:
  """Draws returns, and the values of the fields that evolve, into a file."""
  from matplotlib import colormaps
  from matplotlib.ticker import EngFormatter

  config = workdir.read_config(directory)
  number = len(population.returns)
  colors = colormaps['viridis'](np.linspace(0.0, 0.9, number))
  size = 1 + len(population.fields)
  with tools.figure(path, 7.0, 2.6 * size + 0.4) as figure:
    panels = figure.subplots(size, 1, sharex=True, squeeze=False)[:, 0]
    for i, agent in enumerate(workdir.agents(directory, config)):
      records = workdir.read_records(agent)
      # A game for two has no return of one agent in training.
      name = 'eval_return' if 'env/draws' in records[-1] else 'episode_return'
      points = [
        (x['env_steps'], x[name]) for x in records if x.get(name) is not None
      ]
      panels[0].plot(*np.array(points).T, color=colors[i], lw=1.2)
    end = records[-1]['env_steps']
    panels[0].set_ylabel(name.replace('_', ' '))
    steps = np.append(population.steps, end)
    for (field, _, _, is_log), axes in zip(
      config['population.ranges'], panels[1:]
    ):
      values = population.values[field]
      for i, own in enumerate(values):
        axes.hlines(own, steps[:-1], steps[1:], color=colors[i], lw=1.6)
        for t in np.flatnonzero(population.parents[i] != i):
          ends = values[population.parents[i, t], t - 1], own[t]
          axes.plot([steps[t]] * 2, ends, ':', color=colors[i], lw=1)
          axes.plot(steps[t], own[t], 'o', color=colors[i], ms=3)
      axes.set_yscale('log' if is_log else 'linear')
      axes.set_ylabel(field)
    panels[-1].set_xlabel('environment steps of a member')
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=''))
    figure.suptitle(title, fontsize=10)
    text = 'a line per member; dots: copies, with a dotted line from the parent'
    figure.supxlabel(text, fontsize=8, color='#606060')


def conclude(directory: str, path: str) -> None:
  """Prints, draws and writes what a population did."""
  population = read(directory)
  config = workdir.read_config(directory)
  out = os.path.join(path, 'population')
  title = f'{config["env.name"]}, {config["agent.name"]}, population of '
  title += str(len(population.returns))
  draw(population, directory, title, f'{out}.png')
  contents = {
    'returns': population.returns.tolist(),
    'ancestors': ancestors(population),
    'steps': population.steps.tolist(),
    'parents': population.parents.tolist(),
    'values': {k: x.tolist() for k, x in population.values.items()},
  }
  workdir.write_json(f'{out}.json', contents)
  _CONSOLE.print(table(population))
  median, best = np.median(population.returns), population.returns.argmax()
  _CONSOLE.print(
    f'median return: {median:,.2f}; best: {directory}/member_{best}',
    soft_wrap=True,
  )
  _CONSOLE.print(f'written: {out}.json, {out}.png', soft_wrap=True)
