"""An actor of Sebulba: it takes parameters and returns trajectories.

It steps a pool of environments on the host, chooses actions on one device and
collects the unroll on that device. It runs no program on another device.

If the device is a CPU and the environments have an `XlaEnv`, one program makes
a whole unroll. Otherwise, a loop calls a program for each step. The unrolls are
the same.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import sys
import time
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl import types
from podrl.core.learner import fold_into_rows, row_keys
from podrl.drivers import culprits, info, spmd
from podrl.drivers.culprits import Largest
from podrl.drivers.exchange import Closed
from podrl.drivers.stages import BEHIND_UPDATE, PARKED, STAGES, Busy
from podrl.messages import one_line

_STACKED = 32  # One program stacks at most this many rows.


class ActorHangs(RuntimeError):
  """An actor stays in one stage for too long."""


class Row(NamedTuple):
  """One step of an unroll, on the actor's device; leaves `[B, ...]`."""

  obs: types.Tree
  action: types.Array
  extras: types.Tree


class Unroll(NamedTuple):
  """An unroll of one actor, with a shard on each learner device."""

  shards: list[types.Trajectory]
  version: int  # Version of the parameters that chose the actions.
  finished: list[np.ndarray]  # Returns and lengths of the ended episodes.
  actor: int  # Index of the actor.
  largest: dict[str, Largest]  # Result of `find_largest`, on the actor device.
  first_env: int  # Global index of the actor's first environment.
  info: dict[str, types.InfoSums]  # Sums over the episodes that ended.


class ActorFunctions(NamedTuple):
  """The functions of an actor; all but `initial_carry` are compiled."""

  initial_carry: Callable[[types.Array], types.Tree]  # `Agent.initial_carry`.
  # `(variables, keys, num_steps, timestep, carry) -> (Row, carry)`, called once
  # per step. `num_steps` is the number of earlier steps of each environment.
  step: Callable[..., tuple[Row, types.Tree]]
  stack: Callable[[list[Row]], Row]  # `(rows) -> Row`, leaves `[N, B, ...]`.
  # `(stacks, timesteps, carry, num_steps, env_index) -> ([Trajectory],
  # largest)` returns a shard for each learner device, and the result of
  # `find_largest`. `timesteps` has only the last observation; its other leaves
  # are `[T+1, B]`.
  finish: Callable[..., tuple[list[types.Trajectory], dict[str, Largest]]]
  # `(variables, keys, steps, env_index, env_state, timestep, carry) -> (shards,
  # largest, reward, is_first, info, state)` makes a whole unroll; None without
  # an `XlaEnv`. `steps` has the `num_steps` of each step. `reward`, `is_first`
  # and `info` are those of the T arrivals. `state` is the next `(env_state,
  # timestep, carry)`.
  unroll: Callable[..., tuple[Any, ...]] | None


def make_actor_functions(
  agent: types.Agent,
  observe: Callable[[types.Tree], types.Tree],
  num_shards: int,
  xla_step: Callable[..., tuple[Any, types.TimeStep]] | None = None,
) -> ActorFunctions:
  """Makes the programs that choose actions and collect unrolls.

  Args:
    observe: `EnvSpec.observe`.
    num_shards: number of shards of the batch, one per learner device.
    xla_step: `XlaEnv.step`, if there is one.
  """
  # In XLA's threads, a CPU program would wait for the learner's program.
  options = spmd.in_order_options()
  compiled = functools.partial(jax.jit, compiler_options=options)

  # Rows stay on the device, so each observation is copied to it only once.
  def step(variables, keys, num_steps, timestep, carry):
    seen = timestep._replace(obs=observe(timestep.obs))
    keys = fold_into_rows(keys, num_steps)
    action, extras, carry = agent.act(variables, keys, seen, carry)
    return Row(timestep.obs, action, extras), carry

  @compiled
  def stack(rows):
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)

  def finish(stacks, timesteps, carry, num_steps, env_index):
    def concatenate(*trees):
      return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)

    last, carry = jax.tree.map(lambda x: x[None], (timesteps.obs, carry))
    obs = concatenate(*(s.obs for s in stacks), last)
    action, extras = concatenate(*((s.action, s.extras) for s in stacks))
    timesteps = timesteps._replace(obs=jax.vmap(observe)(obs))
    trajectory = types.Trajectory(
      timesteps,
      action,
      extras,
      carry,
      env_index[None],
      jnp.full_like(env_index, num_steps)[None],
    )
    largest = culprits.find_largest(trajectory, num_steps)
    if num_shards == 1:
      return [trajectory], largest
    leaves, structure = jax.tree.flatten(trajectory)
    shards = zip(*(jnp.split(x, num_shards, axis=1) for x in leaves))
    return [jax.tree.unflatten(structure, shard) for shard in shards], largest

  @compiled
  def unroll(variables, keys, steps, env_index, env_state, timestep, carry):
    def advance(state, num_steps):
      env_state, timestep, carry, chosen = state
      obs = timestep.obs
      assert xla_step is not None
      row, carry = step(variables, keys, num_steps, timestep, carry)
      env_state, timestep = xla_step(env_state, row.action)
      info, timestep = timestep.info, timestep._replace(info=())
      state = env_state, timestep, carry, row._replace(obs=())
      # The next step stores the actions and extras of this row. If this step
      # stored them, the compiler would compute some of them twice, with another
      # rounding than in the program `step`.
      rows = chosen._replace(obs=obs), timestep._replace(obs=()), info
      return state, rows

    shapes, _ = jax.eval_shape(step, variables, keys, steps[0], timestep, carry)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    state = env_state, timestep, carry, zeros._replace(obs=())
    (env_state, last, last_carry, chosen), (rows, arrivals, info) = (
      jax.lax.scan(advance, state, steps)
    )
    rest = jax.tree.map(
      lambda x, end: jnp.append(x[1:], end[None], axis=0),
      rows._replace(obs=()),
      chosen,
    )
    timesteps = jax.tree.map(
      lambda start, x: jnp.append(start[None], x, axis=0),
      timestep._replace(obs=()),
      arrivals,
    )._replace(obs=last.obs)
    stacks = [rest._replace(obs=rows.obs)]
    shards, largest = finish(stacks, timesteps, carry, steps[0], env_index)
    reached = env_state, last, last_carry
    return shards, largest, arrivals.reward, arrivals.is_first, info, reached

  return ActorFunctions(
    agent.initial_carry,
    compiled(step),
    stack,
    compiled(finish),
    unroll if xla_step else None,
  )


def _as_int32(number: np.ndarray | int) -> np.ndarray:
  """Returns `number` modulo 2**32 as an int32, which may be negative.

  An environment may make more than 2**31 steps. Keys fold in the same 32 bits,
  and a memory adds steps in the same way.
  """
  return np.asarray(number, np.int64).astype(np.int32)


class _Episodes:
  """Finds the episodes of one actor's environments over its unrolls."""

  def __init__(self, num_envs: int):
    self._returns = np.zeros(num_envs)
    self._lengths = np.zeros(num_envs, np.int64)

  def add(self, reward: np.ndarray, is_first: np.ndarray) -> list[np.ndarray]:
    """Returns the returns and the lengths of the episodes that ended.

    The arguments are those of one unroll, `[T, B]`.
    """
    returns, lengths = [], []
    for step_reward, is_reset in zip(reward, is_first):
      self._returns += step_reward
      self._lengths += ~is_reset
      returns.append(self._returns[is_reset])
      lengths.append(self._lengths[is_reset])
      self._returns[is_reset], self._lengths[is_reset] = 0.0, 0
    return [np.concatenate(returns), np.concatenate(lengths)]


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
  # Each device gets a shard of each unroll.
  learner_devices: Sequence[jax.Device]
  rng_key: chex.PRNGKey  # All actors share this key.
  first_env: int  # Global index of the pool's first environment.
  # Measures the time in which actors choose actions on the device.
  clock: Busy = dataclasses.field(default_factory=Busy)
  num_waits: int = 0
  is_stopped: bool = False  # Another thread sets it; each step reads it.

  def __post_init__(self):
    self.name = f'podrl-actor-{self.index}'
    self._num_steps = 0
    # Start of a stage that looked late, and the time of the first such check.
    self._seen_late = 0.0, 0.0
    seconds = dict.fromkeys((*STAGES, PARKED), 0.0)
    self._times = 'actor_waiting', time.perf_counter(), seconds
    # The number and the seconds of inferences while no update ran.
    self._free = 0, 0.0
    self._behind_seconds = 0.0

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
    """Returns the seconds spent in each stage, the current one included.

    `BEHIND_UPDATE` is a part of the stage 'inference'.
    """
    stage, since, seconds = self._times  # Read once: another thread writes it.
    return seconds | {
      stage: seconds[stage] + time.perf_counter() - since,
      BEHIND_UPDATE: self._behind_seconds,
    }

  def _add_inference(self, is_updating: bool, seconds: float) -> None:
    """Adds what an inference waited for an update that ran when it began.

    This is its time minus the mean of those that began while no update ran. A
    negative difference counts too, so that noise adds nothing on average.
    """
    number, total = self._free
    if not is_updating:
      self._free = number + 1, total + seconds
    elif number:
      self._behind_seconds += seconds - total / number

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

  def start(self, variables: types.Variables) -> list[types.Trajectory]:
    """Resets the environments and compiles the programs.

    Returns:
      The shards of an example unroll.
    """
    self._timestep = self.env.reset()._replace(info=())
    num_envs = self._timestep.is_first.size
    self._episodes, self._info = _Episodes(num_envs), info.Averages()
    index = self.first_env + jnp.arange(num_envs, dtype=jnp.int32)
    self._env_index, self._keys, self._carry = jax.device_put(
      (
        index,
        row_keys(self.rng_key, index),
        self.functions.initial_carry(index),
      ),
      self.device,
    )
    # The state of `XlaEnv`; None means that a loop steps the environments.
    self._env_state: types.Tree = None
    if self.device.platform == 'cpu' and self.functions.unroll and self.env.xla:
      env_state = self.env.xla.init(self._begin_step, self._end_step)
      if env_state is not None:
        self._env_state, self._timestep = jax.device_put(
          (env_state, self._timestep), self.device
        )
    if self._env_state is not None:
      self.is_stopped = True  # The environments do not step in this call.
      shards, *_ = self._call_program(variables)
      self.is_stopped = False
      return shards
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
    self.enter('inference')
    act = self._run_loop if self._env_state is None else self._run_program
    shards, largest, reward, is_first, infos = act(variables)
    for x in largest.values():  # The learner reads the values.
      x.value.copy_to_host_async()
    return Unroll(
      shards,
      version,
      self._episodes.add(reward, is_first),
      self.index,
      largest,
      self.first_env,
      self._info.add(infos, is_first),
    )

  def _begin_step(self) -> bool:
    """The program calls this before the environments step; see `XlaEnv`."""
    if self.is_stopped:
      return False
    self.enter('environment')
    return True

  def _end_step(self) -> None:
    """The program calls this after the environments have stepped."""
    self.enter('inference')

  def _call_program(self, variables: types.Variables) -> tuple[Any, ...]:
    """Returns the results of `ActorFunctions.unroll`; places the shards."""
    assert self.functions.unroll
    first, last = self._num_steps, self._num_steps + self.unroll_length
    shards, largest, *rest = self.functions.unroll(
      variables,
      self._keys,
      _as_int32(np.arange(first, last)),
      self._env_index,
      self._env_state,
      self._timestep,
      self._carry,
    )
    return self._place(shards), largest, *rest

  def _run_program(self, variables: types.Variables) -> tuple[Any, ...]:
    """Acts for T steps in one program; see `_run_loop`."""
    shards, largest, *numbers, state = self._call_program(variables)
    if self.is_stopped:
      raise Closed
    self._env_state, self._timestep, self._carry = state
    self._num_steps += self.unroll_length
    reward, is_first, info = jax.tree.map(np.asarray, numbers)
    steps = range(self.unroll_length)
    infos = [{k: x[t] for k, x in dict(info).items()} for t in steps]
    return shards, largest, reward, is_first, infos

  def _run_loop(self, variables: types.Variables) -> tuple[Any, ...]:
    """Acts for T steps; returns the shards, the result of `find_largest`, and
    the rewards, `is_first` and `info` of the T arrivals.
    """
    timestep, first_carry = self._timestep, self._carry
    # Make new arrays each time: a CPU device shares memory with aligned arrays.
    shape = self.unroll_length + 1, timestep.is_first.size
    reward, discount = (np.empty(shape, np.float32) for _ in range(2))
    is_first, rows, infos = np.empty(shape, bool), [], []
    for t in range(self.unroll_length + 1):
      reward[t] = timestep.reward
      discount[t] = timestep.discount
      is_first[t] = timestep.is_first
      if t == self.unroll_length:
        break
      if self.is_stopped:
        raise Closed
      is_updating, start = self.clock.is_updating, time.perf_counter()
      row, self._carry = self.functions.step(
        variables, self._keys, _as_int32(self._num_steps), timestep, self._carry
      )
      rows.append(row)
      self._num_steps += 1
      action = np.asarray(row.action)
      self._add_inference(is_updating, time.perf_counter() - start)
      self.enter('environment')
      timestep = self.env.step(action)
      self.enter('inference')
      infos.append(timestep.info)
      timestep = timestep._replace(info=())
    self._timestep = timestep
    timesteps = types.TimeStep(timestep.obs, reward, discount, is_first)
    shards, largest = self._finish(rows, timesteps, first_carry)
    return shards, largest, reward[1:], is_first[1:], infos

  def _finish(
    self, rows: list[Row], timesteps: types.TimeStep, carry: types.Tree
  ) -> tuple[list[types.Trajectory], dict[str, Largest]]:
    """Returns the shards of an unroll, ready on their learner devices.

    It also returns the result of `find_largest`.
    """
    # Use several stacks: one program for all rows would compile too slowly.
    stacks = [
      self.functions.stack(rows[i : i + _STACKED])
      for i in range(0, len(rows), _STACKED)
    ]
    num_steps = _as_int32(self._num_steps - len(rows))
    shards, largest = self.functions.finish(
      stacks, timesteps, carry, num_steps, self._env_index
    )
    return self._place(shards), largest

  def _place(self, shards: list[types.Trajectory]) -> list[types.Trajectory]:
    """Copies the shards of an unroll to the learner devices, and waits."""
    placed = [
      shard if device == self.device else jax.device_put(shard, device)
      for shard, device in zip(shards, self.learner_devices)
    ]
    return jax.block_until_ready(placed)

  def close(self) -> None:
    """Frees the environments; prints an error instead of raising it."""
    try:
      self.env.close()
    except BaseException as error:  # The environment's code can raise anything.
      text = one_line(error, with_kind=True)
      print(
        f'warning: the environments of {self.name} failed in close: {text}',
        file=sys.stderr,
      )
