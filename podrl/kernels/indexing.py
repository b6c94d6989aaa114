"""Environments whose single reads and writes are comparisons, for a TPU.

An environment reads and writes single elements of small arrays, such as the
pixel of a ball. For a batch of environments, a read is a gather and a write is
a scatter, and a TPU handles their indices one after another. A comparison of
every position with the index has the same result, and a TPU computes it for all
environments at the same time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import source_info_util
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from podrl.types import Array, Tree

# An operation with more indices, or on a larger array, stays as it is.
_MAX_INDICES, _MAX_SIZE = 16, 2**14


def compare_indices(function: Callable) -> Callable:
  """Returns the function with comparisons in place of some indexing.

  It replaces reads and writes of single elements, rows or columns, such as
  `x[i, j]` and `x.at[i].set(y)`. The results are the same. Operations inside
  loops and conditionals do not change. A custom derivative inside the function
  is lost.

  Args:
    function: `(*arguments) -> tree`. The arguments are trees of arrays without
      a batch axis.
  """

  def compared(*arguments: Tree) -> Tree:
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    outputs = _evaluate(jaxpr, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

  return compared


def _evaluate(jaxpr: core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
  """Evaluates a program; applies `_RULES` where a rule fits an operation."""
  program = jaxpr.jaxpr
  values = dict(zip(program.constvars, jaxpr.consts, strict=True))
  values.update(zip(program.invars, inputs, strict=True))

  def read(atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]

  for equation in program.eqns:
    primitive, params = equation.primitive, equation.params
    arguments = [read(x) for x in equation.invars]
    called = params.get('jaxpr', params.get('call_jaxpr'))
    rule = _RULES.get(primitive.name, lambda *_, **__: None)
    source = equation.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    # The compiled program then names the lines of the environment.
    with source_info_util.user_context(source.traceback, name_stack=stack):
      if primitive.name in _CALLS and isinstance(called, core.ClosedJaxpr):
        outputs = _evaluate(called, arguments)
      elif (output := rule(*arguments, **params)) is not None:
        outputs = [output]
      else:
        outputs = primitive.bind(*arguments, **params)
        outputs = outputs if primitive.multiple_results else [outputs]
    values.update(zip(equation.outvars, outputs, strict=True))
  return [read(x) for x in program.outvars]


def _is_suitable(x: Any, *indices: Any) -> bool:
  """Whether a comparison can replace an operation on x, and is fast."""
  is_number = not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
  # A smaller dtype of an index may not hold the size of the axis.
  is_wide = all(jnp.result_type(i) == jnp.int32 for i in indices)
  return is_number and is_wide and x.size <= _MAX_SIZE


def _is_at(shape: Sequence[int], axes: Sequence[int], index: Any) -> Array:
  """Returns bool `[*shape]`, true for the elements at `index` on `axes`."""
  sizes = [shape[a] for a in axes]
  order = np.argsort(axes)
  position = np.arange(np.prod(sizes)).reshape(sizes).transpose(order)
  position = np.expand_dims(
    position, [a for a in range(len(shape)) if a not in axes]
  )
  wanted, is_inside = jnp.int32(0), jnp.bool(True)
  for i, size in zip(index, sizes):
    wanted = wanted * size + i
    is_inside &= (i >= 0) & (i < size)
  return position.astype(np.int32) == jnp.where(is_inside, wanted, -1)


def _select(x: Array, axes: Sequence[int], index: Any) -> Array:
  """Returns the elements of x at `index` on `axes`, without these axes."""
  mask = _is_at(x.shape, axes, index)
  if x.dtype == bool:
    return jnp.any(mask & x, axes)
  return jnp.sum(jnp.where(mask, x, jnp.zeros_like(x)), axes, x.dtype)


def _dynamic_slice(x: Array, *starts: Array, slice_sizes: Any, **_: Any) -> Any:
  axes = [a for a, n in enumerate(slice_sizes) if n < x.shape[a]]
  if not axes or any(slice_sizes[a] != 1 for a in axes):
    return None
  if not _is_suitable(x, *starts):
    return None
  index = [jnp.clip(starts[a], 0, x.shape[a] - 1) for a in axes]
  return _select(x, axes, index).reshape(slice_sizes)


def _scatter(
  x: Array, indices: Array, updates: Array, **params: Any
) -> Array | None:
  numbers = params['dimension_numbers']
  axes = numbers.scatter_dims_to_operand_dims
  num_indices = int(np.prod(indices.shape[:-1]))
  is_window = numbers.inserted_window_dims != tuple(sorted(axes))
  if numbers.operand_batching_dims or is_window or num_indices > _MAX_INDICES:
    return None
  if params['mode'] == jax.lax.GatherScatterMode.CLIP:
    return None
  if not axes or not _is_suitable(x, indices):
    return None
  x, updates = jnp.asarray(x), jnp.asarray(updates)
  others = [n for a, n in enumerate(x.shape) if a not in axes]
  first = updates.ndim - len(others)
  if tuple(numbers.update_window_dims) != tuple(range(first, updates.ndim)):
    return None
  if updates.shape[first:] != tuple(others):
    return None  # The update has only a part of a window.
  rows = updates.reshape(-1, *others)
  indices = indices.reshape(-1, indices.shape[-1])
  if not others:  # A TPU pads a vector less than an array.
    flat = x.reshape(-1)
    for row, index in zip(rows, indices):
      mask = _is_at(x.shape, axes, index).reshape(-1)
      flat = jnp.where(mask, row, flat)
    return flat.reshape(x.shape)
  for row, index in zip(rows, indices):
    x = jnp.where(_is_at(x.shape, axes, index), jnp.expand_dims(row, axes), x)
  return x


_CALLS = ('jit', 'pjit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call')
_RULES: dict[str, Callable[..., Array | None]] = {
  'dynamic_slice': _dynamic_slice,
  'scatter': _scatter,
}
