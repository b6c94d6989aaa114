"""Defines and checks the configuration, and parses the command line.

The table `FIELDS` has the default, the allowed values and a comment for every
field. Configurations, checks, `--help` and the parser of overrides use this
table. The table `AGENTS` has the fields that an agent adds or changes.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
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
from podrl.envs import SUITES, add_current_directory, module_directory
from podrl.messages import check_choice, similar, suggest
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
    'Environment steps, joints included, rounded up to whole updates.',
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
  'sebulba.max_lag': Field(1, 'The largest policy lag, in updates.', _FEW),
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
  # Environment i on the host has the seed `seed` + i, which is an int32.
  bound = 2**31 - fields['env.num_envs']
  if config.seed + config.get('num_seeds', 1) > bound:
    bound -= config.get('num_seeds', 1) - 1
    raise ValueError(f'config.seed={config.seed} must be less than {bound}')
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
  for argument in others:
    flag = argument.lstrip('-').partition('=')[0]
    near = similar(flag, ['config', *_make_flags()])
    remedy = 'overrides have the form --config.FIELD=VALUE'
    if near and near[0] != flag:
      remedy = f'did you mean --{near[0]}'
    raise ValueError(f'{argument} is not understood; {remedy}')
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
      base = FIELDS.keys() - _OPTIONAL
      agents = (
        k
        for k, x in AGENTS.items()
        if name in x.defaults or (name in base and name not in x.unused)
      )
      if name == 'env.options':
        raise ValueError(
          f'config.{name} cannot be set as a whole; set single options with '
          f'--config.{name}.NAME=VALUE'
        )
      if owner := _OWNERS.get(name) or ', '.join(agents):
        raise ValueError(
          f'config.{name} is a field of {owner}, which this run does not use'
        )
      advice = suggest(name, known, 'config.')
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
  argv: Sequence[str], *, has_task: bool = False
) -> CommandLine:
  """Parses a command line; raises a ValueError for a wrong flag.

  Args:
    argv: the script's path or the command, then its arguments.
    has_task: whether one of the arguments is the name of an environment.
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


def _resume_run(
  path: str,
  config: ConfigDict,
  requested: set[str],
  exit_stack: contextlib.ExitStack,
) -> Files:
  """Returns the files of the run in `path`, which `exit_stack` keeps locked.

  `config` receives the run's own values, except for the fields `requested`.
  """
  if parent := workdir.run_of_agent(path, or_series=True):
    raise ValueError(
      f'--workdir={short(path)} is one agent of {short(parent)}; use '
      f'--workdir={short(parent)}'
    )
  exit_stack.enter_context(workdir.lock(path))  # Lock it before reading it.
  messages = workdir.restore_config(config, path, requested)
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
    print(message, file=sys.stderr)
  saved = workdir.read_config(path).env.get('path', '')
  config.env.path = config.env.path or saved
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

  def find_run() -> tuple[bool, str]:
    path, agent = values.workdir, values.agent
    is_resumed = bool(path and values.resume and workdir.is_run(path))
    if is_resumed and not values['agent'].present:
      agent = workdir.read_config(path).agent.name
    return is_resumed, agent

  is_resumed, agent = cluster.decide(find_run)

  def make_config() -> tuple[ConfigDict, set[str]]:
    config = get_config(agent, values.variant)
    requested = apply_overrides(config, command_line.overrides)
    if values.variant:
      requested |= {*flatten(config.to_dict())} - workdir.CHANGEABLE
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
    add_current_directory()
    options, suite = config.env.options, SUITES.get(config.env.suite)
    for name in filter(options.get, suite.policy_options if suite else ()):
      options[name] = os.path.abspath(str(options[name]))
    if is_resumed:
      files = _resume_run(values.workdir, config, requested, exit_stack)
    else:
      files = _new_run(values, config, command_line.directory)
    return config.to_dict(), files

  fields, files = cluster.decide(find_files)
  if cluster.is_distributed:
    config = workdir.as_config(fields)

  cluster.attempt(lambda: check(config))
  return config, Files(*files)
