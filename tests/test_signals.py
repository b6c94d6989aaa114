"""Tests what a signal changes in the process."""

import contextlib
import io
import os
import signal
import subprocess
import sys

import pytest

from podrl import signals


def test_a_second_signal_ends_the_process_and_the_grace_time_runs(monkeypatch):
  calls = []
  monkeypatch.setattr(
    signals.faulthandler,
    'dump_traceback_later',
    lambda seconds, exit, file: calls.append((seconds, exit, file)),
  )
  numbers = signal.SIGINT, signal.SIGTERM
  before = [signal.getsignal(x) for x in numbers]
  handler = signals.Signals()
  handler.grace_seconds = 7.0
  try:
    os.kill(os.getpid(), signal.SIGTERM)
    assert handler.exit_code == signals.PREEMPTED and calls == [(7.0, True, 2)]
    assert [signal.getsignal(x) for x in numbers] == [signal.SIG_DFL] * 2
  finally:
    handler.close()
  assert [signal.getsignal(x) for x in numbers] == before


def test_the_grace_time_of_several_processes_begins_when_they_agree(
  monkeypatch,
):
  calls = []
  monkeypatch.setattr(
    signals.faulthandler,
    'dump_traceback_later',
    lambda seconds, **_: calls.append(seconds),
  )
  handler = signals.Signals()
  handler.grace_seconds, handler.is_distributed = 7.0, True
  try:
    os.kill(os.getpid(), signal.SIGTERM)
    assert handler.exit_code == signals.PREEMPTED and not calls
    for _ in range(2):
      handler.note(signals.PREEMPTED)
    assert calls == [7.0]
  finally:
    handler.close()


def test_a_hangup_is_a_sigterm_and_may_come_twice():
  # Under nohup, these tests ignore SIGHUP.
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
  handler = signals.Signals()
  try:
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)  # The kernel and the shell send it.
    assert handler.exit_code == signals.PREEMPTED
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  finally:
    handler.close()
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_DFL


def test_nohup_is_respected():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  handler = signals.Signals()
  try:
    os.kill(os.getpid(), signal.SIGHUP)
    assert not handler.is_set()
  finally:
    handler.close()
    signal.signal(signal.SIGHUP, before)


def test_an_environment_that_replaces_handlers_does_not_win():
  handler = signals.Signals()
  try:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    handler.keep()
    os.kill(os.getpid(), signal.SIGTERM)
    assert handler.exit_code == signals.PREEMPTED
    handler.keep()  # A second signal still ends the process.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  finally:
    handler.close()


def test_stderr_needs_no_descriptor():
  handler = signals.Signals(is_guest=True)
  handler.grace_seconds = 100.0
  try:
    with contextlib.redirect_stderr(io.StringIO()):
      os.kill(os.getpid(), signal.SIGTERM)
    assert handler.exit_code == signals.PREEMPTED
  finally:
    handler.close()


def test_the_timer_of_another_program_goes_on():
  code = """if True:
    import faulthandler, time
    from podrl.signals import Signals
    faulthandler.dump_traceback_later(1.0, exit=True)
    Signals(is_guest=True).close()
    time.sleep(60)
  """
  outcome = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, timeout=50
  )
  assert outcome.returncode == 1 and 'Timeout (0:00:01)' in outcome.stderr


def test_closed_streams_and_an_encoding_without_umlauts(tmp_path):
  code = """if True:
    import os, sys
    from podrl.signals import dump_stacks, repair_streams
    repair_streams()
    print('\\xe4')
    print('\\xe4', file=sys.stderr)
    dump_stacks()
    with open(sys.argv[1], 'w') as f:
      assert f.fileno() > 2
      os.write(2, b'text')
  """
  for end in ('>&-', '2>&-'):
    file = tmp_path / 'file'
    command = f'"$0" -c "$1" "$2" {end}'
    outcome = subprocess.run(
      ['sh', '-c', command, sys.executable, code, str(file)],
      capture_output=True,
      text=True,
      env={**os.environ, 'PYTHONIOENCODING': 'ascii'},
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout == ('' if end == '>&-' else '\\xe4\n')
    assert file.read_text() == ''


_COMMAND = """
import hashlib, signal, sys, threading, time
from absl import flags
# A program in the background, as these tests may be, ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from podrl import signals
from podrl.tools import run_command

signals._END_SECONDS = 1.0

def act(paths, values):
  try:
    if paths == ['in_c']:  # As XLA's compiler, this lets other threads run.
      threading.Timer(0.5, print, ['begins'], {'flush': True}).start()
      hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)
    print('begins', flush=True)
    time.sleep(60)
  except KeyboardInterrupt:
    if paths != ['ignored']:
      raise
    time.sleep(60)  # Some libraries ignore it while they are imported.
  finally:
    print('ends')

sys.exit(run_command(sys.argv, 'text', flags.FlagValues(), act))
"""


@pytest.mark.parametrize('kind', ['', 'in_c', 'ignored'])
def test_ctrl_c_ends_a_command_even_if_it_compiles(kind):
  command = [sys.executable, '-c', _COMMAND, *[kind] * bool(kind)]
  pipe = subprocess.PIPE
  process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
  assert process.stdout.readline() == 'begins\n'
  process.send_signal(signal.SIGINT)
  try:
    out, said = process.communicate(timeout=20)
  finally:
    process.kill()
  assert process.returncode == 130 and said == 'interrupted\n'
  assert out == ('' if kind else 'ends\n')


_FORK = """
import multiprocessing, os, signal, threading, time
from podrl import signals

def wait():
  try:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print('ready', flush=True)
    time.sleep(60)
  except KeyboardInterrupt:
    pass

handler = signals.Signals()
process = multiprocessing.get_context('fork').Process(target=wait)
threading.Thread(target=process.start).start()  # As a pool's own thread does.
while not handler.is_set():
  time.sleep(0.1)
process.join()
time.sleep(1)  # The watcher would end this process within a tenth of that.
handler.close()
print(f'ends with {handler.exit_code}')
"""


def test_the_signal_of_a_forked_environment_is_not_a_second_one():
  process = subprocess.Popen(
    [sys.executable, '-c', _FORK],
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  assert process.stdout.readline() == 'ready\n'
  os.killpg(process.pid, signal.SIGINT)  # As a terminal does.
  try:
    out, _ = process.communicate(timeout=30)
  finally:
    process.kill()
  assert process.returncode == 0 and out == 'ends with 130\n'
