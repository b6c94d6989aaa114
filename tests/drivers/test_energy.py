"""Tests the energy meter, and what records say about energy."""

import json
import sys
import types

import helpers
import jax
import numpy as np
import pytest

from podrl.drivers import energy, limits
from podrl.drivers.anakin import Anakin
from podrl.records import recorder
from podrl.run import loop
from podrl.types import Episodes, Report


def _device(platform='cpu', **attributes):
  return types.SimpleNamespace(platform=platform, **attributes)


def _domain(path, name, energy, size=1000):
  path.mkdir()
  (path / 'name').write_text(name + '\n')
  (path / 'energy_uj').write_text(f'{energy}\n')
  (path / 'max_energy_range_uj').write_text(f'{size}\n')


def _joules(meter, advance=lambda: None):
  """Returns the joules and the moves of a call of `measure`, if known."""

  def report():
    advance()
    return [_report()]

  (measured,) = meter.measure(report)
  return measured.stages.get('joules'), measured.stages.get('counter_moves')


def test_rapl_counts_packages_once_and_wraps(tmp_path):
  _domain(tmp_path / 'intel-rapl:0', 'package-0', 900)
  _domain(tmp_path / 'intel-rapl:1', 'package-1', 100)
  _domain(tmp_path / 'intel-rapl:2', 'psys', 100)
  _domain(tmp_path / 'intel-rapl:0:0', 'core', 100)
  _domain(tmp_path / 'intel-rapl-mmio:0', 'package-0', 100)
  meter = energy.Meter([_device()], str(tmp_path))
  assert meter.parts == ['cpu']

  def set_to(value, pattern='*'):
    for path in tmp_path.glob(pattern):
      (path / 'energy_uj').write_text(str(value))

  # Package 0 goes from 900 to 1000 = 0, then to 400; package 1 from 100 to 400.
  assert _joules(meter, lambda: set_to(400)) == (pytest.approx(800e-6), 1)
  # Only one of the two counters moves, so there is no second move of both.
  zero = 'intel-rapl:0'
  assert _joules(meter, lambda: set_to(450, zero)) == (pytest.approx(50e-6), 0)
  assert _joules(meter, lambda: set_to(460)) == (pytest.approx(70e-6), 1)
  # 460 -> 40 would be 580 of 1000: the counter was reset.
  assert _joules(meter, lambda: set_to(40, zero)) == (None, None)
  assert _joules(meter, lambda: set_to(470)) == (pytest.approx(440e-6), 1)


def test_energy_that_cannot_be_read_is_not_available(tmp_path):
  assert _joules(energy.Meter([_device()], str(tmp_path))) == (None, None)
  _domain(tmp_path / 'intel-rapl:0', 'package-0', 1)
  (
    tmp_path / 'intel-rapl:0' / 'energy_uj'
  ).unlink()  # A missing file is not readable.
  meter = energy.Meter([_device()], str(tmp_path))
  report = _report()
  assert meter.parts == [] and meter.measure(lambda: [report]) == [report]
  assert limits.describe({'energy_of': []}) == []  # There is no row.


class _Nvml(types.ModuleType):
  """Stands in for NVML; its three GPUs have used 1, 2 and 3 kJ."""

  class NVMLError(Exception):
    """Stands in for NVML's error."""

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
  [('', 3.0), ('2,0', 5.0), ('GPU-c,GPU-a', 5.0), ('1, 2', 6.0)],
)
def test_nvml_counts_the_gpus_that_are_used(
  visible, expected, tmp_path, monkeypatch
):
  nvml = _Nvml()
  monkeypatch.setitem(sys.modules, 'pynvml', nvml)
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
  gpus = [_device('gpu', local_hardware_id=i) for i in range(2)]
  meter = energy.Meter(gpus, str(tmp_path))
  assert meter.parts == ['gpu']

  def advance():  # The GPUs use 1, 2 and 4 J; the unit is mJ.
    nvml.energy = [x + 1_000 * 2**i for i, x in enumerate(nvml.energy)]
    return [_report(), _report()]

  # Two agents share the energy of the GPUs that are used.
  stages = {'joules': expected / 2, 'counter_moves': 1}
  assert [x.stages for x in meter.measure(advance)] == [stages] * 2

  def reset():
    nvml.energy = [0] * 3
    return [_report()]

  assert meter.measure(reset) == [_report()]


def test_nvml_that_fails_is_not_available(tmp_path, monkeypatch):
  gpus = [_device('gpu', local_hardware_id=0)]
  monkeypatch.setitem(sys.modules, 'pynvml', _Nvml(is_supported=False))
  assert energy.Meter(gpus, str(tmp_path)).parts == []
  monkeypatch.setitem(sys.modules, 'pynvml', None)  # NVML is not installed.
  assert energy.Meter(gpus, str(tmp_path)).parts == []


def _report(**seconds):
  return Report(
    {'loss': np.zeros(1)},
    Episodes(*np.zeros((3, 1))),
    600,
    2.0,
    True,
    seconds,
    {},
  )


def test_a_counter_that_fails_later_leaves_training_alone(tmp_path):
  _domain(tmp_path / 'intel-rapl:0', 'package-0', 100)
  found = energy.Meter(jax.devices()[:1], str(tmp_path))

  def advance():
    (tmp_path / 'intel-rapl:0' / 'energy_uj').unlink()
    return ['report']

  assert found.measure(advance) == ['report']
  assert found.parts == []


class _Machine:
  """A GPU of 500 W whose counter moves every 100 ms, as NVML's does."""

  def __init__(self, monkeypatch):
    self.seconds, self.nvml = 0.03, _Nvml()
    monkeypatch.setitem(sys.modules, 'pynvml', self.nvml)
    self.spend(0.0)

  def spend(self, seconds):
    self.seconds += seconds
    steps = int(self.seconds * 10 + 1e-6)
    self.nvml.energy[0] = 1_000_000 + steps * 50_000  # 50 J per step, in mJ.

  def call(self, seconds):
    """Returns a driver's `advance`; its report has 600 steps in 2 s."""

    def advance():
      self.spend(seconds)
      report = _report()._replace(seconds=seconds)
      return [report._replace(num_predictions=round(1000 * seconds))]

    return advance


def _records(machine, tmp_path, windows):
  """Returns a record of each window, a list of calls, and that of the run."""
  meter = energy.Meter([_device('gpu', local_hardware_id=0)], str(tmp_path))
  window, records = recorder.Window(4, 1), []
  for calls in windows:
    for seconds in calls:
      window.add(*meter.measure(machine.call(seconds)))
    records.append(window.record())
    machine.spend(0.01)  # Between calls, nothing is counted.
    # A resumed run continues with the sums.
    again = recorder.Window(4, 1)
    again.resume(json.loads(json.dumps(window.progress())))
    window = again
  return records, recorder.describe_energy(window.run_energy, 4)


def test_short_windows_say_nothing_about_energy(tmp_path, monkeypatch):
  machine = _Machine(monkeypatch)
  # The last window of a short run is shorter than a step of the counter.
  windows = [[1.0, 1.0], [0.5], [0.02, 0.02, 0.02], [0.57]]
  records, whole = _records(machine, tmp_path, windows)
  assert ['joules_per_second' in x for x in records] == [1, 0, 0, 0]
  # In the first window, 20 steps of 50 J in 2 s; 1000 steps/s of 4 frames.
  assert records[0]['joules_per_second'] == 500.0
  assert records[0]['frames_per_joule'] == pytest.approx(4000 / 500)
  # The clock goes from 0.03 s to 3.19 s, with 31 steps of the counter, all of
  # them during the calls, which take 3.13 s.
  power = 31 * 50 / 3.13
  assert whole['joules_per_second'] == pytest.approx(power)
  assert whole['frames_per_joule'] == pytest.approx(4000 / power)


@pytest.mark.parametrize('windows', [[[0.05]], [[0.1, 0.02]], [[5.0]]])
def test_a_counter_that_moves_less_than_twice_says_nothing(
  windows, tmp_path, monkeypatch
):
  records, whole = _records(_Machine(monkeypatch), tmp_path, windows)
  assert whole == {} and 'frames_per_joule' not in records[0]


def test_a_summary_has_the_energy_of_the_whole_run(tmp_path, monkeypatch):
  machine = _Machine(monkeypatch)
  gpus = [_device('gpu', local_hardware_id=0)]
  meters, advance = energy.Meter(gpus, str(tmp_path)), Anakin.advance

  def slow_advance(self, *args):
    machine.spend(0.2)  # 100 J, for both agents.
    found = advance(self, *args)
    return [x._replace(seconds=0.2) for x in found]

  monkeypatch.setattr(loop, 'Meter', lambda devices: meters)
  monkeypatch.setattr(Anakin, 'advance', slow_advance)
  assert helpers.run(tmp_path / 'run', '--config.num_seeds=2') == 0
  for path, share in (('', 1), ('seed_1', 2)):
    records, summary = helpers.read(tmp_path / 'run' / path)
    assert summary['joules_per_second'] == pytest.approx(500 / share)
    steps = summary['env_steps'] * 2 / share
    # Updates 1, 2 and 3 are in 2 calls or more; each call has 100 J.
    calls = sum(x['num_updates'] > 0 for x in records)
    assert calls == 3
    joules = steps / summary['frames_per_joule']
    assert joules / 100 * share == pytest.approx(round(joules / 100 * share))
    assert joules / 100 * share >= 4


@pytest.mark.parametrize(
  'frames, text', [(0.25, '0.25'), (272.82, '273'), (16433.06, '16,433')]
)
def test_frames_per_joule_are_readable(frames, text):
  summary = dict(
    energy_of=['gpu'], frames_per_joule=frames, joules_per_second=338.8
  )
  assert limits.describe(summary) == [
    ('energy', f'{text} frames per joule, 339 W used by the GPU')
  ]


def test_processes_add_their_energy_and_average_their_shares():
  def merge(**other):
    report = _report(joules=30.0, counter_moves=3, busy_cores=0.5)
    other = recorder.local_part(_report(busy_cores=1.0, **other))
    return recorder.merge_processes(report, [other]).stages

  expected = {'joules': 40.0, 'counter_moves': 1, 'busy_cores': 0.75}
  assert merge(joules=10.0, counter_moves=1) == expected
  # If one process cannot read its energy, the sum is unknown.
  assert merge() == {'busy_cores': 0.75}
