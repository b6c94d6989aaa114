"""Anakin on bsuite's Catch: a caught ball gives +1, a missed one gives -1.

python experiments/anakin_catch.py [--agent=AGENT]
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
  config.env.name = 'Catch-bsuite'  # Images: 10 x 5. Episodes have 9 steps.
  if not is_actor_critic(agent):
    apply_kinds(config, 'small image')
  config.total_env_steps = 500_000  # The run takes a few seconds.
  if agent in ('impala', 'a2c'):  # These agents use each unroll once.
    config.optimizer.learning_rate = 3e-3
  return config


if __name__ == '__main__':
  podrl.main(get_config)
