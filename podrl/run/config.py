"""The configuration: its fields, its defaults for kinds of tasks, its checks.

Each part of podrl declares its fields beside its code, see `podrl.fields`. A
configuration has the fields of the run, of the architecture, of the agent, and
of the torso and the optimiser that it names. `ConfigDict` is the form that
experiments edit and that `config.json` stores.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import importlib.util
import math
import os
from typing import Any

from ml_collections import ConfigDict

from podrl import agents, fields, modules
from podrl.agents import AGENTS
from podrl.core import meta, optimizers
from podrl.drivers import anakin, sebulba
from podrl.fields import COUNT, FROM_0, Field, Fields, Range, Table
from podrl.messages import check_choice
from podrl.networks import cores, torsos
from podrl.records import checkpoint, recorder, workdir
from podrl.run import evaluation

# The fields of the run itself.
FIELDS = {
  'seed': Field(0, 'All random numbers depend on this number.', FROM_0),
  'num_seeds': Field(
    1, 'Number of independent agents in the run.', Range(1, 2**16)
  ),
  'total_env_steps': Field(
    1_000_000,
    'Environment steps, reset steps included, rounded up to whole updates.',
    Range(1),
    changeable=True,
  ),
  'compilation_cache': Field(
    'auto', "'auto', 'off', or a directory for compiled programs."
  ),
  'gpu_deterministic': Field(
    True,
    'On a GPU, XLA measures no kernels, so that equal seeds give equal bits.',
  ),
  'price_per_hour': Field(
    0.0,
    'Hourly price of all machines, in any currency; 0 means unknown.',
    FROM_0,
  ),
  'env.suite': Field('gymnax', 'Library that provides the environment.'),
  'env.name': Field('', 'Name of the environment in its library.'),
  'env.num_envs': Field(
    64, 'Number of environments in all processes together.', COUNT
  ),
  'env.options': Field({}, 'Options that are passed to the library.'),
  'env.path': Field('', 'Directories of the modules that a run imports.'),
  **evaluation.FIELDS,
  'stop.eval_return': Field(
    '', 'Evaluated return at which a run ends early; empty means never.'
  ),
  **recorder.FIELDS,
  **checkpoint.FIELDS,
}

_OF_ARCHITECTURE = {'Anakin': anakin.FIELDS, 'Sebulba': sebulba.FIELDS}
# The fields that name a part with fields of its own.
PARTS = ('network.name', 'optimizer.name')
# Names of parameters that a user's part cannot have.
_RESERVED = ('name', 'groups', 'num_sgd_steps')
# The fields that may be MODULE:NAME, the user's own part.
_NAMES = ('env.name', 'agent.name', *PARTS)
# The settings of all agents by kind; `AgentEntry.kinds` has those of one agent.
# An environment can have several kinds. They are applied in this order.
KINDS: Mapping[str, Fields] = {
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
  'large image on a CPU': {  # Applied after 'large image'.
    'total_env_steps': 1_500_000,
    'env.num_envs': 16,
    'network.name': 'conv',
  },
  # Applied after another kind.
  'continuous': {'agent.entropy_cost': 0.0},
  # Applied after 'continuous'. With 1.0, three seeds of HalfCheetah-v4 reached
  # 1,800 instead of 5,300 to 7,600. An action of one number needs more noise:
  # with 0.5, MountainCarContinuous-v0 never leaves the valley.
  'action vector': {'network.initial_scale': 0.5},
  # Applied after 'action vector'. A real robot has only its sensors. Noise
  # costs a robot energy, and its reward is never below 0: with a scale of 0.5,
  # the episodes of Go1JoystickFlatTerrain-v1 returned 0.06 after 300k steps;
  # with 0.2, they returned 9.5.
  'robot': {'network.policy_inputs': 'state', 'network.initial_scale': 0.2},
  # Applied after another kind. With normalisation and PPO's four epochs, one of
  # three seeds never learned MemoryChain. With these settings, all six seeds
  # learned it.
  'memory': {
    'total_env_steps': 1_000_000,
    'agent.normalize_observation': False,
    'agent.normalize_reward': False,
    'network.recurrent': 'gru',
    'unroll_length': 32,
  },
  # Applied after another kind.
  'large rewards': {'agent.normalize_reward': True},
  # Applied after another kind. A game is decided at its end.
  'self-play': {
    'agent.gamma': 1.0,
    'agent.normalize_observation': False,
    'agent.normalize_reward': False,
    'network.hidden_sizes': (256,),
  },
}


def _with_part(
  table: Table, name: str, base: Table, shared: Table, own: Table
) -> Table:
  """Gives a table the fields of one torso or optimiser.

  Args:
    table: has the fields `base` and `shared`.
    name: the part's name in its table, or MODULE:NAME.
    base: the fields of all parts of this kind.
    shared: further fields, which only podrl's own parts of this kind have.
    own: the further fields of this part.

  Raises:
    ValueError: if the user's part has a field of another part.
  """
  if ':' not in name:
    return {**table, **{k: x for k, x in own.items() if k not in table}}
  others = {k: x for k, x in table.items() if k not in {*base, *shared}}
  for field in own:
    if field in others or fields.short(field) in _RESERVED:
      raise ValueError(
        f'{name} has a parameter {fields.short(field)}, but config.{field} is '
        "podrl's own; give the parameter another name"
      )
  like = {k: x._replace(default=table[k].default) for k, x in base.items()}
  return {**others, **like, **own}


def make_table(
  agent: str, architecture: str, network: str = '', optimizer: str = ''
) -> Table:
  """Returns the fields of a configuration.

  Args:
    agent: the agent's name, or MODULE:NAME.
    architecture: 'Anakin' or 'Sebulba'.
    network: `network.name`; empty means the agent's default.
    optimizer: `optimizer.name`; empty means the agent's default.

  Raises:
    ValueError: for an unknown name.
  """
  entry = agents.find(agent)
  table: Table = {
    **FIELDS,
    **_OF_ARCHITECTURE[architecture],
    'agent.name': Field('', 'The agent, or MODULE:NAME.'),
    **entry.fields,
  }
  network = network or table['network.name'].default
  own = torsos.own_fields(network)
  table = _with_part(table, network, torsos.FIELDS, torsos.OWN_FIELDS, own)
  optimizer = optimizer or table['optimizer.name'].default
  shared = {k: x for k, x in table.items() if k.startswith('optimizer.')}
  own = optimizers.find(optimizer).fields
  table = _with_part(table, optimizer, optimizers.BASE, shared, own)
  values = {k: x for k, x in entry.defaults.items() if k in table}
  values |= {'agent.name': agent}
  if architecture == 'Sebulba':
    values |= {'env.suite': 'envpool'}
  return fields.with_defaults(table, values)


def table_of(values: Fields) -> Table:
  """Returns the fields of a configuration, given its values."""
  parts = [values[name] for name in PARTS]
  return make_table(values['agent.name'], _architecture(values), *parts)


def _architecture(values: Fields) -> str:
  return 'Sebulba' if 'sebulba.mode' in values else 'Anakin'


def change(config: Fields, values: Fields) -> dict[str, Any]:
  """Returns a configuration with other values.

  Another `network.name` or `optimizer.name` may bring other fields. A value of
  a field that both parts have is kept, unless it is the default of the part
  before.
  """
  parts = {k: values[k] for k in PARTS if values.get(k, config[k]) != config[k]}
  if not parts:
    return {**config, **values}
  before, after = table_of(config), table_of({**config, **parts})
  changed = {k: x for k, x in config.items() if k not in before}
  for name, field in after.items():
    value = config.get(name, field.default)
    old = before.get(name, field)
    is_kept = old == field or value != old.default
    is_kept &= type(value) is type(field.default)
    changed[name] = value if is_kept else field.default
  return {**changed, **values}


def complete(config: Fields) -> dict[str, Any]:
  """Returns a configuration with exactly the fields of its parts.

  An experiment may have set the name of another part, and a run of an earlier
  version lacks newer fields.
  """
  usual = make_table(config['agent.name'], _architecture(config))
  parts = {name: config[name] for name in PARTS}
  others = {name: usual[name].default for name in PARTS}
  sections = 'network.', 'optimizer.'
  known = usual.keys() | table_of(config)
  kept = {
    k: x for k, x in config.items() if k in known or not k.startswith(sections)
  }
  for name in config.keys() - kept.keys():
    part = config[f'{name.partition(".")[0]}.name']
    if ':' in part:
      raise ValueError(f'config.{name} is not a field of {part}')
  if parts == others:
    return {**fields.defaults(usual), **kept}
  return change({**kept, **others}, parts)


def completed(
  get_config: Callable[[str, str], ConfigDict],
) -> Callable[[str, str], dict[str, Any]]:
  """Returns an experiment's `get_config`, whose result is complete and flat."""

  def get(agent: str, variant: str) -> dict[str, Any]:
    return complete(fields.flatten(get_config(agent, variant).to_dict()))

  return get


def changeable(config: Fields) -> set[str]:
  """Returns the fields that a resumed run may change on its command line."""
  return {k for k, x in table_of(config).items() if x.changeable}


def owners(name: str) -> str:
  """Names the architecture, the agents or the optimisers that have a field."""
  found = [k for k, x in _OF_ARCHITECTURE.items() if name in x]
  found = found or [k for k, x in AGENTS.items() if name in x.fields]
  rows = optimizers.OPTIMIZERS.items()
  found = found or [f'the optimiser {k}' for k, x in rows if name in x.fields]
  return ', '.join(found)


def all_fields() -> dict[str, Field]:
  """Returns the fields of all agents, architectures and optimisers."""
  found = {**FIELDS, **anakin.FIELDS, **sebulba.FIELDS}
  for row in optimizers.OPTIMIZERS.values():
    found = {**row.fields, **found}
  for entry in AGENTS.values():
    found = {**entry.fields, **found}
  return found


def as_config(values: Fields) -> ConfigDict:
  """Returns values in the form that experiments edit.

  Only `env.options` accepts new fields.
  """
  config = ConfigDict(fields.nest(values)).lock()
  config.env.options.unlock()
  return config


def default_fields(agent: str, architecture: str) -> dict[str, Any]:
  """Returns the default of each field; see `make_table`."""
  return fields.defaults(make_table(agent, architecture))


def base_config(agent: str) -> ConfigDict:
  """Makes Anakin's defaults; raises a ValueError for an unknown agent."""
  return as_config(default_fields(agent, 'Anakin'))


def sebulba_config(agent: str) -> ConfigDict:
  """Makes Sebulba's defaults; raises a ValueError for an unknown agent."""
  return as_config(default_fields(agent, 'Sebulba'))


def is_actor_critic(agent: str) -> bool:
  """Returns whether an agent is PPO, IMPALA or A2C, or has their fields."""
  return 'agent.entropy_cost' in agents.find(agent).fields


def settings_of_kinds(
  config: Fields, kinds: Sequence[str], chosen: Collection[str] = ()
) -> dict[str, Any]:
  """Returns the settings for kinds of environments; later kinds count more.

  The fields `chosen` and those that the run does not have are left out.
  """
  entry = agents.find(config['agent.name'])
  settings: dict[str, Any] = {}
  for kind in kinds:
    settings |= {k: x for k, x in KINDS[kind].items() if k in config}
    settings |= entry.kinds.get(kind, {})
  settings = {k: x for k, x in settings.items() if k not in chosen}
  parts = {k: settings[k] for k in PARTS if k in settings}
  known = table_of({**config, **parts}) if parts else config
  return {k: x for k, x in settings.items() if k in known}


def apply_kinds(config: ConfigDict, *kinds: str) -> ConfigDict:
  """Applies the settings for kinds of environments, in place; returns `config`.

  See `settings_of_kinds`.
  """
  before = fields.flatten(config.to_dict())
  after = change(before, settings_of_kinds(before, kinds))
  changed = {
    k: x for k, x in after.items() if k not in before or x != before[k]
  }
  kept = {k for k, x in after.items() if type(before.get(k)) is type(x)}
  with config.unlocked():
    for name in before.keys() - kept:
      section, _, last = name.rpartition('.')
      del (config[section] if section else config)[last]
    config.update_from_flattened_dict(changed)
  config.env.options.unlock()
  return config


def check(values: Fields) -> None:
  """Raises a ValueError for a wrong value; needs no device or environment."""
  fields.check(table_of(values), values, PARTS)
  capacity = values.get('replay.capacity_steps', 0)
  if values.get('replay.min_steps', 0) > capacity:
    raise ValueError(
      f'config.replay.min_steps={values["replay.min_steps"]} must be at most '
      f'config.replay.capacity_steps={capacity}'
    )
  cores.check(values)
  if text := values.get('stop.eval_return', ''):
    try:
      is_number = math.isfinite(float(text))
    except ValueError:
      is_number = False
    if not is_number:
      raise ValueError(f'config.stop.eval_return={text} is not a number')
    if not values['eval.every_env_steps']:
      raise ValueError(
        f'config.stop.eval_return={text} needs evaluations before the end; set '
        'config.eval.every_env_steps'
      )
  if not values['network.hidden_sizes']:
    raise ValueError('config.network.hidden_sizes=() needs one or more widths')
  agents.check(values)
  if 'meta.params' in values:
    names = meta_params(values)
    for name in names:
      check_choice('config.meta.params', name, meta.NAMES)
    if len(set(names)) < len(names):
      text = values['meta.params']
      raise ValueError(f'config.meta.params={text} has a name twice')
  if values.get('optimizer.schedule') == 'cosine':
    if not values['optimizer.anneal']:
      raise ValueError(
        'config.optimizer.schedule=cosine needs config.optimizer.anneal=True'
      )
  _check_members(values)
  # JAX makes the same key from `seed` and `seed` + 2**32.
  bound = 2**32 - values.get('num_seeds', 1)
  if values['seed'] > bound:
    raise ValueError(f'config.seed={values["seed"]} must be at most {bound}')
  is_deterministic = values.get('sebulba.mode') == 'deterministic'
  if is_deterministic and values['sebulba.autotune']:
    raise ValueError(
      'config.sebulba.autotune=True does not fit the deterministic mode, '
      'in which every actor gives one unroll to each update; use '
      'config.sebulba.mode=asynchronous'
    )
  if values['log.wandb'] and not importlib.util.find_spec('wandb'):
    raise ValueError(
      'config.log.wandb=True needs the package wandb; install it with '
      "pip install -e '.[wandb]'"
    )


def meta_params(config: Fields) -> list[str]:
  """Returns the names of the hyperparameters that learn."""
  return [name.strip() for name in config['meta.params'].split(',')]


def member_fields(config: Fields) -> set[str]:
  """Returns the fields in which the members of one program may differ."""
  own = agents.find(config['agent.name']).fields
  return {'seed', *(x for x in changeable(config) if x in own)}


def _check_members(config: Fields) -> None:
  """Raises a ValueError if the members of a sweep cannot share a program."""
  if 'members' not in config:
    return
  allowed = member_fields(config)
  for own in config['members']:
    if unknown := sorted(own.keys() - allowed):
      raise ValueError(
        f'the members of one program cannot differ in {unknown[0]}, only in '
        f'{", ".join(sorted(allowed))}'
      )
  for values in workdir.agents('', config).values():
    check(values)


def names_of_parts(config: Fields) -> list[str]:
  """Returns the names MODULE:NAME in a configuration."""
  return [x for x in map(config.get, _NAMES) if x and ':' in x]


def make_importable(config: Fields) -> None:
  """Lets Python find the modules that a configuration names."""
  if names_of_parts(config):
    directories = config.get('env.path', '').split(os.pathsep)
    modules.add_to_path(*directories, modules.current_directory())


def parts_directory(config: Fields) -> str:
  """Returns the directories of the modules, as `env.path` has them."""
  found = map(modules.module_directory, names_of_parts(config))
  return os.pathsep.join(dict.fromkeys(filter(None, found)))


def check_trust(
  path: str, config: Fields, trust: bool, named: Collection[str] = ()
) -> Fields:
  """Raises a ValueError if a run could import code that its user did not write.

  Args:
    config: the saved configuration of the run in `path`.
    trust: whether the user trusts the run.
    named: fields that the user has set, such as `env.name`, and so modules that
      the user knows.

  Returns:
    The configuration; without its `env.path` if `trust` is false and the user's
    key did not sign the run.
  """
  if trust or workdir.is_own(path, config):
    return config
  names = [config.get(k, '') for k in _NAMES if k not in named]
  if name := next((x for x in names if ':' in x), ''):
    what = modules.describe_import(name, config.get('env.path', ''))
    raise ValueError(
      f'{path} would import {what}, and you did not make this run, or not with '
      f'the key {workdir.key_path()}; if you trust this code, add --trust, or '
      'trust=True in Python'
    )
  return {**config, 'env.path': ''} if 'env.path' in config else config
