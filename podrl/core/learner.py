"""The learner core: the only code that changes an agent's parameters.

No other module calls a collective operation. The compiled update has one
all-reduce per optimiser step. It averages one vector: the gradients, the loss's
metrics and the measured statistics. This vector is as large as the parameters
and statistics, plus at most 1 KB. If `prepare` uses `mean`, each unroll needs
one more small all-reduce.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import chex
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import optax

from podrl.types import (
  DEVICE_AXIS,
  Agent,
  Array,
  Learner,
  LearnerState,
  Metrics,
  Trajectory,
  Tree,
)

Unravel = Callable[[Any], Tree]  # Maps a vector to parameters.

# A row of at least this many numbers is wide; see `collect_blocks`.
_WIDE = 32
# The most slices in a program. More would take long to compile.
_MAX_SLICES = 32


def all_mean(tree: Tree) -> Tree:
  """Averages a tree over devices, in one all-reduce of one vector."""
  vector, unravel = ravel_pytree(tree)
  return unravel(jax.lax.pmean(vector, DEVICE_AXIS))


def _with_params(state: LearnerState, params: Tree) -> LearnerState:
  return state._replace(variables=state.variables._replace(params=params))


def block_size(num_rows: int) -> int:
  """Returns how many neighbouring rows stay together in a minibatch.

  Collecting a minibatch from blocks is much faster than from single rows. A
  minibatch has at least 16 blocks. If it has fewer than 16 rows, each row is a
  block.

  Args:
    num_rows: number of rows of the minibatch.
  """
  candidates = range(min(16, num_rows), num_rows + 1)
  return num_rows // next(n for n in candidates if num_rows % n == 0)


def collect_blocks(blocks: Array, order: Array) -> Array:
  """Joins some blocks into rows `[n * block_size, ...]`.

  Args:
    blocks: `[num_blocks, block_size, ...]`.
    order: int `[n]`, indices of the blocks to join.
  """
  width = math.prod(blocks.shape[2:])
  if width < _WIDE or len(order) > _MAX_SLICES:
    return blocks[order].reshape(-1, *blocks.shape[2:])
  # To gather wide rows, a TPU would copy the whole batch to another layout.
  slices = [
    jax.lax.dynamic_index_in_dim(blocks, i, keepdims=False) for i in order
  ]
  return jnp.stack(slices).reshape(-1, *blocks.shape[2:])


def make_learner(
  agent: Agent,
  optimizer: optax.GradientTransformation,
  *,
  num_epochs: int = 1,
  num_minibatches: int = 1,
  target_period: int | None = None,
) -> Learner:
  """Builds the learner of an agent.

  Args:
    agent: the agent whose loss is minimised.
    optimizer: an optax transformation. It gets all parameters as one vector, so
      a rule for each array, such as a mask or a norm per layer, does not work.
      If its `update` takes an argument `hyperparams`, the learner passes
      `Variables.hyperparams`.
    num_epochs: passes over each unroll.
    num_minibatches: optimiser steps in each pass. It must divide the number of
      rows (axis 0) of the batch that `Agent.prepare` returns on each device.
    target_period: number of updates between two copies of the parameters to
      `target_params`; None means that there are no target parameters.

  Returns:
    A `Learner`. Its metrics are `loss`, `grad_norm` and the metrics of the
    agent's loss, averaged over devices and optimiser steps.
  """

  optimizer = optax.with_extra_args_support(optimizer)

  def init(
    rng_key: chex.PRNGKey, example_trajectory: Trajectory
  ) -> LearnerState:
    del example_trajectory  # Only a learner with a memory needs it.
    variables, target_params = agent.init(rng_key), ()
    if target_period is not None:
      # Copy them, because donating one buffer as two arguments crashes.
      target_params = jax.tree.map(jnp.copy, variables.params)
    return LearnerState(
      variables=variables,
      target_params=target_params,
      opt_state=optimizer.init(ravel_pytree(variables.params)[0]),
      num_updates=jnp.zeros((), jnp.int32),
      num_sgd_steps=jnp.zeros((), jnp.int32),
      memory=(),
    )

  def sgd_step(
    state: LearnerState,
    unravel: Unravel,
    batch: Tree,
    measured: Tree,
    rng_key: chex.PRNGKey,
  ) -> tuple[LearnerState, tuple[Metrics, Tree]]:
    # `params` is one vector: then the optimiser needs only a few operations for
    # all parameters, instead of a few for each array.
    variables = state.variables

    def loss(vector: Array) -> tuple[Array, Metrics]:
      changed = variables._replace(params=unravel(vector))
      return agent.loss(changed, state.target_params, batch, rng_key)

    params = variables.params
    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    metrics['loss'] = value
    grads, metrics, measured = all_mean((grads, metrics, measured))
    updates, opt_state = optimizer.update(
      grads, state.opt_state, params, hyperparams=variables.hyperparams
    )
    metrics['grad_norm'] = optax.tree.norm(grads)
    params = optax.apply_updates(params, updates)
    return state._replace(
      variables=variables._replace(params=params),
      opt_state=opt_state,
      num_sgd_steps=state.num_sgd_steps + 1,
    ), (metrics, measured)

  def sgd_steps(
    state: LearnerState,
    unravel: Unravel,
    batch: Tree,
    measured: Tree,
    rng_key: chex.PRNGKey,
  ) -> tuple[LearnerState, tuple[Metrics, Tree]]:
    """Takes all optimiser steps of an update."""
    num_steps = num_epochs * num_minibatches
    if num_steps == 1:
      return sgd_step(state, unravel, batch, measured, rng_key)
    size = jax.tree.leaves(batch)[0].shape[0]
    if size % num_minibatches:
      raise ValueError(
        f'num_minibatches={num_minibatches} does not divide the {size} rows of '
        'the batch on each device'
      )
    block = block_size(size // num_minibatches)
    blocks = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), batch)
    shuffle_key, loss_key = jax.random.split(rng_key)
    shuffle_keys = jax.random.split(shuffle_key, num_epochs)
    shuffle = functools.partial(jax.random.permutation, x=size // block)
    orders = jax.vmap(shuffle)(shuffle_keys).reshape(num_steps, -1)

    def minibatch_step(state, order_and_key):
      order, loss_key = order_and_key
      minibatch = batch
      if num_minibatches > 1:
        collect = functools.partial(collect_blocks, order=order)
        minibatch = jax.tree.map(collect, blocks)
      return sgd_step(state, unravel, minibatch, measured, loss_key)

    loss_keys = jax.random.split(loss_key, num_steps)
    state, rows = jax.lax.scan(minibatch_step, state, (orders, loss_keys))
    return state, jax.tree.map(lambda x: jnp.mean(x, axis=0), rows)

  @jax.named_scope('update')
  def update(
    state: LearnerState, trajectory: Trajectory, rng_key: chex.PRNGKey
  ) -> tuple[LearnerState, Metrics]:
    with jax.named_scope('prepare'):
      batch = agent.prepare(state.variables, trajectory, all_mean)
      measured = agent.measure(state.variables, trajectory)
      batch, measured = jax.lax.stop_gradient((batch, measured))
    vector, unravel = ravel_pytree(state.variables.params)
    state = _with_params(state, vector)
    state, (metrics, measured) = sgd_steps(
      state, unravel, batch, measured, rng_key
    )
    state = _with_params(state, unravel(state.variables.params))
    # Absorb last, so that all optimiser steps see the same statistics.
    variables = agent.absorb(state.variables, measured)
    state = state._replace(variables=variables)
    num_updates = state.num_updates + 1
    if target_period is not None:
      copy = functools.partial(jnp.where, num_updates % target_period == 0)
      target_params = jax.tree.map(copy, variables.params, state.target_params)
      state = state._replace(target_params=target_params)
    return state._replace(num_updates=num_updates), metrics

  return Learner(init, update)
