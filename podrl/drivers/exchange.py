"""How threads hand things on: a bounded queue, a slot and a gate, all closable.

Closing wakes whoever waits, on both sides. And a clock that they share.

Of these, two ways for a learner and its actors to exchange parameters and
unrolls, with the same methods: `Deterministic` and `Asynchronous`.
"""

from collections import deque
import threading
import time
from typing import Any


class Closed(Exception):
  """The other side is gone."""


class Channel:
  """A bounded first-in, first-out queue.

  Args:
    capacity: items that it holds; `put` waits while there are so many.
  """

  def __init__(self, capacity: int):
    self._capacity = capacity
    self._items = deque()
    self._changed = threading.Condition()
    self._is_closed = False

  def __len__(self) -> int:
    return len(self._items)

  def put(self, item: Any) -> None:
    """Appends an item, waiting while the channel is full.

    Raises:
      Closed: if it is, or becomes so while waiting.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_closed or len(self._items) < self._capacity
      )
      if self._is_closed:
        raise Closed
      self._items.append(item)
      self._changed.notify_all()

  def get(self, timeout_seconds: float | None = None) -> Any:
    """Takes the oldest item, waiting while there is none.

    Raises:
      Closed: if it is, or becomes so while waiting.
      TimeoutError: after `timeout_seconds` without an item.
    """
    with self._changed:
      if not self._changed.wait_for(
        lambda: self._is_closed or self._items, timeout_seconds
      ):
        raise TimeoutError
      if self._is_closed:
        raise Closed
      item = self._items.popleft()
      self._changed.notify_all()
      return item

  def close(self) -> None:
    """Ends the channel and wakes all who wait; what it holds is dropped."""
    with self._changed:
      self._is_closed = True
      self._items.clear()
      self._changed.notify_all()


class Slot:
  """The newest of a sequence of values, each overwriting the one before."""

  def __init__(self):
    self._value = None
    self._version = -1
    self._changed = threading.Condition()
    self._is_closed = False

  def put(self, value: Any, version: int) -> None:
    """Overwrites the value; versions only grow.

    Raises:
      Closed: if it is.
    """
    with self._changed:
      if self._is_closed:
        raise Closed
      self._value, self._version = value, version
      self._changed.notify_all()

  def get(self) -> tuple[Any, int]:
    """The value and its version, waiting for the first.

    Raises:
      Closed: if it is, or becomes so while waiting.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._is_closed or self._version >= 0)
      if self._is_closed:
        raise Closed
      return self._value, self._version

  def close(self) -> None:
    """Ends the slot, drops its value and wakes all who wait."""
    with self._changed:
      self._is_closed = True
      self._value = None
      self._changed.notify_all()


class Busy:
  """Adds up the seconds in which at least one of several threads is at work."""

  def __init__(self):
    self._lock = threading.Lock()
    self._num_inside = 0
    self._since = 0.0
    self._seconds = 0.0

  def enter(self) -> None:
    """A thread begins."""
    with self._lock:
      if not self._num_inside:
        self._since = time.perf_counter()
      self._num_inside += 1

  def leave(self) -> None:
    """A thread that began ends."""
    with self._lock:
      self._num_inside -= 1
      if not self._num_inside:
        self._seconds += time.perf_counter() - self._since

  def seconds(self) -> float:
    """So far, including what is under way."""
    with self._lock:
      return self._seconds + (
        time.perf_counter() - self._since if self._num_inside else 0.0
      )


class Gate:
  """Lets those through whose place is among the first so many.

  Args:
    num_open: places to begin with.
  """

  def __init__(self, num_open: int):
    self.num_open = num_open
    self._changed = threading.Condition()
    self._is_closed = False

  def open(self, num_open: int) -> None:
    """Changes the number of places that are let through from now on."""
    with self._changed:
      self.num_open = num_open
      self._changed.notify_all()

  def wait(self, place: int) -> None:
    """Returns when a place, counted from 0, is let through.

    Raises:
      Closed: if the gate is, or becomes so while waiting.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._is_closed or place < self.num_open)
      if self._is_closed:
        raise Closed

  def close(self) -> None:
    """Ends the gate and wakes all who wait."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()


class Deterministic:
  """Each actor has a queue of parameters and one of unrolls.

  The unroll that update k learns from was acted with the parameters of update
  k - min(k, max_lag), whatever the threads' timing. Huang et al. 2023,
  arXiv:2310.00036, section 3, is this with a lag of 1.

  Args:
    num_actors: each of which contributes one unroll to every update.
    max_lag: calls of `update` between the parameters that act and that learn.
  """

  def __init__(self, num_actors: int, max_lag: int):
    self._params = [Channel(max_lag + 1) for _ in range(num_actors)]
    self._unrolls = [Channel(1) for _ in range(num_actors)]
    self._num_copies = max_lag + 1  # Of the first parameters.

  def publish(self, params: Any, version: int) -> None:
    """Hands parameters to all actors; only a closed exchange refuses them."""
    for _ in range(self._num_copies):
      for channel in self._params:
        channel.put((params, version))
    self._num_copies = 1

  def fetch(self, actor: int) -> tuple[Any, int, bool]:
    """An actor's next parameters, their version, and whether it had to wait."""
    waited = not len(self._params[actor])
    return *self._params[actor].get(), waited

  def put(self, actor: int, unroll: Any) -> None:
    """Hands on an actor's unroll, waiting until its last one was taken."""
    self._unrolls[actor].put(unroll)

  def take(self, i: int, timeout_seconds: float) -> Any:
    """The unroll for place i of an update: that of actor i."""
    return self._unrolls[i].get(timeout_seconds)

  def release(self, num_unrolls: int) -> None:
    """So many unrolls were learnt or dropped; here nobody waits for that."""

  def depth(self) -> int:
    """Unrolls that wait for the learner."""
    return sum(map(len, self._unrolls))

  def close(self) -> None:
    """Wakes and ends both sides."""
    for channel in self._params + self._unrolls:
      channel.close()


class Asynchronous:
  """Actors take the newest parameters; the learner takes whatever is ready.

  Each unroll under way or waiting holds a permit. There are as many as can be
  learnt from, in the order of their beginnings, before the newest is staler
  than `max_lag`; who finds none waits. An unroll that others overtook may still
  become staler: the learner sees it by its version.

  Args:
    unrolls_per_update: that one update learns from.
    max_lag: bound of the calls of `update` between the parameters that act and
      those that learn.
  """

  def __init__(self, unrolls_per_update: int, max_lag: int):
    num_permits = unrolls_per_update * (max_lag + 1)
    self._params = Slot()
    self._unrolls = Channel(num_permits)
    self._permits = Channel(num_permits)
    self.release(num_permits)

  def publish(self, params: Any, version: int) -> None:
    """Overwrites the parameters that actors find."""
    self._params.put(params, version)

  def fetch(self, actor: int) -> tuple[Any, int, bool]:
    """The newest parameters, their version, and whether there was a wait."""
    del actor
    waited = not len(self._permits)
    self._permits.get()
    return *self._params.get(), waited

  def put(self, actor: int, unroll: Any) -> None:
    """Hands on an unroll; there is always room for those with a permit."""
    del actor
    self._unrolls.put(unroll)

  def take(self, i: int, timeout_seconds: float) -> Any:
    """The oldest unroll, for any place of an update."""
    del i
    return self._unrolls.get(timeout_seconds)

  def release(self, num_unrolls: int) -> None:
    """So many unrolls were learnt or dropped: as many may begin."""
    for _ in range(num_unrolls):
      self._permits.put(None)

  def depth(self) -> int:
    """Unrolls that wait for the learner."""
    return len(self._unrolls)

  def close(self) -> None:
    """Wakes and ends both sides."""
    for channel in (self._params, self._unrolls, self._permits):
      channel.close()
