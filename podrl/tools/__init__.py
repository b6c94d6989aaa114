"""The commands of `podrl`, one file for each, and their common functions."""

from collections.abc import Callable, Collection, Iterator, Sequence
import contextlib
import errno
import os
import sys
import tempfile
from typing import Any

from absl import flags
from rich import box
from rich.table import Table

from podrl.fields import Fields
from podrl.messages import (
  TRUST,
  EnvironmentFailed,
  one_line,
  printable,
  similar,
  useful_traceback,
)
from podrl.records import workdir
from podrl.signals import interruptible


def run_command(
  argv: Sequence[str],
  doc: str,
  values: flags.FlagValues,
  act: Callable[[list[str], flags.FlagValues], int | None],
  known_only: bool = False,
) -> int:
  """Parses a command line, runs the command and returns its exit code.

  Args:
    argv: the command's name, then its arguments.
    doc: the text that `--help` prints before the flags.
    values: the command's flags; this function adds `--help`.
    act: the command itself, called with the positional arguments and the flags.
      It may return an exit code.
    known_only: if true, `act` gets unknown flags among its arguments; if false,
      an unknown flag is a mistake.

  Returns:
    0 after success, or the exit code of `act`; 1 if an environment fails; 2
    after a user's mistake (a wrong flag, or any ValueError or OSError), which
    is printed as one line; 130 after Ctrl-C; 141 if the reader of the output
    ended first, as `head` does.
  """
  flags.DEFINE_bool('help', False, 'Show this text.', values, short_name='h')
  exit_code = None
  try:
    paths = values(argv, known_only=known_only)[1:]
    if values.help:
      print(f'{doc}\n{values.get_help(include_special_flags=False)}')
    else:
      if 'out' in values and values.out:  # bash keeps the ~ of --out=~/x.
        values.out = os.path.expanduser(values.out)
      with interruptible():
        exit_code = act(paths, values)
    sys.stdout.flush()
  except BrokenPipeError:
    # Python flushes the rest of the output at its end, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except EnvironmentFailed as error:
    print(useful_traceback(error), end='', file=sys.stderr)
    print(f'error: {printable(str(error))}', file=sys.stderr)
    return 1
  except (flags.Error, ValueError, OSError) as error:
    text = str(error)
    if isinstance(error, flags.UnrecognizedFlagError):
      name, names = error.flagname, [x for x in values if len(x) > 1]
      advice = f'podrl {argv[0]} --help lists its flags'
      if near := similar(name, names, 0.6):
        advice = f'did you mean --{" or --".join(near)}'
      text = f'{argv[0]} has no flag --{name}; {advice}'
    print(f'error: {printable(text)}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  return exit_code or 0


class _IntegerParser(flags.IntegerParser):
  """Accepts 1e6 too, as the fields of a configuration do."""

  def convert(self, argument: Any) -> int:
    try:
      return super().convert(argument)
    except ValueError:
      value = float(argument)
      if not value.is_integer():
        raise
      return int(value)


def define_integer(
  name: str,
  default: int | None,
  text: str,
  low: int | None,
  high: int | None,
  values: flags.FlagValues,
) -> None:
  """Defines a flag that is a whole number from `low` to `high`."""
  parser = _IntegerParser(low, high)
  serializer: Any = flags.ArgumentSerializer()
  flags.DEFINE(parser, name, default, text, values, serializer)


def policy_flags(default: int, most: int) -> flags.FlagValues:
  """Defines the flags of commands that load a policy.

  `default` is the default of --episodes, which is from 1 to `most`.
  """
  values = flags.FlagValues()
  text = 'The number of episodes.'
  define_integer('episodes', default, text, 1, most, values)
  text = "Take the most probable action; the default is the run's eval.greedy."
  flags.DEFINE_bool('greedy', None, text, values)
  text = 'The seed of the environments and the actions.'
  define_integer('seed', 0, text, 0, 2**31 - 1, values)
  define_checkpoint(values)
  return values


def is_greedy(values: flags.FlagValues, config: Fields) -> bool:
  """Returns whether a policy takes its greedy actions; see `policy_flags`."""
  return config['eval.greedy'] if values.greedy is None else values.greedy


def define_checkpoint(values: flags.FlagValues) -> None:
  """Defines the flags with which `podrl.load` finds a policy."""
  text = 'The checkpoint: last, best, or its number of updates.'
  flags.DEFINE_string('checkpoint', 'last', text, values)
  flags.DEFINE_bool('trust', False, TRUST, values)


def single_path(paths: Sequence[str], what: str, example: str) -> str:
  """Returns the only path, or raises an error with `what` and an example."""
  if len(paths) != 1:
    raise ValueError(
      f'expected one {what}, got {len(paths)}; try podrl {example}'
    )
  return paths[0]


def common_directory(paths: Sequence[str]) -> str:
  """Returns the only path, or the directory that contains all the paths."""
  absolute = [os.path.abspath(x) for x in paths]
  return os.path.commonpath(absolute) if len(paths) > 1 else paths[0]


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
  """Turns an OSError into a ValueError that names the file `path`."""
  try:
    yield
  except OSError as error:
    reason = error.strerror or one_line(error)
    raise ValueError(
      f'{path} cannot be written: {reason}; use another --out'
    ) from error


def check_out(path: str) -> None:
  """Before the work begins, raises a ValueError if `path` cannot be written."""
  with writing(path):
    if os.path.isdir(path):
      raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    tempfile.TemporaryFile(dir=os.path.dirname(path) or '.').close()


def make_directory(path: str) -> None:
  """Makes the directory of `--out`; raises a ValueError if this fails."""
  with writing(path):
    os.makedirs(path, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()


def make_table(
  *columns: str, left: Collection[str] = (), **options: Any
) -> Table:
  """Makes a table; its columns are aligned right, except those in `left`.

  If the terminal is too narrow, cells get several lines.
  """
  table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, **options)
  for name in columns:
    justify: Any = 'left' if name in left else 'right'
    table.add_column(name, justify=justify, overflow='fold')
  return table


@contextlib.contextmanager
def figure(path: str, width: float, height: float) -> Iterator[Any]:
  """Yields a figure of this size in inches, and writes it to a file."""
  from matplotlib.figure import Figure  # The import takes a second.

  figure = Figure(figsize=(width, height), dpi=110, layout='constrained')
  yield figure
  for axes in figure.axes:
    axes.spines[['top', 'right']].set_visible(False)
  with workdir.replacing(path) as temporary:
    figure.savefig(temporary, bbox_inches='tight')
