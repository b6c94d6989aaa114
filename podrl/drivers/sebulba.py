"""Sebulba: actor threads step environments on the host; a learner uses devices.

Each actor has a thread. The learner joins unrolls on the batch axis and calls
`Learner.update`. Source: Hessel et al. 2021, arXiv:2104.06272, section 4.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
import dataclasses
import itertools
import math
import threading
import time
from typing import Any

import chex
import jax
import numpy as np

from podrl import types
from podrl.drivers import culprits, info, spmd
from podrl.drivers.actor import Actor, ActorHangs, Unroll, make_actor_functions
from podrl.drivers.exchange import Asynchronous, Closed, Deterministic, Monitor
from podrl.drivers.limits import System, find_limit, workload_ratio
from podrl.drivers.stages import PARKED, Stages, leave_out_parked, num_cores
from podrl.drivers.tuner import Tuner
from podrl.fields import SECONDS, Field, Range

_FEW, _INDICES = Range(0, 1024), Range(0, 255)
# The host starts a program for each slice of an update, so slices take at least
# this time. To step environments usually takes an actor longer.
_SLICE_SECONDS = 0.005

FIELDS = {
  'sebulba.actor_devices': Field(
    (), 'Indices of devices; empty means the first quarter.', _INDICES
  ),
  'sebulba.learner_devices': Field(
    (), 'Indices of devices; empty means all others.', _INDICES
  ),
  'sebulba.threads_per_actor_device': Field(
    0,
    'Actors per actor device (with autotune, the maximum); 0 means automatic.',
    _FEW,
  ),
  'sebulba.env_threads': Field(
    0, 'Environment threads per actor; 0 means automatic.', _FEW
  ),
  'sebulba.unrolls_per_update': Field(
    0, 'Unrolls that an update learns from; 0 means one per actor.', _FEW
  ),
  'sebulba.mode': Field(
    'deterministic',
    'Deterministic runs are reproducible; asynchronous runs suit actors of '
    'unequal speed.',
    ('deterministic', 'asynchronous'),
  ),
  'sebulba.max_lag': Field(
    1, 'The largest policy lag, in updates; a replay memory accepts more.', _FEW
  ),
  'sebulba.autotune': Field(
    False, 'Searches for the fastest number of actors during the run.'
  ),
  'sebulba.hang_seconds': Field(
    300.0,
    'Seconds without progress after which an actor counts as hanging.',
    SECONDS,
  ),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """How Sebulba uses a host."""

  num_envs: int  # Per actor; a multiple of the number of learner devices.
  unroll_length: int  # T, steps of an unroll.
  actors_per_device: int  # Actor threads for each actor device.
  unrolls_per_update: int  # Unrolls that one update learns from.
  deterministic: bool  # Whether the mode is deterministic, not asynchronous.
  max_lag: int  # The largest policy lag, in updates; see `Sebulba._take`.
  hang_seconds: float  # An actor that stays in one stage for longer hangs.
  first_env: int = 0  # Global index of this host's first environment.
  # Threads that step the environments of each actor. The driver uses this only
  # to find what limits the run.
  env_threads: int = 1
  autotune: bool = False  # See `Tuner`; this needs the asynchronous mode.
  keeps_episodes: bool = False  # Whether reports have `finished`.
  # Whether the update is split into `Learner.parts`, so that actors can use the
  # device between them.
  is_sliced: bool = False


def _call(thread: ThreadPoolExecutor, function: Callable, *args: Any) -> Any:
  """Runs a function in an actor's thread, and returns its result.

  Only the main thread may set Python's handlers of signals. If the function's
  environments do so, it runs here.
  """
  try:
    return thread.submit(function, *args).result()
  except Exception as error:
    if 'main thread' not in str(error):
      raise
  return function(*args)


@dataclasses.dataclass
class Sebulba:
  """Sebulba's `Driver`: runs the threads, the hand-off and the learner."""

  make_env: Callable[[int], types.HostEnv]  # Makes the environments of actor i.
  agent: types.Agent
  core: types.Learner  # The functions of the learner.
  mesh: spmd.Mesh  # The mesh of the learner devices.
  actor_devices: Sequence[jax.Device]
  settings: Settings
  rng_key: chex.PRNGKey  # Key of the whole run.
  # Values that replace those of `Agent.init`, by name.
  hyperparams: types.Hyperparams = dataclasses.field(default_factory=dict)
  error: BaseException | None = None  # Error of an actor or the learner.
  state: Any = None  # A LearnerState; `start` sets it.

  def __post_init__(self):
    settings, mesh = self.settings, self.mesh
    self._init_key, self._update_key, self._act_key = (
      jax.random.fold_in(self.rng_key, stream) for stream in range(3)
    )
    self._num_actors = len(self.actor_devices) * settings.actors_per_device
    self._num_active = self._num_actors  # The other actors are parked.
    self._num_slices = 1  # Slices of an update's optimiser steps.
    self._update_seconds = 0.0  # Of an update, in the last `advance`.
    self._parking = Monitor()
    unrolls, max_lag = settings.unrolls_per_update, settings.max_lag
    self._exchange: Deterministic | Asynchronous = (
      Deterministic(self._num_actors, max_lag)
      if settings.deterministic
      else Asynchronous(unrolls, max_lag)
    )
    self._tuner: Tuner | None = None  # `start` sets it if autotune is on.
    self._system = System(
      platform=self.actor_devices[0].platform,
      num_cores=num_cores(),
      num_actors=self._num_actors,
      env_threads=settings.env_threads,
      actor_devices=tuple(x.id for x in self.actor_devices),
      learner_devices=tuple(x.id for x in mesh.local_devices),
      unrolls_per_update=unrolls,
      max_lag=max_lag,
      is_deterministic=settings.deterministic,
      num_processes=jax.process_count(),
    )
    self._actors: list[Actor] = []
    # An actor's thread makes, resets, steps and closes its environments:
    # databases, OpenGL and others work only in the thread that made them.
    self._threads: list[ThreadPoolExecutor] = []
    self._acting: list[Future] = []  # Each is done when its actor has ended.
    self._stopper: threading.Thread | None = None
    # The first culprit; its update may still have had a finite loss.
    self._culprit: types.Culprit | None = None
    self._num_updates = self._num_dropped = self._num_waits = 0
    # The number of unrolls of each actor, dropped ones included.
    self._num_unrolls = [0] * self._num_actors
    self._stages = Stages(self.actor_devices, mesh.local_devices, num_cores())
    self._end_seconds = time.perf_counter()  # End of the last `advance`.

  @property
  def learner_state(self) -> types.LearnerState | None:
    """Returns `state`, which does not contain the environments."""
    return self.state

  def progress(self) -> dict[str, Any]:
    """Returns what a resumed run needs in addition to the state."""
    return {
      'num_unrolls': [*self._num_unrolls],
      'num_dropped': self._num_dropped,
      'num_waits': self._count_waits(),
      'num_actors': self._tuner.best if self._tuner else self._num_active,
      'culprit': self._culprit,
    }

  def _count_waits(self) -> int:
    return self._num_waits + sum(actor.num_waits for actor in self._actors)

  def plan(self) -> dict[str, Any]:
    """Returns the number of actors per process, and of slices per update.

    The other actors are parked.
    """
    tuner, parts = self._tuner, self.core.parts
    num_slices = int(self._update_seconds / _SLICE_SECONDS)
    num_slices = min(num_slices, parts.num_steps if parts else 1)
    return {
      'num_actors': tuner.num_actors if tuner else self._num_active,
      'num_slices': max(1, num_slices),
    }

  def describe(self, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what limits the run, and its `workload_ratio`."""
    if 'busy_cores' not in record:
      return {}
    name, sentence = find_limit(record, self._system)
    found: dict[str, Any] = {'limit': name, 'limit_sentence': sentence}
    ratio = workload_ratio(record, self._system)
    if ratio is not None:
      found['cpu_seconds_per_device_second'] = ratio
    return found

  def start(self, restore: types.Restore = lambda state: (state, [])) -> None:
    """Makes the environments, compiles, and starts the actors."""
    settings, mesh = self.settings, self.mesh
    devices, functions = list(mesh.local_devices), None
    length, key = settings.unroll_length, self._act_key
    for index in range(self._num_actors):
      name = f'podrl-actor-{index}'
      self._threads.append(ThreadPoolExecutor(1, thread_name_prefix=name))
      env = _call(self._threads[index], self.make_env, index)
      device = self.actor_devices[index // settings.actors_per_device]
      functions = functions or make_actor_functions(
        self.agent, env.spec.observe, len(devices), env.xla and env.xla.step
      )
      first_env = settings.first_env + index * settings.num_envs
      clock = self._stages.clocks[device]
      actor = Actor(
        index, env, functions, length, device, devices, key, first_env, clock
      )
      self._actors.append(actor)
    agent, learner = self.agent, self.core

    def init(key, hyperparams):
      return agent.init(key).with_hyperparams(hyperparams)

    variables = spmd.call_in_order(init, self._init_key, self.hyperparams)
    # Place the variables as in training, so that actors compile only once.
    variables = spmd.place(variables, mesh, spmd.REPLICATED)
    for actor, thread in zip(self._actors, self._threads):
      own = spmd.to_device(variables, actor.device)
      shards = _call(thread, actor.start, own)
    example = spmd.join_shards(shards, mesh, spmd.TRAJECTORY)
    unrolls = settings.unrolls_per_update
    shape = jax.eval_shape(lambda: spmd.join_unrolls([shards[0]] * unrolls))

    def init_rest(key):
      whole: Any = learner.init(key, shape)
      return whole._replace(variables=())

    state = spmd.init_learner(init_rest, learner, mesh, self._init_key)
    self.state, saved = restore(state._replace(variables=variables))
    if saved:
      self._resume(saved)
    self._update_key = spmd.place(self._update_key, mesh, spmd.REPLICATED)
    inputs = self._inputs((example,) * settings.unrolls_per_update)
    lowered = spmd.lower_update(self.core, mesh, inputs, settings.is_sliced)
    self._programs = {name: x.compile() for name, x in lowered.items()}
    try:
      if settings.autotune:
        self._tuner = self._make_tuner(saved[0]['num_actors'] if saved else 1)
        self._num_active = self._tuner.num_actors
      self._publish()
    except Closed:
      return  # A signal ended the run.
    for actor, thread in zip(self._actors, self._threads):
      self._acting.append(thread.submit(self._run_actor, actor))

  def _inputs(self, trajectories: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of one update; see `spmd.map_update`."""
    rest = self.state._replace(variables=())
    return self.state.variables, rest, trajectories, self._update_key

  def _update(self, trajectories: tuple[Any, ...]) -> tuple[Any, types.Metrics]:
    """Runs one update; returns the learner's state, and the metrics."""
    inputs, parts = self._inputs(trajectories), self.core.parts
    if 'update' in self._programs or parts is None:
      return jax.block_until_ready(self._programs['update'](*inputs))
    begin, steps, end = self._programs.values()
    state, work, means = begin(*inputs)
    bounds = np.linspace(0, parts.num_steps, self._num_slices + 1)
    for first, last in itertools.pairwise(bounds.astype(np.int32)):
      # An actor that chooses actions now waits only until the slice has ended.
      state, means = jax.block_until_ready(
        steps(state, work, means, first, last)
      )
    return jax.block_until_ready(end(state, means))

  def _make_tuner(self, num_actors: int) -> Tuner:
    """Makes a tuner; only the tuner of process 0 decides."""
    settings = self.settings
    unrolls = settings.unrolls_per_update
    # More actors than permits gain nothing: some would always wait.
    max_actors = min(self._num_actors, unrolls * (settings.max_lag + 1))
    samples = settings.unroll_length * settings.num_envs * unrolls
    samples *= jax.process_count()
    return Tuner(max_actors, samples, unrolls, num_actors)

  def _resume(self, saved: list[dict[str, Any]]) -> None:
    """Restores what `progress` returned in each process of the saved run."""
    self._num_updates = int(self.state.num_updates)
    for culprit in filter(None, [x.get('culprit') for x in saved]):
      self._culprit = self._culprit or types.Culprit(*culprit)
    if len(saved) == jax.process_count():
      saved = [saved[jax.process_index()]]
    elif jax.process_index():  # Only process 0 adds the saved counts.
      saved = [x | {'num_dropped': 0, 'num_waits': 0} for x in saved]
    self._num_dropped = sum(x['num_dropped'] for x in saved)
    self._num_waits = sum(x['num_waits'] for x in saved)
    unrolls = [number for x in saved for number in x['num_unrolls']]
    if len(unrolls) != self._num_actors:  # The number of actors has changed.
      unrolls = [max(unrolls)] * self._num_actors
    for actor, num_unrolls in zip(self._actors, unrolls):
      actor.skip(num_unrolls)
    self._num_unrolls = unrolls

  def _publish(self) -> None:
    """Copies the variables to the actor devices, and gives them to actors."""
    # Devices that also learn need no copy: variables are never donated.
    variables = self.state.variables
    copies = {
      device: jax.block_until_ready(spmd.to_device(variables, device))
      for device in self.actor_devices
    }
    self._exchange.publish(copies, self._num_updates)

  def _run_actor(self, actor: Actor) -> None:
    """Acts until the exchange is closed; runs in the actor's thread."""
    # Each device gets about the same number of parked actors.
    device, turn = divmod(actor.index, self.settings.actors_per_device)
    place = turn * len(self.actor_devices) + device
    try:
      while True:
        if place >= self._num_active:
          actor.enter(PARKED)
          with self._parking.when(lambda: place < self._num_active):
            pass
          actor.enter('actor_waiting')
        variables, version, waited = self._exchange.fetch(actor.index)
        actor.num_waits += waited
        unroll = actor.unroll(variables[actor.device], version)
        actor.enter('actor_waiting')
        self._exchange.put(actor.index, unroll)
    except Closed:
      pass
    except BaseException as error:  # The main thread raises it again.
      self.error = self.error or error
      self._stop()
    finally:
      actor.enter('actor_waiting')

  def _check_hangs(self) -> None:
    for actor in self._actors:
      if sentence := actor.hang(self.settings.hang_seconds):
        raise ActorHangs(sentence)

  def _take(self) -> tuple[list[Unroll], list[Unroll]]:
    """Returns the unrolls for an update, and the unrolls with too much lag.

    A learner with a memory takes all unrolls: the steps that it learns from are
    much older, and without an unroll the sequences of its actor would break.
    """
    max_lag = math.inf if self.state.memory else self.settings.max_lag
    taken: list[Unroll] = []
    dropped: list[Unroll] = []
    timeout_seconds = min(1.0, self.settings.hang_seconds / 2)
    while len(taken) < self.settings.unrolls_per_update:
      try:
        unroll = self._exchange.take(len(taken), timeout_seconds)
      except TimeoutError:
        self._check_hangs()
        continue
      if self._num_updates - unroll.version > max_lag:
        dropped.append(unroll)
        self._exchange.release(1)
      else:
        taken.append(unroll)
    return taken, dropped

  def _learn(self) -> tuple[dict, dict, types.Episodes, dict, Any] | None:
    """Runs one update; returns fields of a `Report`.

    They are `metrics`, `own`, `episodes`, `info` and, as arrays, the returns
    and lengths of `finished`. The result is None if the loss is not finite.
    """
    spend = self._stages.spend
    self._check_hangs()
    queue_depth = self._exchange.depth()
    taken, dropped = self._take()
    spend('learner_waiting')
    # Without `Blocks`, a memory joins only the unrolls of the same column.
    taken.sort(key=lambda unroll: unroll.actor)
    lags = [self._num_updates - unroll.version for unroll in taken]
    trajectories = tuple(
      spmd.join_shards(unroll.shards, self.mesh, spmd.TRAJECTORY)
      for unroll in taken
    )
    with self._stages.updating():
      self.state, metrics = self._update(trajectories)
    spend('update')
    metrics = spmd.fetch(metrics)
    is_finite = bool(np.isfinite(metrics['loss']))
    for unroll in taken:
      self._culprit = self._culprit or culprits.find_culprit(
        unroll.largest, unroll.first_env, not is_finite
      )
    if not is_finite:
      return None
    self._num_updates += 1
    self._num_dropped += len(dropped)
    unrolls = taken + dropped
    for unroll in unrolls:
      self._num_unrolls[unroll.actor] += 1
    own = {
      'policy_lag': np.mean(lags),
      'policy_lag_max': max(lags),
      'queue_depth': queue_depth,
      'num_actors': self._num_active,
      'num_unrolls_dropped': self._num_dropped,
      'num_actor_waits': self._count_waits(),
    }
    sizes = [culprits.largest_observation(x.largest) for x in taken]
    own |= {k: max(x[k] for x in sizes) for k in sizes[0]}
    returns, lengths = map(np.concatenate, zip(*(u.finished for u in unrolls)))
    number = np.asarray(len(returns))
    episodes = types.Episodes(number, returns.sum(), lengths.sum())
    infos = info.add_up(u.info for u in unrolls)
    return metrics, own, episodes, infos, (returns, lengths)

  def advance(
    self, num_updates: int, plan: Mapping[str, Any] | None = None
  ) -> list[types.Report]:
    """Runs `num_updates` updates, or fewer after `stop`; returns one report.

    Args:
      plan: what `plan` returned in process 0; None changes nothing.

    Raises:
      ActorHangs: if an actor stays in one stage longer than `hang_seconds`.
      BaseException: the error of an actor or of the learner.
    """
    settings = self.settings
    start, stages = self._stages.begin(), self._measure_stages()
    num_unrolls = sum(self._num_unrolls)
    rows: list[tuple[dict, dict, types.Episodes]] = []
    infos: list[dict] = []
    finished: list[tuple[int, float, int]] = []
    is_finite = True
    try:
      if plan:
        with self._parking.when():
          self._num_active = plan['num_actors']
        self._num_slices = plan['num_slices']
      while len(rows) < num_updates:
        row = self._learn()
        if row is None:
          is_finite = False
          break
        rows.append(row[:3])
        infos.append(row[3])
        if settings.keeps_episodes:
          columns = (x.tolist() for x in row[4])
          finished += [(len(infos) - 1, *x) for x in zip(*columns)]
        self._publish()
        self._exchange.release(settings.unrolls_per_update)
        self._stages.spend('hand_off')
    except Closed:
      self._stages.spend('learner_waiting')
    except Exception as error:
      self.error = self.error or error
      self._stop()
    if self.error and not rows:  # Return rows first: the next call raises.
      raise self.error
    spent = {k: x - stages[k] for k, x in self._measure_stages().items()}
    num_unrolls = sum(self._num_unrolls) - num_unrolls
    num_steps = num_unrolls * settings.unroll_length * settings.num_envs
    end = time.perf_counter()
    decisions = []
    if self._tuner and rows:
      pause = start - self._end_seconds
      depth = rows[-1][1]['queue_depth']
      self._tuner.observe(end - start, len(rows), depth, pause)
      decisions = [x._asdict() for x in self._tuner.take_decisions()]
    self._end_seconds = end
    stacked: Any = ({}, {}, types.Episodes(*np.zeros((3, 0))))
    if rows:
      self._update_seconds = spent['time_update'] / len(rows)
      stacked = jax.tree.map(lambda *x: np.asarray(x), *rows)
    metrics, own, episodes = stacked
    seconds, spent = end - start, leave_out_parked(spent)
    report = types.Report(
      metrics, episodes, num_steps, seconds, is_finite, spent, own, decisions
    )
    report = report._replace(info=info.to_columns(infos), finished=finished)
    return [report if is_finite else report._replace(culprit=self._culprit)]

  def _measure_stages(self) -> dict[str, float]:
    return self._stages.seconds([actor.seconds() for actor in self._actors])

  def stop(self) -> None:
    """Wakes and ends all threads; a signal handler may call `stop`."""
    # This needs a new thread: a signal handler may interrupt a thread that
    # holds a lock, or one that is about to wait and would miss the wake-up.
    self._stopper = threading.Thread(target=self._stop, name='podrl-stop')
    self._stopper.start()

  def _stop(self) -> None:
    self._exchange.close()
    self._parking.close()
    for actor in self._actors:
      actor.is_stopped = True

  def close(self) -> list[str]:
    """Ends threads and frees environments; returns names of hanging actors."""
    self._stop()
    if self._stopper:
      self._stopper.join()
    hang_seconds = self.settings.hang_seconds
    hanging = []
    for actor, acting in zip(self._actors, self._acting):
      while not acting.done() and actor.name not in hanging:
        wait([acting], min(1.0, hang_seconds))
        if actor.hang(hang_seconds):
          hanging.append(actor.name)
    for actor, thread in zip(self._actors, self._threads):
      if actor.name not in hanging:
        thread.submit(actor.close).result()
    for index, thread in enumerate(self._threads):
      thread.shutdown(wait=f'podrl-actor-{index}' not in hanging)
    return hanging
