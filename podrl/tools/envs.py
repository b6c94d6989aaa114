"""Lists the environments that podrl trains.

  podrl envs [WORD]

With WORD, it lists only names that contain WORD. podrl train accepts a name as
NAME. If several suites have an environment of this name, podrl train uses the
first of these suites. A suite that is not installed is named with the command
that installs it. Modules can register more gymnasium environments; see podrl
train --help.
"""

from collections.abc import Sequence

from absl import flags

from podrl import tools
from podrl.envs import SUITES, similar_names


def _act(words: list[str], values: flags.FlagValues) -> None:
  """Prints the names of each suite."""
  del values
  word = tools.single_path(words, 'word', 'envs Pong') if words else ''
  found = {
    suite: [x for x in row.names() if word.lower() in x.lower()]
    for suite, row in SUITES.items()
  }
  if not any(found.values()):
    raise ValueError(
      f'no name contains {word}; similar names: {similar_names(word)}'
    )
  for suite, names in found.items():
    if not SUITES[suite].is_installed():
      print(f"{suite}: not installed; pip install 'podrl[{suite}]'")
      continue
    architecture = SUITES[suite].architecture.capitalize()
    print(f'{suite} ({architecture}): {len(names)}')
    for name in names:
      print(f'  {suite}:{name}')


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  return tools.run_command(argv, __doc__, flags.FlagValues(), _act)
