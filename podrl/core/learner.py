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
  UpdateParts,
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


def num_rows(batch: Tree) -> int:
  """Returns the number of rows of a batch on this device."""
  return jax.tree.leaves(batch)[0].shape[0]


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
      `Variables.hyperparams`. For an argument `metrics`, it passes the metrics
      of the loss.
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
  num_steps = num_epochs * num_minibatches
  is_elementwise = optimizers.is_elementwise(optimizer)
  optimizer = optax.with_extra_args_support(optimizer)

  def pack(params: Tree) -> tuple[Any, Unpack]:
    """Returns the parameters as the optimiser sees them, and the inverse."""
    # On one vector, the optimiser needs only a few operations for all
    # parameters, instead of a few for each array.
    return ravel_pytree(params) if is_elementwise else (params, lambda x: x)

  def pack_state(state: LearnerState) -> tuple[LearnerState, Unpack]:
    packed, unpack = pack(state.variables.params)
    return _with_params(state, packed), unpack

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

  def shuffle_batch(batch, rng_key):
    """Returns the order of blocks, and the key, of each optimiser step."""
    size = num_rows(batch)
    if size % num_minibatches:
      raise ValueError(
        f'num_minibatches={num_minibatches} does not divide the {size} rows of '
        'the batch on each device'
      )
    block = blocks.block_size(size // num_minibatches)
    shuffle_key, loss_key = jax.random.split(rng_key)
    shuffle_keys = jax.random.split(shuffle_key, num_epochs)
    shuffle = functools.partial(jax.random.permutation, x=size // block)
    orders = jax.vmap(shuffle)(shuffle_keys).reshape(num_steps, -1)
    return orders, jax.random.split(loss_key, num_steps)

  def make_minibatch_step(unpack, batch, measured):
    """Makes a function `(state, order_and_key) -> (state, averages)`."""
    size = num_rows(batch)
    block, rows = blocks.block_size(size // num_minibatches), global_rows(size)
    parts = jax.tree.map(
      lambda x: x.reshape(-1, block, *x.shape[1:]), (batch, rows)
    )

    def minibatch_step(state, order_and_key):
      order, loss_key = order_and_key
      minibatch = batch, rows
      if num_minibatches > 1:
        collect = functools.partial(blocks.collect, order=order)
        minibatch = jax.tree.map(collect, parts)
      keys = row_keys(loss_key, minibatch[1])
      return sgd_step(state, unpack, minibatch[0], measured, keys)[:2]

    return minibatch_step

  def sgd_steps(state, batch, measured, rng_key):
    """Takes all optimiser steps of an update without a memory."""
    state, unpack = pack_state(state)
    if num_steps == 1:
      keys = row_keys(rng_key, global_rows(num_rows(batch)))
      state, means, _ = sgd_step(state, unpack, batch, measured, keys)
    else:
      orders_and_keys = shuffle_batch(batch, rng_key)
      step = make_minibatch_step(unpack, batch, measured)
      state, means = kernels.scan_means(step, state, orders_and_keys)
    return _with_params(state, unpack(state.variables.params)), means

  def some_sgd_steps(state, work, means, first, last):
    """Takes the steps from `first` to `last - 1`; see `UpdateParts.steps`."""
    batch, measured, orders_and_keys = work
    state, unpack = pack_state(state)
    step = make_minibatch_step(unpack, batch, measured)

    def body(i, carry):
      state, means = carry
      row = functools.partial(
        jax.lax.dynamic_index_in_dim, index=i, keepdims=False
      )
      state, new = step(state, jax.tree.map(row, orders_and_keys))
      put = functools.partial(
        jax.lax.dynamic_update_index_in_dim, index=i, axis=0
      )
      return state, jax.tree.map(put, means, new)

    # The bounds are unknown to the compiler, so each slice has the same loop.
    state, means = jax.lax.fori_loop(first, last, body, (state, means))
    return _with_params(state, unpack(state.variables.params)), means

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
      keys = row_keys(loss_key, global_rows(num_rows(batch)))
      state, (metrics, _), priority = sgd_step(state, unpack, batch, (), keys)
      if jax.tree.leaves(priority):
        new = memory.prioritise(state.memory, sample.index, priority)
        state = state._replace(memory=new)
      return state, metrics

    keys = jax.random.split(rng_key, num_epochs)
    return kernels.scan_means(sample_step, state, keys)

  def learn_if_ready(state, measured, rng_key):
    assert memory is not None
    state, unpack = pack_state(state)
    storage, priorities = state.memory
    # Average here, because an update may take no optimiser step. All devices
    # must take the same branch: a device that learns waits for the others.
    waits = 1.0 - memory.is_ready(state.memory).astype(jnp.float32)
    waiting_share, measured = all_mean((waits, measured))
    is_ready = waiting_share == 0.0
    state = state._replace(memory=priorities)

    # Inlined, so that JAX traces it only once, for the shapes and for `cond`.
    @functools.partial(jax.jit, inline=True)
    def take_steps(state):
      return learn(state, unpack, storage, rng_key)

    shapes = jax.eval_shape(take_steps, state)[1]

    def skip(state):
      return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    state, metrics = jax.lax.cond(is_ready, take_steps, skip, state)
    metrics['is_learning'] = is_ready.astype(jnp.float32)
    state = state._replace(memory=(storage, state.memory))
    state = _with_params(state, unpack(state.variables.params))
    return finish(state, metrics, measured)

  def begin(state, trajectory, rng_key):
    """Returns the state, the batch, and what `measure` returns.

    With a memory, the batch is empty.
    """
    if agent.calibrate:
      with jax.named_scope(CALIBRATE):
        variables = agent.calibrate(state.variables, trajectory, all_mean)
      state = state._replace(variables=variables)
    measured = agent.measure(state.variables, trajectory)
    batch = ()
    if memory is None:
      prepare_key = jax.random.fold_in(rng_key, _PREPARE_STREAM)
      weight = jnp.ones(trajectory.env_index.shape[1])
      sample = Sample(trajectory, (), weight)
      batch = prepare(state.variables, state.target_params, sample, prepare_key)
    return state, batch, measured

  def begin_parts(state, trajectory, rng_key):
    state, batch, measured = begin(state, trajectory, rng_key)
    work = batch, measured, shuffle_batch(batch, rng_key)
    shapes = jax.eval_shape(sgd_steps, state, batch, measured, rng_key)[1]
    rows = jax.tree.map(
      lambda x: jnp.zeros((num_steps, *x.shape), x.dtype), shapes
    )
    return state, work, rows

  def end(state, means):
    return finish(state, *jax.tree.map(lambda x: jnp.mean(x, axis=0), means))

  def finish(state, metrics, measured):
    # Absorb last, so that all optimiser steps see the same statistics.
    variables = agent.absorb(state.variables, measured)
    number = state.num_updates + 1
    return state._replace(variables=variables, num_updates=number), metrics

  @jax.named_scope('update')
  def update(state, trajectory, rng_key):
    state, batch, measured = begin(state, trajectory, rng_key)
    if memory is None:
      state, means = sgd_steps(state, batch, measured, rng_key)
      return finish(state, *means)
    with jax.named_scope('memory'):
      state = state._replace(memory=memory.add(state.memory, trajectory))
    return learn_if_ready(state, measured, rng_key)

  learner = Learner(init, update)
  if memory is None:
    if num_steps == 1:
      return learner
    scope = jax.named_scope('update')
    return learner._replace(
      parts=UpdateParts(
        num_steps, scope(begin_parts), scope(some_sgd_steps), scope(end)
      )
    )
  axes = learner.split_axes._replace(memory=memory.split_axes)
  return learner._replace(split_axes=axes)
