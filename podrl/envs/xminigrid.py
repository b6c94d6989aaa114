"""XLand-MiniGrid as a `DeviceEnv`."""

import sys
from typing import Any

import numpy as np

from podrl.envs import autoreset, spaces
from podrl.types import Array, DeviceEnv, Discrete

# Side of a grid; a smaller grid may have no room for a wall or a door.
_MIN_SIDE = 5
# The parts of a ruleset, and how many numbers encode one row of each part.
_RULESET = {'goal': 5, 'rules': 7, 'init_tiles': 2}
_told: set[str] = set()  # The environments whose missing goal was mentioned.

NAMES = '__init__.py', r'(?m)^register\(\s*id="([^"]+)"'


def needs_memory(name: str) -> bool:
  """See `Suite.needs_memory`."""
  return 'Memory' in name


def _with_ruleset(
  name: str, params: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
  """Returns the parameters with the ruleset of the options, and the others."""
  parts = {}
  for key, width in _RULESET.items():
    if key not in options:
      continue
    rows = np.asarray(options[key])
    is_byte = rows.dtype.kind in 'iu' and np.all((rows >= 0) & (rows < 256))
    if not is_byte or not rows.size or rows.size % width:
      raise ValueError(
        f'env.options.{key}={options[key]!r} must be rows of {width} numbers '
        'from 0 to 255'
      )
    shape = (width,) if key == 'goal' else (-1, width)
    try:
      parts[key] = rows.astype(np.uint8).reshape(shape)
    except ValueError as error:
      raise ValueError(
        f'env.options.{key}={options[key]!r} must be {width} numbers'
      ) from error
  if 'goal' not in parts and name not in _told:
    _told.add(name)
    print(
      f'warning: {name} has no goal, so no reward is possible; set '
      'env.options.goal and env.options.init_tiles, for example to (1,3,1,0,0) '
      'and (3,1): pick up a red ball',
      file=sys.stderr,
    )
  options = {k: x for k, x in options.items() if k not in _RULESET}
  return params.replace(ruleset=params.ruleset.replace(**parts)), options


def make(name: str, /, **options: Any) -> DeviceEnv:
  """Makes a batch of environments of XLand-MiniGrid.

  Args:
    name: the registered name, for example 'MiniGrid-DoorKey-5x5'.
    **options: whole numbers of `EnvParams`, for example `view_size=5`. An
      'XLand-MiniGrid' environment has no goal by default; the options `goal`,
      `rules` and `init_tiles` have the numbers of a `RuleSet` of the library,
      one row after another.

  Returns:
    A `DeviceEnv`; each cell of the view is a bool one-hot vector of the tile,
    followed by one of the colour.
  """
  import xminigrid
  from xminigrid.core import constants

  env: Any
  params: Any
  env, params = xminigrid.make(name)
  if hasattr(params, 'ruleset'):
    params, options = _with_ruleset(name, params, options)
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

  def reset(rng_key):
    timestep = env.reset(params, rng_key)
    return timestep.observation, timestep

  def step(rng_key, timestep, action):
    del rng_key  # The state has a key of its own.
    new = env.step(params, timestep, action)
    ends = new.discount == 0, new.last()
    return new.observation, new, new.reward, *ends

  def render(timestep: Any) -> np.ndarray:
    drawn = params.replace(render_mode='rgb_array')
    return np.asarray(env.render(drawn, timestep))

  actions = Discrete(env.num_actions(params))
  spec = spaces.device_spec(reset, actions, params.max_steps, observe)
  return autoreset.make_device_env(
    spec, reset, step, observe, reset_chunk=16, render=render
  )
