"""PQN: Q-learning from unrolls, with Q(lambda) targets and no memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podrl.agents import acting, exploring
from podrl.core import losses, returns
from podrl.core.observations import hide_illegal
from podrl.fields import Fields, with_defaults
from podrl.networks import cores
from podrl.types import Agent, Array, EnvSpec, LossOutput, Metrics, Tree

FIELDS = with_defaults(
  {**exploring.FIELDS, **acting.PASSES, **cores.FIELDS},
  {
    'unroll_length': 64,
    'num_epochs': 4,
    'num_minibatches': 16,
    'agent.lambda_': 0.95,
    'network.layer_norm': True,
    'optimizer.name': 'radam',
    'optimizer.max_grad_norm': 10.0,
  },
)

# See `AgentEntry.kinds`. Source: Gallici et al. 2024, arXiv:2407.04811.
KINDS: dict[str, Fields] = {
  'numbers': {
    'total_env_steps': 500_000,
    'agent.final_epsilon': 0.2,  # With 0.05, some seeds lost a good policy.
    'network.hidden_sizes': (128, 128),
    'optimizer.learning_rate': 3e-4,
  },
  'memory': {
    'unroll_length': 128,
    'num_minibatches': 8,
    'agent.final_epsilon': 0.05,
    'network.memory_steps': 200,
    'optimizer.learning_rate': 1e-3,
  },
  'small image': {
    'total_env_steps': 5_000_000,
    'unroll_length': 32,
    'num_epochs': 2,
    'num_minibatches': 32,
    'env.num_envs': 128,
    'agent.lambda_': 0.65,
    'agent.exploration_fraction': 0.1,
    'optimizer.learning_rate': 5e-4,
  },
}
KINDS['large image'] = {
  **KINDS['small image'],
  'total_env_steps': 50_000_000,
  'agent.final_epsilon': 0.001,
  'network.name': 'nature_cnn',
  'network.hidden_sizes': (512,),
  'optimizer.learning_rate': 2.5e-4,
}
KINDS['large image on a CPU'] = {
  'total_env_steps': 2_000_000,
  'env.num_envs': 32,
  'num_minibatches': 8,
  'agent.final_epsilon': 0.01,
  'network.hidden_sizes': (256,),
  'optimizer.learning_rate': 5e-4,
}


class Batch(NamedTuple):
  """Sequences `[N, S, ...]`, as in `ppo.Batch`."""

  obs: Tree  # `[N, S, D]`, observations as vectors.
  is_first: Array  # `[N, S]` bool.
  carry: Tree  # `[N, 1, ...]`, the carry before the first step.
  action: Array  # `[N, S]` int32.
  target: Array  # `[N, S]` float32, the value target.
  weight: Array  # `[N, S]` float32, 0 at reset steps.


def make_agent(spec: EnvSpec, fields: Fields) -> Agent:
  """Builds a PQN agent.

  The field `network.layer_norm` is what makes learning stable without target
  parameters.

  Raises:
    ValueError: if the actions are not discrete.

  Source: Gallici et al. 2024, arXiv:2407.04811, algorithm 2.
  """
  network = exploring.build_network(spec, fields)

  def to_values(outputs: Array) -> Array:
    return outputs[..., 0]

  def prepare(variables, target_params, sample, rng_key, mean) -> Batch:
    del target_params, rng_key, mean
    params, _, hyperparams = variables
    trajectory = sample.trajectory
    timestep = trajectory.timestep
    inputs = acting.bootstrap_inputs(trajectory, network.is_recurrent)
    outputs, _ = network.unroll(params, *inputs)
    last_obs = jax.tree.map(lambda x: x[-1:], inputs[0])
    last_values = hide_illegal(to_values(outputs[-1:]), last_obs)
    last_value = jnp.max(last_values, axis=-1)
    values = jnp.concatenate([trajectory.extras.value, last_value])
    weight = returns.weights(timestep)
    target = returns.q_lambda(
      # The targets are constants with respect to the parameters.
      jax.lax.stop_gradient(values),
      acting.clip_reward(timestep.reward[1:], fields['agent.reward_clip']),
      hyperparams['gamma'] * timestep.discount[1:],
      weight,
      lambda_=hyperparams['lambda_'],
    )
    batch = Batch(
      obs=jax.tree.map(lambda x: x[:-1], timestep.obs),
      is_first=timestep.is_first[:-1],
      carry=trajectory.carry,
      action=trajectory.action,
      target=target,
      weight=weight,
    )
    return acting.to_rows(batch, network)

  def loss(variables, target_params, batch: Batch, rng_key):
    del target_params, rng_key
    batch = acting.from_rows(batch, network)
    outputs, _ = network.unroll(
      variables.params, batch.obs, batch.is_first, batch.carry
    )
    values = hide_illegal(to_values(outputs), batch.obs)
    value = exploring.choose(values, batch.action)
    value_mean = jnp.mean(batch.weight * jnp.max(values, axis=-1))
    metrics: Metrics = {'value': value_mean}
    return losses.value(value, batch.target, batch.weight), LossOutput(metrics)

  return Agent(
    init=exploring.make_init(network.init),
    initial_carry=acting.make_initial_carry(network),
    act=exploring.make_act(network, to_values, stores_value=True),
    prepare=prepare,
    loss=loss,
    absorb=exploring.absorb,
  )
