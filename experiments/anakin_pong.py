"""Anakin on gymnax's Pong-misc: keep a ball in play, 1 point per step.

python experiments/anakin_pong.py [--agent=AGENT]
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
  config.env.name = 'Pong-misc'  # Images: 30 x 40 x 3. At most 1,000 steps.
  config.network.name = 'mlp'  # These sparse images need no convolution.
  if not is_actor_critic(agent):
    apply_kinds(config, 'sparse image')
  config.total_env_steps = 800_000  # The run takes 16 s on two CPU cores.
  return config


if __name__ == '__main__':
  podrl.main(get_config)
