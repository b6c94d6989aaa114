"""Measures how Sebulba's threads spend time, and how busy its devices are."""

from collections.abc import Iterator, Mapping, Sequence, Set
import contextlib
import os
import resource
import threading
import time

import jax
import numpy as np

# Stages of an actor that may act; an actor that must not act is in PARKED.
STAGES = ('environment', 'inference', 'actor_waiting')
PARKED = 'parked'
# The part of an actor's inference in which it waits for an update.
BEHIND_UPDATE = 'behind_update'
_LEARNER = ('update', 'learner_waiting', 'hand_off')  # Stages of the learner.

_STAT = '/proc/stat'  # It contains the idle time of each core.
_QUOTA = '/sys/fs/cgroup/cpu.max'  # It contains a CPU quota and its period.


def num_cores() -> int:
  """Counts the cores that this process may use; rounds a quota up."""
  cores = os.cpu_count() or 1
  if hasattr(os, 'sched_getaffinity'):
    cores = len(os.sched_getaffinity(0))
  try:
    with open(_QUOTA, encoding='ascii') as file:
      quota, period = map(int, file.read().split())
    return min(cores, -(-quota // period))
  except (OSError, ValueError):  # The file is missing, or the quota is 'max'.
    return cores


def _cpu_seconds_of_descendants(pid: int) -> float:
  """Returns CPU seconds of a process's running descendants, from /proc."""
  seconds = 0.0
  try:
    # The main thread starts processes; its thread id is the process id.
    with open(f'/proc/{pid}/task/{pid}/children', encoding='ascii') as file:
      children = file.read().split()
    for child in children:
      with open(f'/proc/{child}/stat', encoding='utf-8') as file:
        fields = file.read().rpartition(')')[2].split()
      seconds += sum(map(int, fields[11:13])) / os.sysconf('SC_CLK_TCK')
      seconds += _cpu_seconds_of_descendants(int(child))
  except (OSError, ValueError):  # The child has ended, or there is no /proc.
    pass
  return seconds


def cpu_seconds() -> float:
  """Returns the CPU seconds of this process, its threads and its descendants.

  envpool uses threads, and gymnasium's 'async' mode uses processes.
  """
  ended = resource.getrusage(resource.RUSAGE_CHILDREN)
  living = time.process_time() + _cpu_seconds_of_descendants(os.getpid())
  return living + ended.ru_utime + ended.ru_stime


def idle_core_seconds(cores: Set[int]) -> float | None:
  """Returns the sum of the idle seconds of `cores`.

  It returns None if the system does not report idle time. Only Linux does.
  """
  seconds, found = 0.0, set()
  try:
    with open(_STAT, encoding='ascii') as file:
      for line in file:
        name, *fields = line.split()
        core = name.removeprefix('cpu')
        if name != core and core.isdigit() and int(core) in cores:
          # These two fields are idle time, and time spent waiting for a disk.
          seconds += sum(map(int, fields[3:5])) / os.sysconf('SC_CLK_TCK')
          found.add(int(core))
  except (OSError, ValueError):
    return None
  return seconds if found == {*cores} else None


class Busy:
  """Measures the seconds in which at least one of several threads works."""

  is_updating = False  # Whether an update runs on the device of this clock.

  def __init__(self):
    self._lock = threading.Lock()
    self._num_inside = 0
    self._since = self._seconds = 0.0

  def enter(self) -> None:
    """Call this when a thread begins to work."""
    with self._lock:
      if not self._num_inside:
        self._since = time.perf_counter()
      self._num_inside += 1

  def leave(self) -> None:
    """Call this when a thread ends its work."""
    with self._lock:
      self._num_inside -= 1
      if not self._num_inside:
        self._seconds += time.perf_counter() - self._since

  def seconds(self) -> float:
    """Returns the seconds so far, the current work included."""
    with self._lock:
      present = time.perf_counter() - self._since if self._num_inside else 0.0
      return self._seconds + present


class Stages:
  """Measures the learner's stages, and the work of devices and cores.

  A device is busy while an actor chooses actions on it, or while the learner
  updates parameters on it. If both happen at the same time, the time counts
  once, because one program waits for the other. All devices belong to this
  process, which may use `num_cores` cores.
  """

  def __init__(
    self,
    actor_devices: Sequence[jax.Device],
    learner_devices: Sequence[jax.Device],
    num_cores: int,
  ):
    self.clocks = {x: Busy() for x in [*actor_devices, *learner_devices]}
    self._actor_clocks = [self.clocks[x] for x in actor_devices]
    self._learner_clocks = [self.clocks[x] for x in learner_devices]
    self._num_cores = num_cores
    has_affinity = hasattr(os, 'sched_getaffinity')
    cores = os.sched_getaffinity(0) if has_affinity else frozenset()
    # If a quota allows fewer cores, this process cannot use all idle cores, so
    # it does not measure idle time.
    self._cores = cores if len(cores) == num_cores else frozenset()
    self._learner = dict.fromkeys(_LEARNER, 0.0)
    self._mark = time.perf_counter()

  def begin(self) -> float:
    """Begins the learner's next stage; returns `time.perf_counter()`."""
    self._mark = time.perf_counter()
    return self._mark

  def spend(self, stage: str) -> None:
    """Adds the time since the last `begin` or `spend` to a learner stage."""
    now = time.perf_counter()
    self._learner[stage] += now - self._mark
    self._mark = now

  @contextlib.contextmanager
  def updating(self) -> Iterator[None]:
    """Counts the learner devices as busy inside the context."""
    for clock in self._learner_clocks:
      clock.enter()
      clock.is_updating = True
    try:
      yield
    finally:
      for clock in self._learner_clocks:
        clock.is_updating = False
        clock.leave()

  def seconds(self, actors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns cumulative seconds, by the names that records use.

    Each item of `actors` is the result of `Actor.seconds` of one actor. For
    stages of actors, `time_*` is the mean over actors. `busy_actor_devices` and
    `busy_learner_devices` are means over devices. `busy_cores` and `idle_cores`
    are means over cores.
    """

    def mean(clocks: Sequence[Busy]) -> float:
      return float(np.mean([x.seconds() for x in clocks]))

    seconds = {f'time_{k}': x for k, x in self._learner.items()}
    for stage in actors[0]:
      seconds[f'time_{stage}'] = float(np.mean([x[stage] for x in actors]))
    idle = idle_core_seconds(self._cores) if self._cores else None
    if idle is not None:
      seconds['idle_cores'] = idle / self._num_cores
    return seconds | {
      'busy_cores': cpu_seconds() / self._num_cores,
      'busy_actor_devices': mean(self._actor_clocks),
      'busy_learner_devices': mean(self._learner_clocks),
    }


def leave_out_parked(stages: Mapping[str, float]) -> dict[str, float]:
  """Converts means over all actors to means over actors that may act."""
  means = {**stages}
  parked = means.pop(f'time_{PARKED}')
  names = [f'time_{stage}' for stage in STAGES]
  scale = 1 + parked / max(sum(means[name] for name in names), 1e-9)
  names += [x for x in means if x == f'time_{BEHIND_UPDATE}']
  return means | {name: means[name] * scale for name in names}
