"""Functions that several agents use: acting, losses, ratios, rows, rewards."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.core import distributions, meta, normalization, optimizers, pool
from podrl.core.distributions import Distribution
from podrl.core.observations import flatten, unflatten
from podrl.fields import COUNT, FRACTION, FROM_0, Field, Fields, Table, short
from podrl.kernels.dense import means
from podrl.networks import actor_critic, cores, torsos
from podrl.networks.actor_critic import Network
from podrl.networks.q import QNetwork
from podrl.types import (
  Agent,
  Array,
  Box,
  Discrete,
  EnvSpec,
  Hyperparams,
  LossOutput,
  Trajectory,
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


# The fields of every agent.
FIELDS = {
  'unroll_length': Field(32, 'Steps of each environment in an unroll.', COUNT),
  'agent.gamma': Field(0.99, 'Discount per step.', FRACTION, changeable=True),
  'agent.reward_clip': Field(
    0.0, 'Clips rewards to this absolute value; 0 means off.', FROM_0
  ),
  **normalization.FIELDS,
  **pool.FIELDS,
  **torsos.FIELDS,
  **torsos.OWN_FIELDS,
  **optimizers.FIELDS,
}
# Further fields of agents that learn from each unroll, instead of a memory.
PASSES = {
  'num_epochs': Field(1, 'Passes over the batch of each update.', COUNT),
  'num_minibatches': Field(1, 'Optimiser steps per pass.', COUNT),
  'agent.lambda_': Field(
    1.0,
    'Mix of one-step returns (0) and full returns (1).',
    FRACTION,
    changeable=True,
  ),
}
VALUE_COST = {
  'agent.value_cost': Field(
    0.5, 'Weight of the value loss.', FROM_0, changeable=True
  ),
}
ACTOR_CRITIC_FIELDS = {
  **FIELDS,
  **PASSES,
  'agent.entropy_cost': Field(
    0.01, 'Weight of the entropy bonus.', FROM_0, changeable=True
  ),
  **VALUE_COST,
  **torsos.POLICY_INPUTS,
  **actor_critic.FIELDS,
  **cores.FIELDS,
  **distributions.FIELDS,
  **optimizers.group_fields('actor', 'critic'),
  **meta.FIELDS,
}


def with_network(
  make_agent: Callable[..., Agent], table: Table
) -> Callable[[EnvSpec, Fields], Agent]:
  """Builds `AgentEntry.make_agent` of an actor-critic agent.

  Args:
    make_agent: `(network, distribution, **fields) -> Agent`. `fields` has the
      fields `agent.*` of `table` by short name.
    table: the agent's fields.
  """
  own = [
    name
    for name in table
    if name.startswith('agent.')
    and name not in normalization.FIELDS
    and name not in pool.FIELDS
  ]

  def make(spec: EnvSpec, fields: Fields) -> Agent:
    distribution = distributions.for_action_space(
      spec.action,
      fields['network.distribution'],
      state_dependent_scale=fields['network.state_dependent_scale'],
      initial_scale=fields['network.initial_scale'],
    )
    policy_torso, value_torso = torsos.build_torsos(spec, fields)
    network = actor_critic.make_network(
      policy_torso,
      spec.obs,
      distribution.num_params,
      shared_torso=fields['network.shared_torso'],
      num_constant_params=distribution.num_constant_params,
      make_value_torso=value_torso,
      **cores.options(fields),
    )
    options = {short(name): fields[name] for name in own}
    return make_agent(network, distribution, **options)

  return make


def bounded_distribution(action: Any) -> Distribution:
  """Builds the distribution over one discrete action or a box with bounds.

  It is categorical or a Gaussian whose samples tanh maps to the box. Other
  action spaces raise a ValueError.
  """
  if not isinstance(action, Discrete | Box):
    raise ValueError(
      f'the agent needs one discrete action or a box, not a '
      f'{type(action).__name__}; --agent=ppo accepts it'
    )
  name = 'tanh_gaussian' if isinstance(action, Box) else 'categorical'
  try:
    return distributions.for_action_space(
      action, name, state_dependent_scale=True
    )
  except ValueError as error:  # Its text names a field that the agent lacks.
    box: Any = action
    raise ValueError(
      'the agent needs actions with bounds, but they are from '
      f'{np.min(box.low)} to {np.max(box.high)}; use --agent=ppo'
    ) from error


def make_init(
  init: Callable[[chex.PRNGKey], Tree], **hyperparams: float
) -> Callable[[chex.PRNGKey], Variables]:
  """Builds `Agent.init` from a network's `init` and hyperparameters."""

  def init_variables(rng_key: chex.PRNGKey) -> Variables:
    values = {k: jnp.float32(x) for k, x in hyperparams.items()}
    return Variables(init(rng_key), (), values)

  return init_variables


def make_initial_carry(network: Network | QNetwork) -> Callable[[Array], Tree]:
  """Builds `Agent.initial_carry` for a network's carry."""
  return lambda env_index: network.initial_carry(len(env_index))


def make_act(
  network: Network, distribution: Distribution, *, stores_value: bool
) -> Callable[..., tuple[Array, Extras, Tree]]:
  """Builds `Agent.act`; if `stores_value`, the `Extras` have the value."""

  def act(variables, rng_key, timestep, carry, *, greedy=False):
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
  **metrics: Array,
) -> tuple[Array, LossOutput]:
  """Returns the weighted sum of the mean losses, and the means as metrics.

    policy_loss + value_cost * value_loss - entropy_cost * entropy

  The losses and the other metrics have the same shape, `[...]`.

  Source: Mnih et al. 2016, arXiv:1602.01783, section 4.
  """
  metrics = {
    'policy_loss': policy_loss,
    'value_loss': value_loss,
    'entropy': entropy,
  } | metrics
  metrics = dict(zip(metrics, means([*metrics.values()]), strict=True))
  total = metrics['policy_loss']
  total += hyperparams['value_cost'] * metrics['value_loss']
  total -= hyperparams['entropy_cost'] * metrics['entropy']
  return total, LossOutput(metrics)


def bootstrap_inputs(
  trajectory: Trajectory, is_recurrent: bool
) -> tuple[Tree, Array, Tree]:
  """Returns a network's inputs that give the outputs of the last time step.

  They are `(obs, is_first, carry)`, time first. Only a recurrent network needs
  the steps before the last one.
  """
  obs, is_first = trajectory.timestep.obs, trajectory.timestep.is_first
  if not is_recurrent:
    obs, is_first = jax.tree.map(lambda x: x[-1:], (obs, is_first))
  return obs, is_first, jax.tree.map(lambda x: x[0], trajectory.carry)


def swap_axes(tree: Any) -> Any:
  """Exchanges time and batch, the first two axes of all leaves."""
  return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)


def to_rows(batch: Any, network: Network | QNetwork) -> Any:
  """Changes leaves from `[T, B, ...]` to `[N, S, ...]`, a sequence per row.

  For a recurrent network, there is a sequence for each environment: N = B and
  S = T. Otherwise, every slot is a sequence of one step: N = T x B and S = 1.
  `batch` is a NamedTuple with the fields `carry` and `obs`. Each observation is
  flattened to a vector.
  """
  batch = batch._replace(obs=flatten(batch.obs, 2))
  if network.is_recurrent:
    return swap_axes(batch)
  return jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), batch)


def from_rows(batch: Any, network: Network | QNetwork) -> Any:
  """Changes rows of a minibatch, `[N, S, ...]`, to time first.

  Observations have their own shapes again, and the carry is `[N, ...]`. Without
  a recurrent network, the order of the steps is free: the first two axes are
  `[N / K, K]`.
  """
  if network.is_recurrent:
    batch = swap_axes(batch)
  else:
    # Usually, axis 1 contains one block of the minibatch (see
    # `kernels.blocks`): a TPU then reads the blocks without joining them.
    size = math.gcd(len(jax.tree.leaves(batch)[0]), 1024)
    batch = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[2:]), batch)
  return batch._replace(
    obs=unflatten(batch.obs, network.obs, 2),
    carry=jax.tree.map(lambda x: x[0], batch.carry),
  )


def log_ratio(log_prob: Array, behaviour_log_prob: Array) -> Array:
  """The log of the importance ratio, bounded so that its exp is finite."""
  return jnp.minimum(log_prob - behaviour_log_prob, _MAX_LOG_RATIO)


def clip_reward(reward: Array, bound: float) -> Array:
  """Clips rewards to [-bound, bound]; a bound of 0 changes nothing."""
  return jnp.clip(reward, -bound, bound) if bound else reward
