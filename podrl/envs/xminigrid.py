"""XLand-MiniGrid as a `DeviceEnv`."""

from typing import Any

import chex
import numpy as np

from podrl.envs import joints, spaces
from podrl.types import Array, DeviceEnv, Discrete, Tree

_MIN_SIDE = 5  # Of a grid; a smaller one may have no room for a wall or a door.


def names() -> list[str]:
  """See `Suite.names`."""
  return spaces.names_in(
    'xminigrid', '__init__.py', r'(?m)^register\(\s*id="([^"]+)"'
  )


def needs_memory(name: str) -> bool:
  """See `Suite.needs_memory`."""
  return 'Memory' in name


def make(name: str, /, **options: Any) -> DeviceEnv:
  """Makes a batch of environments of XLand-MiniGrid.

  Args:
    name: the registered name, for example 'MiniGrid-DoorKey-5x5'. The rules and
      the goal of an 'XLand-MiniGrid' environment are the library's default.
    **options: whole numbers of `EnvParams`, for example `view_size=5`.

  Returns:
    A `DeviceEnv`; each cell of the view is a bool one-hot vector of the tile,
    followed by one of the colour.
  """
  import xminigrid
  from xminigrid.core import constants

  env: Any
  params: Any
  env, params = xminigrid.make(name)
  spaces.check_numbers(name, options, vars(params))
  options = {k: spaces.check_whole(k, x) for k, x in options.items()}
  params = params.replace(**options)
  for key in ('height', 'width'):
    if getattr(params, key) < _MIN_SIDE:
      raise ValueError(
        f'env.options.{key}={getattr(params, key)} must be at least {_MIN_SIDE}'
      )
  if params.view_size % 2 == 0:
    raise ValueError(f'env.options.view_size={params.view_size} must be odd')
  sizes = constants.NUM_TILES, constants.NUM_COLORS

  def observe(obs: Array) -> Array:
    return spaces.one_hot_grid(obs, sizes)

  def reset(rng_key: chex.PRNGKey) -> tuple[Tree, Tree]:
    timestep = env.reset(params, rng_key)
    return timestep.observation, timestep

  def step(
    rng_key: chex.PRNGKey, timestep: Any, action: Array
  ) -> tuple[Tree, Tree, Array, Array, Array]:
    del rng_key  # The state has a key of its own.
    new = env.step(params, timestep, action)
    ends = new.discount == 0, new.last()
    return new.observation, new, new.reward, *ends

  def render(timestep: Any) -> np.ndarray:
    drawn = params.replace(render_mode='rgb_array')
    return np.asarray(env.render(drawn, timestep))

  actions = Discrete(env.num_actions(params))
  spec = spaces.device_spec(reset, actions, params.max_steps, observe)
  return joints.make_device_env(
    spec, reset, step, observe, reset_chunk=16, render=render
  )
