"""Trains an agent, with settings for the kind of environment.

  podrl train [SUITE:]NAME [--agent=ppo] [--steps=1e6] [--seed=0] [--seeds=N]
      [--workdir=DIR] [--resume] [--config.FIELD=VALUE ...]

NAME is an environment, for example CartPole-v1 or envpool:Pong-v5; podrl envs
lists all names and suites. If several suites have an environment of this name,
podrl uses the first of them in that list. MODULE:NAME first imports MODULE,
which registers a gymnasium environment; MODULE may be in the current directory.
--resume needs no NAME. podrl train NAME --help lists the fields of --config.
"""

from collections.abc import Sequence
import sys

from podrl.messages import printable
from podrl.records.terminal import print_text
from podrl.run import defaults, train
from podrl.run.command_line import print_help
from podrl.signals import DONE, MISTAKE


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `train.run`."""
  try:
    get_config, command_line = defaults.parse_arguments(argv[1:])
    if not command_line.flags.help:
      return train.run_to_exit(get_config, command_line)
    print_text(__doc__)
    if command_line.task:
      print_help(command_line, get_config)
    else:
      print_text(command_line.flags.get_help())
  except ValueError as error:
    print(f'error: {printable(str(error))}', file=sys.stderr)
    return MISTAKE
  return DONE
