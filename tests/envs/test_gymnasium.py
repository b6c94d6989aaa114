"""Tests gymnasium environments as a HostEnv."""

from concurrent.futures import ThreadPoolExecutor
import decimal
import fractions
import random
import re
import signal
import subprocess
import sys
import warnings

import cloudpickle
import gymnasium
from helpers import slow
import jax
import numpy as np
import pytest

from podrl.envs import gymnasium as adapter
from podrl.envs import spaces
from podrl.messages import EnvironmentFailed
from podrl.types import Box, Discrete, MultiDiscrete


def test_steps_and_reset_steps_are_those_of_single_environments():
  env = adapter.make('CartPole-v1', 3, seed=7, max_episode_steps=5)
  timestep, rng = env.reset(), np.random.default_rng(0)
  singles = [
    gymnasium.make('CartPole-v1', max_episode_steps=5) for _ in range(3)
  ]
  expected = [single.reset(seed=7 + i)[0] for i, single in enumerate(singles)]
  is_over = [False] * 3
  np.testing.assert_array_equal(timestep.obs, expected)
  num_reset_steps = 0
  for _ in range(20):
    action = rng.integers(2, size=3)
    timestep = env.step(action)
    for i, single in enumerate(singles):
      assert timestep.is_first[i] == is_over[i]
      if is_over[i]:
        obs, reward, terminated, is_over[i] = (
          single.reset()[0],
          0.0,
          False,
          False,
        )
        num_reset_steps += 1
      else:
        obs, reward, terminated, truncated, _ = single.step(action[i])
        is_over[i] = terminated or truncated
      np.testing.assert_array_equal(timestep.obs[i], obs)
      assert timestep.reward[i] == reward
      assert timestep.discount[i] == 1.0 - terminated
  assert num_reset_steps >= 9  # Each of 3 environments has at least 3.
  env.close()


def test_an_option_cannot_have_the_name_of_an_argument():
  with pytest.raises(ValueError, match='env.options.seed is not possible'):
    adapter.make_spec('CartPole-v1', seed=3)


def test_time_steps_are_the_callers():
  env = adapter.make('CartPole-v1', 2, seed=0)
  first = env.reset()
  kept = first.obs.copy()
  env.step(np.zeros(2, int))
  np.testing.assert_array_equal(first.obs, kept)
  env.close()


def test_categories_and_dicts():
  space = gymnasium.spaces.Dict(
    {
      'where': gymnasium.spaces.Discrete(3, start=1),
      'what': gymnasium.spaces.Box(0, 1, (2,), np.float64),
      'which': gymnasium.spaces.MultiDiscrete([2, 3], start=[0, -1]),
    }
  )
  spec = spaces.obs_spec(space)
  assert spec == {
    'where': jax.ShapeDtypeStruct((3,), bool),
    'what': jax.ShapeDtypeStruct((2,), np.float32),
    'which': jax.ShapeDtypeStruct((5,), bool),
  }
  raw = {'where': np.array([1, 3]), 'which': np.array([[1, -1], [0, 1]])}
  raw['what'] = np.ones((2, 2), np.float32)
  obs = jax.jit(lambda raw: spaces.observe(space, raw))(raw)
  expected = [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
  np.testing.assert_array_equal(obs['which'], expected)
  np.testing.assert_array_equal(obs['where'], [[1, 0, 0], [0, 0, 1]])


_Box = gymnasium.spaces.Box


@pytest.mark.parametrize(
  'space,scale',
  [
    (_Box(0, 255, (4, 4, 3), np.uint8), 255),
    (_Box(0, 10, (7, 7, 3), np.uint8), 10),
    (_Box(0, 1, (2,), np.uint8), 1),
    (_Box(-5, 3, (2,), np.int8), 5),
    (_Box(-(2**31), 2**31 - 1, (2,), np.int32), 1),
    (_Box(0, 255, (2,), np.float32), 255),
    (_Box(-8, 8, (2,), np.float32), 1),
    (_Box(-np.inf, np.inf, (2,), np.float64), 1),
    (_Box(0, np.inf, (2,), np.float32), 1),
    (_Box(-3.4e38, 3.4e38, (2,), np.float32), 1),
    (_Box(np.float32([-1, -30]), np.float32([1, 20])), [1, 30]),
    (gymnasium.spaces.Discrete(300), 1),
    (gymnasium.spaces.MultiDiscrete([300, 2]), 1),
    (gymnasium.spaces.MultiBinary(4), 1),
  ],
)
def test_the_scale_of_an_observation_is_the_bound_of_its_space(space, scale):
  def env_spec(space):
    return spaces.env_spec('Mine-v0', space, _TWO, 1, 0)

  np.testing.assert_allclose(
    *np.broadcast_arrays(env_spec(space).obs_scale, scale)
  )
  both = {'a': space, 'b': gymnasium.spaces.Tuple([_Box(0, 7, (1,), int)])}
  found = env_spec(gymnasium.spaces.Dict(both)).obs_scale
  assert found.keys() == {'a', 'b'} and found['b'][0] == 7
  assert np.max(found['a']) == np.max(scale)
  mask = gymnasium.spaces.MultiBinary(2)
  masked = gymnasium.spaces.Dict({'observation': space, 'action_mask': mask})
  assert np.max(env_spec(masked).obs_scale) == np.max(scale)


@pytest.mark.parametrize(
  'shapes,expected',
  [
    ([(3, 64, 60), (4,)], True),
    ([(64, 60, 3), (4,)], False),
    ([(4,), (5, 6)], False),
    ([(3, 3, 5), (3, 64, 64)], True),  # The largest image decides.
  ],
)
def test_the_largest_image_says_where_the_channels_are(shapes, expected):
  boxes = {str(i): _Box(0, 255, x, np.uint8) for i, x in enumerate(shapes)}
  space = gymnasium.spaces.Dict(boxes)
  spec = spaces.env_spec('Mine-v0', space, _TWO, 1, 0)
  assert spec.channels_first is expected


@pytest.mark.parametrize(
  'space',
  [
    gymnasium.spaces.Box(-0.4, 0.4, (3,), np.float64),  # np.float32(0.4) > 0.4.
    gymnasium.spaces.Box(0.1, 0.7, (2, 2), np.float32),
    gymnasium.spaces.Box(-1, 5, (2,), np.int32),
    gymnasium.spaces.Box(0, np.inf, (1,), np.float32),
  ],
)
def test_actions_are_in_the_librarys_own_space(space):
  box = spaces.action_space(space)
  assert isinstance(box, Box) and box.shape == space.shape
  assert box.low.dtype == box.high.dtype == np.float32
  to_action = spaces.to_library_action(space)
  draws = np.random.default_rng(0).normal(0, 4, (50, *space.shape))
  draws = np.concatenate([draws, 0 * draws[:1] + 1e9, 0 * draws[:1] - 1e9])
  draws = np.clip(draws.astype(np.float32), box.low, box.high)
  draws.flags.writeable = False  # JAX's arrays are read-only.
  actions = to_action(draws)
  assert all(space.contains(action) for action in actions)
  actions[:] = 0  # An environment may change them.
  if space.dtype == np.int32:
    assert set(np.unique(to_action(draws))) == set(range(-1, 6))


def test_a_category_that_starts_elsewhere_is_shifted():
  to_action = spaces.to_library_action(gymnasium.spaces.Discrete(3, start=2))
  np.testing.assert_array_equal(to_action(np.array([0, 2])), [2, 4])


def test_several_categories_have_the_shape_and_start_of_their_space():
  start = np.array([[0, 1], [-5, 0]])
  space = gymnasium.spaces.MultiDiscrete([[2, 3], [4, 5]], start=start)
  assert spaces.action_space(space) == MultiDiscrete((2, 3, 4, 5))
  action = np.int32([[1, 2, 3, 4], [0, 1, 2, 3]])
  found = spaces.to_library_action(space)(action)
  np.testing.assert_array_equal(found, action.reshape(2, 2, 2) + start)
  assert all(space.contains(x) for x in found)


def test_a_module_that_registers_is_imported(tmp_path, monkeypatch):
  (tmp_path / 'a_module_of_walks.py').write_text(
    'import gymnasium\n'
    'gymnasium.register("Elsewhere-v0", "gymnasium.envs.classic_control:'
    'CartPoleEnv", max_episode_steps=9)\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  env = adapter.make('a_module_of_walks:Elsewhere-v0', 2, seed=0)
  assert env.spec.max_episode_steps == 9
  assert env.reset().obs.shape == (2, 4)
  env.close()


@pytest.mark.parametrize(
  'code,message',
  [
    ('raise RuntimeError("no\\nlicence")', 'RuntimeError: no licence'),
    ('def', 'SyntaxError: '),
    ('import sys; sys.exit(4)', 'SystemExit: 4'),
  ],
)
def test_a_module_that_fails_is_one_line(code, message, tmp_path, monkeypatch):
  (tmp_path / 'a_module_that_fails.py').write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError) as error:
    adapter.make_spec('a_module_that_fails:Walk-v0')
  assert str(error.value).startswith(
    'env.name=a_module_that_fails:Walk-v0: the module a_module_that_fails '
    f'cannot be imported: {message}'
  )
  assert '\n' not in str(error.value)


class _Faulty(gymnasium.Env):
  """An environment that does something wrong in its second step."""

  observation_space = gymnasium.spaces.Box(0, 9, (2,))
  action_space = gymnasium.spaces.Discrete(2)

  def __init__(self, fault):
    self.fault, self.t = fault, 0

  def reset(self, *, seed=None, options=None):
    obs = np.zeros(2, np.float32)
    return obs if self.fault == 'no info' else (obs, {})

  def step(self, action):
    self.t += 1
    fault = self.fault if self.t == 2 else ''
    obs, reward = np.zeros(2, np.float32), 0.0
    if isinstance(fault, BaseException):
      raise fault
    if fault == 'four values':
      return obs, reward, False, {}
    if fault == 'another shape':
      obs = np.zeros(3, np.float32)
    if fault == 'no observation':
      obs = None
    if fault == 'several rewards':
      reward = np.zeros(2)
    return obs, reward, False, False, {}


@pytest.mark.parametrize(
  'fault,message',
  [
    ('no info', 'Faulty-v0 returned a ndarray in reset; it must return (obs'),
    ('four values', 'Faulty-v0 returned 4 values in step 2; it must return ('),
    (
      'another shape',
      'Faulty-v0 returned an observation of shape (3,) in step 2; its space '
      'says (2,)',
    ),
    ('no observation', 'Faulty-v0 returned an observation of type NoneType in'),
    (
      'several rewards',
      'Faulty-v0 returned a reward of shape (2,) in step 2; it must be one',
    ),
    (
      KeyError('leg'),
      "environment Faulty-v0 failed in step: KeyError: 'leg'",
    ),
    (SystemExit(0), 'environment Faulty-v0 failed in step: SystemExit: 0'),
    (
      KeyboardInterrupt(),
      'environment Faulty-v0 failed in step: KeyboardInterrupt',
    ),
  ],
)
def test_a_failure_names_the_environment(fault, message, monkeypatch):
  gymnasium.register('Faulty-v0', _Faulty, disable_env_checker=True)
  # A run replaces Python's handler of Ctrl-C.
  monkeypatch.setattr(signal, 'getsignal', lambda number: None)
  env = adapter.make('Faulty-v0', 2, seed=0, fault=fault)
  with pytest.raises(EnvironmentFailed) as error:
    env.reset()
    for _ in range(2):
      env.step(np.zeros(2, int))
  text = str(error.value)
  assert text.startswith(message)
  assert '\n' not in text and error.value.__cause__ is not None
  is_raised = isinstance(fault, BaseException)
  assert (f'({__file__}:' in text and text.endswith('in step)')) == is_raised
  env.close()


def test_the_users_interrupt_is_no_failure():
  gymnasium.register('Faulty-v0', _Faulty, disable_env_checker=True)
  env = adapter.make('Faulty-v0', 1, seed=0, fault=KeyboardInterrupt())
  env.reset()
  env.step(np.zeros(1, int))
  # In a background job, Python starts without its handler of Ctrl-C.
  handler = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    with pytest.raises(KeyboardInterrupt):
      env.step(np.zeros(1, int))
  finally:
    signal.signal(signal.SIGINT, handler)


class _From3(gymnasium.Env):
  """An environment that observes its last action: 3, 4 or 5."""

  observation_space = gymnasium.spaces.Box(0, 9, (1,))
  action_space = gymnasium.spaces.Discrete(3, start=3)

  def reset(self, *, seed=None, options=None):
    return np.zeros(1, np.float32), {}

  def step(self, action):
    return np.full(1, action, np.float32), 0.0, False, False, {}


def test_a_discretes_start_is_added():
  gymnasium.register('From3-v0', _From3)
  env = adapter.make('From3-v0', 2, seed=0)
  assert env.spec.action == Discrete(3)
  env.reset()
  np.testing.assert_array_equal(env.step(np.array([0, 2])).obs, [[3], [5]])
  env.close()


@pytest.mark.parametrize(
  'name,options,message',
  [
    ('CartPole-v9', {}, 'did you mean CartPole-v'),
    ('no_module:CartPole-v1', {}, "No module named 'no_module'"),
    (
      'CartPole-v1',
      {'sutton_bartow_reward': True},
      '^env.options.*barto_reward',
    ),
    ('Pendulum-v1', {'g': 'x', 'render_mode': 3}, 'cannot be made'),
    ('FrozenLake-v1', {'map_name': 'x'}, 'cannot be made'),
    ('CartPole-v1', {'max_episode_steps': 2.5}, '=2.5 must be a whole'),
    ('CartPole-v1', {'max_episode_steps': -2}, '=-2 must be a whole'),
  ],
)
def test_mistakes(name, options, message):
  with pytest.raises(ValueError, match=message) as error:
    adapter.make_spec(name, **options)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('steps,expected', [(1e3, 1000), (-1, 0), (None, 500)])
def test_a_limit_of_steps_is_a_whole_number(steps, expected):
  spec = adapter.make_spec('CartPole-v1', max_episode_steps=steps)
  assert spec.max_episode_steps == expected
  assert isinstance(spec.max_episode_steps, int)


_BOX, _TWO = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2)


@pytest.mark.parametrize(
  'obs,action,message',
  [
    (gymnasium.spaces.Box(0, 1, (0,)), _TWO, 'observations are Box.* no num'),
    (
      gymnasium.spaces.Dict(
        {'x': _BOX, 'y': gymnasium.spaces.Box(0, 1, (2, 0))}
      ),
      _TWO,
      'observations are Box.* no number',
    ),
    (_BOX, gymnasium.spaces.Box(0, 1, (0,)), 'actions are Box.* no number'),
    (gymnasium.spaces.Discrete(10**9), _TWO, 'observations .* at most 16384'),
    (_BOX, gymnasium.spaces.Discrete(2_000_000), 'actions .* at most 16384'),
    (_BOX, gymnasium.spaces.MultiDiscrete([9, 2**14]), 'actions .* at most 16'),
    (gymnasium.spaces.MultiDiscrete([]), _TWO, 'observations are Multi.* no n'),
  ],
)
def test_spaces_that_no_network_can_hold_are_refused(obs, action, message):
  with pytest.raises(ValueError, match=message) as error:
    spaces.env_spec('Mine-v0', obs, action, 1, 0)
  assert str(error.value).startswith('env.name=Mine-v0: ')
  assert '; wrap the environment so that' in str(error.value)
  assert '\n' not in str(error.value)
  spaces.env_spec('Mine-v0', gymnasium.spaces.Discrete(2**14), _TWO, 1, 0)


class _Odd(gymnasium.Env):
  """An environment of 3 steps; its arguments are odd values that it returns."""

  observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
  action_space = gymnasium.spaces.Discrete(2)

  def __init__(self, reward=1.0, obs=None, infos=({},), ends=None, space=None):
    self.reward, self.obs, self.infos, self.ends = reward, obs, infos, ends
    if space is not None:
      self.observation_space = space

  def _observe(self):
    return self.observation_space.sample() if self.obs is None else self.obs

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.t, self.number = 0, seed or 0
    return self._observe(), {}

  def step(self, action):
    self.t += 1
    over = self.t >= 3
    terminated = over if self.ends is None else self.ends[over]
    # Two environments give different infos at the same time.
    info = self.infos[(self.t + self.number) % len(self.infos)]
    return self._observe(), self.reward, terminated, False, info


def _odd_steps(num_envs=2, num_steps=5, **options):
  """Returns the time steps of some steps of `_Odd`."""
  gymnasium.register('Odd-v0', _Odd, disable_env_checker=True)
  env = adapter.make('Odd-v0', num_envs, seed=3, **options)
  try:
    actions = np.zeros(num_envs, np.int32)
    return [env.reset(), *(env.step(actions) for _ in range(num_steps))]
  finally:
    env.close()


@pytest.mark.parametrize(
  'infos',
  [
    ({'cause': 1.5}, {'cause': 'wall'}),
    ({'contacts': np.zeros(3)}, {'contacts': np.zeros(2)}),
    ({'x': 1}, {'x': {'y': 2}}),
    (None, []),
    ({'final_obs': 3}, {'_x': 1, 'x': 2}),
  ],
)
def test_nobody_reads_the_infos(infos):
  rewards = [step.reward.tolist() for step in _odd_steps(infos=infos)]
  # Step 4 is a reset step.
  assert rewards == [[0, 0], [1, 1], [1, 1], [1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize(
  'reward',
  [
    decimal.Decimal(1),
    fractions.Fraction(1),
    np.ones(1),
    np.ones((1, 1), np.float32),
    np.int8(1),
    True,
    jax.numpy.ones(1),
  ],
)
def test_a_reward_is_one_number_in_any_form(reward):
  step = _odd_steps(reward=reward)[1]
  assert step.reward.tolist() == [1, 1] and step.reward.dtype == np.float32


@pytest.mark.parametrize(
  'options,message',
  [
    ({'reward': None}, 'a reward of type NoneType in step 1; it must be a num'),
    ({'reward': '1'}, 'a reward of type str in step 1; it must be a number'),
    ({'reward': []}, 'a reward of shape (0,) in step 1; it must be one number'),
    ({'reward': 1j}, 'a reward of type complex in step 1; it must be a number'),
    ({'reward': 1e40}, 'the reward 1e+40 in step 1; 32 bits cannot contain it'),
    (
      {'obs': np.array([0.0, 1e300])},
      'an observation of 1e+300 in reset; float32 cannot contain it; scale it',
    ),
    (
      {
        'space': gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64),
        'obs': np.array([np.inf, -1e300]),
      },
      'an observation of -1e+300; float32 cannot contain it; scale it',
    ),
    (
      {
        'space': gymnasium.spaces.Box(1e12, 1e12 + 1, (2,), np.float64),
        'obs': np.array([1e12, 1e300]),
      },
      'an observation of 1e+300; float32 cannot contain it; scale it',
    ),
    ({'ends': (None, True)}, 'terminated of type NoneType in step 1; it must'),
    ({'ends': (np.zeros(2), 1)}, 'terminated of shape (2,) in step 1; it must'),
    (
      {'obs': np.zeros((1, 2), np.float32)},
      'an observation of shape (1, 2) in reset; its space says (2,)',
    ),
    ({'obs': [[1], [1, 2]]}, 'an observation of type list in reset; its space'),
    (
      {
        'space': gymnasium.spaces.Box(0, 255, (2,), np.uint8),
        'obs': np.array([0.5, 2.0]),
      },
      'an observation of float64 that uint8 cannot contain in reset; its space '
      'says uint8',
    ),
    (
      {
        'space': gymnasium.spaces.Dict(a=_BOX, b=_BOX),
        'obs': {'a': np.ones(3)},
      },
      "an observation without 'b' in reset; add it",
    ),
    (
      {
        'space': gymnasium.spaces.Dict(a=gymnasium.spaces.Tuple([_BOX, _BOX])),
        'obs': {'a': (np.ones(3), np.ones(4))},
      },
      "an observation['a'][1] of shape (4,) in reset; its space says (3,)",
    ),
  ],
)
def test_what_an_environment_returns_wrongly_is_named(options, message):
  with pytest.raises(EnvironmentFailed) as error:
    _odd_steps(**options)
  assert str(error.value).startswith(f'Odd-v0 returned {message}')


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_an_infinite_observation_arrives_as_it_is(dtype):
  space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), dtype)
  for value in np.inf, np.nan, 3e38:
    obs = np.array([1.0, value])
    for step in _odd_steps(space=space, obs=obs)[:2]:
      np.testing.assert_array_equal(step.obs[0], obs.astype(np.float32))


def test_a_large_integer_is_a_reward():
  assert _odd_steps(reward=10**30)[1].reward.tolist() == [np.float32(1e30)] * 2


def test_observations_arrive_in_the_dtype_of_their_space():
  space = gymnasium.spaces.Box(0, 255, (2,), np.uint8)
  for obs in (np.array([3, 200]), [3.0, 200.0], (3, 200)):
    step = _odd_steps(space=space, obs=obs)[1]
    assert step.obs.dtype == np.uint8 and step.obs.tolist() == [[3, 200]] * 2
  # One category may be an array with one element.
  space = gymnasium.spaces.Discrete(4)
  assert _odd_steps(space=space, obs=np.array([3]))[1].obs.tolist() == [3, 3]


def test_an_environment_that_samples_its_spaces_follows_the_seed():
  first, second = ([x.obs for x in _odd_steps(num_envs=3)] for _ in range(2))
  np.testing.assert_array_equal(first, second)
  # The environments share the space of the class, but not its random numbers.
  assert len(np.unique(np.stack(first))) == 6 * 3 * 2


def _in_other_thread(function, *args):
  with ThreadPoolExecutor(1) as executor:
    return executor.submit(function, *args).result()


class _Main(_Odd):
  """An environment that needs the main thread, in `__init__` or in `step`."""

  def __init__(self, where):
    super().__init__()
    self.where = where
    self.handle('init')

  def handle(self, where):
    if where == self.where:
      signal.signal(signal.SIGALRM, signal.SIG_IGN)

  def step(self, action):
    self.handle('step')
    return super().step(action)


def test_what_needs_the_main_thread():
  gymnasium.register('Main-v0', _Main, disable_env_checker=True)
  env = adapter.make('Main-v0', 1, seed=0, where='init')
  env.reset()
  _in_other_thread(env.step, np.zeros(1, int))
  env.close()
  env = adapter.make('Main-v0', 1, seed=0, where='step')
  env.reset()
  with pytest.raises(EnvironmentFailed) as error:
    _in_other_thread(env.step, np.zeros(1, int))
  env.close()
  message = 'signal only works in main thread .*vectorization_mode=async'
  assert re.search(message, str(error.value))


@pytest.mark.parametrize(
  'error,text',
  [
    (OSError('the device is gone'), 'OSError: the device is gone'),
    (KeyboardInterrupt(), 'KeyboardInterrupt'),
    (GeneratorExit(), 'GeneratorExit'),
  ],
)
def test_an_error_in_close_is_a_line(error, text, monkeypatch, capsys):
  class Close(_Odd):
    def close(self):
      raise error

  gymnasium.register('Close-v0', Close, disable_env_checker=True)
  # A run replaces Python's handler of Ctrl-C.
  monkeypatch.setattr(signal, 'getsignal', lambda number: None)
  env = adapter.make('Close-v0', 2, seed=0)
  env.reset()
  env.close()
  said = capsys.readouterr().err
  assert said.startswith(
    f'warning: Close-v0 failed in close: {text} ({__file__}'
  )
  assert said.count('\n') == 1  # Three environments were closed.


def test_ctrl_c_in_close_is_the_users(monkeypatch):
  class Interrupted(_Odd):
    def close(self):
      raise KeyboardInterrupt

  gymnasium.register('Interrupted-v0', Interrupted, disable_env_checker=True)
  # In a background job, Python starts without its handler of Ctrl-C.
  handler = signal.default_int_handler
  monkeypatch.setattr(signal, 'getsignal', lambda number: handler)
  with pytest.raises(KeyboardInterrupt):
    adapter.make_spec('Interrupted-v0')


def test_an_environment_without_an_entry_point():
  gymnasium.register('OnlyVector-v0', vector_entry_point='a:B')
  with pytest.raises(
    ValueError, match='OnlyVector-v0 has no entry_point, only'
  ):
    adapter.make_spec('OnlyVector-v0')


def test_environments_whose_spaces_differ_are_refused():
  sizes = iter([2, 2, 3])

  class Differing(_Odd):
    def __init__(self):
      space = gymnasium.spaces.Box(-1, 1, (next(sizes),))
      super().__init__(space=space)

  gymnasium.register('Differing-v0', Differing, disable_env_checker=True)
  with pytest.raises(ValueError, match='spaces of two environments differ'):
    sizes = iter([2, 2, 3, 2, 3])
    adapter.make('Differing-v0', 2, seed=0)


_ASYNC = """
import os, random
import gymnasium, numpy as np

class Env(gymnasium.Env):
  observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float64)
  action_space = gymnasium.spaces.Discrete(2)
  def __init__(self, fault=''):
    self.fault, self.t = fault, 0
  def reset(self, *, seed=None, options=None):
    return np.array([np.random.rand(), random.random()]), {}
  def step(self, action):
    self.t += 1
    if self.t == 2 and self.fault == 'kill':
      os.kill(os.getpid(), 9)
    if self.t == 2 and self.fault == 'exit':
      os._exit(0)
    if self.t == 2 and self.fault == 'error':
      raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'no text')
    obs = np.zeros(3 if self.fault == 'shape' else 2)
    return obs, np.ones((1, 1)), False, False, {'x': lambda: 1}

gymnasium.register('Async-v0', Env, disable_env_checker=True)
"""


@pytest.mark.parametrize(
  'fault,message',
  [
    ('', ''),
    (
      'kill',
      'environment async_env:Async-v0 failed in step: RuntimeError: the '
      'process of environment 0 was killed by signal 9; the machine may not '
      'have enough memory',
    ),
    slow(
      'exit',
      'environment async_env:Async-v0 failed in step: RuntimeError: the '
      'process of environment 0 ended',
    ),
    slow(
      'error',
      "async_env:Async-v0 failed in step 2: UnicodeDecodeError: 'utf-8' codec "
      "can't decode byte 0x78 in position 0: no text (TMP/async_env.py:19, in "
      'step)',
    ),
    slow(
      'shape',
      'async_env:Async-v0 returned an observation of shape (3,) in step 1; its '
      'space says (2,)',
    ),
  ],
)
def test_environments_in_processes(fault, message, tmp_path, monkeypatch):
  (tmp_path / 'async_env.py').write_text(_ASYNC)
  monkeypatch.syspath_prepend(tmp_path)
  name, options = 'async_env:Async-v0', {'vectorization_mode': 'async'}
  env = adapter.make(name, 2, seed=5, fault=fault, **options)
  obs = env.reset().obs
  for i in range(2):  # The global generators of a process have a seed.
    expected = [
      np.random.RandomState(5 + i).rand(),
      random.Random(5 + i).random(),
    ]
    np.testing.assert_array_equal(obs[i], np.float32(expected))
  actions = np.zeros(2, int)
  if not fault:
    assert env.step(actions).reward.tolist() == [1, 1]
    env.step(actions)
  else:
    with (
      pytest.raises(EnvironmentFailed) as error,
      warnings.catch_warnings(record=True) as warned,
    ):
      for _ in range(2):
        env.step(actions)
    assert not [x for x in warned if 'Worker' in str(x.message)]
    message = message.replace('TMP', str(tmp_path))
    assert str(error.value).startswith(message)
  env.close()


def test_a_process_does_not_import_podrl():
  guard = adapter._make_guard('Any-v0', is_process=True)
  code = (
    'import pickle, sys; guard = pickle.loads(sys.stdin.buffer.read()); '
    "import gymnasium; env = guard(gymnasium.make('CartPole-v1')); "
    "env.reset(seed=0); env.step(0); assert not {'jax', 'podrl'} & "
    '{*sys.modules}'
  )
  content = cloudpickle.dumps(guard)
  subprocess.run([sys.executable, '-c', code], input=content, check=True)


@pytest.mark.parametrize(
  'name,message',
  [
    (
      'ALE/Pong-v5',
      'env.name=ALE/Pong-v5 needs ale_py; write ale_py:ALE/Pong-v5 after pip '
      "install 'ale-py', or train envpool:Pong-v5",
    ),
    (
      'dm_control/cartpole-balance-v0',
      'env.name=dm_control/cartpole-balance-v0 needs shimmy; write '
      'shimmy:dm_control/cartpole-balance-v0 after pip install '
      "'shimmy[dm-control]', or train envpool:CartpoleBalance-v1",
    ),
    (
      'mine/Walk-v0',
      'env.name=mine/Walk-v0: no imported module registers mine/; write '
      'MODULE:mine/Walk-v0, where MODULE is the module that registers it',
    ),
  ],
)
def test_a_namespace_needs_the_module_that_registers_it(name, message):
  with pytest.raises(ValueError) as error:
    adapter.make_spec(name)
  assert str(error.value) == message


_Space = gymnasium.spaces.Box


@pytest.mark.parametrize(
  'space,raw,expected',
  [
    # 2**40 does not fit in 32 bits; as a float, it differs from 0.
    (_Space(0, 2**62, (1,), np.int64), [0, 2**40], [0, 2.0**40]),
    (_Space(-np.inf, np.inf, (1,), np.int64), [7, 2**40], [7, 2.0**40]),
    # The bounds are near each other: only the difference is kept.
    (_Space(2**40, 2**40 + 99, (1,), np.int64), [2**40, 2**40 + 3], [0, 3]),
    (_Space(2**63, 2**63 + 9, (1,), np.uint64), [2**63, 2**63 + 4], [0, 4]),
    (_Space(1.7e9, 1.7e9 + 1e5, (1,), np.float64), [1.7e9 + 0.5], [0.5]),
    # Nothing changes where 32 bits are enough.
    (_Space(0, 9, (1,), np.int64), [4], [4]),
    (_Space(-np.inf, np.inf, (1,), np.float64), [0.1], [np.float32(0.1)]),
    (_Space(5, 6, (1,), np.float64), [5.5], [5.5]),
  ],
)
def test_64_bits_are_cut_where_the_space_tells_how(space, raw, expected):
  raw = np.array(raw, space.dtype)[:, None]
  cut, spec = spaces.make_cut(space)(raw), spaces.obs_spec(space)
  assert cut.dtype == spec.dtype and cut.dtype.itemsize == 4
  np.testing.assert_array_equal(cut[:, 0], expected)


@pytest.mark.parametrize(
  'space',
  [
    gymnasium.spaces.Discrete(3, start=2**40),
    gymnasium.spaces.Discrete(3, start=-(2**62)),
    gymnasium.spaces.MultiDiscrete([2, 3], start=[2**40, -1]),
  ],
)
def test_categories_far_from_0(space):
  raw = np.array([space.start + 1])
  cut = spaces.make_cut(space)(raw)
  obs = np.asarray(jax.jit(lambda x: spaces.observe(space, x))(cut))
  sizes = np.ravel(getattr(space, 'nvec', getattr(space, 'n', 0)))
  expected = np.concatenate([np.arange(n) == 1 for n in sizes])
  np.testing.assert_array_equal(obs[0], expected)


def test_a_dict_is_cut_only_where_it_has_64_bits():
  far = _Space(2**40, 2**40 + 99, (1,), np.int64)
  space = gymnasium.spaces.Dict(a=_BOX, b=gymnasium.spaces.Tuple([far, _BOX]))
  a, c = np.ones((1, 3), np.float32), np.zeros((1, 3), np.float32)
  cut = spaces.make_cut(space)({'a': a, 'b': (np.array([[2**40 + 3]]), c)})
  assert cut['a'] is a and cut['b'][1] is c and cut['b'][0].tolist() == [[3]]
  both = gymnasium.spaces.Dict(a=_BOX, c=_BOX)
  assert spaces.make_cut(both) is spaces.make_cut(_BOX)  # Nothing to do.


def test_a_class_that_extends_a_space_is_that_space():
  class Angle(gymnasium.spaces.Box):
    pass

  class Choice(gymnasium.spaces.Discrete):
    pass

  spec = spaces.env_spec('Mine-v0', Angle(-1, 1, (2,)), Choice(3), 1, 0)
  assert spec.obs.shape == (2,) and spec.action == Discrete(3)


@pytest.mark.parametrize(
  'space',
  [
    gymnasium.spaces.MultiBinary(3),
    gymnasium.spaces.MultiBinary((2, 2)),
    gymnasium.spaces.MultiDiscrete([2, 2], dtype=np.int8),
    gymnasium.spaces.MultiDiscrete([2, 2], start=[3, -5], dtype=np.int16),
  ],
)
def test_binary_and_small_categories_are_in_their_space(space):
  action = spaces.action_space(space)
  assert isinstance(action, MultiDiscrete)
  assert set(action.num_actions) == {2}
  size = len(action.num_actions)
  draws = np.random.default_rng(0).integers(2, size=(50, size), dtype=np.int32)
  actions = spaces.to_library_action(space)(draws)
  assert all(space.contains(x) for x in actions)
  # A policy converts its actions on the device.
  actions = np.asarray(spaces.to_library_action(space)(jax.numpy.array(draws)))
  assert all(space.contains(x) for x in actions)


def test_integers_without_bounds_have_the_limits_of_their_dtype():
  space = _Space(-np.inf, np.inf, (1,), np.int32)
  assert space.high == 2**31 - 1  # gymnasium has no infinite integer.
  box = spaces.action_space(space)
  assert box.low == -np.inf and box.high == np.inf
  box = spaces.action_space(_Space(0, 255, (1,), np.uint8))
  assert box.low == 0 and box.high == 255


@pytest.mark.parametrize(
  'space,values,is_lost',
  [
    # The spacing of float32 is 128 near 1.7e9.
    (_Space(0, 1e12, (2,), np.float64), [1.7e9, 1.7e9 + 1], True),
    (_Space(0, 1e12, (2,), np.float64), [1.7e9, 1.7e9 + 200], False),
    (_Space(0, 2**62, (2,), np.int64), [2**40, 2**40 + 1], True),
    (_Space(2**40, 2**40 + 9, (2,), np.int64), [2**40, 2**40 + 1], False),
    # The last bits of 1 + 2e-16 may be rounding errors.
    (_Space(-9, 9, (2,), np.float64), [1.0, 1.0 + 2.3e-16], False),
    (_Space(-9, 9, (2,), np.float64), [1.0, 1.0 + 1e-9], True),
    (_Space(-9, 9, (2,), np.float64), [1.0, 1.0], False),
    (gymnasium.spaces.Discrete(3, start=2**40), [2**40, 2**40 + 1], False),
    # Integers of 32 bits, which a network sees as floats.
    (_Space(0, 2**31 - 1, (2,), np.int64), [10**9, 10**9 + 1], True),
    (_Space(0, 2**31 - 1, (2,), np.int32), [10**9, 10**9 + 1], True),
    (_Space(0, 2**31 - 1, (2,), np.int32), [10**6, 10**6 + 1], False),
  ],
)
def test_what_32_bits_do_not_show_is_warned_of_once(
  space, values, is_lost, capsys, monkeypatch
):
  monkeypatch.setattr(adapter, '_watched', set())

  class Steps(_Odd):
    def _observe(self):
      return np.full(space.shape, values[self.t % 2], space.dtype)

  gymnasium.register('Steps-v0', Steps, disable_env_checker=True)
  for _ in range(2):
    env = adapter.make('Steps-v0', 2, seed=0, space=space)
    env.reset()
    for _ in range(70):
      env.step(np.zeros(2, int))
    env.close()
  line = (
    'warning: Steps-v0: floats of 32 bits do not show the differences between '
    'its observations; subtract a constant in the environment\n'
  )
  assert capsys.readouterr().err == line * is_lost
