"""Chooses settings for a kind of environment; the user gives only a name.

The specification and the suite of an environment determine its kinds. No
environment has special settings.
"""

from collections.abc import Collection
import math

import jax
from ml_collections import ConfigDict

from podrl.drivers import spmd
from podrl.envs import SUITES, Task
from podrl.networks.torsos import image_sizes
from podrl.run.config import (
  FIELDS,
  base_config,
  change,
  sebulba_config,
  settings_of_kinds,
)
from podrl.types import Box, EnvSpec

_LARGE_SIDE = 36  # Images of this size or more are large, like Atari's.
_SPARSE_SIDE = 16  # From this size on, an MLP reads images of zeros and ones.


def base(task: Task, agent: str) -> ConfigDict:
  """Makes the agent's defaults for the architecture that the task needs."""
  is_anakin = SUITES[task.suite].architecture == 'anakin'
  config = (base_config if is_anakin else sebulba_config)(agent)
  config.env.suite, config.env.name = task.suite, task.name
  return config


def kinds(task: Task, spec: EnvSpec, platform: str) -> list[str]:
  """Returns an environment's kinds; later kinds override earlier ones."""
  size = max(image_sizes(spec))  # That of the largest image.
  leaves = jax.tree.leaves(spec.obs)
  if size >= _LARGE_SIDE:
    found = ['large image']
    if platform == 'cpu':
      found.append('large image on a CPU')
  elif size >= _SPARSE_SIDE and all(x.dtype == bool for x in leaves):
    found = ['sparse image']
  else:
    found = ['small image' if size else 'numbers']
  if isinstance(spec.action, Box):
    found.append('continuous')
    if math.prod(spec.action.shape) > 1:
      found.append('action vector')
  if SUITES[task.suite].needs_memory(task.name):
    found.append('memory')
  if SUITES[task.suite].has_large_rewards(task.name):
    found.append('large rewards')
  return found


def specialise(
  config: ConfigDict, spec: EnvSpec, chosen: Collection[str] = ()
) -> int:
  """Applies the settings for the kinds of an environment, in place.

  Args:
    config: names the environment and has the user's options for it.
    spec: describes the environment.
    chosen: fields that the user has set, which keep their values.

  Returns:
    The usual number of environment steps.
  """
  task = Task(config.env.suite, config.env.name)
  found = kinds(task, spec, spmd.platform())
  settings = settings_of_kinds(config, found)
  if 'large image on a CPU' in found:
    for name, option in SUITES[task.suite].small_options(task.name).items():
      config.env.options.setdefault(name, option)
  usual = settings.get('total_env_steps', FIELDS['total_env_steps'].default)
  change(config, {k: x for k, x in settings.items() if k not in chosen})
  return usual


def make_config(task: Task, agent: str, spec: EnvSpec) -> ConfigDict:
  """Makes an agent's configuration from the kinds of an environment."""
  config = base(task, agent)
  specialise(config, spec)
  return config
