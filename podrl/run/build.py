"""From a configuration to objects."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from podrl.agents import AGENTS
from podrl.core.learner import make_learner
from podrl.core.optimizers import make_optimizer
from podrl.drivers import anakin, sebulba, spmd
from podrl.drivers.limits import System
from podrl.drivers.runner import Runner
from podrl.drivers.stages import num_cores
from podrl.drivers.tuner import Tuner
from podrl.envs import SUITES
from podrl.run.check import check
from podrl.run.config import is_sebulba
from podrl.run.devices import (
  count_updates,
  devices,
  make_layout,
  on_all_hosts,
  periods,
  warn,
)
from podrl.run.evaluation import (
  Evaluation,
  Share,
  make_evaluate,
  make_host_evaluate,
)
from podrl.types import Agent, DeviceEnv, EnvSpec, HostEnv, Learner, Tree

# Where the environment itself never cuts an episode, evaluation does.
_UNLIMITED_STEPS = 10_000

_MAX_UPDATES = 1024  # In one call of Anakin's training.


class Run(NamedTuple):
  """What `train` runs.

  Attributes:
    spec: of the environment.
    suite: the library that the environment is from.
    devices: that it uses.
    driver: `runner.Runner` or `sebulba.Sebulba`.
    evaluate: of `make_evaluate` or `make_host_evaluate`.
    eval_keys: of each agent's evaluations; the number of updates is folded in.
    num_updates: after which training ends.
    eval_every_updates: between two evaluations; 0 is only at the end.
    checkpoint_every_updates: between two checkpoints; 0 is by time alone.
    params: the shapes of all agents' parameters.
    warnings: a line each, for the user.
    tuner: says how many actors should act, where that is tuned.
    resume_note: what a resumed run does not go on with, for the user.
    system: what each process of a Sebulba run works with.
  """

  spec: EnvSpec
  suite: str
  devices: Sequence[jax.Device]
  driver: Runner | sebulba.Sebulba
  evaluate: Callable[..., Evaluation | None]
  eval_keys: Sequence[chex.PRNGKey]
  num_updates: int
  eval_every_updates: int
  checkpoint_every_updates: int
  params: Tree
  warnings: Sequence[str] = ()
  tuner: Tuner | None = None
  resume_note: str = ''
  system: System | None = None


def make_env(config: ConfigDict) -> DeviceEnv:
  """The environment of an Anakin run.

  Raises:
    ValueError: if the name is unknown or an option does not fit.
  """
  return SUITES[config.env.suite].make(config.env.name, **config.env.options)


def make_host_env(
  config: ConfigDict,
  num_envs: int,
  seed: int,
  num_threads: int,
  *,
  evaluation: bool = False,
  render: bool = False,
) -> HostEnv:
  """A pool of the environments of a Sebulba run.

  Args:
    config: of the run.
    num_envs: of the pool.
    seed: of its first environment.
    num_threads: that step it.
    evaluation: leave out what only training uses: episodes that end with a
      life, and clipped rewards.
    render: make it able to draw, for `HostEnv.render`.
  """
  suite = SUITES[config.env.suite]
  options = {
    k: v
    for k, v in config.env.options.items()
    if not (evaluation and k in suite.training_options)
  }
  return suite.make(
    config.env.name,
    num_envs,
    seed,
    num_threads=num_threads,
    render=render,
    **options,
  )


def make_host_spec(config: ConfigDict) -> EnvSpec:
  """The `EnvSpec` of a Sebulba run.

  Raises:
    ValueError: as `make_env`.
  """
  suite = SUITES[config.env.suite]
  return suite.make_spec(config.env.name, **config.env.options)


def make_agent(config: ConfigDict, spec: EnvSpec) -> Agent:
  """The agent, with its network, for an environment.

  Raises:
    ValueError: if its distribution or torso does not fit the environment.
  """
  fields = config.agent.to_dict()
  make = AGENTS[fields.pop('name')].make
  try:
    return make(spec, fields, config.network.to_dict())
  except ValueError as error:
    raise ValueError(f'config.env.name={config.env.name}: {error}') from error


def learner_for(config: ConfigDict, agent: Agent, num_updates: int) -> Learner:
  """The learner of an agent over a run of `num_updates` updates."""
  fields = config.optimizer
  num_steps = num_updates * config.num_epochs * config.num_minibatches
  optimizer = make_optimizer(
    fields.name,
    learning_rate=fields.learning_rate,
    anneal=num_steps if fields.anneal else 0,
    max_grad_norm=fields.max_grad_norm,
  )
  return make_learner(
    agent,
    optimizer,
    num_epochs=config.num_epochs,
    num_minibatches=config.num_minibatches,
  )


def make_run(config: ConfigDict, num_resumes: int = 0) -> Run:
  """All that `train` needs.

  Args:
    config: of the run.
    num_resumes: how often it was gone on with, each time with other seeds.

  Raises:
    ValueError: for a user's mistake, before anything compiles.
  """
  check(config)
  return (
    _make_sebulba_run(config, num_resumes)
    if is_sebulba(config)
    else (_make_anakin_run(config))
  )


def _make_anakin_run(config: ConfigDict) -> Run:
  """`make_run` for Anakin."""
  env = make_env(config)
  agent = make_agent(config, env.spec)
  steps_per_update = config.unroll_length * config.env.num_envs
  num_updates = count_updates(config, steps_per_update)
  # A call reports each of its updates, and ends with a record at the latest.
  max_updates = min(config.log.every_updates, num_updates, _MAX_UPDATES)
  used = devices(config)
  num_seeds = config.num_seeds if config.num_seeds > 1 else None
  driver = anakin.make_anakin(
    env,
    agent,
    learner_for(config, agent, num_updates),
    spmd.make_mesh(used),
    num_envs=config.env.num_envs,
    unroll_length=config.unroll_length,
    max_updates=max_updates,
    num_seeds=num_seeds,
  )
  evaluate = make_evaluate(env, agent, **evaluation(config, env.spec))
  init_keys, eval_keys = zip(
    *(
      jax.random.split(jax.random.key(config.seed + i))
      for i in range(config.num_seeds)
    )
  )
  key = jnp.stack(init_keys) if num_seeds else init_keys[0]
  runner = Runner(
    driver, key, max_updates, steps_per_update // jax.process_count()
  )
  return Run(
    env.spec,
    config.env.suite,
    used,
    runner,
    evaluate,
    eval_keys,
    num_updates,
    *periods(config, steps_per_update),
    jax.eval_shape(jax.vmap(agent.init) if num_seeds else agent.init, key),
  )


def evaluation(config: ConfigDict, spec: EnvSpec) -> dict[str, Any]:
  """The arguments of an evaluation."""
  limit = spec.max_episode_steps
  if not 0 < limit < 2**31 - 1:  # It has none.
    limit = _UNLIMITED_STEPS
  return {
    'num_episodes': config.eval.num_episodes,
    'max_episode_steps': config.eval.max_episode_steps or limit,
    'greedy': config.eval.greedy,
    'share': Share(jax.process_index(), jax.process_count()),
  }


def _make_sebulba_run(config: ConfigDict, num_resumes: int) -> Run:
  """`make_run` for Sebulba."""
  spec = make_host_spec(config)
  agent = make_agent(config, spec)
  layout = make_layout(config, spec)
  found, num_processes = jax.local_devices(), jax.process_count()
  actor_devices = [found[i] for i in layout.actor_devices]
  learner_devices = on_all_hosts(layout.learner_devices)
  envs_per_host = config.env.num_envs // num_processes
  envs_per_actor = envs_per_host // layout.num_actors
  steps_per_update = (
    config.unroll_length
    * envs_per_actor
    * layout.unrolls_per_update
    * num_processes
  )
  num_updates = count_updates(config, steps_per_update)
  settings = sebulba.Settings(
    num_envs=envs_per_actor,
    unroll_length=config.unroll_length,
    actors_per_device=layout.threads,
    unrolls_per_update=layout.unrolls_per_update,
    deterministic=config.sebulba.mode == 'deterministic',
    max_lag=config.sebulba.max_lag,
    hang_seconds=config.sebulba.hang_seconds,
    first_env=jax.process_index() * envs_per_host,
  )
  init_key, eval_key = jax.random.split(jax.random.key(config.seed))
  first_seed = config.seed
  if num_resumes:  # The same ones would repeat what was learnt from.
    first_seed = int(
      jax.random.randint(
        jax.random.fold_in(jax.random.key(config.seed), num_resumes),
        (),
        0,
        2**31 - config.env.num_envs,
      )
    )
  driver = sebulba.Sebulba(
    lambda actor: make_host_env(
      config,
      envs_per_actor,
      first_seed + settings.first_env + actor * envs_per_actor,
      layout.env_threads,
    ),
    agent,
    learner_for(config, agent, num_updates),
    spmd.make_mesh(learner_devices),
    actor_devices,
    settings,
    init_key,
  )
  evaluate = make_host_evaluate(
    lambda num_envs, seed: make_host_env(
      config, num_envs, seed, num_cores(), evaluation=True
    ),
    agent,
    **evaluation(config, spec),
  )
  # An actor more than there are permits could only wait.
  tuner = (
    Tuner(
      min(
        layout.num_actors,
        layout.unrolls_per_update * (config.sebulba.max_lag + 1),
      ),
      steps_per_update,
      layout.unrolls_per_update,
    )
    if config.sebulba.autotune
    else None
  )
  used = sorted({*layout.actor_devices, *layout.learner_devices})
  return Run(
    spec,
    config.env.suite,
    on_all_hosts(used),
    driver,
    evaluate,
    [eval_key],
    num_updates,
    *periods(config, steps_per_update),
    jax.eval_shape(agent.init, init_key),
    warn(config, layout),
    tuner,
    '; the environments begin new episodes',
    System(
      found[0].platform,
      num_cores(),
      layout.num_actors,
      layout.env_threads,
      layout.actor_devices,
      layout.learner_devices,
      layout.unrolls_per_update,
      settings.max_lag,
      settings.deterministic,
      num_processes,
    ),
  )
