"""Tests gymnasium environments as a HostEnv."""

import signal

import gymnasium
import jax
import numpy as np
import pytest

from podrl.envs import gymnasium as adapter
from podrl.envs import joints, spaces
from podrl.types import Box, Discrete, MultiDiscrete


def test_steps_and_joints_are_those_of_single_environments():
  env = adapter.make('CartPole-v1', 3, seed=7, max_episode_steps=5)
  timestep, rng = env.reset(), np.random.default_rng(0)
  singles = [
    gymnasium.make('CartPole-v1', max_episode_steps=5) for _ in range(3)
  ]
  expected = [single.reset(seed=7 + i)[0] for i, single in enumerate(singles)]
  is_over = [False] * 3
  np.testing.assert_array_equal(timestep.obs, expected)
  num_joints = 0
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
        num_joints += 1
      else:
        obs, reward, terminated, truncated, _ = single.step(action[i])
        is_over[i] = terminated or truncated
      np.testing.assert_array_equal(timestep.obs[i], obs)
      assert timestep.reward[i] == reward
      assert timestep.discount[i] == 1.0 - terminated
  assert num_joints >= 9  # Each of 3 environments has at least 3.
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
    ('no info', 'reset: '),
    ('four values', 'step: ValueError: '),
    ('another shape', 'step: ValueError: '),
    ('no observation', 'step: '),
    ('several rewards', 'step: ValueError: '),
    (KeyError('leg'), "step: KeyError: 'leg'"),
    (SystemExit(0), 'step: SystemExit: 0'),
    (KeyboardInterrupt(), 'step: KeyboardInterrupt'),
  ],
)
def test_a_failure_names_the_environment(fault, message, monkeypatch):
  gymnasium.register('Faulty-v0', _Faulty, disable_env_checker=True)
  # A run replaces Python's handler of Ctrl-C.
  monkeypatch.setattr(signal, 'getsignal', lambda number: None)
  env = adapter.make('Faulty-v0', 2, seed=0, fault=fault)
  with pytest.raises(joints.EnvironmentFailed) as error:
    env.reset()
    for _ in range(2):
      env.step(np.zeros(2, int))
  text = str(error.value)
  assert text.startswith(f'environment Faulty-v0 failed in {message}')
  assert '\n' not in text and error.value.__cause__ is not None


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
