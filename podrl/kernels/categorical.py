"""Distributions over a few actions and their values, for GPUs.

A GPU computes each reduction in a kernel of its own, and so it does with the
scatter that is the gradient of indexing. The sum of a few columns is a part of
the kernel that computes them.
"""

from collections.abc import Callable, Sequence
import functools

import jax
import jax.numpy as jnp

from podrl import kernels
from podrl.types import Array

_MAX_ACTIONS = 16  # With more, a GPU has reductions too.


def log_prob(logits: Array, action: Array) -> Array:
  """Returns the log-probability of each action, `[...]`.

  Args:
    logits: `[..., A]` float32.
    action: `[...]` int32, from 0 to A - 1.
  """
  return _choose(_log_prob, _log_prob_in_columns, logits, action)


def select(values: Array, action: Array) -> Array:
  """Returns the value of each action, `[...]`; the arguments are as above."""
  return _choose(_select, _select_columns, values, action)


def entropy(logits: Array) -> Array:
  """Returns the entropy of each distribution in nats, `[...]`."""
  return _choose(_entropy, _entropy_in_columns, logits)


def _choose(
  plain: Callable[..., Array],
  in_columns: Callable[..., Array],
  x: Array,
  *others: Array,
) -> Array:
  forms = {'cuda': in_columns} if x.shape[-1] <= _MAX_ACTIONS else {}
  return kernels.choose(plain, x, *others, **forms)


def _log_prob(logits: Array, action: Array) -> Array:
  # A product with the one-hot action has a faster gradient than indexing.
  one_hot = jax.nn.one_hot(action, logits.shape[-1])
  return jnp.sum(jax.nn.log_softmax(logits) * one_hot, axis=-1)


def _log_prob_in_columns(logits: Array, action: Array) -> Array:
  return _add_selected(_log_softmax(logits), action)


def _select(values: Array, action: Array) -> Array:
  return jnp.take_along_axis(values, action[..., None], axis=-1)[..., 0]


def _select_columns(values: Array, action: Array) -> Array:
  return _add_selected(_columns(values), action)


def _add_selected(columns: Sequence[Array], action: Array) -> Array:
  return _add([jnp.where(action == i, x, 0.0) for i, x in enumerate(columns)])


def _entropy(logits: Array) -> Array:
  log_probs = jax.nn.log_softmax(logits)
  return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def _entropy_in_columns(logits: Array) -> Array:
  return -_add([jnp.exp(x) * x for x in _log_softmax(logits)])


def _add(arrays: Sequence[jax.Array]) -> jax.Array:
  return functools.reduce(jnp.add, arrays)


def _columns(x: Array) -> list[Array]:
  """Returns `x[..., i]` for each i."""
  return [x[..., i] for i in range(x.shape[-1])]


def _log_softmax(logits: Array) -> list[Array]:
  """Returns the log-probability of each action, `[...]` each."""
  columns = _columns(logits)
  largest = jax.lax.stop_gradient(functools.reduce(jnp.maximum, columns))
  columns = [x - largest for x in columns]
  total = jnp.log(_add([jnp.exp(x) for x in columns]))
  return [x - total for x in columns]
