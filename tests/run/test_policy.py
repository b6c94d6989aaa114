"""Tests policies that are loaded from runs, and what they choose."""

import functools
import re

import gymnasium
import gymnax
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podrl
from podrl.drivers import spmd
from podrl.drivers.anakin import Anakin
from podrl.envs import find_task
from podrl.run import build, defaults, export, policy
from podrl.run.command_line import apply_overrides
from podrl.tools import plot
from podrl.types import TimeStep


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Makes a run of each architecture; Anakin's has memory and normalisation."""
  path = tmp_path_factory.mktemp('runs')
  assert helpers.run(path / 'anakin', *helpers.MEMORY) == 0
  assert (
    helpers.run(
      path / 'sebulba',
      '--config.total_env_steps=512',
      '--config.env.num_envs=8',
      '--config.unroll_length=8',
      '--config.env.name=FrozenLake-v1',
      '--config.eval.num_episodes=2',
      '--config.network.hidden_sizes=8',
      '--config.sebulba.actor_devices=0',
      '--config.sebulba.learner_devices=0',
      name='sebulba_cartpole',
      tiny=False,
    )
    == 0
  )
  return path


def test_a_policy_chooses_what_the_agent_does(runs):
  chosen = podrl.load(runs / 'anakin')
  env, params = gymnax.make('Catch-bsuite')
  reset = jax.jit(jax.vmap(env.reset, (0, None)))
  obs, _ = reset(jax.random.split(jax.random.key(0), 3), params)
  assert obs.dtype == jnp.float32  # The agent sees it as bool.
  carry = agent_carry = chosen.initial_carry(3)
  act = jax.jit(functools.partial(chosen.agent.act, greedy=True))
  for is_first in (True, False):
    action, carry = chosen(obs, carry, is_first=np.full(3, is_first))
    timestep = TimeStep(
      obs.astype(bool), jnp.zeros(3), jnp.ones(3), jnp.full(3, is_first)
    )
    keys = jax.random.split(jax.random.key(9), 3)
    expected, _, agent_carry = act(
      chosen.variables, keys, timestep, agent_carry
    )
    np.testing.assert_array_equal(action, expected)
    for x, y in zip(*map(jax.tree.leaves, (carry, agent_carry))):
      np.testing.assert_allclose(x, y, atol=1e-6)
  # Without a carry, an episode begins, so the old memory has no effect.
  fresh, _ = chosen(obs)
  again, _ = chosen(obs, carry, is_first=np.ones(3, bool))
  np.testing.assert_array_equal(fresh, again)


def test_samples_follow_the_policy(runs):
  chosen = podrl.load(runs / 'anakin')
  obs = jnp.zeros((4000, 10, 5))
  actions, _ = chosen(obs, rng_key=jax.random.key(1))
  timestep = TimeStep(
    obs.astype(bool), jnp.zeros(4000), jnp.ones(4000), jnp.ones(4000, bool)
  )
  _, extras, _ = jax.jit(chosen.agent.act)(
    chosen.variables,
    jax.random.split(jax.random.key(2), 4000),
    timestep,
    chosen.initial_carry(4000),
  )
  # All observations are equal, so an action's share is its probability.
  for action in range(3):
    share = np.mean(np.asarray(actions) == action)
    found = np.exp(
      np.asarray(extras.log_prob)[np.asarray(extras.sample) == action]
    )
    np.testing.assert_allclose(share, found[0], atol=0.03)  # 0.03 is 4 sigma.


def test_categories_are_observed_as_the_library_gives_them(runs):
  chosen = podrl.load(runs / 'sebulba')
  env = build.make_host_env(chosen.config, 4, 0, 1)
  raw = np.asarray([0, 3, 7, 15], np.int32)
  np.testing.assert_array_equal(
    policy.observe(chosen.spec, raw), env.spec.observe(raw)
  )
  env.close()
  assert chosen(raw)[0].shape == (4,)
  with pytest.raises(ValueError, match=r'\(4, 2\).*\(4, 16\)'):
    chosen(np.zeros((4, 2)))


def _untrained(name):
  """Returns a policy with new parameters for a gymnasium environment."""
  config = defaults.base(find_task(f'gymnasium:{name}'), 'ppo')
  config['network.name'], config['network.hidden_sizes'] = 'mlp', (8,)
  spec = build.make_spec(config)
  agent = build.make_agent(config, spec)
  return policy.Policy(config, spec, agent, agent.init(jax.random.key(0)), 1200)


def test_a_robot_needs_only_what_its_policy_sees():
  task = find_task('Go1Getup-v1')
  spec = build.make_spec(defaults.base(task, 'ppo'))
  config = defaults.make_config(task, 'ppo', spec)
  agent = build.make_agent(config, spec)
  variables = agent.init(jax.random.key(0))
  chosen = policy.Policy(config, spec, agent, variables, 1200)
  rng = np.random.default_rng(0)  # Like envpool's, these have 64 bits.
  state, other = rng.normal(size=(3, 42)), rng.normal(size=(3, 91))
  action, _ = chosen({'state': state})
  assert np.any(action[0] != action[1])
  whole = {'state': state, 'privileged_state': other}
  np.testing.assert_array_equal(chosen(whole)[0], action)
  assert [*export.example(chosen)] == ['state']


def test_a_single_gymnasium_environment_accepts_an_action():
  chosen = _untrained('CartPole-v1')
  env = gymnasium.make('CartPole-v1')
  obs, _ = env.reset(seed=0)
  action, _ = chosen(obs[None])
  env.step(action[0])
  action[0] = 1  # The array can be changed.
  batch = np.zeros((3, 4), np.float32)
  actions = jax.jit(lambda obs: chosen(obs)[0])(batch)
  np.testing.assert_array_equal(actions, chosen(batch)[0])


@pytest.mark.parametrize(
  'name,obs,remedy',
  [
    ('CartPole-v1', np.zeros(4), 'obs[None]'),
    ('FrozenLake-v1', 3, 'np.array([obs])'),
    ('Blackjack-v1', (12, 5, 0), 'jax.tree.map('),
  ],
)
def test_a_missing_batch_axis_is_named(name, obs, remedy):
  message = f'the batch axis of the observation is missing; pass {remedy}'
  with pytest.raises(ValueError, match=re.escape(message)):
    _untrained(name)(obs)


def test_a_policy_is_printed_in_one_line():
  expected = 'Policy(CartPole-v1, ppo, 1,200 updates)'
  assert repr(_untrained('CartPole-v1')) == expected


def test_its_parameters_are_the_runs(runs, tmp_path, monkeypatch):
  drivers = []
  start = Anakin.start
  monkeypatch.setattr(
    Anakin,
    'start',
    lambda self, *args: (drivers.append(self), start(self, *args))[1],
  )
  assert helpers.run(tmp_path / 'run') == 0
  for x, y in zip(
    *map(
      jax.tree.leaves,
      (
        drivers[0].learner_state.variables,
        podrl.load(tmp_path / 'run').variables,
      ),
    )
  ):
    np.testing.assert_array_equal(x, y)
  _, summary = helpers.read(runs / 'anakin')
  chosen = podrl.load(runs / 'anakin')
  assert chosen.num_updates == summary['num_updates'] == 8
  assert podrl.load(runs / 'anakin', 8).num_updates == 8
  for arguments, message in (
    (('nowhere',), 'is not a run: it has no config.json$'),
    ((runs,), f'is not a run: .*; it contains the run {runs}/'),
    ((runs / 'anakin', '5'), 'it has 8'),
    ((runs / 'anakin', 5), 'it has 8'),
    ((runs / 'anakin', 'best', 1), 'has no agent 1; use a number from 0 to 0'),
  ):
    with pytest.raises(ValueError, match=message):
      podrl.load(*arguments)


def test_seeds_in_one_program_are_the_single_runs(tmp_path, monkeypatch):
  assert (
    helpers.run(
      tmp_path / 'many',
      '--config.num_seeds=2',
      '--config.seed=5',
      '--config.optimizer.name=sgd',
    )
    == 0
  )
  single, member = tmp_path / 'single', tmp_path / 'many' / 'seed_1'
  assert (
    helpers.run(single, '--config.seed=6', '--config.optimizer.name=sgd') == 0
  )
  for x, y in zip(
    helpers.read(single)[0], helpers.read(member)[0], strict=True
  ):
    for name in x:
      if not name.endswith(('_second', '_seconds')):
        np.testing.assert_allclose(x[name], y[name], atol=1e-5, err_msg=name)
  with pytest.raises(ValueError, match='seed_1 has no agent 0'):
    podrl.load(member, seed=0)
  monkeypatch.chdir(member)
  both = podrl.load(single).variables, podrl.load('.').variables
  for x, y in zip(*map(jax.tree.leaves, both)):
    np.testing.assert_allclose(x, y, atol=1e-5)
  records, summary = helpers.read(tmp_path / 'many')
  each = [helpers.read(tmp_path / 'many' / f'seed_{i}')[0] for i in range(2)]
  assert each[0] != each[1]
  for mean, x, y in zip(records, *each, strict=True):
    assert mean['loss'] == pytest.approx((x['loss'] + y['loss']) / 2)
    assert mean['steps_per_second'] == pytest.approx(
      x['steps_per_second'] + y['steps_per_second']
    )
  assert summary['num_params'] == helpers.read(single)[1]['num_params']
  runs = [plot.read_run(str(tmp_path / 'many' / f'seed_{i}')) for i in range(2)]
  assert [len(g.runs) for g in plot.group_runs(runs)] == [2]


@pytest.mark.slow
def test_a_nan_names_its_seed(tmp_path, capsys, monkeypatch):
  make = build.make_agent

  def make_agent(config, spec):
    agent = make(config, spec)

    def loss(variables, target_params, batch, rng_key):
      value, output = agent.loss(variables, target_params, batch, rng_key)
      leaf = jax.tree.leaves(variables)[1]  # This kernel differs per seed.
      return value + jnp.where(
        leaf.ravel()[0] == marked[0], jnp.nan, 0.0
      ), output

    return agent._replace(loss=loss)

  config = ['--config.num_seeds=3', '--agent=impala']
  marked = [jnp.inf]
  monkeypatch.setattr(build, 'make_agent', make_agent)
  # A first run gives the initial parameters of seed 1.
  fields = helpers.fields_of('anakin_catch', 'impala')
  fields, _ = apply_overrides(fields, [*helpers.TINY, config[0]])
  run = build.make_run(fields)
  run.driver.start()
  params = spmd.copy_to_first_device(run.driver.learner_state.variables.params)
  marked[0] = float(jax.tree.leaves(params)[1][1].ravel()[0])
  assert helpers.run(tmp_path / 'run', *config) == 1
  assert 'of seed 1 is NaN or infinite at update 1' in capsys.readouterr().err
