"""The tree search of MuZero, in a model that is learned or the environment."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podrl.core import returns
from podrl.core.distributions import Distribution
from podrl.core.observations import hide_illegal, without_mask
from podrl.networks.muzero import MuZeroNetwork
from podrl.types import Array, Masked, TimeStep, Tree


class Extras(NamedTuple):
  """What the search found at each time step; leaves `[B, ...]`.

  A search compares A actions: all, or samples of a continuous action.
  """

  policy: Array  # Float32 `[B, A]`, the improved policy.
  samples: Tree = ()  # Float32 `[B, A, D]`, see `Distribution`; or `()`.


class _Estimate(NamedTuple):
  """What a model says of a step; float32 `[N]` each."""

  reward: Array
  discount: Array  # Gamma included; negative if the turn passes.
  value: Array  # Value of the state after the step.


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


def value_range(tree: Any, has_turns: bool = False) -> tuple[Array, Array]:
  """Returns the smallest and the largest value in one tree of mctx.

  In a game with turns, each node has the value of the player who moves there,
  so its negative counts too.

  A search compares the values of actions on this scale (Schrittwieser et al.
  2020, appendix B). mctx would use the values of one state's actions. That
  scale is worse as long as values are not exact: if two actions are almost
  equal, their errors then decide.
  """
  is_used = tree.node_visits > 0
  low = jnp.min(jnp.where(is_used, tree.node_values, jnp.inf))
  high = jnp.max(jnp.where(is_used, tree.node_values, -jnp.inf))
  if has_turns:
    high = jnp.maximum(high, -low)
    low = -high
  return low, jnp.maximum(high, low + 1e-5)


def gumbel_scores(tree: Any, node: Array, *, has_turns: bool = False) -> Array:
  """Returns the scores `[A]` that a Gumbel search adds to a node's logits."""
  import mctx

  low, high = value_range(tree, has_turns)
  scores = mctx.qtransform_completed_by_mix_value(
    tree, node, value_scale=0.1 / (high - low), rescale_values=False
  )
  # Only differences count. Added to large scores, small logits would be lost in
  # rounding.
  return scores - jnp.max(scores)


def muzero_scores(tree: Any, node: Array, *, has_turns: bool = False) -> Array:
  """Returns the values `[A]` of a node's actions, from 0 to 1."""
  import mctx

  low, high = value_range(tree, has_turns)
  return mctx.qtransform_by_min_max(tree, node, min_value=low, max_value=high)


def make_search(
  network: MuZeroNetwork,
  codec: Codec,
  kind: str,
  distribution: Distribution | None = None,
  num_samples: int = 0,
  uniform_fraction: float = 0.0,
  has_turns: bool = False,
  simulate: Callable[..., tuple[Tree, TimeStep]] | None = None,
) -> Callable[..., tuple[Array, Extras]]:
  """Builds the function that searches.

  Args:
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
    has_turns: see `EnvSpec.has_turns`. The discount of a simulated step is then
      gamma times the expected sign of the value that follows.
    simulate: `EnvSpec.simulate`, to search in the environment itself, as
      AlphaZero does (Silver et al. 2018). None means that it searches in the
      model.

  Returns:
    `(params, rng_key, obs, gamma, num_simulations, greedy, env_state=()) ->
    (action, Extras)`, for `rng_key` `[B]`, `obs` `[B, ...]` and `env_state`
    `[B]`, which `simulate` needs. The random numbers of a row depend on its key
    alone.
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

  def imagine(params, rng_key, action, state, gamma):
    """Steps one state; returns the policy head, an `_Estimate` and the state.

    All have a first axis of 1.
    """
    if simulate:
      state, timestep = jax.vmap(simulate)(rng_key[None], state, action)
      hidden = network.represent(params, without_mask(timestep.obs))
      reward, sign = timestep.reward, timestep.discount
    else:
      state, reward, turn = network.step(params, state, action)
      hidden, reward = state, codec.decode(reward)
      one = jnp.ones(())
      sign = 2.0 * jax.nn.sigmoid(turn) - one if has_turns else one
    head, value = network.predict(params, hidden)
    if simulate and distribution is None:
      head = hide_illegal(head, timestep.obs)
    discount = jnp.broadcast_to(gamma * sign, reward.shape)
    return head, _Estimate(reward, discount, codec.decode(value)), state

  def search_one(
    params, gamma, num_simulations, greedy, rng_key, obs, env_state
  ):
    def recurrent(params, rng_key, index, embedding):
      state, samples = embedding
      action = choose(samples, index)
      head, estimate, state = imagine(params, rng_key, action, state, gamma)
      logits, samples = propose(rng_key, head)
      output = mctx.RecurrentFnOutput(**estimate._asdict(), prior_logits=logits)
      return output, (state, samples)

    obs, env_state = jax.tree.map(lambda x: x[None], (obs, env_state))
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
      embedding=(env_state if simulate else hidden, samples),
    )
    arguments = params, rng_key, root, recurrent, num_simulations, is_illegal
    if kind == 'gumbel':
      output = mctx.gumbel_muzero_policy(
        *arguments,
        qtransform=functools.partial(gumbel_scores, has_turns=has_turns),
        gumbel_scale=0.0 if greedy else 1.0,
      )
    else:
      noise = {'dirichlet_fraction': 0.0, 'temperature': 0.0} if greedy else {}
      scores = functools.partial(muzero_scores, has_turns=has_turns)
      output = mctx.muzero_policy(*arguments, qtransform=scores, **noise)
    action = choose(samples, output.action)
    found = Extras(output.action_weights, samples)
    return action[0], jax.tree.map(lambda x: x[0], found)

  def search(
    params, rng_key, obs, gamma, num_simulations, greedy, env_state=()
  ):
    one = functools.partial(search_one, params, gamma, num_simulations, greedy)
    return jax.vmap(one)(rng_key, obs, env_state)

  return search
