"""Actor-critic agents with V-trace: IMPALA, and A2C where nothing is stale."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.core import losses, returns
from podrl.core.distributions import Distribution
from podrl.networks.actor_critic import Network
from podrl.types import Agent, Array, Metrics, TimeStep, Trajectory, Tree

# Of probability ratios, all far beyond what is clipped: continuous actions have
# larger ones, and an infinite one times a weight of 0 is NaN.
_MAX_LOG_RATIO = 20.0


class Extras(NamedTuple):
  """What acting notes, `[..., B]` each.

  Attributes:
    sample: what the distribution drew; the action is its image.
    log_prob: float32, of the action under the policy that acted.
    value: float32, of the time step, or `()`.
  """

  sample: Array
  log_prob: Array
  value: Array | tuple[()]


def make_act(
  network: Network, distribution: Distribution, *, notes_value: bool
) -> Callable[..., tuple[Array, Extras, Tree]]:
  """The `act` that the agents share.

  Args:
    network: the policy and the value.
    distribution: what the policy head means.
    notes_value: whether the extras have the value; acting then computes it.

  Returns:
    `Agent.act`; the extras are `Extras`.
  """

  def act(
    params: Tree,
    rng_key: chex.PRNGKey,
    timestep: TimeStep,
    carry: Tree,
    *,
    greedy: bool = False,
  ) -> tuple[Array, Extras, Tree]:
    obs, is_first = jax.tree.map(
      lambda x: x[None], (timestep.obs, timestep.is_first)
    )
    head, value, carry = network.unroll(params, obs, is_first, carry)
    head, value = head[0], value[0]
    if greedy:
      sample = distribution.mode(head)
    else:
      sample = jax.vmap(distribution.sample)(rng_key, head)
    log_prob = distribution.log_prob(head, sample)
    extras = Extras(sample, log_prob, value if notes_value else ())
    return distribution.to_action(sample), extras, carry

  return act


def log_ratio(log_prob: Array, behaviour_log_prob: Array) -> Array:
  """The log of an importance ratio, bounded above so that its exp is finite."""
  return jnp.minimum(log_prob - behaviour_log_prob, _MAX_LOG_RATIO)


def clip_reward(reward: Array, bound: float) -> Array:
  """Rewards clipped to [-bound, bound]; 0 leaves them as they are."""
  return jnp.clip(reward, -bound, bound) if bound else reward


def make_agent(
  network: Network,
  distribution: Distribution,
  *,
  off_policy_correction: bool,
  gamma: float = 0.99,
  lambda_: float = 1.0,
  entropy_cost: float = 0.01,
  value_cost: float = 0.5,
  reward_clip: float = 0.0,
) -> Agent:
  """An advantage actor-critic.

  Its batch keeps whole sequences, `[B, T, ...]`, and the loss evaluates the
  network on all T + 1 steps.

  Args:
    network: the policy and the value.
    distribution: what the policy head means.
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
    carry = jax.tree.map(lambda x: x[0], trajectory.carry)
    head, values, _ = network.unroll(
      params, timestep.obs, timestep.is_first, carry
    )
    head = head[:-1]
    log_prob = distribution.log_prob(head, trajectory.extras.sample)
    weight = returns.weights(timestep)
    ratio = weight
    if off_policy_correction:
      ratio = weight * jnp.exp(log_ratio(log_prob, trajectory.extras.log_prob))
    errors, advantages = returns.vtrace(
      jax.lax.stop_gradient(values),
      clip_reward(timestep.reward[1:], reward_clip),
      gamma * timestep.discount[1:],
      jax.lax.stop_gradient(ratio),
      lambda_=lambda_,
    )
    target = jax.lax.stop_gradient(values[:-1]) + errors
    policy_loss = losses.policy_gradient(log_prob, advantages, weight)
    value_loss = losses.value(values[:-1], target, weight)
    entropy = losses.entropy(distribution.entropy(head), weight)
    total = policy_loss + value_cost * value_loss - entropy_cost * entropy
    return total, {
      'policy_loss': policy_loss,
      'value_loss': value_loss,
      'entropy': entropy,
    }

  return Agent(
    init=network.init,
    initial_carry=network.initial_carry,
    act=make_act(network, distribution, notes_value=False),
    prepare=prepare,
    loss=loss,
  )
