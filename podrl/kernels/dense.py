"""Products with the kernel of a layer, and the ReLU."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl import kernels
from podrl.types import Array


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
  tangent = kernels.choose(jnp.matmul, x, kernel_tangent, cpu=on_cpu)
  return jnp.matmul(x, kernel), jnp.matmul(x_tangent, kernel) + tangent


def dot_general(
  x: Any, kernel: Any, dimension_numbers: Any, precision: Any = None
) -> jax.Array:
  """`multiply` as `lax.dot_general`, for `nn.Dense`."""
  if precision is not None:
    return jax.lax.dot_general(x, kernel, dimension_numbers, precision)
  return multiply(x, kernel)


def means(arrays: Sequence[Array]) -> list[jax.Array]:
  """Returns the mean of each array; all have the same shape."""
  return kernels.choose(_separate_means, arrays, cuda=_joined_means)


def _separate_means(arrays: Sequence[Array]) -> list[jax.Array]:
  return [jnp.mean(x) for x in arrays]


def _joined_means(arrays: Sequence[Array]) -> list[jax.Array]:
  return list(jnp.mean(jnp.stack(arrays).reshape(len(arrays), -1), axis=1))


@jax.custom_jvp
def _relu(x: jax.Array) -> jax.Array:
  return jnp.maximum(x, 0)


# For the gradient `where(x > 0, g, 0)` of `nn.relu`, XLA's program for a TPU
# packs the comparisons into bits, which takes longer than a convolution.
_relu.defjvps(lambda g, y, x: g * jnp.sign(y))


def relu(x: jax.Array) -> jax.Array:
  """Computes max(x, 0); its derivative at 0 is 0."""
  return nn.relu(x) if kernels.is_plain() else _relu(x)
