"""The learner core: the only code that changes an agent's parameters.

No other module calls a collective operation. The compiled update has one
all-reduce per optimiser step. It averages one vector: the gradients, the loss's
metrics and the measured statistics. This vector is as large as the parameters
and statistics, plus at most 1 KB. If `prepare` uses `mean`, each unroll needs
one more small all-reduce.
"""

import functools

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


def all_mean(tree: Tree) -> Tree:
  """Averages a tree over devices, in one all-reduce of one vector."""
  vector, unravel = ravel_pytree(tree)
  return unravel(jax.lax.pmean(vector, DEVICE_AXIS))


def _mean_rows(tree: Tree) -> Tree:
  return jax.tree.map(lambda x: jnp.mean(x, axis=0), tree)


def shuffle(rng_key: chex.PRNGKey, size: int) -> Array:
  """Returns a random permutation of 0 ... size - 1, int32 or uint32 `[size]`.

  If size is a power of two, the permutation is i -> (a i + b) mod size with a
  random odd a and a random b. It needs no sort, but most orders never occur.
  """
  if size & (size - 1):
    return jax.random.permutation(rng_key, size)
  multiplier, offset = jax.random.bits(rng_key, (2,), jnp.uint32)
  order = (multiplier | 1) * jnp.arange(size, dtype=jnp.uint32) + offset
  return order & jnp.uint32(size - 1)


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
    optimizer: an optax transformation. If its `update` takes an argument
      `hyperparams`, the learner passes `Variables.hyperparams`.
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
      opt_state=optimizer.init(variables.params),
      num_updates=jnp.zeros((), jnp.int32),
      num_sgd_steps=jnp.zeros((), jnp.int32),
      memory=(),
    )

  def sgd_step(
    state: LearnerState, batch: Tree, measured: Tree, rng_key: chex.PRNGKey
  ) -> tuple[LearnerState, tuple[Metrics, Tree]]:
    variables = state.variables

    def loss(params: Tree) -> tuple[Array, Metrics]:
      changed = variables._replace(params=params)
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

  def epoch(
    state: LearnerState, batch: Tree, measured: Tree, rng_key: chex.PRNGKey
  ) -> tuple[LearnerState, tuple[Metrics, Tree]]:
    shuffle_key, loss_key = jax.random.split(rng_key)
    loss_keys = jax.random.split(loss_key, num_minibatches)
    if num_minibatches == 1:
      return sgd_step(state, batch, measured, loss_keys[0])
    size = jax.tree.leaves(batch)[0].shape[0]
    if size % num_minibatches:
      raise ValueError(
        f'num_minibatches={num_minibatches} does not divide the {size} rows of '
        'the batch on each device'
      )
    order = shuffle(shuffle_key, size).reshape(num_minibatches, -1)

    def minibatch_step(state, order_and_key):
      rows, loss_key = order_and_key
      minibatch = jax.tree.map(lambda x: x[rows], batch)
      return sgd_step(state, minibatch, measured, loss_key)

    state, rows = jax.lax.scan(minibatch_step, state, (order, loss_keys))
    return state, _mean_rows(rows)

  @jax.named_scope('update')
  def update(
    state: LearnerState, trajectory: Trajectory, rng_key: chex.PRNGKey
  ) -> tuple[LearnerState, Metrics]:
    with jax.named_scope('prepare'):
      batch = agent.prepare(state.variables, trajectory, all_mean)
      measured = agent.measure(state.variables, trajectory)
      batch, measured = jax.lax.stop_gradient((batch, measured))
    if num_epochs == 1:
      state, (metrics, measured) = epoch(state, batch, measured, rng_key)
    else:
      keys = jax.random.split(rng_key, num_epochs)
      state, rows = jax.lax.scan(
        lambda state, key: epoch(state, batch, measured, key), state, keys
      )
      metrics, measured = _mean_rows(rows)
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
