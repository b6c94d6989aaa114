"""Runs the command line `podrl COMMAND` or `python -m podrl COMMAND`."""

import importlib
import importlib.metadata
import os
import sys

from podrl.messages import suggest

COMMANDS = {
  'train': 'train an agent in an environment',
  'sweep': 'train an agent with many settings',
  'envs': 'list the environments that can be trained',
  'plot': 'draw the learning curves of runs',
  'watch': "record an episode of a run's policy as a GIF or an MP4",
  'play': "show a run's policy in the terminal, or play a game against it",
  'evaluate': "evaluate a run's policy",
  'tournament': 'let policies play against each other, and rate them',
  'export': "write a run's policy to files that do not need podrl",
  'balance': 'find the fastest settings of a Sebulba experiment',
  'compile': 'compile a run for TPUs or GPUs that this machine does not have',
  'scaling': 'estimate the speed of a run on 1 to 2,048 cores',
}


def main() -> None:
  """Runs a command and exits with the command's exit code."""
  name, *arguments = sys.argv[1:] or ['--help']
  if name == 'help' and arguments:  # podrl help train
    name, arguments = arguments[0], ['--help']
  if name in ('--version', '-V', 'version'):
    print(f'podrl {importlib.metadata.version("podrl")}')
    sys.exit(0)
  if name in ('--help', '-h', 'help'):
    print('usage: podrl COMMAND [ARGUMENTS]\n')
    for command, text in COMMANDS.items():
      print(f'  {command:12}{text}')
    print('\npodrl COMMAND --help describes that command.')
    print('podrl --version prints the version.')
    sys.exit(0)
  if name not in COMMANDS:
    message = f'podrl has no command {name}; {suggest(name, COMMANDS)}'
    print(f'error: {message}', file=sys.stderr)
    sys.exit(2)
  from podrl.signals import quiet_imports

  os.environ.pop('JAX_ENABLE_X64', None)  # podrl computes in 32 bits.
  with quiet_imports():
    module = importlib.import_module(f'podrl.tools.{name}')
  sys.exit(module.run([name, *arguments]))


if __name__ == '__main__':
  main()
