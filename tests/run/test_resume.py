"""Runs that are stopped, killed or damaged, and gone on with."""

import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from test_train import _TIMINGS, _TINY, _read, _run

import podrl
from podrl.drivers import sebulba
from podrl.drivers.anakin import Anakin
from podrl.records import checkpoint
from podrl.run import loop, train

_ROOT = pathlib.Path(__file__).parents[2]
_HOST = [
  '--config.total_env_steps=1280',
  '--config.env.num_envs=8',
  '--config.unroll_length=8',
  '--config.eval.num_episodes=2',
  '--config.eval.max_episode_steps=4',
  '--config.log.every_updates=3',
  '--config.network.hidden_sizes=8',
  '--config.num_minibatches=1',
  '--config.sebulba.actor_devices=0',
  '--config.sebulba.learner_devices=0',
  '--config.sebulba.threads_per_actor_device=2',
]
_TWENTY = ['--config.total_env_steps=1280', '--config.eval.every_env_steps=448']


def _signal_at(monkeypatch, owner, name, count):
  """SIGTERM in the middle of a function's call of that number."""
  function, calls = getattr(owner, name), iter(range(1, 10**6))

  def interrupted(*args, **kwargs):
    if next(calls) == count:
      os.kill(os.getpid(), signal.SIGTERM)
    return function(*args, **kwargs)

  monkeypatch.setattr(owner, name, interrupted)


def _plain(records):
  return [{k: v for k, v in r.items() if k not in _TIMINGS} for r in records]


def _state(workdir):
  """All files' arrays of the last checkpoint, as orbax reads them."""
  import orbax.checkpoint as ocp

  step = checkpoint.find(str(workdir))
  with ocp.StandardCheckpointer() as reader:
    return [
      reader.restore(workdir / 'checkpoints' / str(step) / item)
      for item in ('params', 'state')
    ]


def _assert_close(a, b, atol):
  a, b = jax.tree.leaves(a), jax.tree.leaves(b)
  assert len(a) == len(b) > 4
  for x, y in zip(a, b):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = map(jax.random.key_data, (x, y))
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)


_IMPALA = [
  '--agent=impala',
  '--config.network.recurrent=gru',
  '--config.agent.normalize_observation=True',
  '--config.agent.normalize_reward=True',
]


@pytest.mark.parametrize(
  'arguments,num_devices',
  [
    (['--agent=ppo'], 1),
    (_IMPALA, 4),
    pytest.param(['--agent=ppo'], 4, marks=pytest.mark.slow),
    pytest.param(_IMPALA, 1, marks=pytest.mark.slow),
    pytest.param(
      ['--agent=ppo', *_IMPALA[1:], '--config.num_minibatches=2'],
      4,
      marks=pytest.mark.slow,
    ),
  ],
  ids=['ppo-1', 'impala-gru-4', 'ppo-4', 'impala-gru-1', 'ppo-gru-4'],
)
def test_anakin_goes_on_bitwise(arguments, num_devices, tmp_path, monkeypatch):
  arguments = [
    *arguments,
    *_TWENTY,
    f'--config.num_devices={num_devices}',
    '--config.checkpoint.every_env_steps=320',
  ]
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert _run(whole, *arguments) == 0
  stops = [  # 20 updates, evaluated at 7, 14 and 20, saved at 5, 10 ...
    (Anakin, 'start', 1),
    (Anakin, 'advance', 3),
    (loop, '_evaluate', 1),
    (checkpoint.Checkpoints, 'save', 2),
    (loop, '_evaluate', 2),
  ]
  codes = []
  for owner, name, count in stops:
    with monkeypatch.context() as patch:
      _signal_at(patch, owner, name, count)
      codes.append(_run(parts, *arguments, '--resume'))
  assert codes == [train.PREEMPTED] * 5
  assert _run(parts, '--resume', *arguments) == 0
  (expected, _), (records, summary) = _read(whole), _read(parts)
  assert [r['num_updates'] for r in expected] == [
    3,
    6,
    7,
    9,
    12,
    14,
    15,
    18,
    20,
  ]
  assert _plain(records) == _plain(expected)
  assert summary['exit'] == 'done'
  _assert_close(_state(parts), _state(whole), 0)


def test_anakin_goes_on_on_other_devices(tmp_path, monkeypatch):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  sgd = ['--agent=impala', '--config.optimizer.name=sgd']
  assert _run(whole, *sgd) == 0
  _signal_at(monkeypatch, Anakin, 'advance', 2)
  assert _run(parts, *sgd) == train.PREEMPTED
  assert _run(parts, *sgd, '--resume', '--config.num_devices=4') == 0
  _assert_close(_state(parts), _state(whole), 1e-6)


def test_sebulba_keeps_what_it_learnt(tmp_path, monkeypatch):
  workdir = tmp_path / 'run'
  run = lambda *args: _run(
    workdir, *_HOST, *args, name='sebulba_cartpole', tiny=False
  )
  states, seeds = [], []
  restore = loop.begin

  def begin(*args):
    state, progress = restore(*args)
    states.append((jax.device_get(state), progress))
    return state, progress

  save = checkpoint.Checkpoints.save

  def saved(self, num_updates, state, progress, best):
    states.append((jax.device_get(state), progress['drivers'][0]))
    return save(self, num_updates, state, progress, best)

  make = train.build.make_host_env
  monkeypatch.setattr(loop, 'begin', begin)
  monkeypatch.setattr(checkpoint.Checkpoints, 'save', saved)
  monkeypatch.setattr(
    train.build,
    'make_host_env',
    lambda config, num, seed, *a, **k: (
      seeds.append(seed),
      make(config, num, seed, *a, **k),
    )[1],
  )
  with monkeypatch.context() as patch:
    _signal_at(patch, sebulba.Sebulba, 'advance', 2)
    assert run() == train.PREEMPTED
  first_seeds = seeds.copy()
  seeds.clear()
  keys = []
  skip = sebulba.Actor.skip
  monkeypatch.setattr(
    sebulba.Actor, 'skip', lambda self, n: (keys.append(n), skip(self, n))
  )
  assert run('--resume') == 0
  (left, left_progress), (found, found_progress) = states[-3:-1]
  _assert_close(left, found, 0)
  assert left_progress == found_progress
  num_updates = int(found.num_updates)
  # Each of two actors contributed one unroll to each update.
  assert keys == found_progress['num_unrolls'] == [num_updates] * 2
  assert first_seeds[:2] == [0, 4] and not set(seeds[:2]) & set(range(8))
  records, summary = _read(workdir)
  # 1280 / (8 x 8) = 20 updates; the rate is annealed over them.
  assert [r['num_updates'] for r in records] == [3, 6, 9, 12, 15, 18, 20]
  last = states[-1][0]
  assert int(last.num_updates) == 20 and summary['exit'] == 'done'
  counts = [
    int(x) for x in jax.tree.leaves(last.opt_state) if x.dtype == np.int32
  ]  # Of the moments, and of the schedule.
  assert counts == [int(last.num_sgd_steps)] * 2
  assert states[-1][1]['num_unrolls'] == [20, 20]


def test_evaluation_keeps_the_best(tmp_path, monkeypatch):
  returns = iter([1.0, 5.0, 3.0, 2.0, 4.0, 0.0])
  monkeypatch.setattr(
    loop,
    '_evaluate',
    lambda *_: [
      {'eval_return': next(returns), 'eval_return_std': 0.0, 'eval_episodes': 1}
    ],
  )
  arguments = [
    '--config.eval.every_env_steps=128',
    '--config.checkpoint.every_env_steps=64',
    '--config.checkpoint.keep=1',
  ]
  assert _run(tmp_path / 'run', *arguments) == 0
  # 8 updates, evaluated after 2, 4, 6, 8.
  assert checkpoint.steps(str(tmp_path / 'run')) == [8, 4]
  assert checkpoint.find(str(tmp_path / 'run'), 'best') == 4


def _finished(tmp_path, *arguments):
  """A run of 8 updates with checkpoints at 4 and 8, as if it went on."""
  workdir = tmp_path / 'run'
  assert (
    _run(workdir, '--config.checkpoint.every_env_steps=256', *arguments) == 0
  )
  assert checkpoint.steps(str(workdir)) == [8, 4]
  (workdir / 'summary.json').unlink()
  return workdir


def _files(workdir):
  return {
    p.relative_to(workdir): p.read_bytes()
    for p in workdir.rglob('*')
    if p.is_file() and 'tfevents' not in p.name
  }


_DAMAGES = [
  (item, damage)
  for item in ('params', 'state', 'progress')
  for damage in ('truncated', 'flipped', 'deleted')
]


@pytest.mark.parametrize(
  'item,damage',
  _DAMAGES[::4]
  + [
    pytest.param(*x, marks=pytest.mark.slow)
    for i, x in enumerate(_DAMAGES)
    if i % 4
  ],
)
def test_a_corrupt_checkpoint_gives_way_to_the_one_before(
  item, damage, tmp_path, capsys
):
  workdir = _finished(tmp_path)
  expected = _plain(_read_records(workdir))
  files = [
    p for p in (workdir / 'checkpoints' / '8' / item).rglob('*') if p.is_file()
  ]
  path = max(files, key=lambda p: p.stat().st_size)
  data = bytearray(path.read_bytes())
  if damage == 'truncated':
    path.write_bytes(data[:-1])
  elif damage == 'flipped':
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
  else:
    path.unlink()
  assert _run(workdir, '--resume') == 0
  said = capsys.readouterr().err
  assert said.count('checkpoint 8 is skipped: its file') == 1
  assert 'going on after update 4' in said and 'Traceback' not in said
  assert _plain(_read_records(workdir)) == expected
  assert (workdir / 'checkpoints' / '8.set_aside').is_dir()
  assert checkpoint.steps(str(workdir))[0] == 8


def _read_records(workdir):
  return [
    json.loads(line)
    for line in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]


def test_what_cannot_be_gone_on_with_is_left_alone(tmp_path, capsys):
  workdir = _finished(tmp_path)
  whole = _files(workdir)

  def refused(message, *arguments):
    before = _files(workdir)
    assert _run(workdir, '--resume', *arguments) == train.MISTAKE
    said = capsys.readouterr().err
    assert message in said.splitlines()[-1] and 'Traceback' not in said
    assert _files(workdir) == before

  refused('config.seed is 0 there, 1 here', '--config.seed=1')
  refused('config.agent.name is ppo there, impala here', '--agent=impala')
  refused(
    'config.env.options is {}', '--config.env.options.max_steps_in_episode=5'
  )
  refused('needs --workdir', '--init_from=x')
  digests = workdir / 'checkpoints' / '8' / 'digests.json'
  newer = json.loads(digests.read_text()) | {'format': 99}
  digests.write_text(json.dumps(newer))
  refused('of a newer version of podrl')
  for step in '48':  # Both: nothing is left to go on with.
    (workdir / 'checkpoints' / step / 'digests.json').write_text('{')
  refused('no checkpoint of')
  for path, data in whole.items():
    (workdir / path).write_bytes(data)
  config = json.loads((workdir / 'config.json').read_text())
  (workdir / 'config.json').write_text(json.dumps(config | {'field': 1}))
  refused('does not have: field')
  (workdir / 'config.json').write_text(json.dumps(config))
  (workdir / 'summary.json').write_text('{"exit": "done"}')
  refused('is finished')


def test_lost_records_give_way_to_an_older_checkpoint(tmp_path, capsys):
  workdir = _finished(tmp_path)
  lines = (workdir / 'metrics.jsonl').read_text().splitlines(keepends=True)
  assert len(lines) == 3  # At 3, 6 and 8; the checkpoint at 4 knows of one.
  (workdir / 'metrics.jsonl').write_text(lines[0] + lines[1][:20])
  assert _run(workdir, '--resume') == 0
  assert '1 records, but had 3' in capsys.readouterr().err
  assert _plain(_read_records(workdir)) == _plain(map(json.loads, lines))


def test_what_was_written_after_the_checkpoint_is_written_again(tmp_path):
  workdir = _finished(tmp_path)
  lines = (workdir / 'metrics.jsonl').read_text()
  shutil.rmtree(workdir / 'checkpoints' / '8')  # As killed before it was whole.
  (workdir / 'metrics.jsonl').write_text(lines + '{"env_st')
  assert _run(workdir, '--resume') == 0
  assert _plain(_read_records(workdir)) == _plain(
    map(json.loads, lines.splitlines())
  )


def test_two_processes_do_not_write_one_run(tmp_path, capsys):
  workdir = _finished(tmp_path)
  before = _files(workdir)
  code = (
    'import time; from podrl.records import workdir\n'
    f'with workdir.lock({str(workdir)!r}):\n'
    '  print("ready", flush=True); time.sleep(60)'
  )
  with subprocess.Popen(
    [sys.executable, '-c', code], stdout=subprocess.PIPE
  ) as process:
    process.stdout.readline()
    assert _run(workdir, '--resume') == train.MISTAKE
    process.kill()
  assert _files(workdir) == before
  assert 'another process' in capsys.readouterr().err


def test_init_from_takes_the_parameters_alone(tmp_path, monkeypatch, capsys):
  assert _run(tmp_path / 'a', '--agent=impala') == 0
  first = []
  begin = loop.begin
  monkeypatch.setattr(
    loop,
    'begin',
    lambda *args: (first.append(jax.device_get(begin(*args))), begin(*args))[1],
  )
  assert (
    _run(
      tmp_path / 'b',
      '--config.seed=7',
      '--config.num_devices=1',
      f'--init_from={tmp_path / "a"}',
    )
    == 0
  )
  state, _ = first[0]
  for x, y in zip(
    *map(
      jax.tree.leaves, (state.learner.params, podrl.load(tmp_path / 'a').params)
    )
  ):
    np.testing.assert_array_equal(x, y)
  assert int(state.learner.num_updates) == 0
  capsys.readouterr()
  for arguments, message in (
    ([f'--init_from={tmp_path}'], 'is not a run'),
    (
      [f'--init_from={tmp_path / "a"}', '--config.network.hidden_sizes=(8,)'],
      'another network',
    ),
  ):
    assert _run(tmp_path / 'c', *arguments) == train.MISTAKE
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'c').exists()


def test_what_a_run_began_with_is_not_lost(tmp_path, monkeypatch):
  assert _run(tmp_path / 'a') == 0
  broken = lambda *_: (_ for _ in ()).throw(RuntimeError('no'))
  with monkeypatch.context() as patch:
    patch.setattr(Anakin, 'advance', broken)
    assert (
      _run(tmp_path / 'b', '--config.seed=7', f'--init_from={tmp_path / "a"}')
      == train.FAILED
    )
  assert checkpoint.steps(str(tmp_path / 'b')) == [0]
  for x, y in zip(
    *map(
      jax.tree.leaves,
      (podrl.load(tmp_path / 'b').params, podrl.load(tmp_path / 'a').params),
    )
  ):
    np.testing.assert_array_equal(x, y)
  assert _run(tmp_path / 'b', '--resume', '--config.seed=7') == 0


def test_a_checkpoint_is_set_aside_as_often_as_it_is_damaged(tmp_path):
  workdir = _finished(tmp_path)
  for _ in range(2):
    path = workdir / 'checkpoints' / '8' / 'progress' / 'metadata'
    data = json.loads(path.read_text())
    del data['num_resumes']
    path.write_text(json.dumps(data))
    assert _run(workdir, '--resume') == 0
    (workdir / 'summary.json').unlink()
  names = {p.name for p in (workdir / 'checkpoints').iterdir()}
  assert {'8', '8.set_aside', '8.set_aside_1'} <= names


def test_a_signal_while_it_begins_leaves_the_summary(tmp_path, monkeypatch):
  workdir = _finished(tmp_path)
  (workdir / 'summary.json').write_text('{"exit": "preempted", "env_steps": 5}')
  monkeypatch.setattr(train.Signals, 'is_set', lambda self: True)
  monkeypatch.setattr(
    train.Signals, 'exit_code', train.PREEMPTED, raising=False
  )
  before = _files(workdir)
  _signal_at(monkeypatch, train, 'Recorder', 1)
  assert _run(workdir, '--resume') == train.PREEMPTED
  assert _files(workdir) == before


def test_one_agent_of_several_is_no_run_to_go_on_with(tmp_path, capsys):
  workdir = tmp_path / 'run'
  assert _run(workdir, '--config.num_seeds=2') == 0
  (workdir / 'summary.json').unlink()
  (workdir / 'seed_1' / 'summary.json').unlink()
  before = _files(workdir)
  assert _run(workdir / 'seed_1', '--resume') == train.MISTAKE
  assert f'is one agent of {workdir}' in capsys.readouterr().err
  assert _files(workdir) == before
  with pytest.raises(ValueError, match='2 agents; name one'):
    podrl.load(workdir)
  alone = tmp_path / 'seed_1'  # A run of that name.
  assert _run(alone) == 0
  assert podrl.load(alone).num_updates == 8


def test_what_was_recorded_before_any_checkpoint_is_set_aside(tmp_path):
  workdir = _finished(tmp_path)
  lines = (workdir / 'metrics.jsonl').read_text()
  shutil.rmtree(workdir / 'checkpoints')
  assert _run(workdir, '--resume') == 0
  assert (workdir / 'metrics.jsonl.set_aside').read_text() == lines
  assert _plain(_read_records(workdir)) == _plain(
    map(json.loads, lines.splitlines())
  )


def test_a_disc_that_is_full_ends_a_run_in_one_line(
  tmp_path, monkeypatch, capsys
):
  free = iter([2**40, 2**40, 0])  # At the third checkpoint.
  monkeypatch.setattr(
    shutil,
    'disk_usage',
    lambda path: shutil._ntuple_diskusage(2**40, 0, next(free)),
  )
  assert (
    _run(tmp_path / 'run', '--config.checkpoint.every_env_steps=64')
    == train.FAILED
  )
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and 'checkpoint 3 needs 1.' in said
  assert (
    json.loads((tmp_path / 'run' / 'summary.json').read_text())['exit']
    == 'failed'
  )
  monkeypatch.undo()
  assert checkpoint.steps(str(tmp_path / 'run')) == [2, 1]
  assert _run(tmp_path / 'run', '--resume') == 0


def test_a_file_that_cannot_be_written_ends_a_run_in_one_line(tmp_path):
  def limit():  # Of a file, in bytes: some records fit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

  outcome = subprocess.run(
    [
      sys.executable,
      str(_ROOT / 'experiments' / 'anakin_catch.py'),
      *_TINY,
      f'--workdir={tmp_path / "run"}',
      '--config.log.every_updates=1',
      '--config.log.tensorboard=False',
    ],
    capture_output=True,
    text=True,
    preexec_fn=limit,
  )
  assert outcome.returncode == train.FAILED
  assert 'JsonLines could not write: [Errno 27]' in outcome.stderr
  assert 'Traceback' not in outcome.stderr


def _kill_and_resume(tmp_path, num_kills, rng):
  """Kills a run, resumed each time, at random moments; how far it then was."""
  workdir = tmp_path / 'run'
  command = [
    sys.executable,
    str(_ROOT / 'experiments' / 'anakin_catch.py'),
    *_TINY,
    '--config.total_env_steps=1e9',
    '--config.log.every_updates=100',
    '--config.checkpoint.every_seconds=0.2',
    f'--workdir={workdir}',
  ]
  resumed = []
  for i in range(num_kills):
    process = subprocess.Popen(
      command + ['--resume'],
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    newest = lambda: max(checkpoint.steps(str(workdir)), default=0)
    first = newest()
    going_on = f'going on after update {first}' if first else 'begins'
    if i % 3 == 1:  # Perhaps before the first, and in the middle of a start.
      time.sleep(rng.uniform(0.0, 10.0))
    else:
      while newest() == first and process.poll() is None:
        time.sleep(0.01)
      time.sleep(rng.uniform(0.0, 1.0))
    before = newest()
    assert process.poll() is None
    process.kill()
    said = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL and 'Traceback' not in said
    if before > first:  # It came so far.
      assert going_on in said
    # XLA's cache may hold a program half written: JAX warns and compiles.
    assert 'skipped' not in said and '\nerror: ' not in said, said
    resumed.append((first, before, newest()))
  return workdir, resumed


@pytest.mark.parametrize(
  'num_kills', [3, pytest.param(20, marks=pytest.mark.slow)]
)
def test_kill_9_loses_no_more_than_a_period(num_kills, tmp_path):
  workdir, found = _kill_and_resume(
    tmp_path, num_kills, random.Random(num_kills)
  )
  assert found[-1][-1] > 0
  # Each went on from the newest of the one before (or was killed too soon).
  assert [first for first, _, _ in found[1:]] == [x for _, _, x in found[:-1]]
  lines = [
    json.loads(x)
    for x in (workdir / 'metrics.jsonl').read_text().splitlines()[:-1]
  ]
  assert [x['num_updates'] for x in lines] == [
    100 * i for i in range(1, len(lines) + 1)
  ]
