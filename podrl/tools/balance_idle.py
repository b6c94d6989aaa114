"""Parts of a host that cost nothing, so that the others can be timed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podrl.core.learner import make_learner
from podrl.types import Agent, Discrete, HostEnv, Learner, TimeStep, Tree

_TAPE = 16  # Random actions, over and over.


def _tape(env: HostEnv, num_envs: int) -> list[np.ndarray]:
  """Random actions for a pool."""
  rng, action = np.random.default_rng(0), env.spec.action
  if isinstance(action, Discrete):
    return [
      rng.integers(action.num_actions, size=num_envs, dtype=np.int32)
      for _ in range(_TAPE)
    ]
  low, high = (np.clip(x, -1e3, 1e3) for x in (action.low, action.high))
  return [
    rng.uniform(low, high, (num_envs, *action.shape)).astype(np.float32)
    for _ in range(_TAPE)
  ]


def on_tape(env: HostEnv, num_envs: int) -> HostEnv:
  """An environment that acts at random and shows nothing."""
  tape, count = _tape(env, num_envs), 0
  blank = np.zeros((num_envs, 1), np.float32)

  def step(action: np.ndarray) -> TimeStep:
    nonlocal count
    del action
    count += 1
    return env.step(tape[count % _TAPE])._replace(obs=blank)

  return HostEnv(
    env.spec, lambda: env.reset()._replace(obs=blank), step, env.close
  )


def standing(env: HostEnv, num_envs: int) -> HostEnv:
  """So many environments that cost nothing: all stay where one began."""
  timestep = jax.tree.map(lambda x: np.repeat(x, num_envs, axis=0), env.reset())
  timestep = timestep._replace(is_first=np.zeros_like(timestep.is_first))
  env.close()
  return HostEnv(
    env.spec,
    lambda: timestep,
    lambda action: timestep,
    lambda: None,
    env.observe,
  )


def idle_agent() -> Agent:
  """An agent that costs nothing, and learns as little."""

  def act(params, rng_key, timestep, carry, *, greedy=False):
    del params, rng_key, greedy
    return jnp.zeros(timestep.is_first.shape, jnp.int32), (), carry

  return Agent(
    lambda rng_key: jnp.zeros(()),
    lambda num_envs: (),
    act,
    lambda params, trajectory, mean: trajectory.timestep.reward,
    lambda params, target_params, batch, rng_key: (0.0 * params, {}),
  )


def idle_learner(params: Tree) -> Learner:
  """A learner that costs nothing; its actors act with `params`."""
  idle = make_learner(idle_agent(), optax.sgd(0.0))
  return idle._replace(
    init=lambda rng_key, example: idle.init(rng_key, example)._replace(
      params=params
    ),
    update=lambda state, trajectory, rng_key: (
      state._replace(num_updates=state.num_updates + 1),
      {'loss': jnp.zeros(())},
    ),
  )
