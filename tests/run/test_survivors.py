"""Tests what a run loses if it loses a process: host copies and restarts."""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import helpers
import jax
import numpy as np
import pytest
from test_resume import _assert_close, _plain, _signal_at, _state

import podrl
from podrl import signals
from podrl.drivers import spmd
from podrl.drivers.anakin import Anakin
from podrl.records import checkpoint
from podrl.records.workdir import WriteError
from podrl.run import loop

pytestmark = pytest.mark.timeout(600)


def _gather(state, into):
  """Makes a copy that has arrived."""
  return jax.block_until_ready(spmd.gather(state, into))


def _save_copies(monkeypatch):
  """Makes a run of one process write host copies in place of checkpoints."""

  def save(self, num_updates, state, progress, best):
    del best
    copy = checkpoint.HostCopy(self._path)
    state = checkpoint.change_learner(state, memory=())
    make = functools.partial(_gather, state)
    copy.renew(num_updates, make, progress)
    copy.write('a reason')

  monkeypatch.setattr(checkpoint.Checkpoints, 'save', save)


@pytest.mark.parametrize(
  'arguments',
  [
    [*helpers.MEMORY, '--config.network.dtype=bfloat16'],
    helpers.slow(['--config.num_seeds=2']),
    helpers.slow(
      ['--config.env.options.opponent=pool', '--config.env.name=tic_tac_toe']
    ),
  ],
)
def test_a_run_resumed_from_a_copy_has_the_same_bits(
  arguments, tmp_path, monkeypatch
):
  if 'opponent' in arguments[0]:
    arguments = [*arguments, '--config.env.suite=pgx']
  whole, path = tmp_path / 'whole', tmp_path / 'run'
  assert helpers.run(whole, *arguments) == 0
  with monkeypatch.context() as patch:
    _save_copies(patch)
    _signal_at(patch, Anakin, 'advance', 3)
    assert helpers.run(path, *arguments) == signals.PREEMPTED
  (step,) = checkpoint.steps(str(path))
  assert 0 < step < 8
  files = sorted(x.name for x in path.glob('checkpoints/*/*/*'))
  assert files == ['arrays.npz', 'arrays.npz', 'metadata']
  loaded = podrl.load(path, seed=0) if 'seeds' in arguments[0] else None
  loaded = loaded or podrl.load(path)
  assert loaded.num_updates == step
  assert helpers.run(path, *arguments, '--resume') == 0
  _assert_close(_state(path), _state(whole), 0)
  assert _plain(helpers.read_records(path)) == _plain(
    helpers.read_records(whole)
  )


def _tree(**changes):
  """Returns the state of a learner, with a few arrays."""
  mesh = spmd.make_mesh(jax.devices()[:2])
  arrays = {'a': np.arange(6, dtype=np.float32), 'b': np.ones((), np.int32)}
  variables = checkpoint.Variables(arrays | changes, (), {})
  state = checkpoint.LearnerState(
    **dict.fromkeys(checkpoint.LearnerState._fields, ())
  )._replace(variables=variables)
  return spmd.place(state, mesh, spmd.REPLICATED)


def test_the_newest_copy_that_has_arrived_is_written_once(tmp_path):
  (tmp_path / 'checkpoints').mkdir()
  copies = [checkpoint.HostCopy(str(tmp_path)) for _ in range(2)]
  assert copies[0].write('too early') is None
  for copy in copies:
    for step in (3, 5):
      make = functools.partial(_gather, _tree(b=np.int32(step)))
      copy.renew(step, make, {'num_resumes': 0})
  assert [copy.write('lost') for copy in copies] == [5, None]
  assert checkpoint.steps(str(tmp_path)) == [5]
  read = checkpoint.read_state(str(tmp_path), 5, _tree())
  params, expected = read.variables.params, _tree().variables.params
  np.testing.assert_array_equal(params['a'], np.arange(6))
  assert params['b'] == 5 and params['a'].sharding == expected['a'].sharding
  progress = checkpoint._read_progress(str(tmp_path), 5)
  assert progress['num_failures'] == 1 and progress['reason'] == 'lost'

  class Late:  # A copy that the device has not made yet.
    def is_ready(self):
      return False

  for step in 6, 7:  # From the third copy on, earlier ones give their memory.
    copies[0].renew(step, functools.partial(_gather, _tree()), {})
    copies[0].settle()
  copies[0]._next = 9, Late(), {}
  assert copies[0].write('lost') == 7
  # Damage is found as in any other checkpoint.
  file = tmp_path / 'checkpoints' / '7' / 'variables' / 'arrays.npz'
  file.write_bytes(file.read_bytes()[:-1])
  with pytest.raises(ValueError, match=r'arrays\.npz is damaged'):
    checkpoint._verify(str(tmp_path / 'checkpoints' / '7'))


def test_a_copy_on_a_full_disk_is_one_error(tmp_path, monkeypatch):
  (tmp_path / 'checkpoints').mkdir()
  copy = checkpoint.HostCopy(str(tmp_path))
  copy.renew(3, functools.partial(_gather, _tree()), {})
  full = shutil._ntuple_diskusage(2**40, 2**40, 0)
  with monkeypatch.context() as patch:
    patch.setattr(shutil, 'disk_usage', lambda path: full)
    with pytest.raises(WriteError, match='checkpoint 3 needs 1'):
      copy.write('lost')
  assert not [*tmp_path.glob('checkpoints/*')]
  # The next start removes what a process that was killed has left.
  (tmp_path / 'checkpoints' / '3.unfinished').mkdir()
  checkpoint.Checkpoints(str(tmp_path), 2).close()
  assert not [*tmp_path.glob('checkpoints/*')]


def test_a_run_that_fails_three_times_at_an_update_stops(
  tmp_path, monkeypatch, capsys
):
  advance = Anakin.advance

  def fail(self, num_updates, plan):
    if int(self.learner_state.num_updates) >= 3:
      raise RuntimeError('it broke')
    return advance(self, 3, plan)

  run = tmp_path / 'run'
  with monkeypatch.context() as patch:
    patch.setattr(Anakin, 'advance', fail)
    codes = [helpers.run(run)]
    codes += [helpers.run(run, '--resume') for _ in range(3)]
    assert codes == [signals.FAILED] * 3 + [signals.MISTAKE]
    said = capsys.readouterr().err.splitlines()[-1]
    assert f'{run} failed 3 times after update 3, so it is not resumed' in said
    assert '(RuntimeError: it broke' in said
    # Then the count begins again.
    assert helpers.run(run, '--resume') == signals.FAILED
  with monkeypatch.context() as patch:  # A mistake does not count.
    patch.setattr(checkpoint, 'read_state', mock.Mock(side_effect=ValueError))
    for _ in range(4):
      assert helpers.run(run, '--resume') == signals.MISTAKE
  assert 'so it is not resumed' not in capsys.readouterr().err
  _signal_at(monkeypatch, Anakin, 'start', 1)
  for _ in range(4):  # Neither does an end by a signal.
    assert helpers.run(run, '--resume') == signals.PREEMPTED
    _signal_at(monkeypatch, Anakin, 'start', 1)
  monkeypatch.undo()
  assert helpers.run(run, '--resume') == 0


def test_a_process_saves_its_copy_even_if_all_fail_alike(monkeypatch):
  # Then no other process learns of a failure and saves.
  calls, trainer = [], mock.Mock()
  trainer.cluster.watchdog.fail.side_effect = lambda *_, **__: calls.append(0)
  trainer._save_copy.side_effect = calls.append
  monkeypatch.setattr(loop, 'exit_now', mock.Mock(side_effect=SystemExit))
  with pytest.raises(SystemExit):
    loop.Trainer._fail(trainer, RuntimeError('it broke'))
  assert calls == [0, 'RuntimeError: it broke']


_POD = [
  '--config.env.num_envs=8',
  '--config.unroll_length=8',
  '--config.eval.num_episodes=8',
  '--config.log.every_updates=100',
  '--config.network.hidden_sizes=8',
  '--config.log.tensorboard=False',
  '--config.num_devices=1',
  '--config.checkpoint.host_seconds=1',
]


class _Launched:
  """A run that launch/local.sh starts and restarts."""

  def __init__(self, path, num_processes, restarts, *arguments):
    self.path, self.log = path, path.parent / f'{path.name}.log'
    script = helpers.ROOT / 'experiments' / 'anakin_catch.py'
    command = [helpers.ROOT / 'launch' / 'local.sh', str(num_processes)]
    command += [f'--restarts={restarts}', '--', sys.executable, str(script)]
    with open(self.log, 'w') as log:
      self.script = subprocess.Popen(
        [*command, f'--workdir={path}', *_POD, *arguments],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
      )

  def pids(self):
    """Returns the processes of the run that are alive, by their number."""
    found = {}
    for name in filter(str.isdigit, os.listdir('/proc')):
      with contextlib.suppress(OSError):
        with open(f'/proc/{name}/cmdline') as file:
          words = file.read().split('\0')
        flags = dict(x.split('=', 1) for x in words if '=' in x)
        if flags.get('--workdir') == str(self.path) and '--process_id' in flags:
          found[int(flags['--process_id'])] = int(name)
    return found

  def num_updates(self):
    """Returns the number of updates in the last record."""
    try:
      lines = (self.path / 'metrics.jsonl').read_text().splitlines()
      return json.loads(lines[-1])['num_updates']
    except (FileNotFoundError, IndexError, ValueError):
      return 0

  def wait_beyond(self, num_updates, seconds=150):
    """Waits for a record of a later update; returns the seconds."""
    start = time.monotonic()
    while self.num_updates() <= num_updates:
      assert self.script.poll() is None, self.log.read_text()[-3000:]
      assert time.monotonic() < start + seconds, self.log.read_text()[-3000:]
      time.sleep(0.05)
    return time.monotonic() - start

  def resumed(self):
    """Returns the updates after which the run was resumed."""
    parts = self.log.read_text(errors='replace').split('resuming after update ')
    return [int(x.split(maxsplit=1)[0].rstrip(';')) for x in parts[1:]]

  def finish(self, seconds=300):
    try:
      return self.script.wait(seconds)
    finally:
      self.kill()

  def kill(self):
    self.script.kill()
    for pid in self.pids().values():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_killed_process_costs_little_and_changes_no_bit(tmp_path):
  total = '--config.total_env_steps=96000', '--heartbeat_seconds=3'
  run = _Launched(tmp_path / 'run', 2, 3, *total)
  try:
    run.wait_beyond(300)
    os.kill(run.pids()[1], signal.SIGKILL)
    assert run.finish() == 0, run.log.read_text()
  finally:
    run.kill()
  said = run.log.read_text()
  assert 'error: process 1 is gone' in said
  (resumed,) = run.resumed()
  assert f'saved after update {resumed}, from a copy in host memory' in said
  assert 'restart 1 of 3' in said
  whole = _Launched(tmp_path / 'whole', 2, 0, *total)
  assert whole.finish() == 0
  a, b = run.path, whole.path
  _assert_close(podrl.load(a).variables, podrl.load(b).variables, 0)
  assert _plain(helpers.read_records(a)) == _plain(helpers.read_records(b))


@pytest.mark.slow  # Parts of it are in the quick tests.
def test_a_run_goes_on_with_fewer_processes_and_with_more(tmp_path):
  numbers, total = [4, 2, 4], '--config.total_env_steps=1e9'
  reached, path = 0, tmp_path / 'run'
  for i, number in enumerate(numbers):
    run = _Launched(path, number, 0, total, *(['--resume'] if i else []))
    try:
      run.wait_beyond(reached + 100)
      if i:
        run.script.send_signal(signal.SIGTERM)
      else:  # The others save their copy.
        os.kill(run.pids()[3], signal.SIGKILL)
      assert run.finish() == (signals.PREEMPTED if i else 137)
    finally:
      run.kill()
    if i:
      assert run.resumed() == [reached]
    before, reached = reached, checkpoint.steps(str(path))[0]
    assert reached > before
  changed = {
    x['num_updates']: x['num_processes']
    for x in helpers.read_records(path)
    if 'num_processes' in x
  }
  assert [*changed.values()] == [2, 4]


def _kill(run, rng, number):
  pids = run.pids()
  for process in rng.sample(range(4), number):
    os.kill(pids[process], signal.SIGKILL)


@contextlib.contextmanager
def _full_disk(path):
  """A block in which the disk of a run is full; frees it after 20 s."""
  file = path.parent / 'filler'
  with open(file, 'wb', buffering=0) as filler, contextlib.suppress(OSError):
    while True:
      filler.write(bytes(4096))
  yield
  time.sleep(20)
  file.unlink()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize('harm', ['one', 'two', 'stop', 'full'])
def test_a_run_goes_on_whatever_is_lost(harm, tmp_path):
  """Four processes on a machine, and a harm at a random moment, 20 rounds."""
  rng, root = random.Random(harm), tmp_path / 'disk'
  root.mkdir()
  if harm == 'full':
    mount = ['mount', '-t', 'tmpfs', '-o', 'size=16m', 'tmpfs', str(root)]
    if subprocess.run(mount, capture_output=True).returncode:
      pytest.skip('this needs the right to mount a small disk')
  num_rounds = int(os.environ.get('PODRL_ROUNDS', '20'))
  total = '--config.total_env_steps=1e9'
  # Without space for the copy, the run goes on from a checkpoint.
  steps = 6400 if harm == 'full' else 0
  every = f'--config.checkpoint.every_env_steps={steps}'
  run = _Launched(root / 'run', 4, 10 * num_rounds, total, every)
  try:
    run.wait_beyond(200)
    for _ in range(num_rounds):
      time.sleep(rng.uniform(1.0, 6.0))
      before, number = run.num_updates(), len(run.resumed())
      start = time.monotonic()
      if harm == 'stop':
        os.kill(run.pids()[rng.randrange(4)], signal.SIGSTOP)
      elif harm == 'full':
        with _full_disk(run.path):
          _kill(run, rng, 1)
      else:
        _kill(run, rng, {'one': 1, 'two': 2}[harm])
      while len(run.resumed()) == number:
        assert run.script.poll() is None, run.log.read_text()[-3000:]
        time.sleep(0.05)
      resumed = run.resumed()[-1]
      run.wait_beyond(max(before, resumed))
      seconds = time.monotonic() - start
      print(f'{harm}: at {before}, from {resumed}, after {seconds:.0f} s')
      if harm != 'full':
        # A record comes every 100 updates, so up to 100 more were done.
        assert before - resumed < 400
    run.script.send_signal(signal.SIGTERM)
    assert run.finish() == signals.PREEMPTED
    updates = [x['num_updates'] for x in helpers.read_records(run.path)]
    assert updates[:-1] == list(range(100, 100 * len(updates), 100))
  finally:
    run.kill()
    if harm == 'full':
      subprocess.run(['umount', str(root)], check=True)
