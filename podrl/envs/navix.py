"""MiniGrid in navix as a `DeviceEnv`."""

from typing import Any

import numpy as np

from podrl.envs import autoreset, spaces
from podrl.messages import check_choice
from podrl.types import Array, DeviceEnv, Discrete

# The number of categories of each channel of an observation. The channels are
# entities, colours, and states or directions.
_SIZES = {'symbolic': (11, 6, 4), 'categorical': (11,), 'rgb': ()}

NAMES = 'environments/*.py', r'register\w*\(\s*"(Navix-[^"]+)"'


def make(
  name: str,
  /,
  *,
  observation: str = 'symbolic',
  max_steps: int = 0,
  **options: Any,
) -> DeviceEnv:
  """Makes a batch of navix environments.

  Args:
    name: the registered name, for example 'Navix-Empty-8x8-v0'.
    observation: a function of `navix.observations`: 'symbolic' and
      'categorical' show the whole grid, as bool one-hot vectors of each cell;
      'rgb' is an image. With '_first_person', they show what the agent sees.
    max_steps: the number of steps after which an episode is truncated; 0 means
      the library's default.
    **options: must be empty.
  """
  import navix
  from navix import observations

  spaces.check_options(name, options, ('observation', 'max_steps'))
  kinds = [x + y for x in _SIZES for y in ('', '_first_person')]
  check_choice('env.options.observation', observation, kinds)
  limit: dict[str, Any] = {}
  if max_steps:
    limit = {'max_steps': spaces.check_whole('max_steps', max_steps)}
  env = navix.make(
    name, observation_fn=getattr(observations, observation), **limit
  )
  sizes = _SIZES[observation.removesuffix('_first_person')]

  def observe(obs: Array) -> Array:
    if not sizes:
      return obs
    grid = obs if len(sizes) > 1 else obs[..., None]
    return spaces.one_hot_grid(grid, sizes)

  def reset(rng_key):
    timestep = env.reset(rng_key)
    return timestep.observation, timestep

  def step(rng_key, timestep, action):
    del rng_key  # The state has a key of its own.
    # `step` would reset in the step after the last; `autoreset` does this.
    new = env._step(timestep, action)
    ends = new.is_termination(), new.is_truncation()
    return new.observation, new, new.reward, *ends

  def render(timestep: Any) -> np.ndarray:
    return np.asarray(observations.rgb(timestep.state))

  actions = Discrete(len(env.action_set))
  spec = spaces.device_spec(reset, actions, int(env.max_steps), observe)
  return autoreset.make_device_env(
    spec, reset, step, observe, reset_chunk=16, render=render
  )
