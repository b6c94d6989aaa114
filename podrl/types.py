"""The types that every part of podrl shares.

An unroll is fence-posts and rails: T + 1 time steps and the T actions between
them. Shapes are written with T for time, B for the batch of environments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import chex
import numpy as np

Array = chex.Array
Tree = chex.ArrayTree
Metrics = dict[str, Array]

# The name of the one mesh axis over which a batch is split.
DEVICE_AXIS = 'devices'


class TimeStep(NamedTuple):
  """What an environment says on arrival.

  Attributes:
    obs: `[..., *obs_shape]`, in the smallest dtype that holds it exactly.
    reward: `[...]` float32, raw; 0 where `is_first`.
    discount: `[...]` float32, 0 if the episode terminated, else 1. It is 1 on
      truncation and does not include the agent's gamma.
    is_first: `[...]` bool; the first step of an episode. The action sent
      before it was ignored: the pair is the joint between two episodes.
  """

  obs: Tree
  reward: Array
  discount: Array
  is_first: Array


class Trajectory(NamedTuple):
  """An unroll of a batch of environments; every leaf has time, then batch.

  Attributes:
    timestep: leaves `[T+1, B, ...]`.
    action: `[T, B, ...]`; `action[t]` was chosen at `timestep[t]`. Where it is
      the image of a sample, `extras` hold that.
    extras: leaves `[T, B, ...]`, what `Agent.act` noted beside each action.
    carry: leaves `[1, B, ...]`, what `Agent.act` carried into the first step;
      `()` for an agent that carries nothing.
  """

  timestep: TimeStep
  action: Array
  extras: Tree
  carry: Tree


class Tracked(NamedTuple):
  """Parameters, and statistics beside them that no gradient changes.

  Attributes:
    params: what the optimiser changes.
    statistics: what `Agent.absorb` changes.
  """

  params: Tree
  statistics: Tree


class LearnerState(NamedTuple):
  """Everything that learning changes; replicated over devices.

  Attributes:
    params: the network's parameters, or `Tracked` ones.
    target_params: a periodic copy of them, or `()`.
    opt_state: the optax state.
    num_updates: int32 `[]`, calls of `Learner.update`.
    num_sgd_steps: int32 `[]`, optimiser steps.
    memory: `[capacity, T, B, ...]`, sharded on axis 2, or `()`.
  """

  params: Tree
  target_params: Tree
  opt_state: Tree
  num_updates: Array
  num_sgd_steps: Array
  memory: Tree


class Discrete(NamedTuple):
  """Actions 0, 1 ... num_actions - 1, as int32 `[]`."""

  num_actions: int


class Box(NamedTuple):
  """Actions float32 `[*shape]` between `low` and `high` (arrays of that shape)."""

  shape: tuple[int, ...]
  low: np.ndarray
  high: np.ndarray


class EnvSpec(NamedTuple):
  """What an agent and a driver need to know of one environment.

  Attributes:
    obs: tree of `jax.ShapeDtypeStruct`, without a batch axis.
    channels_first: whether images are CHW (Atari) rather than HWC.
    action: the action space.
    frame_skip: raw frames per environment step.
    max_episode_steps: after so many steps an episode is truncated; 0 or
      2**31 - 1 is never.
  """

  obs: Tree
  channels_first: bool
  action: Discrete | Box
  frame_skip: int
  max_episode_steps: int


class DeviceEnv(NamedTuple):
  """A batch of B environments written in JAX.

  `envs.joints.make_device_env` builds one from single-environment functions.

  Attributes:
    spec: the `EnvSpec` of one environment.
    reset: `(rng_key[B]) -> (env_state[B], TimeStep[B])`. In the time steps
      `is_first` is true, the reward 0 and the discount 1.
    step: `(env_state[B], action[B]) -> (env_state[B], TimeStep[B])`. The step
      after an episode's last ignores its action and returns the next episode's
      first time step, as in dm_env. Its random numbers come from `env_state`.
  """

  spec: EnvSpec
  reset: Callable[[chex.PRNGKey], tuple[Tree, TimeStep]]
  step: Callable[[Tree, Array], tuple[Tree, TimeStep]]


class HostEnv(NamedTuple):
  """A batch of B environments on the host's CPUs, in numpy.

  Attributes:
    spec: the `EnvSpec` of one of them.
    reset: `() -> TimeStep`, leaves `[B, ...]`, `is_first` set. Called once.
    step: `(action) -> TimeStep`, actions `[B, ...]`; the arrays that it
      returns are the caller's. The step after an episode's last ignores its
      action and returns the next episode's first time step.
    close: `() -> None`, frees what it holds.
    observe: `(obs) -> obs`, traced, on the device: from what `reset` and
      `step` return to what `spec.obs` says, for example a category to one-hot.
    render: `() -> uint8 [H, W, 3]`, a picture of the first of them as it is
      now, or None; raises what its library does where it cannot draw.
  """

  spec: EnvSpec
  reset: Callable[[], TimeStep]
  step: Callable[[np.ndarray], TimeStep]
  close: Callable[[], None]
  observe: Callable[[Tree], Tree] = lambda obs: obs
  render: Callable[[], np.ndarray] | None = None


class Agent(NamedTuple):
  """A learning algorithm, as pure functions.

  Attributes:
    init: `(rng_key) -> params`.
    initial_carry: `(batch_size) -> carry`, leaves `[B, ...]`.
    act: `(params, rng_key, timestep, carry, *, greedy=False) -> (action,
      extras, carry)`, all `[B, ...]`. `rng_key` holds one key for each
      environment, `[B]`, so that an environment's actions do not depend on
      which others share its batch.
    prepare: `(params, trajectory, mean) -> batch`, once per unroll and without
      gradients. `mean` averages a small tree over all devices. The leading
      axis of every leaf of `batch` is the one that minibatches divide.
    loss: `(params, target_params, batch, rng_key) -> (scalar, metrics)`; a
      mean over the batch's slots.
    measure: `(params, trajectory) -> tree` of float32, what the statistics of
      `Tracked` parameters are to learn from this device's shard: means, which
      the learner averages over devices.
    absorb: `(params, measured) -> params`, the statistics with that taken in;
      called once in an update, after the optimiser's steps.
  """

  init: Callable[[chex.PRNGKey], Tree]
  initial_carry: Callable[[int], Tree]
  act: Callable[..., tuple[Array, Tree, Tree]]
  prepare: Callable[[Tree, Trajectory, Callable[[Tree], Tree]], Tree]
  loss: Callable[[Tree, Tree, Tree, chex.PRNGKey], tuple[Array, Metrics]]
  measure: Callable[[Tree, Trajectory], Tree] = lambda params, trajectory: ()
  absorb: Callable[[Tree, Tree], Tree] = lambda params, measured: params


class Learner(NamedTuple):
  """How an agent's parameters change, as pure functions.

  Attributes:
    init: `(rng_key, example_trajectory) -> LearnerState`.
    update: `(state, trajectory, rng_key) -> (state, metrics)`. Call it under a
      mapping over `DEVICE_AXIS`, the trajectory being this device's shard.
  """

  init: Callable[[chex.PRNGKey, Trajectory], LearnerState]
  update: Callable[
    [LearnerState, Trajectory, chex.PRNGKey], tuple[LearnerState, Metrics]
  ]


class Episodes(NamedTuple):
  """Sums over the episodes that ended in unrolls; any leading axes.

  Attributes:
    num_episodes: int, number of episodes that ended.
    num_joints: int, number of joints. A joint is not an environment step.
    return_sum: float, sum of the ended episodes' returns.
    length_sum: int, sum of the ended episodes' lengths in steps.
  """

  num_episodes: Array
  num_joints: Array
  return_sum: Array
  length_sum: Array


class Report(NamedTuple):
  """The result of one call of `Driver.advance`, which ran N updates.

  Attributes:
    metrics: float32 `[N]` each, the learner's metrics. They are the same in
      all processes.
    episodes: leaves `[N, ...]`.
    num_predictions: number of actions that the agent chose, joints included.
    seconds: wall time of the call.
    is_finite: false if one more update ran and its loss was NaN or infinite.
      That update is not among the N.
    stages: seconds spent in each stage; divide by `seconds` for its share.
    own: `[N]` each, metrics of this process only.
    decisions: what the driver decided during the call, as JSON.
  """

  metrics: dict[str, np.ndarray]
  episodes: Episodes
  num_predictions: int
  seconds: float
  is_finite: bool
  stages: dict[str, float]
  own: dict[str, np.ndarray]
  decisions: Sequence[dict[str, Any]] = ()

  @property
  def num_updates(self) -> int:
    """N, the number of updates."""
    return len(self.episodes.num_joints)


# Takes the first state of a run. Returns the state to start from, and what
# `Driver.progress` returned in each process of the run that is resumed; an empty
# list if the run is new.
Restore = Callable[[Tree], tuple[Tree, list[dict[str, Any]]]]


class Driver(Protocol):
  """An architecture, as far as the training loop knows it.

  Attributes:
    state: arrays of the whole run, which a checkpoint stores; None before
      `start`. The next `advance` may delete their buffers.
    learner: the learner's part of `state`.
    error: the exception that ended one of the driver's threads, if any.
  """

  error: BaseException | None

  @property
  def state(self) -> Tree: ...

  @property
  def learner(self) -> LearnerState | None: ...

  def start(self, restore: Restore) -> None:
    """Makes the first state, restores it, and compiles."""

  def plan(self) -> dict[str, Any]:
    """Returns, as JSON, what the next `advance` needs in all processes.

    Only process 0 calls it.
    """

  def advance(self, num_updates: int, plan: Mapping[str, Any]) -> list[Report]:
    """Runs updates and returns a report for each agent.

    Args:
      num_updates: the most updates to run; a driver may run fewer.
      plan: what `plan` returned in process 0.
    """

  def describe(self, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the driver adds to a record of metrics."""

  def progress(self) -> dict[str, Any]:
    """Returns, as JSON, what a resumed run needs beside `state`."""

  def stop(self) -> None:
    """Makes `advance` return early; a signal handler may call it."""

  def close(self) -> list[str]:
    """Ends all threads and returns the names of those that hang."""
