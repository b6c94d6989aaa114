"""Measures the energy of a run, if the machine allows it."""

from collections.abc import Callable, Sequence
import os
import pathlib
from typing import Any

import jax

from podrl.types import Report


def _open_gpus(devices: Sequence[jax.Device]) -> tuple[Any, list[Any]]:
  """Returns NVML and a handle per GPU, or (None, []) if NVML cannot measure."""
  if devices[0].platform not in ('gpu', 'cuda'):
    return None, []
  try:
    import pynvml  # The extra `cuda` installs it.
  except ImportError:
    return None, []
  # NVML numbers all GPUs; JAX numbers only those that this variable names.
  names = os.environ.get('CUDA_VISIBLE_DEVICES', '').replace(' ', '')
  visible = names.split(',') if names else []
  try:
    pynvml.nvmlInit()
    handles = []
    for device in devices:
      index = device.local_hardware_id
      name = visible[index] if visible else str(index)
      if name.isdigit():
        handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(name)))
      else:
        handles.append(pynvml.nvmlDeviceGetHandleByUUID(name))
      pynvml.nvmlDeviceGetTotalEnergyConsumption(handles[-1])
    return pynvml, handles
  except (pynvml.NVMLError, IndexError):  # No driver, or an old or virtual GPU.
    return None, []


class Meter:
  """Measures the energy of GPUs (NVML) and of CPU packages (Linux's RAPL).

  `powercap` is the directory of RAPL's counters.
  """

  def __init__(
    self, devices: Sequence[jax.Device], powercap: str = '/sys/class/powercap'
  ):
    self._nvml, self._gpus = _open_gpus(devices)
    # For each path, the counter's last value and its range, in microjoules.
    self._last: dict[pathlib.Path, tuple[int, int]] = {}
    self._cpu_microjoules = 0
    # A package includes its cores and memory. 'psys' would count it again.
    for path in pathlib.Path(powercap).glob('intel-rapl:*'):
      try:
        if (path / 'name').read_text().startswith('package'):
          size = int((path / 'max_energy_range_uj').read_text())
          self._last[path] = int((path / 'energy_uj').read_text()), size
      except (OSError, ValueError):  # Since 2020, only root may read counters.
        pass

  @property
  def parts(self) -> list[str]:
    """Returns what the meter measures: 'gpu', 'cpu', both or nothing."""
    return ['gpu'] * bool(self._gpus) + ['cpu'] * bool(self._last)

  def joules(self) -> float | None:
    """Returns the joules used since a fixed time, or None if unknown."""
    if not self.parts:
      return None
    try:
      for path, (last, size) in self._last.items():
        now = int((path / 'energy_uj').read_text())
        # At the end of its range, the counter restarts at 0.
        self._cpu_microjoules += (now - last) % size
        self._last[path] = now, size
    except (OSError, ValueError):  # Continue without CPU energy.
      self._last = {}
    millijoules = 0
    try:
      for gpu in self._gpus:
        millijoules += self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    except self._nvml.NVMLError:
      self._gpus, millijoules = [], 0
    return self._cpu_microjoules / 1e6 + millijoules / 1e3

  def measure(self, advance: Callable[[], list[Report]]) -> list[Report]:
    """Calls `advance`, and adds the used energy to the returned reports.

    If there are several agents, each report gets an equal part of the energy.
    """
    before, parts = self.joules(), self.parts
    reports = advance()
    after = self.joules()
    if before is None or after is None or parts != self.parts:
      return reports
    stages = {'joules_per_second': (after - before) / len(reports)}
    return [x._replace(stages=x.stages | stages) for x in reports]
