"""Anakin on bsuite's MemoryChain: recall the bit that the first step shows.

python experiments/anakin_memory_chain.py [--agent=AGENT]
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
  # Observations: 3 numbers. The last action earns 1 if it is right, else -1.
  config.env.name = 'MemoryChain-bsuite'
  if not is_actor_critic(agent):
    return apply_kinds(config, 'numbers', 'memory')
  config.network.recurrent = 'gru'  # Without a memory, the return is about 0.
  config.unroll_length = 32
  return config


if __name__ == '__main__':
  podrl.main(get_config)
