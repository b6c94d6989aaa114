"""gymnax environments as `DeviceEnv`, with the joints of dm_env."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.envs import spaces
from podrl.types import Array, Box, DeviceEnv, Discrete, EnvSpec, TimeStep, Tree

# Observations that are images of zeros and ones, which gymnax keeps as float32.
_BINARY_OBS = frozenset(
  [
    'Asterix-MinAtar',
    'Breakout-MinAtar',
    'Freeway-MinAtar',
    'Seaquest-MinAtar',
    'SpaceInvaders-MinAtar',
    'Catch-bsuite',
    'DeepSea-bsuite',
    'Pong-misc',
  ]
)


_DOWNLOADS = 'MNISTBandit-bsuite'


class GymnaxState(NamedTuple):
  """One environment's state.

  Attributes:
    env_state: gymnax's own.
    rng_key: fixed; each step folds `num_steps` into it.
    num_steps: int32 `[]`, since the first reset, joints counted.
    is_last: bool `[]`, whether the last step ended the episode, so that the
      next one resets.
  """

  env_state: Any
  rng_key: chex.PRNGKey
  num_steps: Array
  is_last: Array


def _action_space(space: Any) -> Discrete | Box:
  if hasattr(space, 'n'):
    return Discrete(int(space.n))
  low, high = (
    np.broadcast_to(np.asarray(x, np.float32), space.shape)
    for x in (space.low, space.high)
  )
  return Box(tuple(space.shape), low, high)


def names() -> list[str]:
  """The environments that gymnax registers, without the one that downloads."""
  import gymnax

  return sorted(set(gymnax.registered_envs) - {_DOWNLOADS})


def make_spec(name: str, **options: Any) -> EnvSpec:
  """What agents and drivers need to know of an environment; raises as `make`."""
  return make(name, **options).spec


def make(name: str, **options: Any) -> DeviceEnv:
  """Makes a gymnax environment.

  Args:
    name: as registered, for example 'CartPole-v1'.
    **options: fields of the environment's parameters, for example
      `max_steps_in_episode=100`.

  Returns:
    A `DeviceEnv`. Images of zeros and ones are bool, a `Discrete` observation
    is a bool one-hot vector, rewards are float32.

  Raises:
    ValueError: if the name or an option is unknown, or a value of a wrong type.
  """
  import gymnax  # Takes seconds: it imports matplotlib and seaborn.

  if name not in gymnax.registered_envs:
    raise spaces.unknown_name(
      name, 'a gymnax environment', gymnax.registered_envs
    )
  if name == _DOWNLOADS:
    raise ValueError(
      f'env.name={name} downloads a data set when made; choose another'
    )
  env, params = gymnax.make(name)
  spaces.check_options(name, options, vars(params))
  for key, value in options.items():
    default = getattr(params, key)
    if np.ndim(default) or not np.isscalar(value) or isinstance(value, str):
      raise ValueError(
        f'env.options.{key}={value!r} is not a number like '
        f'its default, {default}'
      )
    if not abs(value) < 2**31:
      raise ValueError(
        f'env.options.{key}={value} must be between -2**31 and 2**31'
      )
  params = params.replace(**options)
  if params.max_steps_in_episode < 1:
    raise ValueError(
      'env.options.max_steps_in_episode='
      f'{params.max_steps_in_episode} must be at least 1'
    )

  obs_space = env.observation_space(params)
  num_categories = getattr(obs_space, 'n', None)
  # The declared dtypes are not always the ones that come: ask the function.
  obs = jax.eval_shape(lambda k: env.reset_env(k, params)[0], jax.random.key(0))

  def observe(obs: Tree) -> Tree:
    if num_categories is not None:
      return jnp.arange(num_categories) == obs
    if name in _BINARY_OBS:
      return jax.tree.map(lambda x: x.astype(bool), obs)
    return obs

  def select(predicate: Array, on_true: Tree, on_false: Tree) -> Tree:
    return jax.tree.map(
      lambda x, y: jnp.where(predicate, x, y), on_true, on_false
    )

  def reset(rng_key: chex.PRNGKey) -> tuple[GymnaxState, TimeStep]:
    reset_key, step_key = jax.random.split(rng_key)
    obs, env_state = env.reset_env(reset_key, params)
    env_state = jax.tree.map(jnp.asarray, env_state)  # Some are Python numbers.
    state = GymnaxState(
      env_state, step_key, jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    )
    return state, TimeStep(
      observe(obs), jnp.zeros(()), jnp.ones(()), jnp.ones((), bool)
    )

  def step(state: GymnaxState, action: Array) -> tuple[GymnaxState, TimeStep]:
    # One key for both branches: only one of them is what happens.
    rng_key = jax.random.fold_in(state.rng_key, state.num_steps)
    reset_obs, reset_state = env.reset_env(rng_key, params)
    obs, env_state, reward, terminated, _ = env.step_env(
      rng_key, state.env_state, action, params
    )
    # Where an environment says both, terminated wins: the discount is 0.
    is_last = jnp.logical_or(terminated, env.is_truncated(env_state, params))
    env_state = jax.tree.map(
      lambda new, old: jnp.asarray(new, old.dtype),
      select(state.is_last, reset_state, env_state),
      state.env_state,
    )
    is_first = state.is_last
    timestep = TimeStep(
      obs=observe(select(is_first, reset_obs, obs)),
      reward=jnp.where(is_first, 0.0, jnp.asarray(reward, jnp.float32)),
      discount=jnp.logical_or(is_first, jnp.logical_not(terminated)).astype(
        jnp.float32
      ),
      is_first=is_first,
    )
    return GymnaxState(
      env_state,
      state.rng_key,
      state.num_steps + 1,
      jnp.logical_and(is_last, jnp.logical_not(is_first)),
    ), timestep

  spec = EnvSpec(
    obs=jax.eval_shape(observe, obs),
    channels_first=False,
    action=_action_space(env.action_space(params)),
    frame_skip=1,
    max_episode_steps=int(params.max_steps_in_episode),
  )
  return DeviceEnv(spec, reset, step)
