"""Distributions over actions; a policy head outputs their parameters."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.fields import Field, Range
from podrl.kernels import categorical as kernel
from podrl.types import Array, Box, Discrete, MultiDiscrete

DISTRIBUTIONS = ('auto', 'categorical', 'gaussian', 'tanh_gaussian')

FIELDS = {
  'network.distribution': Field(
    'auto',
    'Action distribution; auto chooses it by the action space.',
    DISTRIBUTIONS,
  ),
  'network.state_dependent_scale': Field(
    False, "The Gaussian's scale depends on the state."
  ),
  'network.initial_scale': Field(
    1.0, 'Initial scale of a Gaussian for actions in [-1, 1].', Range(0.01, 10)
  ),
}

# A dimension with a larger bound counts as unbounded: it is infinite, or it
# stands for infinity, as the 1e10 of LqrLqr21-v1 does.
LARGEST_BOUND = 1e9
_SMALLEST_SCALE = 1e-3
# Gauss-Hermite nodes and weights give E[f(x)] for a standard normal x.
_nodes, _weights = np.polynomial.hermite_e.hermegauss(32)
_NODES = _nodes.astype(np.float32)
_WEIGHTS = (_weights / _weights.sum()).astype(np.float32)


class Distribution(NamedTuple):
  """A family of distributions over actions, as pure functions.

  A *sample* is what the distribution draws; `to_action` maps it to the action.
  Unrolls store the sample, because clipping maps many samples to one action.

  Attributes:
    num_params: width of the policy head.
    num_constant_params: number of values at the end of the head that may be the
      same in all states. A network may store them as parameters.
    sample: `(rng_key, head[num_params]) -> sample`, without a batch axis.
    mode: `(head[..., num_params]) -> sample[...]`, the greedy choice.
    to_action: `(sample[...]) -> action[...]`, within the action space.
    log_prob: `(head[..., num_params], sample[...]) -> float32 [...]`, the log
      of the action's probability, or of its density for a continuous action.
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
  """The categorical distribution; its head has one logit for each action."""

  def log_prob(logits: Array, action: Array) -> Array:
    chex.assert_equal_shape_prefix([logits, action], action.ndim)
    return kernel.log_prob(logits, action)

  return Distribution(
    num_params=num_actions,
    num_constant_params=0,
    sample=jax.random.categorical,
    mode=lambda logits: jnp.argmax(logits, axis=-1),
    to_action=lambda action: action,
    log_prob=log_prob,
    entropy=kernel.entropy,
  )


def multi_categorical(num_actions: Sequence[int]) -> Distribution:
  """Independent categorical distributions, one for each component of an action.

  The head contains the logits of all components, one component after another.
  `num_actions` has the number of actions of each component.
  """
  parts = [categorical(n) for n in num_actions]
  ends = np.cumsum(num_actions)[:-1].tolist()

  def split(head: Array) -> Sequence[Array]:
    return jnp.split(head, ends, axis=-1)

  def sample(rng_key: chex.PRNGKey, head: Array) -> Array:
    keys = jax.random.split(rng_key, len(parts))
    return jnp.stack([p.sample(*x) for p, *x in zip(parts, keys, split(head))])

  def mode(head: Array) -> Array:
    modes = [part.mode(x) for part, x in zip(parts, split(head))]
    return jnp.stack(modes, axis=-1)

  def log_prob(head: Array, action: Array) -> Array:
    actions = jnp.moveaxis(action, -1, 0)
    terms = zip(parts, split(head), actions, strict=True)
    each = [part.log_prob(x, action) for part, x, action in terms]
    return jnp.sum(jnp.stack(each), axis=0)

  def entropy(head: Array) -> Array:
    each = [part.entropy(x) for part, x in zip(parts, split(head))]
    return jnp.sum(jnp.stack(each), axis=0)

  return Distribution(
    num_params=sum(num_actions),
    num_constant_params=0,
    sample=sample,
    mode=mode,
    to_action=lambda action: action,
    log_prob=log_prob,
    entropy=entropy,
  )


def _log_slope(x: Array) -> Array:
  """Returns log(1 - tanh(x)^2), the log of tanh's slope; exact for large x."""
  return 2.0 * (np.log(2.0) - x - jax.nn.softplus(-2.0 * x))


def gaussian(
  box: Box,
  *,
  squash: bool,
  state_dependent_scale: bool = False,
  initial_scale: float = 1.0,
) -> Distribution:
  """A diagonal Gaussian whose samples are clipped to a box, or mapped by tanh.

  A sample x is on a scale where the bounds are -1 and 1. A dimension
  without bounds is not scaled. The action is the clipped x, or tanh(x),
  converted to the scale of the box. For a clipped action, `log_prob` is the
  log-density of the Gaussian before clipping. With tanh, `log_prob` is

    log p(a) = log N(x; mean, scale) - log(1 - tanh(x)^2) - log((high - low)/2).

  The head contains the means, followed by the numbers from which softplus
  computes the scales. With tanh, the entropy has no closed form, so podrl uses
  Gauss-Hermite quadrature. A random estimate would depend on how the batch is
  split over devices. The error of the quadrature is at most 0.003 for scales up
  to 3, and at most 0.03 for scales up to 5.

  Args:
    squash: whether to apply tanh instead of clipping; tanh needs bounds.
    state_dependent_scale: whether the scales depend on the state; if not, they
      are parameters of the network.
    initial_scale: the scale if the head is 0; it must be more than 0.001.

  Raises:
    ValueError: if `initial_scale` is too small, or if `squash` is true and the
      box has a dimension without bounds.

  Source: Haarnoja et al. 2018, arXiv:1801.01290, appendix C (tanh).
  """
  low, high = np.asarray(box.low).reshape(-1), np.asarray(box.high).reshape(-1)
  is_bounded = np.maximum(np.abs(low), np.abs(high)) < LARGEST_BOUND
  if squash and not is_bounded.all():
    raise ValueError(
      f'network.distribution=tanh_gaussian needs bounds, but actions are '
      f'from {low.min()} to {high.max()}; use gaussian'
    )
  if not initial_scale > _SMALLEST_SCALE:
    field = f'network.initial_scale={initial_scale}'
    raise ValueError(f'{field} must be more than {_SMALLEST_SCALE}')
  size = low.size
  # A dimension that lacks a bound, or has equal bounds, is not scaled, because
  # it has no width. Its centre is the bound that it has, or 0.
  finite_low, finite_high = (
    np.where(np.abs(x) < LARGEST_BOUND, x, 0.0) for x in (low, high)
  )
  width = finite_high - finite_low
  half = np.where(is_bounded & (high > low), width / 2, 1.0)
  middle = (finite_low + finite_high) / np.where(is_bounded, 2.0, 1.0)
  half, middle = half.astype(np.float32), middle.astype(np.float32)
  log_half = float(np.log(half).sum())
  offset = np.log(np.expm1(initial_scale - _SMALLEST_SCALE))

  def split(head: Array) -> tuple[Array, Array]:
    mean, scale = jnp.split(head, 2, axis=-1)
    return mean, jax.nn.softplus(scale + offset) + _SMALLEST_SCALE

  def on_last_axis(constants: np.ndarray, x: Array) -> np.ndarray:
    return constants.reshape((1,) * (x.ndim - 1) + (-1,))

  def sample(rng_key: chex.PRNGKey, head: Array) -> Array:
    mean, scale = split(head)
    return mean + scale * jax.random.normal(rng_key, mean.shape)

  def to_action(x: Array) -> Array:
    shape = (*x.shape[:-1], *box.shape)
    lower, upper = on_last_axis(low, x), on_last_axis(high, x)
    center, scale = on_last_axis(middle, x), on_last_axis(half, x)
    action = center + scale * (jnp.tanh(x) if squash else x)
    return jnp.clip(action, lower, upper).reshape(shape)

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
      scale = scale[..., None]
      x = mean[..., None] + scale * on_last_axis(_NODES, scale)
      entropies += jnp.sum(_log_slope(x) * on_last_axis(_WEIGHTS, x), axis=-1)
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
  action: Discrete | MultiDiscrete | Box, name: str = 'auto', **options: Any
) -> Distribution:
  """Builds the distribution over an action space.

  Args:
    name: one of `DISTRIBUTIONS`; 'auto' means Gaussian for a box, and
      categorical for other spaces. A name that does not fit the space raises
      a ValueError.
    **options: options of `gaussian`.
  """
  if name == 'auto':
    name = 'gaussian' if isinstance(action, Box) else 'categorical'
  misfit = f'network.distribution={name} does not fit actions that are'
  if not isinstance(action, Box):
    if name != 'categorical':
      raise ValueError(f'{misfit} discrete; use categorical, or auto')
    if isinstance(action, MultiDiscrete):
      return multi_categorical(action.num_actions)
    return categorical(action.num_actions)
  if name == 'categorical':
    raise ValueError(
      f'{misfit} a box of shape {action.shape}; use gaussian or tanh_gaussian, '
      'or auto'
    )
  return gaussian(action, squash=name == 'tanh_gaussian', **options)
