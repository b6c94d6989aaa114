"""Tests the optimisers against optax with constant rates and schedules."""

import jax
import numpy as np
import optax
import pytest

from podrl.core import optimizers
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
  config = apply_kinds(sebulba_config('impala'), 'large image')
  settings = config.optimizer.to_dict() | {'anneal': False}
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


@pytest.mark.parametrize('schedule', ['linear', 'cosine', 'constant'])
@pytest.mark.parametrize('warmup', [0, 2])
def test_schedules_are_those_of_optax(schedule, warmup):
  optimizer = make_optimizer(
    'sgd',
    learning_rate=0.1,
    schedule=schedule,
    warmup_steps=warmup,
    max_grad_norm=0.0,
    num_sgd_steps=6,
  )
  length = 6 - warmup
  after = {
    'linear': optax.linear_schedule(0.1, 0.0, length),
    'cosine': optax.cosine_decay_schedule(0.1, length),
    'constant': optax.constant_schedule(0.1),
  }[schedule]
  # The first steps have 1/2 and 2/2 of the rate.
  before = optax.linear_schedule(0.05, 0.1, 1)
  rate = optax.join_schedules([before, after], [warmup]) if warmup else after
  expected = _steps(optax.sgd(rate))
  np.testing.assert_allclose(_steps(optimizer), expected, rtol=1e-5, atol=1e-9)


def test_a_run_can_extend_its_schedule():
  options = {'learning_rate': 9.0, 'schedule': 'cosine', 'max_grad_norm': 0.0}
  optimizer = make_optimizer('sgd', num_sgd_steps=3, **options)
  values = {'learning_rate': np.float32(0.1), 'anneal_steps': np.float32(7)}
  expected = _steps(optax.sgd(optax.cosine_decay_schedule(0.1, 7)))
  found = _steps(optimizer, hyperparams=values)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def _params():
  rng = np.random.default_rng(0)
  shapes = {'kernel': (3, 4), 'bias': (4,), 'scale': (2, 4)}
  return {'params': {'a': {k: rng.normal(size=x) for k, x in shapes.items()}}}


def test_weight_decay_is_adamw_on_kernels():
  params = _params()
  grads = jax.tree.map(lambda x: 0.3 * x + 1, params)
  mask = {'params': {'a': {'kernel': True, 'bias': False, 'scale': False}}}
  theirs = optax.adamw(
    0.01, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.2, mask=mask
  )
  ours = make_optimizer(
    'adam',
    learning_rate=0.01,
    anneal=False,
    max_grad_norm=0.0,
    weight_decay=0.2,
    b1=0.8,
    b2=0.9,
    eps=1e-3,
  )
  assert not getattr(ours, 'is_elementwise', False)
  assert make_optimizer('adam').is_elementwise
  states = ours.init(params), theirs.init(params)
  for _ in range(3):
    found, state = ours.update(grads, states[0], params)
    expected, other = theirs.update(grads, states[1], params)
    states = state, other
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected
    )


def test_factors_multiply_the_rates_of_groups():
  params = {'a': np.ones((2, 4), np.float32), 'b': np.ones(4, np.float32)}
  names = {'a': 'actor|critic', 'b': 'critic'}
  optimizer = make_optimizer(
    'sgd',
    groups=lambda _: names,
    learning_rate=0.5,
    anneal=False,
    max_grad_norm=0.0,
    actor_factor=0.25,
    critic_factor=0.0,
  )
  assert not getattr(optimizer, 'is_elementwise', False)
  state = optimizer.init(params)
  updates, _ = optimizer.update(params, state, params)
  row = [-0.125, -0.125, 0.0, 0.0]  # 0.5 x 0.25 for the actor's columns.
  np.testing.assert_array_equal(updates['a'], [row, row])
  np.testing.assert_array_equal(updates['b'], np.zeros(4))


def test_sgd_has_momentum_and_rmsprop_a_decay():
  options = {'learning_rate': 0.1, 'anneal': False, 'max_grad_norm': 0.0}
  found = _steps(make_optimizer('sgd', momentum=0.75, **options))
  np.testing.assert_allclose(found, _steps(optax.sgd(0.1, 0.75)), rtol=1e-6)
  ours = make_optimizer('rmsprop', decay=0.5, eps=0.1, **options)
  theirs = optax.rmsprop(0.1, decay=0.5, eps=0.1, eps_in_sqrt=False)
  np.testing.assert_allclose(_steps(ours), _steps(theirs), rtol=1e-6)


@pytest.mark.parametrize('is_packed', [True, False])
def test_steps_follow_the_kl_divergence(is_packed):
  own = optax.sgd(1.0)
  own = optimizers.elementwise(own) if is_packed else own
  optimizer = optimizers.follow_kl(own, 0.02, num_sgd_steps=4)
  assert optimizers.is_elementwise(optimizer) == is_packed
  # Below half, between, at NaN, above twice, and below half again.
  kls = [0.0, 0.03, np.nan, *[0.05] * 8, *[0.009] * 6]
  params, expected, power = np.ones(1, np.float32), [], 0
  state = optimizer.init(params)
  for kl in kls:
    power += int(kl < 0.01) - int(kl > 0.04)
    power = min(power, 0)
    expected.append(-(1.5 ** (power / 4)))
    step, state = optimizer.update(
      params, state, params, metrics={'approx_kl': np.float32(kl)}
    )
    np.testing.assert_allclose(step, expected[-1], rtol=1e-6)
  assert min(map(abs, expected)) == pytest.approx(1 / 2.25)
  with pytest.raises(
    ValueError, match='needs a loss with the metric approx_kl'
  ):
    optimizer.update(params, state, params, metrics={})
