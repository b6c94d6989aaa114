"""Evaluates an agent on the first whole episode of each of N environments."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.types import Agent, Array, DeviceEnv, HostEnv, TimeStep, Tree

_CHUNK_STEPS = 128  # Steps between two calls of `should_stop`.
_NUM_RESAMPLES = 2000  # Of a bootstrap interval.

# Folds one counter into each key; keys `[N]`.
_fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))


class Evaluation(NamedTuple):
  """The episodes of an evaluation.

  Attributes:
    returns: float32 `[N]`, undiscounted sums of raw rewards.
    lengths: int32 `[N]`, in steps.
  """

  returns: np.ndarray
  lengths: np.ndarray


class Share(NamedTuple):
  """Which of several processes this is; each runs its part of the episodes."""

  process: int = 0
  num_processes: int = 1

  def of(self, num_episodes: int) -> slice:
    """Returns the episodes of this process."""
    start = self.process * num_episodes // self.num_processes
    end = (self.process + 1) * num_episodes // self.num_processes
    return slice(start, end)


class _State(NamedTuple):
  """The state of an unfinished evaluation; leaves `[N, ...]`."""

  env_state: Tree
  timestep: TimeStep
  carry: Tree
  is_over: Array
  returns: Array
  lengths: Array


def make_evaluate(
  env: DeviceEnv,
  agent: Agent,
  *,
  num_episodes: int,
  max_episode_steps: int,
  greedy: bool,
  share: Share = Share(),
) -> Callable[..., Evaluation | None]:
  """Builds an evaluation of an agent on one device.

  Args:
    env: environments on the device.
    agent: the agent to evaluate.
    num_episodes: episodes of all processes, each in its own environment.
    max_episode_steps: a longer episode is cut here, and its return so far
      counts.
    greedy: whether to take the policy's mode instead of a sample.
    share: selects the episodes of this process.

  Returns:
    `(params, rng_key, should_stop) -> Evaluation`, or None if `should_stop()`
    became true before the end.
  """

  @jax.jit
  def start(rng_key: chex.PRNGKey) -> tuple[_State, chex.PRNGKey]:
    keys = jax.random.split(rng_key, (2, num_episodes))
    reset_keys, act_keys = keys[:, share.of(num_episodes)]
    size = reset_keys.size
    state = _State(
      *env.reset(reset_keys),
      agent.initial_carry(size),
      is_over=jnp.zeros(size, bool),
      returns=jnp.zeros(size),
      lengths=jnp.zeros(size, jnp.int32),
    )
    return state, act_keys

  def step(params: Tree, keys: chex.PRNGKey, t: Array, state: _State) -> _State:
    action, _, carry = agent.act(
      params, _fold_in(keys, t), state.timestep, state.carry, greedy=greedy
    )
    env_state, timestep = env.step(state.env_state, action)
    is_over = jnp.logical_or(state.is_over, timestep.is_first)
    returns = state.returns + jnp.where(is_over, 0.0, timestep.reward)
    lengths = state.lengths + jnp.where(is_over, 0, 1)
    return _State(env_state, timestep, carry, is_over, returns, lengths)

  @jax.jit
  def run_chunk(
    params: Tree, keys: chex.PRNGKey, t: Array, end: Array, state: _State
  ) -> tuple[Array, _State]:
    return jax.lax.while_loop(
      lambda loop: (loop[0] < end) & ~jnp.all(loop[1].is_over),
      lambda loop: (loop[0] + 1, step(params, keys, loop[0], loop[1])),
      (t, state),
    )

  def evaluate(
    params: Tree, rng_key: chex.PRNGKey, should_stop: Callable[[], bool]
  ) -> Evaluation | None:
    state, keys = start(rng_key)
    for t in range(0, max_episode_steps, _CHUNK_STEPS):
      if should_stop():
        return None
      end = min(t + _CHUNK_STEPS, max_episode_steps)
      _, state = run_chunk(params, keys, t, end, state)
      if np.all(state.is_over):  # True as well if there are no episodes.
        break
    return Evaluation(np.asarray(state.returns), np.asarray(state.lengths))

  return evaluate


def make_host_evaluate(
  make_env: Callable[[int, int], HostEnv],
  agent: Agent,
  *,
  num_episodes: int,
  max_episode_steps: int,
  greedy: bool,
  share: Share = Share(),
) -> Callable[..., Evaluation | None]:
  """Builds an evaluation of an agent that makes a new pool for each call.

  Args:
    make_env: `(num_envs, seed) -> HostEnv`.
    agent: the agent to evaluate.
    num_episodes: this and the others are those of `make_evaluate`.

  Returns:
    As `make_evaluate`.
  """
  observe = None

  # `observe` is that of the first pool, so that this compiles only once.
  @jax.jit
  def act(params, keys, t, timestep, carry):
    timestep = timestep._replace(obs=observe(timestep.obs))
    keys = _fold_in(keys, t)
    action, _, carry = agent.act(params, keys, timestep, carry, greedy=greedy)
    return action, carry

  def evaluate(
    params: Tree, rng_key: chex.PRNGKey, should_stop: Callable[[], bool]
  ) -> Evaluation | None:
    nonlocal observe
    seed_key, act_key = jax.random.split(rng_key)
    episodes = share.of(num_episodes)
    keys = jax.random.split(act_key, num_episodes)[episodes]
    returns = np.zeros(keys.size)
    lengths = np.zeros(keys.size, np.int32)
    if not keys.size:
      return Evaluation(returns.astype(np.float32), lengths)
    seed = jax.random.randint(seed_key, (), 0, 2**31 - 1 - num_episodes)
    env = make_env(keys.size, episodes.start + int(seed))
    observe = observe or env.observe
    carry = agent.initial_carry(keys.size)
    is_over = np.zeros(keys.size, bool)
    try:
      timestep = env.reset()
      for t in range(max_episode_steps):
        if should_stop():
          return None
        action, carry = act(params, keys, np.int32(t), timestep, carry)
        timestep = env.step(np.asarray(action))
        is_over |= timestep.is_first
        returns += np.where(is_over, 0.0, timestep.reward)
        lengths += ~is_over
        if is_over.all():
          break
    finally:
      env.close()
    return Evaluation(returns.astype(np.float32), lengths)

  return evaluate


def bootstrap(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Computes a 95 % confidence interval of the mean by resampling.

  The draws are the same at each call.

  Args:
    values: float64 `[N, ...]`, one row for each run or episode.

  Returns:
    The ends of the interval, `[...]` each.

  Source: Efron 1979, Bootstrap Methods; the percentile interval.
  """
  rng = np.random.default_rng(0)
  draws = rng.integers(len(values), size=(_NUM_RESAMPLES, len(values)))
  means = np.stack([values[draw].mean(0) for draw in draws])
  low, high = np.percentile(means, [2.5, 97.5], axis=0)
  return low, high
