"""What the commands share that look at runs and experiments."""

from collections.abc import Callable, Sequence
import functools
import importlib.util
import os
import sys
from typing import Any

from absl import flags

from podrl.run.config import AGENTS, apply_overrides


def run(
  argv: Sequence[str],
  doc: str,
  values: flags.FlagValues,
  act: Callable[[list[str], flags.FlagValues], None],
) -> int:
  """Parses a command line and acts on it.

  Args:
    argv: the command's name, then its arguments.
    doc: what `--help` shows before the flags.
    values: the flags that the command knows; `--help` is added.
    act: takes the arguments that are no flags, and the flags.

  Returns:
    0, 2 for the user's mistake (a flag that is wrong, or any ValueError or
    OSError, told in one line), or 130 for Ctrl-C.
  """
  flags.DEFINE_bool(
    'help', False, 'show this.', short_name='h', flag_values=values
  )
  try:
    rest = values(argv)[1:]
    if values.help:
      print(f'{doc}\n{values.get_help()}')
    else:
      act(rest, values)
  except (flags.Error, ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  return 0


def run_experiment(
  argv: Sequence[str],
  doc: str,
  values: flags.FlagValues,
  act: Callable[[list[str], list[str], flags.FlagValues], None],
) -> int:
  """`run` for a command that looks at an experiment.

  Args:
    argv: as `run`.
    doc: as `run`.
    values: as `run`; `--agent` and `--variant` are added.
    act: takes the overrides of the configuration, the arguments that are no
      flags, and the flags.
  """
  flags.DEFINE_string('agent', 'ppo', ', '.join(AGENTS), flag_values=values)
  flags.DEFINE_string('variant', '', 'of the experiment.', flag_values=values)
  overrides, rest, left = [], [], list(argv)
  while left:
    argument = left.pop(0)
    if not argument.startswith(('--config.', '-config.')):
      rest.append(argument)
      continue
    overrides.append(argument)
    if '=' not in argument:  # Its value follows.
      overrides += left[:1]
      del left[:1]
  return run(rest, doc, values, functools.partial(act, overrides))


def one(paths: Sequence[str], what: str, example: str) -> str:
  """The only path of a command that takes one.

  Args:
    paths: that are named.
    what: they are.
    example: of what follows `python -m podrl.`.

  Raises:
    ValueError: if there is none, or more.
  """
  if len(paths) != 1:
    raise ValueError(
      f'{len(paths)} {what} are named, not 1; try python -m podrl.{example}'
    )
  return paths[0]


def make_directory(path: str) -> None:
  """Makes the directory that `--out` names, where there is none.

  Raises:
    ValueError: if it cannot be made, or nothing be written there.
  """
  try:
    os.makedirs(path, exist_ok=True)
  except OSError as error:
    raise ValueError(
      f'--out={path} is no directory: {error.strerror}'
    ) from error
  if not os.access(path, os.W_OK):
    raise ValueError(f'--out={path} cannot be written')


def read_config(
  path: str, overrides: Sequence[str], values: flags.FlagValues
) -> Any:
  """The configuration of an experiment, as `run_experiment` was asked for it.

  Raises:
    ValueError: if there is none, or an override does not fit.
  """
  config = _load(path)(values.agent, values.variant)
  apply_overrides(config, overrides)
  return config


def _load(path: str) -> Callable[..., Any]:
  """The `get_config` of an experiment's file.

  Raises:
    ValueError: if there is none.
  """
  if not os.path.isfile(path) or not path.endswith('.py'):
    raise ValueError(
      f'{path} is no experiment; try experiments/sebulba_cartpole.py'
    )
  name = os.path.splitext(os.path.basename(path))[0]
  sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # They share code.
  try:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
  finally:
    del sys.path[0]
  if not hasattr(module, 'get_config'):
    raise ValueError(f'{path} is no experiment: it has no get_config')
  return module.get_config
