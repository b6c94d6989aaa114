"""Tests the clocks of devices, cores and actors."""

import os
import subprocess
import sys
import time

import pytest

from podrl.drivers import stages


def test_a_clock_takes_the_union(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(stages.time, 'perf_counter', lambda: now[0])
  busy = stages.Busy()
  # Calls last from 1 to 4, from 2 to 6, and from 8 on: 5 + 1 busy seconds by 9.
  for seconds, call in (
    (1, busy.enter),
    (2, busy.enter),
    (4, busy.leave),
    (6, busy.leave),
    (8, busy.enter),
  ):
    now[0] = seconds
    call()
  now[0] = 9.0
  assert busy.seconds() == 6.0


def test_a_device_that_learns_and_acts_counts_once(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(stages.time, 'perf_counter', lambda: now[0])
  actor = dict.fromkeys(('environment', 'inference', 'actor_waiting'), 0.0)
  found = stages.Stages(['a', 'b'], ['b', 'c'], 2)
  found.clocks['b'].enter()  # An actor uses b from 0 to 3.
  now[0] = 2.0
  with found.updating():  # The update lasts from 2 to 6.
    updating = [found.clocks[x].is_updating for x in 'abc']
    assert updating == [False, True, True]
    now[0] = 3.0
    found.clocks['b'].leave()
    now[0] = 6.0
  seconds = found.seconds([actor])
  assert seconds['busy_actor_devices'] == (0 + 6) / 2
  assert seconds['busy_learner_devices'] == (6 + 4) / 2


def test_cores_count_threads_and_processes_that_live():
  before, start = stages.cpu_seconds(), time.perf_counter()
  child = subprocess.Popen(
    [sys.executable, '-c', 'while True: pass'], stdout=subprocess.DEVNULL
  )
  try:
    own = time.process_time()
    while stages.cpu_seconds() - before - (time.process_time() - own) < 0.3:
      assert time.perf_counter() - start < 60
      time.sleep(0.05)
  finally:
    child.kill()
    alive = stages.cpu_seconds()
    child.wait()
  # The seconds of a process that ended still count.
  assert stages.cpu_seconds() >= alive - 0.02


def test_idle_cores_are_idle_or_wait_for_a_disk(tmp_path, monkeypatch):
  text = 'cpu 9 9 9 900 90\ncpu0 1 2 3 100 20 6\ncpu1 1 1 1 300 0 0\n'
  (tmp_path / 'stat').write_text(text)
  monkeypatch.setattr(stages, '_STAT', str(tmp_path / 'stat'))
  ticks_per_second = os.sysconf('SC_CLK_TCK')
  assert stages.idle_core_seconds({0}) == 120 / ticks_per_second
  assert stages.idle_core_seconds({0, 1}) == 420 / ticks_per_second
  assert stages.idle_core_seconds({0, 2}) is None


@pytest.mark.parametrize(
  'text, expected',
  [
    ('max 100000', 8),
    ('250000 100000', 3),
    ('50000 100000', 1),
    ('1600000 100000', 8),
    ('', 8),
    (None, 8),
  ],
)
def test_a_quota_bounds_the_cores(text, expected, tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(8))
  monkeypatch.setattr(stages, '_QUOTA', str(tmp_path / 'cpu.max'))
  if text is not None:
    (tmp_path / 'cpu.max').write_text(text + '\n')
  assert stages.num_cores() == expected
