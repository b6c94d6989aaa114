"""Measures the energy of a run, if the machine allows it."""

from collections.abc import Callable, Sequence
import os
import pathlib
from typing import Any

import jax

from podrl.records.merging import JOULES, MOVES
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

  A counter moves in steps: NVML's about every 100 ms, RAPL's every millisecond.
  Over a time that is shorter than a few steps, a difference of its values says
  little. Reports therefore say how often the counters moved, too.

  `powercap` is the directory of RAPL's counters.
  """

  def __init__(
    self, devices: Sequence[jax.Device], powercap: str = '/sys/class/powercap'
  ):
    self._nvml, self._gpus = _open_gpus(devices)
    # For each path, the counter's range in microjoules.
    self._packages: dict[pathlib.Path, int] = {}
    self._moves: list[int] = []  # How often each counter has moved.
    # A package includes its cores and memory. 'psys' would count it again.
    for path in pathlib.Path(powercap).glob('intel-rapl:*'):
      try:
        if (path / 'name').read_text().startswith('package'):
          int((path / 'energy_uj').read_text())
          size = int((path / 'max_energy_range_uj').read_text())
          self._packages[path] = size
      except (OSError, ValueError):  # Since 2020, only root may read counters.
        pass

  @property
  def parts(self) -> list[str]:
    """Returns what the meter measures: 'gpu', 'cpu', both or nothing."""
    return ['gpu'] * bool(self._gpus) + ['cpu'] * bool(self._packages)

  def _read(self) -> list[tuple[float, float]]:
    """Returns the value and the range of each counter, in joules."""
    packages = []
    try:
      for path, size in self._packages.items():
        value = int((path / 'energy_uj').read_text())
        packages.append((value / 1e6, size / 1e6))
    except (OSError, ValueError):  # Continue without CPU energy.
      self._packages, packages = {}, []
    gpus = []
    try:
      for gpu in self._gpus:
        value = self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        gpus.append((value / 1e3, 2**64 / 1e3))
    except self._nvml.NVMLError:
      self._gpus, gpus = [], []
    return packages + gpus

  def measure(self, advance: Callable[[], list[Report]]) -> list[Report]:
    """Calls `advance`, and adds the used energy to the returned reports.

    If there are several agents, each report gets an equal part of the energy.
    Nothing is added if a counter cannot be read, or was reset meanwhile.
    """
    before, parts = self._read(), self.parts
    reports = advance()
    after = self._read()
    if not before or parts != self.parts:
      return reports
    used = []
    for (start, size), (end, _) in zip(before, after):
      # At the end of its range, a counter restarts at 0. If it lost more than
      # half of the range, it was reset instead, for example with its driver.
      used.append(end - start if end >= start else end - start + size)
      if used[-1] > size / 2:
        return reports
    if len(self._moves) != len(used):  # The first call, or a part has failed.
      self._moves = [0] * len(used)
    least = min(self._moves)
    self._moves = [n + (x > 0) for n, x in zip(self._moves, used)]
    stages = {
      JOULES: sum(used) / len(reports),
      MOVES: min(self._moves) - least,  # Moves of the counter that moved least.
    }
    return [x._replace(stages=x.stages | stages) for x in reports]
