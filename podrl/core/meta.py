"""Meta-gradients: hyperparameters that learn from the updates they cause.

Source: Xu et al. 2018, arXiv:1805.09801; Zahavy et al. 2020, arXiv:2002.12928.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from podrl.core.learner import all_mean, global_rows, row_keys
from podrl.fields import FRACTION, FROM_0, Field
from podrl.types import (
  Agent,
  Array,
  Hyperparams,
  Learner,
  LearnerState,
  Sample,
  Trajectory,
  Tree,
  Variables,
)

# `(variables, trajectory, rng_key) -> loss`, a mean over this device's shard.
OuterLoss = Callable[[Variables, Trajectory, chex.PRNGKey], Array]

# The hyperparameters that can learn.
NAMES = ('gamma', 'lambda_', 'entropy_cost', 'value_cost')
_FRACTIONS = ('gamma', 'lambda_')  # From 0 to 1; the others are above 0.
_SMALLEST = 1e-4  # The distance that a meta-parameter keeps from its bounds.

# `fold_in` with a small number would give a key that `split` gives too.
_OUTER_STREAM = 2**32 - 2

FIELDS = {
  'meta.learning_rate': Field(
    0.0,
    'Learning rate of hyperparameters (meta-gradients); 0 keeps them fixed.',
    FROM_0,
  ),
  'meta.params': Field(
    ','.join(NAMES), 'The hyperparameters that learn, with commas.'
  ),
  'meta.decay': Field(
    0.0,
    'Weight of each update in the meta-gradient, relative to the next update.',
    FRACTION,
  ),
  'meta.gamma': Field(0.99, 'Discount of the outer loss.', FRACTION),
  'meta.lambda_': Field(1.0, 'Lambda of the outer loss.', FRACTION),
  'meta.entropy_cost': Field(
    0.01, 'Weight of the entropy bonus in the outer loss.', FROM_0
  ),
  'meta.value_cost': Field(
    0.5, 'Weight of the value loss in the outer loss.', FROM_0
  ),
}


class MetaState(NamedTuple):
  """The state of the optimisers of a meta-learner.

  Attributes:
    inner: the optimiser state of the learner.
    outer: the optimiser state of the meta-parameters.
    offset: float32 `[M]`, the distance that the free value of each
      meta-parameter has moved; see `move`.
    tangents: leaves `[M, ...]`, the derivatives with respect to each offset: of
      the parameters and, with a `decay`, of all other floating-point numbers of
      the learner's state.
  """

  inner: Tree
  outer: Tree
  offset: Array
  tangents: tuple[Tree, list[Array]]


def move(name: str, value: Array, offset: Array) -> Array:
  """Moves a hyperparameter by an offset of its free value.

  The free value of a fraction, such as gamma, is its logit. That of any other
  hyperparameter is its logarithm. A value closer than 1e-4 to a bound first
  moves to this distance.

  Args:
    value: `[]`, the hyperparameter.
    offset: `[]`, any number.
  """
  if name in _FRACTIONS:
    value = jnp.clip(value, _SMALLEST, 1.0 - _SMALLEST)
    return jax.nn.sigmoid(jnp.log(value) - jnp.log1p(-value) + offset)
  return jnp.maximum(value, _SMALLEST) * jnp.exp(offset)


def make_outer_loss(agent: Agent, hyperparams: Hyperparams) -> OuterLoss:
  """Builds an outer loss: the agent's loss with fixed `hyperparams`."""

  def outer_loss(variables, trajectory, rng_key):
    variables = variables.with_hyperparams(hyperparams)
    prepare_key, loss_key = jax.random.split(rng_key)

    def keys(rng_key: chex.PRNGKey, num_rows: int) -> chex.PRNGKey:
      return row_keys(rng_key, global_rows(num_rows))

    weight = jnp.ones(trajectory.env_index.shape[1])
    sample = Sample(trajectory, (), weight)
    prepare_keys = keys(prepare_key, len(weight))
    batch = agent.prepare(variables, (), sample, prepare_keys, all_mean)
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    return agent.loss(variables, (), batch, keys(loss_key, num_rows))[0]

  return outer_loss


def make_meta_learner(
  learner: Learner,
  outer_loss: OuterLoss,
  optimizer: optax.GradientTransformation,
  *,
  names: Sequence[str] = NAMES,
  decay: float = 0.0,
) -> Learner:
  """Builds a learner whose hyperparameters learn too.

  Each update first moves the meta-parameters. Their gradient is that of
  `outer_loss` on the unroll that arrives, through the update before it: this
  update gave the parameters that acted in the unroll. So the unroll is fresh
  data. Then the learner updates its parameters with the moved values.

  The gradient is computed forwards: together with the parameters, an update
  gives their derivatives with respect to each of the M meta-parameters. So the
  state does not keep an earlier unroll, and an update takes about 1 + 2 M times
  as long. If it has N optimiser steps, it has at most 2 N + 1 all-reduces: two
  in each step, for the gradient and its derivatives, and one for the
  meta-gradient. XLA joins the two all-reduces of a step. `Agent.prepare` may
  add others.

  Network outputs that enter a target are constants, as in the inner loss.

  `Variables.hyperparams` keep their first values. The current values are
  metrics.

  Args:
    learner: has no memory; its update must be differentiable.
    outer_loss: what the meta-parameters minimise; see `make_outer_loss`.
    optimizer: of the meta-parameters' free values, float32 `[M]`; see `move`.
    names: the hyperparameters that learn.
    decay: from 0 to 1. With 0, the gradient goes through the last update only.
      With 1, it goes through all updates. Otherwise, each earlier update counts
      `decay` times as much as the next one, like an eligibility trace.

  Returns:
    A `Learner`. Its metrics are those of `learner`, the current value of each
    meta-parameter, `outer_loss` and `meta_grad_norm`.
  """
  names = tuple(names)

  def current(variables: Variables, offset: Array) -> Hyperparams:
    values = variables.hyperparams
    return {name: move(name, values[name], x) for name, x in zip(names, offset)}

  def init(rng_key, example_trajectory):
    state = learner.init(rng_key, example_trajectory)
    offset = jnp.zeros(len(names))
    tangents = jax.tree.map(
      lambda x: jnp.zeros((len(names), *x.shape), x.dtype),
      _moving(state, decay > 0),
    )
    meta = MetaState(state.opt_state, optimizer.init(offset), offset, tangents)
    return state._replace(opt_state=meta)

  def meta_step(variables, meta, trajectory, rng_key):
    """Moves the meta-parameters."""

    def loss(params: Tree) -> Array:
      return outer_loss(variables._replace(params=params), trajectory, rng_key)

    value, grads = jax.value_and_grad(loss)(variables.params)
    products = jax.tree.map(
      lambda tangent, grad: jnp.tensordot(tangent, grad, grad.ndim),
      meta.tangents[0],
      grads,
    )
    grad, value = all_mean((sum(jax.tree.leaves(products)), value))
    updates, outer = optimizer.update(grad, meta.outer, meta.offset)
    offset = optax.apply_updates(meta.offset, updates)
    metrics = {'outer_loss': value, 'meta_grad_norm': optax.tree.norm(grad)}
    return meta._replace(outer=outer, offset=offset), metrics

  def update(state, trajectory, rng_key):
    variables = state.variables
    outer_key = jax.random.fold_in(rng_key, _OUTER_STREAM)
    meta, metrics = meta_step(variables, state.opt_state, trajectory, outer_key)
    state = state._replace(opt_state=meta.inner)
    moving = _moving(state, decay > 0)

    def learn(moving: Tree, offset: Array) -> tuple[Tree, Any]:
      before = _put(state, moving)
      values = current(variables, offset)
      changed = before.variables.with_hyperparams(values)
      after, metrics = learner.update(
        before._replace(variables=changed), trajectory, rng_key
      )
      return _moving(after, decay > 0), (after, metrics)

    def differentiate(direction: Array, tangents: Tree) -> tuple:
      if not decay:
        fixed = functools.partial(learn, moving)
        return jax.jvp(fixed, (meta.offset,), (direction,), has_aux=True)
      tangents = jax.tree.map(lambda x: decay * x, tangents)
      return jax.jvp(
        learn, (moving, meta.offset), (tangents, direction), has_aux=True
      )

    _, tangents, (state, inner_metrics) = jax.vmap(
      differentiate, out_axes=(None, 0, None)
    )(jnp.eye(len(names)), meta.tangents)
    metrics |= inner_metrics | current(variables, meta.offset)
    kept = state.variables._replace(hyperparams=variables.hyperparams)
    meta = meta._replace(inner=state.opt_state, tangents=tangents)
    return state._replace(variables=kept, opt_state=meta), metrics

  return Learner(init, update)


def _rest(state: LearnerState) -> LearnerState:
  """Removes the parameters and the hyperparameters."""
  variables = state.variables._replace(params=(), hyperparams={})
  return state._replace(variables=variables)


def _is_float(x: Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def _moving(state: LearnerState, is_whole: bool) -> tuple[Tree, list[Array]]:
  """Returns the parameters and, if `is_whole`, all other floats of a state."""
  rest = jax.tree.leaves(_rest(state)) if is_whole else []
  return state.variables.params, list(filter(_is_float, rest))


def _put(state: LearnerState, moving: tuple[Tree, list[Array]]) -> LearnerState:
  """Replaces what `_moving` returns."""
  params, floats = moving
  hyperparams = state.variables.hyperparams
  if floats:
    leaves, structure = jax.tree.flatten(_rest(state))
    new = iter(floats)
    leaves = [next(new) if _is_float(x) else x for x in leaves]
    state = jax.tree.unflatten(structure, leaves)
  variables = state.variables._replace(params=params, hyperparams=hyperparams)
  return state._replace(variables=variables)
