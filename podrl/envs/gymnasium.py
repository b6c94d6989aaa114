"""gymnasium environments as a `HostEnv`."""

from collections.abc import Callable, Mapping, Sequence
import copy
import importlib.metadata
import importlib.util
import inspect
from multiprocessing import resource_tracker
import random
import signal
import sys
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np

from podrl import modules
from podrl.envs import autoreset, envpool, spaces
from podrl.messages import check_choice, describe, one_line, similar, suggest
from podrl.types import EnvSpec, HostEnv

_MODES = ('sync', 'async')
# The packages that register the usual namespaces, and how to install them.
_NAMESPACES = {
  'ALE': ('ale_py', 'ale-py'),
  'dm_control': ('shimmy', 'shimmy[dm-control]'),
}
_WATCHED_STEPS = 64  # A warning about precision looks at the first steps.
_watched: set[str] = set()  # Environments that were checked for this warning.
_warned: set[str] = set()  # Warnings that `_close` has printed.
_ASYNC = (
  'with env.options.vectorization_mode=async, each environment has a process '
  'of its own and runs in its main thread'
)
_WORKER_ERRORS = (
  r'(?s).*ERROR: (Received the following error from Worker|'
  r'Traceback \(most recent call last\)|Raising the last exception)'
)
_TAKEN = {'num_envs', 'seed', 'num_threads', 'render'}  # Arguments of `make`.


def names() -> list[str]:
  """Returns the environments that gymnasium has registered so far."""
  import gymnasium

  return sorted(gymnasium.registry)


def is_local(name: str) -> bool:
  """See `Suite.is_local`."""
  if ':' in name:
    return name.startswith('__main__:')
  entry = _registered_spec(name).entry_point
  module = entry.partition(':')[0] if isinstance(entry, str) else '__main__'
  plugins = importlib.metadata.entry_points(group='gymnasium.envs')
  # gymnasium imports these packages itself, so every process has their names.
  everywhere = {'gymnasium', *(x.module.partition('.')[0] for x in plugins)}
  return module.partition('.')[0] not in everywhere


def _registered_spec(name: str) -> Any:
  """Returns the `gymnasium.EnvSpec` of an environment."""
  import gymnasium

  module, _, identifier = name.rpartition(':')
  if module:
    imported = modules.import_module('env.name', name, module)
  try:
    return gymnasium.spec(identifier)
  except gymnasium.error.NamespaceNotFound as error:
    raise ValueError(_explain_namespace(name, identifier)) from error
  except gymnasium.error.Error as error:
    advice = suggest(name, gymnasium.registry)
    if module:
      advice = f'{module} registers no environment {identifier}'
      if near := similar(identifier, gymnasium.registry, 0.7):
        advice += f'; did you mean {near[0]}'
    if module and hasattr(imported, identifier):
      advice = f'for a function that makes a DeviceEnv, write jax:{name}'
      if inspect.isclass(getattr(imported, identifier)):
        advice = f'{identifier} is a class; register it with gymnasium.register'
    raise ValueError(
      f'env.name={name} is not a gymnasium environment; {advice}'
    ) from error


def _explain_namespace(name: str, identifier: str) -> str:
  """Says which package registers the namespace of `NAMESPACE/NAME`."""
  namespace, _, own = identifier.partition('/')
  module, package = _NAMESPACES.get(namespace, ('', ''))
  if not module:
    return (
      f'env.name={name}: no imported module registers {namespace}/; write '
      f'MODULE:{identifier}, where MODULE is the module that registers it'
    )
  text = f'env.name={name} needs {module}; write {module}:{identifier}'
  if not importlib.util.find_spec(module):
    text += f' after pip install {package!r}'
  words, _, version = own.rpartition('-')  # cartpole-swingup-v0, in dm_control.
  ours = similar(f'{words.replace("-", "")}-{version}', envpool.names())
  return f'{text}, or train envpool:{ours[0]}' if ours else text


def _load(entry_point: Any) -> Any:
  """Returns the class or function that makes an environment."""
  import gymnasium

  if isinstance(entry_point, str):
    return gymnasium.envs.registration.load_env_creator(entry_point)
  return entry_point


def _can_draw(name: str) -> bool:
  """Returns whether an environment can draw.

  The result is true if the environment does not declare its render modes.
  """
  try:
    creator = _load(_registered_spec(name).entry_point)
  except Exception:  # `_make_single` says what is wrong.
    return False
  modes = getattr(creator, 'metadata', {}).get('render_modes')
  return modes is None or 'rgb_array' in modes


def _make_single(name: str, entry_point: Any, options: dict[str, Any]) -> Any:
  """Makes one environment after checking its options."""
  import gymnasium

  try:
    entry_point = _load(entry_point)
    parameters = inspect.signature(entry_point).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
      known = {*parameters, 'max_episode_steps', 'vectorization_mode'}
      spaces.check_options(name, options, known - {'self'})
    return gymnasium.make(name, **options)
  except spaces.UnknownOption:
    raise
  except BaseException as error:  # The environment's code can raise anything.
    autoreset.raise_interrupt(error)
    raise ValueError(
      f'env.name={name} with {options or "no options"} cannot be made: '
      f'{describe(error)}'
    ) from error


def _with_whole_limit(options: dict[str, Any]) -> dict[str, Any]:
  """Returns the options with a limit of steps that is an integer."""
  name = 'max_episode_steps'
  if options.get(name) in (None, -1):  # The usual limit, or none.
    return options
  return options | {name: spaces.check_whole(name, options[name])}


def make_spec(name: str, /, **options: Any) -> EnvSpec:
  """Returns an environment's `EnvSpec`; see `make` for the arguments."""
  if taken := _TAKEN & options.keys():
    raise ValueError(
      f'env.options.{min(taken)} is not possible, because podrl sets this '
      'argument itself'
    )
  spec, options = _registered_spec(name), _with_whole_limit(options)
  mode = options.pop('vectorization_mode', _MODES[0])
  check_choice('env.options.vectorization_mode', mode, _MODES)
  if spec.entry_point is None:
    raise ValueError(
      f'env.name={name} has no entry_point, only a vector_entry_point; '
      'register it with an entry_point that makes a single environment'
    )
  env = _make_single(name, spec.entry_point, options)
  _close(name, env.close)
  max_steps = options.get('max_episode_steps')
  if max_steps is None:
    max_steps = spec.max_episode_steps or 0
  observation_space, action_space = env.observation_space, env.action_space
  return spaces.env_spec(
    name, observation_space, action_space, 1, max(max_steps, 0)
  )


def _close(name: str, close: Callable[[], None]) -> None:
  """Closes an environment; prints an error once instead of raising it."""
  try:
    close()
  except BaseException as error:  # The environment's code can raise anything.
    autoreset.raise_interrupt(error)
    text = f'warning: {name} failed in close: {describe(error)}'
    if text not in _warned:  # All environments of a pool give the same text.
      print(text, file=sys.stderr)
    _warned.add(text)


def _make_guard(name: str, *, is_process: bool) -> Callable[[Any], Any]:
  """Makes a function that checks what an environment returns, in its place.

  The function replaces the methods `reset` and `step`. The `info` of `step`
  keeps only its finite numbers, as floats, because others may not fit in an
  array; that of `reset` becomes empty. The first reset seeds the spaces of the
  environment, because some environments sample them.

  The mode 'async' copies the code of this function to other processes, where
  podrl is not imported. So the code uses only numpy, gymnasium and Python.

  Args:
    is_process: whether the environment has a process of its own. Its global
      generators are then seeded too, and it raises only a ValueError, because
      gymnasium hangs if it cannot send an error to the main process.
  """

  def guard(env: Any) -> Any:
    import traceback

    from gymnasium import spaces

    reset, step, base = env.reset, env.step, env.unwrapped
    for key in ('action_space', 'observation_space'):
      space = getattr(type(base), key, None)
      # If all environments shared a space, its seed would be shared too.
      if isinstance(space, spaces.Space) and key not in vars(base):
        setattr(base, key, copy.deepcopy(space))
    space, num_steps = env.observation_space, 0
    shape, dtype, array = space.shape, space.dtype, np.ndarray
    is_plain = isinstance(space, spaces.Box)

    def fail(what: str, rule: str) -> None:
      where = f'in step {num_steps}' if num_steps else 'in reset'
      raise ValueError(f'{name} returned {what} {where}; {rule}')

    def check(space: Any, obs: Any, place: str = '') -> Any:
      if isinstance(space, (spaces.Dict, spaces.Tuple)):
        if not isinstance(obs, (Mapping, tuple, list)):
          kind = type(obs).__name__
          fail(f'an observation{place} of type {kind}', f'its space is {space}')
      if isinstance(space, spaces.Dict):
        missing = [k for k in space.spaces if k not in obs]
        if missing:
          fail(f'an observation{place} without {missing[0]!r}', 'add it')
        items = space.spaces.items()
        return {k: check(v, obs[k], f'{place}[{k!r}]') for k, v in items}
      if isinstance(space, spaces.Tuple):
        if len(obs) != len(space.spaces):
          fail(
            f'{len(obs)} observations{place}',
            f'its space says {len(space.spaces)}',
          )
        parts = enumerate(zip(space.spaces, obs))
        return tuple(check(v, x, f'{place}[{i}]') for i, (v, x) in parts)
      try:
        x = np.asarray(obs)
      except ValueError:  # The rows have different lengths.
        x = np.asarray(obs, object)
      what = f'an observation{place} of'
      if x.dtype.kind not in 'biuf':
        fail(f'{what} type {type(obs).__name__}', f'its space says {dtype}')
      if space.shape == () and x.size == 1:
        x = x.reshape(())
      if x.shape != space.shape:
        fail(f'{what} shape {x.shape}', f'its space says {space.shape}')
      if x.dtype.kind == space.dtype.kind == 'f' and x.dtype != space.dtype:
        with np.errstate(over='ignore'):
          cast = x.astype(space.dtype)
        lost = x[np.isinf(cast) & np.isfinite(x)]
        if lost.size:
          fail(
            f'{what} {lost.flat[0]:g}',
            f'{space.dtype} cannot contain it; scale it',
          )
        return cast
      rule: Any = 'same_kind' if space.dtype.kind == 'f' else 'safe'
      if not np.can_cast(x.dtype, space.dtype, rule):
        with np.errstate(invalid='ignore'):
          cast = x.astype(space.dtype)
        if not np.array_equal(cast, x):
          fail(
            f'{what} {x.dtype} that {space.dtype} cannot contain',
            f'its space says {space.dtype}',
          )
        return cast
      return x

    def number(what: str, value: Any) -> float:
      x = np.asarray(value)
      # A large integer, a fraction or a decimal is an object for numpy.
      is_number = x.dtype.kind in 'biuf' or hasattr(value, '__float__')
      if not is_number or x.dtype.kind == 'c':
        fail(f'{what} of type {type(value).__name__}', 'it must be a number')
      if x.size != 1:
        fail(f'{what} of shape {x.shape}', 'it must be one number')
      return x.item()

    def numbers(info: Any) -> dict[str, float]:
      return {
        name: float(x)
        for name, x in info.items()
        if isinstance(x, (float, int, np.floating, np.integer, np.bool_))
        # In the mode 'async', the name with '_' tells who has the number.
        and isinstance(name, str)
        and not name.startswith('_')
        and -3.4e38 < x < 3.4e38
      }

    def checked_reset(*, seed: Any = None, options: Any = None) -> Any:
      nonlocal num_steps
      num_steps = 0
      if seed is not None:
        env.action_space.seed(seed)
        env.observation_space.seed(seed)
        if is_process:
          np.random.seed(seed)
          random.seed(seed)
      found = reset(seed=seed, options=options)
      if not isinstance(found, tuple) or len(found) != 2:
        fail(f'a {type(found).__name__}', 'it must return (obs, info)')
      return check(space, found[0]), {}

    def checked_step(action: Any) -> Any:
      nonlocal num_steps
      num_steps += 1
      found = step(action)
      if len(found) != 5:
        fail(
          f'{len(found)} values',
          'it must return (obs, reward, terminated, truncated, info)',
        )
      obs, reward, terminated, truncated, info = found
      # The usual types are checked here, because this is faster.
      is_usual = is_plain and type(obs) is array
      if not is_usual or obs.dtype is not dtype or obs.shape != shape:
        obs = check(space, obs)
      if not isinstance(reward, float):
        reward = float(number('a reward', reward))
      if not -3.4e38 < reward < 3.4e38 and abs(reward) < float('inf'):
        fail(f'the reward {reward:g}', '32 bits cannot contain it; scale it')
      if type(terminated) is not bool:
        terminated = bool(number('terminated', terminated))
      if type(truncated) is not bool:
        truncated = bool(number('truncated', truncated))
      info = numbers(info) if info and isinstance(info, Mapping) else {}
      return obs, reward, terminated, truncated, info

    def alone(method: Callable[..., Any]) -> Callable[..., Any]:
      def call(*args: Any, **kwargs: Any) -> Any:
        try:
          return method(*args, **kwargs)
        except Exception as error:
          if isinstance(error, ValueError) and str(error).startswith(name):
            raise
          text = f'{type(error).__name__}: {error}'
          where = f'step {num_steps}' if num_steps else 'reset'
          frames = traceback.extract_tb(error.__traceback__)
          own = [x for x in frames[2:] if 'site-packages' not in x.filename]
          last = (own or frames)[-1]
          raise ValueError(
            f'{name} failed in {where}: {text} '
            f'({last.filename}:{last.lineno}, in {last.name})'
          ) from error

      return call

    wrap = alone if is_process else lambda method: method
    env.reset, env.step = wrap(checked_reset), wrap(checked_step)
    return env

  return guard


class _Pool(NamedTuple):
  """Some environments; the functions are those of gymnasium's `VectorEnv`.

  But `step` returns a `TimeStep.info`.
  """

  num_envs: int
  reset: Callable[..., Any]
  step: Callable[..., Any]
  render: Callable[[], Any]
  close: Callable[[], None]  # Prints the errors of the environments.


def _make_sync(name: str, num_envs: int, options: dict[str, Any]) -> _Pool:
  """Makes environments that are stepped one after another.

  It is faster than gymnasium's `SyncVectorEnv`, and gives the same results.
  """
  import gymnasium
  from gymnasium.vector.utils import concatenate, create_empty_array

  guard, envs = _make_guard(name, is_process=False), []
  is_over = [False] * num_envs
  for _ in range(num_envs):
    envs.append(guard(gymnasium.make(name, **options)))
    # The checks of gymnasium only warn, so one environment is enough.
    options = options | {'disable_env_checker': True}
  space, action_space = envs[0].observation_space, envs[0].action_space
  for env in envs:
    if (env.observation_space, env.action_space) != (space, action_space):
      raise ValueError(
        f'env.name={name}: the spaces of two environments differ: '
        f'{space} and {env.observation_space}, {action_space} and '
        f'{env.action_space}; make them equal'
      )

  def stack(observations: list[Any]) -> Any:
    empty = create_empty_array(space, num_envs, np.empty)
    return concatenate(space, observations, empty)

  def reset(seed: int | Sequence[int]) -> tuple[Any, dict[str, Any]]:
    is_over[:] = [False] * num_envs
    seeds = (
      [seed + i for i in range(num_envs)] if isinstance(seed, int) else seed
    )
    return stack([x.reset(seed=s)[0] for x, s in zip(envs, seeds)]), {}

  def step_all(actions: np.ndarray) -> tuple[Any, ...]:
    observations, rewards, ends, cuts, infos = [], [], [], [], []
    for i, env in enumerate(envs):
      if is_over[i]:
        obs, reward, terminated, truncated = env.reset()[0], 0.0, False, False
        info = {}
      else:
        obs, reward, terminated, truncated, info = env.step(actions[i])
      observations.append(obs)
      rewards.append(reward)
      ends.append(terminated)
      cuts.append(truncated)
      infos.append(info)
      is_over[i] = terminated or truncated
    arrays = np.array(rewards), np.array(ends), np.array(cuts)
    names = dict.fromkeys(name for info in infos for name in info)
    columns = {
      name: np.array([info.get(name, np.nan) for info in infos], np.float32)
      for name in names
    }
    return stack(observations), *arrays, columns

  def step(actions: np.ndarray) -> tuple[Any, ...]:
    try:
      return step_all(actions)
    except (RuntimeError, ValueError) as error:
      # For example, Python allows handlers of signals only in the main thread.
      if 'thread' not in str(error):
        raise
      raise RuntimeError(f'{one_line(error)}; {_ASYNC}') from error

  def render() -> Any:
    return envs[0].render()

  def close() -> None:
    for env in envs:
      _close(name, env.close)

  return _Pool(num_envs, reset, step, render, close)


def _make_async(name: str, num_envs: int, options: dict[str, Any]) -> _Pool:
  """Makes environments that have a process each."""
  import gymnasium

  # `step` and `reset` raise the errors that gymnasium prints, once per process.
  warnings.filterwarnings('ignore', _WORKER_ERRORS)
  # Start the tracker now: its start would reset the mask that is set below.
  resource_tracker.ensure_running()
  # Processes inherit the mask, so Ctrl-C or SIGTERM does not end them directly.
  signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
  try:
    envs: Any = gymnasium.make_vec(
      name,
      num_envs,
      'async',
      # Do not fork: a fork copies locks while JAX's threads use them.
      vector_kwargs={
        'autoreset_mode': gymnasium.vector.AutoresetMode.NEXT_STEP,
        'context': 'spawn',
      },
      wrappers=[_make_guard(name, is_process=True)],
      **options,
    )
  except EOFError as error:
    raise ValueError(
      f'env.name={name}: a process of an environment ended while it started'
    ) from error
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)

  def explain(error: Exception) -> str:
    for i, process in enumerate(envs.processes):
      process.join(1.0)
      if code := process.exitcode:
        text = f'ended with code {code}'
        if code < 0:
          text = f'was killed by signal {-code}'
        if code == -signal.SIGKILL:
          text += '; the machine may not have enough memory'
        return f'the process of environment {i} {text}'
      if code == 0:
        return f'the process of environment {i} ended'
    return one_line(error, with_kind=True)

  def alive(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
      try:
        return method(*args, **kwargs)
      except (EOFError, OSError) as error:
        raise RuntimeError(explain(error)) from error

    return call

  def step(actions: np.ndarray) -> tuple[Any, ...]:
    *results, info = envs.step(actions)
    return *results, {
      name: np.where(info['_' + name], x, np.nan).astype(np.float32)
      for name, x in info.items()
      if not name.startswith('_')
    }

  def close() -> None:
    try:
      envs.close()
    except BaseException as error:  # A process of an environment died.
      for process in envs.unwrapped.processes:
        process.kill()  # The processes block SIGTERM.
      envs.unwrapped.closed = True  # Otherwise, its finalizer closes it again.
      if not isinstance(error, EOFError | OSError):  # `step` explained these.
        raise

  # By default, VectorEnv returns copies of observations, as HostEnv requires.
  return _Pool(
    num_envs,
    alive(envs.reset),
    alive(step),
    lambda: envs.render()[0],
    lambda: _close(name, close),
  )


def _watch(name: str, spec: EnvSpec) -> EnvSpec:
  """Makes `spec.cut` warn once if it rounds away what an environment shows."""
  is_exact = all(
    x.dtype.kind in 'bf' or x.dtype.itemsize < 4
    for x in jax.tree.leaves(spec.obs)
  )
  if (spec.cut is spaces.same and is_exact) or name in _watched:
    return spec
  steps: list[list[tuple[np.ndarray, np.ndarray]]] = []

  def cut(obs: Any) -> Any:
    small = spec.cut(obs)
    if len(steps) == _WATCHED_STEPS:
      return small
    pairs = zip(jax.tree.leaves(obs), jax.tree.leaves(small))
    steps.append([(x, y) for x, y in pairs if x.dtype.itemsize >= 4])
    if len(steps) == _WATCHED_STEPS:
      leaves = zip(*steps)
      is_lost = any(spaces.is_rounded_away(*zip(*leaf)) for leaf in leaves)
      steps[:] = [[]] * _WATCHED_STEPS  # Free the memory.
      if is_lost and name not in _watched:
        print(
          f'warning: {name}: floats of 32 bits do not show the differences '
          'between its observations; subtract a constant in the environment',
          file=sys.stderr,
        )
      _watched.add(name)
    return small

  return spec._replace(cut=cut)


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
  """Makes a batch of environments through gymnasium's API; see `Suite.make`.

  For the name 'module:Id', podrl first imports the module, which must register
  Id. The option `vectorization_mode` is 'sync', which steps one environment
  after another in one thread, or 'async', which steps each environment in its
  own process.
  """
  del num_threads
  if render and _can_draw(name):
    options['render_mode'] = 'rgb_array'
  spec, options = make_spec(name, **options), _with_whole_limit(options)
  if options.pop('vectorization_mode', _MODES[0]) == 'async':
    pool = _make_async(name, num_envs, options)
  else:
    pool = _make_sync(name, num_envs, options)

  return autoreset.make_host_env(
    name,
    _watch(name, spec),
    pool,
    seed,
    close=pool.close,
    render=pool.render,
    info=lambda info: info,
  )
