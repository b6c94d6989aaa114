"""Tests the settings of each kind of environment."""

import jax
import numpy as np
import pytest

from podrl.agents import AGENTS
from podrl.core import optimizers
from podrl.envs import SUITES, Task
from podrl.run import defaults, devices
from podrl.run.config import KINDS, all_fields, check, make_table
from podrl.types import Box, Discrete, EnvSpec


def _box(size):
  return Box((size,), -np.ones(size, np.float32), np.ones(size, np.float32))


_VECTOR = jax.ShapeDtypeStruct((4,), np.float32)


def _image(*shape, dtype=np.uint8):
  return jax.ShapeDtypeStruct(shape, dtype)


def _spec(obs, action=Discrete(3)):
  is_first = isinstance(obs, jax.ShapeDtypeStruct) and obs.shape[0] == 4
  return EnvSpec(obs, is_first and len(obs.shape) == 3, action, 1, 100)


_SPECS = [
  ('gymnax', _spec(_VECTOR), ['numbers']),
  ('envpool', _spec({'a': _VECTOR, 'b': _image(7, 7, 3)}), ['small image']),
  ('envpool', _spec({'a': _VECTOR, 'b': _image(2, 7, 3)}), ['numbers']),
  (
    'envpool',
    _spec({'a': _image(7, 7, 3), 'b': _image(64, 64, 3), 'c': _VECTOR}),
    ['large image'],
  ),
  (
    'gymnax',
    _spec({'a': _image(4, dtype=bool), 'b': _image(30, 40, 3, dtype=bool)}),
    ['sparse image'],
  ),
  (
    'gymnax',
    _spec({'a': _VECTOR, 'b': _image(30, 40, 3, dtype=bool)}),
    ['small image'],
  ),
  ('gymnax', _spec(_VECTOR, _box(1)), ['numbers', 'continuous']),
  (
    'gymnax',
    _spec(_VECTOR, _box(2)),
    ['numbers', 'continuous', 'action vector'],
  ),
  (
    'envpool',
    _spec({'state': _VECTOR, 'privileged_state': _VECTOR}, _box(2)),
    ['numbers', 'continuous', 'action vector', 'robot'],
  ),
  (
    'envpool',
    _spec({'state': _VECTOR, 'other': _VECTOR}, _box(1)),
    ['numbers', 'continuous'],
  ),
  ('gymnax', _spec(_image(10, 10, 4, dtype=bool)), ['small image']),
  ('gymnax', _spec(_image(30, 40, 3, dtype=bool)), ['sparse image']),
  ('envpool', _spec(_image(30, 40, 3)), ['small image']),
  ('envpool', _spec(_image(4, 84, 84)), ['large image']),
  (
    'gymnasium',
    _spec(_image(96, 96, 3), _box(2)),
    ['large image', 'continuous', 'action vector'],
  ),
]


@pytest.mark.parametrize('suite,spec,expected', _SPECS)
def test_the_kind_follows_from_the_specification(suite, spec, expected):
  task = Task(suite, 'Pong-v5')
  assert defaults.kinds(task, spec, 'gpu') == expected
  on_cpu = defaults.kinds(task, spec, 'cpu')
  assert ('large image on a CPU' in on_cpu) == ('large image' in expected)


@pytest.mark.parametrize(
  'suite,name,expected',
  [
    ('pgx', '2048', True),
    ('pgx', 'minatar-breakout', False),
    ('jumanji', 'Game2048-v1', True),
    ('gymnax', 'Breakout-MinAtar', False),
  ],
)
def test_large_rewards_are_normalised(suite, name, expected):
  spec = _spec(_image(10, 10, 4, dtype=bool))
  config = defaults.make_config(Task(suite, name), 'ppo', spec)
  assert config['agent.normalize_reward'] == expected


@pytest.mark.parametrize(
  'suite,name,expected',
  [
    ('gymnax', 'MemoryChain-bsuite', True),
    ('gymnax', 'UmbrellaChain-bsuite', False),
    ('envpool', 'MiniGrid-MemoryS7-v0', True),
    ('envpool', 'MiniGrid-Empty-5x5-v0', False),
  ],
)
def test_some_environments_need_a_memory(suite, name, expected):
  config = defaults.make_config(Task(suite, name), 'ppo', _spec(_VECTOR))
  assert (config['network.recurrent'] == 'gru') == expected
  assert config['env.suite'] == suite and config['env.name'] == name
  assert ('sebulba.mode' in config) == (suite != 'gymnax')


def test_images_are_small_only_without_an_accelerator(monkeypatch):
  task, spec = Task('envpool', 'Pong-v5'), _spec(_image(4, 84, 84))
  config = defaults.make_config(task, 'ppo', spec)
  assert config['env.options'] == {'img_height': 42, 'img_width': 42}
  assert config['network.name'] == 'conv' and config['env.num_envs'] == 16
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  config = defaults.make_config(task, 'ppo', spec)
  assert config['env.options'] == {}
  assert (
    config['network.name'] == 'impala_resnet' and config['env.num_envs'] == 128
  )
  assert SUITES['envpool'].small_options('CartPole-v1') == {}


@pytest.mark.parametrize('agent', AGENTS)
def test_the_settings_of_each_kind_fit_each_agent(agent):
  for suite, spec, _ in _SPECS:
    check(defaults.make_config(Task(suite, 'Pong-v5'), agent, spec))
  task = Task('gymnax', 'MemoryChain-bsuite')
  check(defaults.make_config(task, agent, _spec(_VECTOR)))


@pytest.mark.parametrize('agent', AGENTS)
def test_every_setting_of_a_kind_is_a_field(agent):
  entry = AGENTS[agent]
  known = make_table(agent, 'Sebulba').keys() | make_table(agent, 'Anakin')
  assert entry.kinds.keys() <= KINDS.keys()
  for kind, settings in entry.kinds.items():
    optimizer = settings.get('optimizer.name', 'adam')
    assert settings.keys() <= known | {*optimizers.find(optimizer).fields}, kind
  everything = all_fields()
  assert all(x.keys() <= everything.keys() for x in KINDS.values())


def test_a_choice_of_the_user_stays():
  config = defaults.base(Task('envpool', 'Pong-v5'), 'impala')
  config |= {'env.options': {'img_height': 64}, 'agent.lambda_': 0.5}
  config, usual = defaults.specialise(
    config, _spec(_image(4, 84, 84)), {'agent.lambda_', 'total_env_steps'}
  )
  assert config['env.options'] == {'img_height': 64, 'img_width': 42}
  assert (config['agent.lambda_'], config['agent.entropy_cost']) == (0.5, 0.002)
  assert (usual, config['total_env_steps']) == (1_500_000, 1_000_000)


@pytest.mark.parametrize('agent', AGENTS)
def test_the_settings_of_small_images_fit_eight_devices(agent, monkeypatch):
  monkeypatch.setattr(devices, 'num_cores', lambda: 8)
  spec = _spec(_image(10, 10, 4, dtype=bool))
  config = defaults.make_config(Task('gymnax', 'Freeway-MinAtar'), agent, spec)
  assert devices.num_cpu_devices(config) == 8
