"""What the commands share that look at runs: flags, help and mistakes."""

from collections.abc import Callable, Sequence
import sys

from absl import flags


def run(
    argv: Sequence[str], doc: str, values: flags.FlagValues,
    act: Callable[[list[str], flags.FlagValues], None]) -> int:
  """Parses a command line and acts on it.

  Args:
    argv: the command's name, then its arguments.
    doc: what `--help` shows before the flags.
    values: the flags that the command knows; `--help` is added.
    act: takes the arguments that are no flags, and the flags.

  Returns:
    0, or 2 for the user's mistake: a flag that is wrong, or any ValueError or
    OSError, told in one line.
  """
  flags.DEFINE_bool('help', False, 'show this.', short_name='h',
                    flag_values=values)
  try:
    rest = values(argv)[1:]
    if values.help:
      print(f'{doc}\n{values.get_help()}')
    else:
      act(rest, values)
  except (flags.Error, ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  return 0


def one_run(paths: Sequence[str], command: str) -> str:
  """The only path of a command that takes one run.

  Raises:
    ValueError: if there is none, or more.
  """
  if len(paths) != 1:
    raise ValueError(f'{len(paths)} runs are named, not 1; '
                     f'try python -m podrl.{command} RUN')
  return paths[0]
