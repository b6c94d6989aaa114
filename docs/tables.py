"""Writes the tables of docs/reference/configuration.md.

python docs/tables.py
"""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any

from podrl.agents import AGENTS
from podrl.records.workdir import flatten
from podrl.run.config import (
  FIELDS,
  KINDS,
  Field,
  Range,
  base_config,
  sebulba_config,
)

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


def _allowed(field: Field) -> str:
  """Returns the allowed values of a field."""
  if isinstance(field.default, bool):
    return 'True, False'
  if isinstance(field.allowed, Range):
    low, high, excludes_low = field.allowed
    text = f'{"more than" if excludes_low else "from"} {low:,}'
    return text if high == math.inf else f'{text} to {_number(high)}'
  return ', '.join(f'`{x}`' for x in field.allowed or ())


def _join(agents: Sequence[str]) -> str:
  """Lists agents in words."""
  *others, last = agents
  return f'{", ".join(others)} and {last}' if others else last


def _default(field: Field, values: Mapping[str, Any]) -> str:
  """Returns a field's default, and the different defaults of some agents.

  `values` has the default of each agent that has the field.
  """
  agents: dict[str, list[str]] = {}
  for agent, value in values.items():
    agents.setdefault(repr(value), []).append(agent)
  general = repr(field.default)
  if len(agents) == 1:
    (general,) = agents
  shown = [f'`{general}`'] if general in agents and general != "''" else []
  agents.pop(general, None)
  return '; '.join(
    [*shown, *(f'{_join(x)}: `{value}`' for value, x in agents.items())]
  )


def _meaning(field: Field, owners: Sequence[str]) -> str:
  """Returns a field's comment, and the agents that have the field."""
  others = [x for x in AGENTS if x not in owners]
  if not others:
    return field.comment
  if len(others) < len(owners):
    return f'{field.comment} Not for {_join(others)}.'
  return f'Only for {_join(owners)}. {field.comment}'


def make_tables() -> str:
  """Returns a table of fields for each section of the configuration."""
  configs = {
    agent: {
      **flatten(sebulba_config(agent).to_dict()),
      **flatten(base_config(agent).to_dict()),
    }
    for agent in AGENTS
  }
  # If agents give the same name different meanings, each meaning has a row.
  rows = [
    (name, field, [x for x in AGENTS if name in configs[x]])
    for name, field in FIELDS.items()
  ]
  own: dict[tuple[str, str], list[str]] = {}
  for agent, entry in AGENTS.items():
    for name, comment in entry.comments.items():
      own.setdefault((name, comment), []).append(agent)
  for (name, comment), owners in own.items():
    default = AGENTS[owners[0]].defaults[name]
    rows.append((name, Field(default, comment), owners))
  tables = []
  for section, title in _SECTIONS.items():
    lines = [
      f'| `{name}` '
      f'| {_default(field, {x: configs[x][name] for x in owners})} '
      f'| {_allowed(field)} | {_meaning(field, owners)} |'
      for name, field, owners in rows
      if name.rpartition('.')[0] == section
    ]
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
