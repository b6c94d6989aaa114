"""Chooses the devices and the threads that a run uses on each host."""

from collections.abc import Callable, Sequence
import importlib.metadata
import math
from typing import NamedTuple

import jax

from podrl.agents import find
from podrl.drivers.stages import num_cores
from podrl.envs import SUITES
from podrl.fields import Fields
from podrl.records.workdir import Record, num_agents
from podrl.types import EnvSpec

# On two cores, one device per core was fastest for the default experiment and
# for CartPole. With more than eight devices, the usual shards are too small.
_MAX_CPU_DEVICES = 8
_MAX_TUNED_THREADS = 8  # With more threads, the usual pools are too small.


class Machine(NamedTuple):
  """The hosts and devices that a run uses, or that it is compiled for."""

  devices: Sequence[jax.Device]  # Of all processes.
  process: int  # Index of this process.
  num_cores: int  # CPU cores that this process may use.

  @property
  def hosts(self) -> list[list[jax.Device]]:
    """The devices of each process."""
    hosts: dict[int, list[jax.Device]] = {}
    for device in self.devices:
      hosts.setdefault(device.process_index, []).append(device)
    return [hosts[process] for process in sorted(hosts)]

  @property
  def local_devices(self) -> list[jax.Device]:
    """The devices of this process."""
    return self.hosts[self.process]

  @property
  def platform(self) -> str:
    """The platform of the devices."""
    return self.devices[0].platform


def this_machine() -> Machine:
  """Returns the devices that JAX has, and the cores of this process."""
  return Machine(jax.devices(), jax.process_index(), num_cores())


class Layout(NamedTuple):
  """How Sebulba uses a host."""

  actor_devices: tuple[int, ...]  # Local indices of those that choose actions.
  learner_devices: tuple[int, ...]  # Local indices of the devices that learn.
  threads: int  # Threads per actor device; each thread is an actor.
  num_actors: int  # Actors of this process.
  unrolls_per_update: int  # Unrolls of this process in one update.
  env_threads: int  # Threads that step the environments of one actor.
  # Whether the update is split, because inference waits behind it: a device
  # both acts and learns, and runs one program at a time. A CPU does not.
  is_sliced: bool


def _multiples_near(value: int, divisor: int) -> str:
  """Returns the multiples of `divisor` next to `value`, for a message."""
  below = value // divisor * divisor
  return f'{below} or {below + divisor}' if below else f'{divisor}'


def _batch_size(config: Fields, num_envs: int) -> tuple[int, str]:
  """Returns the size and unit (steps or environments) of a device's batch."""
  unit = find(config['agent.name']).minibatch_unit(config)
  return num_envs * (config['unroll_length'] if unit == 'steps' else 1), unit


def _replay_batch_size(config: Fields) -> int:
  """Counts the sequences of an optimiser step; 0 for an agent without memory.

  The devices that learn must divide this number.
  """
  return config.get('replay.batch_size', 0)


def _check_minibatches(config: Fields, num_envs: int, num_devices: int) -> None:
  """Raises a ValueError if a device's minibatches would differ in size."""
  num_minibatches = config.get('num_minibatches', 1)
  size, unit = _batch_size(config, num_envs)
  if size % num_minibatches:
    largest = min(size, 2 * num_minibatches)
    divisors = [n for n in range(1, largest + 1) if size % n == 0]
    near = sorted(divisors, key=lambda n: abs(n - num_minibatches))[:2]
    raise ValueError(
      f'config.num_minibatches={num_minibatches} does not divide {size}, the '
      f'{unit} per update on each of {num_devices} devices; '
      f'try {" or ".join(map(str, sorted(near)))}'
    )


def num_named_devices(config: Fields) -> int:
  """Counts a Sebulba process's CPU devices; gaps in indices are an error."""
  names = 'actor_devices', 'learner_devices'
  fields = {k: config[f'sebulba.{k}'] for k in names}
  fields = {k: indices for k, indices in fields.items() if indices}
  named = sorted({i for indices in fields.values() for i in indices})
  num_devices = 1 + max([0, *named])  # `check` refuses negative indices.
  # An empty field uses the devices that the other field does not name, so one
  # index may be missing.
  if fields and num_devices > len(named) + (len(fields) == 1):

    def write(number: Callable[[int], int]) -> str:
      return ' and '.join(
        f'config.sebulba.{k}={",".join(str(number(i)) for i in indices)}'
        for k, indices in fields.items()
      )

    raise ValueError(
      f'{write(int)} would make {num_devices} CPU devices; number them from 0 '
      f'without gaps: {write(named.index)}'
    )
  return num_devices


def member_groups(config: Fields, num_devices: int) -> int:
  """Returns into how many groups `num_devices` devices split a run's agents.

  The devices of a group split the environments of its agents. So a member of a
  sweep is equal to a run on as many devices as a group has. The seeds of
  `num_seeds` are all in one group.
  """
  has_groups = 'members' in config
  return math.gcd(num_agents(config), num_devices) if has_groups else 1


def num_cpu_devices(config: Fields, num_processes: int = 1) -> int:
  """Returns how many CPU devices each process of an Anakin run uses."""
  if config['num_devices']:
    return config['num_devices']
  fitting = [1]
  for local in range(2, min(num_cores(), _MAX_CPU_DEVICES) + 1):
    n = local // member_groups(config, local)
    num_envs, rest = divmod(config['env.num_envs'], n * num_processes)
    size, _ = _batch_size(config, num_envs)
    rest += _replay_batch_size(config) % (n * num_processes)
    # `config.check` refuses num_minibatches=0 later.
    if rest == 0 and size % max(1, config.get('num_minibatches', 1)) == 0:
      fitting.append(local)
  return fitting[-1]


def on_all_hosts(indices: Sequence[int], machine: Machine) -> list[jax.Device]:
  """Returns the devices with these local indices, from all processes."""
  return [host[i] for host in machine.hosts for i in indices]


def anakin_devices(
  config: Fields, machine: Machine | None = None
) -> list[jax.Device]:
  """Returns an Anakin run's devices on a machine, by default this one."""
  machine = machine or this_machine()
  local, num_processes = machine.local_devices, len(machine.hosts)
  num_devices = config['num_devices'] or len(local)
  if machine.platform == 'cpu' and not config['num_devices']:
    num_devices = min(num_cpu_devices(config, num_processes), len(local))
  if num_devices > len(local):
    raise ValueError(
      f'config.num_devices={num_devices}, but there are {len(local)} '
      f'{machine.platform} devices; use {len(local)} or fewer, or 0 for all'
    )
  groups = member_groups(config, num_devices)
  num_envs, total = config['env.num_envs'], num_devices // groups
  total *= num_processes
  if num_envs % total:
    raise ValueError(
      f'config.env.num_envs={num_envs} does not divide over {total} devices; '
      f'try {_multiples_near(num_envs, total)}'
    )
  _check_minibatches(config, num_envs // total, total)
  return on_all_hosts(range(num_devices), machine)


def _threads_per_device(
  config: Fields, num_devices: int, machine: Machine
) -> int:
  """Counts the actor threads on each of `num_devices` actor devices."""
  if config['sebulba.threads_per_actor_device']:
    return config['sebulba.threads_per_actor_device']
  if config['sebulba.autotune']:
    most = min(max(2, machine.num_cores // num_devices), _MAX_TUNED_THREADS)
    unit, counts = num_devices * len(machine.hosts), range(2, most + 1)
    fitting = [n for n in counts if config['env.num_envs'] % (unit * n) == 0]
    return max(fitting, default=2)
  # While one thread transfers data to an accelerator, a second one can work. On
  # two CPU cores, one thread trains CartPole 1.2 to 1.4 times as fast as two
  # (median, measured alternately).
  is_small = machine.platform == 'cpu' and machine.num_cores < 4
  return 1 if is_small else 2


def _default_devices(
  config: Fields, machine: Machine
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the configured or default indices of actor and learner devices."""
  actors = config['sebulba.actor_devices']
  learners = config['sebulba.learner_devices']
  num_local = len(machine.local_devices)
  if not actors:
    free = [i for i in range(num_local) if i not in learners] or learners
    actors = tuple(free[: max(1, num_local // 4)])
  if not learners:
    learners = tuple(i for i in range(num_local) if i not in actors) or actors
    # Use the largest number of devices that divides the batch, or else all.
    threads = _threads_per_device(config, len(actors), machine)
    num_hosts, batch_size = len(machine.hosts), _replay_batch_size(config)
    unit = len(actors) * threads * num_hosts
    fitting = [
      n
      for n in range(1, len(learners) + 1)
      if config['env.num_envs'] % (unit * n) == 0
      and batch_size % (num_hosts * n) == 0
    ]
    learners = learners[: max(fitting, default=len(learners))]
  return actors, learners


def make_layout(
  config: Fields, spec: EnvSpec, machine: Machine | None = None
) -> Layout:
  """Decides how Sebulba uses each host of a machine, by default this one."""
  machine = machine or this_machine()
  local, platform = machine.local_devices, machine.platform
  devices = _default_devices(config, machine)
  for name, indices in zip(('actor', 'learner'), devices):
    if max(indices) >= len(local) or len(set(indices)) < len(indices):
      raise ValueError(
        f'config.sebulba.{name}_devices={indices} must be different devices '
        f'from 0 to {len(local) - 1}, the {platform} devices of this process'
      )
  num_actor_devices, num_learners = map(len, devices)
  threads = _threads_per_device(config, num_actor_devices, machine)
  num_actors = num_actor_devices * threads
  if config['sebulba.autotune'] and num_actors == 1:
    raise ValueError(
      'config.sebulba.autotune=True needs several actors, but '
      f'config.sebulba.threads_per_actor_device={threads} gives only one; use '
      '2 or more'
    )
  num_envs, num_processes = config['env.num_envs'], len(machine.hosts)
  step = num_actors * num_learners * num_processes
  if num_envs % step:
    processes = f'{num_processes} processes, ' if num_processes > 1 else ''
    raise ValueError(
      f'config.env.num_envs={num_envs} does not divide over {processes}'
      f'{num_actors} actors and then {num_learners} learner devices; '
      f'try {_multiples_near(num_envs, step)}'
    )
  unrolls_per_update = config['sebulba.unrolls_per_update'] or num_actors
  is_deterministic = config['sebulba.mode'] == 'deterministic'
  if is_deterministic and unrolls_per_update != num_actors:
    raise ValueError(
      f'config.sebulba.unrolls_per_update={unrolls_per_update} does not fit '
      'the deterministic mode: each update takes one unroll from each of '
      f'{num_actors} actors; use 0, or config.sebulba.mode=asynchronous'
    )
  num_learned = num_envs // step * unrolls_per_update  # Per device.
  _check_minibatches(config, num_learned, num_learners * num_processes)
  # On a CPU, one core stays free for the learner. But if environment steps are
  # expensive (images, or several frames per step), environments get all cores.
  # On two cores, Pong trains 1.3 times faster with two threads than with one
  # (separate runs); for CartPole, see docs/benchmarks.md.
  shapes = [x.shape for x in jax.tree.leaves(spec.obs)]
  is_expensive = spec.frame_skip > 1 or any(len(x) == 3 for x in shapes)
  needs_core = platform == 'cpu' and not is_expensive
  env_threads = max(1, (machine.num_cores - needs_core) // num_actors)
  env_threads = config['sebulba.env_threads'] or env_threads
  is_sliced = platform != 'cpu' and not {*devices[0]}.isdisjoint(devices[1])
  return Layout(
    *devices, threads, num_actors, unrolls_per_update, env_threads, is_sliced
  )


def layout_warnings(
  config: Fields, layout: Layout, machine: Machine
) -> list[str]:
  """Returns warnings about too many threads and about unused devices."""
  num_local = len(machine.local_devices)
  num_threads = layout.num_actors * layout.env_threads
  cores = machine.num_cores
  warnings = []
  own = 'env_threads', 'threads_per_actor_device'
  is_set = any(config[f'sebulba.{x}'] for x in own)
  has_threads = SUITES[config['env.suite']].has_env_threads
  if is_set and has_threads and num_threads > cores:
    warnings.append(
      f'{layout.num_actors} actors x config.sebulba.env_threads='
      f'{layout.env_threads} make {num_threads} threads, but there are only '
      f'{cores} cores'
    )
  num_used = len({*layout.actor_devices, *layout.learner_devices})
  own = 'actor_devices', 'learner_devices'
  is_set = any(config[f'sebulba.{x}'] for x in own)
  if num_used < num_local and not is_set:
    warnings.append(
      f'only {num_used} of {num_local} devices are used; to use more, change '
      f'config.env.num_envs={config["env.num_envs"]} to a multiple of '
      f'{layout.num_actors} (actors) times the number of learner devices'
    )
  return warnings


def describe_machine(devices: Sequence[jax.Device], suite: str) -> Record:
  """Describes the devices of a run and the versions of its packages."""
  packages = ('podrl', 'jax', 'jaxlib', 'flax', 'optax', SUITES[suite].package)
  return {
    'platform': devices[0].platform,
    'devices': len(devices),
    'processes': jax.process_count(),
    'versions': {x: _version(x) for x in packages},
  }


def _version(package: str) -> str | None:
  """Returns a package's version; None if it is on the path, not installed."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None
