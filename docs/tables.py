"""Writes the tables of fields, and those made from docs/returns.csv.

python docs/tables.py
"""

from collections.abc import Iterator, Mapping, Sequence
import math
import pathlib
import sys
from typing import Any

import numpy as np
from scipy import stats

from podrl.agents import AGENTS
from podrl.core.optimizers import OPTIMIZERS
from podrl.fields import Field, Range
from podrl.messages import three_digits
from podrl.records.terminal import compact
from podrl.run.config import KINDS, PARTS, make_table

_DOCS = pathlib.Path(__file__).resolve().parent
sys.path.append(str(_DOCS.parent / 'experiments' / 'benchmarks'))
import scores  # noqa: E402

_END = '<!-- end -->\n'
_HEADER = '| field | default | allowed | meaning |\n|---|---|---|---|'

_SECTIONS = {
  '': 'The run',
  'env': 'Environment',
  'agent': 'Agent',
  'network': 'Network',
  'optimizer': 'Optimizer',
  'replay': 'Replay',
  'search': 'Search',
  'meta': 'Meta-gradients',
  'sebulba': 'Sebulba',
  'eval': 'Evaluation',
  'stop': 'Early stop',
  'log': 'Records',
  'checkpoint': 'Checkpoints',
}
# The task that stands for each kind on the page of expected results.
_EXPECTED = {
  'numbers': 'anakin_cartpole CartPole-v1',
  'a memory': 'anakin_memory_chain MemoryChain-bsuite',
  'one continuous action': 'anakin_pendulum Pendulum-v1',
  'several of them': 'sebulba_half_cheetah HalfCheetah-v4',
  'small images': 'anakin_breakout conv Breakout-MinAtar',
  'large images': 'sebulba_pong cpu Pong-v5',
}


def _number(value: float) -> str:
  """Formats a bound; a large power of two becomes 2^N."""
  for offset, suffix in ((0, ''), (1, ' - 1')):
    exponent = math.log2(value + offset) if value > 2**15 else 0.5
    if exponent.is_integer():
      return f'2^{exponent:.0f}{suffix}'
  return f'{value:,}'


def _allowed(name: str, field: Field) -> str:
  """Returns the allowed values of a field."""
  if isinstance(field.default, bool):
    return 'True, False'
  if isinstance(field.allowed, Range):
    low, high, excludes_low = field.allowed
    text = f'{"more than" if excludes_low else "from"} {low:,}'
    return text if high == math.inf else f'{text} to {_number(high)}'
  names = ', '.join(f'`{x}`' for x in field.allowed or ())
  return f'{names}, or MODULE:NAME' if name in PARTS else names


def _join(agents: Sequence[str]) -> str:
  """Lists agents in words."""
  *others, last = agents
  return f'{", ".join(others)} and {last}' if others else last


def _default(values: Mapping[str, Any]) -> str:
  """Returns a field's default, and the different defaults of some parts.

  `values` has the default of each agent or optimiser that has the field. The
  most frequent one comes first, without names.
  """
  parts: dict[str, list[str]] = {}
  for part, value in values.items():
    parts.setdefault(repr(value), []).append(part)
  general = max(parts, key=lambda x: len(parts[x]))
  shown = [f'`{general}`'] if general != "''" else []
  del parts[general]
  return '; '.join(
    [*shown, *(f'{_join(x)}: `{value}`' for value, x in parts.items())]
  )


def _meaning(field: Field, owners: Sequence[str], others: int) -> str:
  """Returns a field's comment, and which parts have it, if not all do.

  `others` is the number of parts of this kind that do not have the field.
  """
  if not others:
    return field.comment
  missing = [x for x in AGENTS if x not in owners]
  if len(missing) == others < len(owners):
    return f'{field.comment} Not for {_join(missing)}.'
  return f'Only for {_join(owners)}. {field.comment}'


def _rows() -> Iterator[tuple[str, str]]:
  """Yields each field's name and its row; all agents of a meaning share one."""
  tables = {
    agent: {**make_table(agent, 'Sebulba'), **make_table(agent, 'Anakin')}
    for agent in AGENTS
  }
  of_optimizers = {k for x in OPTIMIZERS.values() for k in x.fields}
  owners: dict[tuple[str, str], dict[str, Field]] = {}
  for agent, table in tables.items():
    for name, field in table.items():
      if name not in of_optimizers and name != 'agent.name':
        owners.setdefault((name, field.comment), {})[agent] = field
  own = {k: x.fields for k, x in OPTIMIZERS.items()}
  for optimizer, fields in own.items():
    for name, field in fields.items():
      owners.setdefault((name, field.comment), {})[optimizer] = field
  for (name, _), fields in owners.items():
    field = next(iter(fields.values()))
    number = len(OPTIMIZERS if name in of_optimizers else AGENTS)
    values = {k: x.default for k, x in fields.items()}
    meaning = _meaning(field, [*fields], number - len(fields))
    cells = f'`{name}`', _default(values), _allowed(name, field), meaning
    yield name, f'| {" | ".join(cells)} |'


def make_tables() -> str:
  """Returns a table of fields for each section of the configuration."""
  rows, tables = [*_rows()], []
  for section, title in _SECTIONS.items():
    lines = [x for name, x in rows if name.rpartition('.')[0] == section]
    tables.append('\n'.join([f'## {title}', '', _HEADER, *lines, '']))
  return '\n'.join(tables)


def make_kinds() -> str:
  """Returns the table of the settings for kinds of environments."""
  lines = ['| kind | agent | settings |', '|---|---|---|']
  for kind, general in KINDS.items():
    own = {x: y.kinds[kind] for x, y in AGENTS.items() if kind in y.kinds}
    for agent, fields in {'all': general, **own}.items():
      settings = ', '.join(f'`{k}={v}`' for k, v in fields.items())
      lines.append(f'| {kind} | {agent} | {settings} |')
  return '\n'.join([*lines, ''])


def _groups() -> dict[tuple[str, str], list[scores.Row]]:
  """Returns the rows of returns.csv by task and agent.

  If a task was run with several numbers of devices, the largest is kept.
  """
  groups: dict[tuple[str, str], list[scores.Row]] = {}
  rows = scores.read('returns')
  for row in sorted(rows, key=lambda x: -int(x['num_devices'])):
    seeds = groups.setdefault((row['task'], row['agent']), [])
    if not seeds or seeds[0]['num_devices'] == row['num_devices']:
      seeds.append(row)
  return groups


def _return(seeds: Sequence[scores.Row]) -> float:
  """Returns the interquartile mean of the evaluated returns of some seeds."""
  return stats.trim_mean([float(x['eval_return']) for x in seeds], 0.25)


def make_published() -> str:
  """Returns the table of podrl's returns beside those that others published."""
  groups, low = _groups(), scores.random_levels()
  lines = [
    '| task | agent | steps | return | published | after | ratio | source |',
    '|---|---|---|---|---|---|---|---|',
  ]
  for row in scores.read('published'):
    if row['return']:  # It is not in returns.csv.
      own, steps = float(row['return']), float(row['env_steps'])
    else:
      seeds = groups[row['task'], row['agent']]
      own, steps = _return(seeds), float(seeds[0]['env_steps'])
    task = row['task'].split()[-1]
    other, floor = float(row['published']), low.get(task, 0.0)
    cells = (
      task,
      row['agent'],
      compact(steps),
      three_digits(own),
      three_digits(other),
      compact(float(row['steps'])) if row['steps'] else 'not stated',
      f'{(own - floor) / (other - floor):.2f}',
      f'{row["source"]}: {row["note"]}',
    )
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join([*lines, ''])


def _steps_to_learn(seeds: Sequence[scores.Row], floor: float) -> float:
  """Returns after how many steps all seeds are half way to their last return.

  The way begins at `floor`, the return of random actions.
  """
  curves = np.array([x['curve'].split() for x in seeds], float)
  middle = (floor + stats.trim_mean(curves[:, -1], 0.25)) / 2
  is_there = curves >= middle
  is_there[:, -1] = True  # If a seed never is, it takes all steps.
  points = 1 + np.argmax(is_there, axis=1)
  return points.max() / curves.shape[1] * float(seeds[0]['env_steps'])


def make_expected() -> str:
  """Returns the table of the returns, steps and times of all agents."""
  groups, low = _groups(), scores.random_levels()
  lines = [
    '| kind: task | agent | return | worst seed | steps | half way after '
    '| time |',
    '|---|---|---|---|---|---|---|',
  ]
  for kind, task in _EXPECTED.items():
    env = task.split()[-1]
    for agent in AGENTS:
      if seeds := groups.get((task, agent)):
        seconds = np.median([float(x['seconds']) for x in seeds])
        worst = min(float(x['eval_return']) for x in seeds)
        cells = (
          f'{kind}: {env}',
          f'`{agent}`',
          three_digits(_return(seeds)),
          three_digits(worst),
          compact(float(seeds[0]['env_steps'])),
          compact(_steps_to_learn(seeds, low[env])),
          f'{seconds:.0f} s' if seconds < 99.5 else f'{seconds / 60:.0f} min',
        )
        lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join([*lines, ''])


_TABLES = {
  'fields': make_tables,
  'kinds': make_kinds,
  'published': make_published,
  'expected': make_expected,
}


def render(page: str) -> str:
  """Returns the text of the page with new tables."""
  for name, make in _TABLES.items():
    begin = f'<!-- {name}: python docs/tables.py -->\n'
    before, found, rest = page.partition(begin)
    if found:
      page = f'{before}{begin}\n{make()}\n{_END}{rest.partition(_END)[2]}'
  return page


if __name__ == '__main__':
  for path in _DOCS.rglob('*.md'):
    text = path.read_text()
    if (new := render(text)) != text:
      path.write_text(new)
