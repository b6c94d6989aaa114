"""SAC: soft actor-critic for continuous and for discrete actions."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podrl.agents import acting, dqn, exploring
from podrl.core import memory, optimizers, returns
from podrl.core.observations import hide_illegal, without_mask, zeros
from podrl.fields import (
  ABOVE_0,
  COUNT,
  FRACTION,
  Field,
  Fields,
  Range,
  with_defaults,
)
from podrl.networks import torsos
from podrl.networks.q import TwinValues
from podrl.types import (
  Agent,
  Array,
  Box,
  Discrete,
  EnvSpec,
  LossOutput,
  Masked,
  Metrics,
  Tree,
)

RANDOM_FRACTION = {
  'agent.random_fraction': Field(
    0.0,
    'Part of the discrete actions that are random, unless they are greedy.',
    FRACTION,
  ),
}
_OWN = {
  'agent.target_entropy': Field(
    0.3,
    'Entropy of the policy in nats per component of the action, on the scale '
    'where a bounded component is in [-1, 1].',
    Range(-(10**6), 10**6),
    changeable=True,
  ),
  **dqn.TARGET_RATE,
  'agent.initial_temperature': Field(
    1.0, 'Weight of the entropy at the start.', ABOVE_0
  ),
  'agent.caution': Field(
    1.0,
    'With 1, the smaller value of the two critics counts; with 0, their mean.',
    FRACTION,
  ),
  'agent.noise_steps': Field(
    1,
    'Steps for which the noise of an action stays the same. If actions with '
    'new noise at each step never reach a reward, use more steps.',
    COUNT,
  ),
  **RANDOM_FRACTION,
}
FIELDS = with_defaults(
  {
    **acting.FIELDS,
    **torsos.POLICY_INPUTS,
    **_OWN,
    **memory.FIELDS,
    **optimizers.group_fields('actor', 'critic', 'temperature'),
  },
  {
    'unroll_length': 1,
    'agent.target_rate': 0.005,
    'network.activation': 'relu',
    'network.hidden_sizes': (256, 256),
    'optimizer.learning_rate': 3e-4,
    'optimizer.anneal': False,
    'optimizer.max_grad_norm': 0.0,
    'replay.capacity_steps': 1_000_000,
    'replay.batch_size': 256,
    'replay.sgd_steps_per_update': 8,
  },
)
DEFAULTS: Fields = {'log.every_updates': 100, 'env.num_envs': 8}

# See `AgentEntry.kinds`.
KINDS: dict[str, Fields] = {
  # What is cautious for one player is bold for the other.
  'self-play': {'agent.caution': 0.0},
  'numbers': {
    'total_env_steps': 30_000,
    'agent.normalize_observation': False,
    'agent.normalize_reward': False,
  },
  'memory': {'unroll_length': 1},
  'continuous': {
    'agent.target_entropy': -1.0,
    'agent.caution': 1.0,
    'agent.random_fraction': 0.0,
  },
  'action vector': {'total_env_steps': 100_000},
  # An optimiser step for each step of an environment would take an hour. With
  # the policy's own actions only, the return of Breakout-MinAtar stays near 9:
  # the policy is certain where another action would reach more. The smaller of
  # two values hides rare successes, but CartPole-v1 needs it.
  'small image': {
    'total_env_steps': 600_000,
    'env.num_envs': 64,
    'unroll_length': 4,
    'agent.initial_temperature': 0.3,
    'agent.caution': 0.0,
    'agent.target_rate': 0.02,
    'agent.random_fraction': 0.1,
    'optimizer.learning_rate': 5e-4,
    'replay.capacity_steps': 100_000,
    'replay.batch_size': 128,
    'replay.sgd_steps_per_update': 16,
  },
  'large image': dqn.LARGE_IMAGE,
  'large image on a CPU': {'network.hidden_sizes': (256,)},
}


class Noise(NamedTuple):
  """What each environment keeps of the noise of its actions."""

  key_data: Array  # Uint32 `[B, K]`, the key that the noise is drawn with.
  steps_left: Array  # Int32 `[B]`, further steps with this key.


class Extras(NamedTuple):
  """What `act` returns with each action."""

  sample: Array  # `[B, ...]`, see `distributions.Distribution`.


class Policy(nn.Module):
  """A torso and the head of the policy."""

  make_torso: Callable[[], nn.Module]  # Builds a torso, an `nn.Module`.
  num_params: int  # Width of the head.

  @nn.compact
  def __call__(self, obs: Tree) -> Array:
    """Maps observations `[N, ...]` to heads `[N, num_params]` float32."""
    torso: Any = self.make_torso()
    # At first, all actions are likely.
    small = nn.initializers.orthogonal(0.01)
    head = nn.Dense(self.num_params, kernel_init=small)
    return head(torso(obs).astype(jnp.float32))


class Params(NamedTuple):
  """The parameters that the optimiser changes."""

  policy: Tree
  critic: Tree
  log_temperature: Array  # Float32 `[]`.


def groups(params: Params) -> Params:
  """Returns the group of each parameter; see `make_optimizer`."""
  names = Params('actor', 'critic', 'temperature')  # type: ignore
  parts = [jax.tree.map(lambda _: k, x) for k, x in zip(names, params)]
  return Params(*parts)


class Batch(NamedTuple):
  """Transitions; the axis of rows is N."""

  obs: Tree  # `[N, ...]`.
  sample: Array  # `[N, ...]`, see `Extras`.
  target: Array  # `[N]` float32.
  weight: Array  # `[N]` float32.


def make_agent(spec: EnvSpec, fields: Fields) -> Agent:
  """Builds a SAC agent.

  One optimiser step minimises the sum of three losses: of the action values, of
  the policy and of the temperature. Each changes only its own parameters.

  Raises:
    ValueError: if the environment has several discrete actions, or a continuous
      action without bounds.

  Sources: Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1 and section 5;
  Christodoulou 2019, arXiv:1910.07207 (discrete actions); Zhou et al. 2022,
  arXiv:2209.10081 (the mean of two critics); Raffin et al. 2022,
  arXiv:2005.05719, section 3 (noise that stays for several steps).
  """
  is_discrete = isinstance(spec.action, Discrete)
  fraction = fields['agent.random_fraction']
  exploring.check_random_fraction(fraction, spec)
  outer = inner = acting.bounded_distribution(spec.action)
  num_actions, num_components = outer.num_params, 1
  if isinstance(spec.action, Box):
    num_actions, num_components = 0, math.prod(spec.action.shape)
    # The agent's own actions are in [-1, 1].
    ones = np.ones(spec.action.shape, np.float32)
    inner = acting.bounded_distribution(Box(spec.action.shape, -ones, ones))

  policy_torso, critic_torso = torsos.build_torsos(spec, fields)
  policy: Any = Policy(policy_torso, inner.num_params)
  critic: Any = TwinValues(
    critic_torso, num_actions, fields['network.hidden_sizes'][-1]
  )

  def init_params(rng_key: chex.PRNGKey) -> Params:
    policy_key, critic_key = jax.random.split(rng_key)
    obs = zeros(spec.obs, 1)
    action = None if is_discrete else jnp.zeros((1, num_components))
    return Params(
      policy.init(policy_key, obs),
      critic.init(critic_key, obs, action),
      jnp.log(jnp.float32(fields['agent.initial_temperature'])),
    )

  def policy_head(params: Tree, obs: Tree) -> Array:
    return hide_illegal(policy.apply(params, without_mask(obs)), obs)

  def cautious(values: Array) -> jax.Array:
    """Maps the values of the two critics, `[2, ...]`, to `[...]`."""
    caution = fields['agent.caution']
    smaller, mean = jnp.min(values, axis=0), jnp.mean(values, axis=0)
    return caution * smaller + (1.0 - caution) * mean

  def soft_value(params, head, obs, temperature, rng_key):
    """Returns the policy's value with its entropy bonus, and its entropy.

    Both are float32 `[N]`. For continuous actions, they are estimates with one
    action, and gradients flow through this action to the head.
    """
    if is_discrete:
      values = cautious(critic.apply(params, without_mask(obs)))
      probabilities = jax.nn.softmax(head)
      entropy = inner.entropy(head)
      value = jnp.sum(probabilities * values, axis=-1)
    else:
      sample = jax.vmap(inner.sample)(rng_key, head)
      action = inner.to_action(sample).reshape(len(sample), -1)
      value = cautious(critic.apply(params, obs, action))
      entropy = -inner.log_prob(head, sample)
    return value + temperature * entropy, entropy

  def initial_carry(env_index: Array) -> Noise:
    key_data = jax.random.key_data(jax.random.key(0))
    number = len(env_index)
    return Noise(
      jnp.tile(key_data, (number, 1)), jnp.zeros((number,), jnp.int32)
    )

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    head = policy_head(variables.params.policy, timestep.obs)
    if fraction and not greedy:
      uniform = hide_illegal(jnp.zeros_like(head), timestep.obs)
      probabilities = (1.0 - fraction) * jax.nn.softmax(head)
      head = jnp.log(probabilities + fraction * jax.nn.softmax(uniform))
    is_due = carry.steps_left == 0
    fresh = jax.random.key_data(rng_key)
    key_data = jnp.where(is_due[:, None], fresh, carry.key_data)
    left = jnp.where(is_due, fields['agent.noise_steps'], carry.steps_left) - 1
    keys = jax.random.wrap_key_data(key_data)
    sample = inner.mode(head) if greedy else jax.vmap(inner.sample)(keys, head)
    return outer.to_action(sample), Extras(sample), Noise(key_data, left)

  def prepare(variables, target_params, sample, rng_key, mean) -> Batch:
    del mean
    params = jax.lax.stop_gradient(variables.params)
    timestep = sample.trajectory.timestep
    obs, next_obs = (
      jax.tree.map(lambda x: x[t], timestep.obs) for t in range(2)
    )
    value, _ = soft_value(
      target_params.critic,
      policy_head(params.policy, next_obs),
      next_obs,
      jnp.exp(params.log_temperature),
      rng_key,
    )
    discount = variables.hyperparams['gamma'] * timestep.discount[1]
    reward = acting.clip_reward(timestep.reward[1], fields['agent.reward_clip'])
    return Batch(
      obs=obs,
      sample=sample.trajectory.extras.sample[0],
      target=reward + discount * value,
      weight=sample.weight * returns.weights(timestep)[0],
    )

  def loss(variables, target_params, batch: Batch, rng_key):
    del target_params
    params, weight = variables.params, batch.weight
    if is_discrete:
      values = critic.apply(params.critic, without_mask(batch.obs))
      category = jnp.broadcast_to(batch.sample, values.shape[:2])
      values = exploring.choose(values, category)
    else:
      action = inner.to_action(batch.sample).reshape(len(weight), -1)
      values = critic.apply(params.critic, batch.obs, action)
    errors = values - batch.target[None]
    value_loss = 0.5 * jnp.mean(weight[None] * jnp.square(errors))

    fixed = jax.lax.stop_gradient(params)
    temperature = jnp.exp(fixed.log_temperature)
    head = policy_head(params.policy, batch.obs)
    value, entropy = soft_value(
      fixed.critic, head, batch.obs, temperature, rng_key
    )
    policy_loss = -jnp.mean(weight * value)
    target = variables.hyperparams['target_entropy'] * num_components
    if isinstance(batch.obs, Masked):
      # No policy has more entropy than a uniform one over the legal actions.
      num_legal = jnp.sum(
        hide_illegal(jnp.zeros_like(head), batch.obs) == 0, -1
      )
      target = jnp.minimum(target, 0.5 * jnp.log(num_legal))
    excess = jnp.mean(weight * (jax.lax.stop_gradient(entropy) - target))
    temperature_loss = params.log_temperature * excess
    metrics: Metrics = {
      'value_loss': value_loss,
      'policy_loss': policy_loss,
      'entropy': jnp.mean(weight * entropy),
      'temperature': temperature,
      'value': jnp.mean(weight[None] * values),
    }
    total = 2.0 * value_loss + policy_loss + temperature_loss
    return total, LossOutput(metrics)

  return Agent(
    init=acting.make_init(init_params),
    initial_carry=initial_carry,
    act=act,
    prepare=prepare,
    loss=loss,
  )
