"""envpool environments as a `HostEnv`, which envpool's C++ threads step."""

from collections.abc import Sequence
import ctypes
import os
import sys
from typing import Any
import warnings

import numpy as np

from podrl import modules
from podrl.envs import autoreset, spaces
from podrl.kernels.envpool import make_xla_env, release
from podrl.messages import one_line, suggest
from podrl.types import EnvSpec, HostEnv

# A user cannot set these options: podrl sets them, or does not need them.
_RESERVED_OPTIONS = frozenset(
  'num_envs batch_size num_threads seed env_seed base_path '
  'gym_reset_return_info max_num_players task '
  'zero_discount_on_life_loss'.split()
)
# If one of these options is 0, the C++ code crashes, hangs or computes
# wrong results.
_COUNTS = frozenset(
  'frame_skip img_height img_width max_episode_steps stack_num height width '
  'size noop_max'.split()
)
# MiniGrid's images consist of categories, of which the last is 10.
_MINIGRID_SCALE = np.float32(10)

_can_mujoco_draw = sys.platform != 'linux'


def _library() -> Any:
  """Imports envpool, which ends a process whose directory is deleted."""
  if 'envpool' not in sys.modules:
    modules.current_directory()
  import envpool

  return envpool


def names() -> list[str]:
  """Returns the tasks that envpool lists, except those with several players."""
  envpool = _library()
  return sorted(x for x in envpool.list_all_envs() if not _has_players(x))


def _has_players(name: str) -> bool:
  """Returns whether a task has several players, like most games of pgx."""
  envpool = _library()
  if 'multiagent' in name.lower().replace('-', ''):
    return True
  module = envpool.registration.registry.specs[name][0]
  return module.startswith('envpool.pgx') and name != 'Play2048-v1'


def needs_memory(name: str) -> bool:
  """See `Suite.needs_memory`."""
  return 'Memory' in name


def small_options(name: str) -> dict[str, Any]:
  """See `Suite.small_options`; only some tasks have these options."""
  envpool = _library()
  options = envpool.make_spec(name).config._asdict()
  return {k: 42 for k in ('img_height', 'img_width') if k in options}


def steps_per_second(name: str) -> float:
  """See `Suite.steps_per_second`; only MuJoCo Playground's tasks state it."""
  config = _library().make_spec(name).config
  return 1 / getattr(config, 'ctrl_dt', float('inf'))


def _check(
  name: str, options: dict[str, Any]
) -> tuple[EnvSpec, dict[str, Any]]:
  """Returns the `EnvSpec` of a task, and the options cast to their types."""
  envpool = _library()
  known = envpool.list_all_envs()
  if name not in known:
    advice = suggest(name, known)
    raise ValueError(f'env.name={name} is not an envpool task; {advice}')
  try:
    defaults = envpool.make_spec(name).config._asdict()
  except Exception as error:  # For example, a system library is missing.
    raise ValueError(
      f'env.name={name} cannot be made on this machine: {one_line(error)}'
    ) from error
  spaces.check_options(name, options, set(defaults) - _RESERVED_OPTIONS)
  options = {k: _cast(k, v, defaults[k]) for k, v in options.items()}
  if name.startswith('FrozenLake') and options.get('size', 4) not in (4, 8):
    # With another size, envpool reads memory beyond the end of its map.
    raise ValueError(
      f'env.options.size={options["size"]} must be 4 or 8 for {name}'
    )
  try:
    library_spec: Any = envpool.make_spec(name, **options)
  except Exception as error:  # The task's C++ code can raise anything.
    raise ValueError(
      f'{name} refuses env.options={options}: {one_line(error)}'
    ) from error
  config = library_spec.config._asdict()
  num_players = config.get('max_num_players', 1)
  if num_players > 1:
    raise ValueError(
      f'env.name={name} has {num_players} players, but podrl trains only one; '
      'choose a task with one player'
    )
  # envpool gives its bounds as float64, and gymnasium warns for each pool.
  warnings.filterwarnings('ignore', '.*precision lowered by casting')
  spec = spaces.env_spec(
    name,
    library_spec.gymnasium_observation_space,
    library_spec.gymnasium_action_space,
    int(config.get('frame_skip', 1)),
    int(config['max_episode_steps']),
  )
  # Tests show that Atari's stacks are as `EnvSpec.frame_stack` says.
  module = envpool.registration.registry.specs[name][0]
  if module == 'envpool.atari':
    spec = spec._replace(frame_stack=config['stack_num'])
  if module == 'envpool.minigrid':  # The bound of its space is 255.
    scale = {**spec.obs_scale, 'image': _MINIGRID_SCALE}
    spec = spec._replace(obs_scale=scale)
  return spec, options


def _cast(key: str, value: Any, default: Any) -> Any:
  """Casts an option to the type of its default; C++ needs this type."""
  if type(default) is int and type(value) is float and value.is_integer():
    value = int(value)
  if type(default) is float and type(value) is int:
    value = float(value)
  if type(value) is not type(default):
    raise ValueError(
      f'env.options.{key}={value!r} is not of type {type(default).__name__}; '
      f'its default is {default!r}'
    )
  if key in _COUNTS and not 1 <= value < 2**31:
    raise ValueError(f'env.options.{key}={value} must be from 1 to {2**31 - 1}')
  if key == 'repeat_action_probability' and not 0 <= value <= 1:
    raise ValueError(f'env.options.{key}={value} must be from 0 to 1')
  return value


def _is_float(x: Any, num_envs: int) -> bool:
  """Returns whether `x` has a float for each environment."""
  return getattr(x, 'shape', None) == (num_envs,) and x.dtype.kind == 'f'


def make_spec(name: str, /, **options: Any) -> EnvSpec:
  """Returns the `EnvSpec` of a task such as 'Pong-v5'."""
  return _check(name, options)[0]


def load_opengl() -> None:
  """Lets MuJoCo's tasks draw on Linux; call this before importing a suite.

  To draw, envpool's MuJoCo looks for a loaded library with the name libEGL.
  envpool loads libEGL under another name, so MuJoCo does not find it. If libEGL
  is loaded after envpool, nothing initialises it. In both cases, MuJoCo ends
  the process. The package `mujoco`, which other suites use, ends the process
  too, if it looks for a window: MUJOCO_GL tells it not to.
  """
  global _can_mujoco_draw
  if sys.platform == 'linux' and 'envpool' not in sys.modules:
    try:
      ctypes.CDLL('libEGL.so.1', ctypes.RTLD_GLOBAL)
      _can_mujoco_draw = True
    except OSError:  # The library is not installed.
      pass
    os.environ.setdefault('MUJOCO_GL', 'egl' if _can_mujoco_draw else 'disable')


def make(
  name: str,
  /,
  num_envs: int,
  seed: int | Sequence[int],
  *,
  num_threads: int = 1,
  render: bool = False,
  **options: Any,
) -> HostEnv:
  """Makes a pool of envpool environments; see `Suite.make` and `make_spec`.

  `HostEnv.render` raises a RuntimeError if the task cannot draw.
  """
  envpool = _library()
  spec, options = _check(name, options)
  pool: Any = envpool.make_gymnasium(
    name,
    num_envs=num_envs,
    seed=seed,
    num_threads=num_threads,
    render_mode='rgb_array' if render else None,
    **options,
  )

  module = envpool.registration.registry.specs[name][0]
  is_mujoco = module.startswith('envpool.mujoco')

  def numbers(info: dict[str, Any]) -> dict[str, Any]:
    # Other numbers are counters or indices.
    found = {k: x for k, x in info.items() if _is_float(x, num_envs)}
    return {k: x.astype(np.float32) for k, x in found.items()}

  def draw() -> np.ndarray:
    if is_mujoco and not _can_mujoco_draw:
      raise RuntimeError(
        'MuJoCo cannot draw, because libEGL was not loaded before envpool'
      )
    return pool.render()[0].copy()

  def close() -> None:
    release(pool)
    pool.close()

  return autoreset.make_host_env(
    name,
    spec,
    pool,
    None,
    close=close,
    render=draw,
    xla=make_xla_env(pool),
    info=numbers if is_mujoco else lambda info: (),
  )
