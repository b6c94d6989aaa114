"""What the numbers of a policy head mean: a distribution over actions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.types import Array, Box, Discrete

DISTRIBUTIONS = ('auto', 'categorical', 'gaussian', 'tanh_gaussian')


class Distribution(NamedTuple):
  """A family of distributions over actions, as pure functions.

  What is drawn is a *sample*, and the action is its image. A bounded action
  may have many samples, so learning keeps the sample.

  Attributes:
    num_params: how many numbers the policy head puts out.
    num_constant_params: how many of them, the last, a network may hold as
      parameters of its own, the same in every state.
    sample: `(rng_key, head[num_params]) -> sample`, unbatched.
    mode: `(head[..., num_params]) -> sample[...]`, the greedy choice.
    to_action: `(sample[...]) -> action[...]`, within the action space.
    log_prob: `(head[..., num_params], sample[...]) -> float32 [...]`, of the
      action; for a continuous one a density, in nats.
    entropy: `(head[..., num_params]) -> float32 [...]`, in nats.
  """

  num_params: int
  num_constant_params: int
  sample: Callable[[chex.PRNGKey, Array], Array]
  mode: Callable[[Array], Array]
  to_action: Callable[[Array], Array]
  log_prob: Callable[[Array, Array], Array]
  entropy: Callable[[Array], Array]


def categorical(num_actions: int) -> Distribution:
  """The categorical distribution, its head holding one logit per action."""

  def log_prob(logits: Array, action: Array) -> Array:
    chex.assert_equal_shape_prefix([logits, action], action.ndim)
    # A product with the one-hot action: gathering is slower in the gradient.
    one_hot = jax.nn.one_hot(action, num_actions)
    return jnp.sum(jax.nn.log_softmax(logits) * one_hot, axis=-1)

  def entropy(logits: Array) -> Array:
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

  return Distribution(
    num_params=num_actions,
    num_constant_params=0,
    sample=jax.random.categorical,
    mode=lambda logits: jnp.argmax(logits, axis=-1),
    to_action=lambda action: action,
    log_prob=log_prob,
    entropy=entropy,
  )


# A bound beyond this is none: actions in its units would be all noise.
_LARGEST_BOUND = 1e6
_SMALLEST_SCALE = 1e-3
# Nodes and weights of E[f(x)] for a standard normal x.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_NODES, _WEIGHTS = (
  x.astype(np.float32) for x in (_NODES, _WEIGHTS / _WEIGHTS.sum())
)


def _is_bounded(box: Box) -> np.ndarray:
  """Where both bounds are less than `_LARGEST_BOUND`, `[*shape]`."""
  return np.maximum(np.abs(box.low), np.abs(box.high)) < _LARGEST_BOUND


def _log_slope(x: Array) -> Array:
  """log d tanh(x) / dx = log(1 - tanh(x)^2), exact for large x too."""
  return 2.0 * (np.log(2.0) - x - jax.nn.softplus(-2.0 * x))


def gaussian(
  box: Box,
  *,
  squash: bool,
  state_dependent_scale: bool = False,
  initial_scale: float = 1.0,
) -> Distribution:
  """A diagonal Gaussian over a box, one number per dimension, or its tanh.

  A sample x is in units in which the bounds are -1 and 1; a dimension without
  bounds keeps its own. The action is the clipped sample, whose density is the
  Gaussian's before clipping, or tanh(x), with the density

    log p(a) = log N(x; mean, scale) - log(1 - tanh(x)^2) - log((high - low)/2).

  The head holds the means, then what softplus turns into the scales. The
  entropy of the tanh form is by Gauss-Hermite quadrature: it has no closed form,
  and a random estimate would depend on how a batch is spread over devices. It
  is good to 0.003 up to a scale of 3, and to 0.03 up to 5.

  Args:
    box: the action space.
    squash: take the tanh, which needs bounds, rather than clip.
    state_dependent_scale: take the scales from the head in each state, rather
      than as parameters that are the same in all.
    initial_scale: of a head of zeros, as before learning; more than 0.001.

  Raises:
    ValueError: if `squash` and a bound is missing, or the scale is too small.

  Source: Haarnoja et al. 2018, arXiv:1801.01290, appendix C (tanh).
  """
  low, high = np.asarray(box.low).reshape(-1), np.asarray(box.high).reshape(-1)
  is_bounded = _is_bounded(box).reshape(-1)
  if squash and not is_bounded.all():
    raise ValueError(
      f'network.distribution=tanh_gaussian needs bounds, and actions are '
      f'from {low.min()} to {high.max()}; use gaussian'
    )
  if not initial_scale > _SMALLEST_SCALE:
    raise ValueError(
      f'network.initial_scale={initial_scale} must be more than '
      f'{_SMALLEST_SCALE}'
    )
  size = low.size
  # A dimension of one value has no width; it keeps its own unit, as one
  # without bounds does, around the bound that it may have.
  finite_low, finite_high = (
    np.where(np.abs(x) < _LARGEST_BOUND, x, 0.0) for x in (low, high)
  )
  half = np.where(
    is_bounded & (high > low), (finite_high - finite_low) / 2, 1.0
  )
  middle = (finite_low + finite_high) / np.where(is_bounded, 2.0, 1.0)
  half, middle = half.astype(np.float32), middle.astype(np.float32)
  log_half = float(np.log(half).sum())

  offset = np.log(np.expm1(initial_scale - _SMALLEST_SCALE))

  def split(head: Array) -> tuple[Array, Array]:
    mean, scale = jnp.split(head, 2, axis=-1)
    return mean, jax.nn.softplus(scale + offset) + _SMALLEST_SCALE

  def along(constants: np.ndarray, x: Array) -> np.ndarray:
    return constants.reshape((1,) * (x.ndim - 1) + (-1,))

  def sample(rng_key: chex.PRNGKey, head: Array) -> Array:
    mean, scale = split(head)
    return mean + scale * jax.random.normal(rng_key, mean.shape)

  def to_action(x: Array) -> Array:
    action = along(middle, x) + along(half, x) * (jnp.tanh(x) if squash else x)
    action = jnp.clip(action, along(low, x), along(high, x))
    return action.reshape(*x.shape[:-1], *box.shape)

  def log_prob(head: Array, x: Array) -> Array:
    chex.assert_equal_shape_prefix([head, x], x.ndim - 1)
    mean, scale = split(head)
    log_probs = (
      -0.5 * jnp.square((x - mean) / scale)
      - jnp.log(scale)
      - 0.5 * np.log(2 * np.pi)
    )
    if squash:
      log_probs -= _log_slope(x)
    return jnp.sum(log_probs, axis=-1) - log_half

  def entropy(head: Array) -> Array:
    mean, scale = split(head)
    entropies = 0.5 * np.log(2 * np.pi * np.e) + jnp.log(scale)
    if squash:
      x = mean[..., None] + scale[..., None] * along(_NODES, scale[..., None])
      entropies += jnp.sum(_log_slope(x) * along(_WEIGHTS, x), axis=-1)
    return jnp.sum(entropies, axis=-1) + log_half

  return Distribution(
    num_params=2 * size,
    num_constant_params=0 if state_dependent_scale else size,
    sample=sample,
    mode=lambda head: split(head)[0],
    to_action=to_action,
    log_prob=log_prob,
    entropy=entropy,
  )


def for_action_space(
  action: Discrete | Box, name: str = 'auto', **options: Any
) -> Distribution:
  """A distribution over an action space.

  Args:
    action: the action space.
    name: one of `DISTRIBUTIONS`; 'auto' is categorical or Gaussian.
    **options: of `gaussian`.

  Raises:
    ValueError: where the distribution does not fit.
  """
  is_discrete = isinstance(action, Discrete)
  if name == 'auto':
    name = 'categorical' if is_discrete else 'gaussian'
  if is_discrete != (name == 'categorical'):
    space, fitting = (
      ('discrete', 'categorical')
      if is_discrete
      else (f'a box of shape {action.shape}', 'gaussian or tanh_gaussian')
    )
    raise ValueError(
      f'network.distribution={name} does not fit actions that are {space}; '
      f'use {fitting}, or auto'
    )
  if is_discrete:
    return categorical(action.num_actions)
  return gaussian(action, squash=name == 'tanh_gaussian', **options)
