"""Losses: weighted means over slots.

All arguments have the same shape; a weight is 0 at reset steps. A mean divides
by the number of all slots, reset steps included. A mean without the reset steps
would depend on how the batch is split over devices. The argument `mean`
averages over the slots; with `per_slot`, a loss is `[...]`, a number per slot.

Gradients flow through advantages and targets, for example to gamma. Callers
stop gradients at the network outputs from which these are computed.
"""

from collections.abc import Callable

import chex
import jax.numpy as jnp

from podrl.types import Array

Mean = Callable[[Array], Array]


def per_slot(x: Array) -> Array:
  """The argument `mean` of a loss that shall be `[...]`, one for each slot."""
  return x


def policy_gradient(
  log_prob: Array, advantage: Array, weight: Array, *, mean: Mean = jnp.mean
) -> Array:
  """The policy-gradient loss, -E[weight * log pi(a|s) * advantage].

  Args:
    log_prob: `[...]` float32, log-probability of the action.
    advantage: `[...]` float32.
    weight: `[...]` float32.

  Source: Williams 1992; Mnih et al. 2016, arXiv:1602.01783, section 4.
  """
  chex.assert_equal_shape([log_prob, advantage, weight])
  return -mean(weight * log_prob * advantage)


def ppo_clip(
  log_ratio: Array,
  advantage: Array,
  weight: Array,
  *,
  clip: float | Array,
  mean: Mean = jnp.mean,
) -> Array:
  """PPO's clipped surrogate, -E[weight min(r A, clip(r, 1 - c, 1 + c) A)].

  Args:
    log_ratio: `[...]` float32, log(p / q): p is the action's probability under
      the current policy, and q is its probability under the behaviour policy.
    advantage: `[...]` float32.
    weight: `[...]` float32.
    clip: c; moving the ratio beyond 1 - c or 1 + c does not reduce the loss.

  Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
  """
  chex.assert_equal_shape([log_ratio, advantage, weight])
  ratio = jnp.exp(log_ratio)
  clipped = jnp.clip(ratio, 1.0 - clip, 1.0 + clip)
  return -mean(weight * jnp.minimum(ratio * advantage, clipped * advantage))


def value(
  prediction: Array, target: Array, weight: Array, *, mean: Mean = jnp.mean
) -> Array:
  """Half the squared error of the value v, E[weight (v - target)^2 / 2]."""
  chex.assert_equal_shape([prediction, target, weight])
  return 0.5 * mean(weight * jnp.square(prediction - target))


def entropy(
  policy_entropy: Array, weight: Array, *, mean: Mean = jnp.mean
) -> Array:
  """The policy's mean entropy in nats, E[weight H(pi(.|s))].

  Training maximises it.
  """
  chex.assert_equal_shape([policy_entropy, weight])
  return mean(weight * policy_entropy)
