"""gymnasium environments as a `HostEnv`."""

import importlib
import inspect
from multiprocessing import resource_tracker
import signal
from typing import Any

import numpy as np

from podrl.envs import spaces
from podrl.envs.joints import HostJoints
from podrl.types import EnvSpec, HostEnv, TimeStep

_MODES = ('sync', 'async')


def _registered_spec(name: str) -> Any:
  """gymnasium's record of an environment, its module imported where named."""
  import gymnasium

  module, _, identifier = name.rpartition(':')
  try:
    if module:
      importlib.import_module(module)
    return gymnasium.spec(identifier)
  except ImportError as error:
    raise ValueError(f'env.name={name}: {error}') from error
  except gymnasium.error.Error as error:
    raise spaces.unknown_name(
      name, 'a gymnasium environment', gymnasium.registry
    ) from error


def make_spec(name: str, **options: Any) -> EnvSpec:
  """What agents and drivers need to know, from one environment made briefly.

  Args:
    name: as `make`.
    **options: the same.

  Raises:
    ValueError: if the name or an option is unknown or refused, or a space is
      not supported.
  """
  import gymnasium

  spec = _registered_spec(name)
  mode = options.pop('vectorization_mode', _MODES[0])
  if mode not in _MODES:
    raise ValueError(
      f'env.options.vectorization_mode={mode} is unknown; '
      f'choose from {", ".join(_MODES)}'
    )
  max_episode_steps = options.get('max_episode_steps', spec.max_episode_steps)

  def refused(error: Exception) -> ValueError:
    return ValueError(
      f'env.name={name} with {options or "no options"} cannot be made: '
      f'{type(error).__name__}: {" ".join(str(error).split())}'
    )

  entry = spec.entry_point
  try:
    if isinstance(entry, str):
      entry = gymnasium.envs.registration.load_env_creator(entry)
    parameters = inspect.signature(entry).parameters
  except Exception as error:  # Whatever its module raises.
    raise refused(error) from error
  if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    spaces.check_options(
      name,
      options,
      {*parameters, 'max_episode_steps', 'vectorization_mode'} - {'self'},
    )
  try:
    env = gymnasium.make(name, **options)
  except Exception as error:  # Whatever an environment's constructor raises.
    raise refused(error) from error
  try:
    obs = spaces.obs_spec(env.observation_space)
    action = spaces.action_space(env.action_space)
  except ValueError as error:
    raise ValueError(f'env.name={name}: {error}') from error
  finally:
    env.close()
  return EnvSpec(
    obs, spaces.is_channels_first(obs), action, 1, max_episode_steps or 0
  )


def names() -> list[str]:
  """The environments that gymnasium has registered by now."""
  import gymnasium

  return sorted(gymnasium.registry)


def make(
  name: str,
  num_envs: int,
  seed: int,
  *,
  num_threads: int = 1,
  render: bool = False,
  **options: Any,
) -> HostEnv:
  """Makes a batch of gymnasium environments through its vector API.

  Args:
    name: as registered, for example 'CartPole-v1'; 'module:Id' imports the
      module that registers it.
    num_envs: of the batch; environment i has the seed `seed` + i.
    seed: of the first.
    num_threads: unused; `vectorization_mode` decides.
    render: whether `HostEnv.render` will be called.
    **options: of the environment, and `vectorization_mode`: 'sync' steps them
      one after the other, 'async' each in a process of its own.

  Raises:
    ValueError: as `make_spec`.
  """
  import gymnasium

  del num_threads
  if render:
    options['render_mode'] = 'rgb_array'
  spec = make_spec(name, **options)
  mode = options.pop('vectorization_mode', 'sync')
  vector_kwargs = {'autoreset_mode': gymnasium.vector.AutoresetMode.NEXT_STEP}
  if mode == 'async':
    vector_kwargs['context'] = (
      'spawn'  # A fork would copy JAX's threads' locks.
    )
    # The tracker that the first process would start lifts the mask below.
    resource_tracker.ensure_running()
  # Inherited by the processes: who ends them is this one.
  mask = signal.pthread_sigmask(
    signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM)
  )
  try:
    envs = gymnasium.make_vec(
      name, num_envs, mode, vector_kwargs=vector_kwargs, **options
    )
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
  space = envs.single_observation_space
  to_action = spaces.to_library_action(envs.single_action_space)
  joints = HostJoints(num_envs)

  def reset() -> TimeStep:
    # A copy: see `copy` of VectorEnv.
    return joints.reset(envs.reset(seed=seed)[0])

  def step(action: np.ndarray) -> TimeStep:
    obs, reward, terminated, truncated, _ = envs.step(to_action(action))
    return joints.step(obs, reward, terminated, truncated)

  def close() -> None:
    try:
      envs.close()
    except BaseException:  # One of its processes died.
      for process in getattr(envs.unwrapped, 'processes', ()):
        process.kill()  # SIGTERM is blocked there.
      raise

  return HostEnv(
    spec,
    reset,
    step,
    close,
    lambda obs: spaces.observe(space, obs),
    lambda: envs.render()[0],
  )
