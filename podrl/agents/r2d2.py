"""R2D2: recurrent Q-learning from a memory of sequences."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.agents import acting, dqn, exploring
from podrl.core import returns
from podrl.core.observations import hide_illegal
from podrl.types import (
  Agent,
  Array,
  EnvSpec,
  LossOutput,
  Metrics,
  Sample,
  TimeStep,
  Tree,
  Variables,
)

DEFAULTS = {
  'unroll_length': 20,
  'agent.epsilon': 0.4,
  'agent.epsilon_exponent': 7.0,
  'agent.n_steps': 5,
  'agent.target_period': 1,
  'agent.target_rate': 0.02,
  'agent.rescale_values': True,
  'agent.priority_mix': 0.9,
  'network.activation': 'relu',
  'network.recurrent': 'lstm',
  'network.memory_steps': 0,
  'optimizer.max_grad_norm': 40.0,
  'checkpoint.memory': True,
  'replay.capacity_steps': 100_000,
  'replay.min_steps': 5_000,
  'replay.batch_size': 64,
  'replay.sequence_length': 40,
  'replay.burn_in': 20,
  'replay.sgd_steps_per_update': 8,
  'replay.priority_exponent': 0.9,
  'replay.importance_exponent': 0.6,
  'log.every_updates': 50,
}

COMMENTS = {
  'agent.epsilon': 'Probability of a random action in environment 0.',
  'agent.epsilon_exponent': (
    'The last environment has the probability epsilon ** (1 + this number).'
  ),
  'agent.n_steps': dqn.COMMENTS['agent.n_steps'],
  'agent.target_period': dqn.COMMENTS['agent.target_period'],
  'agent.target_rate': dqn.COMMENTS['agent.target_rate'],
  'agent.rescale_values': 'The network predicts values on a compressed scale.',
  'agent.priority_mix': (
    "Weight of a sequence's largest error in its priority; the mean error has "
    'the rest.'
  ),
}

UNUSED = dqn.WITHOUT_PASSES
CHANGEABLE = (
  'agent.gamma',
  'agent.epsilon',
  'agent.epsilon_exponent',
  'replay.importance_exponent',
)

# See `AgentEntry.kinds`.
KINDS: dict[str, dict[str, Any]] = {
  'numbers': {
    'total_env_steps': 500_000,
    'env.num_envs': 32,
    'agent.normalize_reward': False,
    'agent.normalize_observation': False,
  },
  # Without a task for it, a long memory is slower to learn with.
  'memory': {
    'network.recurrent': 'lstm',
    'network.memory_steps': 100,
    'unroll_length': 20,
  },
  'small image': {'total_env_steps': 800_000},
  'large image': dqn.LARGE_IMAGE,
  'large image on a CPU': {  # It learns from each step about four times.
    'network.hidden_sizes': (256,),
    'optimizer.learning_rate': 2.5e-4,
    'replay.batch_size': 16,
    'replay.sgd_steps_per_update': 2,
  },
}


def check(fields: Mapping[str, Any]) -> None:
  """Raises a ValueError if a field is out of range."""
  dqn.check_targets(fields)
  acting.check_fractions(fields, 'agent.epsilon', 'agent.priority_mix')
  exponent = fields['agent.epsilon_exponent']
  if not 0 <= exponent < 1e6:
    raise ValueError(
      f'config.agent.epsilon_exponent={exponent} must be at least 0 and below '
      '1e6'
    )


def sequence_length(fields: Mapping[str, Any]) -> int:
  """Returns the transitions of a sequence, those for the burn-in included."""
  return fields['replay.burn_in'] + fields['replay.sequence_length']


class Carry(NamedTuple):
  """What the agent remembers of each environment."""

  network: Tree  # `[B, ...]`, the network's carry.
  env_index: Array  # Float32 `[B]`, global index of the environment.


class Extras(NamedTuple):
  """What `act` returns with each action."""

  carry: Tree  # `[B, ...]`, the network's carry before the step.


class Batch(NamedTuple):
  """Sequences `[N, ...]` without their burn-in; L transitions each."""

  timestep: TimeStep  # `[N, L + 1, ...]`.
  action: Array  # `[N, L]` int32.
  carry: Tree  # `[N, 1, ...]`, the network's carry before the first step.
  target_values: Array  # `[N, L + 1, A]` float32, of the target parameters.
  weight: Tree  # `[N]` float32.


def epsilon(hyperparams: Mapping[str, Array], env_index: Array) -> Array:
  """Returns each environment's probability of a random action, `[B]`.

    epsilon ** (1 + exponent * i / (N - 1)), for environment i of N

  Source: Horgan et al. 2018, arXiv:1803.00933, section 4.1.
  """
  chex.assert_rank(env_index, 1)
  last = jnp.maximum(hyperparams['num_envs'] - 1.0, 1.0)
  share = hyperparams['epsilon_exponent'] * env_index / last
  return hyperparams['epsilon'] ** (1.0 + share)


def make_agent(
  spec: EnvSpec,
  fields: Mapping[str, Any],
  network_fields: Mapping[str, Any],
) -> Agent:
  """Builds an R2D2 agent.

  Args:
    fields: the fields `agent.*` and `replay.*` by short name; see `COMMENTS`.
      The first `burn_in` steps of a sequence only renew the carry.
    network_fields: the fields `network.*` by short name.

  Raises:
    ValueError: if the actions are not discrete.

  Source: Kapturowski et al. 2019, Recurrent Experience Replay in Distributed
  Reinforcement Learning, sections 2.3 and 3.
  """
  network = exploring.build_network(spec, network_fields, is_duelling=True)
  burn_in = fields['burn_in']

  def rescale(x: Array) -> Array:
    return returns.rescale(x) if fields['rescale_values'] else x

  def inverse(x: Array) -> Array:
    return returns.inverse_rescale(x) if fields['rescale_values'] else x

  def unroll(
    params: Tree, obs: Tree, is_first: Array, carry: Tree
  ) -> tuple[Array, Tree]:
    outputs, carry = network.unroll(params, obs, is_first, carry)
    return hide_illegal(outputs[..., 0], obs), carry

  def act(
    variables: Variables,
    rng_key: chex.PRNGKey,
    timestep: TimeStep,
    carry: Carry,
    *,
    greedy: bool = False,
  ) -> tuple[Array, Extras, Carry]:
    obs, is_first = jax.tree.map(
      lambda x: x[None], (timestep.obs, timestep.is_first)
    )
    values, new = unroll(variables.params, obs, is_first, carry.network)
    probability = epsilon(variables.hyperparams, carry.env_index)
    if greedy:
      probability = jnp.float32(0.0)
    action = exploring.explore(rng_key, values[0], probability, timestep.obs)
    return action, Extras(carry.network), carry._replace(network=new)

  def prepare(
    variables: Variables,
    target_params: Tree,
    sample: Sample,
    rng_key: chex.PRNGKey,
    mean: Callable[[Tree], Tree],
  ) -> Batch:
    del rng_key, mean
    trajectory = sample.trajectory
    before, timestep = (
      jax.tree.map(lambda x: x[part], trajectory.timestep)
      for part in (slice(burn_in), slice(burn_in, None))
    )
    # The stored carry is that of older parameters; the burn-in renews it.
    stored = jax.tree.map(lambda x: x[0], trajectory.extras.carry)

    def renew(params: Tree) -> Tree:
      if not burn_in:
        return stored
      return unroll(params, before.obs, before.is_first, stored)[1]

    target_values, _ = unroll(
      target_params, timestep.obs, timestep.is_first, renew(target_params)
    )
    carry = renew(jax.lax.stop_gradient(variables.params))
    carry = jax.tree.map(lambda x: x[None], carry)
    action = trajectory.action[burn_in:]
    sequences = Batch(timestep, action, carry, target_values, weight=())
    return acting.swap_axes(sequences)._replace(weight=sample.weight)

  def loss(
    variables: Variables,
    target_params: Tree,
    batch: Batch,
    rng_key: chex.PRNGKey,
  ) -> tuple[Array, LossOutput]:
    del target_params, rng_key
    params, _, hyperparams = variables
    timestep, actions, carry, target_values = acting.swap_axes(batch[:-1])
    carry = jax.tree.map(lambda x: x[0], carry)
    all_values, _ = unroll(params, timestep.obs, timestep.is_first, carry)
    values = exploring.choose(all_values[:-1], actions)

    # As in double DQN, the online network chooses the actions of the targets.
    best = jnp.argmax(all_values, axis=-1)
    following = exploring.choose(target_values, best)
    weight = returns.weights(timestep)
    target = returns.n_step(
      inverse(following),
      acting.clip_reward(timestep.reward[1:], fields['reward_clip']),
      hyperparams['gamma'] * timestep.discount[1:],
      weight,
      n=fields['n_steps'],
    )
    errors = weight * (values - rescale(target))
    each = 0.5 * jnp.sum(jnp.square(errors), axis=0)
    value_loss = jnp.mean(batch.weight * each)
    largest = jnp.max(jnp.abs(errors), axis=0)
    mix = fields['priority_mix']
    priority = mix * largest + (1.0 - mix) * jnp.mean(jnp.abs(errors), axis=0)
    value = inverse(jnp.max(all_values[:-1], axis=-1))
    metrics: Metrics = {'value': jnp.mean(weight * batch.weight[None] * value)}
    return value_loss, LossOutput(metrics, priority)

  def initial_carry(env_index: Array) -> Carry:
    carry = network.initial_carry(len(env_index))
    return Carry(carry, env_index.astype(jnp.float32))

  names = 'gamma', 'epsilon', 'epsilon_exponent'
  values = {name: fields[name] for name in names}
  return Agent(
    init=acting.make_init(
      network.init, **values, num_envs=1.0, importance_exponent=1.0
    ),
    initial_carry=initial_carry,
    act=act,
    prepare=prepare,
    loss=loss,
  )
