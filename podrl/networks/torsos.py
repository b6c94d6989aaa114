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

from podrl.core.observations import without_mask
from podrl.networks import sparse
from podrl.types import EnvSpec, Tree

_ORTHOGONAL = nn.initializers.orthogonal(np.sqrt(2))


@jax.custom_jvp
def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Multiplies `[..., F]` by `[F, N]`; on a CPU, the gradient is faster."""
  return jnp.matmul(x, kernel)


def _sum_products(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Computes `x @ kernel` with one sum for each column of the kernel."""
  # Reverse differentiation only transposes this: the gradient of a column is a
  # sum over all rows.
  rows = x.reshape(-1, x.shape[-1])
  columns = jnp.split(kernel.T, kernel.shape[1])
  products = [jnp.sum(rows * column, axis=1) for column in columns]
  return jnp.stack(products, axis=1).reshape(*x.shape[:-1], -1)


def _multiply_transposed(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Computes `x @ kernel`; the kernel's gradient multiplies a copy of x.T."""
  # Without the barrier, XLA would not make the copy.
  x_transposed = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
  y = jax.lax.dot_general(x_transposed, kernel, (((0,), (0,)), ((), ())))
  return y.reshape(*x.shape[:-1], -1)


@multiply.defjvp
def _multiply_jvp(primals: Any, tangents: Any) -> Any:
  x, kernel = primals
  x_tangent, kernel_tangent = tangents
  # On a CPU, XLA has fast products, but not for a transposed first factor. So
  # the gradient of the kernel would take about twice as long as the product,
  # and for a few outputs as long as for 64. The limits come from measurements:
  # the copy of wider inputs takes longer than it saves.
  num_inputs, num_outputs = kernel.shape
  on_cpu: Callable[..., jax.Array] = jnp.matmul
  if 1 < num_outputs <= 8:
    on_cpu = _sum_products
  elif 16 <= num_inputs <= 256 and num_outputs >= 32:
    on_cpu = _multiply_transposed
  tangent = jax.lax.platform_dependent(
    x, kernel_tangent, cpu=on_cpu, default=jnp.matmul
  )
  return jnp.matmul(x, kernel), jnp.matmul(x_tangent, kernel) + tangent


def dot_general(
  x: Any, kernel: Any, dimension_numbers: Any, precision: Any = None
) -> jax.Array:
  """`multiply` as `lax.dot_general`, for `nn.Dense`."""
  if precision is not None:
    return jax.lax.dot_general(x, kernel, dimension_numbers, precision)
  return multiply(x, kernel)


_Dense = functools.partial(
  nn.Dense, kernel_init=_ORTHOGONAL, dot_general=dot_general
)


def as_vector(obs: Tree, dtype: Any = jnp.float32) -> jax.Array:
  """Joins the leaves of an observation, `[N, ...]` each, into `[N, D]`."""
  leaves = [x.reshape(x.shape[0], -1) for x in jax.tree.leaves(obs)]
  return jnp.concatenate([x.astype(dtype) for x in leaves], axis=-1)


def _dot_general_for(obs: Tree, dtype: Any) -> Callable[..., jax.Array]:
  """Returns the `dot_general` of the layer that takes `as_vector(obs)`."""
  is_binary = all(x.dtype == bool for x in jax.tree.leaves(obs))
  # A sum in a smaller dtype would be less exact than a matrix product.
  if not is_binary or jnp.dtype(dtype) != jnp.float32:
    return dot_general
  bools = as_vector(obs, bool)
  if not sparse.is_fast(bools):
    return dot_general

  def multiply_bools(
    x: Any, kernel: Any, dimension_numbers: Any, precision: Any = None
  ) -> jax.Array:
    del x  # flax has converted `bools` to floats.
    del dimension_numbers, precision
    return sparse.multiply_bools(bools, kernel)

  return multiply_bools


def as_image(
  obs: Tree, channels_first: bool, dtype: Any = jnp.float32
) -> jax.Array:
  """Converts images to `[N, H, W, C]`; scales uint8 values to [0, 1]."""
  (image,) = jax.tree.leaves(obs)
  scale = 255.0 if image.dtype == jnp.uint8 else 1.0
  image = jnp.moveaxis(image, 1, -1) if channels_first else image
  return image.astype(dtype) / scale


def standardize(image: jax.Array) -> jax.Array:
  """Scales each of the images `[N, H, W, C]` to mean 0 and deviation 1."""
  # A uniform background would otherwise hide small objects like Pong's ball.
  x = image - jnp.mean(image, (1, 2, 3), keepdims=True)
  return x / (jnp.std(x, (1, 2, 3), keepdims=True) + 1e-3)


@jax.custom_jvp
def relu(x: jax.Array) -> jax.Array:
  """Computes max(x, 0); its derivative at 0 is 0."""
  return jnp.maximum(x, 0)


# For the gradient `where(x > 0, g, 0)` of `nn.relu`, XLA's program for a TPU
# packs the comparisons into bits, which takes longer than a convolution.
relu.defjvps(lambda g, y, x: g * jnp.sign(y))


class MLP(nn.Module):
  """A multilayer perceptron that takes the flattened observation."""

  hidden_sizes: Sequence[int] = (64, 64)  # Width of each layer.
  # Applied after each layer.
  activation: Callable[[jax.Array], jax.Array] = nn.tanh
  dtype: Any = jnp.float32  # Dtype of the arithmetic.
  layer_norm: bool = False  # Whether each layer is normalised.

  @nn.compact
  def __call__(self, obs: Tree) -> jax.Array:
    x = as_vector(obs, self.dtype)
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
    x = self.activation(dense(as_vector(obs, self.dtype)))
    outputs = []
    for half in jnp.split(x, 2, axis=-1):
      for size in rest:
        half = self.activation(_Dense(size, dtype=self.dtype)(half))
      outputs.append(half)
    return tuple(outputs)


def _extract_patches(
  x: jax.Array, kernel: int, stride: int, padding: str
) -> jax.Array:
  """Maps `[N, H, W, C]` to patches `[N, H', W', kernel * kernel * C]`."""
  if padding == 'SAME':
    pads = []
    for size in x.shape[1:3]:
      total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
      pads.append((total // 2, total - total // 2))
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
  rows, columns = ((n - kernel) // stride * stride + 1 for n in x.shape[1:3])
  patches = [
    x[:, i : i + rows : stride, j : j + columns : stride]
    for i in range(kernel)
    for j in range(kernel)
  ]
  return jnp.concatenate(patches, axis=-1)


def _multiply_patches(
  x: jax.Array, kernel: jax.Array, bias: jax.Array, *, stride: int, padding: str
) -> jax.Array:
  """Computes a convolution as one matrix product over patches."""
  patches = _extract_patches(x, kernel.shape[0], stride, padding)
  rows = patches.reshape(-1, patches.shape[-1])
  y = multiply(rows, kernel.reshape(-1, kernel.shape[-1])) + bias[None]
  return y.reshape(*patches.shape[:-1], -1)


def _convolve(
  x: jax.Array, kernel: jax.Array, bias: jax.Array, *, stride: int, padding: str
) -> jax.Array:
  """Computes a convolution with XLA's own operation."""
  axes, strides = ('NHWC', 'HWIO', 'NHWC'), (stride, stride)
  y = jax.lax.conv_general_dilated(
    x, kernel, strides, padding, dimension_numbers=axes
  )
  return y + bias[None, None, None]


def _convolve_with_ones(
  x: jax.Array, kernel: jax.Array, bias: jax.Array, *, stride: int, padding: str
) -> jax.Array:
  """Computes a convolution; the bias is the weight of an extra channel of ones.

  On a TPU, the gradient of an added bias takes as long as several convolutions.
  A TPU pads the channels to a multiple of 8, so the extra channel often costs
  nothing. If the extra channel would cost time, or the padding is 'SAME', the
  function adds the bias instead. With its default precision, a TPU rounds the
  extra weight to bfloat16, as it rounds all weights.
  """
  if padding == 'SAME' or x.shape[-1] % 8 == 0:
    return _convolve(x, kernel, bias, stride=stride, padding=padding)
  x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
  # Each output reads one of the ones, and zeros times the others.
  weights = jnp.zeros_like(kernel[:, :, :1]).at[0, 0, 0].set(bias)
  kernel = jnp.concatenate([kernel, weights], axis=2)
  zeros = jnp.zeros_like(bias)
  return _convolve(x, kernel, zeros, stride=stride, padding=padding)


class Conv(nn.Module):
  """A 2D convolution from `[N, H, W, C]` to `[N, H', W', features]`."""

  features: int  # Number of output channels.
  kernel: int  # Height and width of the kernel.
  stride: int = 1  # Stride in both directions.
  padding: str = 'VALID'  # 'VALID' or 'SAME'.
  # Whether to compute the convolution as a matrix product over patches; the
  # result is the same. None means yes in programs for a CPU, and no in others.
  matmul: bool | None = None
  dtype: Any = jnp.float32  # Dtype of the arithmetic.
  kernel_init: Callable[..., Any] = _ORTHOGONAL

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = (self.kernel, self.kernel, x.shape[-1], self.features)
    kernel: Any = self.param('kernel', self.kernel_init, shape)
    zeros = nn.initializers.zeros_init()
    bias: Any = self.param('bias', zeros, (self.features,))
    arguments = [a.astype(self.dtype) for a in (x, kernel, bias)]
    options: Any = {'stride': self.stride, 'padding': self.padding}
    product, convolution, with_ones = (
      functools.partial(function, **options)
      for function in (_multiply_patches, _convolve, _convolve_with_ones)
    )
    if self.matmul is not None:
      return (product if self.matmul else convolution)(*arguments)
    # On a CPU, XLA's convolution has a ten times slower gradient in a scan.
    return jax.lax.platform_dependent(
      *arguments, cpu=product, tpu=with_ones, default=convolution
    )


class ConvNet(nn.Module):
  """Convolutions, each followed by a ReLU, and then one hidden layer."""

  channels_first: bool  # Whether observations are CHW.
  # (features, kernel, stride) of each convolution.
  layers: Sequence[tuple[int, int, int]]
  hidden_size: int  # Width of the layer after the convolutions.
  standardize: bool = False  # Whether each image is standardised.
  dtype: Any = jnp.float32  # Dtype of the arithmetic.
  layer_norm: bool = False  # Whether each layer is normalised.

  @nn.compact
  def __call__(self, obs: Tree) -> jax.Array:
    def activate(x: jax.Array) -> jax.Array:
      # As in PQN, a convolution is normalised over its channels.
      return relu(nn.LayerNorm(dtype=self.dtype)(x) if self.layer_norm else x)

    x = as_image(obs, self.channels_first)
    x = (standardize(x) if self.standardize else x).astype(self.dtype)
    for features, kernel, stride in self.layers:
      x = activate(Conv(features, kernel, stride, dtype=self.dtype)(x))
    dense = _Dense(self.hidden_size, dtype=self.dtype)
    return activate(dense(x.reshape(x.shape[0], -1)))


class ImpalaResNet(nn.Module):
  """The torso of Espeholt et al. 2018, arXiv:1802.01561, figure 3."""

  channels_first: bool  # Whether observations are CHW.
  # Channels of each section. Each section halves the image's height and width.
  channels: Sequence[int] = (16, 32, 32)
  hidden_size: int = 256  # Width of the last layer.
  dtype: Any = jnp.float32  # Dtype of the arithmetic.

  @nn.compact
  def __call__(self, obs: Tree) -> jax.Array:
    x = as_image(obs, self.channels_first, self.dtype)
    # With orthogonal kernels and a gain of sqrt(2), the residuals of 15
    # convolutions would add up to features of ten times this size.
    conv = functools.partial(
      Conv,
      kernel=3,
      padding='SAME',
      dtype=self.dtype,
      kernel_init=nn.initializers.lecun_normal(),
    )
    for features in self.channels:
      x = conv(features)(x)
      x = nn.max_pool(x, (3, 3), strides=(2, 2), padding='SAME')
      for _ in range(2):
        residual = x
        x = conv(features)(relu(x))
        x = conv(features)(relu(x)) + residual
    x = relu(x).reshape(x.shape[0], -1)
    dense = _Dense(self.hidden_size, dtype=self.dtype)
    return relu(dense(x))


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


def image_size(spec: EnvSpec) -> int:
  """Returns the shorter side of an image, or 0 if `obs` is not an image."""
  shapes = [x.shape for x in jax.tree.leaves(without_mask(spec.obs))]
  if len(shapes) != 1 or len(shapes[0]) != 3:
    return 0
  size = min(shapes[0][1:] if spec.channels_first else shapes[0][:2])
  return size if size >= _MIN_SIZE else 0


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

  Args:
    name: one of `TORSOS`; 'auto' is 'nature_cnn' for images of at least
      36 x 36, 'conv' for smaller images, and 'mlp' for other observations.
    spec: describes the environment.
    hidden_sizes: widths of the MLP's layers. The layer after the convolutions
      has the last of these widths.
    dtype: dtype of the torso's arithmetic.
    activation: one of `ACTIVATIONS`, for the layers of an MLP.
    layer_norm: whether each layer is normalised before its activation; the
      torso 'impala_resnet' cannot do this.

  Raises:
    ValueError: if the torso needs an image, but the observation is not an
      image or is too small; or if the torso cannot normalise.
  """
  size = image_size(spec)
  is_large = size >= _MIN_NATURE_SIZE
  if name == 'auto':
    image_name = 'nature_cnn' if is_large else 'conv'
    name = image_name if size else 'mlp'
  if name == 'mlp':
    return lambda: MLP(hidden_sizes, ACTIVATIONS[activation], dtype, layer_norm)
  smallest = _MIN_NATURE_SIZE if name == 'nature_cnn' else _MIN_SIZE
  if size < smallest:
    shapes = [x.shape for x in jax.tree.leaves(without_mask(spec.obs))]
    raise ValueError(
      f'network.name={name} needs an image of at least {smallest} x '
      f'{smallest}, but observations have the shapes {shapes}; use '
      'network.name=auto'
    )
  fields = {'hidden_size': hidden_sizes[-1], 'dtype': dtype}
  if name == 'impala_resnet':
    if layer_norm:
      raise ValueError(
        'network.layer_norm=True does not fit network.name=impala_resnet; use '
        'False, or another torso'
      )
    return lambda: ImpalaResNet(spec.channels_first, **fields)
  layers: Sequence[tuple[int, int, int]] = _NATURE_LAYERS
  if name == 'conv':
    layers = _STRIDED_LAYERS if is_large else _SMALL_LAYERS
  fields['standardize'] = layers is _STRIDED_LAYERS
  fields['layer_norm'] = layer_norm
  return lambda: ConvNet(spec.channels_first, layers, **fields)
