"""A machine's balance: CPU against accelerator, energy, and money."""

from collections.abc import Callable, Mapping, Sequence
import glob
import os
from typing import Any

import jax

from podrl.drivers.limits import System
from podrl.drivers.stages import num_cores
from podrl.types import Report

_FRAMES = 200_000_000  # As Atari papers train on.


def count_compute_units(devices: Sequence[jax.Device]) -> int:
  """A GPU's multiprocessors, a TPU's cores, over devices; 0 if not known."""
  if devices[0].platform == 'tpu':
    return sum(getattr(x, 'num_cores', None) or 1 for x in devices)
  # The CPU's devices have none; XLA gives a GPU's as its `core_count`.
  return sum(getattr(x, 'core_count', None) or 0 for x in devices)


def workload_ratio(record: Mapping[str, float], system: System) -> float | None:
  """CPU-seconds of environments per device-second of inference and learning.

  What a device would want of CPU time if it were never idle. A pool's step
  counts for all of its threads, but altogether for no more than the process
  used; a device that acts and learns counts once.

  Args:
    record: with the shares of a window; see `limits.find_limit`.
    system: what the run works with.
  """
  system = system.with_active(record)
  cpu = min(
    record['time_environment'] * system.num_actors * system.env_threads,
    record['busy_cores'] * system.num_cores,
  )
  only_act = {*system.actor_devices} - {*system.learner_devices}
  device = record['busy_actor_devices'] * len(only_act) + record[
    'busy_learner_devices'
  ] * len(system.learner_devices)
  return cpu / device if device > 0 else None


def _gpu_handles(devices: Sequence[jax.Device]) -> tuple[Any, list[Any]]:
  """NVML and its handles of NVIDIA GPUs; no handles where it cannot be had."""
  if devices[0].platform not in ('gpu', 'cuda'):
    return None, []
  try:
    import pynvml  # In the extra for CUDA.
  except ImportError:
    return None, []
  # NVML counts all, JAX what this leaves visible: indices or UUIDs.
  names = os.environ.get('CUDA_VISIBLE_DEVICES', '').replace(' ', '')
  visible = names.split(',') if names else []
  try:
    pynvml.nvmlInit()
    handles = []
    for device in devices:
      index = device.local_hardware_id
      name = visible[index] if visible else str(index)
      handles.append(
        pynvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdigit()
        else pynvml.nvmlDeviceGetHandleByUUID(name)
      )
    for handle in handles:
      pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    return pynvml, handles
  except (pynvml.NVMLError, IndexError):  # Too old, virtual, or no driver.
    return None, []


class Meter:
  """Energy that devices and CPUs take, where it can be read.

  Args:
    devices: of this process.
    powercap: the directory where Linux shows RAPL's counters.
  """

  def __init__(
    self, devices: Sequence[jax.Device], powercap: str = '/sys/class/powercap'
  ):
    self._nvml, self._gpus = _gpu_handles(devices)
    self._last: dict[str, tuple[int, int]] = {}  # Microjoules, and the range.
    self._cpu_microjoules = 0
    # Packages alone: their cores and memory are parts of them, and 'psys', the
    # whole platform, has them in it.
    for path in glob.glob(os.path.join(powercap, 'intel-rapl:*')):
      try:
        if self._text(path, 'name').startswith('package'):
          self._last[path] = (
            int(self._text(path, 'energy_uj')),
            int(self._text(path, 'max_energy_range_uj')),
          )
      except (OSError, ValueError):  # Since 2020 only root may read it.
        continue

  @property
  def parts(self) -> list[str]:
    """What is measured: 'gpu', 'cpu', both or neither."""
    return ['gpu'] * bool(self._gpus) + ['cpu'] * bool(self._last)

  def _text(self, path: str, name: str) -> str:
    with open(os.path.join(path, name), encoding='ascii') as file:
      return file.read().strip()

  def joules(self) -> float | None:
    """Since some moment; None where it cannot be read."""
    if not self.parts:
      return None
    try:
      for path, (last, size) in self._last.items():
        now = int(self._text(path, 'energy_uj'))
        self._cpu_microjoules += (
          now - last if now >= last else (now - last + size)
        )
        self._last[path] = now, size
    except (OSError, ValueError):  # Training goes on without.
      self._last = {}
    try:
      gpu_millijoules = sum(
        self._nvml.nvmlDeviceGetTotalEnergyConsumption(x) for x in self._gpus
      )
    except self._nvml.NVMLError:
      self._gpus, gpu_millijoules = [], 0
    return self._cpu_microjoules / 1e6 + gpu_millijoules / 1e3

  def over(self, advance: Callable[[], list[Report]]) -> list[Report]:
    """What `advance` returns, with the energy taken meanwhile in its stages.

    The reports of several agents share it alike.
    """
    before, parts = self.joules(), self.parts
    reports = advance()
    after = self.joules()
    if before is None or parts != self.parts:
      return reports
    joules = (after - before) / len(reports)
    return [
      x._replace(stages=x.stages | {'joules_per_second': joules})
      for x in reports
    ]


def summarise(
  record: Mapping[str, float],
  devices: Sequence[jax.Device],
  price_per_hour: float,
) -> dict[str, Any]:
  """What a run's summary says of its balance; of each only what is known.

  Args:
    record: the run's last values.
    devices: this process's devices that the run uses.
    price_per_hour: price of the whole run's machines; 0 means unknown.
  """
  summary: dict[str, Any] = {'energy_of': Meter(devices).parts}
  if price_per_hour and record.get('frames_per_second'):
    summary['cost_of_200m_frames'] = (
      price_per_hour * _FRAMES / record['frames_per_second'] / 3600
    )
  num_units = count_compute_units(devices)
  if num_units and 'busy_cores' in record:
    summary |= {
      'num_compute_units': num_units,
      'threads_per_compute_unit': num_cores() / num_units,
    }
    ratio = record.get('cpu_seconds_per_device_second')
    if ratio:
      summary['cpu_balance'] = num_cores() / len(devices) / ratio
  return summary


def describe(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Rows of a run's summary as a person reads it.

  Args:
    summary: with what `summarise` returned.
  """
  rows = []
  if 'limit' in summary:
    rows.append((f'limit: {summary["limit"]}', summary['limit_sentence']))
    hardware = (
      f'{summary["threads_per_compute_unit"]:.3g} hardware threads for each '
      f'of {summary["num_compute_units"]} compute units'
      if 'num_compute_units' in summary
      else 'no accelerator'
    )
    if 'cpu_seconds_per_device_second' in summary:
      ratio = summary['cpu_seconds_per_device_second']
      hardware += (
        f'; environments take {ratio:.3g} CPU-seconds for each device-second'
      )
    if 'cpu_balance' in summary:
      hardware += (
        f'; the machine has {summary["cpu_balance"]:.2g} times the '
        'CPU that would keep its devices busy'
      )
    rows.append(('balance', hardware))
  if 'energy_of' in summary:
    known = 'frames_per_joule' in summary
    rows.append(
      (
        'energy',
        (
          f'{summary["frames_per_joule"]:.3g} frames per joule, '
          f'{summary["joules_per_second"]:.0f} W of '
          f'{" and ".join(x.upper() for x in summary["energy_of"])}'
          if known and summary['energy_of']
          else 'not available'
        ),
      )
    )
  if 'cost_of_200m_frames' in summary:
    rows.append(
      (
        'cost of 200 M frames',
        (
          f'{summary["cost_of_200m_frames"]:.2f} at price_per_hour, at the last '
          "window's rate"
        ),
      )
    )
  return rows
