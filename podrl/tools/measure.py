"""What this machine does: updates on one core, and all-reduces between two.

Each measurement runs in processes of their own, `podrl.tools.probe`, each pinned to
one core.
"""

from collections.abc import Sequence
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import numpy as np

from podrl.run.config import is_sebulba
from podrl.tools.chips import Chip
from podrl.tools.probe import SIZES, Row

_SECONDS = 1.5  # About so long is one measurement of updates.


class Times(NamedTuple):
  """Seconds of single-device updates, one number for each.

  Attributes:
    alone: `[N]`, the other core idle.
    busy: `[N]`, with the same work on the other core, in no connection.
    stages: medians of Sebulba's stages where they do not overlap.
  """

  alone: np.ndarray
  busy: np.ndarray
  stages: Row


class _Process:
  """A process of `podrl.tools.probe`.

  Args:
    core: that it is pinned to.
    task: of `podrl.tools.probe`.
    arguments: its own.
  """

  def __init__(self, core: int, task: str, arguments: dict[str, Any]):
    self._errors = tempfile.TemporaryFile('w+')
    self._process = subprocess.Popen(
      [sys.executable, '-m', 'podrl.tools.probe', task, str(core)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''},
    )
    self.begin(arguments)

  def begin(self, order: Any) -> None:
    """Sends an order, to be followed by `end`."""
    self._process.stdin.write(json.dumps(order) + '\n')
    self._process.stdin.flush()

  def end(self) -> list[Row]:
    """Waits for the rows.

    Raises:
      ValueError: where the process ended instead.
    """
    line = self._process.stdout.readline()
    if not line:
      self._errors.seek(0)
      lines = self._errors.read().strip().splitlines() or ['it said nothing']
      raise ValueError(f'a measuring process ended: {lines[-1]}')
    return json.loads(line)

  def close(self) -> None:
    """Ends it."""
    self._process.kill()
    self._process.communicate()
    self._errors.close()


def run(processes: Sequence[_Process], count: int) -> list[Row]:
  """The rows of processes that run at the same time."""
  for process in processes:
    process.begin(count)
  return [row for process in processes for row in process.end()]


def open_processes(
  held: contextlib.ExitStack, tasks: Sequence[tuple[str, dict[str, Any]]]
) -> list[_Process]:
  """Starts processes, the i-th on the i-th core, and warms them up."""
  cores = sorted(os.sched_getaffinity(0))
  processes = []
  for i, (task, arguments) in enumerate(tasks):
    processes.append(_Process(cores[i % len(cores)], task, arguments))
    held.callback(processes[-1].close)
  for process in processes:
    process.end()
  return processes


def one_core(config: Any, **changes: Any) -> dict[str, Any]:
  """A configuration for one device, as JSON."""
  fields = json.loads(json.dumps(config.to_dict()))
  if is_sebulba(config):
    fields['sebulba'] |= {'actor_devices': [], 'learner_devices': []} | changes
  else:
    fields['num_devices'] = 1
  return fields


def measure_updates(config: Any, repeats: int) -> Times:
  """Times a configuration's updates on one core.

  Args:
    config: of an experiment; all its environments are one core's.
    repeats: turns of one process and of two at once.
  """
  rows = {'alone': [], 'busy': []}
  with contextlib.ExitStack() as held:
    pair = open_processes(held, [('train', {'fields': one_core(config)})] * 2)
    seconds = np.median([x['seconds'] for x in run(pair, 2)])
    count = max(3, round(_SECONDS / seconds))
    for _ in range(repeats):
      rows['alone'] += run(pair[:1], count)
      rows['busy'] += run(pair, count)
  stages: Row = {}
  if is_sebulba(config):
    with contextlib.ExitStack() as held:
      single = open_processes(
        held, [('train', {'fields': one_core(config, max_lag=0)})]
      )
      found = run(single, repeats * count)
      stages = {
        k.removeprefix('time_'): float(np.median([x[k] for x in found]))
        for k in found[0]
      }
  return Times(
    *(np.asarray([x['seconds'] for x in rows[k]]) for k in rows), stages
  )


def fit(
  num_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
  """Latency (s) and bandwidth (bytes/s) of seconds = latency + bytes / bandwidth.

  Args:
    num_bytes: `[N]` of messages.
    seconds: `[N]`; relative errors are squared, so that small ones count.
  """
  x, y = np.asarray(num_bytes, float), np.asarray(seconds, float)
  (latency, slope), *_ = np.linalg.lstsq(
    np.stack([1 / y, x / y], 1), np.ones(len(y)), rcond=None
  )
  return max(float(latency), 0.0), 1 / max(float(slope), 1e-15)


def joined(task: str, **arguments: Any) -> list[tuple[str, dict[str, Any]]]:
  """The tasks of two processes that are joined."""
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{found.getsockname()[1]}'
  return [
    (task, arguments | {'coordinator': address, 'process': i}) for i in range(2)
  ]


def link(together: Sequence[Row], apart: Sequence[Row]) -> tuple[float, float]:
  """Latency and bandwidth, of what all-reduces take among two and in one."""
  seconds = [
    max(
      1e-9,
      np.median([x[str(n)] for x in together])
      - np.median([x[str(n)] for x in apart]),
    )
    for n in SIZES
  ]
  return fit([4 * n for n in SIZES], seconds)


def measure_chip(repeats: int) -> Chip:
  """This machine's core, and what links two processes on it.

  Args:
    repeats: turns of processes that are joined and of others that are not.
  """
  with contextlib.ExitStack() as held:
    single = open_processes(held, [('peaks', {})])
    peak = {k: max(x[k] for x in run(single, 5)) for k in ('flops', 'bytes')}
  together, apart = [], []
  with contextlib.ExitStack() as held:
    pair = open_processes(held, joined('all_reduces'))
    others = open_processes(held, [('all_reduces', {})] * 2)
    for _ in range(repeats):
      together += run(pair, 10)
      apart += run(others, 10)
  latency, bandwidth = link(together, apart)
  return Chip(
    peak['flops'],
    peak['flops'],
    peak['bytes'],
    operation_seconds=0.0,
    link_bandwidth=bandwidth,
    hop_seconds=latency / 2,
    torus_dims=1,
    pod_size=2**31,
    far_bandwidth=bandwidth,
    far_hop_seconds=0.0,
    host_cpus=1.0,
  )
