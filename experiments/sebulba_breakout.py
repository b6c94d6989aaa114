"""Sebulba on Atari's Breakout-v5, from images of the screen.

python experiments/sebulba_breakout.py [--agent=AGENT]
    [--variant=cpu|cleanba|recurrent]
"""

from ml_collections import ConfigDict
import sebulba_pong  # The settings suit all Atari games.

import podrl


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """Returns the configuration for an agent, with the variants of Pong."""
  config = sebulba_pong.get_config(agent, variant)
  config.env.name = 'Breakout-v5'
  return config


if __name__ == '__main__':
  podrl.main(get_config)
