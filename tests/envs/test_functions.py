"""Tests the user's own functions as environments."""

import sys

import numpy as np
import pytest

from podrl.envs import SUITES, functions


@pytest.fixture
def module(tmp_path, monkeypatch):
  text = """
import jax, jax.numpy as jnp
from podrl.envs import autoreset
from podrl.types import DeviceEnv, Discrete, EnvSpec
number = 3
walks = []

def count(length=4) -> DeviceEnv:
  def reset(rng_key):
    return jnp.zeros(1), jnp.int32(0)

  def step(rng_key, x, action):
    x = x + 1
    return jnp.ones(1) * x, x, action + 0.5, x == length, False

  obs = jax.ShapeDtypeStruct((1,), jnp.float32)
  spec = EnvSpec(obs, False, Discrete(2), 1, length)
  return autoreset.make_device_env(spec, reset, step)

def wrong() -> DeviceEnv:
  return 1

def silent():
  walks.append(1)

def other() -> int:
  return walks.append(1)

def later(length=4) -> 'types.DeviceEnv':
  return count(length)

def whole() -> DeviceEnv:
  env = count()

  def reset(rng_key):
    return jnp.full(3, 0), env.reset(rng_key)[1]

  def step(state, action):
    return jnp.full(3, 0), env.reset(jax.random.split(jax.random.key(0), 3))[1]

  return DeviceEnv(env.spec, reset, step)

def narrow(method='reset') -> DeviceEnv:
  env = count()

  def cut(step):
    return step[0], step[1]._replace(obs=step[1].obs[:, :0])

  changed = lambda *arguments: cut(getattr(env, method)(*arguments))
  return env._replace(**{method: changed})

def failing() -> DeviceEnv:
  def reset(rng_key):
    raise KeyError('the left leg')

  return count()._replace(reset=reset)

class Kind:
  pass
"""
  (tmp_path / 'counting_envs.py').write_text(text)
  monkeypatch.syspath_prepend(tmp_path)


def test_an_option_is_an_argument_of_the_function(module):
  import jax

  assert SUITES['jax'].make_spec('counting_envs:count').max_episode_steps == 4
  env = functions.make('counting_envs:count', length=2)
  state, _ = env.reset(jax.random.split(jax.random.key(0), 3))
  steps = []
  for _ in range(3):
    state, timestep = env.step(state, np.ones(3, np.int32))
    steps.append(timestep)
  np.testing.assert_array_equal([x.reward[0] for x in steps], [1.5, 1.5, 0.0])
  np.testing.assert_array_equal([x.discount[0] for x in steps], [1, 0, 1])
  np.testing.assert_array_equal([x.is_first[0] for x in steps], [0, 0, 1])


def test_a_batch_of_weakly_typed_numbers_compiles_only_once(module):
  import jax

  env = functions.make('counting_envs:whole')
  state, _ = env.reset(jax.random.split(jax.random.key(0), 3))
  assert not state.weak_type
  state, _ = env.step(state, np.ones(3, np.int32))
  assert not state.weak_type


@pytest.mark.parametrize(
  'name,options,message',
  [
    ('counting_envs', {}, 'must be MODULE:FUNCTION'),
    ('no_such_module:walk', {}, 'no_such_module cannot be imported'),
    ('counting_envs:counts', {}, 'has no function counts.*count'),
    ('counting_envs:number', {}, 'has no function number'),
    ('counting_envs:silent', {}, r'write def silent\(...\) -> DeviceEnv$'),
    ('counting_envs:other', {}, r'write def other\(...\) -> DeviceEnv$'),
    ('counting_envs:Kind', {}, r'write def Kind\(...\) -> DeviceEnv$'),
    ('os:system', {'command': 'true'}, 'calls system only if it is a Python'),
    ('os:getcwd', {}, 'calls getcwd only if it is a Python function'),
    ('counting_envs:wrong', {}, 'must return a DeviceEnv, not a int'),
    ('counting_envs:count', {'size': 1}, 'count failed: TypeError'),
    (
      'counting_envs:narrow',
      {},
      r'reset returns observations of shape \(1, 0\) .* says \(1, 1\)$',
    ),
    ('counting_envs:failing', {}, "reset failed: KeyError: 'the left leg'"),
  ],
)
def test_a_mistake_is_explained(module, name, options, message):
  with pytest.raises(ValueError, match=message):
    functions.make(name, **options)
  called = getattr(sys.modules.get('counting_envs'), 'walks', [])
  assert called == []


def test_the_shape_of_a_steps_observation_is_checked(module):
  import jax

  env = functions.make('counting_envs:narrow', method='step')
  state, _ = env.reset(jax.random.split(jax.random.key(0), 2))
  with pytest.raises(ValueError, match=r'step returns .* shape \(2, 0\)'):
    env.step(state, np.ones(2, np.int32))


def test_an_annotation_may_be_a_text(module):
  assert functions.make('counting_envs:later').spec.max_episode_steps == 4
