"""Tests games for two against a plain simulation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.drivers import anakin
from podrl.drivers import info as info_lib
from podrl.envs import games
from podrl.types import Agent, Masked, Variables


class _State(NamedTuple):
  stones: jax.Array
  current_player: jax.Array
  rewards: jax.Array
  terminated: jax.Array


def _init(rng_key):
  player = jax.random.randint(rng_key, (), 0, 2)
  return _State(jnp.int32(7), player, jnp.zeros(2), jnp.bool(False))


def _step(state, action, rng_key):
  """Takes 1 to 3 stones; who takes 2 moves again; the last stone wins."""
  del rng_key
  stones, mover = state.stones - action - 1, state.current_player
  ends = stones <= 0
  player = jnp.where(action == 1, mover, 1 - mover)
  rewards = jnp.where(ends, 2.0 * jax.nn.one_hot(mover, 2) - 1.0, 0.0)
  return _State(stones, player, rewards, ends)


def _observe(state, player):
  mask = jnp.arange(1, 4) <= state.stones
  return Masked(jnp.stack([state.stones, player]), mask)


GAME = games.Game(_init, _step, _observe, num_actions=3)


def _play(env, num_steps, num_envs=8):
  """Takes random legal actions; returns time steps and actions, time first."""
  state, timestep = env.reset(jax.random.split(jax.random.key(0), num_envs))
  step, rng = jax.jit(env.step), np.random.default_rng(0)
  steps, actions = [timestep], []
  for _ in range(num_steps):
    mask = np.asarray(timestep.obs.action_mask)
    mask = mask | ~mask.any(1, keepdims=True)
    action = np.argmax(rng.random(mask.shape) * mask, axis=1)
    state, timestep = step(state, action)
    steps.append(timestep)
    actions.append(action)
  return jax.tree.map(lambda *x: np.stack(x), *steps), np.stack(actions)


def test_a_time_step_is_that_of_the_player_who_moves():
  env = games.make_device_env(GAME, 'self')
  assert env.spec.has_turns
  steps, actions = _play(env, 60)
  stones, players = np.moveaxis(steps.obs.obs, -1, 0)
  num_ends = 0
  for env_index in range(actions.shape[1]):
    left, mover = 7, players[0, env_index]
    for t, action in enumerate(actions[:, env_index]):
      now = jax.tree.map(lambda x: x[t + 1, env_index], steps)
      if left <= 0:  # The reset step, whose action does not count.
        assert now.is_first and now.reward == 0 and now.discount == 1
        left, mover = 7, players[t + 1, env_index]
        continue
      left -= action + 1
      again = action == 1
      ends = left <= 0
      num_ends += ends
      assert not now.is_first and now.reward == (1.0 if ends else 0.0)
      assert now.discount == (0 if ends else 1 if again else -1)
      mover = mover if again else 1 - mover
      assert (stones[t + 1, env_index], players[t + 1, env_index]) == (
        left,
        mover,
      )
  assert num_ends > 50
  firsts = players[steps.is_first]
  assert 0.2 < firsts.mean() < 0.8  # Either player may begin.


def test_an_opponent_moves_inside_a_step():
  def take_one(rng_key, obs):
    del rng_key, obs
    return jnp.int32(0)

  env = games.make_device_env(GAME, take_one)
  assert not env.spec.has_turns
  steps, actions = _play(env, 60)
  players = steps.obs.obs[..., 1]
  assert not players.any()  # The agent is player 0, and sees its own turns.
  assert set(np.unique(steps.discount)) == {0.0, 1.0}
  assert set(np.unique(steps.reward)) == {-1.0, 0.0, 1.0}
  stones = steps.obs.obs[..., 0]
  ordinary = ~steps.is_first[1:] & (steps.discount[1:] == 1)
  taken = (stones[:-1] - stones[1:])[ordinary]
  # After 2 stones, the agent moves again; else the opponent takes 1 more.
  expected = np.array([2, 2, 4])[actions[ordinary]]
  np.testing.assert_array_equal(taken, expected)


@pytest.mark.parametrize('opponent', ['random', 'self', 'pool'])
def test_a_search_simulates_both_players(opponent):
  """Also for an agent that learned only one side."""
  env = games.make_device_env(GAME, opponent)
  game = _init(jax.random.key(0))
  key = jax.random.key(1)
  for action, sign in (0, -1), (1, 1):
    state = games.to_env_state(game, key)
    simulate = jax.jit(env.spec.simulate)
    state, timestep = simulate(key, state, jnp.int32(action))
    assert timestep.discount == sign
    player = int(timestep.obs.obs[1])
    assert (player == game.current_player) == (sign == 1)
    assert int(timestep.obs.obs[0]) == 7 - action - 1


@pytest.mark.parametrize(
  'num_players,opponent,message',
  [
    (3, 'self', 'needs a game for two players, but this game has 3'),
    (
      2,
      'nobody',
      'the opponent nobody is unknown; give random, self, pool, or',
    ),
    (2, 3, 'the opponent 3 is unknown'),
  ],
)
def test_a_wrong_opponent_is_said(num_players, opponent, message):
  game = GAME._replace(num_players=num_players)
  with pytest.raises(ValueError, match=message):
    games.make_device_env(game, opponent)


def test_records_tell_how_games_ended():
  """The first player takes 3 of 7 stones, the second 2 and then the rest."""
  env = games.make_device_env(GAME, 'self')
  moves = jnp.array([0, 0, 1, 0, 1, 0, 0, 2])  # The action by stones left.

  def act(variables, rng_key, timestep, carry):
    return moves[timestep.obs.obs[:, 0]], (), carry

  agent = Agent(None, None, act, None, None)
  unroll = anakin.make_unroll(env, agent, 20)
  state, timestep = env.reset(jax.random.split(jax.random.key(0), 4))
  zeros = jnp.zeros(4)
  actors = anakin.Actors(
    jnp.arange(4),
    state,
    timestep._replace(info=()),
    (),
    jax.random.split(jax.random.key(1), 4),
    zeros,
    jnp.zeros(4, jnp.int32),
    info_lib.begin(timestep.info, 4),
    zeros + 1,
  )
  variables = Variables((), (), {})
  _, _, episodes, info, finished = jax.jit(unroll)(variables, actors, 0)
  # Each game has 3 steps and a reset step.
  assert int(episodes.num_episodes) == 20
  assert {k: float(x.mean_sum) for k, x in info.items()} == {
    'first_wins': 0.0,
    'draws': 0.0,
    'second_wins': 20.0,
  }
  assert {int(x.num_episodes) for x in info.values()} == {20}
  # The winner moved last, but the return is that of the player who began.
  assert float(episodes.return_sum) == -20.0
  assert set(np.asarray(finished[0]).ravel().tolist()) == {0.0, -1.0}
