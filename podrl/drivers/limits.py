"""Finds the limit of a Sebulba run, the balance of its machine and its cost.

The limit is the part that works for the largest share of the time: if that part
were faster, the run would be faster. If no share is near 1, the parts wait for
one another.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax

from podrl.drivers.energy import Meter
from podrl.drivers.stages import num_cores
from podrl.messages import count, three_digits

# A part that works for this share of the time is the limit: if all other parts
# were faster, the run would be at most a quarter faster. The value is below 1,
# because step times vary.
_SATURATED = 0.8
# Sentences name other programs that use at least this share of the cores.
OTHERS_WORTH_NAMING = 0.1
_FRAMES = 200_000_000  # The usual number of frames in Atari papers.
_WAITS = 'The learner waits for data {time_learner_waiting} of the time'
_BOTH_WAIT = (
  _WAITS + ', and the actors wait for the learner {time_actor_waiting} of the '
  'time'
)
_ACTORS_WAIT = (
  'The actors wait for the learner {time_actor_waiting} of the time, and the '
  'learner spends {time_update} of its time on updates'
)
_SENTENCES = {  # `_words` fills the braces.
  'shared cores': 'The {cores}{most_work}. Actors spend '
  '{time_environment} of their time in environments and {time_inference} on '
  'choosing actions; the learner spends {time_update} of its time on updates. '
  '{add_cores}{or_less_work}.',
  'cores': _WAITS + ', and the {cores}: the environments need more cores. '
  '{add_cores}{or_drop_devices}.',
  'environments': _WAITS + '. {actors_spend} {time_environment} of the time in '
  'environments, and the {cores}: the latency of the environments is the '
  'limit. Add actor threads (sebulba.threads_per_actor_device)'
  '{or_env_threads}{or_drop_devices}.',
  'inference latency': _WAITS + '. {actors_spend} {time_inference} of the time '
  'choosing actions, and the {cores}: too few actors work at the same time. '
  'Add actor threads (sebulba.threads_per_actor_device), or environments for '
  'each actor (env.num_envs).',
  'waiting for updates': _WAITS + '. {actors_spend} {time_behind_update} of '
  'the time waiting for an update on the same device: inference waits behind '
  "the learner's update. Use a separate device for choosing actions "
  '(sebulba.actor_devices), or smaller minibatches (num_minibatches), between '
  'which actors can use the device.',
  'actor devices': _WAITS + ', and the {acting_devices} {busy_actor_devices} '
  'busy{with_updates}: this is the limit. Add actor devices '
  '(sebulba.actor_devices), or use fewer actors with more environments each '
  '(env.num_envs, sebulba.threads_per_actor_device).',
  'learner devices': _ACTORS_WAIT + ': the {learning_devices} the limit. '
  '{remedy}, or use a smaller network or fewer optimiser steps per update.',
  'hand-off': _ACTORS_WAIT + ' and {time_hand_off} on handing parameters to '
  'the actors: the hand-off is the limit. Make updates fewer and larger '
  '(unroll_length, sebulba.unrolls_per_update, env.num_envs).',
  'no lag': _BOTH_WAIT + ': with sebulba.max_lag=0 they never work at the same '
  'time. Set sebulba.max_lag=1, so that acting and learning overlap. If the '
  'agent is a2c, which needs sebulba.max_lag=0, use --agent=impala instead.',
  'slowest actor': _BOTH_WAIT + ': each update needs an unroll from each of '
  '{actors}, so the slowest actor is the limit. Use sebulba.mode=asynchronous, '
  'or raise sebulba.max_lag.',
  'lag': _BOTH_WAIT + ': at most {permits} unrolls may exist at the same time '
  '(sebulba.unrolls_per_update={unrolls_per_update} x '
  '(sebulba.max_lag={max_lag} + 1)). Raise one of the two fields'
  '{or_drop_actors}.',
}


class System(NamedTuple):
  """Resources and settings of one process of a Sebulba run."""

  platform: str  # Devices of the platform 'cpu' share the cores.
  num_cores: int  # Cores that the process may use.
  num_actors: int  # Actor threads on all actor devices.
  env_threads: int  # Threads that step the environments of one actor.
  # Indices of devices; the learner may use them, too.
  actor_devices: tuple[int, ...]
  learner_devices: tuple[int, ...]
  unrolls_per_update: int  # Unrolls that one update learns from.
  max_lag: int  # The largest policy lag, in updates.
  is_deterministic: bool  # The mode is deterministic instead of asynchronous.
  num_processes: int = 1  # Each process of the run has the same resources.

  @property
  def is_shared(self) -> bool:
    """Whether a device both acts and learns."""
    return bool({*self.actor_devices} & {*self.learner_devices})

  def with_active(self, record: Mapping[str, float]) -> 'System':
    """Returns this system with only the actors that are active in a record."""
    total = self.num_actors * self.num_processes
    active = record.get('num_actors', total) / self.num_processes
    return self._replace(num_actors=round(active))


class Limit(NamedTuple):
  """What limits a run."""

  # 'cores', 'environments', 'inference latency', 'waiting for updates', 'actor
  # devices', 'learner devices', 'hand-off', 'lag' or 'slowest actor'.
  name: str
  sentence: str  # It says what shows the limit, and what to do about it.


def _are(number: int, noun: str) -> str:
  return f'{count(number, noun)} {"is" if number == 1 else "are"}'


def _percent(share: float) -> str:
  return f'{100 * min(max(share, 0.0), 1.0):.0f} %'


def _used_cores(record: Mapping[str, float]) -> float:
  """Returns the share of the cores that this run or another program uses."""
  own = record['busy_cores']
  return max(own, 1 - record.get('idle_cores', 1 - own))


def others(record: Mapping[str, float]) -> float:
  """Returns the share of the cores that other programs use."""
  return _used_cores(record) - record['busy_cores']


def find_limit(record: Mapping[str, float], system: System) -> Limit:
  """Returns the resource that limits a run.

  Args:
    record: shares of a window's time, from 0 to 1. `time_*` describe the
      learner and the average actor. `busy_*` describe cores and devices.
      `idle_cores`, if known, is the share of cores that no program uses.
      `num_actors` is the number of active actors.
    system: resources and settings of one process of the run.
  """
  system = system.with_active(record)
  case = _find_case(record, system)
  name = {'shared cores': 'cores', 'no lag': 'lag'}.get(case, case)
  return Limit(name, _SENTENCES[case].format(**_words(record, system)))


def _find_case(record: Mapping[str, float], system: System) -> str:
  """Returns the key in `_SENTENCES` of the sentence that applies."""
  is_cpu, used_cores = system.platform == 'cpu', _used_cores(record)
  if is_cpu and used_cores >= _SATURATED:
    return 'shared cores'
  learner = record['time_update'] + record['time_hand_off']
  actors = 1 - record['time_actor_waiting']
  busy = record['busy_actor_devices']
  # On a CPU, an update and an inference run at the same time.
  behind = 0.0 if is_cpu else record.get('time_behind_update', 0.0)
  parts = {
    'environments': record['time_environment'],
    'inference latency': record['time_inference'] - behind,
    'waiting for updates': behind,
  }
  longest = max(parts, key=parts.__getitem__)
  # A CPU device can be busy although some cores are free, so ignore it. While
  # an inference waits for an update, its device counts as busy, too.
  is_device_busy = not is_cpu and busy >= _SATURATED
  is_device_busy &= longest != 'waiting for updates'
  is_updating = system.is_shared and record['time_update'] >= busy / 2
  if learner >= max(actors, _SATURATED) or (is_device_busy and is_updating):
    is_hand_off = record['time_hand_off'] > record['time_update']
    return 'hand-off' if is_hand_off else 'learner devices'
  is_acting = actors >= _SATURATED or system.is_shared
  if is_device_busy and is_acting and busy >= used_cores:
    return 'actor devices'
  if actors >= _SATURATED:  # Actors always work; devices are not always busy.
    if used_cores >= _SATURATED:
      return 'cores'
    return longest
  # No part works all the time: the mode or the lag makes the parts wait.
  if system.max_lag == 0:
    return 'no lag'
  return 'slowest actor' if system.is_deterministic else 'lag'


def _words(record: Mapping[str, float], system: System) -> dict[str, Any]:
  """Returns the texts that fill the braces of all sentences."""
  names = [k for k in record if k.startswith(('time_', 'busy_'))]
  words = system._asdict() | {k: _percent(record[k]) for k in names}
  busy, actors = words['busy_actor_devices'], count(system.num_actors, 'actor')
  num_devices, is_cpu = len(system.actor_devices), system.platform == 'cpu'
  cores = _are(system.num_cores, 'CPU core')
  cores += f' {_percent(_used_cores(record))} busy'
  if others(record) >= OTHERS_WORTH_NAMING:
    own = words['busy_cores']
    cores += f' ({own} with this run, the rest with other programs)'
  num_threads = system.num_actors * system.env_threads
  seconds = {
    'environments': record['time_environment'] * num_threads,
    'choosing actions': record['time_inference'] * system.num_actors,
    'updates': record['time_update'] * len(system.learner_devices),
  }
  most_work = max(seconds, key=seconds.__getitem__)
  # If other programs use most of the busy cores, they are the cause.
  is_disturbed = others(record) > record['busy_cores']
  permits = system.unrolls_per_update * (system.max_lag + 1)
  words |= {
    'cores': cores,
    'add_cores': f'{"Stop other programs, or add" if is_disturbed else "Add"} '
    'CPU cores',
    'most_work': f', mostly with {most_work}',
    'or_less_work': ', or use a smaller network or fewer optimiser steps per '
    'update; podrl balance measures whether an accelerator is faster',
    'or_env_threads': ' or environment threads (sebulba.env_threads)',
    'or_drop_devices': '',
    'or_drop_actors': f', or use only {count(permits, "actor")}',
    'with_updates': f' ({words["time_update"]} with updates)',
    'permits': permits,
    'actors': actors,
    'actors_spend': f'{actors} {"spends" if actors == "1 actor" else "spend"}',
    'acting_devices': _are(num_devices, 'actor device'),
    'learning_devices': _are(len(system.learner_devices), 'learner device'),
    'remedy': 'Add learner devices (sebulba.learner_devices)',
  }
  work = num_devices * record['busy_actor_devices']
  needed = max(1, math.ceil(work / _SATURATED))
  if needed < num_devices and not is_cpu:
    fewer = f'se only {needed} of the {num_devices} actor devices'
    words['or_drop_devices'] = f', or u{fewer}, since they are {busy} busy'
    words['remedy'] = (
      f'U{fewer}, which are {busy} busy, and learn on the others'
    )
  if system.is_shared:
    words['remedy'] = 'Use a separate device for choosing actions'
  if is_cpu:
    remedy = 'learn on more CPU devices (sebulba.learner_devices)'
    words['remedy'] = f'The {cores}: {remedy}'
  for name, applies in (
    ('most_work', not is_disturbed),
    ('or_less_work', most_work != 'environments' and not is_disturbed),
    ('or_env_threads', num_threads < system.num_cores),
    ('or_drop_actors', permits < system.num_actors),
    ('with_updates', system.is_shared),
  ):
    if not applies:
      words[name] = ''
  return words


def workload_ratio(record: Mapping[str, float], system: System) -> float | None:
  """Returns CPU seconds of the environments per busy second of a device.

  The environments need this many cores to keep one device always busy. Their
  CPU seconds are the time that all actors together spend in steps, multiplied
  by the threads of one actor. They are at most the CPU time of the process. A
  device that acts and learns counts once. The result is None if no device was
  busy.

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


def summarise(
  record: Mapping[str, Any],
  devices: Sequence[jax.Device],
  price_per_hour: float,
) -> dict[str, Any]:
  """Returns fields of a run's summary: the cost and the machine's balance.

  Args:
    record: the run's last record.
    devices: the devices of this process that the run uses.
    price_per_hour: price of all machines of the run; 0 means unknown.
  """
  summary: dict[str, Any] = {'energy_of': Meter(devices).parts}
  if price_per_hour and record.get('frames_per_second'):
    hours = _FRAMES / record['frames_per_second'] / 3600
    summary['cost_of_200m_frames'] = price_per_hour * hours
  # Compute units: a GPU's multiprocessors or a TPU's cores.
  is_tpu = devices[0].platform == 'tpu'
  name, default = ('num_cores', 1) if is_tpu else ('core_count', 0)
  num_units = sum(getattr(x, name, None) or default for x in devices)
  if num_units and 'busy_cores' in record:
    summary['num_compute_units'] = num_units
    summary['threads_per_compute_unit'] = num_cores() / num_units
    if ratio := record.get('cpu_seconds_per_device_second'):
      summary['cpu_balance'] = num_cores() / len(devices) / ratio
  return summary


def describe(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns rows (name, text) that show a summary to a person."""
  rows = []
  if 'limit' in summary:
    rows.append((f'limit: {summary["limit"]}', summary['limit_sentence']))
  if 'num_compute_units' in summary:  # CPU devices have no such units.
    text = (
      f'{summary["threads_per_compute_unit"]:.3g} hardware threads for each '
      f'of {summary["num_compute_units"]} compute units'
    )
    if 'cpu_seconds_per_device_second' in summary:
      ratio = summary['cpu_seconds_per_device_second']
      text += (
        f'; environments use {ratio:.3g} CPU seconds for each second that a '
        'device works'
      )
    if 'cpu_balance' in summary:
      text += (
        f'; the machine has {summary["cpu_balance"]:.2g} times as many '
        'CPU cores as it needs to keep its devices busy'
      )
    rows.append(('balance', text))
  if 'frames_per_joule' in summary:
    parts = ' and '.join(x.upper() for x in summary['energy_of'])
    text = (
      f'{three_digits(summary["frames_per_joule"])} frames per joule, '
      f'{summary["joules_per_second"]:.0f} W used by the {parts}'
    )
    rows.append(('energy', text))
  if 'cost_of_200m_frames' in summary:
    cost = f'{summary["cost_of_200m_frames"]:.2f} at price_per_hour'
    rows.append(('cost of 200 M frames', f'{cost} and the last speed'))
  return rows
