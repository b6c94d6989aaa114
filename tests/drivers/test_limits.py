"""Tests the sentence that names what limits a run, and the costs of a run."""

import random
import types
from typing import NamedTuple

import jax
import pytest
from synthetic import Costs, Host

from podrl.drivers import limits
from podrl.drivers.limits import System, find_limit
from podrl.records import recorder, terminal
from podrl.run.config import check, default_fields

_GPU = System('gpu', 16, 8, 2, (0, 1), (2, 3), 8, 1, True)
_CPU = System('cpu', 2, 1, 1, (0,), (0,), 1, 1, True)
_RECORD = {  # No part is full; each case changes some values.
  'time_environment': 0.5,
  'time_inference': 0.1,
  'time_actor_waiting': 0.4,
  'time_update': 0.5,
  'time_hand_off': 0.1,
  'time_learner_waiting': 0.4,
  'busy_cores': 0.3,
  'busy_actor_devices': 0.3,
  'busy_learner_devices': 0.5,
}


def _record(environment, inference, update, hand_off=0.02, **busy):
  return (
    _RECORD
    | {
      'time_environment': environment,
      'time_inference': inference,
      'time_actor_waiting': 1 - environment - inference,
      'time_update': update,
      'time_hand_off': hand_off,
      'time_learner_waiting': 1 - update - hand_off,
    }
    | {k if k.startswith('idle') else f'busy_{k}': v for k, v in busy.items()}
  )


_SIX = _GPU._replace(actor_devices=(0, 1, 2, 3, 4, 5), learner_devices=(6, 7))
_ONE = _GPU._replace(actor_devices=(0,), learner_devices=(0,), num_actors=2)
_FREE = _GPU._replace(is_deterministic=False)


@pytest.mark.parametrize(
  'name, words, record, system',
  [
    # 4 devices that are 68 % busy could do the work of 6 that are 45 % busy.
    (
      'cores',
      ('waits for data 43 %', 'Add CPU cores', '4 of the 6 actor devices'),
      _record(0.8, 0.19, 0.55, cores=0.95, actor_devices=0.45),
      _SIX,
    ),
    (
      'environments',
      ('waits for data 43 %', 'threads_per_actor_device', '16 CPU cores'),
      _record(0.8, 0.19, 0.55, cores=0.3, actor_devices=0.7),
      _GPU,
    ),
    (
      'environments',
      ('env_threads',),
      _record(0.8, 0.19, 0.55, cores=0.3),
      _GPU._replace(env_threads=1),
    ),
    # Cores that other programs use are not free.
    (
      'cores',
      ('30 % with this run', 'Stop other programs, or add CPU cores'),
      _record(0.8, 0.19, 0.55, cores=0.3, idle_cores=0.05),
      _GPU,
    ),
    (
      'inference latency',
      ('env.num_envs',),
      _record(0.3, 0.69, 0.55, cores=0.3, actor_devices=0.69),
      _GPU._replace(num_actors=1, actor_devices=(0,)),
    ),
    # Inference itself takes 14 % of the time, and waits 45 %.
    (
      'waiting for updates',
      ('spend 45 % of the time waiting for an update', 'num_minibatches'),
      _record(0.4, 0.59, 0.3, actor_devices=0.7) | {'time_behind_update': 0.45},
      _ONE,
    ),
    # The device is busy because of both; measured with `synthetic.Host`.
    (
      'waiting for updates',
      ('waits for data 50 %', 'separate device'),
      _record(0.31, 0.68, 0.5, 0.0, actor_devices=0.8)
      | {'time_behind_update': 0.43},
      _ONE,
    ),
    # Here, it waits 19 %, which is less than the environments take.
    (
      'environments',
      ('spend 60 % of the time in environments',),
      _record(0.6, 0.39, 0.3, actor_devices=0.7) | {'time_behind_update': 0.19},
      _ONE,
    ),
    (
      'actor devices',
      ('2 actor devices are 97 % busy', 'waits for data 43 %'),
      _record(0.2, 0.79, 0.55, cores=0.4, actor_devices=0.97),
      _GPU,
    ),
    # Both are full; the sentence names the fuller one.
    (
      'cores',
      ('CPU cores are 99 %',),
      _record(0.3, 0.69, 0.55, cores=0.99, actor_devices=0.9),
      _GPU,
    ),
    (
      'learner devices',
      ('actors wait for the learner 60 %', 'smaller network'),
      _record(0.3, 0.1, 0.95, actor_devices=0.9),
      _GPU,
    ),
    (
      'learner devices',
      ('1 of the 6 actor devices,',),
      _record(0.3, 0.1, 0.95, actor_devices=0.1),
      _SIX,
    ),
    (
      'learner devices',
      ('a separate device',),
      _record(0.3, 0.6, 0.95, actor_devices=0.99),
      _ONE,
    ),
    # One device acts and learns; neither of these tasks alone fills it.
    (
      'learner devices',
      ('a separate device',),
      _record(0.5, 0.45, 0.6, actor_devices=0.95),
      _ONE,
    ),
    (
      'actor devices',
      ('(30 % with updates)',),
      _record(0.3, 0.69, 0.3, actor_devices=0.95),
      _ONE,
    ),
    (
      'actor devices',
      ('(45 % with updates)',),
      _record(0.05, 0.5, 0.45, actor_devices=0.97),
      _ONE._replace(max_lag=0),
    ),
    ('hand-off', ('Make updates fewer',), _record(0.2, 0.1, 0.3, 0.65), _GPU),
    ('slowest actor', ('asynchronous',), _record(0.5, 0.1, 0.5), _GPU),
    (
      'lag',
      ('sebulba.max_lag=0', 'impala'),
      _record(0.5, 0.1, 0.5),
      _GPU._replace(max_lag=0),
    ),
    (
      'lag',
      ('16 unrolls', 'Raise one of the two'),
      _record(0.5, 0.1, 0.5),
      _FREE,
    ),
    (
      'lag',
      ('4 unrolls', 'use only 4 actors'),
      _record(0.5, 0.1, 0.5),
      _FREE._replace(unrolls_per_update=2),
    ),
    # A CPU device may be busy although cores are free.
    (
      'environments',
      ('1 CPU core is 30 %',),
      _record(0.5, 0.45, 0.5),
      _CPU._replace(num_cores=1),
    ),
    (
      'environments',
      ('1 actor spends',),
      _record(0.6, 0.39, 0.6, cores=0.7, actor_devices=0.95),
      _CPU,
    ),
    (
      'cores',
      ('mostly with updates', 'smaller network'),
      _record(0.6, 0.39, 0.9, cores=0.95, actor_devices=0.99),
      _CPU,
    ),
    (
      'cores',
      ('mostly with environments', 'Add CPU cores'),
      _record(0.9, 0.09, 0.5, cores=0.95, actor_devices=0.6),
      _CPU,
    ),
    # The run's own work is not the cause if other programs use most cores.
    (
      'cores',
      ('with other programs). Actors', 'its time on updates. Stop other pro'),
      _record(0.6, 0.39, 0.9, cores=0.27, idle_cores=0.0, actor_devices=0.6),
      _CPU,
    ),
    (
      'learner devices',
      ('more CPU devices',),
      _record(0.2, 0.1, 0.97, cores=0.6, actor_devices=0.99),
      _CPU,
    ),
    (
      'inference latency',
      ('threads_per_actor_device',),
      _record(0.2, 0.79, 0.4, cores=0.6, actor_devices=0.99),
      _CPU,
    ),
    (
      'lag',
      ('max_lag=0',),
      _record(0.3, 0.2, 0.5, cores=0.6),
      _CPU._replace(max_lag=0),
    ),
  ],
)
def test_the_limit_of_shares(name, words, record, system):
  limit = find_limit(record, system)
  assert limit.name == name, limit
  for word in words:
    assert word in limit.sentence, limit


def test_parked_actors_are_not_counted():
  record = _record(0.8, 0.19, 0.55) | {'num_actors': 3.0}
  assert '3 actors spend 80 %' in find_limit(record, _GPU).sentence


class _Case(NamedTuple):
  """A synthetic system.

  Attributes:
    num_actors, unrolls_per_update, max_lag, is_deterministic: driver settings.
    step, inference, update: seconds of one call.
  """

  num_actors: int
  unrolls_per_update: int
  max_lag: int
  is_deterministic: bool
  step: float
  inference: float
  update: float


_T = 8  # The unroll length.
_NUM_ENVS = 4  # Each actor has 4; more would cost no time.
_MARGIN = 1.5
# On a busy machine, Python and XLA add these seconds to a sleep.
_PER_STEP, _PER_UPDATE = 1e-3, 3e-3


def _capacities(case):
  """Returns the unrolls per second that each part alone would allow."""
  inference, update = case.inference + _PER_STEP, case.update + _PER_UPDATE
  unroll = _T * (case.step + inference)  # The actor never waits here.
  # At most this many unrolls exist at the same time, from their start until
  # their update ends. All actors share one device.
  permits = case.unrolls_per_update * (case.max_lag + 1)
  acting = max(unroll, min(case.num_actors, permits) * _T * inference)
  return {
    'environments': case.num_actors / unroll,  # All actors act at once.
    'actor devices': 1 / (_T * inference),  # A device runs one call at a time.
    'learner devices': case.unrolls_per_update / update,
    'lag': permits / (acting + update),
  }


def _draw(rng, name):
  """Draws a case limited by `name`; all other parts allow 1.5 times as much."""
  while True:
    num_actors = rng.choice([1, 2, 3, 4, 6])
    is_deterministic = rng.random() < 0.5
    step, inference, update = (
      low * (high / low) ** rng.random()
      for low, high in ((1e-3, 20e-3), (1e-3, 12e-3), (5e-3, 150e-3))
    )
    case = _Case(
      num_actors,
      num_actors if is_deterministic else rng.choice([1, num_actors]),
      rng.choice([0, 1, 1, 2, 3]),
      is_deterministic,
      step,
      inference,
      update,
    )
    rates = _capacities(case)
    limit = rates.pop(name)
    if min(rates.values()) < _MARGIN * limit:
      continue
    # Each second has more than 4 updates. If environments are the limit, they
    # also determine an actor's latency.
    if (name != 'environments' or step > 2 * (inference + _PER_STEP)) and (
      limit / case.unrolls_per_update > 4
    ):
      return case


def _run(case, seed):
  """Makes a real run of about a second; returns its limit and its record."""
  host = Host(
    Costs(step=case.step, inference=case.inference, update=case.update),
    seed=seed,
  )
  driver = host.make_driver(
    num_actors=case.num_actors,
    num_envs=_NUM_ENVS,
    unroll_length=_T,
    unrolls_per_update=case.unrolls_per_update,
    max_lag=case.max_lag,
    deterministic=case.is_deterministic,
    learner_device=1,
  )
  window, seconds = recorder.Window(1, 1), 0.0
  driver.start()
  try:
    driver.advance(2)  # Leave out the start.
    while seconds < 1.0:
      (report,) = driver.advance(1)
      window.add(report)
      seconds += report.seconds
  finally:
    driver.close()
  record = window.record()
  record.pop('idle_cores', None)  # Other tests use the cores.
  system = System(  # Its costs resemble an accelerator's.
    'gpu',
    2,
    case.num_actors,
    1,
    (0,),
    (1,),
    case.unrolls_per_update,
    case.max_lag,
    case.is_deterministic,
  )
  return find_limit(record, system), record


_NAMES = ('environments', 'actor devices', 'learner devices', 'lag')


def _check(names, seed):
  rng = random.Random(seed)
  for name in names:
    case = _draw(rng, name)
    for _ in range(5):  # Repeat if a busy machine slowed the run.
      limit, record = _run(case, seed)
      if record['steps_per_second'] / (_T * _NUM_ENVS) > (
        0.75 * _capacities(case)[name]
      ):
        break
    shares = {
      k: round(v, 2)
      for k, v in record.items()
      if k.startswith(('time_', 'busy_'))
    }
    print(f'\n{name}: {case}\n  {limit.sentence}\n  {shares}')
    assert limit.name == name


def test_real_runs_name_their_limit():
  _check(_NAMES[:3], 0)


@pytest.mark.slow
def test_many_real_runs_name_their_limit():
  _check(_NAMES * 4, 1)


_BALANCED = System('gpu', 16, 8, 2, (0, 1), (1, 2, 3), 8, 1, True)


_SHARES = {
  'time_environment': 0.5,
  'time_inference': 0.1,
  'time_actor_waiting': 0.4,
  'time_update': 0.5,
  'time_hand_off': 0.1,
  'time_learner_waiting': 0.4,
  'busy_cores': 0.9,
  'busy_actor_devices': 0.6,
  'busy_learner_devices': 0.8,
  'frames_per_second': 1000.0,
}


def test_ratios(monkeypatch):
  # Environments use .5 x 8 actors x 2 threads = 8 of the 14.4 CPU-seconds.
  # Device 0 only acts, .6 of the time. Devices 1 to 3 learn, .8 of the time.
  ratio = limits.workload_ratio(_SHARES, _BALANCED)
  assert ratio == pytest.approx(8 / (0.6 + 3 * 0.8))
  # Environments that sleep cannot use more CPU-seconds than the process.
  assert limits.workload_ratio(
    _SHARES | {'busy_cores': 0.1}, _BALANCED
  ) == pytest.approx(1.6 / 3)
  gpus = [
    types.SimpleNamespace(platform='gpu', core_count=132, local_hardware_id=i)
    for i in range(4)
  ]
  monkeypatch.setattr(limits, 'num_cores', lambda: 16)
  record = _SHARES | {'cpu_seconds_per_device_second': ratio}
  summary = limits.summarise(record, gpus, 0.0)
  assert summary['num_compute_units'] == 528
  assert summary['threads_per_compute_unit'] == 16 / 528
  # Each device has 4 threads, and a device-second needs 8/3 CPU-seconds.
  assert summary['cpu_balance'] == pytest.approx(4 / (8 / 3))
  tpus = [types.SimpleNamespace(platform='tpu', num_cores=2)] * 4
  assert limits.summarise(record, tpus, 0.0)['num_compute_units'] == 8
  assert 'num_compute_units' not in limits.summarise(record, jax.devices(), 0.0)
  record |= {'limit': 'lag', 'limit_sentence': ''}
  rows = dict(limits.describe(record | summary))
  assert '528 compute units' in rows['balance'] and 'limit: lag' in rows
  rows = dict(
    limits.describe(record | limits.summarise(record, jax.devices(), 0.0))
  )
  assert 'balance' not in rows


def test_money():
  # At 1,000 frames per second, 200 M frames take 55.6 hours.
  summary = limits.summarise(_SHARES, jax.devices(), 2.5)
  assert summary['cost_of_200m_frames'] == pytest.approx(138.889, rel=1e-4)
  assert 'limit' not in summary
  assert 'cost_of_200m_frames' not in limits.summarise(
    _SHARES, jax.devices(), 0.0
  )
  config = default_fields('ppo', 'Anakin')
  config['env.name'], config['price_per_hour'] = 'CartPole-v1', -1.0
  with pytest.raises(ValueError, match='price_per_hour=-1.0 must be'):
    check(config)


def test_the_line_of_the_limit_fits_80_columns():
  record = (
    _SHARES
    | {k: 1.0 for k in _SHARES if k.startswith('busy_')}
    | {
      'time_actor_waiting': 0.9,
      'time_update': 0.9,
      'policy_lag': 1.0,
      'num_actors': 12.0,
      'limit': 'learner devices',
      'policy_lag_max': 1.0,
      'queue_depth': 1.0,
      'predictions_per_second': 1.0,
      'updates_per_second': 1.0,
    }
  )
  lines = terminal.describe_stages(record).split('\n')
  expected = 'busy: cores 100%, actor/learner devices 100%/100%'
  assert lines[3] == f'limit: learner devices; {expected}'
  assert max(map(len, lines)) <= 78  # Plain lines are indented by 2.
  del record['limit']
  assert len(terminal.describe_stages(record).split('\n')) == 3
