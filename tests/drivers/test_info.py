"""Tests the means of `TimeStep.info` against plain Python loops."""

import contextlib
import math
import signal
import sys
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import podrl
from podrl.core import learner as learner_lib
from podrl.drivers import actor as actor_lib
from podrl.drivers import anakin, info, spmd
from podrl.drivers.anakin import Anakin
from podrl.envs import autoreset
from podrl.envs import gymnasium as adapter
from podrl.records import checkpoint, workdir
from podrl.run import evaluation, loop
from podrl.types import (
  Agent,
  DeviceEnv,
  Discrete,
  EnvSpec,
  LossOutput,
  Variables,
)

_T = 5


def _expected(steps):
  """Returns {name: [sum of the means, episodes]} for one environment.

  `steps` has the arrivals in their order, as pairs `(is_first, info)`.
  """
  found, values = {}, {}
  for is_first, numbers in steps:
    if is_first:
      for name, own in values.items():
        sums = found.setdefault(name, [0.0, 0])
        sums[0] += sum(own) / len(own)
        sums[1] += 1
      values = {}
      continue
    for name, x in numbers.items():
      if math.isfinite(x):
        values.setdefault(name, []).append(float(x))
  return found


def _join(parts):
  """Adds up the sums of several environments."""
  joined = {}
  for part in parts:
    for name, sums in part.items():
      before = joined.get(name, [0.0, 0])
      joined[name] = [x + y for x, y in zip(before, sums)]
  return joined


def _assert_sums(found, expected):
  found = {k: [*map(float, x)] for k, x in found.items() if x[1]}
  assert found.keys() == expected.keys()
  for name, sums in expected.items():
    np.testing.assert_allclose(found[name], sums, rtol=1e-5)


def _random_unrolls(num_envs=3, num_unrolls=4):
  """Makes `is_first` `[T, B]` and T dicts for each of several unrolls.

  An environment may have several episodes in an unroll, or none.
  """
  rng = np.random.default_rng(0)
  for _ in range(num_unrolls):
    is_first = rng.random((_T, num_envs)) < [0.5, 0.2, 0.0]
    infos = []
    for _ in range(_T):
      x = rng.normal(size=(3, num_envs)).astype(np.float32)
      x[0, rng.random(num_envs) < 0.3] = np.nan
      x[1, rng.random(num_envs) < 0.3] = np.inf
      infos.append(dict(zip('abc', x)))
    yield is_first, infos


def _by_env(unrolls):
  for env in range(unrolls[0][0].shape[1]):
    yield [
      (is_first[t, env], {k: x[env] for k, x in infos[t].items()})
      for is_first, infos in unrolls
      for t in range(_T)
    ]


def test_averages_on_the_host_are_those_of_a_loop():
  unrolls = [*_random_unrolls()]
  for _, infos in unrolls:
    del infos[1]['c']  # A name may be missing.
    infos[3] = ()
  # In the first unroll, no environment has the name.
  unrolls[0] = unrolls[0][0], [{}] * _T
  averages = info.Averages()
  found = [averages.add(infos, is_first) for is_first, infos in unrolls]
  names = [(is_first, [dict(x) for x in infos]) for is_first, infos in unrolls]
  expected = _join(map(_expected, _by_env(names)))
  assert expected['a'][1] > 5 and found[0] == {}
  _assert_sums(info.add_up(found), expected)
  columns = info.to_columns(found)
  assert columns['a'].mean_sum.shape == (4,)
  assert columns['a'].num_episodes[0] == 0
  _assert_sums({k: [*map(np.sum, x)] for k, x in columns.items()}, expected)


def test_averages_on_a_device_are_those_of_a_loop():
  unrolls = [*_random_unrolls()]
  running = info.begin(unrolls[0][1][0], 3)
  step, found = jax.jit(info.step), []
  for is_first, infos in unrolls:
    ended = []
    for t in range(_T):
      running, result = step(running, infos[t], is_first[t])
      ended.append(result)
    found.append(info.by_name(jax.tree.map(lambda *x: np.stack(x), *ended)))
  expected = _join(map(_expected, _by_env(unrolls)))
  _assert_sums(info.add_up(found), expected)


def test_new_names_in_every_step_do_not_fill_the_memory():
  averages, is_first = info.Averages(), np.zeros((1, 2), bool)
  for i in range(130):
    averages.add([{f'step_{i}': np.ones(2)}], is_first)
  found = averages.add([()], ~is_first)
  assert list(found) == [f'step_{i}' for i in range(100)]
  assert found['step_0'] == (2.0, 2)


@pytest.mark.parametrize(
  'after_reset,after_step,message',
  [
    ({}, {'a': np.zeros(2)}, '0 names after `reset`, but 1 after `step`: a'),
    ({'a': np.zeros(2)}, {}, '1 names after `reset`, but 0 after .* none;'),
    ({'a': np.zeros(2)}, {'a': np.zeros((2, 3))}, r"info\['a'\] of 2 .*2, 3"),
  ],
)
def test_other_names_and_shapes_are_refused(after_reset, after_step, message):
  running = info.begin(after_reset, 2)
  with pytest.raises(ValueError, match=message):
    info.step(running, after_step or (), np.zeros(2, bool))


# In JAX: an episode has n = 2, 3 or 4 steps, by its key. In its step t, the
# info is {'t': t, 'late': 1 in the last step}.
_SPEC = EnvSpec(jax.ShapeDtypeStruct((), jnp.int32), False, Discrete(2), 1, 4)


def counting() -> DeviceEnv:
  """Makes the environment; its observation is 10 n + t."""

  def reset(rng_key):
    n = jax.random.randint(rng_key, (), 2, 5)
    return 10 * n, (n, jnp.int32(0))

  def step(rng_key, state, action):
    del rng_key, action
    n, t = state[0], state[1] + 1
    return 10 * n + t, (n, t), 1.0, t == n, False

  def numbers(state):
    n, t = state
    return {'t': t, 'late': t == n}

  return autoreset.make_device_env(_SPEC, reset, step, info=numbers)


def _spying_agent():
  """Makes an agent that records time steps, and refuses `info`."""

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    assert timestep.info == ()
    return jnp.zeros(timestep.obs.shape, jnp.int32), (), carry

  def prepare(variables, target, sample, key, mean):
    assert sample.trajectory.timestep.info == ()
    return sample.trajectory

  return Agent(
    init=lambda key: Variables(jnp.zeros(()), (), {}),
    initial_carry=lambda n: (),
    act=act,
    prepare=prepare,
    loss=lambda variables, *rest: (0.0 * variables.params, LossOutput({})),
  )


@pytest.mark.parametrize('num_agents', [None, 2])
def test_anakin_averages_the_info_of_its_environments(num_agents):
  agent = _spying_agent()

  def make_driver(unroll_length, num_devices):
    programs = anakin.make_programs(
      counting(),
      agent,
      learner_lib.make_learner(agent, optax.sgd(1.0)),
      spmd.make_mesh(jax.devices()[:num_devices]),
      num_envs=4,
      unroll_length=unroll_length,
      max_updates=3,
      num_agents=num_agents,
    )
    key = jax.random.key(0)
    keys = jax.random.split(key, num_agents) if num_agents else key
    driver = Anakin(programs, keys, 3, 0)
    driver.start()
    return driver

  # With unrolls of one step, the state shows each time step.
  single = make_driver(1, 1)
  steps = []
  for _ in range(30):
    single.advance(1)
    steps.append(jax.device_get(single.state.actors.timestep))
  assert steps[0].info == ()
  driver = make_driver(_T, 2)
  reports = [driver.advance(3) for _ in range(2)]
  assert reports[0][0].info['t'].mean_sum.shape == (3, 2)  # Updates, devices.

  def arrivals(agent, env):
    for step in steps:
      place = (agent, env) if num_agents else env
      n, t = divmod(int(step.obs[place]), 10)
      yield step.is_first[place], {'t': t, 'late': t == n}

  for i in range(num_agents or 1):
    expected = _join(_expected(arrivals(i, env)) for env in range(4))
    assert expected['t'][1] > 20
    own = [
      {k: [*map(np.sum, x)] for k, x in r[i].info.items()} for r in reports
    ]
    _assert_sums(info.add_up(own), expected)


class _Walk(gymnasium.Env):
  """Episodes of 3, 4, 5, 3 ... steps; the seed says which one comes first."""

  observation_space = gymnasium.spaces.Box(0, 9, (1,))
  action_space = gymnasium.spaces.Discrete(2)

  def reset(self, *, seed=None, options=None):
    self.number = (self.number + 1 if seed is None else seed) % 3
    self.t = 0
    return np.zeros(1, np.float32), {'v': 1000.0}

  def numbers(self, action):
    """Returns the numbers that podrl should find."""
    found = {'success': self.t == 3 + self.number}
    if self.t != 2:
      found['v'] = np.float32(10 * action + self.t)
    if found['success']:
      found['final'] = np.int64(self.t)
    return found

  def step(self, action):
    self.t += 1
    others = {'label': 'text', 'array': np.ones(3), 'nested': {'x': 1.0}}
    others |= {'_hidden': 1.0, 3: 1.0, 'big': 10**400, 'bad': math.nan}
    numbers = self.numbers(action)
    obs = np.full(1, self.t, np.float32)
    return obs, 1.0, numbers['success'], False, others | numbers


gymnasium.register('InfoWalk-v0', _Walk)
# The processes of the mode 'async' cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _walk(seed, actions):
  """Yields `(is_first, numbers)` of one environment."""
  walk, is_last = _Walk(), False
  walk.reset(seed=seed)
  for action in actions:
    if is_last:
      walk.reset()
      is_last = False
      yield True, {}
    else:
      _, _, is_last, _, _ = walk.step(action)
      yield False, walk.numbers(action)


@pytest.mark.parametrize('mode', ['sync', helpers.slow('async')])
def test_gymnasium_reports_the_numbers_of_an_info(mode):
  env = adapter.make('InfoWalk-v0', 2, 0, vectorization_mode=mode)
  with contextlib.closing(env):  # Else its processes would hang.
    assert env.reset().info == ()
    actions = np.random.default_rng(0).integers(0, 2, (12, 2))
    walks = [[*_walk(i, actions[:, i])] for i in range(2)]
    has_nan = False
    for action, pairs in zip(actions, zip(*walks)):
      timestep = env.step(action)
      np.testing.assert_array_equal(timestep.is_first, [x for x, _ in pairs])
      names = {k for _, numbers in pairs for k in numbers}
      assert dict(timestep.info).keys() == names
      for name in names:
        x, expected = (
          timestep.info[name],
          [n.get(name, np.nan) for _, n in pairs],
        )
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, expected)
        has_nan |= np.isnan(x).any()
    assert has_nan


def test_an_actor_averages_the_info_of_its_environments():
  env = adapter.make('InfoWalk-v0', 2, 0)
  agent = helpers.make_agent('ppo', env.spec)
  act = agent.act

  def act_without_info(variables, rng_key, timestep, carry, **kwargs):
    assert timestep.info == ()
    return act(variables, rng_key, timestep, carry, **kwargs)

  agent = agent._replace(act=act_without_info)
  functions = actor_lib.make_actor_functions(agent, env.spec.observe, 1)
  device, key = jax.devices()[0], jax.random.key(1)
  actor = actor_lib.Actor(0, env, functions, _T, device, [device], key, 0)
  variables = agent.init(jax.random.key(2))
  actor.start(variables)
  unrolls = [actor.unroll(variables, 0) for _ in range(6)]
  actor.close()
  trajectories = [jax.device_get(x.shards[0]) for x in unrolls]
  assert all(x.timestep.info == () for x in trajectories)
  actions = np.concatenate([x.action for x in trajectories])
  expected = _join(_expected(_walk(i, actions[:, i])) for i in range(2))
  assert expected['v'][1] == sum(len(x.finished[0]) for x in unrolls) > 10
  _assert_sums(info.add_up(x.info for x in unrolls), expected)


def test_an_evaluation_hides_info_from_the_agent():
  agent, key = _spying_agent(), jax.random.key(0)
  settings = evaluation.Settings(2, 9, True)
  variables = agent.init(key)
  on_device = evaluation.make_evaluate(counting(), agent, settings)
  lengths = on_device(variables, key, lambda: False).lengths
  assert set(lengths) <= {2, 3, 4}

  def make_env(num_envs, seed):
    return adapter.make('InfoWalk-v0', num_envs, seed)

  on_host = evaluation.make_host_evaluate(make_env, agent, settings)
  lengths = on_host(variables, key, lambda: False).lengths
  assert set(lengths) <= {3, 4, 5}


class _OldTimeStep(NamedTuple):
  obs: np.ndarray
  reward: np.ndarray


class _OldActors(NamedTuple):
  timestep: _OldTimeStep
  episode_return: np.ndarray


class _Actors(NamedTuple):
  timestep: Any
  episode_return: np.ndarray
  episode_info: Any = ()


class _TimeStep(NamedTuple):
  obs: np.ndarray
  reward: np.ndarray
  info: Any = ()


@pytest.mark.parametrize('has_info', [False, True])
def test_a_checkpoint_without_info_can_be_read(has_info, tmp_path):
  saved = _OldActors(_OldTimeStep(np.arange(3.0), np.ones(2)), np.zeros(4))
  path = tmp_path / 'checkpoints' / '7' / 'state'
  with ocp.StandardCheckpointer() as writer:
    writer.save(path, (saved, np.arange(5)))
  episode_info = info.begin({'a': 0, 'b': 0} if has_info else {}, 4)
  like = jax.tree.map(jnp.zeros_like, saved)
  timestep = _TimeStep(*like.timestep)
  like = _Actors(timestep, like.episode_return, episode_info), jnp.zeros(5, int)
  found, last = checkpoint._read(str(tmp_path), 7, 'state', like)
  np.testing.assert_array_equal(last, np.arange(5))
  np.testing.assert_array_equal(found.timestep.obs, np.arange(3.0))
  np.testing.assert_array_equal(found.timestep.reward, np.ones(2))
  assert found.timestep.info == () and isinstance(found, _Actors)
  assert found.episode_info is episode_info


_TINY = {
  'total_env_steps': 768,
  'env.num_envs': 8,
  'unroll_length': 8,
  'num_minibatches': 1,
  'eval.num_episodes': 2,
  'eval.max_episode_steps': 9,
  'network.hidden_sizes': (8,),
  'log.every_updates': 5,
}


@pytest.mark.parametrize('num_seeds', [1, helpers.slow(2)])
def test_a_sebulba_run_records_info(num_seeds, tmp_path):
  devices = {'sebulba.actor_devices': 0, 'sebulba.learner_devices': (0, 1)}
  threads = {'sebulba.threads_per_actor_device': 2, 'num_seeds': num_seeds}
  run = podrl.train(
    'InfoWalk-v0', workdir=str(tmp_path), config=_TINY | devices | threads
  )
  assert [x['num_updates'] for x in run.records] == [5, 10, 12]
  for record in run.records:
    # 'final' is in the last step only, where it is the length.
    assert record['env/final'] == pytest.approx(record['episode_length'])
    assert 1 / 5 < record['env/success'] < 1 / 3
    # The names with a prefix of podrl's own are those of the loop above.
    names = {x for x in record if x.startswith('env/')}
    assert names == {'env/final', 'env/success', 'env/v'}


def test_an_anakin_run_resumes_the_averages_bitwise(tmp_path, monkeypatch):
  def train_at(path, **kwargs):
    config = _TINY | {'num_devices': 2, 'log.every_updates': 3}
    if kwargs:
      config = {
        k: x for k, x in config.items() if k.startswith(('eval', 'log'))
      }
    return podrl.train(counting, workdir=str(path), config=config, **kwargs)

  whole = train_at(tmp_path / 'whole')
  add, calls = loop.Trainer._add, []

  def interrupt(self, reports):
    calls.append(1)
    if len(calls) == 2:
      signal.raise_signal(signal.SIGINT)
    add(self, reports)

  with monkeypatch.context() as patch:
    patch.setattr(loop.Trainer, '_add', interrupt)
    with pytest.raises(KeyboardInterrupt):
      train_at(tmp_path / 'parts')
  saved = workdir.read_json(str(tmp_path / 'parts' / 'summary.json'))
  assert saved['exit'] == 'interrupted' and saved['num_updates'] < 12
  parts = train_at(tmp_path / 'parts', resume=True)
  assert len(parts.records) == len(whole.records) == 4
  for found, expected in zip(parts.records, whole.records):
    for name in 'env/t', 'env/late', 'episode_length', 'loss':
      assert found[name] == expected[name], name
    # The mean of 1 ... n is (n + 1) / 2.
    mean = (found['episode_length'] + 1) / 2
    assert found['env/t'] == pytest.approx(mean)


def test_an_infinite_reward_stays_in_its_episode():
  episodes = actor_lib._Episodes(2)
  is_first = np.array([[0, 0], [1, 0], [0, 1], [1, 0]], bool)
  reward = np.array([[np.inf, 1], [0, 2], [5, 0], [0, 3]], np.float32)
  returns, lengths = episodes.add(reward, is_first)
  np.testing.assert_array_equal(returns, [np.inf, 3, 5])
  np.testing.assert_array_equal(lengths, [1, 2, 1])
  returns, _ = episodes.add(np.zeros((1, 2)), np.array([[False, True]]))
  np.testing.assert_array_equal(returns, [3])
