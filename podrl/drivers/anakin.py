"""Anakin: environments, acting and learning compiled into one program.

Hessel et al. 2021, arXiv:2104.06272, section 3. One call runs a number of
updates, each an unroll of all environments and `Learner.update`, mapped over
the devices. The environments are split over them, the learner is replicated.
"""

from collections.abc import Callable, Mapping
import time
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.drivers import spmd
from podrl.types import (
  Agent,
  Array,
  DeviceEnv,
  Episodes,
  Learner,
  LearnerState,
  Metrics,
  Report,
  Restore,
  TimeStep,
  Trajectory,
  Tree,
)

# Streams of random numbers, folded into the key of the seed.
_LEARNER_STREAM, _UPDATE_STREAM, _RESET_STREAM, _ACT_STREAM = range(4)


def _strongly_typed(tree: Tree) -> Tree:
  """Drops weak types: a state that gains one compiles the program again."""
  return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)


# Of keys `[B]` and one counter.
_fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))


class Actors(NamedTuple):
  """The environments; every leaf is `[B, ...]`, split over devices.

  Attributes:
    env_state: of the environments.
    timestep: the last one of each.
    carry: recurrent state.
    rng_key: fixed; update and step counters are folded in.
    episode_return: float32, of the episode under way.
    episode_length: int32, steps of the episode under way.
  """

  env_state: Tree
  timestep: TimeStep
  carry: Tree
  rng_key: chex.PRNGKey
  episode_return: Array
  episode_length: Array


class AnakinState(NamedTuple):
  """The whole of a run.

  Attributes:
    learner: replicated.
    actors: split over devices.
    rng_key: of the updates, replicated; `num_updates` is folded in.
  """

  learner: LearnerState
  actors: Actors
  rng_key: chex.PRNGKey


class Records(NamedTuple):
  """What a call of `Programs.train` reports, a row for each update.

  Rows past the number of updates that were run are zero.

  Attributes:
    metrics: float32 `[max_updates]` each, the learner's; `[max_updates, S]`
      for several seeds.
    episodes: `[max_updates, num_devices]` each; `[max_updates, num_devices, S]`.
    is_finite: bool `[]`, false if the last update's loss was NaN or infinite,
      at which the call ended.
  """

  metrics: Metrics
  episodes: Episodes
  is_finite: Array


class Programs(NamedTuple):
  """Anakin's compiled programs.

  Attributes:
    init: `(rng_key) -> AnakinState`, placed on the devices; keys `[S]` for
      several seeds.
    train: `(state, num_updates) -> (state, Records)`; compiled once for any
      int32 `num_updates` up to `max_updates`. The state's buffers are donated.
  """

  init: Callable[[chex.PRNGKey], AnakinState]
  train: Callable[[AnakinState, Array], tuple[AnakinState, Records]]


def make_unroll(
  env: DeviceEnv, agent: Agent, unroll_length: int
) -> Callable[[Tree, Actors, Array], tuple[Actors, Trajectory, Episodes]]:
  """Builds `(params, actors, num_updates) -> (actors, trajectory, episodes)`.

  Args:
    env: the environments.
    agent: chooses actions.
    unroll_length: steps of an unroll.
  """

  def unroll(
    params: Tree, actors: Actors, num_updates: Array
  ) -> tuple[Actors, Trajectory, Episodes]:
    update_keys = _fold_in(actors.rng_key, num_updates)
    # All at once: one call for T B keys costs little more than one for B.
    keys = jax.vmap(lambda t: _fold_in(update_keys, t))(
      jnp.arange(unroll_length)
    )

    def step(actors, rng_key):
      action, extras, carry = agent.act(
        params, rng_key, actors.timestep, actors.carry
      )
      env_state, timestep = _strongly_typed(env.step(actors.env_state, action))
      is_first = timestep.is_first
      length = actors.episode_length
      ended = (
        is_first,
        jnp.where(is_first, actors.episode_return, 0.0),
        jnp.where(is_first, length, 0),
      )
      stepped = Actors(
        env_state,
        timestep,
        carry,
        actors.rng_key,
        jnp.where(is_first, 0.0, actors.episode_return + timestep.reward),
        jnp.where(is_first, 0, length + 1),
      )
      return stepped, (actors.timestep, action, extras, ended)

    carry = jax.tree.map(lambda x: x[None], actors.carry)
    actors, (timesteps, actions, extras, ended) = jax.lax.scan(
      step, actors, keys
    )
    timesteps = jax.tree.map(
      lambda x, last: jnp.concatenate([x, last[None]]),
      timesteps,
      actors.timestep,
    )
    is_first, returns, lengths = ended
    num_joints = jnp.sum(is_first, dtype=jnp.int32)
    episodes = Episodes(
      num_joints, num_joints, jnp.sum(returns), jnp.sum(lengths)
    )
    return actors, Trajectory(timesteps, actions, extras, carry), episodes

  return unroll


def make_programs(
  env: DeviceEnv,
  agent: Agent,
  learner: Learner,
  mesh: spmd.Mesh,
  *,
  num_envs: int,
  unroll_length: int,
  max_updates: int,
  num_seeds: int | None = None,
) -> Programs:
  """Builds the programs.

  Args:
    env: the environments.
    agent: chooses actions.
    learner: of that agent.
    mesh: of `spmd.make_mesh`.
    num_envs: over all devices, which divide it.
    unroll_length: steps of an unroll.
    max_updates: bound of the updates in one call.
    num_seeds: so many independent agents, in one program: keys, the state's
      leaves and a record's rows have an axis of them, in front (of rows: behind
      theirs). None is one, without such an axis.
  """

  def reset(rng_key: chex.PRNGKey, index: Array) -> Actors:
    """Starts the environments whose global indices are `index` `[B]`."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng_key, index)
    env_state, timestep = _strongly_typed(
      env.reset(_fold_in(keys, _RESET_STREAM))
    )
    return Actors(
      env_state,
      timestep,
      agent.initial_carry(index.size),
      _fold_in(keys, _ACT_STREAM),
      jnp.zeros(index.shape),
      jnp.zeros(index.shape, jnp.int32),
    )

  unroll = make_unroll(env, agent, unroll_length)

  def update(state: AnakinState) -> tuple[AnakinState, Metrics, Episodes]:
    num_updates = state.learner.num_updates
    actors, trajectory, episodes = unroll(
      state.learner.params, state.actors, num_updates
    )
    learner_state, metrics = learner.update(
      state.learner, trajectory, jax.random.fold_in(state.rng_key, num_updates)
    )
    return AnakinState(learner_state, actors, state.rng_key), metrics, episodes

  if num_seeds is not None:
    update = jax.vmap(update)

  def train(
    state: AnakinState, num_updates: Array
  ) -> tuple[AnakinState, Records]:
    _, *shapes = jax.eval_shape(update, state)
    rows = jax.tree.map(
      lambda x: jnp.zeros((max_updates, *x.shape), x.dtype), shapes
    )

    def is_running(loop):
      i, _, _, is_finite = loop
      return jnp.logical_and(i < num_updates, is_finite)

    def body(loop):
      i, state, rows, _ = loop
      state, metrics, episodes = update(state)
      rows = jax.tree.map(
        lambda x, row: x.at[i].set(row), rows, [metrics, episodes]
      )
      return i + 1, state, rows, jnp.all(jnp.isfinite(metrics['loss']))

    _, state, (metrics, episodes), is_finite = jax.lax.while_loop(
      is_running, body, (0, state, rows, jnp.ones((), bool))
    )
    episodes = jax.tree.map(lambda x: x[:, None], episodes)
    return state, Records(metrics, episodes, is_finite)

  batch = spmd.BATCH if num_seeds is None else spmd.TRAJECTORY  # Axis 0 or 1.
  sharding = AnakinState(spmd.LEARNER_STATE, batch, spmd.REPLICATED)
  over_seeds = (lambda f, **_: f) if num_seeds is None else jax.vmap
  map_reset = spmd.device_map(
    over_seeds(reset, in_axes=(0, None)),
    mesh,
    (spmd.REPLICATED, spmd.BATCH),
    batch,
  )

  def init(rng_key: chex.PRNGKey) -> AnakinState:
    learner_key, update_key, env_key = (
      over_seeds(lambda key, stream=stream: jax.random.fold_in(key, stream))(
        rng_key
      )
      for stream in (_LEARNER_STREAM, _UPDATE_STREAM, _RESET_STREAM)
    )
    index = np.arange(num_envs)
    actors = map_reset(
      spmd.place(env_key, mesh, spmd.REPLICATED),
      spmd.place(index, mesh, spmd.BATCH),
    )

    @jax.jit
    @over_seeds
    def init_learner(key: chex.PRNGKey) -> LearnerState:
      actors = jax.eval_shape(reset, key, index)
      params = jax.eval_shape(agent.init, key)
      _, trajectory, _ = jax.eval_shape(unroll, params, actors, 0)
      return learner.init(key, trajectory)

    return AnakinState(
      spmd.place(init_learner(learner_key), mesh, spmd.LEARNER_STATE),
      actors,
      spmd.place(update_key, mesh, spmd.REPLICATED),
    )

  return Programs(
    init,
    spmd.device_map(
      train,
      mesh,
      (sharding, spmd.REPLICATED),
      (sharding, Records(spmd.REPLICATED, spmd.TRAJECTORY, spmd.REPLICATED)),
      donate=(0,),
    ),
  )


class Anakin:
  """Anakin's `Driver`: runs the programs from the host, call by call.

  Args:
    programs: what `make_programs` returned.
    rng_key: key of the whole run; `[S]` for several seeds.
    max_updates: the most updates that one call may run.
    predictions_per_update: actions that this process's environments take in
      one update.
  """

  # Anakin has no threads: every exception is raised at once.
  error: BaseException | None = None

  def __init__(
    self,
    programs: Programs,
    rng_key: chex.PRNGKey,
    max_updates: int,
    predictions_per_update: int,
  ):
    self._programs = programs
    self._rng_key = rng_key
    self._max_updates = max_updates
    self._predictions_per_update = predictions_per_update
    self._state: AnakinState | None = None

  @property
  def state(self) -> AnakinState | None:
    """The whole run, once started; the next `advance` deletes its buffers."""
    return self._state

  @property
  def learner(self) -> LearnerState | None:
    """The learner's part of the state."""
    return self._state and self._state.learner

  def start(self, restore: Restore = lambda state: (state, [])) -> None:
    """Makes the state and compiles."""
    state, _ = restore(self._programs.init(self._rng_key))
    # Zero updates: the call compiles, so that the first window need not.
    self._state, _ = jax.block_until_ready(
      self._programs.train(state, np.int32(0))
    )

  def plan(self) -> dict[str, Any]:
    """Returns nothing: all processes do the same anyway."""
    return {}

  def advance(
    self, num_updates: int, plan: Mapping[str, Any] | None = None
  ) -> list[Report]:
    """Runs at most `max_updates` updates; returns a report for each seed."""
    del plan
    num_updates = min(num_updates, self._max_updates)
    start = time.perf_counter()
    self._state, records = self._programs.train(
      self._state, np.int32(num_updates)
    )
    records = spmd.fetch(records)
    seconds = time.perf_counter() - start
    is_finite = np.isfinite(records.metrics['loss'])
    is_finite = is_finite.reshape(self._max_updates, -1)
    if not records.is_finite:
      num_updates = int(np.argmin(is_finite.all(1)))

    def report(seed: int) -> Report:
      rows = jax.tree.map(
        lambda x: (
          x[:num_updates, ..., seed] if self._rng_key.ndim else x[:num_updates]
        ),
        (records.metrics, records.episodes),
      )
      return Report(
        *rows,
        num_predictions=num_updates * self._predictions_per_update,
        seconds=seconds,
        stages={},
        own={},
        is_finite=bool(records.is_finite or is_finite[num_updates, seed]),
      )

    return [report(seed) for seed in range(is_finite.shape[1])]

  def describe(self, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nothing: one program leaves no shares to tell apart."""
    del record
    return {}

  def progress(self) -> dict[str, Any]:
    """Returns nothing: the state holds the whole run."""
    return {}

  def stop(self) -> None:
    """Does nothing: a call of `advance` ends by itself."""

  def close(self) -> list[str]:
    """Does nothing, and returns no names: there are no threads."""
    return []
