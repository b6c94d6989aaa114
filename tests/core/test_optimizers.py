"""Tests the optimisers against optax with constant rates and schedules."""

import jax
import numpy as np
import optax
import pytest

from podrl.core.optimizers import make_optimizer, scale_by_rms
from podrl.run.config import apply_kinds, sebulba_config


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
    (
      'rmsprop',
      lambda rate: optax.rmsprop(
        rate, decay=0.99, eps=0.02 / 640, eps_in_sqrt=False
      ),
    ),
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


def test_rmsprop_of_a_mean_loss_steps_about_as_far_as_cleanba_with_a_sum():
  # Cleanba sums the loss over 20 x 32 slots, clips the gradient's norm to 40,
  # and divides by sqrt(nu) + 0.01, for nu = 0.99 nu + 0.01 g^2.
  fields = sebulba_config('impala')
  apply_kinds(fields, 'large image')
  settings = fields.optimizer.to_dict() | {'anneal': False}
  optimizer = make_optimizer(**settings)
  rng, nu, size = np.random.default_rng(0), np.zeros(1000), 640
  params = {'a': np.zeros(1000, np.float32)}
  state = optimizer.init(params)
  for scale in (1e-2, 1e-3, 1e-4, 1e-4, 1e-3):
    grads = rng.normal(size=1000) * scale
    total = grads * size
    norm = np.linalg.norm(total)
    total *= min(1.0, 40.0 / norm)
    nu = 0.99 * nu + 0.01 * total**2
    theirs = -6e-4 * total / (np.sqrt(nu) + 0.01)
    mean = {'a': np.float32(grads)}
    updates, state = optimizer.update(mean, state, params)
    expected = -6e-4 * total / (np.sqrt(nu) + 0.02)
    np.testing.assert_allclose(updates['a'], expected, rtol=1e-4)
    ratio = np.linalg.norm(updates['a']) / np.linalg.norm(theirs)
    assert 0.5 <= ratio <= 1.0
    assert (norm > 40.0) == (scale > 1e-3)  # The clip binds where theirs does.


def test_rmsprop_has_a_derivative_where_the_gradient_is_zero():
  optimizer = scale_by_rms(0.99, 1e-5)

  def step(gradient):
    return optimizer.update(gradient, optimizer.init(gradient))[0]

  # g / (sqrt(0.01 g^2 + 1e-16) + 1e-5) has the derivative 1 / (1e-8 + 1e-5).
  np.testing.assert_allclose(jax.grad(step)(0.0), 1 / 1.001e-5, rtol=1e-4)
