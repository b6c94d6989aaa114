"""Tests reset steps: batches of JAX environments, time steps on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.envs import SUITES, autoreset, spaces
from podrl.types import Discrete, EnvSpec

_SPEC = EnvSpec(jax.ShapeDtypeStruct((), jnp.int32), False, Discrete(2), 1, 0)


def _counter(terminates, truncates):
  """Makes an environment that counts 3 steps from a random start."""

  def reset(rng_key):
    start = jax.random.randint(rng_key, (), 100, 1000)
    return start, (start, 0)

  def step(rng_key, state, action):
    del rng_key
    start, t = state
    t = t + 1
    is_over = t == 3
    obs = start + t + 10 * action
    return obs, (start, t), t, is_over & terminates, is_over & truncates

  return autoreset.make_device_env(_SPEC, reset, step)


def _unroll(env, action, num_steps=8, num_envs=2):
  state, first = env.reset(jax.random.split(jax.random.key(0), num_envs))
  steps, step = [first], jax.jit(env.step)
  for _ in range(num_steps):
    state, timestep = step(state, jnp.full(num_envs, action))
    steps.append(timestep)
  return jax.tree.map(lambda *x: np.stack(x), *steps)


@pytest.mark.parametrize(
  'terminates,truncates', [(True, False), (False, True), (True, True)]
)
def test_a_device_env_has_reset_steps(terminates, truncates):
  steps = _unroll(_counter(terminates, truncates), 0)
  is_first, last = np.zeros((9, 2), bool), [3, 7]
  is_first[[0, 4, 8]] = True
  np.testing.assert_array_equal(steps.is_first, is_first)
  reward = np.float32([0, 1, 2, 3] * 2 + [0])
  np.testing.assert_array_equal(steps.reward, np.stack([reward] * 2, 1))
  assert steps.reward.dtype == steps.discount.dtype == np.float32
  # Termination wins over truncation.
  np.testing.assert_array_equal(steps.discount[last], 1.0 - terminates)
  assert np.delete(steps.discount, last, 0).all()
  # All 6 episodes (3 in each environment) have different starts.
  assert len(np.unique(steps.obs[is_first])) == 6
  np.testing.assert_array_equal(steps.obs[last] - steps.obs[[0, 4]], 3)


@pytest.mark.parametrize('reset_chunk', [0, 1])
def test_the_info_is_that_of_the_state(reset_chunk):
  def reset(rng_key):
    return jnp.int32(0), jnp.int32(0)

  def step(rng_key, t, action):
    return t + 1, t + 1, 0.0, t == 2, False

  def info(t):
    return {'t': t, 'is_late': t == jnp.int32([3])}

  env = autoreset.make_device_env(
    _SPEC, reset, step, reset_chunk=reset_chunk, info=info
  )
  steps = _unroll(env, 0)
  expected = np.stack([[0, 1, 2, 3] * 2 + [0]] * 2, 1)
  np.testing.assert_array_equal(steps.info['t'], expected)
  np.testing.assert_array_equal(steps.info['is_late'], expected == 3)
  assert steps.info['t'].dtype == steps.info['is_late'].dtype == np.float32
  wrong = autoreset.make_device_env(
    _SPEC, reset, step, info=lambda t: {'many': jnp.zeros(3)}
  )
  with pytest.raises(ValueError, match="the info 'many' of one .* shape .3,"):
    _unroll(wrong, 0)


def test_the_action_at_a_reset_step_is_ignored():
  a, b = (_unroll(_counter(True, False), action) for action in (0, 1))
  np.testing.assert_array_equal(a.obs[a.is_first], b.obs[a.is_first])
  np.testing.assert_array_equal(b.obs[~a.is_first] - a.obs[~a.is_first], 10)


def test_an_environments_stream_does_not_depend_on_the_batch():
  env = _counter(True, False)
  keys = jax.random.split(jax.random.key(0), 4)
  for size in (1, 4):
    state, first = env.reset(keys[:size])
    steps, step = [first.obs[0]], jax.jit(env.step)
    for _ in range(8):
      state, timestep = step(state, jnp.zeros(size, jnp.int32))
      steps.append(timestep.obs[0])
    if size == 1:
      expected = steps
  np.testing.assert_array_equal(steps, expected)


def test_the_table_of_suites():
  assert {k: v.architecture for k, v in SUITES.items()} == {
    'gymnax': 'anakin',
    'envpool': 'sebulba',
    'gymnasium': 'sebulba',
    **dict.fromkeys(
      'pgx navix xminigrid jumanji brax craftax playground jax'.split(),
      'anakin',
    ),
  }
  for name in ('gymnax', 'envpool', 'gymnasium'):
    suite = SUITES[name]
    assert suite.package == name and 'CartPole-v1' in suite.names()
    spec = suite.make_spec('CartPole-v1')
    assert spec.obs.shape == (4,) and spec.action == Discrete(2)


@pytest.mark.parametrize('chunk', [1, 2, 3, 5, 16])
def test_resets_in_chunks_are_the_same_resets(chunk):
  """Resets five environments whose episodes end at random times."""

  def reset(rng_key):
    start = jax.random.randint(rng_key, (), 0, 10**6)
    return start, (start, jnp.int32(0))

  def step(rng_key, state, action):
    ends = jax.random.bernoulli(rng_key, 0.4)
    obs = state[0] + action
    return obs, (obs, state[1] + 1), obs, ends, state[1] >= 3

  results = []
  for size in (0, chunk):
    env = autoreset.make_device_env(_SPEC, reset, step, reset_chunk=size)
    state, first = env.reset(jax.random.split(jax.random.key(1), 5))
    actions = jnp.ones((30, 5), jnp.int32)
    results.append((first, jax.lax.scan(env.step, state, actions)))
  (_, (_, steps)), _ = results
  counts = np.sum(steps.is_first, 1)
  assert {0, 1, 2, 3} <= set(counts.tolist())
  jax.tree.map(np.testing.assert_array_equal, *map(_data, results))


def test_an_observation_without_elements_is_said():
  def reset(rng_key):
    return {'x': jnp.zeros(3), 'y': jnp.zeros((0, 2))}, ()

  with pytest.raises(ValueError, match=r"observation\['y'\] has the shape"):
    spaces.device_spec(reset, Discrete(2), 0)


def test_arrays_without_elements_are_not_in_the_state():
  def reset(rng_key):
    return jnp.int32(0), {'none': jnp.zeros((0, 3)), 'steps': jnp.int32(0)}

  def step(rng_key, state, action):
    del rng_key, action
    assert state['none'].shape == (0, 3)
    steps = state['steps'] + 1
    return steps, {**state, 'steps': steps}, steps, False, steps == 3

  def render(state):
    return np.full((1, 1, 3), state['steps'] + state['none'].size, np.uint8)

  for chunk in (0, 2):
    env = autoreset.make_device_env(
      _SPEC, reset, step, reset_chunk=chunk, render=render
    )
    state, _ = env.reset(jax.random.split(jax.random.key(0), 2))
    for _ in range(2):
      state, steps = jax.jit(env.step)(state, jnp.zeros(2, jnp.int32))
    assert all(x.size for x in jax.tree.leaves(state))
    np.testing.assert_array_equal(steps.obs, [2, 2])
    np.testing.assert_array_equal(env.render(state), [[[2, 2, 2]]])


def test_a_state_of_python_numbers_compiles_only_once():
  env = _counter(True, False)
  state, _ = env.reset(jax.random.split(jax.random.key(0), 2))
  step = jax.jit(env.step)
  for _ in range(2):
    state, _ = step(state, jnp.zeros(2, jnp.int32))
  assert step._cache_size() == 1


@pytest.mark.parametrize('chunk', [0, 2])
def test_a_state_that_becomes_fractional_is_said(chunk):
  def reset(rng_key):
    return jnp.int32(0), {'x': 0}

  def step(rng_key, state, action):
    return action, {'x': state['x'] + 0.5}, 0.0, False, False

  env = autoreset.make_device_env(_SPEC, reset, step, reset_chunk=chunk)
  state, _ = env.reset(jax.random.split(jax.random.key(0), 2))
  with pytest.raises(ValueError, match=r"\['x'\] .* is int32 after `reset`"):
    env.step(state, jnp.zeros(2, jnp.int32))


def _one_step(chunk, shape=(), reward=0.0, end=False):
  """Steps 2 environments that return these values."""

  def step(rng_key, state, action):
    return jnp.broadcast_to(action, shape), state, reward, end, end

  env = autoreset.make_device_env(
    _SPEC, lambda rng_key: (jnp.int32(0), 0), step, reset_chunk=chunk
  )
  state, _ = env.reset(jax.random.split(jax.random.key(0), 2))
  return env.step(state, jnp.zeros(2, jnp.int32))[1]


@pytest.mark.parametrize('chunk', [0, 2])
def test_a_reward_may_be_an_array_of_one_number(chunk):
  timestep = _one_step(chunk, reward=jnp.array([3]), end=jnp.array([[True]]))
  np.testing.assert_array_equal(timestep.reward, [3.0, 3.0])
  np.testing.assert_array_equal(timestep.discount, [0.0, 0.0])
  assert timestep.obs.shape == timestep.is_first.shape == (2,)


@pytest.mark.parametrize('chunk', [0, 2])
@pytest.mark.parametrize(
  'values,message',
  [
    (
      {'reward': jnp.zeros(2)},
      r'the reward of .* shape \(2,\); it must be one',
    ),
    ({'end': jnp.zeros(0)}, r'the terminated of .* has shape \(0,\)'),
    ({'shape': (1,)}, r'shape \(\) after `reset`, but \(1,\) after `step`'),
  ],
)
def test_a_wrong_shape_is_said(values, message, chunk):
  with pytest.raises(ValueError, match=message):
    _one_step(chunk, **values)


def _data(tree):
  """Returns a tree with the numbers of its random keys."""
  return jax.tree.map(
    lambda x: (
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ),
    tree,
  )
