"""Tests runs that are stopped, killed or damaged, and resumed."""

import builtins
import contextlib
import errno
import json
import math
import os
import pathlib
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import podrl
from podrl import signals
from podrl.agents import exploring
from podrl.drivers import sebulba, spmd
from podrl.drivers.anakin import Anakin
from podrl.records import checkpoint, recorder, sinks
from podrl.records import workdir as records_workdir
from podrl.run import build, train
from podrl.tools import train as command_train
from podrl.types import LearnerState, Variables

_HOST = (
  '--config.total_env_steps=1280 --config.env.num_envs=8 '
  '--config.unroll_length=8 --config.eval.num_episodes=2 '
  '--config.eval.max_episode_steps=4 --config.log.every_updates=3 '
  '--config.network.hidden_sizes=8 --config.num_minibatches=1 '
  '--config.sebulba.actor_devices=0 --config.sebulba.learner_devices=0 '
  '--config.sebulba.threads_per_actor_device=2'
).split()
_REPLAY = (
  '--config.replay.min_steps=200 --config.replay.batch_size=8 '
  '--config.replay.capacity_steps=600 --config.replay.sgd_steps_per_update=2'
).split()
# The run has 20 updates, evaluates at 7, 14 and 20, and saves at 5, 10 ...
_TWENTY = (
  '--config.total_env_steps=1280 --config.eval.every_env_steps=448 '
  '--config.checkpoint.every_env_steps=320'
).split()


def _signal_at(monkeypatch, owner, name, count):
  """Sends SIGTERM when a function is called for the `count`-th time."""
  function, calls = getattr(owner, name), iter(range(1, 10**6))

  def interrupted(*args, **kwargs):
    if next(calls) == count:
      os.kill(os.getpid(), signal.SIGTERM)
    return function(*args, **kwargs)

  monkeypatch.setattr(owner, name, interrupted)


def _plain(records):
  return [
    {k: v for k, v in r.items() if k not in helpers.TIMINGS} for r in records
  ]


def _state(workdir):
  """Reads all arrays of the last checkpoint with orbax."""
  path = workdir / 'checkpoints' / str(checkpoint.find(str(workdir)))
  items = [x for x in ('variables', 'state', 'memory') if (path / x).is_dir()]
  with ocp.StandardCheckpointer() as reader:
    return [reader.restore(path / item) for item in items]


def _assert_close(a, b, atol):
  a, b = jax.tree.leaves(a), jax.tree.leaves(b)
  assert len(a) == len(b) > 4
  for x, y in zip(a, b):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = map(jax.random.key_data, (x, y))
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)


# A signal comes at these calls. An evaluation begins with a copy of parameters.
_STOPS = (
  (Anakin, 'start', 1),
  (Anakin, 'advance', 3),
  (spmd, 'copy_to_first_device', 1),
  (checkpoint.Checkpoints, 'save', 2),
  (spmd, 'copy_to_first_device', 2),
)


@pytest.mark.parametrize(
  'arguments,num_devices,stops',
  [
    helpers.slow(helpers.MEMORY, 2, _STOPS[1:3]),
    (['--agent=rainbow', *_REPLAY], 4, _STOPS[1:4]),
    helpers.slow(['--agent=rainbow', *_REPLAY], 1, _STOPS),
    helpers.slow(['--agent=r2d2', *_REPLAY], 4, _STOPS),
    helpers.slow(
      ['--agent=r2d2', *_REPLAY, '--config.network.recurrent=lru'],
      2,
      _STOPS[1:3],
    ),
    helpers.slow(
      [
        '--agent=a2c',
        '--config.network.recurrent=gtrxl',
        '--config.network.memory_steps=3',
        '--config.network.num_layers=2',
      ],
      2,
      _STOPS[1:3],
    ),
    helpers.slow(['--agent=sac', *_REPLAY], 1, _STOPS),
    helpers.slow(
      ['--agent=muzero', *_REPLAY, '--config.search.reanalyse_fraction=0.5'],
      4,
      _STOPS,
    ),
    helpers.slow(
      ['--agent=pqn', *helpers.MEMORY[1:], '--config.num_minibatches=2'],
      4,
      _STOPS,
    ),
    helpers.slow(['--agent=ppo'], 1, _STOPS),
    helpers.slow(['--agent=ppo'], 4, _STOPS),
    helpers.slow(helpers.MEMORY, 1, _STOPS),
    helpers.slow(helpers.MEMORY, 4, _STOPS),
    helpers.slow(
      ['--agent=ppo', *helpers.MEMORY[1:], '--config.num_minibatches=2'],
      4,
      _STOPS,
    ),
  ],
)
def test_anakin_resumes_bitwise(
  arguments, num_devices, stops, tmp_path, monkeypatch
):
  arguments = [*arguments, *_TWENTY, f'--config.num_devices={num_devices}']
  arguments.append('--config.log.episodes=True')
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert helpers.run(whole, *arguments) == 0
  for stop in stops:
    with monkeypatch.context() as patch:
      _signal_at(patch, *stop)
      assert helpers.run(parts, *arguments, '--resume') == signals.PREEMPTED
  assert helpers.run(parts, '--resume', *arguments) == 0
  (expected, _), (records, summary) = helpers.read(whole), helpers.read(parts)
  numbers = [r['num_updates'] for r in expected]
  assert numbers == [3, 6, 7, 9, 12, 14, 15, 18, 20]
  assert _plain(records) == _plain(expected)
  assert summary['exit'] == 'done'
  episodes = (whole / 'episodes.csv').read_text()
  assert (parts / 'episodes.csv').read_text() == episodes
  assert len(episodes.splitlines()) == 1 + records[-1]['num_reset_steps']
  _assert_close(_state(parts), _state(whole), 0)


@pytest.mark.slow
def test_a_memory_that_is_left_out_is_filled_again(
  tmp_path, monkeypatch, capfd
):
  arguments = ['--agent=dqn', *_REPLAY, *_TWENTY, '--config.num_devices=2']
  parts, less = tmp_path / 'parts', '--config.checkpoint.memory=False'
  with monkeypatch.context() as patch:
    _signal_at(patch, Anakin, 'advance', 3)
    assert helpers.run(parts, *arguments, less) == signals.PREEMPTED
  saved = checkpoint.find(str(parts))
  assert not (parts / 'checkpoints' / str(saved) / 'memory').exists()
  before = helpers.read(parts)[0][-1]
  assert helpers.run(parts, *arguments, '--resume') == 0
  # An unroll has 64 steps, and learning waits for 200.
  records, summary = helpers.read(parts)
  learned = summary['num_sgd_steps'] - before['num_sgd_steps']
  assert learned == 2 * (20 - saved - 3)
  last = parts / 'checkpoints' / '20' / 'memory'
  assert last.is_dir() and records[-1]['num_updates'] == 20
  # The memories of two devices, joined, fit one device.
  longer = ['--config.total_env_steps=1600', '--config.num_devices=1']
  assert helpers.run(parts, *arguments, *longer, '--resume') == 0
  assert (
    helpers.read(parts)[1]['num_sgd_steps'] == summary['num_sgd_steps'] + 10
  )
  # An earlier version may have saved more.
  read = checkpoint._read_progress

  def read_more(*arguments):
    progress = read(*arguments)
    return progress | {'memory': progress['memory'] | {'more': 'int32[3]'}}

  monkeypatch.setattr(checkpoint, '_read_progress', read_more)
  longer[0] = '--config.total_env_steps=1920'
  assert helpers.run(parts, *arguments, *longer, '--resume') == signals.MISTAKE
  said = capfd.readouterr().err.splitlines()[-1]
  assert 'more is int32[3] in the checkpoint, missing in this run' in said


@pytest.mark.parametrize('num_seeds', [helpers.slow(1), helpers.slow(2)])
def test_a_finished_run_is_extended(num_seeds, tmp_path, monkeypatch, capsys):
  arguments = (
    '--config.optimizer.anneal=False --config.log.every_updates=4 '
    f'--config.eval.every_env_steps=512 --config.num_seeds={num_seeds}'
  ).split()
  seeds = [f'seed_{i}' for i in range(num_seeds)] if num_seeds > 1 else []
  whole, parts, killed = (tmp_path / x for x in ('whole', 'parts', 'killed'))
  longer = ['--config.total_env_steps=1024']
  assert helpers.run(whole, *arguments, *longer) == 0
  assert helpers.run(parts, *arguments) == 0
  before = _files(parts)
  for total, message in (
    (512, 'is finished; to extend it, set config.total_env_steps to more than'),
    (448, 'config.total_env_steps=448 is less than the 512 steps'),
  ):
    total = [f'--config.total_env_steps={total}', '--resume']
    assert helpers.run(parts, *total) == signals.MISTAKE
    said = capsys.readouterr().err
    assert message in said and said.count('\n') == 1
  assert _files(parts) == before
  advance, calls = Anakin.advance, iter(range(100))

  def copy_and_advance(self, *args):
    if next(calls) == 1:  # Copy what `kill -9` leaves.
      shutil.copytree(parts, killed)
    return advance(self, *args)

  monkeypatch.setattr(Anakin, 'advance', copy_and_advance)
  assert helpers.run(parts, *arguments, *longer, '--resume') == 0
  assert 'total_env_steps=1024 replaces 512' in capsys.readouterr().err
  # The killed run still has the summary of the first 512 steps.
  assert json.loads((killed / 'summary.json').read_text())['exit'] == 'done'
  options = [*helpers.TINY[1:], *arguments, '--resume']  # Leave out the total.
  assert helpers.run(killed, *options, tiny=False) == 0
  assert 'resuming after update 8' in capsys.readouterr().err
  for path in parts, killed:
    _assert_close(_state(path), _state(whole), 0)
    for name in '', *seeds:
      expected, _ = helpers.read(whole / name)
      records, summary = helpers.read(path / name)
      assert _plain(records) == _plain(expected)
      assert [r['num_updates'] for r in records] == [4, 8, 12, 16]
      assert summary['num_updates'] == 16
      config = json.loads((path / name / 'config.json').read_text())
      assert config['total_env_steps'] == 1024


@pytest.mark.slow
def test_anakin_resumes_on_other_devices(tmp_path, monkeypatch, capfd):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  sgd = ['--agent=impala', '--config.optimizer.name=sgd']
  assert helpers.run(whole, *sgd) == 0
  _signal_at(monkeypatch, Anakin, 'advance', 2)
  assert helpers.run(parts, *sgd) == signals.PREEMPTED
  assert helpers.run(parts, *sgd, '--resume', '--config.num_devices=4') == 0
  assert '2 devices before, 4 now' in capfd.readouterr().err
  _assert_close(_state(parts), _state(whole), 1e-6)


def test_a_counter_of_float32_becomes_an_integer(tmp_path):
  def make_state(count):
    variables = Variables({'w': jnp.ones(2)}, exploring.Statistics(count), {})
    number = jnp.int32(94)
    return LearnerState(variables, (), (), number, number, ())

  os.makedirs(tmp_path / 'checkpoints')
  checkpoints = checkpoint.Checkpoints(str(tmp_path), 1)
  checkpoints.save(94, make_state(jnp.float32(94)), {}, None)
  checkpoints.close()
  state = make_state(jnp.int32(0))
  shapes = jax.eval_shape(lambda: state.variables)
  read = checkpoint.read_variables(str(tmp_path), 94, shapes)
  state = checkpoint.read_state(str(tmp_path), 94, state)
  for count in (x.statistics.num_updates for x in (read, state.variables)):
    assert count == 94 and count.dtype == jnp.int32
  # Other arrays must have the same type.
  shapes = shapes._replace(params={'w': jax.ShapeDtypeStruct((2,), jnp.int8)})
  with pytest.raises(checkpoint.IncompatibleError, match='w is float32'):
    checkpoint.read_variables(str(tmp_path), 94, shapes)


def test_sebulba_resumes(tmp_path, monkeypatch):
  workdir = tmp_path / 'run'
  arguments = dict(name='sebulba_cartpole', tiny=False)
  states, seeds, skipped = [], [], []
  start, skip = sebulba.Sebulba.start, sebulba.Actor.skip
  save, make = checkpoint.Checkpoints.save, build.make_host_env

  def start_and_note(self, restore):
    def restore_and_note(state):
      state, progress = restore(state)
      states.append((jax.device_get(state), progress))
      return state, progress

    start(self, restore_and_note)

  def save_and_note(self, num_updates, state, progress, best):
    states.append((jax.device_get(state), progress['drivers']))
    save(self, num_updates, state, progress, best)

  def make_and_note(config, num_envs, seed, *args, **kwargs):
    seeds.append(seed)
    return make(config, num_envs, seed, *args, **kwargs)

  def skip_and_note(self, num_unrolls):
    skipped.append(num_unrolls)
    skip(self, num_unrolls)

  monkeypatch.setattr(sebulba.Sebulba, 'start', start_and_note)
  monkeypatch.setattr(checkpoint.Checkpoints, 'save', save_and_note)
  monkeypatch.setattr(build, 'make_host_env', make_and_note)
  monkeypatch.setattr(sebulba.Actor, 'skip', skip_and_note)
  with monkeypatch.context() as patch:
    _signal_at(patch, sebulba.Sebulba, 'advance', 2)
    assert helpers.run(workdir, *_HOST, **arguments) == signals.PREEMPTED
  first_seeds = seeds.copy()
  saved, saved_progress = states[-1]
  seeds.clear()
  assert helpers.run(workdir, *_HOST, '--resume', **arguments) == 0
  # The second run starts, and saves before and after its evaluation.
  found, found_progress = states[-3]
  _assert_close(saved, found, 0)
  assert saved_progress == found_progress
  num_updates = int(found.num_updates)
  # Each of two actors contributed one unroll to each update.
  assert skipped == found_progress[0]['num_unrolls'] == [num_updates] * 2
  # Each of two actors has four environments.
  for number, pools in enumerate((first_seeds[:2], seeds[:2])):
    expected = [build.env_seed(0, number, env) for env in range(8)]
    assert pools == [expected[:4], expected[4:]]
  records, summary = helpers.read(workdir)
  # 1280 / (8 x 8) = 20 updates; the learning rate is annealed over them.
  assert [r['num_updates'] for r in records] == [3, 6, 9, 12, 15, 18, 20]
  for r in records:
    assert r['env_steps'] + r['num_reset_steps'] == 64 * r['num_updates']
  last, progress = states[-1]
  assert int(last.num_updates) == 20 and summary['exit'] == 'done'
  leaves = jax.tree.leaves(last.opt_state)
  counts = [int(x) for x in leaves if x.dtype == np.int32]
  assert counts == [int(last.num_sgd_steps)] * 2  # Adam and the schedule count.
  assert progress[0]['num_unrolls'] == [20, 20]
  more = ['--config.total_env_steps=1600', '--resume']
  assert helpers.run(workdir, *_HOST, *more, **arguments) == 0
  records, summary = helpers.read(workdir)
  assert [r['num_updates'] for r in records[6:]] == [20, 21, 24, 25]
  assert summary['exit'] == 'done' and summary['num_updates'] == 25
  assert states[-1][1][0]['num_unrolls'] == [25, 25]


def test_the_best_checkpoint_is_kept(tmp_path, monkeypatch):
  returns = iter([math.nan, 5.0, 3.0, 2.0])
  write = recorder.Recorder.write

  def write_return(self, outcomes=(), scalars={}):
    write(self, [x | {'eval_return': next(returns)} for x in outcomes], scalars)

  monkeypatch.setattr(recorder.Recorder, 'write', write_return)
  arguments = (
    '--config.eval.every_env_steps=128 --config.checkpoint.every_env_steps=64 '
    '--config.checkpoint.keep=1'
  ).split()
  # The run has 8 updates, and evaluates after 2, 4, 6 and 8.
  assert helpers.run(tmp_path / 'run', *arguments) == 0
  assert checkpoint.steps(str(tmp_path / 'run')) == [8, 4]
  assert checkpoint.find(str(tmp_path / 'run'), 'best') == 4


def test_a_checkpoint_has_the_progress_of_its_time(tmp_path, monkeypatch):
  # Orbax writes the progress in a thread, while the run changes its lists.
  found, json_save = [], checkpoint.ocp.args.JsonSave
  add = recorder.Recorder.add

  def save(progress):
    found.append((progress, progress['scores'][0].copy()))
    return json_save(progress)

  def add_and_compare(self, reports):
    add(self, reports)
    assert all(progress['scores'][0] == x for progress, x in found)

  monkeypatch.setattr(checkpoint.ocp.args, 'JsonSave', save)
  monkeypatch.setattr(recorder.Recorder, 'add', add_and_compare)
  every = '--config.checkpoint.every_env_steps=64'
  assert helpers.run(tmp_path / 'run', every) == 0
  assert found[-1][1][0] > found[0][1][0]  # Episodes ended between them.


@pytest.fixture(scope='module')
def original(tmp_path_factory):
  """Makes a run of 8 updates with checkpoints at 4 and 8, without a summary."""
  path = tmp_path_factory.mktemp('original') / 'run'
  assert helpers.run(path, '--config.checkpoint.every_env_steps=256') == 0
  assert checkpoint.steps(str(path)) == [8, 4]
  (path / 'summary.json').unlink()
  return path


@pytest.fixture
def workdir(original, tmp_path):
  """Copies the original run."""
  return pathlib.Path(shutil.copytree(original, tmp_path / 'run'))


def _files(workdir):
  return {
    p.relative_to(workdir): p.read_bytes()
    for p in workdir.rglob('*')
    if p.is_file() and 'tfevents' not in p.name
  }


@pytest.mark.parametrize(
  'item,damage',
  [
    ('state', 'flipped'),
    ('progress', 'deleted'),
    *(helpers.slow(x, 'truncated') for x in ('variables', 'state', 'progress')),
    *(helpers.slow(x, 'flipped') for x in ('variables', 'progress')),
    *(helpers.slow(x, 'deleted') for x in ('variables', 'state')),
  ],
)
def test_a_damaged_checkpoint_is_skipped(item, damage, workdir, capsys):
  expected = _plain(helpers.read_records(workdir))
  files = (workdir / 'checkpoints' / '8' / item).rglob('*')
  path = max(filter(pathlib.Path.is_file, files), key=os.path.getsize)
  data = bytearray(path.read_bytes())
  if damage == 'truncated':
    path.write_bytes(data[:-1])
  elif damage == 'flipped':
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
  else:
    path.unlink()
  assert helpers.run(workdir, '--resume') == 0
  said = capsys.readouterr().err
  assert said.count('checkpoint 8 is skipped: its file') == 1
  assert 'resuming after update 4' in said and 'Traceback' not in said
  assert _plain(helpers.read_records(workdir)) == expected
  assert (workdir / 'checkpoints' / '8.set_aside').is_dir()
  assert checkpoint.steps(str(workdir))[0] == 8


@pytest.mark.parametrize(
  'name,number',
  [
    ('digests.json', errno.EACCES),
    ('metadata', errno.EMFILE),
    ('state', errno.EIO),
    ('8', errno.EACCES),
    ('', errno.EACCES),
  ],
)
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(
  name, number, workdir, monkeypatch, capsys
):
  before = _files(workdir)
  last = workdir / 'checkpoints' / '8'

  def refusing(function):
    def call(path='.', *args, **kwargs):
      text = os.fspath(path) if not isinstance(path, int) else ''
      parent = {'': str(last.parent), '8': str(last)}.get(name)
      is_file = parent is None and os.path.basename(text) == name
      if text == parent or (is_file and text.startswith(str(last))):
        raise OSError(number, os.strerror(number), text)
      return function(path, *args, **kwargs)

    return call

  for owner, function in (
    (builtins, 'open'),
    (os, 'scandir'),
    (os, 'listdir'),
  ):
    monkeypatch.setattr(owner, function, refusing(getattr(owner, function)))
  assert helpers.run(workdir, '--resume') == signals.MISTAKE
  monkeypatch.undo()
  said = capsys.readouterr().err
  where = str(last if name else last.parent)
  assert f'{where} cannot be read' in said and 'Traceback' not in said
  assert os.strerror(number) in said and said.count('\n') == 1
  assert _files(workdir) == before


@pytest.mark.parametrize(
  'error,reason',
  [
    (OSError(errno.EIO, os.strerror(errno.EIO)), os.strerror(errno.EIO)),
    (OSError('block 7 is bad'), 'block 7 is bad'),  # It has no number.
  ],
)
def test_a_disk_that_fails_while_it_reads_is_no_damage(
  error, reason, workdir, monkeypatch, capsys
):
  before = _files(workdir)
  monkeypatch.setattr(
    checkpoint.hashlib, 'file_digest', mock.Mock(side_effect=error)
  )
  assert helpers.run(workdir, '--resume') == signals.MISTAKE
  said = capsys.readouterr().err
  where = workdir / 'checkpoints' / '8'
  assert f'error: {where} cannot be read ({reason}), but may be int' in said
  assert _files(workdir) == before
  monkeypatch.undo()
  # The digests were right, and orbax then reads the files again.
  monkeypatch.setattr(checkpoint, '_read', mock.Mock(side_effect=error))
  assert helpers.run(workdir, '--resume') == signals.MISTAKE
  said = capsys.readouterr().err.splitlines()[-1]
  assert said.startswith(f'error: {where} is intact, but could not be read')
  assert reason in said and _files(workdir) == before


def test_a_run_that_cannot_be_resumed_stays_as_it_is(workdir, capsys):
  whole = _files(workdir)

  def assert_refused(message, *arguments):
    before = _files(workdir)
    assert helpers.run(workdir, '--resume', *arguments) == signals.MISTAKE
    said = capsys.readouterr().err
    assert message in said.splitlines()[-1] and 'Traceback' not in said
    assert _files(workdir) == before

  assert_refused('config.seed is 0 in the run, but 1 now', '--config.seed=1')
  assert_refused(
    'config.agent.name is ppo in the run, but impala now', '--agent=impala'
  )
  assert_refused(
    'config.env.options is {}', '--config.env.options.max_steps_in_episode=5'
  )
  digests = workdir / 'checkpoints' / '8' / 'digests.json'
  newer = json.loads(digests.read_text()) | {'format': 99}
  digests.write_text(json.dumps(newer))
  assert_refused('another version of podrl wrote')
  for step in '48':  # Damage both checkpoints.
    (workdir / 'checkpoints' / step / 'digests.json').write_text('{')
  assert_refused('no checkpoint of')
  for path, data in whole.items():
    (workdir / path).write_bytes(data)
  config = json.loads((workdir / 'config.json').read_text())
  (workdir / 'config.json').write_text(json.dumps(config | {'field': 1}))
  assert_refused('does not have: field')
  (workdir / 'config.json').write_text(json.dumps(config))
  (workdir / 'summary.json').write_text(
    '{"exit": "done", "total_env_steps": 512}'
  )
  assert_refused('is finished')


def test_advice_after_a_nan_works(tmp_path, monkeypatch, capfd):
  workdir = tmp_path / 'a run'
  with monkeypatch.context() as patch:
    _signal_at(patch, Anakin, 'advance', 2)
    assert helpers.run(workdir) == signals.PREEMPTED
  said = capfd.readouterr()
  notice = 'SIGTERM: the run stops and saves; a second signal ends it at once\n'
  assert notice in said.err
  python, script, *arguments = shlex.split(said.out.splitlines()[-1])
  assert (python, script) == ('python', 'anakin_catch.py')
  assert arguments == [f'--workdir={workdir}', '--resume', *helpers.TINY]
  (done,) = checkpoint.steps(str(workdir))
  too_large = '--config.optimizer.learning_rate=1e30'
  capfd.readouterr()
  assert helpers.run(workdir, '--resume', too_large) == signals.FAILED
  said = capfd.readouterr().err
  assert 'config.optimizer.learning_rate=1e+30 replaces 0.001' in said
  assert (
    json.loads((workdir / 'config.json').read_text())['optimizer'][
      'learning_rate'
    ]
    == 1e30
  )
  _, found, advice = said.splitlines()[-1].partition(
    f'; continue from update {done} with a smaller learning rate: '
  )
  assert found and said.count('\n') == 3
  python, script, *arguments = shlex.split(advice)
  assert (python, script) == ('python', 'anakin_catch.py')
  rate = '--config.optimizer.learning_rate=0.001'
  assert arguments == [f'--workdir={workdir}', '--resume', *helpers.TINY, rate]
  rates, start = [], Anakin.start

  def start_and_note(self, restore):
    start(self, restore)
    hyperparams = self.state.learner.variables.hyperparams
    rates.append(float(hyperparams['learning_rate']))

  monkeypatch.setattr(Anakin, 'start', start_and_note)
  assert helpers.run(*[workdir, *arguments[1:]]) == 0
  assert rates == [np.float32(1e-3)]
  assert helpers.read(workdir)[1]['exit'] == 'done'


def test_values_of_the_program_change_on_resume(tmp_path, monkeypatch, capfd):
  workdir = tmp_path / 'run'
  with monkeypatch.context() as patch:
    _signal_at(patch, Anakin, 'advance', 1)
    seeds = '--config.num_seeds=2'
    assert helpers.run(workdir, '--config.agent.clip=0.3', seeds) == 75
  values = {'gamma': 0.5, 'lambda_': 0.25, 'entropy_cost': 0.0}
  arguments = [f'--config.agent.{k}={x}' for k, x in values.items()]
  states, start = [], Anakin.start

  def start_and_note(self, restore):
    start(self, restore)
    states.append(jax.device_get(self.state.learner.variables.hyperparams))

  monkeypatch.setattr(Anakin, 'start', start_and_note)
  assert helpers.run(workdir, '--resume', *arguments) == 0
  expected = values | {'clip': 0.3}  # What the command line leaves out stays.
  for name, value in expected.items():
    np.testing.assert_array_equal(
      states[0][name], np.full(2, value, np.float32)
    )
  for path in workdir, workdir / 'seed_1':
    agent = json.loads((path / 'config.json').read_text())['agent']
    assert {k: agent[k] for k in expected} == expected


def test_digests_are_computed_once_per_load(workdir, monkeypatch):
  digested, digests = [], checkpoint._digests

  def note(directory):
    digested.append(directory)
    return digests(directory)

  monkeypatch.setattr(checkpoint, '_digests', note)
  assert podrl.load(workdir).num_updates == 8
  assert len(digested) == 1
  assert (
    helpers.run(workdir, '--resume') == 0
  )  # All updates are done, so it only loads.
  assert len(digested) == 2


def test_lost_records_are_reported_and_the_run_goes_on(
  workdir, monkeypatch, capfd
):
  metrics = workdir / 'metrics.jsonl'
  lines = metrics.read_text().splitlines(keepends=True)
  assert len(lines) == 3  # Records are at updates 3, 6 and 8.
  metrics.write_text(lines[0] + lines[1][:20])
  assert helpers.run(workdir, '--resume') == 0
  said = capfd.readouterr().err
  assert 'metrics.jsonl: 2 of the 3 records before the checkpoint are l' in said
  assert 'resuming after update 8' in said and 'skipped' not in said
  records, summary = helpers.read(workdir)
  assert _plain(records) == _plain([json.loads(lines[0])])
  last = json.loads(lines[-1])
  names = last.keys() - helpers.TIMINGS
  assert {k: summary[k] for k in names} == {k: last[k] for k in names}
  # A run from the older checkpoint writes each later record once, unchanged.
  (workdir / 'summary.json').unlink()
  shutil.rmtree(workdir / 'checkpoints' / '8')
  metrics.write_text(lines[0][:20])
  with monkeypatch.context() as patch:
    _signal_at(patch, Anakin, 'advance', 3)
    assert helpers.run(workdir, '--resume') == signals.PREEMPTED
  assert '1 of the 1 records' in capfd.readouterr().err
  assert (workdir / 'metrics.jsonl.set_aside_1').read_text() == lines[0][:20]
  assert helpers.run(workdir, '--resume') == 0
  assert 'are lost' not in capfd.readouterr().err
  assert _plain(helpers.read_records(workdir)) == _plain(
    map(json.loads, lines[1:])
  )


def test_what_was_written_after_the_checkpoint_is_written_again(workdir):
  lines = (workdir / 'metrics.jsonl').read_text()
  shutil.rmtree(workdir / 'checkpoints' / '8')  # Pretend it is incomplete.
  (workdir / 'metrics.jsonl').write_text(lines + '{"env_st')
  assert helpers.run(workdir, '--resume') == 0
  expected = _plain(map(json.loads, lines.splitlines()))
  assert _plain(helpers.read_records(workdir)) == expected


def test_records_without_a_checkpoint_are_set_aside(workdir):
  lines = (workdir / 'metrics.jsonl').read_text()
  shutil.rmtree(workdir / 'checkpoints')
  assert helpers.run(workdir, '--resume') == 0
  assert (workdir / 'metrics.jsonl.set_aside').read_text() == lines
  expected = _plain(map(json.loads, lines.splitlines()))
  assert _plain(helpers.read_records(workdir)) == expected


@pytest.mark.parametrize(
  'is_new,is_over,message',
  [
    (False, False, 'process PID of HOST is writing to'),
    (True, False, 'process PID of HOST is writing to'),
    (True, True, 'already contains a run'),
  ],
)
def test_two_processes_do_not_write_one_run(
  is_new, is_over, message, workdir, tmp_path, monkeypatch, capsys
):
  # The other process starts while this one builds a run, or before it resumes.
  other, make_run = contextlib.ExitStack(), build.make_run
  path = tmp_path / 'new' if is_new else workdir
  config = records_workdir.read_config(str(workdir))

  def begin():
    other.enter_context(records_workdir.lock(str(path)))
    if is_new:
      records_workdir.make(str(path), config)
    if is_over:
      other.close()

  def begin_and_make(*arguments):
    begin()
    return make_run(*arguments)

  if is_new:
    monkeypatch.setattr(build, 'make_run', begin_and_make)
  else:
    begin()
    before = _files(path)
  arguments = () if is_new else ('--resume',)
  with other:
    assert helpers.run(path, '--config.seed=5', *arguments) == signals.MISTAKE
  said = capsys.readouterr().err
  said = said.replace(f'process {os.getpid()} ', 'process PID ')
  said = said.replace(f' {socket.gethostname()} ', ' HOST ')
  assert message in said and said.count('\n') == 1
  if not is_new:
    assert _files(path) == before
  assert records_workdir.read_config(str(path))['seed'] == 0


def test_a_run_without_its_config_is_not_begun_again(workdir, capsys):
  (workdir / 'config.json').unlink()
  before = _files(workdir)
  for arguments in (), ('--resume',):
    assert helpers.run(workdir, *arguments) == signals.MISTAKE
    said = capsys.readouterr().err
    assert 'its config.json is missing; restore that file from a ba' in said
    assert '--resume' not in said and said.count('\n') == 1
  assert _files(workdir) == before


def test_a_run_of_an_earlier_version_lacks_a_field_of_its_kind(
  tmp_path, capsys
):
  command = ['train', 'Pendulum-v1', f'--workdir={tmp_path}']
  command += ['--config.env.num_envs=4', '--config.eval.num_episodes=4']
  first = ['--config.optimizer.desired_kl=0', '--steps=512']
  assert command_train.run([*command, *first]) == 0
  path = tmp_path / 'config.json'
  fields = json.loads(path.read_text())
  del fields['optimizer']['desired_kl']
  path.write_text(json.dumps(fields))
  assert command_train.run([*command, '--steps=1024', '--resume']) == 0
  said = capsys.readouterr().err
  assert 'keeps its saved value: config.optimizer.desired_kl=0.0' in said


@pytest.mark.parametrize('field', ['env.suite', 'agent.normalize_reward'])
def test_a_config_without_a_field_is_one_error(field, workdir):
  fields = json.loads((workdir / 'config.json').read_text())
  section, name = field.split('.')
  del fields[section][name]
  (workdir / 'config.json').write_text(json.dumps(fields))
  with pytest.raises(ValueError, match='is not the configuration of a run'):
    podrl.load(workdir)


@pytest.mark.parametrize('name', ['anakin_catch', 'sebulba_cartpole'])
def test_seeds_do_not_overwrite_a_run_in_the_directory_of_a_seed(
  name, original, tmp_path, capsys
):
  shutil.copytree(original, tmp_path / 'run' / 'seed_1')
  before = _files(tmp_path)
  argv = [name, f'--workdir={tmp_path}/run', '--config.num_seeds=2']
  assert train.run(helpers.get_config(name), argv) == signals.MISTAKE
  said = capsys.readouterr().err
  assert 'contains seed_1/metrics.jsonl and seed_1/checkpoints of a run' in said
  assert _files(tmp_path) == before


def test_init_from_copies_the_parameters_to_the_targets(tmp_path, monkeypatch):
  arguments = ['--agent=dqn', *_REPLAY, *_TWENTY, '--config.num_devices=1']
  with monkeypatch.context() as patch:
    _signal_at(patch, Anakin, 'advance', 3)
    assert helpers.run(tmp_path / 'old', *arguments) == signals.PREEMPTED
  starts, start = [], Anakin.start

  def start_and_note(self, restore):
    start(self, restore)
    starts.append(jax.device_get(self.state.learner))

  monkeypatch.setattr(Anakin, 'start', start_and_note)
  init_from = f'--init_from={tmp_path / "old"}'
  # The run donates the parameters and the targets, so they are two copies.
  assert helpers.run(tmp_path / 'new', *arguments, init_from) == 0
  (state,) = starts
  expected = podrl.load(tmp_path / 'old').variables.params
  for params in state.variables.params, state.target_params:
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_init_from_takes_only_the_parameters(
  original, tmp_path, monkeypatch, capsys
):
  states, start = [], Anakin.start

  def start_and_note(self, restore):
    start(self, restore)
    states.append(jax.device_get(self.state.learner))

  def fail(*_):
    raise RuntimeError('no')

  init_from = f'--init_from={original}'
  with monkeypatch.context() as patch:
    patch.setattr(Anakin, 'start', start_and_note)
    patch.setattr(Anakin, 'advance', fail)
    arguments = ['--config.seed=7', '--config.num_devices=1']
    code = helpers.run(tmp_path / 'new', *arguments, init_from)
    assert code == signals.FAILED
  # Before its first update, a checkpoint holds the parameters.
  assert checkpoint.steps(str(tmp_path / 'new')) == [0]
  (state,) = states
  assert int(state.num_updates) == 0
  expected = podrl.load(original).variables.params
  for variables in state.variables, podrl.load(tmp_path / 'new').variables:
    jax.tree.map(np.testing.assert_array_equal, variables.params, expected)
  assert helpers.run(tmp_path / 'new', '--resume', *arguments) == 0
  capsys.readouterr()
  for arguments, message in (
    ([f'--init_from={tmp_path}'], 'is not a run'),
    (
      [init_from, '--config.network.hidden_sizes=(9,)'],
      'do not fit: params/params/Dense_0/kernel is float32[8, 3] in the '
      'checkpoint, float32[9, 3] in the agent; config.network.hidden_sizes is '
      '(8,) in that run, (9,)',
    ),
    (
      [init_from, '--config.agent.normalize_observation=True'],
      'do not fit: statistics/obs/mean is missing in the checkpoint, '
      'float32[10, 5] in the agent; config.agent.normalize_observation is '
      'False in that run, True in this run',
    ),
    (
      [init_from, '--config.num_seeds=2'],
      'has 1 agent, but this run has 2; use config.num_seeds=1',
    ),
  ):
    assert helpers.run(tmp_path / 'third', *arguments) == signals.MISTAKE
    said = capsys.readouterr().err
    assert message in said and said.count('\n') == 1, said
    assert not (tmp_path / 'third').exists()


def test_damaged_checkpoints_of_one_name_are_all_set_aside(workdir):
  for _ in range(2):
    path = workdir / 'checkpoints' / '8' / 'progress' / 'metadata'
    data = json.loads(path.read_text())
    del data['num_resumes']
    path.write_text(json.dumps(data))
    assert helpers.run(workdir, '--resume') == 0
    (workdir / 'summary.json').unlink()
  names = {p.name for p in (workdir / 'checkpoints').iterdir()}
  assert {'8', '8.set_aside', '8.set_aside_1'} <= names


def test_a_signal_at_the_start_leaves_the_summary(workdir, monkeypatch):
  (workdir / 'summary.json').write_text('{"exit": "preempted", "env_steps": 5}')
  before = _files(workdir)
  _signal_at(monkeypatch, train.records, 'Recorder', 1)
  assert helpers.run(workdir, '--resume') == signals.PREEMPTED
  assert _files(workdir) == before


def test_a_signal_at_the_start_keeps_the_initial_parameters(
  original, tmp_path, monkeypatch
):
  _signal_at(monkeypatch, train.records, 'Recorder', 1)
  new = tmp_path / 'new'
  assert helpers.run(new, f'--init_from={original}') == signals.PREEMPTED
  assert checkpoint.steps(str(new)) == [0]
  params = [podrl.load(x).variables.params for x in (new, original)]
  jax.tree.map(np.testing.assert_array_equal, *params)


def test_a_launcher_may_add_resume_to_init_from(
  original, tmp_path, monkeypatch
):
  new, arguments = tmp_path / 'new', (f'--init_from={original}', '--resume')
  for number in range(3):
    with monkeypatch.context() as patch:
      _signal_at(patch, Anakin, 'advance', 1)
      assert helpers.run(new, *arguments) == signals.PREEMPTED
    (step, *_) = checkpoint.steps(str(new))
    assert step == [1, 2, 1][number]
    # The run went on from its own checkpoint, or began again without one.
    if number == 1:
      shutil.rmtree(new / 'checkpoints')
  seen = []
  monkeypatch.setattr(train, '_read_initial', lambda *args: seen.append(args))
  assert helpers.run(new, *arguments) == 0 and not seen


def test_one_agent_of_several_is_not_a_run(tmp_path, monkeypatch, capfd):
  workdir = tmp_path / 'run'
  assert helpers.run(workdir, '--config.num_seeds=2') == 0
  (workdir / 'summary.json').unlink()
  (workdir / 'seed_1' / 'summary.json').unlink()
  before = _files(workdir)
  assert helpers.run(workdir / 'seed_1', '--resume') == signals.MISTAKE
  assert f'is one agent of {workdir}' in capfd.readouterr().err
  assert _files(workdir) == before
  with pytest.raises(ValueError, match='2 agents; name one'):
    podrl.load(workdir)
  new = tmp_path / 'new'
  assert helpers.run(new, f'--init_from={workdir}') == signals.MISTAKE
  expected = f'2 agents; name one, for example {workdir}/seed_0'
  assert expected in capfd.readouterr().err
  with monkeypatch.context() as patch:
    _signal_at(patch, Anakin, 'advance', 1)
    init_from = f'--init_from={workdir}/seed_1'
    assert helpers.run(new, init_from) == signals.PREEMPTED
  assert checkpoint.steps(str(new))[-1] == 0
  _assert_close(
    podrl.load(new, '0').variables.params,
    podrl.load(workdir, seed=1).variables.params,
    0,
  )


def test_a_run_may_be_named_as_an_agent(original, tmp_path):
  path = shutil.copytree(original, tmp_path / 'seed_1')
  assert podrl.load(path).num_updates == 8


def test_a_full_disk_ends_a_run_in_one_line(tmp_path, monkeypatch, capsys):
  free = iter([2**40, 2**40, 0])  # The third checkpoint does not fit.
  with monkeypatch.context() as patch:
    patch.setattr(
      shutil,
      'disk_usage',
      lambda path: shutil._ntuple_diskusage(2**40, 0, next(free)),
    )
    arguments = ['--config.checkpoint.every_env_steps=64']
    assert helpers.run(tmp_path / 'run', *arguments) == signals.FAILED
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and 'checkpoint 3 needs 1.' in said
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['exit'] == 'failed'
  assert checkpoint.steps(str(tmp_path / 'run')) == [2, 1]
  assert helpers.run(tmp_path / 'run', '--resume') == 0


def test_a_directory_that_vanishes_does_not_hide_the_failure(
  tmp_path, monkeypatch, capsys
):
  def fail(*_):
    shutil.rmtree(tmp_path / 'run' / 'checkpoints')
    raise RuntimeError('the failure')

  monkeypatch.setattr(Anakin, 'advance', fail)
  assert helpers.run(tmp_path / 'run') == signals.FAILED
  last = capsys.readouterr().err.splitlines()[-1]
  assert last.startswith('error: RuntimeError: the failure (')


def test_a_file_that_cannot_be_written_ends_a_run_in_one_line(
  tmp_path, monkeypatch, capsys
):
  class Full(sinks.Lines):
    def __init__(self, file, *arguments):
      super().__init__(file, *arguments)
      self._file.close()
      self._file = open('/dev/full', 'a')

  monkeypatch.setattr(sinks, 'Lines', Full)
  assert helpers.run(tmp_path / 'run') == signals.FAILED
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and 'Full could not write: [Errno 28]' in said


def _start(workdir):
  """Starts a run that saves often, in another process."""
  command = [
    sys.executable,
    str(helpers.ROOT / 'experiments' / 'anakin_catch.py'),
    *helpers.TINY,
    '--config.total_env_steps=1e9',
    '--config.log.every_updates=100',
    '--config.checkpoint.every_seconds=0.2',
    f'--workdir={workdir}',
    '--resume',
  ]
  return subprocess.Popen(
    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
  )


def _newest(workdir):
  return max(checkpoint.steps(str(workdir)), default=0)


def _kill_after_checkpoint(workdir, seconds):
  """Starts a run, and kills it `seconds` after its first new checkpoint."""
  first, process = _newest(workdir), _start(workdir)
  while _newest(workdir) == first and process.poll() is None:
    time.sleep(0.01)
  time.sleep(seconds)
  assert process.poll() is None
  process.kill()
  said = process.communicate()[1]
  assert process.returncode == -signal.SIGKILL and 'Traceback' not in said
  # JAX may warn of an incomplete program in XLA's cache, and compile it again.
  assert 'skipped' not in said and '\nerror: ' not in said, said
  if first:
    assert f'resuming after update {first}' in said


def test_kill_9_loses_no_more_than_a_period(tmp_path, monkeypatch, capfd):
  workdir = tmp_path / 'run'
  _kill_after_checkpoint(workdir, 0.2)
  newest = _newest(workdir)
  arguments = [
    '--config.total_env_steps=1e9',
    '--config.log.every_updates=100',
    '--resume',
  ]
  _signal_at(monkeypatch, Anakin, 'advance', 3)
  assert helpers.run(workdir, *arguments) == signals.PREEMPTED
  said = capfd.readouterr().err  # faulthandler needs capfd's file.
  assert f'resuming after update {newest}' in said and 'skipped' not in said
  assert _newest(workdir) > newest


@pytest.mark.slow
def test_twenty_kills_lose_no_more_than_a_period(tmp_path):
  workdir, rng = tmp_path / 'run', random.Random(0)
  for i in range(20):
    if i % 3 == 1:  # Kill it at any time, even at its start.
      process = _start(workdir)
      time.sleep(rng.uniform(0.0, 10.0))
      process.kill()
      assert 'Traceback' not in process.communicate()[1]
    else:
      _kill_after_checkpoint(workdir, rng.uniform(0.0, 1.0))
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()[:-1]
  numbers = [json.loads(line)['num_updates'] for line in lines]
  assert numbers == [100 * i for i in range(1, len(lines) + 1)]
