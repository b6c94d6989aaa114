"""Tests DQN's targets and losses against plain Python, and its learning."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.agents import AGENTS, dqn, exploring
from podrl.types import Discrete, EnvSpec, Sample, TimeStep, Trajectory

_OBS = jax.ShapeDtypeStruct((3,), jnp.float32)
_SPEC = EnvSpec(_OBS, False, Discrete(4), 1, 0)
_GAMMA = 0.9


def _sample(num_steps, batch=6, seed=0):
  """Makes sequences: 0, 1 end inside, 2 begins with a reset step, 3 ends."""
  rng = np.random.default_rng(seed)
  is_first = np.zeros((num_steps + 1, batch), bool)
  discount = np.ones((num_steps + 1, batch), np.float32)
  if num_steps > 1:
    is_first[2, :2] = True
    discount[1, 0] = 0.0  # 0 terminates, 1 is truncated.
  is_first[1, 2] = True
  discount[-1, 3] = 0.0
  obs = rng.normal(size=(num_steps + 1, batch, 3)).astype(np.float32)
  reward = rng.normal(size=is_first.shape).astype(np.float32)
  reward = np.where(is_first, 0, reward).astype(np.float32)
  timestep = TimeStep(obs, reward, discount, is_first)
  action = rng.integers(0, 4, (num_steps, batch)).astype(np.int32)
  trajectory = Trajectory(timestep, action, (), (), (), ())
  weight = rng.uniform(0.5, 1, batch).astype(np.float32)
  return Sample(trajectory, np.arange(batch), weight)


def _by_hand(sample, num_steps):
  """Returns the reward, the discount and the step of each target's value."""
  timestep, found = sample.trajectory.timestep, []
  for b in range(timestep.reward.shape[1]):
    reward, discount, t = 0.0, 1.0, 0
    while t < num_steps and not timestep.is_first[t + 1, b]:
      reward += discount * timestep.reward[t + 1, b]
      discount *= _GAMMA * timestep.discount[t + 1, b]
      t += 1
    found.append((reward, discount, t))
  return found


def test_first_values_of_bytes_are_those_of_numbers_up_to_1():
  raw = np.random.default_rng(0).integers(0, 256, (64, 128))

  def first_values(dtype, scale):
    obs = jax.ShapeDtypeStruct((128,), dtype)
    agent = helpers.make_agent('dqn', _SPEC._replace(obs=obs), n_steps=1)
    variables = jax.jit(agent.init)(jax.random.key(0))
    timestep = TimeStep(
      np.stack([raw / scale] * 2).astype(dtype),
      *np.ones((2, 2, 64), np.float32),
      np.zeros((2, 64), bool),
    )
    trajectory = Trajectory(
      timestep, np.zeros((1, 64), np.int32), (), (), (), ()
    )
    sample = Sample(trajectory, (), np.ones(64, np.float32))
    batch = agent.prepare(variables, variables.params, sample, None, None)
    _, output = agent.loss(variables, variables.params, batch, None)
    return output.metrics['value']

  values = first_values(np.uint8, 1)
  assert abs(values) < 3
  np.testing.assert_allclose(values, first_values(np.float32, 255), rtol=1e-4)


@pytest.mark.parametrize('is_double', [True, False])
@pytest.mark.parametrize('num_steps', [1, 3])
def test_targets_and_loss_by_hand(num_steps, is_double):
  clip = 0.5 if is_double else 0.0
  agent = helpers.make_agent(
    'dqn', _SPEC, n_steps=num_steps, double=is_double, reward_clip=clip
  )
  variables = agent.init(jax.random.key(0))
  target = agent.init(jax.random.key(1)).params
  sample = clipped = _sample(num_steps)
  if clip:
    timestep = sample.trajectory.timestep
    assert np.abs(timestep.reward).max() > clip
    timestep = timestep._replace(reward=np.clip(timestep.reward, -clip, clip))
    trajectory = sample.trajectory._replace(timestep=timestep)
    clipped = sample._replace(trajectory=trajectory)
  obs = sample.trajectory.timestep.obs
  batch = jax.jit(lambda v, t, s: agent.prepare(v, t, s, None, lambda x: x))(
    variables, target, sample
  )

  def q(params, x):
    tree = jax.device_get(params['params'])
    layer = tree['MLP_0']['Dense_0']
    hidden = np.maximum(x @ layer['kernel'] + layer['bias'], 0)
    head = tree['DenseGeneral_0']
    return hidden @ head['kernel'][:, :, 0] + head['bias'][:, 0]

  expected = []
  for b, (reward, discount, t) in enumerate(_by_hand(clipped, num_steps)):
    chooser = variables.params if is_double else target
    best = np.argmax(q(chooser, obs[t, b]))
    expected.append(reward + discount * q(target, obs[t, b])[best])
  np.testing.assert_allclose(batch.target, expected, rtol=1e-5)
  # A sequence that begins with a reset step is not learned from.
  weight = sample.weight * (np.arange(6) != 2)
  np.testing.assert_allclose(batch.weight, weight)
  loss, output = agent.loss(variables, target, batch, None)
  action = sample.trajectory.action[0]
  error = q(variables.params, obs[0])[np.arange(6), action] - expected
  huber = np.where(abs(error) < 1, error**2 / 2, abs(error) - 0.5)
  np.testing.assert_allclose(loss, np.mean(weight * huber), rtol=1e-5)
  # The error of a reset step would never fall, and a memory would draw it
  # forever.
  priority = abs(error) * (weight > 0)
  # Differences of numbers of about 1 have a rounding error of 1e-7.
  np.testing.assert_allclose(output.priority, priority, rtol=1e-4, atol=2e-7)


def test_target_params_move_by_the_rate_once_in_a_period():
  update = dqn.target_update(
    {'agent.target_rate': 0.25, 'agent.target_period': 2}
  )
  found = [update(np.float32(8), np.float32(0), n) for n in (1, 2, 3)]
  np.testing.assert_array_equal(found, [0.0, 2.0, 0.0])


@pytest.mark.parametrize('name', ['dqn', 'pqn'])
def test_an_agent_explores_with_its_probability(name):
  agent = helpers.make_agent(
    name, _SPEC, initial_epsilon=0.4, final_epsilon=0.4
  )
  number, num_actions = 4000, _SPEC.action.num_actions
  obs = jnp.ones((number, *_SPEC.obs.shape))
  timestep = TimeStep(
    obs, jnp.zeros(number), jnp.ones(number), jnp.zeros(number, bool)
  )
  keys = jax.random.split(jax.random.key(1), number)
  carry = agent.initial_carry(jnp.arange(number))
  act = jax.jit(agent.act, static_argnames='greedy')
  variables = agent.init(jax.random.key(0))
  best, *_ = act(variables, keys, timestep, carry, greedy=True)
  action, *_ = act(variables, keys, timestep, carry)
  assert len(np.unique(best)) == 1
  # A random action is the best one with the probability 1 / num_actions.
  expected = 0.4 * (1 - 1 / num_actions)
  # 0.03 is 4 sigma.
  np.testing.assert_allclose(np.mean(action != best), expected, atol=0.03)


def _distributions(params, x, num_atoms):
  """Computes the distributions of all actions in numpy, `[A, num_atoms]`."""
  tree = jax.device_get(params['params'])
  layer = tree['MLP_0']['Dense_0']
  hidden = np.maximum(x @ layer['kernel'] + layer['bias'], 0)
  action, state = tree['DenseGeneral_0'], tree['DenseGeneral_1']
  outputs = np.tensordot(hidden, action['kernel'], 1) + action['bias']
  outputs -= outputs.mean(axis=0)
  outputs += np.tensordot(hidden, state['kernel'], 1) + state['bias']
  assert outputs.shape == (4, num_atoms)
  powers = np.exp(outputs)
  return powers / powers.sum(axis=-1, keepdims=True)


def test_atoms_and_the_duelling_head_by_hand():
  agent = helpers.make_agent(
    'dqn',
    _SPEC,
    n_steps=3,
    num_atoms=5,
    min_value=-2.0,
    max_value=2.0,
    duelling=True,
  )
  variables = agent.init(jax.random.key(0))
  target = agent.init(jax.random.key(1)).params
  # The untrained values are near 0, so make them larger.
  variables, target = jax.tree.map(lambda x: 3 * x, (variables, target))
  variables = variables.with_hyperparams({'gamma': jnp.float32(_GAMMA)})
  sample, support = _sample(3), np.linspace(-2, 2, 5)
  obs = sample.trajectory.timestep.obs
  batch = agent.prepare(variables, target, sample, None, lambda x: x)
  loss, output = agent.loss(variables, target, batch, None)
  losses, divergences, at_ends = [], [], []
  for b, (reward, discount, t) in enumerate(_by_hand(sample, 3)):
    values = _distributions(variables.params, obs[t, b], 5) @ support
    found = _distributions(target, obs[t, b], 5)[np.argmax(values)]
    expected = np.zeros(5)
    for atom, probability in zip(support, found):
      place = np.clip(reward + discount * atom, -2, 2) + 2  # The spacing is 1.
      low = int(np.floor(place))
      expected[low] += (low + 1 - place) * probability
      expected[min(low + 1, 4)] += (place - low) * probability
    np.testing.assert_allclose(batch.target[b], expected, atol=1e-5)
    at_ends.append(expected[0] + expected[4])
    action = sample.trajectory.action[0, b]
    predicted = _distributions(variables.params, obs[0, b], 5)[action]
    losses.append(-np.sum(expected * np.log(predicted)))
    positive = expected > 0
    ratio = expected[positive] / predicted[positive]
    divergences.append(np.sum(expected[positive] * np.log(ratio)))
  priority = divergences * (
    np.arange(6) != 2
  )  # Row 2 begins with a reset step.
  np.testing.assert_allclose(output.priority, priority, rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(loss, np.mean(batch.weight * losses), rtol=1e-4)
  np.testing.assert_allclose(
    output.metrics['targets_at_ends'],
    np.mean(at_ends * (np.arange(6) != 2)),
    rtol=1e-4,
  )


def test_a_narrow_support_is_reported_once(tmp_path, capfd):
  narrow = ['--config.agent.min_value=-0.01', '--config.agent.max_value=0.01']
  narrow += ['--config.replay.min_steps=64', '--config.log.every_updates=1']
  narrow += ['--config.replay.batch_size=8']
  assert helpers.run(tmp_path, '--agent=rainbow', *narrow) == 0
  assert helpers.read_records(tmp_path)[-1]['targets_at_ends'] > 0.5
  assert capfd.readouterr().err.count('at the ends of the support') == 1


def test_rainbow_normalises_rewards_of_any_kind_of_task():
  assert AGENTS['rainbow'].fields['agent.normalize_reward'].default
  assert not dqn.warn_of_ends({'targets_at_ends': 0.1})
  assert dqn.warn_of_ends({'targets_at_ends': 0.164}).startswith('16% of')


def test_actions_are_random_as_often_as_epsilon_says():
  values = jnp.tile(jnp.array([0.0, 1.0, 0.0, 0.0]), (40_000, 1))
  keys = jax.random.split(jax.random.key(0), 40_000)
  actions = np.asarray(exploring.explore(keys, values, jnp.float32(0.4)))
  shares = np.bincount(actions, minlength=4) / 40_000
  np.testing.assert_allclose(shares, [0.1, 0.7, 0.1, 0.1], atol=0.01)


def test_epsilon_falls_in_a_part_of_the_updates():
  agent = helpers.make_agent(
    'dqn',
    _SPEC,
    initial_epsilon=0.9,
    final_epsilon=0.1,
    exploration_fraction=0.5,
  )
  variables = agent.init(jax.random.key(0))
  variables = variables.with_hyperparams({'num_updates': jnp.float32(16)})
  seen = []
  for _ in range(17):
    seen.append(float(exploring.epsilon(variables)))
    variables = agent.absorb(variables, ())
  np.testing.assert_allclose(seen[:9], np.linspace(0.9, 0.1, 9), rtol=1e-5)
  np.testing.assert_allclose(seen[9:], 0.1, rtol=1e-5)


@pytest.mark.parametrize('agent_name', ['dqn', 'pqn'])
def test_the_counter_of_updates_has_no_limit_of_float32(agent_name):
  agent = helpers.make_agent(agent_name, _SPEC)
  hyperparams = {
    'initial_epsilon': jnp.float32(1.0),
    'final_epsilon': jnp.float32(0.05),
    'exploration_fraction': jnp.float32(0.25),
    'num_updates': jnp.float32(100e6),
  }
  variables = agent.init(jax.random.key(0)).with_hyperparams(hyperparams)
  absorb = jax.jit(lambda x: exploring.absorb(x, ()))
  for start in (0, 2**24 - 2, 2**24 + 5, 25_000_000, 2**31 - 8):
    count = jnp.asarray(start, variables.statistics.num_updates.dtype)
    variables = variables._replace(statistics=exploring.Statistics(count))
    for _ in range(7):
      variables = absorb(variables)
    number = start + 7
    assert int(variables.statistics.num_updates) == number
    # The probability falls from 1 to 0.05 in 25 M updates.
    expected = max(0.05, 1 - 0.95 * number / 25e6)
    assert float(exploring.epsilon(variables)) == pytest.approx(expected, 1e-6)


def test_continuous_actions_are_refused():
  spec = _SPEC._replace(action=None)
  with pytest.raises(ValueError, match='one discrete action'):
    exploring.build_network(spec, {})
