"""Tests distributions against plain arithmetic and frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from podrl.core import distributions
from podrl.types import Box, Discrete, MultiDiscrete


def test_categorical_against_probabilities():
  logits = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
  probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  action = np.arange(7) % 4
  dist = distributions.for_action_space(Discrete(4))
  assert dist.num_params == 4
  np.testing.assert_allclose(
    dist.log_prob(logits, action),
    np.log(probabilities[np.arange(7), action]),
    atol=1e-6,
  )
  np.testing.assert_allclose(
    dist.entropy(logits),
    -(probabilities * np.log(probabilities)).sum(-1),
    atol=1e-6,
  )
  np.testing.assert_array_equal(dist.mode(logits), logits.argmax(-1))


def test_categorical_samples_by_probability():
  dist = distributions.categorical(3)
  keys = jax.random.split(jax.random.key(0), 20_000)
  logits = jnp.log(jnp.asarray([0.2, 0.3, 0.5]))
  actions = jax.vmap(lambda key: dist.sample(key, logits))(keys)
  share = np.bincount(actions, minlength=3) / 20_000
  # The tolerance is five standard deviations: 5 sqrt(.25 / 20000) = .018.
  np.testing.assert_allclose(share, [0.2, 0.3, 0.5], atol=0.018)


def test_components_are_independent_categoricals():
  sizes = (3, 1, 4)
  dist = distributions.for_action_space(MultiDiscrete(sizes))
  assert dist.num_params == 8
  head = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
  action = np.arange(42).reshape(2, 7, 3) % sizes
  log_prob, entropy = np.zeros((2, 7)), np.zeros((2, 7))
  mode = np.zeros_like(action)
  for place in np.ndindex(2, 7):
    for i, part in enumerate((slice(0, 3), slice(3, 4), slice(4, 8))):
      logits = head[place][part].astype(np.float64)
      probabilities = np.exp(logits) / np.exp(logits).sum()
      log_prob[place] += np.log(probabilities[action[place][i]])
      entropy[place] += scipy.stats.entropy(probabilities)
      mode[place][i] = logits.argmax()
  np.testing.assert_allclose(dist.log_prob(head, action), log_prob, atol=1e-5)
  np.testing.assert_allclose(dist.entropy(head), entropy, atol=1e-5)
  np.testing.assert_array_equal(dist.mode(head), mode)


def test_components_are_drawn_independently():
  dist = distributions.multi_categorical((2, 2, 3))
  keys = jax.random.split(jax.random.key(0), 20_000)
  shares = [0.3, 0.7], [0.3, 0.7], [0.2, 0.3, 0.5]
  head = jnp.log(jnp.concatenate([*map(jnp.asarray, shares)]))
  drawn = jax.vmap(dist.sample, (0, None))(keys, head)
  assert drawn.shape == (20_000, 3) and drawn.dtype == jnp.int32
  counts, _ = np.histogramdd(np.asarray(drawn), (2, 2, 3))
  expected = np.einsum('i,j,k->ijk', *shares)
  # The tolerance is five standard deviations: 5 sqrt(.25 / 20000) = .018.
  np.testing.assert_allclose(counts / 20_000, expected, atol=0.018)


_LOW, _HIGH = np.float32([-1.0, 0.0, -2.0]), np.float32([1.0, 3.0, 6.0])
_BOX = Box((3,), _LOW, _HIGH)


def _head(dist, seed=0, batch=50):
  """Returns a head, its means and its scales; some means saturate a tanh."""
  rng = np.random.default_rng(seed)
  mean = rng.normal(size=(batch, 3)) * 2.0
  scale = rng.uniform(0.05, 3.0, (batch, 3))
  # The scale is softplus(raw + offset) + 1e-3; raw = 0 gives a scale of 1.
  raw = np.log(np.expm1(scale - 1e-3)) - np.log(np.expm1(1.0 - 1e-3))
  assert dist.num_params == 6
  return np.concatenate([mean, raw], -1).astype(np.float32), mean, scale


def test_gaussian_against_scipy():
  dist = distributions.for_action_space(_BOX, 'gaussian')
  head, mean, scale = _head(dist)
  # scipy's distribution is in the units of the actions.
  half, middle = (_HIGH - _LOW) / 2, (_HIGH + _LOW) / 2
  normal = scipy.stats.norm(middle + half * mean, half * scale)
  sample = np.random.default_rng(1).normal(size=mean.shape).astype(np.float32)
  np.testing.assert_allclose(
    dist.log_prob(head, sample),
    normal.logpdf(middle + half * sample).sum(-1),
    rtol=1e-4,
    atol=1e-4,
  )
  np.testing.assert_allclose(
    dist.entropy(head), normal.entropy().sum(-1), rtol=1e-5, atol=1e-5
  )
  np.testing.assert_allclose(
    dist.to_action(dist.mode(head)),
    np.clip(middle + half * mean, _LOW, _HIGH),
    atol=1e-5,
  )


def test_tanh_gaussian_against_scipy_and_numerical_integration():
  dist = distributions.for_action_space(_BOX, 'tanh_gaussian')
  head, mean, scale = _head(dist)
  half, middle = (_HIGH - _LOW) / 2, (_HIGH + _LOW) / 2

  sample = np.random.default_rng(1).normal(size=mean.shape)
  action = middle + half * np.tanh(sample)
  # The density follows from the change of variables a = middle + half tanh x.
  y = (action - middle) / half
  expected = (
    scipy.stats.norm.logpdf(np.arctanh(y), mean, scale)
    - np.log((1 - y**2) * half)
  ).sum(-1)
  np.testing.assert_allclose(
    dist.log_prob(head, sample.astype(np.float32)),
    expected,
    rtol=1e-4,
    atol=1e-4,
  )
  np.testing.assert_allclose(
    dist.to_action(sample.astype(np.float32)), action, atol=1e-5
  )

  def integral(mean, scale, half):
    """Integrates -p(x) log p(a) over x; over a, the ends are singular."""

    def integrand(x):
      log_slope = (
        -2 * np.log(np.cosh(x)) if abs(x) < 300 else (2 * (np.log(2) - abs(x)))
      )
      # This is the normal log-density; scipy's function is 100 times slower.
      log_density = -0.5 * ((x - mean) / scale) ** 2 - np.log(
        scale * np.sqrt(2 * np.pi)
      )
      return -np.exp(log_density) * (log_density - log_slope - np.log(half))

    return scipy.integrate.quad(
      integrand, mean - 12 * scale, mean + 12 * scale, limit=200
    )[0]

  expected = [sum(map(integral, m, s, half)) for m, s in zip(mean, scale)]
  np.testing.assert_allclose(dist.entropy(head), expected, rtol=2e-3, atol=2e-3)


def test_densities_of_a_tanh_gaussian_integrate_to_one():
  box = Box((1,), np.float32([-3.0]), np.float32([1.0]))
  dist = distributions.for_action_space(box, 'tanh_gaussian')
  head = jnp.asarray([0.3, -0.5])
  actions = np.linspace(-3, 1, 20_001)[1:-1]
  samples = np.arctanh((actions + 1) / 2).astype(np.float32)
  density = np.exp(
    dist.log_prob(jnp.broadcast_to(head, (len(samples), 2)), samples[:, None])
  )
  np.testing.assert_allclose(
    scipy.integrate.trapezoid(density, actions), 1.0, atol=1e-3
  )


@pytest.mark.parametrize('name', ['gaussian', 'tanh_gaussian'])
def test_samples_have_their_moments_and_actions_their_bounds(name):
  dist = distributions.for_action_space(_BOX, name)
  keys = jax.random.split(jax.random.key(0), 20_000)
  head, mean, scale = _head(dist, batch=1)
  samples = jax.vmap(lambda k: dist.sample(k, head[0]))(keys)
  # The tolerances are five standard errors: of a mean, and of a deviation.
  np.testing.assert_allclose(
    np.mean((samples - mean) / scale, 0), np.zeros(3), atol=5 / 20_000**0.5
  )
  np.testing.assert_allclose(np.std(samples, 0), scale[0], rtol=5 / 40_000**0.5)
  extreme = jnp.asarray([[-1e30] * 3, [1e30] * 3, [-20.0] * 3, [20.0] * 3])
  for x in samples, extreme:
    action = np.asarray(dist.to_action(x))
    assert action.shape == x.shape and action.dtype == jnp.float32
    assert np.all(action >= _LOW) and np.all(action <= _HIGH)
  np.testing.assert_array_equal(dist.to_action(extreme)[:2], [_LOW, _HIGH])


@pytest.mark.parametrize('name', ['gaussian', 'tanh_gaussian'])
def test_saturated_actions_keep_finite_densities_and_gradients(name):
  dist = distributions.for_action_space(_BOX, name)
  head = jnp.asarray([30.0, -30.0, 8.0, -40.0, 2.0, 40.0])
  sample = jnp.asarray([31.0, -29.0, 60.0])
  for f in (lambda h: dist.log_prob(h, sample), dist.entropy):
    value, grad = jax.value_and_grad(f)(head)
    assert np.isfinite(value) and np.all(np.isfinite(grad))


def test_boxes_of_any_shape_and_with_missing_bounds():
  inf, most = np.inf, np.finfo(np.float32).max
  low = np.float32([[-1.0, -inf, 0.0], [-inf, 2.0, -most]])
  high = np.float32([[1.0, inf, inf], [5.0, 2.0, most]])
  dist = distributions.for_action_space(Box((2, 3), low, high))
  assert dist.num_params == 12 and dist.num_constant_params == 6
  sample = jnp.asarray([0.5, 0.5, 0.5, -0.5, 0.5, 0.5])
  # A dimension keeps its unit if it has no bounds or has width 0. A dimension
  # with one bound starts at that bound.
  expected = np.float32([[0.5, 0.5, 0.5], [4.5, 2.0, 0.5]])
  np.testing.assert_allclose(dist.to_action(sample), expected)
  np.testing.assert_array_equal(
    dist.to_action(jnp.full((4, 6), 1e12))[0],
    np.float32([[1.0, 1e12, 1e12], [5.0, 2.0, 1e12]]),
  )
  np.testing.assert_allclose(
    dist.log_prob(jnp.zeros(12), sample),
    scipy.stats.norm.logpdf(0.5) * 6,
    rtol=1e-5,
  )


@pytest.mark.parametrize('name', ['gaussian', 'tanh_gaussian'])
def test_large_bounds_are_bounds(name):
  box = Box((1,), np.float32([0]), np.float32([5e6]))
  dist = distributions.for_action_space(box, name)
  # A sample of 0 is the middle, and one of 100 is the upper bound.
  actions = dist.to_action(jnp.array([[0.0], [100.0], [-100.0]]))
  np.testing.assert_array_equal(actions[:, 0], [2.5e6, 5e6, 0.0])


@pytest.mark.parametrize(
  'space,name,message',
  [
    (_BOX, 'categorical', r'box of shape \(3,\); use gaussian'),
    (Discrete(3), 'gaussian', 'discrete; use categorical'),
    (Discrete(3), 'tanh_gaussian', 'discrete; use categorical'),
    (MultiDiscrete((3, 2)), 'gaussian', 'discrete; use categorical'),
    (
      Box((1,), np.float32([0]), np.float32([np.inf])),
      'tanh_gaussian',
      'needs bounds, but actions are from 0.0 to inf; use gaussian',
    ),
  ],
)
def test_what_does_not_fit_is_refused(space, name, message):
  with pytest.raises(ValueError, match=message):
    distributions.for_action_space(space, name)


def test_scales_start_where_they_are_told():
  dist = distributions.for_action_space(_BOX, initial_scale=0.2)
  half = (_HIGH - _LOW) / 2
  np.testing.assert_allclose(
    dist.entropy(jnp.zeros(6)),
    scipy.stats.norm(0, 0.2 * half).entropy().sum(),
    rtol=1e-5,
  )


def test_scales_may_depend_on_the_state():
  dist = distributions.for_action_space(_BOX, state_dependent_scale=True)
  assert (dist.num_params, dist.num_constant_params) == (6, 0)
