"""Tests the search for plans, the command's output, and wrong arguments."""

import collections
import io
import itertools
import os
import sys

import gymnasium
import helpers
import numpy as np
import pytest
from rich.console import Console

from podrl.fields import section
from podrl.records import workdir
from podrl.run import build
from podrl.run.command_line import apply_overrides
from podrl.run.config import default_fields
from podrl.tools import balance, experiments
from podrl.tools.balance import Plan

_PLAN = Plan(32, 64, 1, 1, (0,), (0,), 0)


def _near(plan, base, num_cores=4):
  """Returns the neighbours that `is_candidate` would accept on a host."""
  return [
    x
    for x in balance.neighbours(plan, 1)
    if min(x.threads, x.env_threads, x.unroll_length) >= 1
    and x.sizes[0] <= 2 * num_cores
    and x.env_threads <= max(1, num_cores // x.sizes[0])
    and 0.5 <= x.unroll_length / base.unroll_length <= 2
    and 0.5 <= x.batch / base.batch <= 2
  ]


def _reachable(base):
  """Returns all plans that any number of steps leads to."""
  plans, new = {base}, [base]
  while new:
    new = [x for x in {y for z in new for y in _near(z, base)} - plans]
    plans.update(new)
  return plans


def _make_rate(rng, num_cores=4):
  """Makes a host of 4 cores with random costs: plan -> steps per second."""
  step, per_env, inference, per_inference, update, per_slot = (
    np.asarray([300, 10, 300, 3, 3000, 10])
    * 1e-6
    * (10 ** rng.uniform(-0.7, 0.7, 6))
  )

  def rate(plan):
    num_actors, num_envs, length, env_threads = plan.sizes
    # Threads of one actor step its environments together.
    stepping = length * (step + per_env * num_envs / env_threads)
    acting = length * (inference + per_inference * num_envs)
    learning = update + per_slot * plan.batch
    work = num_actors * (acting + length * per_env * num_envs) + learning
    return plan.batch / max(stepping + acting, learning, work / num_cores)

  return rate


def test_the_search_finds_fast_plans_in_spite_of_noise():
  rng = np.random.default_rng(0)
  shares = []
  for _ in range(200):
    rate = _make_rate(rng)

    def run(plan, seconds):
      noise = rng.lognormal(0, 0.04 / np.sqrt(seconds))
      return {'steps_per_second': rate(plan) * noise}

    runs = balance.search(_PLAN, lambda x: _near(x, _PLAN), run)
    assert len(runs) <= balance.MAX_PLANS
    best, *_ = runs
    assert rate(best) >= 0.93 * rate(_PLAN)
    shares.append(rate(best) / max(map(rate, _reachable(_PLAN))))
  assert np.mean(shares) > 0.97 and np.quantile(shares, 0.05) > 0.85


def test_rungs_are_halved_and_the_last_takes_turns():
  calls = []

  def run(plan, seconds):
    calls.append((plan, seconds))
    return {'steps_per_second': float(plan.num_envs + len(calls) % 2)}

  plans = [_PLAN._replace(num_envs=n) for n in range(1000, 0, -50)]
  runs = balance.search(_PLAN, lambda plan: plans, run)
  ranking = list(runs)
  first, others = [plan for plan, _ in calls[:12]], calls[12:]
  assert first == [_PLAN, *plans[:11]] and len(set(first)) == 12
  assert [x for x, _ in others[:6]] == [_PLAN, *plans[:5]]
  assert [x for x, _ in others[6:]] == [_PLAN, *plans[:2]] * 3
  lengths = collections.Counter(seconds for _, seconds in calls)
  assert sum(lengths.values()) == 27
  assert ranking[0] == plans[0] and ranking[-1] == _PLAN
  assert runs[plans[0]]['steps_per_second'] in (1000, 1001)
  # Without other candidates, the search runs only the configured plan.
  slow = balance.search(_PLAN, lambda plan: [], run)
  assert list(slow) == [_PLAN]


def test_a_plan_that_fails_is_left_out(capsys):
  plans = [_PLAN._replace(num_envs=n) for n in (300, 200, 100)]

  def run(plan, seconds):
    if plan.num_envs == 200:
      raise balance.PlanError('200 environments: out of memory')
    return {'steps_per_second': float(plan.num_envs)}

  runs = balance.search(_PLAN, lambda plan: plans, run)
  assert {*runs} == {_PLAN, plans[0], plans[2]}
  assert 'left out: 200 environments: out of memory' in capsys.readouterr().out
  with pytest.raises(balance.PlanError):
    balance.search(plans[1], lambda plan: plans, run)


def test_devices_are_split():
  splits = {x[4:6] for x in balance.neighbours(_PLAN, 4)} - {_PLAN[4:6]}
  every = (0, 1, 2, 3)
  assert splits == {
    (every, every),
    ((0,), (1, 2, 3)),
    ((0, 1), (2, 3)),
  }


def _config(**fields):
  config = default_fields('ppo', 'Sebulba')
  config['env.name'] = 'CartPole-v1'
  return config | fields


def test_candidates_run_stay_near_and_are_what_their_overrides_say():
  # Here, 16 minibatches divide the environments, so small pools do not fit.
  fields = {
    'sebulba.max_lag': 2,
    'network.recurrent': 'gru',
    'num_minibatches': 16,
  }
  config = _config(**fields)
  base = balance.from_config(config)
  plans = [
    x
    for x in {y for x in balance.neighbours(base, 4) for y in (x, base)}
    if balance.is_candidate(config, x, base, 2.0)
  ]
  assert base in plans and len(plans) > 5
  for plan in plans:
    again = _config(**fields)
    again, _ = apply_overrides(
      again, experiments.to_flags(plan.overrides(base)).split()
    )
    assert balance.from_config(again) == plan
    assert 0.5 <= plan.batch / base.batch <= 2
  for change in (
    {'num_envs': 4 * base.num_envs},
    {'num_envs': 2 * base.num_envs, 'unroll_length': base.unroll_length * 2},
    {'threads': 0},
    {'env_threads': 1000},
    {'num_envs': base.num_envs + 1},
  ):
    plan = base._replace(**change)
    assert not balance.is_candidate(config, plan, base, 2.0), change


def test_gymnasium_has_no_environment_threads():
  config = _config(**{'env.suite': 'gymnasium', 'sebulba.env_threads': 1})
  base = balance.from_config(config)
  more = base._replace(env_threads=2)
  assert not balance.is_candidate(config, more, base, 2.0)


def _record(rate):
  shares = dict.fromkeys(('busy_cores', 'busy_actor_devices'), 0.5)
  return shares | {
    'steps_per_second': rate,
    'busy_learner_devices': 1.0,
    'policy_lag': 1.0,
    'limit': 'learner devices',
  }


def test_table_and_picture(tmp_path):
  plans = [
    Plan(128, 512 * n, n, 1, (0,), (0,), 0) for n in (32, 16, 8, 4, 2, 1)
  ]
  runs = {plan: _record(100_000.0 + plan.threads) for plan in plans}
  console = Console(width=80, file=io.StringIO())
  console.print(balance.table(runs, plans[-1]))
  lines = console.file.getvalue().splitlines()
  assert '\u2026' not in console.file.getvalue()  # Nothing is cut off.
  assert [x.split()[0] for x in lines[2:]] == ['1', '2', '3', '4', '5', 'now']
  assert '100k' in lines[2] and 'learner devices' in lines[2]
  path = tmp_path / 'balance.png'
  balance.draw(runs, plans[-1], str(path))
  assert path.read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize(
  'rates, sentence',
  [
    (
      {'Sebulba on cpu': 100.0, 'Anakin on cpu': 150.0},
      'Anakin on cpu learns 1.50 times as fast as Sebulba on cpu.',
    ),
    (
      {
        'Sebulba on gpu': 300.0,
        'Sebulba on cpu': 100.0,
        'Anakin on gpu': 200.0,
      },
      'An accelerator pays off: Sebulba on gpu learns 3.00 times as fast as '
      'Sebulba on cpu.',
    ),
    (
      {'Sebulba on gpu': 110.0, 'Anakin on cpu': 100.0},
      'An accelerator hardly pays off: Sebulba on gpu learns 1.10 times as '
      'fast as Anakin on cpu.',
    ),
    (
      {'Sebulba on gpu': 50.0, 'Sebulba on cpu': 100.0},
      'An accelerator does not pay off: Sebulba on cpu learns 2.00 times as '
      'fast as Sebulba on gpu.',
    ),
    (
      {'Sebulba on cpu': 50.0},
      'No other way to run this experiment was measured.',
    ),
  ],
)
def test_verdict(rates, sentence):
  assert balance.verdict(rates) == sentence


@pytest.fixture
def brief(monkeypatch):
  """Limits a search to two plans, each measured for a moment."""
  monkeypatch.setattr(balance, 'MAX_PLANS', 2)
  monkeypatch.setattr(balance, 'FINAL_ROUNDS', 1)
  monkeypatch.setattr(balance, 'RUNG_SECONDS', (0.05, 0.05, 0.05))


_TINY = [
  '--config.network.hidden_sizes=8',
  '--config.env.num_envs=8',
  '--config.unroll_length=8',
]


def test_the_whole_command(tmp_path, monkeypatch, capsys, brief):
  started, directory = [], tmp_path / 'new'
  monkeypatch.setattr(os, 'execv', lambda _, argv: started.append(argv))
  experiment = 'experiments/sebulba_cartpole.py'
  settings = [
    *_TINY,
    '--config.env.name=Blackjack-v1',  # gymnax does not have it.
    '--config.sebulba.mode=asynchronous',
    '--config.sebulba.autotune=True',
  ]
  options = [f'--out={directory}', '--apply', '--max_lag=2']
  assert balance.run(['balance', experiment, *options, *settings]) == 0
  printed = capsys.readouterr().out
  assert started[0][1:8] == [experiment, *settings]
  # The pasted line has the settings of plan 1, and the experiment accepts it.
  line = (directory / 'balance.txt').read_text()
  assert line.split() == started[0][8:] and f'1  {line}' in printed
  config = helpers.fields_of('sebulba_cartpole')
  config, _ = apply_overrides(config, started[0][2:])
  build.make_run(config)
  assert config['sebulba.max_lag'] == 2
  assert not config['sebulba.autotune']  # A plan has a fixed number of actors.
  assert printed.count('running ') == 2 + 2 + 2
  for text in (
    ' times as fast as configured\n',
    '\nas configured, limit: ',
    '  Sebulba on cpu: ',
    '  Anakin on cpu: not measured: env.name=Blackjack-v1',
  ):
    assert text in printed, text
  assert (directory / 'balance.png').exists()


def test_anakin_has_all_settings_that_are_not_sebulbas():
  config = default_fields('sac', 'Sebulba')
  config['env.name'], config['num_seeds'] = 'Pendulum-v1', 3
  config['replay.batch_size'], config['replay.sgd_steps_per_update'] = 7, 5
  found = balance._anakin_config(config, _PLAN)
  for name in 'replay', 'agent', 'network':
    own = section(config, name)
    assert own and section(found, name) == own
  assert found['env.name'] == 'Pendulum-v1'
  names = 'env.num_envs', 'unroll_length', 'num_seeds'
  sizes = tuple(found[x] for x in names)
  assert sizes == (_PLAN.num_envs, _PLAN.unroll_length, 1)
  assert found['env.suite'] == 'gymnax' and not section(found, 'sebulba')


@pytest.mark.slow
def test_anakin_is_measured_in_a_process_of_its_own(brief):
  config = _config(**{'env.num_envs': 8, 'unroll_length': 8})
  plan = balance.from_config(config)
  lines = balance.compare(config, plan, 1.0, 2.0)
  assert lines[0].startswith('Anakin on cpu learns ')
  assert lines[1] == '  Sebulba on cpu: 1 steps/s, plan 1'
  assert lines[2].startswith('  Anakin on cpu: ') and 'steps/s' in lines[2]


def test_a_loss_that_is_not_finite_ends_the_command(brief, capsys):
  settings = [*_TINY, '--config.optimizer.learning_rate=1e38']
  arguments = ['balance', 'experiments/sebulba_cartpole.py', *settings]
  assert balance.run(arguments) == 2
  error = capsys.readouterr().err
  assert 'the loss or gradient is NaN or infinite' in error
  assert error.count('\n') == 1


class _Fails(gymnasium.Env):
  """An environment whose third step fails."""

  observation_space = gymnasium.spaces.Box(-1, 1, (2,))
  action_space = gymnasium.spaces.Discrete(2)
  num_steps = 0

  def reset(self, *, seed=None, options=None):
    return np.zeros(2, np.float32), {}

  def step(self, action):
    self.num_steps += 1
    if self.num_steps == 3:
      raise RuntimeError('out of fuel')
    return np.zeros(2, np.float32), 0.0, False, False, {}


def test_an_environment_that_fails_ends_the_search_in_a_line():
  gymnasium.register('Fails-v0', _Fails)
  fields = {'env.name': 'Fails-v0', 'env.suite': 'gymnasium'}
  config = _config(**fields, **{'env.num_envs': 8, 'unroll_length': 8})
  with pytest.raises(ValueError, match='^1 actor .*out of fuel .*, in step'):
    balance.find(config, 2.0)


def test_an_actor_that_hangs_is_named(monkeypatch, capsys):
  class Hangs:
    def start(self, restore):
      raise RuntimeError('podrl-actor-1 has not come back')

    def close(self):
      return ['podrl-actor-1']

  run = build.make_run(_config())._replace(driver=Hangs())
  monkeypatch.setattr(build, 'make_run', lambda config: run)
  monkeypatch.setattr(os, '_exit', sys.exit)
  with pytest.raises(SystemExit) as outcome:
    balance.measure(_config(), 1, 1.0)
  assert outcome.value.code == 1
  assert capsys.readouterr().err == (
    'error: podrl-actor-1 did not return: podrl-actor-1 has not come back\n'
  )


def test_ctrl_c_ends_in_a_line(monkeypatch, capsys):
  def find(*_, **__):
    raise KeyboardInterrupt

  monkeypatch.setattr(balance, 'find', find)
  assert balance.run(['balance', 'experiments/sebulba_cartpole.py']) == 130
  assert capsys.readouterr().err == 'interrupted\n'


def test_a_flag_cannot_set_a_value_that_the_field_does_not_allow(capsys):
  path = helpers.ROOT / 'experiments' / 'sebulba_cartpole.py'
  assert balance.run(['balance', str(path), '--max_lag=2000']) == 2
  said = capsys.readouterr().err
  assert 'config.sebulba.max_lag=2000 must be at least 0 and at most' in said


def test_a_run_is_described(tmp_path, capsys):
  path = tmp_path / 'run'
  workdir.make(str(path), _config())
  assert balance.run(['balance', str(path), f'--out={tmp_path}']) == 0
  assert 'has not ended' in capsys.readouterr().out
  (path / 'summary.json').write_text(
    '{"limit": "cores", "limit_sentence": "add some"}'
  )
  assert balance.run(['balance', str(path)]) == 0
  assert capsys.readouterr().out.startswith('limit: cores: add some\n')
  for flag in '--config.seed=1', '--apply', '--agent=ppo', '--max_lag=1':
    assert balance.run(['balance', str(path), flag]) == 2
    said = capsys.readouterr().err
    assert flag.split('=')[0] in said
    assert f'needs an experiment; {path} is a run' in said


def _decision(seconds, tried, is_kept, num_drifts):
  return (
    '{"num_updates": 1, "env_steps": 1, '
    f'"wall_seconds": {seconds}, "tried": {tried}, '
    f'"is_kept": {str(is_kept).lower()}, "num_drifts": {num_drifts}}}\n'
  )


def test_a_run_of_several_seeds_names_one(tmp_path, capsys):
  path = tmp_path / 'run'
  workdir.make(str(path), _config(num_seeds=2))
  assert balance.run(['balance', str(path)]) == 2
  assert f'name one, for example {path}/seed_0' in capsys.readouterr().err


def test_the_decisions_of_a_run_are_drawn(tmp_path, capsys):
  path = tmp_path / 'run'
  fields = {'sebulba.mode': 'asynchronous', 'sebulba.autotune': True}
  workdir.make(str(path), _config(**fields))
  (path / 'metrics.jsonl').touch()
  (path / 'decisions.jsonl').touch()
  assert balance.run(['balance', str(path)]) == 2
  assert 'has no record yet' in capsys.readouterr().err
  (path / 'metrics.jsonl').write_text(
    ''.join(
      f'{{"num_updates": {i}, "env_steps": {i}, "wall_seconds": {i}, '
      f'"steps_per_second": 9, "num_actors": {n}}}\n'
      for i, n in enumerate(itertools.chain([1, 2], [2, 4]))
    )
  )
  assert balance.run(['balance', str(path)]) == 0  # No decision exists yet.
  (path / 'decisions.jsonl').write_text(
    _decision(1, 2, True, 0) + _decision(2, 4, False, 1)
  )
  assert balance.run(['balance', str(path)]) == 0
  assert (path / 'balance.png').read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize(
  'arguments, message',
  [
    ([], 'no file is not an experiment; try experiments/'),
    (['experiments/anakin_breakout.py'], 'uses Anakin'),
    (
      ['experiments/sebulba_cartpole.py', f'--out={__file__}'],
      f'{__file__} cannot be written: File exists; use another --out',
    ),
    (
      ['experiments/sebulba_cartpole.py', '--size_range=nan'],
      '--size_range=nan is not between 1 and',
    ),
    (
      ['experiments/sebulba_cartpole.py', '--size_range=inf'],
      '--size_range=inf is not between 1 and',
    ),
  ],
)
def test_mistakes(arguments, message, capsys):
  assert balance.run(['balance', *arguments]) == 2
  assert message in capsys.readouterr().err
