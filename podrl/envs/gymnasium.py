"""gymnasium environments as a `HostEnv`."""

from collections.abc import Sequence
import importlib.metadata
import inspect
from multiprocessing import resource_tracker
import signal
from typing import Any

from podrl.envs import joints, spaces
from podrl.messages import check_choice, one_line, suggest
from podrl.types import EnvSpec, HostEnv

_MODES = ('sync', 'async')
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
    imported = spaces.import_module(name, module)
  try:
    return gymnasium.spec(identifier)
  except gymnasium.error.Error as error:
    advice = suggest(name, gymnasium.registry)
    if module and hasattr(imported, identifier):
      advice = f'for a function that makes a DeviceEnv, write jax:{name}'
      if inspect.isclass(getattr(imported, identifier)):
        advice = f'{identifier} is a class; register it with gymnasium.register'
    raise ValueError(
      f'env.name={name} is not a gymnasium environment; {advice}'
    ) from error


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
  # The environment's code can raise anything, and can also call `sys.exit`.
  except (Exception, SystemExit) as error:
    raise ValueError(
      f'env.name={name} with {options or "no options"} cannot be made: '
      f'{one_line(error, with_kind=True)}'
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
  env = _make_single(name, spec.entry_point, options)
  env.close()
  max_steps = options.get('max_episode_steps')
  if max_steps is None:
    max_steps = spec.max_episode_steps or 0
  observation_space, action_space = env.observation_space, env.action_space
  return spaces.env_spec(
    name, observation_space, action_space, 1, max(max_steps, 0)
  )


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
  after another, or 'async', which steps each environment in its own process.
  """
  import gymnasium

  del num_threads
  if render and _can_draw(name):
    options['render_mode'] = 'rgb_array'
  spec, options = make_spec(name, **options), _with_whole_limit(options)
  mode = options.pop('vectorization_mode', _MODES[0])
  vector_kwargs: dict[str, Any] = {
    'autoreset_mode': gymnasium.vector.AutoresetMode.NEXT_STEP
  }
  if mode == 'async':
    # Do not fork: a fork copies locks while JAX's threads use them.
    vector_kwargs['context'] = 'spawn'
    # Start the tracker now: its start would reset the mask that is set below.
    resource_tracker.ensure_running()
  # Processes inherit the mask, so Ctrl-C or SIGTERM does not end them directly.
  signals = (signal.SIGINT, signal.SIGTERM)
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
  try:
    envs: Any = gymnasium.make_vec(
      name, num_envs, mode, vector_kwargs=vector_kwargs, **options
    )
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)

  def close() -> None:
    try:
      envs.close()
    except BaseException:  # A process of an environment died.
      for process in getattr(envs.unwrapped, 'processes', ()):
        process.kill()  # The processes block SIGTERM.
      envs.unwrapped.closed = True  # Otherwise, its finalizer closes it again.
      raise

  # By default, VectorEnv returns copies of observations, as HostEnv requires.
  return joints.make_host_env(
    name, spec, envs, seed, close=close, render=lambda: envs.render()[0]
  )
