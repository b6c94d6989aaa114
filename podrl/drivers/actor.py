"""An actor of Sebulba: parameters in, trajectory out.

It steps a pool of environments on the host, chooses actions on one device and
gathers the unroll there. It runs programs of that device alone.
"""

from collections.abc import Callable, Sequence
import functools
import time
import traceback
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.drivers.exchange import Busy, Closed
from podrl.types import (
  Agent,
  Array,
  Episodes,
  HostEnv,
  TimeStep,
  Trajectory,
  Tree,
)

STAGES = ('environment', 'inference', 'actor_waiting')
PARKED = 'parked'  # A further stage, of an actor that is not to act.

_STACKED = 32  # Rows that one program stacks.


class ActorHangs(RuntimeError):
  """An actor has not come back from a call for too long."""


class Row(NamedTuple):
  """One step of an unroll, on the actor's device, `[B, ...]`."""

  obs: Tree
  action: Array
  extras: Tree


class Unroll(NamedTuple):
  """What an actor hands on.

  Attributes:
    shards: a `Trajectory` for each learner device, on it.
    version: of the parameters that acted.
    episodes: that ended during it.
    actor: its index.
  """

  shards: list[Trajectory]
  version: int
  episodes: Episodes
  actor: int


class ActorFunctions(NamedTuple):
  """The compiled part of an actor, on one device.

  Attributes:
    initial_carry: the agent's.
    step: `(params, keys, num_steps, timestep, carry) -> (Row, carry)`;
      `num_steps` counts an environment's actions. One dispatch a step.
    stack: `(rows) -> Row`, `[N, B, ...]`.
    finish: `(stacks, timesteps, carry) -> [Trajectory]`, a shard for each
      learner device, of the stacks of T rows. `timesteps` has the rewards,
      discounts and first steps `[T+1, B]` of the unroll, but of observations
      only the last.
  """

  initial_carry: Callable[[int], Tree]
  step: Callable[..., tuple[Row, Tree]]
  stack: Callable[[list[Row]], Row]
  finish: Callable[[list[Row], TimeStep, Tree], list[Trajectory]]


def make_actor_functions(
  agent: Agent, observe: Callable[[Tree], Tree], num_shards: int
) -> ActorFunctions:
  """Compiles acting and gathering.

  Args:
    agent: chooses actions.
    observe: of the `HostEnv`.
    num_shards: into which the batch is split.
  """
  fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))

  # On a CPU a program stays in the thread that calls it, instead of waiting in
  # others behind the learner's, if it runs in a fixed order and donates nothing.
  options = (
    {}
    if jax.default_backend() != 'cpu'
    else {'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}
  )

  # Gathered on the device: each observation goes there once, for acting.
  @functools.partial(jax.jit, compiler_options=options)
  def step(params, keys, num_steps, timestep, carry):
    action, extras, carry = agent.act(
      params,
      fold_in(keys, num_steps),
      timestep._replace(obs=observe(timestep.obs)),
      carry,
    )
    return Row(timestep.obs, action, extras), carry

  @functools.partial(jax.jit, compiler_options=options)
  def stack(rows):
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)

  @functools.partial(jax.jit, compiler_options=options)
  def finish(stacks, timesteps, carry):
    last = jax.tree.map(lambda x: x[None], timesteps.obs)
    obs = jax.tree.map(
      lambda *x: jnp.concatenate(x), *(s.obs for s in stacks), last
    )
    action, extras = jax.tree.map(
      lambda *x: jnp.concatenate(x), *((s.action, s.extras) for s in stacks)
    )
    trajectory = Trajectory(
      timesteps._replace(obs=jax.vmap(observe)(obs)),
      action,
      extras,
      jax.tree.map(lambda x: x[None], carry),
    )
    if num_shards == 1:
      return [trajectory]
    leaves, structure = jax.tree.flatten(trajectory)
    shards = zip(*(jnp.split(x, num_shards, axis=1) for x in leaves))
    return [jax.tree.unflatten(structure, shard) for shard in shards]

  return ActorFunctions(agent.initial_carry, step, stack, finish)


class _Episodes:
  """Counts the episodes of one actor's environments over its unrolls."""

  def __init__(self, num_envs: int):
    self._returns = np.zeros(num_envs)
    self._lengths = np.zeros(num_envs, np.int64)

  def add(self, reward: np.ndarray, is_first: np.ndarray) -> Episodes:
    """Of the arrivals of an unroll, `[T, B]` each."""
    # An environment's ended episodes fill the unroll up to its last joint.
    is_open = ~np.logical_or.accumulate(is_first[::-1])[::-1]
    ends = is_first.any(0)
    number = int(is_first.sum())
    sums = []
    for carry, x in (self._returns, reward), (self._lengths, ~is_first):
      whole = x.sum(0, dtype=carry.dtype)
      rest = (x * is_open).sum(0, dtype=carry.dtype)
      sums.append((carry + whole - rest)[ends].sum().item())
      carry[:] = np.where(ends, rest, carry + whole)
    return Episodes(number, number, *sums)


class Actor:
  """One thread's environments and how its time is spent.

  Other threads may read `seconds`, `stage` and `num_waits` while it runs.

  Args:
    index: among the actors of this process.
    env: its pool.
    functions: of `make_actor_functions`, for this pool.
    unroll_length: T.
    device: where it chooses actions.
    learner_devices: where the shards of its unrolls go.
    rng_key: of all actors.
    first_env: global index of the pool's first environment.
    clock: of the device, shared by its actors: runs while one is in inference.
  """

  def __init__(
    self,
    index: int,
    env: HostEnv,
    functions: ActorFunctions,
    unroll_length: int,
    device: jax.Device,
    learner_devices: Sequence[jax.Device],
    rng_key: chex.PRNGKey,
    first_env: int,
    clock: Busy | None = None,
  ):
    self.name = f'podrl-actor-{index}'
    self.index = index
    self.device = device
    self._env = env
    self._clock = clock or Busy()
    self._functions = functions
    self._unroll_length = unroll_length
    self._learner_devices = learner_devices
    self._num_steps = 0
    self._timestep = env.reset()
    num_envs = self._timestep.is_first.size
    self._episodes = _Episodes(num_envs)
    self._keys = jax.device_put(
      jax.vmap(lambda i: jax.random.fold_in(rng_key, i))(
        first_env + jnp.arange(num_envs)
      ),
      device,
    )
    self._carry = jax.device_put(functions.initial_carry(num_envs), device)
    self.num_waits = 0
    self._seen_late = 0.0, 0.0  # A call's start, and when `hangs` saw it late.
    self.is_stopped = False  # Set by another thread; read before each step.
    self._times = (
      'actor_waiting',
      time.perf_counter(),
      dict.fromkeys((*STAGES, PARKED), 0.0),
    )

  def skip(self, num_unrolls: int) -> None:
    """Chooses the next actions as after so many unrolls; before the first."""
    self._num_steps = num_unrolls * self._unroll_length

  def enter(self, stage: str) -> None:
    """Ends one stage and begins another."""
    is_inference, was_inference = (
      x == 'inference' for x in (stage, self._times[0])
    )
    if is_inference and not was_inference:
      self._clock.enter()
    elif was_inference and not is_inference:
      self._clock.leave()
    self._times = stage, time.perf_counter(), self.seconds()

  def seconds(self) -> dict[str, float]:
    """Seconds spent in each stage, the present one included."""
    stage, since, seconds = self._times  # At once: another thread may write.
    return seconds | {stage: seconds[stage] + time.perf_counter() - since}

  def stage(self) -> tuple[str, float]:
    """The present stage, and the seconds since it began."""
    stage, since, _ = self._times
    return stage, time.perf_counter() - since

  def hangs(self, hang_seconds: float) -> bool:
    """Whether it has been in one call for so long, and was a second ago.

    Seen once is not enough: so looks all of a suspended process at first.
    """
    stage, since, _ = self._times
    now = time.perf_counter()
    if stage in ('actor_waiting', PARKED) or now - since <= hang_seconds:
      return False
    if self._seen_late[0] != since:
      self._seen_late = since, now
    return now - self._seen_late[1] >= 1.0

  def compile(self, params: Tree) -> list[Trajectory]:
    """Compiles the actor's programs; returns an example of an unroll's shards."""
    functions, timestep = self._functions, self._timestep
    carry = self._carry
    for _ in range(2):  # The second time for a carry of its own.
      row, carry = functions.step(
        params, self._keys, np.int32(0), timestep, carry
      )
    shape = (self._unroll_length + 1, timestep.is_first.size)
    timesteps = TimeStep(
      timestep.obs,
      np.zeros(shape, np.float32),
      np.zeros(shape, np.float32),
      np.ones(shape, bool),
    )
    return self._finish([row] * self._unroll_length, timesteps, carry)

  def unroll(self, params: Tree, version: int) -> Unroll:
    """Acts for T steps with `params`, which are on the actor's device.

    Raises:
      Closed: if it was stopped.
    """
    functions, timestep, length = (
      self._functions,
      self._timestep,
      self._unroll_length,
    )
    first_carry = self._carry
    # Fresh ones each time: on the CPU the device shares an aligned array.
    shape = (length + 1, timestep.is_first.size)
    timesteps = TimeStep(
      None,
      np.empty(shape, np.float32),
      np.empty(shape, np.float32),
      np.empty(shape, bool),
    )
    rows = []
    self.enter('inference')
    for t in range(length + 1):
      timesteps.reward[t] = timestep.reward
      timesteps.discount[t] = timestep.discount
      timesteps.is_first[t] = timestep.is_first
      if t == length:
        break
      if self.is_stopped:
        raise Closed
      row, self._carry = functions.step(
        params, self._keys, np.int32(self._num_steps), timestep, self._carry
      )
      rows.append(row)
      self._num_steps += 1
      action = np.asarray(row.action)
      self.enter('environment')
      timestep = self._env.step(action)
      self.enter('inference')
    self._timestep = timestep
    shards = self._finish(
      rows, timesteps._replace(obs=timestep.obs), first_carry
    )
    return Unroll(
      shards,
      version,
      self._episodes.add(timesteps.reward[1:], timesteps.is_first[1:]),
      self.index,
    )

  def _finish(
    self, rows: list[Row], timesteps: TimeStep, carry: Tree
  ) -> list[Trajectory]:
    """The shards of an unroll, each on its learner device, ready for use."""
    # In stacks: a program of all rows would compile for ever longer.
    stacks = [
      self._functions.stack(rows[i : i + _STACKED])
      for i in range(0, len(rows), _STACKED)
    ]
    shards = self._functions.finish(stacks, timesteps, carry)
    return jax.block_until_ready(
      list(map(jax.device_put, shards, self._learner_devices))
    )

  def close(self) -> None:
    """Frees the environments; prints what they raise, for others are to follow."""
    try:
      self._env.close()
    except Exception:
      traceback.print_exc()


def check_hangs(actors: Sequence[Actor], hang_seconds: float) -> None:
  """Raises `ActorHangs` where an actor has been in one call for so long."""
  for actor in actors:
    if actor.hangs(hang_seconds):
      stage, seconds = actor.stage()
      raise ActorHangs(
        f'{actor.name} has not come back from {stage} for {seconds:.0f} s, '
        f'more than sebulba.hang_seconds={hang_seconds:g}'
      )
