"""Tests Sebulba with envpool: determinism, lag, reset steps, failures."""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podrl import signals
from podrl.core.learner import make_learner
from podrl.drivers import actor as actor_lib
from podrl.drivers import anakin, sebulba, spmd
from podrl.drivers.exchange import Closed
from podrl.envs import envpool, gymnax
from podrl.kernels import envpool as calls
from podrl.run import build, train
from podrl.run import devices as layout
from podrl.run.config import as_config, default_fields
from podrl.types import DEVICE_AXIS, Trajectory

_T, _NUM_ENVS, _EPISODE = 8, 8, 5


def _config(agent='ppo', **options):
  config = default_fields(agent, 'Sebulba')
  config['env.name'] = 'CartPole-v1'
  config['env.num_envs'] = 2 * _NUM_ENVS
  # An episode and its reset step have at most 6 steps, so each unroll has reset
  # steps.
  config['env.options'].update(options or {'max_episode_steps': _EPISODE})
  config['unroll_length'] = _T
  config['network.hidden_sizes'] = (8,)
  config['eval.num_episodes'] = 2
  config['sebulba.threads_per_actor_device'] = 2
  config['sebulba.actor_devices'] = (3,)
  config['sebulba.learner_devices'] = (0, 1)
  return config


def _with_memory(config, core='gru'):
  """Turns on all that an agent may carry from step to step."""
  config['network.recurrent'] = core
  config['network.memory_steps'] = 3 * (core == 'gtrxl')
  config['agent.normalize_observation'] = True
  config['agent.normalize_reward'] = True
  return config


def _agent(config):
  spec = envpool.make_spec(config['env.name'], **config['env.options'])
  return build.make_agent(config, spec)


def _make_env(index, sleep=lambda index: 0.0, fail_at=None, error=OSError):
  """Makes a pool of CartPole that may sleep before a step, or fail at one."""
  env = envpool.make(
    'CartPole-v1', _NUM_ENVS, index * _NUM_ENVS, max_episode_steps=_EPISODE
  )
  steps = iter(range(10**9))

  def step(action):
    time.sleep(sleep(index))
    if next(steps) == fail_at:
      raise error('the environment broke')
    return env.step(action)

  return env._replace(step=step, xla=None)


def _index_of(seeds):
  """Returns whose pool has these seeds, in a run of two actors and seed 0."""
  return int(np.ravel(seeds)[0] != build.env_seed(0, 0, 0))


def _driver(
  make_env=_make_env,
  *,
  agent_name='ppo',
  deterministic=True,
  max_lag=1,
  num_actors=2,
  unrolls_per_update=2,
  num_learners=2,
  num_actor_devices=1,
  hang_seconds=60.0,
  loss=None,
  agent=None,
  is_sliced=False,
):
  agent = agent or _agent(_config(agent_name))
  if loss:
    agent = agent._replace(loss=loss)
  learner = make_learner(agent, optax.adam(1e-2), num_epochs=2)
  devices = jax.devices()
  settings = sebulba.Settings(
    num_envs=_NUM_ENVS,
    unroll_length=_T,
    actors_per_device=num_actors // num_actor_devices,
    unrolls_per_update=unrolls_per_update,
    deterministic=deterministic,
    max_lag=max_lag,
    hang_seconds=hang_seconds,
    is_sliced=is_sliced,
  )
  return sebulba.Sebulba(
    make_env,
    agent,
    learner,
    spmd.make_mesh(devices[:num_learners]),
    devices[-num_actor_devices:],
    settings,
    jax.random.key(0),
  )


def _advance(driver, num_updates):
  """Runs `num_updates` updates and returns their reports."""
  reports = []
  while num_updates:
    reports += driver.advance(num_updates)
    num_updates -= reports[-1].num_updates
  return reports


def _podrl_threads():
  return [t.name for t in threading.enumerate() if t.name.startswith('podrl')]


@pytest.mark.parametrize(
  'max_lag,core',
  [
    (1, 'gru'),
    helpers.slow(0, ''),
    helpers.slow(1, ''),
    helpers.slow(1, 'lru'),
    helpers.slow(1, 'gtrxl'),
  ],
)
def test_deterministic_runs_are_bitwise_equal(max_lag, core):
  config = _with_memory(_config(), core) if core else _config()

  def params(seed):
    rng = np.random.default_rng(seed)  # Each run has other delays.
    driver = _driver(
      lambda i: _make_env(i, lambda _: rng.exponential(0.001)),
      max_lag=max_lag,
      agent=_agent(config),
    )
    driver.start()
    reports = _advance(driver, 20)
    outcome = jax.device_get(driver.learner_state.variables.params)
    assert driver.close() == [] and not _podrl_threads()
    lags = np.concatenate([r.own['policy_lag'] for r in reports])
    np.testing.assert_array_equal(lags, np.minimum(np.arange(20), max_lag))
    assert sum(r.episodes.num_episodes.sum() for r in reports) > 20
    return outcome

  for x, y in zip(*map(jax.tree.leaves, (params(0), params(1)))):
    np.testing.assert_array_equal(x, y)


def test_a_run_with_slices_has_the_same_records(monkeypatch):
  def run(is_sliced):
    driver = _driver(is_sliced=is_sliced)
    driver.start()
    assert ('update' in driver._programs) != is_sliced
    reports = [driver.advance(4, driver.plan())[0] for _ in range(3)]
    assert driver.plan()['num_slices'] == 2  # Both optimiser steps.
    monkeypatch.setattr(sebulba, '_SLICE_SECONDS', 60.0)
    assert driver.plan()['num_slices'] == 1
    outcome = jax.device_get(driver.learner_state.variables.params)
    assert driver.close() == []
    records = [(x.metrics, x.episodes, x.own['policy_lag']) for x in reports]
    return records, outcome

  outcomes = []
  for is_sliced in (False, True):
    monkeypatch.setattr(sebulba, '_SLICE_SECONDS', 1e-9)
    outcomes.append(run(is_sliced))
  jax.tree.map(np.testing.assert_array_equal, *outcomes)


def test_an_inference_waits_behind_an_update():
  driver = _driver(num_learners=1)
  driver.start()
  actor, clock = driver._actors[0], driver._actors[0].clock
  driver.stop()
  assert driver.close() == []
  before = actor.seconds()['behind_update']
  actor._free = 0, 0.0
  for is_updating, seconds in (
    (True, 9.0),  # How long an inference takes is not known yet.
    (False, 1.0),
    (False, 3.0),
    (True, 7.0),
    (True, 1.5),
  ):
    actor._add_inference(is_updating, seconds)
  # The mean of the inferences without an update is 2.
  waited = (7.0 - 2.0) + (1.5 - 2.0)
  assert actor.seconds()['behind_update'] - before == waited
  # The learner's device is another one, so nothing waited.
  assert before == 0.0 and not clock.is_updating


@pytest.mark.parametrize(
  'platform,num_devices,expected',
  [('cuda', 1, True), ('cuda', 2, False), ('cpu', 1, False)],
)
def test_an_update_is_sliced_where_an_accelerator_also_acts(
  platform, num_devices, expected
):
  Device = collections.namedtuple('Device', 'platform process_index id')
  local = [Device(platform, 0, i) for i in range(num_devices)]
  config = _config()
  config['sebulba.actor_devices'] = config['sebulba.learner_devices'] = ()
  config['env.num_envs'] = 64
  plan = layout.make_layout(
    config, build.make_spec(config), layout.Machine(local, 0, 2)
  )
  assert plan.is_sliced == expected


def test_runs_actors_processes_and_resumes_share_no_environments(monkeypatch):
  seeds, mesh = [], spmd.make_mesh(jax.devices()[:1])
  monkeypatch.setattr(
    build, 'make_host_env', lambda c, num_envs, seed, *_: seeds.append(seed)
  )
  monkeypatch.setattr(spmd, 'make_mesh', lambda devices: mesh)
  fields = 'platform process_index id'
  Device = collections.namedtuple('Device', fields)
  hosts = [Device('cpu', process, process) for process in range(2)]
  config = _config()
  config['sebulba.actor_devices'] = config['sebulba.learner_devices'] = (0,)
  config['env.num_envs'] = 64

  def pools(seed, num_resumes, process, num_actors=2):
    config['seed'] = seed
    config['sebulba.threads_per_actor_device'] = num_actors
    seeds.clear()
    machine = layout.Machine(hosts, process, 2)
    driver = build.make_run(config, num_resumes, machine).driver
    for actor in range(num_actors):
      driver.make_env(actor)
    return [list(x) for x in seeds]

  found = []
  for seed, num_resumes in [*((i, 0) for i in range(21)), (100, 0), (101, 0)]:
    for process in range(2):
      found += pools(seed, num_resumes, process)
  for num_resumes in (1, 2):
    found += pools(100, num_resumes, 0)
  assert len(found) == 23 * 4 + 4 and {len(x) for x in found} == {16}
  numbers = np.concatenate(found)
  assert len(np.unique(numbers)) == numbers.size  # 1,536 of 2**31.
  assert numbers.min() >= 0 and 2**30 < numbers.max() < 2**31
  # They are the same in each start, and for any number of actors.
  (whole,) = pools(7, 0, 1, num_actors=1)
  assert whole == sum(pools(7, 0, 1), []) == sum(found[30:32], [])


def test_environments_of_neighbouring_seeds_differ():
  def observations(seed):
    config = _config(max_episode_steps=100)
    config['seed'] = seed
    pool = build.make_run(config).driver.make_env(0)
    steps = [pool.reset()]
    action = np.zeros(_NUM_ENVS, np.int32)
    steps += [pool.step(action) for _ in range(5)]
    pool.close()
    return np.stack([x.obs for x in steps], 1)

  runs = [observations(seed) for seed in (100, 101, 100)]
  np.testing.assert_array_equal(runs[0], runs[2])
  starts = np.concatenate(runs[:2])
  for i, j in np.ndindex(2 * _NUM_ENVS, 2 * _NUM_ENVS):
    assert i == j or not np.any(starts[i] == starts[j])


def test_actors_on_two_devices_learn_as_on_one():
  def params(num_actor_devices):
    driver = _driver(num_actor_devices=num_actor_devices)
    driver.start()
    _advance(driver, 5)
    outcome = jax.device_get(driver.learner_state.variables.params)
    assert driver.close() == []
    return outcome

  for x, y in zip(*map(jax.tree.leaves, (params(1), params(2)))):
    np.testing.assert_array_equal(x, y)


def test_unrolls_do_not_depend_on_how_they_are_stacked(monkeypatch):
  agent = _agent(_config())
  _, unrolls = _unrolls(agent)
  monkeypatch.setattr(actor_lib, '_STACKED', 3)
  _, others = _unrolls(agent)
  for x, y in zip(unrolls, others):
    jax.tree.map(np.testing.assert_array_equal, x.shards, y.shards)


def test_an_update_orders_its_unrolls_by_actor(monkeypatch):
  driver = _driver(deterministic=False)
  take, join, first = driver._take, spmd.join_shards, []

  def join_shards(shards, *arguments):
    first.append(int(shards[0].env_index[0, 0]))
    return join(shards, *arguments)

  # The second actor is the first to deliver.
  def take_backwards():
    taken, dropped = take()
    return sorted(taken, key=lambda x: -x.actor), dropped

  monkeypatch.setattr(driver, '_take', take_backwards)
  driver.start()
  monkeypatch.setattr(spmd, 'join_shards', join_shards)
  _advance(driver, 3)
  assert driver.close() == []
  pairs = list(zip(first[::2], first[1::2]))
  assert len(pairs) == 3 and all(x <= y for x, y in pairs)
  assert any(x < y for x, y in pairs)


def test_every_environment_is_freed_though_one_raises(capsys):
  freed = []

  def make_env(index):
    def close():
      freed.append(index)
      raise OSError('not freed')

    return _make_env(index)._replace(close=close)

  driver = _driver(make_env)
  driver.start()
  assert driver.close() == [] and freed == [0, 1]
  assert capsys.readouterr().err.count('OSError: not freed') == 2


def test_environments_that_cannot_be_reset_are_freed():
  freed = []

  def make_env(index):
    def reset():
      raise OSError('not reset')

    return _make_env(index)._replace(
      reset=reset, close=lambda: freed.append(index)
    )

  driver = _driver(make_env)
  with pytest.raises(OSError, match='not reset'):
    driver.start()
  assert driver.close() == [] and freed == [0, 1]


def _actor(agent, env, num_shards=1):
  """Makes an actor that is ready to act, and its parameters."""
  functions = actor_lib.make_actor_functions(
    agent, env.spec.observe, num_shards, env.xla and env.xla.step
  )
  devices = jax.devices()
  actor = actor_lib.Actor(
    0,
    env,
    functions,
    _T,
    devices[-1],
    devices[:num_shards],
    jax.random.key(1),
    0,
  )
  params = jax.device_put(agent.init(jax.random.key(2)), devices[-1])
  actor.start(params)
  return actor, params


def _unrolls(agent, num_shards=1, num_unrolls=3, env=None):
  """Makes consecutive unrolls of one actor; each is a list of shards."""
  actor, params = _actor(agent, env or _make_env(0), num_shards)
  unrolls = [actor.unroll(params, 0) for _ in range(num_unrolls)]
  actor.close()
  return params, unrolls


def _make_pool(name='CartPole-v1', index=0, **options):
  """Makes a pool that a program can step."""
  env = envpool.make(name, _NUM_ENVS, index * _NUM_ENVS, **options)
  assert env.xla
  return env


@pytest.mark.parametrize(
  'name,options,memory,num_shards',
  [
    ('CartPole-v1', {'max_episode_steps': _EPISODE}, True, 2),
    ('HalfCheetah-v4', {'max_episode_steps': _EPISODE}, False, 1),
    ('MiniGrid-Empty-5x5-v0', {'max_episode_steps': _EPISODE}, False, 1),
    pytest.param(
      'FrozenLake-v1',
      {'max_episode_steps': _EPISODE},
      True,
      1,
      marks=pytest.mark.slow,
    ),
    pytest.param(
      'Pong-v5',
      {'img_height': 42, 'img_width': 42, 'max_episode_steps': _EPISODE},
      False,
      2,
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_program_makes_the_unrolls_of_the_loop(
  name, options, memory, num_shards
):
  config = _config(**options)
  config['env.name'] = name
  agent = _agent(_with_memory(config) if memory else config)
  env = _make_pool(name, **options)
  _, unrolls = _unrolls(agent, num_shards, env=env)
  loop = _make_pool(name, **options)._replace(xla=None)
  _, others = _unrolls(agent, num_shards, env=loop)
  for x, y in zip(unrolls, others):
    jax.tree.map(
      np.testing.assert_array_equal,
      (x.shards, x.largest, x.finished, x.info),
      (y.shards, y.largest, y.finished, y.info),
    )
  is_first = [shard.timestep.is_first for u in unrolls for shard in u.shards]
  assert np.any(is_first) and not np.all(is_first)


@pytest.mark.parametrize('is_program', [True, False])
def test_an_actor_acts_after_2_to_the_31_steps(is_program):
  pool = _make_pool()
  pool = pool if is_program else pool._replace(xla=None)
  actor, params = _actor(_agent(_config()), pool)
  actor.skip(2**31 // _T - 1)
  shards = [actor.unroll(params, 0).shards[0] for _ in range(2)]
  assert [int(x.num_steps[0, 0]) for x in shards] == [2**31 - _T, -(2**31)]
  actions = [np.asarray(x.action) for x in shards]
  actor.skip(2**32 // _T - 1)
  shards = [actor.unroll(params, 0).shards[0] for _ in range(2)]
  actor.close()
  assert [int(x.num_steps[0, 0]) for x in shards] == [-_T, 0]
  actions += [np.asarray(x.action) for x in shards]
  for i in range(4):  # No unroll repeats the random numbers of another one.
    assert not any(np.array_equal(actions[i], x) for x in actions[:i])


def test_programs_of_two_actors_learn_what_loops_learn():
  def params(xla):
    def make_env(index):
      env = _make_pool(index=index, max_episode_steps=_EPISODE)
      return env if xla else env._replace(xla=None)

    driver = _driver(make_env)
    driver.start()
    report = _advance(driver, 5)[-1]
    outcome = jax.device_get(driver.learner_state.variables.params)
    assert driver.close() == []
    stages = [report.stages[f'time_{x}'] for x in ('environment', 'inference')]
    assert min(stages) > 0
    return outcome

  jax.tree.map(np.testing.assert_array_equal, params(True), params(False))


def test_an_actor_whose_device_learns_compiles_its_program_once():
  driver = _driver(
    lambda index: _make_pool(index=index),
    num_actors=4,
    unrolls_per_update=4,
    num_learners=1,
    num_actor_devices=4,
  )
  driver.start()
  program = driver._actors[0].functions.unroll
  assert program._cache_size() == 4  # One program per device.
  _advance(driver, 3)
  assert driver.close() == [] and program._cache_size() == 4


def test_a_program_of_a_stopped_actor_steps_no_environment(monkeypatch):
  actor, params = _actor(_agent(_config()), _make_pool())
  enter, stages = actor.enter, []

  def enter_and_stop(stage):
    stages.append(stage)
    actor.is_stopped = stages.count('environment') == 3
    enter(stage)

  monkeypatch.setattr(actor, 'enter', enter_and_stop)
  with pytest.raises(Closed):
    actor.unroll(params, 0)
  assert stages == ['inference', *['environment', 'inference'] * 3]


def test_a_program_that_hangs_is_found_in_the_environment(monkeypatch):
  actor, params = _actor(_agent(_config()), _make_pool())
  recv, clock = calls._Pool.recv, time.perf_counter
  is_there, is_free = threading.Event(), threading.Event()

  def wait(*arguments):
    is_there.set()
    is_free.wait()
    return recv(*arguments)

  monkeypatch.setattr(calls._Pool, 'recv', wait)
  thread = threading.Thread(target=actor.unroll, args=(params, 0))
  thread.start()
  try:
    assert is_there.wait(60)
    assert not actor.hang(0.0)  # One look is not enough.
    monkeypatch.setattr(actor_lib.time, 'perf_counter', lambda: clock() + 9)
    assert re.search(r"in the stage 'environment' for \d+ s", actor.hang(0.0))
  finally:
    is_free.set()
    thread.join()


def test_a_loop_acts_if_the_layout_of_a_frame_is_unknown(monkeypatch):
  monkeypatch.setattr(calls, '_FRAME_SIZE', 0)
  actor, params = _actor(_agent(_config()), _make_pool())
  assert actor._env_state is None
  assert actor.unroll(params, 0).shards


def test_unrolls_follow_one_another_over_their_reset_steps():
  agent = _agent(_config())
  _, unrolls = _unrolls(agent)
  trajectories = [jax.device_get(u.shards[0]) for u in unrolls]
  for i, trajectory in enumerate(trajectories):
    np.testing.assert_array_equal(trajectory.num_steps, [[i * _T] * _NUM_ENVS])
    np.testing.assert_array_equal(trajectory.env_index, [range(_NUM_ENVS)])
  for before, after in zip(trajectories, trajectories[1:]):
    jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x[-1], y[0]),
      before.timestep,
      after.timestep,
    )
  # Another pool gives the same steps for the same actions.
  pool = envpool.make('CartPole-v1', _NUM_ENVS, 0, max_episode_steps=_EPISODE)
  timestep, length = pool.reset(), np.zeros(_NUM_ENVS)
  for trajectory, unroll in zip(trajectories, unrolls):
    ended = []
    for t in range(_T):
      jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x[t], y),
        trajectory.timestep,
        timestep,
      )
      timestep = pool.step(trajectory.action[t])
      ended += list(length[timestep.is_first])
      length = np.where(timestep.is_first, 0, length + 1)
    # CartPole's reward is 1 per step, so an episode's return is its length.
    returns, lengths = unroll.finished
    assert len(ended) > 0
    np.testing.assert_array_equal(returns, ended)
    np.testing.assert_array_equal(lengths, ended)
  pool.close()


@pytest.mark.parametrize(
  'core', ['gru', 'mingru', helpers.slow('lru'), 'gtrxl']
)
def test_each_unroll_keeps_what_was_carried_into_it(core):
  agent = _agent(_with_memory(_config('impala'), core))
  params, unrolls = _unrolls(agent)
  trajectories = [jax.device_get(u.shards[0]) for u in unrolls]
  keys = jax.random.split(jax.random.key(0), _NUM_ENVS)
  carry = jax.device_get(agent.initial_carry(np.arange(_NUM_ENVS)))
  act = jax.jit(agent.act)
  for trajectory in trajectories:
    for x, y in zip(jax.tree.leaves(trajectory.carry), jax.tree.leaves(carry)):
      np.testing.assert_allclose(x[0], y, atol=1e-5)
    for t in range(_T):
      step = jax.tree.map(lambda x: x[t], trajectory.timestep)
      _, _, carry = act(params, keys, step, carry)
  assert all(map(np.any, jax.tree.leaves(carry)))


def test_nothing_is_learnt_over_a_reset_step():
  config = _config()
  config['agent.normalize_advantage'] = False
  agent = _agent(config)
  params, unrolls = jax.device_get(_unrolls(agent))
  gamma, lambda_ = config['agent.gamma'], config['agent.lambda_']
  for unroll in unrolls:
    trajectory = unroll.shards[0]
    batch = helpers.prepare(agent, params, unroll.shards[0])
    advantage = np.asarray(batch.advantage).reshape(_T, _NUM_ENVS)
    _, extras, _ = agent.act(
      params,
      None,
      jax.tree.map(lambda x: x[-1], trajectory.timestep),
      (),
      greedy=True,
    )
    values = np.concatenate([trajectory.extras.value, extras.value[None]])
    is_first = trajectory.timestep.is_first
    assert is_first[1:].any()
    for b in range(_NUM_ENVS):
      error = 0.0
      for t in reversed(range(_T)):
        if is_first[t + 1, b]:  # A reset step passes no error back.
          error = 0.0
        else:
          reward = trajectory.timestep.reward[t + 1, b]
          discount = gamma * trajectory.timestep.discount[t + 1, b]
          delta = reward + discount * values[t + 1, b] - values[t, b]
          error = delta + discount * lambda_ * error
        np.testing.assert_allclose(advantage[t, b], error, rtol=1e-5, atol=1e-5)
        assert batch.weight.reshape(_T, _NUM_ENVS)[t, b] == (
          not is_first[t + 1, b]
        )


@pytest.mark.parametrize(
  'num_devices,agent_name,has_memory',
  [(1, 'impala', True), (2, 'ppo', True)]
  + [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
      (1, 'ppo', False),
      (1, 'ppo', True),
      (1, 'impala', False),
      (2, 'ppo', False),
      (2, 'impala', False),
      (2, 'impala', True),
      (2, 'muzero', False),
    )
  ],
)
def test_one_trajectory_through_both_drivers(
  agent_name, num_devices, has_memory
):
  config = _config(agent_name)
  config = _with_memory(config) if has_memory else config
  if agent_name == 'muzero':
    config['agent.num_unroll_steps'] = config['agent.n_steps'] = 2
  env = gymnax.make('CartPole-v1')
  agent = build.make_agent(config, env.spec)
  learner = make_learner(agent, optax.sgd(0.1), num_epochs=2, num_minibatches=2)

  def update(state, trajectory, rng_key):
    whole = jax.tree.map(
      lambda x: jax.lax.all_gather(x, DEVICE_AXIS, axis=1, tiled=True),
      trajectory,
    )
    state, metrics = learner.update(state, trajectory, rng_key)
    return state, metrics | {'trajectory': whole}

  mesh = spmd.make_mesh(jax.devices()[:num_devices])
  driver = anakin.make_programs(
    env,
    agent,
    learner._replace(update=update),
    mesh,
    num_envs=8,
    unroll_length=_T,
    max_updates=1,
  )
  state = driver.init(jax.random.key(5))
  before = jax.tree.map(np.array, jax.device_get(state.learner))
  key = jnp.array(jax.random.key_data(state.rng_key))
  state, records = driver.train(state, np.int32(1))
  trajectory = jax.tree.map(
    lambda x: np.array(x[0]), records.metrics['trajectory']
  )
  placed = spmd.place(before, mesh, spmd.REPLICATED)
  ours, _ = spmd.map_update(learner, mesh)(
    placed.variables,
    placed._replace(variables=()),
    (spmd.place(trajectory, mesh, spmd.TRAJECTORY),),
    jax.random.wrap_key_data(key),
  )
  changed = False
  for x, y, z in zip(
    *map(
      jax.tree.leaves,
      (x.variables.params for x in (ours, state.learner, before)),
    )
  ):
    np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    changed |= bool(np.abs(np.asarray(x) - z).max() > 1e-3)
  assert changed


@pytest.mark.parametrize(
  'agent_name,num_devices',
  [
    ('ppo', 2),
    ('impala', 2),
    pytest.param('ppo', 1, marks=pytest.mark.slow),
    pytest.param('impala', 1, marks=pytest.mark.slow),
  ],
)
def test_unrolls_are_joined_into_one_trajectory(agent_name, num_devices):
  agent = _agent(_config(agent_name))
  params, (one, two) = _unrolls(agent, num_devices, num_unrolls=2)
  learner = make_learner(agent, optax.sgd(0.1), num_epochs=2)
  mesh = spmd.make_mesh(jax.devices()[:num_devices])
  key = jax.random.key(3)
  parts = [
    spmd.join_shards(u.shards, mesh, spmd.TRAJECTORY) for u in (one, two)
  ]
  state = spmd.place(
    learner.init(jax.random.key(2), parts[0]), mesh, spmd.REPLICATED
  )

  # Here, each device joins the two unrolls.
  ours, _ = spmd.map_update(learner, mesh)(
    jax.tree.map(jnp.copy, state.variables),
    jax.tree.map(jnp.copy, state._replace(variables=())),
    tuple(parts),
    key,
  )
  # Here, one trajectory is split over the devices.
  whole = spmd.place(
    jax.tree.map(
      lambda *x: np.concatenate([np.asarray(p) for p in x], 1), *parts
    ),
    mesh,
    spmd.TRAJECTORY,
  )
  theirs, _ = spmd.device_map(
    learner.update,
    mesh,
    (spmd.REPLICATED, spmd.TRAJECTORY, spmd.REPLICATED),
    (spmd.REPLICATED, spmd.REPLICATED),
  )(state, whole, jax.random.fold_in(key, 0))
  assert isinstance(whole, Trajectory) and whole.action.shape == (_T, 16)
  changed = False
  for x, y, z in zip(
    *map(jax.tree.leaves, (x.variables.params for x in (ours, theirs, state)))
  ):
    np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    changed |= bool(np.abs(np.asarray(x) - np.asarray(z)).max() > 1e-3)
  assert changed


def test_a_slow_actor_learns_nothing_stale():
  driver = _driver(
    lambda i: _make_env(i, lambda i: 0.002 if i else 0.02),
    agent_name='impala',
    deterministic=False,
    unrolls_per_update=1,
  )
  driver.start()
  reports = _advance(driver, 40)
  driver.close()
  own = [r.own for r in reports]
  assert max(x['policy_lag_max'].max() for x in own) <= 1
  num_dropped = own[-1]['num_unrolls_dropped'][-1]
  assert num_dropped > 0
  num_predictions = sum(r.num_predictions for r in reports)
  assert num_predictions == (40 + num_dropped) * _T * _NUM_ENVS
  assert own[-1]['num_actor_waits'][-1] > 0


def test_sequences_go_on_over_the_unrolls_of_unequal_actors():
  config = default_fields('dqn', 'Sebulba')
  config['env.name'], config['env.num_envs'] = 'CartPole-v1', 3 * _NUM_ENVS
  config['unroll_length'], config['network.hidden_sizes'] = 4, (8,)
  config['agent.n_steps'] = 6  # More than an unroll.
  config['replay.capacity_steps'], config['replay.min_steps'] = 32_000, 400
  config['replay.batch_size'], config['replay.sgd_steps_per_update'] = 8, 1
  config['sebulba.mode'] = 'asynchronous'
  config['sebulba.threads_per_actor_device'] = 3
  config['sebulba.unrolls_per_update'] = 2
  config['sebulba.learner_devices'] = (0, 1)
  driver = build.make_run(config).driver
  # The first actor is about three times as fast as the others.
  driver.make_env = lambda i: _make_env(i, lambda i: 0.006 if i else 0.001)
  driver.start()
  reports = _advance(driver, 80)
  storage, priorities = jax.device_get(driver.learner_state.memory)
  assert driver.close() == []
  # No unroll is missing, so a column of N steps has N - 5 sequences of 6 steps.
  num_steps = storage.num_rows[0]
  assert num_steps.sum() == 80 * 2 * 4 * _NUM_ENVS
  assert num_steps.max() >= 1.5 * num_steps.min()
  np.testing.assert_array_equal((priorities > 0).sum(0), num_steps - 5)
  assert sum(r.metrics['is_learning'].sum() for r in reports) > 60


def test_the_stages_add_up():
  driver = _driver(lambda i: _make_env(i, lambda _: 0.005), agent_name='impala')
  driver.start()
  reports = _advance(driver, 10)
  driver.close()
  stages = {k: sum(r.stages[k] for r in reports) for k in reports[0].stages}
  seconds = sum(r.seconds for r in reports)
  actor = ('time_environment', 'time_inference', 'time_actor_waiting')
  learner = ('time_update', 'time_learner_waiting', 'time_hand_off')
  for names in (actor, learner):
    assert sum(stages[n] for n in names) == pytest.approx(seconds, rel=0.1)
  # A step takes at least 5 ms; 2 of 10 unrolls may start before `advance`.
  assert stages['time_environment'] >= 8 * 8 * 0.005


def _run(config, workdir):
  return train.run(
    lambda agent, variant: as_config(config),
    ['test.py', f'--workdir={workdir}'],
  )


@pytest.mark.parametrize('where', ['', 'make', 'reset'])
def test_the_thread_of_an_actor_makes_and_closes_its_environments(where):
  """Databases, OpenGL and others work only in the thread that made them."""
  threads = {0: [], 1: []}

  def note(index, method):
    is_main = threading.current_thread() is threading.main_thread()
    if method == where and not is_main:
      raise ValueError('signal only works in main thread')
    threads[index].append((method, threading.get_ident()))

  def make_env(index):
    note(index, 'make')
    env = _make_env(index)

    def call(method):
      def method_of_env(*args):
        note(index, method)
        return getattr(env, method)(*args)

      return method_of_env

    return env._replace(**{x: call(x) for x in ('reset', 'step', 'close')})

  driver = _driver(make_env)
  driver.start()
  _advance(driver, 3)
  assert driver.close() == [] and not _podrl_threads()
  own = []
  for own_calls in threads.values():
    assert {x for x, _ in own_calls} == {'make', 'reset', 'step', 'close'}
    # What sets handlers of signals runs in the main thread.
    others = {thread for method, thread in own_calls if method != where}
    assert len(others) == 1
    own += others
    if where:
      assert dict(own_calls)[where] == threading.get_ident()
  assert len({*own, threading.get_ident()}) == 3


@pytest.mark.parametrize(
  'error', [OSError, pytest.param(SystemExit, marks=pytest.mark.slow)]
)
def test_an_actors_exception_ends_the_run(error, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(
    build,
    'make_host_env',
    lambda config, num_envs, seed, threads, **kw: _make_env(
      _index_of(seed), fail_at=100 if _index_of(seed) else None, error=error
    ),
  )
  assert _run(_config(), tmp_path / 'run') == signals.FAILED
  stderr = capsys.readouterr().err
  assert f'{error.__name__}: the environment broke' in stderr
  # The line is the environment's, not that of the learner's closed exchange.
  assert 'in step)' in stderr and 'Closed' not in stderr
  assert 'Traceback' not in stderr  # The line says everything.
  assert not _podrl_threads()
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['exit'] == 'failed' and 'broke' in summary['error']
  assert summary['num_updates'] >= 8  # The actor fails after 12 unrolls.


def test_an_exception_in_the_learner_ends_the_run(
  tmp_path, monkeypatch, capsys
):
  join, calls = spmd.join_shards, iter(range(100))

  def fail(*arguments):  # Compiling makes the first call.
    if next(calls) == 5:
      raise OSError('the learner broke')
    return join(*arguments)

  monkeypatch.setattr(spmd, 'join_shards', fail)
  assert _run(_config(), tmp_path / 'run') == signals.FAILED
  assert 'the learner broke' in capsys.readouterr().err
  assert not _podrl_threads()
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['num_updates'] == 2  # Each update joins two unrolls.


def test_an_actor_may_fail_during_the_last_evaluation(
  tmp_path, monkeypatch, capsys
):
  def evaluate(params, rng_key, should_stop):
    del params, rng_key
    for _ in range(1000):
      if should_stop():
        return None
      time.sleep(0.01)
    raise AssertionError('the evaluation was not stopped')

  monkeypatch.setattr(
    build.evaluation, 'make_host_evaluate', lambda *a, **k: evaluate
  )
  monkeypatch.setattr(
    build,
    'make_host_env',
    lambda config, num_envs, seed, threads, **kw: _make_env(
      _index_of(seed), fail_at=6 * _T + 2
    ),
  )  # The actor has version 5 when it fails.
  config = _config()
  config['total_env_steps'] = 5 * 2 * _NUM_ENVS * _T
  assert _run(config, tmp_path / 'run') == signals.FAILED
  assert 'OSError: the environment broke' in capsys.readouterr().err
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['num_updates'] == 5 and summary['exit'] == 'failed'


def test_an_asynchronous_run(tmp_path):
  config = _config('impala')
  config['sebulba.mode'] = 'asynchronous'
  config['total_env_steps'] = 5 * 2 * _NUM_ENVS * _T
  assert _run(config, tmp_path / 'run') == signals.DONE
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['num_updates'] == 5
  assert summary['policy_lag_max'] <= 1 and summary['eval_episodes'] > 0


def test_a_failing_evaluation_loses_no_record(tmp_path, monkeypatch):
  def fail(*arguments):
    raise OSError('no evaluation')

  monkeypatch.setattr(
    build.evaluation, 'make_host_evaluate', lambda *a, **k: fail
  )
  config = _config()
  config['total_env_steps'] = 5 * 2 * _NUM_ENVS * _T
  assert _run(config, tmp_path / 'run') == signals.FAILED
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['num_updates'] == 5 and 'no evaluation' in summary['error']


def test_a_nan_stops_the_run_at_its_update(tmp_path, capsys):
  config = _config('impala')
  config['optimizer.learning_rate'], config['optimizer.name'] = 1e30, 'sgd'
  assert _run(config, tmp_path / 'run') == signals.FAILED
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert 'update 2' in summary['error'] and summary['num_updates'] == 1
  assert not _podrl_threads()


def test_a_hanging_actor_is_named_and_the_process_ends(tmp_path):
  # The run needs a separate process, which ends without joining the thread.
  here = pathlib.Path(__file__).parent
  code = f"""
import sys; sys.path += {[str(x) for x in (here, here.parent)]!r}
import test_sebulba as t
t.spmd.set_num_cpu_devices(4)
t.build.make_host_env = lambda config, num_envs, seed, threads, **kw: (
    t._make_env(t._index_of(seed), lambda i: 1e6 * (i == 1)))
config = t._config()
config['sebulba.hang_seconds'] = 2.0
sys.exit(t._run(config, {str(tmp_path / 'run')!r}))
"""
  outcome = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    timeout=120,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert outcome.returncode == 1
  assert "podrl-actor-1 has been in the stage 'environment'" in outcome.stderr
  assert 'in step' in outcome.stderr and 'Thread 0x' in outcome.stderr
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert 'podrl-actor-1' in summary['error']


def test_evaluation_counts_whole_raw_episodes():
  config = _config(max_episode_steps=7)
  run = build.make_run(config)
  params = _agent(config).init(jax.random.key(0))
  outcome = run.evaluate(params, jax.random.key(1), lambda: False)
  again = run.evaluate(params, jax.random.key(1), lambda: False)
  # No pole falls in 7 steps, and each step has the reward 1.
  assert list(outcome.returns) == list(outcome.lengths) == [7, 7]
  assert list(again.returns) == list(outcome.returns)
  assert run.evaluate(params, jax.random.key(1), lambda: True) is None


def test_evaluation_leaves_out_what_only_training_uses():
  config = default_fields('ppo', 'Sebulba')
  config['env.name'] = 'Breakout-v5'
  config['env.options'].update(
    episodic_life=True, reward_clip=True, stack_num=1
  )
  pools = []
  import envpool

  make = envpool.make_gymnasium
  envpool.make_gymnasium = lambda *a, **kw: (
    pools.append(make(*a, **kw)) or (pools[-1])
  )
  try:
    for evaluation in (False, True):
      build.make_host_env(config, 1, 0, 1, evaluation=evaluation).close()
  finally:
    envpool.make_gymnasium = make
  flags = [
    (p.config['episodic_life'], p.config['reward_clip'], p.config['stack_num'])
    for p in pools
  ]
  assert flags == [(True, True, 1), (False, False, 1)]


@pytest.mark.parametrize(
  'changes,message',
  [
    ({'env.name': 'CartPole-v9'}, 'did you mean CartPole-v'),
    (
      {'env.name': 'Pendulum-v1', 'network.distribution': 'categorical'},
      'use gaussian or tanh_gaussian',
    ),
    (
      {'env.name': 'LqrLqr21-v1', 'network.distribution': 'tanh_gaussian'},
      'needs bounds',
    ),
    (
      {'network.recurrent': 'gru', 'num_minibatches': 3},
      'does not divide 8, the environments per update on each of 2',
    ),
    ({'network.initial_scale': 0.0}, 'at least 0.01 and at most 10'),
    ({'env.name': 'Go9x9-v1'}, '2 players'),
    ({'env.suite': 'gymnax'}, 'works only with anakin'),
    ({'env.num_envs': 15}, 'try 12 or 16'),
    ({'sebulba.learner_devices': (0, 1, 2)}, '3 learner devices; try 12 or 18'),
    ({'sebulba.learner_devices': (4,)}, '0 to 3'),
    ({'sebulba.actor_devices': (0, 0)}, 'different devices'),
    ({'sebulba.actor_devices': (-1,)}, 'at least 0'),
    ({'sebulba.threads_per_actor_device': -1}, 'at least 0'),
    ({'seed': 2**32}, 'must be at most 4294967295'),
    (
      {
        'sebulba.max_lag': 1,
        'agent.name': 'a2c',
        'num_epochs': 1,
        'num_minibatches': 1,
      },
      'use 0, or --agent=impala',
    ),
    ({'sebulba.unrolls_per_update': 3}, 'asynchronous'),
    ({'sebulba.mode': 'async'}, 'did you mean asynchronous'),
    ({'sebulba.hang_seconds': 0.0}, 'more than 0'),
    ({'sebulba.max_lag': -1}, 'at least 0'),
    ({'sebulba.max_lag': 10**12}, 'at most 1024'),
    ({'sebulba.hang_seconds': 1e30}, 'at most 1000000'),
    ({'env.num_envs': 10**12}, 'at most 16777216'),
    ({'total_env_steps': 10**15}, 'only 2**31 - 1; set a smaller total'),
    ({'num_minibatches': 7}, 'try 4 or 8'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
  changes, message, tmp_path, capsys
):
  config = _config() | changes
  if 'env.name' in changes:
    config['env.options'] = {}
  assert _run(config, tmp_path / 'run') == signals.MISTAKE
  stderr = capsys.readouterr().err
  assert message in stderr and stderr.count('\n') == 1
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'field,value,message',
  [
    ('env_threads', 64, '2 actors x config.sebulba.env_threads=64 make 128'),
    ('threads_per_actor_device', 16, '16 actors x'),
  ],
)
def test_too_many_environment_threads_are_warned_of(
  field, value, message, monkeypatch
):
  monkeypatch.setattr(layout, 'num_cores', lambda: 2)
  config = _config()
  config['env.num_envs'] = 64
  config[f'sebulba.{field}'] = value
  (warning,) = build.make_run(config).warnings
  assert message in warning


@pytest.mark.parametrize(
  'name,env_threads', [('CartPole-v1', 1), ('Pong-v5', 2)]
)
def test_a_learner_has_a_core_unless_images_are_drawn(
  name, env_threads, monkeypatch
):
  monkeypatch.setattr(layout, 'num_cores', lambda: 2)
  config = default_fields('ppo', 'Sebulba')
  config['env.name'] = name
  plan = layout.make_layout(config, build.make_spec(config))
  assert (plan.num_actors, plan.env_threads) == (1, env_threads)


@pytest.mark.parametrize(
  'actors,learners,expected',
  [
    ((), (), 1),
    ((0,), (0,), 1),
    ((1,), (), 2),  # Device 0 learns.
    ((-1,), (), 1),  # `check` raises the error.
    ((), (0, 1), 2),
    ((0, 1), (1, 2), 3),
    (
      (7,),
      (),
      'actor_devices=7 would make 8 .*: config.sebulba.actor_devices=0',
    ),
    ((), (2,), 'learner_devices=2 would make 3 CPU .*learner_devices=0$'),
    (
      (0, 4),
      (2,),
      '=0,4 and .*=2 would make 5 .*=0,2 and .*learner_devices=1$',
    ),
  ],
)
def test_cpu_devices_are_named_without_gaps(actors, learners, expected):
  config = default_fields('ppo', 'Sebulba')
  config['sebulba.actor_devices'] = actors
  config['sebulba.learner_devices'] = learners
  if isinstance(expected, int):
    assert layout.num_named_devices(config) == expected
    return
  with pytest.raises(ValueError, match=expected):
    layout.num_named_devices(config)


def test_idle_devices_are_warned_of(monkeypatch):
  monkeypatch.setattr(layout, 'num_cores', lambda: 2)
  config = _config()
  config['env.num_envs'] = 4  # One of 4 devices acts; 2 learn.
  config['sebulba.actor_devices'] = config['sebulba.learner_devices'] = ()
  config['num_minibatches'] = 1
  (warning,) = build.make_run(config).warnings
  assert (
    '3 of 4 devices are used; to use more, change config.env.num_envs=4 to'
    in warning
  )
  assert build.make_run(_config()).warnings == []
