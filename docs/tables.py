"""Writes the tables of docs/reference/configuration.md.

python docs/tables.py
"""

from collections.abc import Iterator, Mapping, Sequence
import math
import pathlib
from typing import Any

from podrl.agents import AGENTS
from podrl.core.optimizers import OPTIMIZERS
from podrl.fields import Field, Range
from podrl.run.config import KINDS, PARTS, make_table

_PAGE = pathlib.Path(__file__).parent / 'reference' / 'configuration.md'
_BEGIN, _END = '<!-- fields: python docs/tables.py -->\n', '<!-- end -->\n'
_KINDS_BEGIN = '<!-- kinds: python docs/tables.py -->\n'
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


def render(page: str) -> str:
  """Returns the text of the page with new tables."""
  tables = {_BEGIN: make_tables(), _KINDS_BEGIN: make_kinds()}
  for begin, table in tables.items():
    before, _, rest = page.partition(begin)
    page = f'{before}{begin}\n{table}\n{_END}{rest.partition(_END)[2]}'
  return page


if __name__ == '__main__':
  _PAGE.write_text(render(_PAGE.read_text()))
