"""Agents learn: thresholds on a small environment, with fixed seeds."""

import json

import pytest

from podrl import train
from test_train import _get_config


@pytest.mark.parametrize('agent', ['ppo', 'impala', 'a2c'])
def test_catch_is_solved(agent, tmp_path):
  argv = ['anakin_catch.py', f'--agent={agent}', f'--workdir={tmp_path}/run',
          '--config.seed=1', '--config.num_devices=2']
  assert train.run(_get_config('anakin_catch'), argv) == 0
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  # A random policy gets about -0.6, the best possible is 1.
  assert summary['eval_return'] >= 0.95
  assert summary['num_params'] > 0 and summary['platform'] == 'cpu'


@pytest.mark.slow
@pytest.mark.parametrize('seed', [1, 2, 3])
@pytest.mark.parametrize('name,agent,threshold', [
    ('anakin_cartpole', 'ppo', 475), ('anakin_cartpole', 'impala', 475),
    ('anakin_cartpole', 'a2c', 475), ('anakin_pong', 'ppo', 900),
    ('anakin_pong', 'impala', 900), ('sebulba_cartpole', 'ppo', 475)])
def test_larger_tasks_are_solved(name, agent, threshold, seed, tmp_path):
  argv = [f'{name}.py', f'--agent={agent}', f'--workdir={tmp_path}/run',
          f'--config.seed={seed}']
  argv += ['--config.num_devices=2'] if name.startswith('anakin') else []
  assert train.run(_get_config(name), argv) == 0
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['eval_return'] >= threshold
