"""Sebulba on Atari's Breakout-v5, from its screen.

python experiments/sebulba_breakout.py [--agent=ppo|impala|a2c]
    [--variant=cpu|cleanba|recurrent]
"""

from ml_collections import ConfigDict
import sebulba_pong  # The same settings: they are for all of Atari.

import podrl


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """The configuration for an agent; the variants are those of Pong."""
  config = sebulba_pong.get_config(agent, variant)
  config.env.name = 'Breakout-v5'
  return config


if __name__ == '__main__':
  podrl.main(get_config)
