"""Anakin on bsuite's MemoryChain: recall at the end what was shown at first.

python experiments/anakin_memory_chain.py [--agent=ppo|impala|a2c]
"""

from ml_collections import ConfigDict

import podrl
from podrl.run.config import base_config, check_choice


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """The configuration for an agent; there are no variants."""
  check_choice('variant', variant, ('',))
  config = base_config(agent)
  # 3 numbers, 2 actions; 1 for the right one at the end, -1 for the other.
  config.env.name = 'MemoryChain-bsuite'
  config.network.recurrent = 'gru'  # Without it the return is 0.
  config.unroll_length = 32
  return config


if __name__ == '__main__':
  podrl.main(get_config)
