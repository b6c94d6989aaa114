"""The command line: `podrl COMMAND`, the same as `python -m podrl COMMAND`."""

import importlib
import sys

COMMANDS = {
  'plot': 'draw the learning curves of runs',
  'watch': "record an episode of a run's policy as a GIF or an MP4",
  'evaluate': "evaluate a run's policy",
  'balance': 'find the fastest settings of a Sebulba experiment',
  'scaling': 'predict the speed of an experiment on a pod',
}


def main() -> None:
  """Runs one command and exits with its exit code."""
  if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
    lines = [f'  {name:10} {text}' for name, text in COMMANDS.items()]
    is_help = sys.argv[1:2] in ([], ['--help'], ['-h'])
    print(
      '\n'.join(
        (
          'usage: podrl COMMAND [ARGUMENTS]',
          *lines,
          'podrl COMMAND --help describes one command',
        )
      ),
      file=sys.stdout if is_help else sys.stderr,
    )
    sys.exit(0 if is_help else 2)
  command = importlib.import_module(f'podrl.tools.{sys.argv[1]}')
  sys.exit(command.run(sys.argv[1:]))


if __name__ == '__main__':
  main()
