"""Anakin on MinAtar's Breakout: 10 x 10 images, 1 point per brick.

python experiments/anakin_breakout.py [--agent=ppo|impala|a2c]
    [--variant=conv|mlp]
"""

from ml_collections import ConfigDict

import podrl
from podrl.run.config import base_config, check_choice


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """The configuration for an agent; 'conv' is the default variant."""
  check_choice('variant', variant, ('', 'conv', 'mlp'))
  config = base_config(agent)
  config.env.name = 'Breakout-MinAtar'  # 10 x 10 x 4 images, 3 actions.
  config.network.name = variant or 'conv'  # MinAtar's own network, or an MLP.
  config.total_env_steps = 5_000_000  # Still climbing there.
  if agent == 'ppo':
    config.unroll_length = 128  # Bricks are rare: look further,
    config.num_epochs = 4  # learn more from each unroll,
    config.num_minibatches = 8  # in smaller batches,
    config.optimizer.learning_rate = 5e-3  # and leave the first habit fast.
  if config.network.name == 'conv':
    config.network.hidden_sizes = (128,)  # Of the layer after the convolution.
    config.network.shared_torso = True  # Both heads can use what it sees.
    config.total_env_steps = 2_000_000  # It learns from fewer steps.
  return config


if __name__ == '__main__':
  podrl.main(get_config)
