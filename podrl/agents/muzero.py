"""MuZero: acting by a tree search in a learned model of the environment."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from podrl.agents import acting, dqn, exploring, sac
from podrl.core import memory, returns
from podrl.core.distributions import Distribution
from podrl.core.observations import hide_illegal, without_mask
from podrl.fields import COUNT, FRACTION, Field, Fields, Range, with_defaults
from podrl.networks import muzero
from podrl.networks.muzero import MuZeroNetwork
from podrl.types import (
  Agent,
  Array,
  Box,
  EnvSpec,
  LossOutput,
  Masked,
  Sample,
  TimeStep,
  Tree,
  Variables,
)

_OWN = {
  'agent.num_unroll_steps': Field(
    5, 'Steps for which the loss unrolls the model.', COUNT
  ),
  'agent.n_steps': Field(
    10,
    'Rewards in the value target of the last step of the model; the targets of '
    'earlier steps end at the same time, so they have more.',
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
    'Part of the way that these parameters then move.',
    Range(0, 1, excludes_low=True),
  ),
  **sac.RANDOM_FRACTION,
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
    "Part of the search's prior over actions that is uniform; not if greedy.",
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
  return fields['agent.num_unroll_steps'] + fields['agent.n_steps']


class Extras(NamedTuple):
  """What the search found at each time step; leaves `[B, ...]`.

  A search compares A actions: all, or samples of a continuous action.
  """

  policy: Array  # Float32 `[B, A]`, the improved policy.
  samples: Tree = ()  # Float32 `[B, A, D]`, see `Distribution`; or `()`.


class Targets(NamedTuple):
  """What the model should predict at the steps 0 to K after a start.

  Time is axis 0, and rows are axis 1; in a `Batch`, the axes are swapped. A
  weight is 0 if the target does not exist. The steps after an episode's
  termination have the reward 0, the value 0 and no policy.
  """

  reward: Array  # Float32 `[K, N]`, of the steps 1 to K.
  value: Array  # Float32 `[K+1, N]`.
  policy: Array  # Float32 `[K+1, N, A]`.
  samples: Tree  # `[K+1, N, A, D]` or `()`; see `Extras`.
  weight: Array  # Float32 `[K+1, N]`, of a step's reward and value.
  policy_weight: Array  # Float32 `[K+1, N]`.


class Batch(NamedTuple):
  """N sequences: where they start, the actions, and the targets."""

  obs: Tree  # `[N, ...]`, of the first step.
  action: Array  # `[N, K]`, the actions after it.
  targets: Targets
  importance: Array  # Float32 `[N]`, 0 if the sequence is not valid.


class Codec(NamedTuple):
  """Converts numbers to probabilities of bins, and logits of bins to numbers.

  Source: Schrittwieser et al. 2020, arXiv:1911.08265, appendix F.
  """

  support: Array  # `[M]`, the rescaled number of each bin.

  def encode(self, x: Array) -> Array:
    """Maps numbers `[...]` to probabilities `[..., M]`."""
    atoms = returns.rescale(x)[..., None]
    return returns.project(atoms, jnp.ones_like(atoms), self.support)

  def decode(self, logits: Array) -> Array:
    """Maps logits `[..., M]` to numbers `[...]`."""
    support = jnp.expand_dims(self.support, range(logits.ndim - 1))
    mean = jnp.sum(jax.nn.softmax(logits) * support, axis=-1)
    return returns.inverse_rescale(mean)


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
  )


def value_range(tree: Any) -> tuple[Array, Array]:
  """Returns the smallest and the largest value in one tree of mctx.

  A search compares the values of actions on this scale (Schrittwieser et al.
  2020, appendix B). mctx would use the values of one state's actions. That is
  worse as long as values are not exact: if two actions are almost equal, their
  errors then decide.
  """
  is_used = tree.node_visits > 0
  low = jnp.min(jnp.where(is_used, tree.node_values, jnp.inf))
  high = jnp.max(jnp.where(is_used, tree.node_values, -jnp.inf))
  return low, jnp.maximum(high, low + 1e-5)


def gumbel_scores(tree: Any, node: Array) -> Array:
  """Returns the scores `[A]` that a Gumbel search adds to a node's logits."""
  import mctx

  low, high = value_range(tree)
  scores = mctx.qtransform_completed_by_mix_value(
    tree, node, value_scale=0.1 / (high - low), rescale_values=False
  )
  # Only differences count. Beside large scores, logits would be rounded away.
  return scores - jnp.max(scores)


def muzero_scores(tree: Any, node: Array) -> Array:
  """Returns the values `[A]` of a node's actions, from 0 to 1."""
  import mctx

  low, high = value_range(tree)
  return mctx.qtransform_by_min_max(tree, node, min_value=low, max_value=high)


def make_search(
  network: MuZeroNetwork,
  codec: Codec,
  kind: str,
  distribution: Distribution | None = None,
  num_samples: int = 0,
  uniform_fraction: float = 0.0,
) -> Callable[..., tuple[Array, Extras]]:
  """Builds the function that searches.

  Args:
    network: the model.
    codec: converts the network's rewards and values.
    kind: 'gumbel' (Danihelka et al. 2022) or 'muzero' (Schrittwieser et al.
      2020), see mctx.
    distribution: the policy over continuous actions; None for discrete ones.
    num_samples: how many samples of a continuous action each state compares.
      They have the same prior, because the policy itself proposed them (Hubert
      et al. 2021, arXiv:2104.06303, section 4). If actions are greedy, the
      first sample of the root is the mode.
    uniform_fraction: the part of the root's prior over discrete actions that is
      uniform, if actions are not greedy. Without it, the policy can become
      certain too early: each search sharpens the policy that the next searches
      start from.

  Returns:
    `(params, rng_key, obs, gamma, num_simulations, greedy) -> (action,
    Extras)`, for `rng_key` `[B]` and `obs` `[B, ...]`. The random numbers of
    a row depend on its key alone.
  """
  import mctx  # Imported on use: only this agent needs it.

  def propose(rng_key, head):
    """Returns logits of the actions to compare, `[1, A]`, and samples."""
    if distribution is None:
      return head, ()
    keys = jax.random.split(rng_key, num_samples)
    samples = jax.vmap(distribution.sample, (0, None))(keys, head[0])
    return jnp.zeros((1, num_samples)), samples[None]

  def choose(samples, index):
    """Returns the environment's actions for indices `[1]`."""
    if distribution is None:
      return index
    return distribution.to_action(samples[jnp.arange(1), index])

  def search_one(params, rng_key, obs, gamma, num_simulations, greedy):
    def recurrent(params, rng_key, index, state):
      hidden, samples = state
      hidden, reward = network.step(params, hidden, choose(samples, index))
      head, value = network.predict(params, hidden)
      logits, samples = propose(rng_key, head)
      output = mctx.RecurrentFnOutput(
        reward=codec.decode(reward),
        discount=jnp.broadcast_to(gamma, reward.shape[:1]),
        prior_logits=logits,
        value=codec.decode(value),
      )
      return output, (hidden, samples)

    obs = jax.tree.map(lambda x: x[None], obs)
    hidden = network.represent(params, without_mask(obs))
    head, value = network.predict(params, hidden)
    sample_key = rng_key
    if distribution is not None:
      rng_key, sample_key = jax.random.split(rng_key)
    logits, samples = propose(sample_key, head)
    if distribution is not None and greedy:
      samples = samples.at[:, 0].set(distribution.mode(head))
    if distribution is None and not greedy and uniform_fraction:
      prior = (1.0 - uniform_fraction) * jax.nn.softmax(logits)
      logits = jnp.log(prior + uniform_fraction / logits.shape[-1])
    is_illegal = None
    if isinstance(obs, Masked):
      is_illegal = hide_illegal(jnp.zeros_like(logits), obs) < 0.0
    root = mctx.RootFnOutput(
      prior_logits=logits,
      value=codec.decode(value),
      embedding=(hidden, samples),
    )
    arguments = params, rng_key, root, recurrent, num_simulations, is_illegal
    if kind == 'gumbel':
      output = mctx.gumbel_muzero_policy(
        *arguments,
        qtransform=gumbel_scores,
        gumbel_scale=0.0 if greedy else 1.0,
      )
    else:
      noise = {'dirichlet_fraction': 0.0, 'temperature': 0.0} if greedy else {}
      output = mctx.muzero_policy(*arguments, qtransform=muzero_scores, **noise)
    action = choose(samples, output.action)
    found = Extras(output.action_weights, samples)
    return action[0], jax.tree.map(lambda x: x[0], found)

  def search(params, rng_key, obs, gamma, num_simulations, greedy):
    return jax.vmap(
      lambda rng_key, obs: search_one(
        params, rng_key, obs, gamma, num_simulations, greedy
      )
    )(rng_key, obs)

  return search


def make_targets(
  timestep: TimeStep,
  extras: Extras,
  bootstrap: Array,
  gamma: Array,
  *,
  num_unroll_steps: int,
) -> Targets:
  """Computes the targets of the model's K steps.

  Args:
    timestep: leaves `[T+1, N, ...]`, T > K, rewards already clipped.
    extras: what searches found, leaves `[T, N, ...]`.
    bootstrap: float32 `[T+1, N]`, the values of each row's last time step: T,
      or the end of the first episode; others are not read.
    gamma: the discount per step.
    num_unroll_steps: K.
  """
  num_steps = num_unroll_steps + 1
  valid = returns.weights(timestep)  # `[T, N]`, 0 at a reset step.
  discount = gamma * timestep.discount[1:]
  targets = returns.q_lambda(
    bootstrap, timestep.reward[1:], discount, valid, lambda_=1.0
  )
  # Whether step k is before or at the end of the first episode.
  alive = jnp.concatenate(
    [jnp.ones_like(valid[:1]), jnp.cumprod(valid[: num_steps - 1], axis=0)]
  )
  is_terminal = timestep.discount[:num_steps] == 0.0
  ends = jnp.where(is_terminal, alive * (1.0 - valid[:num_steps]), 0.0)
  # Whether the episode terminated before step k.
  absorbed = jnp.cumsum(ends, axis=0) - ends
  value = jnp.where(is_terminal, 0.0, targets[:num_steps] * alive)
  reward = timestep.reward[1:num_steps] * alive[1:]
  policy_weight = jnp.where(is_terminal, 0.0, alive)
  policy, samples = jax.tree.map(
    lambda x: x[:num_steps], (extras.policy, extras.samples)
  )
  weight = alive + absorbed
  return Targets(reward, value, policy, samples, weight, policy_weight)


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
  )
  num_unroll_steps = fields['agent.num_unroll_steps']

  def act(
    variables: Variables,
    rng_key: chex.PRNGKey,
    timestep: TimeStep,
    carry: Tree,
    *,
    greedy: bool = False,
  ) -> tuple[Array, Extras, Tree]:
    name = 'search.eval_num_simulations' if greedy else 'search.num_simulations'
    action, extras = search(
      variables.params,
      rng_key,
      timestep.obs,
      variables.hyperparams['gamma'],
      fields[name],
      greedy,
    )
    if fraction and not greedy:
      keys = jax.vmap(jax.random.fold_in, (0, None))(rng_key, 1)
      choice = jax.nn.one_hot(action, extras.policy.shape[-1])
      action = exploring.explore(keys, choice, fraction, timestep.obs)
    return action, extras, carry

  def reanalyse(
    params: Tree,
    timestep: TimeStep,
    extras: Extras,
    rng_key: chex.PRNGKey,
    gamma: Array,
  ) -> Extras:
    """Searches again in a part of the sequences.

    Args:
      params: the target parameters.
      timestep: leaves `[T+1, N, ...]`.
      extras: what the searches found earlier, leaves `[T, N, ...]`.
      rng_key: `[N]`, one key for each sequence.
      gamma: the discount per step.
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
    from there, so the network sees one observation for each row.

    Values that searches found earlier would be those of worse policies. MuZero
    Reanalyze predicts them too, but with a target network (Schrittwieser et al.
    2020, appendix H); here, the newest parameters do.
    """
    params = jax.lax.stop_gradient(params)
    steps = jnp.sum(jnp.cumprod(returns.weights(timestep), axis=0), axis=0)
    places = steps.astype(jnp.int32), np.arange(len(steps))
    obs = jax.tree.map(lambda x: x[places], timestep.obs)
    hidden = network.represent(params, without_mask(obs))
    value = codec.decode(network.predict(params, hidden)[1])
    return jnp.zeros_like(timestep.reward).at[places].set(value)

  def prepare(
    variables: Variables,
    target_params: Tree,
    sample: Sample,
    rng_key: chex.PRNGKey,
    mean: Callable[[Tree], Tree],
  ) -> Batch:
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

  def loss(
    variables: Variables,
    target_params: Tree,
    batch: Batch,
    rng_key: chex.PRNGKey,
  ) -> tuple[Array, LossOutput]:
    del target_params, rng_key
    params, targets = variables.params, batch.targets
    cross_entropy = optax.losses.softmax_cross_entropy
    hidden = network.represent(params, without_mask(batch.obs))
    policy_losses, value_losses, reward_losses, values = [], [], [], []
    for k in range(num_unroll_steps + 1):
      if k:
        # Half of the gradient flows into the earlier state.
        hidden = 0.5 * hidden + 0.5 * jax.lax.stop_gradient(hidden)
        hidden, reward = network.step(params, hidden, batch.action[:, k - 1])
        each = cross_entropy(reward, codec.encode(targets.reward[:, k - 1]))
        reward_losses.append(targets.weight[:, k] * each)
      policy, value = network.predict(params, hidden)
      values.append(codec.decode(value))
      each = policy_cross_entropy(policy, targets, k)
      policy_losses.append(targets.policy_weight[:, k] * each)
      each = cross_entropy(value, codec.encode(targets.value[:, k]))
      value_losses.append(targets.weight[:, k] * each)

    def total(losses: list[Array]) -> Array:
      """The first step counts as much as all others together."""
      return losses[0] + sum(losses[1:]) / num_unroll_steps

    policy_loss, value_loss = total(policy_losses), total(value_losses)
    reward_loss = sum(reward_losses) / num_unroll_steps
    value_cost = variables.hyperparams['value_cost']
    each = policy_loss + value_cost * value_loss + reward_loss
    metrics = {
      'policy_loss': policy_loss,
      'value_loss': value_loss,
      'reward_loss': reward_loss,
      'value': values[0],
    }
    metrics = {k: jnp.mean(batch.importance * x) for k, x in metrics.items()}
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
  )
