"""MuZero's network: a model of the environment in a hidden state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl.core.observations import without_mask
from podrl.types import Array, Tree


class MuZeroNetwork(NamedTuple):
  """Pure functions; N rows, H numbers of a hidden state, A actions, M bins.

  Attributes:
    init: `(rng_key) -> params`.
    represent: `(params, obs) -> hidden`, from leaves `[N, ...]` to float32
      `[N, H]`, each state scaled to [0, 1].
    step: `(params, hidden, action) -> (hidden, reward)`, for int `[N]` actions;
      `reward` is float32 logits `[N, M]`.
    predict: `(params, hidden) -> (policy, value)`, float32 logits `[N, A]` and
      `[N, M]`.
  """

  init: Callable[[jax.Array], Tree]
  represent: Callable[[Tree, Tree], Array]
  step: Callable[[Tree, Array, Array], tuple[Array, Array]]
  predict: Callable[[Tree, Array], tuple[Array, Array]]


def _scale(hidden: Array) -> Array:
  """Scales each state to [0, 1]; Schrittwieser et al. 2020, appendix G."""
  low = jnp.min(hidden, axis=-1, keepdims=True)
  high = jnp.max(hidden, axis=-1, keepdims=True)
  return (hidden - low) / jnp.maximum(high - low, 1e-5)


class _Head(nn.Module):
  """One hidden layer, and an output that is 0 at the start of training."""

  hidden_size: int
  num_outputs: int

  @nn.compact
  def __call__(self, x: Array) -> Array:
    x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden_size)(x)))
    return nn.Dense(self.num_outputs, kernel_init=nn.initializers.zeros)(x)


class _Model(nn.Module):
  """Representation, dynamics and prediction."""

  make_torso: Callable[[], nn.Module]  # Builds a torso, an `nn.Module`.
  hidden_size: int  # H, and the width of hidden layers.
  num_actions: int
  num_bins: int

  def setup(self) -> None:
    size = self.hidden_size
    self.torso = self.make_torso()
    self.encoder = nn.Dense(size)
    self.first = nn.Dense(size)
    self.norm = nn.LayerNorm()
    self.second = nn.Dense(size)
    self.reward = _Head(size, self.num_bins)
    self.policy = _Head(size, self.num_actions)
    self.value = _Head(size, self.num_bins)

  def represent(self, obs: Tree) -> Array:
    return _scale(self.encoder(self.torso(obs).astype(jnp.float32)))

  def step(self, hidden: Array, action: Array) -> tuple[Array, Array]:
    one_hot = jax.nn.one_hot(action, self.num_actions)
    x = jnp.concatenate([hidden, one_hot], axis=-1)
    x = nn.relu(self.norm(self.first(x)))
    hidden = _scale(hidden + self.second(x))
    return hidden, self.reward(hidden)

  def predict(self, hidden: Array) -> tuple[Array, Array]:
    return self.policy(hidden), self.value(hidden)

  def __call__(self, obs: Tree, action: Array) -> Any:
    """Calls every part, so that `init` makes all parameters."""
    hidden, reward = self.step(self.represent(obs), action)
    return reward, self.predict(hidden)


def make_network(
  make_torso: Callable[[], nn.Module],
  obs: Tree,
  num_actions: int,
  *,
  hidden_size: int,
  num_bins: int,
) -> MuZeroNetwork:
  """Makes a network.

  Args:
    make_torso: builds a torso, an `nn.Module`, which reads the observations.
    obs: tree of `jax.ShapeDtypeStruct` for the observation of one environment.
    num_actions: A, number of actions.
    hidden_size: H, the size of the hidden state and of each head's layer.
    num_bins: M, the bins of rewards and values.
  """
  model = _Model(make_torso, hidden_size, num_actions, num_bins)

  def init(rng_key: jax.Array) -> Tree:
    example = jax.tree.map(
      lambda x: jnp.zeros((1, *x.shape), x.dtype), without_mask(obs)
    )
    return model.init(rng_key, example, jnp.zeros((1,), jnp.int32))

  def bind(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *inputs: model.apply(params, *inputs, method=method)

  return MuZeroNetwork(
    init,
    bind(_Model.represent),
    bind(_Model.step),
    bind(_Model.predict),
  )
