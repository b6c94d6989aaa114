"""Tests learning curves: reading, grouping, intervals, pictures, mistakes."""

import inspect
import json
import os
import re
import sys

import numpy as np
import pytest

from podrl import tools
from podrl.tools import plot


def _write(path, *, seed=0, agent='ppo', shift=0.0, **fields):
  """Writes a run of three records and one incomplete record."""
  path.mkdir(parents=True)
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
      'limit': 'cores',
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
        {'env': {'name': 'Pong', 'suite': 'envpool', 'options': {}}},
      ]
    )
  ]
  groups = plot.group_runs(runs)
  assert [(g.task, len(g.runs)) for g in groups] == [
    ('Catch', 2),
    ('Catch', 1),
    ('Catch', 1),
    ('Catch', 1),
    ('Pong (None)', 1),
    ('Pong (envpool)', 1),
  ]
  assert [g.label for g in groups] == [
    'ppo, num_epochs=1',
    'ppo, num_epochs=4',
    'impala',
    'ppo, num_epochs=1',
    'ppo',
    'ppo',
  ]


def test_curves_are_joined_where_all_runs_have_been(tmp_path):
  runs = [
    plot.read_run(_write(tmp_path / str(i), seed=i, shift=i)) for i in range(3)
  ]
  short = runs[2]._replace(records=runs[2].records[:2])
  points, returns = plot.training_curve([*runs[:2], short], 'env_steps')
  assert (points[0], points[-1]) == (100.0, 200.0)
  # Run i starts at the return 10 + i, and gains 10 in 100 steps.
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
    ([], 'no run is given'),
    (['nowhere'], 'nowhere cannot be read: No such file'),
    (['nothing'], 'nothing is not a run and contains no run'),
    (['a', 'a', '--out=a'], 'must end in .png or .svg'),
    (['a', '--out=d.png'], 'd.png cannot be written: Is a directory'),
    (['a', '--out=x.gif'], 'must end in .png or .svg'),
    (['a', '--x=frames'], 'should be one of'),
    (['a', '--y=2'], '--y=2 is in no record'),
    (['a', '--y='], '--y names no metric'),
    (['a', '--y=limit'], '--y=limit is in no record; '),
    (['empty'], 'has no return yet'),
    (['damaged'], 'damaged in line 2'),
    (['a', '--out=no/x.png'], 'no/x.png cannot be written: No such file or d'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
  arguments, message, tmp_path, capsys, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(plot, 'draw', lambda *_: pytest.fail('drawn'))
  (tmp_path / 'nothing').mkdir()
  (tmp_path / 'd.png').mkdir()
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


def test_a_directory_stands_for_the_runs_in_it_at_any_depth(tmp_path):
  names = ['a', 'b/c/d', 'b/e']
  for name in names:
    _write(tmp_path / name)
  _write(tmp_path / 'five/seed_0')
  _write(tmp_path / 'five/seed_1')
  (tmp_path / 'five/config.json').write_text('{}')
  _write(tmp_path / 'a' / 'checkpoints')  # A directory inside a run is no run.
  (tmp_path / 'b' / 'circle').symlink_to(tmp_path)
  (tmp_path / 'b' / 'lost').symlink_to(tmp_path / 'nowhere')
  expected = [*names, 'five/seed_0', 'five/seed_1']
  paths = [str(tmp_path / x) for x in ('', 'b', 'b/c', 'five/seed_0')]
  found, problems = plot.find_runs(paths)
  assert sorted(found) == [str(tmp_path / x) for x in expected]
  assert problems == []


def test_a_deep_tree_is_searched(tmp_path):
  limit = sys.getrecursionlimit()
  _write(tmp_path / '/'.join('a' * 150) / 'run')
  try:
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    (found,), problems = plot.find_runs([str(tmp_path)])
  finally:
    sys.setrecursionlimit(limit)
  assert found.endswith('a/a/run') and problems == []


def test_a_file_that_cannot_be_written_is_one_line(
  tmp_path, monkeypatch, capsys
):
  def draw(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(plot, 'draw', draw)
  out = tmp_path / 'x.png'
  assert plot.run(['plot', _write(tmp_path / 'a'), f'--out={out}']) == 2
  assert capsys.readouterr().err == (
    f'error: {out} cannot be written: No space left on device; use another '
    '--out\n'
  )


def test_runs_that_cannot_be_drawn_are_skipped(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('good', 'new', 'cut', 'odd', 'locked/x'):
    _write(tmp_path / name)
  (tmp_path / 'new/metrics.jsonl').write_text('')
  (tmp_path / 'cut/config.json').write_text('{"env"')
  (tmp_path / 'odd/metrics.jsonl').write_text(
    '{"env_steps": "x", "num_updates": 1, "episode_return": 1}\n'
  )
  listdir = os.listdir

  def refuse(path):
    if path.endswith('locked'):
      raise PermissionError(13, 'Permission denied')
    return listdir(path)

  monkeypatch.setattr(os, 'listdir', refuse)
  assert plot.run(['plot', '.', 'nowhere']) == 0
  lines = capsys.readouterr().err.splitlines()
  for line, message in zip(
    lines,
    (
      'skipped: ./locked cannot be read: Permission denied',
      'skipped: nowhere cannot be read: No such file or directory',
      'skipped: ./cut/config.json cannot be read: Expecting',
      'skipped: ./new has no return yet',
      'skipped: ./odd/metrics.jsonl is damaged in line 1',
    ),
    strict=True,
  ):
    assert line.startswith(message)
  assert (tmp_path / 'curve.png').exists()
  assert plot.run(['plot', 'cut', 'new']) == 2
  assert capsys.readouterr().err.endswith('none of these runs can be drawn\n')


@pytest.mark.parametrize(
  'name,value',
  [
    ('loss', '[' * 200_000),
    ('loss', '9' * 400),
    ('loss', '9' * 5_000),
    ('loss', '"text"'),
    ('wall_seconds', '"text"'),
    ('episode_return', '{}'),
    ('num_updates', '"text"'),
    ('env_steps', 'null'),
    ('env_steps', '-5'),
    ('env_steps', '1e999'),
    ('num_updates', 'true'),
  ],
)
def test_a_value_that_is_no_number_skips_only_its_run(
  name, value, tmp_path, capsys
):
  for path in 'good', 'odd':
    _write(tmp_path / path)
    file = tmp_path / path / 'metrics.jsonl'
    whole = file.read_text().replace('"limit"', '"loss": 1.0, "limit"')
    first, second, rest = whole.split('\n', 2)
    if path == 'odd':
      second = re.sub(rf'"{name}": [^,}}]+', f'"{name}": {value}', second)
    file.write_text('\n'.join([first, second, rest]))
  assert plot.run(['plot', str(tmp_path), '--y=episode_return,loss']) == 0
  said = capsys.readouterr().err
  assert said == f'skipped: {tmp_path}/odd/metrics.jsonl is damaged in line 2\n'


def test_a_file_that_cannot_be_written_is_noticed_first(tmp_path, monkeypatch):
  file = tmp_path / 'x.png'
  tools.check_out(str(file))
  assert not file.exists()
  file.write_text('a')
  tools.check_out(str(file))
  assert file.read_text() == 'a'

  def refuse(dir):
    raise PermissionError(13, 'Permission denied')

  monkeypatch.setattr(tools.tempfile, 'TemporaryFile', refuse)
  with pytest.raises(ValueError, match='cannot be written: Permission denied'):
    tools.check_out(str(file))


@pytest.mark.parametrize('num_seeds', [1, 2])
def test_a_single_point_is_drawn(num_seeds, tmp_path):
  for seed in range(num_seeds):
    path = tmp_path / str(seed)
    _write(path, seed=seed)
    lines = (path / 'metrics.jsonl').read_text().splitlines()
    (path / 'metrics.jsonl').write_text(lines[seed] + '\n')
  runs = [plot.read_run(str(tmp_path / str(i))) for i in range(num_seeds)]
  points, returns = plot.training_curve(runs, 'env_steps')
  assert points == [100.0] and returns.shape == (num_seeds, 1)


def test_a_run_without_an_episode_shows_its_evaluations(tmp_path):
  path = tmp_path / 'run'
  _write(path)
  text = (path / 'metrics.jsonl').read_text()
  (path / 'metrics.jsonl').write_text(text.replace('episode_', 'own_'))
  assert plot.run(['plot', str(path)]) == 0
  assert os.path.getsize(path / 'curve.png') > 5_000


def test_other_metrics_have_panels_of_their_own(tmp_path, monkeypatch):
  drawn = []

  def draw_group(axes, group, x, y, label, index):
    del group, x, label, index
    drawn.append((axes.get_subplotspec().rowspan.start, y))

  monkeypatch.setattr(plot, '_draw_group', draw_group)
  path = _write(tmp_path / 'run')
  assert plot.run(['podrl plot', path, '--y=num_updates,episode_return']) == 0
  assert drawn == [(0, 'num_updates'), (1, 'episode_return')]
