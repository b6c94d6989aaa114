"""Anakin on MinAtar's Breakout: 10 x 10 images, 1 point per brick.

python experiments/anakin_breakout.py [--agent=AGENT]
    [--variant=conv|mlp]
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
  """Returns the configuration for an agent; the default variant is conv."""
  check_choice('variant', variant, ('', 'conv', 'mlp'))
  config = base_config(agent)
  config.env.name = 'Breakout-MinAtar'  # Images: 10 x 10 x 4. Actions: 3.
  config.network.name = variant or 'conv'  # MinAtar's authors use conv.
  if not is_actor_critic(agent):
    return apply_kinds(config, 'small image')
  config.total_env_steps = 5_000_000  # The return still rises at the end.
  if agent == 'ppo':
    config.unroll_length = 128  # Rewards are rare, so unrolls are long.
    # More passes and smaller minibatches give more optimiser steps per unroll.
    config.num_epochs = 4
    config.num_minibatches = 8
    # A high learning rate improves the policy quickly at the start.
    config.optimizer.learning_rate = 5e-3
  elif agent == 'a2c':
    # With less entropy, the policy soon becomes certain, and stays near 6.
    config.env.num_envs = 32
    config.unroll_length = 16
    config.agent.lambda_ = 0.95
    config.agent.entropy_cost = 0.05
    config.optimizer.learning_rate = 5e-3
  if config.network.name == 'conv':
    config.network.hidden_sizes = (128,)  # One layer after the convolution.
    config.network.shared_torso = True  # Both heads use the same features.
    config.total_env_steps = 2_000_000  # conv needs fewer steps than mlp.
  return config


if __name__ == '__main__':
  podrl.main(get_config)
