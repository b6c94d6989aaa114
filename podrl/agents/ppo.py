"""PPO: proximal policy optimisation with generalised advantages."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.agents import acting
from podrl.core import losses, returns
from podrl.core.distributions import Distribution
from podrl.fields import ABOVE_0, FROM_0, Field, Fields, with_defaults
from podrl.networks.actor_critic import Network
from podrl.types import Agent, Array, Tree

FIELDS = with_defaults(
  acting.ACTOR_CRITIC_FIELDS,
  {
    'unroll_length': 64,
    'num_epochs': 2,
    'num_minibatches': 4,
    'agent.lambda_': 0.95,
  },
) | {
  'agent.clip': Field(
    0.2,
    'Clips probability ratios to [1 - clip, 1 + clip].',
    ABOVE_0,
    changeable=True,
  ),
  'optimizer.desired_kl': Field(
    0.0,
    'Steps get shorter while the KL divergence is above twice this; 0 is off.',
    FROM_0,
  ),
  'agent.normalize_advantage': Field(
    True, 'Standardises advantages over the global batch.'
  ),
}

# See `AgentEntry.kinds`.
KINDS: dict[str, Fields] = {
  'numbers': {'unroll_length': 32, 'num_epochs': 4},
  # Many episodes end at the time limit, so all environments stay in the same
  # part of an episode. If all actions are about equally good in this part,
  # normalised advantages are noise. With them, three seeds of Pendulum-v1 had
  # returns of -140 to -158 after 1M of 20M steps, and of -177 to -504 after 3M;
  # without them, -150 to -154. Rewards are normalised, so the scale of
  # advantages is known. In brax:ant, the policy becomes almost certain, and
  # each update changes it more: without `desired_kl`, the return stayed near
  # 6,000 from 1M to 3M of 20M steps, and `approx_kl` rose to 0.16; with it,
  # 7,800 after 3M and 8,105 after 20M. With a learning rate of 7e-4, one of
  # three seeds lost its good policy after half of 1M steps.
  'continuous': {
    'agent.normalize_reward': True,
    'agent.normalize_advantage': False,
    'optimizer.desired_kl': 0.02,
    'num_epochs': 8,
    'num_minibatches': 16,
    'optimizer.learning_rate': 3e-4,
  },
  'memory': {'num_epochs': 2},
  # With a high learning rate, the first poor policy improves quickly.
  'small image': {
    'unroll_length': 128,
    'num_epochs': 4,
    'num_minibatches': 8,
    'optimizer.learning_rate': 5e-3,
  },
  'large image': {
    'unroll_length': 128,
    'num_epochs': 4,
    'agent.clip': 0.1,
    'optimizer.learning_rate': 2.5e-4,
  },
  # With little entropy, the agent soon plays the same few games, and then loses
  # to a player who plays other games: with 0.1, two of five seeds lost some of
  # 1,000 games of tic-tac-toe to a random player.
  'self-play': {'total_env_steps': 10_000_000, 'agent.entropy_cost': 0.2},
  'large image on a CPU': {
    # Small images show the ball of Breakout-v5 as one faint pixel. Without
    # normalisation, the return was 2 after 400k steps; with it, 11.
    'agent.normalize_observation': True,
    'num_epochs': 3,
    'num_minibatches': 8,
    'agent.clip': 0.2,
    'optimizer.learning_rate': 5e-4,
    'optimizer.anneal': False,  # The run is too short to anneal.
  },
}


def check(fields: Fields) -> None:
  """Raises a ValueError if an update has too few steps."""
  num_steps = fields['env.num_envs'] * fields['unroll_length']
  if fields['agent.normalize_advantage'] and num_steps == 1:
    raise ValueError(
      'config.env.num_envs=1 and config.unroll_length=1 give one step per '
      'update, whose advantage cannot be normalised; set '
      'config.unroll_length=2, or config.agent.normalize_advantage=False'
    )


def minibatch_unit(fields: Fields) -> str:
  """Returns what is split into minibatches: 'steps' or 'environments'."""
  return 'steps' if fields['network.recurrent'] == 'none' else 'environments'


class Batch(NamedTuple):
  """Sequences `[N, S, ...]`, see `acting.to_rows`; minibatches split axis 0."""

  obs: Tree  # `[N, S, D]`, observations as vectors.
  is_first: Array  # `[N, S]` bool.
  carry: Tree  # `[N, 1, ...]`, the carry before the first step.
  sample: Array  # `[N, S, ...]`, see `acting.Extras`.
  log_prob: Array  # `[N, S]` float32, under the behaviour policy.
  advantage: Array  # `[N, S]` float32.
  target: Array  # `[N, S]` float32, the value target.
  weight: Array  # `[N, S]` float32, 0 at reset steps.


def normalize(
  advantage: Array, weight: Array, mean: Callable[[Tree], Tree]
) -> Array:
  """Scales advantages to mean 0 and deviation 1 over the global batch.

  Args:
    advantage: `[...]` float32.
    weight: `[...]` float32, 0 at reset steps, so that reset steps do not count.
    mean: averages a tree over devices.
  """
  chex.assert_equal_shape([advantage, weight])
  powers = 1.0, advantage, jnp.square(advantage)
  share, first, second = mean([jnp.mean(weight * x) for x in powers])
  share = jnp.maximum(share, 1e-8)  # Avoids 0 / 0 if all slots are reset steps.
  first, second = first / share, second / share
  # If the mean is large, rounding errors may be all that is left of the
  # variance. And the root has no derivative at 0, which meta-gradients need.
  least = 1e-6 * jnp.square(first) + 1e-16
  deviation = jnp.sqrt(jnp.maximum(second - jnp.square(first), least))
  return (advantage - first) / (deviation + 1e-8)


def make_agent(
  network: Network,
  distribution: Distribution,
  *,
  gamma: float = 0.99,
  lambda_: float = 0.95,
  clip: float = 0.2,
  entropy_cost: float = 0.01,
  value_cost: float = 0.5,
  normalize_advantage: bool = True,
  reward_clip: float = 0.0,
) -> Agent:
  """Builds a PPO agent.

  Args:
    gamma: discount per step.
    lambda_: from 0 (one-step advantages) to 1 (full advantages).
    clip: see `losses.ppo_clip`.
    entropy_cost: weight of the entropy bonus.
    value_cost: weight of the value loss.
    normalize_advantage: whether to normalise advantages over the global batch,
      once per unroll.
    reward_clip: rewards are clipped to [-reward_clip, reward_clip]; 0 means no
      clipping.

  Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9.
  """

  def prepare(variables, target_params, sample, rng_key, mean) -> Batch:
    del target_params, rng_key
    params, _, hyperparams = variables
    trajectory = sample.trajectory
    timestep = trajectory.timestep
    # `act` stored the values of all steps except the last.
    inputs = acting.bootstrap_inputs(trajectory, network.is_recurrent)
    _, last_values, _ = network.unroll(params, *inputs)
    values = jnp.concatenate([trajectory.extras.value, last_values[-1:]])
    # The targets are constants with respect to the parameters.
    values = jax.lax.stop_gradient(values)
    weight = returns.weights(timestep)
    advantage = returns.vtrace(
      values,
      acting.clip_reward(timestep.reward[1:], reward_clip),
      hyperparams['gamma'] * timestep.discount[1:],
      weight,
      lambda_=hyperparams['lambda_'],
    )
    target = values[:-1] + advantage
    if normalize_advantage:
      advantage = normalize(advantage, weight, mean)
    batch = Batch(
      obs=jax.tree.map(lambda x: x[:-1], timestep.obs),
      is_first=timestep.is_first[:-1],
      carry=trajectory.carry,
      sample=trajectory.extras.sample,
      log_prob=trajectory.extras.log_prob,
      advantage=advantage,
      target=target,
      weight=weight,
    )
    return acting.to_rows(batch, network)

  def loss(variables, target_params, batch: Batch, rng_key):
    del target_params, rng_key
    params, _, hyperparams = variables
    batch = acting.from_rows(batch, network)
    head, value, _ = network.unroll(
      params, batch.obs, batch.is_first, batch.carry
    )
    advantage, weight = batch.advantage, batch.weight
    log_prob = distribution.log_prob(head, batch.sample)
    log_ratios = acting.log_ratio(log_prob, batch.log_prob)
    mean = losses.per_slot  # `combine_losses` computes all means together.
    policy_loss = losses.ppo_clip(
      log_ratios, advantage, weight, clip=hyperparams['clip'], mean=mean
    )
    value_loss = losses.value(value, batch.target, weight, mean=mean)
    entropy = losses.entropy(distribution.entropy(head), weight, mean=mean)
    # An estimate of KL(old, new) that is never negative (Schulman 2020).
    approx_kl = weight * (jnp.expm1(log_ratios) - log_ratios)
    return acting.combine_losses(
      hyperparams, policy_loss, value_loss, entropy, approx_kl=approx_kl
    )

  init = acting.make_init(
    network.init,
    gamma=gamma,
    lambda_=lambda_,
    clip=clip,
    entropy_cost=entropy_cost,
    value_cost=value_cost,
  )
  act = acting.make_act(network, distribution, stores_value=True)
  initial_carry = acting.make_initial_carry(network)
  return Agent(init, initial_carry, act, prepare, loss)
