"""Tests the benchmark of returns: its statistics, and which seeds it trains."""

import csv
import importlib
import sys

from absl import app, flags
from absl.testing import flagsaver
import numpy as np
import pytest
from scipy import stats
import training

_TASK = 'anakin_catch Catch-bsuite'
_NAMES = (
  'tasks agent first_seed num_seeds num_devices one_program workdir'.split()
)


@pytest.fixture(scope='module')
def module():
  # Other benchmarks have flags with the same names.
  others = {n: flags.FLAGS[n] for n in _NAMES if n in flags.FLAGS}
  for name in others:
    delattr(flags.FLAGS, name)
  # A process may run tests of another file between those of this file.
  sys.modules.pop('returns', None)
  yield importlib.import_module('returns')
  for name in _NAMES:
    delattr(flags.FLAGS, name)
  for name, flag in others.items():
    flags.FLAGS[name] = flag


@pytest.fixture
def returns(module, tmp_path, monkeypatch):
  """The benchmark, with files of its own and a row for each of two seeds."""
  for name in ('_CSV', '_PAGE', '_FIGURE'):
    monkeypatch.setattr(module, name, tmp_path / f'{name}.png')
  module._PAGE.write_text(
    f'Before.\n{module._BEGIN}stale\n{module._END}After.\n'
  )
  with module._CSV.open('w', newline='') as file:
    writer = csv.DictWriter(file, module._FIELDS, lineterminator='\n')
    writer.writeheader()
    writer.writerows(_row(seed) for seed in (101, 103))
  monkeypatch.setattr(module, '_train', None)
  with flagsaver.flagsaver():
    yield module


def _row(seed, eval_return='1'):
  curve = ' '.join(['0.5'] * 20)
  values = _TASK, 'a2c', '2', str(seed), eval_return, '640', '2.0', curve
  names = 'task agent num_devices seed eval_return env_steps seconds curve'
  return dict(zip(names.split(), values, strict=True))


def _run(returns, *argv):
  flags.FLAGS(['returns', *argv])
  returns.main(['returns'])
  return [int(row['seed']) for row in returns.read_rows()]


def test_the_table_has_the_statistics_of_its_seeds(returns):
  values = '0.2', '0.95', '0.97', '-4', '1', '0.96', '0.94', '0.99'
  rows = [_row(100 + i, x) for i, x in enumerate(values)]
  rows[0]['seconds'] = '90'
  line = returns.table(rows).splitlines()[-1]
  cells = [x.strip() for x in line.strip('|').split('|')]
  low, high = map(float, cells.pop(6).split(' to '))
  # Without two seeds at each end, the mean is that of 0.94 to 0.97.
  first = [_TASK, 'a2c', '2', '0.95', '5 of 8 (20 planned)']
  assert cells == [*first, '0.955', '-4', '640', '2 s']
  expected = stats.bootstrap(
    (np.array(values, float),),
    lambda x, axis: stats.trim_mean(x, 0.25, axis=axis),
    method='percentile',
    rng=1,
  ).confidence_interval
  assert low == pytest.approx(expected.low, abs=0.1)
  assert high == pytest.approx(expected.high, abs=0.01)
  assert 0.9 < high < 1 and low < 0.5


def test_agents_of_a_task_can_have_different_numbers_of_seeds(returns):
  task = 'anakin_breakout conv Breakout-MinAtar'
  rows = [_row(100, '99') | {'task': task, 'agent': x} for x in ('ppo', 'pqn')]
  ppo, pqn = returns.table(rows).splitlines()[-2:]
  assert '| 1 of 1 (20 planned) |' in ppo and '| 1 of 1 (3 planned) |' in pqn


def test_only_the_missing_seeds_train(returns, monkeypatch):
  calls = []

  def train(task, agent, seeds):
    calls.append((task.name, agent, seeds))
    returns._add_rows([_row(seeds.start)])  # Another process was faster.
    return [_row(seed) for seed in seeds]

  monkeypatch.setattr(returns, '_train', train)
  argv = '--tasks=Catch', '--agent=a2c', '--num_seeds=6'
  assert _run(returns, *argv) == [101, 103, 100, 102, 104, 105]
  assert calls == [
    (_TASK, 'a2c', seeds)
    for seeds in (range(100, 101), range(102, 103), range(104, 106))
  ]
  assert _run(returns, *argv) == [101, 103, 100, 102, 104, 105]
  assert len(calls) == 3 and returns._FIGURE.stat().st_size > 10_000
  page = returns._PAGE.read_text()
  assert page.startswith('Before.\n') and page.endswith('After.\n')
  assert '| 6 of 6 (20 planned) |' in page and 'stale' not in page


def test_a_failed_run_loses_no_row(returns, monkeypatch):
  def train(task, agent, seeds):
    returns._add_rows([_row(7)])
    training.run([sys.executable, '-c', 'raise SystemExit(75)'])

  monkeypatch.setattr(returns, '_train', train)
  with pytest.raises(SystemExit) as ended:
    _run(returns, '--tasks=Catch', '--agent=a2c')
  assert ended.value.code == 75
  assert '| 3 of 3 (20 planned) |' in returns._PAGE.read_text()


@pytest.mark.parametrize(
  'arguments,expected',
  [
    ([], [range(100, 101), range(101, 102)]),
    (['--one_program'], [range(100, 102)]),
  ],
)
def test_seeds_with_replay_train_one_after_the_other(
  arguments, expected, returns, monkeypatch
):
  calls = []
  monkeypatch.setattr(
    returns, '_train', lambda task, agent, seeds: calls.append(seeds) or []
  )
  _run(returns, '--tasks=Catch', '--agent=dqn', '--num_seeds=2', *arguments)
  assert calls == expected


@pytest.mark.parametrize(
  'arguments,message',
  [
    (
      ['--tasks=Catch,'],
      '--tasks= matches none of anakin_cartpole CartPole-v1,',
    ),
    (['--tasks=Katch'], '--tasks=Katch matches none of'),
    (['--tasks=Catch', '--agent=muzero'], 'no such task takes muzero'),
  ],
)
def test_a_choice_of_nothing_is_an_error(returns, arguments, message):
  with pytest.raises(app.UsageError, match=message):
    _run(returns, *arguments)
  assert 'stale' in returns._PAGE.read_text()
