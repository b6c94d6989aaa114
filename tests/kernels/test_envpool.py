"""Tests that compiled programs step envpool's environments as Python does."""

import gc
import weakref

import jax
import numpy as np
import pytest

from podrl.envs import envpool
from podrl.kernels import envpool as calls

_STEPS, _NUM_ENVS = 12, 3


def _make(name):
  return envpool.make(name, _NUM_ENVS, seed=3, max_episode_steps=5)


def _assert_equal(x, y):
  jax.tree.map(np.testing.assert_array_equal, x, y)


@pytest.mark.parametrize('name', ['CartPole-v1', 'HalfCheetah-v4'])
def test_a_program_steps_two_pools_as_python_does(name):
  envs, others = ([_make(name) for _ in range(2)] for _ in range(2))
  step = envs[0].xla.step  # It also steps the other pool.
  program = jax.jit(lambda state, actions: jax.lax.scan(step, state, actions))
  rng = np.random.default_rng(0)
  for env, other in zip(envs, others):
    _assert_equal(env.reset(), other.reset())
    calls = []
    state = env.xla.init(
      lambda calls=calls: calls.append('begin') or True,
      lambda calls=calls: calls.append('end'),
    )
    shape = (_STEPS, _NUM_ENVS, *getattr(env.spec.action, 'shape', ()))
    actions = rng.integers(2, size=shape, dtype=np.int32)
    if name == 'HalfCheetah-v4':
      actions = rng.uniform(-1, 1, size=shape).astype(np.float32)
    _, timesteps = program(state, actions)
    assert calls == ['begin', 'end'] * _STEPS
    assert timesteps.is_first.any() and not timesteps.is_first.all()
    for t, action in enumerate(actions):
      timestep = other.step(action)
      # JAX stores float64 as float32.
      obs = timestep.obs.astype(np.float32)
      _assert_equal(
        jax.tree.map(lambda x, t=t: x[t], timesteps),
        timestep._replace(obs=obs),
      )


def test_a_pool_does_not_step_if_begin_is_false():
  env, other = _make('CartPole-v1'), _make('CartPole-v1')
  env.reset(), other.reset()
  may_step = False

  def end():
    assert may_step

  state = env.xla.init(lambda: may_step, end)
  actions = np.zeros((_STEPS, _NUM_ENVS), np.int32)
  program = jax.jit(
    lambda state: jax.lax.scan(env.xla.step, state, actions)[1].obs
  )
  program(state)
  may_step = True
  np.testing.assert_array_equal(program(state)[0], other.step(actions[0]).obs)


def test_an_exception_in_a_hook_ends_the_program():
  env = _make('CartPole-v1')
  env.reset()

  def begin():
    raise OSError('the hook broke')

  state = env.xla.init(begin, lambda: None)
  action = np.zeros(_NUM_ENVS, np.int32)
  with pytest.raises(jax.errors.JaxRuntimeError, match='OSError: the hook'):
    jax.block_until_ready(jax.jit(env.xla.step)(state, action))


def test_a_closed_pool_does_not_wait_for_the_garbage_collector():
  class Owner:
    def __init__(self):
      self.env = _make('CartPole-v1')
      self.state = self.env.xla.init(self.begin, lambda: None)

    def begin(self):
      return True

  gc.collect()
  gc.disable()
  try:
    owner = Owner()
    owner.env.close()
    reference = weakref.ref(owner)
    del owner
    assert reference() is None
  finally:
    gc.enable()


def test_observations_have_32_bits_even_if_jax_has_64():
  env, other = _make('HalfCheetah-v4'), _make('HalfCheetah-v4')
  env.reset(), other.reset()
  action = np.zeros((_NUM_ENVS, 6), np.float32)
  with jax.enable_x64(True):
    state = env.xla.init(lambda: True, lambda: None)
    obs = jax.jit(env.xla.step)(state, action)[1].obs
  assert obs.dtype == np.float32
  np.testing.assert_array_equal(obs, other.step(action).obs)


def test_two_threads_may_register_the_same_handlers(monkeypatch):
  class Race(dict):
    def __contains__(self, target):
      return False  # The other thread is about to add it.

  _make('CartPole-v1')
  monkeypatch.setattr(calls, '_handlers', Race(calls._handlers))
  jax.devices()
  assert _make('CartPole-v1').xla


def test_there_is_no_program_if_the_layout_of_a_frame_is_unknown(monkeypatch):
  env = _make('CartPole-v1')
  assert env.xla.init(lambda: True, lambda: None)
  monkeypatch.setattr(calls, '_FRAME_SIZE', 0)
  assert env.xla.init(lambda: True, lambda: None) is None
