"""Running normalisation of observations and rewards, around any agent.

The statistics are part of the agent's parameters, so that they go wherever
these go, and are the same on all devices. They count every step that is learnt
from once, but for the first unroll's, which give the first mean alone: measured
about 0, its variance would be inexact. An update uses those that it finds, which
without policy lag are the ones that acting used, and changes them at its end.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.types import (
  Agent,
  Array,
  Metrics,
  TimeStep,
  Tracked,
  Trajectory,
  Tree,
)

_LARGEST = 10.0  # In standard deviations, of an observation or a reward.
_EPSILON = 1e-8


class Moments(NamedTuple):
  """Running moments of a tree.

  Attributes:
    mean: float32 leaves.
    variance: the same shapes; 1 until the second unroll.
    count: float32 `[]`, in unrolls; the first counts next to nothing.
  """

  mean: Tree
  variance: Tree
  count: Array


class Measured(NamedTuple):
  """Means over the slots of an unroll; the weight is 1 where a slot counts.

  Attributes:
    share: float32 `[]`, of the weight.
    first: float32 leaves, of weight (x - m), m being the running mean.
    second: the same, of weight (x - m)^2.
  """

  share: Array
  first: Tree
  second: Tree


class Statistics(NamedTuple):
  """What is normalised; `()` is what is not.

  Attributes:
    obs: of observations.
    discounted_return: of the discounted sum of an episode's rewards so far.
  """

  obs: Moments | tuple[()]
  discounted_return: Moments | tuple[()]


class Carry(NamedTuple):
  """What an agent with normalisation carries from step to step.

  Attributes:
    agent: the carry of the agent itself.
    discounted_return: `[B]` float32, of the episode's rewards so far, or `()`.
  """

  agent: Tree
  discounted_return: Array | tuple[()]


def init(obs: Tree) -> Moments:
  """Moments before the first unroll, of a tree of shapes: 0 and 1."""
  return Moments(
    jax.tree.map(lambda x: jnp.zeros(x.shape), obs),
    jax.tree.map(lambda x: jnp.ones(x.shape), obs),
    jnp.zeros(()),
  )


def measure(moments: Moments, x: Tree, weight: Array) -> Measured:
  """What `absorb` needs of an unroll's slots.

  Args:
    moments: those so far.
    x: leaves `[T, B, ...]`.
    weight: `[T, B]` float32.
  """

  def mean(power: int) -> Tree:
    def one(x: Array, center: Array) -> Array:
      chex.assert_equal_shape([x[0, 0], center])
      # About the running mean: of raw squares little would be left.
      x = (x.astype(jnp.float32) - center[None, None]) ** power
      return jnp.mean(
        x * weight.reshape(*weight.shape, *[1] * center.ndim), (0, 1)
      )

    return jax.tree.map(one, x, moments.mean)

  return Measured(jnp.mean(weight), mean(1), mean(2))


def absorb(moments: Moments, measured: Measured) -> Moments:
  """The moments of what was counted before and of what was measured.

  Source: Chan et al. 1979, Updating Formulae and a Pairwise Algorithm for
  Computing Sample Variances, eq. 2.1.
  """
  share = measured.share
  safe = jnp.maximum(share, _EPSILON)  # Joints alone have a share of 0.
  shift = jax.tree.map(lambda x: x / safe, measured.first)
  is_first = moments.count == 0.0
  count = moments.count + jnp.where(is_first, _EPSILON, 1.0) * share
  gain = jnp.where(is_first, 1.0, share / jnp.maximum(count, _EPSILON))

  def variance(old: Array, second: Array, shift: Array) -> Array:
    new = jnp.maximum(second / safe - jnp.square(shift), 0.0)
    merged = old + gain * (new - old) + gain * (1.0 - gain) * jnp.square(shift)
    return jnp.where(is_first, old, merged)

  return Moments(
    jax.tree.map(lambda x, s: x + gain * s, moments.mean, shift),
    jax.tree.map(variance, moments.variance, measured.second, shift),
    count,
  )


def _scale(mean: Array, variance: Array) -> Array:
  """One over the deviation; 1 for what has hardly varied.

  Divided by their deviation, the rounding errors of a constant would be large,
  and would differ with the number of devices.
  """
  has_varied = variance > _EPSILON + jnp.square(1e-5 * mean)
  return jnp.where(
    has_varied, jax.lax.rsqrt(jnp.maximum(variance, _EPSILON)), 1.0
  )


def _standardize(moments: Moments, obs: Tree) -> Tree:
  """Observations `[..., *obs_shape]` in standard deviations, and clipped."""

  def one(x: Array, mean: Array, variance: Array) -> Array:
    mean, scale = (
      y.reshape((1,) * (x.ndim - y.ndim) + y.shape)
      for y in (mean, _scale(mean, variance))
    )
    return jnp.clip((x.astype(jnp.float32) - mean) * scale, -_LARGEST, _LARGEST)

  return jax.tree.map(one, obs, moments.mean, moments.variance)


def as_float(obs: Tree) -> Tree:
  """The specification of observations once they are normalised."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), obs)


def normalize(
  agent: Agent, obs: Tree, *, observations: bool, rewards: bool, gamma: float
) -> Agent:
  """An agent that sees normalised observations or rewards.

  Observations have their running mean subtracted, rewards do not. Then both are
  divided by a running deviation, rewards by that of the discounted return so
  far, for all environments alike; and clipped to plus and minus 10.

  Args:
    agent: made for `as_float(obs)` where observations are normalised.
    obs: tree of `jax.ShapeDtypeStruct`, one environment's observation.
    observations: whether to normalise them.
    rewards: whether to normalise them.
    gamma: discount per step of the discounted return.

  Returns:
    The agent, its parameters being `Tracked` ones, or the same agent where
    nothing is normalised.

  Source: Engstrom et al. 2020, arXiv:2005.12729, section 3 and algorithm 1.
  """
  if not (observations or rewards):
    return agent

  def seen(statistics: Statistics, timestep: TimeStep) -> TimeStep:
    return (
      timestep
      if not observations
      else timestep._replace(obs=_standardize(statistics.obs, timestep.obs))
    )

  def accumulate(before: Array, timestep: TimeStep) -> Array:
    """The discounted return on arrival; `[B]`."""
    return jnp.where(timestep.is_first, 0.0, gamma * before + timestep.reward)

  def init_params(rng_key: chex.PRNGKey) -> Tracked:
    return Tracked(
      agent.init(rng_key),
      Statistics(
        init(obs) if observations else (),
        init(jax.ShapeDtypeStruct((), jnp.float32)) if rewards else (),
      ),
    )

  def initial_carry(batch_size: int) -> Carry:
    return Carry(
      agent.initial_carry(batch_size), jnp.zeros(batch_size) if rewards else ()
    )

  def act(
    params: Tracked,
    rng_key: chex.PRNGKey,
    timestep: TimeStep,
    carry: Carry,
    *,
    greedy: bool = False,
  ) -> tuple[Array, Tree, Carry]:
    action, extras, agent_carry = agent.act(
      params.params,
      rng_key,
      seen(params.statistics, timestep),
      carry.agent,
      greedy=greedy,
    )
    return (
      action,
      extras,
      Carry(
        agent_carry,
        accumulate(carry.discounted_return, timestep) if rewards else (),
      ),
    )

  def prepare(
    params: Tracked, trajectory: Trajectory, mean: Callable[[Tree], Tree]
  ) -> Tree:
    timestep = seen(params.statistics, trajectory.timestep)
    if rewards:
      moments = params.statistics.discounted_return
      reward = timestep.reward * _scale(moments.mean, moments.variance)
      timestep = timestep._replace(reward=jnp.clip(reward, -_LARGEST, _LARGEST))
    return agent.prepare(
      params.params,
      trajectory._replace(timestep=timestep, carry=trajectory.carry.agent),
      mean,
    )

  def loss(
    params: Tracked, target_params: Tree, batch: Tree, rng_key: chex.PRNGKey
  ) -> tuple[Array, Metrics]:
    if target_params:
      target_params = target_params.params
    return agent.loss(params.params, target_params, batch, rng_key)

  def measure_all(params: Tracked, trajectory: Trajectory) -> Statistics:
    # The last post is the first of the next unroll.
    timestep = jax.tree.map(lambda x: x[:-1], trajectory.timestep)
    statistics, returns = params.statistics, ()
    if rewards:

      def step(before, timestep):
        after = accumulate(before, timestep)
        return after, after

      _, so_far = jax.lax.scan(
        step, trajectory.carry.discounted_return[0], timestep._replace(obs=())
      )
      weight = 1.0 - timestep.is_first.astype(jnp.float32)
      returns = measure(statistics.discounted_return, so_far, weight)
    return Statistics(
      measure(statistics.obs, timestep.obs, jnp.ones(timestep.is_first.shape))
      if observations
      else (),
      returns,
    )

  def absorb_all(params: Tracked, measured: Statistics) -> Tracked:
    return params._replace(
      statistics=Statistics(
        *(
          new and absorb(old, new)
          for old, new in zip(params.statistics, measured)
        )
      )
    )

  return Agent(
    init_params, initial_carry, act, prepare, loss, measure_all, absorb_all
  )
