"""The types that every part of podrl shares.

An unroll has T + 1 time steps and T actions; action t leads from step t to step
t + 1. In shapes, T is time and B is the batch of environments. A *slot* is one
of the T x B places of an unroll.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np

Array: TypeAlias = jax.Array | np.ndarray
Tree: TypeAlias = Any  # A nested structure whose leaves are arrays.
Metrics = dict[str, Array]
Hyperparams = dict[str, Array]  # Each value is a float32 `[]`.

# Batches are split over this axis of a mesh.
DEVICE_AXIS = 'devices'
# If a run has several agents, they are split over this axis.
MEMBER_AXIS = 'members'


class Masked(NamedTuple):
  """An observation with the actions that are legal in its state.

  Attributes:
    obs: what the network sees, leaves `[..., *obs_shape]`.
    action_mask: bool `[..., A]`, true for legal actions; if all are false, all
      are legal. A is the number of actions. `MultiDiscrete` has the masks of
      all its components, one after another; its A is the sum. If only a part of
      its components have a legal action, the others act at random.
  """

  obs: Tree
  action_mask: Tree


class TimeStep(NamedTuple):
  """What an environment returns when it arrives in a state.

  Attributes:
    obs: `[..., *obs_shape]`, in the smallest dtype that stores it exactly; or
      `Masked`.
    reward: `[...]` float32, not scaled or clipped by podrl; 0 where `is_first`.
    discount: `[...]` float32, 0 if the episode terminated, else 1. It is also 1
      if the episode was truncated. It does not include the agent's gamma. If
      the agent plays both sides of a game (see `EnvSpec.has_turns`), it is -1
      where the turn passes to the other player.
    is_first: `[...]` bool, whether the step is the first of an episode. The
      transition into a first step is the reset step between two episodes; the
      environment ignored the action of this transition.
    info: other numbers that the environment reports, as a dict of float32
      `[...]`; `()` if there are none. The driver records their means over
      episodes, and removes them before an agent or a memory gets the time step.
      Numbers that are NaN or infinite, or belong to a reset step, do not count.
      A `DeviceEnv` always returns the same names, but a `HostEnv` need not.
  """

  obs: Tree
  reward: Array
  discount: Array
  is_first: Array
  info: Tree = ()


class Trajectory(NamedTuple):
  """An unroll of a batch of environments; in every leaf, time is axis 0.

  Attributes:
    timestep: leaves `[T+1, B, ...]`.
    action: `[T, B, ...]`; `action[t]` was chosen at `timestep[t]`.
    extras: leaves `[T, B, ...]`, the extras that `Agent.act` returned.
    carry: leaves `[1, B, ...]`, the agent's carry before the first step; `()`
      for an agent without a carry.
    env_index: int32 `[1, B]`, the global index of each environment.
    num_steps: int32 `[1, B]`, steps of each environment before this unroll,
      reset steps included, modulo 2**32: it is negative after 2**31 steps. A
      memory joins the unrolls of an environment by it. In a sample of a memory,
      `carry`, `env_index` and `num_steps` are `()`.
  """

  timestep: TimeStep
  action: Array
  extras: Tree
  carry: Tree
  env_index: Tree
  num_steps: Tree


class Variables(NamedTuple):
  """The variables of an agent; each device has a copy.

  Attributes:
    params: the network's parameters, which the optimiser changes.
    statistics: what `Agent.absorb` changes, for example running moments; `()`
      if there are none. The statistics of a wrapper contain those of the
      wrapped agent.
    hyperparams: numbers such as 'gamma'. They are inputs of the compiled
      programs, so changing a value does not cause a new compilation.
  """

  params: Tree
  statistics: Tree
  hyperparams: Hyperparams

  def with_hyperparams(self, values: Hyperparams) -> 'Variables':
    """Returns these variables with some hyperparameters replaced."""
    return self._replace(hyperparams=self.hyperparams | values)


class LearnerState(NamedTuple):
  """Everything that learning changes; only `memory` is split over devices.

  Attributes:
    variables: the agent's variables. Their `hyperparams` also contain the
      optimiser's hyperparameters, for example 'learning_rate'.
    target_params: a copy of `variables.params`, which the learner renews from
      time to time; `()` if the agent needs none.
    opt_state: the state of the optax optimiser.
    num_updates: int32 `[]`, number of calls of `Learner.update`.
    num_sgd_steps: int32 `[]`, number of optimiser steps.
    memory: what `Memory.init` returned, on each device its own; `()` if the
      learner has no memory.
  """

  variables: Variables
  target_params: Tree
  opt_state: Tree
  num_updates: Array
  num_sgd_steps: Array
  memory: Tree


class Discrete(NamedTuple):
  """The actions 0, 1 ... num_actions - 1; each is an int32 `[]`."""

  num_actions: int


class MultiDiscrete(NamedTuple):
  """Several discrete actions at the same time, as int32 `[num_components]`.

  Component i is one of 0, 1 ... num_actions[i] - 1.
  """

  num_actions: tuple[int, ...]


class Box(NamedTuple):
  """Float32 actions `[*shape]`, between two bounds of the same shape."""

  shape: tuple[int, ...]
  low: np.ndarray
  high: np.ndarray


class EnvSpec(NamedTuple):
  """What an agent and a driver need to know about one environment.

  Attributes:
    obs: tree of `jax.ShapeDtypeStruct`, without a batch axis.
    channels_first: whether images are CHW (Atari) rather than HWC.
    action: the action space.
    frame_skip: raw frames per environment step.
    max_episode_steps: the number of steps after which an episode is truncated;
      0 or 2**31 - 1 means never.
    frame_stack: S, the number of frames on axis 0 of the observation, the
      newest one last. Each observation is the previous one moved on by one
      frame, or S copies of one frame. 1 means that no frames are stacked.
    observe: `(obs) -> obs`, runs on the device. It converts observations
      `[B, ...]` from the library's format to the format that the attribute
      `obs` describes; for example, a category becomes a one-hot vector.
    to_library: `(action) -> action`, converts actions `[B, ...]` to the
      library's format. The library's first category may have another number
      than 0.
    obs_scale: tree like `obs`, but without a mask. A network divides each leaf
      by its scale, a float or an array that broadcasts to the leaf's shape.
      None means 255 for uint8, and 1 for other dtypes.
    cut: `(obs) -> obs`, runs on the host before `observe`. It converts the
      library's observations `[B, ...]` to 32 bits.
    has_turns: whether the agent plays both sides of a zero-sum game for two.
      Each observation and reward is that of the player who moves. A gain for
      one player is an equal loss for the other, so the value after a step is
      multiplied by -1 if the other player moves next.
    simulate: `(rng_key, env_state, action) -> (env_state, TimeStep)`, a step of
      one environment that an agent imagines. `env_state` is an element of the
      state of a `DeviceEnv`. After the end of an episode, the discount is 0.
      It is None if the environment cannot be simulated.
    has_pool: whether earlier versions of the agent play a part of the games;
      see `DeviceEnv.with_pool`.
  """

  obs: Tree
  channels_first: bool
  action: Discrete | MultiDiscrete | Box
  frame_skip: int
  max_episode_steps: int
  frame_stack: int = 1
  observe: Callable[[Tree], Tree] = lambda obs: obs
  to_library: Callable[[Array], Array] = lambda action: action
  obs_scale: Tree = None
  cut: Callable[[Tree], Tree] = lambda obs: obs
  has_turns: bool = False
  simulate: Callable[[Any, Tree, Array], tuple[Tree, TimeStep]] | None = None
  has_pool: bool = False


class DeviceEnv(NamedTuple):
  """A batch of B environments written in JAX; `envs.autoreset` builds one.

  Attributes:
    spec: describes one environment.
    reset: `(rng_key[B]) -> (env_state[B], TimeStep[B])`. In the returned time
      steps, `is_first` is true, the reward is 0 and the discount is 1.
    step: `(env_state[B], action[B]) -> (env_state[B], TimeStep[B])`. The step
      after an episode's last step ignores the action and returns the first time
      step of the next episode, as in dm_env. `env_state` contains the keys for
      random numbers.
    render: `(env_state[B]) -> uint8 [H, W, 3]`, draws the first environment, or
      raises the library's error. It is None if the environment cannot be drawn.
    with_pool: `(choose) -> DeviceEnv`, the same environments, where `choose`,
      like `Agent.play_earlier` without the variables, moves for the earlier
      versions of the agent. None if there are no earlier versions.
  """

  spec: EnvSpec
  reset: Callable[[chex.PRNGKey], tuple[Tree, TimeStep]]
  step: Callable[[Tree, Array], tuple[Tree, TimeStep]]
  render: Callable[[Tree], np.ndarray] | None = None
  with_pool: Callable[[Callable[..., Array]], 'DeviceEnv'] | None = None


class XlaEnv(NamedTuple):
  """How a compiled program on a CPU device steps a batch of host environments.

  Attributes:
    init: `(begin, end) -> env_state`, called once, after `HostEnv.reset`. It
      returns None if this version of JAX cannot step the environments. The
      program calls `begin() -> bool` before each step and `end()` after it. If
      `begin` returns false, the environments do not step, the result of the
      step is undefined, and the program does not call `end`. If either raises
      an exception, the program fails with a `JaxRuntimeError` that names it.
    step: `(env_state, action) -> (env_state, TimeStep)`, for traced arrays. It
      is the same function for all batches of one task and size, so that they
      can share a compiled program: `env_state` tells which batch steps.
  """

  init: Callable[[Callable[[], bool], Callable[[], None]], Tree | None]
  step: Callable[[Tree, Array], tuple[Tree, TimeStep]]


class HostEnv(NamedTuple):
  """A batch of B environments on the host's CPUs, in numpy.

  Attributes:
    spec: describes one environment.
    reset: `() -> TimeStep`, with leaves `[B, ...]` and `is_first` true. podrl
      calls it once. The observations of `reset` and `step` have the library's
      format; `spec.observe` converts them on the device.
    step: `(action) -> TimeStep`, for actions `[B, ...]`. A call does not change
      arrays that an earlier call returned. The step after an episode's last
      step ignores the action and returns the first time step of the next
      episode.
    close: `() -> None`, frees the environments.
    render: `() -> uint8 [H, W, 3]`, draws the first environment, or raises the
      library's error. `render` is None if the environment cannot be drawn.
    xla: steps the same environments as `step`, but without Python. It is None
      if the library cannot do this, or if `step` was replaced.
  """

  spec: EnvSpec
  reset: Callable[[], TimeStep]
  step: Callable[[np.ndarray], TimeStep]
  close: Callable[[], None]
  render: Callable[[], np.ndarray] | None = None
  xla: XlaEnv | None = None


class Sample(NamedTuple):
  """Sequences to learn from: an unroll, or a sample of a memory.

  Attributes:
    trajectory: B sequences.
    index: int32 `[B]`, identifies the sequences in the memory; `()` without a
      memory.
    weight: float32 `[B]`, importance weights; 1 without a memory. A sequence
      with weight 0 is not valid, and the loss must not depend on it.
  """

  trajectory: Trajectory
  index: Tree  # type: ignore[assignment]  # It hides `tuple.index`.
  weight: Array


class LossOutput(NamedTuple):
  """What `Agent.loss` returns besides the loss.

  Attributes:
    metrics: float32 `[]` each.
    priority: float32 `[rows]`, a new priority for each row of the batch, at
      least 0; `()` if the agent does not prioritise.
  """

  metrics: Metrics
  priority: Tree = ()


class Memory(NamedTuple):
  """What a learner remembers, on its own device; pure functions.

  A memory is a tuple `(storage, priorities)`. The learner keeps the storage
  outside of loops and conditions, because XLA copies what they pass on.

  Attributes:
    init: `(example_trajectory) -> memory`, empty, for unrolls of this shape.
      The example may consist of `jax.ShapeDtypeStruct`s.
    add: `(memory, trajectory) -> memory`. A sequence goes on over two unrolls
      only where `env_index` and `num_steps` follow. New sequences get the
      largest priority.
    is_ready: `(memory) -> bool []`, whether there is enough to learn from. The
      learner waits until this is true on all devices.
    sample: `(memory, rng_key, hyperparams) -> Sample`, sequences of one length.
    prioritise: `(priorities, index, priority) -> priorities`, for the `index`
      of a sample and the priorities that the loss returned.
    split_axes: a tree of ints like a memory, the axis of each leaf that is
      split over devices; -1 for a leaf that is the same on all devices.
  """

  init: Callable[[Trajectory], tuple[Tree, Tree]]
  add: Callable[[tuple[Tree, Tree], Trajectory], tuple[Tree, Tree]]
  is_ready: Callable[[tuple[Tree, Tree]], Array]
  sample: Callable[[tuple[Tree, Tree], chex.PRNGKey, Hyperparams], Sample]
  prioritise: Callable[[Tree, Array, Array], Tree]
  split_axes: tuple[Tree, Tree]


class Agent(NamedTuple):
  """A learning algorithm, as pure functions.

  Attributes:
    init: `(rng_key) -> Variables`.
    initial_carry: `(env_index) -> carry`, leaves `[B, ...]`. `env_index` is
      int32 `[B]`, the environments' global indices. So the carry can contain
      what differs between environments, such as an exploration rate.
    act: `(variables, rng_key, timestep, carry, *, greedy=False) -> (action,
      extras, carry)`, all `[B, ...]`. `rng_key` has one key for each
      environment, so that the actions of an environment do not depend on the
      rest of the batch.
    prepare: `(variables, target_params, sample, rng_key, mean) -> batch`.
      Without a memory, it is called once per unroll, else once per optimiser
      step. `sample` is a `Sample` of `[T+1, B]`, and `rng_key` has one key for
      each of the B sequences. `mean` averages a small tree over all devices.
      Axis 0 of every leaf of `batch` is split into minibatches.
    loss: `(variables, target_params, batch, rng_key) -> (scalar, LossOutput)`.
      `rng_key` has one key for each row of the batch. The scalar is a mean over
      the rows of the batch. The learner computes the gradient of the scalar
      with respect to `variables.params`.
    measure: `(variables, trajectory) -> tree`, float32 means over this device's
      shard of the trajectory. The learner averages them over devices and passes
      them to `absorb`.
    absorb: `(variables, measured) -> variables`, updates the statistics. It is
      called once per update, after the optimiser's steps.
    plans: whether `act` also takes the keyword `env_state`, the states of the
      environments `[B]`, which it simulates; see `EnvSpec.simulate`. Without
      it, `act` does not search.
    play_earlier: `(variables, rng_key, obs, ticket) -> action`, what an earlier
      version of the agent does at one observation; `ticket`, int32 `[]`, says
      which version. None if there are no earlier versions.
    calibrate: `(variables, trajectory, mean) -> variables`, called at the start
      of each update. It sets statistics that have no value yet, from the first
      unroll. `mean` is as in `prepare`. None means that there are no such
      statistics.
  """

  init: Callable[[chex.PRNGKey], Variables]
  initial_carry: Callable[[Array], Tree]
  act: Callable[..., tuple[Array, Tree, Tree]]
  prepare: Callable[
    [Variables, Tree, Sample, chex.PRNGKey, Callable[[Tree], Tree]], Tree
  ]
  loss: Callable[
    [Variables, Tree, Tree, chex.PRNGKey], tuple[Array, LossOutput]
  ]
  measure: Callable[[Variables, Trajectory], Tree] = (
    lambda variables, trajectory: ()
  )
  absorb: Callable[[Variables, Tree], Variables] = lambda variables, measured: (
    variables
  )
  calibrate: (
    Callable[[Variables, Trajectory, Callable[[Tree], Tree]], Variables] | None
  ) = None
  plans: bool = False
  play_earlier: Callable[..., Array] | None = None

  def planning(self, env_state: Tree) -> dict[str, Tree]:
    """Returns the further arguments of `act`, by keyword.

    It is `env_state`, leaves `[B, ...]`, if the agent `plans`.
    """
    return {'env_state': env_state} if self.plans else {}

  def act_once(
    self, variables: Variables, rng_key: chex.PRNGKey, obs: Tree
  ) -> Array:
    """Returns the action for one observation, if no carry changes actions."""
    timestep = TimeStep(obs, jnp.zeros(()), jnp.ones(()), jnp.bool(False))
    timestep = jax.tree.map(lambda x: x[None], timestep)
    carry = self.initial_carry(np.zeros(1, np.int32))
    return self.act(variables, rng_key[None], timestep, carry)[0][0]


_SAME: Any = -1  # See `Learner.split_axes`.


class UpdateParts(NamedTuple):
  """`Learner.update` as several functions, which may be separate programs.

  One after the other, they compute exactly what `update` computes. Like it,
  they run on each device, mapped over `DEVICE_AXIS`.

  Attributes:
    num_steps: the number of optimiser steps of an update.
    begin: `(state, trajectory, rng_key) -> (state, work, means)` does what
      comes before the optimiser steps. `work` is what they need, and differs
      between devices. `means` has a row of zeros for each step.
    steps: `(state, work, means, first, last) -> (state, means)` takes the
      optimiser steps from `first` to `last - 1`, int32 `[]`.
    end: `(state, means) -> (state, metrics)`.
  """

  num_steps: int
  begin: Callable[
    [LearnerState, Trajectory, chex.PRNGKey], tuple[LearnerState, Tree, Tree]
  ]
  steps: Callable[..., tuple[LearnerState, Tree]]
  end: Callable[[LearnerState, Tree], tuple[LearnerState, Metrics]]


class Learner(NamedTuple):
  """Pure functions that change an agent's parameters.

  Attributes:
    init: `(rng_key, example_trajectory) -> LearnerState`. The example has the
      shape of one device's shard; only a memory's size depends on it.
    update: `(state, trajectory, rng_key) -> (state, metrics)`. It runs on each
      device, mapped over `DEVICE_AXIS`, with that device's shard of the
      trajectory.
    split_axes: a `LearnerState` of ints, a tree prefix of the state: the axis
      of each leaf that is split over devices, or -1 where all devices have the
      same.
    parts: `update` in parts; None if it has only one optimiser step, or if it
      can run only as a whole.
  """

  init: Callable[[chex.PRNGKey, Trajectory], LearnerState]
  update: Callable[
    [LearnerState, Trajectory, chex.PRNGKey], tuple[LearnerState, Metrics]
  ]
  split_axes: Tree = LearnerState(*[_SAME] * 6)
  parts: UpdateParts | None = None


class Episodes(NamedTuple):
  """Sums over the episodes that ended during unrolls; leaves `[...]`.

  Attributes:
    num_episodes: int, number of episodes that ended. This is also the number of
      reset steps. A reset step is not an environment step.
    return_sum: float, sum of the ended episodes' returns.
    length_sum: int, sum of the ended episodes' lengths in steps.
  """

  num_episodes: Array
  return_sum: Array
  length_sum: Array


class InfoSums(NamedTuple):
  """Sums for one name of `TimeStep.info`, over ended episodes; leaves `[...]`.

  Attributes:
    mean_sum: float, sum of the episodes' means per step.
    num_episodes: int, number of these episodes. An episode in which no value
      counts is not one of them.
  """

  mean_sum: Array
  num_episodes: Array


class Culprit(NamedTuple):
  """A number that may have made the loss NaN or infinite.

  The number is a reward or a part of an observation.

  Attributes:
    field: 'reward', 'observation', or a part such as "observation['x']".
    value: the number, which is NaN, infinite or large.
    step: number of the environment's earlier steps, reset steps included.
    env: global index of the environment.
    element: index of the number in the flattened array.
  """

  field: str
  value: float
  step: int
  env: int
  element: int


class Report(NamedTuple):
  """The result of one call of `Driver.advance`, which ran N updates.

  Attributes:
    metrics: float32 `[N]` each, the learner's metrics. They are the same in
      all processes.
    episodes: leaves `[N, ...]`, one row for each update.
    num_predictions: number of actions that the agent chose, including
      those at reset steps.
    seconds: wall time of the call.
    is_finite: false if the call ended with update N + 1, because the loss of
      this update was NaN or infinite.
    stages: seconds spent in each stage. Divided by `seconds`, they are shares.
    own: `[N]` each, metrics of this process only.
    decisions: what the driver decided during the call, as JSON.
    culprit: the number in this process that may have made `is_finite` false;
      None if podrl found no such number.
    info: leaves `[N, ...]`, the sums for each name of `TimeStep.info`.
    finished: `(update, return, length)` of each episode in `episodes`, where
      `update` is its row. Empty unless the driver was told to keep them.
  """

  metrics: dict[str, np.ndarray]
  episodes: Episodes
  num_predictions: int
  seconds: float
  is_finite: bool
  stages: dict[str, float]
  own: dict[str, np.ndarray]
  decisions: Sequence[dict[str, Any]] = ()
  culprit: Culprit | None = None
  info: Mapping[str, InfoSums] = {}
  finished: Sequence[tuple[int, float, int]] = ()

  @property
  def num_updates(self) -> int:
    """N, the number of updates."""
    return len(self.episodes.num_episodes)


# This function takes the initial state of a run. It returns the state to start
# from, and a list with the result of `Driver.progress` in each process of the
# saved run. The list is empty if the run is new.
Restore = Callable[[Tree], tuple[Tree, list[dict[str, Any]]]]


class Driver(Protocol):
  """The interface between an architecture and the training loop.

  Attributes:
    state: arrays of the whole run, which a checkpoint stores; None before
      `start`. The next `advance` may delete these arrays.
    learner_state: the learner's part of `state`.
    error: the exception that ended one of the driver's threads, if any.
  """

  error: BaseException | None

  @property
  def state(self) -> Tree: ...

  @property
  def learner_state(self) -> LearnerState | None: ...

  def start(self, restore: Restore) -> None:
    """Makes the initial state, calls `restore` with it, and compiles."""

  def plan(self) -> dict[str, Any]:
    """Returns the `plan` for `advance`, as JSON; only process 0 calls this."""

  def advance(self, num_updates: int, plan: Mapping[str, Any]) -> list[Report]:
    """Runs at most `num_updates` updates; returns a report for each agent."""

  def describe(self, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that the driver adds to a record of metrics."""

  def progress(self) -> dict[str, Any]:
    """Returns what a resumed run needs in addition to `state`, as JSON."""

  def stop(self) -> None:
    """Makes `advance` return early; a signal handler may call `stop`."""

  def close(self) -> list[str]:
    """Ends all threads; returns the names of the threads that hang."""
