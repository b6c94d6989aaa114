"""Tests losses against rlax and plain loops."""

import jax
import numpy as np
import pytest
import rlax

from podrl.core import losses


def _data(seed, size=64):
  rng = np.random.default_rng(seed)
  weight = (rng.random(size) > 0.2).astype(np.float32)
  return (
    rng.normal(size=size).astype(np.float32) * 0.4,
    rng.normal(size=size).astype(np.float32),
    weight,
  )


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_ppo_clip_agrees_with_a_loop_and_rlax(seed):
  log_ratio, advantage, weight = _data(seed)
  loss = losses.ppo_clip(log_ratio, advantage, weight, clip=0.2)
  total = 0.0
  for x, a, w in zip(log_ratio, advantage, weight):
    ratio = np.exp(x)
    total += w * min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
  np.testing.assert_allclose(loss, -total / len(weight), atol=1e-5)
  # rlax gets only the valid slots, so it divides by their number.
  valid = weight > 0
  theirs = rlax.clipped_surrogate_pg_loss(
    np.exp(log_ratio)[valid], advantage[valid], 0.2
  )
  np.testing.assert_allclose(loss, theirs * valid.mean(), atol=1e-5)


def test_ppo_gradient_agrees_with_rlax():
  log_ratio, advantage, _ = _data(3)
  ones = np.ones_like(advantage)
  ours = jax.grad(lambda x: losses.ppo_clip(x, advantage, ones, clip=0.1))
  theirs = jax.grad(
    lambda x: rlax.clipped_surrogate_pg_loss(jax.numpy.exp(x), advantage, 0.1)
  )
  np.testing.assert_allclose(ours(log_ratio), theirs(log_ratio), atol=1e-6)


def test_policy_gradient_value_and_entropy_divide_by_slots():
  x, y, weight = _data(4)
  n = len(x)
  np.testing.assert_allclose(
    losses.policy_gradient(x, y, weight),
    -sum(w * a * b for a, b, w in zip(x, y, weight)) / n,
    atol=1e-6,
  )
  np.testing.assert_allclose(
    losses.value(x, y, weight),
    sum(w * (a - b) ** 2 / 2 for a, b, w in zip(x, y, weight)) / n,
    atol=1e-6,
  )
  np.testing.assert_allclose(
    losses.entropy(x, weight), sum(x * weight) / n, atol=1e-6
  )


def test_gradients_flow_to_targets_and_advantages():
  x, y, weight = _data(5)
  n = len(x)
  gradient = jax.grad(losses.value, 1)(x, y, weight)
  np.testing.assert_allclose(gradient, weight * (y - x) / n, atol=1e-6)
  gradient = jax.grad(losses.policy_gradient, 1)(x, y, weight)
  np.testing.assert_allclose(gradient, -weight * x / n, atol=1e-6)
  # Where PPO does not clip, its gradient is the weighted ratio.
  gradient = jax.grad(losses.ppo_clip, 1)(x, y, weight, clip=100.0)
  np.testing.assert_allclose(gradient, -weight * np.exp(x) / n, atol=1e-6)
