"""Makes the processes of a run start together, agree and watch one another.

Every process runs the same updates in the same order. Process 0 decides
everything that depends on a clock or on a signal. The other processes read its
decisions from the key-value store of JAX's coordination service.

A thread of each process writes signs of life and progress to that store.
Process 0 reads them. If a process is silent or makes no progress, process 0
writes a message, the verdict. All processes print the verdict and end.
"""

from collections.abc import Callable, Iterator
import contextlib
import ctypes
import dataclasses
import faulthandler
import hashlib
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, Self

from absl import flags
import jax
from jax._src import distributed  # JAX has no public API for the store.

from podrl.messages import one_line
from podrl.records.workdir import SAVE_SECONDS, WriteError
from podrl.signals import FAILED, INTERRUPTED

_PERIOD_SECONDS = 0.5  # Time between two signs of life.
# A process that must end is killed after this long. It may save a copy first.
_END_SECONDS = 60.0
_AbortHandler = ctypes.CFUNCTYPE(None, ctypes.c_int)


def store_key(*names: Any) -> str:
  """Returns the key of a value in the store."""
  return '/'.join(map(str, ('podrl', *names)))


class Watchdog:
  """Ends this process when another process of the run has died or hangs.

  A process is dead after `heartbeat_seconds` without a sign of life, and hangs
  after `hang_seconds` without progress.
  """

  def __init__(self, heartbeat_seconds: float, hang_seconds: float):
    self._heartbeat_seconds = heartbeat_seconds
    self._hang_seconds = hang_seconds
    self._process, self._abort_message = 0, ''
    self._client: Any = None
    self._num_beats = 0  # How often the main thread reported progress.
    self._busy_until = 0.0  # End of the time that `busy` allows.
    self._num_contacts = 0  # How often process 0 answered.
    # For each process: its last sign of life, its last beat, and the number of
    # periods since each of the two changed.
    self._late: dict[int, tuple[int, int, int, int]] = {}
    self._threads: list[threading.Thread] = []
    self._closed = threading.Event()
    self._ending = threading.Lock()
    # The watchdog calls this from any thread before it ends this process.
    self.on_failure = lambda x: print('error:', x, file=sys.stderr, flush=True)
    # C stores only the address of this handler, so keep a reference to it.
    self._on_abort = _AbortHandler(lambda _: self._end(self._abort_message))

  def catch_aborts(self, message: str) -> None:
    """Makes this process end with exit code 1 and `message` if JAX aborts it.

    If process 0 is gone or the run cannot start, a thread of JAX's runtime
    aborts this process. C calls the handler, because Python would call it too
    late.
    """
    self._abort_message = message
    ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)

  def begin(self, process: int, num_processes: int, client: Any) -> None:
    """Starts the threads; `client` calls JAX's coordination service."""
    self._process, self._client = process, client
    self._late = {i: (0, 0, 0, 0) for i in range(num_processes)}
    own_abort = "JAX's runtime ended process 0; see JAX's messages above"
    self.catch_aborts('process 0 is gone' if process else own_abort)
    for target in self._report, self._watch_process_0:
      name = f'podrl-cluster-{target.__name__.strip("_")}'
      self._threads.append(threading.Thread(target=target, name=name))
      self._threads[-1].start()

  def beat(self) -> None:
    """Records that the main thread makes progress."""
    self._num_beats += 1

  @contextlib.contextmanager
  def busy(self) -> Iterator[None]:
    """A block that makes progress, without beats, for `SAVE_SECONDS`."""
    before, self._busy_until = self._busy_until, time.monotonic() + SAVE_SECONDS
    try:
      yield
    finally:
      self._busy_until = before

  def _report(self) -> None:
    """Runs in a thread: reports to process 0, and may end this process."""
    num_signs = 0
    try:
      while not self._closed.wait(_PERIOD_SECONDS):
        num_signs += 1
        if time.monotonic() < self._busy_until:
          self.beat()
        self._client.key_value_set(
          store_key('alive', self._process),
          json.dumps([num_signs, self._num_beats]),
          allow_overwrite=True,
        )
        for _, verdict in self._client.key_value_dir_get(store_key('verdict')):
          self._end(verdict)
        self._num_contacts += 1
        if self._process == 0:
          self._check_reports()
    except jax.errors.JaxRuntimeError as error:
      if not self._closed.is_set():
        self._end(f'process {self._process} cannot reach process 0: {error}')

  def _check_reports(self) -> None:
    """Ends all processes when one of them is silent or hangs.

    The check counts periods, not seconds. If it counted seconds, every process
    would look dead after a suspended machine resumes.
    """
    reports = {}
    for name, text in self._client.key_value_dir_get(store_key('alive')):
      reports[int(name.rpartition('/')[2])] = json.loads(text)
    hanging = []
    for process, (old_sign, old_beats, silent, stuck) in self._late.items():
      sign, beats = reports.get(process, (0, 0))
      silent = 0 if sign != old_sign else silent + 1
      stuck = 0 if beats != old_beats else stuck + 1
      self._late[process] = sign, beats, silent, stuck
      limit = self._heartbeat_seconds
      if silent * _PERIOD_SECONDS > limit:
        self._end(f'process {process} is gone: no sign of life for {limit:g} s')
      if stuck * _PERIOD_SECONDS > self._hang_seconds:
        hanging.append(str(process))
    if hanging:
      names, limit = ' and '.join(hanging), self._hang_seconds
      self._end(f'no progress for {limit:g} s in process {names}')

  def _watch_process_0(self) -> None:
    """Runs in a thread: ends this process if `_report` gets no answer."""
    num_contacts, periods, limit = 0, 0, self._heartbeat_seconds
    while not self._closed.wait(_PERIOD_SECONDS):
      periods = 0 if self._num_contacts != num_contacts else periods + 1
      num_contacts = self._num_contacts
      if periods * _PERIOD_SECONDS > limit:
        self._end(f'process 0 is gone: no answer from it for {limit:g} s')

  def _write_verdict(self, message: str) -> None:
    """Tells all processes why they end; only the first message counts."""
    try:
      self._client.key_value_set(store_key('verdict', 'first'), message)
    except jax.errors.JaxRuntimeError as error:
      if 'ALREADY_EXISTS' not in str(error):
        print(f'this process cannot warn the others: {error}', file=sys.stderr)
    if self._process == 0:  # The others must read it before the store ends.
      time.sleep(4 * _PERIOD_SECONDS)

  def _end(self, message: str) -> None:
    """Ends this process because another one failed; never returns."""
    self._ending.acquire()  # Never released, so a second caller waits here.
    faulthandler.dump_traceback_later(_END_SECONDS, exit=True, file=2)
    try:
      self.on_failure(message)
      if self._process == 0 and self._client:
        self._write_verdict(message)
      sys.stdout.flush()
    finally:
      os._exit(1)

  def fail(self, message: str, *, is_suspect: bool) -> None:
    """Tells the other processes that this one ends.

    `is_suspect` says that another process may have caused the error, for
    example if a collective failed. In this case, the call waits first, so that
    the watchdog can end this process and name the other one.
    """
    if is_suspect:
      time.sleep(self._heartbeat_seconds + 4 * _PERIOD_SECONDS)
    self._ending.acquire()
    self._closed.set()
    self._write_verdict(f'process {self._process} failed: {message}')

  def close(self) -> None:
    """Stops the threads."""
    self._closed.set()
    for thread in self._threads:
      thread.join()


@dataclasses.dataclass
class Cluster:
  """The processes of a run; `Cluster()` is a process that runs alone.

  At the end of a `with` block, this process leaves the run, also after a
  ValueError, which all processes must raise together. Any other error ends all
  processes.
  """

  process: int = 0  # Index of this process.
  num_processes: int = 1
  client: Any = None  # Client of JAX's coordination service.
  watchdog: Watchdog | None = None

  def __post_init__(self):
    self._num_exchanges = 0
    self._decided: list[str] = []  # Keys that some process may not have read.

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self, kind: Any, error: BaseException | None, trace: Any
  ) -> None:
    if error is None or isinstance(error, ValueError):
      self.close()
    elif self.watchdog:  # Without this, all processes would hang.
      is_interrupted = isinstance(error, KeyboardInterrupt)
      is_full = isinstance(error, WriteError)
      message = one_line(error, with_kind=not is_full)
      try:
        if is_full:
          print(f'error: {message}', file=sys.stderr)
        elif not is_interrupted:
          traceback.print_exc()
        is_suspect = not (is_interrupted or is_full)
        self.watchdog.fail(message, is_suspect=is_suspect)
        sys.stdout.flush()
      finally:  # Otherwise, the watchdog's threads would go on.
        os._exit(INTERRUPTED if is_interrupted else FAILED)

  @property
  def is_distributed(self) -> bool:
    """Whether JAX's runtime for several processes is running."""
    return self.client is not None

  def _read(self, key: str) -> Any:
    """Waits for a value; the watchdog ends the process if none comes."""
    while True:
      self.beat()  # Waiting for another process does not count as hanging.
      try:
        return json.loads(self.client.blocking_key_value_get(key, 1_000))
      except jax.errors.JaxRuntimeError as error:
        if 'DEADLINE_EXCEEDED' not in str(error):
          raise

  def beat(self) -> None:
    """Records progress; call it again and again during long work."""
    if self.watchdog:
      self.watchdog.beat()

  def busy(self) -> contextlib.AbstractContextManager[None]:
    """A block that compiles, or that reads or writes files, for long."""
    return self.watchdog.busy() if self.watchdog else contextlib.nullcontext()

  def decide(self, make_decision: Callable[[], Any]) -> Any:
    """Returns, in every process, what `make_decision` returns in process 0.

    Only process 0 calls `make_decision`, which returns a JSON value.

    Raises:
      ValueError: in all processes, if `make_decision` raises it.
    """
    if not self.is_distributed:
      return make_decision()
    self.beat()
    self._num_exchanges += 1
    key = store_key('decided', self._num_exchanges)
    if self.process:
      decision = self._read(key)
    else:
      try:
        decision = {'value': make_decision()}
      except ValueError as error:
        decision = {'error': str(error)}
      text = json.dumps(decision)
      self.client.key_value_set(key, text)
      self._decided.append(key)
      decision = json.loads(text)  # The other processes read the same.
    if 'error' in decision:
      raise ValueError(decision['error'])
    return decision['value']

  def gather(self, value: Any) -> list[Any] | None:
    """Gives process 0 the JSON values of all processes; the others get None."""
    if not self.is_distributed:
      return [value]
    self.beat()
    self._num_exchanges += 1
    name = store_key('gathered', self._num_exchanges)
    keys = [f'{name}/{i}' for i in range(self.num_processes)]
    if self.process:
      self.client.key_value_set(keys[self.process], json.dumps(value))
      return None
    own_value = json.loads(json.dumps(value))
    values = [own_value] + [self._read(key) for key in keys[1:]]
    # A process that wrote its value has read all earlier decisions.
    for key in keys[1:] + self._decided:
      self.client.key_value_delete(key)
    self._decided = []
    return values

  def attempt(self, function: Callable[[], Any]) -> Any:
    """Returns `function()`, which every process calls.

    Raises:
      ValueError: in all processes, if `function` raises it in any of them. The
        message names the process.
    """
    if not self.is_distributed:
      return function()
    value, mistake = None, None
    try:
      value = function()
    except ValueError as error:
      mistake = str(error)
    mistakes = self.gather(mistake) or []

    def check() -> None:
      found = {i: x for i, x in enumerate(mistakes) if x}
      if len(found) == self.num_processes and len({*mistakes}) == 1:
        raise ValueError(mistakes[0])
      if found:
        lines = (f'process {i}: {x}' for i, x in found.items())
        raise ValueError('; '.join(lines))

    self.decide(check)
    return value

  def compare(self, values: dict[str, Any]) -> None:
    """Raises a ValueError in all processes if their JSON values differ."""
    values_of_all = self.gather(values) or []

    def check() -> None:
      expected = values_of_all[0]
      for i, others in enumerate(values_of_all):
        differing = [
          f'{k}={others.get(k)!r}, but process 0 has {expected.get(k)!r}'
          for k in expected | others
          if expected.get(k) != others.get(k)
        ]
        if differing:
          raise ValueError(f'process {i} has {"; ".join(differing)}')

    self.decide(check)

  def close(self) -> None:
    """Waits for the other processes and leaves the run."""
    if self.is_distributed:
      self.gather(None)
      self.decide(lambda: None)
      if self.watchdog:
        self.watchdog.close()
      jax.distributed.shutdown()
      self.client = None


def num_processes() -> int:
  """Returns the number of processes in JAX's cluster; 1 without a cluster."""
  return distributed.global_state.num_processes or 1


def version_of_code() -> str:
  """Returns a digest of podrl's source files."""
  digest = hashlib.sha256()
  root = pathlib.Path(__file__).parents[1]
  for path in sorted(root.rglob('*.py')):
    digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
  return digest.hexdigest()[:12]


def _await_coordinator(address: str, process: int, seconds: float) -> None:
  """Waits until the coordinator listens, because otherwise JAX aborts."""
  host, _, port = address.rpartition(':')
  end = time.monotonic() + seconds
  while True:
    try:
      socket.create_connection((host, int(port)), timeout=5.0).close()
      return
    except OSError as error:
      if time.monotonic() > end:
        raise ValueError(
          f'process {process}: no coordinator answered at {address} within '
          f'{seconds:g} s ({error}); set --coordinator to the machine of '
          'process 0 and a free port there'
        ) from error
      time.sleep(0.2)


def connect(values: flags.FlagValues) -> Cluster:
  """Connects this process with the others; call it before using any device.

  `values` are the flags of a run. With the coordinator 'auto', as on TPUs and
  on Kubernetes, JAX detects the cluster. An empty coordinator means one
  process, or the processes of a Slurm step.

  Raises:
    ValueError: if a flag is wrong, or the processes cannot connect.
  """
  coordinator, start_seconds = values.coordinator, values.start_seconds
  num_processes, process = values.num_processes, values.process_id
  heartbeat_seconds = values.heartbeat_seconds
  has_address = coordinator not in ('', 'auto')
  tasks = os.environ.get('SLURM_STEP_NUM_TASKS', '')
  has_tasks = tasks.isdigit() and int(tasks) > 1
  is_slurm_step = has_tasks and 'SLURM_PROCID' in os.environ
  if {num_processes is not None, process is not None} != {has_address}:
    raise ValueError(
      'give --coordinator=HOST:PORT, --num_processes and --process_id together'
    )
  if process is not None and num_processes is not None:
    if not 0 <= process < num_processes:
      last = num_processes - 1
      raise ValueError(f'--process_id={process} is not between 0 and {last}')
    host, _, port = coordinator.rpartition(':')
    if not (host and port.isdigit() and 0 < int(port) < 2**16):
      raise ValueError(f'--coordinator={coordinator} is not HOST:PORT')
    if process:
      _await_coordinator(coordinator, process, start_seconds)
  elif not (coordinator or is_slurm_step):
    return Cluster()
  name = 'this process' if process is None else f'process {process}'
  watchdog = Watchdog(heartbeat_seconds, values.hang_seconds)
  watchdog.catch_aborts(
    f'{name}: the other processes did not connect within {start_seconds:g} s, '
    "or no coordinator could start; see JAX's messages above"
  )
  # JAX's agreement on SIGTERM can fail if all processes get it at once; then it
  # is lost. podrl's loop agrees on each signal.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(
      coordinator if has_address else None,
      num_processes,
      process,
      initialization_timeout=int(start_seconds),
      # The watchdog must act first, because it names the process that is gone.
      heartbeat_timeout_seconds=int(2 * heartbeat_seconds + 10),
      shutdown_timeout_seconds=int(heartbeat_seconds + 10),
    )
  except (RuntimeError, ValueError) as error:
    reason = one_line(error)
    if reason.startswith('coordinator_address should be defined'):
      reason = (
        'JAX detected no cluster here; on Kubernetes, install the package '
        'kubernetes; elsewhere, give --coordinator=HOST:PORT, --num_processes '
        'and --process_id'
      )
    raise ValueError(f'{name}: {reason}') from error
  state = distributed.global_state
  watchdog.begin(state.process_id, state.num_processes, state.client)
  return Cluster(state.process_id, state.num_processes, state.client, watchdog)
