"""A host as a closed queueing network, simulated event by event.

Actors are the customers: each asks for parameters, then T times for inference
and a step of its pool, and hands an unroll to the learner, under the driver's
own rules: permits or first-in-first-out queues, unrolls per update, the bound
of policy lag. Stations are the environments (as many servers as pools can step
at a time), each actor device and each learner device (one server, first come
first served; one for both where they are the same accelerator). All that uses
cores shares them: where more are asked for than there are, everything that runs
on them is slowed alike (processor sharing). On a CPU environments, inference
and updates all do.
"""

from collections import deque
from collections.abc import Iterator, Sequence
import math
import random
from typing import NamedTuple

import numpy as np
from scipy import optimize

from podrl.tools.balance_plan import Plan


class Costs(NamedTuple):
  """What everything costs, alone on the machine, in seconds.

  A vector is of coefficients; its terms are named.

  Attributes:
    environment: of a pool's step: 1, threads - 1, environments / threads.
    environment_cores: seconds of cores in it: 1, threads - 1, environments.
    environment_servers: pools that can step at a time.
    noise: deviation of a pool's step over its mean.
    inference: of an unroll's inference and gathering: 1, T, T x environments.
    inference_cores: cores at work meanwhile.
    exclusive: the share of it in which no other actor of its device gets on.
    update: of an update: 1, slots of a device, T.
    update_cores: cores at work meanwhile.
    hand_off: of parameters, once an update.
    num_cores: that there are.
    is_cpu: whether devices are cores: then acting never waits for learning.
  """

  environment: tuple[float, ...]
  environment_cores: tuple[float, ...]
  environment_servers: float
  noise: float
  inference: tuple[float, ...]
  inference_cores: float
  exclusive: float
  update: tuple[float, ...]
  update_cores: float
  hand_off: float
  num_cores: float
  is_cpu: bool


class Times(NamedTuple):
  """Seconds that a plan's parts take, alone on the machine.

  Attributes:
    environment: of a pool's step.
    environment_cores: at work meanwhile.
    inference: of all of an unroll.
    update: of an update.
  """

  environment: float
  environment_cores: float
  inference: float
  update: float


def _dot(coefficients: tuple[float, ...], *terms: float) -> float:
  return sum(c * x for c, x in zip(coefficients, terms, strict=True))


def fit(
  rows: Sequence[Sequence[float]], values: Sequence[float]
) -> tuple[float, ...]:
  """Coefficients, none negative, of `values = rows @ coefficients`.

  Args:
    rows: `[N, K]`, the terms.
    values: `[N]`; relative errors are squared, so that small ones count.

  Source: Lawson and Hanson 1974, Solving Least Squares Problems, chapter 23.
  """
  y = np.maximum(np.asarray(values, float), 1e-9)
  x = np.asarray(rows, float) / y[:, None]
  found, _ = optimize.nnls(x, np.ones(len(y)))
  return tuple(map(float, found))


def times(plan: Plan, costs: Costs) -> Times:
  """The seconds that the parts of a plan take by themselves."""
  envs, threads, length = plan.num_envs, plan.env_threads, plan.unroll_length
  used = min(threads, envs, max(1, math.floor(costs.num_cores)))
  environment = _dot(costs.environment, 1, used - 1, envs / used)
  cores = _dot(costs.environment_cores, 1, used - 1, envs)
  return Times(
    environment,
    min(used, cores / max(environment, 1e-9)),
    _dot(costs.inference, 1, length, length * envs),
    _dot(costs.update, 1, plan.batch / len(plan.learner_devices), length),
  )


class _Queue:
  """Items, and who waits to take or to add some."""

  def __init__(self, capacity: float = math.inf, items: int = 0):
    self.items = deque([0] * items)
    self.capacity = capacity
    self.takers: deque = deque()
    self.givers: deque = deque()


class Station:
  """Servers, first come first served."""

  def __init__(self, servers: float):
    self.free = servers
    self.waiting: deque = deque()
    self.busy_seconds = 0.0


_TAKE, _GIVE, _WORK = range(3)


class Simulation:
  """One plan's run; each actor and the learner are a generator of requests.

  Args:
    plan: how the host is used.
    costs: of its parts.
  """

  def __init__(self, plan: Plan, costs: Costs):
    self.plan, self.costs = plan, costs
    self.now, self.core_seconds = 0.0, 0.0
    self.num_updates, self.lags = 0, []
    self._jobs: list[list] = []  # Seconds left, cores, station, generator.
    self._ready: deque = deque()
    self._normal = random.Random(0).gauss
    self.environments = Station(costs.environment_servers)
    found = {*plan.actor_devices, *plan.learner_devices}
    stations = {i: Station(1) for i in found}
    self.actor_stations = [stations[i] for i in plan.actor_devices]
    self.learner_stations = [
      Station(1) if costs.is_cpu else stations[i] for i in plan.learner_devices
    ]
    num_actors, permits = (
      plan.num_actors,
      plan.unrolls_per_update * (plan.max_lag + 1),
    )
    if plan.deterministic:
      self._params = [_Queue(items=plan.max_lag + 1) for _ in range(num_actors)]
      self._unrolls = [_Queue(1) for _ in range(num_actors)]
    else:
      self._params, self._unrolls = [_Queue(items=permits)], [_Queue()]
    self._parts = times(plan, costs)
    for i in range(num_actors):
      self._ready.append((self._actor(i), None))
    self._ready.append((self._learner(), None))

  def _actor(self, i: int) -> Iterator:
    plan, costs, parts = self.plan, self.costs, self._parts
    # In few and longer steps: what waits for what is much the same.
    steps = min(plan.unroll_length, 8 if plan.num_actors <= 8 else 4)
    environment = parts.environment * plan.unroll_length / steps
    exclusive = parts.inference * costs.exclusive / steps
    free = parts.inference * (1 - costs.exclusive) / steps
    noise = costs.noise * math.sqrt(steps / plan.unroll_length)
    station = self.actor_stations[i // plan.threads]
    params = self._params[i % len(self._params)]
    unrolls = self._unrolls[i % len(self._unrolls)]
    while True:
      version = yield _TAKE, params
      if not plan.deterministic:
        version = self.num_updates
      for _ in range(steps):
        if free:
          yield _WORK, free, costs.inference_cores, None
        if exclusive:
          yield _WORK, exclusive, costs.inference_cores, station
        factor = math.exp(self._normal(-noise * noise / 2, noise))
        yield (
          _WORK,
          environment * factor,
          parts.environment_cores,
          (self.environments),
        )
      yield _GIVE, unrolls, version

  def _learner(self) -> Iterator:
    plan, costs, parts = self.plan, self.costs, self._parts
    while True:
      taken = 0
      while taken < plan.unrolls_per_update:
        version = yield _TAKE, self._unrolls[taken % len(self._unrolls)]
        if self.num_updates - version > plan.max_lag:
          yield _GIVE, self._params[0], 0
          continue
        self.lags.append(self.num_updates - version)
        taken += 1
      for station in self.learner_stations[1:]:
        station.busy_seconds += parts.update  # They work as the first does.
      yield _WORK, parts.update, costs.update_cores, self.learner_stations[0]
      if costs.hand_off:
        yield _WORK, costs.hand_off, 1.0, None
      self.num_updates += 1
      if plan.deterministic:
        for queue in self._params:
          yield _GIVE, queue, self.num_updates
      else:
        for _ in range(taken):
          yield _GIVE, self._params[0], 0

  def _begin(self, job: list) -> None:
    """Lets a job run, or wait for its station."""
    station = job[2]
    if station is not None:
      if station.free < 1:
        station.waiting.append(job)
        return
      station.free -= 1
      station.busy_seconds += job[0]
    self._jobs.append(job)

  def _resume(self) -> None:
    """Answers requests until all wait or work."""
    while self._ready:
      who, answer = self._ready.popleft()
      while True:
        request = who.send(answer)
        answer = None
        if request[0] == _WORK:
          self._begin([request[1], request[2], request[3], who])
          break
        queue = request[1]
        if request[0] == _TAKE:
          if not queue.items:
            queue.takers.append(who)
            break
          answer = queue.items.popleft()
          if queue.givers:
            giver, item = queue.givers.popleft()
            queue.items.append(item)
            self._ready.append((giver, None))
        elif queue.takers:
          self._ready.append((queue.takers.popleft(), request[2]))
        elif len(queue.items) >= queue.capacity:
          queue.givers.append((who, request[2]))
          break
        else:
          queue.items.append(request[2])

  def run(self, num_updates: int) -> None:
    """Runs until there were so many updates in all."""
    capacity = self.costs.num_cores
    while True:
      self._resume()
      if self.num_updates >= num_updates:
        return
      jobs = self._jobs
      asked = sum(job[1] for job in jobs)
      slow = asked / capacity
      if slow > 1:  # A job that partly sleeps is slowed in part.
        stretches = [1 + min(1.0, job[1]) * (slow - 1) for job in jobs]
        seconds = min(job[0] * x for job, x in zip(jobs, stretches))
      else:
        stretches, seconds = [1.0] * len(jobs), min(job[0] for job in jobs)
      self.now += seconds
      self.core_seconds += seconds * min(asked, capacity)
      still = []
      for job, stretch in zip(jobs, stretches):
        job[0] -= seconds / stretch
        if job[0] > 1e-12:
          still.append(job)
          if stretch > 1 and job[2] is not None:
            job[2].busy_seconds += seconds - seconds / stretch
          continue
        if stretch > 1 and job[2] is not None:
          job[2].busy_seconds += seconds - seconds / stretch
        self._ready.append((job[3], None))
        if job[2] is not None:
          job[2].free += 1
      self._jobs = still
      for _, _, station, _ in [job for job in jobs if job not in still]:
        if station is not None and station.waiting and station.free >= 1:
          self._begin(station.waiting.popleft())
