"""podrl: reinforcement learning in JAX, from a laptop to a TPU pod."""

from collections.abc import Callable
import os
from typing import TYPE_CHECKING

# `import podrl` imports nothing else: each function imports what it needs.
if TYPE_CHECKING:
  from ml_collections import ConfigDict

  from podrl.run.policy import Policy


def load(
  path: str | os.PathLike, which: str = 'last', seed: int | None = None
) -> 'Policy':
  """Loads the policy of a run.

  Args:
    path: the directory of the run, or of one of its agents (`RUN/seed_2`).
    which: the checkpoint: 'last', 'best' by evaluated return, or a number of
      updates.
    seed: index of the agent, from 0, if the run has several.

  Raises:
    ValueError: if the run, the checkpoint or the agent does not exist, or
      cannot be read.
  """
  from podrl.run import policy

  return policy.load(path, which, seed)


def main(get_config: Callable[..., 'ConfigDict']) -> None:
  """Runs an experiment from the command line and exits with its exit code.

  Args:
    get_config: `(agent, variant) -> ConfigDict`.
  """
  from podrl.run import train

  train.main(get_config)
