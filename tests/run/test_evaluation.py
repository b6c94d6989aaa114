"""Tests evaluation on first whole episodes: greedy, sampled, and bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.run import evaluation as evaluate
from podrl.types import Agent, DeviceEnv, Discrete, EnvSpec, HostEnv, TimeStep

_SPEC = EnvSpec(jax.ShapeDtypeStruct((), jnp.int32), False, Discrete(2), 1, 0)


def _env():
  """Makes episodes of 1 to 5 steps, in which the reward is the action.

  After the episode's end, each step has the reward 100, which must not count.
  """

  def reset(rng_key):
    length = 1 + jax.random.randint(rng_key, (), 0, 5)
    state = (length, jnp.zeros((), jnp.int32))
    return state, TimeStep(length, jnp.zeros(()), jnp.ones(()), jnp.array(True))

  def step(state, action):
    length, t = state
    t = t + 1
    reward = jnp.where(t > length, 100.0, action.astype(jnp.float32))
    is_first = t == length + 1
    return (length, t), TimeStep(
      length,
      jnp.where(is_first, 0.0, reward),
      jnp.where(t == length, 0.0, 1.0),
      is_first,
    )

  return DeviceEnv(_SPEC, jax.vmap(reset), jax.vmap(step))


def _act(params, rng_key, timestep, carry, *, greedy=False):
  sampled = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5))(rng_key)
  action = jnp.ones_like(sampled) if greedy else sampled
  return action.astype(jnp.int32), (), carry


_AGENT = Agent(None, lambda n: (), _act, None, None)


def _evaluate(max_steps=1000, greedy=True, stop=lambda: False):
  return evaluate.make_evaluate(
    _env(), _AGENT, evaluate.Settings(64, max_steps, greedy)
  )((), jax.random.key(0), stop)


def test_first_whole_episodes():
  outcome = _evaluate()
  assert outcome.returns.shape == outcome.lengths.shape == (64,)
  # Each greedy action has the reward 1, so an episode's return is its length.
  np.testing.assert_array_equal(outcome.returns, outcome.lengths)
  assert set(outcome.lengths) == {1, 2, 3, 4, 5}


def test_sampled_actions_differ_from_greedy_ones():
  outcome = _evaluate(greedy=False)
  share = outcome.returns.sum() / outcome.lengths.sum()
  assert 0.3 < share < 0.7


@pytest.mark.parametrize('max_steps', [1, 2, 3])
def test_an_episode_that_does_not_end_is_cut(max_steps):
  outcome = _evaluate(max_steps)
  assert outcome.lengths.max() == max_steps


def test_what_is_carried_goes_from_step_to_step():
  def act(params, rng_key, timestep, carry, *, greedy=False):
    return carry + 1, (), carry + 1

  agent = Agent(None, jnp.zeros_like, act, None, None)
  outcome = evaluate.make_evaluate(
    _env(), agent, evaluate.Settings(64, 9, True)
  )((), jax.random.key(0), lambda: False)
  n = outcome.lengths
  np.testing.assert_array_equal(outcome.returns, n * (n + 1) / 2)  # 1 + ... + n

  def make_env(num_envs, seed):
    t = np.zeros(num_envs)

    def timestep(reward):
      ended = t == 3
      return TimeStep(
        np.zeros(num_envs),
        reward.astype(np.float32),
        1.0 - ended,
        (t == 0) | (t == 4),
      )

    def step(action):
      nonlocal t
      t = t + 1
      return timestep(action)

    return HostEnv(_SPEC, lambda: timestep(t), step, lambda: None)

  outcome = evaluate.make_host_evaluate(
    make_env, agent, evaluate.Settings(2, 9, True)
  )((), jax.random.key(0), lambda: False)
  np.testing.assert_array_equal(outcome.lengths, [3, 3])
  np.testing.assert_array_equal(outcome.returns, [6, 6])


def test_it_stops_when_asked():
  assert _evaluate(stop=lambda: True) is None


@pytest.mark.parametrize('num_episodes', [7, 2])
def test_the_shares_of_processes_make_the_whole(num_episodes):
  def evaluate_share(*share):
    settings = evaluate.Settings(num_episodes, 9, False, *share)
    return evaluate.make_evaluate(_env(), _AGENT, settings)(
      (), jax.random.key(0), lambda: False
    )

  whole, parts = evaluate_share(), [evaluate_share(i, 3) for i in range(3)]
  for a, *b in zip(whole, *parts):
    np.testing.assert_array_equal(a, np.concatenate(b))

  seeds = []

  def make_env(num_envs, seed):  # An episode's length is its seed's last digit.
    seeds.extend(range(seed, seed + num_envs))
    lengths, t = np.arange(seed, seed + num_envs) % 10 + 1, 0

    def timestep():
      return TimeStep(
        np.zeros(num_envs),
        np.ones(num_envs, np.float32),
        1.0 - (t == lengths),
        (t == 0) | (t == lengths + 1),
      )

    def step(action):
      nonlocal t
      t += 1
      return timestep()

    return HostEnv(_SPEC, timestep, step, lambda: None)

  def evaluate_host_share(*share):
    settings = evaluate.Settings(num_episodes, 99, False, *share)
    return evaluate.make_host_evaluate(make_env, _AGENT, settings)(
      (), jax.random.key(0), lambda: False
    )

  whole, parts = (
    evaluate_host_share(),
    [evaluate_host_share(i, 3) for i in range(3)],
  )
  assert seeds[:num_episodes] == seeds[num_episodes:]
  for a, *b in zip(whole, *parts):
    np.testing.assert_array_equal(a, np.concatenate(b))
