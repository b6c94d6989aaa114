"""Observations as vectors, and observations with a mask of legal actions.

A TPU stores vectors best: it pads the last two axes of an array, to at least 8
and 128 elements. A vector needs little padding, but an image with three
channels needs much.
"""

import jax
import jax.numpy as jnp

from podrl.types import Array, Masked, Tree

# The logit or value of an illegal action. With minus infinity, an entropy or a
# gradient would be NaN.
ILLEGAL = -1e9


def without_mask(obs: Tree) -> Tree:
  """Returns what a network or a normalisation sees of an observation."""
  return obs.obs if isinstance(obs, Masked) else obs


def zeros(obs: Tree, *axes: int) -> Tree:
  """Returns zeros for a network's initialisation, leaves `[*axes, ...]`."""
  return jax.tree.map(
    lambda x: jnp.zeros((*axes, *x.shape), x.dtype), without_mask(obs)
  )


def merge_time(obs: Tree) -> Tree:
  """Reshapes leaves `[T, B, ...]` to `[T * B, ...]`."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)


def hide_illegal(x: Array, obs: Tree) -> Array:
  """Returns `x` with `ILLEGAL` for illegal actions.

  Args:
    x: float32 `[..., A]`, a logit or a value for each action.
    obs: leaves `[..., *obs_shape]`. If it is not `Masked`, `x` stays unchanged.
  """
  if not isinstance(obs, Masked):
    return x
  mask = obs.action_mask
  return jnp.where(mask | ~jnp.any(mask, axis=-1, keepdims=True), x, ILLEGAL)


def flatten(obs: Tree, num_batch_axes: int) -> Tree:
  """Joins the axes after the batch axes into one; a scalar gets one axis."""
  return jax.tree.map(lambda x: x.reshape(*x.shape[:num_batch_axes], -1), obs)


def unflatten(obs: Tree, shapes: Tree, num_batch_axes: int) -> Tree:
  """Inverts `flatten`; `shapes` has the shapes without the batch axes."""

  def restore(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:num_batch_axes], *like.shape)

  return jax.tree.map(restore, obs, shapes)
