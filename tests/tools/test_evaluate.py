"""Tests `podrl evaluate`: what it prints and writes, and a user's mistakes."""

import json
import os
from unittest import mock

import helpers
import jax
import numpy as np
import pytest

from podrl.run import build, policy
from podrl.run.config import sebulba_config
from podrl.tools import evaluate


def _untrained(path, which, trust):
  """Returns what `policy.load` would for a Sebulba run, with new parameters."""
  config = sebulba_config('ppo')
  config.env.suite, config.env.name = 'envpool', 'FrozenLake-v1'
  config.network.name, config.network.hidden_sizes = 'mlp', (8,)
  spec = build.make_spec(config)
  agent = build.make_agent(config, spec)
  return policy.Policy(config, spec, agent, agent.init(jax.random.key(0)), 8)


@pytest.mark.parametrize('name', ['anakin', 'sebulba'])
def test_the_result_is_printed_and_written(name, tmp_path, capsys, monkeypatch):
  run = tmp_path / name
  if name == 'anakin':
    assert helpers.run(run, '--config.total_env_steps=256') == 0
  else:
    run.mkdir()
    monkeypatch.setattr(policy, 'load', _untrained)
  argv = ['evaluate', str(run), '--episodes=40', '--nogreedy']
  (run / 'evaluation.json').symlink_to(tmp_path / 'elsewhere')
  assert evaluate.run(argv) == 0
  assert not (tmp_path / 'elsewhere').exists()
  found = json.loads((run / 'evaluation.json').read_text())
  returns = np.asarray(found['returns'])
  assert len(returns) == found['episodes'] == 40 and not found['greedy']
  np.testing.assert_allclose(found['return'], returns.mean())
  # The interval of a mean has about two standard errors on each side.
  width = (found['return_high'] - found['return_low']) / 2
  np.testing.assert_allclose(
    width, 1.96 * returns.std() / 40**0.5, rtol=0.2, atol=0.02
  )
  assert f'written: {run}' in capsys.readouterr().out
  with monkeypatch.context() as patch:  # The command fails before it loads.
    patch.setattr(policy, 'load', None)
    assert evaluate.run([*argv, f'--out={tmp_path}/no/x.json']) == 2
  assert 'No such file or directory' in capsys.readouterr().err
  with monkeypatch.context() as patch:  # The disk becomes full.
    patch.setattr(os, 'replace', mock.Mock(side_effect=OSError(28, 'No space')))
    assert evaluate.run([*argv, f'--out={tmp_path}/x.json']) == 2
  said = capsys.readouterr()
  assert 'over 40 episodes' in said.out
  assert said.err == (
    f'error: {tmp_path}/x.json cannot be written: No space; use another --out\n'
  )
  out = tmp_path / 'again.json'
  assert evaluate.run([*argv, f'--out={out}']) == 0  # The episodes repeat.
  assert json.loads(out.read_text()) == found


def test_episodes_can_be_cut_and_agents_unknown(tmp_path, capsys):
  steps = '--config.total_env_steps=256', '--config.eval.max_episode_steps=5'
  assert helpers.run(tmp_path / 'run', *steps) == 0
  argv = ['evaluate', str(tmp_path / 'run'), '--episodes=3']
  assert evaluate.run(argv) == 0  # An episode of Catch has 9 steps.
  message = '3 episodes reached the limit of 5 steps, and counted until then'
  assert message in capsys.readouterr().out
  path = tmp_path / 'run' / 'config.json'
  path.write_text(path.read_text().replace('"ppo"', '"pppo"'))
  assert evaluate.run(argv) == 2
  assert capsys.readouterr().err.startswith(
    'error: config.agent.name=pppo is unknown; did you mean ppo'
  )


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
