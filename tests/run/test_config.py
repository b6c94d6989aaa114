"""Tests the table of fields, and overrides."""

import contextlib
import functools
import json
import os
import pathlib
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.agents import AGENTS
from podrl.fields import Range, as_tuples, flatten, hyperparams, nest
from podrl.records import workdir
from podrl.run import build, command_line, devices, start
from podrl.run import config as configs
from podrl.run.cluster import Cluster
from podrl.run.command_line import apply_overrides, parse_command_line
from podrl.run.config import base_config, check, default_fields
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
  config = default_fields('ppo', 'Anakin')
  config, _ = apply_overrides(config, [argument])
  value = config[field]
  assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
  'field,value,expected',
  [
    ('seed', 1e3, 1000),
    ('seed', '1e3', 1000),
    ('optimizer.anneal', 0, False),
    ('agent.gamma', 1, 1.0),
    ('network.hidden_sizes', [8, 9], (8, 9)),
    ('stop.eval_return', 475, '475'),
    ('env.name', "'x'", "'x'"),  # It is no text that shows a string.
    ('env.options.level', '3', '3'),
    ('env.options.sizes', [1, [2]], (1, (2,))),
  ],
)
def test_values_of_python_take_the_type_of_their_default(
  field, value, expected
):
  config = default_fields('ppo', 'Anakin')
  config, names = apply_overrides(config, [], {field: value})
  option = field.removeprefix('env.options.')
  found = config['env.options'][option] if option != field else config[field]
  assert found == expected and type(found) is type(expected)
  assert names == {'env.options' if option != field else field}


@pytest.mark.parametrize('value', [1, '1', None])
def test_a_saved_integer_is_a_float_and_other_types_are_an_error(
  value, tmp_path
):
  config = default_fields('ppo', 'Anakin') | {'env.name': 'Catch-bsuite'}
  workdir.make(str(tmp_path), config)
  saved = nest(config | {'agent.gamma': value})
  workdir.write_json(str(tmp_path / 'config.json'), saved)
  path = str(tmp_path)
  restore = functools.partial(
    workdir.restore_config,
    config,
    workdir.read_config(path),
    path,
    set(),
    set(),
  )
  if value == 1:
    assert type(restore()[0]['agent.gamma']) is float
    return
  with pytest.raises(ValueError, match='agent.gamma=.* is not of type float'):
    restore()


def test_a_resume_command_gives_the_values_of_python_again():
  values = {'env.options.level': '3', 'network.hidden_sizes': (8, 9)}
  parsed = parse_command_line(['x.py', 'Catch-bsuite'], has_task=True)
  arguments = shlex.split(parsed._replace(values=values).resume('run'))[4:]
  again, _ = apply_overrides(default_fields('ppo', 'Anakin'), arguments)
  assert again['env.options'] == {'level': '3'}
  assert again['network.hidden_sizes'] == (8, 9)


@pytest.mark.parametrize(
  'values,message',
  [
    ({'seed': 1.5}, 'config.seed=1.5 is not of type int'),
    ({'agent.gama': 0.9}, 'did you mean config.agent.gamma'),
    ({'env.options.x': {1, 2}}, r'x={1, 2} cannot be written to config.json'),
    ({'agent.name': 'a2c'}, 'use --agent=a2c'),
  ],
)
def test_wrong_values_of_python_are_one_line(values, message):
  with pytest.raises(ValueError, match=message) as caught:
    apply_overrides(default_fields('ppo', 'Anakin'), [], values)
  assert '\n' not in str(caught.value)


def test_an_override_may_be_two_arguments():
  config = default_fields('ppo', 'Anakin')
  config, _ = apply_overrides(
    config, ['--config.seed', '5', '--config.env.num_envs', '8']
  )
  assert (config['seed'], config['env.num_envs']) == (5, 8)


@pytest.mark.parametrize(
  'flag,field',
  [('steps', 'total_env_steps'), ('seed', 'seed'), ('seeds', 'num_seeds')],
)
def test_a_short_flag_and_its_field_exclude_each_other(flag, field):
  for override in [f'--config.{field}=2'], [f'-config.{field}', '2']:
    message = f'--{flag} and --config.{field} set the same field'
    with pytest.raises(ValueError, match=message):
      parse_command_line(['x.py', *override, f'--{flag}=2'])
  with pytest.raises(ValueError, match=message):
    parse_command_line(['x.py', f'--{flag}=2'], values={field: 2})
  # The name of another field may begin in the same way.
  argv = ['x.py', f'--config.{field}_x=2', f'--{flag}=3']
  overrides = parse_command_line(argv).overrides
  assert overrides == [argv[1], f'--config.{field}=3']


def test_the_directory_follows_the_final_configuration():
  argv = ['x.py', '--agent=impala', '--config.env.name=a:b/c']
  parsed = parse_command_line(argv)
  _, files = start.resolve_config(
    parsed,
    lambda agent, variant: default_fields(agent, 'Anakin'),
    Cluster(),
    contextlib.ExitStack(),
  )
  assert files.workdir.startswith(os.path.abspath('runs/a-b-c/impala-2'))


def test_paths_are_absolute_at_the_start(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', '/home/me')
  argv = ['x.py', '--workdir=~/a', '--init_from=b', '--seed=1']
  argv += ['--config.compilation_cache', 'c/../d', '--config.agent.name=e']
  parsed = parse_command_line(argv)
  monkeypatch.chdir('/')  # As an environment may do.
  values = parsed.flags
  assert values.workdir == '/home/me/a' and values.init_from == f'{tmp_path}/b'
  assert parsed.overrides[:2] == [
    f'--config.compilation_cache={tmp_path}/d',
    '--config.agent.name=e',
  ]
  # The user types the command where the run started.
  assert parsed.resume(f'{tmp_path}/runs/f').startswith(
    'python x.py --workdir=runs/f --resume'
  )


@pytest.mark.parametrize('value', ['auto', 'off'])
def test_words_are_no_paths(value):
  argument = f'--config.compilation_cache={value}'
  parsed = parse_command_line(['x.py', argument])
  assert list(parsed.overrides) == [argument]
  assert parsed.flags.workdir == ''


def test_options_are_open():
  config = default_fields('ppo', 'Anakin')
  config, _ = apply_overrides(
    config, ['--config.env.options.max_steps_in_episode=7']
  )
  assert config['env.options'] == {'max_steps_in_episode': 7}
  for _ in range(2):  # The second time, the option has a text as its default.
    config, _ = apply_overrides(
      config, ["--config.env.options.observation='rgb'"]
    )
    assert config['env.options']['observation'] == 'rgb'


@pytest.mark.parametrize('value', ["['SF', 'FG']", "{1: ['SF']}", '3', 'x'])
def test_options_are_what_config_json_gives_back(value):
  config = default_fields('ppo', 'Anakin')
  config, _ = apply_overrides(config, [f'--config.env.options.map={value}'])
  again = as_tuples(json.loads(json.dumps(nest(config))))
  assert flatten(again) == config


def test_a_command_quotes_what_the_shell_would_split():
  parsed = parse_command_line(['my dir/a.py', '--seed=3'])
  assert parsed.resume('runs/my run') == (
    "python 'my dir/a.py' '--workdir=runs/my run' --resume --config.seed=3"
  )


@pytest.mark.parametrize(
  'argument,message',
  [
    ('--config.sed=3', 'did you mean config.seed'),
    ('--config.agent.gama=.9', 'config.agent.gamma'),
    ('--config.learning_rate=.9', 'did you mean config.optimizer.learning_'),
    ('--config.gamma=.9', 'did you mean config.agent.gamma$'),
    ('--config.agent.learning_rate=.9', 'did you mean config.optimizer.lear'),
    ('--config.env.num_env=.9', 'did you mean config.env.num_envs$'),
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
    apply_overrides(default_fields('ppo', 'Anakin'), [argument])
  assert '\n' not in str(error.value)


# What users of Stable-Baselines3, CleanRL, rejax and brax type.
_HINTS = {
  '--total-timesteps=1e6': 'write --steps=VALUE',
  '--num_timesteps=1e6': 'write --steps=VALUE',
  '--env-id=CartPole-v1': 'as in podrl train CartPole-v1',
  '--env=CartPole-v1': 'as in podrl train CartPole-v1',
  '--num_envs=8': 'write --config.env.num_envs=8',
  '--n-envs=8': 'write --config.env.num_envs=VALUE',
  '--learning_rate=1e-3': 'write --config.optimizer.learning_rate=1e-3',
  '--lr=1e-3': 'write --config.optimizer.learning_rate=VALUE',
  '--gamma=0.9': 'write --config.agent.gamma=0.9',
  '--gamma': 'write --config.agent.gamma=VALUE',
  '--discounting=0.9': 'write --config.agent.gamma=VALUE',
  '--gae-lambda=0.9': 'write --config.agent.lambda_=VALUE',
  '--n_steps=128': 'write --config.unroll_length=VALUE',
  '--batch_size=64': '=N, the number of parts, not their size',
  '--update-epochs=4': 'write --config.num_epochs=VALUE',
  '--clip-coef=0.2': 'write --config.agent.clip=VALUE',
  '--ent_coef=0.01': 'write --config.agent.entropy_cost=VALUE',
  '--device=cuda': 'set the environment variable JAX_PLATFORMS',
  '--network=mlp': 'write --config.network.name=VALUE',
  '--net_arch=64': 'write --config.network.hidden_sizes=VALUE',
  '--wandb': 'write --config.log.wandb=True',
  '--track': 'write --config.log.wandb=True',
  '--capture-video': 'write --config.log.videos=True',
  '--algo=dqn': 'write --agent=VALUE',
  '--num-seeds=3': 'write --seeds=3',
  '--logdir=x': 'write --workdir=VALUE',
  '--eval-freq=100': 'write --config.eval.every_env_steps=VALUE',
  '--num_episodes=3': 'write --config.eval.num_episodes=3',
  '--buffer_size=10': 'replay.capacity_steps is a field of dqn, rainbow',
  '--exploration-fraction=1': 'agent.exploration_fraction is a field of pqn',
  '--target-kl=0.1': 'write --config.optimizer.desired_kl=VALUE',
  '--kl-target=0.1': 'write --config.optimizer.desired_kl=VALUE',
  '--eps=1e-5': 'write --config.optimizer.eps=1e-5',
  '--adam-eps=1e-5': 'write --config.optimizer.eps=VALUE',
  '--weight-decay=0': 'write --config.optimizer.weight_decay=0',
  '--lr-schedule=x': 'write --config.optimizer.schedule=VALUE',
  '--version': 'podrl --version prints the version',
  '--iterations=10': 'give the environment steps, as in --steps=1e6',
  '--num_updates=10': 'give the environment steps, as in --steps=1e6',
  '--distributed': 'needs --coordinator, --num_processes and --process_id',
  '--eval': 'podrl evaluate RUN evaluates a trained policy',
  '--n_step=3': 'agent.n_steps is a field of dqn, rainbow, r2d2, muzero',
  '--alpha=0.1': 'agent.initial_temperature is a field of sac',
  '--sweep': 'podrl sweep trains with many settings, or a population',
  '--workers=4': 'write --config.sebulba.threads_per_actor_device=VALUE',
  '--tensorboard-log=x': 'in the directory of the run; see --workdir',
  '--reward_scaling=2': 'clip rewards with --config.agent.reward_clip=VALUE',
  '--checkpoint-dir=x': 'write --workdir=VALUE',
  '--load=x': 'write --init_from=VALUE',
  '--dueling': 'has priorities, a duelling head and a distribution',
  '--backend=mjx': "if the environment's library has such an option",
  '--render_mode=x': "if the environment's library has such an option",
  '--episode_length=9': "if the environment's library has such an option",
  '--nmu_envs=8': 'did you mean --config.env.num_envs',
  '--wordir=x': 'did you mean --workdir',
  '--axes=x': 'did you mean --axis',
  '--qqq': '--help lists all flags and fields',
}


@pytest.mark.parametrize('argument', _HINTS)
def test_a_flag_of_another_trainer_gets_the_right_hint(argument):
  argv = ['podrl train', argument, '100', 'CartPole-v1']
  message = f'{argument} is not understood; '
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    parse_command_line(argv, has_task=True, own=['axis'])
  advice = str(error.value).removeprefix(message)
  assert advice.endswith(_HINTS[argument]) or (
    advice.startswith(_HINTS[argument]) and '=' not in _HINTS[argument]
  )


def test_a_field_of_another_trainer_gets_the_right_hint():
  config = default_fields('ppo', 'Anakin')
  message = 'n_steps is not understood; write --config.unroll_length=VALUE'
  with pytest.raises(ValueError, match=message):
    apply_overrides(config, ['--config.n_steps=64'])


def test_the_page_for_users_of_others_has_the_names_of_the_hints():
  docs = pathlib.Path(__file__).parents[2] / 'docs'
  page = docs / 'how-to' / 'coming-from.md'
  rows = re.findall(r'^\| (`.*`) \|.*\| `([\w.-]+)`', page.read_text(), re.M)
  assert len(rows) > 20

  def advice(agent, word):
    with pytest.raises(ValueError, match=word) as error:
      parse_command_line(['podrl train', f'--agent={agent}', f'--{word}=1'])
    return str(error.value)

  for theirs, ours in rows:
    for word in re.findall(r'`(\w+)`', theirs):
      found = [advice(agent, word) for agent in ('ppo', 'dqn', 'sac')]
      assert any(ours in x for x in found), (word, ours, found)


def test_a_hint_names_a_field_that_the_agent_has():
  argv = ['podrl train', '--agent=dqn', '--batch_size=64']
  with pytest.raises(ValueError, match='write --config.replay.batch_size=64$'):
    parse_command_line(argv)
  with pytest.raises(ValueError, match='; write --seed=3$'):
    apply_overrides(default_fields('ppo', 'Anakin'), ['seed=3'])


def test_every_hint_names_a_field_and_no_field_is_a_word_of_others():
  config = configs.all_fields()
  flags = {*command_line._make_flags()}
  words = [w for x in command_line._WORDS.values() for w in x.split()]
  assert len(words) == len({*words}) > 100
  for target in command_line._WORDS:
    name = target.removeprefix('--')
    assert ' ' in target or name in (flags if target[0] == '-' else config)
  assert flags.isdisjoint(words)


def test_fields_of_others_name_their_owner():
  with pytest.raises(ValueError, match='agent.clip is a field of ppo, which'):
    apply_overrides(default_fields('a2c', 'Anakin'), ['--config.agent.clip=.1'])
  with pytest.raises(ValueError, match='num_devices is a field of Anakin'):
    apply_overrides(
      default_fields('ppo', 'Sebulba'), ['--config.num_devices=1']
    )


def test_fields_are_locked():
  with pytest.raises(AttributeError):
    base_config('ppo').sede = 3


def test_an_agent_brings_what_goes_with_it():
  assert base_config('ppo').num_epochs > 1 == base_config('a2c').num_epochs
  assert 'clip' not in base_config('impala').agent
  with pytest.raises(ValueError, match='did you mean impala'):
    base_config('impalla')


@pytest.mark.parametrize('agent', AGENTS)
@pytest.mark.parametrize('architecture', ['Anakin', 'Sebulba'])
def test_defaults_are_allowed(architecture, agent):
  config = default_fields(agent, architecture)
  check(config)
  assert build.architecture(config) == architecture.lower()
  assert ('sebulba.mode' in config) == ('num_devices' not in config)
  assert config['agent.name'] == agent and config['env.options'] == {}


def test_runs_do_not_share_their_options():
  default_fields('ppo', 'Anakin')['env.options']['x'] = 1
  assert default_fields('ppo', 'Anakin')['env.options'] == {}


def test_every_field_has_a_comment():
  found = configs.all_fields()
  assert len(found) > 90
  assert all(field.comment.endswith('.') for field in found.values())


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
  agent = build.make_agent(default_fields(name, 'Anakin'), spec)
  variables = jax.eval_shape(agent.init, jax.random.key(0))
  config = default_fields(name, 'Anakin')
  own = hyperparams(AGENTS[name].fields, config)
  assert own.keys() >= {'gamma', 'learning_rate'}
  assert own.keys() <= variables.hyperparams.keys()
  found = build.hyperparams(config, agent, num_updates=7)
  for name, value in own.items():
    assert found[name] == np.float32(value)


@pytest.mark.parametrize('batch_size,expected', [(20, 4), (66, 6), (24, 8)])
def test_the_default_devices_divide_the_replay_batch(
  batch_size, expected, monkeypatch
):
  monkeypatch.setattr(devices, 'num_cores', lambda: 12)
  config = default_fields('dqn', 'Anakin')
  config['env.num_envs'] = 24  # Without replay, there would be 8 devices.
  config['replay.batch_size'] = batch_size
  assert devices.num_cpu_devices(config) == expected


def test_a_memory_has_the_settings_of_the_run(monkeypatch):
  config, found = default_fields('rainbow', 'Anakin'), {}
  config['replay.batch_size'], config['replay.capacity_steps'] = 32, 1001
  config['replay.min_steps'], config['replay.priority_exponent'] = 101, 0.4
  monkeypatch.setattr(
    build.memory, 'make_ring', lambda obs, **options: found.update(options)
  )
  obs = jax.ShapeDtypeStruct((4, 84, 84), jnp.uint8)
  spec = EnvSpec(obs, True, Discrete(3), 4, 0, frame_stack=4)
  config['agent.n_steps'] = 5
  build.make_learner(config, build.make_agent(config, spec), spec, 2, 1)
  # Each of the two devices has a half of the steps, rounded up.
  assert found == {
    'blocks': build.memory.Blocks(),
    'frame_stack': 4,
    'capacity': 501,
    'min_steps': 51,
    'batch_size': 16,
    'sequence_length': 5,
    'priority_exponent': 0.4,
  }


@pytest.mark.parametrize(
  'least,period,message',
  [
    ('much', 100, 'stop.eval_return=much is not a number'),
    ('nan', 100, 'stop.eval_return=nan is not a number'),
    ('5', 0, 'set config.eval.every_env_steps'),
  ],
)
def test_a_return_to_stop_at_is_a_number_and_is_measured(
  least, period, message
):
  config = default_fields('ppo', 'Anakin')
  config['stop.eval_return'], config['eval.every_env_steps'] = least, period
  with pytest.raises(ValueError, match=message):
    configs.check(config)
