"""Functions that all actor-critic agents use: acting, losses and ratios."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.core.distributions import Distribution
from podrl.networks.actor_critic import Network
from podrl.types import (
  Array,
  Hyperparams,
  LossOutput,
  TimeStep,
  Tree,
  Variables,
)

# Continuous actions can have huge log-ratios. Their exp could be infinite, and
# infinity times a weight of 0 is NaN. This bound is far above the usual clips.
_MAX_LOG_RATIO = 20.0


class Extras(NamedTuple):
  """What `act` returns with each action; leaves `[B, ...]`."""

  sample: Array  # The distribution's sample; the action is `to_action(sample)`.
  # Float32, the action's log-probability under the behaviour policy.
  log_prob: Array
  value: Array | tuple[()]  # Float32, the value of the time step, or `()`.


def make_init(
  init: Callable[[chex.PRNGKey], Tree], **hyperparams: float
) -> Callable[[chex.PRNGKey], Variables]:
  """Builds `Agent.init` from a network's `init` and hyperparameters."""

  def init_variables(rng_key: chex.PRNGKey) -> Variables:
    values = {k: jnp.float32(x) for k, x in hyperparams.items()}
    return Variables(init(rng_key), (), values)

  return init_variables


def make_initial_carry(network: Network) -> Callable[[Array], Tree]:
  """Builds `Agent.initial_carry` for a network's carry."""
  return lambda env_index: network.initial_carry(len(env_index))


def make_act(
  network: Network, distribution: Distribution, *, stores_value: bool
) -> Callable[..., tuple[Array, Extras, Tree]]:
  """Builds `Agent.act`; if `stores_value`, the `Extras` have the value."""

  def act(
    variables: Variables,
    rng_key: chex.PRNGKey,
    timestep: TimeStep,
    carry: Tree,
    *,
    greedy: bool = False,
  ) -> tuple[Array, Extras, Tree]:
    obs, is_first = jax.tree.map(
      lambda x: x[None], (timestep.obs, timestep.is_first)
    )
    head, value, carry = network.unroll(variables.params, obs, is_first, carry)
    head, value = head[0], value[0]
    if greedy:
      sample = distribution.mode(head)
    else:
      sample = jax.vmap(distribution.sample)(rng_key, head)
    log_prob = distribution.log_prob(head, sample)
    extras = Extras(sample, log_prob, value if stores_value else ())
    return distribution.to_action(sample), extras, carry

  return act


def combine_losses(
  hyperparams: Hyperparams,
  policy_loss: Array,
  value_loss: Array,
  entropy: Array,
) -> tuple[Array, LossOutput]:
  """Returns the weighted sum of the losses, and the losses as metrics.

    policy_loss + value_cost * value_loss - entropy_cost * entropy

  Source: Mnih et al. 2016, arXiv:1602.01783, section 4.
  """
  total = policy_loss + hyperparams['value_cost'] * value_loss
  total -= hyperparams['entropy_cost'] * entropy
  metrics = {
    'policy_loss': policy_loss,
    'value_loss': value_loss,
    'entropy': entropy,
  }
  return total, LossOutput(metrics)


def log_ratio(log_prob: Array, behaviour_log_prob: Array) -> Array:
  """The log of the importance ratio, bounded so that its exp is finite."""
  return jnp.minimum(log_prob - behaviour_log_prob, _MAX_LOG_RATIO)


def clip_reward(reward: Array, bound: float) -> Array:
  """Clips rewards to [-bound, bound]; a bound of 0 changes nothing."""
  return jnp.clip(reward, -bound, bound) if bound else reward
