"""The benchmarks run on a small scale; their figures are not checked here."""

import re
import time

from absl import flags
import connect_four
import helpers
import logging_cost
import numpy as np
import overlap
import pytest
import search
import throughput
import unrolls

from podrl.tools import train


@pytest.fixture(autouse=True)
def parsed_flags():
  flags.FLAGS(['test'])


@pytest.mark.parametrize(
  'make_config', [throughput.get_config, throughput.get_sebulba_config]
)
def test_throughput_measures_parts_and_whole(make_config, monkeypatch):
  monkeypatch.setattr(throughput, '_SECONDS', 0.0)  # Each sample is one update.
  config = make_config('CartPole-v1', 8)
  config['unroll_length'], config['num_epochs'] = 8, 1
  config['network.hidden_sizes'] = (16,)
  row = throughput.measure(config, repeats=1)
  # Each of 2 torsos has 4 x 16 + 16 parameters; each of 3 outputs has 16 + 1.
  assert row['num_params'] == 2 * 5 * 16 + 17 * 2 + 17
  acting, update = row['acting'], row['update']
  bound = (
    min(row['environment'], acting, update)
    if make_config is throughput.get_sebulba_config
    else acting * update / (acting + update)
  )
  assert row['share_of_bound'] == pytest.approx(row['training'] / bound)
  assert 0 < row['training'] < np.inf


@pytest.mark.slow  # Sebulba's tests cover what this calls.
@pytest.mark.parametrize('mode', ['deterministic', 'asynchronous'])
def test_overlap_has_parts_and_a_whole(mode, monkeypatch):
  monkeypatch.setattr(overlap, '_STEP_SECONDS', 0.002)
  driver = overlap.make_driver(0.5, mode)
  functions, _, close = throughput.sebulba_programs(driver)
  try:
    for name, least in ('environment', 2 * 10 * 0.002), ('update', 0.02):
      start = time.perf_counter()
      functions[name](2)
      assert time.perf_counter() - start >= least
    functions['acting'](2)
    functions['training'](2)
  finally:
    assert close() == []


@pytest.mark.slow  # The recorder's tests cover what this calls.
@pytest.mark.parametrize('architecture', ['anakin', 'sebulba'])
def test_logging_cost_is_a_ratio_of_rates(architecture):
  config = logging_cost.get_config(architecture)
  config['env.num_envs'], config['unroll_length'] = 8, 8
  ratios = logging_cost.measure(config, 2, 0.2, False)
  assert len(ratios) == 2 and 0.1 < min(ratios) < 10


@pytest.mark.slow  # The tests of the search and of evaluations cover the rest.
def test_the_benchmark_of_searches_prints_a_row_for_each_number(
  tmp_path, capsys
):
  argv = [
    'train',
    'Catch-bsuite',
    '--agent=muzero',
    f'--workdir={tmp_path}/run',
  ]
  argv += [*helpers.TINY, '--config.replay.min_steps=64']
  argv += ['--config.agent.normalize_reward=True']
  assert train.run([*argv, '--config.replay.batch_size=16']) == 0
  picture = tmp_path / 'search.png'
  options = ['--simulations=1,4', '--episodes=8', '--batch=4', '--turns=1']
  flags.FLAGS(['search.py', *options, f'--picture={picture}'])
  capsys.readouterr()
  search.main(['search.py', f'{tmp_path}/run'])
  text = capsys.readouterr().out
  rows = re.findall(r'^\| (\d+) \|.* ([\d.]+) \|$', text, re.M)
  assert [n for n, _ in rows] == ['1', '4']
  assert all(0.05 < float(ratio) < 20 for _, ratio in rows)
  assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_the_benchmark_of_unrolls_has_a_number_for_each_core(capsys):
  flags.FLAGS(['unrolls.py', '--lengths=4', '--width=8', '--rounds=1'])
  unrolls.main(['unrolls.py'])
  head, _, *rows = capsys.readouterr().out.splitlines()
  assert head == '| length | none | gru | lstm | mingru | lru | gtrxl |'
  assert [row.split()[1] for row in rows] == ['4']
  for row in rows:
    assert all(float(x) > 0 for x in row.strip('| ').split(' | '))


def test_the_search_of_connect_four_wins_and_defends():
  """The lowest row is row 5; bit r * 7 + c is a cell."""

  def row(*columns):
    return sum(1 << (5 * 7 + c) for c in columns)

  rng = np.random.default_rng(0)
  # Three in a row: the player who moves wins, and the other must close it.
  assert connect_four._choose(row(0, 1, 2), row(4, 5), 2, rng) == 3
  assert connect_four._choose(row(6, 4), row(0, 1, 2), 2, rng) == 3
  # Two with both ends free become three; one end must be closed now.
  move = connect_four._choose(row(6), row(2, 3), 4, rng)
  assert move in (1, 4)
  assert len(connect_four._LINES) == 69  # Of a board with 6 x 7 cells.
