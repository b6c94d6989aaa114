"""Tests windows, reductions, sinks and the terminal."""

import csv
import functools
import io
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import sys
import threading
import time

import gymnasium
import helpers
import numpy as np
from PIL import Image
import pytest
import rich.console
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from podrl import signals
from podrl.agents import AGENTS
from podrl.envs import SUITES
from podrl.messages import format_size
from podrl.records import merging, recorder, sinks, terminal, workdir
from podrl.records.workdir import WriteError
from podrl.run import train
from podrl.run.config import default_fields
from podrl.types import Episodes, InfoSums, Report

_METRICS = helpers.ROOT / 'docs' / 'reference' / 'metrics.md'


def test_numbers_change_the_unit_when_they_are_rounded():
  values = 999.6, 999_400.0, 999_600.0, 1_234_567.0, 999_600_000.0
  expected = ['999.6', '999k', '1M', '1.23M', '1G']
  assert list(map(terminal.compact, values)) == expected
  sizes = 999.0, 999.6 * 2**20, 1.5 * 2**30
  assert list(map(format_size, sizes)) == ['999 B', '0.976 GiB', '1.5 GiB']


def _report(num_updates, seed, stages=None):
  rng = np.random.default_rng(seed)
  episodes = Episodes(*(rng.integers(0, 9, num_updates) for _ in range(3)))
  return Report(
    {
      'loss': rng.normal(size=num_updates).astype(np.float32),
      'policy_lag_max': rng.integers(0, 3, num_updates),
      'num_actors': rng.integers(1, 9, num_updates),
    },
    episodes,
    64 * num_updates,
    0.5,
    True,
    stages or {},
    {},
  )


def test_a_window_resumes_from_its_progress():
  whole, first, second = (recorder.Window(4, 2) for _ in range(3))
  reports = [
    _report(3, 0, {'time_update': 0.1}),
    _report(5, 1, {'time_update': 0.3}),
  ]
  for report in reports:
    whole.add(report)
  first.add(reports[0])
  second.resume(json.loads(json.dumps(first.progress())))
  second.add(reports[1])
  record = whole.record()
  assert record == second.record()
  # The expected values are sums over both reports.
  episodes = [
    sum(x.sum() for x in pair) for pair in zip(*(r.episodes for r in reports))
  ]
  assert record['env_steps'] == 64 * 8 - episodes[0]
  assert record['num_reset_steps'] == episodes[0]
  assert record['frames'] == 4 * record['env_steps']
  assert record['num_sgd_steps'] == 16
  seconds = sum(x.seconds for x in reports)
  assert record['steps_per_second'] == record['env_steps'] / seconds
  assert record['frames_per_second'] == 4 * record['steps_per_second']
  assert record['updates_per_second'] == 8 / seconds
  predictions = sum(x.num_predictions for x in reports)
  assert record['predictions_per_second'] == predictions / seconds
  np.testing.assert_allclose(
    record['episode_return'], episodes[1] / episodes[0]
  )
  np.testing.assert_allclose(
    record['loss'],
    np.concatenate([r.metrics['loss'] for r in reports]).mean(),
    rtol=1e-6,
  )
  np.testing.assert_allclose(record['time_update'], 0.4)
  # A record has the largest lag, and the last number of actors.
  lags = [r.metrics['policy_lag_max'] for r in reports]
  assert record['policy_lag_max'] == np.concatenate(lags).max()
  assert record['num_actors'] == reports[1].metrics['num_actors'][-1]


def test_a_window_averages_info_over_episodes():
  # Three reports, of 2, 1 and 1 updates; the second one has another name.
  infos = [
    {'v': InfoSums(np.array([3.0, 4.0]), np.array([1, 2]))},
    {'v': InfoSums(np.array([1.0]), np.array([1])), 'w': InfoSums(6.0, 4)},
    {'w': InfoSums(np.zeros(1), np.zeros(1, int))},
  ]
  reports = [_report(n, 0)._replace(info=x) for n, x in zip((2, 1, 1), infos)]
  window = recorder.Window(4, 2)
  window.add(reports[0])
  resumed = recorder.Window(4, 2)
  resumed.resume(json.loads(json.dumps(window.progress())))
  resumed.add(reports[1])
  record = resumed.record()
  # (3 + 4 + 1) / (1 + 2 + 1) = 2, and 6 / 4 = 1.5.
  assert record['env/v'] == 2.0 and record['env/w'] == 1.5
  resumed.add(reports[2])
  assert not any(name.startswith('env/') for name in resumed.record())
  # Earlier versions saved no `info`.
  progress = window.progress()
  del progress['info']
  older = recorder.Window(4, 2)
  older.resume(progress)
  older.add(reports[0])
  assert older.record()['env/v'] == pytest.approx(7 / 3)


def test_info_of_processes_is_added():
  def report(**info):
    sums = {k: InfoSums(np.array(x), np.array(y)) for k, (x, y) in info.items()}
    return _report(2, 0)._replace(info=sums)

  own = report(v=([1.0, 2.0], [1, 1]))
  others = [
    report(v=([3.0, 0.0], [2, 0]), w=([5.0, 5.0], [2, 3])),
    report(w=([0.0, 2.0], [0, 1])),
  ]
  parts = [json.loads(json.dumps(recorder.local_part(x))) for x in others]
  window = recorder.Window(1, 1)
  window.add(recorder.merge_processes(own, parts))
  record = window.record()
  # v: (1 + 2 + 3) / (1 + 1 + 2); w: (5 + 5 + 2) / (2 + 3 + 1).
  assert record['env/v'] == 1.5 and record['env/w'] == 2.0
  np.testing.assert_array_equal(own.info['v'].mean_sum, [1.0, 2.0])


def test_processes_are_merged():
  def report(scale, steps):
    return _report(2, 0)._replace(
      stages={'busy_cores': 0.1 * scale, 'joules': 10.0 * scale},
      own={
        'policy_lag': np.array([1.0, 2.0]) * scale,
        'policy_lag_max': np.array([1, 2]) * scale,
        'num_actors': np.array([2, 2]),
      },
      num_predictions=steps,
    )

  other = json.loads(json.dumps(recorder.local_part(report(3, 20))))
  merged = recorder.merge_processes(report(1, 10), [other])
  assert merged.num_predictions == 30
  np.testing.assert_allclose(merged.stages['busy_cores'], 0.2)
  np.testing.assert_allclose(merged.stages['joules'], 40.0)
  np.testing.assert_allclose(merged.own['policy_lag'], [2.0, 4.0])
  assert merged.own['policy_lag_max'].tolist() == [3, 6]
  assert merged.own['num_actors'].tolist() == [4, 4]
  for total, count in zip(merged.episodes, _report(2, 0).episodes):
    assert total.sum() == 2 * count.sum()


class _Sink:
  """Writes records slowly, and fails at one of them."""

  def __init__(self, fail_at=None):
    self.records, self.threads, self.fail_at = [], set(), fail_at
    self.gate, self.is_closed = threading.Event(), False

  def write(self, record):
    self.gate.wait()
    self.threads.add(threading.current_thread().name)
    if record == self.fail_at:
      raise OSError(28, 'No space left on device')
    self.records.append(record)

  def close(self):
    self.is_closed = True


def test_a_writer_delays_nobody_and_loses_nothing():
  writer, sink = sinks.Writer(), _Sink()
  for i in range(50):
    writer.write([sink], i)  # This does not wait for the sink.
  assert sink.records == []
  sink.gate.set()
  writer.flush()
  assert sink.records == list(range(50))
  assert sink.threads == {'podrl-writer_0'}
  writer.write([sink], 50)
  writer.close([sink])
  assert sink.records[-1] == 50 and sink.is_closed
  assert 'podrl-writer_0' not in {t.name for t in threading.enumerate()}


def test_a_hanging_sink_delays_the_run_when_the_queue_is_full(monkeypatch):
  monkeypatch.setattr(sinks, '_MAX_QUEUED', 3)
  writer, sink = sinks.Writer(), _Sink()
  thread = threading.Thread(
    target=lambda: [writer.write([sink], i) for i in range(4)], daemon=True
  )
  thread.start()
  thread.join(0.3)
  assert thread.is_alive()  # The fourth record waits.
  sink.gate.set()
  thread.join(30)
  writer.close([sink])
  assert not thread.is_alive() and sink.records == list(range(4))


def test_what_a_sink_raises_is_raised():
  writer, sink, other = sinks.Writer(), _Sink(fail_at=1), _Sink()
  sink.gate.set()
  other.gate.set()
  for i in range(2):
    writer.write([sink, other], i)
  with pytest.raises(WriteError, match='_Sink could not write.*No space'):
    writer.flush()
  with pytest.raises(WriteError):
    writer.write([sink], 2)
  with pytest.raises(WriteError):
    writer.close([sink, other])
  assert sink.is_closed and other.is_closed and sink.records == [0]


def _scalars(path, name):
  found = event_accumulator.EventAccumulator(
    str(path), size_guidance={'scalars': 0}
  ).Reload()
  return [(x.step, x.value) for x in found.Scalars(name)]


def test_tensorboard_reads_the_events(tmp_path):
  assert helpers.run(tmp_path / 'run') == 0
  records, _ = helpers.read(tmp_path / 'run')
  for name in ('loss', 'episode_return', 'eval_return', 'steps_per_second'):
    expected = [(r['env_steps'], r[name]) for r in records if name in r]
    found = _scalars(tmp_path / 'run', sinks.tag(name))
    assert len(expected) > 0 and [x for x, _ in found] == [
      x for x, _ in expected
    ]
    np.testing.assert_allclose(
      [x for _, x in found], [x for _, x in expected], rtol=1e-6
    )


def test_tensorboard_shows_the_configuration(tmp_path):
  config = {'env.name': 'Catch', 'seed': 3, 'network.hidden_sizes': (8, 8)}
  config['compilation_cache'] = 'a|b'
  sinks.TensorBoard(str(tmp_path), config).close()
  found = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
  (text,) = found.Tensors('config/text_summary')
  (table,) = text.tensor_proto.string_val
  assert b'\n| network.hidden_sizes | (8, 8) |' in table
  assert table.endswith(b'\n| compilation_cache | a\\|b |')
  plugin = found.SummaryMetadata('_hparams_/session_start_info').plugin_data
  hparams = plugin_data_pb2.HParamsPluginData.FromString(plugin.content)
  values = hparams.session_start_info.hparams
  assert values['seed'].number_value == 3
  assert values['env.name'].string_value == 'Catch'


def test_tensorboard_shows_a_video_of_each_evaluation(tmp_path, monkeypatch):
  logged = []

  class Fake:
    __spec__ = object()
    Video = staticmethod(lambda path: pathlib.Path(path).read_bytes())

    @classmethod
    def init(cls, **_):
      return cls()

    def log(self, values, step):
      logged.extend((step, x) for k, x in values.items() if k == 'Return/video')

    def finish(self):
      pass

  monkeypatch.setitem(sys.modules, 'wandb', Fake)
  arguments = (
    '--config.log.videos=True --config.log.wandb=True '
    '--config.eval.every_env_steps=256'
  )
  assert helpers.run(tmp_path, *arguments.split()) == 0
  records = helpers.read_records(tmp_path)
  evaluated = [x for x in records if 'eval_return' in x]
  paths = [tmp_path / f'videos/{x["num_updates"]}.gif' for x in evaluated]
  assert sorted(tmp_path.glob('videos/*')) == sorted(paths) and len(paths) == 2
  contents = [x.read_bytes() for x in paths]
  steps = [x['env_steps'] for x in evaluated]
  assert logged == [*zip(steps, contents)]
  found = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
  images = found.Images('Return/video')
  assert [(x.step, x.encoded_image_string) for x in images] == logged
  with Image.open(paths[0]) as image:
    assert image.n_frames == 10  # An episode of Catch has nine steps.
    assert image.size == (images[0].width, images[0].height)


def test_metrics_have_groups_of_which_the_first_are_returns():
  tags = {
    name: sinks.tag(name)
    for name in re.findall(
      r'`([a-z_]+)`',
      ''.join(
        line.split('|')[1]
        for line in _METRICS.read_text().splitlines()
        if line.startswith('|')
      ),
    )
  }
  groups = {x.partition('/')[0] for x in tags.values()}
  # TensorBoard sorts by the codes of the characters.
  assert min(groups) == 'Return'
  assert {k for k, x in tags.items() if x.startswith('other/')} == {
    *('gamma', 'lambda_', 'entropy_cost', 'value_cost', 'is_frozen'),
    *('limit', 'limit_sentence'),
  }
  assert {tags[x] for x in ('episode_return', 'eval_return', 'policy_lag')} == {
    *('Return/episode_return', 'Return/eval_return', 'lag/policy_lag'),
  }
  assert sinks.tag('env/is_success') == 'env/is_success'
  assert sinks.tag('checked') == 'other/checked'


@pytest.mark.parametrize(
  'name,arguments',
  [
    ('anakin_catch', ['--config.num_seeds=2', *helpers.TINY]),
    (
      'sebulba_cartpole',
      [
        *('--config.total_env_steps=2e3', '--config.env.num_envs=8'),
        *('--config.unroll_length=16', '--config.log.every_updates=3'),
        '--config.eval.num_episodes=1',
      ],
    ),
  ],
)
def test_each_finished_episode_can_have_a_line(
  name, arguments, tmp_path, capsys
):
  given = [*arguments, '--config.log.episodes=True']
  assert helpers.run(tmp_path, *given, name=name, tiny=False) == 0
  assert 'episodes.csv' not in capsys.readouterr().err
  paths = sorted(x.parent for x in tmp_path.rglob('episodes.csv'))
  assert [x.name for x in paths] == (
    ['seed_0', 'seed_1'] if name == 'anakin_catch' else [tmp_path.name]
  )
  for path in paths:
    with open(path / 'episodes.csv', newline='') as file:
      rows = [
        {k: float(x) for k, x in row.items()} for row in csv.DictReader(file)
      ]
    steps, num_done = 0, 0
    for record in helpers.read_records(path):
      window = [
        x for x in rows if steps < x['env_steps'] <= record['env_steps']
      ]
      steps, num_done = record['env_steps'], num_done + len(window)
      assert num_done == record['num_reset_steps']
      for metric in 'episode_return', 'episode_length':
        if window:
          mean = np.mean([x[metric] for x in window])
          assert record[metric] == pytest.approx(mean, rel=1e-6)
        else:
          assert metric not in record
    assert num_done == len(rows) > 10
  longer = [*arguments, '--config.total_env_steps=3e3', '--resume']
  before = (paths[0] / 'episodes.csv').read_text()
  assert helpers.run(tmp_path, *longer, name=name, tiny=False) == 0
  assert (paths[0] / 'episodes.csv').read_text() == before
  said = capsys.readouterr().err
  assert f'{paths[0]}/episodes.csv gets no further episodes' in said


def test_tensorboard_forgets_what_is_written_again(tmp_path):
  first = sinks.TensorBoard(str(tmp_path), {})
  for step in (10, 20, 30):
    first.write({'env_steps': step, 'loss': 1.0})
  first.close()
  time.sleep(1.1)  # File names are ordered by seconds.
  second = sinks.TensorBoard(str(tmp_path), {}, 11)
  for step in (15, 40):
    second.write({'env_steps': step, 'loss': 2.0})
  second.close()
  assert _scalars(tmp_path, 'loss/loss') == [(10, 1.0), (15, 2.0), (40, 2.0)]


def test_not_a_number_is_null_in_json(tmp_path):
  sink = sinks.Lines(str(tmp_path / 'metrics.jsonl'))
  sink.write(
    {'loss': math.nan, 'x': np.float32(2), 'y': -math.inf, 'n': np.int64(3)}
  )
  sink.close()
  assert json.loads((tmp_path / 'metrics.jsonl').read_text()) == {
    'loss': None,
    'x': 2.0,
    'y': None,
    'n': 3,
  }


def test_lines_before_a_damaged_one_are_kept(tmp_path):
  file = tmp_path / 'metrics.jsonl'
  lines = [f'{{"num_updates": {i}, "env_steps": {i}}}\n' for i in range(5)]
  whole = ''.join(lines[:2]) + '{"num_upd\0\0\n' + ''.join(lines[3:])
  file.write_text(whole)
  sink = sinks.Lines(str(file), 4)
  assert sink.num_lines == 2
  sink.write({'num_updates': 9, 'env_steps': 9})
  assert sink.num_lines == 3
  sink.close()
  expected = ''.join([*lines[:2], '{"num_updates": 9, "env_steps": 9}\n'])
  assert file.read_text() == expected
  assert (tmp_path / 'metrics.jsonl.set_aside').read_text() == whole


def test_lost_decisions_are_reported(tmp_path, capsys):
  file = tmp_path / 'decisions.jsonl'
  file.write_text('{"num_updates": 1, "env_steps": 1}\n')
  sinks.open_lines(str(file), 1, 'decisions').close()
  assert capsys.readouterr().err == ''
  sinks.open_lines(str(file), 3, 'decisions').close()
  assert capsys.readouterr().err.startswith(
    f'warning: {file}: 2 of the 3 decisions before the checkpoint are lost; '
  )


def test_wandb_gets_every_record(tmp_path, monkeypatch):
  class Fake:
    """Stands in for the parts of wandb that podrl uses."""

    runs = []

    @classmethod
    def init(cls, *, project, name, id, dir, config, resume, reinit):
      assert (resume, reinit) == ('allow', 'create_new')
      run = cls()
      run.project, run.id, run.config, run.rows = project, id, config, []
      run.is_finished = False
      cls.runs.append(run)
      return run

    def log(self, record, step):
      self.rows.append((step, record))

    def finish(self):
      self.is_finished = True

  monkeypatch.setitem(__import__('sys').modules, 'wandb', Fake)
  monkeypatch.setattr(Fake, '__spec__', object(), raising=False)
  assert (
    helpers.run(
      tmp_path / 'run', '--config.log.wandb=True', '--config.num_seeds=2'
    )
    == 0
  )
  # The first run has the mean of all seeds; the others have one seed each.
  assert [r.config['seed'] for r in Fake.runs] == [0, 0, 1]
  assert len({r.id for r in Fake.runs}) == 3
  for run, path in zip(Fake.runs, ('', 'seed_0', 'seed_1')):
    records = helpers.read_records(tmp_path / 'run' / path)
    assert run.is_finished and run.project == 'Catch-bsuite'
    assert [s for s, _ in run.rows] == [r['env_steps'] for r in records]
    assert run.rows[-1][1]['loss/loss'] == pytest.approx(records[-1]['loss'])


def test_each_new_run_has_an_id_of_its_own(tmp_path, monkeypatch):
  ids = []

  class Fake:
    @staticmethod
    def init(*, id, **_):
      ids.append(id)

  monkeypatch.setitem(sys.modules, 'wandb', Fake)
  for path in ('first', 'first', 'second', 'first'):
    if len(ids) == 3:  # The run is deleted, and another one has its path.
      shutil.rmtree(tmp_path / 'first')
    (tmp_path / path).mkdir(exist_ok=True)
    sinks.Wandb(str(tmp_path / path), {'env.name': 'Catch'})
  first, resumed, second, other = ids
  assert first == resumed and len({first, second, other}) == 3


def test_an_extra_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(__import__('sys').modules, 'wandb', None)
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  assert (
    helpers.run(tmp_path / 'run', '--config.log.wandb=True') == signals.MISTAKE
  )
  assert "pip install -e '.[wandb]'" in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()


def test_wandb_without_a_login_is_one_line(tmp_path, monkeypatch, capsys):
  class NoLogin:
    __spec__ = object()

    @staticmethod
    def init(**_):
      raise Exception('no API key')

  monkeypatch.setitem(sys.modules, 'wandb', NoLogin)
  assert helpers.run(tmp_path / 'run', '--config.log.wandb=True') == 1
  said = capsys.readouterr().err
  assert said.endswith('at Weights & Biases could not be written: no API key\n')
  assert said.count('\n') == 1


def test_a_sink_that_is_off_writes_nothing(tmp_path):
  assert helpers.run(tmp_path / 'run', '--config.log.tensorboard=False') == 0
  names = {x.name for x in (tmp_path / 'run').iterdir()}
  expected = 'config.json metrics.jsonl checkpoints summary.json .lock'
  assert names == set(expected.split())


def test_a_profile_is_what_tensorboard_and_perfetto_open(tmp_path):
  assert helpers.run(tmp_path / 'run', '--config.log.profile=2') == 0
  records, _ = helpers.read(tmp_path / 'run')
  assert [r['num_updates'] for r in records] == [3, 6, 8]
  found = {
    p.name.split('.', 1)[1]
    for p in (tmp_path / 'run' / 'profile').rglob('*')
    if p.is_file()
  }
  assert 'xplane.pb' in found  # TensorBoard reads it.
  traces = list((tmp_path / 'run' / 'profile').rglob('perfetto_trace.json.gz'))
  import gzip

  events = json.loads(gzip.open(traces[0]).read())['traceEvents']
  assert any('while' in e.get('name', '') for e in events)


def _config(**fields):
  """Makes a configuration of 64 environments x 32 = 2,048 steps per update."""
  config = default_fields('ppo', 'Anakin')
  config['env.name'], config['unroll_length'] = 'Catch-bsuite', 32
  config.update(fields)
  return config


def _lines(
  is_terminal, monkeypatch, records, config=None, exit='done', path='runs/x'
):
  out = io.StringIO()
  console = functools.partial(
    rich.console.Console,
    file=out,
    width=80,
    force_terminal=is_terminal,
    color_system=None,
    legacy_windows=False,
  )
  monkeypatch.setattr(terminal, 'Console', console)
  panel = terminal.Terminal(config or _config(), 100, 2048)
  panel.begin()
  panel.start(0)
  for record in records:
    panel.write(record)
  panel.close()
  train.print_summary(
    panel,
    config or _config(),
    records[-1]
    | {
      'wall_seconds': 3.0,
      'compile_seconds': 1.0,
      'devices': 2,
      'platform': 'cpu',
      'exit': exit,
    },
    path,
    'RESUME',
  )
  return out.getvalue()


_RECORD = {
  'num_updates': 50,
  'env_steps': 101_400,
  'num_reset_steps': 1_000,
  'frames': 493824,
  'steps_per_second': 9876.5,
  'frames_per_second': 39506.0,
  'predictions_per_second': 1e4,
  'updates_per_second': 5.0,
}
_STAGES = {
  f'time_{x}': 0.5
  for x in (
    'environment',
    'inference',
    'actor_waiting',
    'update',
    'learner_waiting',
    'hand_off',
  )
} | {
  'policy_lag': 1.0,
  'policy_lag_max': 1,
  'queue_depth': 0.5,
  'num_actors': 2.0,
}


@pytest.mark.parametrize('more', [{}, _STAGES])
def test_the_panel_fits_80_columns(more, monkeypatch):
  records = [
    _RECORD | more,
    _RECORD
    | more
    | {
      'num_updates': 100,
      'episode_return': 12.34567,
      'eval_return': 1000.0,
      'eval_return_std': 0.0,
      'eval_episodes': 8,
    },
  ]
  shown = _lines(True, monkeypatch, records)
  last = re.sub(r'\x1b\[[?\d]*[a-zA-Z]', '', shown)
  for text in (
    '9.88k steps/s',
    '100%',
    'return 12.35',
    'evaluated 1,000.00',
    '━' * 20,
  ) + (('hand off 50%', 'updates 5/s') if more else ()):
    assert text in shown, text
  assert all(len(line) <= 80 for line in last.splitlines())


def test_plain_output_is_a_line_for_each_record(monkeypatch):
  lines = _lines(False, monkeypatch, [_RECORD, _RECORD | _STAGES]).splitlines()
  assert lines[:3] == [
    'Catch-bsuite, ppo: 100 updates of 2,048 steps (64 environments x 32) '
    '= 204,800 steps, reset steps included',
    'Catch-bsuite, ppo: compiling',
    'Catch-bsuite, ppo: training',
  ]
  assert lines[3].startswith('Catch-bsuite, ppo:  50%  101k steps')
  assert '\x1b' not in ''.join(lines)
  assert 'environment 50%' in lines[5]


_EVALUATED = {'eval_return': 1234.5, 'eval_return_std': 6, 'eval_episodes': 8}


def test_a_summary_adds_up_and_says_what_its_figures_are(monkeypatch):
  text = _lines(False, monkeypatch, [_RECORD | _EVALUATED])
  for row in (
    r'Catch-bsuite, ppo: done',
    r'return +│ 1,234.50 \+- 6.00 \(standard deviation, 8 episodes\)',
    r'steps │ 101,400 \+ 1,000 reset steps = 102,400 \(planned: 204,800\)',
    r'devices +│ 2 x CPU',
  ):
    assert re.search(row, text), text
  dropped = _RECORD | {'env_steps': 103_448, 'num_unrolls_dropped': 2.0}
  text = _lines(False, monkeypatch, [dropped], default_fields('ppo', 'Sebulba'))
  assert re.search(r'reset steps = 104,448, including 2,048[ │\n]+in 2', text)


def test_a_summary_of_several_seeds_says_how_they_differ(monkeypatch):
  # Each seed has a small deviation, but the seeds differ a lot.
  returns = 500.0, 500.0, 500.0, 154.0, 265.0
  records = [
    _RECORD | {'eval_return': x, 'eval_return_std': 3.88, 'eval_episodes': 128}
    for x in returns
  ]
  names = [f'seed_{i}' for i in range(5)]
  merged = merging.merge_seeds(records, names)
  # The mean is 1919 / 5, and the deviations from it are 3 x 116.2, -229.8 and
  # -118.8: 146.58 is the root of (3 x 116.2**2 + 229.8**2 + 118.8**2) / 5.
  assert merged['eval_return'] == 383.8 and merged['eval_episodes'] == 128
  assert merged['eval_return_std'] == pytest.approx(146.580, abs=1e-3)
  assert merged['eval_return_worst'] == 154.0
  assert merged['eval_return_worst_agent'] == 'seed_3'
  # The exact distribution: the mean of each of the 5**5 samples of 5 seeds.
  means = sorted(sum(x) / 5 for x in itertools.product(returns, repeat=5))
  exact = means[len(means) * 25 // 1000], means[len(means) * 975 // 1000]
  found = merged['eval_return_low'], merged['eval_return_high']
  assert found == pytest.approx(exact, abs=10.0)
  text = _lines(False, monkeypatch, [merged], _config(num_seeds=5))
  low, high = (f'{x:.2f}' for x in found)
  spread = f'(95 %: {low} to {high}; worst: 154.00, seed_3)'
  assert f'evaluated 383.80 {spread}\n' in text
  assert 'reset steps included, for each of 5 agents\n' in text
  cells = ' '.join(re.sub('[│\n]', ' ', text).split())
  assert f'383.80 {spread}, mean of 5 seeds with 128 episodes each' in cells
  assert '+-' not in text


def test_members_that_differ_have_no_interval_and_a_nan_is_the_worst():
  records = [
    {'eval_return': x, 'eval_return_std': 0.0} for x in (3.0, None, 1.0)
  ]
  names = [f'member_{i}' for i in range(3)]
  merged = merging.merge_seeds(records, names, are_alike=False)
  assert merged['eval_return_worst_agent'] == 'member_1'
  for name in '', '_std', '_worst':
    assert math.isnan(merged[f'eval_return{name}'])
  assert 'eval_return_low' not in merged
  # An agent without an evaluation is no NaN.
  assert merging.merge_seeds([records[0], {}], names) == {}


@pytest.mark.parametrize(
  'members,are_alike',
  [
    ((), True),
    (({'seed': 0}, {'seed': 1}), True),
    (({'seed': 0, 'agent.gamma': 0.9}, {'seed': 1, 'agent.gamma': 0.9}), True),
    (({'seed': 0, 'agent.gamma': 0.9}, {'seed': 0, 'agent.gamma': 0.5}), False),
  ],
)
def test_agents_are_alike_if_only_their_seeds_differ(members, are_alike):
  config = _config(num_seeds=2)
  config['members'] = members
  assert workdir.are_alike(config) == are_alike


def test_values_of_the_last_seed_do_not_stand_for_all(tmp_path):
  paths = [str(tmp_path / f'seed_{i}') for i in range(2)]
  times = {'wall_seconds': 1.0, 'compile_seconds': 0.5, 'exit': 'done'}
  own = [{'eval_return': None, 'loss': 1.0}, {'eval_return': 7.0, 'only': 2.0}]
  for path, values in zip(paths, own):
    os.mkdir(path)
    workdir.write_json(os.path.join(path, 'summary.json'), values | times)
    record = {'num_updates': 1, 'env_steps': 1} | values
    text = workdir.to_json(record) + '\n'
    workdir.write_text(os.path.join(path, 'metrics.jsonl'), text)
  summary = recorder.join_seeds(str(tmp_path), paths)
  assert math.isnan(summary['eval_return']) and summary['exit'] == 'done'
  assert summary['eval_return_worst_agent'] == 'seed_0'
  assert summary['wall_seconds'] == 2.0
  assert 'only' not in summary and 'loss' not in summary
  written = workdir.read_summary(str(tmp_path))
  assert written['eval_return'] is None


@pytest.mark.parametrize(
  'places,podrl',
  [
    (['bin', 'venv'], 'podrl'),
    (['venv'], '{venv}/podrl'),
    ([], '{venv}/python -m podrl'),
  ],
)
def test_a_finished_run_says_what_comes_next(
  places, podrl, tmp_path, monkeypatch
):
  for name in 'bin', 'venv':
    (tmp_path / name).mkdir()
  for name in places:
    (tmp_path / name / 'podrl').touch(0o755)
  monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
  monkeypatch.setattr(sys, 'executable', str(tmp_path / 'venv' / 'python'))
  podrl = podrl.format(venv=tmp_path / 'venv')
  path = 'runs/' + 80 * 'x' + ' y'
  lines = _lines(False, monkeypatch, [_RECORD], _config(num_seeds=2), path=path)
  assert lines.splitlines()[-3:] == [
    f"{podrl} plot '{path}'",
    f"{podrl} watch '{path}/seed_0'",
    f"{podrl} evaluate '{path}'",
  ]


@pytest.mark.parametrize(
  'exit,is_resumed',
  [('interrupted', True), ('preempted', True), ('failed', False)],
)
def test_a_stopped_run_says_how_to_resume_it(exit, is_resumed, monkeypatch):
  lines = _lines(False, monkeypatch, [_RECORD], exit=exit)
  assert lines.endswith('\nRESUME\n') == is_resumed
  assert 'podrl' not in lines


def test_the_panel_is_shown_when_the_run_begins(monkeypatch):
  started = []
  monkeypatch.setattr(terminal.Live, 'start', lambda x: started.append(x))
  monkeypatch.setenv('FORCE_COLOR', '1')  # It means a terminal, for rich.
  panel = terminal.Terminal(_config(), 100, 2048)
  assert not started  # A finished series shows only its summary.
  panel.begin()
  assert started == [panel._live]


def test_the_reader_of_a_text_may_end_first(monkeypatch):
  reader, writer = os.pipe()
  os.close(reader)
  with open(writer, 'w') as file:
    monkeypatch.setattr(sys, 'stdout', file)
    with pytest.raises(SystemExit):
      terminal.print_text('text')


def test_a_silent_process_prints_nothing(capfd):
  panel = terminal.Terminal(_config(), 100, 2048, is_silent=True)
  panel.begin()
  panel.write(_RECORD)
  times = {'wall_seconds': 3.0, 'compile_seconds': 1.0}
  machine = {'devices': 2, 'platform': 'cpu', 'exit': 'done'}
  panel.print_summary(_RECORD | times | machine, 'runs/x')
  assert capfd.readouterr() == ('', '')


@pytest.mark.parametrize(
  'name,expected',
  [
    ('CartPole-v1', 'CartPole-v1'),
    ('ALE/Pong-v5', 'ALE-Pong-v5'),
    ('my.module:My Env-v0', 'my.module-My-Env-v0'),
  ],
)
def test_a_directory_names_the_task_and_the_agent(name, expected):
  config = default_fields('impala', 'Anakin')
  config['env.name'] = name
  path = workdir.default_path(config)
  assert re.fullmatch(rf'runs/{expected}/impala-[\d-]{{22}}', path)


def test_a_resumed_run_counts_what_is_left_from_there(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(terminal.time, 'perf_counter', lambda: now[0])
  panel = terminal.Terminal(_config(), 100, 2048)
  panel.start(90)
  now[0] = 10.0
  shown = []
  monkeypatch.setattr(panel, 'say', shown.append)
  panel.write(_RECORD | {'num_updates': 95})
  assert ' 10 s left' in shown[0]  # 5 updates took 10 s and 5 are left.


def test_records_of_seeds_are_merged():
  mean = merging.merge_seeds(
    [
      {'env_steps': 4, 'loss': 1.0, 'steps_per_second': 10.0, 'only': 1.0},
      {'env_steps': 6, 'loss': 2.0, 'steps_per_second': 30.0},
    ]
  )
  assert mean == {'env_steps': 5, 'loss': 1.5, 'steps_per_second': 40.0}


def test_steps_and_reset_steps_of_seeds_still_add_up():
  pairs = [(95, 5), (94, 6), (91, 9), (98, 2)]  # The means are 94.5 and 5.5.
  mean = merging.merge_seeds(
    [{'env_steps': x, 'num_reset_steps': y} for x, y in pairs]
  )
  assert mean == {'env_steps': 94, 'num_reset_steps': 6}


@pytest.mark.parametrize(
  'suite,name,agent,expected',
  [
    ('gymnax', 'Catch-bsuite', 'ppo', True),
    ('gymnax', 'Catch-bsuite', 'own', False),
    ('gymnasium', 'CartPole-v1', 'ppo', True),
    ('gymnasium', 'my_envs:Walk-v0', 'ppo', True),
    ('gymnasium', 'Class-v0', 'ppo', False),
    ('gymnasium', 'Text-v0', 'ppo', False),
    ('jax', 'my_envs:walk', 'ppo', True),
    ('jax', '__main__:walk', 'ppo', False),
    ('own', 'Walk', 'ppo', False),
  ],
)
def test_only_commands_that_can_work_are_printed(
  suite, name, agent, expected, monkeypatch
):
  monkeypatch.setitem(AGENTS, 'own', AGENTS['ppo'])
  monkeypatch.setitem(SUITES, 'own', SUITES['gymnax'])
  for own_name, entry in ('Class-v0', object), ('Text-v0', 'my_envs:Walk'):
    spec = gymnasium.envs.registration.EnvSpec(own_name, entry)
    monkeypatch.setitem(gymnasium.registry, own_name, spec)
  config = _config()
  config['env.suite'], config['env.name'], config['agent.name'] = (
    suite,
    name,
    agent,
  )
  lines = _lines(False, monkeypatch, [_RECORD], config).splitlines()
  podrl = terminal.podrl_command()
  printed = [x.split()[1] for x in lines if x.startswith(f'{podrl} ')]
  assert printed == ['plot', *(['watch', 'evaluate'] if expected else [])]
  # A script can resume its own run, but `podrl train` cannot.
  for command in (f'{podrl} train --resume', 'python x.py --resume'):
    monkeypatch.setattr(terminal.Terminal, '_describe_steps', lambda *_: '')
    panel = terminal.Terminal(config, 100, 2048)
    with io.StringIO() as out:
      panel._console.file = out
      ending = {'wall_seconds': 3.0, 'compile_seconds': 1.0, 'devices': 2}
      ending |= {'platform': 'cpu', 'exit': 'interrupted'}
      train.print_summary(panel, config, _RECORD | ending, 'runs/x', command)
      is_shown = expected or command.startswith('python')
      assert (command in out.getvalue()) == is_shown


def test_bootstrap_intervals_of_two_and_of_equal_runs():
  # The mean of two draws of 0 or 10 is 0 or 10 with probability 1/4 each.
  low, high = merging.bootstrap(np.asarray([[0.0, 3.0], [10.0, 3.0]]))
  np.testing.assert_array_equal([low, high], [[0.0, 3.0], [10.0, 3.0]])
  # For many values, the interval is the mean -+ 1.96 standard errors.
  values = np.random.default_rng(1).normal(5.0, 2.0, 400)
  low, high = merging.bootstrap(values)
  error = 1.96 * values.std() / 20
  np.testing.assert_allclose(
    [low, high], [values.mean() - error, values.mean() + error], atol=0.03
  )


def test_a_run_goes_on_without_its_terminal(monkeypatch, tmp_path):
  with open(tmp_path / 'other', 'w') as stderr:
    monkeypatch.setattr(sys, 'stderr', stderr)
    primary, replica = os.openpty()
    with open(replica, 'w') as stream:
      monkeypatch.setattr(sys, 'stdout', stream)
      panel = terminal.Terminal(_config(), 100, 2048)
      panel.begin()
      os.close(primary)  # The terminal ends.
      panel.say('x' * 10000)
      panel.write(
        {'steps_per_second': 1.0, 'frames': 1, 'env_steps': 1}
        | {'num_updates': 1}
      )
      panel.close()
      print('nobody reads this', flush=True)
