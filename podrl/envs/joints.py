"""Joints: how every adapter presents the end of an episode.

The step after an episode's last is the *joint*: its action is ignored, and it
returns the first time step of the next episode, as in dm_env.
"""

import numpy as np

from podrl.types import Array, TimeStep, Tree


class HostJoints:
  """Builds time steps from a library that resets in the step after the last.

  gymnasium calls this the next-step mode, and envpool does the same. Such a
  library does not say which steps are first: they follow the last ones.
  """

  def __init__(self, num_envs: int):
    self._num_envs = num_envs
    self._is_last = np.zeros(num_envs, bool)

  def reset(self, obs: Tree) -> TimeStep:
    """The time step after a reset of all environments."""
    self._is_last = np.zeros(self._num_envs, bool)
    return TimeStep(
      obs,
      np.zeros(self._num_envs, np.float32),
      np.ones(self._num_envs, np.float32),
      np.ones(self._num_envs, bool),
    )

  def step(
    self, obs: Tree, reward: Array, terminated: Array, truncated: Array
  ) -> TimeStep:
    """The time step after a step; the arguments are `[B, ...]`."""
    is_first = self._is_last
    is_real = ~is_first
    self._is_last = (terminated | truncated) & is_real
    return TimeStep(
      obs,
      np.where(is_first, np.float32(0), reward).astype(np.float32, copy=False),
      1 - (terminated & is_real).astype(np.float32),
      is_first,
    )
