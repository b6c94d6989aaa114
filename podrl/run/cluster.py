"""Several processes of one run: their start, and what they agree on.

Every process issues the same updates in the same order. What depends on a clock
or on a signal process 0 decides, and the others read it in the key-value store
of JAX's coordination service.
"""

from collections.abc import Callable
import hashlib
import json
import os
import pathlib
import socket
import time
from typing import Any

import jax
from jax._src import distributed  # The store has no public name.
from jax.experimental import multihost_utils

from podrl.run.watchdog import Watchdog, key


class Cluster:
  """The processes of a run; with no arguments, one that is alone.

  Args:
    process: this one's index.
    num_processes: of the run.
    client: of JAX's coordination service.
    watchdog: that has begun.
  """

  def __init__(
    self,
    process: int = 0,
    num_processes: int = 1,
    client: Any = None,
    watchdog: Watchdog | None = None,
  ):
    self.process = process
    self.num_processes = num_processes
    self.watchdog = watchdog
    self._client = client
    self._num_exchanges = self._num_rounds = 0
    self._decided: list[str] = []  # Keys that the others may not have read.

  @property
  def is_distributed(self) -> bool:
    """Whether JAX's runtime for several processes is running."""
    return self._client is not None

  def _get(self, name: str) -> Any:
    """Waits for a value; the watchdog ends it where none comes."""
    while True:
      self.beat()  # Not this process hangs but the one that is waited for.
      try:
        return json.loads(self._client.blocking_key_value_get(name, 1_000))
      except jax.errors.JaxRuntimeError as error:
        if 'DEADLINE_EXCEEDED' not in str(error):
          raise

  def beat(self) -> None:
    """Shows that this process gets on, in what takes long."""
    if self.watchdog:
      self.watchdog.beat()

  def decide(self, choose: Callable[[], Any]) -> Any:
    """What `choose()` gives in process 0; the others do not call it.

    Args:
      choose: gives a value of JSON.

    Raises:
      ValueError: in all processes, where `choose` raises it.
    """
    if not self.is_distributed:
      return choose()
    self.beat()
    self._num_exchanges += 1
    name = key('decided', self._num_exchanges)
    if self.process:
      said = self._get(name)
    else:
      try:
        said = {'value': choose()}
      except ValueError as error:
        said = {'error': str(error)}
      text = json.dumps(said)
      self._client.key_value_set(name, text)
      self._decided.append(name)
      said = json.loads(text)  # As the others have it.
    if 'error' in said:
      raise ValueError(said['error'])
    return said['value']

  def gather(self, value: Any) -> list[Any] | None:
    """The values of all processes, JSON, in process 0; None in the others."""
    if not self.is_distributed:
      return [value]
    self.beat()
    self._num_exchanges += 1
    names = [
      key('gathered', self._num_exchanges, i) for i in range(self.num_processes)
    ]
    if self.process:
      self._client.key_value_set(names[self.process], json.dumps(value))
      return None
    values = [json.loads(json.dumps(value))] + [
      self._get(name) for name in names[1:]
    ]
    # All have come this far, and read what was decided before.
    for name in names[1:] + self._decided:
      self._client.key_value_delete(name)
    self._decided = []
    return values

  def attempt(self, function: Callable[[], Any]) -> Any:
    """What `function()` gives in each process.

    Raises:
      ValueError: in all processes, where it does in one; of which, it says.
    """
    if not self.is_distributed:
      return function()
    value, mistake = None, None
    try:
      value = function()
    except ValueError as error:
      mistake = str(error)

    def choose() -> None:
      found = {i: x for i, x in enumerate(mistakes) if x}
      if len(found) == self.num_processes and len({*mistakes}) == 1:
        raise ValueError(mistakes[0])
      if found:
        raise ValueError(
          '; '.join(f'process {i}: {x}' for i, x in found.items())
        )

    mistakes = self.gather(mistake)
    self.decide(choose)
    return value

  def compare(self, values: dict[str, Any]) -> None:
    """Raises a ValueError in all processes where their values differ.

    Args:
      values: of JSON, by name.
    """

    def choose() -> None:
      for i, others in enumerate(everybody):
        differing = [
          f'{k}={others.get(k)!r} where process 0 has {everybody[0].get(k)!r}'
          for k in {**everybody[0], **others}
          if everybody[0].get(k) != others.get(k)
        ]
        if differing:
          raise ValueError(f'process {i} has {"; ".join(differing)}')

    everybody = self.gather(values)
    self.decide(choose)

  def is_preempted(self) -> bool:
    """Whether a process had SIGTERM; all ask together, and hear the same."""
    self._num_rounds += 1
    return self.is_distributed and (
      multihost_utils.reached_preemption_sync_point(self._num_rounds)
    )

  def close(self) -> None:
    """Leaves the others when all have come here."""
    if self.is_distributed:
      self.gather(None)
      self.decide(lambda: None)
      self.watchdog.close()
      jax.distributed.shutdown()
      self._client = None


def version_of_code() -> str:
  """A digest of podrl's sources."""
  digest = hashlib.sha256()
  root = pathlib.Path(__file__).parents[1]
  for path in sorted(root.rglob('*.py')):
    digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
  return digest.hexdigest()[:12]


def _is_slurm_step() -> bool:
  """Whether Slurm started this process as one of several."""
  tasks = os.environ.get('SLURM_STEP_NUM_TASKS', '')
  return 'SLURM_PROCID' in os.environ and tasks.isdigit() and int(tasks) > 1


def _await_coordinator(address: str, process: int, seconds: float) -> None:
  """Waits until somebody listens there; JAX's runtime would abort."""
  host, _, port = address.rpartition(':')
  end = time.monotonic() + seconds
  while True:
    try:
      socket.create_connection((host, int(port)), timeout=5.0).close()
      return
    except (OSError, OverflowError) as error:
      if time.monotonic() > end:
        raise ValueError(
          f'process {process}: no coordinator answers at {address} within '
          f"{seconds:g} s ({error}); name process 0's machine and a free port "
          'of it'
        ) from error
      time.sleep(0.2)


def start(
  coordinator: str,
  num_processes: int | None,
  process: int | None,
  *,
  start_seconds: float,
  heartbeat_seconds: float,
  hang_seconds: float,
) -> Cluster:
  """Joins this process with the others; call it before any device is used.

  Args:
    coordinator: HOST:PORT of process 0; 'auto' where JAX knows the cluster by
      itself, as on TPUs; empty for a process that is alone, unless Slurm
      started several.
    num_processes: of the run; None where JAX knows.
    process: this one's index; None where JAX knows.
    start_seconds: how long to wait for the others.
    heartbeat_seconds: as `Watchdog` takes it.
    hang_seconds: as `Watchdog` takes it.

  Raises:
    ValueError: if the arguments do not fit, or no coordinator is reached.
  """
  is_named = coordinator not in ('', 'auto')
  if [num_processes is not None, process is not None] != [is_named] * 2:
    raise ValueError(
      '--coordinator=HOST:PORT, --num_processes and --process_id '
      'are given together'
    )
  if is_named:
    if not 0 <= process < num_processes:
      raise ValueError(
        f'--process_id={process} is not between 0 and {num_processes - 1}'
      )
    host, _, port = coordinator.rpartition(':')
    if not host or not port.isdigit():
      raise ValueError(f'--coordinator={coordinator} is not HOST:PORT')
    if process:
      _await_coordinator(coordinator, process, start_seconds)
  elif not (coordinator or _is_slurm_step()):
    return Cluster()
  name = 'this process' if process is None else f'process {process}'
  watchdog = Watchdog(heartbeat_seconds, hang_seconds)
  watchdog.catch_aborts(
    f'{name}: the others did not come within {start_seconds:g} s, or no '
    "coordinator could start; the lines above are JAX's"
  )
  try:
    jax.distributed.initialize(
      coordinator if is_named else None,
      num_processes,
      process,
      initialization_timeout=int(start_seconds),
      # Ours ends a run before JAX's does, and names who is gone.
      heartbeat_timeout_seconds=int(2 * heartbeat_seconds + 10),
      shutdown_timeout_seconds=int(heartbeat_seconds + 10),
    )
  except (RuntimeError, ValueError) as error:
    raise ValueError(f'{name}: {" ".join(str(error).split())}') from error
  state = distributed.global_state
  watchdog.begin(state.process_id, state.num_processes, state.client)
  return Cluster(state.process_id, state.num_processes, state.client, watchdog)
