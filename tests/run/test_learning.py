"""Agents learn: thresholds on a small environment, with fixed seeds."""

import json

import pytest
from test_train import _get_config

from podrl.run import train


@pytest.mark.parametrize('agent', ['ppo', 'impala', 'a2c'])
def test_catch_is_solved(agent, tmp_path):
  argv = [
    'anakin_catch.py',
    f'--agent={agent}',
    f'--workdir={tmp_path}/run',
    '--config.seed=1',
    '--config.num_devices=2',
  ]
  assert train.run(_get_config('anakin_catch'), argv) == 0
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  # A random policy gets about -0.6, the best possible is 1.
  assert summary['eval_return'] >= 0.95
  assert summary['num_params'] > 0 and summary['platform'] == 'cpu'


def _evaluated(name, tmp_path, *arguments):
  """The evaluated return of an experiment."""
  argv = [f'{name}.py', f'--workdir={tmp_path}/run', *arguments]
  argv += ['--config.num_devices=2'] if name.startswith('anakin') else []
  assert train.run(_get_config(name), argv) == 0
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  return summary['eval_return']


@pytest.mark.parametrize(
  'agent,core',
  [
    ('ppo', 'gru'),
    ('impala', 'lstm'),
    pytest.param('impala', 'gru', marks=pytest.mark.slow),
    pytest.param('a2c', 'lstm', marks=pytest.mark.slow),
  ],
)
def test_a_memory_recalls_what_was_shown(agent, core, tmp_path):
  # Right is 1, wrong is -1; by chance it would be 0.
  assert (
    _evaluated(
      'anakin_memory_chain',
      tmp_path,
      f'--agent={agent}',
      '--config.seed=1',
      '--config.total_env_steps=150_000',
      f'--config.network.recurrent={core}',
    )
    >= 0.9
  )


@pytest.mark.parametrize(
  'agent', ['impala', pytest.param('ppo', marks=pytest.mark.slow)]
)
def test_without_a_memory_there_is_nothing_to_recall(agent, tmp_path):
  assert (
    _evaluated(
      'anakin_memory_chain',
      tmp_path,
      f'--agent={agent}',
      '--config.seed=1',
      '--config.total_env_steps=150_000',
      '--config.eval.num_episodes=1024',
      '--config.network.recurrent=none',
    )
    <= 0.2
  )


def test_a_pendulum_is_swung_up_and_held(tmp_path):
  # A random policy gets about -1,200.
  assert _evaluated('anakin_pendulum', tmp_path, '--config.seed=1') >= -250


@pytest.mark.slow
@pytest.mark.parametrize('seed', [1, 2, 3])
@pytest.mark.parametrize(
  'arguments,threshold',
  [
    (['anakin_pendulum'], -250),
    (['anakin_pendulum', '--config.env.name=MountainCarContinuous-v0'], 85),
    (['anakin_pendulum', '--config.network.distribution=tanh_gaussian'], -250),
    (['anakin_memory_chain', '--agent=impala'], 0.9),
    (['sebulba_half_cheetah'], 1500),
  ],
)
def test_memory_and_continuous_control_are_learnt(
  arguments, threshold, seed, tmp_path
):
  name, *arguments = arguments
  assert (
    _evaluated(name, tmp_path, f'--config.seed={seed}', *arguments) >= threshold
  )


@pytest.mark.slow
@pytest.mark.parametrize('seed', [1, 2, 3])
@pytest.mark.parametrize(
  'name,agent,threshold',
  [
    ('anakin_cartpole', 'ppo', 475),
    ('anakin_cartpole', 'impala', 475),
    ('anakin_cartpole', 'a2c', 475),
    ('anakin_pong', 'ppo', 900),
    ('anakin_pong', 'impala', 900),
    ('sebulba_cartpole', 'ppo', 475),
  ],
)
def test_larger_tasks_are_solved(name, agent, threshold, seed, tmp_path):
  assert (
    _evaluated(name, tmp_path, f'--agent={agent}', f'--config.seed={seed}')
    >= threshold
  )
