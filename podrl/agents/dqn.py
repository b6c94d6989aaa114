"""DQN and Rainbow: action values learned from a memory of transitions."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from podrl.agents import acting, exploring
from podrl.core import memory, returns
from podrl.core.observations import hide_illegal
from podrl.fields import COUNT, Field, Fields, Range, with_defaults
from podrl.types import Agent, Array, EnvSpec, LossOutput, Metrics, Tree

TARGET_RATE = {
  'agent.target_rate': Field(
    0.01,
    'An update moves the target parameters by this part of the way.',
    Range(0, 1, excludes_low=True),
  ),
}
TARGETS = {
  'agent.target_period': Field(
    1, 'Optimiser steps between updates of the target parameters.', COUNT
  ),
  **TARGET_RATE,
}
N_STEPS = {
  'agent.n_steps': Field(3, 'Number of rewards that a target adds up.', COUNT)
}
_ATOMS = Range(-(10**9), 10**9)
_OWN = {
  **N_STEPS,
  'agent.double': Field(
    True, 'The online network chooses the actions of the targets.'
  ),
  'agent.duelling': Field(
    False, 'The head has a number for the state, and one for each action.'
  ),
  'agent.num_atoms': Field(
    1, 'Atoms of the distribution of returns; 1 means only the mean.', COUNT
  ),
  'agent.min_value': Field(-10.0, 'The smallest atom.', _ATOMS),
  'agent.max_value': Field(10.0, 'The largest atom.', _ATOMS),
  **TARGETS,
}
FIELDS = with_defaults(
  {**exploring.FIELDS, **_OWN, **memory.FIELDS, **memory.PRIORITY_FIELDS},
  {'unroll_length': 4, 'optimizer.max_grad_norm': 10.0},
)
# Values of fields that are not the agent's own.
DEFAULTS: Fields = {'log.every_updates': 50}
RAINBOW_FIELDS = with_defaults(
  FIELDS,
  {
    # The atoms must cover the returns, whatever the size of the rewards.
    'agent.normalize_reward': True,
    'agent.duelling': True,
    'agent.num_atoms': 51,
    'replay.priority_exponent': 0.5,
  },
)


def check(fields: Fields) -> None:
  """Raises a ValueError if the atoms are in the wrong order."""
  low, high = fields['agent.min_value'], fields['agent.max_value']
  if not low < high:
    raise ValueError(
      f'config.agent.min_value={low} must be less than '
      f'config.agent.max_value={high}'
    )


# Beyond this share of targets at the ends of a support, values are cut off. An
# untrained network has a share of 2 / 51.
_MANY_AT_ENDS = 0.1


def warn_of_ends(record: Mapping[str, Any]) -> str:
  """Returns a warning if the atoms or bins do not cover the targets, or ''."""
  share = record.get('targets_at_ends', 0.0)
  if not share > _MANY_AT_ENDS:
    return ''
  return (
    f'{share:.0%} of the targets are at the ends of the support, so the agent '
    'cannot tell larger returns apart; use config.agent.normalize_reward=True, '
    'or a wider support'
  )


def target_update(fields: Fields) -> Callable[..., Any]:
  """Returns what changes the target parameters after an optimiser step.

  Without the field `agent.target_period`, they change after each step.
  """
  rate = fields['agent.target_rate']
  period = fields.get('agent.target_period', 1)

  def update(params: Array, target_params: Array, num_sgd_steps: Array) -> Any:
    params = optax.incremental_update(params, target_params, rate)
    return optax.periodic_update(params, target_params, num_sgd_steps, period)

  return update


# The settings for large images of all agents with a memory. With Atari's usual
# frames of 84 x 84 bytes, the memory has 0.7 GiB.
LARGE_IMAGE: Fields = {
  'total_env_steps': 10_000_000,
  'env.num_envs': 32,
  'network.name': 'nature_cnn',
  'network.hidden_sizes': (512,),
  'optimizer.learning_rate': 1e-4,
  'replay.capacity_steps': 100_000,
  'replay.min_steps': 10_000,
}

# See `AgentEntry.kinds`.
KINDS: dict[str, Fields] = {
  # In most games, the result is from -1 to 1; in backgammon, from -3 to 3.
  'self-play': {'agent.min_value': -3.0, 'agent.max_value': 3.0},
  'numbers': {
    'total_env_steps': 100_000,
    'env.num_envs': 16,
    'agent.normalize_observation': False,
    'network.hidden_sizes': (128, 128),
  },
  'memory': {'unroll_length': 4},
  'small image': {'total_env_steps': 800_000},
  'large image': LARGE_IMAGE,
  'large image on a CPU': {  # It learns from each step about twice.
    'network.hidden_sizes': (256,),
    'optimizer.learning_rate': 2.5e-4,
    'replay.batch_size': 64,
    'replay.sgd_steps_per_update': 2,
  },
}


class Batch(NamedTuple):
  """Transitions over n steps; the axis of rows is N."""

  obs: Tree  # `[N, ...]`.
  action: Array  # `[N]` int32.
  # `[N]` float32, or probabilities `[N, num_atoms]`.
  target: Array
  weight: Array  # `[N]` float32.


def make_agent(spec: EnvSpec, fields: Fields) -> Agent:
  """Builds a DQN agent.

  Sources: Mnih et al. 2015, Human-level control through deep reinforcement
  learning; van Hasselt et al. 2016, arXiv:1509.06461 (double); Bellemare et al.
  2017, arXiv:1707.06887, algorithm 1 (atoms); Hessel et al. 2018,
  arXiv:1710.02298 (Rainbow).
  """
  num_atoms, num_steps = fields['agent.num_atoms'], fields['agent.n_steps']
  support = jnp.linspace(
    fields['agent.min_value'], fields['agent.max_value'], num_atoms
  )
  network = exploring.build_network(
    spec, fields, num_atoms=num_atoms, is_duelling=fields['agent.duelling']
  )

  def to_values(outputs: Array) -> Array:
    """Maps outputs `[..., A, N]` to values `[..., A]`."""
    if num_atoms == 1:
      return outputs[..., 0]
    # By default, a TPU would compute this in bfloat16.
    return jnp.matmul(jax.nn.softmax(outputs), support, precision='highest')

  def evaluate(params: Tree, obs: Tree) -> Array:
    """Maps observations `[N, ...]` to outputs `[N, A, num_atoms]`."""
    is_first = jnp.zeros((1, len(jax.tree.leaves(obs)[0])), bool)
    obs = jax.tree.map(lambda x: x[None], obs)
    return network.unroll(params, obs, is_first, ())[0][0]

  def prepare(variables, target_params, sample, rng_key, mean) -> Batch:
    del rng_key, mean
    timestep = sample.trajectory.timestep
    weight = returns.weights(timestep)
    reward = acting.clip_reward(
      timestep.reward[1:], fields['agent.reward_clip']
    )
    discount = variables.hyperparams['gamma'] * timestep.discount[1:]
    zeros = jnp.zeros_like(timestep.reward)

    # The target is `reward + discount * value`, with the value of the step
    # `place`. `n_step` computes these three numbers.
    def n_step(values: Array, rewards: Array, discounts: Array) -> Array:
      return returns.n_step(values, rewards, discounts, weight, n=num_steps)[0]

    steps = jnp.arange(num_steps + 1.0)[:, None] + zeros
    place = n_step(steps, zeros[1:], zeros[1:] + 1.0).astype(jnp.int32)
    reward = n_step(zeros, reward, discount)
    discount = n_step(zeros + 1.0, zeros[1:], discount)
    column = jnp.arange(len(place))
    obs = jax.tree.map(lambda x: x[place, column], timestep.obs)
    outputs = evaluate(target_params, obs)
    chooser = outputs
    if fields['agent.double']:
      chooser = evaluate(jax.lax.stop_gradient(variables.params), obs)
    best = jnp.argmax(hide_illegal(to_values(chooser), obs), axis=-1)
    outputs = outputs[column, best]
    if num_atoms == 1:
      target = reward + discount * outputs[:, 0]
    else:
      atoms = reward[:, None] + discount[:, None] * support[None]
      target = returns.project(atoms, jax.nn.softmax(outputs), support)
    return Batch(
      obs=jax.tree.map(lambda x: x[0], timestep.obs),
      action=sample.trajectory.action[0],
      target=target,
      weight=sample.weight * weight[0],
    )

  def loss(variables, target_params, batch: Batch, rng_key):
    del target_params, rng_key
    all_outputs = evaluate(variables.params, batch.obs)
    outputs = all_outputs[jnp.arange(len(batch.action)), batch.action]
    if num_atoms == 1:
      error = outputs[:, 0] - batch.target
      each, priority = optax.losses.huber_loss(error), jnp.abs(error)
    else:
      each = optax.losses.softmax_cross_entropy(outputs, batch.target)
      entropy = -jnp.sum(
        jax.scipy.special.xlogy(batch.target, batch.target), axis=-1
      )
      priority = jnp.maximum(each - entropy, 0.0)  # The divergence KL.
    # The loss never changes the error of a reset step, so it would never fall.
    priority = jnp.where(batch.weight > 0.0, priority, 0.0)
    values = hide_illegal(to_values(all_outputs), batch.obs)
    value = jnp.mean(batch.weight * jnp.max(values, axis=-1))
    metrics: Metrics = {'value': value}
    if num_atoms > 1:
      at_ends = batch.target[:, 0] + batch.target[:, -1]
      is_valid = batch.weight > 0.0
      metrics['targets_at_ends'] = jnp.mean(jnp.where(is_valid, at_ends, 0.0))
    return jnp.mean(batch.weight * each), LossOutput(metrics, priority)

  return Agent(
    init=exploring.make_init(network.init),
    initial_carry=lambda env_index: (),
    act=exploring.make_act(network, to_values),
    prepare=prepare,
    loss=loss,
    absorb=exploring.absorb,
  )
