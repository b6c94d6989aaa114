"""Parts that users bring: objects that a configuration names MODULE:NAME."""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from typing import Any

from podrl.fields import Field
from podrl.messages import check_choice, one_line, suggest


def current_directory() -> str:
  """Returns the current directory; raises a ValueError if it is deleted."""
  try:
    return os.getcwd()
  except OSError as error:
    raise ValueError(
      'the current directory no longer exists; change to another directory'
    ) from error


def check_table(what: str, name: str, table: Any) -> None:
  """Raises a ValueError if the fields of a user's part are not a table."""
  if not isinstance(table, Mapping):
    raise ValueError(f'{what}={name}: fields must be a dict')
  for field, value in table.items():
    if not (isinstance(field, str) and isinstance(value, Field)):
      raise ValueError(
        f'{what}={name}: the field {field} must be a podrl.fields.Field, not a '
        f'{type(value).__name__}'
      )


@contextlib.contextmanager
def one_line_errors(what: str, name: str) -> Iterator[None]:
  """A block that calls the user's code, if `name` is MODULE:NAME.

  A ValueError says what is wrong; any other error becomes one.
  """
  try:
    yield
  except ValueError:
    raise
  except Exception as error:
    if ':' not in name:
      raise
    raise failed(what, name, error) from error


def failed(what: str, name: str, error: BaseException) -> ValueError:
  """Returns the error for a user's code that has raised one."""
  text = one_line(error, with_kind=True)
  return ValueError(f'{what}={name} failed: {text}')


def add_to_path(*directories: str) -> None:
  """Appends directories to `sys.path`, where Python looks for modules."""
  for directory in filter(None, directories):
    if directory not in sys.path:
      sys.path.append(directory)


def import_module(what: str, name: str, module: str) -> Any:
  """Imports the user's module of the field or flag `what`, which is `name`."""
  try:
    return importlib.import_module(module)
  # The module's code can raise anything, and can also call `sys.exit`.
  except (Exception, SystemExit) as error:
    raise ValueError(
      f'{what}={name}: the module {module} cannot be imported: '
      f'{one_line(error, with_kind=True)}'
    ) from error


def find(what: str, name: str, known: Collection[str]) -> Any:
  """Imports the object `MODULE:NAME`.

  Python looks among the installed modules, in the directories that a caller has
  added, and then in the current directory.

  Args:
    what: the field or flag that has this name, for messages.
    known: other names that the field may have.

  Raises:
    ValueError: for another name, or if there is no such object.
  """
  module_name, colon, attribute = name.partition(':')
  if not colon:
    check_choice(what, name, known)
  if not (module_name and attribute):
    raise ValueError(f'{what}={name} must be MODULE:NAME')
  add_to_path(current_directory())
  module = import_module(what, name, module_name)
  if not hasattr(module, attribute):
    public = [x for x in vars(module) if not x.startswith('_')]
    advice = suggest(attribute, public)
    if module_name == '__main__':
      advice = (
        'only the program that defines it can use it; move it to a module'
      )
    raise ValueError(
      f'{what}={name}: the module {module_name} has no {attribute}; {advice}'
    )
  return getattr(module, attribute)


# A parameter with a default of another type is not a field.
_TYPES = bool, int, float, str


def _is_value(value: Any) -> bool:
  if isinstance(value, tuple):
    return bool(value) and all(isinstance(x, _TYPES) for x in value)
  return isinstance(value, _TYPES)


def attributes(part: Any) -> list[dataclasses.Field]:
  """Returns the attributes of a flax module or class, except flax's own."""
  known = (x for x in dataclasses.fields(part) if x.init)
  return [x for x in known if x.name not in ('parent', 'name')]


def fields_of(
  part: Callable[..., Any], section: str, name: str, skipped: int = 0
) -> dict[str, Field]:
  """Makes a field of each parameter of a function or class with a default.

  Defaults that are not numbers, texts or tuples of them are left out. A class
  may be a dataclass, as flax modules are.

  Args:
    part: the function or class.
    section: the first part of the fields' names.
    name: `MODULE:NAME` of the part, for the comments.
    skipped: how many of the first parameters are left out.
  """
  if dataclasses.is_dataclass(part):
    found = {x.name: x.default for x in attributes(part)}
  else:
    try:
      parameters = [*inspect.signature(part).parameters.values()][skipped:]
    except ValueError:  # A function in C may not say what it takes.
      return {}
    found = {x.name: x.default for x in parameters}
  comment = f'A field of {name}.'
  return {
    f'{section}.{k}': Field(x, comment)
    for k, x in found.items()
    if _is_value(x)
  }


def describe_import(name: str, directories: str) -> str:
  """Says what podrl imports for `MODULE:NAME`; it imports nothing itself.

  `directories` are those of `env.path`.
  """
  module, _, attribute = name.partition(':')
  top, spec = module.partition('.')[0], None
  with contextlib.suppress(ImportError, ValueError):
    find_spec = importlib.machinery.PathFinder.find_spec
    spec = importlib.util.find_spec(top)
    # A module has priority over a directory without `__init__.py`.
    if not (spec and spec.origin):
      path = [*directories.split(os.pathsep), current_directory()]
      spec = find_spec(top, path) or spec
  folders = list(spec.submodule_search_locations or ()) if spec else []
  place = spec and spec.origin or next(iter(folders), 'not found')
  return f'{attribute} of the module {module} ({place})'


def module_directory(name: str) -> str:
  """Returns the directory that contains the module of `MODULE:NAME`.

  It returns '' if the name has no module, or if the module is installed, is
  the running program, or cannot be found.
  """
  module = name.rpartition(':')[0].partition('.')[0]
  is_named = module not in ('', '__main__')
  spec = importlib.util.find_spec(module) if is_named else None
  if spec is None:
    return ''
  locations = list(spec.submodule_search_locations or [])
  path = os.path.abspath(locations[0] if locations else spec.origin or '')
  # With a separator at its end, the prefix /x/venv does not match /x/venv_2.
  is_installed = path.startswith(os.path.join(sys.prefix, ''))
  return '' if is_installed else os.path.dirname(path)
