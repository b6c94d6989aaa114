"""Evaluation: the first whole episode of each of N environments."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.types import Agent, Array, DeviceEnv, HostEnv, TimeStep, Tree

_CHUNK_STEPS = 128  # Between two looks at whether to stop.
_NUM_RESAMPLES = 2000  # Of a bootstrap interval.

# Of keys `[N]` and one counter.
_fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))


class Evaluation(NamedTuple):
  """Finished evaluation.

  Attributes:
    returns: float32 `[N]`, undiscounted sums of raw rewards.
    lengths: int32 `[N]`, steps.
  """

  returns: np.ndarray
  lengths: np.ndarray


class Share(NamedTuple):
  """One of several processes; each runs its part of the episodes."""

  process: int = 0
  num_processes: int = 1

  def of(self, num_episodes: int) -> slice:
    """This process's episodes."""
    return slice(
      *(
        i * num_episodes // self.num_processes
        for i in (self.process, self.process + 1)
      )
    )


class _State(NamedTuple):
  """Evaluation under way; leaves `[N, ...]`."""

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
  """Builds an evaluation on one device.

  Args:
    env: the environments.
    agent: whose `act` is evaluated.
    num_episodes: how many, one per environment.
    max_episode_steps: where an episode that does not end is cut; it counts
      with the return that it has by then.
    greedy: take the policy's mode rather than a sample.
    share: what this process runs of them.

  Returns:
    `(params, rng_key, should_stop) -> Evaluation`, or None where
    `should_stop()` became true before the end.
  """

  @jax.jit
  def start(rng_key: chex.PRNGKey) -> tuple[_State, chex.PRNGKey]:
    keys = jax.random.split(rng_key, (2, num_episodes))[
      :, share.of(num_episodes)
    ]
    env_state, timestep = env.reset(keys[0])
    size = keys.shape[1]
    return _State(
      env_state,
      timestep,
      agent.initial_carry(size),
      jnp.zeros(size, bool),
      jnp.zeros(size),
      jnp.zeros(size, jnp.int32),
    ), keys[1]

  def step(params: Tree, keys: chex.PRNGKey, t: Array, state: _State) -> _State:
    action, _, carry = agent.act(
      params, _fold_in(keys, t), state.timestep, state.carry, greedy=greedy
    )
    env_state, timestep = env.step(state.env_state, action)
    is_over = jnp.logical_or(state.is_over, timestep.is_first)
    return _State(
      env_state,
      timestep,
      carry,
      is_over,
      state.returns + jnp.where(is_over, 0.0, timestep.reward),
      state.lengths + jnp.where(is_over, 0, 1),
    )

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
    state, keys = start(rng_key)  # Without episodes all are over.
    for t in range(0, max_episode_steps, _CHUNK_STEPS):
      if should_stop():
        return None
      end = min(t + _CHUNK_STEPS, max_episode_steps)
      _, state = run_chunk(params, keys, t, end, state)
      if np.all(state.is_over):
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
  """Builds an evaluation in a pool of its own, made afresh each time.

  Args:
    make_env: `(num_envs, seed) -> HostEnv`.
    agent: whose `act` is evaluated.
    num_episodes: how many, one per environment.
    max_episode_steps: where an episode that does not end is cut.
    greedy: take the policy's mode rather than a sample.
    share: what this process runs of them.

  Returns:
    `(params, rng_key, should_stop) -> Evaluation`, or None where
    `should_stop()` became true before the end.
  """

  def make_act(observe: Callable[[Tree], Tree]) -> Callable:
    @jax.jit
    def act(params, keys, t, timestep, carry):
      action, _, carry = agent.act(
        params,
        _fold_in(keys, t),
        timestep._replace(obs=observe(timestep.obs)),
        carry,
        greedy=greedy,
      )
      return action, carry

    return act

  act = None

  def evaluate(
    params: Tree, rng_key: chex.PRNGKey, should_stop: Callable[[], bool]
  ) -> Evaluation | None:
    nonlocal act
    seed_key, act_key = jax.random.split(rng_key)
    mine = share.of(num_episodes)
    keys = jax.random.split(act_key, num_episodes)[mine]
    size = keys.size
    returns, lengths = np.zeros(size), np.zeros(size, np.int64)
    if not size:
      return Evaluation(returns.astype(np.float32), lengths.astype(np.int32))
    env = make_env(
      size,
      mine.start
      + int(jax.random.randint(seed_key, (), 0, 2**31 - 1 - num_episodes)),
    )
    act = act or make_act(env.observe)  # Compiled once for all evaluations.
    carry = agent.initial_carry(size)
    is_over = np.zeros(size, bool)
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
    return Evaluation(returns.astype(np.float32), lengths.astype(np.int32))

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
