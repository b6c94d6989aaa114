"""Finds, during training, how many actors should act.

GA3C's scheduler (Babaeizadeh et al. 2017, arXiv:1611.06256) changes the number
at random, and decides after one noisy window of training. This tuner compares
two numbers, A and B, by the samples learned per second. Its windows alternate:
A B B A. The tuner waits after each change, and ignores differences that may be
noise.
"""

from collections.abc import Generator
import math
from typing import NamedTuple

# A window has at least this many seconds and updates. After its search, the
# tuner uses windows that are _WATCH_SCALE times as long.
_WINDOW_SECONDS, _WINDOW_UPDATES, _WATCH_SCALE = 1.0, 4, 3.0
_SETTLE_SECONDS = 0.2  # After a change, the tuner waits at least this long.
_PAUSE_SECONDS = 0.1  # A longer pause of the learner begins a new window.
_WORTH = 0.02  # Log of the gain that justifies more actors.
# A comparison ends if the gain differs from _WORTH by _CLEAR standard errors,
# if the standard error is at most _PRECISION, or after _MAX_PAIRS pairs.
_CLEAR, _PRECISION, _MAX_PAIRS = 2.5, 0.03, 4
# The noise at the start: the deviation of log rates, and its weight in windows.
_PRIOR_NOISE, _PRIOR_NUMBER = 0.03, 3
# The rate has changed if its log differs by more than _DRIFT, and by more than
# _DRIFT_NOISE deviations, in _NUM_DRIFTED windows in a row.
_DRIFT, _DRIFT_NOISE, _NUM_DRIFTED = 0.06, 2.5, 3


class Decision(NamedTuple):
  """A comparison of two numbers of actors, and its result."""

  seconds: float  # Seconds of training until the decision.
  num_actors: int  # Number of actors before the comparison.
  tried: int  # The other number.
  is_kept: bool  # Whether the tuner keeps the other number.
  rate: float  # Samples learned per second with `num_actors`.
  rate_tried: float  # Samples learned per second with `tried`.
  num_pairs: int  # Pairs of windows that were compared.
  num_drifts: int  # How often a changed rate had started a new search.


# A part of the search: it yields the number of actors of the next window and
# the window's length, relative to the usual one. It receives the window's rate.
_Search = Generator[tuple[int, float], float, None]


class Tuner:
  """Finds the number of actors that gives the most samples learned per second.

  The tuner has no clock and no thread. It doubles the number until the rate no
  longer rises, and then halves the remaining interval. After this search, it
  only watches the rate. When the rate changes, it searches again in both
  directions. If several numbers are equally fast, it takes the lowest, because
  this gives the smallest policy lag.

  Attributes:
    best: the best number so far.
    num_actors: how many actors should act now.
    is_settled: whether the search has ended, and the tuner only watches.

  Args:
    max_actors: the largest number of actors that can act.
    samples_per_update: samples, from all processes, in one update.
    unrolls_per_update: unrolls, from this process, in one update.
    num_actors: first number of the search; clipped to [1, max_actors].
  """

  def __init__(
    self,
    max_actors: int,
    samples_per_update: int,
    unrolls_per_update: int,
    num_actors: int = 1,
  ):
    self._max_actors = max_actors
    self._samples_per_update = samples_per_update
    self._unrolls_per_update = unrolls_per_update
    self._seconds = self._last_pause = 0.0
    self._num_drifts = 0
    self._noise = _PRIOR_NUMBER * _PRIOR_NOISE**2, float(_PRIOR_NUMBER)
    self._decisions: list[Decision] = []
    self.best = min(max(num_actors, 1), max_actors)
    self.is_settled = False
    self._search = self._run()
    self.num_actors, self._scale = next(self._search)
    self._start_window(self.best)

  def _start_window(self, before: int = 0, queue_depth: int = 0) -> None:
    """Starts a window.

    `before` is the number of actors that acted until now. The window starts
    when they have ended their current unrolls, or at once if `before` is 0.
    """
    self._before, self._depth = before, queue_depth
    self._passed, self._num_updates = 0.0, 0

  def observe(
    self,
    seconds: float,
    num_updates: int,
    queue_depth: int,
    pause_seconds: float = 0.0,
  ) -> None:
    """Adds what training did since the last call; may change `num_actors`.

    Args:
      seconds: training time, without the pause.
      num_updates: updates in that time, one or more.
      queue_depth: unrolls that waited for the learner before the last update.
      pause_seconds: how long the learner paused before that time. In a pause,
        actors may fill the queue, so a long pause begins a new window.
    """
    # If every call follows a pause, the pauses affect all windows equally.
    if pause_seconds > max(_PAUSE_SECONDS, 4 * self._last_pause):
      self._start_window(self.num_actors)
    self._last_pause = pause_seconds
    self._seconds += seconds
    self._passed += seconds
    self._num_updates += num_updates
    if self._before:
      # Wait until each actor has ended its unroll and one or two new ones.
      rounds = 2 * max(self._before, self.num_actors) / self._unrolls_per_update
      num_updates = 1 + math.ceil(rounds)
      if self._passed >= _SETTLE_SECONDS and self._num_updates >= num_updates:
        self._start_window(queue_depth=queue_depth)
      return
    scale, before = self._scale, self.num_actors
    if (
      self._passed >= scale * _WINDOW_SECONDS
      and self._num_updates >= scale * _WINDOW_UPDATES
    ):
      # Do not count updates that only emptied the queue.
      drained = max(0, self._depth - queue_depth) / self._unrolls_per_update
      num_learned = max(self._num_updates - drained, 0.1)
      rate = num_learned * self._samples_per_update / self._passed
      self.num_actors, self._scale = self._search.send(rate)
      is_same = self.num_actors == before
      self._start_window(0 if is_same else before, queue_depth)

  def take_decisions(self) -> list[Decision]:
    """Returns the decisions since the last call."""
    decisions, self._decisions = self._decisions, []
    return decisions

  def _deviation(self) -> float:
    """Returns the standard deviation of the log of a window's rate."""
    squares, number = self._noise
    return math.sqrt(squares / number)

  def _update_noise(self, log_rate: float, other: float) -> None:
    """Updates the noise with two log rates of the same number of actors."""
    squares, number = self._noise
    # Old values lose weight. An outlier is not noise, so it counts as three
    # deviations at most.
    square = min((log_rate - other) ** 2 / 2, 9 * squares / number)
    self._noise = 0.95 * squares + square, 0.95 * number + 1

  def _run(self) -> _Search:
    while True:
      yield from self._find_best()
      self.is_settled = True
      yield from self._watch()
      self.is_settled = False
      self._num_drifts += 1

  def _find_best(self) -> _Search:
    """Searches for the best number, and sets `best` to this number."""
    # `low` is worse than the best number; `high` is not better than it. If
    # `may_rise` is true, a number between the best and `high` may be better.
    low, high, may_rise = 0, 0, False
    rate = None  # Rate of the last window, if that window measured `best`.
    while True:
      best, step = self.best, max(1, self.best // 8)
      if not high and best < self._max_actors:
        tried = min(2 * best, self._max_actors)
      elif may_rise and high - best > step:
        tried = (best + high) // 2
      elif best - low > step:
        tried = (low + best) // 2
      else:
        return
      is_kept, is_uneven, rate = yield from self._compare(tried, rate)
      if is_kept:
        self.best = tried
      if is_kept and tried > best:
        low = best
      elif is_kept:
        high, may_rise = best, False
      elif tried > best:
        high, may_rise = tried, is_uneven or not high
      else:
        low = tried

  def _compare(
    self, tried: int, rate: float | None
  ) -> Generator[tuple[int, float], float, tuple[bool, bool, float | None]]:
    """Compares `tried` with the best number.

    `rate` is the rate of the best number in the last window, or None. The
    generator returns three values: whether `tried` is now the best; whether the
    two rates differ; and the rate of the last window, or None if that window
    did not measure the new best.
    """
    best = self.best
    logs: tuple[list[float], list[float]] = [], []
    for num_pairs in range(1, _MAX_PAIRS + 1):
      # The order A B, B A, A B ... has half as many changes as A B, A B, A B.
      for i in (0, 1) if num_pairs % 2 else (1, 0):
        if rate is None:
          rate = yield (best, tried)[i], 1.0
        if logs[i]:
          self._update_noise(logs[i][-1], math.log(rate))
        logs[i].append(math.log(rate))
        last, rate = (i, rate), None
      mean, mean_tried = (sum(x) / num_pairs for x in logs)
      # The gain of the higher number over the lower one.
      gain = mean_tried - mean if tried > best else mean - mean_tried
      error = self._deviation() * math.sqrt(2 / num_pairs)
      if abs(gain - _WORTH) > _CLEAR * error or error <= _PRECISION:
        break
    # To replace the best number, a higher one needs a clear gain. To stay the
    # best, it needs only a likely gain.
    is_more = gain > _WORTH and (tried < best or gain > 1.5 * error)
    is_kept = is_more == (tried > best)
    rates = math.exp(mean), math.exp(mean_tried)
    counts = num_pairs, self._num_drifts
    decision = Decision(self._seconds, best, tried, is_kept, *rates, *counts)
    self._decisions.append(decision)
    is_uneven = gain > _WORTH or gain < -max(_WORTH, 2 * error)
    return is_kept, is_uneven, last[1] if last[0] == is_kept else None

  def _watch(self) -> _Search:
    """Yields windows until the rate has changed."""
    window = self.best, _WATCH_SCALE
    settled = 0.0
    for _ in range(3):
      settled += math.log((yield window)) / 3
    run = 0.0  # Windows in a row that differ; negative if they are slower.
    while abs(run) < _NUM_DRIFTED:
      change = math.log((yield window)) - settled
      sign = math.copysign(1, change)
      if abs(change) <= max(_DRIFT, _DRIFT_NOISE * self._deviation()):
        run = 0.0
      else:
        run = run + sign if run * sign > 0 else sign
