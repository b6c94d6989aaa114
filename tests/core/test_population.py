"""Tests how populations evolve: parents, hyperparameters and copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.core import population
from podrl.core.population import Range
from podrl.types import LearnerState, Variables


@pytest.mark.parametrize(
  'scores,lowest,highest',
  [
    ([3.0, 1.0, 2.0, 5.0, 4.0], [1], [3]),  # ceil(5 / 5) = 1.
    ([3.0, 1.0, 2.0, 5.0, 4.0, 0.0], [5, 1], [3, 4]),  # ceil(6 / 5) = 2.
    ([2.0, 3.0, np.nan, 1.0, 5.0], [2], [4]),
    ([2.0, 3.0, -np.inf, 1.0, np.inf], [2], [4]),
    ([1.0, 2.0], [0], [1]),
    ([-np.inf] * 9 + [1.0], [0, 1], [9]),
  ],
)
def test_the_lowest_fifth_continues_from_the_highest(scores, lowest, highest):
  choose = jax.jit(population.choose_parents)
  seen = set()
  for seed in range(20):
    parents = choose(jax.random.key(seed), np.float32(scores))
    for member, parent in enumerate(parents):
      if member in lowest:
        assert parent in highest
        seen.add(int(parent))
      else:
        assert parent == member
  assert seen == set(highest)


@pytest.mark.parametrize(
  'bounds', [Range(1e-5, 1e-1, True), Range(0.5, 0.9), Range(-1.0, 1.0)]
)
def test_hyperparameters_change_by_a_factor_or_are_drawn_again(bounds):
  value = np.float32(0.1 * bounds.low + 0.9 * bounds.high)
  keys = jax.random.split(jax.random.key(0), 4000)
  new = np.array(
    jax.vmap(lambda key: population.vary(key, value, bounds))(keys)
  )
  low, high = np.float32(bounds[:2])
  assert new.min() >= low and new.max() <= high
  factors = [np.clip(value * x, low, high) for x in np.float32([0.8, 1.25])]
  is_factor = [np.isclose(new, x, rtol=1e-6) for x in factors]
  # 3 of 8 each; the standard error is 0.008.
  assert abs(np.mean(is_factor, axis=1) - 0.375).max() < 0.03
  drawn = new[~np.any(is_factor, axis=0)]
  middle = np.sqrt(low * high) if bounds.is_log else (low + high) / 2
  assert np.mean(drawn < middle) == pytest.approx(0.5, abs=0.06)


def test_a_copy_has_all_of_its_parent_and_other_hyperparameters():
  members = np.arange(5, dtype=np.float32)
  hyperparams = {'gamma': members / 10, 'learning_rate': 10 + members}
  variables = Variables({'w': np.ones((5, 3)) * members[:, None]}, members, {})
  state = LearnerState(
    variables._replace(hyperparams=hyperparams),
    target_params=(),
    opt_state=(members, members.astype(np.int32)),
    num_updates=np.full(5, 7),
    num_sgd_steps=members.astype(np.int32),
    memory=(),
  )
  rates = Range(1.0, 100.0)
  exploit = population.make_exploit({'learning_rate': rates})
  scores = np.float32([3, 9, 4, 1, 5])  # Member 3 continues from member 1.
  new, parents = jax.jit(exploit)(state, scores, jax.random.key(1))
  expected = np.array([0, 1, 2, 1, 4])
  np.testing.assert_array_equal(parents, expected)
  old_rate = hyperparams.pop('learning_rate')
  rate = new.variables.hyperparams.pop('learning_rate')
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x[expected], y), state, new
  )
  is_same = rate == jnp.asarray(old_rate, jnp.float32)
  np.testing.assert_array_equal(is_same, expected == np.arange(5))
  assert rate[3] != old_rate[1] and 1.0 <= rate[3] <= 100.0
  # Each hyperparameter of a copy changes by itself.
  both = {'gamma': 10 + members, 'learning_rate': 10 + members}
  state = state._replace(variables=variables._replace(hyperparams=both))
  exploit = population.make_exploit({'gamma': rates, 'learning_rate': rates})
  keys = jax.random.split(jax.random.key(2), 20)
  new, _ = jax.jit(jax.vmap(exploit, (None, None, 0)))(state, scores, keys)
  found = new.variables.hyperparams
  assert np.any(found['gamma'][:, 3] != found['learning_rate'][:, 3])
