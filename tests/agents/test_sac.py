"""Tests SAC's targets and its three losses against formulas, and its spaces."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.agents import sac
from podrl.types import (
  Box,
  Discrete,
  EnvSpec,
  Masked,
  MultiDiscrete,
  Sample,
  TimeStep,
  Trajectory,
)

_OBS = jax.ShapeDtypeStruct((3,), jnp.float32)
_SPACES = {
  'box': Box((2,), np.float32([-2, 0]), np.float32([2, 10])),
  'discrete': Discrete(4),
}
_GAMMA, _TARGET_ENTROPY = 0.9, -0.4
_B = 6


def _make(action, **fields):
  spec = EnvSpec(_OBS, False, action, 1, 0)
  return helpers.make_agent('sac', spec, reward_clip=0.5, **fields)


@functools.cache
def _agent(space):
  """Makes an agent, its variables and target parameters, all of them random."""
  agent = _make(_SPACES[space], target_entropy=_TARGET_ENTROPY)
  variables = jax.jit(agent.init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  # Under vmap, JAX's custom derivatives do not accept constants of NumPy.
  params, target = (
    jax.tree.map(
      lambda x: jnp.float32(rng.normal(size=x.shape, scale=0.5)),
      variables.params,
    )
    for _ in range(2)
  )
  return agent, variables._replace(params=params), target


def _sample(space):
  """Makes transitions: 0 terminates, 1 is truncated, 2 is a reset step."""
  rng = np.random.default_rng(0)
  obs = rng.normal(size=(2, _B, 3)).astype(np.float32)
  is_first = np.zeros((2, _B), bool)
  is_first[1, 2] = True
  discount = np.ones((2, _B), np.float32)
  discount[1, 0] = 0.0
  reward = np.where(is_first, 0, rng.normal(size=is_first.shape))
  timestep = TimeStep(obs, reward.astype(np.float32), discount, is_first)
  stored = rng.integers(0, 4, (1, _B)).astype(np.int32)
  if space == 'box':
    stored = rng.normal(size=(1, _B, 2)).astype(np.float32)
  extras = sac.Extras(stored)
  # The action of the environment is not used; the stored sample is.
  trajectory = Trajectory(timestep, np.full((1, _B), -1), extras, (), (), ())
  weight = rng.uniform(0.5, 1, _B).astype(np.float32)
  return Sample(trajectory, np.arange(_B), weight)


def _keys(seed):
  return jax.random.split(jax.random.key(seed), _B)


def _mlp(params, x):
  hidden, last = (params['params'][k] for k in ('MLP_0', 'Dense_0'))
  hidden = hidden['Dense_0']
  x = jax.nn.relu(x @ hidden['kernel'] + hidden['bias'][None])
  return x @ last['kernel'] + last['bias'][None]


def _values(params, obs, action=None):
  """Computes the values of both critics, `[2, N, ...]`."""
  inputs = obs if action is None else jnp.concatenate([obs, action], axis=1)
  return jax.vmap(_mlp, (0, None))(params, inputs)


@functools.partial(jax.jit, static_argnums=0)
def _soft_value(space, policy, critic, temperature, obs, keys):
  """Computes the policy's soft value, and the entropy or its estimate."""
  head = _mlp(policy, obs)
  if space == 'discrete':
    probabilities = jnp.exp(head) / jnp.sum(jnp.exp(head), 1, keepdims=True)
    entropy = -jnp.sum(probabilities * jnp.log(probabilities), axis=1)
    values = jnp.min(_values(critic, obs), axis=0)
    return jnp.sum(probabilities * values, 1) + temperature * entropy, entropy
  # The scale of the Gaussian is 1 if the head's number is 0.
  offset = np.log(np.exp(1 - 1e-3) - 1)
  mean, scale = head[:, :2], jnp.log1p(jnp.exp(head[:, 2:] + offset)) + 1e-3
  noise = jnp.stack([jax.random.normal(key, (2,)) for key in keys])
  action = jnp.tanh(mean + scale * noise)
  log_prob = -0.5 * noise**2 - jnp.log(scale) - 0.5 * np.log(2 * np.pi)
  log_prob = jnp.sum(log_prob - jnp.log(1 - action**2), axis=1)
  value = jnp.min(_values(critic, obs, action)[..., 0], axis=0)
  return value - temperature * log_prob, -log_prob


def _prepare(agent, variables, target, sample):
  return jax.jit(
    lambda v, t: agent.prepare(v, t, sample, _keys(1), lambda x: x)
  )(variables, target)


@pytest.mark.parametrize('space', _SPACES)
def test_targets_by_hand(space):
  agent, variables, target = _agent(space)
  sample = _sample(space)
  timestep = sample.trajectory.timestep
  batch = _prepare(agent, variables, target, sample)
  policy, _, log_temperature = variables.params
  temperature, obs = np.exp(log_temperature), timestep.obs[1]
  value, _ = _soft_value(
    space, policy, target.critic, temperature, obs, _keys(1)
  )
  bootstrap = _GAMMA * np.asarray(value)
  assert np.all(abs(bootstrap[:2]) > 0.1)
  bootstrap[0] = 0.0  # A termination; the truncation of 1 bootstraps.
  expected = np.clip(timestep.reward[1], -0.5, 0.5) + bootstrap
  np.testing.assert_allclose(batch.target, expected, rtol=1e-4, atol=1e-4)
  weight = sample.weight * (np.arange(_B) != 2)  # Row 2 is a reset step.
  np.testing.assert_array_equal(batch.weight, weight)


@pytest.mark.parametrize('space', _SPACES)
def test_each_loss_changes_only_its_own_parameters(space):
  agent, variables, target = _agent(space)
  sample = _sample(space)
  batch = _prepare(agent, variables, target, sample)
  obs, weight = sample.trajectory.timestep.obs[0], batch.weight
  stored = sample.trajectory.extras.sample[0]
  policy, critic, log_temperature = variables.params
  temperature = np.exp(log_temperature)

  def critic_loss(critic):
    if space == 'discrete':
      values = _values(critic, obs)[:, np.arange(_B), stored]
    else:
      values = _values(critic, obs, np.tanh(stored))[..., 0]
    first, second = (0.5 * weight * (x - batch.target) ** 2 for x in values)
    return jnp.mean(first + second)

  def policy_loss(policy):
    value, entropy = _soft_value(
      space, policy, critic, temperature, obs, _keys(2)
    )
    num_components = 2 if space == 'box' else 1
    excess = weight * (entropy - num_components * _TARGET_ENTROPY)
    return -jnp.mean(weight * value), jnp.mean(excess)

  @jax.jit
  def by_hand(policy, critic):
    of_policy, excess = jax.grad(policy_loss, has_aux=True)(policy)
    return sac.Params(of_policy, jax.grad(critic_loss)(critic), excess)

  def loss(params):
    changed = variables._replace(params=params)
    return agent.loss(changed, (), batch, _keys(2))[0]

  found = jax.jit(jax.grad(loss))(variables.params)
  chex.assert_trees_all_close(
    found, by_hand(policy, critic), rtol=1e-3, atol=1e-5
  )
  for part in found:
    assert max(np.abs(x).max() for x in jax.tree.leaves(part)) > 0.01


@pytest.mark.parametrize('space', _SPACES)
def test_nothing_is_learned_from_a_reset_step_and_targets_are_constants(space):
  agent, variables, target = _agent(space)
  sample = _sample(space)
  batch = _prepare(agent, variables, target, sample)

  @jax.jit
  @jax.grad
  def gradient(obs):
    changed = batch._replace(obs=obs)
    return agent.loss(variables, (), changed, _keys(2))[0]

  changes = np.any(gradient(batch.obs), axis=1)
  np.testing.assert_array_equal(changes, np.arange(_B) != 2)
  grads = jax.grad(
    lambda v: jnp.sum(_prepare(agent, v, target, sample).target)
  )(variables)
  assert not any(np.any(x) for x in jax.tree.leaves(grads.params))
  assert abs(grads.hyperparams['gamma']) > 0.1


def test_the_temperature_rises_if_the_entropy_is_below_its_target():
  agent, variables, target = _agent('box')
  batch = _prepare(agent, variables, target, _sample('box'))

  @jax.jit
  @jax.grad
  def gradient(log_temperature, target_entropy):
    params = variables.params._replace(log_temperature=log_temperature)
    changed = variables._replace(params=params)
    changed = changed.with_hyperparams({'target_entropy': target_entropy})
    return agent.loss(changed, (), batch, _keys(2))[0]

  before = variables.params.log_temperature
  for target_entropy in (-9.0, 9.0):
    after = before - 0.1 * gradient(before, target_entropy)
    assert after > before if target_entropy > 0 else after < before


def test_only_the_critics_see_what_the_policy_must_do_without():
  spec = EnvSpec({'state': _OBS, 'other': _OBS}, False, _SPACES['box'], 1, 0)
  agent = helpers.make_agent('sac', spec, {'policy_inputs': 'state'})
  variables = jax.jit(agent.init)(jax.random.key(0))
  sample = _sample('box')
  obs = jnp.asarray(sample.trajectory.timestep.obs)

  @jax.jit
  @jax.jacrev
  def derivatives(obs):
    timestep = sample.trajectory.timestep._replace(obs=obs)
    trajectory = sample.trajectory._replace(timestep=timestep)
    batch = agent.prepare(
      variables,
      variables.params,
      sample._replace(trajectory=trajectory),
      _keys(1),
      lambda x: x,
    )
    first = jax.tree.map(lambda x: x[0], timestep)
    carry = agent.initial_carry(np.arange(_B))
    action, *_ = agent.act(variables, _keys(1), first, carry, greedy=True)
    return action, batch.target

  of_action, of_target = derivatives({'state': obs, 'other': -obs})
  assert np.any(of_action['state']) and not np.any(of_action['other'])
  assert np.any(of_target['state']) and np.any(of_target['other'])


def test_the_two_critics_begin_differently():
  params = jax.jit(_make(Discrete(4)).init)(jax.random.key(0)).params
  first, second = _values(params.critic, np.ones((1, 3), np.float32))
  assert np.all(first != second)


@pytest.mark.parametrize('space', _SPACES)
def test_actions_have_bounds_and_the_greedy_action_is_the_mode(space):
  agent, variables, _ = _agent(space)
  obs = np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
  steps = TimeStep(obs, *(np.zeros(200, np.float32),) * 2, np.zeros(200, bool))
  keys = jax.random.split(jax.random.key(0), 200)
  act = jax.jit(agent.act, static_argnames='greedy')
  carry = agent.initial_carry(np.arange(200))
  action, extras, _ = act(variables, keys, steps, carry)
  greedy, *_ = act(variables, keys, steps, carry, greedy=True)
  assert np.any(action != greedy)
  head = _mlp(variables.params.policy, obs)
  if space == 'discrete':
    np.testing.assert_array_equal(np.unique(action), np.arange(4))
    np.testing.assert_array_equal(action, extras.sample)
    np.testing.assert_array_equal(greedy, np.argmax(head, axis=1))
  else:
    low, high = _SPACES['box'][1:]
    assert np.all(action >= low[None]) and np.all(action <= high[None])
    # The interval from -1 to 1 becomes the intervals of the box.
    middle, half = np.float32([[0, 5]]), np.float32([[2, 5]])
    expected = middle + half * np.tanh(extras.sample)
    np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-5)
    expected = middle + half * np.tanh(head[:, :2])
    np.testing.assert_allclose(greedy, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('space', _SPACES)
def test_the_noise_stays_for_its_number_of_steps(space):
  agent, variables, _ = _agent(space)
  slow = _make(_SPACES[space], noise_steps=3)
  obs = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
  steps = TimeStep(obs, *(np.zeros(50, np.float32),) * 2, np.zeros(50, bool))

  def actions_of(agent):
    act, actions = jax.jit(agent.act), []
    carry = agent.initial_carry(np.arange(50))
    for step in range(7):
      keys = jax.random.split(jax.random.key(step), 50)
      action, _, carry = act(variables, keys, steps, carry)
      actions.append(np.asarray(action))
    return actions

  expected, found = actions_of(agent), actions_of(slow)
  assert np.any(expected[0] != expected[1])
  np.testing.assert_array_equal(found, [expected[x // 3 * 3] for x in range(7)])


@pytest.mark.parametrize('space', _SPACES)
def test_caution_moves_targets_from_the_mean_to_the_smaller_value(space):
  _, variables, target = _agent(space)
  sample = _sample(space)

  def targets(caution):
    agent = _make(_SPACES[space], caution=caution)
    return _prepare(agent, variables, target, sample).target

  mean, middle, smaller = map(targets, (0.0, 0.5, 1.0))
  assert np.all(smaller <= mean) and np.any(smaller < mean - 0.01)
  np.testing.assert_allclose(middle, (mean + smaller) / 2, rtol=1e-5)
  # With two equal critics, there is no smaller value.
  policy, _, log_temperature = variables.params
  obs, keys = sample.trajectory.timestep.obs[1], _keys(1)
  temperature = np.exp(log_temperature)
  alone = []
  for i in range(2):
    critic = jax.tree.map(lambda x: jnp.stack([x[i]] * 2), target.critic)
    value, _ = _soft_value(space, policy, critic, temperature, obs, keys)
    alone.append(np.asarray(value))
  timestep = sample.trajectory.timestep
  expected = np.clip(timestep.reward[1], -0.5, 0.5)
  expected += _GAMMA * np.mean(alone, 0) * timestep.discount[1]
  np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-4)


def test_a_part_of_the_actions_is_random():
  _, variables, _ = _agent('discrete')
  number, fraction = 20_000, 0.3
  obs = np.tile(np.float32([1.0, -2.0, 0.5]), (number, 1))
  zeros = np.zeros(number, np.float32)
  obs = Masked(obs, np.tile([True, True, False, True], (number, 1)))
  steps = TimeStep(obs, zeros, zeros, zeros > 0)
  keys = jax.random.split(jax.random.key(1), number)

  def actions_of(fraction, **options):
    spec = EnvSpec(
      Masked(_OBS, jax.ShapeDtypeStruct((4,), bool)), False, Discrete(4), 1, 0
    )
    agent = helpers.make_agent('sac', spec, random_fraction=fraction)
    carry = agent.initial_carry(np.arange(number))
    actions, _, _ = agent.act(variables, keys, steps, carry, **options)
    return np.bincount(actions, minlength=4) / number

  own, mixed = actions_of(0.0), actions_of(fraction)
  expected = (1 - fraction) * own + fraction / 3 * np.array([1, 1, 0, 1])
  # Each of the two frequencies has a standard error of at most 0.0036.
  np.testing.assert_allclose(mixed, expected, atol=0.02)
  assert np.abs(mixed - own).max() > 0.05 and mixed[2] == 0
  np.testing.assert_array_equal(
    actions_of(fraction, greedy=True), actions_of(0.0, greedy=True)
  )
  with pytest.raises(ValueError, match='needs discrete actions'):
    _make(_SPACES['box'], random_fraction=fraction)


@pytest.mark.parametrize(
  'space,message',
  [
    (
      MultiDiscrete((3, 2)),
      'one discrete action or a box, not a MultiDiscrete; --agent=ppo accepts',
    ),
    (
      Box((1,), np.float32([0]), np.float32([np.inf])),
      'from 0.0 to inf.*use --agent=ppo',
    ),
  ],
)
def test_actions_that_do_not_fit_are_refused(space, message):
  with pytest.raises(ValueError, match=message):
    _make(space)
