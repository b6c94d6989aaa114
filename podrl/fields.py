"""The form of a configuration: tables of fields, and their values by name.

A name has a section and a short name, such as 'agent.gamma', or only a short
name, such as 'seed'. A part of podrl declares the fields that it reads in a
table `FIELDS` beside its code. This file knows none of these parts.
"""

import ast
from collections.abc import Collection, Mapping
import contextlib
import copy
import json
import math
from typing import Any, NamedTuple

from podrl.messages import check_choice


class Range(NamedTuple):
  """The allowed numbers, from `low` to `high`; infinity is never allowed.

  A tuple is allowed if all its elements are allowed.
  """

  low: float
  high: float = math.inf
  excludes_low: bool = False

  def allows(self, value: float | tuple[float, ...]) -> bool:
    """Returns whether a number, or each element of a tuple, is in the range."""
    if isinstance(value, tuple):
      return all(map(self.allows, value))
    is_above = value > self.low if self.excludes_low else value >= self.low
    return is_above and value <= self.high and value < math.inf

  def __str__(self) -> str:
    low = f'{"more than" if self.excludes_low else "at least"} {self.low}'
    return low if self.high == math.inf else f'{low} and at most {self.high}'


class Field(NamedTuple):
  """A field of the configuration.

  Attributes:
    default: the value, unless a kind of task, an experiment or the user sets
      another. Its type is the type of all values.
    comment: one line for `--help`.
    allowed: a range, the allowed strings, or None if any value of the type is
      allowed.
    changeable: whether a resumed run may change the field. Such a field of an
      agent is a hyperparameter: a float that compiled programs read from
      `Variables.hyperparams`, by the field's short name.
  """

  default: Any
  comment: str
  allowed: Range | tuple[str, ...] | None = None
  changeable: bool = False


Table = Mapping[str, Field]
Fields = Mapping[str, Any]  # Values by the names of their fields.

FROM_0 = Range(0)
ABOVE_0 = Range(0, excludes_low=True)
FRACTION = Range(0, 1)
COUNT = Range(1, 2**24)
SECONDS = Range(0, 10**6, excludes_low=True)


def short(name: str) -> str:
  """Returns the last part of a name: 'gamma' for 'agent.gamma'."""
  return name.rpartition('.')[2]


def defaults(table: Table) -> dict[str, Any]:
  """Returns the default of each field."""
  return {name: copy.copy(field.default) for name, field in table.items()}


def with_defaults(table: Table, values: Fields) -> dict[str, Field]:
  """Returns a table with other defaults; each name must be in the table."""
  changed = {k: table[k]._replace(default=x) for k, x in values.items()}
  return {**table, **changed}


def section(fields: Fields, name: str) -> dict[str, Any]:
  """Returns the fields of a section, by short name."""
  prefix = f'{name}.'
  return {
    k.removeprefix(prefix): x for k, x in fields.items() if k.startswith(prefix)
  }


def hyperparams(table: Table, fields: Fields) -> dict[str, Any]:
  """Returns the values of the changeable fields of a table, by short name."""
  return {short(k): fields[k] for k, x in table.items() if x.changeable}


def check(table: Table, fields: Fields, modules: Collection[str] = ()) -> None:
  """Raises a ValueError for a value that its field does not allow.

  The fields `modules` may also be MODULE:NAME.
  """
  for name, value in fields.items():
    allowed = table[name].allowed if name in table else None
    if isinstance(allowed, Range):
      if not allowed.allows(value):
        each = ': each element' if isinstance(value, tuple) else ''
        raise ValueError(f'config.{name}={value}{each} must be {allowed}')
    elif allowed is not None and not (name in modules and ':' in value):
      check_choice(f'config.{name}', value, allowed)


def flatten(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Maps names to values; `env.options` stays one field, a dictionary."""
  fields: dict[str, Any] = {}
  for key, value in config.items():
    name = prefix + key
    is_section = isinstance(value, dict) and name != 'env.options'
    fields |= flatten(value, f'{name}.') if is_section else {name: value}
  return fields


def nest(fields: Fields) -> dict[str, Any]:
  """Returns a dictionary for each section; the inverse of `flatten`."""
  nested: dict[str, Any] = {}
  for name, value in fields.items():
    head, _, last = name.rpartition('.')
    node = nested.setdefault(head, {}) if head else nested
    node[last] = dict(value) if isinstance(value, dict) else value
  return nested


def as_tuples(value: Any) -> Any:
  """Makes tuples of the lists in a JSON value, because JSON has no tuples."""
  if isinstance(value, dict):
    return {k: as_tuples(v) for k, v in value.items()}
  return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def _evaluate(text: str) -> Any:
  """Returns the Python value that a text shows, or the text itself."""
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError):
    return {'true': True, 'false': False}.get(text.lower(), text)


def parse(name: str, text: str, default: Any) -> Any:
  """Converts a text to the type of the field's default; or raises a ValueError.

  An integer field also accepts a float such as 1e6, and a tuple accepts one
  element, or words with commas. Without a default, any value that config.json
  can contain is allowed.
  """
  value = _evaluate(text)
  if default is None:
    with contextlib.suppress(TypeError):
      return as_tuples(json.loads(json.dumps(value)))
    return text
  if isinstance(default, str) and not isinstance(value, str):
    return text
  return convert(name, value, default, text)


def convert(name: str, value: Any, default: Any, text: str = '') -> Any:
  """Converts a value to the type of the field's default; see `parse`.

  `text` is how the user wrote the value.
  """
  text = text or str(value)
  if isinstance(value, str) and not isinstance(default, str | None):
    value = _evaluate(value)
  if default is None:
    try:
      return as_tuples(json.loads(json.dumps(value)))
    except TypeError as error:
      raise ValueError(
        f'config.{name}={text} cannot be written to config.json: {error}'
      ) from error
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if isinstance(default, str):
    if isinstance(value, str | int | float):
      return str(value)
  elif isinstance(default, bool):
    if value in (0, 1):
      return bool(value)
  elif isinstance(default, int):
    if is_number and (isinstance(value, int) or value.is_integer()):
      return int(value)
  elif isinstance(default, float):
    if is_number and abs(value) < 1e300:  # Not infinite or NaN.
      return float(value)
  elif isinstance(default, tuple):
    if isinstance(value, str):
      value = tuple(x.strip() for x in value.split(','))
    value = value if isinstance(value, tuple | list) else (value,)
    # A field whose default is () contains indices.
    types = {type(x) for x in default} or {int}
    if {type(x) for x in value} <= types:
      return tuple(value)
  raise ValueError(
    f'config.{name}={text} is not of type {type(default).__name__}; '
    f'its default is {default!r}'
  )
