"""Tests sweeps: their members, programs, results, resuming and mistakes."""

import json
import os
import shlex
import signal

import helpers
import jax
import numpy as np
import pytest
from rich.console import Console

import podrl
from podrl import signals
from podrl.drivers.anakin import Anakin
from podrl.run.command_line import apply_overrides
from podrl.run.config import default_fields
from podrl.tools import experiments, sweep
from podrl.tools import population as populations

_SMALL = [
  *helpers.TINY[:-1],
  '--config.num_devices=1',
  '--config.log.every_updates=1',
]
_CATCH = str(helpers.ROOT / 'experiments' / 'anakin_catch.py')
_REPLAY = ['--config.replay.min_steps=64', '--config.replay.batch_size=16']


def _sweep(path, *arguments):
  return sweep.run(['sweep', _CATCH, *_SMALL, f'--workdir={path}', *arguments])


def _members(path, agent, num_devices, *arguments):
  """Trains three members; the learning rate of the last one is too high."""
  rates = '--axis=optimizer.learning_rate=0.02,0.01,1e30'
  arguments = [f'--agent={agent}', '--seed=6', *arguments]
  arguments += _REPLAY if agent == 'dqn' else []
  devices = f'--config.num_devices={num_devices}'
  assert _sweep(path / 'many', *arguments, rates, devices) == 0
  arguments += ['--config.optimizer.learning_rate=0.01']
  assert helpers.run(path / 'one', *_SMALL, *arguments, tiny=False) == 0
  return path / 'many' / 'program_0'


@pytest.mark.parametrize(
  'agent,num_devices',
  [
    ('ppo', 1),
    ('dqn', 3),
    *(
      pytest.param(*x, marks=pytest.mark.slow)
      for x in (('ppo', 3), ('impala', 1), ('impala', 3), ('dqn', 1))
    ),
  ],
)
def test_a_member_is_the_single_run(agent, num_devices, tmp_path):
  """After 25 updates with SGD, parameters are equal up to rounding."""
  steps = '--config.total_env_steps=1600', '--config.optimizer.name=sgd'
  program = _members(tmp_path, agent, num_devices, *steps)
  both = [
    jax.tree.leaves(podrl.load(x).variables.params)
    for x in (program / 'member_1', tmp_path / 'one')
  ]
  for x, y in zip(*both, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)
  first, second = (
    helpers.read_records(x) for x in (program / 'member_1', tmp_path / 'one')
  )
  for x, y in zip(first, second, strict=True):
    assert x['env_steps'] == y['env_steps']
    assert x.get('episode_return') == y.get('episode_return')
  # The last member diverged, and the others did not end.
  frozen = [
    helpers.read_records(program / f'member_{i}')[-1]['is_frozen']
    for i in range(3)
  ]
  assert frozen == [0.0, 0.0, 1.0]
  last = podrl.load(program / 'member_2').variables.params
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(last))


@pytest.mark.slow
def test_the_first_gradients_of_a_member_with_adam_are_those_of_the_run(
  tmp_path,
):
  program = _members(tmp_path, 'impala', 1)
  x, y = (
    helpers.read_records(path)[0]['grad_norm']
    for path in (program / 'member_1', tmp_path / 'one')
  )
  np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_sweep_resumes_bit_for_bit(tmp_path, monkeypatch, capfd):
  axes = '--axis=optimizer.learning_rate=log:1e-3:1e-1:2', '--seeds=2'
  axes += ('--axis=num_epochs=1,2',)
  assert _sweep(tmp_path / 'whole', *axes) == 0
  out = capfd.readouterr()
  assert '4 settings x 2 seeds = 8 members in 2 programs' in out.err
  results = json.loads((tmp_path / 'whole' / 'sweep.json').read_text())
  assert len(results['results']) == 4
  for result in results['results']:
    assert len(result['returns']) == 2 and not result['num_diverged']
  best = next(x for x in out.out.splitlines() if x.startswith('best: '))
  assert 'optimizer.learning_rate=0.' in best
  assert os.path.getsize(tmp_path / 'whole' / 'sweep.png') > 10_000
  advance, calls = Anakin.advance, iter(range(100))

  def interrupted(self, *arguments):
    if next(calls) == 11:  # In the second program.
      os.kill(os.getpid(), signal.SIGTERM)
    return advance(self, *arguments)

  with monkeypatch.context() as patch:
    patch.setattr(Anakin, 'advance', interrupted)
    assert _sweep(tmp_path / 'cut', *axes) == signals.PREEMPTED
  out = capfd.readouterr().out
  command = next(x for x in out.splitlines() if '--resume' in x)
  assert f'podrl sweep {_CATCH}' in command and '--seeds' not in command
  assert f'--workdir={tmp_path}/cut ' in command
  assert '--config.num_seeds=2' in command and axes[0] in command
  assert not (tmp_path / 'cut' / 'sweep.json').exists()
  assert _sweep(tmp_path / 'cut', *axes, '--resume') == 0
  assert 'program_0 is finished' in capfd.readouterr().err
  again = json.loads((tmp_path / 'cut' / 'sweep.json').read_text())
  assert again == results


def test_programs_share_what_they_can():
  config = default_fields('ppo', 'Anakin')
  config['seed'], config['num_seeds'] = 3, 2
  settings = [
    {'agent.gamma': gamma, 'unroll_length': length}
    for gamma in (0.9, 0.99)
    for length in (8, 16)
  ]
  programs = sweep.make_programs(settings, config, 0)
  assert [x.fields for x in programs] == [
    {'unroll_length': 8, 'num_seeds': 1},
    {'unroll_length': 16, 'num_seeds': 1},
  ]
  assert programs[0].members == tuple(
    {'agent.gamma': gamma, 'seed': seed}
    for gamma in (0.9, 0.99)
    for seed in (3, 4)
  )
  *_, last = programs = sweep.make_programs(settings, config, 3)
  assert len(programs) == 4  # The last one of each group has a single member.
  assert last.members == () and last.fields['seed'] == 4
  assert last.fields['agent.gamma'] == 0.99
  # With Sebulba, each member has a program of its own.
  config = default_fields('ppo', 'Sebulba')
  config['num_seeds'] = 2
  programs = sweep.make_programs(settings, config, 0)
  found = [{**x.fields} for x in programs]
  assert not any(x.members for x in programs) and len(found) == 8
  for setting in settings:
    for seed in (0, 1):
      assert setting | {'seed': seed, 'num_seeds': 1} in found


def test_the_flags_of_a_setting_give_the_setting():
  config = default_fields('ppo', 'Anakin')
  setting = {'network.hidden_sizes': (64, 32), 'agent.gamma': 0.123456789}
  config, _ = apply_overrides(
    config, shlex.split(experiments.to_flags(setting))
  )
  assert config['network.hidden_sizes'] == (64, 32)
  assert config['agent.gamma'] == 0.123456789


def test_random_settings_are_in_their_range_and_depend_on_the_seed():
  config = default_fields('ppo', 'Anakin')
  axes = [
    sweep.parse_axis(x, config, True)
    for x in (
      'optimizer.learning_rate=log:1e-5:1e-1',
      'agent.gamma=linear:0.5:1',
      'num_epochs=1,2',
    )
  ]
  settings = sweep.make_settings(axes, 2000, 0)
  assert all(x == float(f'{x:.6g}') for x in settings[0].values())
  rates, gammas, epochs = np.array([[*x.values()] for x in settings]).T
  # Half of the rates are below the geometric mean of the ends.
  assert np.mean(rates < 1e-3) == pytest.approx(0.5, abs=0.05)
  assert rates.min() >= 1e-5 and rates.max() <= 1e-1
  assert gammas.mean() == pytest.approx(0.75, abs=0.01)
  # No setting is drawn twice.
  assert len(sweep.make_settings(axes[2:], 8, 0)) == 2
  assert {*epochs} == {1, 2}
  assert settings == sweep.make_settings(axes, 2000, 0)
  assert settings != sweep.make_settings(axes, 2000, 1)


def test_a_list_of_numbers_is_spaced_evenly():
  axis = 'optimizer.learning_rate=log:1e-4:1e-1:4', 'unroll_length=linear:2:8:4'
  logarithmic, linear = (
    sweep.parse_axis(x, default_fields('ppo', 'Anakin'), False).values
    for x in axis
  )
  assert logarithmic == (1e-4, 1e-3, 1e-2, 1e-1)
  assert linear == (2, 4, 6, 8) and isinstance(linear[0], int)


@pytest.mark.parametrize(
  'arguments,message',
  [
    ([], 'give an axis, for example --axis=optimizer.learning_rate='),
    (['--axis=agent.gama=0.9,1'], 'did you mean agent.gamma'),
    (['--axis=agent.gamma=high'], 'is not of type float'),
    (['--axis=agent.gamma=0.9,0.9'], 'has a value twice'),
    (['--axis=agent.gamma=2,3'], 'config.agent.gamma=2.0 must be at least 0'),
    (['--axis=agent.gamma={[]:1}'], 'is not of type float'),
    (['--axis=network.name=mlp,foo'], 'config.network.name=foo is unknown'),
    (['--axis=agent.gamma=log:0:1:3'], 'with LOW < HIGH'),
    (['--axis=agent.gamma=log:0.1:1'], 'must be agent.gamma=log:LOW:HIGH:N'),
    (['--axis=agent.gamma=linear:0:1:1'], 'whole number of values'),
    (['--axis=agent.gamma=linear:0:1:inf'], 'whole number of values'),
    (['--axis=agent.gamma=linear:0:1:2.5'], 'whole number of values'),
    (['--axis=total_env_steps=1e5,2e5'], 'use --steps=N'),
    (['--axis=network.name=linear:0:1:2'], 'network.name is not a number'),
    (['--axis=seed=1,2'], 'use --seeds=N'),
    (['--random=2', '--axis=num_epochs=linear:1:8'], 'num_epochs is an integ'),
    (['--axis=optimizer.anneal=linear:0:1:2'], 'anneal is not a number'),
    (
      ['--axis=agent.gamma=0.5,0.9', '--config.agent.gamma=0.9'],
      'set a field only once',
    ),
    (['--axis=agent.gamma=0.9', '--init_from=x'], '--init_from does not work'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
  arguments, message, tmp_path, capsys
):
  assert _sweep(tmp_path / 'run', *arguments) == 2
  stderr = capsys.readouterr().err.splitlines()
  assert message in stderr[-1] and stderr[-1].startswith('error: ')
  assert not (tmp_path / 'run' / 'program_0' / 'metrics.jsonl').exists()


def test_a_directory_with_another_sweep_is_refused(tmp_path, capsys):
  axis = '--axis=agent.gamma=0.9,0.99'
  env = '--config.env.name=UmbrellaChain-bsuite'
  assert _sweep(tmp_path, axis, env) == 0
  results = (tmp_path / 'sweep.json').read_text()
  for arguments, message in (
    ([axis, env], 'already contains a sweep; add --resume'),
    ([axis, '--resume'], 'program_0 does not belong'),
    (
      ['--axis=agent.gamma=0.9,0.8', env, '--resume'],
      'program_0 does not belong',
    ),
    ([axis, env, '--agent=impala', '--resume'], 'program_0 does not belong'),
    (
      [axis, env, '--config.num_epochs=3', '--resume'],
      'program_0 does not belong',
    ),
    (
      ['--axis=optimizer.max_grad_norm=1,2', env, '--resume'],
      'program_0 does not belong',
    ),
  ):
    capsys.readouterr()
    assert _sweep(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
  command = ['sweep', _CATCH, *_SMALL, axis, '--resume']
  assert sweep.run(command) == 2
  assert 'give --workdir' in capsys.readouterr().err
  assert (tmp_path / 'sweep.json').read_text() == results
  # A resumed sweep keeps the settings of each member.
  more = '--resume', '--config.total_env_steps=1024'
  assert _sweep(tmp_path, axis, env, *more) == 0
  gammas = [
    json.loads((tmp_path / f'program_0/member_{i}/config.json').read_text())
    for i in range(2)
  ]
  assert [x['agent']['gamma'] for x in gammas] == [0.9, 0.99]


def test_a_program_that_diverges_does_not_end_the_sweep(tmp_path, capsys):
  rates = '--axis=optimizer.learning_rate=1e30,0.01', '--per_program=1'
  arguments = *rates, '--config.optimizer.name=sgd', '--agent=impala'
  assert _sweep(tmp_path, *arguments) == 0
  err = capsys.readouterr().err
  message = 'the loss or gradient of seed 0 is NaN or infinite at update 2'
  assert f'program_0: {message}' in err
  assert _sweep(tmp_path, *arguments, '--resume') == 0
  assert 'program_0 is finished' in capsys.readouterr().err
  results = json.loads((tmp_path / 'sweep.json').read_text())['results']
  assert [x['num_diverged'] for x in results] == [1, 0]
  assert [len(x['returns']) for x in results] == [0, 1]
  # A return that is NaN is null in the records.
  path = tmp_path / 'program_1' / 'metrics.jsonl'
  first, *rest = map(json.loads, path.read_text().splitlines())
  first['episode_return'] = None
  path.write_text('\n'.join(map(json.dumps, [first, *rest])) + '\n')
  assert _sweep(tmp_path, *arguments, '--resume') == 0


def test_a_sweep_whose_members_all_diverge_has_a_table(tmp_path, capsys):
  arguments = '--axis=optimizer.learning_rate=1e30,1e29', '--agent=impala'
  assert _sweep(tmp_path, *arguments, '--config.optimizer.name=sgd') == 0
  results = json.loads((tmp_path / 'sweep.json').read_text())['results']
  assert [x['num_diverged'] for x in results] == [1, 1]
  assert os.path.getsize(tmp_path / 'sweep.png') > 1_000


_EVOLVING = [
  '--random=4',
  '--evolve_every=1.28e2',
  '--axis=optimizer.learning_rate=log:1e-4:1e30',
  '--axis=agent.gamma=0.9,0.99',
]


def _decisions(path):
  lines = (path / 'program_0' / 'decisions.jsonl').read_text().splitlines()
  kept = 'num_updates', 'env_steps', 'scores', 'parents', 'hyperparams'
  return [{k: json.loads(x)[k] for k in kept} for x in lines]


def test_a_population_evolves_and_resumes_bit_for_bit(
  tmp_path, monkeypatch, capfd
):
  assert _sweep(tmp_path / 'whole', *_EVOLVING) == 0
  out = capfd.readouterr().out
  assert 'median return: ' in out and 'ancestor' in out
  decisions = _decisions(tmp_path / 'whole')
  # 8 updates of 64 steps; nothing evolves at the end.
  assert [x['num_updates'] for x in decisions] == [2, 4, 6]
  for x in decisions:
    assert np.sum(np.array(x['parents']) != range(4)) == 1
  gammas = {*decisions[-1]['hyperparams']['gamma']}
  assert gammas <= {float(np.float32(x)) for x in (0.9, 0.99)}
  contents = json.loads((tmp_path / 'whole' / 'population.json').read_text())
  rates = np.array(contents['values']['optimizer.learning_rate'])
  assert rates.shape == (4, 4)
  np.testing.assert_allclose(
    rates[:, -1], decisions[-1]['hyperparams']['learning_rate']
  )
  assert os.path.getsize(tmp_path / 'whole' / 'population.png') > 10_000
  advance, calls = Anakin.advance, iter(range(100))

  def interrupted(self, *arguments):
    reports = advance(self, *arguments)
    if next(calls) == 4:
      os.kill(os.getpid(), signal.SIGTERM)
    return reports

  with monkeypatch.context() as patch:
    patch.setattr(Anakin, 'advance', interrupted)
    assert _sweep(tmp_path / 'cut', *_EVOLVING) == signals.PREEMPTED
  assert '--evolve_every=128' in capfd.readouterr().out
  assert _sweep(tmp_path / 'cut', *_EVOLVING, '--resume') == 0
  again = json.loads((tmp_path / 'cut' / 'population.json').read_text())
  assert again == contents
  assert _decisions(tmp_path / 'cut') == decisions
  for i in range(4):
    both = [
      jax.tree.leaves(
        podrl.load(tmp_path / x / 'program_0' / f'member_{i}').variables.params
      )
      for x in ('whole', 'cut')
    ]
    for x, y in zip(*both, strict=True):
      np.testing.assert_array_equal(x, y)


def test_the_table_of_a_population_fits_into_80_columns():
  values = {
    'agent.gamma': np.array([[0.957327, 0.946125]]),
    'optimizer.learning_rate': np.array([[0.000644704, 0.000112094]]),
  }
  steps, parents, returns = (
    np.arange(2),
    np.array([[0, 0]]),
    np.array([-1234.5]),
  )
  population = populations.Population(
    [*values], steps, values, parents, returns
  )
  console = Console(width=80)
  with console.capture() as capture:
    console.print(populations.table(population))
  cells = '0 -1,234.50 0 0 0.957327 0.946125 0.000644704 0.000112094'
  assert capture.get().splitlines()[-1].split() == cells.split()


def test_a_population_waits_for_an_episode_of_each_member(tmp_path):
  # Episodes end in the slots 10, 20 ... 50 of an environment. An update has 8
  # slots, so no episode ends in the updates 1 and 6.
  arguments = [*_EVOLVING, '--axis=optimizer.learning_rate=log:1e-4:1e-2']
  arguments[1:3] = ['--evolve_every=64']
  assert _sweep(tmp_path, *arguments) == 0
  decisions = _decisions(tmp_path)
  assert [x['num_updates'] for x in decisions] == [2, 3, 4, 5, 7]
  assert np.isfinite([x['scores'] for x in decisions]).all()
  # A return that is NaN is null in the records, and the lowest.
  program = tmp_path / 'program_0'
  path = program / 'member_2' / 'metrics.jsonl'
  *rest, last = map(json.loads, path.read_text().splitlines())
  last['eval_return'] = None
  path.write_text('\n'.join(map(json.dumps, [*rest, last])) + '\n')
  assert populations.read(str(program)).returns[2] == -np.inf


@pytest.mark.slow
def test_an_extended_population_goes_on_learning(tmp_path, capsys):
  arguments = [*_EVOLVING, '--agent=impala']
  arguments[2] = '--axis=optimizer.learning_rate=log:1e-3:1e-2'
  assert _sweep(tmp_path, *arguments) == 0
  first = podrl.load(tmp_path / 'program_0' / 'member_0').variables
  assert (
    _sweep(tmp_path, *arguments, '--resume', '--config.total_env_steps=1024')
    == 0
  )
  last = podrl.load(tmp_path / 'program_0' / 'member_0').variables
  # Annealed for 512 steps, the learning rate would be 0 from there on.
  differences = jax.tree.map(lambda x, y: abs(x - y).max(), first, last).params
  assert max(jax.tree.leaves(differences)) > 1e-4
  names = {*_decisions(tmp_path)[-1]['hyperparams']}
  assert 'learning_rate' in names and 'anneal_steps' not in names
  # Members have hyperparameters of their own, so a new value is refused.
  more = '--config.total_env_steps=2048', '--config.agent.value_cost=0.25'
  assert _sweep(tmp_path, *arguments, '--resume', *more) == 2
  assert 'value_cost is 0.5 in the run, but 0.25' in capsys.readouterr().err


@pytest.mark.slow
def test_members_on_several_devices_evolve_in_the_same_way(tmp_path):
  arguments = [*_EVOLVING, '--config.optimizer.name=sgd', '--agent=impala']
  arguments[2] = '--axis=optimizer.learning_rate=log:1e-4:1e-2'
  one, two = tmp_path / 'one', tmp_path / 'two'
  assert _sweep(one, *arguments) == 0
  assert _sweep(two, *arguments, '--config.num_devices=2') == 0
  for x, y in zip(_decisions(one), _decisions(two), strict=True):
    assert x['parents'] == y['parents']
    is_copy = [i for i, parent in enumerate(x['parents']) if parent != i]
    assert is_copy == [np.argmin(x['scores'])]
    np.testing.assert_allclose(x['scores'], y['scores'], rtol=1e-5)


@pytest.mark.parametrize(
  'arguments,message',
  [
    (
      ['--axis=agent.gamma=0.9,0.99'],
      'needs --random and an axis with a range',
    ),
    (
      ['--random=2', '--axis=optimizer.max_grad_norm=linear:1:2'],
      'only axes of agent.clip, agent.entropy_cost',
    ),
    (
      ['--random=2', '--per_program=1', '--axis=agent.gamma=linear:0:1'],
      'needs one program with several members',
    ),
  ],
)
def test_members_that_cannot_evolve_are_refused(
  arguments, message, tmp_path, capsys
):
  assert _sweep(tmp_path / 'run', '--evolve_every=128', *arguments) == 2
  assert message in capsys.readouterr().err


def test_the_command_of_a_program_quotes_its_experiment(tmp_path):
  path = tmp_path / 'my dir' / 'catch.py'
  path.parent.mkdir()
  path.symlink_to(_CATCH)
  _, command_line = sweep._experiment(['podrl sweep', str(path)])
  assert command_line.command.endswith(f"podrl sweep '{path}'")
