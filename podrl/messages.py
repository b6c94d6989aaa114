"""Functions for messages; every other file may use them."""

from collections.abc import Collection, Iterable
import difflib
import os
import sysconfig
import traceback

# Parts of the paths of code that the user has not written.
_LIBRARIES = (
  os.path.dirname(os.path.abspath(__file__)) + os.sep,
  sysconfig.get_path('stdlib') + os.sep,
  f'{os.sep}site-packages{os.sep}',
  f'{os.sep}dist-packages{os.sep}',
  '<frozen ',
  '<__array_function__',
)
# The comment of the flag --trust of several commands.
TRUST = 'import the module that a run names, even if you did not make the run.'


class EnvironmentFailed(RuntimeError):
  """A host environment failed; podrl prints only the message, not the type."""


def similar(name: str, known: Iterable[str], least: float = 0.4) -> list[str]:
  """Returns up to three known names similar to `name`; case does not matter.

  `least` is the least similarity, from 0 to 1.
  """
  names = {x.lower(): x for x in known}
  near = difflib.get_close_matches(str(name).lower(), names, 3, least)
  return [names[x] for x in near]


def suggest(name: str, known: Collection[str], prefix: str = '') -> str:
  """Returns advice for an unknown name: similar names, or all known names."""
  if near := similar(name, known):
    return f'did you mean {" or ".join(prefix + x for x in near)}'
  if len(known) > 200:  # These are too many for a message.
    return 'no name is similar'
  names = ', '.join(prefix + x for x in known if x)
  return f'choose from {names or "none"}'


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
  """Raises a ValueError that suggests names if `value` is not a choice."""
  if value not in choices:
    raise ValueError(f'{name}={value} is unknown; {suggest(value, choices)}')


def one_line(error: BaseException, *, with_kind: bool = False) -> str:
  """Returns an exception's message in one line; without a message, its type."""
  kind, message = type(error).__name__, ' '.join(str(error).split())
  return f'{kind}: {message}' if with_kind and message else message or kind


def printable(text: str) -> str:
  """Escapes what could control a terminal; keeps line breaks and tabs.

  Names in the files of a run, and names of files, can contain any character.
  """
  return ''.join(
    x if x.isprintable() or x in '\n\t' else ascii(x)[1:-1] for x in text
  )


def count(number: int, noun: str) -> str:
  """Returns a count and its noun, for example '1 actor' or '2 actors'."""
  return f'{number:,} {noun}{"s" * (number != 1)}'


def two_decimals(value: float, *others: float) -> str:
  """Formats a return with two decimals, or with three digits if it is tiny.

  A return is tiny if neither this number nor one of the others reaches 0.01.
  """
  is_tiny = 0.0 < max(map(abs, (value, *others))) < 0.01
  return f'{value:.3g}' if is_tiny else f'{value:,.2f}'


def three_digits(value: float) -> str:
  """Rounds a number to three digits, or to a whole number from 999.5 on."""
  return f'{value:,.0f}' if abs(value) >= 999.5 else f'{value:.3g}'


def format_size(value: float) -> str:
  """Formats a number of bytes, for example as 1.5 GiB."""
  for unit, power in (('TiB', 40), ('GiB', 30), ('MiB', 20), ('KiB', 10)):
    if value >= 999.5 * 2 ** (power - 10):
      return f'{value / 2**power:.3g} {unit}'
  return f'{value:.0f} B'


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
  """Returns the frames of a traceback that are in the user's code."""
  frames = traceback.extract_tb(error.__traceback__)
  return [x for x in frames if not any(y in x.filename for y in _LIBRARIES)]


def place_of(error: BaseException) -> str:
  """Returns the innermost line of the user's code that raised, or ''.

  The result has the form `FILE:LINE, in FUNCTION`.
  """
  frames = _own_frames(error)
  if not frames:
    return ''
  return f'{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}'


def describe(error: BaseException) -> str:
  """Returns an exception's type and message.

  Its `place_of` follows in parentheses, if there is one.
  """
  text, place = one_line(error, with_kind=True), place_of(error)
  return f'{text} ({place})' if place else text


def useful_traceback(error: BaseException) -> str:
  """Returns the traceback from the user's code on, or '' if it has no use.

  It has none if `place_of` names the only line of the user's code, or if a
  check of podrl says what an environment returned. An error that comes from no
  code of the user has its whole traceback.
  """
  if isinstance(error, EnvironmentFailed):
    origin = error.__cause__
    if origin is None or one_line(origin) == str(error):
      return ''
    error = origin
  own = _own_frames(error)
  context = None if error.__suppress_context__ else error.__context__
  if len(own) == 1 and not (error.__cause__ or context):
    return ''
  frames = traceback.TracebackException.from_exception(error)
  if own:
    start = list(frames.stack).index(own[0])
    frames.stack = traceback.StackSummary.from_list(frames.stack[start:])
  return ''.join(frames.format())
