"""Anakin on CartPole-v1: balance a pole for 500 steps.

python experiments/anakin_cartpole.py [--agent=AGENT]
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
  config.env.name = 'CartPole-v1'  # Observations: 4 numbers. Actions: 2.
  if not is_actor_critic(agent):
    return apply_kinds(config, 'numbers')
  # With raw rewards, returns are near 100. The value head learns such numbers
  # so slowly that a few of 20 seeds stay below 300.
  config.agent.normalize_reward = True
  if agent == 'ppo':
    # Short unrolls and many optimiser steps make learning fast.
    config.unroll_length = 32
    config.num_epochs = 4
  else:
    # These agents use each unroll once, so they need more and larger updates.
    config.unroll_length = 8
    config.total_env_steps = 2_000_000
    config.optimizer.learning_rate = 3e-3
  return config


if __name__ == '__main__':
  podrl.main(get_config)
