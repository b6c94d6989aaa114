"""The learner core: how parameters change, whatever the agent or the driver.

It is the only place that calls a collective. The compiled update has one
all-reduce per optimiser step: the gradients, the loss's metrics and what running
statistics measure, in one vector as large as the parameters and statistics and
at most 1 KB. It has one small one per unroll where `prepare` uses `mean`.
"""

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
  Tracked,
  Trajectory,
  Tree,
)


def _all_mean(tree: Tree) -> Tree:
  """Averages a tree over devices, in one all-reduce of one vector."""
  vector, unravel = ravel_pytree(tree)
  return unravel(jax.lax.pmean(vector, DEVICE_AXIS))


def trained(params: Tree) -> Tree:
  """The part of an agent's parameters that the optimiser changes."""
  return params.params if isinstance(params, Tracked) else params


def _with_trained(params: Tree, part: Tree) -> Tree:
  """An agent's parameters with that part replaced."""
  return params._replace(params=part) if isinstance(params, Tracked) else part


def shuffle(rng_key: chex.PRNGKey, size: int) -> Array:
  """A random permutation of 0 ... size - 1, cheap where size is a power of two.

  There it is i -> (a i + b) mod size with a odd, both drawn afresh: a
  bijection without the sort that a uniform permutation costs.

  Args:
    rng_key: of this permutation.
    size: how many to permute.

  Returns:
    Int32 or uint32 `[size]`.
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
  """The learner of an agent.

  Args:
    agent: whose loss is minimised.
    optimizer: an optax transformation.
    num_epochs: passes over each unroll.
    num_minibatches: optimiser steps in each pass; it divides the leading axis
      of the agent's batch on each device.
    target_period: copy the parameters to `target_params` after every so many
      calls of `update`; None keeps no target parameters.

  Returns:
    A `Learner`. Its metrics are means over devices and optimiser steps: those
    of the agent's loss, `loss` itself, and `grad_norm`.
  """

  def init(
    rng_key: chex.PRNGKey, example_trajectory: Trajectory
  ) -> LearnerState:
    del example_trajectory  # For learners that remember.
    params = agent.init(rng_key)
    return LearnerState(
      params=params,
      # Copied: donating one buffer under two names crashes.
      target_params=()
      if target_period is None
      else jax.tree.map(jnp.copy, params),
      opt_state=optimizer.init(trained(params)),
      num_updates=jnp.zeros((), jnp.int32),
      num_sgd_steps=jnp.zeros((), jnp.int32),
      memory=(),
    )

  def sgd_step(
    state: LearnerState, batch: Tree, measured: Tree, rng_key: chex.PRNGKey
  ) -> tuple[LearnerState, tuple[Metrics, Tree]]:
    def loss(part: Tree) -> tuple[Array, Metrics]:
      return agent.loss(
        _with_trained(state.params, part), state.target_params, batch, rng_key
      )

    params = trained(state.params)
    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    grads, metrics, measured = _all_mean(
      (grads, metrics | {'loss': value}, measured)
    )
    updates, opt_state = optimizer.update(grads, state.opt_state, params)
    metrics['grad_norm'] = optax.tree.norm(grads)
    return state._replace(
      params=_with_trained(state.params, optax.apply_updates(params, updates)),
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
        f'num_minibatches={num_minibatches} does not divide the {size} slots '
        'that one device learns from'
      )
    order = shuffle(shuffle_key, size).reshape(num_minibatches, -1)

    def minibatch_step(state, order_and_key):
      rows, loss_key = order_and_key
      return sgd_step(
        state, jax.tree.map(lambda x: x[rows], batch), measured, loss_key
      )

    state, rows = jax.lax.scan(minibatch_step, state, (order, loss_keys))
    return state, jax.tree.map(lambda x: jnp.mean(x, axis=0), rows)

  def update(
    state: LearnerState, trajectory: Trajectory, rng_key: chex.PRNGKey
  ) -> tuple[LearnerState, Metrics]:
    batch, measured = jax.lax.stop_gradient(
      (
        agent.prepare(state.params, trajectory, _all_mean),
        agent.measure(state.params, trajectory),
      )
    )
    if num_epochs == 1:
      state, (metrics, measured) = epoch(state, batch, measured, rng_key)
    else:
      state, rows = jax.lax.scan(
        lambda state, key: epoch(state, batch, measured, key),
        state,
        jax.random.split(rng_key, num_epochs),
      )
      metrics, measured = jax.tree.map(lambda x: jnp.mean(x, axis=0), rows)
    # Last: all of the update's steps see the same statistics.
    state = state._replace(params=agent.absorb(state.params, measured))
    num_updates = state.num_updates + 1
    if target_period is not None:
      is_due = num_updates % target_period == 0
      state = state._replace(
        target_params=jax.tree.map(
          lambda new, old: jnp.where(is_due, new, old),
          state.params,
          state.target_params,
        )
      )
    return state._replace(num_updates=num_updates), metrics

  return Learner(init, update)
