"""Ratios, energy and money, and the clocks that they come from."""

import os
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from podrl.drivers import exchange as channel
from podrl.drivers import machine, stages
from podrl.drivers.limits import System
from podrl.records import recorder, terminal
from podrl.run.config import base_config, check
from podrl.types import Episodes, Report


def _device(platform='cpu', **attributes):
  return types.SimpleNamespace(platform=platform, **attributes)


def test_a_clock_takes_the_union(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(channel.time, 'perf_counter', lambda: now[0])
  busy = channel.Busy()
  # One from 1 to 4, another from 2 to 6, one from 8 on: 5 and 1 by 9.
  for seconds, call in (
    (1, busy.enter),
    (2, busy.enter),
    (4, busy.leave),
    (6, busy.leave),
    (8, busy.enter),
  ):
    now[0] = seconds
    call()
  now[0] = 9.0
  assert busy.seconds() == 6.0


def test_a_device_that_learns_and_acts_counts_once(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(channel.time, 'perf_counter', lambda: now[0])
  actor = types.SimpleNamespace(
    seconds=lambda: dict.fromkeys(
      ('environment', 'inference', 'actor_waiting'), 0.0
    )
  )
  found = stages.Stages(['a', 'b'], ['b', 'c'], 2)
  found.clocks['b'].enter()  # An actor's, from 0 to 3.
  now[0] = 2.0
  with found.updating():  # From 2 to 6.
    now[0] = 3.0
    found.clocks['b'].leave()
    now[0] = 6.0
  seconds = found.seconds([actor])
  assert seconds['busy_actor_devices'] == (0 + 6) / 2
  assert seconds['busy_learner_devices'] == (6 + 4) / 2


def test_cores_count_threads_and_processes_that_live():
  before, start = stages.cpu_seconds(), time.perf_counter()
  child = subprocess.Popen(
    [sys.executable, '-c', 'while True: pass'], stdout=subprocess.DEVNULL
  )
  try:
    own = time.process_time()
    while stages.cpu_seconds() - before - (time.process_time() - own) < 0.3:
      assert time.perf_counter() - start < 60
      time.sleep(0.05)
  finally:
    child.kill()
    alive = stages.cpu_seconds()
    child.wait()
  # What it used stays when it is gone.
  assert stages.cpu_seconds() >= alive - 0.02


@pytest.mark.skipif(not os.path.exists('/proc/stat'), reason='of Linux')
def test_idle_cores_are_those_that_nobody_uses():
  cores = os.sched_getaffinity(0)
  before, start = stages.idle_core_seconds(cores), time.perf_counter()
  time.sleep(0.2)
  idle = stages.idle_core_seconds(cores) - before
  assert 0 <= idle <= len(cores) * (time.perf_counter() - start) + 0.05
  assert stages.idle_core_seconds({*cores, 10**6}) is None


@pytest.mark.parametrize(
  'text, expected',
  [
    ('max 100000', 8),
    ('250000 100000', 3),
    ('50000 100000', 1),
    ('1600000 100000', 8),
    ('', 8),
    (None, 8),
  ],
)
def test_a_quota_bounds_the_cores(text, expected, tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(8))
  monkeypatch.setattr(stages, '_QUOTA', str(tmp_path / 'cpu.max'))
  if text is not None:
    (tmp_path / 'cpu.max').write_text(text + '\n')
  assert stages.num_cores() == expected


def _domain(path, name, energy, size=1000):
  path.mkdir()
  (path / 'name').write_text(name + '\n')
  (path / 'energy_uj').write_text(f'{energy}\n')
  (path / 'max_energy_range_uj').write_text(f'{size}\n')


def test_rapl_counts_packages_once_and_wraps(tmp_path):
  _domain(tmp_path / 'intel-rapl:0', 'package-0', 900)
  _domain(tmp_path / 'intel-rapl:1', 'package-1', 100)
  _domain(tmp_path / 'intel-rapl:2', 'psys', 100)
  _domain(tmp_path / 'intel-rapl:0:0', 'core', 100)
  _domain(tmp_path / 'intel-rapl-mmio:0', 'package-0', 100)
  meter = machine.Meter([_device()], str(tmp_path))
  assert meter.parts == ['cpu']
  before = meter.joules()
  for path in tmp_path.iterdir():
    (path / 'energy_uj').write_text('400')
  # 900 -> 1000 = 0 -> 400 and 100 -> 400 microjoules.
  assert meter.joules() - before == pytest.approx(800e-6)
  (tmp_path / 'intel-rapl:0' / 'energy_uj').write_text('450')
  assert meter.joules() - before == pytest.approx(850e-6)


def test_energy_that_cannot_be_read_is_not_available(tmp_path):
  assert machine.Meter([_device()], str(tmp_path)).joules() is None
  _domain(tmp_path / 'intel-rapl:0', 'package-0', 1)
  (tmp_path / 'intel-rapl:0' / 'energy_uj').unlink()  # As good as unreadable.
  meter = machine.Meter([_device()], str(tmp_path))
  report = _report()
  assert meter.parts == [] and meter.over(lambda: [report]) == [report]
  assert ('energy', 'not available') in machine.describe({'energy_of': []})


class _Nvml(types.ModuleType):
  """NVML with three GPUs that have taken 1, 2 and 3 kJ."""

  class NVMLError(Exception):
    """As NVML's."""

  def __init__(self, is_supported=True):
    super().__init__('pynvml')
    self.energy = [1_000_000, 2_000_000, 3_000_000]
    self.is_supported = is_supported

  def nvmlInit(self):
    pass

  def nvmlDeviceGetHandleByIndex(self, index):
    return index

  def nvmlDeviceGetHandleByUUID(self, name):
    return {'GPU-a': 0, 'GPU-c': 2}[name]

  def nvmlDeviceGetTotalEnergyConsumption(self, handle):
    if not self.is_supported:
      raise self.NVMLError
    return self.energy[handle]


@pytest.mark.parametrize(
  'visible, expected',
  [('', 3.0), ('2,0', 4.0), ('GPU-c,GPU-a', 4.0), ('1, 2', 5.0)],
)
def test_nvml_counts_the_gpus_that_are_used(
  visible, expected, tmp_path, monkeypatch
):
  nvml = _Nvml()
  monkeypatch.setitem(sys.modules, 'pynvml', nvml)
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
  gpus = [_device('gpu', local_hardware_id=i) for i in range(2)]
  meter = machine.Meter(gpus, str(tmp_path))
  assert meter.parts == ['gpu'] and meter.joules() == expected * 1e3

  def advance():
    nvml.energy = [x + 7_000 for x in nvml.energy]  # Millijoules.
    return [_report(), _report()]

  # 7 J of each GPU, shared by two agents.
  assert [x.stages for x in meter.over(advance)] == [
    {'joules_per_second': 7.0}
  ] * 2


def test_nvml_that_fails_is_not_available(tmp_path, monkeypatch):
  gpus = [_device('gpu', local_hardware_id=0)]
  monkeypatch.setitem(sys.modules, 'pynvml', _Nvml(is_supported=False))
  assert machine.Meter(gpus, str(tmp_path)).parts == []
  monkeypatch.setitem(sys.modules, 'pynvml', None)  # Not installed.
  assert machine.Meter(gpus, str(tmp_path)).parts == []


def _report(**seconds):
  return Report(
    {'loss': np.zeros(1)},
    Episodes(*np.zeros((4, 1))),
    600,
    2.0,
    True,
    seconds,
    {},
  )


def test_a_counter_that_fails_later_leaves_training_alone(tmp_path):
  _domain(tmp_path / 'intel-rapl:0', 'package-0', 100)
  found = machine.Meter(jax.devices()[:1], str(tmp_path))

  def advance():
    (tmp_path / 'intel-rapl:0' / 'energy_uj').unlink()
    return ['report']

  assert found.over(advance) == ['report']
  assert found.parts == []


def test_frames_per_joule():
  window = recorder.Window(4, 1)
  window.add(_report(joules_per_second=30.0))
  record = window.record()
  # 600 steps of 4 frames with 30 J in 2 s.
  assert record['joules_per_second'] == 15.0
  assert record['frames_per_joule'] == pytest.approx(600 * 4 / 30)


def test_processes_add_their_energy_and_average_their_shares():
  merged = recorder.merge_processes(
    _report(joules_per_second=30.0, busy_cores=0.5),
    [recorder.local_part(_report(joules_per_second=10.0, busy_cores=1.0))],
  )
  assert merged.stages == {'joules_per_second': 40.0, 'busy_cores': 0.75}
  # One whose energy cannot be read: then that of all is not known.
  merged = recorder.merge_processes(
    _report(joules_per_second=30.0, busy_cores=0.5),
    [recorder.local_part(_report(busy_cores=1.0))],
  )
  assert merged.stages == {'busy_cores': 0.75}


_SYSTEM = System('gpu', 16, 8, 2, (0, 1), (1, 2, 3), 8, 1, True)
_RECORD = {
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
  # Environments: .5 x 8 actors x 2 threads = 8 of 14.4 CPU-seconds used.
  # Devices: 0 acts alone for .6, and 3 that learn for .8 each.
  ratio = machine.workload_ratio(_RECORD, _SYSTEM)
  assert ratio == pytest.approx(8 / (0.6 + 3 * 0.8))
  # Of environments that sleep, the process's CPU-seconds are the bound.
  assert machine.workload_ratio(
    _RECORD | {'busy_cores': 0.1}, _SYSTEM
  ) == pytest.approx(1.6 / 3)
  gpus = [_device('gpu', core_count=132, local_hardware_id=i) for i in range(4)]
  monkeypatch.setattr(machine, 'num_cores', lambda: 16)
  record = _RECORD | {'cpu_seconds_per_device_second': ratio}
  summary = machine.summarise(record, gpus, 0.0)
  assert summary['num_compute_units'] == 528
  assert summary['threads_per_compute_unit'] == 16 / 528
  # 4 threads a device, where 8/3 CPU-seconds go with a device-second.
  assert summary['cpu_balance'] == pytest.approx(4 / (8 / 3))
  assert machine.count_compute_units([_device('tpu', num_cores=2)] * 4) == 8
  assert machine.count_compute_units(jax.devices()) == 0
  record |= {'limit': 'lag', 'limit_sentence': ''}
  rows = dict(machine.describe(record | summary))
  assert '528 compute units' in rows['balance'] and 'limit: lag' in rows
  rows = dict(
    machine.describe(record | machine.summarise(record, jax.devices(), 0.0))
  )
  assert rows['balance'].startswith('no accelerator')


def test_money():
  # 200 M frames at 1,000 a second are 55.6 hours.
  summary = machine.summarise(_RECORD, jax.devices(), 2.5)
  assert summary['cost_of_200m_frames'] == pytest.approx(138.889, rel=1e-4)
  assert 'limit' not in summary
  assert 'cost_of_200m_frames' not in machine.summarise(
    _RECORD, jax.devices(), 0.0
  )
  config = base_config('ppo')
  config.env.name = 'CartPole-v1'
  config.price_per_hour = -1.0
  with pytest.raises(ValueError, match='price_per_hour=-1.0 must be'):
    check(config)


def test_the_line_of_the_limit_fits_80_columns():
  record = (
    _RECORD
    | {k: 1.0 for k in _RECORD if k.startswith('busy_')}
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
  assert lines[3].startswith('limit: learner devices   cores 100%  actor dev')
  assert max(map(len, lines)) <= 78  # Plain lines are indented by 2.
  del record['limit']
  assert len(terminal.describe_stages(record).split('\n')) == 3
