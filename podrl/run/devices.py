"""Which devices and threads of this host a run uses."""

from collections.abc import Sequence
import importlib.metadata
import os
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from podrl.drivers import spmd
from podrl.drivers.stages import num_cores
from podrl.run.check import (
  check_division,
  check_minibatches,
  multiples_near,
  slots,
)
from podrl.run.config import is_sebulba
from podrl.types import EnvSpec

# Measured on two cores, the default experiment and CartPole are fastest with a
# device for each core; past eight the shards of the usual batches get small.
_MAX_CPU_DEVICES = 8

_MAX_TUNED_THREADS = 8  # More would make the pools of the usual batches small.


class Layout(NamedTuple):
  """How Sebulba uses a host.

  Attributes:
    actor_devices: indices of devices.
    learner_devices: the same.
    threads: for each actor device.
    num_actors: threads, over all actor devices.
    unrolls_per_update: that one update learns from.
    env_threads: of each actor.
  """

  actor_devices: tuple[int, ...]
  learner_devices: tuple[int, ...]
  threads: int
  num_actors: int
  unrolls_per_update: int
  env_threads: int


def num_cpu_devices(config: ConfigDict, num_processes: int = 1) -> int:
  """How many devices to make of a CPU, for each of several processes.

  For Anakin one per core, as far as they divide the batch; for Sebulba as many
  as are named.
  """
  if is_sebulba(config):
    return 1 + max(
      (*config.sebulba.actor_devices, *config.sebulba.learner_devices),
      default=0,
    )
  if config.num_devices:
    return config.num_devices

  def divides(n: int) -> bool:
    n *= num_processes
    size, _ = slots(config, config.env.num_envs // n)
    return config.env.num_envs % n == 0 and size % config.num_minibatches == 0

  return max(
    n
    for n in range(1, min(num_cores(), _MAX_CPU_DEVICES) + 1)
    if n == 1 or divides(n)
  )


def on_all_hosts(indices: Sequence[int]) -> list[jax.Device]:
  """The devices that have these indices in their processes."""
  hosts = [jax.local_devices(i) for i in range(jax.process_count())]
  return [found[i] for found in hosts for i in indices]


def devices(config: ConfigDict) -> Sequence[jax.Device]:
  """The devices that an Anakin run uses, of all processes.

  Raises:
    ValueError: where there are fewer, or the batch does not divide over them.
  """
  found = jax.local_devices()
  num_devices = config.num_devices or (
    min(num_cpu_devices(config, jax.process_count()), len(found))
    if found[0].platform == 'cpu'
    else len(found)
  )
  if num_devices > len(found):
    raise ValueError(
      f'config.num_devices={num_devices}, and there are {len(found)} '
      f'{found[0].platform} devices; use {len(found)} or fewer, or 0 for all'
    )
  check_division(config, num_devices * jax.process_count())
  return on_all_hosts(range(num_devices))


def _num_threads(config: ConfigDict, num_devices: int) -> int:
  """Actor threads for each of so many actor devices."""
  if config.sebulba.autotune and not config.sebulba.threads_per_actor_device:
    most = min(max(2, num_cores() // num_devices), _MAX_TUNED_THREADS)
    step = num_devices * jax.process_count()
    return max(
      (n for n in range(2, most + 1) if config.env.num_envs % (n * step) == 0),
      default=2,
    )
  # Two hide the transfers to an accelerator. On two cores one is faster:
  # CartPole by 1.6 times (medians of windows, in turn).
  is_small = jax.default_backend() == 'cpu' and num_cores() < 4
  return config.sebulba.threads_per_actor_device or (1 if is_small else 2)


def _choose_devices(
  config: ConfigDict, num_found: int
) -> tuple[tuple[int, ...], ...]:
  """Indices of the actor and of the learner devices, as named or by default."""
  fields, found = config.sebulba, range(num_found)
  actors, learners = fields.actor_devices, fields.learner_devices
  if not actors:
    free = [i for i in found if i not in learners] or list(learners)
    actors = tuple(free[: max(1, num_found // 4)])
  if not learners:
    learners = tuple(i for i in found if i not in actors) or actors
    # As many as divide the batch; where none do, the error names them all.
    num_actors = (
      jax.process_count() * len(actors) * _num_threads(config, len(actors))
    )
    divisors = [
      n
      for n in range(1, len(learners) + 1)
      if config.env.num_envs % (num_actors * n) == 0
    ]
    learners = learners[: max(divisors, default=len(learners))]
  return actors, learners


def make_layout(config: ConfigDict, spec: EnvSpec) -> Layout:
  """How a Sebulba run uses this host.

  Args:
    config: of the run.
    spec: of its environment.

  Raises:
    ValueError: where a device does not exist, or the batch does not divide.
  """
  fields, found = config.sebulba, jax.local_devices()
  actor_devices, learner_devices = _choose_devices(config, len(found))
  for name, indices in (
    ('actor_devices', actor_devices),
    ('learner_devices', learner_devices),
  ):
    if max(indices) >= len(found) or len(set(indices)) < len(indices):
      raise ValueError(
        f'config.sebulba.{name}={indices} must be different devices from 0 '
        f'to {len(found) - 1}, the {found[0].platform} devices that there are'
      )
  threads = _num_threads(config, len(actor_devices))
  num_actors = len(actor_devices) * threads
  if fields.autotune and num_actors == 1:
    raise ValueError(
      f'config.sebulba.autotune=True has nothing to choose from with config.'
      f'sebulba.threads_per_actor_device={threads}; use 2 or more'
    )
  num_envs = config.env.num_envs
  num_processes = jax.process_count()
  step = num_actors * len(learner_devices) * num_processes
  if num_envs % step:
    over = f'{num_processes} processes, ' if num_processes > 1 else ''
    raise ValueError(
      f'config.env.num_envs={num_envs} does not divide over {over}{num_actors} '
      f'actors and then {len(learner_devices)} learner devices; '
      f'try {multiples_near(num_envs, step)}'
    )
  # A CPU's learner needs a core too, unless a step of the environments costs
  # much (they draw images, or simulate several frames): on two cores one thread
  # trains CartPole 1.25 times faster than two, two train Pong 1.3 times faster
  # than one (windows in turn; after one another).
  is_cpu = found[0].platform == 'cpu'
  costs_much = spec.frame_skip > 1 or any(
    len(x.shape) == 3 for x in jax.tree.leaves(spec.obs)
  )
  free_cores = num_cores() - (is_cpu and not costs_much)
  unrolls_per_update = fields.unrolls_per_update or num_actors
  if fields.mode == 'deterministic' and unrolls_per_update != num_actors:
    raise ValueError(
      f'config.sebulba.unrolls_per_update={unrolls_per_update} does not fit '
      f'the deterministic mode, which takes one of each of {num_actors} '
      'actors; use 0, or config.sebulba.mode=asynchronous'
    )
  check_minibatches(
    config,
    num_envs // step * unrolls_per_update,
    len(learner_devices) * num_processes,
  )
  return Layout(
    actor_devices,
    learner_devices,
    threads,
    num_actors,
    unrolls_per_update,
    fields.env_threads or max(1, free_cores // num_actors),
  )


def warn(config: ConfigDict, layout: Layout) -> list[str]:
  """What a user of this layout should know, a line each."""
  fields, found = config.sebulba, jax.local_devices()
  num_threads, cores = layout.num_actors * layout.env_threads, num_cores()
  warnings = []
  if (
    num_threads > cores
    and config.env.suite == 'envpool'
    and (fields.env_threads or fields.threads_per_actor_device)
  ):
    warnings.append(
      f'{layout.num_actors} actors x config.sebulba.env_threads='
      f'{layout.env_threads} are {num_threads} threads for {cores}'
    )
  num_used = len({*layout.actor_devices, *layout.learner_devices})
  if num_used < len(found) and not (
    fields.actor_devices or fields.learner_devices
  ):
    warnings.append(
      f'{num_used} of {len(found)} devices are used: config.env.num_envs='
      f'{config.env.num_envs} divides over {len(layout.actor_devices)} that '
      f'act, with {layout.threads} actors each, and '
      f'{len(layout.learner_devices)} that learn'
    )
  return warnings


def count_updates(config: ConfigDict, steps_per_update: int) -> int:
  """Calls of `update` in a whole run.

  Raises:
    ValueError: if there are too many.
  """
  num_updates = -(-config.total_env_steps // steps_per_update)
  num_sgd_steps = num_updates * config.num_epochs * config.num_minibatches
  if num_sgd_steps >= 2**31:  # They are counted in int32.
    raise ValueError(
      f'config.total_env_steps={config.total_env_steps} are {num_sgd_steps} '
      'optimiser steps; choose fewer than 2**31 of those'
    )
  return num_updates


def periods(config: ConfigDict, steps_per_update: int) -> tuple[int, int]:
  """Updates between two evaluations, and between two checkpoints."""
  return tuple(
    -(-fields.every_env_steps // steps_per_update)
    for fields in (config.eval, config.checkpoint)
  )


def set_up_jax(config: ConfigDict, num_processes: int = 1) -> None:
  """Sets what must be set before the first use of a device."""
  # Devices made already (by a test, XLA_FLAGS) stay.
  if (
    jax.config.jax_num_cpu_devices < 1
    and ('device_count' not in os.environ.get('XLA_FLAGS', ''))
    and (not spmd.has_accelerator())
  ):
    spmd.set_num_cpu_devices(
      num_cpu_devices(config, num_processes), num_processes
    )
    # An actor's small programs are faster in its own thread than in another.
    jax.config.update('jax_cpu_enable_async_dispatch', not is_sebulba(config))
  cache = config.compilation_cache
  jax.config.update('jax_enable_compilation_cache', cache != 'off')
  if cache == 'off':
    return
  if cache == 'auto':
    cache = os.path.join(
      os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'),
      'podrl',
      'xla',
    )
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def describe_machine(
  devices: Sequence[jax.Device], suite: str
) -> dict[str, Any]:
  """What a run ran on: its devices, and versions, of its library of tasks too."""
  packages = ('jax', 'jaxlib', 'flax', 'optax', suite)
  return {
    'platform': devices[0].platform,
    'devices': len(devices),
    'processes': jax.process_count(),
    'versions': {'podrl': importlib.metadata.version('podrl')}
    | {p: importlib.metadata.version(p) for p in packages},
  }
