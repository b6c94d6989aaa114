"""Writes the table of fields into docs/reference/configuration.md.

python docs/tables.py
"""

import math
import pathlib

from podrl.agents import AGENTS
from podrl.run.config import FIELDS, Field, Range

_PAGE = pathlib.Path(__file__).parent / 'reference' / 'configuration.md'
_BEGIN, _END = '<!-- fields: python docs/tables.py -->\n', '<!-- end -->\n'
_HEADER = '| field | default | allowed | meaning |\n|---|---|---|---|'

_SECTIONS = {
  '': 'The run',
  'env': 'Environment',
  'agent': 'Agent',
  'network': 'Network',
  'optimizer': 'Optimizer',
  'sebulba': 'Sebulba',
  'eval': 'Evaluation',
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


def _allowed(field: Field) -> str:
  """Returns the allowed values of a field."""
  if isinstance(field.default, bool):
    return 'True, False'
  if isinstance(field.allowed, Range):
    low, high, excludes_low = field.allowed
    text = f'{"more than" if excludes_low else "from"} {low:,}'
    return text if high == math.inf else f'{text} to {_number(high)}'
  return ', '.join(f'`{x}`' for x in field.allowed or ())


def _default(name: str, field: Field) -> str:
  """Returns a field's default, and the different defaults of some agents."""
  text = f'`{field.default!r}`' if field.default != '' else ''
  others: dict[str, list[str]] = {}
  for agent, entry in AGENTS.items():
    value = entry.defaults.get(name, field.default)
    if name not in entry.comments and value != field.default:
      others.setdefault(repr(value), []).append(agent)
  return ', '.join(
    [text, *(f'{" and ".join(x)}: `{value}`' for value, x in others.items())]
  )


def make_tables() -> str:
  """Returns a table of fields for each section of the configuration."""
  fields = dict(FIELDS)
  for agent, entry in AGENTS.items():
    for name, comment in entry.comments.items():
      fields[name] = Field(entry.defaults[name], f'Only for {agent}. {comment}')
  tables = []
  for section, title in _SECTIONS.items():
    rows = [
      f'| `{name}` | {_default(name, field)} | {_allowed(field)} '
      f'| {field.comment} |'
      for name, field in fields.items()
      if name.rpartition('.')[0] == section
    ]
    tables.append('\n'.join([f'## {title}', '', _HEADER, *rows, '']))
  return '\n'.join(tables)


def render(page: str) -> str:
  """Returns the text of the page with new tables."""
  before, _, rest = page.partition(_BEGIN)
  return f'{before}{_BEGIN}\n{make_tables()}\n{_END}{rest.partition(_END)[2]}'


if __name__ == '__main__':
  _PAGE.write_text(render(_PAGE.read_text()))
