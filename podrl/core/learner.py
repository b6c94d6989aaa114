"""The learner core: the only code that changes an agent's parameters.

No other module has a collective operation in an update. The update has one
all-reduce per optimiser step. It averages one vector: the gradients, the loss's
metrics and the measured statistics. This vector is as large as the parameters
and statistics, plus at most 1 KB. With a memory, or if `prepare` uses `mean`,
each unroll needs one more small all-reduce. The first update may need a few
more, for `Agent.calibrate`.
"""

from collections.abc import Callable
import functools
from typing import Any

import chex
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import optax

from podrl import kernels
from podrl.core import optimizers
from podrl.kernels import blocks
from podrl.types import (
  DEVICE_AXIS,
  Agent,
  Array,
  Learner,
  LearnerState,
  LossOutput,
  Memory,
  Sample,
  Tree,
)

TargetUpdate = Callable[[Tree, Tree, Array], Tree]
Unpack = Callable[[Any], Tree]  # Maps what the optimiser sees to parameters.

# The scope of the operations that only the first update runs.
CALIBRATE = 'calibrate'

# `fold_in` with a small number would give a key that `split` gives too.
_PREPARE_STREAM = 2**32 - 1


def all_mean(tree: Tree) -> Tree:
  """Averages a tree over devices, in one all-reduce of one vector."""
  if not jax.tree.leaves(tree):
    return tree
  vector, unravel = ravel_pytree(tree)
  return unravel(jax.lax.pmean(vector, DEVICE_AXIS))


def _with_params(state: LearnerState, params: Tree) -> LearnerState:
  return state._replace(variables=state.variables._replace(params=params))


def row_keys(rng_key: chex.PRNGKey, row: Array) -> chex.PRNGKey:
  """Folds the global indices of rows, int32 `[N]`, into a key."""
  return jax.vmap(jax.random.fold_in, (None, 0))(rng_key, row)


def fold_into_rows(keys: chex.PRNGKey, number: Array | int) -> chex.PRNGKey:
  """Folds one number, int32 `[]`, into the keys `[N]` of rows."""
  return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def global_rows(num_rows: int) -> Array:
  """Returns the global indices of this device's rows, int32 `[num_rows]`."""
  first = jax.lax.axis_index(DEVICE_AXIS) * num_rows
  return first + jnp.arange(num_rows, dtype=jnp.int32)


def make_learner(
  agent: Agent,
  optimizer: optax.GradientTransformation,
  *,
  num_epochs: int = 1,
  num_minibatches: int = 1,
  target_update: TargetUpdate | None = None,
  memory: Memory | None = None,
) -> Learner:
  """Builds the learner of an agent.

  Args:
    optimizer: an optax transformation of the agent's parameters. If it is
      `optimizers.elementwise`, it gets them as one vector, which is faster. If
      its `update` takes an argument `hyperparams`, the learner passes
      `Variables.hyperparams`; likewise `metrics`, those of the loss.
    num_epochs: passes over each unroll. With a memory, the number of optimiser
      steps per update; each learns from a sample of its own.
    num_minibatches: optimiser steps in each pass. It must divide the number of
      rows (axis 0) of the batch that `Agent.prepare` returns on each device.
      It must be 1 with a memory.
    target_update: `(params, target_params, num_sgd_steps) -> target_params`,
      called after every optimiser step; None means that there are no target
      parameters. See `optax.periodic_update` and `optax.incremental_update`.
    memory: what the learner learns from; None means the latest unroll.

  Returns:
    A `Learner`. Its metrics are `loss`, `grad_norm` and the metrics of the
    agent's loss, averaged over devices and optimiser steps. `loss` is NaN if
    the gradient of a step is NaN or infinite. With a memory, the metric
    `is_learning` is 0 for updates before the memory was ready, and then the
    other metrics are 0 too.
  """
  if memory is not None and num_minibatches != 1:
    raise ValueError(
      f'num_minibatches={num_minibatches} must be 1 if there is a memory'
    )
  is_elementwise = optimizers.is_elementwise(optimizer)
  optimizer = optax.with_extra_args_support(optimizer)

  def pack(params: Tree) -> tuple[Any, Unpack]:
    """Returns the parameters as the optimiser sees them, and the inverse."""
    # On one vector, the optimiser needs only a few operations for all
    # parameters, instead of a few for each array.
    return ravel_pytree(params) if is_elementwise else (params, lambda x: x)

  def init(rng_key, example_trajectory):
    variables, target_params = agent.init(rng_key), ()
    if target_update is not None:
      # Copy them, because donating one buffer as two arguments crashes.
      target_params = jax.tree.map(jnp.copy, variables.params)
    return LearnerState(
      variables=variables,
      target_params=target_params,
      opt_state=optimizer.init(pack(variables.params)[0]),
      num_updates=jnp.zeros((), jnp.int32),
      num_sgd_steps=jnp.zeros((), jnp.int32),
      memory=memory.init(example_trajectory) if memory else (),
    )

  def sgd_step(state, unpack, batch, measured, rng_key):
    """Takes one step; also returns the averages, and the rows' priorities."""
    variables = state.variables

    def loss(packed: Tree) -> tuple[Array, LossOutput]:
      changed = variables._replace(params=unpack(packed))
      return agent.loss(changed, state.target_params, batch, rng_key)

    params = variables.params
    (value, output), grads = jax.value_and_grad(loss, has_aux=True)(params)
    metrics = output.metrics | {'loss': value}
    grads, metrics, measured = all_mean((grads, metrics, measured))
    updates, opt_state = optimizer.update(
      grads,
      state.opt_state,
      params,
      hyperparams=variables.hyperparams,
      metrics=metrics,
    )
    metrics['grad_norm'] = norm = optax.tree.norm(grads)
    # Such a gradient ruins the parameters, even if the loss is finite.
    metrics['loss'] = jnp.where(jnp.isfinite(norm), metrics['loss'], jnp.nan)
    params = optax.apply_updates(params, updates)
    num_sgd_steps = state.num_sgd_steps + 1
    if target_update is not None:
      new = target_update(unpack(params), state.target_params, num_sgd_steps)
      state = state._replace(target_params=new)
    state = state._replace(
      variables=variables._replace(params=params),
      opt_state=opt_state,
      num_sgd_steps=num_sgd_steps,
    )
    return state, (metrics, measured), output.priority

  def sgd_steps(state, unpack, batch, measured, rng_key):
    """Takes all optimiser steps of an update without a memory."""
    num_steps = num_epochs * num_minibatches
    size = jax.tree.leaves(batch)[0].shape[0]
    rows = global_rows(size)
    if num_steps == 1:
      keys = row_keys(rng_key, rows)
      return sgd_step(state, unpack, batch, measured, keys)[:2]
    if size % num_minibatches:
      raise ValueError(
        f'num_minibatches={num_minibatches} does not divide the {size} rows of '
        'the batch on each device'
      )
    block = blocks.block_size(size // num_minibatches)
    parts = jax.tree.map(
      lambda x: x.reshape(-1, block, *x.shape[1:]), (batch, rows)
    )
    shuffle_key, loss_key = jax.random.split(rng_key)
    shuffle_keys = jax.random.split(shuffle_key, num_epochs)
    shuffle = functools.partial(jax.random.permutation, x=size // block)
    orders = jax.vmap(shuffle)(shuffle_keys).reshape(num_steps, -1)

    def minibatch_step(state, order_and_key):
      order, loss_key = order_and_key
      minibatch = batch, rows
      if num_minibatches > 1:
        collect = functools.partial(blocks.collect, order=order)
        minibatch = jax.tree.map(collect, parts)
      keys = row_keys(loss_key, minibatch[1])
      return sgd_step(state, unpack, minibatch[0], measured, keys)[:2]

    loss_keys = jax.random.split(loss_key, num_steps)
    return kernels.scan_means(minibatch_step, state, (orders, loss_keys))

  def prepare(variables, target_params, sample, rng_key):
    keys = row_keys(rng_key, global_rows(len(sample.weight)))
    with jax.named_scope('prepare'):
      return agent.prepare(variables, target_params, sample, keys, all_mean)

  def learn(state, unpack, storage, rng_key):
    """Takes all optimiser steps of an update with a memory.

    `state.memory` contains only the priorities.
    """
    assert memory is not None
    device = jax.lax.axis_index(DEVICE_AXIS)

    def sample_step(state, rng_key):
      sample_key, prepare_key, loss_key = jax.random.split(rng_key, 3)
      sample_key = jax.random.fold_in(sample_key, device)
      hyperparams = state.variables.hyperparams
      sample = memory.sample((storage, state.memory), sample_key, hyperparams)
      variables = _with_params(state, unpack(state.variables.params)).variables
      batch = prepare(variables, state.target_params, sample, prepare_key)
      size = jax.tree.leaves(batch)[0].shape[0]
      keys = row_keys(loss_key, global_rows(size))
      state, (metrics, _), priority = sgd_step(state, unpack, batch, (), keys)
      if jax.tree.leaves(priority):
        new = memory.prioritise(state.memory, sample.index, priority)
        state = state._replace(memory=new)
      return state, metrics

    keys = jax.random.split(rng_key, num_epochs)
    return kernels.scan_means(sample_step, state, keys)

  def learn_if_ready(state, unpack, measured, rng_key):
    assert memory is not None
    storage, priorities = state.memory
    # Average here, because an update may take no optimiser step. All devices
    # must take the same branch: a device that learns waits for the others.
    waits = 1.0 - memory.is_ready(state.memory).astype(jnp.float32)
    waiting_share, measured = all_mean((waits, measured))
    is_ready = waiting_share == 0.0
    state = state._replace(memory=priorities)

    # Inlined, so that tracing it for the shapes and for `cond` is one trace.
    @functools.partial(jax.jit, inline=True)
    def take_steps(state):
      return learn(state, unpack, storage, rng_key)

    shapes = jax.eval_shape(take_steps, state)[1]

    def skip(state):
      return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    state, metrics = jax.lax.cond(is_ready, take_steps, skip, state)
    metrics['is_learning'] = is_ready.astype(jnp.float32)
    state = state._replace(memory=(storage, state.memory))
    return state, (metrics, measured)

  @jax.named_scope('update')
  def update(state, trajectory, rng_key):
    if agent.calibrate:
      with jax.named_scope(CALIBRATE):
        variables = agent.calibrate(state.variables, trajectory, all_mean)
      state = state._replace(variables=variables)
    measured = agent.measure(state.variables, trajectory)
    packed, unpack = pack(state.variables.params)
    batch = ()
    if memory is None:
      prepare_key = jax.random.fold_in(rng_key, _PREPARE_STREAM)
      weight = jnp.ones(trajectory.env_index.shape[1])
      sample = Sample(trajectory, (), weight)
      batch = prepare(state.variables, state.target_params, sample, prepare_key)
    state = _with_params(state, packed)
    if memory is None:
      state, (metrics, measured) = sgd_steps(
        state, unpack, batch, measured, rng_key
      )
    else:
      with jax.named_scope('memory'):
        state = state._replace(memory=memory.add(state.memory, trajectory))
      state, (metrics, measured) = learn_if_ready(
        state, unpack, measured, rng_key
      )
    state = _with_params(state, unpack(state.variables.params))
    # Absorb last, so that all optimiser steps see the same statistics.
    variables = agent.absorb(state.variables, measured)
    number = state.num_updates + 1
    return state._replace(variables=variables, num_updates=number), metrics

  learner = Learner(init, update)
  if memory is None:
    return learner
  axes = learner.split_axes._replace(memory=memory.split_axes)
  return learner._replace(split_axes=axes)
