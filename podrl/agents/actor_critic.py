"""Actor-critic agents with V-trace: IMPALA, and A2C where nothing is stale."""

from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl import losses
from podrl import returns
from podrl.distributions import Distribution
from podrl.types import Agent, Array, Metrics, TimeStep, Trajectory, Tree


class Extras(NamedTuple):
  """What acting notes, `[..., B]` float32 each."""
  log_prob: Array
  value: Array | tuple[()]


def make_policy(network: nn.Module, distribution: Distribution, obs: Tree, *,
                notes_value: bool):
  """The `init`, `initial_carry` and `act` that feed-forward agents share.

  Args:
    network: from observations `[N, ...]` to a policy head and values `[N]`.
    distribution: what the policy head means.
    obs: tree of `jax.ShapeDtypeStruct`, one environment's observation.
    notes_value: whether the extras have the value; acting then computes it.

  Returns:
    The three functions of `Agent`; the extras are `Extras`.
  """

  def init(rng_key: chex.PRNGKey) -> Tree:
    example = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), obs)
    return network.init(rng_key, example)

  def initial_carry(batch_size: int) -> Tree:
    del batch_size
    return ()

  def act(
      params: Tree, rng_key: chex.PRNGKey, timestep: TimeStep, carry: Tree, *,
      greedy: bool = False) -> tuple[Array, Extras, Tree]:
    head, value = network.apply(params, timestep.obs)
    if greedy:
      action = distribution.mode(head)
    else:
      action = jax.vmap(distribution.sample)(rng_key, head)
    log_prob = distribution.log_prob(head, action)
    return action, Extras(log_prob, value if notes_value else ()), carry

  return init, initial_carry, act


def clip_reward(reward: Array, bound: float) -> Array:
  """Rewards clipped to [-bound, bound]; 0 leaves them as they are."""
  return jnp.clip(reward, -bound, bound) if bound else reward


def make_agent(
    network: nn.Module,
    distribution: Distribution,
    obs: Tree,
    *,
    off_policy_correction: bool,
    gamma: float = 0.99,
    lambda_: float = 1.,
    entropy_cost: float = 0.01,
    value_cost: float = 0.5,
    reward_clip: float = 0.,
) -> Agent:
  """An advantage actor-critic.

  Its batch keeps whole sequences, `[B, T, ...]`, and the loss evaluates the
  network on all T + 1 steps.

  Args:
    network: from observations `[N, ...]` to a policy head and values `[N]`.
    distribution: what the policy head means.
    obs: tree of `jax.ShapeDtypeStruct`, one environment's observation.
    off_policy_correction: IMPALA's importance ratios; without them the agent
      is A2C, and its data must come from the policy that learns.
    gamma: discount per step.
    lambda_: mixes one-step (0) and full (1) returns.
    entropy_cost: weight of the entropy bonus.
    value_cost: weight of the value loss.
    reward_clip: clip rewards to plus and minus this; 0 is off.

  Source: Espeholt et al. 2018, arXiv:1802.01561, section 4.2; Mnih et al.
  2016, arXiv:1602.01783, section 4.
  """

  def prepare(params: Tree, trajectory: Trajectory, mean) -> Tree:
    del params, mean
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), trajectory)

  def loss(
      params: Tree, target_params: Tree, batch: Tree, rng_key: chex.PRNGKey
  ) -> tuple[Array, Metrics]:
    del target_params, rng_key
    trajectory = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batch)
    timestep = trajectory.timestep
    shape = timestep.is_first.shape
    flat_obs = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]), timestep.obs)
    head, values = network.apply(params, flat_obs)
    head, values = head.reshape(*shape, -1)[:-1], values.reshape(shape)
    log_prob = distribution.log_prob(head, trajectory.action)
    weight = returns.weights(timestep)
    ratio = weight
    if off_policy_correction:
      ratio = weight * jnp.exp(log_prob - trajectory.extras.log_prob)
    errors, advantages = returns.vtrace(
        jax.lax.stop_gradient(values),
        clip_reward(timestep.reward[1:], reward_clip),
        gamma * timestep.discount[1:],
        jax.lax.stop_gradient(ratio),
        lambda_=lambda_)
    target = jax.lax.stop_gradient(values[:-1]) + errors
    policy_loss = losses.policy_gradient(log_prob, advantages, weight)
    value_loss = losses.value(values[:-1], target, weight)
    entropy = losses.entropy(distribution.entropy(head), weight)
    total = policy_loss + value_cost * value_loss - entropy_cost * entropy
    return total, {'policy_loss': policy_loss, 'value_loss': value_loss,
                   'entropy': entropy}

  return Agent(
      *make_policy(network, distribution, obs, notes_value=False),
      prepare=prepare, loss=loss)
