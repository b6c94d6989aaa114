"""Tests exchanges: order, bounds, closing, and lags."""

import threading

import pytest

from podrl.drivers.exchange import (
  Asynchronous,
  Closed,
  Deterministic,
  Monitor,
)


def _in_thread(function):
  """Runs a function in a thread; returns the thread and its result list."""
  outcome = []

  def run():
    try:
      outcome.append(function())
    except Closed as error:
      outcome.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  return thread, outcome


def _exchanges():
  exchanges = Deterministic(2, 1), Asynchronous(2, 1)
  for exchange in exchanges:
    exchange.publish('params', 0)
  return exchanges


def test_unrolls_come_in_order():
  deterministic, asynchronous = _exchanges()
  for exchange in (deterministic, asynchronous):
    exchange.put(1, 'a')
    exchange.put(0, 'b')
    assert exchange.depth() == 2
  assert [deterministic.take(i, 1) for i in range(2)] == ['b', 'a']
  assert [asynchronous.take(i, 1) for i in range(2)] == ['a', 'b']


def test_a_deterministic_actor_waits_until_its_unroll_is_taken():
  exchange, _ = _exchanges()
  exchange.put(0, 'a')
  thread, _ = _in_thread(lambda: exchange.put(0, 'b'))
  thread.join(0.2)
  assert thread.is_alive() and exchange.take(0, 1) == 'a'
  thread.join(10)
  assert exchange.take(0, 10) == 'b'


def test_a_learner_without_unrolls_times_out():
  for exchange in _exchanges():
    with pytest.raises(TimeoutError):
      exchange.take(0, 0.01)


@pytest.mark.parametrize(
  'make',
  [
    lambda: (d := Deterministic(1, 0), lambda: d.fetch(0)),
    lambda: (d := Deterministic(1, 0), lambda: [d.put(0, 1), d.put(0, 1)]),
    lambda: (a := Asynchronous(1, 0), lambda: a.fetch(0)),
    lambda: (a := Asynchronous(1, 0), lambda: a.take(0, 60)),
    lambda: (m := Monitor(), lambda: m.when(lambda: False).__enter__()),
  ],
  ids=['fetch', 'put', 'fetch newest', 'take', 'monitor'],
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


def test_asynchronous_actors_fetch_the_newest_parameters():
  exchange = Asynchronous(2, 0)
  exchange.publish('a', 0)
  exchange.publish('b', 1)
  assert exchange.fetch(0) == exchange.fetch(1) == ('b', 1, False)


@pytest.mark.parametrize('max_lag', [0, 1, 3])
def test_deterministic_lags(max_lag):
  exchange = Deterministic(2, max_lag)
  exchange.publish('params', 0)
  versions = []
  for update in range(8):
    for actor in range(2):  # Each actor acts as soon as it may.
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
    while exchange.num_permits:
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
