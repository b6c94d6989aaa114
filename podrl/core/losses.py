"""Losses: means over slots of weighted terms.

A mean divides by the number of slots, not of valid ones: a mean of ratios
would depend on how the batch is spread over devices.
"""

import chex
import jax
import jax.numpy as jnp

from podrl.types import Array


def policy_gradient(log_prob: Array, advantage: Array, weight: Array) -> Array:
  """The policy-gradient loss, -E[weight * log pi(a|s) * advantage].

  Args:
    log_prob: `[...]` float32, log-probability of the action taken.
    advantage: `[...]` float32; no gradient flows through it.
    weight: `[...]` float32, 0 at joints.

  Returns:
    Float32 `[]`.

  Source: Williams 1992; Mnih et al. 2016, arXiv:1602.01783, section 4.
  """
  chex.assert_equal_shape([log_prob, advantage, weight])
  return -jnp.mean(weight * log_prob * jax.lax.stop_gradient(advantage))


def ppo_clip(
  log_ratio: Array, advantage: Array, weight: Array, *, clip: float
) -> Array:
  """PPO's clipped surrogate, -E[min(r A, clip(r, 1 - c, 1 + c) A)].

  Args:
    log_ratio: `[...]` float32, log of target over behaviour probability.
    advantage: `[...]` float32; no gradient flows through it.
    weight: `[...]` float32, 0 at joints.
    clip: how far from 1 the ratio may pay.

  Returns:
    Float32 `[]`.

  Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
  """
  chex.assert_equal_shape([log_ratio, advantage, weight])
  advantage = jax.lax.stop_gradient(advantage)
  ratio = jnp.exp(log_ratio)
  clipped = jnp.clip(ratio, 1.0 - clip, 1.0 + clip)
  return -jnp.mean(weight * jnp.minimum(ratio * advantage, clipped * advantage))


def value(prediction: Array, target: Array, weight: Array) -> Array:
  """Half the squared error of the value, E[weight (v - target)^2 / 2].

  Args:
    prediction: `[...]` float32.
    target: `[...]` float32; no gradient flows through it.
    weight: `[...]` float32, 0 at joints.

  Returns:
    Float32 `[]`.
  """
  chex.assert_equal_shape([prediction, target, weight])
  return 0.5 * jnp.mean(
    weight * jnp.square(prediction - jax.lax.stop_gradient(target))
  )


def entropy(policy_entropy: Array, weight: Array) -> Array:
  """The policy's entropy in nats, E[weight H(pi(.|s))]; to be maximised.

  Args:
    policy_entropy: `[...]` float32.
    weight: `[...]` float32, 0 at joints.

  Returns:
    Float32 `[]`.
  """
  chex.assert_equal_shape([policy_entropy, weight])
  return jnp.mean(weight * policy_entropy)
