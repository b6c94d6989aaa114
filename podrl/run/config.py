"""Defines and checks the configuration, and parses the command line.

The table `FIELDS` has the default, the allowed values and a comment for every
field. Configurations, checks, `--help` and the parser of overrides use this
table. The table `AGENTS` has the fields that an agent adds or changes.
"""

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import importlib.util
import itertools
import json
import math
import os
import shlex
import sys
from typing import Any, NamedTuple

from absl import flags
import jax
from ml_collections import ConfigDict

from podrl.agents import ACTOR_CRITICS, AGENTS
from podrl.core import meta
from podrl.core.distributions import DISTRIBUTIONS
from podrl.core.optimizers import OPTIMIZERS
from podrl.envs import (
  SUITES,
  describe_import,
  make_importable,
  module_directory,
  spaces,
)
from podrl.messages import TRUST, check_choice, printable, similar, suggest
from podrl.networks.cores import CORES
from podrl.networks.torsos import ACTIVATIONS, TORSOS
from podrl.records import checkpoint, workdir
from podrl.records.terminal import print_text
from podrl.records.workdir import flatten, short
from podrl.run.cluster import Cluster, version_of_code


class Range(NamedTuple):
  """The allowed numbers, from `low` to `high`; infinity is never allowed.

  A tuple is allowed if all its elements are allowed.
  """

  low: float
  high: float = math.inf
  excludes_low: bool = False

  def allows(self, value: float | tuple[float, ...]) -> bool:
    """Returns whether a number, or each element of a tuple, is in the range."""
    if isinstance(value, tuple):
      return all(map(self.allows, value))
    is_above = value > self.low if self.excludes_low else value >= self.low
    return is_above and value <= self.high and value < math.inf

  def __str__(self) -> str:
    low = f'{"more than" if self.excludes_low else "at least"} {self.low}'
    return low if self.high == math.inf else f'{low} and at most {self.high}'


class Field(NamedTuple):
  """A field of the configuration."""

  default: Any  # The value, unless the agent or the experiment sets another.
  comment: str  # One line for `--help`.
  # A range, the allowed strings, or None if any value of the type is allowed.
  allowed: Range | tuple[str, ...] | None = None


_FROM_0 = Range(0)
_ABOVE_0 = Range(0, excludes_low=True)
_FRACTION = Range(0, 1)
_COUNT = Range(1, 2**24)
_MEMORY = Range(0, 10**6)
_SECONDS = Range(0, 10**6, excludes_low=True)
_FEW = Range(0, 1024)
_SEEDS = Range(1, 2**16)
_INDEX = Range(0, 255)
_STEPS = Range(0, 2**31 - 1)
_DEVICES = Range(0, 256)
_DTYPES = ('float32', 'bfloat16')
_MODES = ('deterministic', 'asynchronous')

FIELDS = {
  'seed': Field(0, 'All random numbers depend on this number.', _FROM_0),
  'num_seeds': Field(1, 'Number of independent agents in the run.', _SEEDS),
  'num_devices': Field(
    0, 'Devices per process; 0 means all, or at most 8 on a CPU.', _DEVICES
  ),
  'total_env_steps': Field(
    1_000_000,
    'Environment steps, reset steps included, rounded up to whole updates.',
    Range(1),
  ),
  'unroll_length': Field(32, 'Steps of each environment in an unroll.', _COUNT),
  'num_epochs': Field(1, 'Passes over the batch of each update.', _COUNT),
  'num_minibatches': Field(1, 'Optimiser steps per pass.', _COUNT),
  'compilation_cache': Field(
    'auto', "'auto', 'off', or a directory for compiled programs."
  ),
  'price_per_hour': Field(
    0.0,
    'Hourly price of all machines, in any currency; 0 means unknown.',
    _FROM_0,
  ),
  'env.suite': Field('gymnax', 'Library that provides the environment.'),
  'env.name': Field('', 'Name of the environment in its library.'),
  'env.num_envs': Field(
    64, 'Number of environments in all processes together.', _COUNT
  ),
  'env.options': Field({}, 'Options that are passed to the library.'),
  'env.path': Field('', 'Directory of MODULE, if env.name is MODULE:NAME.'),
  'agent.gamma': Field(0.99, 'Discount per step.', _FRACTION),
  'agent.lambda_': Field(
    1.0, 'Mix of one-step returns (0) and full returns (1).', _FRACTION
  ),
  'agent.entropy_cost': Field(0.01, 'Weight of the entropy bonus.', _FROM_0),
  'agent.value_cost': Field(0.5, 'Weight of the value loss.', _FROM_0),
  'agent.reward_clip': Field(
    0.0, 'Clips rewards to this absolute value; 0 means off.', _FROM_0
  ),
  'agent.normalize_observation': Field(
    False, 'Standardises observations with running statistics.'
  ),
  'agent.normalize_reward': Field(
    False, 'Divides rewards by the running deviation of returns.'
  ),
  'network.name': Field(
    'auto', 'The torso; auto chooses it by the observation.', TORSOS
  ),
  'network.hidden_sizes': Field(
    (64, 64), 'Widths of hidden layers; the last is the torso output.', Range(1)
  ),
  'network.shared_torso': Field(False, 'Policy and value share one torso.'),
  'network.recurrent': Field('none', 'Recurrent core after a torso.', CORES),
  'network.memory_steps': Field(
    0,
    'Steps for which an untrained core remembers; 0 means about 2.',
    _MEMORY,
  ),
  'network.distribution': Field(
    'auto',
    'Action distribution; auto chooses it by the action space.',
    DISTRIBUTIONS,
  ),
  'network.state_dependent_scale': Field(
    False, "The Gaussian's scale depends on the state."
  ),
  'network.initial_scale': Field(
    1.0, 'Initial scale of a Gaussian for actions in [-1, 1].', Range(0.01, 10)
  ),
  'network.activation': Field(
    'tanh', 'Activation of the layers of an MLP.', tuple(ACTIVATIONS)
  ),
  'network.layer_norm': Field(
    False, 'Normalises each layer before its activation.'
  ),
  'network.dtype': Field('float32', 'Data type inside the torso.', _DTYPES),
  'optimizer.name': Field('adam', 'The optimiser.', tuple(OPTIMIZERS)),
  'optimizer.learning_rate': Field(1e-3, 'Initial learning rate.', _ABOVE_0),
  'optimizer.anneal': Field(True, 'The learning rate falls linearly to 0.'),
  'optimizer.max_grad_norm': Field(
    0.5, 'Clips the gradient to this norm; 0 means off.', _FROM_0
  ),
  'eval.num_episodes': Field(
    128, 'Number of episodes; each has its own environment.', _COUNT
  ),
  'eval.every_env_steps': Field(
    0, 'Steps between evaluations; 0 means only at the end.', _FROM_0
  ),
  'eval.greedy': Field(True, 'Uses the best action, not a sample.'),
  'eval.max_episode_steps': Field(
    0,
    "Steps of the longest episode; 0 means the environment's limit, or 10,000 "
    'if it has none.',
    _STEPS,
  ),
  'stop.eval_return': Field(
    '', 'Evaluated return at which a run ends early; empty means never.'
  ),
  'log.every_updates': Field(10, 'Updates per record.', Range(1, 2**31 - 1)),
  'log.tensorboard': Field(True, 'Writes TensorBoard events.'),
  'log.wandb': Field(False, 'Sends records to Weights & Biases.'),
  'log.profile': Field(
    0, "Number of updates that JAX's profiler traces.", Range(0, 10**6)
  ),
  'checkpoint.every_seconds': Field(
    300.0, 'Seconds between checkpoints; 0 means off.', _FROM_0
  ),
  'checkpoint.every_env_steps': Field(
    0, 'Steps between checkpoints; 0 means off.', _FROM_0
  ),
  'checkpoint.keep': Field(
    2, 'Number of newest checkpoints to keep, besides the best one.', _COUNT
  ),
  'checkpoint.grace_seconds': Field(
    30.0, 'Time limit for saving a checkpoint after SIGTERM.', _SECONDS
  ),
  'sebulba.actor_devices': Field(
    (), 'Indices of devices; empty means the first quarter.', _INDEX
  ),
  'sebulba.learner_devices': Field(
    (), 'Indices of devices; empty means all others.', _INDEX
  ),
  'sebulba.threads_per_actor_device': Field(
    0,
    'Actors per actor device (with autotune, the maximum); 0 means automatic.',
    _FEW,
  ),
  'sebulba.env_threads': Field(
    0, 'Environment threads per actor; 0 means automatic.', _FEW
  ),
  'sebulba.unrolls_per_update': Field(
    0, 'Unrolls that an update learns from; 0 means one per actor.', _FEW
  ),
  'sebulba.mode': Field(
    'deterministic',
    'Deterministic runs are reproducible; asynchronous runs suit actors of '
    'unequal speed.',
    _MODES,
  ),
  'sebulba.max_lag': Field(
    1,
    'The largest policy lag, in updates; a replay memory accepts more.',
    _FEW,
  ),
  'sebulba.autotune': Field(
    False, 'Searches for the fastest number of actors during the run.'
  ),
  'sebulba.hang_seconds': Field(
    300.0,
    'Seconds without progress after which an actor counts as hanging.',
    _SECONDS,
  ),
}
# The fields that only agents with a memory have; `AgentEntry.defaults` has the
# values. All sizes are those of all devices together.
_REPLAY = {
  'replay.capacity_steps': Field(
    0, 'Environment steps that the memory stores.', _COUNT
  ),
  'replay.min_steps': Field(
    0, 'Environment steps in the memory before learning begins.', _COUNT
  ),
  'replay.batch_size': Field(
    0, 'Sequences that each optimiser step learns from.', _COUNT
  ),
  'replay.sequence_length': Field(
    0, 'Steps of a sequence that the agent learns from.', _COUNT
  ),
  'replay.burn_in': Field(
    0, 'Earlier steps of a sequence, which only renew the carry.', _FROM_0
  ),
  'replay.sgd_steps_per_update': Field(
    0, 'Optimiser steps per update.', _COUNT
  ),
  'replay.priority_exponent': Field(
    0.0, 'Exponent of the priorities; 0 samples all equally often.', _FROM_0
  ),
  'replay.importance_exponent': Field(
    0.0, 'Exponent of the weights that correct for priorities.', _FROM_0
  ),
}
_REPLAY['checkpoint.memory'] = Field(
  True,
  'Checkpoints contain the replay memory; otherwise, a resumed run fills it '
  'again.',
)
# The fields that only agents with a tree search have; see `_REPLAY`.
_SEARCH = {
  'search.kind': Field('gumbel', 'The kind of search.', ('gumbel', 'muzero')),
  'search.num_simulations': Field(
    0, 'Simulations of the search of each step.', _COUNT
  ),
  'search.eval_num_simulations': Field(
    0, 'Simulations of the search of each step if actions are greedy.', _COUNT
  ),
  'search.num_samples': Field(
    2, 'Samples of a continuous action that a search compares.', Range(2, 2**24)
  ),
  'search.uniform_fraction': Field(
    0.0,
    "Part of the search's prior over actions that is uniform; not if greedy.",
    _FRACTION,
  ),
  'search.reanalyse_fraction': Field(
    0.0, 'Part of each batch whose policies come from new searches.', _FRACTION
  ),
}
# The fields of meta-gradients, which only the actor-critic agents have.
_META = {
  'meta.learning_rate': Field(
    0.0,
    'Learning rate of hyperparameters (meta-gradients); 0 keeps them fixed.',
    _FROM_0,
  ),
  'meta.params': Field('', 'The hyperparameters that learn, with commas.'),
  'meta.decay': Field(
    0.0,
    'Weight of each update in the meta-gradient, relative to the next update.',
    _FRACTION,
  ),
  'meta.gamma': Field(0.0, 'Discount of the outer loss.', _FRACTION),
  'meta.lambda_': Field(0.0, 'Lambda of the outer loss.', _FRACTION),
  'meta.entropy_cost': Field(
    0.0, 'Weight of the entropy bonus in the outer loss.', _FROM_0
  ),
  'meta.value_cost': Field(
    0.0, 'Weight of the value loss in the outer loss.', _FROM_0
  ),
}
# Only agents whose defaults contain such a field have it.
_OPTIONAL = _REPLAY.keys() | _SEARCH.keys() | _META.keys()
FIELDS |= _REPLAY | _SEARCH | _META
# The settings of all agents by kind; `AgentEntry.kinds` has those of one agent.
# An environment can have several kinds. They are applied in this order.
KINDS: Mapping[str, Mapping[str, Any]] = {
  'numbers': {
    'total_env_steps': 2_000_000,
    'agent.normalize_observation': True,
    # The returns of CartPole-v1 are near 100. The value head learns such
    # numbers so slowly that a few of 20 seeds stay below 300.
    'agent.normalize_reward': True,
  },
  'sparse image': {'network.name': 'mlp'},
  'small image': {
    'total_env_steps': 2_000_000,
    'network.hidden_sizes': (128,),
    'network.shared_torso': True,
  },
  'large image': {
    'total_env_steps': 50_000_000,
    'env.num_envs': 128,
    'agent.reward_clip': 1.0,
    'network.name': 'impala_resnet',
    'network.hidden_sizes': (256,),
    'network.shared_torso': True,
    'eval.num_episodes': 16,
  },
  'large image on a CPU': {  # Added to the settings of a large image.
    'total_env_steps': 1_500_000,
    'env.num_envs': 16,
    'network.name': 'conv',
  },
  # Added to the settings of another kind.
  'continuous': {'agent.entropy_cost': 0.0},
  # Added to 'continuous'. With 1.0, three seeds of HalfCheetah-v4 reached
  # 1,800 instead of 5,300 to 7,600. An action of one number needs more noise:
  # with 0.5, MountainCarContinuous-v0 never leaves the valley.
  'action vector': {'network.initial_scale': 0.5},
  # Added to the settings of another kind. With normalisation and PPO's four
  # epochs, one of three seeds never learned MemoryChain. With these settings,
  # all six seeds learned it.
  'memory': {
    'total_env_steps': 1_000_000,
    'agent.normalize_observation': False,
    'agent.normalize_reward': False,
    'network.recurrent': 'gru',
    'unroll_length': 32,
  },
  'large rewards': {'agent.normalize_reward': True},  # Added to another kind.
}
# A resumed run may change these fields only on its command line. `config.json`
# then gets the new values.
CHANGEABLE = {'total_env_steps', 'optimizer.learning_rate'}.union(
  *(agent.changeable for agent in AGENTS.values())
)
# The fields that only one architecture has.
_OWNERS = {'num_devices': 'Anakin'} | {
  name: 'Sebulba' for name in FIELDS if name.startswith('sebulba.')
}


def _make_config(agent: str, architecture: str) -> ConfigDict:
  """Makes an architecture's defaults; only `env.options` accepts new fields."""
  check_choice('agent', agent, AGENTS)
  entry = AGENTS[agent]
  absent = {*entry.unused, *_OPTIONAL} - entry.defaults.keys()
  values = {k: x.default for k, x in FIELDS.items() if k not in absent}
  values |= {'agent.name': agent, **entry.defaults}
  nested: dict[str, Any] = {}
  for name, value in values.items():
    if _OWNERS.get(name, architecture) == architecture:
      section, _, field = name.rpartition('.')
      node = nested.setdefault(section, {}) if section else nested
      node[field] = value
  config = ConfigDict(nested)
  config.lock()
  config.env.options.unlock()
  return config


def base_config(agent: str) -> ConfigDict:
  """Makes Anakin's defaults; raises a ValueError for an unknown agent."""
  return _make_config(agent, 'Anakin')


def sebulba_config(agent: str) -> ConfigDict:
  """Makes Sebulba's defaults; raises a ValueError for an unknown agent."""
  config = _make_config(agent, 'Sebulba')
  config.env.suite = 'envpool'
  return config


def is_actor_critic(agent: str) -> bool:
  """Returns whether an agent is PPO, IMPALA or A2C."""
  return agent in ACTOR_CRITICS


def apply_kinds(config: ConfigDict, *kinds: str) -> ConfigDict:
  """Applies the settings for kinds of environments to a configuration.

  Later kinds override earlier ones. The fields of `KINDS` that the agent does
  not have are left out.

  Returns:
    `config`, which changes in place.
  """
  for kind in kinds:
    known = flatten(config.to_dict())
    general = {k: x for k, x in KINDS[kind].items() if k in known}
    own = AGENTS[config.agent.name].kinds.get(kind, {})
    config.update_from_flattened_dict({**general, **own})
  return config


def check(config: ConfigDict) -> None:
  """Raises a ValueError for a wrong value; needs no device or environment."""
  fields = flatten(config.to_dict())
  for name, value in fields.items():
    allowed = FIELDS[name].allowed if name in FIELDS else None
    if isinstance(allowed, Range):
      if not allowed.allows(value):
        each = ': each element' if isinstance(value, tuple) else ''
        raise ValueError(f'config.{name}={value}{each} must be {allowed}')
    elif allowed is not None:
      check_choice(f'config.{name}', value, allowed)
  capacity = fields.get('replay.capacity_steps', 0)
  if fields.get('replay.min_steps', 0) > capacity:
    raise ValueError(
      f'config.replay.min_steps={fields["replay.min_steps"]} must be at most '
      f'config.replay.capacity_steps={capacity}'
    )
  if fields.get('network.memory_steps') == 1:
    raise ValueError('config.network.memory_steps=1 must be 0, or at least 2')
  if text := fields.get('stop.eval_return', ''):
    try:
      is_number = math.isfinite(float(text))
    except ValueError:
      is_number = False
    if not is_number:
      raise ValueError(f'config.stop.eval_return={text} is not a number')
    if not fields['eval.every_env_steps']:
      raise ValueError(
        f'config.stop.eval_return={text} needs evaluations before the end; set '
        'config.eval.every_env_steps'
      )
  if not fields['network.hidden_sizes']:
    raise ValueError('config.network.hidden_sizes=() needs one or more widths')
  check_choice('config.agent.name', fields['agent.name'], AGENTS)
  AGENTS[fields['agent.name']].check(fields)
  if 'meta.params' in fields:
    names = meta_params(config)
    for name in names:
      check_choice('config.meta.params', name, meta.NAMES)
    if len(set(names)) < len(names):
      text = fields['meta.params']
      raise ValueError(f'config.meta.params={text} has a name twice')
  _check_members(config)
  # JAX makes the same key from `seed` and `seed` + 2**32.
  bound = 2**32 - config.get('num_seeds', 1)
  if config.seed > bound:
    raise ValueError(f'config.seed={config.seed} must be at most {bound}')
  is_deterministic = fields.get('sebulba.mode') == 'deterministic'
  if is_deterministic and fields['sebulba.autotune']:
    raise ValueError(
      'config.sebulba.autotune=True does not fit the deterministic mode, '
      'in which every actor gives one unroll to each update; use '
      'config.sebulba.mode=asynchronous'
    )
  if fields['log.wandb'] and not importlib.util.find_spec('wandb'):
    raise ValueError(
      'config.log.wandb=True needs the package wandb; install it with '
      "pip install -e '.[wandb]'"
    )


def meta_params(config: ConfigDict) -> list[str]:
  """Returns the names of the hyperparameters that learn."""
  return [name.strip() for name in config.meta.params.split(',')]


def member_fields(agent: str) -> set[str]:
  """Returns the fields in which the members of one program may differ."""
  return {'seed', 'optimizer.learning_rate', *AGENTS[agent].changeable}


def _check_members(config: ConfigDict) -> None:
  """Raises a ValueError if the members of a sweep cannot share a program."""
  if 'members' not in config:
    return
  allowed = member_fields(config.agent.name)
  for own in config.members:
    if unknown := sorted(own.keys() - allowed):
      raise ValueError(
        f'the members of one program cannot differ in {unknown[0]}, only in '
        f'{", ".join(sorted(allowed))}'
      )
  for fields in workdir.agents('', config).values():
    check(workdir.as_config(fields))


def check_trust(
  path: str, config: ConfigDict, trust: bool, is_named: bool = False
) -> None:
  """Raises a ValueError if a run could import code that its user did not write.

  Args:
    path: the directory of the run.
    config: its saved configuration. If neither `trust` nor the signature
      speaks for it, this function clears `env.path`.
    trust: whether the user trusts the run.
    is_named: whether the user has named the environment, and so its module.
  """
  if trust or workdir.is_own(path, config):
    return
  name, directory = config.env.name, config.env.get('path', '')
  if directory:
    config.env.path = ''
  if ':' in name and not is_named:
    raise ValueError(
      f'{path} would import {describe_import(name, directory)}, and you did '
      f'not make this run, or not with the key {workdir.key_path()}; if you '
      'trust this code, add --trust, or trust=True in Python'
    )


def parse_value(name: str, text: str, default: Any) -> Any:
  """Converts the text of an override to the type of the field's default.

  Without a default, any value that config.json can contain is allowed.
  """
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError):
    value = {'true': True, 'false': False}.get(text.lower(), text)
  if default is None:
    with contextlib.suppress(TypeError):
      return workdir.as_tuples(json.loads(json.dumps(value)))
    return text
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if isinstance(default, str):
    return value if isinstance(value, str) else text
  elif isinstance(default, bool):
    if value in (0, 1):
      return bool(value)
  elif isinstance(default, int):
    if is_number and (isinstance(value, int) or value.is_integer()):
      return int(value)
  elif isinstance(default, float):
    if is_number and abs(value) < 1e300:  # Not infinite or NaN.
      return float(value)
  elif isinstance(default, tuple):
    value = value if isinstance(value, tuple | list) else (value,)
    # A field whose default is () contains indices.
    types = {type(x) for x in default} or {int}
    if {type(x) for x in value} <= types:
      return tuple(value)
  raise ValueError(
    f'config.{name}={text} is not of type {type(default).__name__}; '
    f'its default is {default!r}'
  )


def _with_absolute_path(override: str) -> str:
  """Makes the path in an override of `compilation_cache` absolute."""
  name, _, value = override.partition('=')
  is_path = name.endswith('config.compilation_cache')
  if not is_path or value in ('', 'auto', 'off'):
    return override
  return f'{name}={workdir.absolute(value)}'


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits arguments into overrides and all other arguments.

  An override may be two arguments, `--config.FIELD VALUE`. In the result, it is
  one argument: `--config.FIELD=VALUE`, or `--config.FIELD` if it has no value.
  """
  overrides, others, remaining = [], [], iter(arguments)
  for argument in remaining:
    if not argument.startswith(('--config.', '-config.')):
      others.append(argument)
    elif '=' in argument:
      overrides.append(argument)
    else:
      overrides.append('='.join([argument, *itertools.islice(remaining, 1)]))
  return overrides, others


# Words of other trainers (Stable-Baselines3, CleanRL, rejax, brax), after what
# podrl calls the same thing: a flag, a field, or what to do instead.
_WORDS = {
  '--steps': 'total_timesteps num_timesteps n_timesteps timesteps total_steps '
  'num_env_steps num_frames frames num_train_steps',
  '--agent': 'algo algorithm alg',
  '--seeds': 'n_seeds num_seeds',
  '--workdir': 'logdir log_dir log_folder log_path output_dir out_dir exp_name '
  'experiment_name run_name save_dir save_path checkpoint_dir ckpt_dir '
  'model_dir',
  '--init_from': 'trained_agent load_model model_path load_path pretrained '
  'restore checkpoint_path load_checkpoint load ckpt checkpoint resume_from',
  'env.num_envs': 'n_envs envs num_environments',
  'unroll_length': 'num_steps n_steps rollout_length rollout_steps horizon',
  'num_epochs': 'update_epochs n_epochs ppo_epochs num_update_epochs '
  'num_updates_per_batch',
  'num_minibatches': 'batch_size minibatch_size mini_batch_size num_mini_batch',
  'num_devices': 'n_devices devices num_gpus gpus',
  'agent.gamma': 'discount discounting discount_factor',
  'agent.lambda_': 'gae_lambda lambda lam td_lambda',
  'agent.clip': 'clip_coef clip_range clip_eps clip_epsilon clipping_epsilon',
  'agent.entropy_cost': 'ent_coef entropy_coef entropy_coeff',
  'agent.value_cost': 'vf_coef value_coef vf_coeff value_loss_coef',
  'agent.normalize_advantage': 'norm_adv normalize_advantages',
  'agent.normalize_observation': 'normalize_observations norm_obs normalize',
  'agent.normalize_reward': 'norm_reward normalize_rewards',
  'agent.reward_clip': 'clip_rewards clip_reward reward_clipping',
  'agent.n_steps': 'n_step nstep multi_step num_steps_td',
  'agent.initial_temperature': 'alpha ent_coef_init init_temperature',
  'agent.initial_epsilon': 'start_e exploration_initial_eps eps_start',
  'agent.final_epsilon': 'end_e exploration_final_eps eps_end',
  'agent.target_period': 'target_network_frequency target_update_interval '
  'target_update_freq',
  'agent.target_rate': 'tau polyak',
  'network.name': 'network policy policy_type net model arch',
  'network.hidden_sizes': 'net_arch hidden_layer_sizes hidden_dim hidden_size '
  'policy_kwargs agent_kwargs policy_hidden_layer_sizes',
  'network.recurrent': 'lstm use_lstm rnn use_rnn',
  'network.activation': 'activation_fn',
  'optimizer.name': 'optimizer optim',
  'optimizer.learning_rate': 'lr policy_lr q_lr step_size',
  'optimizer.anneal': 'anneal_lr lr_schedule',
  'optimizer.max_grad_norm': 'max_gradient_norm grad_clip clip_grad_norm',
  'eval.num_episodes': 'eval_episodes n_eval_episodes num_eval_episodes '
  'n_eval_envs num_eval_envs',
  'eval.every_env_steps': 'eval_freq eval_frequency eval_interval eval_every '
  'num_evals',
  'eval.greedy': 'deterministic deterministic_eval',
  'log.every_updates': 'log_interval log_freq log_every',
  'log.tensorboard': 'use_tensorboard',
  'log.wandb': 'track use_wandb wandb_project wandb_project_name wandb_entity',
  'checkpoint.every_env_steps': 'save_freq save_interval save_every '
  'checkpoint_freq checkpoint_frequency',
  'sebulba.threads_per_actor_device': 'num_workers n_workers workers '
  'num_actors num_rollout_workers vec_env',
  'sebulba.env_threads': 'num_threads n_threads',
  'replay.capacity_steps': 'buffer_size memory_size replay_size '
  'max_replay_size',
  'replay.min_steps': 'learning_starts min_replay_size fill_buffer '
  'start_steps warmup_steps',
  'replay.sgd_steps_per_update': 'gradient_steps grad_updates_per_step '
  'train_freq train_frequency',
  'write the name without a flag, as in podrl train CartPole-v1': 'env env_id '
  'env_name environment task gym_id game',
  'write --config.env.options.NAME=VALUE for each': 'env_kwargs env_params',
  'set the environment variable JAX_PLATFORMS, for example to cpu': 'device '
  'cuda no_cuda gpu platform accelerator',
  'later, podrl watch RUN records an episode': 'capture_video render '
  'record_video video no_render',
  'TensorBoard events are in the directory of the run; see --workdir': ''
  'tensorboard_log tb_log tensorboard_dir',
  'podrl --version prints the version': 'version',
  'podrl evaluate RUN evaluates a trained policy': 'eval evaluate test '
  'eval_only',
  'podrl sweep trains with many settings, or a population': 'sweep tune optuna '
  'hyperparameter_search population',
  'give the environment steps, as in --steps=1e6': 'num_updates total_updates '
  'iterations num_iterations',
  '--agent=rainbow has priorities, a duelling head and a distribution': ''
  'dueling duelling prioritized per distributional',
  'write --config.agent.normalize_reward=True, or clip rewards with '
  '--config.agent.reward_clip=VALUE': 'reward_scaling reward_scale',
  'a run in several processes needs --coordinator, --num_processes and '
  '--process_id': 'distributed multihost rank local_rank world_size',
  'podrl always saves checkpoints, in the directory of the run': 'save_model '
  'upload_model save save_replay_buffer',
  'podrl always shows the progress': 'verbose progress progress_bar quiet',
  "write --config.env.options.NAME=VALUE if the environment's library has such "
  'an option': 'episode_length time_limit action_repeat frame_skip frame_stack '
  'backend render_mode',
  'podrl has no such setting': 'target_kl clip_vloss clip_range_vf use_sde '
  'torch_deterministic kl_target eps adam_eps weight_decay policy_frequency '
  'num_resets_per_eval max_devices_per_host',
}


def _owners(name: str) -> str:
  """Returns the architecture or the agents that have a field."""
  base = FIELDS.keys() - _OPTIONAL
  agents = (
    k
    for k, x in AGENTS.items()
    if name in x.defaults or (name in base and name not in x.unused)
  )
  return _OWNERS.get(name) or ', '.join(agents)


def _fields_named(word: str, known: Collection[str]) -> list[str]:
  """Returns the fields whose name, or its last part, is `word`."""
  found = [x for x in known if word in (x, x.rpartition('.')[2])]
  # The fields of meta-gradients have the names of those that they tune.
  return [x for x in found if not x.startswith('meta.')] or found


def _similar_fields(word: str, known: Collection[str]) -> list[str]:
  """Returns similar fields; the last part of a field counts first."""
  near = similar(word, [x.rpartition('.')[2] for x in known])
  return _fields_named(near[0], known) if near else similar(word, known)


def explain_unknown(
  argument: str, known: Collection[str], options: Collection[str]
) -> str:
  """Says that an argument is not understood, and what to write instead.

  Args:
    argument: the argument, with or without `--` and `=VALUE`.
    known: the fields of the configuration.
    options: the flags of the command.
  """
  flag, _, value = argument.lstrip('-').partition('=')
  word = flag.replace('-', '_').lower()
  flags_of = {field: name for name, field in _SHORT.items()}
  known = [x for x in known if x not in ('env.options', 'agent.name')]
  every = FIELDS.keys() | set().union(*(x.defaults for x in AGENTS.values()))
  meant = next((k for k, x in _WORDS.items() if word in x.split()), '')

  def write(name: str, value: str) -> str:
    is_switch = name in FIELDS and isinstance(FIELDS[name].default, bool)
    value = value or ('True' if is_switch else 'VALUE')
    name = flags_of.get(name, name)
    return f'--{name if name in options else f"config.{name}"}={value}'

  last_parts = [x.rpartition('.')[2] for x in known]
  if flag in options and not argument.startswith('-'):
    advice = f'write --{argument}'
  elif word == 'config':
    advice = 'overrides have the form --config.FIELD=VALUE'
  elif found := _fields_named(word, known):
    advice = f'write {" or ".join(write(x, value) for x in found)}'
  elif ' ' in meant:
    advice = meant
  elif meant in known or meant.startswith('--'):  # Its values may differ.
    advice = f'write {write(meant.removeprefix("--"), "")}'
  elif found := [meant] if meant else _fields_named(word, sorted(every)):
    owners = _owners(found[0])
    advice = f'{found[0]} is a field of {owners}, which this run does not use'
  elif near := similar(word, [*options, *last_parts], 0.6):
    found = [f'config.{x}' for x in _fields_named(near[0], known)]
    names = [near[0]] if near[0] in options else found
    advice = f'did you mean --{" or --".join(names)}'
  else:
    advice = '--help lists all flags and fields'
  return f'{argument} is not understood; {advice}'


def apply_overrides(config: ConfigDict, arguments: Sequence[str]) -> set[str]:
  """Sets fields from `--config.FIELD=VALUE` arguments, in place.

  An integer field also accepts `1e6`. Only `env.options` accepts new fields.

  Returns:
    The names of the fields that were set; each option counts as 'env.options'.

  Raises:
    ValueError: for an argument of another form, an unknown field, or a value of
      the wrong type.
  """
  names = set()
  overrides, others = _split_overrides(arguments)
  if others:
    fields = flatten(config.to_dict())
    raise ValueError(explain_unknown(others[0], fields, [*_make_flags()]))
  for argument in overrides:
    name, equals, text = argument.partition('config.')[2].partition('=')
    if not equals:
      raise ValueError(f'{argument} has no value; write {argument}=VALUE')
    section, _, field = name.rpartition('.')
    if section == 'env.options' and field:
      options = config.env.options
      options[field] = parse_value(name, text, options.get(field))
      names.add('env.options')
      continue
    known = sorted(set(flatten(config.to_dict())) - {'env.options'})
    if name not in known:
      if name == 'env.options':
        raise ValueError(
          f'config.{name} cannot be set as a whole; set single options with '
          f'--config.{name}.NAME=VALUE'
        )
      if owner := _owners(name):
        raise ValueError(
          f'config.{name} is a field of {owner}, which this run does not use'
        )
      near = _fields_named(name, known) or _similar_fields(field, known)
      advice = suggest(name, known)
      if near:
        advice = f'did you mean config.{" or config.".join(near)}'
      raise ValueError(f'config.{name} is not a field; {advice}')
    if name == 'agent.name':
      raise ValueError(
        f'config.agent.name={text} cannot be overridden, because the defaults '
        f'of other fields depend on the agent; use --agent={text}'
      )
    node = config[section] if section else config
    node[field] = parse_value(name, text, node[field])
    names.add(name)
  return names


class CommandLine(NamedTuple):
  """A parsed command line."""

  command: str  # The command that starts the program, without arguments.
  flags: flags.FlagValues
  overrides: Sequence[str]  # Arguments that override fields.
  task: str = ''  # The environment's name, for `podrl train`.
  # For a program of a sweep: the sweep's directory, then its own arguments.
  sweep: tuple[str, ...] = ()
  directory: str = ''  # The current directory at the start.

  def resume(self, workdir: str, *more: str) -> str:
    """Returns the command that resumes the run in `workdir`.

    The arguments `more` replace the overrides of the same fields.
    """
    fields = {x.partition('=')[0] for x in more}
    kept = [x for x in self.overrides if x.partition('=')[0] not in fields]
    chosen = [x for x in ('agent', 'variant') if self.flags[x].present]
    chosen = [f'--{x}={self.flags[x].value}' for x in chosen]
    path, *own = self.sweep or (short(workdir),)
    arguments = [f'--workdir={path}', '--resume', *own, *chosen, *kept, *more]
    return f'{self.command} {shlex.join(arguments)}'


class Files(NamedTuple):
  """The files that a run starts with."""

  workdir: str  # The run's directory.
  init_from: str = ''  # A run that gives the initial parameters, or empty.
  is_resumed: bool = False  # Whether the run in `workdir` is continued.
  num_resumes: int = 0  # How often it has been resumed, this time included.


# Flags that are short names of fields.
_SHORT = {'steps': 'total_env_steps', 'seed': 'seed', 'seeds': 'num_seeds'}


def _make_flags() -> flags.FlagValues:
  """Defines the flags of an experiment."""
  values = flags.FlagValues()
  for name, default, comment in (
    ('agent', 'ppo', f'the agent: {", ".join(AGENTS)}.'),
    ('variant', '', "the experiment's variant; empty means the default."),
    ('workdir', '', "the run's directory; empty means runs/TASK/AGENT-TIME."),
    ('init_from', '', 'a run that provides the initial parameters.'),
    ('coordinator', '', 'HOST:PORT of process 0; auto lets JAX find it.'),
  ):
    flags.DEFINE_string(name, default, comment, values)
  for name, field in _SHORT.items():
    comment = f'short for --config.{field}.'
    flags.DEFINE_string(name, None, comment, values)
  flags.DEFINE_bool('resume', False, 'continue the run in --workdir.', values)
  flags.DEFINE_bool('trust', False, TRUST, values)
  flags.DEFINE_bool('help', False, 'show this help.', values, short_name='h')
  for name, low, comment in (
    ('num_processes', 1, 'number of processes of the run.'),
    ('process_id', 0, 'index of this process, from 0.'),
  ):
    flags.DEFINE_integer(name, None, comment, low, flag_values=values)
  for name, seconds, comment in (
    ('start_seconds', 120.0, 'seconds to wait for other processes to start.'),
    (
      'heartbeat_seconds',
      10.0,
      'seconds without a sign of life until a process counts as dead.',
    ),
    (
      'hang_seconds',
      600.0,
      'seconds without progress until a process counts as hanging.',
    ),
  ):
    flags.DEFINE_float(name, seconds, comment, 1.0, flag_values=values)
    flags.register_validator(name, math.isfinite, 'must be finite', values)
  return values


def parse_command_line(
  argv: Sequence[str], *, has_task: bool = False, own: Collection[str] = ()
) -> CommandLine:
  """Parses a command line; raises a ValueError for a wrong flag.

  Args:
    argv: the script's path or the command, then its arguments.
    has_task: whether one of the arguments is the name of an environment.
    own: further flags of the command, which hints may name.
  """
  values = _make_flags()
  try:
    arguments = values(argv, known_only=True)[1:]
  except flags.Error as error:
    raise ValueError(str(error)) from error
  directory = workdir.note_start()
  for flag in ('workdir', 'init_from'):
    values[flag].value = workdir.absolute(values[flag].value or '')
  overrides, others = _split_overrides(arguments)
  if unknown := [x for x in others if x.startswith('-')]:
    configs = base_config(values.agent), sebulba_config(values.agent)
    known = dict.fromkeys(k for x in configs for k in flatten(x.to_dict()))
    raise ValueError(explain_unknown(unknown[0], known, [*values, *own]))
  overrides = list(map(_with_absolute_path, overrides))
  tasks = [x for x in others if has_task and not x.startswith('-')]
  if len(tasks) > 1:
    raise ValueError(f'expected one environment, got {" ".join(tasks)}')
  for flag, field in _SHORT.items():
    if (value := values[flag].value) is not None:
      if any(x.lstrip('-').startswith(f'config.{field}=') for x in overrides):
        raise ValueError(
          f'--{flag} and --config.{field} set the same field; use one of them'
        )
      overrides.append(f'--config.{field}={value}')
  # `apply_overrides` says which arguments are unknown.
  arguments = overrides + [x for x in others if x not in tasks]
  task = tasks[0] if tasks else ''
  command = f'python {shlex.quote(argv[0])}'
  return CommandLine(command, values, arguments, task, directory=directory)


def print_help(
  command_line: CommandLine, get_config: Callable[..., ConfigDict]
) -> None:
  """Prints the flags and the fields, with defaults, choices and comments."""
  values = command_line.flags
  config = get_config(values.agent, values.variant)
  comments = {name: field.comment for name, field in FIELDS.items()}
  comments |= AGENTS[config.agent.name].comments
  name = ' [SUITE:]NAME' if command_line.task else ''
  lines = [f'usage: {command_line.command}{name} [flags]', values.get_help()]
  lines.append('\nfields, with their defaults:')
  for name, value in flatten(config.to_dict()).items():
    comment = comments.get(name, '')
    allowed = FIELDS[name].allowed if name in FIELDS else None
    if allowed and not isinstance(allowed, Range):
      comment += f' One of {", ".join(allowed)}.'
    if name == 'env.options':
      name, value = 'env.options.NAME', 'VALUE'
    if name != 'agent.name':  # The flag --agent sets it.
      lines.append(f'  --config.{name}={value}\n      {comment}')
  print_text('\n'.join(lines))


def _new_run(
  values: flags.FlagValues, config: ConfigDict, directory: str
) -> Files:
  """Returns the files of a new run; `config` receives its module's path."""
  path = os.path.join(directory, values.workdir or workdir.default_path(config))
  if source := values.init_from:
    checkpoint.find(workdir.run_of_agent(source) or source)
  workdir.check_new(path, config)
  if values.resume:
    text = f'{short(path)} contains no run, so a new run starts'
    print(text, file=sys.stderr)
  # The run may be resumed in another directory.
  config.env.path = config.env.path or module_directory(config.env.name)
  return Files(path, values.init_from)


def _refuse_links(path: str, config: ConfigDict) -> None:
  """Raises a ValueError if a run would write to directories elsewhere."""
  agents = {path, *workdir.agents(path, config)}
  names = {os.path.join(x, 'checkpoints') for x in agents} | agents - {path}
  if links := sorted(filter(os.path.islink, names)):
    raise ValueError(
      f'{links[0]} is a link, and you did not make this run; replace the link '
      'with a directory, or add --trust, or trust=True in Python'
    )


def _resume_run(
  path: str,
  config: ConfigDict,
  requested: set[str],
  exit_stack: contextlib.ExitStack,
  trust: bool,
) -> Files:
  """Returns the files of the run in `path`, which `exit_stack` keeps locked.

  `config` receives the run's own values, except for the fields `requested`. If
  `trust` is false, perhaps another user made the run.
  """
  if parent := workdir.run_of_agent(path, or_series=True):
    raise ValueError(
      f'--workdir={short(path)} is one agent of {short(parent)}; use '
      f'--workdir={short(parent)}'
    )
  exit_stack.enter_context(workdir.lock(path))  # Lock it before reading it.
  messages = workdir.restore_config(config, path, requested, CHANGEABLE)
  total = config.total_env_steps
  if workdir.is_finished(path, total):
    first = next(iter(workdir.agents(path, config)))
    raise ValueError(
      f'--workdir={short(path)} is finished; to extend it, set '
      f'config.total_env_steps to more than {total}; to start another run '
      f'with its parameters, use --init_from={short(first)}'
    )
  for part, _ in workdir.programs(path, config):
    num_resumes, num_updates, unit = checkpoint.last_progress(part)
    if -(-total // unit) < num_updates:
      raise ValueError(
        f'config.total_env_steps={total} is less than the '
        f'{num_updates * unit} steps that {part} has done; set a larger total'
      )
  for message in messages:
    print(printable(message), file=sys.stderr)
  saved = workdir.read_config(path)
  if not trust:
    _refuse_links(path, saved)
  own = saved.env.get('path', '') if trust else module_directory(saved.env.name)
  config.env.path = config.env.path or own
  return Files(path, '', True, num_resumes)


def resolve_config(
  command_line: CommandLine,
  get_config: Callable[..., ConfigDict],
  cluster: Cluster,
  exit_stack: contextlib.ExitStack,
) -> tuple[ConfigDict, Files]:
  """Decides the configuration and the files, which all processes share.

  `exit_stack` receives the lock of a run that is resumed.

  Raises:
    ValueError: in all processes, for a user's mistake in any process.
  """
  values = command_line.flags
  if cluster.is_distributed:
    names = ('workdir', 'resume', 'init_from', 'agent', 'variant')
    shared = {f'--{name}': values[name].value for name in names}
    shared["podrl's code"] = version_of_code()
    cluster.compare(shared | {'jax': jax.__version__})

  def find_run() -> tuple[bool, str, bool]:
    path, agent, trust = values.workdir, values.agent, values.trust
    is_resumed = bool(path and values.resume and workdir.is_run(path))
    if is_resumed:
      saved = workdir.read_config(path)
      agent = agent if values['agent'].present else saved.agent.name
      trust = trust or workdir.is_own(path, saved)
    return is_resumed, agent, trust

  is_resumed, agent, trust = cluster.decide(find_run)

  def make_config() -> tuple[ConfigDict, set[str]]:
    given, values['trust'].value = values.trust, trust
    try:  # Process 0 decides for all: the others may have another key.
      config = get_config(agent, values.variant)
    finally:
      values['trust'].value = given
    requested = apply_overrides(config, command_line.overrides)
    if values.variant:
      requested |= {*flatten(config.to_dict())} - CHANGEABLE
    if values.init_from and workdir.is_series(config):
      raise ValueError(
        f'--init_from does not work with config.num_seeds={config.num_seeds} '
        'in Sebulba; train each seed with a separate command'
      )
    if values.resume and (not values.workdir or values.init_from):
      raise ValueError(
        '--resume continues the run in --workdir: give --workdir, and omit '
        '--init_from, which starts another run'
      )
    return config, requested

  config, requested = cluster.attempt(make_config)
  if cluster.is_distributed:
    fields = flatten(config.to_dict())
    cluster.compare({f'config.{k}': v for k, v in fields.items()})

  # Only process 0 runs this. It completes `config`.
  def find_files() -> tuple[dict, Files]:
    spaces.current_directory()  # It must exist.
    make_importable(config.env.name)
    options, suite = config.env.options, SUITES.get(config.env.suite)
    for name in filter(options.get, suite.policy_options if suite else ()):
      options[name] = os.path.abspath(str(options[name]))
    if is_resumed:
      files = _resume_run(values.workdir, config, requested, exit_stack, trust)
    else:
      files = _new_run(values, config, command_line.directory)
    return config.to_dict(), files

  fields, files = cluster.decide(find_files)
  if cluster.is_distributed:
    config = workdir.as_config(fields)

  cluster.attempt(lambda: check(config))
  return config, Files(*files)
