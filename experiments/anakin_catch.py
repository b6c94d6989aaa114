"""Anakin on bsuite's Catch: a falling ball, +1 if caught and -1 if missed.

python experiments/anakin_catch.py [--agent=ppo|impala|a2c]
"""

from ml_collections import ConfigDict

import podrl
from podrl.run.config import base_config, check_choice


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """The configuration for an agent; there are no variants."""
  check_choice('variant', variant, ('',))
  config = base_config(agent)
  config.env.name = 'Catch-bsuite'  # 10 x 5 images, 9 steps.
  config.total_env_steps = 500_000  # Some seconds.
  return config


if __name__ == '__main__':
  podrl.main(get_config)
