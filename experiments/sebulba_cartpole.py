"""Sebulba on envpool's CartPole-v1. The run takes 20 s on two CPU cores.

python experiments/sebulba_cartpole.py [--agent=AGENT]
"""

import podrl
from podrl.run.config import (
  ConfigDict,
  apply_kinds,
  check_choice,
  sebulba_config,
)


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """Returns the configuration for an agent. There are no variants."""
  check_choice('variant', variant, ('',))
  config = apply_kinds(sebulba_config(agent), 'numbers')
  config.env.name = 'CartPole-v1'  # Observations: 4 numbers. Actions: 2.
  if agent == 'ppo':
    config.total_env_steps = 1_000_000
  return config


if __name__ == '__main__':
  podrl.main(get_config)
