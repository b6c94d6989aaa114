"""Tests the energy meter, and what records say about energy."""

import sys
import types

import jax
import numpy as np
import pytest

from podrl.drivers import energy, limits
from podrl.records import recorder
from podrl.types import Episodes, Report


def _device(platform='cpu', **attributes):
  return types.SimpleNamespace(platform=platform, **attributes)


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
  meter = energy.Meter([_device()], str(tmp_path))
  assert meter.parts == ['cpu']
  before = meter.joules()
  for path in tmp_path.iterdir():
    (path / 'energy_uj').write_text('400')
  # Package 0 goes from 900 to 1000 = 0, then to 400; package 1 from 100 to 400.
  assert meter.joules() - before == pytest.approx(800e-6)
  (tmp_path / 'intel-rapl:0' / 'energy_uj').write_text('450')
  assert meter.joules() - before == pytest.approx(850e-6)


def test_energy_that_cannot_be_read_is_not_available(tmp_path):
  assert energy.Meter([_device()], str(tmp_path)).joules() is None
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
  [('', 3.0), ('2,0', 4.0), ('GPU-c,GPU-a', 4.0), ('1, 2', 5.0)],
)
def test_nvml_counts_the_gpus_that_are_used(
  visible, expected, tmp_path, monkeypatch
):
  nvml = _Nvml()
  monkeypatch.setitem(sys.modules, 'pynvml', nvml)
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
  gpus = [_device('gpu', local_hardware_id=i) for i in range(2)]
  meter = energy.Meter(gpus, str(tmp_path))
  assert meter.parts == ['gpu'] and meter.joules() == expected * 1e3

  def advance():
    nvml.energy = [x + 7_000 for x in nvml.energy]  # The unit is mJ.
    return [_report(), _report()]

  # Two GPUs use 7 J each, and two agents share them.
  assert [x.stages for x in meter.measure(advance)] == [
    {'joules_per_second': 7.0}
  ] * 2


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


def test_frames_per_joule():
  window = recorder.Window(4, 1)
  window.add(_report(joules_per_second=30.0))
  record = window.record()
  # The window has 600 steps of 4 frames, and uses 30 J in 2 s.
  assert record['joules_per_second'] == 15.0
  assert record['frames_per_joule'] == pytest.approx(600 * 4 / 30)


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
  merged = recorder.merge_processes(
    _report(joules_per_second=30.0, busy_cores=0.5),
    [recorder.local_part(_report(joules_per_second=10.0, busy_cores=1.0))],
  )
  assert merged.stages == {'joules_per_second': 40.0, 'busy_cores': 0.75}
  # If one process cannot read its energy, the sum is unknown.
  merged = recorder.merge_processes(
    _report(joules_per_second=30.0, busy_cores=0.5),
    [recorder.local_part(_report(busy_cores=1.0))],
  )
  assert merged.stages == {'busy_cores': 0.75}
