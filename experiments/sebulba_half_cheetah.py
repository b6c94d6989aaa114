"""Sebulba on MuJoCo's HalfCheetah-v4: run forward.

python experiments/sebulba_half_cheetah.py [--agent=AGENT]
"""

import podrl
from podrl.run.config import (
  ConfigDict,
  apply_kinds,
  check_choice,
  is_actor_critic,
  sebulba_config,
)


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """Returns the configuration for an agent. There are no variants."""
  check_choice('variant', variant, ('',))
  config = sebulba_config(agent)
  config.env.name = 'HalfCheetah-v4'  # Observation: 17 numbers; action: 6.
  if not is_actor_critic(agent):
    config.eval.num_episodes = 16
    config.eval.every_env_steps = 30_000
    apply_kinds(config, 'numbers', 'continuous')
    config.total_env_steps = 300_000
    return config
  config.env.num_envs = 16
  config.agent.entropy_cost = 0.0
  config.agent.normalize_observation = True
  config.agent.normalize_reward = True
  # With 1.0, most agents of IMPALA and A2C stayed near a return of 1,000.
  config.network.initial_scale = 0.5
  config.eval.num_episodes = 16
  config.eval.every_env_steps = 250_000
  if agent == 'ppo':  # CleanRL's ppo_continuous_action.py has these settings.
    config.unroll_length = 128
    config.num_epochs = 10
    config.num_minibatches = 32
    config.optimizer.learning_rate = 3e-4
  else:
    config.agent.lambda_ = 0.95
    if agent == 'impala':
      config.num_minibatches = 4
    else:  # A2C takes one optimiser step per unroll, so it needs larger steps.
      config.optimizer.learning_rate = 2e-3
      config.network.initial_scale = 0.3  # With 0.5, 1 of 6 seeds stays at 700.
  return config


if __name__ == '__main__':
  podrl.main(get_config)
