"""Tests meta-gradients against finite differences, and the meta-learner."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_learner

from podrl.agents import a2c, impala, ppo
from podrl.core import distributions, meta
from podrl.core import learner as learner_lib
from podrl.core.optimizers import make_optimizer
from podrl.drivers import spmd
from podrl.networks import actor_critic

_OUTER = {
  'gamma': 0.97,
  'lambda_': 0.9,
  'entropy_cost': 0.02,
  'value_cost': 1.0,
}
_BEGIN = {'gamma': 0.8, 'lambda_': 0.7, 'entropy_cost': 0.3, 'value_cost': 0.6}


def _double(tree):
  def convert(x):
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x, jnp.float64) if is_float else jnp.asarray(x)

  return jax.tree.map(convert, tree)


def _network():
  """Makes a network whose arithmetic has the dtype of its parameters."""

  def init(rng_key):
    shapes = {'in': (5, 16), 'policy': (16, 3), 'value': (16, 1)}
    keys = dict(zip(shapes, jax.random.split(rng_key, 3)))
    return {k: 0.5 * jax.random.normal(keys[k], x) for k, x in shapes.items()}

  def unroll(params, obs, is_first, carry):
    hidden = jnp.tanh(obs @ params['in'])
    return hidden @ params['policy'], (hidden @ params['value'])[..., 0], carry

  return actor_critic.Network(
    init,
    lambda size: (),
    unroll,
    jax.ShapeDtypeStruct((5,), jnp.float32),
    False,
  )


_NETWORK, _DISTRIBUTION = _network(), distributions.categorical(3)


def _outer_loss(variables, trajectory, rng_key):
  """A loss without stopped gradients, as finite differences need it."""
  del rng_key
  timestep = trajectory.timestep
  head, value, _ = _NETWORK.unroll(
    variables.params, timestep.obs, timestep.is_first, ()
  )
  reward = timestep.reward[1:]
  log_prob = _DISTRIBUTION.log_prob(head[:-1], trajectory.extras.sample)
  return jnp.mean(jnp.square(value[:-1] - reward) - log_prob * reward)


def _agent(name):
  module = {'ppo': ppo, 'impala': impala, 'a2c': a2c}[name]
  return module.make_agent(_NETWORK, _DISTRIBUTION)


def _learners(
  name,
  optimizer,
  decay=0.0,
  meta_optimizer=optax.sgd(1.0),
  outer_loss=_outer_loss,
  **kwargs,
):
  agent = _agent(name)
  inner = learner_lib.make_learner(agent, optimizer, **kwargs)
  learner = meta.make_meta_learner(
    inner, outer_loss, meta_optimizer, decay=decay
  )
  unrolls = [test_learner._trajectory(agent, seed) for seed in range(3)]
  return inner, learner, unrolls


def _begin(state):
  values = {
    k: jnp.asarray(x, jnp.result_type(float)) for k, x in _BEGIN.items()
  }
  return state._replace(variables=state.variables.with_hyperparams(values))


def _map(function, num_devices):
  """Maps `update`, or a function with the same arguments, over devices."""
  return spmd.device_map(
    function,
    spmd.make_mesh(jax.devices()[:num_devices]),
    (spmd.REPLICATED, spmd.TRAJECTORY, spmd.REPLICATED),
    spmd.REPLICATED,
  )


@pytest.mark.parametrize(
  'name,decay,kwargs',
  [
    ('impala', 0.0, {}),
    ('ppo', 0.0, {'num_epochs': 2, 'num_minibatches': 2}),
    pytest.param('a2c', 0.0, {}, marks=pytest.mark.slow),
    ('ppo', 1.0, {}),
  ],
)
def test_the_gradient_is_that_of_finite_differences(name, decay, kwargs):
  """With `decay`, the gradient goes through two updates, else through one."""
  with jax.enable_x64(True):
    optimizer = make_optimizer(
      'adam', learning_rate=0.01, anneal=False, max_grad_norm=0.5
    )
    inner, learner, unrolls = _learners(name, optimizer, decay, **kwargs)
    # The value after the last step enters targets, so it has no derivative.
    for unroll in unrolls if decay else ():
      unroll.timestep.discount[-1] = 0.0
    unrolls, keys = (
      _double(unrolls),
      list(jax.random.split(jax.random.key(7), 3)),
    )
    # Keep the meta-parameters until the last update.
    waiting = _learners(name, optimizer, decay, optax.sgd(0.0), **kwargs)[1]
    update, inner_update = _map(waiting.update, 1), _map(inner.update, 1)
    first = _begin(_double(learner.init(jax.random.key(0), unrolls[0])))
    num_updates = 2 if decay else 1
    state = first
    for unroll, key in zip(unrolls[:num_updates], keys):
      state, _ = update(state, unroll, key)
    last = _map(learner.update, 1)
    ended, _ = last(state, unrolls[num_updates], keys[num_updates])
    gradient = -ended.opt_state.offset
    outer = _map(lambda state, *args: _outer_loss(state.variables, *args), 1)

    def loss(offset):
      values = {
        k: meta.move(k, jnp.float64(_BEGIN[k]), x)
        for k, x in zip(meta.NAMES, offset)
      }
      state = first._replace(
        variables=first.variables.with_hyperparams(values),
        opt_state=first.opt_state.inner,
      )
      for unroll, key in zip(unrolls[:num_updates], keys):
        state, _ = inner_update(state, unroll, key)
      return float(outer(state, unrolls[num_updates], keys[num_updates]))

    for i, name in enumerate(meta.NAMES):
      step = 1e-4 * np.eye(4)[i]
      expected = (loss(step) - loss(-step)) / 2e-4
      assert abs(expected) > 1e-7, name
      np.testing.assert_allclose(gradient[i], expected, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize(
  'name,kwargs',
  # Minibatches would depend on the number of devices.
  [('ppo', {'num_epochs': 2}), helpers.slow('impala', {})],
)
def test_one_two_and_four_devices_agree(name, kwargs):
  outcomes = []
  for num_devices in 1, 2, 4:
    agent = _agent(name)
    outer_loss = meta.make_outer_loss(agent, _OUTER)
    _, learner, unrolls = _learners(
      name, optax.sgd(0.1), 0.5, outer_loss=outer_loss, **kwargs
    )
    state = _begin(learner.init(jax.random.key(0), unrolls[0]))
    update = _map(learner.update, num_devices)
    for i, unroll in enumerate(unrolls):
      state, metrics = update(state, unroll, jax.random.key(i))
    assert float(metrics['meta_grad_norm']) > 1e-4
    outcomes.append(jax.device_get((state, metrics)))
  for other in outcomes[1:]:
    for a, b in zip(jax.tree.leaves(outcomes[0]), jax.tree.leaves(other)):
      np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
  'name,kwargs,number',
  # A loop over optimiser steps is in the text once. The compiler joins the
  # averages of a gradient and of its derivatives. `prepare` of PPO averages the
  # moments of advantages, once for each of the two losses.
  [
    ('impala', {}, 2),
    ('impala', {'num_epochs': 3}, 2),
    ('ppo', {'num_epochs': 2, 'num_minibatches': 2}, 4),
  ],
)
def test_collectives_of_the_compiled_update(name, kwargs, number):
  outer_loss = meta.make_outer_loss(_agent(name), _OUTER)
  optimizer = make_optimizer(
    'adam', learning_rate=0.01, anneal=False, max_grad_norm=0.5
  )
  _, learner, unrolls = _learners(
    name, optimizer, outer_loss=outer_loss, **kwargs
  )
  state = jax.eval_shape(learner.init, jax.random.key(0), unrolls[0])
  update = _map(learner.update, 4)
  text = update.lower(state, unrolls[0], jax.random.key(0)).compile().as_text()
  found = [kind for kind, _ in test_learner._all_reduces(text)]
  assert found == ['all-reduce'] * number


def test_a_gradient_of_zero_gives_no_nan():
  optimizer = make_optimizer(
    'adam', learning_rate=0.01, anneal=False, max_grad_norm=0.5
  )
  _, learner, (unroll, *_) = _learners('impala', optimizer, 1.0)
  # All transitions are reset steps, and the entropy's weight is 0 there.
  is_first = np.ones_like(unroll.timestep.is_first)
  unroll = unroll._replace(timestep=unroll.timestep._replace(is_first=is_first))
  state = _begin(learner.init(jax.random.key(0), unroll))
  update = _map(learner.update, 1)
  for i in range(3):
    state, metrics = update(state, unroll, jax.random.key(i))
  assert metrics['grad_norm'] == 0.0
  chex.assert_tree_all_finite((state, metrics))


@pytest.mark.parametrize('name', meta.NAMES)
@pytest.mark.parametrize('value', [0.0, 0.3, 1.0])
def test_a_meta_parameter_stays_within_its_bounds(name, value):
  for offset in -20.0, -0.5, 0.0, 0.5, 20.0:
    moved = float(meta.move(name, jnp.float32(value), jnp.float32(offset)))
    assert moved >= 0 and (moved <= 1 or name.endswith('cost'))
    if not offset:
      np.testing.assert_allclose(moved, value, atol=1.01e-4)
    elif abs(offset) < 1 and value == 0.3:
      odds = np.exp(offset) * (0.3 / 0.7 if 'cost' not in name else 0.3)
      expected = odds / (1 + odds) if 'cost' not in name else odds
      np.testing.assert_allclose(moved, expected, rtol=1e-5)
