"""What limits a Sebulba run: one resource, and what a person can do about it.

A pure function of a record's shares and of what the run works with. The limit
is the part with the highest utilisation: were it faster, so would be the run.
Where no part is near 1, they wait for one another.
"""

from collections.abc import Mapping
import math
from typing import NamedTuple

# A part that works so much of the time leaves no more than a quarter to gain
# elsewhere; random costs keep even a clear limit from 1.
_SATURATED = 0.8
TOLD = 0.1  # The share of the cores in other programs that is worth telling.


class System(NamedTuple):
  """What a Sebulba process works with.

  Attributes:
    platform: of its devices; on 'cpu' they are made of the same cores.
    num_cores: that the process may use.
    num_actors: threads, over all actor devices.
    env_threads: of each actor's environments.
    actor_devices: their indices.
    learner_devices: the same; a device may be in both.
    unrolls_per_update: that one update learns from.
    max_lag: bound of the calls of `update` between the parameters that act and
      those that learn.
    is_deterministic: or asynchronous.
    num_processes: of the run, each with as much.
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

  def with_active(self, record: Mapping[str, float]) -> 'System':
    """With those actors alone that a record says are active."""
    total = self.num_actors * self.num_processes
    return self._replace(
      num_actors=round(record.get('num_actors', total) / self.num_processes)
    )


class Limit(NamedTuple):
  """What limits a run.

  Attributes:
    name: 'cores', 'environments', 'inference latency', 'actor devices',
      'learner devices', 'hand-off', 'lag' or 'slowest actor'.
    sentence: that says how it shows and what to do.
  """

  name: str
  sentence: str


def _percent(share: float) -> str:
  return f'{100 * min(max(share, 0.0), 1.0):.0f} %'


def _used_cores(record: Mapping[str, float]) -> float:
  """The share of the cores that is in use, by this run or others."""
  return max(
    record['busy_cores'], 1 - record.get('idle_cores', 1 - record['busy_cores'])
  )


def others(record: Mapping[str, float]) -> float:
  """The share of the cores that other programs use."""
  return _used_cores(record) - record['busy_cores']


def _cores(record: Mapping[str, float], system: System) -> str:
  """How busy the cores are, and with whose work."""
  used = _used_cores(record)
  own = (
    ''
    if others(record) < TOLD
    else (
      f' ({_percent(record["busy_cores"])} with this run, the rest with other '
      'programs)'
    )
  )
  return f'{_are(system.num_cores, "CPU core")} {_percent(used)} busy{own}'


def count(number: int, noun: str) -> str:
  """A number of things, in words."""
  return f'{number} {noun}{"s" * (number != 1)}'


def _are(number: int, noun: str) -> str:
  return f'{count(number, noun)} {"is" if number == 1 else "are"}'


def find_limit(record: Mapping[str, float], system: System) -> Limit:
  """The resource that limits a run.

  Args:
    record: with the shares, from 0 to 1, of the window: `time_*` of the actors
      (means over them) and of the learner, `busy_*` of cores and devices.
      `num_actors`, where it is there, are those that are active, and
      `idle_cores` is the share of the cores that no program uses.
    system: what the run works with, of one of its processes.
  """
  system = system.with_active(record)
  is_cpu = system.platform == 'cpu'
  is_shared = bool({*system.actor_devices} & {*system.learner_devices})
  learner = record['time_update'] + record['time_hand_off']
  actors = 1 - record['time_actor_waiting']
  # A CPU's devices are its cores: that one is busy all the time says little,
  # its programs may run in several threads at once.
  is_device_busy = not is_cpu and record['busy_actor_devices'] >= _SATURATED
  if is_cpu and _used_cores(record) >= _SATURATED:
    return _cores_of_all(record, system)
  if learner >= max(actors, _SATURATED):
    return _learner(record, system, is_shared)
  if (
    is_device_busy
    and is_shared
    and (record['time_update'] >= record['busy_actor_devices'] / 2)
  ):
    return _learner(record, system, is_shared)
  if (
    is_device_busy
    and (actors >= _SATURATED or is_shared)
    and (record['busy_actor_devices'] >= _used_cores(record))
  ):
    return _actor_devices(record, system, is_shared)
  if actors >= _SATURATED:
    return _environments(record, system)
  return _both_wait(record, system)


def _waits(record: Mapping[str, float]) -> str:
  waits = _percent(record['time_learner_waiting'])
  return f'the learner waits {waits} of the time for data'


def _cores_of_all(record: Mapping[str, float], system: System) -> Limit:
  """Where environments, inference and updates share the cores."""
  parts = {  # Thread-seconds, by which they may be compared.
    'the environments': record['time_environment']
    * system.num_actors
    * (system.env_threads),
    'choosing actions': record['time_inference'] * system.num_actors,
    'updates': record['time_update'] * len(system.learner_devices),
  }
  most = max(parts, key=parts.get)
  remedy = (
    ''
    if most == 'the environments'
    else (
      ', or choose a smaller network or fewer epochs (whether an accelerator '
      'pays, podrl balance measures)'
    )
  )
  return Limit(
    'cores',
    (
      f'the {_cores(record, system)}, mostly for {most} (environments take '
      f'{_percent(record["time_environment"])} and choosing actions '
      f"{_percent(record['time_inference'])} of the actors' time, updates "
      f"{_percent(record['time_update'])} of the learner's): that is the "
      f'limit; add CPU cores{remedy}'
    ),
  )


def _learner(
  record: Mapping[str, float], system: System, is_shared: bool
) -> Limit:
  """Where actors could deliver more than is learnt."""
  waits = (
    f'the actors wait {_percent(record["time_actor_waiting"])} of the '
    'time for the learner'
  )
  if record['time_hand_off'] > record['time_update']:
    return Limit(
      'hand-off',
      (
        f'{waits}, which spends {_percent(record["time_hand_off"])} of its '
        'time on handing parameters on and '
        f'{_percent(record["time_update"])} on updates: the hand-off is the '
        'limit; make updates larger and fewer (unroll_length, '
        'sebulba.unrolls_per_update, env.num_envs)'
      ),
    )
  num_actor_devices = len(system.actor_devices)
  # Spare ones can learn: as many act as their work needs.
  needed = max(
    1, math.ceil(num_actor_devices * record['busy_actor_devices'] / _SATURATED)
  )
  if system.platform == 'cpu':
    remedy = (
      f'the {_cores(record, system)}: learn on more CPU devices '
      '(sebulba.learner_devices), or choose a smaller network or fewer '
      'epochs'
    )
  elif is_shared:
    remedy = (
      'they also choose actions: give these a device of their own, or '
      'choose a smaller network or fewer epochs'
    )
  elif needed < num_actor_devices:
    remedy = (
      f'drop from {num_actor_devices} to '
      f'{count(needed, "actor device")}, since they '
      f'are {_percent(record["busy_actor_devices"])} busy, and learn '
      'on the rest'
    )
  else:
    remedy = (
      'add learner devices (sebulba.learner_devices), or choose a '
      'smaller network or fewer epochs'
    )
  return Limit(
    'learner devices',
    (
      f'{waits}, which spends {_percent(record["time_update"])} of its time on '
      f'updates: the {_are(len(system.learner_devices), "learner device")} the '
      f'limit; {remedy}'
    ),
  )


def _actor_devices(
  record: Mapping[str, float], system: System, is_shared: bool
) -> Limit:
  """Where choosing actions fills the devices."""
  shared = (
    f' ({_percent(record["time_update"])} with updates)' if is_shared else ''
  )
  return Limit(
    'actor devices',
    (
      f'{_waits(record)}, and the '
      f'{_are(len(system.actor_devices), "actor device")} '
      f'{_percent(record["busy_actor_devices"])} busy{shared}: that is the '
      'limit; add actor devices (sebulba.actor_devices), or let fewer actors '
      'choose for more environments at a time (env.num_envs, '
      'sebulba.threads_per_actor_device)'
    ),
  )


def _environments(record: Mapping[str, float], system: System) -> Limit:
  """Where the actors always work, and no device of theirs is full."""
  waits, cores = _waits(record), _cores(record, system)
  busy, num_devices = record['busy_actor_devices'], len(system.actor_devices)
  needed = max(1, math.ceil(num_devices * busy / _SATURATED))
  drop = (
    ''
    if system.platform == 'cpu' or needed == num_devices
    else (
      f', or drop from {num_devices} to {count(needed, "actor device")}, '
      f'since they are {_percent(busy)} busy'
    )
  )
  if _used_cores(record) >= _SATURATED:
    return Limit(
      'cores',
      (
        f'{waits}, and the {cores}: environments are the limit; add CPU '
        f'cores{drop}'
      ),
    )
  more = 'add actor threads (sebulba.threads_per_actor_device)'
  actors = count(system.num_actors, 'actor')
  if record['time_environment'] >= record['time_inference']:
    if system.num_actors * system.env_threads < system.num_cores:
      more += ' or threads of their environments (sebulba.env_threads)'
    return Limit(
      'environments',
      (
        f'{waits}: of the time of {actors} '
        f'{_percent(record["time_environment"])} goes into environments, and '
        f"the {cores}: environments' latency is the limit; {more}{drop}"
      ),
    )
  return Limit(
    'inference latency',
    (
      f'{waits}: of the time of {actors} {_percent(record["time_inference"])} '
      f'goes into choosing actions, and the {cores}: too few are under way at '
      f'once; {more}, or environments to choose for at a time (env.num_envs)'
    ),
  )


def _both_wait(record: Mapping[str, float], system: System) -> Limit:
  """Where nobody works all the time: they are kept in step too closely."""
  waits = (
    f'{_waits(record)} and the actors '
    f'{_percent(record["time_actor_waiting"])} of theirs'
  )
  max_lag, unrolls = system.max_lag, system.unrolls_per_update
  if max_lag and system.is_deterministic:
    return Limit(
      'slowest actor',
      (
        f'{waits}, for each update takes one unroll of each of '
        f'{count(system.num_actors, "actor")}: the slowest is the limit; let '
        'environments of uneven speed run with sebulba.mode=asynchronous, or '
        'raise sebulba.max_lag'
      ),
    )
  if not max_lag:
    return Limit(
      'lag',
      (
        f'{waits}, in turn: sebulba.max_lag=0 is the limit; 1 lets acting and '
        'learning overlap (with a2c it must be 0: use --agent=impala)'
      ),
    )
  permits = unrolls * (max_lag + 1)
  drop = (
    f', or drop to {count(permits, "actor")}'
    if (permits < system.num_actors)
    else ''
  )
  return Limit(
    'lag',
    (
      f'{waits}, for no more than {permits} unrolls may be under way or '
      f'waiting (sebulba.unrolls_per_update={unrolls} x '
      f'(sebulba.max_lag={max_lag} + 1)): the bound of the lag is the limit; '
      f'raise either{drop}'
    ),
  )
