"""Tests several seeds of a Sebulba run, trained one after another."""

import json
import os
import shutil
import signal

import helpers
import jax
import numpy as np
import pytest
from test_resume import _HOST

import podrl
from podrl import signals
from podrl.drivers import sebulba
from podrl.records import checkpoint
from podrl.tools import plot

_NAMES = 'seed_0', 'seed_1', 'seed_2'


def _run(workdir, *arguments):
  arguments = *_HOST, '--config.total_env_steps=640', *arguments
  name = 'sebulba_cartpole'
  return helpers.run(workdir, *arguments, name=name, tiny=False)


@pytest.mark.parametrize(
  'is_killed', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_seeds_are_runs_in_turn(is_killed, tmp_path, monkeypatch, capfd):
  workdir, killed = tmp_path / 'run', tmp_path / 'killed'
  seeds = ['--config.num_seeds=3', '--config.seed=4']
  advance = sebulba.Sebulba.advance

  def interrupted(self, *args):
    report = advance(self, *args)
    if (workdir / 'seed_1' / 'metrics.jsonl').exists() and not killed.exists():
      shutil.copytree(workdir, killed)  # Copy what `kill -9` leaves.
      os.kill(os.getpid(), signal.SIGTERM)
    return report

  with monkeypatch.context() as patch:
    patch.setattr(sebulba.Sebulba, 'advance', interrupted)
    assert _run(workdir, *seeds) == signals.PREEMPTED
  workdir = killed if is_killed else workdir
  assert checkpoint.steps(str(workdir / 'seed_0'))[0] == 10
  assert bool(checkpoint.steps(str(workdir / 'seed_1'))) != is_killed
  assert not (workdir / 'summary.json').exists()
  assert not (workdir / 'seed_2' / 'metrics.jsonl').exists()
  finished = (workdir / 'seed_0' / 'metrics.jsonl').read_bytes()
  capfd.readouterr()
  assert _run(workdir, *seeds, '--resume') == 0
  said = capfd.readouterr().err
  assert 'seed_0 is finished' in said
  assert ('seed_1: resuming after update' in said) != is_killed
  assert 'seed_2 trains seed 6' in said
  assert (workdir / 'seed_0' / 'metrics.jsonl').read_bytes() == finished
  runs = [helpers.read(workdir / name) for name in _NAMES]
  records, summary = helpers.read(workdir)
  assert [x['num_updates'] for x in records] == [3, 6, 9, 10]
  for i, record in enumerate(records):
    for name in 'loss', 'steps_per_second':
      mean = np.mean([records[i][name] for records, _ in runs])
      assert record[name] == pytest.approx(mean)
    steps = record['env_steps'] + record['num_reset_steps']
    assert steps == 64 * record['num_updates']
  assert summary['exit'] == 'done' and summary['num_updates'] == 10
  times = [x['wall_seconds'] for _, x in runs]
  assert summary['wall_seconds'] == pytest.approx(sum(times))
  # Each seed gives the same records as a run of that seed alone.
  assert _run(tmp_path / 'alone', '--config.seed=4') == 0
  alone, (first, _) = helpers.read_records(tmp_path / 'alone'), runs[0]
  for name in 'loss', 'grad_norm', 'env_steps', 'episode_return':
    assert [x[name] for x in first] == [x[name] for x in alone]


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """Makes a finished run of two seeds."""
  path = tmp_path_factory.mktemp('seeds') / 'run'
  assert _run(path, '--config.num_seeds=2') == 0
  return path


def test_each_seed_is_drawn_and_loaded(finished):
  found, _ = plot.find_runs([str(finished)])
  assert found == [str(finished / name) for name in _NAMES[:2]]
  first, second = podrl.load(finished, seed=0), podrl.load(finished / 'seed_1')
  assert first.num_updates == 10 and second.config['seed'] == 1
  for seed, policy in ((0, first), (1, second)):
    again = podrl.load(finished, seed=seed)
    assert again.config['seed'] == seed
    jax.tree.map(
      np.testing.assert_array_equal,
      again.variables.params,
      policy.variables.params,
    )
  leaves = [jax.tree.leaves(x.variables.params) for x in (first, second)]
  assert any(np.any(x != y) for x, y in zip(*leaves))
  for seed, message in ((None, 'name one'), (2, 'no agent 2')):
    with pytest.raises(ValueError, match=message):
      podrl.load(finished, seed=seed)


def test_mistakes(finished, tmp_path, capsys):
  total = '--config.total_env_steps'
  for path, arguments, message in (
    (finished, ['--resume'], 'run is finished; to extend it'),
    (finished, ['--resume'], f'use --init_from={finished}/seed_0\n'),
    (
      finished / 'seed_1',
      ['--resume', f'{total}=960'],
      f'seed_1 is one agent of {finished}; use --workdir={finished}\n',
    ),
    (finished, ['--resume', f'{total}=320'], 'is less than the 640 steps'),
    (tmp_path / 'new', [f'--init_from={finished}'], 'seed_0'),
    (
      tmp_path / 'new',
      [f'--init_from={finished}/seed_0', '--config.num_seeds=2'],
      'does not work with config.num_seeds=2',
    ),
    (
      tmp_path / 'new',
      ['--config.num_seeds=2', f'--config.seed={2**32 - 1}'],
      f'must be at most {2**32 - 2}',
    ),
  ):
    assert _run(path, *arguments) == signals.MISTAKE
    said = capsys.readouterr().err
    assert message in said and said.count('\n') == 1
  assert not (tmp_path / 'new').exists()


def test_all_seeds_are_extended(finished, tmp_path):
  path = shutil.copytree(finished, tmp_path / 'run')
  assert _run(path, '--config.total_env_steps=960', '--resume') == 0
  for directory in path, path / 'seed_0', path / 'seed_1':
    records, summary = helpers.read(directory)
    assert [x['num_updates'] for x in records] == [3, 6, 9, 10, 12, 15]
    assert summary['exit'] == 'done' and summary['num_updates'] == 15
    config = json.loads((directory / 'config.json').read_text())
    assert config['total_env_steps'] == 960
