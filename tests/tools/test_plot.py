"""Learning curves: reading, grouping, intervals, pictures, mistakes."""

import json

import numpy as np
import pytest

from podrl.tools import plot


def _write(path, *, seed=0, agent='ppo', shift=0.0, **fields):
  """A run of three records and one that is still being written."""
  path.mkdir()
  config = {
    'seed': seed,
    'num_epochs': 1,
    'env': {'name': 'Catch', 'options': {}},
    'agent': {'name': agent, 'gamma': 0.9},
    'log': {'every': seed},
    'network': {'name': 'mlp'},
    'optimizer': {'name': 'adam'},
  }
  (path / 'config.json').write_text(json.dumps(config | fields))
  records = [
    {
      'env_steps': 100 * t,
      'num_updates': t,
      'wall_seconds': 2.0 * t,
      'episode_return': shift + 10.0 * t,
    }
    for t in (1, 2, 3)
  ]
  records[1]['eval_return'] = shift + 50
  records[2]['eval_return'] = shift + 70
  text = '\n'.join(map(json.dumps, records)) + '\n' + '{"env_steps": 40'
  (path / 'metrics.jsonl').write_text(text)
  return str(path)


def test_a_run_is_read_up_to_its_last_whole_record(tmp_path):
  run = plot.read_run(_write(tmp_path / 'a'))
  assert [r['env_steps'] for r in run.records] == [100, 200, 300]
  assert run.config['agent.gamma'] == 0.9 and run.config['seed'] == 0


def test_groups_differ_in_more_than_seeds(tmp_path):
  runs = [
    plot.read_run(_write(tmp_path / str(i), seed=i % 2, **kwargs))
    for i, kwargs in enumerate(
      [
        {},
        {},
        {'num_epochs': 4},
        {'agent': 'impala'},
        {'env': {'name': 'Pong', 'options': {}}},
        {'sebulba': {'max_lag': 1}},
      ]
    )
  ]
  groups = plot.group_runs(runs)
  assert [(g.task, len(g.runs)) for g in groups] == [
    ('Catch', 2),
    ('Catch', 1),
    ('Catch', 1),
    ('Pong', 1),
    ('Catch', 1),
  ]
  assert [g.label for g in groups] == [
    'ppo, num_epochs=1',
    'ppo, num_epochs=4',
    'impala',
    'ppo',
    'ppo, num_epochs=1',
  ]


def test_curves_are_joined_where_all_runs_have_been(tmp_path):
  runs = [
    plot.read_run(_write(tmp_path / str(i), seed=i, shift=i)) for i in range(3)
  ]
  short = runs[2]._replace(records=runs[2].records[:2])
  points, returns = plot.training_curve([*runs[:2], short], 'env_steps')
  assert (points[0], points[-1]) == (100.0, 200.0)
  # Each gains 10 in 100 steps, from 10 on and 0, 1, 2 higher.
  for i, row in enumerate(returns):
    np.testing.assert_allclose(row, points / 10 + i)
  points, _ = plot.training_curve(runs, 'wall_seconds')
  assert (points[0], points[-1]) == (2.0, 6.0)


@pytest.mark.parametrize(
  'suffix,magic', [('png', b'\x89PNG'), ('svg', b'<?xml')]
)
def test_a_picture_and_a_table(suffix, magic, tmp_path, capsys):
  paths = [_write(tmp_path / str(i), seed=i, shift=10.0 * i) for i in range(2)]
  out = tmp_path / f'x.{suffix}'
  assert plot.run(['plot', *paths, f'--out={out}', '--x=wall_seconds']) == 0
  assert out.read_bytes().startswith(magic) and out.stat().st_size > 5000
  text = capsys.readouterr().out
  # The last evaluations are 70 and 80.
  assert '75.00' in text and '70.00 to 80.00' in text and str(out) in text


def test_pictures_lie_beside_their_runs(tmp_path, monkeypatch):
  a, b = _write(tmp_path / 'a'), _write(tmp_path / 'b')
  assert plot.run(['plot', a]) == 0 and (tmp_path / 'a/curve.png').exists()
  monkeypatch.chdir(tmp_path)
  assert plot.run(['plot', 'a', b]) == 0 and (tmp_path / 'curve.png').exists()


@pytest.mark.parametrize(
  'arguments,message',
  [
    ([], 'no run is named'),
    (['nowhere'], 'nowhere is not a run'),
    (['a', '--out=x.gif'], 'must end in .png or .svg'),
    (['a', '--x=frames'], 'should be one of'),
    (['a', '--y=2'], 'y'),
    (['empty'], 'has no return yet'),
    (['damaged'], 'damaged in line 2'),
    (['a', '--out=no/x.png'], 'No such file'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
  arguments, message, tmp_path, capsys, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  _write(tmp_path / 'a')
  _write(tmp_path / 'empty')
  (tmp_path / 'empty' / 'metrics.jsonl').write_text('')
  _write(tmp_path / 'damaged')
  lines = (tmp_path / 'damaged' / 'metrics.jsonl').read_text().split('\n')
  lines[1] = lines[1][:9]
  (tmp_path / 'damaged' / 'metrics.jsonl').write_text('\n'.join(lines))
  assert plot.run(['plot', *arguments]) == 2
  stderr = capsys.readouterr().err
  assert message in stderr and stderr.count('\n') == 1


def test_a_directory_of_runs_stands_for_them(tmp_path):
  for name in 'ab':
    _write(tmp_path / name, seed=ord(name))
  (tmp_path / 'a' / 'checkpoints').mkdir()
  assert plot.find_runs(str(tmp_path)) == [str(tmp_path / x) for x in 'ab']
  assert plot.find_runs(str(tmp_path / 'a')) == [str(tmp_path / 'a')]
  assert plot.find_runs(str(tmp_path / 'c')) == [str(tmp_path / 'c')]
