"""Anakin on gymnax's Pendulum-v1: swing a pendulum up and hold it there.

python experiments/anakin_pendulum.py [--agent=AGENT]
"""

import podrl
from podrl.run.config import (
  ConfigDict,
  apply_kinds,
  base_config,
  check_choice,
  is_actor_critic,
)


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """Returns the configuration for an agent. There are no variants."""
  check_choice('variant', variant, ('',))
  config = base_config(agent)
  config.env.name = 'Pendulum-v1'  # Observations: 3 numbers. Action: 1 torque.
  if not is_actor_critic(agent):
    config = apply_kinds(config, 'numbers', 'continuous')
    config.total_env_steps = 30_000
    return config
  config.agent.normalize_observation = True
  config.agent.normalize_reward = True
  if agent == 'ppo':  # With fewer optimiser steps, 1 of 20 seeds reached -302.
    config.num_epochs = 8
    config.num_minibatches = 8
    config.optimizer.learning_rate = 3e-4
  else:
    # These agents use each unroll once, so they need many small updates. With
    # 64 environments and the default discounts, all seeds stayed near -1,200.
    config.env.num_envs = 8
    config.unroll_length = 8
    config.agent.gamma = 0.95
    config.agent.lambda_ = 0.9
    config.agent.entropy_cost = 0.02
    config.optimizer.learning_rate = 1.5e-3
  return config


if __name__ == '__main__':
  podrl.main(get_config)
