"""Tests R2D2's targets, priorities and burn-in against plain Python."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.agents import exploring, r2d2
from podrl.types import Discrete, EnvSpec, Sample, TimeStep, Trajectory

_SPEC = EnvSpec(
  jax.ShapeDtypeStruct((5,), jnp.float32), False, Discrete(4), 1, 0
)
_MEMORY = {'recurrent': 'lstm', 'memory_steps': 10}
_GAMMA, _N, _BURN_IN = 0.9, 3, 3
_L, _B = 7, 5  # Transitions to learn from, and sequences.


@functools.cache  # So the tests share compiled functions.
def _agent(**fields):
  """Makes the agent, its variables and target parameters."""
  fields = {'n_steps': _N, 'burn_in': _BURN_IN} | fields
  agent = helpers.make_agent('r2d2', _SPEC, _MEMORY, **fields)
  init = jax.jit(agent.init)
  variables, target = (init(jax.random.key(i)) for i in range(2))
  return agent, variables, target.params


def _sample(burn_in=_BURN_IN):
  """Makes sequences with a carry before each of their steps.

  Sequence 0 has no reset step. In 1, the first learned step is the first of its
  episode. In 2, an episode terminates in the burn-in. 3 is truncated and 4
  terminates at learned steps; 4 ends with a reset step.
  """
  rng = np.random.default_rng(0)
  shape = burn_in + _L + 1, _B
  is_first = np.zeros(shape, bool)
  discount = np.ones(shape, np.float32)
  is_first[[burn_in, burn_in + 3, burn_in + 2, -1], [1, 3, 4, 4]] = True
  discount[burn_in + 1, 4] = 0.0
  if burn_in:
    is_first[1, 2], discount[0, 2] = True, 0.0
  obs, carry = (
    rng.normal(size=(*shape, n)).astype(np.float32) for n in (5, 16)
  )
  reward = np.where(is_first, 0, rng.normal(size=shape, scale=4))
  timestep = TimeStep(obs, reward.astype(np.float32), discount, is_first)
  action = rng.integers(0, 4, (shape[0] - 1, _B)).astype(np.int32)
  extras = r2d2.Extras((carry[:-1, :, :8], carry[:-1, :, 8:]))
  weight = rng.uniform(0.5, 1, _B).astype(np.float32)
  trajectory = Trajectory(timestep, action, extras, (), (), ())
  return Sample(trajectory, np.arange(_B), weight)


@functools.partial(jax.jit, static_argnums=0)
def _prepare(agent, variables, target, sample):
  return agent.prepare(variables, target, sample, None, lambda x: x)


@functools.partial(jax.jit, static_argnums=0)
def _loss(agent, variables, target, sample):
  batch = _prepare(agent, variables, target, sample)
  return agent.loss(variables, (), batch, None)


def _step_through(params, sample):
  """Computes the action values of all steps, one step after another."""
  fields = helpers.network_fields('r2d2', **_MEMORY)
  network = exploring.build_network(_SPEC, fields, is_duelling=True)
  timestep = sample.trajectory.timestep
  carry = jax.tree.map(lambda x: x[0], sample.trajectory.extras.carry)
  step, values = jax.jit(network.unroll), []
  for t in range(len(timestep.obs)):
    outputs, carry = step(
      params, timestep.obs[t : t + 1], timestep.is_first[t : t + 1], carry
    )
    values.append(outputs[0, :, :, 0])
  return np.array(values, np.float64)


def _rescale(x):
  return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x


def _inverse(x):
  """Computes the formula of Pohlen et al. 2018, arXiv:1805.11593."""
  root = np.sqrt(1 + 4e-3 * (abs(x) + 1 + 1e-3))
  return np.sign(x) * (((root - 1) / 2e-3) ** 2 - 1)


@pytest.mark.parametrize(
  'burn_in,rescales,reward_clip', [(_BURN_IN, True, 0.0), (0, False, 2.0)]
)
def test_loss_and_priority_by_hand(burn_in, rescales, reward_clip):
  agent, variables, target = _agent(
    burn_in=burn_in, rescale_values=rescales, reward_clip=reward_clip
  )
  sample = _sample(burn_in)
  timestep, action = sample.trajectory[:2]
  online = _step_through(variables.params, sample)
  frozen = _step_through(target, sample)
  assert np.any(online.argmax(-1) != frozen.argmax(-1))
  reward = timestep.reward
  if reward_clip:
    reward = np.clip(reward, -reward_clip, reward_clip)
  errors = np.zeros((_L, _B))
  for b in range(_B):
    for t in range(burn_in, burn_in + _L):
      total, discount, end = 0.0, 1.0, t
      last = min(t + _N, burn_in + _L)
      while end < last and not timestep.is_first[end + 1, b]:
        end += 1
        total += discount * reward[end, b]
        discount *= _GAMMA * timestep.discount[end, b]
      if end == t:
        continue  # A reset step.
      value = frozen[end, b, online[end, b].argmax()]
      if rescales:
        expected = _rescale(total + discount * _inverse(value))
      else:
        expected = total + discount * value
      errors[t - burn_in, b] = online[t, b, action[t, b]] - expected
  loss, output = _loss(agent, variables, target, sample)
  expected = np.mean(sample.weight * 0.5 * np.sum(errors**2, 0))
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
  size = abs(errors)
  priority = 0.9 * size.max(0) + 0.1 * size.mean(0)
  np.testing.assert_allclose(output.priority, priority, rtol=1e-4)


def test_importance_weights_change_the_loss_but_not_the_priority():
  agent, variables, target = _agent()
  sample = _sample()
  loss, output = _loss(agent, variables, target, sample)
  doubled = sample._replace(weight=2 * sample.weight)
  twice, same = _loss(agent, variables, target, doubled)
  np.testing.assert_allclose(twice, 2 * loss, rtol=1e-6)
  np.testing.assert_array_equal(output.priority, same.priority)


def test_parameters_get_no_gradient_from_the_burn_in():
  agent, variables, target = _agent()
  sample = _sample()
  batch = _prepare(agent, variables, target, sample)

  def gradient(loss):
    return jax.jit(jax.grad(lambda p: loss(variables._replace(params=p))[0]))(
      variables.params
    )

  # Here, the carry after the burn-in is a constant.
  constant = gradient(lambda v: agent.loss(v, (), batch, None))
  flowing = gradient(lambda v: _loss(agent, v, target, sample))
  assert max(np.abs(x).max() for x in jax.tree.leaves(constant)) > 0.1
  chex.assert_trees_all_close(flowing, constant, atol=1e-5)


def test_the_burn_in_changes_the_loss_unless_a_reset_step_follows():
  agent, variables, target = _agent()
  sample = _sample()

  def loss(obs, carry):
    trajectory = sample.trajectory
    timestep = trajectory.timestep._replace(obs=obs)
    trajectory = trajectory._replace(
      timestep=timestep, extras=r2d2.Extras(carry)
    )
    changed = sample._replace(trajectory=trajectory)
    return _loss(agent, variables, target, changed)[0]

  of_obs, of_carry = jax.jit(jax.grad(loss, (0, 1)))(
    sample.trajectory.timestep.obs, sample.trajectory.extras.carry
  )
  changes = np.any(of_obs, axis=-1)
  assert changes.shape == (_BURN_IN + _L + 1, _B)
  # The reset step at the first learned step separates sequence 1 from its
  # burn-in, and the reset step in the burn-in separates 2 from its first step.
  expected = np.ones((_BURN_IN, _B), bool)
  expected[:, 1] = expected[0, 2] = False
  np.testing.assert_array_equal(changes[:_BURN_IN], expected)
  assert changes[_BURN_IN].all()
  # Only the carry before the first step of a sequence is used.
  for x in of_carry:
    np.testing.assert_array_equal(np.any(x[0], axis=-1), expected[0])
    assert not np.any(x[1:])


@pytest.mark.parametrize('num_envs', [1, 2, 8])
def test_each_environment_has_its_own_epsilon(num_envs):
  hyperparams = {'epsilon': 0.4, 'epsilon_exponent': 7.0, 'num_envs': num_envs}
  found = r2d2.epsilon(hyperparams, jnp.arange(num_envs, dtype=jnp.float32))
  expected = [0.4]
  for i in range(1, num_envs):
    expected.append(0.4 ** (1 + 7 * i / (num_envs - 1)))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_acting_explores_by_environment_and_stores_the_carry_before_a_step():
  agent, variables, _ = _agent()
  variables = variables.with_hyperparams({'num_envs': jnp.float32(8)})
  # Half of the environments are environment 0, and half are the last one.
  index = np.repeat([0, 7], 2000)
  carry = agent.initial_carry(index)
  steps = TimeStep(
    np.ones((4000, 5), np.float32),
    np.zeros(4000, np.float32),
    np.ones(4000, np.float32),
    np.zeros(4000, bool),
  )
  keys = jax.random.split(jax.random.key(0), 4000)
  act = jax.jit(agent.act, static_argnames='greedy')
  first, extras, after = act(variables, keys, steps, carry)
  chex.assert_trees_all_equal(extras.carry, carry.network)
  np.testing.assert_array_equal(after.env_index, index)
  _, extras, later = act(variables, keys, steps, after)
  chex.assert_trees_all_equal(extras.carry, after.network)
  assert np.all(later.network[0] != after.network[0])
  greedy, *_ = act(variables, keys, steps, carry, greedy=True)
  assert len(np.unique(greedy)) == 1
  # Of 4 actions, a random one is another than the best in 3 of 4 cases.
  shares = np.mean((first != greedy).reshape(2, -1), axis=1)
  np.testing.assert_allclose(shares, [0.75 * 0.4, 0.75 * 0.4**8], atol=0.03)
