"""Tests `podrl evaluate`: what it prints and writes, and a user's mistakes."""

import json
import os
from unittest import mock

import helpers
import jax
import numpy as np
import pytest

from podrl.run import build, policy
from podrl.run.config import default_fields
from podrl.tools import evaluate


def _untrained(path, which, trust):
  """Returns what `policy.load` would for a Sebulba run, with new parameters."""
  config = default_fields('ppo', 'Sebulba')
  config['env.suite'], config['env.name'] = 'envpool', 'FrozenLake-v1'
  config['network.name'], config['network.hidden_sizes'] = 'mlp', (8,)
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
    'error: agent=pppo is unknown; did you mean ppo'
  )


@pytest.fixture(scope='module')
def two_seeds(tmp_path_factory):
  """Makes a run of two seeds that have not learned."""
  path = tmp_path_factory.mktemp('two') / 'run'
  seeds = '--config.num_seeds=2', '--config.total_env_steps=64'
  assert helpers.run(path, *seeds) == 0
  return path


def test_several_agents_have_a_mean_an_interval_and_a_worst_one(
  two_seeds, capsys, monkeypatch
):
  compiled, make = [], build.make_evaluate
  monkeypatch.setattr(
    build, 'make_evaluate', lambda *x: compiled.append(x) or make(*x)
  )
  assert evaluate.run(['evaluate', str(two_seeds), '--episodes=30']) == 0
  assert len(compiled) == 1
  said = capsys.readouterr().out.splitlines()
  found = json.loads((two_seeds / 'evaluation.json').read_text())
  assert [*found['agents']] == ['seed_0', 'seed_1'] and found['episodes'] == 30
  means = [np.mean(x['returns']) for x in found['agents'].values()]
  low, high = sorted(means)
  assert found['return'] == pytest.approx((low + high) / 2)
  # Half of the samples of two agents have one of them twice.
  assert (found['return_low'], found['return_high']) == (low, high)
  assert found['return_std'] == pytest.approx((high - low) / 2)
  assert found['return_worst'] == low
  worst = f'seed_{int(np.argmin(means))}'
  assert found['return_worst_agent'] == worst
  assert said[0].startswith('seed_0, after 1 updates: ')
  assert said[2] == (
    f'Catch-bsuite: {(low + high) / 2:.2f} (95 %: {low:.2f} to {high:.2f}; '
    f'worst: {low:.2f}, {worst}), mean of 2 seeds with 30 episodes each'
  )
  # Each agent plays the same episodes as alone.
  out = two_seeds.parent / 'alone.json'
  argv = ['evaluate', str(two_seeds / 'seed_1'), '--episodes=30']
  assert evaluate.run([*argv, f'--out={out}']) == 0
  assert json.loads(out.read_text()) == found['agents']['seed_1']


def test_runs_that_differ_have_no_interval(two_seeds, tmp_path, capsys):
  other = tmp_path / 'other'
  arguments = '--config.total_env_steps=64', '--config.agent.clip=0.3'
  assert helpers.run(other, *arguments) == 0
  capsys.readouterr()
  argv = ['evaluate', str(other), str(two_seeds), '--episodes=3']
  assert evaluate.run([*argv, f'--out={tmp_path}/x.json']) == 0
  found = json.loads((tmp_path / 'x.json').read_text())
  assert len(found['agents']) == 3 and 'return_low' not in found
  said = capsys.readouterr().out.splitlines()
  assert 'mean of 3 agents' in said[3] and '95 %' not in said[3]
  path = other / 'config.json'
  path.write_text(path.read_text().replace('"Catch-bsuite"', '"CartPole-v1"'))
  assert evaluate.run(argv) == 2
  assert 'these runs have different tasks' in capsys.readouterr().err


@pytest.mark.parametrize(
  'arguments,message',
  [
    ([], 'no run is given'),
    (['a', 'b'], 'a is not a run'),
    (['nowhere'], 'is not a run'),
    (['nowhere', '--episodes=0'], 'not an integer in the range'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
  assert evaluate.run(['evaluate', *arguments]) == 2
  stderr = capsys.readouterr().err
  assert message in stderr and stderr.count('\n') == 1
