"""Distributions against plain arithmetic and frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl import distributions
from podrl.types import Box, Discrete


def test_categorical_against_probabilities():
  logits = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
  probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  action = np.arange(7) % 4
  dist = distributions.for_action_space(Discrete(4))
  assert dist.num_params == 4
  np.testing.assert_allclose(
      dist.log_prob(logits, action),
      np.log(probabilities[np.arange(7), action]), atol=1e-6)
  np.testing.assert_allclose(
      dist.entropy(logits),
      -(probabilities * np.log(probabilities)).sum(-1), atol=1e-6)
  np.testing.assert_array_equal(dist.mode(logits), logits.argmax(-1))


def test_categorical_samples_by_probability():
  dist = distributions.categorical(3)
  keys = jax.random.split(jax.random.key(0), 20_000)
  logits = jnp.log(jnp.asarray([.2, .3, .5]))
  actions = jax.vmap(lambda key: dist.sample(key, logits))(keys)
  share = np.bincount(actions, minlength=3) / 20_000
  # Five standard deviations: 5 sqrt(.25 / 20000) = .018.
  np.testing.assert_allclose(share, [.2, .3, .5], atol=0.018)


def test_a_box_is_refused_by_name():
  with pytest.raises(ValueError, match=r'box of shape \(2,\)'):
    distributions.for_action_space(Box((2,), np.zeros(2), np.ones(2)))
