"""Tests PQN's targets, loss and reset steps against plain Python."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.types import Discrete, EnvSpec, TimeStep, Trajectory

_SPEC = EnvSpec(
  jax.ShapeDtypeStruct((5,), jnp.float32), False, Discrete(3), 1, 0
)
_GAMMA, _LAMBDA = 0.9, 0.8
_T, _B = 8, 4


def _agent(core='none', reward_clip=0.0):
  agent = helpers.make_agent(
    'pqn',
    _SPEC,
    {'layer_norm': True, 'recurrent': core},
    lambda_=_LAMBDA,
    reward_clip=reward_clip,
  )
  return agent, jax.jit(agent.init)(jax.random.key(0))


def _steps():
  """Makes steps with reset steps inside the unroll and at both of its ends.

  Environment 0 terminates and begins again, 1 is truncated. In 2, the first and
  the last transition are reset steps. The last step of 3 terminates.
  """
  rng = np.random.default_rng(0)
  is_first = np.zeros((_T + 1, _B), bool)
  is_first[[3, 3, 1, _T], [0, 1, 2, 2]] = True
  discount = np.ones((_T + 1, _B), np.float32)
  discount[[2, _T], [0, 3]] = 0.0
  obs = rng.normal(size=(_T + 1, _B, 5)).astype(np.float32)
  reward = np.where(is_first, 0, rng.normal(size=is_first.shape))
  return TimeStep(obs, reward.astype(np.float32), discount, is_first)


def _act(agent, variables, steps):
  """Acts step by step; returns the trajectory and the values of all steps."""
  first = carry = jax.tree.map(
    lambda x: x + 0.5, agent.initial_carry(np.arange(_B))
  )
  rows, act = [], jax.jit(agent.act)
  for t in range(_T + 1):
    step = jax.tree.map(lambda x: x[t], steps)
    keys = jax.random.split(jax.random.key(t), _B)
    action, extras, carry = act(variables, keys, step, carry)
    rows.append((action, extras))
  actions, extras = jax.tree.map(lambda *x: np.stack(x), *rows)
  before = jax.tree.map(lambda x: x[:-1], extras)
  first = jax.tree.map(lambda x: x[None], first)
  counters = helpers.counters(_B)
  trajectory = Trajectory(steps, actions[:-1], before, first, *counters)
  return trajectory, extras.value


def _prepare(agent, variables, trajectory):
  return jax.jit(lambda v, x: helpers.prepare(agent, v, x))(
    variables, trajectory
  )


def _values(params, obs):
  """Computes the action values of a feed-forward network with numpy."""
  params = jax.device_get(params['params'])
  layer, norm = (params['MLP_0'][x] for x in ('Dense_0', 'LayerNorm_0'))
  x = obs @ layer['kernel'] + layer['bias']
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1)[..., None] + 1e-6)
  x = np.maximum(x * norm['scale'] + norm['bias'], 0)
  head = params['DenseGeneral_0']
  return x @ head['kernel'][:, :, 0] + head['bias'][:, 0]


def _targets(timestep, values):
  """Computes Q(lambda) targets `[T, B]` with a loop; 0 for reset steps."""
  targets = np.zeros((_T, _B))
  for b in range(_B):
    for t in reversed(range(_T)):
      if timestep.is_first[t + 1, b]:
        continue
      following = values[t + 1, b]
      if t + 1 < _T and not timestep.is_first[t + 2, b]:
        following *= 1 - _LAMBDA
        following += _LAMBDA * targets[t + 1, b]
      discount = _GAMMA * timestep.discount[t + 1, b]
      targets[t, b] = timestep.reward[t + 1, b] + discount * following
  return targets


@pytest.mark.parametrize('reward_clip', [0.0, 0.5])
def test_targets_and_loss_by_hand(reward_clip):
  agent, variables = _agent(reward_clip=reward_clip)
  steps = _steps()
  trajectory, values = _act(agent, variables, steps)
  # The values of the unroll are those that acting stored; the network gives
  # only the last one.
  stored = np.random.default_rng(1).normal(size=(_T, _B)).astype(np.float32)
  extras = trajectory.extras._replace(value=stored)
  batch = _prepare(agent, variables, trajectory._replace(extras=extras))
  q = _values(variables.params, steps.obs)
  np.testing.assert_allclose(values, q.max(-1), atol=1e-5)
  clipped = steps
  if reward_clip:
    clipped = steps._replace(reward=np.clip(steps.reward, -0.5, 0.5))
  expected = _targets(clipped, np.concatenate([stored, q[-1:].max(-1)]))
  weight = 1.0 - steps.is_first[1:]
  assert batch.target.shape == (_T * _B, 1)
  np.testing.assert_array_equal(batch.weight.reshape(_T, _B), weight)
  target = weight * batch.target.reshape(_T, _B)
  np.testing.assert_allclose(target, expected, atol=1e-5)

  loss, output = jax.jit(agent.loss)(variables, (), batch, None)
  chosen = np.take_along_axis(q[:-1], trajectory.action[..., None], -1)[..., 0]
  # The mean is over all slots, reset steps included.
  errors = weight * (chosen - expected)
  np.testing.assert_allclose(loss, 0.5 * np.mean(errors**2), rtol=1e-4)
  value = np.mean(weight * q[:-1].max(-1))
  np.testing.assert_allclose(output.metrics['value'], value, atol=1e-5)


def test_targets_depend_on_gamma_and_lambda_but_not_on_parameters():
  agent, variables = _agent()
  trajectory, _ = _act(agent, variables, _steps())
  grads = jax.jit(
    jax.grad(lambda v: jnp.sum(helpers.prepare(agent, v, trajectory).target))
  )(variables._replace(statistics=()))
  assert not any(np.any(x) for x in jax.tree.leaves(grads.params))
  assert abs(grads.hyperparams['gamma']) > 0.1
  assert abs(grads.hyperparams['lambda_']) > 0.1


@pytest.mark.parametrize('core', ['none', 'gru'])
def test_nothing_is_learned_from_a_reset_step(core):
  agent, variables = _agent(core)
  steps = _steps()
  trajectory, _ = _act(agent, variables, steps)
  batch = _prepare(agent, variables, trajectory)

  @jax.jit
  def loss(obs, target, action):
    changed = batch._replace(obs=obs, target=target, action=action)
    return agent.loss(variables, (), changed, None)[0]

  arguments = batch.obs, batch.target, batch.action
  is_reset_step = np.asarray(batch.weight) == 0
  assert is_reset_step.sum() == 4
  # The step before a reset step is the last of its episode, so its observation
  # matters for no other slot.
  for grad in jax.jit(jax.grad(loss, (0, 1)))(*arguments):
    changes = np.asarray(grad).reshape(*is_reset_step.shape, -1).any(-1)
    np.testing.assert_array_equal(changes, ~is_reset_step)
  others = (batch.action + 1) % 3
  at_reset_steps = np.where(is_reset_step, others, batch.action)
  assert loss(*arguments[:2], at_reset_steps) == loss(*arguments)
  assert loss(*arguments[:2], others) != loss(*arguments)


@pytest.mark.parametrize('core', ['gru', 'lru', helpers.slow('lstm')])
def test_a_recurrent_loss_has_the_values_of_acting(core):
  agent, variables = _agent(core)
  steps = _steps()
  trajectory, values = _act(agent, variables, steps)
  batch = _prepare(agent, variables, trajectory)
  # Rows are environments.
  np.testing.assert_array_equal(batch.action, trajectory.action.T)
  weight = 1.0 - steps.is_first[1:]
  expected = _targets(steps, values)
  np.testing.assert_allclose(
    batch.target.T * weight, expected, atol=1e-5, rtol=1e-5
  )

  def value(weight):
    changed = batch._replace(weight=weight)
    return agent.loss(variables, (), changed, None)[1].metrics['value']

  # The metric is a weighted mean, so its derivatives are the values in the
  # loss, divided by the number of slots.
  found = jax.jit(jax.grad(value))(batch.weight) * _T * _B
  np.testing.assert_allclose(found.T, values[:-1], atol=1e-5)
