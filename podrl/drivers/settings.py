"""How Sebulba uses a host."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a host is used.

  Attributes:
    num_envs: of each actor; the learner devices divide it.
    unroll_length: T, steps of an unroll.
    actors_per_device: threads for each actor device.
    unrolls_per_update: unrolls that one update learns from.
    deterministic: or asynchronous.
    max_lag: bound of the calls of `update` between the parameters that acted
      and those that learn.
    hang_seconds: after so long in one call an actor counts as hanging.
    first_env: index of this host's first environment among all hosts'.
  """

  num_envs: int
  unroll_length: int
  actors_per_device: int
  unrolls_per_update: int
  deterministic: bool
  max_lag: int
  hang_seconds: float
  first_env: int = 0
