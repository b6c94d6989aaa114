"""Tests Anakin: unrolls, counters, independence of devices, a stop at a NaN."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podrl.core import learner as learner_lib
from podrl.drivers import anakin, spmd
from podrl.run import build
from podrl.types import (
  Agent,
  DeviceEnv,
  Discrete,
  EnvSpec,
  LossOutput,
  TimeStep,
  Variables,
)

# An episode has n steps with rewards 1, 2 ... n, then a reset step; `obs` is t.
_SPEC = EnvSpec(
  jax.ShapeDtypeStruct((), jnp.int32), False, Discrete(2), 1, 1000
)


def _counting_env(num_steps):
  def timestep(t, is_first):
    return TimeStep(
      t,
      jnp.where(is_first, 0.0, t.astype(jnp.float32)),
      jnp.where(t == num_steps, 0.0, 1.0),
      is_first,
    )

  def reset(rng_key):
    t = jnp.zeros((), jnp.int32)
    return t, timestep(t, jnp.ones((), bool))

  def step(t, action):
    t = jnp.where(t == num_steps, 0, t + 1)
    return t, timestep(t, t == 0)

  return DeviceEnv(_SPEC, jax.vmap(reset), jax.vmap(step))


def _agent(loss=lambda p: 0.0 * p):
  """Makes an agent that acts at random and keeps its key's bits and `obs`."""

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    bits = jax.vmap(lambda k: jax.random.bits(k, (), jnp.uint32))(rng_key)
    return (bits % 2).astype(jnp.int32), (bits, timestep.obs), carry

  return Agent(
    init=lambda key: Variables(jnp.zeros(()), (), {}),
    initial_carry=lambda n: (),
    act=act,
    prepare=lambda variables, target, sample, key, mean: sample.trajectory,
    loss=lambda variables, *rest: (loss(variables.params), LossOutput({})),
  )


def _spying_learner(agent):
  """Makes a learner whose memory is the last trajectory."""
  learner = learner_lib.make_learner(agent, optax.sgd(1.0))

  def init(key, example):
    del key
    zeros = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), example)
    return learner.init(jax.random.key(0), example)._replace(memory=zeros)

  def update(state, trajectory, key):
    state, metrics = learner.update(state, trajectory, key)
    return state._replace(
      memory=jax.tree.map(lambda x: x[None], trajectory)
    ), metrics

  axes = learner.split_axes._replace(memory=2)
  return learner._replace(init=init, update=update, split_axes=axes)


def _make(
  num_devices, num_steps=3, spy=False, loss=lambda p: 0.0 * p, **kwargs
):
  agent = _agent(loss)
  learner = (
    _spying_learner(agent)
    if spy
    else learner_lib.make_learner(agent, optax.sgd(1.0))
  )
  kwargs = {'num_envs': 4, 'unroll_length': 5, 'max_updates': 8} | kwargs
  return anakin.make_programs(
    _counting_env(num_steps),
    agent,
    learner,
    spmd.make_mesh(jax.devices()[:num_devices]),
    **kwargs,
  )


def test_an_unroll_is_fence_posts_and_rails():
  driver = _make(1, spy=True)
  state = driver.init(jax.random.key(0))
  seen = []
  for _ in range(3):
    state, _ = driver.train(state, np.int32(1))
    seen.append(jax.tree.map(lambda x: np.asarray(x[0]), state.learner.memory))
  for i, trajectory in enumerate(seen):
    np.testing.assert_array_equal(trajectory.num_steps, [[5 * i] * 4])
    np.testing.assert_array_equal(trajectory.env_index, [range(4)])
    steps = trajectory.timestep
    assert steps.obs.shape == (6, 4) and trajectory.action.shape == (5, 4)
    # Each action was chosen at the time step of its own row.
    np.testing.assert_array_equal(trajectory.extras[1], steps.obs[:-1])
  # The last time step of an unroll is also the first of the next.
  for before, after in zip(seen[:-1], seen[1:]):
    np.testing.assert_array_equal(
      before.timestep.obs[-1], after.timestep.obs[0]
    )
  # `obs` counts 0 1 2 3 in each episode, and unrolls leave out no time step.
  whole = np.concatenate([s.timestep.obs[:-1, 0] for s in seen])
  np.testing.assert_array_equal(whole, np.arange(15) % 4)


def test_each_unroll_keeps_what_was_carried_into_it():
  agent = _agent()

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    action, extras, _ = agent.act(variables, rng_key, timestep, carry)
    return action, extras, jnp.where(timestep.is_first, 0, carry) + 1

  counting = agent._replace(initial_carry=jnp.zeros_like, act=act)
  driver = anakin.make_programs(
    _counting_env(3),
    counting,
    _spying_learner(counting),
    spmd.make_mesh(jax.devices()[:2]),
    num_envs=4,
    unroll_length=5,
    max_updates=8,
  )
  state, carries = driver.init(jax.random.key(0)), []
  for _ in range(4):
    state, _ = driver.train(state, np.int32(1))
    carries.append(np.asarray(state.learner.memory.carry)[0, 0])
  # An episode and its reset step have 4 steps; unrolls start at steps 0 5 10
  # 15.
  np.testing.assert_array_equal(carries, np.repeat([[0], [1], [2], [3]], 4, 1))


def test_episodes_and_reset_steps_are_counted():
  driver = _make(2)
  state, records = driver.train(driver.init(jax.random.key(0)), np.int32(8))
  episodes = jax.tree.map(lambda x: np.asarray(x).sum(), records.episodes)
  # An episode has 3 steps and a reset step. So in 40 steps, each of the 4
  # environments has 10 reset steps. An episode returns 1 + 2 + 3.
  assert tuple(episodes) == (40, 40 * 6.0, 40 * 3)
  assert records.episodes.num_episodes.shape == (8, 2)


@pytest.mark.parametrize('num_devices', [2, 4])
def test_random_streams_do_not_depend_on_devices(num_devices):
  def bits(num_devices):
    driver = _make(num_devices, spy=True)
    state, _ = driver.train(driver.init(jax.random.key(7)), np.int32(2))
    return np.asarray(state.learner.memory.extras[0])

  one = bits(1)
  assert len(np.unique(one)) == one.size  # No two actions share a key.
  np.testing.assert_array_equal(bits(num_devices), one)


def test_calls_may_be_divided_in_any_way():
  def run(*calls):
    driver = _make(2, loss=lambda p: 0.1 * p**2 + p)
    state, rows = driver.init(jax.random.key(0)), []
    for num_updates in calls:
      state, records = driver.train(state, np.int32(num_updates))
      rows.append(np.asarray(records.metrics['loss'])[:num_updates])
    return np.asarray(state.learner.variables.params), np.concatenate(rows)

  whole, divided = run(7), run(1, 4, 0, 2)
  assert whole[0] != 0.0 and len(np.unique(whole[1])) == 7
  np.testing.assert_array_equal(whole[0], divided[0])
  np.testing.assert_array_equal(whole[1], divided[1])


def test_one_compilation_for_any_number_of_updates():
  events = []

  def listen(event, seconds, **_):
    events.append(event)

  driver = _make(2)
  state = driver.init(jax.random.key(0))
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    for num_updates in (0, 1, 5, 8):
      state, _ = driver.train(state, np.int32(num_updates))
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert sum('backend_compile' in event for event in events) == 1


def test_a_call_ends_at_the_update_whose_loss_is_not_finite():
  # sgd(1) on -p adds 1 to p in each update: the loss is infinite at p = 3.
  driver = _make(2, loss=lambda p: jnp.where(p >= 3.0, jnp.inf, -p))
  state, records = driver.train(driver.init(jax.random.key(0)), np.int32(8))
  assert not records.is_finite
  assert int(state.learner.num_updates) == 4
  np.testing.assert_array_equal(
    records.metrics['loss'][:4], [0.0, -1.0, -2.0, np.inf]
  )


@pytest.mark.parametrize('agent', ['dqn', 'r2d2'])
def test_the_compiled_program_does_not_copy_the_memory(agent):
  config = helpers.fields_of('anakin_catch', agent)
  config['num_devices'] = 1
  driver = build.make_run(config).driver
  programs = driver.programs
  state = programs.init(driver.rng_key, driver.hyperparams)
  text = programs.train.lower(state, np.int32(1)).compile().as_text()
  assert helpers.copies_of_memory(text, state.learner.memory) == 0
