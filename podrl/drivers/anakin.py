"""Anakin: one compiled program steps environments, acts and learns.

One call runs several updates. An update is an unroll of all environments and
one `Learner.update`, mapped over the devices. The environments are split over
devices; each device has a copy of the learner's state.

Source: Hessel et al. 2021, arXiv:2104.06272, section 3.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl import kernels
from podrl.core.learner import fold_into_rows, row_keys
from podrl.core.observations import flatten, unflatten
from podrl.core.returns import of_first_player
from podrl.drivers import culprits, spmd
from podrl.drivers import info as info_lib
from podrl.drivers.culprits import Largest
from podrl.fields import Field, Range
from podrl.types import (
  DEVICE_AXIS,
  Agent,
  Array,
  Culprit,
  DeviceEnv,
  Episodes,
  Hyperparams,
  InfoSums,
  Learner,
  LearnerState,
  Metrics,
  Report,
  Restore,
  TimeStep,
  Trajectory,
  Tree,
)

# Each number is folded into a key, for a separate stream of random numbers.
FIELDS = {
  'num_devices': Field(
    0, 'Devices per process; 0 means all, or at most 8 on a CPU.', Range(0, 256)
  )
}

_LEARNER_STREAM, _UPDATE_STREAM, _RESET_STREAM, _ACT_STREAM = range(4)


def learner_key(rng_key: chex.PRNGKey) -> chex.PRNGKey:
  """Returns the key of `Learner.init`, for the key of a run."""
  return jax.random.fold_in(rng_key, _LEARNER_STREAM)


class Actors(NamedTuple):
  """The environments and carries; leaves `[B, ...]`, split over devices."""

  env_index: Array  # Int32, the global index of each environment.
  env_state: Tree
  timestep: TimeStep  # Latest time step of each environment, without `info`.
  carry: Tree
  # Fixed keys; each action folds in the numbers of its update and step.
  rng_key: chex.PRNGKey
  # Float32, sum of rewards so far in this episode; in a game with turns, the
  # player's who began.
  episode_return: Array
  episode_length: Array  # Int32, steps so far in this episode.
  episode_info: Tree = ()  # See `info.Running`.
  # Float32, 1 if the player moves who began, else -1; `()` without turns.
  sign: Tree = ()


class AnakinState(NamedTuple):
  """The state of a whole run; only the actors are split over devices."""

  learner: LearnerState
  actors: Actors
  rng_key: chex.PRNGKey  # Fixed; each update folds in `num_updates`.
  # Bool `[S]`, the agents that no longer learn; see `make_programs`.
  is_frozen: Tree = ()


class Records(NamedTuple):
  """What a call of `Programs.train` reports, with one row per update.

  Rows after the last update are zero. For S agents, the arrays have a last axis
  S, except those of `finished`.
  """

  metrics: Metrics  # Float32 `[max_updates]` each, the learner's metrics.
  episodes: Episodes  # `[max_updates, num_devices]` each.
  largest: dict[str, Largest]  # `[max_updates, num_devices]` each.
  info: dict[str, InfoSums]  # `[max_updates, num_devices]` each.
  # Returns and lengths of the episodes that ended at each step, or else 0:
  # `[max_updates, num_devices, (S,) T, B]` each. Empty unless they are kept.
  finished: Tree
  # Bool `[]`, false if the loss of the last update was NaN or infinite. Unless
  # agents freeze, the call ends after such an update.
  is_finite: Array


class Programs(NamedTuple):
  """Anakin's compiled programs."""

  # `(rng_key, hyperparams={}) -> AnakinState` on the devices. For several
  # agents, both have an axis S. `hyperparams` replaces those of `Agent.init`.
  init: Callable[..., AnakinState]
  # `(state, num_updates) -> (state, Records)`. It compiles only once, for all
  # int32 `num_updates` up to `max_updates`. It donates the state's buffers.
  train: Callable[[AnakinState, Any], tuple[AnakinState, Records]]
  # `(state, scores, rng_key) -> (state, parent)`, see `make_exploit` in
  # `core.population`. It donates the state's buffers. None if nothing evolves.
  exploit: Callable[..., tuple[AnakinState, Array]] | None = None


def make_unroll(
  env: DeviceEnv, agent: Agent, unroll_length: int
) -> Callable[[Tree, Actors, Array], tuple[Any, ...]]:
  """Makes the function that acts for T steps.

  The function is `(variables, actors, num_updates) -> (actors, trajectory,
  episodes, info, finished)`, where `info` has the `InfoSums` of each name, and
  `finished` is as in `Records`, `[T, B]` each.
  """

  def unroll(variables, actors, num_updates):
    step_envs = env.step
    if env.with_pool and agent.play_earlier:
      choose = functools.partial(agent.play_earlier, variables)
      step_envs = env.with_pool(choose).step
    update_keys = fold_into_rows(actors.rng_key, num_updates)
    # One call for T x B keys costs little more than a call for B keys.
    keys = jax.vmap(fold_into_rows, (None, 0))(
      update_keys, jnp.arange(unroll_length)
    )

    shapes = jax.tree.map(lambda x: x[0], actors.timestep.obs)

    def as_vectors(timestep):
      return timestep._replace(obs=flatten(timestep.obs, 1))

    def as_given(timestep):
      return timestep._replace(obs=unflatten(timestep.obs, shapes, 1))

    def step(actors, rng_key):
      before = actors.timestep
      known = agent.planning(actors.env_state)
      action, extras, carry = agent.act(
        variables, rng_key, as_given(before), actors.carry, **known
      )
      with jax.named_scope('environment'):
        env_state, timestep = step_envs(actors.env_state, action)
      info, timestep = timestep.info, timestep._replace(info=())
      timestep = as_vectors(timestep)
      is_first, length = timestep.is_first, actors.episode_length
      ended_return = jnp.where(is_first, actors.episode_return, 0.0)
      episode_info, ended_info = info_lib.step(
        actors.episode_info, info, is_first
      )
      reward, sign = of_first_player(timestep, actors.sign)
      stepped = Actors(
        actors.env_index,
        env_state,
        timestep,
        carry,
        actors.rng_key,
        jnp.where(is_first, 0.0, actors.episode_return + reward),
        jnp.where(is_first, 0, length + 1),
        episode_info,
        sign,
      )
      ended = ended_return, jnp.where(is_first, length, 0), ended_info
      # The row has the observation before the step, but other fields after it.
      # A TPU copies an array that a turn of the loop both stores and passes on.
      row = timestep._replace(obs=before.obs)
      return stepped, (row, action, extras, ended)

    first = actors.timestep
    carry = jax.tree.map(lambda x: x[None], actors.carry)
    actors = actors._replace(timestep=as_vectors(first))
    actors, rows = kernels.scan(step, actors, keys, tpu=16, gpu=16)
    steps, actions, extras, (returns, lengths, ended_info) = rows
    actors = actors._replace(timestep=as_given(actors.timestep))

    def append(x, last):
      return jnp.concatenate([x, last[None]])

    def prepend(first, x):
      return jnp.concatenate([first[None], x])

    obs = unflatten(steps.obs, shapes, 2)
    obs = jax.tree.map(append, obs, actors.timestep.obs)
    timesteps = TimeStep(obs, *jax.tree.map(prepend, first[1:], steps[1:]))
    number = jnp.sum(steps.is_first, dtype=jnp.int32)
    episodes = Episodes(number, jnp.sum(returns), jnp.sum(lengths))
    env_index = actors.env_index[None]
    num_steps = jnp.full_like(env_index, num_updates * unroll_length)
    trajectory = Trajectory(
      timesteps, actions, extras, carry, env_index, num_steps
    )
    info = info_lib.by_name(ended_info)
    return actors, trajectory, episodes, info, (returns, lengths)

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
  num_agents: int | None = None,
  freezes: bool = False,
  keeps_episodes: bool = False,
  exploit: Callable[..., tuple[LearnerState, Array]] | None = None,
) -> Programs:
  """Makes Anakin's programs.

  Args:
    mesh: see `spmd.make_mesh`. The agents are split over its first axis, and
      the environments of each agent over its second.
    num_envs: environments of an agent, on all devices; a multiple of the size
      of the second axis.
    unroll_length: T, steps of an unroll.
    max_updates: the largest number of updates in one call.
    num_agents: S, the number of independent agents in the program. S is the
      first axis of keys, hyperparameters and the state's leaves, and the last
      axis of records. None means one agent, and then arrays do not have this
      axis.
    freezes: whether an agent whose loss is NaN or infinite stops learning,
      while the others go on. It keeps the parameters that it had before, and
      the metric `is_frozen` is 1 from this update on. Needs several agents.
    keeps_episodes: whether the records have the episodes one by one.
    exploit: how a population evolves, see `core.population`; needs `freezes`.
  """

  def reset(rng_key: chex.PRNGKey, index: Array) -> Actors:
    """Starts the environments whose global indices are `index` `[B]`."""
    keys = row_keys(rng_key, index)
    env_state, timestep = env.reset(fold_into_rows(keys, _RESET_STREAM))
    info = info_lib.begin(timestep.info, index.size)
    timestep = timestep._replace(info=())
    act_keys = fold_into_rows(keys, _ACT_STREAM)
    carry = agent.initial_carry(index)
    returns, lengths = jnp.zeros(index.shape), jnp.zeros(index.shape, jnp.int32)
    sign = jnp.ones(index.shape) if env.spec.has_turns else ()
    return Actors(
      index, env_state, timestep, carry, act_keys, returns, lengths, info, sign
    )

  unroll = make_unroll(env, agent, unroll_length)

  def update(state):
    before, actors, rng_key, is_frozen = state
    number = before.num_updates
    with jax.named_scope('acting'):
      actors, trajectory, episodes, info, finished = unroll(
        before.variables, actors, number
      )
    update_key = jax.random.fold_in(rng_key, number)
    largest = culprits.find_largest(trajectory, number * unroll_length)
    after, metrics = learner.update(before, trajectory, update_key)
    if freezes:
      is_frozen |= ~jnp.isfinite(metrics['loss'])
      # Leave out the memory: it stays valid, and selecting would copy it.
      kept, new = before._replace(memory=()), after._replace(memory=())
      kept = jax.tree.map(lambda x, y: jnp.where(is_frozen, x, y), kept, new)
      number = after.num_updates
      after = kept._replace(memory=after.memory, num_updates=number)
      metrics = metrics | {'is_frozen': is_frozen.astype(jnp.float32)}
    state = AnakinState(after, actors, rng_key, is_frozen)
    finished = finished if keeps_episodes else ()
    return state, metrics, (episodes, largest, info, finished)

  has_members = num_agents is not None

  def over_agents(function: Callable, in_axes: Any = 0) -> Callable:
    return jax.vmap(function, in_axes) if has_members else function

  # Inlined, so that JAX traces it only once, for the shapes and for the loop.
  update_agents = jax.jit(over_agents(update), inline=True)

  def train(state, num_updates):
    _, *shapes = jax.eval_shape(update_agents, state)
    rows = jax.tree.map(
      lambda x: jnp.zeros((max_updates, *x.shape), x.dtype), shapes
    )

    def is_running(loop):
      i, _, _, is_finite = loop
      return jnp.logical_and(i < num_updates, is_finite)

    def body(loop):
      i, state, rows, _ = loop
      state, *row = update_agents(state)
      rows = jax.tree.map(lambda x, row: x.at[i].set(row), rows, row)
      metrics, _ = row
      # A group of agents may end before others, which do not wait for it.
      is_finite = freezes or jnp.all(jnp.isfinite(metrics['loss']))
      return i + 1, state, rows, jnp.asarray(is_finite)

    _, state, (metrics, own), is_finite = jax.lax.while_loop(
      is_running, body, (0, state, rows, jnp.ones((), bool))
    )
    if has_members:
      is_finite = jnp.full(shapes[0]['loss'].shape, is_finite)
    # These rows differ between devices, so they get an axis for the devices.
    episodes, largest, info, finished = jax.tree.map(lambda x: x[:, None], own)
    records = Records(metrics, episodes, largest, info, finished, is_finite)
    return state, records

  batch = spmd.MEMBERS_BATCH if has_members else spmd.BATCH
  same = spmd.MEMBERS if has_members else spmd.REPLICATED
  learner_specs = spmd.specs(learner.split_axes, has_members)
  sharding = AnakinState(learner_specs, batch, same, same)
  rows, own = spmd.record_specs(has_members)
  records = Records(rows, own, own, own, own, same)
  reset_agents = spmd.device_map(
    over_agents(reset, (0, None)), mesh, (same, spmd.BATCH), batch
  )

  def init_learner(rng_key: chex.PRNGKey, hyperparams: Tree) -> LearnerState:
    # One device's shard: the size of a memory depends on it.
    index = np.arange(num_envs // mesh.shape[DEVICE_AXIS], dtype=np.int32)
    actors = jax.eval_shape(reset, rng_key, index)
    variables = jax.eval_shape(agent.init, rng_key)
    _, trajectory, *_ = jax.eval_shape(unroll, variables, actors, 0)
    state = learner.init(rng_key, trajectory)
    variables = state.variables.with_hyperparams(hyperparams)
    return state._replace(variables=variables)

  def stream_keys(rng_key: chex.PRNGKey) -> list[chex.PRNGKey]:
    streams = _UPDATE_STREAM, _RESET_STREAM
    others = [jax.random.fold_in(rng_key, stream) for stream in streams]
    return [learner_key(rng_key), *others]

  def init(rng_key: chex.PRNGKey, hyperparams: Hyperparams = {}) -> AnakinState:
    init_key, *keys = over_agents(stream_keys)(rng_key)
    learner_state = spmd.init_learner(
      over_agents(init_learner),
      learner,
      mesh,
      init_key,
      hyperparams,
      has_members=has_members,
    )
    is_frozen: Tree = ()
    if freezes:
      is_frozen = np.zeros(rng_key.shape, bool)
    update_key, env_key, is_frozen = spmd.place((*keys, is_frozen), mesh, same)
    index = spmd.place(np.arange(num_envs, dtype=np.int32), mesh, spmd.BATCH)
    actors = reset_agents(env_key, index)
    return AnakinState(learner_state, actors, update_key, is_frozen)

  def evolve(state, scores, rng_key):
    assert exploit is not None
    scores = jnp.where(state.is_frozen, -jnp.inf, scores)
    memory = state.learner.memory
    learner_state, parent = exploit(
      state.learner._replace(memory=()), scores, rng_key
    )
    state = state._replace(
      learner=learner_state._replace(memory=memory),
      is_frozen=state.is_frozen[parent],
    )
    return state, parent

  in_specs, out_specs = (sharding, spmd.REPLICATED), (sharding, records)
  return Programs(
    init,
    spmd.device_map(train, mesh, in_specs, out_specs, donate=(0,)),
    exploit
    and spmd.global_map(evolve, mesh, (sharding, spmd.REPLICATED), donate=(0,)),
  )


def _list_finished(arrays: Tree) -> list[tuple[int, float, int]]:
  """Returns `Report.finished` of an agent's part of `Records.finished`."""
  if not arrays:
    return []
  returns, lengths = arrays
  place = np.nonzero(lengths)
  columns = place[0], returns[place], lengths[place]
  return list(zip(*(x.tolist() for x in columns)))


@dataclasses.dataclass
class Anakin:
  """Anakin's `Driver`: calls the programs from the host.

  Attributes:
    programs: what `make_programs` returned.
    rng_key: key of the whole run; `[S]` for several agents.
    max_updates: the largest number of updates in one call.
    predictions_per_update: number of actions in one update, in this process.
    hyperparams: see `Programs.init`.
    state: the run's state, or None before `start`; `advance` donates it.
  """

  programs: Programs
  rng_key: chex.PRNGKey
  max_updates: int
  predictions_per_update: int
  hyperparams: Hyperparams = dataclasses.field(default_factory=dict)
  state: Any = None  # An AnakinState.
  error: BaseException | None = None  # Stays None: Anakin has no threads.
  # Keeps the first culprit of each agent, even if the loss was finite then.
  _culprits: dict[int, Culprit] = dataclasses.field(default_factory=dict)

  @property
  def learner_state(self) -> LearnerState | None:
    """The learner's part of the state."""
    return self.state and self.state.learner

  def start(self, restore: Restore = lambda state: (state, [])) -> None:
    """Makes the state and compiles."""
    state, saved = restore(self.programs.init(self.rng_key, self.hyperparams))
    # If several processes saved one, the first counts.
    for process in reversed(saved):
      for agent, culprit in process.get('culprits', []):
        self._culprits[agent] = Culprit(*culprit)
    # Compile now, with zero updates, so that `advance` does not compile.
    self.state, _ = self.programs.train(state, np.int32(0))
    jax.block_until_ready(self.state)

  def advance(
    self, num_updates: int, plan: Mapping[str, Any] | None = None
  ) -> list[Report]:
    """Runs at most `max_updates` updates; returns a report for each agent."""
    del plan
    num_updates = min(num_updates, self.max_updates)
    start = time.perf_counter()
    self.state, records = self.programs.train(self.state, np.int32(num_updates))
    records = spmd.fetch(records)
    seconds = time.perf_counter() - start
    is_finite = np.isfinite(records.metrics['loss'])
    is_finite = is_finite.reshape(self.max_updates, -1)
    is_sound_call = np.all(records.is_finite)
    if not is_sound_call:
      num_updates = int(np.argmin(is_finite.all(1)))
    reports = []
    for agent in range(is_finite.shape[1]):
      index = (..., agent) if self.rng_key.ndim else ...
      metrics, episodes, info = jax.tree.map(
        lambda x: x[:num_updates][index],
        (records.metrics, records.episodes, records.info),
      )
      own_axes = (slice(None), agent) if self.rng_key.ndim else ()
      finished = jax.tree.map(
        lambda x: x[:num_updates][:, *own_axes], records.finished
      )
      predictions = num_updates * self.predictions_per_update
      is_sound = bool(is_sound_call or is_finite[num_updates, agent])
      largest = jax.tree.map(lambda x: x[index], records.largest)
      culprit = self._find_culprit(largest, num_updates, is_sound, agent)
      own = {
        k: x[:num_updates].max(1)
        for k, x in culprits.largest_observation(largest).items()
      }
      report = Report(
        metrics, episodes, predictions, seconds, is_sound, {}, own
      )
      rest = {'info': info, 'finished': _list_finished(finished)}
      reports.append(report._replace(culprit=culprit, **rest))
    return reports

  def exploit(
    self, scores: Sequence[float], rng_key: chex.PRNGKey
  ) -> tuple[list[int], dict[str, list[float]]]:
    """Lets the population evolve; see `Programs.exploit`.

    Returns:
      The parents, and all hyperparameters, of each member.
    """
    assert self.programs.exploit is not None
    self.state, parent = self.programs.exploit(
      self.state, np.asarray(scores, np.float32), rng_key
    )
    hyperparams = spmd.fetch(self.state.learner.variables.hyperparams)
    values = {name: x.tolist() for name, x in hyperparams.items()}
    return spmd.fetch(parent).tolist(), values

  def _find_culprit(
    self,
    largest: Mapping[str, Largest],
    num_updates: int,
    is_sound: bool,
    agent: int,
  ) -> Culprit | None:
    """Returns the culprit of an agent whose loss was not finite, or else None.

    The method also keeps the first culprit of each agent, for later calls.
    `largest` has leaves `[max_updates, num_devices]`.
    """
    if agent in self._culprits:
      return None if is_sound else self._culprits[agent]
    values = np.stack([x.value for x in largest.values()])
    if is_sound and np.isfinite(values[:, :num_updates]).all():
      return None
    num_devices = values.shape[2]  # Devices of this process.
    num_envs = self.state.actors.timestep.reward.shape[-1]
    num_envs //= num_devices * jax.process_count()
    for update, device in np.ndindex(num_updates + (not is_sound), num_devices):
      cell = jax.tree.map(lambda x: x[update, device], largest)
      first_env = (jax.process_index() * num_devices + device) * num_envs
      is_failing = update == num_updates
      if culprit := culprits.find_culprit(cell, first_env, is_failing):
        self._culprits[agent] = culprit
        break
    return None if is_sound else self._culprits.get(agent)

  def progress(self) -> dict[str, Any]:
    """Returns the culprits: a memory or a mean may contain their numbers."""
    return {'culprits': [*self._culprits.items()]}

  # `Driver` requires the methods below, but Anakin does not need them.

  def plan(self) -> dict[str, Any]:
    return {}

  def describe(self, record: Mapping[str, Any]) -> dict[str, Any]:
    return {}

  def stop(self) -> None:
    pass

  def close(self) -> list[str]:
    return []
