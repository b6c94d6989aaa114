"""Is it worth an accelerator? Only a CPU, one accelerator, or Anakin.

What is there is measured. A CPU beside an accelerator is measured in a process
of its own; an accelerator that is not there is predicted from its data sheet by
rooflines, as `podrl.scaling` does, with the environments and cores of here.
"""

from collections.abc import Sequence
import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from podrl import build
from podrl import measure as probes
from podrl import workdir
from podrl.balance import model
from podrl.balance.plan import Plan
from podrl.balance.search import Found, find_for
from podrl.balance.simulation import Costs, times
from podrl.chips import CHIPS, Chip
from podrl.config import base_config, is_sebulba
from podrl.layout import set_up_jax
from podrl.prediction import scale
from podrl.program import Work, read_work

# Assumed, for want of a published figure: from calling a program on an
# accelerator until its actions are on the host. Cores are at work meanwhile.
_CALL_SECONDS = 100e-6
_SECONDS = 2.  # Of a run of Anakin.
_PAYS = 1.2  # Times as fast, from which on we say that it pays.


class Way(NamedTuple):
  """A way to run an experiment.

  Attributes:
    name: 'CPU only', ...
    steps_per_second: of training; None where it cannot be done.
    how: it is known, or why not.
    is_accelerator: whether it needs one.
  """
  name: str
  steps_per_second: float | None
  how: str
  is_accelerator: bool


def on_chip(costs: Costs, plan: Plan, act: Work, learn: Work, local: Chip,
            chip: Chip, dtype: str) -> Costs:
  """A CPU's costs, with inference and updates on an accelerator beside it.

  Args:
    costs: of the CPU.
    plan: whose unroll and update the work is.
    act: of inference in all of an unroll, of one environment.
    learn: of an update.
    local: one core of the CPU.
    chip: the accelerator.
    dtype: of the network.
  """
  here, length = times(plan, costs), plan.unroll_length
  # Of cores that work together, one alone would take so long.
  cores = max(1., costs.update_cores)
  acting, _ = scale(here.inference, act, local, chip, dtype)
  learning, _ = scale(here.update * cores, learn, local, chip, dtype)
  latency = [min(x, work.operations * chip.operation_seconds)
             for x, work in ((acting, act), (learning, learn))]
  step = _CALL_SECONDS + latency[0] / length
  per_slot = (acting - latency[0]) / (length * plan.num_envs)
  total = step + per_slot * plan.num_envs
  return costs._replace(
      inference=(step, step, per_slot),  # One call more gathers the unroll.
      inference_cores=_CALL_SECONDS / total,
      exclusive=1 - _CALL_SECONDS / total,
      update=(latency[1], (learning - latency[1]) / plan.batch, 0.),
      update_cores=0., is_cpu=False)


def _peaks() -> Chip:
  """One core of this machine."""
  with contextlib.ExitStack() as held:
    process = probes.open_processes(held, [('peaks', {})])
    rows = probes.run(process, 3)
  flops, num_bytes = (max(x[k] for x in rows) for k in ('flops', 'bytes'))
  return Chip(flops, flops, num_bytes, 0., 1., 0., 0, 1, 1., 0., 1.)


def _best(costs: Costs, plans: Sequence[Plan]) -> tuple[float, str]:
  """The best rate under some costs, and what limits it."""
  found = model.predict(list(plans), costs, 0.9)
  plan = max(found, key=lambda p: found[p].steps_per_second)
  return found[plan].steps_per_second, model.limit(plan, costs)


def _predicted(config: Any, found: Found, name: str) -> Way:
  """One accelerator, by its data sheet."""
  base = found.base
  one = config.copy_and_resolve_references()
  one.env.num_envs = base.num_envs * base.unrolls_per_update
  act, learn = read_work(one)

  def share(work: Work, parts: int) -> Work:
    return work._replace(
        flops=work.flops / parts, num_bytes=work.num_bytes / parts)
  act = share(act, base.unrolls_per_update)  # Of one actor.
  learn = share(learn, 2 // min(2, len(jax.devices())))  # It is that of two.
  costs = on_chip(found.costs, base, act, learn, _peaks(), CHIPS[name],
                  config.network.dtype)
  rate, limit = _best(costs, list(found.predictions))
  return Way(f'one {name}', rate, (
      f'predicted from its data sheet, beside these {found.costs.num_cores:g} '
      f'cores; the limit: {limit}'), True)


def _apart(config: Any, platform: str) -> float:
  """Steps per second of a configuration, measured in a process of its own.

  Raises:
    ValueError: where that failed.
  """
  # Beside this process, which may hold most of an accelerator's memory.
  process = subprocess.run(
      [sys.executable, '-m', 'podrl.balance.worth'], text=True,
      input=json.dumps(config.to_dict()), capture_output=True, check=False,
      env=os.environ | {'JAX_PLATFORMS': platform,
                        'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'})
  if process.returncode:
    lines = process.stderr.strip().splitlines() or ['it said nothing']
    raise ValueError(f'a measuring process ended: {lines[-1]}')
  return json.loads(process.stdout.splitlines()[-1])


def anakin_config(config: Any) -> Any:
  """Anakin's configuration with the agent and network of one of Sebulba's."""
  fields = config.to_dict()
  new = base_config(config.agent.name)
  for name in ('agent', 'network', 'optimizer'):
    new[name].update(fields[name])
  for name in ('seed', 'unroll_length', 'num_epochs', 'num_minibatches'):
    new[name] = fields[name]
  new.env.name, new.env.num_envs = config.env.name, config.env.num_envs
  new.checkpoint.every_seconds = 0.
  return new


def _anakin(config: Any, platform: str) -> Way:
  """The same network where the environment exists in JAX."""
  name, is_accelerator = config.env.name, platform != 'cpu'
  title = f'Anakin on the {"accelerator" if is_accelerator else "CPU"}'
  new = anakin_config(config)
  try:
    build.make_env(new)
  except ValueError:
    return Way(title, None, f'gymnax has no {name} that fits', is_accelerator)
  return Way(title, _apart(new, platform), f"gymnax's {name}, measured here",
             is_accelerator)


def ways(config: Any, found: Found, chip: str) -> list[Way]:
  """The ways to run an experiment, each with what it reaches.

  Args:
    config: of the experiment.
    found: its plans on this machine.
    chip: of `CHIPS`, for a machine without an accelerator.
  """
  best = found.predictions[found.ranking[0]].steps_per_second
  if found.costs.is_cpu:
    return [Way('CPU only', best, 'plan 1', False),
            _predicted(config, found, chip), _anakin(config, 'cpu')]
  device = jax.devices()[0]
  return [Way(f'with {device.device_kind}', best, 'plan 1', True),
          Way('CPU only', _apart(config, 'cpu'), 'the best plan there', False),
          _anakin(config, device.platform), _anakin(config, 'cpu')]


def verdict(found: Sequence[Way]) -> str:
  """What a person should do, in a sentence or two."""
  known = [x for x in found if x.steps_per_second is not None]
  cpu = max((x for x in known if not x.is_accelerator),
            key=lambda x: x.steps_per_second)
  accelerator = max((x for x in known if x.is_accelerator),
                    key=lambda x: x.steps_per_second)
  ratio = accelerator.steps_per_second / cpu.steps_per_second
  if ratio >= _PAYS:
    return (f'An accelerator pays: {accelerator.name} learns from {ratio:.1f} '
            f'times the steps of {cpu.name}.')
  if ratio > 1:
    return (f'An accelerator hardly pays: {accelerator.name} learns from only '
            f'{ratio:.2f} times the steps of {cpu.name}.')
  return (f'An accelerator loses: {cpu.name} learns from {1 / ratio:.1f} times '
          f'the steps of {accelerator.name}.')


def compare(config: Any, found: Found, chip: str) -> list[str]:
  """Lines that say whether an accelerator is worth it."""
  rows = ways(config, found, chip)
  return [verdict(rows), *(
      f'  {x.name}: ' + (
          f'{x.steps_per_second:,.0f} steps/s, {x.how}'
          if x.steps_per_second is not None else x.how) for x in rows)]


def _measure(config: Any) -> float:
  """Steps per second of an Anakin run, or of the best plan of Sebulba."""
  set_up_jax(config)
  if is_sebulba(config):
    found = find_for(config, None, 2.)
    return found.predictions[found.ranking[0]].steps_per_second
  driver = build.make_run(config).driver
  driver.start()
  driver.advance(1)
  start, steps = time.perf_counter(), 0.
  while time.perf_counter() - start < _SECONDS:
    for x in driver.advance(16):
      steps += x.num_predictions - float(np.sum(x.episodes.num_joints))
  return steps / (time.perf_counter() - start)


if __name__ == '__main__':
  print(_measure(workdir.as_config(json.load(sys.stdin))))
