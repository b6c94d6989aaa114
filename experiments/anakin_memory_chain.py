"""Anakin on bsuite's MemoryChain: recall the bit that the first step shows.

python experiments/anakin_memory_chain.py [--agent=ppo|impala|a2c]
"""

import podrl
from podrl.run.config import ConfigDict, base_config, check_choice


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """Returns the configuration for an agent. There are no variants."""
  check_choice('variant', variant, ('',))
  config = base_config(agent)
  # Observations: 3 numbers. The last action earns 1 if it is right, else -1.
  config.env.name = 'MemoryChain-bsuite'
  config.network.recurrent = 'gru'  # Without a memory, the return is about 0.
  config.unroll_length = 32
  return config


if __name__ == '__main__':
  podrl.main(get_config)
