"""Value targets: V-trace and GAE by one recursion, even across episode ends.

No function stops gradients, so that a target has a derivative with respect to
gamma. Callers stop gradients at the network outputs that they pass.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.types import Array, TimeStep


class VTrace(NamedTuple):
  """The result of `vtrace`.

  Attributes:
    errors: `[T, ...]` float32; `values[:-1] + errors` are the value targets.
      If every importance ratio is 0 or 1, the errors are the GAE advantages.
    advantages: `[T, ...]` float32, for the policy gradient. They are already
      multiplied by the clipped importance ratio.
  """

  errors: Array
  advantages: Array


def weights(timestep: TimeStep) -> Array:
  """Returns `[T, ...]` float32: 1 for a real transition, 0 for a joint.

  Args:
    timestep: the steps of an unroll; `is_first` is `[T+1, ...]`.
  """
  return 1.0 - timestep.is_first[1:].astype(jnp.float32)


def vtrace(
  values: Array,
  rewards: Array,
  discounts: Array,
  ratios: Array,
  *,
  lambda_: float | Array = 1.0,
  clip_ratio: float = 1.0,
  clip_policy_gradient_ratio: float = 1.0,
) -> VTrace:
  """V-trace(lambda) errors and policy-gradient advantages.

    delta_t = min(clip_ratio, ratio_t) (r_t + discount_t v_{t+1} - v_t)
    error_t = delta_t + discount_t lambda min(1, ratio_t) error_{t+1}

  A ratio of 0 marks a joint. The error of a joint is 0, so errors of the next
  episode do not reach the previous episode. If every other ratio is 1, the
  errors are the advantages of GAE(lambda).

  Args:
    values: `[T+1, ...]` float32, the values of all time steps.
    rewards: `[T, ...]` float32, received on arrival at step t + 1.
    discounts: `[T, ...]` float32, gamma included; 0 if the episode terminated.
    ratios: `[T, ...]` float32, importance ratio of the action at step t; 0 for
      a joint. This ratio is the action's probability under the current policy
      divided by its probability under the behaviour policy.
    lambda_: from 0 (one-step returns) to 1 (full returns).
    clip_ratio: bound of the ratio in the temporal difference delta (rho bar).
    clip_policy_gradient_ratio: bound of the ratio in the advantages.

  Returns:
    A `VTrace`.

  Source: Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and remark 1 (V-trace),
  section 4.2 (advantages); Schulman et al. 2015, arXiv:1506.02438, eq. 16.
  """
  chex.assert_equal_shape([values[1:], rewards, discounts, ratios])
  clipped = jnp.minimum(clip_ratio, ratios)
  deltas = clipped * (rewards + discounts * values[1:] - values[:-1])
  decays = discounts * lambda_ * jnp.minimum(1.0, ratios)

  def backward(error, delta_and_decay):
    delta, decay = delta_and_decay
    error = delta + decay * error
    return error, error

  _, errors = jax.lax.scan(
    backward,
    jnp.zeros_like(deltas[0]),
    (deltas, decays),
    reverse=True,
    unroll=16,
  )
  # The return from a step is the step's value plus lambda times its error.
  following = values[1:] + lambda_ * jnp.concatenate(
    [errors[1:], jnp.zeros_like(errors[:1])]
  )
  advantages = jnp.minimum(clip_policy_gradient_ratio, ratios) * (
    rewards + discounts * following - values[:-1]
  )
  return VTrace(errors, advantages)
