"""Torsos: from an observation to features.

They are flax modules from `[N, *obs_shape]` to `[N, features]`. They take
observations as environments give them (bool, uint8, CHW) and convert inside
the compiled program, so that the small dtype is what is stored and moved.
Their `dtype` is that of their arithmetic; parameters are float32.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podrl.types import Array, EnvSpec, Tree


def as_vector(obs: Tree, dtype: Any = jnp.float32) -> Array:
  """Joins an observation's leaves, `[N, ...]` each, into `[N, D]`."""
  leaves = [x.reshape(x.shape[0], -1) for x in jax.tree.leaves(obs)]
  return jnp.concatenate([x.astype(dtype) for x in leaves], axis=-1)


def as_image(
  obs: Tree, channels_first: bool, dtype: Any = jnp.float32
) -> Array:
  """An image observation as `[N, H, W, C]`; uint8 is scaled to 0..1."""
  (image,) = jax.tree.leaves(obs)
  scale = 255.0 if image.dtype == jnp.uint8 else 1.0
  image = jnp.moveaxis(image, 1, -1) if channels_first else image
  return image.astype(dtype) / scale


def standardize(image: Array) -> Array:
  """Each of the images `[N, H, W, C]` with mean 0 and deviation 1."""
  # A uniform ground would outweigh what moves on it, such as Pong's ball.
  x = image - jnp.mean(image, (1, 2, 3), keepdims=True)
  return x / (jnp.std(x, (1, 2, 3), keepdims=True) + 1e-3)


class MLP(nn.Module):
  """A multilayer perceptron over the flattened observation.

  Attributes:
    hidden_sizes: width of each layer.
    activation: after each layer.
    dtype: of the arithmetic.
  """

  hidden_sizes: Sequence[int] = (64, 64)
  activation: Callable[[Array], Array] = nn.tanh
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, obs: Tree) -> Array:
    x = as_vector(obs, self.dtype)
    for size in self.hidden_sizes:
      init = nn.initializers.orthogonal(np.sqrt(2))
      x = self.activation(nn.Dense(size, dtype=self.dtype, kernel_init=init)(x))
    return x


class TwinMLP(nn.Module):
  """Two separate MLPs over one observation, their first layers in one product.

  The same functions and as many parameters as two `MLP`s; but a wide
  observation is converted and read once, not twice.

  Attributes:
    hidden_sizes: width of each layer of each MLP.
    activation: after each layer.
    dtype: of the arithmetic.
  """

  hidden_sizes: Sequence[int] = (64, 64)
  activation: Callable[[Array], Array] = nn.tanh
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, obs: Tree) -> tuple[Array, Array]:
    first, *rest = self.hidden_sizes
    orthogonal = nn.initializers.orthogonal(np.sqrt(2))

    def twice(rng_key, shape, dtype=jnp.float32):
      halves = (shape[0], shape[1] // 2)
      return jnp.concatenate(
        [orthogonal(k, halves, dtype) for k in jax.random.split(rng_key)], 1
      )

    x = self.activation(
      nn.Dense(2 * first, dtype=self.dtype, kernel_init=twice)(
        as_vector(obs, self.dtype)
      )
    )
    outputs = []
    for half in jnp.split(x, 2, axis=-1):
      for size in rest:
        half = self.activation(
          nn.Dense(size, dtype=self.dtype, kernel_init=orthogonal)(half)
        )
      outputs.append(half)
    return tuple(outputs)


def _extract_patches(x: Array, kernel: int, stride: int, padding: str) -> Array:
  """`[N, H, W, C]` to `[N, H', W', kernel * kernel * C]`, as strided slices."""
  height, width = x.shape[1:3]
  if padding == 'SAME':
    pads = jax.lax.padtype_to_pads(
      (height, width), (kernel, kernel), (stride, stride), 'SAME'
    )
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    height, width = x.shape[1:3]
  rows, columns = (height - kernel) // stride, (width - kernel) // stride
  return jnp.concatenate(
    [
      x[
        :,
        i : i + rows * stride + 1 : stride,
        j : j + columns * stride + 1 : stride,
      ]
      for i in range(kernel)
      for j in range(kernel)
    ],
    axis=-1,
  )


class Conv(nn.Module):
  """A two-dimensional convolution, `[N, H, W, C]` to `[N, H', W', features]`.

  Attributes:
    features: output channels.
    kernel: height and width of the kernel.
    stride: in both directions.
    padding: 'VALID' or 'SAME'.
    matmul: compute it as one matrix product over patches, which gives the same
      numbers; by default where the backend is the CPU.
    dtype: of the arithmetic.
  """

  features: int
  kernel: int
  stride: int = 1
  padding: str = 'VALID'
  matmul: bool | None = None
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    shape = (self.kernel, self.kernel, x.shape[-1], self.features)
    kernel = self.param('kernel', nn.initializers.orthogonal(np.sqrt(2)), shape)
    bias = self.param('bias', nn.initializers.zeros_init(), (self.features,))
    x, kernel, bias = (a.astype(self.dtype) for a in (x, kernel, bias))
    # XLA's CPU convolution is some ten times slower in a gradient in a scan.
    matmul = (
      jax.default_backend() == 'cpu' if self.matmul is None else self.matmul
    )
    if matmul:
      patches = _extract_patches(x, self.kernel, self.stride, self.padding)
      x = patches @ kernel.reshape(-1, self.features)
    else:
      x = jax.lax.conv_general_dilated(
        x,
        kernel,
        (self.stride, self.stride),
        self.padding,
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      )
    return x + bias[None, None, None]


class ConvNet(nn.Module):
  """Convolutions, each with a ReLU, and one hidden layer.

  Attributes:
    channels_first: whether observations are CHW.
    layers: (features, kernel, stride) of each convolution.
    hidden_size: width of the layer after them.
    standardize: whether images are standardised, each by itself.
    dtype: of the arithmetic.
  """

  channels_first: bool
  layers: Sequence[tuple[int, int, int]]
  hidden_size: int
  standardize: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, obs: Tree) -> Array:
    x = as_image(obs, self.channels_first)
    x = (standardize(x) if self.standardize else x).astype(self.dtype)
    for features, kernel, stride in self.layers:
      x = nn.relu(Conv(features, kernel, stride, dtype=self.dtype)(x))
    init = nn.initializers.orthogonal(np.sqrt(2))
    x = x.reshape(x.shape[0], -1)
    return nn.relu(
      nn.Dense(self.hidden_size, dtype=self.dtype, kernel_init=init)(x)
    )


class ImpalaResNet(nn.Module):
  """The residual torso of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, fig. 3).

  Attributes:
    channels_first: whether observations are CHW.
    channels: of the sections, each of which halves the image.
    hidden_size: width of the last layer.
    dtype: of the arithmetic.
  """

  channels_first: bool
  channels: Sequence[int] = (16, 32, 32)
  hidden_size: int = 256
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, obs: Tree) -> Array:
    x = as_image(obs, self.channels_first, self.dtype)
    conv = functools.partial(Conv, kernel=3, padding='SAME', dtype=self.dtype)
    for features in self.channels:
      x = conv(features)(x)
      x = nn.max_pool(x, (3, 3), strides=(2, 2), padding='SAME')
      for _ in range(2):
        residual = x
        x = conv(features)(nn.relu(x))
        x = conv(features)(nn.relu(x)) + residual
    x = nn.relu(x).reshape(x.shape[0], -1)
    init = nn.initializers.orthogonal(np.sqrt(2))
    return nn.relu(
      nn.Dense(self.hidden_size, dtype=self.dtype, kernel_init=init)(x)
    )


# Nature CNN: Mnih et al. 2015, methods. For small images MinAtar's network,
# Young and Tian 2019, arXiv:1903.03176; for larger ones, without an accelerator,
# two strided layers of about the same cost over standardised images.
_NATURE_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_SMALL_LAYERS = ((16, 3, 1),)
_STRIDED_LAYERS = ((16, 3, 3), (32, 4, 2))
_SMALLEST_NATURE_IMAGE = 36  # Smaller, its last convolution has no room.

TORSOS = ('auto', 'mlp', 'conv', 'nature_cnn', 'impala_resnet')


def make_torso(
  name: str,
  spec: EnvSpec,
  *,
  hidden_sizes: Sequence[int],
  dtype: Any = jnp.float32,
) -> Callable[[], nn.Module]:
  """A torso that fits an observation.

  Args:
    name: one of `TORSOS`; 'auto' takes 'nature_cnn' for images of at least
      36 x 36, 'conv' for smaller ones, else 'mlp'.
    spec: of the environment.
    hidden_sizes: widths of the MLP's layers; the last is also that of the
      layer after the convolutions.
    dtype: of the torso's arithmetic.

  Returns:
    A function without arguments that builds the torso.

  Raises:
    ValueError: if the name is unknown or the observation too small for it.
  """
  shapes = [x.shape for x in jax.tree.leaves(spec.obs)]
  is_image = len(shapes) == 1 and len(shapes[0]) == 3
  size = (
    min(shapes[0][1:] if spec.channels_first else shapes[0][:2])
    if (is_image)
    else 0
  )
  if name == 'auto':
    name = (
      'mlp'
      if size < 3
      else 'conv'
      if size < _SMALLEST_NATURE_IMAGE
      else 'nature_cnn'
    )
  if name == 'mlp':
    return lambda: MLP(hidden_sizes, dtype=dtype)
  smallest = {
    'conv': 3,
    'nature_cnn': _SMALLEST_NATURE_IMAGE,
    'impala_resnet': 3,
  }
  if size < smallest[name]:
    raise ValueError(
      f'network.name={name} needs an image of at least {smallest[name]} x '
      f'{smallest[name]}, and observations are {shapes}; try '
      'network.name=auto'
    )
  if name == 'impala_resnet':
    return lambda: ImpalaResNet(
      spec.channels_first, hidden_size=hidden_sizes[-1], dtype=dtype
    )
  layers = (
    _NATURE_LAYERS
    if name == 'nature_cnn'
    else (_SMALL_LAYERS if size < _SMALLEST_NATURE_IMAGE else _STRIDED_LAYERS)
  )
  return lambda: ConvNet(
    spec.channels_first,
    layers,
    hidden_sizes[-1],
    standardize=layers is _STRIDED_LAYERS,
    dtype=dtype,
  )
