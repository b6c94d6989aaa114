"""Tests parts that users bring by name: torsos, optimisers and agents."""

import json
import os
import sys

import helpers
import jax
import numpy as np
import optax
import pytest

import podrl
from podrl.agents import AGENTS
from podrl.core.optimizers import make_optimizer
from podrl.envs import Task
from podrl.fields import Field, Range, nest, section
from podrl.networks import actor_critic, torsos
from podrl.records import workdir
from podrl.run import defaults, train
from podrl.run.command_line import apply_overrides
from podrl.run.config import (
  change,
  changeable,
  check,
  complete,
  default_fields,
  member_fields,
)
from podrl.tools import evaluate, sweep
from podrl.tools import train as train_tool
from podrl.types import Discrete, EnvSpec

_CODE = """
import flax.linen as nn
import optax

from podrl.agents import AGENTS
from podrl.core.optimizers import OPTIMIZERS, Optimizer
from podrl.fields import Field, Range


class Torso(nn.Module):
  width: int = 12
  scale: float = 1.0

  @nn.compact
  def __call__(self, obs):
    assert obs.dtype == 'float32'
    obs = obs.reshape(len(obs), -1)
    return nn.tanh(self.scale * nn.Dense(self.width)(obs))


def make_torso(depth=2):
  layers = [nn.Dense(8) for _ in range(depth)]
  return nn.Sequential([lambda x: x.reshape(len(x), -1), *layers])


ready = Torso(width=5)


def muon(values, warmup: int = 4):
  rate = optax.warmup_cosine_decay_schedule(
    0.0, values['learning_rate'], warmup, values['num_sgd_steps']
  )
  return optax.contrib.muon(rate)


decayed = Optimizer(
  lambda values: optax.sgd(values['learning_rate'] * values['part']),
  {'optimizer.part': Field(0.5, 'Part of the rate.', Range(0, 1))},
)


def make_agent(spec, fields):
  agent = AGENTS['impala'].make_agent(spec, fields)

  def loss(variables, target_params, batch, rng_key):
    total, output = agent.loss(variables, target_params, batch, rng_key)
    bonus = variables.hyperparams['bonus']
    return total, output._replace(metrics=output.metrics | {'bonus': bonus})

  return agent._replace(loss=loss)


agent = AGENTS['impala']._replace(
  make_agent=make_agent,
  fields={
    **AGENTS['impala'].fields,
    'agent.bonus': Field(0.25, 'A bonus.', Range(0, 1), changeable=True),
  },
)
impala = AGENTS['impala']
raising = impala._replace(make_agent=lambda spec, fields: 1 / 0)
unchecked = impala._replace(check=lambda fields: fields['nope'])
empty = impala._replace(make_agent=lambda spec, fields: None)
untyped = impala._replace(fields={**impala.fields, 'agent.bonus': 0.5})
bare = impala._replace(
  fields={k: x for k, x in impala.fields.items() if k != 'agent.gamma'}
)
numbers = Optimizer(lambda values: optax.sgd(0.1), {'optimizer.b': 0.5})
number = 3


def broken(values):
  raise KeyError('leg')


def changing(values, part: float = 0.5):
  return optax.sgd(part)


changing = Optimizer(
  changing, {'optimizer.part': Field(0.5, 'Part.', changeable=True)}
)
again = OPTIMIZERS['adam']


def grouped(values, groups: int = 3):
  return optax.sgd(0.1)


def Named(name: str = 'x'):
  return nn.Dense(3)


class Clash(nn.Module):
  recurrent: int = 3


def nothing(values):
  return None


class Typed(nn.Module):
  activation: int = 3  # A text in podrl's own torsos.

  @nn.compact
  def __call__(self, obs):
    return obs + 'text'


class Flat(nn.Module):
  @nn.compact
  def __call__(self, obs):
    return obs.sum()
"""
_PARTS = [
  '--agent=my_parts:agent',
  '--config.network.name=my_parts:Torso',
  '--config.network.width=6',
  '--config.optimizer.name=my_parts:muon',
  '--config.agent.bonus=0.125',
]


@pytest.fixture
def parts(tmp_path, monkeypatch):
  """Changes to a directory with the module, which Python then imports anew."""
  (tmp_path / 'my_parts.py').write_text(_CODE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.delitem(sys.modules, 'my_parts', raising=False)
  yield tmp_path
  sys.modules.pop('my_parts', None)


_TINY = [x for x in helpers.TINY if 'hidden_sizes' not in x]


def _train(*arguments):
  return train_tool.run(['podrl train', *arguments, *_TINY])


def test_a_run_with_own_parts_can_do_what_every_run_can(
  parts, monkeypatch, capsys, tmp_path_factory
):
  workdir_flag = f'--workdir={parts}/run'
  assert _train('Catch-bsuite', *_PARTS, workdir_flag) == 0
  said = capsys.readouterr()
  assert 'podrl evaluate run' in said.out + said.err
  records = workdir.read_records('run')
  assert records[-1]['bonus'] == 0.125
  config = workdir.read_config('run')
  assert config['env.path'] == str(parts)
  assert (config['network.width'], config['optimizer.warmup']) == (6, 4)
  assert 'network.activation' not in config and 'optimizer.b1' not in config
  policy = podrl.load('run')
  kernels = jax.tree.leaves(policy.variables.params)
  assert any(x.shape[-1] == 6 for x in kernels)
  # From another directory, in a process without the module.
  monkeypatch.chdir(tmp_path_factory.mktemp('other'))
  monkeypatch.setattr(sys, 'path', [x for x in sys.path if x != str(parts)])
  sys.modules.pop('my_parts')
  arguments = ['podrl evaluate', f'{parts}/run', '--episodes=3']
  assert evaluate.run(arguments) == 0
  sys.modules.pop('my_parts')
  resumed = ['--resume', workdir_flag, '--steps=1024']
  assert train_tool.run(['podrl train', *resumed]) == 0
  more = workdir.read_records(f'{parts}/run')
  assert more[-1]['num_updates'] == 16 and more[: len(records)] == records


def test_nobody_elses_parts_are_imported(parts, monkeypatch):
  assert _train('Catch-bsuite', *_PARTS, '--workdir=run') == 0
  sys.modules.pop('my_parts')
  (parts / 'my_parts.py').write_text('raise RuntimeError("it ran")')
  monkeypatch.setenv('XDG_STATE_HOME', str(parts / 'other'))
  for field in 'agent.name', 'network.name', 'optimizer.name':
    config = workdir.read_config('run')
    others = {
      'agent.name': 'impala',
      'network.name': 'mlp',
      'optimizer.name': 'adam',
    }
    others.pop(field)
    config |= others
    os.makedirs(field, exist_ok=True)
    workdir.write_json(f'{field}/config.json', nest(config))
    os.symlink(parts / 'run/checkpoints', f'{field}/checkpoints')
    message = f'{field} would import .* of the module my_parts .*add --trust'
    with pytest.raises(ValueError, match=message):
      podrl.load(field)
    if field == 'agent.name':  # The call names another agent, PPO.
      message = 'config.agent.name is my_parts:agent in the run, but ppo now'
    with pytest.raises(ValueError, match=message):
      podrl.train('Catch-bsuite', workdir=field, resume=True)
    assert 'my_parts' not in sys.modules


def test_help_has_the_fields_of_parts(parts, capsys):
  code = train_tool.run(['podrl train', 'Catch-bsuite', *_PARTS, '--help'])
  assert code == 0
  text = capsys.readouterr().out
  for line in 'network.width=6', 'optimizer.warmup=4', 'agent.bonus=0.125':
    assert f'--config.{line}' in text
  assert 'network.activation' not in text and 'optimizer.b1' not in text


@pytest.mark.slow
def test_a_sweep_over_an_own_field(parts):
  tiny = [x for x in helpers.TINY if 'hidden_sizes' not in x]
  arguments = ['podrl sweep', 'Catch-bsuite', *_PARTS, '--workdir=sweep']
  arguments += ['--axis=agent.bonus=0.25,0.5', '--axis=network.width=3,4']
  arguments = [x for x in arguments if 'bonus=0.1' not in x and '=6' not in x]
  assert sweep.run([*arguments, *tiny]) == 0
  found = {}
  for path in parts.glob('sweep/**/config.json'):
    fields = json.loads(path.read_text())
    if 'members' not in fields:
      own = fields['agent']['bonus'], fields['network']['width']
      found[own] = workdir.read_records(path.parent)[-1]['bonus']
  assert found == {(b, w): b for b in (0.25, 0.5) for w in (3, 4)}


@pytest.mark.parametrize(
  'argument,message',
  [
    ('--config.network.name=my_parts:Torse', 'did you mean Torso'),
    ('--config.network.name=my_part:Torso', 'my_part cannot be imported'),
    ('--config.network.name=__main__:Torso', 'move it to a module'),
    ('--config.network.name=my_parts:', 'must be MODULE:NAME'),
    ('--config.network.name=my_parts:number', 'must be a flax module, or'),
    ('--config.network.name=my_parts:Flat', 'must map 1 observations to feat'),
    ('--config.network.name=my_parts:broken', 'broken failed: TypeError'),
    ('--config.network.name=builtins:int', 'int failed: TypeError'),
    ('--config.network.name=Torso', 'network.name=Torso is unknown'),
    ('--config.optimizer.name=my_parts:number', 'must be an Optimizer, or'),
    ('--config.optimizer.name=my_parts:broken', "broken failed: KeyError: 'le"),
    ('--config.optimizer.name=my_parts:nothing', 'not a NoneType'),
    ('--config.optimizer.name=adan', 'did you mean adam'),
    ('--config.optimizer.momentum=0.5', 'a field of the optimiser sgd, which'),
    ('--agent=my_parts:muon', 'must be a podrl.agents.AgentEntry, not a func'),
    ('--agent=my_parts:agen', 'did you mean agent'),
    ('--agent=my_parts:raising', 'raising failed: ZeroDivisionError: div'),
    ('--agent=my_parts:unchecked', "unchecked failed: KeyError: 'nope'"),
    ('--agent=my_parts:empty', 'make_agent must return an Agent, not a None'),
    ('--agent=my_parts:untyped', 'agent.bonus must be a podrl.fields.Field'),
    ('--agent=my_parts:bare', "bare failed: KeyError: 'agent."),
    ('--config.optimizer.name=my_parts:numbers', 'b must be a podrl.fields.F'),
    ('--config.network.name=my_parts:Typed', 'Typed failed: TypeError'),
  ],
)
def test_a_mistake_in_a_part_is_one_line(parts, argument, message, capsys):
  assert _train('Catch-bsuite', argument, '--workdir=run') == 2
  said = capsys.readouterr().err
  assert message in said and 'Traceback' not in said
  assert not os.path.exists('run/metrics.jsonl')


def test_the_values_of_own_fields_are_checked(parts):
  config = change(
    default_fields('ppo', 'Anakin'), {'optimizer.name': 'my_parts:decayed'}
  )
  check(config)
  config['optimizer.part'] = 1.5
  with pytest.raises(ValueError, match='config.optimizer.part=1.5 must be at'):
    check(config)


def test_an_instance_and_a_function_make_torsos(parts):
  for name, widths in ('ready', {5}), ('make_torso', {8}):
    flag = f'--config.network.name=my_parts:{name}'
    assert _train('Catch-bsuite', flag, f'--workdir={name}') == 0
    params = podrl.load(name).variables.params
    found = {x.shape[-1] for x in jax.tree.leaves(params) if x.ndim == 2}
    assert found == widths | {1, 3}  # The heads have 3 actions and a value.


def test_an_own_optimizer_is_the_optax_one(parts):
  params = {'a': np.ones((4, 3), np.float32), 'b': np.ones(3, np.float32)}
  grads = jax.tree.map(lambda x: 0.1 * x, params)
  rate = optax.warmup_cosine_decay_schedule(0.0, 0.02, 4, 50)
  theirs = optax.contrib.muon(rate)
  ours = make_optimizer('my_parts:muon', learning_rate=0.02, num_sgd_steps=50)
  states = [x.init(params) for x in (ours, theirs)]
  for _ in range(6):
    found, states[0] = ours.update(grads, states[0], params)
    expected, states[1] = theirs.update(grads, states[1], params)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert abs(found['a']).max() > 0


def test_another_part_brings_its_fields_and_keeps_chosen_values():
  config = default_fields('ppo', 'Anakin')
  config['optimizer.eps'] = 0.5  # Chosen, so it stays.
  config = change(config, {'optimizer.name': 'rmsprop'})
  assert config['optimizer.decay'] == 0.99 and 'optimizer.b1' not in config
  assert config['optimizer.eps'] == 0.5
  other = change(default_fields('ppo', 'Anakin'), {'optimizer.name': 'rmsprop'})
  assert other['optimizer.eps'] == 0.02 / 640  # Not Adam's.
  # An experiment may set the name itself.
  config = default_fields('ppo', 'Anakin')
  config['optimizer.name'] = 'sgd'
  config['optimizer.learning_rate'] = 0.25
  config = complete(config)
  assert config['optimizer.momentum'] == 0.0 and 'optimizer.b1' not in config
  assert config['optimizer.learning_rate'] == 0.25


@pytest.mark.parametrize('name', AGENTS)
def test_a_field_of_all_torsos_is_declared_once(name, monkeypatch):
  """A new field needs no other place: every agent accepts and stores it."""
  new = {'network.gain': Field(2.0, 'A factor.', Range(1))}
  monkeypatch.setattr(torsos, 'OWN_FIELDS', torsos.OWN_FIELDS | new)
  config = default_fields(name, 'Anakin')
  config, _ = apply_overrides(config, ['--config.network.gain=3'])
  assert config['network.gain'] == 3.0
  check(config)
  config['network.gain'] = 0.5
  with pytest.raises(ValueError, match='config.network.gain=0.5 must be at'):
    check(config)


def test_an_unsigned_run_names_no_part_of_a_script(parts, monkeypatch):
  """The user's --config.network.name is not the name that the run has."""
  get_config = helpers.get_config('anakin_catch')
  names = ['--config.network.name=my_parts:Torso', '--workdir=run']
  assert train.run(get_config, ['x.py', *names, *_TINY]) == 0
  sys.modules.pop('my_parts')
  (parts / 'my_parts.py').write_text('raise RuntimeError("it ran")')
  monkeypatch.setenv('XDG_STATE_HOME', str(parts / 'other'))
  argv = ['x.py', '--resume', '--workdir=run', '--config.network.name=mlp']
  assert train.run(get_config, [*argv, '--steps=2048']) == 2
  assert 'my_parts' not in sys.modules


def test_members_share_an_own_optimizer(parts):
  config = change(
    default_fields('ppo', 'Anakin'), {'optimizer.name': 'my_parts:changing'}
  )
  assert 'optimizer.part' in changeable(config)
  assert not any(x.startswith('optimizer.') for x in member_fields(config))
  assert 'optimizer.learning_rate' in member_fields(
    default_fields('ppo', 'Anakin')
  )


def test_a_kind_does_not_set_fields_of_a_part_that_the_user_replaces(parts):
  obs = jax.ShapeDtypeStruct((84, 84, 3), np.uint8)
  spec = EnvSpec(obs, False, Discrete(3), 1, 100)
  config = defaults.base(Task('envpool', 'Pong-v5'), 'impala')
  config = change(config, {'optimizer.name': 'my_parts:muon'})
  config, _ = defaults.specialise(config, spec, {'optimizer.name'})
  assert config['optimizer.name'] == 'my_parts:muon'
  own = section(config, 'optimizer')
  assert own.keys() == {'name', 'learning_rate', 'warmup'}


@pytest.mark.parametrize('name', ['Clash', 'Named', 'grouped'])
def test_a_part_cannot_have_a_field_of_podrl(parts, name):
  field = 'optimizer.name' if name == 'grouped' else 'network.name'
  with pytest.raises(ValueError, match='give the parameter another name'):
    change(default_fields('ppo', 'Anakin'), {field: f'my_parts:{name}'})


def test_a_row_of_podrl_may_be_used_again(parts):
  optimizer = make_optimizer('my_parts:again', learning_rate=0.5, eps=0.25)
  params = {'a': np.ones(3, np.float32)}
  expected = make_optimizer('adam', learning_rate=0.5, eps=0.25)
  found, _ = optimizer.update(params, optimizer.init(params), params)
  theirs, _ = expected.update(params, expected.init(params), params)
  np.testing.assert_array_equal(found['a'], theirs['a'])


@pytest.mark.parametrize('field', ['search.kind', 'network.recurrent'])
def test_only_parts_may_be_modules(field):
  config = default_fields(
    'muzero' if field == 'search.kind' else 'ppo', 'Anakin'
  )
  config |= {field: 'x:y'}
  with pytest.raises(ValueError, match=f'config.{field}=x:y is unknown'):
    check(config)


def test_another_optimizer_of_an_experiment_has_its_own_numbers():
  config = default_fields('ppo', 'Anakin')
  config['optimizer.name'] = 'radam'  # It has the same fields as Adam.
  assert complete(config)['optimizer.eps'] == 1e-8
  assert complete(config)['optimizer.eps'] == 1e-8
  config['optimizer.eps'] = 0.25
  assert complete(config)['optimizer.eps'] == 0.25


def test_a_run_with_a_field_that_its_part_has_lost_is_refused(parts):
  assert _train('Catch-bsuite', *_PARTS, '--workdir=run') == 0
  config = workdir.read_config('run')
  config['network.gain'] = 2.0
  workdir.write_json('run/config.json', nest(config))
  with pytest.raises(ValueError, match='network.gain is not a field of my_p'):
    podrl.load('run', trust=True)


def test_a_schedule_needs_annealing():
  config = default_fields('sac', 'Anakin')
  config['optimizer.schedule'] = 'cosine'
  with pytest.raises(ValueError, match='cosine needs config.optimizer.anneal'):
    check(config)


@pytest.mark.slow
def test_a_factor_of_0_keeps_the_critic(parts):
  flags = ['--config.optimizer.critic_factor=0', '--steps=512']
  for number in 1, 2:  # Two runs of one seed begin with the same parameters.
    steps = f'--steps={512 * number}'
    flags = ['--config.optimizer.critic_factor=0', steps, f'--workdir={number}']
    tiny = [x for x in _TINY if 'total_env_steps' not in x]
    assert train_tool.run(['podrl train', 'Catch-bsuite', *flags, *tiny]) == 0
  first, second = (podrl.load(str(x)).variables.params for x in (1, 2))

  def compare(group, a, b):
    assert np.array_equal(a, b) == (group == 'critic'), group

  jax.tree.map(compare, actor_critic.groups(first), first, second)
