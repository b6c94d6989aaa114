"""envpool environments as a `HostEnv`.

envpool steps a batch on threads of its own. After an episode's last step the
next one resets, ignoring its action: dm_env's joints, as they are.
"""

import ctypes
import sys
from typing import Any
import warnings

import numpy as np

from podrl.envs import spaces
from podrl.envs.joints import HostJoints
from podrl.types import EnvSpec, HostEnv, TimeStep

# Set by podrl, or of no use to it.
_OWN_OPTIONS = frozenset(
  [
    'num_envs',
    'batch_size',
    'num_threads',
    'seed',
    'env_seed',
    'base_path',
    'gym_reset_return_info',
    'max_num_players',
    'task',
    'zero_discount_on_life_loss',
  ]
)

# Counts: of 0 of them C++ crashes, hangs or makes nonsense.
_COUNTS = frozenset(
  [
    'frame_skip',
    'img_height',
    'img_width',
    'max_episode_steps',
    'stack_num',
    'height',
    'width',
    'size',
    'noop_max',
  ]
)

_can_mujoco_draw = sys.platform != 'linux'


def _checked(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
  """envpool's own record of a task, and its options, of the right types."""
  import envpool

  known = envpool.list_all_envs()
  if name not in known:
    raise spaces.unknown_name(name, 'an envpool task', known)
  try:
    defaults = envpool.make_spec(name).config._asdict()
  except Exception as error:  # For example a system library that is missing.
    raise ValueError(
      f'env.name={name} cannot be made here: {" ".join(str(error).split())}'
    ) from error
  spaces.check_options(name, options, set(defaults) - _OWN_OPTIONS)
  options = {k: _typed(k, v, defaults[k]) for k, v in options.items()}
  if name.startswith('FrozenLake') and options.get('size', 4) not in (4, 8):
    raise ValueError(  # It reads past its map's end.
      f'env.options.size={options["size"]} must be 4 or 8 for {name}'
    )
  try:
    return envpool.make_spec(name, **options), options
  except Exception as error:  # Whatever the task's C++ raises.
    raise ValueError(
      f'env.options={options} are refused by {name}: '
      f'{" ".join(str(error).split())}'
    ) from error


def _typed(key: str, value: Any, default: Any) -> Any:
  """An option's value in the type of its default, which C++ insists on."""
  if type(default) is int and type(value) is float and value.is_integer():
    value = int(value)
  if type(default) is float and type(value) is int:
    value = float(value)
  if type(value) is type(default):
    if key in _COUNTS and not 1 <= value < 2**31:
      raise ValueError(
        f'env.options.{key}={value} must be from 1 to {2**31 - 1}'
      )
    if key == 'repeat_action_probability' and not 0 <= value <= 1:
      raise ValueError(f'env.options.{key}={value} must be from 0 to 1')
    return value
  raise ValueError(
    f'env.options.{key}={value!r} is not of type {type(default).__name__}; '
    f'its default is {default!r}'
  )


def _to_spec(name: str, spec: Any) -> EnvSpec:
  """An `EnvSpec` of envpool's own record."""
  config = spec.config._asdict()
  if config.get('max_num_players', 1) > 1:
    raise ValueError(
      f'env.name={name} has {config["max_num_players"]} players, and podrl '
      'trains one; choose a single-player task'
    )
  try:
    with warnings.catch_warnings():  # Of bounds rounded to float32.
      warnings.simplefilter('ignore')
      obs = spaces.obs_spec(spec.gymnasium_observation_space)
      action = spaces.action_space(spec.gymnasium_action_space)
  except ValueError as error:
    raise ValueError(f'env.name={name}: {error}') from error
  return EnvSpec(
    obs,
    spaces.is_channels_first(obs),
    action,
    int(config.get('frame_skip', 1)),
    int(config['max_episode_steps']),
  )


def make_spec(name: str, **options: Any) -> EnvSpec:
  """What agents and drivers need to know of a task.

  Args:
    name: as envpool lists it, for example 'Pong-v5'.
    **options: of the task, for example `img_height=42`.

  Raises:
    ValueError: if the name or an option is unknown, a value of a wrong type,
      the task has several players, or a space is not supported.
  """
  return _to_spec(name, _checked(name, options)[0])


def names() -> list[str]:
  """The tasks that envpool lists."""
  import envpool

  return sorted(envpool.list_all_envs())


def load_opengl() -> None:
  """Lets MuJoCo's tasks draw on Linux; call it before anything imports envpool.

  MuJoCo looks for a library called libEGL among those that are loaded. The one
  that envpool brings has another name, and a libEGL that is loaded after it is
  not the one that envpool set up: in both cases MuJoCo ends the process.
  """
  global _can_mujoco_draw
  if sys.platform == 'linux' and 'envpool' not in sys.modules:
    try:
      ctypes.CDLL('libEGL.so.1', ctypes.RTLD_GLOBAL)
      _can_mujoco_draw = True
    except OSError:  # There is none.
      pass


def make(
  name: str,
  num_envs: int,
  seed: int,
  *,
  num_threads: int = 1,
  render: bool = False,
  **options: Any,
) -> HostEnv:
  """Makes a pool of envpool environments.

  Args:
    name: as envpool lists it, for example 'Pong-v5'.
    num_envs: of the pool; environment i has the seed `seed` + i.
    seed: of the first.
    num_threads: that step it.
    render: whether `HostEnv.render` will be called, which raises a
      RuntimeError if the task cannot draw on this machine.
    **options: of the task.

  Raises:
    ValueError: as `make_spec`.
  """
  import envpool

  record, options = _checked(name, options)
  spec = _to_spec(name, record)
  pool = envpool.make_gymnasium(
    name,
    num_envs=num_envs,
    seed=seed,
    num_threads=num_threads,
    render_mode='rgb_array' if render else None,
    **options,
  )
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    space = pool.single_observation_space
    to_action = spaces.to_library_action(pool.single_action_space)
  joints = HostJoints(num_envs)

  def reset() -> TimeStep:
    return joints.reset(pool.reset()[0])

  def step(action: Any) -> TimeStep:
    obs, reward, terminated, truncated, _ = pool.step(to_action(action))
    return joints.step(obs, reward, terminated, truncated)

  def draw() -> np.ndarray:
    module = envpool.registration.registry.specs[name][0]
    if module.startswith('envpool.mujoco') and not _can_mujoco_draw:
      raise RuntimeError('MuJoCo needs libEGL, loaded before envpool')
    return pool.render()[0].copy()

  return HostEnv(
    spec,
    reset,
    step,
    pool.close,
    lambda obs: spaces.observe(space, obs),
    draw,
  )
