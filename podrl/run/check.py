"""Checks of a configuration that need neither a device nor an environment."""

import importlib.util

from ml_collections import ConfigDict

from podrl.agents import AGENTS
from podrl.core.distributions import DISTRIBUTIONS
from podrl.core.optimizers import OPTIMIZERS
from podrl.envs import SUITES
from podrl.networks.actor_critic import CORES
from podrl.networks.torsos import TORSOS
from podrl.records.workdir import flatten
from podrl.run.config import check_choice, is_sebulba

_DTYPES = ('float32', 'bfloat16')
_MODES = ('deterministic', 'asynchronous')


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
    'checkpoint.keep': config.checkpoint.keep,
  }
  not_negative = {
    'seed': config.seed,
    'price_per_hour': config.price_per_hour,
    'log.profile': config.log.profile,
    'checkpoint.every_seconds': config.checkpoint.every_seconds,
    'checkpoint.every_env_steps': config.checkpoint.every_env_steps,
    'eval.every_env_steps': config.eval.every_env_steps,
    'eval.max_episode_steps': config.eval.max_episode_steps,
    'optimizer.max_grad_norm': config.optimizer.max_grad_norm,
    'agent.entropy_cost': config.agent.entropy_cost,
    'agent.value_cost': config.agent.value_cost,
    'agent.reward_clip': config.agent.reward_clip,
  }
  positive = {
    'optimizer.learning_rate': config.optimizer.learning_rate,
    'checkpoint.grace_seconds': config.checkpoint.grace_seconds,
  }
  if is_sebulba(config):
    sebulba = config.sebulba
    for field in (
      'threads_per_actor_device',
      'env_threads',
      'unrolls_per_update',
      'max_lag',
    ):
      not_negative[f'sebulba.{field}'] = sebulba[field]
    for field in ('actor_devices', 'learner_devices'):
      not_negative[f'sebulba.{field}'] = min(sebulba[field], default=0)
    positive['sebulba.hang_seconds'] = sebulba.hang_seconds
  else:
    not_negative['num_devices'] = config.num_devices
    at_least_one['num_seeds'] = config.num_seeds
  fractions = {
    'agent.gamma': config.agent.gamma,
    'agent.lambda_': config.agent.lambda_,
  }
  for values, holds, remedy in (
    (at_least_one, lambda x: x >= 1, 'at least 1'),
    (not_negative, lambda x: 0 <= x < float('inf'), 'at least 0 and finite'),
    (positive, lambda x: 0 < x < float('inf'), 'more than 0 and finite'),
    (fractions, lambda x: 0 <= x <= 1, 'from 0 to 1'),
  ):
    for name, value in values.items():
      if not holds(value):
        raise ValueError(f'config.{name}={value} must be {remedy}')
  if min(config.network.hidden_sizes, default=0) < 1:
    raise ValueError(
      f'config.network.hidden_sizes={config.network.hidden_sizes} must be one '
      'or more widths, each at least 1'
    )
  if not 0.01 <= config.network.initial_scale <= 10:
    raise ValueError(
      f'config.network.initial_scale={config.network.initial_scale} must be '
      'from 0.01 to 10'
    )
  largest = at_least_one | not_negative | positive
  bounded = {
    'env.num_envs': 2**24,
    'unroll_length': 2**24,
    'num_epochs': 2**24,
    'num_minibatches': 2**24,
    'eval.num_episodes': 2**24,
    'eval.max_episode_steps': 2**31 - 1,
    'log.every_updates': 2**31 - 1,
    'log.profile': 10**6,
    'checkpoint.keep': 10**6,
    'checkpoint.grace_seconds': 10**6,
  }
  if is_sebulba(config):
    bounded |= {
      'sebulba.max_lag': 1024,
      'sebulba.env_threads': 1024,
      'sebulba.threads_per_actor_device': 1024,
      'sebulba.unrolls_per_update': 1024,
      'sebulba.hang_seconds': 10**6,
      'sebulba.actor_devices': 255,
      'sebulba.learner_devices': 255,
    }
    for field in ('actor_devices', 'learner_devices'):
      largest[f'sebulba.{field}'] = max(sebulba[field], default=0)
  else:
    bounded['num_devices'] = 256  # A CPU is divided into as many as are named.
    bounded['num_seeds'] = 2**16
  for name, bound in bounded.items():
    if largest[name] > bound:
      raise ValueError(f'config.{name}={largest[name]} must be at most {bound}')
  # Environment i of a host's pool has the seed `seed` + i, an int32.
  bound = (
    2**31 - config.env.num_envs
    if is_sebulba(config)
    else (2**32 - config.num_seeds + 1)
  )
  if config.seed >= bound:
    raise ValueError(f'config.seed={config.seed} must be less than {bound}')


def check_sinks(config: ConfigDict) -> None:
  """Raises a ValueError where an extra is asked for and not installed."""
  if config.log.wandb and not importlib.util.find_spec('wandb'):
    raise ValueError(
      "config.log.wandb=True needs wandb; install podrl's extra, "
      "pip install -e '.[wandb]'"
    )


def multiples_near(value: int, divisor: int) -> str:
  """The multiples of `divisor` around `value`, as a remedy."""
  below = value // divisor * divisor
  return f'{below} or {below + divisor}' if below else f'{divisor}'


def slots(config: ConfigDict, num_envs: int) -> tuple[int, str]:
  """What minibatches divide on a device with `num_envs`: how many, of what."""
  unit = AGENTS[config.agent.name].minibatch_unit(flatten(config.to_dict()))
  num_steps = config.unroll_length if unit == 'steps' else 1
  return num_envs * num_steps, unit


def check_minibatches(
  config: ConfigDict, num_envs: int, num_devices: int
) -> None:
  """Raises a ValueError where minibatches do not divide a device's batch."""
  num_minibatches = config.num_minibatches
  size, unit = slots(config, num_envs)
  if size % num_minibatches:
    divisors = [
      n for n in range(1, min(size, 2 * num_minibatches) + 1) if size % n == 0
    ]
    near = sorted(divisors, key=lambda n: abs(n - num_minibatches))[:2]
    raise ValueError(
      f'config.num_minibatches={num_minibatches} does not divide the {size} '
      f'{unit} per update of each of {num_devices} devices; '
      f'try {" or ".join(map(str, sorted(near)))}'
    )


def check_division(config: ConfigDict, num_devices: int) -> None:
  """Raises a ValueError where Anakin's batch does not divide."""
  num_envs = config.env.num_envs
  if num_envs % num_devices:
    raise ValueError(
      f'config.env.num_envs={num_envs} does not divide over {num_devices} '
      f'devices; try {multiples_near(num_envs, num_devices)}'
    )
  check_minibatches(config, num_envs // num_devices, num_devices)


def check(config: ConfigDict) -> None:
  """Checks what can be checked without a device.

  Raises:
    ValueError: naming the field, its value and the remedy.
  """
  _check_ranges(config)
  architecture = 'sebulba' if is_sebulba(config) else 'anakin'
  suite = config.env.suite
  suites = [k for k, v in SUITES.items() if v.architecture == architecture]
  if suite not in suites and suite in SUITES:
    raise ValueError(
      f'config.env.suite={suite} runs from an experiment of '
      f'{SUITES[suite].architecture}, and this is one of {architecture}; '
      f'use {" or ".join(suites)}'
    )
  check_choice('config.env.suite', suite, suites)
  check_choice('config.network.name', config.network.name, TORSOS)
  check_choice('config.network.dtype', config.network.dtype, _DTYPES)
  check_choice('config.network.recurrent', config.network.recurrent, CORES)
  check_choice(
    'config.network.distribution', config.network.distribution, DISTRIBUTIONS
  )
  check_choice('config.optimizer.name', config.optimizer.name, list(OPTIMIZERS))
  AGENTS[config.agent.name].check(flatten(config.to_dict()))
  if is_sebulba(config):
    check_choice('config.sebulba.mode', config.sebulba.mode, _MODES)
    if config.sebulba.autotune and config.sebulba.mode == 'deterministic':
      raise ValueError(
        'config.sebulba.autotune=True does not fit the deterministic mode, '
        'which takes an unroll of every actor; use '
        'config.sebulba.mode=asynchronous'
      )
  else:
    check_division(config, config.num_devices or 1)
