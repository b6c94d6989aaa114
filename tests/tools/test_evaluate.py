"""`podrl evaluate`: what it prints and writes, and a user's mistakes."""

import json

import helpers
import numpy as np
import pytest

from podrl.tools import evaluate


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """A directory with a tiny run of each architecture."""
  path = tmp_path_factory.mktemp('runs')
  assert helpers.run(path / 'anakin', '--config.total_env_steps=256') == 0
  overrides = (
    'total_env_steps=64 env.num_envs=8 unroll_length=8 env.name=FrozenLake-v1 '
    'eval.num_episodes=2 network.hidden_sizes=8 sebulba.actor_devices=0 '
    'sebulba.learner_devices=0'
  )
  flags = [f'--config.{x}' for x in overrides.split()]
  name = 'sebulba_cartpole'
  assert helpers.run(path / 'sebulba', *flags, name=name, tiny=False) == 0
  return path


@pytest.mark.parametrize('name', ['anakin', 'sebulba'])
def test_the_result_is_printed_and_written(name, runs, tmp_path, capsys):
  out = tmp_path / 'found.json'
  argv = ['evaluate', str(runs / name), '--episodes=40', '--nogreedy']
  assert evaluate.run([*argv, f'--out={out}']) == 0
  found = json.loads(out.read_text())
  returns = np.asarray(found['returns'])
  assert len(returns) == found['episodes'] == 40 and not found['greedy']
  np.testing.assert_allclose(found['return'], returns.mean())
  # An interval of the mean is about two standard errors to each side.
  width = (found['return_high'] - found['return_low']) / 2
  np.testing.assert_allclose(
    width, 1.96 * returns.std() / 40**0.5, rtol=0.2, atol=0.02
  )
  assert str(out) in capsys.readouterr().out
  assert evaluate.run(argv) == 0  # The same episodes, in the default file.
  again = json.loads((runs / name / 'evaluation.json').read_text())
  assert again == found


@pytest.mark.parametrize(
  'arguments,message',
  [
    ([], 'expected one run, got 0'),
    (['a', 'b'], 'expected one run, got 2'),
    (['nowhere'], 'is not a run'),
    (['nowhere', '--episodes=0'], 'not an integer in the range'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
  assert evaluate.run(['evaluate', *arguments]) == 2
  stderr = capsys.readouterr().err
  assert message in stderr and stderr.count('\n') == 1
