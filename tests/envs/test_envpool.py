"""Tests envpool tasks as a HostEnv: reset steps, spaces, seeds, mistakes."""

import contextlib
import warnings

import envpool
import jax
import numpy as np
import pytest

from podrl.envs import envpool as adapter
from podrl.types import Discrete


def _random_walk(
  name, num_steps, *, num_envs=4, seed=3, num_threads=1, **options
):
  """Acts at random; returns the pool, the time steps and the actions."""
  env = adapter.make(name, num_envs, seed, num_threads=num_threads, **options)
  rng = np.random.default_rng(0)
  actions = [
    rng.integers(env.spec.action.num_actions, size=num_envs)
    for _ in range(num_steps)
  ]
  timesteps = [env.reset(), *map(env.step, actions)]
  env.close()
  return env, timesteps, actions


def test_a_pool_gives_no_warnings():
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    adapter.make('CartPole-v1', 2, 0).close()


def test_reset_steps_are_where_envpool_resets():
  _, timesteps, actions = _random_walk('CartPole-v1', 40, max_episode_steps=6)
  # envpool counts the steps of an episode, and the count starts at 0.
  pool = envpool.make_gymnasium(
    'CartPole-v1', num_envs=4, seed=3, max_episode_steps=6
  )
  pool.reset()
  num_reset_steps = 0
  for action, timestep in zip(actions, timesteps[1:]):
    obs, reward, terminated, _, info = pool.step(action.astype(np.int32))
    is_first = info['elapsed_step'] == 0
    np.testing.assert_array_equal(timestep.obs, obs)
    np.testing.assert_array_equal(timestep.is_first, is_first)
    np.testing.assert_array_equal(
      timestep.reward, np.where(is_first, 0, reward)
    )
    np.testing.assert_array_equal(timestep.discount, 1.0 - terminated)
    num_reset_steps += is_first.sum()
  assert num_reset_steps >= 20  # In 40 steps, each of 4 has at least 5.


def test_truncation_keeps_its_discount_and_its_last_observation():
  _, timesteps, _ = _random_walk(
    'CartPole-v1', 4, max_episode_steps=3
  )  # The pole cannot fall in 3 steps.
  assert all((t.discount == 1).all() for t in timesteps)
  assert [t.is_first.all() for t in timesteps] == [
    True,
    False,
    False,
    False,
    True,
  ]
  last, first = timesteps[3].obs, timesteps[4].obs
  assert np.abs(first).max() <= 0.05 < np.abs(last).max()  # Starts are near 0.


def test_environments_are_seeded_one_by_one_whatever_the_threads():
  _, a, _ = _random_walk('CartPole-v1', 10, num_envs=4, seed=5)
  _, b, _ = _random_walk('CartPole-v1', 10, num_envs=4, seed=5, num_threads=2)
  _, c, _ = _random_walk('CartPole-v1', 10, num_envs=4, seed=6)
  np.testing.assert_array_equal(a[-1].obs, b[-1].obs)
  np.testing.assert_array_equal(a[0].obs[1:], c[0].obs[:-1])  # 5 + 1 = 6.


def test_an_atari_spec():
  spec = adapter.make_spec('Pong-v5')
  assert spec.obs == jax.ShapeDtypeStruct((4, 84, 84), np.uint8)
  assert spec.channels_first and spec.action == Discrete(6)
  assert (spec.frame_skip, spec.max_episode_steps) == (4, 27_000)
  small = adapter.make_spec('Pong-v5', img_height=42, img_width=40, stack_num=2)
  assert small.obs.shape == (2, 42, 40)
  assert (spec.frame_stack, small.frame_stack) == (4, 2)
  assert adapter.make_spec('CartPole-v1').frame_stack == 1
  assert not adapter.make_spec('CarRacing-v3').channels_first


def test_observations_have_the_scale_of_their_bounds():
  assert np.all(adapter.make_spec('Pong-v5').obs_scale == 255)
  assert np.all(adapter.make_spec('CartPole-v1').obs_scale == 1)
  np.testing.assert_allclose(  # Its speeds are below 4 pi and 9 pi.
    adapter.make_spec('Acrobot-v1').obs_scale,
    [1, 1, 1, 1, 4 * np.pi, 9 * np.pi],
    rtol=1e-6,
  )
  # The space of MiniGrid's image says 255, but it consists of categories.
  env, timesteps, _ = _random_walk('MiniGrid-DoorKey-5x5-v0', 100)
  scale = env.spec.obs_scale
  assert scale['image'] == 10 and np.all(scale['mission'] == 255)
  assert max(x.obs['image'].max() for x in timesteps) <= 10


@pytest.mark.parametrize(
  'options', [{}, {'episodic_life': True, 'gray_scale': False, 'stack_num': 3}]
)
def test_a_stack_moves_on_by_a_frame_or_repeats_one(options):
  size = {'img_height': 30, 'img_width': 20}
  env, timesteps, _ = _random_walk('Breakout-v5', 400, **size, **options)
  num_stacks, num_frames = 0, env.spec.frame_stack
  stacks = [x.obs.reshape(4, num_frames, -1, 30, 20) for x in timesteps]
  for last, stack in zip(stacks, stacks[1:]):
    moves_on = (stack[:, :-1] == last[:, 1:]).all((1, 2, 3, 4))
    repeats = (stack == stack[:, -1:]).all((1, 2, 3, 4))
    assert (moves_on | repeats).all()
    num_stacks += (~repeats).sum()
  assert num_stacks > 1000
  assert sum(x.is_first.sum() for x in timesteps) > 8


@pytest.mark.parametrize(
  'name', ['FrozenLake-v1', 'Taxi-v3', 'Blackjack-v1', 'MiniGrid-Empty-5x5-v0']
)
def test_observations_become_what_the_spec_says(name):
  env, timesteps, _ = _random_walk(name, 3)
  obs = jax.jit(env.spec.observe)(timesteps[-1].obs)
  jax.tree.map(
    lambda x, spec: np.testing.assert_equal(
      (x.shape, x.dtype), ((4, *spec.shape), spec.dtype)
    ),
    obs,
    env.spec.obs,
  )


def test_the_terms_of_a_robots_reward_are_reported():
  env = adapter.make('Go1JoystickFlatTerrain-v1', 2, 0)
  with contextlib.closing(env):
    env.reset()
    for _ in range(5):
      timestep = env.step(np.zeros((2, 12), np.float32))
  assert {x.dtype for x in timestep.info.values()} == {np.dtype('float32')}
  assert all(name.startswith('reward_') for name in timestep.info)
  # MuJoCo Playground: dt times the sum of the terms, and not below 0.
  total = 0.02 * sum(timestep.info.values())
  assert np.all(total > 0)
  np.testing.assert_allclose(timestep.reward, total, rtol=1e-5)


def test_a_category_is_one_hot():
  env, timesteps, _ = _random_walk('FrozenLake-v1', 5)
  for timestep in timesteps:
    obs = np.asarray(env.spec.observe(timestep.obs))
    expected = np.zeros((4, 16), bool)
    expected[np.arange(4), np.ravel(timestep.obs)] = True
    np.testing.assert_array_equal(obs, expected)


@pytest.mark.parametrize(
  'name,options,message',
  [
    ('Pong-v55', {}, 'did you mean Pong-v5'),
    ('Pong-v5', {'img_hight': 3}, 'img_height'),
    ('Pong-v5', {'img_height': 'x'}, 'not of type int'),
    ('Pong-v5', {'img_height': 1.5}, 'not of type int'),
    ('Pong-v5', {'episodic_life': 2}, 'not of type bool'),
    ('Pong-v5', {'num_envs': 3}, 'not an option'),
    ('Pong-v5', {'task': 'foo'}, 'not an option'),
    ('Pong-v5', {'name': 'foo'}, 'not an option'),
    ('Pong-v5', {'stack_num': 0}, 'from 1'),
    ('Pong-v5', {'frame_skip': 0}, 'from 1'),
    ('Pong-v5', {'noop_max': 0}, 'from 1'),
    ('Pong-v5', {'repeat_action_probability': 1.5}, 'from 0 to 1'),
    ('FrozenLake-v1', {'size': 5}, '4 or 8'),
    ('CartPole-v1', {'max_episode_steps': -5}, 'from 1'),
    ('CartPole-v1', {'max_episode_steps': 1e12}, 'from 1'),
    ('Go9x9-v1', {}, '2 players'),
  ],
)
def test_mistakes(name, options, message):
  with pytest.raises(ValueError, match=message) as error:
    adapter.make_spec(name, **options)
  assert '\n' not in str(error.value)
