"""Tests gymnax: reset steps, truncation, dtypes, every environment."""

import subprocess
import sys

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.envs import SUITES
from podrl.envs import gymnax as adapter
from podrl.types import Box, Discrete

_DOWNLOADS = {'MNISTBandit-bsuite': 'downloads a data set when made'}
_NAMES = [n for n in gymnax.registered_envs if n not in _DOWNLOADS]


def _some_slow(names):
  """Marks as slow the environments that take seconds to compile."""
  slow = ('Asterix', 'Freeway', 'Seaquest', 'SpaceInvaders')
  return [
    pytest.param(x, marks=pytest.mark.slow) if x.startswith(slow) else x
    for x in names
  ]


def _single(env):
  """Returns the reset and step of one environment, without a batch axis."""

  def add(tree):
    return jax.tree.map(lambda x: x[None], tree)

  def drop(tree):
    return jax.tree.map(lambda x: x[0], tree)

  return (
    jax.jit(lambda key: drop(env.reset(add(key)))),
    jax.jit(lambda state, action: drop(env.step(add(state), add(action)))),
  )


def _rollout(env, num_steps, seed=0):
  """Acts at random in one program; returns the time steps."""
  reset_one, step_one = _single(env)

  def step(state, key):
    if isinstance(env.spec.action, Discrete):
      action = jax.random.randint(key, (), 0, env.spec.action.num_actions)
    else:
      action = jax.random.uniform(
        key, env.spec.action.shape, minval=-1.0, maxval=1.0
      )
    return step_one(state, action)

  @jax.jit
  def rollout(key):
    state, first = reset_one(key)
    _, rest = jax.lax.scan(step, state, jax.random.split(key, num_steps))
    return first, rest

  first, rest = jax.device_get(rollout(jax.random.key(seed)))
  return jax.tree.map(lambda a, b: np.concatenate([a[None], b]), first, rest)


def test_only_the_download_is_left_out():
  assert len(_NAMES) == len(gymnax.registered_envs) - 1 == 25


@pytest.mark.parametrize('name', _some_slow(_NAMES))
def test_every_environment(name):
  if name == 'Swimmer-misc':  # It adds arrays of different ranks.
    jax.config.update('jax_numpy_rank_promotion', 'allow')
  try:
    env = adapter.make(name)
    steps = _rollout(env, 300)
  finally:
    jax.config.update('jax_numpy_rank_promotion', 'raise')
  leaves, specs = map(jax.tree.leaves, (steps.obs, env.spec.obs))
  for x, spec in zip(leaves, specs, strict=True):
    assert x.shape[1:] == spec.shape and x.dtype == spec.dtype
  assert steps.reward.dtype == np.float32 == steps.discount.dtype
  assert steps.is_first[0] and steps.is_first.dtype == bool
  assert not np.any(steps.reward[steps.is_first])
  assert np.all(steps.discount[steps.is_first] == 1.0)
  assert set(np.unique(steps.discount)) <= {0.0, 1.0}
  # A reset step follows each termination, and no reset step follows another.
  assert np.all(steps.is_first[1:][steps.discount[:-1] == 0.0])
  assert not np.any(steps.is_first[1:] & steps.is_first[:-1])


@pytest.mark.parametrize(
  'name,scale',
  [
    ('FourRooms-misc', 11),  # Positions, which are integers.
    ('CartPole-v1', 1),
    ('Pendulum-v1', 1),  # A speed of up to 8 stays.
    ('Acrobot-v1', [1, 1, 1, 1, 4 * np.pi, 9 * np.pi]),
  ],
)
def test_observations_have_the_scale_of_their_bounds(name, scale):
  found = adapter.make(name).spec.obs_scale
  np.testing.assert_allclose(*np.broadcast_arrays(found, scale), rtol=1e-6)


@pytest.mark.parametrize('name', _some_slow(sorted(adapter._BINARY_OBS)))
def test_bool_images_lose_nothing(name):
  env, params = gymnax.make(name)

  def step(state, key):
    action = env.action_space(params).sample(key)
    obs, state, *_ = env.step(key, state, action, params)
    return state, obs

  @jax.jit
  def rollout(key):
    _, state = env.reset(key, params)
    return jax.lax.scan(step, state, jax.random.split(key, 500))[1]

  obs = rollout(jax.random.key(1))
  assert adapter.make(name).spec.obs.dtype == bool
  assert set(np.unique(obs)) <= {0.0, 1.0}


def test_truncation_keeps_the_last_observation_and_terminates_nothing():
  env = adapter.make('CartPole-v1', max_steps_in_episode=3)
  reset, step = _single(env)
  state, _ = reset(jax.random.key(0))
  steps = []
  for action in (0, 1, 0, 1, 0):
    state, timestep = step(state, jnp.int32(action))
    steps.append(timestep)
  assert [bool(s.is_first) for s in steps] == [False] * 3 + [True, False]
  assert [float(s.discount) for s in steps] == [1.0] * 5
  assert [float(s.reward) for s in steps] == [1.0, 1.0, 1.0, 0.0, 1.0]
  # gymnax computes the third observation from the second.
  gym, params = gymnax.make('CartPole-v1')
  key = jax.random.key(0)
  fields = type(state.env_state)(
    **dict(zip(('x', 'x_dot', 'theta', 'theta_dot'), steps[1].obs)), time=2
  )
  obs, *_ = gym.step_env(key, fields, 0, params)
  np.testing.assert_allclose(steps[2].obs, obs, atol=1e-6)


def test_termination_wins_over_truncation():
  # The last step of DeepSea is both terminated and truncated.
  steps = _rollout(adapter.make('DeepSea-bsuite'), 40)
  last = np.flatnonzero(steps.is_first[1:])
  assert last.size and np.all(steps.discount[last] == 0.0)


def test_the_environment_ignores_the_action_at_a_reset_step():
  env = adapter.make('Catch-bsuite')
  reset, step = _single(env)
  state, timestep = reset(jax.random.key(3))
  while not bool(state.is_last):
    state, timestep = step(state, jnp.int32(1))
  outcomes = [step(state, jnp.int32(a)) for a in range(3)]
  for outcome in outcomes[1:]:
    for a, b in zip(
      jax.tree.leaves(outcomes[0][1]), jax.tree.leaves(outcome[1])
    ):
      np.testing.assert_array_equal(a, b)
  assert bool(outcomes[0][1].is_first)


def test_episodes_start_differently():
  steps = _rollout(adapter.make('CartPole-v1'), 400)
  starts = steps.obs[steps.is_first]
  assert len(starts) > 5
  assert len(np.unique(starts, axis=0)) == len(starts)


def test_spaces():
  assert adapter.make('FrozenLake-misc').spec.obs.shape == (16,)
  box = adapter.make('Pendulum-v1').spec.action
  assert isinstance(box, Box) and box.low == [-2.0] and box.high == [2.0]


@pytest.mark.parametrize(
  'name,options,message',
  [
    ('CartPole-v2', {}, 'CartPole-v1'),
    ('zzz', {}, 'choose from'),
    ('MNISTBandit-bsuite', {}, 'downloads'),
    ('CartPole-v1', {'max_steps_in_episode': 0}, 'at least 1'),
    ('CartPole-v1', {'max_steps': 3}, 'max_steps_in_episode'),
    ('CartPole-v1', {'gravity': 'high'}, 'must be a number'),
  ],
)
def test_mistakes_are_named(name, options, message):
  with pytest.raises(ValueError, match=message):
    SUITES['gymnax'].make(name, **options)


def test_gymnax_imports_its_drawing_libraries_when_it_draws():
  code = """
import sys
import jax
from podrl.envs import gymnax
jax.config.update('jax_platforms', 'cpu')
library = gymnax.import_gymnax()
print(sorted({'matplotlib.pyplot', 'pandas', 'seaborn'} & set(sys.modules)))
import matplotlib
matplotlib.use('Agg')
env, params = library.make('Pong-misc')
_, state = env.reset_env(jax.random.key(0), params)
print(type(env.render(state, params)).__name__, 'seaborn' in sys.modules)
"""
  outcome = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert outcome.stdout.splitlines() == ['[]', 'AxesImage True']


def test_several_threads_import_gymnax():
  code = """if True:
    from concurrent.futures import ThreadPoolExecutor
    from podrl.envs.gymnax import import_gymnax
    with ThreadPoolExecutor(4) as executor:
      list(executor.map(lambda _: import_gymnax().make, range(4)))
  """
  subprocess.run([sys.executable, '-c', code], check=True)
