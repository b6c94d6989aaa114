"""Builds the objects of a run from its configuration."""

from collections.abc import Callable, Collection, Mapping, Sequence
import functools
import os
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from podrl import types
from podrl.agents import find, make, sgd_steps_per_update
from podrl.core import learner, memory, meta, population
from podrl.core.optimizers import follow_kl, make_optimizer
from podrl.drivers import anakin, sebulba, spmd
from podrl.drivers.stages import num_cores
from podrl.envs import SUITES, Suite
from podrl.fields import Fields, section, short
from podrl.fields import hyperparams as declared
from podrl.messages import check_choice
from podrl.records import checkpoint, workdir
from podrl.records.workdir import agents, num_agents
from podrl.run import devices, evaluation
from podrl.run.config import check_trust, complete, make_importable, meta_params
from podrl.run.devices import Machine
from podrl.run.evaluation import Evaluation

# Evaluation cuts episodes at this length if the environment has no limit.
_UNLIMITED_STEPS = 10_000

_FIRST = 'first'  # The opponent that is the untrained policy of the seed.

_MAX_UPDATES = 1024  # One call of Anakin's program runs at most this many.
# One call reports at most about this many bytes of finished episodes.
_EPISODES_BYTES = 2**26


class Run(NamedTuple):
  """Everything that `train` needs."""

  spec: types.EnvSpec
  devices: Sequence[jax.Device]  # Used by the run, in all processes.
  driver: types.Driver
  evaluate: Callable[..., Evaluation | None]  # See `make_evaluate`.
  # Further evaluations of an agent that plays against itself, by opponent.
  others: Mapping[str, Callable[..., Evaluation | None]]
  eval_keys: Sequence[chex.PRNGKey]  # Each agent's key for evaluations.
  steps_per_update: int  # Environment steps, reset steps included.
  num_updates: int
  eval_every_updates: int  # 0 means that the run evaluates only at its end.
  checkpoint_every_updates: int  # 0 means never after a number of updates.
  evolve_every_updates: int  # 0 means that there is no population.
  variables: types.Variables  # Shapes of the variables of all agents.
  warnings: Sequence[str]
  resume_note: str  # Tells the user what a resumed run cannot continue.


def has_axis(config: Fields) -> bool:
  """Returns whether a run's arrays have an axis of agents."""
  return 'sebulba.mode' not in config and num_agents(config) > 1


def architecture(config: Fields) -> str:
  """Returns 'anakin' or 'sebulba'; raises a ValueError for a wrong suite."""
  suite = config['env.suite']
  expected = 'sebulba' if 'sebulba.mode' in config else 'anakin'
  names = [k for k, x in SUITES.items() if x.architecture == expected]
  if suite in SUITES and suite not in names:
    raise ValueError(
      f'config.env.suite={suite} works only with {SUITES[suite].architecture}, '
      f'but this experiment uses {expected}; set the suite to '
      f'{" or ".join(names)}'
    )
  check_choice('config.env.suite', suite, names)
  return expected


# XLA then measures no kernels, and avoids operations whose results depend on
# timing. Without measurements, its own products have small tiles, so cuBLAS
# computes all products.
GPU_DETERMINISTIC: dict[str, str | bool] = {
  'xla_gpu_deterministic_ops': True,
  'xla_gpu_enable_triton_gemm': False,
}


def _missing_gpu_flags(config: Fields) -> list[str]:
  """Returns the flags that a run needs and XLA_FLAGS does not contain."""
  given = os.environ.get('XLA_FLAGS', '')
  options = GPU_DETERMINISTIC if config['gpu_deterministic'] else {}
  return [
    f'--{k}={str(x).lower()}' for k, x in options.items() if k not in given
  ]


def set_up_jax(config: Fields, num_processes: int = 1) -> None:
  """Configures JAX for a run; call it before the first use of a device."""
  is_anakin = architecture(config) == 'anakin'
  # Programs are written for 32 bits; a profile may set JAX_ENABLE_X64.
  jax.config.update('jax_enable_x64', False)
  missing = _missing_gpu_flags(config)
  if missing and spmd.has_gpu_packages() and not spmd.is_in_use():
    given = os.environ.get('XLA_FLAGS', '').split()
    os.environ['XLA_FLAGS'] = ' '.join(given + missing)
  # Keep the CPU devices that a test or XLA_FLAGS made.
  has_devices = jax.config.jax_num_cpu_devices > 0  # type: ignore
  has_devices |= 'device_count' in os.environ.get('XLA_FLAGS', '')
  has_devices |= spmd.is_in_use()
  if not has_devices and not spmd.has_accelerator():
    if is_anakin:
      num_devices = devices.num_cpu_devices(config, num_processes)
    else:
      num_devices = devices.num_named_devices(config)
    spmd.set_num_cpu_devices(num_devices, num_processes)
    # Without asynchronous dispatch, an actor's small programs are faster.
    jax.config.update('jax_cpu_enable_async_dispatch', is_anakin)
  cache = config['compilation_cache']
  jax.config.update('jax_enable_compilation_cache', cache != 'off')
  if cache == 'off':
    return
  if cache == 'auto':
    home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    cache = os.path.join(home, 'podrl', 'xla')
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def _suite(config: Fields) -> Suite:
  """Returns the suite, after making the user's modules importable."""
  make_importable(config)
  return SUITES[config['env.suite']]


def make_spec(config: Fields) -> types.EnvSpec:
  """Makes the environment's spec; raises a ValueError for a user's mistake."""
  suite = _suite(config)
  options = config['env.options']
  omitted = [x for x in suite.policy_options if _is_run(options.get(x))]
  return suite.make_spec(config['env.name'], **_without(options, omitted))


def make_env(
  config: Fields, opponent: str = '', agent: types.Agent | None = None
) -> types.DeviceEnv:
  """Makes an Anakin run's environments.

  Args:
    opponent: if given, it replaces that of the configuration.
    agent: the agent of the run, which the opponent 'first' needs.

  Raises:
    ValueError: for a user's mistake.
  """
  suite = _suite(config)
  options = dict(config['env.options'])
  if opponent:
    options['opponent'] = opponent
  for name in filter(options.get, suite.policy_options):
    if agent and options[name] == _FIRST:
      options[name] = _first_player(config, agent)
    elif _is_run(options[name]):
      try:
        options[name] = _load_player(options[name], config)
      except ValueError as error:
        field = 'eval.opponents' if opponent else f'env.options.{name}'
        raise ValueError(f'{field}: {error}') from error
  return suite.make(config['env.name'], **options)


def _is_run(value: Any) -> bool:
  return isinstance(value, str) and workdir.is_run(value)


def _without(
  options: Mapping[str, Any], omitted: Collection[str]
) -> dict[str, Any]:
  return {k: x for k, x in options.items() if k not in omitted}


# `(rng_key, obs) -> action`, see `Suite.policy_options`.
_Player = Callable[[chex.PRNGKey, types.Tree], types.Array]


def _load_player(path: str, config: Fields) -> _Player:
  """Loads a policy that plays in an environment."""
  # Compare first: nothing may be imported for another environment.
  both = config, workdir.find_agent(str(path))[1]
  names, options = zip(*map(game, both))
  if names[0] != names[1]:
    raise ValueError(f'{path} has learned {names[1]}, not {names[0]}')
  if options[0] != options[1]:
    raise ValueError(f'{path} has other env.options: {options[1]}')
  own, _, agent, variables, _ = load_agent(str(path))
  check_can_play(path, own)
  return _make_player(agent, variables)


def game(config: Fields) -> tuple[str, dict[str, Any]]:
  """Returns the task and its options, except those that name players."""
  omitted = SUITES[config['env.suite']].policy_options
  name = f'{config["env.suite"]}:{config["env.name"]}'
  return name, _without(config['env.options'], omitted)


def check_can_play(path: str, config: Fields) -> None:
  """Raises a ValueError if a run's policy cannot play against others."""
  if config.get('network.recurrent', 'none') != 'none':
    raise ValueError(f'{path} has a recurrent network, which cannot play')


def _first_player(config: Fields, agent: types.Agent) -> _Player:
  """Makes a player of the untrained policy that the run's seed gives."""
  init_key, _ = jax.random.split(jax.random.key(config['seed']))
  return _make_player(agent, agent.init(anakin.learner_key(init_key)))


def _make_player(agent: types.Agent, variables: types.Variables) -> _Player:
  variables = jax.tree.map(np.asarray, variables)  # For any device.
  return functools.partial(agent.act_once, variables)


def make_host_env(
  config: Fields,
  num_envs: int,
  seed: int | Sequence[int],
  num_threads: int,
  *,
  evaluation: bool = False,
  render: bool = False,
) -> types.HostEnv:
  """Makes a pool of environments for a Sebulba run.

  For `seed`, see `Suite.make`. `evaluation` omits the options that only
  training uses. `render` allows calls to `HostEnv.render`.
  """
  suite = _suite(config)
  omitted = suite.training_options if evaluation else ()
  options = _without(config['env.options'], omitted)
  options |= {'num_threads': num_threads, 'render': render}
  return suite.make(config['env.name'], num_envs, seed, **options)


def env_seed(seed: int, num_resumes: int, env: int) -> int:
  """Returns the seed, below 2**31, of a host environment in training.

  Two environments of N in all have the same seed with a probability of about
  N**2 / 2**32, in one run or in several.

  Args:
    num_resumes: how often the run was resumed. The same seeds would repeat the
      earlier episodes.
    env: global index of the environment.
  """
  sequence = np.random.SeedSequence(seed, spawn_key=(num_resumes, env))
  return int(sequence.generate_state(1)[0]) >> 1


def make_agent(config: Fields, spec: types.EnvSpec) -> types.Agent:
  """Makes the agent; raises a ValueError if it does not fit `spec`."""
  make_importable(config)
  try:
    return make(spec, config)
  except ValueError as error:
    name = config['env.name']
    raise ValueError(f'config.env.name={name}: {error}') from error


def make_learner(
  config: Fields,
  agent: types.Agent,
  spec: types.EnvSpec,
  num_devices: int,
  num_updates: int,
  layout: devices.Layout | None = None,
) -> types.Learner:
  """Makes an agent's learner; the caller puts `hyperparams` into the state.

  Args:
    num_devices: number of devices that learn, of all processes.
    num_updates: those of the whole run.

  Raises:
    ValueError: if a size of the memory does not fit the devices.
  """
  entry = find(config['agent.name'])
  values = section(config, 'optimizer')
  desired_kl = values.pop('desired_kl', 0.0)
  optimizer = make_optimizer(
    **values,
    num_sgd_steps=max(1, num_updates * sgd_steps_per_update(config)),
    groups=entry.groups,
  )
  if desired_kl:
    optimizer = follow_kl(optimizer, desired_kl, sgd_steps_per_update(config))
  target_update = entry.target_update and entry.target_update(config)
  if entry.sequence_length is None:
    own = learner.make_learner(
      agent,
      optimizer,
      num_epochs=config['num_epochs'],
      num_minibatches=config['num_minibatches'],
      target_update=target_update,
    )
    return _add_meta_gradients(own, agent, config)
  batch_size = config['replay.batch_size']
  if batch_size % num_devices:
    raise ValueError(
      f'config.replay.batch_size={batch_size} must be a multiple of '
      f'{num_devices}, the number of devices that learn'
    )
  blocks = memory.Blocks()
  if layout and config['sebulba.mode'] == 'asynchronous':
    blocks = memory.Blocks(
      layout.num_actors, layout.unrolls_per_update, len(layout.learner_devices)
    )
  ring = memory.make_ring(
    spec.obs,
    blocks=blocks,
    frame_stack=spec.frame_stack,
    capacity=-(-config['replay.capacity_steps'] // num_devices),
    min_steps=-(-config['replay.min_steps'] // num_devices),
    batch_size=batch_size // num_devices,
    sequence_length=entry.sequence_length(config),
    priority_exponent=config.get('replay.priority_exponent', 0.0),
  )
  return learner.make_learner(
    agent,
    optimizer,
    num_epochs=config['replay.sgd_steps_per_update'],
    target_update=target_update,
    memory=ring,
  )


def _add_meta_gradients(
  own: types.Learner, agent: types.Agent, config: Fields
) -> types.Learner:
  """Makes hyperparameters learn too, if the configuration asks for it."""
  if not config.get('meta.learning_rate'):
    return own
  fixed = {x: jnp.float32(config[f'meta.{x}']) for x in meta.NAMES}
  return meta.make_meta_learner(
    own,
    meta.make_outer_loss(agent, fixed),
    optax.adam(config['meta.learning_rate']),
    names=meta_params(config),
    decay=config['meta.decay'],
  )


def hyperparams(
  config: Fields, agent: types.Agent, num_updates: int
) -> types.Hyperparams:
  """Returns a run's hyperparameters, which are inputs of compiled programs.

  For several agents in one program, they have an axis of agents.
  """
  if has_axis(config):
    own = [
      hyperparams(x, agent, num_updates) for x in agents('', config).values()
    ]
    return jax.tree.map(lambda *x: np.stack(x), *own)
  variables = jax.eval_shape(agent.init, jax.random.key(0))
  known = declared(find(config['agent.name']).fields, config) | {
    'num_updates': num_updates,
    'num_envs': config['env.num_envs'],
  }
  if unknown := sorted(variables.hyperparams.keys() - known.keys()):
    raise ValueError(
      f'the agent {config["agent.name"]} has the hyperparameter {unknown[0]}, '
      'which is not one of its changeable fields; see podrl.fields.Field'
    )
  values = {name: known[name] for name in variables.hyperparams}
  values['anneal_steps'] = max(1, num_updates * sgd_steps_per_update(config))
  return {name: np.asarray(value, np.float32) for name, value in values.items()}


def load_agent(
  path: str,
  which: str | int = 'last',
  seed: int | None = None,
  trust: bool = False,
) -> tuple[Fields, types.EnvSpec, types.Agent, types.Variables, int]:
  """Loads the fields of a `Policy` from a run; see `podrl.load`."""
  path, saved, seed = workdir.find_agent(path, seed)
  step = checkpoint.find(path, which)
  config = check_trust(path, saved, trust)
  if trust:  # Later commands then need no `trust`.
    workdir.sign(path, config)
  make_importable(config)
  config = complete(config)
  spec = make_spec(config)
  agent = make_agent(config, spec)
  like = jax.eval_shape(agent.init, jax.random.key(0))
  variables = checkpoint.read_agent(path, config, seed, step, like)
  config = [*agents(path, config).values()][seed]
  # Schedules depend on the number of updates of the whole run.
  steps_per_update = checkpoint.last_progress(path)[2]
  num_updates = -(-config['total_env_steps'] // steps_per_update)
  values = hyperparams(config, agent, num_updates)
  return config, spec, agent, variables._replace(hyperparams=values), step


def _count_updates(config: Fields, steps_per_update: int) -> int:
  """Counts a run's updates; raises a ValueError if there are too many."""
  total = config['total_env_steps']
  num_updates = -(-total // steps_per_update)
  num_sgd_steps = num_updates * sgd_steps_per_update(config)
  if num_sgd_steps >= 2**31:  # An int32 counts them.
    raise ValueError(
      f'config.total_env_steps={total} needs {num_sgd_steps} optimiser steps, '
      'but podrl can count only 2**31 - 1; set a smaller total'
    )
  return num_updates


def episode_limit(config: Fields, spec: types.EnvSpec) -> int:
  """Returns the steps at which an evaluation cuts episodes."""
  limit = spec.max_episode_steps
  if not 0 < limit < 2**31 - 1:  # The environment has no limit.
    limit = _UNLIMITED_STEPS
  return config['eval.max_episode_steps'] or limit


def make_evaluate(
  config: Fields,
  spec: types.EnvSpec,
  agent: types.Agent,
  env: types.DeviceEnv | None = None,
  opponent: str = '',
) -> Callable[..., Evaluation | None]:
  """Builds the configured evaluation; see `evaluation.make_evaluate`.

  `env` is for an Anakin run whose environments already exist. An agent that
  plays against itself is evaluated against `opponent`; the default is the first
  of `eval.opponents`.
  """
  settings = evaluation.Settings(
    config['eval.num_episodes'],
    episode_limit(config, spec),
    config['eval.greedy'],
    jax.process_index(),
    jax.process_count(),
  )
  if architecture(config) == 'anakin':
    if names := opponents(config, spec):
      env = make_env(config, opponent or names[0], agent)
    env = env or make_env(config)
    return evaluation.make_evaluate(env, agent, settings)

  def make_pool(num_envs: int, seed: int) -> types.HostEnv:
    return make_host_env(config, num_envs, seed, num_cores(), evaluation=True)

  return evaluation.make_host_evaluate(make_pool, agent, settings)


def opponents(config: Fields, spec: types.EnvSpec) -> Sequence[str]:
  """Returns against whom a policy is evaluated; see `eval.opponents`."""
  names = config['eval.opponents']
  if not (spec.has_turns and config['env.options'].get('opponent')):
    if names != evaluation.FIELDS['eval.opponents'].default:
      raise ValueError(
        f'config.eval.opponents={",".join(names)} needs an agent that plays '
        'against itself; see env.options.opponent'
      )
    return ()
  if not names or any(x in ('', 'self', 'pool') for x in names):
    raise ValueError(
      f'config.eval.opponents={",".join(names)} must name others: random, '
      'first or directories of runs'
    )
  short_names = [os.path.basename(x) for x in names]
  if len({*short_names}) < len(names):
    raise ValueError(
      f'config.eval.opponents={",".join(names)}: two of them have the same '
      'name, which their metrics would share'
    )
  return names


def make_run(
  config: Fields, num_resumes: int = 0, machine: Machine | None = None
) -> Run:
  """Builds everything that `train` needs.

  Args:
    num_resumes: how often the run was resumed. The seeds of Sebulba's
      environments depend on this number.
    machine: the machine of the run; None means this machine.

  Raises:
    ValueError: for a user's mistake, before anything compiles.
  """
  is_here = machine is None
  machine = machine or devices.this_machine()
  is_anakin = architecture(config) == 'anakin'
  env = make_env(config) if is_anakin else None
  spec = env.spec if env else make_spec(config)
  agent = make_agent(config, spec)
  seeds = [own['seed'] for own in agents('', config).values()]
  seeds = seeds if is_anakin else [config['seed']]
  keys = [jax.random.split(jax.random.key(seed)) for seed in seeds]
  init_keys, eval_keys = zip(*keys)
  init_key = jnp.stack(init_keys) if has_axis(config) else init_keys[0]
  init = jax.vmap(agent.init) if has_axis(config) else agent.init
  if env:
    system = _make_anakin(config, env, agent, init_key, machine)
  else:
    system = _make_sebulba(config, spec, agent, init_key, num_resumes, machine)
  driver, run_devices, steps_per_update, num_updates, warnings = system
  num_steps = num_updates * steps_per_update
  eval_every, save_every, evolve_every = (
    -(-config.get(f'{part}.every_env_steps', 0) // steps_per_update)
    for part in ('eval', 'checkpoint', 'population')
  )
  if evolve_every and spec.has_turns:  # A population then compares evaluations.
    eval_every = evolve_every
  missing = _missing_gpu_flags(config)
  if is_here and missing and run_devices[0].platform == 'gpu':
    warnings = [
      *warnings,
      'JAX used a device before this run, so other runs with this seed can '
      'have other results; begin the run in a new process, or set '
      f'XLA_FLAGS="{" ".join(missing)}"',
    ]
  if num_steps < config.get('replay.min_steps', 0):
    warnings = [
      *warnings,
      f'the run has {num_steps} steps, fewer than config.replay.min_steps='
      f'{config["replay.min_steps"]}, so the agent never learns',
    ]
  return Run(
    spec,
    run_devices,
    driver,
    make_evaluate(config, spec, agent, env),
    {
      os.path.basename(x): make_evaluate(config, spec, agent, opponent=x)
      for x in opponents(config, spec)[1:]
    },
    eval_keys,
    steps_per_update,
    num_updates,
    eval_every,
    save_every,
    evolve_every,
    jax.eval_shape(init, init_key),
    warnings,
    '' if is_anakin else '; the environments begin new episodes',
  )


# Contains the driver, the run's devices in all processes, environment steps per
# update (reset steps included), the number of updates, and warnings.
_System = tuple[types.Driver, Sequence[jax.Device], int, int, Sequence[str]]


def _make_anakin(
  config: Fields,
  env: types.DeviceEnv,
  agent: types.Agent,
  init_key: chex.PRNGKey,
  machine: Machine,
) -> _System:
  """Builds an Anakin run; a resumed run continues the same episodes."""
  run_devices = devices.anakin_devices(config, machine)
  num_envs, unroll_length = config['env.num_envs'], config['unroll_length']
  steps_per_update = unroll_length * num_envs
  num_updates = _count_updates(config, steps_per_update)
  # A call ends at or before the next record. Its report has a row per update,
  # so the number of updates is limited too.
  max_updates = min(config['log.every_updates'], _MAX_UPDATES)
  keeps_episodes = config['log.episodes']
  if keeps_episodes:  # The report then has eight bytes per step.
    bytes_per_update = 8 * steps_per_update * num_agents(config)
    max_updates = min(max_updates, _EPISODES_BYTES // bytes_per_update)
    max_updates = max(1, max_updates)
  exploit = _make_exploit(config)
  groups = devices.member_groups(config, len(run_devices) // len(machine.hosts))
  programs = anakin.make_programs(
    env,
    agent,
    make_learner(
      config, agent, env.spec, len(run_devices) // groups, num_updates
    ),
    spmd.make_mesh(run_devices, groups),
    num_envs=num_envs,
    unroll_length=unroll_length,
    max_updates=max_updates,
    num_agents=num_agents(config) if has_axis(config) else None,
    freezes='members' in config,
    keeps_episodes=keeps_episodes,
    exploit=exploit,
  )
  steps_per_host = steps_per_update // len(machine.hosts)
  driver = anakin.Anakin(
    programs,
    init_key,
    max_updates,
    steps_per_host,
    hyperparams(config, agent, num_updates),
  )
  return driver, run_devices, steps_per_update, num_updates, []


def _make_exploit(config: Fields) -> Callable | None:
  """Makes the function by which a run's population evolves, or None."""
  if 'population.every_env_steps' not in config:
    return None
  ranges = {
    short(field): population.Range(*bounds)
    for field, *bounds in config['population.ranges']
  }
  return population.make_exploit(ranges)


def _make_sebulba(
  config: Fields,
  spec: types.EnvSpec,
  agent: types.Agent,
  init_key: chex.PRNGKey,
  num_resumes: int,
  machine: Machine,
) -> _System:
  """Builds a Sebulba run; a resumed run starts new episodes."""
  layout = devices.make_layout(config, spec, machine)
  envs_per_host = config['env.num_envs'] // len(machine.hosts)
  envs_per_actor = envs_per_host // layout.num_actors
  unrolls = layout.unrolls_per_update * len(machine.hosts)
  steps_per_update = config['unroll_length'] * envs_per_actor * unrolls
  num_updates = _count_updates(config, steps_per_update)
  local = machine.local_devices
  settings = sebulba.Settings(
    num_envs=envs_per_actor,
    unroll_length=config['unroll_length'],
    actors_per_device=layout.threads,
    unrolls_per_update=layout.unrolls_per_update,
    deterministic=config['sebulba.mode'] == 'deterministic',
    max_lag=config['sebulba.max_lag'],
    hang_seconds=config['sebulba.hang_seconds'],
    first_env=machine.process * envs_per_host,
    env_threads=layout.env_threads,
    autotune=config['sebulba.autotune'],
    keeps_episodes=config['log.episodes'],
    is_sliced=layout.is_sliced,
  )

  def make_pool(actor: int) -> types.HostEnv:
    first = settings.first_env + actor * envs_per_actor
    envs = range(first, first + envs_per_actor)
    seeds = [env_seed(config['seed'], num_resumes, env) for env in envs]
    return make_host_env(config, envs_per_actor, seeds, layout.env_threads)

  learners = devices.on_all_hosts(layout.learner_devices, machine)
  driver = sebulba.Sebulba(
    make_pool,
    agent,
    make_learner(config, agent, spec, len(learners), num_updates, layout),
    spmd.make_mesh(learners),
    [local[i] for i in layout.actor_devices],
    settings,
    init_key,
    hyperparams(config, agent, num_updates),
  )
  used = sorted({*layout.actor_devices, *layout.learner_devices})
  warnings = devices.layout_warnings(config, layout, machine)
  run_devices = devices.on_all_hosts(used, machine)
  return driver, run_devices, steps_per_update, num_updates, warnings
