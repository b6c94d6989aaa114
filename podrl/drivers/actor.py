"""An actor of Sebulba: it takes parameters and returns trajectories.

It steps a pool of environments on the host, chooses actions on one device and
collects the unroll on that device. It runs no program on another device.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import time
import traceback
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl import types
from podrl.drivers import culprits, spmd
from podrl.drivers.culprits import Largest
from podrl.drivers.exchange import Closed
from podrl.drivers.stages import PARKED, STAGES, Busy

_STACKED = 32  # One program stacks at most this many rows.


class ActorHangs(RuntimeError):
  """An actor stays in one stage for too long."""


class Row(NamedTuple):
  """One step of an unroll, on the actor's device; leaves `[B, ...]`."""

  obs: types.Tree
  action: jax.Array
  extras: types.Tree


class Unroll(NamedTuple):
  """An unroll of one actor, with a shard on each learner device."""

  shards: list[types.Trajectory]
  version: int  # Version of the parameters that chose the actions.
  episodes: types.Episodes  # Episodes that ended in the unroll.
  actor: int  # Index of the actor.
  largest: dict[str, Largest]  # Result of `find_largest`, in numpy.
  first_env: int  # Global index of the actor's first environment.


class ActorFunctions(NamedTuple):
  """The compiled programs of an actor, on one device."""

  initial_carry: Callable[[int], types.Tree]  # `Agent.initial_carry`.
  # `(variables, keys, num_steps, timestep, carry) -> (Row, carry)`, called once
  # per step. `num_steps` is the number of earlier steps of each environment.
  step: Callable[..., tuple[Row, types.Tree]]
  stack: Callable[[list[Row]], Row]  # `(rows) -> Row`, leaves `[N, B, ...]`.
  # `(stacks, timesteps, carry, num_steps) -> ([Trajectory], largest)` returns a
  # shard for each learner device, and the result of `find_largest`. `timesteps`
  # has only the last observation; its other leaves are `[T+1, B]`.
  finish: Callable[..., tuple[list[types.Trajectory], dict[str, Largest]]]


def make_actor_functions(
  agent: types.Agent,
  observe: Callable[[types.Tree], types.Tree],
  num_shards: int,
) -> ActorFunctions:
  """Makes the programs that choose actions and collect unrolls.

  Args:
    observe: `EnvSpec.observe`.
    num_shards: number of shards of the batch, one per learner device.
  """
  fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))

  # In XLA's threads, a CPU program would wait for the learner's program.
  options = spmd.in_order_options()
  compiled = functools.partial(jax.jit, compiler_options=options)

  # Rows stay on the device, so each observation is copied to it only once.
  @compiled
  def step(variables, keys, num_steps, timestep, carry):
    seen = timestep._replace(obs=observe(timestep.obs))
    keys = fold_in(keys, num_steps)
    action, extras, carry = agent.act(variables, keys, seen, carry)
    return Row(timestep.obs, action, extras), carry

  @compiled
  def stack(rows):
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)

  @compiled
  def finish(stacks, timesteps, carry, num_steps):
    def concatenate(*trees):
      return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)

    last, carry = jax.tree.map(lambda x: x[None], (timesteps.obs, carry))
    obs = concatenate(*(s.obs for s in stacks), last)
    action, extras = concatenate(*((s.action, s.extras) for s in stacks))
    timesteps = timesteps._replace(obs=jax.vmap(observe)(obs))
    trajectory = types.Trajectory(timesteps, action, extras, carry)
    largest = culprits.find_largest(trajectory, num_steps)
    if num_shards == 1:
      return [trajectory], largest
    leaves, structure = jax.tree.flatten(trajectory)
    shards = zip(*(jnp.split(x, num_shards, axis=1) for x in leaves))
    return [jax.tree.unflatten(structure, shard) for shard in shards], largest

  return ActorFunctions(agent.initial_carry, step, stack, finish)


class _Episodes:
  """Counts the episodes of one actor's environments over its unrolls."""

  def __init__(self, num_envs: int):
    self._returns = np.zeros(num_envs)
    self._lengths = np.zeros(num_envs, np.int64)

  def add(self, reward: np.ndarray, is_first: np.ndarray) -> types.Episodes:
    """Counts the episodes that ended in one unroll; arguments are `[T, B]`."""
    # Steps after an environment's last joint belong to an open episode.
    is_open = ~np.logical_or.accumulate(is_first[::-1])[::-1]
    ends = is_first.any(0)
    sums: list[Any] = [int(is_first.sum())]
    for carry, x in (self._returns, reward), (self._lengths, ~is_first):
      whole = x.sum(0, dtype=carry.dtype)
      rest = (x * is_open).sum(0, dtype=carry.dtype)
      sums.append((carry + whole - rest)[ends].sum().item())
      carry[:] = np.where(ends, rest, carry + whole)
    return types.Episodes(*sums)


@dataclasses.dataclass
class Actor:
  """Steps the environments of one thread, and measures the thread's time.

  Other threads may call `seconds` and `hang`, and read `num_waits`.
  """

  index: int  # Index among the actors of this process.
  env: types.HostEnv
  functions: ActorFunctions
  unroll_length: int
  device: jax.Device  # The device that chooses actions.
  learner_devices: Sequence[jax.Device]  # Each gets a shard of each unroll.
  rng_key: chex.PRNGKey  # All actors share this key.
  first_env: int  # Global index of the pool's first environment.
  # Measures the time in which actors choose actions on the device.
  clock: Busy = dataclasses.field(default_factory=Busy)
  num_waits: int = 0
  is_stopped: bool = False  # Another thread sets it; each step reads it.

  def __post_init__(self):
    self.name = f'podrl-actor-{self.index}'
    self._num_steps = 0
    self._timestep = self.env.reset()
    num_envs = self._timestep.is_first.size
    self._episodes = _Episodes(num_envs)
    indices = self.first_env + jnp.arange(num_envs)
    keys = jax.vmap(lambda i: jax.random.fold_in(self.rng_key, i))(indices)
    self._keys, self._carry = jax.device_put(
      (keys, self.functions.initial_carry(num_envs)), self.device
    )
    # Start of a stage that looked late, and the time of the first such check.
    self._seen_late = 0.0, 0.0
    seconds = dict.fromkeys((*STAGES, PARKED), 0.0)
    self._times = 'actor_waiting', time.perf_counter(), seconds

  def skip(self, num_unrolls: int) -> None:
    """Skips the random numbers of `num_unrolls` unrolls."""
    self._num_steps = num_unrolls * self.unroll_length

  def enter(self, stage: str) -> None:
    """Ends the current stage and begins `stage`."""
    before = self._times[0]
    if stage != before and stage == 'inference':
      self.clock.enter()
    elif stage != before and before == 'inference':
      self.clock.leave()
    self._times = stage, time.perf_counter(), self.seconds()

  def seconds(self) -> dict[str, float]:
    """Returns the seconds spent in each stage, the current one included."""
    stage, since, seconds = self._times  # Read once: another thread writes it.
    return seconds | {stage: seconds[stage] + time.perf_counter() - since}

  def hang(self, hang_seconds: float) -> str:
    """Returns a sentence if the actor hangs, or else an empty string.

    An actor hangs if two checks, at least a second apart, find it in the same
    stage for too long. One check is not enough: after a suspended process
    resumes, every actor looks late.
    """
    stage, since, _ = self._times
    now = time.perf_counter()
    if stage in ('actor_waiting', PARKED) or now - since <= hang_seconds:
      return ''
    if self._seen_late[0] != since:
      self._seen_late = since, now
    if now - self._seen_late[1] < 1.0:
      return ''
    return (
      f"{self.name} has been in the stage '{stage}' for {now - since:.0f} s, "
      f'more than sebulba.hang_seconds={hang_seconds:g}'
    )

  def compile(self, variables: types.Variables) -> list[types.Trajectory]:
    """Compiles the programs; returns the shards of an example unroll."""
    timestep, carry = self._timestep, self._carry
    inputs = variables, self._keys, np.int32(0), timestep
    for _ in range(2):  # The second call gets the carry of the first call.
      row, carry = self.functions.step(*inputs, carry)
    shape = self.unroll_length + 1, timestep.is_first.size
    zeros = np.zeros(shape, np.float32)
    timesteps = types.TimeStep(timestep.obs, zeros, zeros, np.ones(shape, bool))
    return self._finish([row] * self.unroll_length, timesteps, carry)[0]

  def unroll(self, variables: types.Variables, version: int) -> Unroll:
    """Acts for T steps; raises `Closed` if the actor is stopped."""
    timestep, first_carry = self._timestep, self._carry
    # Make new arrays each time: a CPU device shares memory with aligned arrays.
    shape = self.unroll_length + 1, timestep.is_first.size
    reward, discount = (np.empty(shape, np.float32) for _ in range(2))
    is_first, rows = np.empty(shape, bool), []
    self.enter('inference')
    for t in range(self.unroll_length + 1):
      reward[t] = timestep.reward
      discount[t] = timestep.discount
      is_first[t] = timestep.is_first
      if t == self.unroll_length:
        break
      if self.is_stopped:
        raise Closed
      row, self._carry = self.functions.step(
        variables, self._keys, np.int32(self._num_steps), timestep, self._carry
      )
      rows.append(row)
      self._num_steps += 1
      action = np.asarray(row.action)
      self.enter('environment')
      timestep = self.env.step(action)
      self.enter('inference')
    self._timestep = timestep
    timesteps = types.TimeStep(timestep.obs, reward, discount, is_first)
    shards, largest = self._finish(rows, timesteps, first_carry)
    episodes = self._episodes.add(reward[1:], is_first[1:])
    return Unroll(
      shards, version, episodes, self.index, largest, self.first_env
    )

  def _finish(
    self, rows: list[Row], timesteps: types.TimeStep, carry: types.Tree
  ) -> tuple[list[types.Trajectory], dict[str, Largest]]:
    """Returns the shards of an unroll, ready on their learner devices.

    It also returns the largest numbers of the unroll, in numpy.
    """
    # Use several stacks: one program for all rows would compile too slowly.
    stacks = [
      self.functions.stack(rows[i : i + _STACKED])
      for i in range(0, len(rows), _STACKED)
    ]
    num_steps = np.int32(self._num_steps - len(rows))
    shards, largest = self.functions.finish(stacks, timesteps, carry, num_steps)
    placed = map(jax.device_put, shards, self.learner_devices)
    return jax.block_until_ready(list(placed)), jax.device_get(largest)

  def close(self) -> None:
    """Frees the environments; prints an error instead of raising it."""
    try:
      self.env.close()
    except Exception:
      traceback.print_exc()
