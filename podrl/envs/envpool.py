"""envpool environments as a `HostEnv`; envpool steps a batch on its threads."""

import ctypes
import sys
from typing import Any
import warnings

import numpy as np

from podrl.envs import spaces
from podrl.envs.joints import HostJoints
from podrl.types import EnvSpec, HostEnv, TimeStep

# podrl sets these options, or has no use for them.
_RESERVED_OPTIONS = frozenset(
  'num_envs batch_size num_threads seed env_seed base_path '
  'gym_reset_return_info max_num_players task '
  'zero_discount_on_life_loss'.split()
)
# With a value of 0, the C++ code crashes, hangs or computes nonsense.
_COUNTS = frozenset(
  'frame_skip img_height img_width max_episode_steps stack_num height width '
  'size noop_max'.split()
)

_can_mujoco_draw = sys.platform != 'linux'


def names() -> list[str]:
  """The tasks that envpool lists."""
  import envpool

  return sorted(envpool.list_all_envs())


def _check(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
  """Returns envpool's specification of a task, and the options after casts."""
  import envpool

  known = envpool.list_all_envs()
  if name not in known:
    raise spaces.unknown_name(name, 'an envpool task', known)
  try:
    defaults = envpool.make_spec(name).config._asdict()
  except Exception as error:  # For example, a system library is missing.
    raise ValueError(
      f'env.name={name} cannot be made here: {spaces.one_line(error)}'
    ) from error
  spaces.check_options(name, options, set(defaults) - _RESERVED_OPTIONS)
  options = {k: _cast(k, v, defaults[k]) for k, v in options.items()}
  if name.startswith('FrozenLake') and options.get('size', 4) not in (4, 8):
    # With another size, envpool reads past the end of its map.
    raise ValueError(
      f'env.options.size={options["size"]} must be 4 or 8 for {name}'
    )
  try:
    return envpool.make_spec(name, **options), options
  except Exception as error:  # The task's C++ code can raise anything.
    raise ValueError(
      f'{name} refuses env.options={options}: {spaces.one_line(error)}'
    ) from error


def _cast(key: str, value: Any, default: Any) -> Any:
  """Casts an option to the type of its default, which the C++ code requires."""
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


def _to_spec(name: str, spec: Any) -> EnvSpec:
  """Converts envpool's specification of a task."""
  config = spec.config._asdict()
  num_players = config.get('max_num_players', 1)
  if num_players > 1:
    raise ValueError(
      f'env.name={name} has {num_players} players, and podrl trains one; '
      'choose a single-player task'
    )
  try:
    with warnings.catch_warnings():  # gymnasium warns of rounded bounds.
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
  """The `EnvSpec` of a task.

  Args:
    name: a task that envpool lists, for example 'Pong-v5'.
    **options: options of the task, for example `img_height=42`.

  Raises:
    ValueError: if the name or an option is unknown, a value has a wrong type,
      the task has several players, or a space is not supported.
  """
  return _to_spec(name, _check(name, options)[0])


def load_opengl() -> None:
  """Lets MuJoCo's tasks draw on Linux; call it before envpool is imported.

  MuJoCo looks for a library called libEGL among the loaded ones. The library
  that envpool loads has another name, and a libEGL that is loaded later is not
  the one that envpool set up. In both cases MuJoCo ends the process.
  """
  global _can_mujoco_draw
  if sys.platform == 'linux' and 'envpool' not in sys.modules:
    try:
      ctypes.CDLL('libEGL.so.1', ctypes.RTLD_GLOBAL)
      _can_mujoco_draw = True
    except OSError:  # The library is not installed.
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
    name: a task that envpool lists, for example 'Pong-v5'.
    num_envs: number of environments in the pool.
    seed: seed of the first environment; environment i has `seed` + i.
    num_threads: number of threads that step the pool.
    render: whether `HostEnv.render` will be called, which raises a
      RuntimeError if the task cannot draw on this machine.
    **options: options of the task.

  Raises:
    ValueError: see `make_spec`.
  """
  import envpool

  library_spec, options = _check(name, options)
  spec = _to_spec(name, library_spec)
  pool: Any = envpool.make_gymnasium(
    name,
    num_envs=num_envs,
    seed=seed,
    num_threads=num_threads,
    render_mode='rgb_array' if render else None,
    **options,
  )
  with warnings.catch_warnings():  # gymnasium warns of rounded bounds.
    warnings.simplefilter('ignore')
    space = pool.single_observation_space
    to_action = spaces.to_library_action(pool.single_action_space)
  joints = HostJoints(num_envs)

  def step(action: np.ndarray) -> TimeStep:
    obs, reward, terminated, truncated, _ = pool.step(to_action(action))
    return joints.step(obs, reward, terminated, truncated)

  def draw() -> np.ndarray:
    module = envpool.registration.registry.specs[name][0]
    if module.startswith('envpool.mujoco') and not _can_mujoco_draw:
      raise RuntimeError('MuJoCo needs libEGL, loaded before envpool')
    return pool.render()[0].copy()

  return HostEnv(
    spec,
    reset=lambda: joints.reset(pool.reset()[0]),
    step=step,
    close=pool.close,
    observe=lambda obs: spaces.observe(space, obs),
    render=draw,
  )
