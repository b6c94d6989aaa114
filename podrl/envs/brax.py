"""brax's environments as a `DeviceEnv`."""

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np

from podrl.envs import joints, spaces
from podrl.messages import suggest
from podrl.types import Array, Box, DeviceEnv, Tree

UNUSABLE = {'fast': 'is a dummy for measurements'}
_BACKENDS = ('spring', 'generalized', 'positional', 'mjx')
# The environments that lack 'spring', or that agents do not solve with it: PPO
# reached 205 of 1,000 on the inverted pendulum with it, and 1,000 with 'mjx'.
_DEFAULTS = {
  'swimmer': 'generalized',
  'inverted_pendulum': 'mjx',
  'inverted_double_pendulum': 'mjx',
}


def names() -> list[str]:
  """See `Suite.names`."""
  return spaces.names_in('brax', 'envs/__init__.py', r"(?m)^    '(\w+)': \w+\.")


def make(
  name: str,
  *,
  backend: str = '',
  episode_length: int = 1000,
  **options: Any,
) -> DeviceEnv:
  """Makes a batch of brax's environments.

  Args:
    name: the registered name, for example 'ant'.
    backend: the physics: 'spring' is fast, and the default except for the
      pendulums and the swimmer; 'generalized' is exact; 'mjx' is MuJoCo's.
    episode_length: the number of steps after which an episode is truncated;
      brax's environments have no limit of their own.
    **options: there are no others.
  """
  from brax import envs

  spaces.check_options(name, options, ('backend', 'episode_length'))
  backend = backend or _DEFAULTS.get(name, 'spring')
  if backend not in _BACKENDS:
    raise ValueError(
      f'env.options.backend={backend} is unknown; {suggest(backend, _BACKENDS)}'
    )
  env = envs.get_environment(name, backend=backend)
  return from_brax(env, env.action_size, episode_length)


def from_brax(env: Any, num_actions: int, episode_length: int) -> DeviceEnv:
  """Makes a batch of environments that have the interface of brax's.

  Args:
    num_actions: the size of an action; each number is from -1 to 1.
    episode_length: the number of steps after which an episode is truncated.
  """
  episode_length = spaces.check_limit('episode_length', episode_length)

  def reset(rng_key: chex.PRNGKey) -> tuple[Tree, Tree]:
    state = env.reset(rng_key)
    return state.obs, (state, jnp.int32(0))

  def step(
    rng_key: chex.PRNGKey, env_state: Any, action: Array
  ) -> tuple[Tree, Tree, Array, Array, Array]:
    del rng_key  # The state has a key of its own, if it needs one.
    state, num_steps = env_state[0], env_state[1] + 1
    new = env.step(state, action)
    ends = new.done > 0, num_steps >= episode_length
    return new.obs, (new, num_steps), new.reward, *ends

  high = np.ones(num_actions, np.float32)
  action = Box((num_actions,), -high, high)
  spec = spaces.device_spec(reset, action, episode_length)
  return joints.make_device_env(spec, reset, step, reset_chunk=16)
