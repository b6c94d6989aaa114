"""Ctrl-C and SIGTERM, noted and left to the training loop."""

from collections.abc import Callable
import faulthandler
import signal

# Exit codes of a run.
DONE, FAILED, MISTAKE, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


class Signals:
  """Notes Ctrl-C and SIGTERM; a second one ends the process at once.

  The handlers only set a flag: an exception in the middle of a call would
  leave donated, deleted arrays behind.
  """

  def __init__(self):
    self.exit_code = None
    self.on_signal: Callable[[], None] = lambda: None  # Called by the first.
    self.grace_seconds: float | None = None  # After SIGTERM; None is no bound.
    self._previous = {
        number: signal.signal(number, self._handle)
        for number in (signal.SIGINT, signal.SIGTERM)}

  def _handle(self, number: int, frame) -> None:
    del frame
    self.exit_code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
    for signal_number in self._previous:
      signal.signal(signal_number, signal.SIG_DFL)
    if number == signal.SIGTERM and self.grace_seconds:
      # Whatever hangs: it prints all stacks and exits with 1.
      faulthandler.dump_traceback_later(self.grace_seconds, exit=True)
    self.on_signal()

  def is_set(self) -> bool:
    """Whether one came."""
    return self.exit_code is not None

  def close(self) -> None:
    """Puts the previous handlers back."""
    faulthandler.cancel_dump_traceback_later()
    for number, handler in self._previous.items():
      signal.signal(number, handler)
