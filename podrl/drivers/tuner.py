"""How many actors should act, found out while training.

GA3C's scheduler (Babaeizadeh et al. 2017, arXiv:1611.06256) walks at random and
counts calls of training; one window decides, however noisy. Here two counts are
compared by windows in turn, A B B A ..., of samples learnt a second, after a
settling time, and only what is beyond the noise counts.
"""

from collections.abc import Generator
import math
from typing import NamedTuple

# A window is at least as long as both; watching takes longer ones.
_WINDOW_SECONDS, _WINDOW_UPDATES, _WATCH_SCALE = 1.0, 4, 3.0
_SETTLE_SECONDS = 0.2
_PAUSE_SECONDS = 0.1  # A longer pause of the learner begins a new window.
_WORTH = 0.02  # The logarithm of a gain for which more actors are worth it.
_CLEAR = 2.5  # Standard errors beyond which no further pair is needed.
_PRECISION, _MAX_PAIRS = 0.03, 4  # A pair more until the error is so small.
_PRIOR_NOISE, _PRIOR_NUMBER = 0.03, 3  # Deviation of a window's logarithm.
_DRIFT, _DRIFT_NOISE, _NUM_DRIFTED = 0.06, 2.5, 3


class Decision(NamedTuple):
  """A comparison of two counts of actors, and what followed.

  Attributes:
    seconds: of training until then.
    num_actors: that acted before.
    tried: the other count.
    is_kept: whether that one stays; else it was undone.
    rate: of `num_actors`, samples learnt a second.
    rate_tried: of the other.
    num_pairs: of windows that were compared.
    num_drifts: how often a settled rate had changed before it.
  """

  seconds: float
  num_actors: int
  tried: int
  is_kept: bool
  rate: float
  rate_tried: float
  num_pairs: int
  num_drifts: int


class _Window(NamedTuple):
  """What the search asks for: the rate of so many actors."""

  num_actors: int
  scale: float = 1.0


# A part of the search: it yields windows, and is sent their rates.
_Search = Generator[_Window, float, None]


class Tuner:
  """Says how many actors should act, so that most is learnt.

  It has neither a clock nor a thread. It doubles the count until that gains
  nothing, halves the interval that is left, and rests: from then on it only
  watches, and searches anew, around the present count and both ways, where the
  rate has left what it was. Of counts that are equally fast it takes the
  lowest, whose unrolls are least stale.

  Args:
    max_actors: the most that there may be.
    samples_per_update: that one update learns from, over all processes.
    unrolls_per_update: that these are, of this process.
    num_actors: to begin with.
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
    self._seconds = 0.0
    self._last_pause = 0.0
    self._num_drifts = 0
    self._noise = _PRIOR_NUMBER * _PRIOR_NOISE**2, _PRIOR_NUMBER
    self._decisions: list[Decision] = []
    self.begin(num_actors)

  def begin(self, num_actors: int) -> None:
    """Searches from a count on, as near to it as there may be."""
    self.best = min(max(num_actors, 1), self._max_actors)
    self.is_settled = False
    self._plan = self._run()
    self._asked = next(self._plan)
    self._before = self.num_actors
    self._start_window(is_settled=False)

  @property
  def num_actors(self) -> int:
    """How many should act now."""
    return self._asked.num_actors

  def observe(
    self,
    seconds: float,
    num_updates: int,
    queue_depth: int,
    pause_seconds: float = 0.0,
  ) -> None:
    """Takes note of training since the last call; may change `num_actors`.

    Args:
      seconds: training time, without the pause.
      num_updates: updates in that time, one or more.
      queue_depth: unrolls that waited for the learner before the last update.
      pause_seconds: time before it, in which the learner did not train. The
        actors may have filled the queue, so a long pause begins a new window.
    """
    # What comes back before every call is no pause, however long it is.
    if pause_seconds > max(_PAUSE_SECONDS, 4 * self._last_pause):
      self._before = self.num_actors
      self._start_window(is_settled=False)
    self._last_pause = pause_seconds
    self._seconds += seconds
    self._passed += seconds
    self._num_updates += num_updates
    if self._is_settling:
      # What was under way ends, and each actor hands on an unroll or two.
      rounds = 2 * max(self._before, self.num_actors) / self._unrolls_per_update
      if self._passed >= _SETTLE_SECONDS and (
        self._num_updates >= 1 + math.ceil(rounds)
      ):
        self._start_window(is_settled=True, queue_depth=queue_depth)
      return
    scale = self._asked.scale
    if self._passed >= scale * _WINDOW_SECONDS and (
      self._num_updates >= scale * _WINDOW_UPDATES
    ):
      # A queue that empties hides for a while that too few act.
      drained = max(0, self._depth - queue_depth) / self._unrolls_per_update
      learnt = max(self._num_updates - drained, 0.1)
      self._before = self.num_actors
      self._asked = self._plan.send(
        learnt * self._samples_per_update / self._passed
      )
      self._start_window(self.num_actors == self._before, queue_depth)

  def _start_window(self, is_settled: bool, queue_depth: int = 0) -> None:
    self._is_settling = not is_settled
    self._passed, self._num_updates, self._depth = 0.0, 0, queue_depth

  def take_decisions(self) -> list[Decision]:
    """The decisions since the last call."""
    decisions, self._decisions = self._decisions, []
    return decisions

  def _deviation(self) -> float:
    """Of the logarithm of a window's rate."""
    squares, number = self._noise
    return math.sqrt(squares / number)

  def _learn_noise(self, one: float, other: float) -> None:
    """Of the logarithms of two windows of the same count."""
    squares, number = self._noise
    # Old ones fade; a change that is no noise counts only so much.
    limit = 9 * squares / number
    self._noise = (
      0.95 * squares + min((one - other) ** 2 / 2, limit),
      0.95 * number + 1,
    )

  def _run(self) -> _Search:
    while True:
      yield from self._search()
      self.is_settled = True
      yield from self._watch()
      self.is_settled = False
      self._num_drifts += 1

  def _search(self) -> _Search:
    """Leaves the best count in `best`."""
    # Known to be worse than the best; and no better. Is there one between?
    low, high, may_rise = 0, None, False
    rate = None  # Of the last window, where it was one of the best's.
    while True:
      best, step = self.best, max(1, self.best // 8)
      if high is None and best < self._max_actors:
        tried = min(2 * best, self._max_actors)
      elif may_rise and high - best > step:
        tried = (best + high) // 2
      elif best - low > step:
        tried = (low + best) // 2
      else:
        return
      is_kept, is_uneven, rate = yield from self._compare(tried, rate)
      if tried > best:
        if is_kept:
          low = best
        else:  # Of what was doubled the best may lie between, on a hump.
          high, may_rise = tried, is_uneven or high is None
      elif is_kept:
        high, may_rise = best, False
      else:
        low = tried
      if is_kept:
        self.best = tried

  def _compare(
    self, tried: int, rate: float | None
  ) -> Generator[_Window, float, tuple[bool, bool, float | None]]:
    """Tries a count against the best one.

    Args:
      tried: that count.
      rate: of the best one, if that has just been measured.

    Returns:
      Whether it is to be kept; whether the rate is no plateau between both; and
      the last window's rate, where it was one of what is best now.
    """
    best = self.best
    logs = [], []
    for num_pairs in range(1, _MAX_PAIRS + 1):
      # A B, B A, A B ...: half as often is there something to settle.
      for i in (0, 1) if num_pairs % 2 else (1, 0):
        if rate is None:
          rate = yield _Window((best, tried)[i])
        if logs[i]:
          self._learn_noise(logs[i][-1], math.log(rate))
        logs[i].append(math.log(rate))
        last, rate = (i, rate), None
      one, other = (sum(x) / num_pairs for x in logs)
      gain = other - one if tried > best else one - other  # Of more actors.
      error = self._deviation() * math.sqrt(2 / num_pairs)
      if abs(gain - _WORTH) > _CLEAR * error or error <= _PRECISION:
        break
    # In doubt the fewer. To start more takes certainty, to park a tendency.
    is_more = gain > _WORTH and (tried < best or gain > 1.5 * error)
    is_kept = is_more == (tried > best)
    self._decisions.append(
      Decision(
        self._seconds,
        best,
        tried,
        is_kept,
        math.exp(one),
        math.exp(other),
        num_pairs,
        self._num_drifts,
      )
    )
    is_uneven = gain > _WORTH or gain < -max(_WORTH, 2 * error)
    return is_kept, is_uneven, last[1] if last[0] == is_kept else None

  def _watch(self) -> _Search:
    """Returns when the rate has left what it was at first."""
    window = _Window(self.best, _WATCH_SCALE)
    logs = []
    for _ in range(3):
      logs.append(math.log((yield window)))
    settled, run = sum(logs) / 3, 0
    while abs(run) < _NUM_DRIFTED:
      change = math.log((yield window)) - settled
      sign = math.copysign(1, change)
      if abs(change) <= max(_DRIFT, _DRIFT_NOISE * self._deviation()):
        run = 0
      else:
        run = run + sign if run * sign > 0 else sign
