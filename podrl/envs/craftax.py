"""Craftax as a `DeviceEnv`."""

import importlib
import sys
from typing import Any

import chex

from podrl.envs import joints, spaces
from podrl.types import Array, DeviceEnv, Discrete, EnvSpec, Tree

PACKAGE = 'craftax'


def names() -> list[str]:
  """Returns the environments, without importing craftax."""
  found = spaces.names_in(PACKAGE, 'craftax_env.py', r'name == "([\w-]+)"')
  return [x for x in found if 'AutoReset' not in x]


def make_spec(name: str, **options: Any) -> EnvSpec:
  """Returns the `EnvSpec` of an environment; raises the errors of `make`."""
  return make(name, **options).spec


def make(name: str, **options: Any) -> DeviceEnv:
  """Makes a batch of Craftax's environments.

  Craftax ends an episode at its time limit as it does at a death. Here, that
  episode is truncated, unless it also ends for another reason.

  Args:
    name: for example 'Craftax-Classic-Symbolic-v1'.
    **options: numbers of `EnvParams`, for example `max_timesteps=1000`.
  """
  spaces.import_library(sys.modules[__name__], name)
  library = importlib.import_module('craftax.craftax_env')
  env = library.make_craftax_env_from_name(name, auto_reset=False)
  params = env.default_params
  known = {k: x for k, x in vars(params).items() if isinstance(x, int | float)}
  spaces.check_options(name, options, known)
  params = params.replace(**options)
  max_steps = int(params.max_timesteps)
  if not 1 <= max_steps < 2**31:
    raise ValueError(
      f'env.options.max_timesteps={max_steps} must be between 1 and 2**31 - 1'
    )
  unlimited = params.replace(max_timesteps=2**31 - 1)

  def reset(rng_key: chex.PRNGKey) -> tuple[Tree, Tree]:
    return env.reset(rng_key, params)

  def step(
    rng_key: chex.PRNGKey, state: Any, action: Array
  ) -> tuple[Tree, Tree, Array, Array, Array]:
    obs, state, reward, _, _ = env.step(rng_key, state, action, unlimited)
    terminated = env.is_terminal(state, unlimited)
    return obs, state, reward, terminated, state.timestep >= max_steps

  actions = Discrete(env.action_space(params).n)
  spec = spaces.device_spec(reset, actions, max_steps)
  return joints.make_device_env(spec, reset, step, reset_chunk=16)
