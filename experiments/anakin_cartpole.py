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
  config = apply_kinds(base_config(agent), 'numbers')
  config.env.name = 'CartPole-v1'  # Observations: 4 numbers. Actions: 2.
  if is_actor_critic(agent):
    config.agent.normalize_observation = False
  if agent == 'ppo':
    config.total_env_steps = 1_000_000
  return config


if __name__ == '__main__':
  podrl.main(get_config)
