"""Tests returns against arithmetic, a plain loop and rlax."""

import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from podrl.core import returns
from podrl.types import TimeStep


def _random_unroll(seed, length=25, batch=4, last_is_joint=False):
  """Draws an unroll with terminations, truncations and joints."""
  rng = np.random.default_rng(seed)
  values = rng.normal(size=(length + 1, batch)).astype(np.float32)
  rewards = rng.normal(size=(length, batch)).astype(np.float32)
  discounts = np.full((length, batch), 0.97, np.float32)
  weights = np.ones((length, batch), np.float32)
  for b in range(batch):
    for t in rng.choice(np.arange(1, length), 6, replace=False):
      weights[t, b] = 0.0  # This is a joint.
      rewards[t, b] = 0.0
      if rng.random() < 0.5:
        discounts[t - 1, b] = 0.0
  weights[0, 0] = 0.0
  if last_is_joint:
    weights[-1] = 0.0
  return values, rewards, discounts, weights


def _gae_loop(values, rewards, discounts, weights, lambda_):
  """Computes the generalised advantages of one environment in a plain loop."""
  advantages = np.zeros(len(rewards))
  following = 0.0
  for t in reversed(range(len(rewards))):
    if weights[t] == 0.0:
      following = 0.0
      continue
    delta = rewards[t] + discounts[t] * values[t + 1] - values[t]
    following = delta + discounts[t] * lambda_ * following
    advantages[t] = following
  return advantages


def test_worked_example():
  # gamma is .9, lambda .95. Episode A is truncated at the value .7, and the
  # value 50 starts episode B. t=1: 2 + .9*.7 - .6 = 2.03; t=0: 1 + .9*.6 - .5
  # + .9*.95*2.03 = 2.77565; the joint at t=2 learns nothing.
  errors = returns.vtrace(
    jnp.asarray([0.5, 0.6, 0.7, 50.0]),
    jnp.asarray([1.0, 2.0, 0.0]),
    0.9 * jnp.ones(3),
    jnp.asarray([1.0, 1.0, 0.0]),
    lambda_=0.95,
  ).errors
  np.testing.assert_allclose(errors, [2.77565, 2.03, 0.0], rtol=1e-6)


def test_weights_mark_the_step_that_arrives_first():
  is_first = jnp.asarray([[True], [False], [True], [False]])
  timestep = TimeStep((), jnp.zeros((4, 1)), jnp.ones((4, 1)), is_first)
  np.testing.assert_array_equal(
    returns.weights(timestep)[:, 0], [1.0, 0.0, 1.0]
  )


@pytest.mark.parametrize('last_is_joint', [False, True])
@pytest.mark.parametrize('lambda_', [0.0, 0.95, 1.0])
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_errors_are_gae_where_ratios_are_weights(seed, lambda_, last_is_joint):
  unroll = _random_unroll(seed, last_is_joint=last_is_joint)
  errors = returns.vtrace(*unroll, lambda_=lambda_).errors
  for b in range(4):
    expected = _gae_loop(*(x[:, b] for x in unroll), lambda_)
    np.testing.assert_allclose(errors[:, b], expected, atol=1e-5)


@pytest.mark.parametrize('lambda_', [0.0, 0.9, 1.0])
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_vtrace_agrees_with_rlax(seed, lambda_):
  values, rewards, discounts, weights = _random_unroll(seed, last_is_joint=True)
  rng = np.random.default_rng(seed)
  ratios = weights * np.exp(rng.normal(size=weights.shape)).astype(np.float32)
  ours = returns.vtrace(values, rewards, discounts, ratios, lambda_=lambda_)
  for b in range(values.shape[1]):
    theirs = rlax.vtrace_td_error_and_advantage(
      values[:-1, b],
      values[1:, b],
      rewards[:, b],
      discounts[:, b],
      ratios[:, b],
      lambda_=lambda_,
    )
    np.testing.assert_allclose(ours.errors[:, b], theirs.errors, atol=1e-5)
    np.testing.assert_allclose(
      ours.advantages[:, b], theirs.pg_advantage, atol=1e-5
    )


def test_nothing_passes_back_over_a_joint():
  values, rewards, discounts, weights = _random_unroll(0)
  weights[10] = 0.0
  before = returns.vtrace(values, rewards, discounts, weights, lambda_=0.95)
  values[11:] += 7.0
  rewards[10:] -= 3.0
  after = returns.vtrace(values, rewards, discounts, weights, lambda_=0.95)
  np.testing.assert_array_equal(before.errors[:11], after.errors[:11])
  assert np.abs(before.errors[11:] - after.errors[11:]).max() > 0.1
