"""CartPole and Pendulum without velocities, for agents that must remember.

cd experiments/benchmarks
podrl train jax:masked:cartpole --config.network.recurrent=lru
podrl train jax:masked:pendulum --config.network.recurrent=lru
"""

import jax
import jax.numpy as jnp

from podrl.envs import gymnax
from podrl.types import Array, DeviceEnv, TimeStep, Tree


def _without(env: DeviceEnv, shown: tuple[int, ...]) -> DeviceEnv:
  """Shows only these numbers of the observations, `[B, D]`."""
  index = jnp.array(shown)

  def hide(timestep: TimeStep) -> TimeStep:
    return timestep._replace(obs=timestep.obs[:, index])

  def reset(rng_key: jax.Array) -> tuple[Tree, TimeStep]:
    state, timestep = env.reset(rng_key)
    return state, hide(timestep)

  def step(state: Tree, action: Array) -> tuple[Tree, TimeStep]:
    state, timestep = env.step(state, action)
    return state, hide(timestep)

  obs = jax.ShapeDtypeStruct((len(shown),), env.spec.obs.dtype)
  spec = env.spec._replace(obs=obs, simulate=None)
  return DeviceEnv(spec, reset, step)


def cartpole() -> DeviceEnv:
  """CartPole-v1 with the cart's position and the pole's angle."""
  return _without(gymnax.make('CartPole-v1'), (0, 2))


def pendulum() -> DeviceEnv:
  """Pendulum-v1 with the cosine and the sine of the angle."""
  return _without(gymnax.make('Pendulum-v1'), (0, 1))
