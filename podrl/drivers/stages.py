"""Where Sebulba's time goes: stages of its threads, work of its resources."""

from collections.abc import Iterator, Sequence, Set
import contextlib
import os
import resource
import time
from typing import Protocol

import numpy as np

from podrl.drivers.actor import PARKED, STAGES
from podrl.drivers.exchange import Busy

_QUOTA = '/sys/fs/cgroup/cpu.max'  # Microseconds of CPU, then of wall time.
_LEARNER = ('update', 'learner_waiting', 'hand_off')


def num_cores() -> int:
  """Cores that this process may use, with a container's quota rounded up."""
  found = (
    len(os.sched_getaffinity(0))
    if hasattr(os, 'sched_getaffinity')
    else os.cpu_count() or 1
  )
  try:
    with open(_QUOTA, encoding='ascii') as file:
      quota, period = file.read().split()
    return (
      found if quota == 'max' else min(found, -(-int(quota) // int(period)))
    )
  except (OSError, ValueError):  # Only Linux's control groups v2 have it.
    return found


class Timed(Protocol):
  """An actor, as far as its time is concerned."""

  def seconds(self) -> dict[str, float]:
    """Seconds spent in each stage."""


def _of_descendants(pid: int) -> float:
  """CPU seconds of the living descendants of a process, from Linux's /proc."""
  seconds = 0.0
  try:
    # Python starts processes from the main thread, whose id is the process's.
    with open(f'/proc/{pid}/task/{pid}/children', encoding='ascii') as file:
      children = file.read().split()
    for child in children:
      with open(f'/proc/{child}/stat', encoding='utf-8') as file:
        fields = file.read().rpartition(')')[2].split()
      seconds += sum(map(int, fields[11:13])) / os.sysconf('SC_CLK_TCK')
      seconds += _of_descendants(int(child))
  except (OSError, ValueError):  # It ended meanwhile, or there is no /proc.
    pass
  return seconds


def cpu_seconds() -> float:
  """CPU seconds of this process, all its threads, and its descendants.

  envpool steps in threads, gymnasium's 'async' environments in processes.
  """
  ended = resource.getrusage(resource.RUSAGE_CHILDREN)
  return (
    time.process_time()
    + ended.ru_utime
    + ended.ru_stime
    + _of_descendants(os.getpid())
  )


def idle_core_seconds(cores: Set[int]) -> float | None:
  """Seconds that cores had nothing to do, whoever uses them; Linux alone.

  Args:
    cores: their indices; the sum is over them.
  """
  seconds, found = 0.0, set()
  try:
    with open('/proc/stat', encoding='ascii') as file:
      for line in file:
        name, *fields = line.split()
        if name.startswith('cpu') and name[3:].isdigit():
          if int(name[3:]) in cores:  # Idle, and waiting for a disc.
            seconds += sum(map(int, fields[3:5])) / os.sysconf('SC_CLK_TCK')
            found.add(int(name[3:]))
  except (OSError, ValueError):
    return None
  return seconds if found == {*cores} else None


class Stages:
  """Adds up seconds: of the learner's stages, and of work on devices and cores.

  A device is busy while at least one actor chooses actions on it or the learner
  updates on it: the union of both, since they wait for one another there.

  Args:
    actor_devices: of this process.
    learner_devices: of this process; they may be the same.
    num_cores: that the process may use.
  """

  def __init__(
    self, actor_devices: Sequence, learner_devices: Sequence, num_cores: int
  ):
    self.clocks = {
      device: Busy() for device in [*actor_devices, *learner_devices]
    }
    self._actor_clocks = [self.clocks[x] for x in actor_devices]
    self._learner_clocks = [self.clocks[x] for x in learner_devices]
    self._num_cores = num_cores
    cores = (
      os.sched_getaffinity(0)
      if hasattr(os, 'sched_getaffinity')
      else frozenset()
    )
    # Where a quota leaves fewer, all may look idle and yet no more be had.
    self._cores = cores if len(cores) == num_cores else frozenset()
    self._learner = dict.fromkeys(_LEARNER, 0.0)
    self._mark = time.perf_counter()

  def begin(self) -> float:
    """The learner's next stage begins; returns `time.perf_counter()`."""
    self._mark = time.perf_counter()
    return self._mark

  def spend(self, stage: str) -> None:
    """What passed since the last call was one of the learner's stages."""
    now = time.perf_counter()
    self._learner[stage] += now - self._mark
    self._mark = now

  @contextlib.contextmanager
  def updating(self) -> Iterator[None]:
    """The learner devices are busy meanwhile."""
    for clock in self._learner_clocks:
      clock.enter()
    try:
      yield
    finally:
      for clock in self._learner_clocks:
        clock.leave()

  def seconds(self, actors: Sequence[Timed]) -> dict[str, float]:
    """Seconds since the start, by the keys that records have.

    `time_*` of the actors are means over them; `busy_*` of devices are means
    over these, and of cores CPU seconds by their number.
    """
    own = [actor.seconds() for actor in actors]
    seconds = {f'time_{k}': x for k, x in self._learner.items()}
    seconds |= {
      f'time_{k}': float(np.mean([x[k] for x in own])) for k in own[0]
    }
    idle = idle_core_seconds(self._cores) if self._cores else None
    if idle is not None:
      seconds['idle_cores'] = idle / self._num_cores
    return seconds | {
      'busy_cores': cpu_seconds() / self._num_cores,
      'busy_actor_devices': float(
        np.mean([x.seconds() for x in self._actor_clocks])
      ),
      'busy_learner_devices': float(
        np.mean([x.seconds() for x in self._learner_clocks])
      ),
    }


def leave_out_parked(stages: dict[str, float]) -> dict[str, float]:
  """Of actors the means over those that were not parked meanwhile."""
  names = [f'time_{stage}' for stage in STAGES]
  active = max(sum(stages[name] for name in names), 1e-9)
  scale = 1 + stages[f'time_{PARKED}'] / active
  return {
    k: x * scale if k in names else x
    for k, x in stages.items()
    if k != f'time_{PARKED}'
  }
