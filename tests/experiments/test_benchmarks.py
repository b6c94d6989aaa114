"""The benchmarks run on a small scale; their figures are not checked here."""

import time

from absl import flags
import logging_cost
import numpy as np
import overlap
import pytest
import throughput


@pytest.fixture(autouse=True)
def parsed_flags():
  flags.FLAGS(['test'])


@pytest.mark.parametrize(
  'make_config',
  [
    throughput.get_config,
    pytest.param(throughput.get_sebulba_config, marks=pytest.mark.slow),
  ],
)
def test_throughput_measures_parts_and_whole(make_config, monkeypatch):
  monkeypatch.setattr(throughput, '_SECONDS', 0.0)  # Each sample is one update.
  config = make_config('CartPole-v1', 8)
  config.unroll_length, config.num_epochs = 8, 1
  config.network.hidden_sizes = (16,)
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
  functions, close = overlap.parts(0.5, mode)
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
  config.env.num_envs, config.unroll_length = 8, 8
  ratios = logging_cost.measure(config, 2, 0.2, False)
  assert len(ratios) == 2 and 0.1 < min(ratios) < 10
