"""Handles signals in the training loop and during imports; repairs streams."""

from collections.abc import Callable, Iterator
import contextlib
import faulthandler
import functools
import math
import os
import select
import signal
import sys
import threading
import time
from typing import Any

# Exit codes of a run, and their names in its summary; a mistake writes none.
DONE, FAILED, MISTAKE, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130
NAMES = {0: 'done', 1: 'failed', 75: 'preempted', 130: 'interrupted'}
_STDERR = 2  # The descriptor; `sys.stderr` may have none, or be None.


# A forked process, as some environments have, inherits the pipe to the watchers
# below. Its signals are not those of this process.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def dump_stacks() -> None:
  """Prints the stacks of all threads."""
  faulthandler.dump_traceback(_STDERR, all_threads=True)


def repair_streams() -> None:
  """Makes sure that a program can print without an error.

  If a shell has closed a standard stream, as in `2>&-`, the next file that the
  program opens would get its descriptor. If a stream cannot encode a character,
  it prints an escape sequence.
  """
  while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
    pass
  os.close(descriptor)
  sys.stdout = sys.stdout or open(os.devnull, 'w')
  sys.stderr = sys.stderr or open(os.devnull, 'w')
  for stream in (sys.stdout, sys.stderr):
    if getattr(stream, 'errors', '') == 'strict':
      # The streams of a notebook or a test lack this method.
      reconfigure = getattr(stream, 'reconfigure', lambda **_: None)
      reconfigure(errors='backslashreplace')


# After a signal, a thread that may be left gets at most this time to return.
PATIENCE_SECONDS = 2.0
_END_SECONDS = 10.0  # A command gets this time to end after Ctrl-C.
_PERIOD_SECONDS = 0.1  # How often the watcher looks, after a signal.


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
  """Makes Ctrl-C print a line at once, and end the program after the imports.

  An exception during the imports would not help: some libraries ignore it, and
  others raise another error. A second Ctrl-C ends the program immediately.
  """
  repair_streams()
  is_main = threading.current_thread() is threading.main_thread()
  previous = signal.getsignal(signal.SIGINT)
  if not is_main or previous is not signal.default_int_handler:
    yield
    return
  is_interrupted = False

  def note(number: int, frame) -> None:
    nonlocal is_interrupted
    del frame
    is_interrupted = True
    signal.signal(number, signal.SIG_DFL)
    print('interrupted', file=sys.stderr, flush=True)

  signal.signal(signal.SIGINT, note)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, previous)
  if is_interrupted:  # KeyboardInterrupt does not end an interactive session.
    raise KeyboardInterrupt if hasattr(sys, 'ps1') else SystemExit(INTERRUPTED)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
  """A block that Ctrl-C ends, even if XLA keeps Python's handlers waiting.

  If no handler runs within `PATIENCE_SECONDS`, a thread ends the process. It
  also does so if the block goes on for `_END_SECONDS` after the exception,
  because some libraries ignore it.
  """
  is_main = threading.current_thread() is threading.main_thread()
  previous = signal.getsignal(signal.SIGINT)
  if not is_main or previous is not signal.default_int_handler:
    yield
    return
  is_handled, is_over = threading.Event(), threading.Event()

  @functools.wraps(signal.default_int_handler)
  def interrupt(number: int, frame: Any) -> None:
    is_handled.set()
    signal.default_int_handler(number, frame)

  def watch() -> None:
    while number := os.read(reader, 1)[0]:
      if number != signal.SIGINT:
        continue
      is_late = not is_handled.wait(PATIENCE_SECONDS)
      if is_late or not is_over.wait(_END_SECONDS):
        os.write(_STDERR, b'interrupted\n')
        os._exit(INTERRUPTED)

  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  signal.signal(signal.SIGINT, interrupt)
  watcher = threading.Thread(target=watch, name='podrl-signals', daemon=True)
  watcher.start()
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, previous)
    signal.set_wakeup_fd(wakeup)
    is_over.set()
    os.write(writer, b'\0')
    watcher.join()
    os.close(reader)
    os.close(writer)


class Signals:
  """Remembers Ctrl-C or SIGTERM; a second signal ends the process immediately.

  SIGHUP, which arrives when a terminal ends, counts as SIGTERM, unless the
  process ignores it, as under nohup.

  `is_guest` says that the run is part of another program. The first signal then
  restores that program's handlers. Only the main thread can handle signals.

  The handlers raise no exception, because an exception during a compiled
  program would lose its donated arrays. In a run of several processes, set
  `is_distributed`: all processes end at the same update, so the grace time
  begins when they have agreed on it, which the loop notes.

  Python runs a handler only when the main thread returns from C++, and XLA may
  compile for minutes. So a thread, the watcher, learns of signals through a
  pipe. It notes a signal that no handler has noted, and ends the process in a
  block that `leaving` allows to leave. Another program's process is not ended,
  so a guest has no watcher.
  """

  def __init__(self, is_guest: bool = False) -> None:
    self.exit_code: int | None = None
    # The first signal calls this.
    self.on_signal: Callable[[], None] = lambda: None
    # Time that a run has to end after SIGTERM.
    self.grace_seconds: float | None = None
    self.is_distributed = False
    self._is_guest = is_guest
    self._is_armed = False  # Whether the process ends after `grace_seconds`.
    repair_streams()
    numbers = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
      numbers.add(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
      numbers.clear()
    self._has_begun = False
    self._leave: Callable[[int], int] | None = None
    self._lock = threading.Lock()  # Held while a thread ends the process.
    self._watcher: threading.Thread | None = None
    self._previous = {x: signal.signal(x, self._handle) for x in numbers}
    if numbers and not is_guest:
      self._reader, self._writer = os.pipe()
      os.set_blocking(self._writer, False)
      self._wakeup = signal.set_wakeup_fd(
        self._writer, warn_on_full_buffer=False
      )
      self._watcher = threading.Thread(
        target=self._watch, name='podrl-signals', daemon=True
      )
      self._watcher.start()

  def _handle(self, number: int, frame) -> None:
    del frame
    for signal_number, previous in self._previous.items():
      handler = previous if self._is_guest else signal.SIG_DFL
      if number == signal_number == signal.SIGHUP:
        handler = signal.SIG_IGN  # The shell may send SIGHUP again.
      signal.signal(signal_number, handler)
    self._begin(number)

  def _begin(self, number: int) -> None:
    """Notes the first signal, and says so."""
    if self._has_begun:
      return
    self._has_begun = True
    # An object of Python's io may be in use now, so write to the descriptor.
    name = signal.Signals(number).name
    name = 'Ctrl-C' if number == signal.SIGINT else name
    text = f'{name}: the run stops and saves; a second signal ends it at once\n'
    with contextlib.suppress(OSError):
      os.write(_STDERR, text.encode())
    exit_code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
    if self.is_distributed:
      self.exit_code = self.exit_code or exit_code
    else:
      self.note(exit_code)
    self.on_signal()

  def _watch(self) -> None:
    """Waits for signals, and leaves the process where this is allowed."""
    end_seconds, timeout = math.inf, None
    while True:
      if select.select([self._reader], [], [], timeout)[0]:
        number = os.read(self._reader, 1)[0]
        if not number:  # See `close`.
          return
        if number not in self._previous:
          continue
        if timeout:  # The main thread has not handled the first signal yet.
          os._exit(128 + number)
        grace_seconds = self.grace_seconds or math.inf
        patience = PATIENCE_SECONDS * min(1.0, grace_seconds / 8)
        end_seconds = time.monotonic() + patience
        timeout = _PERIOD_SECONDS
        time.sleep(min(_PERIOD_SECONDS, patience))
        self._begin(number)
      if time.monotonic() >= end_seconds:
        with self._lock:
          if self._leave:
            exit_code = FAILED
            try:
              exit_code = self._leave(self.exit_code or FAILED)
              sys.stdout.flush()
            finally:
              os._exit(exit_code)

  @contextlib.contextmanager
  def leaving(self, leave: Callable[[int], int] | None) -> Iterator[None]:
    """Says how to end the process while the block runs.

    If a signal has arrived and the block does not return for `PATIENCE_SECONDS`
    (or a quarter of the grace time), another thread calls `leave` with the exit
    code of the signal. The process then ends with the exit code that `leave`
    returns. With None, the block always runs to its end.
    """
    with self._lock:
      before, self._leave = self._leave, leave
    try:
      yield
    finally:
      with self._lock:
        self._leave = before

  def note(self, exit_code: int | None) -> None:
    """Sets the exit code if none is set yet; None changes nothing."""
    self.exit_code = self.exit_code or exit_code
    is_preempted = exit_code == PREEMPTED == self.exit_code
    if is_preempted and self.grace_seconds and not self._is_armed:
      # If the run has not ended by then, this prints all stacks and exits.
      faulthandler.dump_traceback_later(
        self.grace_seconds, exit=True, file=_STDERR
      )
      self._is_armed = True

  def is_set(self) -> bool:
    """Returns whether a signal has arrived."""
    return self.exit_code is not None

  def keep(self) -> None:
    """Installs the handlers again: an environment may have replaced them."""
    if not self.is_set():
      for number in self._previous:
        signal.signal(number, self._handle)

  def close(self) -> None:
    """Restores the previous handlers."""
    if self._is_armed:  # The program may have a timer of its own.
      faulthandler.cancel_dump_traceback_later()
    if self._watcher:
      signal.set_wakeup_fd(self._wakeup)
      os.write(self._writer, b'\0')
      self._watcher.join()
      os.close(self._reader)
      os.close(self._writer)
      self._watcher = None
    for number, handler in self._previous.items():
      signal.signal(number, handler)
