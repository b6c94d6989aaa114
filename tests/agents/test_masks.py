"""Tests that agents obey masks of legal actions, and that networks see none."""

import chex
import gymnasium
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from podrl.agents import AGENTS
from podrl.tools import train
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

_A, _B = 5, 64
_SLOW = pytest.mark.slow


def _spec(action=Discrete(_A), size=_A):
  obs = jax.ShapeDtypeStruct((3,), jnp.float32)
  mask = jax.ShapeDtypeStruct((size,), bool)
  return EnvSpec(Masked(obs, mask), False, action, 1, 0)


def _obs(seed=0):
  """Makes masks with 1 to `_A` legal actions, and four without any."""
  rng = np.random.default_rng(seed)
  mask = rng.uniform(size=(_B, _A)) < 0.3
  mask[:, 0] |= ~mask.any(axis=1)
  mask[:4] = False
  return Masked(rng.normal(size=(_B, 3)).astype(np.float32), mask)


def _legal(mask):
  return mask | ~mask.any(axis=1, keepdims=True)


def _timestep(obs):
  ones = np.ones(_B, np.float32)
  return TimeStep(obs, 0 * ones, ones, np.zeros(_B, bool))


def _network_values(params, x):
  """Computes the outputs of a small network with one hidden layer."""
  hidden = params['MLP_0']['Dense_0']
  x = np.maximum(x @ hidden['kernel'] + hidden['bias'], 0)
  if 'Dense_0' in params:
    return x @ params['Dense_0']['kernel'] + params['Dense_0']['bias']
  heads = [
    x @ params[k]['kernel'][..., 0] + params[k]['bias'][:, 0]
    for k in ('DenseGeneral_0', 'DenseGeneral_1')
    if k in params
  ]
  if len(heads) == 1:
    return heads[0]
  return heads[0] - heads[0].mean(axis=1, keepdims=True) + heads[1]


def _make(name, network=(), **fields):
  """Makes an agent and its variables, with random parameters."""
  agent = helpers.make_agent(name, _spec(), network, **fields)
  variables = jax.jit(agent.init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), variables.params
  )
  return agent, variables._replace(params=params)


def _act(agent, variables, obs, greedy):
  carry = agent.initial_carry(np.arange(_B, dtype=np.int32))
  keys = jax.random.split(jax.random.key(0), _B)
  act = jax.jit(agent.act, static_argnames='greedy')
  timestep = _timestep(obs)
  return act(variables, keys, timestep, carry, greedy=greedy)[:2]


@pytest.mark.parametrize(
  'name,network,fields',
  [
    *((name, {}, {}) for name in AGENTS),
    ('impala', {'recurrent': 'lstm'}, {}),
    ('ppo', {}, {'normalize_observation': True}),
    ('muzero', {}, {'kind': 'muzero'}),
  ],
)
def test_actions_are_legal(name, network, fields):
  agent, variables = _make(name, network, **fields)
  obs = _obs()
  for greedy in (False, True):
    action, extras = _act(agent, variables, obs, greedy)
    chosen = np.asarray(action)
    mask = obs.action_mask
    assert _legal(mask)[np.arange(_B), chosen].all()
    # Where no action is legal, every action is.
    empty = obs._replace(action_mask=np.zeros_like(mask))
    full = obs._replace(action_mask=np.ones_like(mask))
    chex.assert_trees_all_equal(
      _act(agent, variables, empty, greedy),
      _act(agent, variables, full, greedy),
    )
    assert len(set(chosen.tolist())) == _A


@pytest.mark.parametrize(
  'name', [helpers.slow(x) if x == 'muzero' else x for x in AGENTS]
)
def test_networks_and_normalisation_never_see_a_mask(name):
  fields = {'normalize_observation': True}
  agent, variables = _make(name, **fields)
  plain = _spec()._replace(obs=_spec().obs.obs)
  other = helpers.make_agent(name, plain, **fields)
  expected = jax.jit(other.init)(jax.random.key(0))
  chex.assert_trees_all_equal_shapes(variables, expected)

  # Without the mask, an agent acts as if all actions were legal.
  obs = _obs()._replace(action_mask=np.ones((_B, _A), bool))
  chex.assert_trees_all_close(
    _act(agent, variables, obs, True),
    _act(other, variables, obs.obs, True),
    rtol=1e-5,
  )


def _sample(agent, variables):
  """Makes transitions between states with masks; no episode ends."""
  both = [_obs(seed) for seed in range(2)]
  timesteps = [_timestep(obs) for obs in both]
  timestep = jax.tree.map(lambda *x: np.stack(x), *timesteps)
  carry = agent.initial_carry(np.arange(_B, dtype=np.int32))
  keys = jax.random.split(jax.random.key(0), _B)
  action, extras, _ = jax.jit(agent.act)(variables, keys, timesteps[0], carry)
  action, extras, carry = jax.tree.map(
    lambda x: x[None], (action, extras, carry)
  )
  trajectory = Trajectory(timestep, action, extras, carry, (), ())
  return Sample(trajectory, np.arange(_B), np.ones(_B, np.float32))


@pytest.mark.parametrize(
  'name,fields',
  [
    ('dqn', {'double': False, 'n_steps': 1}),
    ('dqn', {'double': True, 'n_steps': 1}),
    ('pqn', {}),
    ('sac', {}),
  ],
)
def test_targets_use_only_legal_actions(name, fields):
  agent, variables = _make(name, **fields)
  sample = _sample(agent, variables)
  keys = jax.random.split(jax.random.key(1), _B)
  batch = jax.jit(agent.prepare, static_argnums=4)(
    variables, variables.params, sample, keys, lambda x: x
  )
  obs, mask = jax.tree.map(lambda x: x[1], sample.trajectory.timestep.obs)
  legal = _legal(mask)

  tree = variables.params
  if name == 'sac':
    policy, critic = tree.policy['params'], tree.critic['params']
    logits = _network_values(policy, obs)
    odds = np.where(legal, np.exp(logits), 0)
    policy = odds / odds.sum(axis=1, keepdims=True)
    halves = [jax.tree.map(lambda x, i=i: x[i], critic) for i in range(2)]
    twins = [_network_values(half, obs) for half in halves]
    entropy = -scipy.special.xlogy(policy, policy).sum(axis=1)
    value = (policy * np.min(twins, axis=0)).sum(axis=1)
    value += np.exp(tree.log_temperature) * entropy
  else:
    values = _network_values(tree['params'], obs)
    value = np.where(legal, values, -np.inf).max(axis=1)
    assert (value < values.max(axis=1)).any()
  expected = 0.9 * value
  np.testing.assert_allclose(
    np.ravel(batch.target), expected, rtol=1e-5, atol=1e-5
  )


def test_the_losses_of_r2d2_use_only_legal_actions():
  agent, variables = _make(
    'r2d2', {'recurrent': 'none'}, n_steps=1, burn_in=0, rescale_values=False
  )
  sample = _sample(agent, variables)
  keys = jax.random.split(jax.random.key(1), _B)
  batch = agent.prepare(variables, variables.params, sample, keys, None)
  _, output = jax.jit(agent.loss)(variables, (), batch, None)
  before, after = (
    _network_values(variables.params['params'], x)
    for x in sample.trajectory.timestep.obs.obs
  )
  legal = _legal(sample.trajectory.timestep.obs.action_mask[1])
  target = 0.9 * np.where(legal, after, -np.inf).max(axis=1)
  chosen = before[np.arange(_B), sample.trajectory.action[0]]
  np.testing.assert_allclose(output.priority, abs(chosen - target), rtol=1e-4)


def test_each_component_of_an_action_obeys_its_part_of_the_mask():
  spec = _spec(MultiDiscrete((2, 3)))
  agent = helpers.make_agent('ppo', spec)
  variables = jax.jit(agent.init)(jax.random.key(0))
  mask = np.zeros((_B, _A), bool)
  mask[:, [1, 2, 4]] = True
  for greedy in (False, True):
    action, _ = _act(
      agent, variables, _obs()._replace(action_mask=mask), greedy
    )
    assert set(map(tuple, np.asarray(action))) <= {(1, 0), (1, 2)}


@pytest.mark.parametrize(
  'spec,message',
  [
    (_spec(size=4), r'must be bool \(5,\), not bool \(4,\)'),
    (_spec(Box((1,), np.float32([-1]), np.float32([1]))), 'cannot have a mask'),
  ],
)
def test_a_mask_that_does_not_fit_is_refused(spec, message):
  with pytest.raises(ValueError, match=message):
    helpers.make_agent('ppo', spec)


def test_the_entropy_that_sac_aims_at_is_possible():
  """Where one action is legal, no temperature can raise the entropy."""
  agent, variables = _make('sac')
  sample = _sample(agent, variables)
  obs = sample.trajectory.timestep.obs
  forced = np.zeros_like(obs.action_mask)
  forced[..., 2] = True
  timestep = sample.trajectory.timestep._replace(
    obs=obs._replace(action_mask=forced)
  )
  trajectory = sample.trajectory._replace(timestep=timestep)
  sample = sample._replace(trajectory=trajectory)
  keys = jax.random.split(jax.random.key(1), _B)
  batch = agent.prepare(variables, variables.params, sample, keys, None)

  def loss(params):
    return agent.loss(variables._replace(params=params), (), batch, keys)[0]

  grad = jax.jit(jax.grad(loss))(variables.params)
  np.testing.assert_allclose(grad.log_temperature, 0.0, atol=1e-6)


class Tempting(gymnasium.Env):
  """Three of five actions are illegal; they pay best, but raise an error."""

  observation_space = gymnasium.spaces.Dict(
    observation=gymnasium.spaces.Box(-1, 1, (3,)),
    action_mask=gymnasium.spaces.MultiBinary(_A),
  )
  action_space = gymnasium.spaces.Discrete(_A)

  def _look(self):
    self.mask = np.zeros(_A, np.int8)
    self.mask[self.np_random.permutation(_A)[:2]] = 1
    observation = self.np_random.uniform(-1, 1, 3).astype(np.float32)
    return {'observation': observation, 'action_mask': self.mask}

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.t = 0
    return self._look(), {}

  def step(self, action):
    if not self.mask[action]:
      raise AssertionError(f'{action} is illegal: {self.mask}')
    self.t += 1
    return self._look(), float(action), self.t == 9, False, {}


gymnasium.register('Tempting-v0', Tempting)


@pytest.mark.parametrize(
  'name',
  [pytest.param(x, marks=[] if x == 'ppo' else _SLOW) for x in AGENTS],
)
def test_runs_never_take_an_illegal_action(name, tmp_path):
  argv = ['train', 'gymnasium:Tempting-v0', f'--agent={name}']
  argv += [f'--workdir={tmp_path}', *helpers.TINY[:-1]]
  if AGENTS[name].sequence_length:  # It has a memory.
    argv += ['--config.replay.min_steps=64', '--config.replay.batch_size=16']
  assert train.run(argv) == 0
