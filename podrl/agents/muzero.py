"""MuZero: acting by a tree search in a learned model of the environment."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podrl.agents import acting, dqn, exploring, sac
from podrl.agents.muzero_search import Codec, make_search
from podrl.agents.muzero_targets import Targets, make_targets
from podrl.core import memory, returns
from podrl.core.observations import hide_illegal, without_mask
from podrl.fields import COUNT, FRACTION, Field, Fields, Range, with_defaults
from podrl.networks import muzero
from podrl.networks.muzero import MuZeroNetwork
from podrl.types import Agent, Array, Box, EnvSpec, LossOutput, TimeStep, Tree

_OWN = {
  'agent.num_unroll_steps': Field(
    5, 'Steps for which the loss unrolls the model.', COUNT
  ),
  'agent.n_steps': Field(
    10,
    "Rewards in the value target of the model's last step. Targets of earlier "
    'steps end at the same time step, so they have more rewards.',
    COUNT,
  ),
  'agent.support': Field(
    20, 'The largest rescaled reward and value; one bin per unit.', COUNT
  ),
  **acting.VALUE_COST,
  'agent.target_period': Field(
    100,
    'Optimiser steps between updates of the parameters that reanalyse.',
    COUNT,
  ),
  'agent.target_rate': Field(
    1.0,
    'An update moves the parameters that reanalyse by this part of the way.',
    Range(0, 1, excludes_low=True),
  ),
  **sac.RANDOM_FRACTION,
  'search.model': Field(
    'learned',
    'What the search steps: a learned model, or the environment (AlphaZero).',
    ('learned', 'env'),
  ),
  'search.kind': Field('gumbel', 'The kind of search.', ('gumbel', 'muzero')),
  'search.num_simulations': Field(
    16, 'Simulations of the search of each step.', COUNT
  ),
  'search.eval_num_simulations': Field(
    16, 'Simulations of the search of each step if actions are greedy.', COUNT
  ),
  'search.num_samples': Field(
    16,
    'Samples of a continuous action that a search compares.',
    Range(2, 2**24),
  ),
  'search.uniform_fraction': Field(
    0.1,
    "Part of the search's prior that is uniform, unless actions are greedy.",
    FRACTION,
  ),
  'search.reanalyse_fraction': Field(
    0.0, 'Part of each batch whose policies come from new searches.', FRACTION
  ),
}
FIELDS = with_defaults(
  {
    **acting.FIELDS,
    **_OWN,
    **muzero.FIELDS,
    **memory.FIELDS,
    **memory.PRIORITY_FIELDS,
  },
  {
    'unroll_length': 8,
    'agent.value_cost': 0.25,
    'network.activation': 'relu',
    'network.layer_norm': True,
    'optimizer.max_grad_norm': 10.0,
    'replay.min_steps': 2_000,
    'replay.sgd_steps_per_update': 8,
    'replay.priority_exponent': 0.6,
  },
)
DEFAULTS: Fields = {'log.every_updates': 20}

# See `AgentEntry.kinds`.
KINDS: dict[str, Fields] = {
  'numbers': {
    'total_env_steps': 200_000,
    'env.num_envs': 16,
    'agent.n_steps': 30,
    'replay.priority_exponent': 0.0,
    'agent.normalize_reward': False,
    'agent.normalize_observation': False,
    'network.hidden_sizes': (128,),
  },
  'memory': {'unroll_length': 8},
  # With 16 simulations, the best of the sampled actions was wrong so often that
  # the evaluated return of Pendulum-v1 was -317; with 32 or 64, about -190.
  'continuous': {
    'agent.support': 60,
    'agent.random_fraction': 0.0,
    'search.eval_num_simulations': 32,
  },
  # With policies that older searches found, the return of Breakout-MinAtar
  # stays near 6: the memory is small. Some actions are random, because the
  # search is soon certain of a path that ends early.
  'small image': {
    'total_env_steps': 600_000,
    'env.num_envs': 64,
    'unroll_length': 4,
    'agent.n_steps': 5,
    'agent.value_cost': 1.0,
    'agent.random_fraction': 0.1,
    'network.hidden_sizes': (128,),
    'optimizer.learning_rate': 2e-3,
    'replay.capacity_steps': 10_000,
    'replay.priority_exponent': 0.0,
    'replay.sgd_steps_per_update': 16,
  },
  # With fewer random actions, the model stays wrong at rare positions: with
  # 0.2, the agent lost 1 of 2,000 games of tic-tac-toe to a random player. With
  # 0.35, three seeds lost none, and drew 2,000 of 2,000 with a perfect player.
  'self-play': {
    'total_env_steps': 600_000,
    'agent.n_steps': 10,
    'agent.random_fraction': 0.35,
    'network.hidden_sizes': (128,),
    'replay.capacity_steps': 50_000,
    'search.eval_num_simulations': 50,
  },
  'large image': {
    **dqn.LARGE_IMAGE,
    'network.name': 'auto',
    'network.channels': 64,
  },
  'large image on a CPU': {
    'network.name': 'nature_cnn',
    'network.channels': 0,
    'network.hidden_sizes': (256,),
    'replay.batch_size': 32,
    'replay.sgd_steps_per_update': 2,
  },
}


def target_update(fields: Fields) -> Callable[..., Any] | None:
  """Returns the update of the parameters that reanalyse, if any do."""
  has_targets = fields['search.reanalyse_fraction'] > 0
  return dqn.target_update(fields) if has_targets else None


def sequence_length(fields: Fields) -> int:
  """Returns the transitions that the targets of one sequence need."""
  return _num_unroll_steps(fields) + fields['agent.n_steps']


def _num_unroll_steps(fields: Fields) -> int:
  """Returns the steps of the learned model; the environment needs none."""
  is_learned = fields['search.model'] == 'learned'
  return fields['agent.num_unroll_steps'] if is_learned else 0


class Batch(NamedTuple):
  """N sequences: where they start, the actions, and the targets."""

  obs: Tree  # `[N, ...]`, the observation of the first step.
  action: Array  # `[N, K]`, the actions from the first step on.
  targets: Targets
  importance: Array  # Float32 `[N]`, 0 if the sequence is not valid.


def build_network(
  spec: EnvSpec, fields: Fields, num_bins: int
) -> MuZeroNetwork:
  """Builds the network for the actions of an environment."""
  distribution = acting.bounded_distribution(spec.action)
  return muzero.make_network(
    spec,
    fields,
    num_policy_params=distribution.num_params,
    num_bins=num_bins,
    has_dynamics=fields['search.model'] == 'learned',
  )


def _simulator(spec: EnvSpec, fields: Fields) -> Callable[..., Any] | None:
  """Returns how the search steps the environment, or None.

  It raises a ValueError if the search cannot see what the agent learns from.
  """
  if fields['search.model'] == 'learned':
    if spec.has_pool:
      raise ValueError(
        'a learned model cannot tell the games against earlier versions from '
        'the others; use --config.search.model=env, or opponent=self'
      )
    return None
  if spec.simulate is None:
    raise ValueError(
      'config.search.model=env needs an environment that is written in JAX'
    )
  for name in (
    'agent.normalize_observation',
    'agent.normalize_reward',
    'search.reanalyse_fraction',  # A memory does not have the states.
  ):
    if fields[name]:
      raise ValueError(
        f'config.search.model=env does not work with config.{name}='
        f'{fields[name]}'
      )
  simulate, clip = spec.simulate, fields['agent.reward_clip']

  def step(*arguments: Tree) -> tuple[Tree, TimeStep]:
    env_state, timestep = simulate(*arguments)
    reward = acting.clip_reward(timestep.reward, clip)
    return env_state, timestep._replace(reward=reward)

  return step


def make_agent(spec: EnvSpec, fields: Fields) -> Agent:
  """Builds a MuZero agent.

  Raises:
    ValueError: if the environment has several discrete actions, or a continuous
      action without bounds.

  Sources: Schrittwieser et al. 2020, arXiv:1911.08265; Danihelka et al. 2022,
  Policy improvement by planning with Gumbel (the search); Hubert et al. 2021,
  arXiv:2104.06303 (continuous actions).
  """
  largest = fields['agent.support']
  codec = Codec(jnp.arange(-largest, largest + 1.0))
  network = build_network(spec, fields, len(codec.support))
  is_box = isinstance(spec.action, Box)
  fraction = fields['agent.random_fraction']
  exploring.check_random_fraction(fraction, spec)
  distribution = acting.bounded_distribution(spec.action) if is_box else None
  search = make_search(
    network,
    codec,
    fields['search.kind'],
    distribution,
    fields['search.num_samples'],
    fields['search.uniform_fraction'],
    spec.has_turns,
    simulate := _simulator(spec, fields),
  )
  num_unroll_steps = _num_unroll_steps(fields)

  def act(variables, rng_key, timestep, carry, *, greedy=False, env_state=None):
    if simulate and env_state is None:
      action = act_without_search(
        variables.params, rng_key, timestep.obs, greedy
      )
      return action, (), carry
    name = 'search.eval_num_simulations' if greedy else 'search.num_simulations'
    action, extras = search(
      variables.params,
      rng_key,
      timestep.obs,
      variables.hyperparams['gamma'],
      fields[name],
      greedy,
      env_state if simulate else (),
    )
    if fraction and not greedy:
      keys = jax.vmap(jax.random.fold_in, (0, None))(rng_key, 1)
      choice = jax.nn.one_hot(action, extras.policy.shape[-1])
      action = exploring.explore(keys, choice, fraction, timestep.obs)
    return action, extras, carry

  def act_without_search(params, rng_key, obs, greedy):
    """Returns actions of the policy, the most probable ones if greedy."""
    policy = acting.bounded_distribution(spec.action)
    head, _ = network.predict(
      params, network.represent(params, without_mask(obs))
    )
    head = head if is_box else hide_illegal(head, obs)
    if greedy:
      return policy.to_action(policy.mode(head))
    return policy.to_action(jax.vmap(policy.sample)(rng_key, head))

  def reanalyse(params, timestep, extras, rng_key, gamma):
    """Searches again in a part of the sequences.

    Args:
      params: the target parameters.
      timestep: leaves `[T+1, N, ...]`.
      extras: what the searches found earlier, leaves `[T, N, ...]`.
      rng_key: `[N]`, one key for each sequence.
    """
    share, size = fields['search.reanalyse_fraction'], len(rng_key)
    counts = [math.ceil(round(i * share, 6)) for i in range(size + 1)]
    chosen = [i for i in range(size) if counts[i + 1] > counts[i]]
    if not chosen:
      return extras
    places = np.ix_(range(num_unroll_steps + 1), chosen)
    split = jax.vmap(lambda key: jax.random.split(key, len(places[0])), 0, 1)
    keys = split(rng_key[np.array(chosen)])
    obs = jax.tree.map(lambda x: x[places], timestep.obs)
    fresh = jax.vmap(
      lambda key, obs: search(
        params, key, obs, gamma, fields['search.num_simulations'], False
      )[1]
    )(keys, obs)
    return jax.tree.map(lambda x, new: x.at[places].set(new), extras, fresh)

  def fresh_value(params: Tree, timestep: TimeStep) -> Array:
    """Predicts the values `[T+1, N]` of each row's last step; others are 0.

    A row ends at the end of its first episode. All targets of a row bootstrap
    from its last step, so the network sees one observation for each row.

    Values that searches found earlier would be those of worse policies. MuZero
    Reanalyze predicts them with a target network instead (Schrittwieser et al.
    2020, appendix H); here, the newest parameters predict them.
    """
    params = jax.lax.stop_gradient(params)
    steps = jnp.sum(jnp.cumprod(returns.weights(timestep), axis=0), axis=0)
    places = steps.astype(jnp.int32), np.arange(len(steps))
    obs = jax.tree.map(lambda x: x[places], timestep.obs)
    hidden = network.represent(params, without_mask(obs))
    value = codec.decode(network.predict(params, hidden)[1])
    return jnp.zeros_like(timestep.reward).at[places].set(value)

  def prepare(variables, target_params, sample, rng_key, mean) -> Batch:
    del mean
    trajectory, gamma = sample.trajectory, variables.hyperparams['gamma']
    timestep = trajectory.timestep
    extras = reanalyse(
      target_params, timestep, trajectory.extras, rng_key, gamma
    )
    reward = acting.clip_reward(timestep.reward, fields['agent.reward_clip'])
    targets = make_targets(
      timestep._replace(reward=reward),
      extras,
      fresh_value(variables.params, timestep),
      gamma,
      num_unroll_steps=num_unroll_steps,
      has_turns=spec.has_turns,
    )
    action = trajectory.action[:num_unroll_steps]
    action, targets = acting.swap_axes((action, targets))
    obs = jax.tree.map(lambda x: x[0], timestep.obs)
    importance = sample.weight * returns.weights(timestep)[0]
    return Batch(obs, action, targets, importance)

  def policy_cross_entropy(head: Array, targets: Targets, k: int) -> Array:
    policy = targets.policy[:, k]
    if distribution is None:
      return optax.losses.softmax_cross_entropy(head, policy)
    log_probs = jax.vmap(distribution.log_prob, (None, 1), 1)(
      head, targets.samples[:, k]
    )
    return -jnp.sum(policy * log_probs, axis=-1)

  def loss(variables, target_params, batch: Batch, rng_key):
    del target_params, rng_key
    params, targets = variables.params, batch.targets
    cross_entropy = optax.losses.softmax_cross_entropy
    hidden = network.represent(params, without_mask(batch.obs))
    policy_losses, value_losses, reward_losses, values = [], [], [], []
    turn_losses: list[Array] = []
    for k in range(num_unroll_steps + 1):
      if k:
        # Half of the gradient flows into the earlier state.
        hidden = 0.5 * hidden + 0.5 * jax.lax.stop_gradient(hidden)
        hidden, reward, turn = network.step(
          params, hidden, batch.action[:, k - 1]
        )
        each = cross_entropy(reward, codec.encode(targets.reward[:, k - 1]))
        reward_losses.append(targets.weight[:, k] * each)
        if spec.has_turns:
          each = optax.sigmoid_binary_cross_entropy(
            turn, targets.turn[:, k - 1]
          )
          # At the end of a game, nobody moves.
          turn_losses.append(targets.policy_weight[:, k] * each)
      policy, value = network.predict(params, hidden)
      values.append(codec.decode(value))
      each = policy_cross_entropy(policy, targets, k)
      policy_losses.append(targets.policy_weight[:, k] * each)
      each = cross_entropy(value, codec.encode(targets.value[:, k]))
      value_losses.append(targets.weight[:, k] * each)

    def total(losses: list[Array]) -> Array:
      """The first step counts as much as all others together."""
      return losses[0] + sum(losses[1:]) / max(1, num_unroll_steps)

    policy_loss, value_loss = total(policy_losses), total(value_losses)
    reward_loss = sum(reward_losses) / max(1, num_unroll_steps)
    value_cost = variables.hyperparams['value_cost']
    each = policy_loss + value_cost * value_loss + reward_loss
    metrics = {
      'policy_loss': policy_loss,
      'value_loss': value_loss,
      'reward_loss': reward_loss,
      'value': values[0],
    }
    metrics = {k: jnp.mean(batch.importance * x) for k, x in metrics.items()}
    if turn_losses:
      turn_loss = sum(turn_losses) / num_unroll_steps
      each += turn_loss
      metrics['turn_loss'] = jnp.mean(batch.importance * turn_loss)
    is_at_end = jnp.abs(returns.rescale(targets.value[:, 0])) >= largest
    is_at_end &= (batch.importance > 0.0) & (targets.weight[:, 0] > 0.0)
    metrics['targets_at_ends'] = jnp.mean(is_at_end, dtype=jnp.float32)
    # The loss does not change the value where an episode ends, so a priority
    # there would never fall.
    error = jnp.abs(values[0] - targets.value[:, 0])
    priority = jnp.where(batch.importance > 0.0, error, 0.0)
    return jnp.mean(batch.importance * each), LossOutput(metrics, priority)

  return Agent(
    init=acting.make_init(network.init),
    initial_carry=lambda env_index: (),
    act=act,
    prepare=prepare,
    loss=loss,
    plans=simulate is not None,
  )
