"""What an experiment's command line says, and the run that it finds on disc."""

from collections.abc import Callable, Sequence
import contextlib
import datetime
import os
import sys
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict

from podrl import checkpoint
from podrl import workdir
from podrl.config import AGENTS, apply_overrides, describe, flatten


class Files(NamedTuple):
  """What a run finds on disc.

  Attributes:
    workdir: its own directory.
    init_from: a run whose parameters it begins with, or empty.
    is_resumed: whether it goes on with what `workdir` holds.
    num_resumes: how often it has done so.
  """
  workdir: str
  init_from: str = ''
  is_resumed: bool = False
  num_resumes: int = 0


def parse(
    get_config: Callable[..., ConfigDict], argv: Sequence[str], name: str,
    held: contextlib.ExitStack) -> tuple[ConfigDict | None, Files]:
  """Reads the command line, and what is on disc of the run that it names.

  Args:
    get_config: `(agent, variant) -> ConfigDict`.
    argv: the script's name, then its arguments.
    name: of the experiment.
    held: gets the lock of a run that is gone on with.

  Returns:
    The configuration, None where only help was asked for, and the files.

  Raises:
    ValueError: for a user's mistake.
  """
  values = flags.FlagValues()
  flags.DEFINE_string('agent', 'ppo', ', '.join(AGENTS), flag_values=values)
  flags.DEFINE_string(
      'variant', '', 'of the experiment; empty is its default.',
      flag_values=values)
  flags.DEFINE_string(
      'workdir', '', 'of the run; empty is runs/NAME/TIME.', flag_values=values)
  flags.DEFINE_bool(
      'resume', False, 'go on with the run in --workdir.', flag_values=values)
  flags.DEFINE_string(
      'init_from', '', 'a run whose parameters to begin with.',
      flag_values=values)
  flags.DEFINE_bool('help', False, 'show this.', short_name='h',
                    flag_values=values)
  try:
    rest = values(argv, known_only=True)[1:]
  except flags.Error as error:
    raise ValueError(str(error)) from error
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')
  path = values.workdir or os.path.join('runs', name, now)
  is_resumed = values.resume and workdir.is_run(path)
  agent = values.agent
  if is_resumed and not values['agent'].present:
    agent = workdir.read_config(path).agent.name
  config = get_config(agent, values.variant)
  if values.help:
    print(f'usage: python {argv[0]} [flags]\n{values.get_help()}'
          f'\nfields, with their defaults:\n{describe(config)}')
    return None, Files(path)
  asked = apply_overrides(config, rest)
  if values.variant:
    asked |= set(flatten(config.to_dict()))
  if values.resume and (not values.workdir or values.init_from):
    raise ValueError(
        '--resume goes on with a run: it needs --workdir, and --init_from '
        'begins another')
  if values.init_from:
    checkpoint.find(values.init_from)
  if not is_resumed:
    workdir.check_new(path)
    if values.resume:
      print(f'{path} holds no run: it begins', file=sys.stderr)
    return config, Files(path, values.init_from)
  if parent := workdir.run_of_agent(path):
    raise ValueError(f'--workdir={path} is one agent of {parent}; go on with that')
  held.enter_context(workdir.lock(path))  # Before anything of it is read.
  if workdir.is_finished(path):
    raise ValueError(f'--workdir={path} is finished; --init_from={path} begins '
                     'another run with its parameters')
  for field in workdir.settle(config, path, asked):
    print(f'of the run: config.{field}', file=sys.stderr)
  progress = checkpoint.peek(path)
  return config, Files(
      path, '', True, progress['num_resumes'] + 1 if progress else 0)
