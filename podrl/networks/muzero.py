"""MuZero's network: a model of the environment in a hidden state."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podrl.core.observations import without_mask, zeros
from podrl.fields import Field, Fields, Range
from podrl.networks.torsos import (
  Conv,
  as_image,
  build_torso,
  image_sizes,
  scales,
)
from podrl.types import Array, Box, Discrete, EnvSpec, Tree

FIELDS = {
  'network.channels': Field(
    0,
    'Channels of a hidden state for images; 0 means that it is a vector.',
    Range(0, 2**16),
  )
}

# The representation halves an image until its sides are not longer than this.
_LARGEST_SIDE = 12
# The values of other fields that a hidden image needs.
_FIXED = {
  'network.name': 'auto',
  'network.activation': 'relu',
  'network.layer_norm': True,
  'network.dtype': 'float32',
}
_HEAD_CHANNELS = 4  # Channels of an image from which a head computes.


class MuZeroNetwork(NamedTuple):
  """Pure functions for N rows and M bins.

  Attributes:
    init: `(rng_key) -> params`.
    represent: `(params, obs) -> hidden`, from leaves `[N, ...]` to float32
      vectors `[N, H]` or images `[N, h, w, C]`, each state scaled to [0, 1].
    step: `(params, hidden, action) -> (hidden, reward, turn)`, for actions
      `[N, ...]` of the environment; `reward` is float32 logits `[N, M]`. In a
      game with turns, `turn` is the float32 logit `[N]` that the same player
      moves again; otherwise, it is `()`.
    predict: `(params, hidden) -> (policy, value)`, a policy head float32
      `[N, num_params]` and logits `[N, M]`.
  """

  init: Callable[[jax.Array], Tree]
  represent: Callable[[Tree, Tree], Array]
  step: Callable[[Tree, Array, Array], tuple[Array, Array, Tree]]
  predict: Callable[[Tree, Array], tuple[Array, Array]]


def _scale(hidden: Array) -> Array:
  """Scales each state to [0, 1]; Schrittwieser et al. 2020, appendix G."""
  axes = tuple(range(1, hidden.ndim))
  low = jnp.min(hidden, axis=axes, keepdims=True)
  high = jnp.max(hidden, axis=axes, keepdims=True)
  return (hidden - low) / jnp.maximum(high - low, 1e-5)


class _Head(nn.Module):
  """One hidden layer, and an output that is 0 at the start of training."""

  hidden_size: int
  num_outputs: int

  @nn.compact
  def __call__(self, x: Any) -> jax.Array:
    if x.ndim > 2:
      x = nn.relu(nn.LayerNorm()(Conv(_HEAD_CHANNELS, kernel=1)(x)))
      x = x.reshape(len(x), -1)
    x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden_size)(x)))
    return nn.Dense(self.num_outputs, kernel_init=nn.initializers.zeros)(x)


class _Model(nn.Module):
  """Representation, dynamics and prediction; subclasses have the first two."""

  hidden_size: int  # Width of hidden layers, and of a vector.
  num_policy_params: int  # Width of the policy head.
  num_bins: int
  has_turns: bool
  has_dynamics: bool  # Whether `step` is used.

  def setup(self) -> None:
    if self.has_turns:
      self.turn = _Head(self.hidden_size, 1)
    self.reward = _Head(self.hidden_size, self.num_bins)
    self.policy = _Head(self.hidden_size, self.num_policy_params)
    self.value = _Head(self.hidden_size, self.num_bins)

  def represent(self, obs: Tree) -> Array:
    return _scale(self.encode(obs))

  def step(self, hidden: Array, action: Array) -> tuple[Array, Array, Tree]:
    """Computes `MuZeroNetwork.step` for actions `[N, D]` from `_encode`."""
    hidden = _scale(hidden + self.change(hidden, action))
    turn = self.turn(hidden)[:, 0] if self.has_turns else ()
    return hidden, self.reward(hidden), turn

  def predict(self, hidden: Array) -> tuple[Array, Array]:
    return self.policy(hidden), self.value(hidden)

  def __call__(self, obs: Tree, action: Array) -> Any:
    """Calls every part, so that `init` makes all parameters."""
    hidden = self.represent(obs)
    if not self.has_dynamics:
      return self.predict(hidden)
    hidden, *others = self.step(hidden, action)
    return others, self.predict(hidden)


class _VectorModel(_Model):
  """The hidden state is a vector with `hidden_size` numbers."""

  make_torso: Callable[[], nn.Module]  # Builds a torso, an `nn.Module`.

  def setup(self) -> None:
    super().setup()
    self.torso = self.make_torso()
    self.encoder = nn.Dense(self.hidden_size)
    self.first = nn.Dense(self.hidden_size)
    self.norm = nn.LayerNorm()
    self.second = nn.Dense(self.hidden_size)

  def encode(self, obs: Tree) -> Array:
    return self.encoder(self.torso(obs).astype(jnp.float32))

  def change(self, hidden: Array, action: Array) -> Array:
    x = jnp.concatenate([hidden, action], axis=-1)
    return self.second(nn.relu(self.norm(self.first(x))))


class _Residual(nn.Module):
  """Two convolutions; the result is added to an image with C channels."""

  channels: int  # C.

  @nn.compact
  def __call__(self, x: Any) -> jax.Array:
    x = Conv(self.channels, kernel=3, padding='SAME')(x)
    x = nn.relu(nn.LayerNorm()(x))
    return Conv(self.channels, kernel=3, padding='SAME')(x)


class _ImageModel(_Model):
  """The hidden state is an image with `channels` channels."""

  channels: int  # C.
  channels_first: bool  # Whether observations are CHW.
  num_strides: int  # How often the representation halves an image.
  index: int  # Index of the image among an observation's leaves.
  scale: Any  # What the image is divided by.
  # Builds a torso for the other leaves; None if there are none.
  make_torso: Callable[[], nn.Module] | None

  def setup(self) -> None:
    super().setup()
    strides = [2] * self.num_strides or [1]
    self.convs = [
      Conv(self.channels, kernel=3, stride=x, padding='SAME') for x in strides
    ]
    self.norms = [nn.LayerNorm() for _ in strides]
    self.block = _Residual(self.channels)
    self.dynamics = _Residual(self.channels)
    if self.make_torso:
      self.torso = self.make_torso()
      self.planes = nn.Dense(self.channels)

  def encode(self, obs: Tree) -> Array:
    leaves = jax.tree.leaves(obs)
    x = as_image(leaves.pop(self.index), self.channels_first, self.scale)
    for conv, norm in zip(self.convs, self.norms, strict=True):
      x = nn.relu(norm(conv(x)))
    if leaves:
      x = x + self.planes(self.torso(leaves))[:, None, None]
    return x + self.block(x)

  def change(self, hidden: Array, action: Array) -> Array:
    shape = *hidden.shape[:3], action.shape[-1]
    planes = jnp.broadcast_to(action[:, None, None], shape)
    return self.dynamics(jnp.concatenate([hidden, planes], axis=-1))


def _encode(space: Discrete | Box, action: Array) -> Array:
  """Maps actions `[N, ...]` to float32 `[N, D]`: one-hot, or in [-1, 1]."""
  if isinstance(space, Discrete):
    return jax.nn.one_hot(action, space.num_actions)
  low, high = (np.reshape(x, (1, -1)) for x in (space.low, space.high))
  width = np.where(high > low, high - low, 1.0)
  return 2.0 * (action.reshape(len(action), -1) - low) / width - 1.0


def make_network(
  spec: EnvSpec,
  fields: Fields,
  *,
  num_policy_params: int,
  num_bins: int,
  has_dynamics: bool = True,
) -> MuZeroNetwork:
  """Makes a network.

  Args:
    fields: the configuration by name. If `network.channels` is not 0, the
      hidden state is an image with this number of channels, from the largest
      image of an observation; the features of the other leaves are added to
      each of its pixels. Otherwise, it is a vector, and a torso reads the
      observations. The last of `network.hidden_sizes` is the size of this
      vector and of each head's hidden layer.
    num_policy_params: width of the policy head.
    num_bins: M, the bins of rewards and values.
    has_dynamics: whether the network has the parameters of `step`.

  Raises:
    ValueError: if `channels` does not fit the observations or the torso.
  """
  space: Any = spec.action
  channels = fields['network.channels']
  sizes = (
    fields['network.hidden_sizes'][-1],
    num_policy_params,
    num_bins,
    spec.has_turns,
    has_dynamics,
  )
  if channels:
    reasons = [
      f'with {k}={fields[k]}' for k, x in _FIXED.items() if fields.get(k) != x
    ]
    sides = image_sizes(spec)
    if not any(sides):
      reasons = ['without an image']
    if reasons:
      raise ValueError(
        f'config.network.channels={channels} cannot be used {reasons[0]}; use 0'
      )
    leaves, divisors = jax.tree.leaves(without_mask(spec.obs)), [*scales(spec)]
    index = int(np.argmax(sides))
    shape, scale = leaves.pop(index).shape, divisors.pop(index)
    longest = max(shape[1:] if spec.channels_first else shape[:2])
    num_strides = max(0, math.ceil(math.log2(longest / _LARGEST_SIDE)))
    others = spec._replace(obs=leaves, obs_scale=divisors)
    torso = build_torso(others, fields) if leaves else None
    model: _Model = _ImageModel(
      *sizes, channels, spec.channels_first, num_strides, index, scale, torso
    )
  else:
    model = _VectorModel(*sizes, build_torso(spec, fields))

  def init(rng_key: jax.Array) -> Tree:
    action = jnp.zeros((1, *getattr(space, 'shape', ())), jnp.int32)
    return model.init(rng_key, zeros(spec.obs, 1), _encode(space, action))

  def step(params: Tree, hidden: Array, action: Array) -> Any:
    encoded = _encode(space, action)
    return model.apply(params, hidden, encoded, method=_Model.step)

  def bind(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *inputs: model.apply(params, *inputs, method=method)

  return MuZeroNetwork(init, bind(_Model.represent), step, bind(_Model.predict))
