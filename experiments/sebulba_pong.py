"""Sebulba on Atari's Pong-v5, from images of the screen.

python experiments/sebulba_pong.py [--agent=AGENT]
    [--variant=cpu|cleanba|recurrent]
"""

import podrl
from podrl.run.config import (
  ConfigDict,
  apply_kinds,
  check_choice,
  sebulba_config,
)


def get_config(agent: str = 'ppo', variant: str = '') -> ConfigDict:
  """Returns the configuration for an agent.

  Args:
    agent: one of `podrl.agents.AGENTS`.
    variant: 'cleanba' is for accelerators and has the settings of Cleanba
      (Huang et al. 2023, arXiv:2310.00036). 'cpu' is for machines without an
      accelerator and has small images, a small network and small batches. ''
      selects 'cleanba' or 'cpu', whichever fits this machine. 'recurrent' makes
      the same choice, but an observation is one frame and the network has an
      LSTM.
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
  apply_kinds(config, 'large image')
  if variant == 'cleanba':  # Source: Machado et al. 2018, arXiv:1709.06009.
    options.repeat_action_probability = 0.25
    options.full_action_space = True
  else:
    apply_kinds(config, 'large image on a CPU')
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
