"""Tests what a signal changes in the process."""

import os
import signal

from podrl.run import signals


def test_a_second_signal_ends_the_process_and_the_grace_time_runs(monkeypatch):
  calls = []
  monkeypatch.setattr(
    signals.faulthandler,
    'dump_traceback_later',
    lambda seconds, exit: calls.append((seconds, exit)),
  )
  numbers = signal.SIGINT, signal.SIGTERM
  before = [signal.getsignal(x) for x in numbers]
  handler = signals.Signals()
  handler.grace_seconds = 7.0
  try:
    os.kill(os.getpid(), signal.SIGTERM)
    assert handler.exit_code == signals.PREEMPTED and calls == [(7.0, True)]
    assert [signal.getsignal(x) for x in numbers] == [signal.SIG_DFL] * 2
  finally:
    handler.close()
  assert [signal.getsignal(x) for x in numbers] == before


def test_connected_processes_leave_sigterm_to_jax():
  numbers = signal.SIGINT, signal.SIGTERM
  before = [signal.getsignal(x) for x in numbers]
  handler = signals.Signals(is_distributed=True)
  try:
    changed = [signal.getsignal(x) != y for x, y in zip(numbers, before)]
    assert changed == [True, False]
  finally:
    handler.close()
  assert [signal.getsignal(x) for x in numbers] == before
