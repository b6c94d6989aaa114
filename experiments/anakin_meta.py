"""Meta-gradients on Anakin: hyperparameters that begin wrong and learn.

python experiments/anakin_meta.py [--agent=ppo|impala|a2c]
    [--variant=catch|corridor]

On Catch, the weight of the entropy bonus begins at 5.0, so that the policy
would stay random. In a corridor of six steps, gamma begins at 0.5, so that the
agent would leave the corridor at once. --config.meta.learning_rate=0 shows what
happens without meta-gradients.
"""

import jax
import jax.numpy as jnp

import podrl
from podrl.envs import autoreset
from podrl.messages import check_choice
from podrl.run.config import ConfigDict, base_config
from podrl.types import DeviceEnv, Discrete, EnvSpec

_LENGTH = 6  # Steps from one end of the corridor to the other.


def corridor() -> DeviceEnv:
  """Action 1 goes on; the end pays 1. Action 0 leaves, which pays 0.1."""

  def reset(rng_key):
    del rng_key
    return jnp.arange(_LENGTH) == 0, jnp.int32(0)

  def step(rng_key, x, action):
    del rng_key
    x = x + action
    is_end = x == _LENGTH
    reward = jnp.where(is_end, 1.0, 0.1 * (action == 0))
    return jnp.arange(_LENGTH) == x, x, reward, is_end | (action == 0), False

  spec = EnvSpec(
    jax.ShapeDtypeStruct((_LENGTH,), bool),
    channels_first=False,
    action=Discrete(2),
    frame_skip=1,
    max_episode_steps=_LENGTH,
  )
  return autoreset.make_device_env(spec, reset, step)


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """Returns the configuration for an agent; the default variant is 'catch'."""
  check_choice('variant', variant, ('', 'catch', 'corridor'))
  check_choice('agent', agent, ('ppo', 'impala', 'a2c'))
  config = base_config(agent)
  config.total_env_steps = 500_000  # The run takes a few seconds.
  config.eval.greedy = False
  config.meta.learning_rate = 0.1
  # Short unrolls give more updates, and each update moves the hyperparameters.
  if agent == 'ppo':
    config.unroll_length = 8
    config.num_epochs = config.num_minibatches = 1
  else:  # IMPALA and A2C use each unroll once.
    config.optimizer.learning_rate = 3e-3
  if variant == 'corridor':
    config.env.suite = 'jax'
    config.env.name = 'anakin_meta:corridor'
    config.agent.gamma = 0.5
  else:
    config.env.name = 'Catch-bsuite'
    config.agent.entropy_cost = 5.0
  return config


if __name__ == '__main__':
  podrl.main(get_config)
