"""Channels and slots: order, bounds, closing; and the two exchanges' lags."""

import threading

import pytest

from podrl.drivers.exchange import (
  Asynchronous,
  Channel,
  Closed,
  Deterministic,
  Gate,
  Slot,
)


def _in_thread(function):
  """Runs a function in a thread; returns it and a list for the outcome."""
  outcome = []

  def run():
    try:
      outcome.append(function())
    except Closed as error:
      outcome.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  return thread, outcome


def test_a_channel_is_first_in_first_out():
  channel = Channel(3)
  for item in 'abc':
    channel.put(item)
  assert len(channel) == 3
  assert [channel.get() for _ in range(3)] == ['a', 'b', 'c']


def test_a_full_channel_waits_for_room():
  channel = Channel(1)
  channel.put('a')
  thread, _ = _in_thread(lambda: channel.put('b'))
  thread.join(0.2)
  assert thread.is_alive() and len(channel) == 1
  assert channel.get() == 'a'
  thread.join(10)
  assert channel.get(10) == 'b'


def test_an_empty_channel_times_out():
  with pytest.raises(TimeoutError):
    Channel(1).get(0.01)


@pytest.mark.parametrize(
  'make',
  [
    lambda: (c := Channel(1), c.get),
    lambda: (s := Slot(), s.get),
    lambda: (c := Channel(0), lambda: c.put(1)),
    lambda: (g := Gate(2), lambda: g.wait(2)),
  ],
  ids=['get', 'slot', 'put', 'gate'],
)
def test_closing_wakes_who_waits_and_refuses_who_comes(make):
  closable, wait = make()
  thread, outcome = _in_thread(wait)
  thread.join(0.2)
  assert thread.is_alive()
  closable.close()
  thread.join(10)
  assert not thread.is_alive() and isinstance(outcome[0], Closed)
  with pytest.raises(Closed):
    wait()


def test_a_slot_has_the_newest():
  slot = Slot()
  slot.put('a', 0)
  slot.put('b', 1)
  assert slot.get() == slot.get() == ('b', 1)


def test_a_gate_lets_the_first_places_through():
  gate = Gate(1)
  gate.wait(0)
  thread, _ = _in_thread(lambda: gate.wait(1))
  thread.join(0.2)
  assert thread.is_alive()
  gate.open(2)
  thread.join(10)
  assert not thread.is_alive() and gate.num_open == 2


@pytest.mark.parametrize('max_lag', [0, 1, 3])
def test_deterministic_lags(max_lag):
  exchange = Deterministic(2, max_lag)
  exchange.publish('params', 0)
  versions = []
  for update in range(8):
    for actor in range(2):  # Each acts as soon as it may.
      _, version, _ = exchange.fetch(actor)
      exchange.put(actor, (actor, version))
    unrolls = [exchange.take(i, 1) for i in range(2)]
    assert [actor for actor, _ in unrolls] == [0, 1]
    versions.append([version for _, version in unrolls])
    exchange.publish('params', update + 1)
  # Update k learns from the parameters of update k - min(k, max_lag).
  assert versions == [[k - min(k, max_lag)] * 2 for k in range(8)]


@pytest.mark.parametrize('max_lag,unrolls_per_update', [(0, 1), (1, 1), (2, 3)])
def test_permits_bound_the_lag(max_lag, unrolls_per_update):
  exchange = Asynchronous(unrolls_per_update, max_lag)
  exchange.publish('params', 0)
  under_way, lags = [], []
  for update in range(6):
    # Actors begin as many unrolls as they may.
    while len(exchange._permits):
      _, version, waited = exchange.fetch(0)
      assert not waited
      under_way.append(version)
    assert len(under_way) == unrolls_per_update * (max_lag + 1)
    for version in under_way[:unrolls_per_update]:
      exchange.put(0, version)
      lags.append(update - exchange.take(0, 1))
    del under_way[:unrolls_per_update]
    exchange.publish('params', update + 1)
    exchange.release(unrolls_per_update)
  assert max(lags) == max_lag


def test_without_a_permit_an_actor_waits():
  exchange = Asynchronous(1, 0)
  exchange.publish('params', 0)
  exchange.fetch(0)
  thread, outcome = _in_thread(lambda: exchange.fetch(1))
  thread.join(0.2)
  assert thread.is_alive()
  exchange.publish('newer', 1)
  exchange.release(1)
  thread.join(10)
  assert outcome == [('newer', 1, True)]
