"""Sebulba on Atari's Pong-v5, from images of the screen.

python experiments/sebulba_pong.py [--agent=AGENT]
    [--variant=cpu|cleanba|recurrent]
"""

import podrl
from podrl.run.config import (
  ConfigDict,
  apply_kinds,
  check_choice,
  is_actor_critic,
  sebulba_config,
)


def _set_actor_critic(config: ConfigDict, agent: str, variant: str) -> None:
  """Sets what the agents with a policy and a value learn with."""
  config.total_env_steps = 50_000_000  # Each step is 4 frames of the game.
  config.env.num_envs = 128  # Two actor threads have 64 environments each.
  config.agent.reward_clip = 1.0
  config.network.name = 'impala_resnet'
  config.network.hidden_sizes = (256,)
  config.network.shared_torso = True
  config.eval.num_episodes = 16
  config.num_minibatches = 4
  if agent == 'ppo':
    config.unroll_length = 128
    config.num_epochs = 4
    config.agent.clip = 0.1
    config.optimizer.learning_rate = 2.5e-4
  else:
    config.unroll_length = 20
    config.num_minibatches = 4 if agent == 'impala' else 1
    config.optimizer.name = 'rmsprop'
    config.optimizer.learning_rate = 6e-4
    config.optimizer.max_grad_norm = 40.0
  if variant != 'cpu':
    return
  config.total_env_steps = 1_500_000
  config.env.num_envs = 16
  config.network.name = 'conv'
  if agent == 'ppo':
    config.num_epochs = 3
    config.num_minibatches = 8
    config.agent.clip = 0.2
    config.optimizer.learning_rate = 5e-4
    config.optimizer.anneal = False  # This run is too short to anneal.


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """Returns the configuration for an agent.

  Args:
    agent: one of `podrl.agents.AGENTS`.
    variant: 'cleanba' is for accelerators and has the settings of Cleanba
      (Huang et al. 2023, arXiv:2310.00036). 'cpu' is for machines without an
      accelerator and has small images, a small network and small batches. ''
      selects 'cleanba' or 'cpu', whichever fits this machine. 'recurrent' makes
      the same choice, but an observation is one frame and the network has a
      memory.
  """
  check_choice('variant', variant, ('', 'cleanba', 'cpu', 'recurrent'))
  is_recurrent = variant == 'recurrent'
  if not variant or is_recurrent:
    # An import at the top would make Ctrl-C print a traceback.
    from podrl.drivers import spmd

    variant = 'cleanba' if spmd.has_accelerator() else 'cpu'
  config = sebulba_config(agent)
  options = config.env.options
  config.env.name = 'Pong-v5'
  if is_actor_critic(agent):
    _set_actor_critic(config, agent, variant)
  else:
    on_cpu = ['large image on a CPU'] * (variant == 'cpu')
    apply_kinds(config, 'large image', *on_cpu)
  if variant != 'cpu':  # Source: Machado et al. 2018, arXiv:1709.06009.
    options.repeat_action_probability = 0.25
    options.full_action_space = True
  else:
    options.img_height = options.img_width = 42
    config.eval.every_env_steps = 250_000
  if is_recurrent:
    if 'recurrent' not in config.network:
      raise ValueError(f'variant=recurrent does not fit agent={agent}')
    options.stack_num = 1
    config.network.recurrent = 'lstm'
  return config


if __name__ == '__main__':
  podrl.main(get_config)
