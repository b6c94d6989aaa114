"""From a configuration to objects; the only reader of its fields."""

from collections.abc import Callable, Sequence
import os
from typing import NamedTuple

import chex
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict
import optax

from podrl import anakin
from podrl import distributions
from podrl import networks
from podrl import spmd
from podrl.agents import actor_critic
from podrl.agents import ppo
from podrl.config import check_choice
from podrl.envs import gymnax_env
from podrl.evaluate import Evaluation, make_evaluate
from podrl.learner import make_learner
from podrl.types import Agent, DeviceEnv, EnvSpec, Learner

_OPTIMIZERS = {
    'adam': lambda rate: optax.adam(rate, eps=1e-5),
    'rmsprop': lambda rate: optax.rmsprop(rate, decay=0.99, eps=1e-5),
    'sgd': optax.sgd,
}

# Measured on two cores, the default experiment and CartPole are fastest with a
# device for each core; past eight the shards of the usual batches get small.
_MAX_CPU_DEVICES = 8

_MAX_UPDATES = 1024  # In one call of training.


class Run(NamedTuple):
  """What `train` runs.

  Attributes:
    spec: of the environment.
    mesh: the devices.
    driver: Anakin.
    evaluate: of `make_evaluate`.
    init_key: of the training.
    eval_key: of the evaluations; the number of updates is folded in.
    num_updates: after which training ends.
    max_updates_per_call: bound of `Anakin.train`.
    eval_every_updates: between two evaluations; 0 is only at the end.
  """
  spec: EnvSpec
  mesh: Mesh
  driver: anakin.Anakin
  evaluate: Callable[..., Evaluation | None]
  init_key: chex.PRNGKey
  eval_key: chex.PRNGKey
  num_updates: int
  max_updates_per_call: int
  eval_every_updates: int


def _check_ranges(config: ConfigDict) -> None:
  """Raises a ValueError for a number outside of its range."""
  at_least_one = {
      'total_env_steps': config.total_env_steps,
      'unroll_length': config.unroll_length,
      'num_epochs': config.num_epochs,
      'num_minibatches': config.num_minibatches,
      'env.num_envs': config.env.num_envs,
      'eval.num_episodes': config.eval.num_episodes,
      'log.every_updates': config.log.every_updates,
      'network.hidden_sizes': min(config.network.hidden_sizes, default=0)}
  not_negative = {
      'seed': config.seed,
      'num_devices': config.num_devices,
      'eval.every_env_steps': config.eval.every_env_steps,
      'eval.max_episode_steps': config.eval.max_episode_steps,
      'optimizer.max_grad_norm': config.optimizer.max_grad_norm,
      'agent.entropy_cost': config.agent.entropy_cost,
      'agent.value_cost': config.agent.value_cost,
      'agent.reward_clip': config.agent.reward_clip}
  positive = {'optimizer.learning_rate': config.optimizer.learning_rate}
  fractions = {
      'agent.gamma': config.agent.gamma, 'agent.lambda_': config.agent.lambda_}
  if config.agent.name == 'ppo':
    positive['agent.clip'] = config.agent.clip
  for values, holds, remedy in (
      (at_least_one, lambda x: x >= 1, 'at least 1'),
      (not_negative, lambda x: 0 <= x < float('inf'), 'at least 0 and finite'),
      (positive, lambda x: 0 < x < float('inf'), 'more than 0 and finite'),
      (fractions, lambda x: 0 <= x <= 1, 'from 0 to 1')):
    for name, value in values.items():
      if not holds(value):
        raise ValueError(f'config.{name}={value} must be {remedy}')
  if config.seed >= 2**32:
    raise ValueError(f'config.seed={config.seed} must be less than 2**32')


def _multiples_near(value: int, divisor: int) -> str:
  """The multiples of `divisor` around `value`, as a remedy."""
  below = value // divisor * divisor
  return f'{below} or {below + divisor}' if below else f'{divisor}'


def _slots(config: ConfigDict, num_devices: int) -> tuple[int, str]:
  """What minibatches divide on one device: how many, and of what."""
  size = config.env.num_envs // num_devices
  if config.agent.name == 'ppo':  # It learns from steps, the others from unrolls.
    return size * config.unroll_length, 'steps'
  return size, 'environments'


def _divides(config: ConfigDict, num_devices: int) -> bool:
  """Whether the batch divides over devices and then over minibatches."""
  size, _ = _slots(config, num_devices)
  return (config.env.num_envs % num_devices == 0
          and size % config.num_minibatches == 0)


def _check_division(config: ConfigDict, num_devices: int) -> None:
  """Raises a ValueError where the batch does not divide."""
  num_envs, num_minibatches = config.env.num_envs, config.num_minibatches
  if num_envs % num_devices:
    raise ValueError(
        f'config.env.num_envs={num_envs} does not divide over {num_devices} '
        f'devices; try {_multiples_near(num_envs, num_devices)}')
  size, unit = _slots(config, num_devices)
  if size % num_minibatches:
    divisors = [n for n in range(1, min(size, 2 * num_minibatches) + 1)
                if size % n == 0]
    near = sorted(divisors, key=lambda n: abs(n - num_minibatches))[:2]
    raise ValueError(
        f'config.num_minibatches={num_minibatches} does not divide the {size} '
        f'{unit} per update of each of {num_devices} devices; '
        f'try {" or ".join(map(str, sorted(near)))}')


def check(config: ConfigDict) -> None:
  """Checks what can be checked without a device.

  Raises:
    ValueError: naming the field, its value and the remedy.
  """
  _check_ranges(config)
  check_choice('config.env.suite', config.env.suite, ('gymnax',))
  check_choice('config.network.name', config.network.name, networks.NETWORKS)
  check_choice(
      'config.optimizer.name', config.optimizer.name, tuple(_OPTIMIZERS))
  for field in ('num_epochs', 'num_minibatches'):
    if config.agent.name == 'a2c' and config[field] != 1:
      raise ValueError(
          f'config.{field}={config[field]} does not fit a2c, which learns once '
          f'from each step; use 1, or --agent=impala')
  _check_division(config, config.num_devices or 1)


def num_cpu_devices(config: ConfigDict) -> int:
  """How many devices to make of a CPU: one per core, as far as they divide."""
  if config.num_devices:
    return config.num_devices
  cores = len(os.sched_getaffinity(0)) if hasattr(
      os, 'sched_getaffinity') else os.cpu_count() or 1
  return max(n for n in range(1, min(cores, _MAX_CPU_DEVICES) + 1)
             if n == 1 or _divides(config, n))


def devices(config: ConfigDict) -> Sequence[jax.Device]:
  """The devices that a run uses.

  Raises:
    ValueError: where there are fewer, or the batch does not divide over them.
  """
  found = jax.local_devices()
  num_devices = config.num_devices or (
      min(num_cpu_devices(config), len(found))
      if found[0].platform == 'cpu' else len(found))
  if num_devices > len(found):
    raise ValueError(
        f'config.num_devices={num_devices}, and there are {len(found)} '
        f'{found[0].platform} devices; use {len(found)} or fewer, or 0 for all')
  _check_division(config, num_devices)
  return found[:num_devices]


def make_env(config: ConfigDict) -> DeviceEnv:
  """The environment.

  Raises:
    ValueError: if it is unknown, an option does not fit, or its actions do not
      fit the agents.
  """
  env = gymnax_env.make(config.env.name, **config.env.options)
  try:
    distributions.for_action_space(env.spec.action)
  except ValueError as error:
    raise ValueError(f'config.env.name={config.env.name}: {error}') from error
  return env


def make_agent(config: ConfigDict, spec: EnvSpec) -> Agent:
  """The agent, with its network, for an environment."""
  distribution = distributions.for_action_space(spec.action)
  torso = networks.make_torso(
      config.network.name, spec, hidden_sizes=config.network.hidden_sizes)
  network = networks.ActorCritic(
      torso, distribution.num_params, config.network.shared_torso)
  arguments = config.agent.to_dict()
  name = arguments.pop('name')
  if name == 'ppo':
    return ppo.make_agent(network, distribution, spec.obs, **arguments)
  return actor_critic.make_agent(
      network, distribution, spec.obs,
      off_policy_correction=name == 'impala', **arguments)


def make_optimizer(
    config: ConfigDict, num_updates: int) -> optax.GradientTransformation:
  """The optimiser, its learning rate annealed over `num_updates`."""
  rate = config.optimizer.learning_rate
  if config.optimizer.anneal:
    steps = num_updates * config.num_epochs * config.num_minibatches
    rate = optax.linear_schedule(rate, 0., steps)
  optimizer = _OPTIMIZERS[config.optimizer.name](rate)
  if config.optimizer.max_grad_norm:
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optimizer.max_grad_norm), optimizer)
  return optimizer


def learner_for(config: ConfigDict, agent: Agent, num_updates: int) -> Learner:
  """The learner of an agent over a run of `num_updates` updates."""
  return make_learner(
      agent, make_optimizer(config, num_updates),
      num_epochs=config.num_epochs, num_minibatches=config.num_minibatches)


def make_run(config: ConfigDict) -> Run:
  """All that `train` needs.

  Raises:
    ValueError: for a user's mistake, before anything compiles.
  """
  check(config)
  env = make_env(config)
  agent = make_agent(config, env.spec)
  steps_per_update = config.unroll_length * config.env.num_envs
  num_updates = -(-config.total_env_steps // steps_per_update)
  # A call reports each of its updates, and ends with a record at the latest.
  max_updates = min(config.log.every_updates, num_updates, _MAX_UPDATES)
  mesh = spmd.make_mesh(devices(config))
  learner = learner_for(config, agent, num_updates)
  driver = anakin.make_anakin(
      env, agent, learner, mesh,
      num_envs=config.env.num_envs, unroll_length=config.unroll_length,
      max_updates=max_updates)
  evaluate = make_evaluate(
      env, agent,
      num_episodes=config.eval.num_episodes,
      max_episode_steps=(
          config.eval.max_episode_steps or env.spec.max_episode_steps),
      greedy=config.eval.greedy)
  init_key, eval_key = jax.random.split(jax.random.key(config.seed))
  return Run(
      env.spec, mesh, driver, evaluate, init_key, eval_key, num_updates,
      max_updates,
      -(-config.eval.every_env_steps // steps_per_update))
