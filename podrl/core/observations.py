"""Observations as vectors, the form in which a TPU stores them best.

A TPU pads the last two axes of an array, to at least 8 and 128 elements. A
vector needs little padding, but an image with three channels needs much.
"""

import jax

from podrl.types import Tree


def flatten(obs: Tree, num_batch_axes: int) -> Tree:
  """Joins the axes after the batch axes into one; a scalar gets one axis."""
  return jax.tree.map(lambda x: x.reshape(*x.shape[:num_batch_axes], -1), obs)


def unflatten(obs: Tree, shapes: Tree, num_batch_axes: int) -> Tree:
  """Inverts `flatten`; `shapes` has the shapes without the batch axes."""

  def restore(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:num_batch_axes], *like.shape)

  return jax.tree.map(restore, obs, shapes)
