"""Is it worth an accelerator? Only a CPU, one accelerator, or Anakin.

What is there is measured. A CPU beside an accelerator is measured in a process
of its own; an accelerator that is not there is predicted from its data sheet by
rooflines, as `podrl.tools.scaling` does, with the environments and cores of here.
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

from podrl.records import workdir
from podrl.run import build
from podrl.run.config import base_config, is_sebulba
from podrl.run.devices import num_anakin_devices
from podrl.tools import balance_model as model
from podrl.tools import scaling as measure
from podrl.tools.balance_plan import Plan, candidates
from podrl.tools.balance_search import Found, find_for
from podrl.tools.balance_simulation import Costs, times
from podrl.tools.scaling import CHIPS, Chip, Work, read_work, scale, single

# Assumed, for want of a published figure: from calling a program on an
# accelerator until its actions are on the host. Cores are at work meanwhile.
_CALL_SECONDS = 100e-6
_SECONDS = 2.0  # Of a run of Anakin.
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


def on_chip(
  costs: Costs,
  plan: Plan,
  act: Work,
  learn: Work,
  local: Chip,
  chip: Chip,
  dtype: str,
) -> Costs:
  """A CPU's costs, with inference and updates on an accelerator beside it.

  Args:
    costs: of the CPU.
    plan: whose unroll and update the work is.
    act: of inference in all of an actor's unroll.
    learn: of an update.
    local: one core of the CPU.
    chip: the accelerator.
    dtype: of the network.
  """
  here, length = times(plan, costs), plan.unroll_length
  # Of cores that work together, one alone would take so long.
  cores = max(1.0, costs.update_cores)
  acting, _ = scale(here.inference, act, local, chip, dtype)
  learning, _ = scale(here.update * cores, learn, local, chip, dtype)
  latency = [x.operations * chip.operation_seconds for x in (act, learn)]
  step = _CALL_SECONDS + latency[0] / length
  per_slot = (acting - latency[0]) / (length * plan.num_envs)
  total = step + per_slot * plan.num_envs
  return costs._replace(
    inference=(step, step, per_slot),  # One call more gathers the unroll.
    inference_cores=_CALL_SECONDS / total,
    exclusive=1 - _CALL_SECONDS / total,
    update=(latency[1], (learning - latency[1]) / plan.batch, 0.0),
    update_cores=0.0,
    is_cpu=False,
  )


def _peaks() -> Chip:
  """One core of this machine."""
  with contextlib.ExitStack() as held:
    process = measure.open_processes(held, [('peaks', {})])
    rows = measure.run_processes(process, 3)
  flops, num_bytes = (max(x[k] for x in rows) for k in ('flops', 'bytes'))
  return Chip(flops, flops, num_bytes, 0.0, 1.0, 0.0, 0, 1, 1.0, 0.0, 1.0)


def _work(config: Any) -> tuple[Work, Work]:
  """Of acting and of learning, in all environments of a configuration."""
  act, learn = read_work(config)  # Where there is one device, that of two.
  return act, _share(learn, 2 // min(2, len(jax.devices())))


def _share(work: Work, parts: int) -> Work:
  return work._replace(
    flops=work.flops / parts, num_bytes=work.num_bytes / parts
  )


def _predicted(
  config: Any, found: Found, name: str, size_range: float, local: Chip
) -> Way:
  """One accelerator, by its data sheet."""
  base = found.base._replace(actor_devices=(0,), learner_devices=(0,))
  one = config.copy_and_resolve_references()
  one.env.num_envs = base.num_envs * base.unrolls_per_update
  act, learn = _work(one)
  costs = on_chip(
    found.costs,
    base,
    _share(act, base.unrolls_per_update),
    learn,
    local,
    CHIPS[name],
    config.network.dtype,
  )
  predictions = model.predict(
    list(
      dict.fromkeys(
        p._replace(
          actor_devices=(0,), learner_devices=(0,), threads=p.num_actors
        )
        for p in candidates(config, build.make_host_spec(config), size_range)
      )
    ),
    costs,
    0.9,
  )
  plan = max(predictions, key=lambda p: predictions[p].steps_per_second)
  # What the model leaves out here, slots between episodes too, it does there.
  factor = (
    found.runs[found.base].steps_per_second
    / model.simulate(found.base, found.costs).steps_per_second
  )
  return Way(
    f'one {name}',
    factor * predictions[plan].steps_per_second,
    (
      f'predicted from its data sheet, beside these {found.costs.num_cores:g} '
      f'cores; the limit: {model.limit(plan, costs)}'
    ),
    True,
  )


def _predicted_anakin(
  config: Any, steps_per_second: float, name: str, local: Chip
) -> Way:
  """Anakin on one accelerator, by its data sheet and what it reaches here."""
  new = anakin_config(config)
  steps = new.unroll_length * new.env.num_envs
  one_core = np.asarray([steps * num_anakin_devices(new) / steps_per_second])
  base = single(
    measure.Times(one_core, one_core, {}),
    *_work(new),
    local,
    CHIPS[name],
    new.network.dtype,
    overlaps=False,
  )
  return Way(
    f'Anakin on one {name}',
    steps / base.alone,
    'predicted from its data sheet, as many environments and steps',
    True,
  )


def _apart(
  title: str, config: Any, is_accelerator: bool, size_range: float, how: str
) -> Way:
  """A way that is measured in a process of its own."""
  # Beside this process, which may hold most of an accelerator's memory.
  process = subprocess.run(
    [sys.executable, '-m', 'podrl.tools.balance_worth'],
    text=True,
    input=json.dumps([config.to_dict(), size_range]),
    capture_output=True,
    check=False,
    env=os.environ
    | {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
    | ({} if is_accelerator else {'JAX_PLATFORMS': 'cpu'}),
  )
  if process.returncode:  # The other ways are to be told all the same.
    lines = process.stderr.strip().splitlines() or ['it said nothing']
    return Way(
      title, None, f'a measuring process ended: {lines[-1]}', is_accelerator
    )
  return Way(
    title, json.loads(process.stdout.splitlines()[-1]), how, is_accelerator
  )


def anakin_config(config: Any) -> Any:
  """Anakin's configuration with the agent and network of one of Sebulba's."""
  fields = config.to_dict()
  new = base_config(config.agent.name)
  for name in ('agent', 'network', 'optimizer'):
    new[name].update(fields[name])
  for name in (
    'seed',
    'unroll_length',
    'num_epochs',
    'num_minibatches',
    'compilation_cache',
  ):
    new[name] = fields[name]
  new.env.name, new.env.num_envs = config.env.name, config.env.num_envs
  new.checkpoint.every_seconds = 0.0
  return new


def _anakin(config: Any, is_accelerator: bool, size_range: float) -> Way:
  """The same network where the environment exists in JAX."""
  name = config.env.name
  title = f'Anakin on the {"accelerator" if is_accelerator else "CPU"}'
  new = anakin_config(config)
  try:
    build.make_env(new)
  except ValueError:
    return Way(title, None, f'gymnax has no {name} that fits', is_accelerator)
  return _apart(
    title,
    new,
    is_accelerator,
    size_range,
    f"gymnax's {name}, measured here with the configured "
    f'{new.env.num_envs} environments x {new.unroll_length} steps',
  )


def ways(config: Any, found: Found, chip: str, size_range: float) -> list[Way]:
  """The ways to run an experiment, each with what it reaches.

  Args:
    config: of the experiment.
    found: its plans on this machine.
    chip: of `CHIPS`, for a machine without an accelerator.
    size_range: as `plan.candidates`.
  """
  best = found.rate(found.ranking[0])
  if found.costs.is_cpu:
    local, anakin = _peaks(), _anakin(config, False, size_range)
    rows = [
      Way('CPU only', best, 'plan 1', False),
      _predicted(config, found, chip, size_range, local),
      anakin,
    ]
    if anakin.steps_per_second is not None:
      rows.append(
        _predicted_anakin(config, anakin.steps_per_second, chip, local)
      )
    return rows
  device = jax.devices()[0]
  return [
    Way(f'with {device.device_kind}', best, 'plan 1', True),
    _apart('CPU only', config, False, size_range, 'the best plan there'),
    *(_anakin(config, x, size_range) for x in (True, False)),
  ]


def verdict(found: Sequence[Way]) -> str:
  """What a person should do, in a sentence or two."""
  known = [x for x in found if x.steps_per_second is not None]
  cpu, accelerator = (
    max(
      (x for x in known if x.is_accelerator == wanted),
      default=None,
      key=lambda x: x.steps_per_second,
    )
    for wanted in (False, True)
  )
  if cpu is None or accelerator is None:
    return 'Whether an accelerator pays is not known.'
  ratio = accelerator.steps_per_second / cpu.steps_per_second
  if ratio >= _PAYS:
    return (
      f'An accelerator pays: {accelerator.name} learns from {ratio:.1f} '
      f'times the steps of {cpu.name}.'
    )
  if ratio > 1:
    return (
      f'An accelerator hardly pays: {accelerator.name} learns from only '
      f'{ratio:.2f} times the steps of {cpu.name}.'
    )
  return (
    f'An accelerator loses: {cpu.name} learns from {1 / ratio:.2f} times '
    f'the steps of {accelerator.name}.'
  )


def compare(
  config: Any, found: Found, chip: str, size_range: float
) -> list[str]:
  """Lines that say whether an accelerator is worth it."""
  rows = ways(config, found, chip, size_range)
  return [
    verdict(rows),
    *(
      f'  {x.name}: '
      + (
        f'{x.steps_per_second:,.0f} steps/s, {x.how}'
        if x.steps_per_second is not None
        else x.how
      )
      for x in rows
    ),
  ]


def _measure(config: Any, size_range: float) -> float:
  """Steps per second of an Anakin run, or of the best plan of Sebulba."""
  build.set_up_jax(config)
  if is_sebulba(config):
    found = find_for(config, size_range)
    return found.rate(found.ranking[0])
  driver = build.make_run(config).driver
  driver.start()
  driver.advance(1)
  start, steps = time.perf_counter(), 0.0
  while time.perf_counter() - start < _SECONDS:
    for x in driver.advance(16):
      steps += x.num_predictions - float(np.sum(x.episodes.num_joints))
  return steps / (time.perf_counter() - start)


if __name__ == '__main__':
  _fields, _range = json.load(sys.stdin)
  print(_measure(workdir.as_config(_fields), _range))
