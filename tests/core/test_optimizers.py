"""Tests the optimisers against optax with constant rates and schedules."""

import jax
import numpy as np
import optax
import pytest

from podrl.core.optimizers import make_optimizer


def _steps(optimizer, **kwargs):
  """Returns the updates of seven steps, each with a different gradient."""
  params = {'a': np.ones(3, np.float32)}
  state, found = optimizer.init(params), []
  for i in range(7):
    grads = {'a': np.float32([1.0, -2.0, 0.5]) * (i + 1)}
    updates, state = optimizer.update(grads, state, params, **kwargs)
    found.append(updates['a'])
  return np.stack(found)


@pytest.mark.parametrize(
  'name,theirs',
  [
    ('adam', lambda rate: optax.adam(rate, eps=1e-5)),
    ('radam', optax.radam),
    ('rmsprop', lambda rate: optax.rmsprop(rate, decay=0.99, eps=1e-5)),
    ('sgd', optax.sgd),
  ],
)
@pytest.mark.parametrize('anneal', [True, False])
def test_the_rate_is_a_value_that_falls_linearly(name, theirs, anneal):
  optimizer = make_optimizer(
    name, learning_rate=9.0, anneal=anneal, max_grad_norm=0.7
  )
  values = {'learning_rate': np.float32(0.1), 'anneal_steps': np.float32(5)}
  # After five steps, an annealed rate stays 0.
  rate = optax.linear_schedule(0.1, 0.0, 5) if anneal else 0.1
  expected = optax.chain(optax.clip_by_global_norm(0.7), theirs(rate))
  found = _steps(optimizer, hyperparams=values)
  np.testing.assert_allclose(found, _steps(expected), rtol=1e-6)
  assert np.all(found[5:] == 0) == anneal


def test_without_a_value_the_rate_is_the_argument():
  optimizer = make_optimizer(
    'sgd', learning_rate=0.5, anneal=False, max_grad_norm=0.0
  )
  np.testing.assert_array_equal(_steps(optimizer), _steps(optax.sgd(0.5)))
  assert jax.tree.leaves(optimizer.init({}))[0] == 0  # The leaf counts steps.
