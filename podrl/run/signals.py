"""Notes Ctrl-C and SIGTERM for the training loop."""

from collections.abc import Callable
import faulthandler
import signal

# Exit codes of a run.
DONE, FAILED, MISTAKE, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


class Signals:
  """Notes Ctrl-C and SIGTERM; a second signal ends the process at once.

  The handlers only set a flag: an exception in the middle of a call would leave
  donated, deleted arrays behind. In a run of several processes JAX handles
  SIGTERM, because all processes must end at the same update.
  """

  def __init__(self) -> None:
    self.exit_code: int | None = None
    # The first signal calls this.
    self.on_signal: Callable[[], None] = lambda: None
    self.grace_seconds: float | None = None  # After SIGTERM; None is no limit.
    self.is_distributed = False
    self._previous = {
      number: signal.signal(number, self._handle)
      for number in (signal.SIGINT, signal.SIGTERM)
    }

  def _handle(self, number: int, frame) -> None:
    del frame
    for signal_number in self._previous:
      if not self.is_distributed or signal_number == signal.SIGINT:
        signal.signal(signal_number, signal.SIG_DFL)
    self.note(INTERRUPTED if number == signal.SIGINT else PREEMPTED)
    self.on_signal()

  def note(self, exit_code: int | None) -> None:
    """Makes the run end with this exit code; None changes nothing."""
    if self.exit_code is None and exit_code == PREEMPTED and self.grace_seconds:
      # If the run hangs, this prints all stacks and exits with 1.
      faulthandler.dump_traceback_later(self.grace_seconds, exit=True)
    self.exit_code = self.exit_code or exit_code

  def is_set(self) -> bool:
    """Whether a signal has come."""
    return self.exit_code is not None

  def close(self) -> None:
    """Restores the previous handlers."""
    faulthandler.cancel_dump_traceback_later()
    for number, handler in self._previous.items():
      signal.signal(number, handler)
