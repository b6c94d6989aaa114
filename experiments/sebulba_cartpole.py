"""Sebulba on CartPole-v1: envpool on the host, a minute on a CPU.

python experiments/sebulba_cartpole.py [--agent=ppo|impala|a2c]
"""

from ml_collections import ConfigDict

import podrl
from podrl.run.config import check_choice, sebulba_config


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """The configuration for an agent; there are no variants."""
  check_choice('variant', variant, ('',))
  config = sebulba_config(agent)
  config.env.name = 'CartPole-v1'  # 4 numbers, 2 actions, 500 steps at most.
  if agent == 'ppo':
    config.unroll_length = 32  # Short unrolls and
    config.num_epochs = 4  # many steps.
  else:
    config.unroll_length = 8  # One pass over each unroll needs more of them,
    config.total_env_steps = 2_000_000  # more steps
    config.optimizer.learning_rate = 3e-3  # and larger ones.
  return config


if __name__ == '__main__':
  podrl.main(get_config)
