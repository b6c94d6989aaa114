"""gymnasium environments as a `HostEnv`, and spaces as podrl's types."""

from collections.abc import Callable
import difflib
import importlib
import inspect
from multiprocessing import resource_tracker
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrl.types import Array, Box, Discrete, EnvSpec, HostEnv, TimeStep, Tree

_MODES = ('sync', 'async')


def obs_spec(space: Any) -> Tree:
  """What `observe(space, ...)` returns, for one environment.

  Args:
    space: a gymnasium space: a box, a category, or a dict or tuple of them.

  Returns:
    A tree of `jax.ShapeDtypeStruct`.

  Raises:
    ValueError: for another kind of space.
  """
  kind = type(space).__name__
  if kind == 'Dict':
    return {k: obs_spec(v) for k, v in space.spaces.items()}
  if kind == 'Tuple':
    return tuple(obs_spec(x) for x in space.spaces)
  if kind == 'Discrete':
    return jax.ShapeDtypeStruct((int(space.n),), bool)
  if kind in ('Box', 'MultiBinary'):
    # The device has no 64-bit numbers; they are rounded on their way there.
    return jax.ShapeDtypeStruct(
      space.shape, jax.dtypes.canonicalize_dtype(space.dtype)
    )
  raise ValueError(
    f'observations are {space}, which no network takes; what fits are boxes, '
    'categories and dicts of them'
  )


def observe(space: Any, obs: Tree) -> Tree:
  """Observations of a space with each category as a one-hot vector.

  Args:
    space: of one environment.
    obs: leaves `[B, ...]`; traced.

  Returns:
    Leaves `[B, ...]`, of the shapes and dtypes of `obs_spec(space)`.
  """
  kind = type(space).__name__
  if kind == 'Dict':
    return {k: observe(v, obs[k]) for k, v in space.spaces.items()}
  if kind == 'Tuple':
    return tuple(map(observe, space.spaces, obs))
  if kind == 'Discrete':
    categories = jnp.arange(space.n, dtype=jnp.int32) + int(space.start)
    return obs.reshape(-1, 1) == categories[None]
  return obs.reshape(-1, *space.shape)


def action_space(space: Any) -> Discrete | Box:
  """A gymnasium action space as podrl's type; a `Discrete`'s start is left out.

  Raises:
    ValueError: if it is neither a category nor a box.
  """
  kind = type(space).__name__
  if kind == 'Discrete':
    return Discrete(int(space.n))
  if kind == 'Box':
    # Rounded inwards: float32's 0.4 is more than float64's.
    low, high = (np.asarray(x, np.float32) for x in (space.low, space.high))
    low = np.where(low < space.low, np.nextafter(low, np.float32(np.inf)), low)
    high = np.where(
      high > space.high, np.nextafter(high, np.float32(-np.inf)), high
    )
    return Box(space.shape, low, high)
  raise ValueError(
    f'actions are {space}, which no agent takes; what fits are '
    'categories and boxes'
  )


def to_library_action(space: Any) -> Callable[[np.ndarray], np.ndarray]:
  """What turns actions `[B, ...]` of `action_space(space)` into the library's.

  A category's start is added; a box's numbers get its dtype, and are rounded
  where that is an integer's.
  """
  if type(space).__name__ == 'Discrete':
    start = int(space.start)
    return lambda action: action + start if start else action
  dtype = space.dtype
  if np.issubdtype(dtype, np.integer):
    return lambda action: np.rint(action).astype(dtype)
  return lambda action: action.astype(dtype)  # A copy: JAX's is read-only.


def is_channels_first(spec: Tree) -> bool:
  """Whether an observation is an image whose first axis is the channels."""
  shapes = [x.shape for x in jax.tree.leaves(spec)]
  return (
    len(shapes) == 1
    and len(shapes[0]) == 3
    and (shapes[0][0] < min(shapes[0][1:]))
  )


def check_options(name: str, options: Any, known: Any) -> None:
  """Raises a ValueError, with near names, for an unknown option."""
  for key in options:
    if key not in known:
      near = difflib.get_close_matches(key, known, 3, 0.4) or sorted(known)
      raise ValueError(
        f'env.options.{key} is not an option of {name}; '
        f'it has: {", ".join(near)}'
      )


class Joints:
  """Turns what a library's step returns into time steps with joints.

  The libraries reset an environment in the step after its episode's last
  (gymnasium's next-step mode); which steps are first follows from that.
  """

  def __init__(self, num_envs: int):
    self._num_envs = num_envs
    self._is_last = np.zeros(num_envs, bool)

  def reset(self, obs: Tree) -> TimeStep:
    """The time step of a reset of all environments."""
    self._is_last = np.zeros(self._num_envs, bool)
    return TimeStep(
      obs,
      np.zeros(self._num_envs, np.float32),
      np.ones(self._num_envs, np.float32),
      np.ones(self._num_envs, bool),
    )

  def step(
    self, obs: Tree, reward: Array, terminated: Array, truncated: Array
  ) -> TimeStep:
    """The time step of a step, `[B, ...]` each."""
    is_first = self._is_last
    is_real = ~is_first
    self._is_last = (terminated | truncated) & is_real
    return TimeStep(
      obs,
      np.where(is_first, np.float32(0), reward).astype(np.float32, copy=False),
      1 - (terminated & is_real).astype(np.float32),
      is_first,
    )


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
    near = difflib.get_close_matches(name, gymnasium.registry, 3, 0.4)
    raise ValueError(
      f'env.name={name} is not a gymnasium environment; near names: '
      f'{", ".join(near) or "none"}'
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
    check_options(
      name,
      options,
      {*parameters, 'max_episode_steps', 'vectorization_mode'} - {'self'},
    )
  try:
    env = gymnasium.make(name, **options)
  except Exception as error:  # Whatever an environment's constructor raises.
    raise refused(error) from error
  try:
    obs = obs_spec(env.observation_space)
    action = action_space(env.action_space)
  except ValueError as error:
    raise ValueError(f'env.name={name}: {error}') from error
  finally:
    env.close()
  return EnvSpec(obs, is_channels_first(obs), action, 1, max_episode_steps or 0)


def make(name: str, num_envs: int, seed: int, **options: Any) -> HostEnv:
  """Makes a batch of gymnasium environments through its vector API.

  Args:
    name: as registered, for example 'CartPole-v1'; 'module:Id' imports the
      module that registers it.
    num_envs: of the batch; environment i has the seed `seed` + i.
    seed: of the first.
    **options: of the environment, and `vectorization_mode`: 'sync' steps them
      one after the other, 'async' each in a process of its own.

  Raises:
    ValueError: as `make_spec`.
  """
  import gymnasium

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
  to_action = to_library_action(envs.single_action_space)
  joints = Joints(num_envs)

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
    lambda obs: observe(space, obs),
    lambda: envs.render()[0],
  )
