"""How a learner and its actors exchange parameters and unrolls.

`Deterministic` and `Asynchronous` have the same methods. Closing an exchange
wakes all threads that wait in it: each of them raises `Closed`. Version v of
the parameters is the result of v updates. The policy lag of an unroll is the
version from which the learner's update starts, minus the version that chose the
actions of the unroll.
"""

from collections import deque
from collections.abc import Callable, Iterator
import contextlib
import threading
from typing import Any


class Closed(Exception):
  """The exchange is closed, because the run ends."""


class Monitor:
  """A lock on which threads wait for a condition; `close` wakes them all."""

  def __init__(self):
    self._changed = threading.Condition()
    self._is_closed = False

  @contextlib.contextmanager
  def when(
    self,
    is_ready: Callable[[], Any] = lambda: True,
    timeout_seconds: float | None = None,
  ) -> Iterator[None]:
    """Waits until `is_ready()` is true, then runs the `with` block.

    The block holds the lock. The end of the block wakes all waiting threads.

    Raises:
      Closed: if the monitor is closed before or during the wait.
      TimeoutError: after `timeout_seconds` of waiting.
    """
    with self._changed:
      if not self._changed.wait_for(
        lambda: self._is_closed or is_ready(), timeout_seconds
      ):
        raise TimeoutError
      if self._is_closed:
        raise Closed
      yield
      self._changed.notify_all()

  def close(self) -> None:
    """Closes the monitor and wakes all waiting threads."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()


class Channel:
  """A first-in, first-out queue of at most `capacity` items."""

  def __init__(self, capacity: int):
    self._capacity = capacity
    self._items: deque = deque()
    self._monitor = Monitor()
    self.close = self._monitor.close

  def __len__(self) -> int:
    return len(self._items)

  def put(self, item: Any) -> None:
    """Appends an item; waits while the channel is full."""
    with self._monitor.when(lambda: len(self._items) < self._capacity):
      self._items.append(item)

  def get(self, timeout_seconds: float | None = None) -> Any:
    """Removes and returns the oldest item; waits while the channel is empty."""
    with self._monitor.when(lambda: self._items, timeout_seconds):
      return self._items.popleft()


class Deterministic:
  """Each actor has a channel of parameters and a channel of unrolls.

  Update k = 0, 1 ... learns from unrolls that actors made with version
  k - min(k, max_lag) of the parameters. The timing of the threads does not
  change this.

  Args:
    num_actors: number of actors; each update learns from one unroll per actor.
    max_lag: policy lag of all updates except the first `max_lag` updates.

  Source for a lag of 1: Huang et al. 2023, arXiv:2310.00036, section 3.
  """

  def __init__(self, num_actors: int, max_lag: int):
    self._variables = [Channel(max_lag + 1) for _ in range(num_actors)]
    self._unrolls = [Channel(1) for _ in range(num_actors)]
    # How many unrolls each actor makes with the next published parameters.
    self._num_copies = max_lag + 1

  def publish(self, variables: Any, version: int) -> None:
    """Gives parameters to all actors."""
    for _ in range(self._num_copies):
      for channel in self._variables:
        channel.put((variables, version))
    self._num_copies = 1

  def fetch(self, actor: int) -> tuple[Any, int, bool]:
    """Returns parameters, their version, and whether the actor had to wait."""
    waited = not len(self._variables[actor])
    return *self._variables[actor].get(), waited

  def put(self, actor: int, unroll: Any) -> None:
    """Adds an unroll; waits until the learner has taken the previous one."""
    self._unrolls[actor].put(unroll)

  def take(self, i: int, timeout_seconds: float) -> Any:
    """Returns the unroll of actor i, which has place i in an update."""
    return self._unrolls[i].get(timeout_seconds)

  def release(self, num_unrolls: int) -> None:
    """Does nothing: no actor waits for the end of an update."""

  def depth(self) -> int:
    """Returns the number of unrolls that wait for the learner."""
    return sum(map(len, self._unrolls))

  def close(self) -> None:
    """Closes all channels, so that the learner and the actors end."""
    for channel in self._variables + self._unrolls:
      channel.close()


class Asynchronous:
  """Actors use the newest parameters; the learner takes any finished unroll.

  An actor needs a permit for each unroll. If the learner takes unrolls in the
  order in which they began, the number of permits keeps their policy lag within
  `max_lag`. A slow unroll may end after unrolls that began later, and may then
  have a larger lag. The learner computes the lag from the unroll's version.

  Args:
    unrolls_per_update: number of unrolls that one update learns from.
  """

  def __init__(self, unrolls_per_update: int, max_lag: int):
    self.num_permits = unrolls_per_update * (max_lag + 1)
    self._newest: tuple[Any, ...] = ()  # Parameters and their version.
    self._actors = Monitor()
    self._unrolls = Channel(self.num_permits)

  def publish(self, variables: Any, version: int) -> None:
    """Replaces the newest parameters."""
    with self._actors.when():
      self._newest = variables, version

  def fetch(self, actor: int) -> tuple[Any, int, bool]:
    """Returns parameters, their version, and whether the actor had to wait."""
    del actor
    waited = not self.num_permits
    with self._actors.when(lambda: self.num_permits and self._newest):
      self.num_permits -= 1
      return *self._newest, waited

  def put(self, actor: int, unroll: Any) -> None:
    """Adds an unroll; the channel has room for all unrolls with a permit."""
    del actor
    self._unrolls.put(unroll)

  def take(self, i: int, timeout_seconds: float) -> Any:
    """Returns the oldest unroll, for any place i in an update."""
    del i
    return self._unrolls.get(timeout_seconds)

  def release(self, num_unrolls: int) -> None:
    """Frees the permits of unrolls that the learner has used or dropped."""
    with self._actors.when():
      self.num_permits += num_unrolls

  def depth(self) -> int:
    """Returns the number of unrolls that wait for the learner."""
    return len(self._unrolls)

  def close(self) -> None:
    """Closes monitor and channel, so that the learner and the actors end."""
    self._actors.close()
    self._unrolls.close()
