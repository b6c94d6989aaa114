"""Evaluates an agent on the first whole episode of each of N environments."""

from collections.abc import Callable
import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podrl.core.learner import fold_into_rows
from podrl.core.returns import of_first_player
from podrl.fields import COUNT, FROM_0, Field, Range
from podrl.types import Agent, DeviceEnv, HostEnv, TimeStep, Tree

FIELDS = {
  'eval.num_episodes': Field(
    128, 'Number of episodes; each has its own environment.', COUNT
  ),
  'eval.every_env_steps': Field(
    0, 'Steps between evaluations; 0 means only at the end.', FROM_0
  ),
  'eval.greedy': Field(True, 'Uses the best action, not a sample.'),
  'eval.opponents': Field(
    ('random',),
    'Opponents of an agent that otherwise plays against itself: random, first '
    '(the untrained policy) or directories of runs.',
  ),
  'eval.max_episode_steps': Field(
    0,
    "Steps of the longest episode; 0 means the environment's limit, or 10,000 "
    'if it has none.',
    Range(0, 2**31 - 1),
  ),
}

_CHUNK_STEPS = 128  # Steps between two calls of `should_stop`.


class Evaluation(NamedTuple):
  """The episodes of an evaluation."""

  returns: np.ndarray  # Float32 `[N]`, undiscounted sums of raw rewards.
  lengths: np.ndarray  # Int32 `[N]`, in steps.


class Settings(NamedTuple):
  """Settings of an evaluation."""

  num_episodes: int  # Episodes of all processes, each in its own environment.
  max_episode_steps: int  # A longer episode counts only until this length.
  greedy: bool  # Whether to take the policy's mode instead of a sample.
  process: int = 0  # Index of this process, which runs a part of the episodes.
  num_processes: int = 1

  def episodes(self) -> slice:
    """Returns the indices of this process's episodes."""
    start = self.process * self.num_episodes // self.num_processes
    end = (self.process + 1) * self.num_episodes // self.num_processes
    return slice(start, end)


class _State(NamedTuple):
  """The state of an unfinished evaluation; leaves `[N, ...]`."""

  env_state: Tree
  timestep: TimeStep
  carry: Tree
  is_over: jax.Array
  returns: jax.Array
  lengths: jax.Array
  sign: Tree  # See `anakin.Actors`.


def make_evaluate(
  env: DeviceEnv, agent: Agent, settings: Settings
) -> Callable[..., Evaluation | None]:
  """Builds a function that evaluates an agent on one device.

  Returns:
    `(variables, rng_key, should_stop) -> Evaluation | None`. The result is None
    if `should_stop()` became true before the end.
  """
  act = functools.partial(agent.act, greedy=settings.greedy)

  @jax.jit
  def start(rng_key):
    keys = jax.random.split(rng_key, (2, settings.num_episodes))
    episodes = settings.episodes()
    reset_keys, act_keys = keys[:, episodes]
    size = reset_keys.size
    state = _State(
      *env.reset(reset_keys),
      agent.initial_carry(jnp.arange(settings.num_episodes)[episodes]),
      is_over=jnp.zeros(size, bool),
      returns=jnp.zeros(size),
      lengths=jnp.zeros(size, jnp.int32),
      sign=jnp.ones(size) if env.spec.has_turns else (),
    )
    return state, act_keys

  @jax.jit
  def run_chunk(variables, keys, t, end, state):
    def is_running(loop: tuple[jax.Array, _State]) -> jax.Array:
      return (loop[0] < end) & ~jnp.all(loop[1].is_over)

    def step(loop: tuple[jax.Array, _State]) -> tuple[jax.Array, _State]:
      t, (env_state, timestep, carry, is_over, returns, lengths, sign) = loop
      keys_t, seen = fold_into_rows(keys, t), timestep._replace(info=())
      known = agent.planning(env_state)
      action, _, carry = act(variables, keys_t, seen, carry, **known)
      env_state, timestep = env.step(env_state, action)
      is_over = jnp.logical_or(is_over, timestep.is_first)
      reward, sign = of_first_player(timestep, sign)
      returns += jnp.where(is_over, 0.0, reward)
      lengths += jnp.where(is_over, 0, 1)
      state = _State(
        env_state, timestep, carry, is_over, returns, lengths, sign
      )
      return t + 1, state

    return jax.lax.while_loop(is_running, step, (t, state))[1]

  def evaluate(variables, rng_key, should_stop):
    if should_stop():  # Do not compile in vain.
      return None
    state, keys = start(rng_key)
    for t in range(0, settings.max_episode_steps, _CHUNK_STEPS):
      if should_stop():
        return None
      end = min(t + _CHUNK_STEPS, settings.max_episode_steps)
      state = run_chunk(variables, keys, t, end, state)
      if np.all(state.is_over):  # True if this process has no episodes.
        break
    return Evaluation(np.asarray(state.returns), np.asarray(state.lengths))

  return evaluate


def make_host_evaluate(
  make_env: Callable[[int, int], HostEnv], agent: Agent, settings: Settings
) -> Callable[..., Evaluation | None]:
  """Builds an evaluation that makes a new pool of environments in each call.

  `make_env` is `(num_envs, seed) -> HostEnv`. For the result, see
  `make_evaluate`.
  """
  observe: Any = None

  # All calls use the first pool's `observe`, so that `act` compiles only once.
  @jax.jit
  def act(variables, keys, t, timestep, carry):
    timestep = timestep._replace(obs=observe(timestep.obs))
    keys, greedy = fold_into_rows(keys, t), settings.greedy
    action, _, carry = agent.act(
      variables, keys, timestep, carry, greedy=greedy
    )
    return action, carry

  def evaluate(variables, rng_key, should_stop):
    nonlocal observe
    seed_key, act_key = jax.random.split(rng_key)
    num_episodes, episodes = settings.num_episodes, settings.episodes()
    keys = jax.random.split(act_key, num_episodes)[episodes]
    returns, lengths = np.zeros(keys.size), np.zeros(keys.size, np.int32)
    if not keys.size:
      return Evaluation(returns.astype(np.float32), lengths)
    seed = jax.random.randint(seed_key, (), 0, 2**31 - 1 - num_episodes)
    env = make_env(keys.size, episodes.start + int(seed))
    observe = observe or env.spec.observe
    carry = agent.initial_carry(jnp.arange(num_episodes)[episodes])
    is_over = np.zeros(keys.size, bool)
    with contextlib.closing(env):
      timestep = env.reset()._replace(info=())
      for t in range(settings.max_episode_steps):
        if should_stop():
          return None
        action, carry = act(variables, keys, np.int32(t), timestep, carry)
        timestep = env.step(np.asarray(action))._replace(info=())
        is_over |= timestep.is_first
        returns += np.where(is_over, 0.0, timestep.reward)
        lengths += ~is_over
        if is_over.all():
          break
    return Evaluation(returns.astype(np.float32), lengths)

  return evaluate
