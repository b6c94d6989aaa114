"""What limits a Sebulba run, how its machine is balanced, and what it costs.

The limit is the part with the highest utilisation: if that part were faster,
the run would be faster. If no part is near 1, the parts wait for one another.
The functions are pure: they read a record's shares and what the run works with.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax

from podrl.drivers.energy import Meter
from podrl.drivers.stages import num_cores

# A part that works this share of the time leaves at most a quarter to gain
# elsewhere. Costs vary, so even a clear limit does not reach 1.
_SATURATED = 0.8
OTHERS_WORTH_NAMING = 0.1  # Share of the cores that other programs use.
_FRAMES = 200_000_000  # The number of frames in Atari papers.


class System(NamedTuple):
  """What a process of a Sebulba run works with.

  Attributes:
    platform: platform of the devices; those of 'cpu' share the cores.
    num_cores: cores that the process may use.
    num_actors: actor threads on all actor devices.
    env_threads: threads that step the environments of one actor.
    actor_devices, learner_devices: indices of devices; they may overlap.
    unrolls_per_update: unrolls that one update learns from.
    max_lag: the most calls of `update` between the parameters that acted and
      those that learn.
    is_deterministic: whether the mode is deterministic instead of asynchronous.
    num_processes: processes of the run; each has as much.
  """

  platform: str
  num_cores: int
  num_actors: int
  env_threads: int
  actor_devices: tuple[int, ...]
  learner_devices: tuple[int, ...]
  unrolls_per_update: int
  max_lag: int
  is_deterministic: bool
  num_processes: int = 1

  @property
  def is_shared(self) -> bool:
    """Whether a device both acts and learns."""
    return bool({*self.actor_devices} & {*self.learner_devices})

  def with_active(self, record: Mapping[str, float]) -> 'System':
    """Returns this with only the actors that were active in a record."""
    total = self.num_actors * self.num_processes
    active = record.get('num_actors', total) / self.num_processes
    return self._replace(num_actors=round(active))


class Limit(NamedTuple):
  """What limits a run.

  Attributes:
    name: 'cores', 'environments', 'inference latency', 'actor devices',
      'learner devices', 'hand-off', 'lag' or 'slowest actor'.
    sentence: how the limit shows, and what to do about it.
  """

  name: str
  sentence: str


def count(number: int, noun: str) -> str:
  """Returns a number of things in words."""
  return f'{number} {noun}{"s" * (number != 1)}'


def _are(number: int, noun: str) -> str:
  return f'{count(number, noun)} {"is" if number == 1 else "are"}'


def _percent(share: float) -> str:
  return f'{100 * min(max(share, 0.0), 1.0):.0f} %'


def _used_cores(record: Mapping[str, float]) -> float:
  """Share of the cores that this run or another program uses."""
  own = record['busy_cores']
  return max(own, 1 - record.get('idle_cores', 1 - own))


def others(record: Mapping[str, float]) -> float:
  """Share of the cores that other programs use."""
  return _used_cores(record) - record['busy_cores']


def _cores(record: Mapping[str, float], system: System) -> str:
  text = (
    f'{_are(system.num_cores, "CPU core")} {_percent(_used_cores(record))} busy'
  )
  if others(record) < OTHERS_WORTH_NAMING:
    return text
  own = _percent(record['busy_cores'])
  return f'{text} ({own} with this run, the rest with other programs)'


def _waits(record: Mapping[str, float]) -> str:
  waits = _percent(record['time_learner_waiting'])
  return f'The learner waits {waits} of the time for data'


def _needed_actor_devices(record: Mapping[str, float], system: System) -> int:
  """Returns how many actor devices the work of the present ones would fill."""
  work = len(system.actor_devices) * record['busy_actor_devices']
  return max(1, math.ceil(work / _SATURATED))


def find_limit(record: Mapping[str, float], system: System) -> Limit:
  """Returns the resource that limits a run.

  Args:
    record: shares of a window, from 0 to 1: `time_*` of the actors (means over
      them) and of the learner, `busy_*` of cores and devices, and, if known,
      `idle_cores`, which no program uses. `num_actors` counts active actors.
    system: what one process of the run works with.
  """
  system = system.with_active(record)
  is_cpu = system.platform == 'cpu'
  learner = record['time_update'] + record['time_hand_off']
  actors = 1 - record['time_actor_waiting']
  busy = record['busy_actor_devices']
  # A device of the CPU says little: it is busy although cores may be free.
  is_device_busy = not is_cpu and busy >= _SATURATED
  is_updating = system.is_shared and record['time_update'] >= busy / 2
  if is_cpu and _used_cores(record) >= _SATURATED:
    return _shared_cores(record, system)
  if learner >= max(actors, _SATURATED) or (is_device_busy and is_updating):
    return _learner(record, system)
  if (
    is_device_busy
    and (actors >= _SATURATED or system.is_shared)
    and busy >= _used_cores(record)
  ):
    return _actor_devices(record, system)
  if actors >= _SATURATED:
    return _environments(record, system)
  return _both_wait(record, system)


def _shared_cores(record: Mapping[str, float], system: System) -> Limit:
  """Environments, inference and updates share the cores, which are busy."""
  environments, inference, update = (
    record[f'time_{stage}'] for stage in ('environment', 'inference', 'update')
  )
  thread_seconds = {
    'environments': environments * system.num_actors * system.env_threads,
    'choosing actions': inference * system.num_actors,
    'updates': update * len(system.learner_devices),
  }
  most = max(thread_seconds, key=thread_seconds.__getitem__)
  remedy = (
    ''
    if most == 'environments'
    else (
      ', or use a smaller network or fewer epochs; podrl balance measures '
      'whether an accelerator pays'
    )
  )
  return Limit(
    'cores',
    f'The {_cores(record, system)}, mostly with {most}: environments take '
    f'{_percent(environments)} and choosing actions {_percent(inference)} of '
    f"the actors' time, updates {_percent(update)} of the learner's. Add CPU "
    f'cores{remedy}.',
  )


def _learner(record: Mapping[str, float], system: System) -> Limit:
  """The actors could deliver more than the learner uses."""
  waits = (
    f'The actors wait {_percent(record["time_actor_waiting"])} of the time for '
    'the learner, which spends'
  )
  update = f'{_percent(record["time_update"])} of its time on updates'
  if record['time_hand_off'] > record['time_update']:
    return Limit(
      'hand-off',
      f'{waits} {update} and {_percent(record["time_hand_off"])} on handing '
      'parameters to the actors: the hand-off is the limit. Make updates fewer '
      'and larger (unroll_length, sebulba.unrolls_per_update, env.num_envs).',
    )
  num_actor_devices = len(system.actor_devices)
  needed = _needed_actor_devices(record, system)
  if system.platform == 'cpu':
    remedy = (
      f'The {_cores(record, system)}: learn on more CPU devices '
      '(sebulba.learner_devices)'
    )
  elif system.is_shared:
    remedy = 'Choose actions on a device of their own'
  elif needed < num_actor_devices:
    remedy = (
      f'Drop from {num_actor_devices} to {count(needed, "actor device")}, '
      f'which are {_percent(record["busy_actor_devices"])} busy, and learn '
      'on the others'
    )
  else:
    remedy = 'Add learner devices (sebulba.learner_devices)'
  return Limit(
    'learner devices',
    f'{waits} {update}: the '
    f'{_are(len(system.learner_devices), "learner device")} the limit. '
    f'{remedy}, or use a smaller network or fewer epochs.',
  )


def _actor_devices(record: Mapping[str, float], system: System) -> Limit:
  """Choosing actions fills the devices."""
  busy = _percent(record['busy_actor_devices'])
  updates = f' ({_percent(record["time_update"])} with updates)'
  return Limit(
    'actor devices',
    f'{_waits(record)}, and the '
    f'{_are(len(system.actor_devices), "actor device")} {busy} busy'
    f'{updates if system.is_shared else ""}: this is the limit. Add actor '
    'devices (sebulba.actor_devices), or let fewer actors choose actions for '
    'more environments each (env.num_envs, sebulba.threads_per_actor_device).',
  )


def _environments(record: Mapping[str, float], system: System) -> Limit:
  """The actors always work, and their devices have room."""
  cores, busy = _cores(record, system), record['busy_actor_devices']
  num_devices = len(system.actor_devices)
  needed, drop = _needed_actor_devices(record, system), ''
  if system.platform != 'cpu' and needed < num_devices:
    drop = (
      f', or drop from {num_devices} to {count(needed, "actor device")}, since '
      f'they are {_percent(busy)} busy'
    )
  if _used_cores(record) >= _SATURATED:
    return Limit(
      'cores',
      f'{_waits(record)}, and the {cores}: the environments need more cores. '
      f'Add CPU cores{drop}.',
    )
  threads = 'Add actor threads (sebulba.threads_per_actor_device)'
  spend = 'spends' if system.num_actors == 1 else 'spend'
  actors = f'{_waits(record)}. {count(system.num_actors, "actor")} {spend}'
  if record['time_environment'] >= record['time_inference']:
    if system.num_actors * system.env_threads < system.num_cores:
      threads += ' or environment threads (sebulba.env_threads)'
    return Limit(
      'environments',
      f'{actors} {_percent(record["time_environment"])} of the time in '
      f'environments, and the {cores}: the latency of the environments is the '
      f'limit. {threads}{drop}.',
    )
  return Limit(
    'inference latency',
    f'{actors} {_percent(record["time_inference"])} of the time choosing '
    f'actions, and the {cores}: too few actors work at once. {threads}, or '
    'environments for which each chooses (env.num_envs).',
  )


def _both_wait(record: Mapping[str, float], system: System) -> Limit:
  """Nobody works all the time: the mode or the lag couples them too closely."""
  waits = (
    f'{_waits(record)}, and the actors wait '
    f'{_percent(record["time_actor_waiting"])} of the time for the learner'
  )
  max_lag, unrolls = system.max_lag, system.unrolls_per_update
  if not max_lag:
    return Limit(
      'lag',
      f'{waits}: with sebulba.max_lag=0 they work in turn. Set it to 1, which '
      'lets acting and learning overlap (a2c needs 0; use --agent=impala).',
    )
  if system.is_deterministic:
    return Limit(
      'slowest actor',
      f'{waits}: each update takes one unroll of each of '
      f'{count(system.num_actors, "actor")}, so the slowest is the limit. Use '
      'sebulba.mode=asynchronous, or raise sebulba.max_lag.',
    )
  permits = unrolls * (max_lag + 1)
  drop = f', or drop to {count(permits, "actor")}'
  return Limit(
    'lag',
    f'{waits}: at most {permits} unrolls may exist at once '
    f'(sebulba.unrolls_per_update={unrolls} x (sebulba.max_lag={max_lag} + '
    f'1)). Raise either{drop if permits < system.num_actors else ""}.',
  )


def workload_ratio(record: Mapping[str, float], system: System) -> float | None:
  """Returns CPU-seconds of environments per device-second of the networks.

  A device that is never idle needs this much CPU time. A pool's step counts for
  all of its threads, but in total at most what the process used. A device that
  acts and learns counts once. None if no device was busy.

  Source: Inci et al. 2020, arXiv:2012.04210.
  """
  system = system.with_active(record)
  cpu = min(
    record['time_environment'] * system.num_actors * system.env_threads,
    record['busy_cores'] * system.num_cores,
  )
  only_act = {*system.actor_devices} - {*system.learner_devices}
  learning = record['busy_learner_devices'] * len(system.learner_devices)
  device = record['busy_actor_devices'] * len(only_act) + learning
  return cpu / device if device > 0 else None


def count_compute_units(devices: Sequence[jax.Device]) -> int:
  """Returns a GPU's multiprocessors or a TPU's cores; 0 if unknown."""
  if devices[0].platform == 'tpu':
    return sum(getattr(x, 'num_cores', None) or 1 for x in devices)
  return sum(getattr(x, 'core_count', None) or 0 for x in devices)


def summarise(
  record: Mapping[str, Any],
  devices: Sequence[jax.Device],
  price_per_hour: float,
) -> dict[str, Any]:
  """Returns what a run's summary adds: the cost and the machine's balance.

  Args:
    record: the run's last values.
    devices: this process's devices that the run uses.
    price_per_hour: price of the whole run's machines; 0 means unknown.
  """
  summary: dict[str, Any] = {'energy_of': Meter(devices).parts}
  if price_per_hour and record.get('frames_per_second'):
    hours = _FRAMES / record['frames_per_second'] / 3600
    summary['cost_of_200m_frames'] = price_per_hour * hours
  num_units = count_compute_units(devices)
  if num_units and 'busy_cores' in record:
    summary['num_compute_units'] = num_units
    summary['threads_per_compute_unit'] = num_cores() / num_units
    ratio = record.get('cpu_seconds_per_device_second')
    if ratio:
      summary['cpu_balance'] = num_cores() / len(devices) / ratio
  return summary


def describe(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns the rows of a summary that a person reads: (name, text)."""
  rows = []
  if 'limit' in summary:
    rows.append((f'limit: {summary["limit"]}', summary['limit_sentence']))
    text = 'no accelerator'
    if 'num_compute_units' in summary:
      text = (
        f'{summary["threads_per_compute_unit"]:.3g} hardware threads for each '
        f'of {summary["num_compute_units"]} compute units'
      )
    if 'cpu_seconds_per_device_second' in summary:
      ratio = summary['cpu_seconds_per_device_second']
      text += f'; environments take {ratio:.3g} CPU-seconds per device-second'
    if 'cpu_balance' in summary:
      text += (
        f'; the machine has {summary["cpu_balance"]:.2g} times the CPU that '
        'would keep its devices busy'
      )
    rows.append(('balance', text))
  if 'frames_per_joule' in summary:
    parts = ' and '.join(x.upper() for x in summary['energy_of'])
    text = (
      f'{summary["frames_per_joule"]:.3g} frames per joule, '
      f'{summary["joules_per_second"]:.0f} W of {parts}'
    )
    rows.append(('energy', text))
  if 'cost_of_200m_frames' in summary:
    cost = f'{summary["cost_of_200m_frames"]:.2f} at price_per_hour'
    rows.append(('cost of 200 M frames', f'{cost} and the last speed'))
  return rows
