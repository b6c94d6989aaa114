"""Measures a host: what environments, inference and updates cost on it.

Each part is timed alone, in the calling thread; then by short runs of the
driver in which all but one part cost nothing, to see how much of it goes on at
a time; then by short runs of whole plans.
"""

from collections.abc import Callable, Iterable, Sequence
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from podrl.drivers import sebulba, spmd
from podrl.drivers.actor import Actor, make_actor_functions
from podrl.drivers.machine import Meter
from podrl.drivers.stages import cpu_seconds
from podrl.records.recorder import Window
from podrl.tools.balance_idle import idle_agent, idle_learner, on_tape, standing
from podrl.tools.balance_plan import Plan
from podrl.tools.balance_simulation import Costs, fit, times
from podrl.tools.scaling import robust_deviation
from podrl.types import Agent, HostEnv, Learner, Report

_SECONDS = 0.5  # About so long is one measurement of a part.
_LENGTHS = (8, 32)  # Of the unrolls in which inference is timed.


class Host(NamedTuple):
  """What is measured.

  Attributes:
    make_env: `(num_envs, seed, num_threads) -> HostEnv`.
    agent: chooses actions.
    learner: of that agent.
    make_driver: `(plan) -> Sebulba`, with these.
    devices: of this process, as plans number them.
    num_cores: that this process may use.
  """

  make_env: Callable[[int, int, int], HostEnv]
  agent: Agent
  learner: Learner
  make_driver: Callable[[Plan], sebulba.Sebulba]
  devices: Sequence[jax.Device]
  num_cores: int


class Run(NamedTuple):
  """A short run of the driver.

  Attributes:
    steps_per_second: learnt, those between episodes left out.
    slots_per_second: the same, those between episodes counted.
    lag: mean policy lag, in updates.
    hand_off: seconds of an update.
    busy_cores: share of the cores.
    record: of it, as a run's records; its frames are steps.
  """

  steps_per_second: float
  slots_per_second: float
  lag: float
  hand_off: float
  busy_cores: float
  record: dict[str, float]


class _Row(NamedTuple):
  """A call's mean seconds, the seconds of cores in it, and its noise."""

  seconds: float
  cores: float
  noise: float


def run(
  driver: sebulba.Sebulba,
  seconds: float,
  batch: int,
  devices: Sequence[jax.Device],
  warm_up: int = 2,
) -> Run:
  """Starts a driver, lets it run for about so long, and closes it.

  From the end of one update to that of another, at least three later.

  Args:
    driver: not started yet.
    seconds: about which it runs.
    batch: slots that one update learns from; what is dropped does not count.
    devices: of this process that it uses; their energy is measured.
    warm_up: updates that are left out.
  """
  window = Window(1, 1)
  meter = Meter(devices)

  def advance(count: int) -> Report:
    (report,) = meter.over(lambda: driver.advance(count))
    if not report.is_finite:
      raise ValueError(
        'the loss is NaN or infinite; try a smaller optimizer.learning_rate'
      )
    return report

  try:
    driver.start()
    advance(warm_up)
    start, num_updates = time.perf_counter(), 0
    while num_updates < 3 or time.perf_counter() - start < seconds:
      window.add(advance(1))
      num_updates += 1
  finally:
    driver.close()
  record = window.record()
  slots = record['updates_per_second'] * batch
  steps = record['steps_per_second'] / record['predictions_per_second']
  return Run(
    slots * steps,
    slots,
    record['policy_lag'],
    record['time_hand_off'] / record['updates_per_second'],
    record['busy_cores'],
    record,
  )


def _time(call: Callable[[], Any], least: int = 3, warm_up: int = 1) -> _Row:
  """Times calls for about half a second."""
  for _ in range(warm_up):
    call()
  seconds, cpu = [], cpu_seconds()
  while sum(seconds) < _SECONDS or len(seconds) < least:
    start = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - start)
  cpu = (cpu_seconds() - cpu) / len(seconds)
  mean = float(np.mean(seconds))
  return _Row(mean, cpu, robust_deviation(np.asarray(seconds)) / mean)


def _together(
  host: Host, make_env: Callable[[int], HostEnv], agent: Agent, plan: Plan
) -> float:
  """Seconds between two unrolls of a plan's actors, updates costing nothing."""
  key = jax.random.key(0)
  device = host.devices[plan.actor_devices[0]]
  driver = sebulba.Sebulba(
    make_env,
    agent,
    idle_learner(agent.init(key)),
    spmd.make_mesh([device]),
    [device],
    sebulba.Settings(
      num_envs=plan.num_envs,
      unroll_length=plan.unroll_length,
      actors_per_device=plan.num_actors,
      unrolls_per_update=1,
      deterministic=False,
      max_lag=2 * plan.num_actors,
      hang_seconds=300.0,
    ),
    key,
  )
  found = run(
    driver,
    2 * _SECONDS,
    plan.num_envs * plan.unroll_length,
    [device],
    warm_up=2 * plan.num_actors,
  )
  return plan.unroll_length * plan.num_envs / found.slots_per_second


def _servers(
  alone: float,
  cores: float,
  together: float,
  num_actors: int,
  num_cores: int,
  idle: float = 0.0,
) -> float:
  """How many can be in a part at a time; infinite where the rest explains it.

  Args:
    alone: seconds of it.
    cores: seconds of cores in it.
    together: seconds between two, of so many actors.
    num_actors: so many.
    num_cores: that there are.
    idle: seconds of what else an actor does, holding Python's lock.
  """
  expected = max((alone + idle) / num_actors, (cores + idle) / num_cores, idle)
  return np.inf if together < 1.3 * expected else max(1.0, alone / together)


def _environments(
  host: Host, plans: Sequence[Plan]
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
  """Coefficients of a pool's step, of its cores, and its noise."""
  few, many = (choose(p.env_threads for p in plans) for choose in (min, max))
  sizes = _spread(p.num_envs for p in plans)
  rows, cores, found = [], [], []
  for num_envs, num_threads in dict.fromkeys(
    [
      (sizes[0], few),
      (sizes[-1], few),
      *((x, many) for x in sizes[len(sizes) // 2 :]),
    ]
  ):
    used = min(num_threads, num_envs, host.num_cores)
    env = on_tape(host.make_env(num_envs, 0, num_threads), num_envs)
    env.reset()
    found.append(_time(lambda: env.step(None), 10))
    env.close()
    rows.append((1, used - 1, num_envs / used))
    cores.append((1, used - 1, num_envs))
  return (
    fit(rows, [x.seconds for x in found]),
    fit(cores, [x.cores for x in found]),
    float(np.median([x.noise for x in found])),
  )


def _spread(values: Iterable[int]) -> list[int]:
  """The least, the middle and the greatest of some numbers."""
  found = sorted({*values})
  return sorted({found[0], found[len(found) // 2], found[-1]})


def _actor(host: Host, plan: Plan) -> tuple[Actor, Any]:
  """An actor whose environments cost nothing, and parameters for it."""
  env = standing(host.make_env(1, 0, 1), plan.num_envs)
  devices = [host.devices[i] for i in plan.learner_devices]
  functions = make_actor_functions(host.agent, env.observe, len(devices))
  device = host.devices[plan.actor_devices[0]]
  key = jax.random.key(0)
  params = jax.device_put(jax.jit(host.agent.init)(key), device)
  return Actor(
    0, env, functions, plan.unroll_length, device, devices, key, 0
  ), params


def _inference(
  host: Host, plans: Sequence[Plan]
) -> tuple[tuple[float, ...], float]:
  """Coefficients of an unroll's inference, and the cores at work in it."""
  rows, found = [], []
  for length in _LENGTHS:
    for num_envs in sorted({f(p.num_envs for p in plans) for f in (min, max)}):
      actor, params = _actor(
        host, plans[0]._replace(num_envs=num_envs, unroll_length=length)
      )
      actor.compile(params)
      found.append(_time(lambda: actor.unroll(params, 0)))
      rows.append((1, length, length * num_envs))
  return (
    fit(rows, [x.seconds for x in found]),
    float(np.mean([min(1.0, x.cores / x.seconds) for x in found])),
  )


def _updates(
  host: Host, plans: Sequence[Plan]
) -> tuple[tuple[float, ...], float]:
  """Coefficients of an update, and the cores at work in it."""
  corners = dict.fromkeys(
    choose(plans, key=key)
    for choose in (min, max)
    for key in (
      lambda p: (p.batch, p.unroll_length),
      lambda p: (p.unroll_length, -p.batch),
    )
  )
  rows, found = [], []
  for plan in corners:
    actor, params = _actor(host, plan)
    mesh = spmd.make_mesh([host.devices[i] for i in plan.learner_devices])
    example = spmd.join_shards(actor.compile(params), mesh, spmd.TRAJECTORY)
    key = spmd.place(jax.random.key(0), mesh, spmd.REPLICATED)
    state = spmd.place(
      jax.jit(
        lambda key: host.learner.init(key, jax.eval_shape(lambda: example))
      )(key),
      mesh,
      spmd.LEARNER_STATE,
    )
    update = spmd.map_update(host.learner, mesh)

    def call() -> None:
      nonlocal state
      state, _ = jax.block_until_ready(
        update(
          state.params,
          state._replace(params=()),
          (example,) * plan.unrolls_per_update,
          key,
        )
      )

    found.append(_time(call))
    rows.append((1, plan.batch / len(plan.learner_devices), plan.unroll_length))
  return (
    fit(rows, [x.seconds for x in found]),
    float(np.mean([x.cores / x.seconds for x in found])),
  )


def measure(host: Host, plans: Sequence[Plan]) -> Costs:
  """Measures and fits what the parts of some plans cost.

  Args:
    host: to measure.
    plans: whose range of sizes is covered.
  """
  environment, environment_cores, noise = _environments(host, plans)
  inference, inference_cores = _inference(host, plans)
  update, update_cores = _updates(host, plans)
  costs = Costs(
    environment,
    environment_cores,
    np.inf,
    noise,
    inference,
    inference_cores,
    0.0,
    update,
    update_cores,
    0.0,
    host.num_cores,
    host.devices[0].platform == 'cpu',
  )
  # As many at a time as there may be; that is what tells most.
  plan = max(plans, key=lambda p: (p.num_actors, p.num_envs))._replace(
    env_threads=1, unroll_length=_LENGTHS[0]
  )
  plan = plan._replace(
    actor_devices=plan.actor_devices[:1],
    learner_devices=plan.learner_devices[:1],
  )
  if plan.num_actors < 2:
    return costs._replace(exclusive=float(not costs.is_cpu))
  alone = times(plan, costs)
  actor, params = _actor(host._replace(agent=idle_agent()), plan)
  actor.compile(params)
  idle = _time(lambda: actor.unroll(params, 0)).seconds / plan.unroll_length
  seconds = (
    _together(
      host,
      lambda i: on_tape(
        host.make_env(plan.num_envs, i * plan.num_envs, 1), plan.num_envs
      ),
      idle_agent(),
      plan,
    )
    / plan.unroll_length
  )
  servers = _servers(
    alone.environment,
    alone.environment * alone.environment_cores,
    seconds,
    plan.num_actors,
    host.num_cores,
    idle,
  )
  seconds = _together(
    host,
    lambda i: standing(host.make_env(1, 0, 1), plan.num_envs),
    host.agent,
    plan,
  )
  exclusive = (
    1
    / _servers(
      alone.inference,
      alone.inference * inference_cores,
      seconds,
      plan.num_actors,
      host.num_cores,
    )
    if costs.is_cpu
    else (min(1.0, seconds / alone.inference))
  )
  return costs._replace(
    environment_servers=servers if servers > 8 else round(servers),
    exclusive=exclusive,
  )
