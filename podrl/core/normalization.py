"""Running normalisation of observations and rewards, as a wrapper of an agent.

The statistics are part of the agent's variables, so they are saved, copied and
replicated with the parameters. They count each step of the experience once. An
update changes the statistics only at its end. Without policy lag, acting and
learning use the same statistics. The first update is an exception: it learns
with the statistics of its own unroll, because there are no others.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.core.observations import without_mask
from podrl.fields import Field
from podrl.types import (
  Agent,
  Array,
  LossOutput,
  Masked,
  TimeStep,
  Trajectory,
  Tree,
  Variables,
)

FIELDS = {
  'agent.normalize_observation': Field(
    False, 'Standardises observations with running statistics.'
  ),
  'agent.normalize_reward': Field(
    False, 'Divides rewards by the running deviation of returns.'
  ),
}

_LARGEST = 10.0  # Values are clipped to this many standard deviations.
_EPSILON = 1e-8
_TINY = 1e-37  # Avoids a division by 0.
_HUGE = 1e15  # The sum of the squares of many such numbers is a finite float32.
# The measured deviation of a constant is at most this part of its mean.
_ROUNDING = 1e-6


class Moments(NamedTuple):
  """Running mean and variance of each leaf of a tree.

  Attributes:
    mean: float32 leaves.
    variance: float32 leaves.
    count: float32 `[]`, sum of `Measured.share` over the unrolls. It stops at
      2^24; then, the weight of a new unroll no longer falls.
  """

  mean: Tree
  variance: Tree
  count: Array  # type: ignore[assignment]  # It hides `tuple.count`.


class Measured(NamedTuple):
  """Means over the slots of an unroll, for a number x with running mean m."""

  share: Array  # Float32 `[]`, mean of the weights.
  first: Tree  # Float32 leaves, mean of weight * (x - m).
  second: Tree  # Float32 leaves, mean of weight * (x - m)^2.


class Statistics(NamedTuple):
  """`Moments` or `Measured` of each quantity.

  The value is `()` for a quantity that is not normalised. The discounted return
  is the discounted sum of an episode's rewards so far. `agent` contains the
  statistics of the wrapped agent.
  """

  agent: Tree
  obs: Tree
  discounted_return: Tree


class Carry(NamedTuple):
  """The wrapped agent's carry, and the discounted return, `[B]` or `()`."""

  agent: Tree
  discounted_return: Tree


def init(obs: Tree) -> Moments:
  """Initial moments for a tree of shapes: mean 0 and variance 1."""
  return Moments(
    jax.tree.map(lambda x: jnp.zeros(x.shape), obs),
    jax.tree.map(lambda x: jnp.ones(x.shape), obs),
    jnp.zeros(()),
  )


def measure(moments: Moments, x: Tree, weight: Array) -> Measured:
  """Computes the means that `absorb` needs, over the slots of an unroll.

  Args:
    moments: the moments before this unroll.
    x: leaves `[T, B, ...]`.
    weight: `[T, B]` float32.
  """

  def mean_power(power: int, x: Array, center: Array) -> Array:
    chex.assert_equal_shape([x[0, 0], center])
    # Subtract the running mean first: squares of x would lose precision.
    x = x.astype(jnp.float32) - center[None, None]
    # Infinity stays: it is an error of the environment.
    x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -_HUGE, _HUGE)) ** power
    slot_weight = weight.reshape(*weight.shape, *[1] * center.ndim)
    return jnp.mean(x * slot_weight, (0, 1))

  first, second = (
    jax.tree.map(functools.partial(mean_power, power), x, moments.mean)
    for power in (1, 2)
  )
  return Measured(jnp.mean(weight), first, second)


def absorb(moments: Moments, measured: Measured) -> Moments:
  """Updates the moments with the means that `measure` returned.

  Source: Chan et al. 1979, Updating Formulae and a Pairwise Algorithm for
  Computing Sample Variances, eq. 2.1.
  """
  share = measured.share
  # Avoids 0 / 0 if all are reset steps.
  safe_share = jnp.maximum(share, _EPSILON)
  shift = jax.tree.map(lambda x: x / safe_share, measured.first)
  count = moments.count + share
  gain = share / jnp.maximum(count, _EPSILON)

  def variance(old: Array, second: Array, shift: Array) -> Array:
    new = jnp.maximum(second / safe_share - jnp.square(shift), 0.0)
    return old + gain * (new - old) + gain * (1.0 - gain) * jnp.square(shift)

  return Moments(
    jax.tree.map(lambda x, s: x + gain * s, moments.mean, shift),
    jax.tree.map(variance, moments.variance, measured.second, shift),
    count,
  )


def calibrate(
  moments: Moments, x: Tree, weight: Array, mean: Callable[[Tree], Tree]
) -> Moments:
  """Returns moments with the mean and variance of one unroll, and a count of 0.

  The second pass measures around the mean that the first pass found: squares of
  x itself would lose precision.

  Args:
    moments: initial moments.
    x: leaves `[T, B, ...]`.
    weight: `[T, B]` float32.
    mean: averages a tree over devices.
  """
  for _ in range(2):
    measured = mean(measure(moments, x, weight))
    moments = absorb(moments, measured)._replace(count=moments.count)
  return moments


def _scale(mean: Array, variance: Array) -> Array:
  """Returns 1 / deviation, or 1 for a quantity that is almost constant.

  The measured deviation of a constant is only a rounding error. A division by
  this deviation would enlarge other rounding errors, which depend on the number
  of devices.
  """
  has_varied = variance > jnp.square(_ROUNDING * mean)
  scale = jax.lax.rsqrt(jnp.maximum(variance, _TINY))
  return jnp.where(has_varied, scale, 1.0)


def _clip(x: Array) -> Array:
  return jnp.clip(x, -_LARGEST, _LARGEST)


def _standardize(moments: Moments, obs: Tree) -> Tree:
  """Normalises and clips observations `[..., *obs_shape]`, but not a mask."""
  if isinstance(obs, Masked):
    return obs._replace(obs=_standardize(moments, obs.obs))

  def leaf(x: Array, mean: Array, variance: Array) -> Array:
    shape = (1,) * (x.ndim - mean.ndim) + mean.shape
    scale = _scale(mean, variance).reshape(shape)
    return _clip((x.astype(jnp.float32) - mean.reshape(shape)) * scale)

  return jax.tree.map(leaf, obs, moments.mean, moments.variance)


def as_float(obs: Tree) -> Tree:
  """Returns the shapes and dtypes of normalised observations."""
  if isinstance(obs, Masked):
    return obs._replace(obs=as_float(obs.obs))
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), obs)


def normalize(
  agent: Agent, obs: Tree, *, observations: bool, rewards: bool
) -> Agent:
  """Wraps an agent so that it sees normalised observations or rewards.

  The wrapper subtracts the running mean from observations and divides them by
  their running deviation. It divides rewards by the running deviation of the
  discounted return. All environments share these statistics. The discount is
  the hyperparameter 'gamma'. Normalised observations and rewards are clipped to
  [-10, 10].

  Args:
    agent: the agent to wrap. If observations are normalised, its network must
      be made for `as_float(obs)`.
    obs: tree of `jax.ShapeDtypeStruct`, one environment's observation.

  Returns:
    An agent whose statistics are `Statistics`, or `agent` if nothing is
    normalised.

  Source: Engstrom et al. 2020, arXiv:2005.12729, section 3 and algorithm 1.
  """
  if not (observations or rewards):
    return agent

  def normalize_obs(statistics: Statistics, timestep: TimeStep) -> TimeStep:
    if not observations:
      return timestep
    return timestep._replace(obs=_standardize(statistics.obs, timestep.obs))

  def accumulate(gamma: Array, before: Array, timestep: TimeStep) -> Array:
    """Returns the discounted return after this time step, `[B]`."""
    return jnp.where(timestep.is_first, 0.0, gamma * before + timestep.reward)

  def inner(variables: Variables) -> Variables:
    return variables._replace(statistics=variables.statistics.agent)

  def init_all(rng_key: chex.PRNGKey) -> Variables:
    variables = agent.init(rng_key)
    of_obs = init(without_mask(obs)) if observations else ()
    of_return = init(jnp.zeros(())) if rewards else ()
    statistics = Statistics(variables.statistics, of_obs, of_return)
    return variables._replace(statistics=statistics)

  def initial_carry(env_index: Array) -> Carry:
    discounted_return = jnp.zeros(len(env_index)) if rewards else ()
    return Carry(agent.initial_carry(env_index), discounted_return)

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    normalized = normalize_obs(variables.statistics, timestep)
    action, extras, agent_carry = agent.act(
      inner(variables), rng_key, normalized, carry.agent, greedy=greedy
    )
    discounted_return = carry.discounted_return
    if rewards:
      gamma = variables.hyperparams['gamma']
      discounted_return = accumulate(gamma, discounted_return, timestep)
    return action, extras, Carry(agent_carry, discounted_return)

  def normalize_all(variables: Variables, trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory as the wrapped agent sees it."""
    timestep = normalize_obs(variables.statistics, trajectory.timestep)
    if rewards:
      moments = variables.statistics.discounted_return
      scale = _scale(moments.mean, moments.variance)
      timestep = timestep._replace(reward=_clip(timestep.reward * scale))
    carry = trajectory.carry.agent if trajectory.carry else ()
    return trajectory._replace(timestep=timestep, carry=carry)

  def prepare(variables, target_params, sample, *arguments):
    seen = normalize_all(variables, sample.trajectory)
    sample = sample._replace(trajectory=seen)
    return agent.prepare(inner(variables), target_params, sample, *arguments)

  def loss(variables: Variables, *arguments: Tree) -> tuple[Array, LossOutput]:
    return agent.loss(inner(variables), *arguments)

  def quantities(variables: Variables, trajectory: Trajectory) -> list:
    """Returns the arguments of `measure` for each normalised quantity."""
    # The last time step counts as the first one of the next unroll.
    timestep = jax.tree.map(lambda x: x[:-1], trajectory.timestep)
    _, of_obs, of_return = variables.statistics
    found: list = [(), ()]
    if observations:
      weight = jnp.ones(timestep.is_first.shape)
      found[0] = of_obs, without_mask(timestep.obs), weight
    if rewards:

      def step(before, timestep):
        gamma = variables.hyperparams['gamma']
        after = accumulate(gamma, before, timestep)
        return after, after

      first = trajectory.carry.discounted_return[0]
      timestep = timestep._replace(obs=())
      _, discounted = jax.lax.scan(step, first, timestep, unroll=16)
      weight = 1.0 - timestep.is_first.astype(jnp.float32)
      found[1] = of_return, discounted, weight
    return found

  def calibrate_all(variables, trajectory, mean):
    _, *old = variables.statistics

    def first_moments(old: list) -> list:
      arguments = quantities(variables, trajectory)
      return [calibrate(x[0], x[1], x[2], mean) if x else () for x in arguments]

    count = next(x.count for x in old if x)
    new = jax.lax.cond(count == 0.0, first_moments, lambda old: old, old)
    statistics = variables.statistics._replace(
      obs=new[0], discounted_return=new[1]
    )
    return variables._replace(statistics=statistics)

  def measure_all(variables: Variables, trajectory: Trajectory) -> Statistics:
    of_agent = agent.measure(
      inner(variables), normalize_all(variables, trajectory)
    )
    arguments = quantities(variables, trajectory)
    return Statistics(of_agent, *(measure(*x) if x else () for x in arguments))

  def absorb_all(variables: Variables, measured: Statistics) -> Variables:
    of_agent = agent.absorb(inner(variables), measured.agent).statistics
    pairs = zip(variables.statistics[1:], measured[1:], strict=True)
    moments = [absorb(old, new) if new else () for old, new in pairs]
    return variables._replace(statistics=Statistics(of_agent, *moments))

  return Agent(
    init_all,
    initial_carry,
    act,
    prepare,
    loss,
    measure_all,
    absorb_all,
    calibrate_all,
  )
