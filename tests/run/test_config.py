"""Tests the table of fields, and overrides."""

import contextlib
import json
import os

import jax
import jax.numpy as jnp
import pytest

from podrl.agents import AGENTS
from podrl.records import workdir
from podrl.run import build, devices
from podrl.run import config as configs
from podrl.run.cluster import Cluster
from podrl.run.config import (
  FIELDS,
  Range,
  apply_overrides,
  base_config,
  check,
  sebulba_config,
)
from podrl.types import Discrete, EnvSpec


@pytest.mark.parametrize(
  'argument,field,expected',
  [
    ('--config.seed=3', 'seed', 3),
    ('--config.total_env_steps=1e6', 'total_env_steps', 1_000_000),
    ('--config.agent.gamma=1', 'agent.gamma', 1.0),
    ('--config.optimizer.anneal=false', 'optimizer.anneal', False),
    ('--config.optimizer.anneal=True', 'optimizer.anneal', True),
    ('--config.network.hidden_sizes=(8, 9)', 'network.hidden_sizes', (8, 9)),
    ('--config.network.hidden_sizes=8', 'network.hidden_sizes', (8,)),
    ('--config.env.name=1', 'env.name', '1'),
    ('-config.seed=4', 'seed', 4),
  ],
)
def test_overrides_take_the_type_of_their_default(argument, field, expected):
  config = base_config('ppo')
  apply_overrides(config, [argument])
  value = config
  for part in field.split('.'):
    value = value[part]
  assert value == expected and type(value) is type(expected)


def test_an_override_may_be_two_arguments():
  config = base_config('ppo')
  apply_overrides(config, ['--config.seed', '5', '--config.env.num_envs', '8'])
  assert (config.seed, config.env.num_envs) == (5, 8)


@pytest.mark.parametrize(
  'flag,field',
  [('steps', 'total_env_steps'), ('seed', 'seed'), ('seeds', 'num_seeds')],
)
def test_a_short_flag_and_its_field_exclude_each_other(flag, field):
  for override in [f'--config.{field}=2'], [f'-config.{field}', '2']:
    message = f'--{flag} and --config.{field} set the same field'
    with pytest.raises(ValueError, match=message):
      configs.parse_command_line(['x.py', *override, f'--{flag}=2'])
  # The name of another field may begin in the same way.
  argv = ['x.py', f'--config.{field}_x=2', f'--{flag}=3']
  overrides = configs.parse_command_line(argv).overrides
  assert overrides == [argv[1], f'--config.{field}=3']


def test_the_directory_follows_the_final_configuration():
  argv = ['x.py', '--agent=impala', '--config.env.name=a:b/c']
  command_line = configs.parse_command_line(argv)
  _, files = configs.resolve_config(
    command_line,
    lambda agent, variant: base_config(agent),
    Cluster(),
    contextlib.ExitStack(),
  )
  assert files.workdir.startswith(os.path.abspath('runs/a-b-c/impala-2'))


def test_paths_are_absolute_at_the_start(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', '/home/me')
  argv = ['x.py', '--workdir=~/a', '--init_from=b', '--seed=1']
  argv += ['--config.compilation_cache', 'c/../d', '--config.agent.name=e']
  command_line = configs.parse_command_line(argv)
  monkeypatch.chdir('/')  # As an environment may do.
  values = command_line.flags
  assert values.workdir == '/home/me/a' and values.init_from == f'{tmp_path}/b'
  assert command_line.overrides[:2] == [
    f'--config.compilation_cache={tmp_path}/d',
    '--config.agent.name=e',
  ]
  # The user types the command where the run started.
  assert command_line.resume(f'{tmp_path}/runs/f').startswith(
    'python x.py --workdir=runs/f --resume'
  )


@pytest.mark.parametrize('value', ['auto', 'off'])
def test_words_are_no_paths(value):
  argument = f'--config.compilation_cache={value}'
  command_line = configs.parse_command_line(['x.py', argument])
  assert list(command_line.overrides) == [argument]
  assert command_line.flags.workdir == ''


def test_options_are_open():
  config = base_config('ppo')
  apply_overrides(config, ['--config.env.options.max_steps_in_episode=7'])
  assert config.env.options.to_dict() == {'max_steps_in_episode': 7}
  for _ in range(2):  # The second time, the option has a text as its default.
    apply_overrides(config, ["--config.env.options.observation='rgb'"])
    assert config.env.options.observation == 'rgb'


@pytest.mark.parametrize('value', ["['SF', 'FG']", "{1: ['SF']}", '3', 'x'])
def test_options_are_what_config_json_gives_back(value):
  config = base_config('ppo')
  apply_overrides(config, [f'--config.env.options.map={value}'])
  text = json.dumps(config.to_dict())
  assert workdir.as_config(json.loads(text)).env.options == config.env.options


def test_a_command_quotes_what_the_shell_would_split():
  command_line = configs.parse_command_line(['my dir/a.py', '--seed=3'])
  assert command_line.resume('runs/my run') == (
    "python 'my dir/a.py' '--workdir=runs/my run' --resume --config.seed=3"
  )


@pytest.mark.parametrize(
  'argument,message',
  [
    ('--config.sed=3', 'did you mean config.seed'),
    ('--config.agent.gama=.9', 'config.agent.gamma'),
    ('--config.learning_rate=.9', 'config.optimizer.learning_rate'),
    ('--config.seed.x=3', 'not a field'),
    ('--config.sebulba.autotune=True', 'autotune is a field of Sebulba, which'),
    ('--config.sebulba.autotun=True', 'not a field'),
    ('--config.agent=ppo', 'not a field'),
    ('--config=3', 'not understood'),
    ('--config.seed=two', 'not of type int'),
    ('--config.seed=1.5', 'not of type int'),
    ('--config.seed=True', 'not of type int'),
    ('--config.agent.gamma=x', 'not of type float'),
    ('--config.optimizer.anneal=2', 'not of type bool'),
    ('--config.network.hidden_sizes=(8, 9.5)', 'not of type tuple'),
    ('--config.seed', 'has no value'),
    ('--config.env.options={"a": 1}', 'set single options with --config.env.'),
    ('--config.agent.name=a2c', 'use --agent=a2c'),
    ('--agnt=ppo', 'did you mean --agent'),
    ('seed=3', 'not understood'),
  ],
)
def test_mistakes_are_one_line(argument, message):
  with pytest.raises(ValueError, match=message) as error:
    apply_overrides(base_config('ppo'), [argument])
  assert '\n' not in str(error.value)


def test_fields_of_others_name_their_owner():
  with pytest.raises(ValueError, match='agent.clip is a field of ppo, which'):
    apply_overrides(base_config('a2c'), ['--config.agent.clip=.1'])
  with pytest.raises(ValueError, match='num_devices is a field of Anakin'):
    apply_overrides(sebulba_config('ppo'), ['--config.num_devices=1'])


def test_fields_are_locked():
  with pytest.raises(AttributeError):
    base_config('ppo').sede = 3


def test_an_agent_brings_what_goes_with_it():
  assert base_config('ppo').num_epochs > 1 == base_config('a2c').num_epochs
  assert 'clip' not in base_config('impala').agent
  with pytest.raises(ValueError, match='did you mean impala'):
    base_config('impalla')


@pytest.mark.parametrize('agent', AGENTS)
@pytest.mark.parametrize('make_config', [base_config, sebulba_config])
def test_defaults_are_allowed(make_config, agent):
  config = make_config(agent)
  check(config)
  assert build.architecture(config) == (
    'anakin' if make_config is base_config else 'sebulba'
  )
  assert ('sebulba' in config) == ('num_devices' not in config)
  assert config.agent.name == agent and config.env.options.to_dict() == {}


def test_every_field_has_a_comment():
  for entry in AGENTS.values():
    added = {k for k in entry.defaults if k not in FIELDS}
    assert added <= entry.comments.keys()
  assert all(field.comment.endswith('.') for field in FIELDS.values())


@pytest.mark.parametrize(
  'allowed,inside,outside,text',
  [
    (Range(0), (0, 1e9), (-1, float('inf')), 'at least 0'),
    (Range(0, excludes_low=True), (1e-9,), (0, -1), 'more than 0'),
    (
      Range(1, 3),
      (1, 3, (2, 3), ()),
      (0, 4, (1, 4)),
      'at least 1 and at most 3',
    ),
  ],
)
def test_ranges(allowed, inside, outside, text):
  assert str(allowed) == text
  assert all(map(allowed.allows, inside))
  assert not any(map(allowed.allows, outside))


@pytest.mark.parametrize('name', AGENTS)
def test_the_changeable_fields_of_an_agent_are_hyperparameters(name):
  obs = jax.ShapeDtypeStruct((3,), jnp.float32)
  spec = EnvSpec(obs, False, Discrete(2), 1, 0)
  agent = build.make_agent(base_config(name), spec)
  variables = jax.eval_shape(agent.init, jax.random.key(0))
  changeable = {x.split('.')[1] for x in AGENTS[name].changeable}
  assert changeable
  assert changeable <= variables.hyperparams.keys()


@pytest.mark.parametrize('batch_size,expected', [(20, 4), (66, 6), (24, 8)])
def test_the_default_devices_divide_the_replay_batch(
  batch_size, expected, monkeypatch
):
  monkeypatch.setattr(devices, 'num_cores', lambda: 12)
  config = base_config('dqn')
  config.env.num_envs = 24  # Without replay, there would be 8 devices.
  config.replay.batch_size = batch_size
  assert devices.num_cpu_devices(config) == expected


def test_a_memory_has_the_settings_of_the_run(monkeypatch):
  config, found = base_config('rainbow'), {}
  config.replay.batch_size, config.replay.capacity_steps = 32, 1001
  config.replay.min_steps, config.replay.priority_exponent = 101, 0.4
  monkeypatch.setattr(
    build.memory, 'make_ring', lambda obs, **options: found.update(options)
  )
  obs = jax.ShapeDtypeStruct((4, 84, 84), jnp.uint8)
  spec = EnvSpec(obs, True, Discrete(3), 4, 0, frame_stack=4)
  config.agent.n_steps = 5
  build.make_learner(config, build.make_agent(config, spec), spec, 2)
  # Each of the two devices has a half of the steps, rounded up.
  assert found == {
    'frame_stack': 4,
    'capacity': 501,
    'min_steps': 51,
    'batch_size': 16,
    'sequence_length': 5,
    'priority_exponent': 0.4,
  }
