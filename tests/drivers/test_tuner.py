"""Tests the tuner on a simulated host, and the driver on a synthetic one.

The simulation has the same parts as `synthetic.Host`: actors that take turns on
cores, permits, a queue, a learner, and noise. It has its own clock.
"""

import heapq
import itertools
import json
import multiprocessing
import os
import signal
import time

import jax
import numpy as np
import pytest
import synthetic

from podrl import signals
from podrl.drivers import sebulba
from podrl.drivers.tuner import Tuner
from podrl.records import workdir
from podrl.run import train
from podrl.run.config import sebulba_config
from podrl.tools import balance

_T, _ENVS, _U, _MAX, _LAG = 8, 8, 8, 8, 1
_SAMPLES = _U * _T * _ENVS  # The samples of one update.


class Simulation:
  """Asynchronous Sebulba, unroll by unroll.

  Args:
    unroll: seconds of one unroll while no other actor runs.
    update: seconds of one update.
    cores: number of cores that the actors share.
    contention: share by which each further actor slows all actors.
    noise: standard deviation of the logarithm of each duration.
    unrolls_per_update: number of unrolls that one update learns from.
    seed: seed of the noise.
  """

  def __init__(
    self,
    unroll,
    update,
    cores=100,
    contention=0.0,
    noise=0.1,
    unrolls_per_update=_U,
    seed=0,
  ):
    self.unroll, self.update = unroll, update
    self._cores, self._contention, self._noise = cores, contention, noise
    self._unrolls_per_update = unrolls_per_update
    self._permits = unrolls_per_update * (_LAG + 1)
    self._rng = np.random.default_rng(seed)
    self._now, self._ends = 0.0, []  # Ends of running tasks.
    self._working, self._queue = set(), 0

  def _begin(self, what, seconds):
    noise = self._rng.lognormal(-(self._noise**2) / 2, self._noise)
    heapq.heappush(self._ends, (self._now + seconds * noise, what))

  def advance(self, num_actors):
    """Runs one update; returns its seconds and the queue's depth before it."""
    start, is_updating, depth = self._now, False, self._queue
    while True:
      for actor in range(num_actors):
        if actor not in self._working and self._permits:
          self._permits -= 1
          self._working.add(actor)
          number = len(self._working)
          self._begin(
            actor,
            self.unroll
            * max(1, num_actors / self._cores)
            * (1 + self._contention * (number - 1)),
          )
      if not is_updating and self._queue >= self._unrolls_per_update:
        self._queue -= self._unrolls_per_update
        is_updating = True
        self._begin(-1, self.update)
      self._now, what = heapq.heappop(self._ends)
      if what == -1:
        self._permits += self._unrolls_per_update
        return self._now - start, depth
      self._working.remove(what)
      self._queue += 1


def _samples(host, seconds, choose, at=lambda now: None, num_actors=1):
  """Counts the samples that a simulated host learns from.

  Args:
    host: simulated host.
    seconds: simulated seconds to run for.
    choose: `(seconds, depth) -> num_actors`, called after each update.
    at: called with the time before each update.
    num_actors: number of actors at the start.

  Returns:
    The number of samples, and the time and new number of each change.
  """
  now, number, changes = 0.0, 0, []
  while now < seconds:
    at(now)
    spent, depth = host.advance(num_actors)
    now, number = now + spent, number + 1
    chosen = choose(spent, depth)
    if chosen != num_actors:
      changes.append((now, chosen))
    num_actors = chosen
  return number * _SAMPLES * seconds / now, changes


def _best(max_actors=_MAX, **costs):
  """Returns the rate of each number of actors, which is fixed in a run."""
  return [
    _samples(
      Simulation(**costs),
      400 * costs['unroll'] * 4,
      lambda *_, n=n: n,
      num_actors=n,
    )[0]
    / (1600 * costs['unroll'])
    for n in range(1, max_actors + 1)
  ]


_SYSTEMS = {
  'environments': dict(unroll=0.1, update=0.01),
  'cores': dict(unroll=0.1, update=0.01, cores=3),
  'learner': dict(unroll=0.1, update=0.2),
  'contention': dict(unroll=0.1, update=0.01, contention=0.1, cores=5),
  'slow updates': dict(unroll=0.25, update=0.6),
}


def _tuner(max_actors=_MAX):
  return Tuner(max_actors, _SAMPLES, _U)


def _choose(tuner):
  """Makes the argument `choose` of `_samples` from a tuner."""

  def choose(seconds, depth):
    tuner.observe(seconds, 1, depth)
    return tuner.num_actors

  return choose


def _cases(fast, *cases):
  """Returns all combinations; those that are not in `fast` are slow tests."""
  return [
    case if case in fast else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(*cases)
  ]


@pytest.mark.parametrize(
  'name,seed', _cases([('cores', 0), ('contention', 0)], _SYSTEMS, range(3))
)
def test_nine_tenths_of_the_best_within_a_minute_and_rest(name, seed):
  rates = _best(**_SYSTEMS[name])
  tuner, settled = _tuner(), []

  def choose(seconds, depth):
    count = _choose(tuner)(seconds, depth)
    settled.append(tuner.is_settled)
    return count

  host = Simulation(**_SYSTEMS[name], seed=seed)
  _, changes = _samples(host, 60.0, choose)
  assert rates[tuner.best - 1] >= 0.9 * max(rates)
  _, changes = _samples(host, 90.0, choose, num_actors=tuner.num_actors)
  assert tuner.is_settled
  _, changes = _samples(host, 600.0, choose, num_actors=tuner.num_actors)
  assert all(settled[-10:]) and len(changes) <= 10
  assert rates[tuner.best - 1] >= 0.9 * max(rates)


@pytest.mark.parametrize(
  'changed,most',
  [
    # Eight unrolls of one actor take 0.8 s, and an update 0.2 s. So at first
    # four actors keep the learner busy. After the change, eight or two do.
    ({'unroll': 0.2}, 8),
    ({'update': 0.4}, 4),
  ],
)
def test_it_recovers_when_costs_change(changed, most):
  costs = dict(unroll=0.1, update=0.2)
  after, counts = _best(**costs | changed), []
  for seed in range(5):
    tuner, host = _tuner(), Simulation(**costs, seed=seed)

    def at(now):
      if now > 100:
        vars(host).update(changed)

    _samples(host, 160.0, _choose(tuner), at)
    assert after[tuner.best - 1] >= 0.9 * max(after)
    assert any(d.num_drifts for d in tuner.take_decisions())
    counts.append(tuner.best)
  assert most / 2 < np.median(counts) <= most


def test_of_equal_counts_it_takes_the_lowest():
  counts = []
  for seed in range(9):
    # The learner needs 0.1 s x 8 / 0.5 s = 1.6 actors, so two suffice.
    tuner, host = _tuner(), Simulation(unroll=0.1, update=0.5, seed=seed)
    _samples(host, 180.0, _choose(tuner))
    counts.append(tuner.best)
  assert np.median(counts) == 2 and min(counts) == 2


def test_a_rejected_move_is_undone_at_once():
  tuner, host = _tuner(), Simulation(unroll=0.1, update=0.5)
  undone = []

  def choose(seconds, depth):
    count = _choose(tuner)(seconds, depth)
    undone.extend((d, count) for d in tuner.take_decisions() if not d.is_kept)
    return count

  _samples(host, 60.0, choose)
  assert undone and all(count != d.tried for d, count in undone)


def test_a_window_is_compared_only_after_settling():
  """Without settling, a change that takes effect late would be rejected."""
  tuner, number = Tuner(2, 100, 1), 0
  recent = [1] * 6
  while tuner.best == 1 and number < 200:
    # An update learns from the unroll of five updates ago.
    recent = recent[1:] + [tuner.num_actors]
    tuner.observe(0.4 / recent[0], 1, 0)
    number += 1
  assert tuner.take_decisions()[0].is_kept


def test_a_long_pause_begins_a_new_window():
  def count(pauses):
    """Counts the calls until the tuner has compared two numbers of actors."""
    tuner, number = Tuner(8, 1, 1), 0
    while not tuner.take_decisions():
      tuner.observe(0.3, 2, 0, next(pauses, 0.0))
      number += 1
    return number

  usual = count(iter([]))
  assert count(iter([0.0, 0.0, 0.0, 1.0])) > usual
  assert count(iter([0.0, 0.0, 0.0, 0.05])) == usual  # The pause is too short.
  assert count(itertools.repeat(1.0)) <= usual + 1  # Each call follows a pause.


def test_where_it_begins_is_within_bounds():
  for number, expected in ((5, 5), (100, _MAX), (0, 1)):
    tuner = Tuner(_MAX, _SAMPLES, _U, number)
    assert tuner.num_actors == tuner.best == expected


def test_what_a_queue_hands_out_counts_as_learnt_only_where_it_is_filled_up():
  rates = []
  for drain in (0, 2):
    tuner, depth = Tuner(2, 100, 4), 100
    while not (decisions := tuner.take_decisions()):
      depth -= drain * (tuner.num_actors == 2)
      tuner.observe(0.25, 1, depth)
    rates.append(decisions[0].rate_tried)
    assert decisions[0].rate == pytest.approx(400.0)
  # If the queue loses 2 of the 4 unrolls of an update, actors made only 2 new
  # ones in .25 s. Each has 25 samples, so the rate is 200.
  assert rates == pytest.approx([400.0, 200.0])


def _random_walk(rng, seconds=20.0):
  """Makes GA3C's scheduler of actors: `(seconds, depth) -> num_actors`.

  Every 20 s it changes the number by -1, 0 or +1. It keeps the change if the
  rate of updates did not fall. Babaeizadeh et al. 2017, arXiv:1611.06256.
  """
  passed, calls, before, count, last = 0.0, 0, None, 1, 1

  def choose(spent, depth):
    nonlocal passed, calls, before, count, last
    del depth
    passed, calls = passed + spent, calls + 1
    if passed >= seconds:
      rate = calls / passed
      if before is not None and rate < before:
        count = last
      else:
        before = rate
      last = count
      count = min(max(1, count + int(rng.integers(-1, 2))), _MAX)
      passed, calls = 0.0, 0
    return count

  return choose


@pytest.mark.parametrize(('name',), _cases([('contention',)], _SYSTEMS))
def test_a_random_walk_learns_less(name):
  ratios = []
  for seed in range(10):
    rng = np.random.default_rng(seed)
    walk, _ = _samples(
      Simulation(**_SYSTEMS[name], seed=seed), 120.0, _random_walk(rng)
    )
    tuner = _tuner()
    tuned, _ = _samples(
      Simulation(**_SYSTEMS[name], seed=seed), 120.0, _choose(tuner)
    )
    ratios.append(tuned / walk)
  assert np.median(ratios) >= 1.2, ratios


def _run(driver, seconds, choose, at=lambda now: None):
  """Runs a real driver; returns its sample rate, changes and greatest lag."""
  num_actors = driver.plan()['num_actors']
  start, number, lag, changes = time.perf_counter(), 0, 0, []
  while (now := time.perf_counter() - start) < seconds:
    at(now)
    (report,) = driver.advance(1, driver.plan() | {'num_actors': num_actors})
    number += report.num_updates
    lag = max(lag, report.own['policy_lag_max'].max())
    chosen = choose(report.seconds, report.own['queue_depth'][-1])
    if chosen != num_actors:
      changes.append((now, chosen))
      num_actors = chosen
  return number * _SAMPLES / now, changes, lag


def _start(costs, num_cores=None, seed=0, num_active=1):
  driver = synthetic.Host(costs, num_cores, seed).make_driver(
    num_actors=_MAX,
    num_envs=_ENVS,
    unroll_length=_T,
    unrolls_per_update=_U,
    max_lag=_LAG,
    autotune=True,  # It starts with one actor.
  )
  driver.start()
  driver.advance(1, driver.plan() | {'num_actors': num_active})
  return driver


def test_a_parked_actor_waits_and_closing_wakes_it():
  driver = _start(synthetic.Costs(step=0.005))
  _run(driver, 0.5, lambda s, d: 1)
  before = driver.progress()['num_unrolls']
  (report,) = driver.advance(2)
  # Only the active actor counts: its stages fill the time.
  stages = [
    report.stages[f'time_{x}']
    for x in ('environment', 'inference', 'actor_waiting')
  ]
  assert sum(stages) == pytest.approx(report.seconds, rel=0.05)
  assert report.own['num_actors'].tolist() == [1, 1]
  after = driver.progress()['num_unrolls']
  assert [y > x for x, y in zip(before, after)] == [True] + [False] * 7
  driver.advance(4, driver.plan() | {'num_actors': 3})
  assert [x > 0 for x in driver.progress()['num_unrolls']] == [True] * 3 + [
    False
  ] * 5
  assert driver.close() == []


def _train(tmp_path, *arguments):
  def get_config(agent, variant):
    del variant
    config = sebulba_config(agent)
    config.env.name, config.env.num_envs = 'CartPole-v1', 8
    config.unroll_length, config.eval.num_episodes = 4, 2
    config.network.hidden_sizes = (8,)
    config.sebulba.mode, config.sebulba.autotune = 'asynchronous', True
    return config

  return train.run(
    get_config, ['x.py', f'--workdir={tmp_path}/run', *arguments]
  )


def test_a_run_records_what_was_decided_and_goes_on_from_there(
  tmp_path, monkeypatch
):
  monkeypatch.setattr('podrl.drivers.tuner._WINDOW_SECONDS', 0.0)
  monkeypatch.setattr('podrl.drivers.tuner._SETTLE_SECONDS', 0.0)
  # Pretend that two actors are always faster than one.
  monkeypatch.setattr('podrl.drivers.tuner._WORTH', -9.0)
  monkeypatch.setattr(Tuner, '_deviation', lambda self: -99.0)
  advance, reports = sebulba.Sebulba.advance, []

  def interrupted(self, *arguments):
    reports.append(advance(self, *arguments)[0])
    if sum(r.num_updates for r in reports) == 40:
      os.kill(os.getpid(), signal.SIGTERM)
    return reports[-1:]

  arguments = [
    f'--config.total_env_steps={32 * 60}',
    '--config.sebulba.threads_per_actor_device=2',
  ]
  with monkeypatch.context() as patch:
    patch.setattr(sebulba.Sebulba, 'advance', interrupted)
    assert _train(tmp_path, *arguments) == signals.PREEMPTED
  path = str(tmp_path / 'run')
  decision, *_ = decisions = workdir.read_records(path, 'decisions.jsonl')
  assert decision['num_actors'] == 1 and decision['tried'] == 2
  assert decision['is_kept']
  begin, begun = Tuner.__init__, []
  monkeypatch.setattr(
    Tuner, '__init__', lambda self, *x: begun.append(x[3]) or begin(self, *x)
  )
  assert _train(tmp_path, *arguments, '--resume') == 0
  assert begun == [2]
  assert (
    workdir.read_records(path, 'decisions.jsonl')[: len(decisions)] == decisions
  )
  records = workdir.read_records(path)
  assert max(r['policy_lag_max'] for r in records) <= 1
  balance.draw_decisions(path, str(tmp_path / 'history.png'))
  assert (tmp_path / 'history.png').read_bytes()[1:4] == b'PNG'


@pytest.mark.parametrize(
  'arguments,message',
  [
    (['--config.sebulba.mode=deterministic'], 'sebulba.mode=asynchronous'),
    (['--config.sebulba.threads_per_actor_device=1'], 'use 2 or more'),
  ],
)
def test_what_cannot_be_tuned_is_a_mistake(
  arguments, message, tmp_path, capsys
):
  assert _train(tmp_path, *arguments) == 2
  assert message in capsys.readouterr().err


# In 'cores', half of the actors have a core. In 'learner', updates are slow.
_REAL = {
  'cores': (dict(step=0.02, inference=0.001, update=0.02), 4),
  'learner': (dict(step=0.02, inference=0.001, update=0.3), None),
  'environments': (dict(step=0.02, inference=0.001, update=0.02), None),
}


def _compare(job):
  """Runs the random walk or the tuner for 120 s, in a separate process."""
  jax.config.update('jax_platforms', 'cpu')
  name, seed, is_walk = job
  costs, num_cores = _REAL[name]
  driver = _start(synthetic.Costs(**costs), num_cores, seed)
  tuner = _tuner()
  choose = (
    _random_walk(np.random.default_rng(seed)) if is_walk else (_choose(tuner))
  )
  outcome = _run(driver, 120.0, choose)
  driver.close()
  return outcome


@pytest.mark.slow
def test_a_random_walk_learns_less_on_the_driver():
  jobs = [
    ('cores', seed, is_walk) for seed in range(10) for is_walk in (False, True)
  ]
  # The runs mostly sleep, so five at a time do not disturb one another.
  with multiprocessing.get_context('spawn').Pool(5) as pool:
    outcomes = pool.map(_compare, jobs, chunksize=1)
  rates = np.reshape([rate for rate, _, _ in outcomes], (10, 2))
  print(rates)
  assert np.median(rates[:, 0] / rates[:, 1]) >= 1.2
  assert max(lag for _, _, lag in outcomes) <= _LAG


@pytest.mark.slow
@pytest.mark.parametrize('name', _REAL)
def test_the_driver_is_tuned_within_a_minute_and_again(name):
  costs, num_cores = _REAL[name]

  def exhaust(factor):
    return [
      _fixed(dict(costs, step=factor * costs['step']), num_cores, n)
      for n in range(1, _MAX + 1)
    ]

  rates = exhaust(1.0), exhaust(2.0)
  print(rates)
  costs = synthetic.Costs(**costs)
  driver, tuner = _start(costs, num_cores), _tuner()

  def tune(seconds):
    return _run(driver, seconds, _choose(tuner))

  for now in rates:
    _, _, lag = tune(60.0)
    print(tuner.best, tuner.is_settled, *tuner.take_decisions(), sep='\n')
    assert now[tuner.best - 1] >= 0.9 * max(now)
    for _ in range(18):  # The tuner may still refine its choice.
      if not tuner.is_settled:
        tune(10.0)
    rate, changes, later = tune(60.0)
    print(rate, changes)
    assert rate >= 0.9 * max(now) and max(lag, later) <= _LAG
    assert len(changes) <= 1
    costs.step *= 2
  assert driver.close() == []


def _fixed(costs, num_cores, num_actors):
  driver = _start(synthetic.Costs(**costs), num_cores, num_active=num_actors)
  synthetic.rate(driver, 2.0)
  rate = synthetic.rate(driver, 8.0)
  driver.close()
  return rate


@pytest.mark.slow
def test_cartpole_is_learnt_with_autotune(tmp_path):
  from sebulba_cartpole import get_config

  assert (
    train.run(
      get_config,
      [
        'x.py',
        f'--workdir={tmp_path}/run',
        '--config.sebulba.mode=asynchronous',
        '--config.sebulba.autotune=True',
      ],
    )
    == 0
  )
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['eval_return'] >= 475
