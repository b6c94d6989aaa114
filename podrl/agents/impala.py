"""IMPALA: an actor-critic that corrects for policy lag with V-trace."""

import jax
import jax.numpy as jnp

from podrl.agents import acting
from podrl.core import losses, returns
from podrl.core.distributions import Distribution
from podrl.fields import Fields
from podrl.networks.actor_critic import Network
from podrl.types import Agent, Tree

FIELDS = acting.ACTOR_CRITIC_FIELDS

# See `AgentEntry.kinds`. Learning only once from each unroll needs more updates
# and a higher rate. Images: Huang et al. 2023, arXiv:2310.00036.
KINDS: dict[str, Fields] = {
  'numbers': {'unroll_length': 8, 'optimizer.learning_rate': 3e-3},
  # With 64 environments, Pendulum-v1 stayed near -1,200: it needs many small
  # updates, and exploration. With 0.99 as discount, A2C reached -334 there.
  'continuous': {
    'total_env_steps': 1_000_000,
    'env.num_envs': 8,
    'agent.gamma': 0.97,
    'agent.lambda_': 0.9,
    'agent.entropy_cost': 0.02,
    'optimizer.learning_rate': 1.5e-3,
  },
  'action vector': {  # Chosen on HalfCheetah-v4.
    'env.num_envs': 16,
    'unroll_length': 32,
    'num_minibatches': 4,
    'agent.gamma': 0.99,
    'agent.lambda_': 0.95,
    'agent.entropy_cost': 0.0,
    'optimizer.learning_rate': 1e-3,
  },
  # With less entropy, the policy of Breakout-MinAtar soon becomes certain, and
  # its return stays near 6. Other small images were not tried.
  'small image': {
    'unroll_length': 16,
    'num_minibatches': 4,
    'agent.lambda_': 0.95,
    'agent.entropy_cost': 0.05,
    'optimizer.learning_rate': 5e-3,
  },
  # With an entropy cost of 0.05 and a learning rate of 5e-3, the second player
  # of tic-tac-toe never learned to defend itself.
  'self-play': {
    'total_env_steps': 10_000_000,
    'agent.entropy_cost': 0.2,
    'optimizer.learning_rate': 1e-3,
  },
  'large image': {
    'unroll_length': 20,
    'num_minibatches': 4,
    'optimizer.name': 'rmsprop',
    'optimizer.learning_rate': 6e-4,
    # Cleanba clips to 40, for a sum over 640 steps instead of a mean; see
    # `optimizers._RMS_EPS`.
    'optimizer.max_grad_norm': 40 / 640,
  },
  # The run is short, so the agent must learn more from each step. With the
  # optimiser above and one pass, Pong-v5 stayed at -20 for 1.5M steps.
  'large image on a CPU': {
    'agent.normalize_observation': True,  # See `ppo.KINDS`.
    'unroll_length': 64,
    'num_epochs': 3,
    'agent.lambda_': 0.95,
    # With 0.01, the policy of Pong-v5 stays nearly random. Sampled actions
    # reached 18, but the most probable ones only 10.
    'agent.entropy_cost': 0.002,
    'optimizer.name': 'adam',
    'optimizer.learning_rate': 5e-4,
    'optimizer.max_grad_norm': 0.5,
  },
}


def make_agent(
  network: Network,
  distribution: Distribution,
  *,
  off_policy_correction: bool = True,
  gamma: float = 0.99,
  lambda_: float = 1.0,
  entropy_cost: float = 0.01,
  value_cost: float = 0.5,
  reward_clip: float = 0.0,
) -> Agent:
  """Builds an IMPALA agent.

  The batch keeps whole sequences, `[B, T, ...]`, and the loss evaluates the
  network on all T + 1 steps.

  Args:
    off_policy_correction: whether to use importance ratios. Without them, the
      agent is A2C, and must learn only from actions of its current policy.
    gamma: discount per step.
    lambda_: from 0 (one-step returns) to 1 (full returns).
    entropy_cost: weight of the entropy bonus.
    value_cost: weight of the value loss.
    reward_clip: rewards are clipped to [-reward_clip, reward_clip]; 0 means no
      clipping.

  Source: Espeholt et al. 2018, arXiv:1802.01561, section 4.2.
  """

  def prepare(variables, target_params, sample, rng_key, mean):
    del variables, target_params, rng_key, mean
    return acting.swap_axes(sample.trajectory)

  def loss(variables, target_params, batch: Tree, rng_key):
    del target_params, rng_key
    params, _, hyperparams = variables
    trajectory = acting.swap_axes(batch)
    timestep = trajectory.timestep
    carry = jax.tree.map(lambda x: x[0], trajectory.carry)
    head, values, _ = network.unroll(
      params, timestep.obs, timestep.is_first, carry
    )
    head, extras = head[:-1], trajectory.extras
    log_prob = distribution.log_prob(head, extras.sample)
    weight = returns.weights(timestep)
    ratio = weight
    if off_policy_correction:
      ratio *= jnp.exp(acting.log_ratio(log_prob, extras.log_prob))
    # The targets are constants with respect to the parameters.
    baseline, ratio = jax.lax.stop_gradient((values, ratio))
    errors = returns.vtrace(
      baseline,
      acting.clip_reward(timestep.reward[1:], reward_clip),
      hyperparams['gamma'] * timestep.discount[1:],
      ratio,
      lambda_=hyperparams['lambda_'],
    )
    mean = losses.per_slot  # `combine_losses` computes all means together.
    policy_loss = losses.policy_gradient(log_prob, errors, weight, mean=mean)
    targets = baseline[:-1] + errors
    value_loss = losses.value(values[:-1], targets, weight, mean=mean)
    entropy = losses.entropy(distribution.entropy(head), weight, mean=mean)
    return acting.combine_losses(hyperparams, policy_loss, value_loss, entropy)

  init = acting.make_init(
    network.init,
    gamma=gamma,
    lambda_=lambda_,
    entropy_cost=entropy_cost,
    value_cost=value_cost,
  )
  act = acting.make_act(network, distribution, stores_value=False)
  initial_carry = acting.make_initial_carry(network)
  return Agent(init, initial_carry, act, prepare, loss)
