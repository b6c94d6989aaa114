"""Products of observations of zeros and ones, fast on a CPU.

The observations of grid worlds have few ones: those of gymnax's Pong-misc have
12 in 3,600 values. The product of such a row with a kernel is the sum of a few
rows of the kernel. On a CPU, adding these is several times faster than a matrix
product. Other devices compute the matrix product.
"""

from collections.abc import Sequence
from typing import Any

import chex
import jax
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from podrl import kernels

# For smaller observations, a matrix product is as fast. If a vectorised program
# has many small products, only matrix products are joined.
_MIN_SIZE = 2**16
_MIN_WIDTH = 257


def _max_count(x: jax.Array) -> int:
  """Returns how many ones a row may have; with more, a product is faster."""
  # Adding rows takes time in proportion to `count * (num_rows + 48)`, and a
  # matrix product to `width * num_rows`. Measurements gave the numbers.
  num_rows, width = x.shape
  return width * num_rows // (10 * (num_rows + 48))


def is_fast(x: jax.Array) -> bool:
  """Returns whether `multiply_bools` may be faster than a matrix product."""
  return x.dtype == bool and x.size >= _MIN_SIZE and x.shape[1] >= _MIN_WIDTH


def multiply_bools(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Multiplies zeros and ones by a kernel.

  If a row has too many ones, this computes a matrix product.

  Args:
    x: bool `[N, W]`, for which `is_fast` is true.
    kernel: floats `[W, M]`.

  Returns:
    Floats `[N, M]`, of the dtype of the kernel.
  """
  chex.assert_rank([x, kernel], 2)

  def add_rows(x: jax.Array, kernel: jax.Array) -> jax.Array:
    columns, count = _find(x)
    return _product_p.bind(kernel, x, columns, count, is_transposed=False)

  return kernels.choose(_multiply_matrices, x, kernel, cpu=add_rows)


def _multiply_matrices(x: jax.Array, y: jax.Array) -> jax.Array:
  return x.astype(y.dtype) @ y


def _pack(x: jax.Array) -> jax.Array:
  """Packs bools `[N, W]` into uint32 `[N, ceil(W / 32)]`.

  Bit b of word i is column `b * ceil(W / 32) + i`.
  """
  size = -(-x.shape[1] // 32)
  words = jnp.zeros((x.shape[0], size), jnp.uint32)
  for bit in range(32):
    part = x[:, bit * size : (bit + 1) * size].astype(jnp.uint32)
    part = jnp.pad(part, ((0, 0), (0, size - part.shape[1])))
    words |= part << jnp.uint32(bit)
  # Without the barrier, XLA would pack again wherever it reads a word.
  return lax.optimization_barrier(words)


def _lowest(word: jax.Array) -> jax.Array:
  """Returns the index of the lowest bit that is 1, or -1 if none is."""
  return 31 - lax.clz(word & -word).astype(jnp.int32)


@sequential_vmap
def _find(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Finds the ones of each row of `x`, bool `[N, W]`.

  The first result, int32 `[_max_count(x), N]`, has the columns of each row's
  ones, and W in unused places. The second, int32 `[]`, is the number of ones of
  the row that has most. If it is above `_max_count(x)`, all columns are W.
  """
  num_rows, width = x.shape
  max_count = _max_count(x)
  words = _pack(x)
  summary = _pack(words != 0)  # Bits say which of the words are not 0.
  num_words, num_summaries = words.shape[1], summary.shape[1]
  counts = jnp.sum(lax.population_count(words), axis=1, dtype=jnp.uint32)
  count = jnp.max(counts).astype(jnp.int32)

  def find_next(k: jax.Array, carry: Any) -> Any:
    """Takes the lowest 1 of each row's word, or of its next word."""
    summaries, index, word, columns = carry
    needs_word = word == 0
    remaining = []
    for i, bits in enumerate(summaries):
      takes = needs_word & (bits != 0)
      index = jnp.where(takes, _lowest(bits) * num_summaries + i, index)
      remaining.append(jnp.where(takes, bits & (bits - 1), bits))
      needs_word &= ~takes
    next_word = words[jnp.arange(num_rows), index]
    word = jnp.where((word == 0) & ~needs_word, next_word, word)
    column = jnp.where(word == 0, width, _lowest(word) * num_words + index)
    return remaining, index, word & (word - 1), columns.at[k].set(column)

  zeros = jnp.zeros(num_rows, jnp.int32)
  carry = (
    [summary[:, i] for i in range(num_summaries)],
    zeros,
    zeros.astype(jnp.uint32),
    jnp.full((max_count, num_rows), width, jnp.int32),
  )
  num_loops = jnp.where(count <= max_count, count, 0)
  return lax.fori_loop(0, num_loops, find_next, carry)[-1], count


def _compute_product(
  y: jax.Array,
  x: jax.Array,
  columns: jax.Array,
  count: jax.Array,
  *,
  is_transposed: bool,
) -> jax.Array:
  """Multiplies `x`, or its transpose, by `y`, with the results of `_find`."""

  def sparse(y: jax.Array) -> jax.Array:
    def add_rows(k: jax.Array, total: jax.Array) -> jax.Array:
      if is_transposed:
        return total.at[columns[k]].add(y, mode='drop')
      return total + jnp.take(y, columns[k], axis=0, fill_value=0)

    num_rows = x.shape[1 if is_transposed else 0]
    zeros = jnp.zeros((num_rows, y.shape[1]), y.dtype)
    return lax.fori_loop(0, count, add_rows, zeros)

  def dense(y: jax.Array) -> jax.Array:
    return _multiply_matrices(x.T if is_transposed else x, y)

  return lax.cond(count <= columns.shape[0], sparse, dense, y)


# JAX can transpose neither loops of unknown length nor, if vectorised, a
# `linear_call`. So the product is a primitive, whose transpose is known.
_product_p = Primitive('sparse_product')
_product_p.def_impl(jax.jit(_compute_product, static_argnames='is_transposed'))


@_product_p.def_abstract_eval
def _shape(
  y: Any, x: Any, columns: Any, count: Any, *, is_transposed: bool
) -> Any:
  del columns, count
  return y.update(shape=(x.shape[1 if is_transposed else 0], y.shape[1]))


def _transpose(
  cotangent: Any, y: Any, *args: Any, is_transposed: bool
) -> Sequence[Any]:
  if type(cotangent) is ad.Zero:
    return [ad.Zero(y.aval.to_ct_aval()), None, None, None]
  # `columns` has the ones of `x`, not of its transpose, in both directions.
  y_cotangent = _product_p.bind(
    cotangent, *args, is_transposed=not is_transposed
  )
  return [y_cotangent, None, None, None]


def _vectorize(args: Any, axes: Any, *, is_transposed: bool) -> Any:
  """Computes the products of a batch one after the other."""
  # A product is large enough, and gathering from a batch would be slower.
  mapped = [
    None if axis is None else jnp.moveaxis(x, axis, 0)
    for x, axis in zip(args, axes)
  ]

  def compute(mapped: Sequence[Any]) -> jax.Array:
    values = [x if m is None else m for x, m in zip(args, mapped)]
    return _product_p.bind(*values, is_transposed=is_transposed)

  return lax.map(compute, mapped), 0


ad.defjvp(
  _product_p,
  lambda tangent, y, *args, **params: _product_p.bind(tangent, *args, **params),
  None,
  None,
  None,
)
ad.primitive_transposes[_product_p] = _transpose
batching.primitive_batchers[_product_p] = _vectorize
mlir.register_lowering(
  _product_p, mlir.lower_fun(_compute_product, multiple_results=False)
)
