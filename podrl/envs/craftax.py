"""Craftax as a `DeviceEnv`."""

import importlib
from typing import Any

import numpy as np

from podrl.envs import autoreset, spaces
from podrl.types import DeviceEnv, Discrete

_TILE = 16  # The side of a tile in a picture, in pixels.

# Those with AutoReset in their names are left out: podrl begins the episodes.
NAMES = 'craftax_env.py', r'name == "((?![\w-]*AutoReset)[\w-]+)"'


def make(name: str, /, **options: Any) -> DeviceEnv:
  """Makes a batch of Craftax's environments.

  Craftax ends an episode at its time limit as it does at a death. Here, that
  episode is truncated, unless it also ends for another reason.

  Args:
    name: for example 'Craftax-Classic-Symbolic-v1'.
    **options: numbers of `EnvParams`, for example `max_timesteps=1000`.
  """
  from craftax import craftax_env

  env = craftax_env.make_craftax_env_from_name(name, auto_reset=False)
  params = spaces.replace_numbers(name, env.default_params, options)
  max_steps = spaces.check_whole('max_timesteps', params.max_timesteps)
  unlimited = params.replace(max_timesteps=2**31 - 1)

  def reset(rng_key):
    return env.reset(rng_key, params)

  def step(rng_key, state, action):
    obs, state, reward, _, _ = env.step(rng_key, state, action, unlimited)
    terminated = env.is_terminal(state, unlimited)
    return obs, state, reward, terminated, state.timestep >= max_steps

  def render(state: Any) -> np.ndarray:
    kind = 'craftax_classic' if 'Classic' in name else 'craftax'
    renderer = importlib.import_module(f'craftax.{kind}.renderer')
    draw = renderer.make_craftax_pixel_renderer(_TILE)
    return np.asarray(draw(state), np.uint8)

  actions = Discrete(env.action_space(params).n)
  spec = spaces.device_spec(reset, actions, max_steps)
  return autoreset.make_device_env(
    spec, reset, step, reset_chunk=16, render=render
  )
