"""podrl: reinforcement learning on anything from a laptop to a TPU pod."""

import os
from typing import Any

__version__ = '0.1.0'


def load(path: str | os.PathLike, which: str = 'last',
         seed: int | None = None) -> Any:
  """Loads the policy of a run: a `podrl.policy.Policy`.

  Args:
    path: of the run, or of one of its agents, `RUN/seed_2`.
    which: checkpoint: 'last', 'best' by the run's evaluations, or a number of
      updates.
    seed: which of a run's several agents, from 0 on.

  Raises:
    ValueError: if there is no such run, checkpoint or agent, or it cannot be
      read.
  """
  from podrl import policy  # Here: `import podrl` alone imports nothing.
  return policy.load(path, which, seed)
