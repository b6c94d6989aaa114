"""R2D2: recurrent Q-learning from a memory of sequences."""

from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.agents import acting, dqn, exploring
from podrl.core import memory, returns
from podrl.core.observations import hide_illegal
from podrl.fields import (
  COUNT,
  FRACTION,
  FROM_0,
  Field,
  Fields,
  Range,
  with_defaults,
)
from podrl.networks import cores
from podrl.types import (
  Agent,
  Array,
  EnvSpec,
  LossOutput,
  Metrics,
  TimeStep,
  Tree,
)

_OWN = {
  'agent.epsilon': Field(
    0.4,
    'Probability of a random action in environment 0.',
    FRACTION,
    changeable=True,
  ),
  'agent.epsilon_exponent': Field(
    7.0,
    'The last environment has the probability epsilon ** (1 + this number).',
    Range(0, 10**6),
    changeable=True,
  ),
  **dqn.N_STEPS,
  **dqn.TARGETS,
  'agent.rescale_values': Field(
    True, 'The network predicts values on a compressed scale.'
  ),
  'agent.priority_mix': Field(
    0.9,
    "Weight of a sequence's largest error in its priority; the mean error has "
    'the rest.',
    FRACTION,
  ),
  'replay.sequence_length': Field(
    40, 'Steps of a sequence that the agent learns from.', COUNT
  ),
  'replay.burn_in': Field(
    20, 'Earlier steps of a sequence, which only renew the carry.', FROM_0
  ),
}
FIELDS = with_defaults(
  {
    **acting.FIELDS,
    **cores.FIELDS,
    **_OWN,
    **memory.FIELDS,
    **memory.PRIORITY_FIELDS,
  },
  {
    'unroll_length': 20,
    'agent.n_steps': 5,
    'agent.target_rate': 0.02,
    'network.activation': 'relu',
    'network.recurrent': 'lstm',
    'optimizer.max_grad_norm': 40.0,
    'replay.min_steps': 5_000,
    'replay.batch_size': 64,
    'replay.sgd_steps_per_update': 8,
    'replay.priority_exponent': 0.9,
    'replay.importance_exponent': 0.6,
  },
)

DEFAULTS = dqn.DEFAULTS

# See `AgentEntry.kinds`.
KINDS: dict[str, Fields] = {
  'numbers': {
    'total_env_steps': 500_000,
    'env.num_envs': 32,
    'agent.normalize_reward': False,
    'agent.normalize_observation': False,
  },
  # If a task needs no long memory, learning with one is slower.
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


def sequence_length(fields: Fields) -> int:
  """Returns the transitions of a sequence, those for the burn-in included."""
  return fields['replay.burn_in'] + fields['replay.sequence_length']


def check(fields: Fields) -> None:
  """Raises a ValueError if a carry is too large to store it at each step."""
  name = fields['network.recurrent']
  if name in cores.CORES and cores.CORES[name].has_window:
    raise ValueError(
      f'config.network.recurrent={name} does not fit r2d2, whose memory stores '
      'the carry of each step: here, a whole window; use lru or mingru, or '
      '--agent=pqn'
    )


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


def make_agent(spec: EnvSpec, fields: Fields) -> Agent:
  """Builds an R2D2 agent.

  The first `replay.burn_in` steps of a sequence only renew the carry.

  Raises:
    ValueError: if the actions are not discrete.

  Source: Kapturowski et al. 2019, Recurrent Experience Replay in Distributed
  Reinforcement Learning, sections 2.3 and 3.
  """
  network = exploring.build_network(spec, fields, is_duelling=True)
  burn_in = fields['replay.burn_in']

  def rescale(x: Array) -> Array:
    return returns.rescale(x) if fields['agent.rescale_values'] else x

  def inverse(x: Array) -> Array:
    return returns.inverse_rescale(x) if fields['agent.rescale_values'] else x

  def unroll(params, obs, is_first, carry):
    outputs, carry = network.unroll(params, obs, is_first, carry)
    return hide_illegal(outputs[..., 0], obs), carry

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    obs, is_first = jax.tree.map(
      lambda x: x[None], (timestep.obs, timestep.is_first)
    )
    values, new = unroll(variables.params, obs, is_first, carry.network)
    probability = epsilon(variables.hyperparams, carry.env_index)
    if greedy:
      probability = jnp.float32(0.0)
    action = exploring.explore(rng_key, values[0], probability, timestep.obs)
    return action, Extras(carry.network), carry._replace(network=new)

  def prepare(variables, target_params, sample, rng_key, mean) -> Batch:
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

  def loss(variables, target_params, batch: Batch, rng_key):
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
      acting.clip_reward(timestep.reward[1:], fields['agent.reward_clip']),
      hyperparams['gamma'] * timestep.discount[1:],
      weight,
      n=fields['agent.n_steps'],
    )
    errors = weight * (values - rescale(target))
    each = 0.5 * jnp.sum(jnp.square(errors), axis=0)
    value_loss = jnp.mean(batch.weight * each)
    largest = jnp.max(jnp.abs(errors), axis=0)
    mix = fields['agent.priority_mix']
    priority = mix * largest + (1.0 - mix) * jnp.mean(jnp.abs(errors), axis=0)
    value = inverse(jnp.max(all_values[:-1], axis=-1))
    metrics: Metrics = {'value': jnp.mean(weight * batch.weight[None] * value)}
    return value_loss, LossOutput(metrics, priority)

  def initial_carry(env_index: Array) -> Carry:
    carry = network.initial_carry(len(env_index))
    return Carry(carry, env_index.astype(jnp.float32))

  return Agent(
    init=acting.make_init(network.init, num_envs=1.0),
    initial_carry=initial_carry,
    act=act,
    prepare=prepare,
    loss=loss,
  )
