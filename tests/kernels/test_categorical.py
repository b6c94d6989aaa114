"""Tests categorical distributions against scipy, in all forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from podrl.kernels import categorical

_LOG_PROBS = categorical._log_prob, categorical._log_prob_in_columns
_ENTROPIES = categorical._entropy, categorical._entropy_in_columns
_SELECTIONS = categorical._select, categorical._select_columns


def _inputs(num_actions):
  rng = np.random.default_rng(num_actions)
  logits = 3.0 * rng.normal(size=(5, 4, num_actions)).astype(np.float32)
  logits[0, 0] += 80.0  # A plain exp would be infinite.
  logits[1, 1, 0] = -1e9  # An illegal action.
  probs = np.exp(logits - logits.max(-1, keepdims=True).astype(float))
  probs /= probs.sum(-1, keepdims=True)
  return logits, rng.integers(1, num_actions, (5, 4)), probs


@pytest.mark.parametrize('num_actions', [2, 6])
@pytest.mark.parametrize('form', _LOG_PROBS)
def test_log_probs(form, num_actions):
  logits, action, probs = _inputs(num_actions)
  chosen = np.take_along_axis(probs, action[..., None], -1)[..., 0]
  np.testing.assert_allclose(form(logits, action), np.log(chosen), atol=1e-5)
  # The gradient of log p(a) is the one-hot action minus the probabilities.
  gradient = jax.grad(lambda x: jnp.sum(form(x, action)))(logits)
  expected = np.eye(num_actions)[action] - probs
  np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize('num_actions', [2, 6])
@pytest.mark.parametrize('form', _ENTROPIES)
def test_entropies(form, num_actions):
  logits, _, probs = _inputs(num_actions)
  expected = scipy.stats.entropy(probs, axis=-1)
  np.testing.assert_allclose(form(logits), expected, atol=1e-5)
  # The gradient is -p (log p + entropy).
  gradient = jax.grad(lambda x: jnp.sum(form(x)))(logits)
  log_probs = np.log(np.maximum(probs, 1e-300))
  expected = -probs * (log_probs + expected[..., None])
  np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize('form', _SELECTIONS)
def test_selected_values(form):
  values, action, _ = _inputs(6)
  chosen = np.take_along_axis(values, action[..., None], -1)[..., 0]
  np.testing.assert_array_equal(form(values, action), chosen)
  gradient = jax.grad(lambda x: jnp.sum(form(x, action) ** 2))(values)
  expected = 2 * chosen[..., None] * np.eye(6)[action]
  np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_a_gpu_selects_values_without_a_scatter():
  def total(values):
    return jnp.sum(categorical.select(values, jnp.zeros(4, int)))

  traced = jax.jit(jax.grad(total)).trace(jnp.zeros((4, 3)))
  for platform in ('cpu', 'cuda'):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ('stablehlo.scatter' in text) == (platform == 'cpu')


@pytest.mark.parametrize('num_actions,is_short', [(16, True), (17, False)])
def test_a_gpu_has_no_reduction_over_a_few_actions(num_actions, is_short):
  logits = jnp.zeros((4, num_actions))
  traced = jax.jit(categorical.entropy).trace(logits)
  for platform in ('cpu', 'tpu', 'cuda'):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    has_none = is_short and platform == 'cuda'
    assert ('stablehlo.reduce' in text) != has_none
