"""Sebulba: actor threads on the host feed a learner on accelerators.

Hessel et al. 2021, arXiv:2104.06272, section 4. Each actor has a thread; the
learner joins unrolls on the batch axis and calls `Learner.update`, as Anakin.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import threading
import time
from typing import Any

import chex
import jax
import numpy as np

from podrl.drivers import spmd
from podrl.drivers.actor import (
  PARKED,
  Actor,
  Unroll,
  check_hangs,
  make_actor_functions,
)
from podrl.drivers.exchange import Asynchronous, Closed, Deterministic, Gate
from podrl.drivers.limits import System, find_limit, workload_ratio
from podrl.drivers.stages import Stages, leave_out_parked, num_cores
from podrl.drivers.tuner import Tuner
from podrl.types import (
  Agent,
  Episodes,
  HostEnv,
  Learner,
  LearnerState,
  Metrics,
  Report,
  Restore,
)

_LEARNER_STREAM, _UPDATE_STREAM, _ACT_STREAM = range(3)


@dataclasses.dataclass(frozen=True)
class Settings:
  """How Sebulba uses a host.

  Attributes:
    num_envs: environments of each actor; the learner devices divide it.
    unroll_length: T, steps of an unroll.
    actors_per_device: threads for each actor device.
    unrolls_per_update: unrolls that one update learns from.
    deterministic: whether the mode is deterministic instead of asynchronous.
    max_lag: the most calls of `update` between the parameters that acted and
      those that learn.
    hang_seconds: an actor hangs if one call of it takes longer than this.
    first_env: global index of this host's first environment.
    env_threads: threads that step each actor's environments; only used to say
      what limits the run.
    autotune: whether the driver tunes the number of actors that act; the mode
      must be asynchronous.
  """

  num_envs: int
  unroll_length: int
  actors_per_device: int
  unrolls_per_update: int
  deterministic: bool
  max_lag: int
  hang_seconds: float
  first_env: int = 0
  env_threads: int = 1
  autotune: bool = False


class Sebulba:
  """The driver: owns the threads, the hand-off and the learner's loop.

  Args:
    make_env: `(actor's index) -> HostEnv`, a pool of `settings.num_envs`.
    agent: chooses actions.
    learner: of that agent.
    mesh: of the learner devices.
    actor_devices: each serves `settings.actors_per_device` threads.
    settings: how the host is used.
    rng_key: of the whole run.
  """

  def __init__(
    self,
    make_env: Callable[[int], HostEnv],
    agent: Agent,
    learner: Learner,
    mesh: spmd.Mesh,
    actor_devices: Sequence[jax.Device],
    settings: Settings,
    rng_key: chex.PRNGKey,
  ):
    self._make_env = make_env
    self._agent = agent
    self._learner = learner
    self._mesh = mesh
    self._actor_devices = list(actor_devices)
    self._settings = settings
    self._init_key, self._update_key, self._act_key = (
      jax.random.fold_in(rng_key, stream)
      for stream in (_LEARNER_STREAM, _UPDATE_STREAM, _ACT_STREAM)
    )
    self._num_actors = len(self._actor_devices) * settings.actors_per_device
    self._exchange = (
      Deterministic(self._num_actors, settings.max_lag)
      if settings.deterministic
      else Asynchronous(settings.unrolls_per_update, settings.max_lag)
    )
    self._gate = Gate(self._num_actors)
    # Each process has a tuner; only that of process 0 makes the plan.
    self._tuner = (
      Tuner(
        # One actor more than there are permits could only wait.
        min(
          self._num_actors,
          settings.unrolls_per_update * (settings.max_lag + 1),
        ),
        settings.unroll_length
        * settings.num_envs
        * settings.unrolls_per_update
        * jax.process_count(),
        settings.unrolls_per_update,
      )
      if settings.autotune
      else None
    )
    self._system = System(
      platform=self._actor_devices[0].platform,
      num_cores=num_cores(),
      num_actors=self._num_actors,
      env_threads=settings.env_threads,
      actor_devices=tuple(x.id for x in self._actor_devices),
      learner_devices=tuple(x.id for x in mesh.local_devices),
      unrolls_per_update=settings.unrolls_per_update,
      max_lag=settings.max_lag,
      is_deterministic=settings.deterministic,
      num_processes=jax.process_count(),
    )
    self._actors: list[Actor] = []
    self._threads: list[threading.Thread] = []
    self.error: BaseException | None = None  # What ended an actor, or learning.
    self._stopper: threading.Thread | None = None
    self._update = self._state = None  # Until `start`.
    self._num_updates = self._num_dropped = self._num_waits = 0
    self._num_unrolls = [0] * self._num_actors  # Learnt or dropped, of each.
    self._stages = Stages(self._actor_devices, mesh.local_devices, num_cores())
    self._end_seconds = time.perf_counter()  # Of the last call of `advance`.

  @property
  def learner(self) -> LearnerState | None:
    """The learner's state, once started."""
    return self._state

  state = learner  # A checkpoint cannot store the environments.

  def progress(self) -> dict[str, Any]:
    """Returns what a resumed run needs beside the state."""
    return {
      'num_unrolls': [*self._num_unrolls],
      'num_dropped': self._num_dropped,
      'num_waits': self._count_waits(),
      'num_actors': self._tuner.best if self._tuner else self._gate.num_open,
    }

  def _count_waits(self) -> int:
    return self._num_waits + sum(actor.num_waits for actor in self._actors)

  def plan(self) -> dict[str, Any]:
    """Returns the number of actors of each process that should act."""
    return {
      'num_actors': self._tuner.num_actors
      if self._tuner
      else self._gate.num_open
    }

  def describe(self, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what limits the run, and the CPU time that a device needs."""
    if 'busy_cores' not in record:
      return {}
    limit = find_limit(record, self._system)
    ratio = workload_ratio(record, self._system)
    return {'limit': limit.name, 'limit_sentence': limit.sentence} | (
      {} if ratio is None else {'cpu_seconds_per_device_second': ratio}
    )

  def start(self, restore: Restore = lambda state: (state, [])) -> None:
    """Makes the environments, compiles, and starts the actors."""
    settings, devices = self._settings, list(self._mesh.local_devices)
    functions = None
    for index in range(self._num_actors):
      env = self._make_env(index)
      device = self._actor_devices[index // settings.actors_per_device]
      functions = functions or make_actor_functions(
        self._agent, env.observe, len(devices)
      )
      self._actors.append(
        Actor(
          index,
          env,
          functions,
          settings.unroll_length,
          device,
          devices,
          self._act_key,
          settings.first_env + index * settings.num_envs,
          self._stages.clocks[device],
        )
      )
    params = spmd.place(  # As those that actors will get.
      jax.jit(self._agent.init)(self._init_key), self._mesh, spmd.REPLICATED
    )
    for actor in self._actors:
      shards = actor.compile(spmd.to_device(params, actor.device))
    example = spmd.join_shards(shards, self._mesh, spmd.TRAJECTORY)
    shape = jax.eval_shape(lambda: example)
    state = jax.jit(lambda key: self._learner.init(key, shape))(self._init_key)
    self._state, saved = restore(
      spmd.place(state, self._mesh, spmd.LEARNER_STATE)
    )
    if saved:
      self._resume(saved)
    if self._tuner:
      self._tuner.begin(saved[0]['num_actors'] if saved else 1)
      self._gate.open(self._tuner.num_actors)
    self._update_key = spmd.place(self._update_key, self._mesh, spmd.REPLICATED)
    self._update = (
      spmd.map_update(self._learner, self._mesh)
      .lower(
        self._state.params,
        self._state._replace(params=()),
        (example,) * settings.unrolls_per_update,
        self._update_key,
      )
      .compile()
    )
    try:
      self._publish()
    except Closed:
      return  # A signal came.
    for actor in self._actors:
      thread = threading.Thread(
        target=self._run_actor, args=(actor,), name=actor.name
      )
      self._threads.append(thread)
      thread.start()

  def _resume(self, saved: list[dict[str, Any]]) -> None:
    """Takes over what `progress` returned in each process of the run."""
    self._num_updates = int(self._state.num_updates)
    process = jax.process_index()
    if len(saved) == jax.process_count():
      saved = [saved[process]]
      process = 0
    if process == 0:  # If the number of processes changed, it keeps all counts.
      self._num_dropped = sum(x['num_dropped'] for x in saved)
      self._num_waits = sum(x['num_waits'] for x in saved)
    unrolls = [number for x in saved for number in x['num_unrolls']]
    if len(unrolls) != self._num_actors:  # On other devices.
      unrolls = [max(unrolls)] * self._num_actors
    for actor, num_unrolls in zip(self._actors, unrolls):
      actor.skip(num_unrolls)
    self._num_unrolls = unrolls

  def _publish(self) -> None:
    """Hands the parameters, ready for use, to the actors."""
    # Not copied where a device learns and acts: parameters are not donated.
    self._exchange.publish(
      {
        device: jax.block_until_ready(
          spmd.to_device(self._state.params, device)
        )
        for device in self._actor_devices
      },
      self._num_updates,
    )

  def _run_actor(self, actor: Actor) -> None:
    """An actor's thread."""
    device, turn = divmod(actor.index, self._settings.actors_per_device)
    place = turn * len(self._actor_devices) + device
    try:
      while True:
        if place >= self._gate.num_open:
          actor.enter(PARKED)
          self._gate.wait(place)
          actor.enter('actor_waiting')
        params, version, waited = self._exchange.fetch(actor.index)
        actor.num_waits += waited
        unroll = actor.unroll(params[actor.device], version)
        actor.enter('actor_waiting')
        self._exchange.put(actor.index, unroll)
    except Closed:
      pass
    except BaseException as error:  # Raised again in the main thread.
      self.error = self.error or error
      self._stop()
    finally:
      actor.enter('actor_waiting')

  def _take(self) -> tuple[list[Unroll], list[Unroll]]:
    """The unrolls of one update, and those that were too stale for it."""
    taken, dropped = [], []
    while len(taken) < self._settings.unrolls_per_update:
      try:
        unroll = self._exchange.take(
          len(taken), min(1.0, self._settings.hang_seconds / 2)
        )
      except TimeoutError:
        check_hangs(self._actors, self._settings.hang_seconds)
        continue
      if self._num_updates - unroll.version > self._settings.max_lag:
        dropped.append(unroll)
        self._exchange.release(1)
      else:
        taken.append(unroll)
    return taken, dropped

  def advance(
    self, num_updates: int, plan: Mapping[str, Any] | None = None
  ) -> list[Report]:
    """Runs `num_updates` updates, or fewer if it is stopped; one report.

    Args:
      num_updates: number of updates.
      plan: what `plan` returned in process 0; None changes nothing.

    Raises:
      ActorHangs: where an actor has not come back for `hang_seconds`.
      BaseException: what an actor raised, or the learner.
    """
    if plan:
      self._gate.open(plan['num_actors'])
    start, before = self._stages.begin(), self._stages.seconds(self._actors)
    rows, own, episodes, num_unrolls, is_finite = [], [], [], 0, True
    spend = self._stages.spend
    try:
      while is_finite and len(rows) < num_updates:
        check_hangs(self._actors, self._settings.hang_seconds)
        queue_depth = self._exchange.depth()
        taken, dropped = self._take()
        spend('learner_waiting')
        lags = [self._num_updates - u.version for u in taken]
        trajectories = tuple(
          spmd.join_shards(u.shards, self._mesh, spmd.TRAJECTORY) for u in taken
        )
        with self._stages.updating():
          self._state, metrics = jax.block_until_ready(
            self._update(
              self._state.params,
              self._state._replace(params=()),
              trajectories,
              self._update_key,
            )
          )
        spend('update')
        metrics = spmd.fetch(metrics)
        is_finite = bool(np.isfinite(metrics['loss']))
        if is_finite:
          self._num_updates += 1
          self._num_dropped += len(dropped)
          for unroll in taken + dropped:
            self._num_unrolls[unroll.actor] += 1
          num_unrolls += len(taken) + len(dropped)
          episodes.append(
            jax.tree.map(
              lambda *x: sum(x), *(u.episodes for u in taken + dropped)
            )
          )
          rows.append(metrics)
          own.append(
            {
              'policy_lag': np.mean(lags),
              'policy_lag_max': max(lags),
              'queue_depth': queue_depth,
              'num_actors': self._gate.num_open,
              'num_unrolls_dropped': self._num_dropped,
              'num_actor_waits': self._count_waits(),
            }
          )
          self._publish()
          self._exchange.release(len(taken))
          spend('hand_off')
    except Closed:
      spend('learner_waiting')
    except Exception as error:
      self.error = self.error or error
      self._stop()
    if self.error and not rows:  # With rows the next call comes here again.
      raise self.error
    stages = self._stages.seconds(self._actors)

    def columns(rows: list[Metrics]) -> Metrics:
      return jax.tree.map(lambda *x: np.asarray(x), *rows) if rows else {}

    end = time.perf_counter()
    decisions = []
    if self._tuner and rows:
      self._tuner.observe(
        end - start,
        len(rows),
        own[-1]['queue_depth'],
        start - self._end_seconds,
      )
      decisions = [x._asdict() for x in self._tuner.take_decisions()]
    self._end_seconds = end
    return [
      Report(
        columns(rows),
        Episodes(*np.reshape(episodes, (-1, len(Episodes._fields))).T),
        num_unrolls * self._settings.unroll_length * self._settings.num_envs,
        end - start,
        is_finite,
        leave_out_parked({k: stages[k] - before[k] for k in stages}),
        columns(own),
        decisions,
      )
    ]

  def stop(self) -> None:
    """Wakes and ends all threads; a signal handler may call it."""
    # In a thread: a handler runs in the middle of its own, which may be about
    # to wait, and would miss the call that should wake it.
    self._stopper = threading.Thread(target=self._stop, name='podrl-stop')
    self._stopper.start()

  def _stop(self) -> None:
    self._exchange.close()
    self._gate.close()
    for actor in self._actors:
      actor.is_stopped = True

  def close(self) -> list[str]:
    """Ends the threads, frees the environments; names the threads that hang."""
    self._stop()
    if self._stopper:
      self._stopper.join()
    hanging = []
    for actor, thread in zip(self._actors, self._threads):
      while thread.is_alive() and actor.name not in hanging:
        thread.join(min(1.0, self._settings.hang_seconds))
        if actor.hangs(self._settings.hang_seconds):
          hanging.append(actor.name)
    for actor in self._actors:
      if actor.name not in hanging:
        actor.close()
    return hanging
