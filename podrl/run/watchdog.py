"""How the processes of a run watch over one another.

A thread of each tells in the store of JAX's coordination service that it lives
and how far it got. Process 0 reads it: where one falls silent or gets no
further, it says so there, and all end with that message.
"""

from collections.abc import Callable
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import jax

_PERIOD_SECONDS = 0.5  # Between two signs of life.
_END_SECONDS = 10.0  # In which a process that must end does so.
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


def key(*names: Any) -> str:
  """A key of the store."""
  return '/'.join(map(str, ('podrl', *names)))


class Watchdog:
  """Ends this process where another one of the run is gone.

  Args:
    heartbeat_seconds: who gives no sign for so long counts as dead.
    hang_seconds: who gets no further for so long counts as hanging.
  """

  def __init__(self, heartbeat_seconds: float, hang_seconds: float):
    self._heartbeat_seconds = heartbeat_seconds
    self._hang_seconds = hang_seconds
    self._process, self._client = 0, None
    self._num_beats = 0  # Of the main thread.
    self._num_contacts = 0  # With process 0.
    self._late: dict[int, tuple[int, ...]] = {}  # See `_look`.
    self._threads: list[threading.Thread] = []
    self._closed = threading.Event()
    self._ending = threading.Lock()
    # Called, in any thread, before this process ends because of another one.
    self.on_failure: Callable[[str], None] = lambda message: print(
      f'error: {message}', file=sys.stderr, flush=True
    )
    self._on_abort = _Handler(self._abort)  # Held: C knows only its address.
    self._abort_message = ''

  def catch_aborts(self, message: str) -> None:
    """From now on JAX's runtime, where it aborts the process, ends it with 1.

    It does so from a thread of its own where process 0 is gone, and where a
    run cannot begin; Python's own handlers would come too late.

    Args:
      message: what that means.
    """
    self._abort_message = message
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, _Handler]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, self._on_abort)

  def _abort(self, number: int) -> None:
    del number
    self._end(self._abort_message)

  def begin(self, process: int, num_processes: int, client: Any) -> None:
    """Begins to watch.

    Args:
      process: the index of this one.
      num_processes: of the run.
      client: of JAX's coordination service.
    """
    self._process, self._client = process, client
    # The sign, the beats, and the periods for which either stayed the same.
    self._late = {i: (0, 0, 0, 0) for i in range(num_processes)}
    self.catch_aborts(
      'process 0 is gone'
      if process
      else "JAX's runtime ended process 0; the lines above are its own"
    )
    for target, name in (self._give_signs, 'signs'), (self._wait, 'watch'):
      thread = threading.Thread(target=target, name=f'podrl-cluster-{name}')
      self._threads.append(thread)
      thread.start()

  def beat(self) -> None:
    """Shows that the main thread gets on."""
    self._num_beats += 1

  def _give_signs(self) -> None:
    """The thread that speaks with process 0."""
    num_signs = 0
    try:
      while not self._closed.wait(_PERIOD_SECONDS):
        num_signs += 1
        self._client.key_value_set(
          key('alive', self._process),
          json.dumps([num_signs, self._num_beats]),
          allow_overwrite=True,
        )
        if verdict := self._verdict():
          self._end(verdict)
        self._num_contacts += 1
        if self._process == 0:
          self._look()
    except jax.errors.JaxRuntimeError as error:
      if not self._closed.is_set():
        self._end(f'process {self._process} does not reach process 0: {error}')

  def _look(self) -> None:
    """Ends all where a process is silent or hangs.

    Periods are counted, not seconds: when a suspended machine goes on, nobody
    is dead.
    """
    told = {}
    for name, text in self._client.key_value_dir_get(key('alive')):
      process, (sign, beats) = int(name.rpartition('/')[2]), json.loads(text)
      told[process] = sign, beats
    for process, (old_sign, old_beats, silent, stuck) in self._late.items():
      sign, beats = told.get(process, (0, 0))
      silent = 0 if sign != old_sign else silent + 1
      stuck = 0 if beats != old_beats else stuck + 1
      self._late[process] = sign, beats, silent, stuck
      if silent * _PERIOD_SECONDS > self._heartbeat_seconds:
        self._end(
          f'process {process} is gone: no sign of it for '
          f'{self._heartbeat_seconds:g} s'
        )
    hanging = [
      str(process)
      for process, (*_, stuck) in self._late.items()
      if stuck * _PERIOD_SECONDS > self._hang_seconds
    ]
    if hanging:
      self._end(
        f'process {" and ".join(hanging)} hangs: no progress for '
        f'{self._hang_seconds:g} s'
      )

  def _wait(self) -> None:
    """The thread that sees where the other one gets no answer."""
    seen, periods = 0, 0
    while not self._closed.wait(_PERIOD_SECONDS):
      periods = 0 if self._num_contacts != seen else periods + 1
      seen = self._num_contacts
      if periods * _PERIOD_SECONDS > self._heartbeat_seconds:
        self._end(
          'process 0 is gone: it has not answered for '
          f'{self._heartbeat_seconds:g} s'
        )

  def _verdict(self) -> str | None:
    try:
      return self._client.key_value_try_get(key('verdict'))
    except jax.errors.JaxRuntimeError as error:
      if 'NOT_FOUND' not in str(error):
        raise
      return None

  def _tell(self, message: str) -> None:
    """Tells the others why all end; the first message stays."""
    try:
      self._client.key_value_set(key('verdict'), message)
    except jax.errors.JaxRuntimeError as error:
      if 'ALREADY_EXISTS' not in str(error):
        print(f'nobody could be told: {error}', file=sys.stderr)
    if self._process == 0:  # The store goes with it.
      time.sleep(4 * _PERIOD_SECONDS)

  def _end(self, message: str) -> None:
    """Ends this process because of another one; never returns."""
    self._ending.acquire()  # For good: who comes here later waits for the end.
    faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
    try:
      self.on_failure(message)
      if self._process == 0 and self._client:
        self._tell(message)
      sys.stdout.flush()
    finally:
      os._exit(1)

  def fail(self, message: str, *, is_suspect: bool) -> None:
    """Tells the others that this process ends, and why.

    Args:
      message: of the error.
      is_suspect: it may be another one's, as where a collective breaks; if so
        this does not return.
    """
    if is_suspect:
      time.sleep(self._heartbeat_seconds + 4 * _PERIOD_SECONDS)
    self._ending.acquire()
    self._closed.set()
    self._tell(f'process {self._process} failed: {message}')

  def close(self) -> None:
    """Ends the threads."""
    self._closed.set()
    for thread in self._threads:
      thread.join()
