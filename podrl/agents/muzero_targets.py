"""What the model of MuZero should predict."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podrl.agents.muzero_search import Extras
from podrl.core import returns
from podrl.types import Array, TimeStep, Tree


class Targets(NamedTuple):
  """What the model should predict at the steps 0 to K after a start.

  Time is axis 0, and rows are axis 1. In a batch, the axes are swapped. A
  weight is 0 if the target does not exist. The steps after an episode's
  termination have the reward 0, the value 0 and no policy.
  """

  reward: Array  # Float32 `[K, N]`, the rewards of the steps 1 to K.
  value: Array  # Float32 `[K+1, N]`.
  policy: Array  # Float32 `[K+1, N, A]`.
  samples: Tree  # `[K+1, N, A, D]` or `()`; see `Extras`.
  weight: Array  # Float32 `[K+1, N]`, the weight of a step's reward and value.
  policy_weight: Array  # Float32 `[K+1, N]`.
  # Float32 `[K, N]`, 1 where the same player moves again, else 0: the other
  # player moves, or nobody. `()` if the agent does not play both sides.
  turn: Tree = ()


def make_targets(
  timestep: TimeStep,
  extras: Extras,
  bootstrap: Array,
  gamma: Array,
  *,
  num_unroll_steps: int,
  has_turns: bool = False,
) -> Targets:
  """Computes the targets of the model's K steps.

  Args:
    timestep: leaves `[T+1, N, ...]`, T > K, rewards already clipped.
    extras: what searches found, leaves `[T, N, ...]`.
    bootstrap: float32 `[T+1, N]`, the values of each row's last time step: T,
      or the end of the first episode; others are not read.
    gamma: the discount per step.
    num_unroll_steps: K.
    has_turns: see `EnvSpec.has_turns`.
  """
  num_steps = num_unroll_steps + 1
  valid = returns.weights(timestep)  # `[T, N]`, 0 at a reset step.
  discount = gamma * timestep.discount[1:]
  targets = returns.q_lambda(
    bootstrap, timestep.reward[1:], discount, valid, lambda_=1.0
  )
  # Whether step k is before or at the end of the first episode.
  alive = jnp.concatenate(
    [jnp.ones_like(valid[:1]), jnp.cumprod(valid[: num_steps - 1], axis=0)]
  )
  is_terminal = timestep.discount[:num_steps] == 0.0
  ends = jnp.where(is_terminal, alive * (1.0 - valid[:num_steps]), 0.0)
  # Whether the episode terminated before step k.
  absorbed = jnp.cumsum(ends, axis=0) - ends
  value = jnp.where(is_terminal, 0.0, targets[:num_steps] * alive)
  reward = timestep.reward[1:num_steps] * alive[1:]
  policy_weight = jnp.where(is_terminal, 0.0, alive)
  policy, samples = jax.tree.map(
    lambda x: x[:num_steps], (extras.policy, extras.samples)
  )
  weight = alive + absorbed
  turn: Tree = ()
  if has_turns:
    turn = (timestep.discount[1:num_steps] > 0.0).astype(jnp.float32)
  return Targets(reward, value, policy, samples, weight, policy_weight, turn)
