"""Torsos: networks that map an observation to features.

A torso is a flax module from `[N, *obs_shape]` to `[N, features]`. It accepts
observations as environments return them (bool, uint8, CHW). It converts them in
the compiled program, so podrl stores and copies observations in a small dtype.
`dtype` is the dtype of the arithmetic; parameters are float32.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podrl import modules
from podrl.core.observations import without_mask
from podrl.fields import Field, Fields, Range, Table, short
from podrl.kernels import conv, sparse
from podrl.kernels.dense import dot_general, relu
from podrl.messages import check_choice
from podrl.types import EnvSpec, Tree

_ORTHOGONAL = nn.initializers.orthogonal(np.sqrt(2))
_Dense = functools.partial(
  nn.Dense, kernel_init=_ORTHOGONAL, dot_general=dot_general
)

# What a leaf is divided by: one number, or one for each of its elements.
_Scale = float | tuple[float, ...]


def scales(spec: EnvSpec) -> tuple[_Scale, ...]:
  """Returns the scale of each leaf of `spec.obs`; see `EnvSpec.obs_scale`."""
  obs, scale = without_mask(spec.obs), spec.obs_scale
  if scale is None:
    scale = jax.tree.map(lambda x: 255.0 if x.dtype == jnp.uint8 else 1.0, obs)

  def one(x: Any, scale: Any) -> np.ndarray:
    return np.broadcast_to(np.float32(1 if x.dtype == bool else scale), x.shape)

  # Modules must be hashable, so they get tuples instead of arrays.
  leaves = jax.tree.leaves(jax.tree.map(one, obs, scale))
  return tuple(
    float(x.flat[0]) if np.all(x == x.flat[0]) else tuple(x.ravel().tolist())
    for x in leaves
  )


def as_vector(
  obs: Tree, dtype: Any = jnp.float32, scales: Sequence[_Scale] = ()
) -> jax.Array:
  """Joins the leaves of an observation, `[N, ...]` each, into `[N, D]`.

  The first leaves are divided by `scales`, and the other leaves by 1.
  """
  leaves = [x.reshape(len(x), -1).astype(dtype) for x in jax.tree.leaves(obs)]
  for i, scale in enumerate(scales):
    if isinstance(scale, tuple):
      leaves[i] /= jnp.asarray(scale, dtype)[None]
    elif scale != 1:
      leaves[i] /= scale
  return jnp.concatenate(leaves, axis=-1)


def _dot_general_for(obs: Tree, dtype: Any) -> Callable[..., jax.Array]:
  """Returns the `dot_general` of the layer that takes `as_vector(obs)`."""
  is_binary = all(x.dtype == bool for x in jax.tree.leaves(obs))
  # A sum in a smaller dtype would be less exact than a matrix product.
  if not is_binary or jnp.dtype(dtype) != jnp.float32:
    return dot_general
  bools = as_vector(obs, bool)
  if not sparse.is_fast(bools):
    return dot_general

  def multiply_bools(x, kernel, dimension_numbers, precision=None):
    del x  # flax has converted `bools` to floats.
    del dimension_numbers, precision
    return sparse.multiply_bools(bools, kernel)

  return multiply_bools


def as_image(
  obs: Tree, channels_first: bool, scale: _Scale, dtype: Any = jnp.float32
) -> jax.Array:
  """Converts images to `[N, H, W, C]`, and divides them by `scale`."""
  (image,) = jax.tree.leaves(obs)
  divisor: Any = scale
  if isinstance(scale, tuple):
    divisor = jnp.asarray(scale, dtype).reshape(1, *image.shape[1:])
    divisor = jnp.moveaxis(divisor, 1, -1) if channels_first else divisor
  image = jnp.moveaxis(image, 1, -1) if channels_first else image
  return image.astype(dtype) / divisor


def standardize(image: jax.Array) -> jax.Array:
  """Scales each of the images `[N, H, W, C]` to mean 0 and deviation 1."""
  # A uniform background would otherwise hide small objects like Pong's ball.
  x = image - jnp.mean(image, (1, 2, 3), keepdims=True)
  return x / (jnp.std(x, (1, 2, 3), keepdims=True) + 1e-3)


class MLP(nn.Module):
  """A multilayer perceptron that takes the flattened observation."""

  hidden_sizes: Sequence[int] = (64, 64)  # Width of each layer.
  # Applied after each layer.
  activation: Callable[[jax.Array], jax.Array] = nn.tanh
  dtype: Any = jnp.float32  # Dtype of the arithmetic.
  layer_norm: bool = False  # Whether each layer is normalised.
  scales: Sequence[_Scale] = ()  # See `as_vector`.

  @nn.compact
  def __call__(self, obs: Tree) -> jax.Array:
    x = as_vector(obs, self.dtype, self.scales)
    product = _dot_general_for(obs, self.dtype)
    for size in self.hidden_sizes:
      x = _Dense(size, dtype=self.dtype, dot_general=product)(x)
      product = dot_general
      x = nn.LayerNorm(dtype=self.dtype)(x) if self.layer_norm else x
      x = self.activation(x)
    return x


class TwinMLP(nn.Module):
  """Two separate MLPs; one matrix product computes both first layers.

  The result and the number of parameters are those of two `MLP`s, but the
  network reads and converts a wide observation only once. The attributes are
  those of `MLP`.
  """

  hidden_sizes: Sequence[int] = (64, 64)
  activation: Callable[[jax.Array], jax.Array] = nn.tanh
  dtype: Any = jnp.float32
  scales: Sequence[_Scale] = ()

  @nn.compact
  def __call__(self, obs: Tree) -> tuple[jax.Array, ...]:
    first, *rest = self.hidden_sizes

    def init_halves(rng_key, shape, dtype=jnp.float32):
      half = (shape[0], shape[1] // 2)
      keys = jax.random.split(rng_key)
      return jnp.concatenate([_ORTHOGONAL(k, half, dtype) for k in keys], 1)

    dense = nn.Dense(
      2 * first,
      dtype=self.dtype,
      kernel_init=init_halves,
      dot_general=_dot_general_for(obs, self.dtype),
    )
    x = self.activation(dense(as_vector(obs, self.dtype, self.scales)))
    outputs = []
    for half in jnp.split(x, 2, axis=-1):
      for size in rest:
        half = self.activation(_Dense(size, dtype=self.dtype)(half))
      outputs.append(half)
    return tuple(outputs)


class Conv(nn.Module):
  """A 2D convolution from `[N, H, W, C]` to `[N, H', W', features]`."""

  features: int  # Number of output channels.
  kernel: int  # Height and width of the kernel.
  stride: int = 1  # Stride in both directions.
  padding: str = 'VALID'  # 'VALID' or 'SAME'.
  dtype: Any = jnp.float32  # Dtype of the arithmetic.
  kernel_init: Callable[..., Any] = _ORTHOGONAL

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = (self.kernel, self.kernel, x.shape[-1], self.features)
    kernel: Any = self.param('kernel', self.kernel_init, shape)
    zeros = nn.initializers.zeros_init()
    bias: Any = self.param('bias', zeros, (self.features,))
    arguments = [a.astype(self.dtype) for a in (x, kernel, bias)]
    return conv.convolve(*arguments, stride=self.stride, padding=self.padding)


class ConvNet(nn.Module):
  """Convolutions, each followed by a ReLU, and then one hidden layer."""

  channels_first: bool  # Whether observations are CHW.
  # (features, kernel, stride) of each convolution.
  layers: Sequence[tuple[int, int, int]]
  hidden_size: int  # Width of the layer after the convolutions.
  scale: _Scale  # What images are divided by.
  standardize: bool = False  # Whether each image is standardised.
  dtype: Any = jnp.float32  # Dtype of the arithmetic.
  layer_norm: bool = False  # Whether each layer is normalised.

  @nn.compact
  def __call__(self, obs: Tree) -> jax.Array:
    def activate(x: jax.Array) -> jax.Array:
      # As in PQN, a convolution is normalised over its channels.
      return relu(nn.LayerNorm(dtype=self.dtype)(x) if self.layer_norm else x)

    x = as_image(obs, self.channels_first, self.scale)
    x = (standardize(x) if self.standardize else x).astype(self.dtype)
    for features, kernel, stride in self.layers:
      x = activate(Conv(features, kernel, stride, dtype=self.dtype)(x))
    dense = _Dense(self.hidden_size, dtype=self.dtype)
    return activate(dense(x.reshape(x.shape[0], -1)))


class ImpalaResNet(nn.Module):
  """The torso of Espeholt et al. 2018, arXiv:1802.01561, figure 3."""

  channels_first: bool  # Whether observations are CHW.
  scale: _Scale  # What images are divided by.
  # Channels of each section. Each section halves the image's height and width.
  channels: Sequence[int] = (16, 32, 32)
  hidden_size: int = 256  # Width of the last layer.
  dtype: Any = jnp.float32  # Dtype of the arithmetic.

  @nn.compact
  def __call__(self, obs: Tree) -> jax.Array:
    x = as_image(obs, self.channels_first, self.scale, self.dtype)
    # With orthogonal kernels and a gain of sqrt(2), the residuals of 15
    # convolutions would add up to features of ten times this size.
    layer = functools.partial(
      Conv,
      kernel=3,
      padding='SAME',
      dtype=self.dtype,
      kernel_init=nn.initializers.lecun_normal(),
    )
    for features in self.channels:
      x = layer(features)(x)
      x = nn.max_pool(x, (3, 3), strides=(2, 2), padding='SAME')
      for _ in range(2):
        residual = x
        x = layer(features)(relu(x))
        x = layer(features)(relu(x)) + residual
    x = relu(x).reshape(x.shape[0], -1)
    dense = _Dense(self.hidden_size, dtype=self.dtype)
    return relu(dense(x))


class MultiInput(nn.Module):
  """A torso for each image, and an MLP that joins them with the other leaves.

  The MLP takes the images' features beside the other leaves, so its features
  can depend on all leaves at once.
  """

  # For each leaf of the observation, this builds the torso of an image; or it
  # is None if the leaf is not an image.
  make_torsos: Sequence[Callable[[], nn.Module] | None]
  make_mlp: Callable[[], nn.Module]

  @nn.compact
  def __call__(self, obs: Tree) -> jax.Array:
    inputs = []
    for x, make in zip(jax.tree.leaves(obs), self.make_torsos, strict=True):
      torso: Any = make and make()
      inputs.append(torso(x) if torso else x)
    mlp: Any = self.make_mlp()
    return mlp(inputs)


# Source: Mnih et al. 2015, Human-level control, methods.
_NATURE_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
# For small images, 'conv' is MinAtar's network (Young and Tian 2019,
# arXiv:1903.03176). For larger images, 'conv' standardises the image and has
# two strided layers. They cost about as much as MinAtar's layer, so 'conv' is
# fast even without an accelerator.
_SMALL_LAYERS = ((16, 3, 1),)
_STRIDED_LAYERS = ((16, 3, 3), (32, 4, 2))
_MIN_NATURE_SIZE = 36  # A smaller image is too small for the last convolution.
_MIN_SIZE = 3

TORSOS = ('auto', 'mlp', 'conv', 'nature_cnn', 'impala_resnet')
ACTIVATIONS: dict[str, Callable[..., Any]] = {'tanh': nn.tanh, 'relu': relu}

# The fields of every torso; `hidden_sizes` concerns other layers too.
FIELDS = {
  'network.name': Field(
    'auto', 'The torso; auto chooses it by the observation.', TORSOS
  ),
  'network.hidden_sizes': Field(
    (64, 64),
    'Widths of hidden layers; the last one is also that of a recurrent core. '
    'Your own torso does not get them.',
    Range(1),
  ),
}
# The fields of podrl's own torsos.
OWN_FIELDS = {
  'network.activation': Field(
    'tanh', 'Activation of the layers of an MLP.', tuple(ACTIVATIONS)
  ),
  'network.layer_norm': Field(
    False, 'Normalises each layer before its activation.'
  ),
  'network.dtype': Field(
    'float32', 'Data type inside the torso.', ('float32', 'bfloat16')
  ),
}

# A further field, of networks whose policy and critic have separate torsos.
POLICY_INPUTS = {
  'network.policy_inputs': Field(
    '',
    'Leaves of a dictionary that the policy sees, with commas; the critic sees '
    'all. Empty means that the policy sees all too.',
  ),
}


def _image_size(shape: Sequence[int], channels_first: bool) -> int:
  """Returns the shorter side of an image, or 0 for any other leaf."""
  if len(shape) != 3:
    return 0
  size = min(shape[1:] if channels_first else shape[:2])
  return size if size >= _MIN_SIZE else 0


def image_sizes(spec: EnvSpec) -> list[int]:
  """Returns, for each leaf, an image's shorter side, or 0 if it is no image."""
  leaves = jax.tree.leaves(without_mask(spec.obs))
  return [_image_size(x.shape, spec.channels_first) for x in leaves]


def _make_conv_torso(
  name: str, size: int, *, hidden_size: int, layer_norm: bool, **fields: Any
) -> Callable[[], nn.Module]:
  """Makes a function that builds the torso of an image with this size.

  Args:
    name: one of `TORSOS` with convolutions, or 'auto'.
    **fields: the attributes `channels_first`, `scale` and `dtype`.
  """
  is_large = size >= _MIN_NATURE_SIZE
  if name in ('auto', 'nature_cnn'):
    name = 'nature_cnn' if is_large else 'conv'
  fields['hidden_size'] = hidden_size
  if name == 'impala_resnet':
    return lambda: ImpalaResNet(**fields)
  layers: Sequence[tuple[int, int, int]] = _NATURE_LAYERS
  if name == 'conv':
    layers = _STRIDED_LAYERS if is_large else _SMALL_LAYERS
  fields |= {'layers': layers, 'standardize': layers is _STRIDED_LAYERS}
  return lambda: ConvNet(layer_norm=layer_norm, **fields)


def make_torso(
  name: str,
  spec: EnvSpec,
  hidden_sizes: Sequence[int],
  dtype: Any = jnp.float32,
  *,
  activation: str = 'tanh',
  layer_norm: bool = False,
) -> Callable[[], nn.Module]:
  """Makes a function that builds a torso for the observations of `spec`.

  Images are the leaves with three axes whose sides are at least 3. If an
  observation has an image and other leaves, the torso is a `MultiInput`.

  Args:
    name: one of `TORSOS`; 'auto' is 'nature_cnn' for images of at least
      36 x 36, 'conv' for smaller images, and 'mlp' for other observations. With
      'nature_cnn', a smaller image beside a large one has the torso 'conv'.
      'mlp' flattens images too.
    hidden_sizes: widths of the MLP's layers. The layer after the convolutions
      has the last of these widths.
    activation: one of `ACTIVATIONS`, for the layers of an MLP.
    layer_norm: whether each layer is normalised before its activation; the
      torso 'impala_resnet' cannot do this.

  Raises:
    ValueError: if the torso needs an image, but the observation has none that
      is large enough; or if the torso cannot normalise.
  """
  sizes, divisors = image_sizes(spec), scales(spec)
  mlp = functools.partial(
    MLP, hidden_sizes, ACTIVATIONS[activation], dtype, layer_norm
  )
  if name == 'mlp' or (name == 'auto' and not any(sizes)):
    return lambda: mlp(scales=divisors)
  smallest = _MIN_NATURE_SIZE if name == 'nature_cnn' else _MIN_SIZE
  if max(sizes) < smallest:
    shapes = [x.shape for x in jax.tree.leaves(without_mask(spec.obs))]
    raise ValueError(
      f'network.name={name} needs an image of at least {smallest} x '
      f'{smallest}, but observations have the shapes {shapes}; use '
      'network.name=auto'
    )
  if name == 'impala_resnet' and layer_norm:
    raise ValueError(
      'network.layer_norm=True does not fit network.name=impala_resnet; use '
      'False, or another torso'
    )
  make_image_torso = functools.partial(
    _make_conv_torso,
    name,
    hidden_size=hidden_sizes[-1],
    layer_norm=layer_norm,
    channels_first=spec.channels_first,
    dtype=dtype,
  )
  pairs = list(zip(sizes, divisors, strict=True))
  if len(pairs) == 1:
    return make_image_torso(*sizes, scale=divisors[0])
  of_images = [make_image_torso(n, scale=x) if n else None for n, x in pairs]
  # An image's own torso divides it.
  others = tuple(1.0 if n else x for n, x in pairs)
  return lambda: MultiInput(tuple(of_images), lambda: mlp(scales=others))


class UserTorso(nn.Module):
  """The user's torso, which gets float32 observations.

  A number is divided by its scale, see `scales`. The axes of an image are
  height, width and channels. Leaves keep their place in the observation's tree.
  """

  what: str  # 'MODULE:NAME', for messages.
  make: Callable[[], nn.Module]
  channels_first: bool  # Whether observations are CHW.
  scales: Sequence[_Scale]
  is_image: Sequence[bool]  # Of each leaf.

  @nn.compact
  def __call__(self, obs: Tree) -> jax.Array:
    leaves: list[Any] = jax.tree.leaves(obs)
    structure: Any = jax.tree.structure(obs)
    for i, (x, scale) in enumerate(zip(leaves, self.scales, strict=True)):
      if self.is_image[i]:
        leaves[i] = as_image(x, self.channels_first, scale)
      else:
        divisor = np.broadcast_to(np.asarray(scale, 'f'), (x[0].size,))
        leaves[i] = x.astype(jnp.float32) / divisor.reshape(1, *x.shape[1:])
    try:
      torso: Any = self.make()
      features = torso(structure.unflatten(leaves))
    except Exception as error:  # The user's code can raise anything.
      raise modules.failed('config.network.name', self.what, error) from error
    if getattr(features, 'shape', ())[:1] != leaves[0].shape[:1]:
      raise ValueError(
        f'config.network.name={self.what} must map {len(leaves[0])} '
        'observations to features [N, F], one row for each observation'
      )
    return features.reshape(len(leaves[0]), -1)


def _find(name: str) -> Any:
  """Returns the user's torso: a flax module, its class, or its maker."""
  found = modules.find('config.network.name', name, TORSOS)
  if not (isinstance(found, nn.Module) or callable(found)):
    raise ValueError(
      f'config.network.name={name} must be a flax module, or a function that '
      f'makes one, not a {type(found).__name__}'
    )
  return found


def own_fields(name: str) -> Table:
  """Returns the fields of one torso; `name` is in `TORSOS`, or MODULE:NAME.

  The attributes of the user's module, or the parameters of its maker, are
  fields if they have defaults.
  """
  if ':' not in name:
    return OWN_FIELDS
  found = _find(name)
  is_made = isinstance(found, nn.Module)
  return {} if is_made else modules.fields_of(found, 'network', name)


def build_torso(spec: EnvSpec, fields: Fields) -> Callable[[], nn.Module]:
  """Makes a function that builds the torso of a configuration.

  Args:
    fields: the configuration by name.

  Raises:
    ValueError: see `make_torso`.
  """
  name = fields['network.name']
  if ':' not in name:
    known = {short(k): fields[k] for k in {**FIELDS, **OWN_FIELDS}}
    return make_torso(spec=spec, **known)
  found = _find(name)
  if isinstance(found, nn.Module):
    names = [x.name for x in modules.attributes(found)]
    own = {name: getattr(found, name) for name in names}
    make = functools.partial(type(found), **own)
  else:
    own = {short(k): fields[k] for k in own_fields(name)}
    make = functools.partial(found, **own)
  is_image = tuple(size > 0 for size in image_sizes(spec))
  divisors, channels_first = scales(spec), spec.channels_first
  return lambda: UserTorso(name, make, channels_first, divisors, is_image)


class Selected(nn.Module):
  """A torso that sees only some leaves of a dictionary."""

  names: Sequence[str]  # Of the leaves.
  make_torso: Callable[[], nn.Module]  # Builds the torso that sees them.

  @nn.compact
  def __call__(self, obs: Tree) -> jax.Array:
    torso: Any = self.make_torso()
    return torso({name: obs[name] for name in self.names})


def policy_inputs(fields: Fields) -> tuple[str, ...]:
  """Returns the names in `network.policy_inputs`; `()` means all leaves."""
  names = fields.get('network.policy_inputs', '').split(',')
  return tuple(name.strip() for name in names if name.strip())


def build_torsos(
  spec: EnvSpec, fields: Fields
) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
  """Makes functions that build the torsos of the policy and of the critic.

  Both are that of `build_torso`, unless the policy sees only a part of the
  observation; see `network.policy_inputs`.

  Raises:
    ValueError: if the observation lacks a leaf that the policy must see, if
      the two share a torso, or for a mistake that `make_torso` finds.
  """
  of_all, names = build_torso(spec, fields), policy_inputs(fields)
  if not names:
    return of_all, of_all
  field = f'network.policy_inputs={fields["network.policy_inputs"]}'
  if fields.get('network.shared_torso'):
    raise ValueError(
      f'{field} needs a torso of its own for the policy; use '
      '--config.network.shared_torso=False'
    )
  if not isinstance(spec.obs, dict):
    raise ValueError(
      f'{field} needs observations that are a dictionary without a mask; '
      'these are not, so leave the field empty'
    )
  for name in names:
    check_choice('network.policy_inputs', name, tuple(spec.obs))
  scale = spec.obs_scale and {name: spec.obs_scale[name] for name in names}
  seen = {name: spec.obs[name] for name in names}
  of_policy = build_torso(spec._replace(obs=seen, obs_scale=scale), fields)
  return (
    functools.partial(Selected, names, of_policy),
    functools.partial(Selected, tuple(spec.obs), of_all),
  )
