"""Convolutions of images."""

import functools

import jax
import jax.numpy as jnp

from podrl import kernels
from podrl.kernels import dense


def convolve(
  x: jax.Array, kernel: jax.Array, bias: jax.Array, *, stride: int, padding: str
) -> jax.Array:
  """Computes a 2D convolution, and adds a bias.

  Args:
    x: `[N, H, W, C]`.
    kernel: `[K, K, C, F]`.
    bias: `[F]`.
    stride: in both directions.
    padding: 'VALID' or 'SAME'.

  Returns:
    `[N, H', W', F]`.
  """
  plain, with_products, with_ones = (
    functools.partial(form, stride=stride, padding=padding)
    for form in (_convolve, _multiply_patches, _convolve_with_ones)
  )
  # On a CPU, XLA's convolution has a ten times slower gradient in a scan.
  return kernels.choose(
    plain, x, kernel, bias, cpu=with_products, tpu=with_ones
  )


def _convolve(
  x: jax.Array, kernel: jax.Array, bias: jax.Array, *, stride: int, padding: str
) -> jax.Array:
  """The plain form: XLA's own operation."""
  axes, strides = ('NHWC', 'HWIO', 'NHWC'), (stride, stride)
  y = jax.lax.conv_general_dilated(
    x, kernel, strides, padding, dimension_numbers=axes
  )
  return y + bias[None, None, None]


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
  y = dense.multiply(rows, kernel.reshape(-1, kernel.shape[-1])) + bias[None]
  return y.reshape(*patches.shape[:-1], -1)


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
