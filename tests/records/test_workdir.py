"""Tests a run on file systems that are not like a disk, and the lock."""

import errno
import functools
import os
import socket
import subprocess
import sys

import helpers
import pytest

from podrl import signals
from podrl.records import checkpoint, workdir

_RUN = ('--config.log.tensorboard=False', '--config.total_env_steps=128')


def _refuse(operation, mount, monkeypatch, code=errno.EPERM):
  """Makes `mount` refuse an operation, like a bucket that is mounted."""

  def check(is_refused, function, path, *arguments, **options):
    is_in = os.path.abspath(path).startswith(str(mount))
    if is_in and is_refused(path, *arguments):
      raise OSError(code, os.strerror(code))
    return function(path, *arguments, **options)

  names, is_refused = {
    'append to a file': (['open'], lambda path, flags, *_: flags & os.O_APPEND),
    'rename a file to the name of another': (
      ['rename', 'replace'],
      lambda _, target: os.path.exists(target),
    ),
    'rename a directory': (['rename'], lambda path, _: os.path.isdir(path)),
  }[operation]
  for name in names:
    changed = functools.partial(check, is_refused, getattr(os, name))
    monkeypatch.setattr(os, name, changed)


@pytest.mark.parametrize('is_new', [True, False])
@pytest.mark.parametrize(
  'operation',
  [
    'append to a file',
    'rename a file to the name of another',
    'rename a directory',
  ],
)
def test_a_run_does_not_begin_where_a_file_system_lacks_what_it_needs(
  operation, is_new, tmp_path, monkeypatch, capsys
):
  path = tmp_path / 'run'
  path.mkdir()
  if not is_new:
    assert helpers.run(path, *_RUN) == 0
  capsys.readouterr()
  before = {x: x.read_bytes() for x in path.rglob('*') if x.is_file()}
  with monkeypatch.context() as context:
    _refuse(operation, path, context)
    arguments = ('--config.total_env_steps=256', '--resume')
    code = helpers.run(path, *_RUN, *(() if is_new else arguments))
  said = capsys.readouterr().err
  assert code == signals.MISTAKE
  assert f'its file system cannot {operation} (Operation not perm' in said
  assert said.count('\n') == 1
  after = {x: x.read_bytes() for x in path.rglob('*') if x.is_file()}
  after.pop(path / '.lock')
  before.pop(path / '.lock', None)
  assert after == before


def test_a_disk_that_is_full_is_no_mistake(tmp_path, monkeypatch, capsys):
  # It may have space again, so a launcher may start the run again.
  _refuse('append to a file', tmp_path, monkeypatch, errno.ENOSPC)
  assert helpers.run(tmp_path / 'run', *_RUN) == signals.FAILED
  said = capsys.readouterr().err
  assert 'cannot append to a file (No space left on device)' in said
  assert said.count('\n') == 1


def test_a_bucket_has_the_records_of_each_checkpoint(tmp_path, monkeypatch):
  # A mounted bucket gets the lines of an open file only when it is synced.
  bucket, counts, fsync = {}, [], os.fsync

  def sync(file):
    fsync(file)
    name = os.path.realpath(f'/proc/self/fd/{file.fileno()}')
    with open(name, 'rb') as copied:
      bucket[os.path.basename(name)] = copied.read().count(b'\n')

  save = checkpoint.Checkpoints.save

  def check(self, num_updates, state, progress, best):
    lines = bucket['metrics.jsonl'], bucket['episodes.csv']
    counts.append(lines)
    assert lines[0] == progress['num_records'][0]
    assert lines[1] == progress['num_episode_lines'][0]
    return save(self, num_updates, state, progress, best)

  monkeypatch.setattr(os, 'fsync', sync)
  monkeypatch.setattr(checkpoint.Checkpoints, 'save', check)
  options = (
    '--config.log.episodes=True',
    '--config.checkpoint.every_env_steps=1',
  )
  assert helpers.run(tmp_path / 'run', *_RUN, *options) == 0
  assert counts[-1][0] >= 1 and counts[-1][1] > 1


def test_the_lock_names_the_process_that_has_it(tmp_path):
  program = (
    'import sys; from podrl.records import workdir\n'
    'with workdir.lock(sys.argv[1]):\n'
    '  print(flush=True); sys.stdin.read()\n'
  )
  other = subprocess.Popen(
    [sys.executable, '-c', program, tmp_path],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  with other:
    other.stdout.readline()
    name = f'^process {other.pid} of {socket.gethostname()} is writing to'
    with pytest.raises(ValueError, match=name):
      with workdir.lock(str(tmp_path)):
        pass
    other.kill()
  with workdir.lock(str(tmp_path)):  # The lock ends with its process.
    assert (tmp_path / '.lock').read_text().startswith(f'process {os.getpid()}')
