"""What the actor-critic agents share: acting, ratios, and their assembly."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.core import distributions, normalization
from podrl.core.distributions import Distribution
from podrl.networks import actor_critic, torsos
from podrl.networks.actor_critic import Network
from podrl.types import Agent, Array, EnvSpec, TimeStep, Tree

# Larger log-ratios are far beyond every clip. Continuous actions have them, and
# an infinite ratio times a weight of 0 is NaN.
_MAX_LOG_RATIO = 20.0


class Extras(NamedTuple):
  """What `act` stores beside each action, `[..., B]` each.

  Attributes:
    sample: the distribution's sample; the action is `to_action(sample)`.
    log_prob: float32, the action's log-probability under the behaviour policy.
    value: float32, the value of the time step, or `()`.
  """

  sample: Array
  log_prob: Array
  value: Array | tuple[()]


def make_act(
  network: Network, distribution: Distribution, *, stores_value: bool
) -> Callable[..., tuple[Array, Extras, Tree]]:
  """Builds `Agent.act`; its extras are `Extras`.

  Args:
    network: the policy and the value.
    distribution: gives the policy head its meaning.
    stores_value: whether the extras contain the value.
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
    extras = Extras(sample, log_prob, value if stores_value else ())
    return distribution.to_action(sample), extras, carry

  return act


def log_ratio(log_prob: Array, behaviour_log_prob: Array) -> Array:
  """The log of the importance ratio, bounded so that its exp is finite."""
  return jnp.minimum(log_prob - behaviour_log_prob, _MAX_LOG_RATIO)


def clip_reward(reward: Array, bound: float) -> Array:
  """Clips rewards to [-bound, bound]; a bound of 0 changes nothing."""
  return jnp.clip(reward, -bound, bound) if bound else reward


def assemble(
  make_agent: Callable[..., Agent],
  spec: EnvSpec,
  fields: Mapping[str, Any],
  network_fields: Mapping[str, Any],
) -> Agent:
  """Builds an agent with its distribution, torso, network and normalisation.

  Args:
    make_agent: `(network, distribution, **fields) -> Agent`.
    spec: describes the environment.
    fields: the configuration's `agent.*` by short name, without `name`.
    network_fields: the configuration's `network.*` by short name.

  Raises:
    ValueError: if the distribution or the torso does not fit the environment.
  """
  fields = dict(fields)
  observations = fields.pop('normalize_observation')
  rewards = fields.pop('normalize_reward')
  distribution = distributions.for_action_space(
    spec.action,
    network_fields['distribution'],
    state_dependent_scale=network_fields['state_dependent_scale'],
    initial_scale=network_fields['initial_scale'],
  )
  hidden_sizes = network_fields['hidden_sizes']
  torso = torsos.make_torso(
    network_fields['name'],
    spec,
    hidden_sizes=hidden_sizes,
    dtype=network_fields['dtype'],
  )
  network = actor_critic.make_network(
    torso,
    normalization.as_float(spec.obs) if observations else spec.obs,
    distribution.num_params,
    shared_torso=network_fields['shared_torso'],
    num_constant_params=distribution.num_constant_params,
    core=network_fields['recurrent'],
    core_size=hidden_sizes[-1],
  )
  return normalization.normalize(
    make_agent(network, distribution, **fields),
    spec.obs,
    observations=observations,
    rewards=rewards,
    gamma=fields['gamma'],
  )
