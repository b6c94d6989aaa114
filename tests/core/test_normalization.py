"""Tests running normalisation, against numpy and around an agent."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_learner import make_update

from podrl.agents import impala, ppo
from podrl.core import distributions, normalization
from podrl.networks import actor_critic as networks
from podrl.networks import torsos
from podrl.types import TimeStep, Trajectory

_OBS = {
  'a': jax.ShapeDtypeStruct((3,), jnp.float32),
  'b': jax.ShapeDtypeStruct((2, 2), jnp.uint8),
}
_GAMMA = 0.9


def _agent(*, observations=True, rewards=True, make=ppo.make_agent, **kwargs):
  dist = distributions.categorical(3)
  network = networks.make_network(
    lambda: torsos.MLP((8,)), normalization.as_float(_OBS), 3
  )
  agent = normalization.normalize(
    make(network, dist, gamma=_GAMMA, **kwargs),
    _OBS,
    observations=observations,
    rewards=rewards,
  )
  return agent._replace(init=jax.jit(agent.init))


def _prepare(agent, variables, trajectory):
  """Prepares a batch on one device."""
  prepare = jax.jit(functools.partial(helpers.prepare, agent))
  return prepare(variables, trajectory)


def _steps(length=40, batch=4, seed=0):
  """Makes time steps whose components have very different moments."""
  rng = np.random.default_rng(seed)
  is_first = rng.random((length, batch)) < 0.15
  is_first[0] = True
  shape = (length, batch)
  obs = {
    'a': rng.normal([0, 5e3, -3], [1, 0.5, 20], (*shape, 3)).astype(np.float32),
    'b': rng.integers(0, 256, (*shape, 2, 2)).astype(np.uint8),
  }
  reward = np.where(is_first, 0, rng.normal(3, 2, shape)).astype(np.float32)
  return TimeStep(obs, reward, np.ones(shape, np.float32), is_first)


def _unrolls(agent, variables, steps, length=8):
  """Acts through the steps; the last step of an unroll starts the next."""
  act = jax.jit(agent.act)
  batch = steps.is_first.shape[1]
  carry, unrolls = agent.initial_carry(np.arange(batch)), []
  for start in range(0, len(steps.is_first) - length, length):
    first, rows = carry, []
    for t in range(start, start + length):
      action, extras, carry = act(
        variables,
        jax.random.split(jax.random.key(t), batch),
        jax.tree.map(lambda x: x[t], steps),
        carry,
      )
      rows.append((action, extras))
    actions, extras = jax.tree.map(lambda *x: np.stack(x), *rows)
    unrolls.append(
      Trajectory(
        jax.tree.map(lambda x: x[start : start + length + 1], steps),
        actions,
        extras,
        jax.tree.map(lambda x: x[None], first),
        *helpers.counters(batch, start),
      )
    )
  return unrolls


def _plain_returns(steps):
  """Computes the discounted return on each arrival, step by step."""
  so_far, rows = np.zeros(steps.is_first.shape[1]), []
  for reward, is_first in zip(steps.reward, steps.is_first):
    so_far = np.where(is_first, 0.0, _GAMMA * so_far + reward)
    rows.append(so_far)
  return np.stack(rows)


@pytest.mark.parametrize(
  'num_devices', [1, pytest.param(2, marks=pytest.mark.slow), 4]
)
def test_moments_are_those_of_all_steps_so_far(num_devices):
  agent = _agent()
  steps = _steps()
  learner, update = make_update(
    agent, optax.sgd(0.1), num_devices, num_epochs=2, num_minibatches=2
  )
  state = learner.init(jax.random.key(0), ())
  unrolls = _unrolls(agent, state.variables, steps)
  for i, trajectory in enumerate(unrolls):
    state, _ = update(state, trajectory, jax.random.key(i))
    statistics = state.variables.statistics
    seen = slice(8 * (i + 1))
    for name, x in steps.obs.items():
      x = x[seen].astype(np.float64)
      np.testing.assert_allclose(
        statistics.obs.mean[name], x.mean((0, 1)), rtol=1e-5, atol=1e-4
      )
      np.testing.assert_allclose(
        statistics.obs.variance[name], x.var((0, 1)), rtol=1e-4
      )
    returns = _plain_returns(steps)[seen][~steps.is_first[seen]]
    np.testing.assert_allclose(
      statistics.discounted_return.mean, returns.mean(), rtol=1e-5
    )
    np.testing.assert_allclose(
      statistics.discounted_return.variance, returns.var(), rtol=1e-4
    )
  assert len(unrolls) == 4 and int(state.num_updates) == 4


@pytest.mark.parametrize('num_devices', [1, 4])
def test_the_first_update_learns_from_normalised_numbers(num_devices):
  seen = []

  def spy(agent):
    def prepare(variables, target_params, sample, *rest):
      jax.debug.callback(
        lambda *x: seen.append(x),
        sample.trajectory.timestep.obs['a'],
        sample.trajectory.timestep.reward,
      )
      return agent.prepare(variables, target_params, sample, *rest)

    return agent._replace(prepare=prepare)

  steps = _steps(9)
  steps.obs['a'][..., 0] = 1e4 + steps.obs['a'][..., 0]
  plain = ppo.make_agent(
    networks.make_network(
      lambda: torsos.MLP((8,)), normalization.as_float(_OBS), 3
    ),
    distributions.categorical(3),
    gamma=_GAMMA,
  )
  agent = normalization.normalize(
    spy(plain), _OBS, observations=True, rewards=True
  )
  learner, update = make_update(agent, optax.sgd(0.1), num_devices)
  state = learner.init(jax.random.key(0), ())
  (trajectory,) = _unrolls(agent, state.variables, steps)
  update(state, trajectory, jax.random.key(0))
  jax.effects_barrier()
  # Devices have one environment each; their order is not known.
  obs, reward = (np.concatenate(x, axis=1) for x in zip(*seen))
  a = steps.obs['a'].astype(np.float64)
  expected = (a - a[:-1].mean((0, 1))) / a[:-1].std((0, 1))
  np.testing.assert_allclose(
    np.sort(obs, axis=1), np.sort(expected, axis=1), atol=2e-3
  )
  returns = _plain_returns(steps)[:-1][~steps.is_first[:-1]]
  np.testing.assert_allclose(
    np.sort(reward, axis=1),
    np.sort(steps.reward / returns.std(), axis=1),
    rtol=1e-4,
    atol=1e-6,
  )


@pytest.mark.parametrize(
  'size,offset', [(6e-5, 0), (1e-12, 0), (0.005, 1e3), (1e-8, 1e-3), (1e14, 0)]
)
def test_numbers_of_any_size_are_normalised(size, offset):
  obs = {'x': jax.ShapeDtypeStruct((), jnp.float32)}
  rng = np.random.default_rng(0)
  x = np.float32(size * (rng.random((64, 8)) < 0.5) + offset)
  weight = np.ones(x.shape, np.float32)
  moments = normalization.calibrate(
    normalization.init(obs), {'x': x}, weight, lambda tree: tree
  )
  found = normalization._standardize(moments, {'x': x})['x']
  exact = x.astype(np.float64)
  expected = (exact - exact.mean()) / exact.std()
  # Beside a large offset, the mean has a rounding error.
  tolerance = 1e-4 + 2e-7 * offset / size
  np.testing.assert_allclose(found, expected, rtol=tolerance)


@pytest.mark.parametrize('value', [0.1, 1e3, 123456.7, 3e38])
def test_the_rounding_errors_of_a_constant_are_not_enlarged(value):
  obs = jax.ShapeDtypeStruct((), jnp.float32)
  x = np.full((64, 8), value, np.float32)
  moments, weight = normalization.init(obs), np.ones(x.shape, np.float32)
  for _ in range(50):
    measured = normalization.measure(moments, x, weight)
    moments = normalization.absorb(moments, measured)
    assert np.isfinite(moments.variance)
    if value < 1e18:
      found = normalization._standardize(moments, x[0])
      assert np.ptp(found) == 0.0
  assert value > 1e18 or np.abs(found).max() < 1e-4 * value


def _with_statistics(agent):
  """Returns variables whose statistics differ from the initial ones."""
  variables = agent.init(jax.random.key(0))
  statistics = variables.statistics
  mean = {'a': jnp.asarray([1.0, 5e3, -2.0]), 'b': jnp.full((2, 2), 100.0)}
  variance = {'a': jnp.asarray([4.0, 1.0, 100.0]), 'b': jnp.full((2, 2), 1e3)}
  return variables._replace(
    statistics=statistics._replace(
      obs=statistics.obs
      and statistics.obs._replace(mean=mean, variance=variance),
      discounted_return=statistics.discounted_return
      and (statistics.discounted_return._replace(variance=jnp.asarray(25.0))),
    )
  )


@pytest.mark.parametrize(
  'make',
  [ppo.make_agent, impala.make_agent],
)
def test_the_agent_sees_what_was_normalised_by_hand(make):
  wrapped = _agent(make=make)
  plain = make(
    networks.make_network(
      lambda: torsos.MLP((8,)), normalization.as_float(_OBS), 3
    ),
    distributions.categorical(3),
    gamma=_GAMMA,
  )
  variables = _with_statistics(wrapped)
  steps = _steps(17)
  (trajectory, _) = _unrolls(wrapped, variables, steps)
  a = np.clip((steps.obs['a'] - [1.0, 5e3, -2.0]) / [2.0, 1.0, 10.0], -10, 10)
  b = np.clip((steps.obs['b'] - 100.0) / 1e3**0.5, -10, 10)
  assert np.abs(a).max() < 10  # The clip is tested below.
  by_hand = steps._replace(
    obs={'a': a.astype(np.float32), 'b': b.astype(np.float32)},
    reward=steps.reward / np.float32(5),
  )  # No reward reaches the clip of 10.
  bare = variables._replace(statistics=())
  (expected, _) = _unrolls(plain, bare, by_hand)
  for x, y in zip(
    jax.tree.leaves(trajectory.extras), jax.tree.leaves(expected.extras)
  ):
    np.testing.assert_allclose(x, y, atol=1e-3)
  expected = expected._replace(
    action=trajectory.action, extras=trajectory.extras
  )

  def loss(agent, *args):
    batch = _prepare(agent, *args)
    return jax.jit(agent.loss)(args[0], (), batch, jax.random.key(0))[0]

  np.testing.assert_allclose(
    loss(wrapped, variables, trajectory),
    loss(plain, bare, expected),
    rtol=1e-3,
  )


def test_far_observations_are_clipped():
  agent = _agent(rewards=False)
  variables = _with_statistics(agent)
  assert variables.statistics.discounted_return == ()
  near, far = (
    TimeStep(
      {
        'a': jnp.asarray([[1.0 + 2 * x, 5e3, -2.0]]),
        'b': jnp.full((1, 2, 2), 100, jnp.uint8),
      },
      jnp.zeros(1),
      jnp.ones(1),
      jnp.ones(1, bool),
    )
    for x in (10.0, 1e4)
  )
  keys = jax.random.split(jax.random.key(0), 1)
  carry = agent.initial_carry(np.zeros(1, np.int32))
  act = jax.jit(agent.act)
  _, a, _ = act(variables, keys, near, carry)
  _, b, _ = act(variables, keys, far, carry)
  np.testing.assert_allclose(a.value, b.value, rtol=1e-5)
  other = near._replace(obs=near.obs | {'a': jnp.zeros((1, 3))})
  _, c, _ = act(variables, keys, other, carry)
  assert not np.allclose(a.value, c.value, rtol=1e-3)


def test_an_update_sees_the_statistics_that_acting_saw():
  agent = _agent(normalize_advantage=False)
  learner, update = make_update(agent, optax.sgd(0.1), 1)
  state = learner.init(jax.random.key(0), ())
  variables = state.variables
  counted = [x._replace(count=jnp.ones(())) for x in variables.statistics[1:]]
  statistics = normalization.Statistics((), *counted)
  state = state._replace(variables=variables._replace(statistics=statistics))
  first, *_ = _unrolls(agent, state.variables, _steps())
  after, metrics = update(state, first, jax.random.key(1))
  # At the only step of SGD, every ratio is 1, so the KL is 0.
  np.testing.assert_allclose(metrics['approx_kl'], 0.0, atol=1e-8)
  # With the statistics after this unroll, the ratios differ from 1.
  stale = state._replace(
    variables=state.variables._replace(statistics=after.variables.statistics)
  )
  _, metrics = update(stale, first, jax.random.key(1))
  assert metrics['approx_kl'] > 1e-5


def test_the_optimizer_leaves_the_statistics_alone():
  agent = _agent(rewards=False)
  still = agent._replace(
    absorb=lambda variables, measured: variables, calibrate=None
  )
  learner, update = make_update(still, optax.adamw(0.1, weight_decay=0.5), 1)
  state = learner.init(jax.random.key(0), ())
  trajectory, *_ = _unrolls(agent, state.variables, _steps())
  new, _ = update(state, trajectory, jax.random.key(1))
  for x, y in zip(
    *map(
      jax.tree.leaves, (new.variables.statistics, state.variables.statistics)
    )
  ):
    np.testing.assert_array_equal(x, y)
  assert any(
    np.any(x != y)
    for x, y in zip(
      *map(jax.tree.leaves, (new.variables.params, state.variables.params))
    )
  )


def test_an_unroll_of_reset_steps_does_not_change_the_return_statistics():
  agent = _agent(observations=False)
  steps = _steps(9)._replace(is_first=np.ones((9, 4), bool))
  learner, update = make_update(agent, optax.sgd(0.1), 1)
  state = learner.init(jax.random.key(0), ())
  (trajectory,) = _unrolls(agent, state.variables, steps)
  new, _ = update(state, trajectory, jax.random.key(1))
  moments = new.variables.statistics.discounted_return
  assert (
    float(moments.mean),
    float(moments.variance),
    float(moments.count),
  ) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
  'constant',
  [8.907] + [pytest.param(x, marks=pytest.mark.slow) for x in (-57.3, 1000.1)],
)
def test_a_constant_looks_the_same_whatever_the_devices(constant):
  seen = []
  for num_devices in (1, 4):
    agent = _agent(rewards=False)
    steps = _steps()
    steps.obs['a'][..., 0] = constant
    learner, update = make_update(agent, optax.sgd(0.0), num_devices)
    state = learner.init(jax.random.key(0), ())
    for i, trajectory in enumerate(_unrolls(agent, state.variables, steps)):
      state, _ = update(state, trajectory, jax.random.key(i))
    batch = _prepare(agent, state.variables, trajectory)
    seen.append(batch.obs['a'])
    np.testing.assert_allclose(batch.obs['a'][..., 0], 0, atol=1e-3)
  np.testing.assert_allclose(seen[0], seen[1], atol=1e-3)


def test_rewards_are_clipped_and_unscaled_until_there_are_some():
  agent = _agent(
    observations=False,
    make=impala.make_agent,
  )
  steps = _steps(17)
  steps.reward[:] = 0
  learner, update = make_update(agent, optax.sgd(0.0), 1)
  state = learner.init(jax.random.key(0), ())
  for trajectory in _unrolls(agent, state.variables, steps):
    state, _ = update(state, trajectory, jax.random.key(1))
  assert state.variables.statistics.discounted_return.variance == 0.0
  timestep = trajectory.timestep
  rare = np.zeros_like(timestep.reward)
  rare[3:5, 0] = 4.0, -99.0
  trajectory = trajectory._replace(timestep=timestep._replace(reward=rare))
  batch = _prepare(agent, state.variables, trajectory)
  rewards = batch.timestep.reward[0]
  assert (rewards[3], rewards[4]) == (4.0, -10.0)


def test_nothing_to_normalise_is_the_agent_itself():
  agent = _agent(observations=False, rewards=False)
  assert (
    agent.measure(None, None) == () and agent.initial_carry(np.arange(3)) == ()
  )
