"""Tests how podrl finds out what made a loss NaN or infinite."""

import gymnasium
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl import signals
from podrl.drivers import culprits
from podrl.run import build
from podrl.types import Culprit, DeviceEnv, TimeStep, Trajectory

_FIELDS = {
  'env.name': 'Mine-v0',
  'agent.reward_clip': 0.0,
  'agent.normalize_reward': False,
  'agent.normalize_observation': False,
}


def _trajectory(**bad):
  """Makes 4 steps of 3 environments; `bad` maps an array to (index, value)."""
  rng = np.random.default_rng(0)
  arrays = {
    'reward': rng.normal(size=(5, 3)),
    'action': rng.normal(size=(4, 3, 2)),
    'x': rng.normal(size=(5, 3, 2, 2)),
  }
  for name, (index, value) in bad.items():
    arrays[name][index] = value
  arrays = {k: x.astype(np.float32) for k, x in arrays.items()}
  obs = {'image': np.zeros((5, 3, 9), np.uint8), 'x': arrays['x']}
  steps = TimeStep(obs, arrays['reward'], np.ones((5, 3)), np.zeros((5, 3)))
  return Trajectory(steps, arrays['action'], (), (), (), ())


def _culprit(is_failing=True, **bad):
  find = jax.jit(lambda x: culprits.find_largest(x, 20))
  largest = find(_trajectory(**bad))
  assert largest.keys() == {'reward', 'action', "observation['x']"}
  culprit = culprits.find_culprit(jax.device_get(largest), 6, is_failing)
  # Sebulba's learner gets arrays of the actor device.
  assert culprits.find_culprit(largest, 6, is_failing) == culprit
  return culprit


_X, _NAN, _INF = "observation['x']", float('nan'), float('inf')


@pytest.mark.parametrize(
  'bad,expected',
  [
    ({}, None),
    ({'reward': ((3, 1), -_INF)}, ('reward', -_INF, 23, 7, 0)),
    ({'x': ((2, 2, 1, 0), _INF)}, (_X, _INF, 22, 8, 2)),
    ({'reward': ((4, 0), -3e7)}, ('reward', -3e7, 24, 6, 0)),
    ({'x': ((0, 0, 0, 1), 2e6)}, (_X, 2e6, 20, 6, 1)),
    # The first bad number counts, and NaN or infinity counts before 1e30.
    (
      {'x': ((3, 0, 0, 0), _INF), 'reward': ((2, 1), _INF)},
      ('reward', _INF, 22, 7, 0),
    ),
    (
      {'x': ((3, 0, 0, 0), _INF), 'reward': ((2, 1), 1e30)},
      (_X, _INF, 23, 6, 0),
    ),
    # An environment is not at fault for its answer to a bad action. The action
    # of step t is chosen after the observation of step t.
    ({'x': ((3, 0, 0, 0), _INF), 'action': ((2, 1, 0), _NAN)}, None),
    ({'reward': ((3, 0), 1e30), 'action': ((2, 1, 0), 1e9)}, None),
    (
      {'x': ((2, 0, 0, 0), _INF), 'action': ((2, 0, 1), _NAN)},
      (_X, _INF, 22, 6, 0),
    ),
  ],
)
def test_the_culprit_is_the_first_that_gave_a_bad_number(bad, expected):
  assert _culprit(**bad) == (expected and Culprit(*expected))
  is_large = expected and np.isfinite(expected[1])
  if is_large:  # A large number is no culprit if the loss is finite.
    assert _culprit(False, **bad) is None


def test_the_size_of_observations_is_a_metric():
  trajectory = _trajectory(x=((2, 1, 0, 1), -70.5))
  largest = jax.jit(lambda x: culprits.find_largest(x, 20))(trajectory)
  assert culprits.largest_observation(largest) == {'largest_observation': 70.5}
  # Bytes and booleans have no such size.
  steps = trajectory.timestep._replace(obs=trajectory.timestep.obs['image'])
  largest = culprits.find_largest(trajectory._replace(timestep=steps), 20)
  assert culprits.largest_observation(largest) == {}


@pytest.mark.parametrize(
  'size,is_normalized,is_small',
  [
    (6e-5, False, True),
    (6e-5, True, False),
    (0.02, False, False),
    (0.0, False, False),
    (np.nan, False, False),
    (None, False, False),
  ],
)
def test_a_warning_says_that_observations_are_small(
  size, is_normalized, is_small
):
  record = {} if size is None else {'largest_observation': size}
  text = culprits.warn_of_size(record, is_normalized)
  assert ('at most 6e-05' in text and 'normalize_observation=True' in text) == (
    is_small
  )


def test_steps_are_counted_beyond_2_to_the_31():
  trajectory = _trajectory(reward=((3, 1), -_INF))
  num_steps = np.int32(20 - 2**31)  # 2**31 + 20, modulo 2**32.
  largest = jax.jit(culprits.find_largest)(trajectory, num_steps)
  assert culprits.find_culprit(largest, 6, True).step == 2**31 + 23


@pytest.mark.parametrize(
  'culprit,settings,expected',
  [
    (
      Culprit('reward', _NAN, 12, 5, 0),
      {'agent.reward_clip': 1.0},
      'environment 5 of Mine-v0 gave the reward NaN in its step 12; '
      'correct the environment',
    ),
    (
      Culprit(_X, _INF, 12, 5, 3),
      {'agent.normalize_observation': True},
      "environment 5 of Mine-v0 gave the observation['x'] inf (element 3) in "
      'its step 12; correct the environment',
    ),
    (
      Culprit('reward', -1e30, 12, 5, 0),
      {},
      'environment 5 of Mine-v0 gave the reward -1e+30 in its step 12; set '
      'config.agent.reward_clip or config.agent.normalize_reward',
    ),
    (Culprit('reward', _INF, 1, 1, 0), {'agent.reward_clip': 1.0}, ''),
    (Culprit('reward', 1e30, 1, 1, 0), {'agent.normalize_reward': True}, ''),
    (Culprit(_X, 1e9, 1, 1, 0), {'agent.normalize_observation': True}, ''),
  ],
)
def test_the_remedy_fits_the_settings(culprit, settings, expected):
  assert culprits.explain(culprit, _FIELDS | settings) == expected
  if not expected:
    assert culprits.explain(culprit, _FIELDS)
  if np.isinf(culprit.value) and culprit.field == 'reward':
    fields = _FIELDS | settings | {'agent.normalize_reward': True}
    assert culprits.explain(culprit, fields)  # The running mean is infinite.


def _check_run(path, capsys, message, *arguments, **options):
  assert helpers.run(path, *arguments, **options) == signals.FAILED
  said = capsys.readouterr().err
  assert message in said and said.count('\n') == 1
  assert 'learning_rate' not in said
  assert message in helpers.read(path)[1]['error']


@pytest.mark.parametrize(
  'value,settings,message',
  [
    (
      _NAN,
      [],
      'at update 2: environment 5 of CartPole-v1 gave the observation NaN '
      '(element 1) in its step 12; correct the environment',
    ),
    # The infinity enters the running mean, so the loss is NaN 2 updates later.
    (
      _INF,
      ['--config.agent.normalize_observation=True'],
      'at update 4: environment 5 of CartPole-v1 gave the observation inf '
      '(element 1) in its step 12; correct the environment',
    ),
  ],
)
def test_anakin_names_the_environment(
  value, settings, message, tmp_path, monkeypatch, capsys
):
  make = build.make_env

  def make_env(config) -> DeviceEnv:
    env = make(config)

    def step(state, action):
      state, timestep = env.step(state, action)
      num_envs = timestep.is_first.size
      try:
        first_env = jax.lax.axis_index('devices') * num_envs
      except NameError:  # This call only computes shapes.
        first_env = 0
      index = first_env + jnp.arange(num_envs)
      is_bad = (index == 5) & (state.num_steps == 12)
      obs = timestep.obs.at[:, 1].set(
        jnp.where(is_bad, value, timestep.obs[:, 1])
      )
      return state, timestep._replace(obs=obs)

    return env._replace(step=step)

  monkeypatch.setattr(build, 'make_env', make_env)
  path = tmp_path / 'run'
  _check_run(path, capsys, message, *settings, name='anakin_cartpole')
  if value == _INF:  # The checkpoint has the mean, and remembers the culprit.
    path = tmp_path / 'parts'
    few = '--config.total_env_steps=192'
    assert helpers.run(path, *settings, few, name='anakin_cartpole') == 0
    capsys.readouterr()
    more = [*settings, '--resume']
    assert helpers.run(path, *more, name='anakin_cartpole') == signals.FAILED
    assert message in capsys.readouterr().err


class _Broken(gymnasium.Env):
  """Environments; the 10th step of number 6 gives `reward` and `obs`."""

  observation_space = gymnasium.spaces.Dict(
    {
      'x': gymnasium.spaces.Box(-1, 1, (3,)),
      'y': gymnasium.spaces.Discrete(2),
    }
  )
  action_space = gymnasium.spaces.Discrete(2)
  reward, obs = 0.0, 0.0

  def reset(self, *, seed=None, options=None):
    self.is_broken, self.num_steps = seed == build.env_seed(0, 0, 6), 0
    return {'x': np.zeros(3, np.float32), 'y': 0}, {}

  def step(self, action):
    self.num_steps += 1
    obs, reward = {'x': np.zeros(3, np.float32), 'y': 0}, 0.0
    if self.is_broken and self.num_steps == 10:
      obs['x'][2], reward = self.obs, self.reward
    return obs, reward, False, False, {}


# Normalisation would clip large numbers.
_BROKEN = [
  *(x for x in helpers.TINY if 'num_devices' not in x),
  '--config.env.suite=gymnasium',
  '--config.env.name=Broken-v0',
  '--config.agent.normalize_observation=False',
  '--config.agent.normalize_reward=False',
  '--config.sebulba.actor_devices=0',
  '--config.sebulba.learner_devices=0,1',
  '--config.sebulba.threads_per_actor_device=2',
]


@pytest.mark.parametrize(
  'reward,obs,message',
  [
    (_NAN, 0.0, 'reward NaN in its step 10; correct the environment'),
    (
      0.0,
      _INF,
      "observation['x'] inf (element 2) in its step 10; correct the env",
    ),
    (1e30, 0.0, 'reward 1e+30 in its step 10; set config.agent.reward_clip or'),
  ],
)
def test_sebulba_names_the_environment(
  reward, obs, message, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(_Broken, 'reward', reward)
  monkeypatch.setattr(_Broken, 'obs', obs)
  gymnasium.register('Broken-v0', _Broken)
  _check_run(
    tmp_path / 'run',
    capsys,
    f'at update 2: environment 6 of Broken-v0 gave the {message}',
    *_BROKEN,
    name='sebulba_cartpole',
    tiny=False,
  )


def test_a_resumed_run_of_sebulba_remembers_the_culprit(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(_Broken, 'obs', _INF)
  gymnasium.register('Broken-v0', _Broken)
  arguments = [*_BROKEN, '--config.agent.normalize_observation=True']
  few, path = '--config.total_env_steps=128', tmp_path / 'run'
  options = {'name': 'sebulba_cartpole', 'tiny': False}
  assert helpers.run(path, *arguments, few, **options) == 0
  capsys.readouterr()
  arguments.append('--resume')
  assert helpers.run(path, *arguments, **options) == signals.FAILED
  assert (
    "environment 6 of Broken-v0 gave the observation['x'] inf (element 2) in "
    'its step 10'
  ) in capsys.readouterr().err
