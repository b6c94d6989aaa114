"""Plans: how a host could be used, and which of them are worth a thought."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from podrl.run.config import check
from podrl.run.devices import make_layout, num_cores
from podrl.types import EnvSpec

_MAX_THREADS = 16  # Of an actor device.
_MAX_ENVS = 4096  # Of an actor.


class Plan(NamedTuple):
  """How Sebulba uses a host.

  Attributes:
    actor_devices: indices of devices.
    learner_devices: the same; perhaps the same ones.
    threads: actors of each actor device.
    num_envs: of each actor.
    env_threads: that step them.
    unroll_length: T, steps.
    unrolls_per_update: that one update learns from.
    max_lag: bound of the policy lag, in updates.
    deterministic: or asynchronous.
  """

  actor_devices: tuple[int, ...]
  learner_devices: tuple[int, ...]
  threads: int
  num_envs: int
  env_threads: int
  unroll_length: int
  unrolls_per_update: int
  max_lag: int
  deterministic: bool

  @property
  def num_actors(self) -> int:
    """Threads, over all actor devices."""
    return len(self.actor_devices) * self.threads

  @property
  def batch(self) -> int:
    """Slots that one update learns from: T x environments."""
    return self.unroll_length * self.num_envs * self.unrolls_per_update


def from_config(config: Any, spec: EnvSpec) -> Plan:
  """The plan of a configuration.

  Raises:
    ValueError: where it does not fit the machine, or itself.
  """
  check(config)
  layout = make_layout(config, spec)
  # The other suites do not heed how many threads are to step.
  env_threads = layout.env_threads if config.env.suite == 'envpool' else 1
  return Plan(
    layout.actor_devices,
    layout.learner_devices,
    layout.threads,
    config.env.num_envs // layout.num_actors,
    env_threads,
    config.unroll_length,
    layout.unrolls_per_update,
    config.sebulba.max_lag,
    config.sebulba.mode == 'deterministic',
  )


def overrides(plan: Plan, base: Plan) -> dict[str, Any]:
  """The fields that make `plan` of the configuration of `base`."""
  fields = {
    'unroll_length': plan.unroll_length,
    'env.num_envs': plan.num_envs * plan.num_actors,
    'sebulba.threads_per_actor_device': plan.threads,
    'sebulba.env_threads': plan.env_threads,
  }
  devices = ('actor_devices', 'learner_devices')
  if any(getattr(plan, x) != getattr(base, x) for x in devices):
    fields |= {f'sebulba.{x}': getattr(plan, x) for x in devices}
  return fields


def to_flags(fields: dict[str, Any]) -> str:
  """Overrides as they are pasted after a command."""
  return ' '.join(
    f'--config.{name}='
    + (','.join(map(str, value)) if isinstance(value, tuple) else str(value))
    for name, value in fields.items()
  )


def configured(config: Any, fields: dict[str, Any]) -> Any:
  """A copy of a configuration with these fields."""
  copy = config.copy_and_resolve_references()
  for name, value in fields.items():
    *path, field = name.split('.')
    node = copy
    for part in path:
      node = node[part]
    node[field] = value
  return copy


def _splits(base: Plan) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
  """Actor and learner devices: as configured, and 1, 2, 4 ... that act."""
  yield base.actor_devices, base.learner_devices
  found = jax.local_devices()
  if found[0].platform == 'cpu':  # Its devices share the cores all the same.
    return
  everything = tuple(range(len(found)))
  yield everything, everything
  num_actors = 1
  while num_actors < len(found):
    yield everything[:num_actors], everything[num_actors:]
    num_actors *= 2


def _powers(middle: int, bound: int) -> list[int]:
  """`middle` times and over powers of two, from 1 to `bound`."""
  found = {middle * 2**i for i in range(24)} | {
    middle // 2**i for i in range(24) if middle % 2**i == 0
  }
  return sorted(x for x in found if 1 <= x <= bound)


def candidates(config: Any, spec: EnvSpec, size_range: float) -> list[Plan]:
  """Plans near a configuration, each of which runs.

  Threads, environments and unroll lengths in powers of two around it, with
  unrolls and batches (T x environments of an update) within a factor of the
  configured ones: further off, other learning rates would be needed. The number
  of optimiser steps in an update stays.

  Args:
    config: of the experiment.
    spec: of its environment.
    size_range: the factor, at least 1.
  """
  base = from_config(config, spec)
  cores = num_cores()
  length = config.unroll_length
  lengths = [
    x
    for x in _powers(length, int(size_range * length))
    if size_range * x >= length
  ]
  found = {base: None}
  for actor_devices, learner_devices in dict.fromkeys(_splits(base)):
    for threads in sorted({*_powers(1, _MAX_THREADS), base.threads}):
      num_actors = threads * len(actor_devices)
      if num_actors > max(2 * len(actor_devices), 2 * cores, base.num_actors):
        continue
      shares = {1, max(1, cores // num_actors), base.env_threads}
      shares = [
        x
        for x in sorted(shares)
        if x == base.env_threads or x * num_actors <= cores or x == 1
      ]
      for num_envs in _powers(base.num_envs, _MAX_ENVS):
        for length in lengths:
          for env_threads in shares:
            plan = base._replace(
              actor_devices=actor_devices,
              learner_devices=learner_devices,
              threads=threads,
              num_envs=num_envs,
              unroll_length=length,
              env_threads=env_threads,
              unrolls_per_update=(
                config.sebulba.unrolls_per_update or num_actors
              ),
            )
            if (
              1 / size_range <= plan.batch / base.batch <= size_range
              and env_threads <= max(num_envs, base.env_threads)
              and _runs(config, spec, plan, base)
            ):
              found[plan] = None
  return list(found)


def _runs(config: Any, spec: EnvSpec, plan: Plan, base: Plan) -> bool:
  """Whether its overrides give a plan that the checks let pass: this one."""
  try:
    return from_config(configured(config, overrides(plan, base)), spec) == plan
  except ValueError:
    return False


def best_of_each(
  plans: Sequence[Plan], rates: dict[Plan, float]
) -> dict[int, Plan]:
  """The fastest plan of each number of actors."""
  best: dict[int, Plan] = {}
  for plan in plans:
    known = best.get(plan.num_actors)
    if plan in rates and (known is None or rates[plan] > rates[known]):
      best[plan.num_actors] = plan
  return dict(sorted(best.items()))
