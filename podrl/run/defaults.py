"""Makes the configuration for an environment of which the user gives a name.

The specification and the suite of an environment determine its kinds. No
environment has special settings.
"""

from collections.abc import Callable, Collection, Sequence
import functools
import math
import sys
import types
from typing import Any

import jax
import numpy as np

from podrl.core.distributions import LARGEST_BOUND
from podrl.drivers import spmd
from podrl.envs import SUITES, Task, find_task
from podrl.fields import Fields
from podrl.messages import check_choice
from podrl.networks.torsos import image_sizes
from podrl.records import workdir as files
from podrl.records.terminal import podrl_command
from podrl.run import build, cluster
from podrl.run.command_line import CommandLine, parse_command_line
from podrl.run.config import (
  FIELDS,
  change,
  check_trust,
  default_fields,
  settings_of_kinds,
)
from podrl.types import Box, EnvSpec

# With less than this part of the usual steps, an agent may not begin to learn.
_FEW_STEPS = 0.2
_LARGE_SIDE = 36  # Images of this size or more are large, like Atari's.
# What MuJoCo Playground's robots observe: their sensors, and the whole state of
# the simulation.
_ROBOT = {'state', 'privileged_state'}
_SPARSE_SIDE = 16  # From this size on, an MLP reads images of zeros and ones.


def base(task: Task, agent: str) -> dict[str, Any]:
  """Returns the agent's defaults for the architecture that the task needs."""
  architecture = SUITES[task.suite].architecture.capitalize()
  own = {'env.suite': task.suite, 'env.name': task.name}
  return default_fields(agent, architecture) | own


def kinds(task: Task, spec: EnvSpec, platform: str) -> list[str]:
  """Returns an environment's kinds; later kinds override earlier ones."""
  size = max(image_sizes(spec))  # The size of the largest image.
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
  if isinstance(spec.obs, dict) and spec.obs.keys() == _ROBOT:
    found.append('robot')
  if SUITES[task.suite].needs_memory(task.name):
    found.append('memory')
  if SUITES[task.suite].has_large_rewards(task.name):
    found.append('large rewards')
  if spec.has_turns:
    found.append('self-play')
  return found


def specialise(
  config: Fields, spec: EnvSpec, chosen: Collection[str] = ()
) -> tuple[dict[str, Any], int]:
  """Applies the settings for the kinds of an environment.

  Args:
    config: names the environment and has the user's options for it.
    chosen: fields that the user has set, which keep their values.

  Returns:
    The configuration, and the usual number of environment steps.
  """
  task = Task(config['env.suite'], config['env.name'])
  found = kinds(task, spec, spmd.platform())
  # The usual number of steps is needed even if the user has chosen another.
  settings = settings_of_kinds(config, found, {*chosen} - {'total_env_steps'})
  default = FIELDS['total_env_steps'].default
  usual = settings.get('total_env_steps', default)
  changes = {k: x for k, x in settings.items() if k not in chosen}
  if 'large image on a CPU' in found:
    options = SUITES[task.suite].small_options(task.name)
    changes['env.options'] = options | config['env.options']
  return change(config, changes), usual


def make_config(task: Task, agent: str, spec: EnvSpec) -> dict[str, Any]:
  """Makes an agent's configuration from the kinds of an environment."""
  return specialise(base(task, agent), spec)[0]


def parse_arguments(
  arguments: Sequence[str], values: Fields = types.MappingProxyType({})
) -> tuple[Callable[..., dict[str, Any]], CommandLine]:
  """Parses the arguments of `podrl train`; raises a ValueError for a mistake.

  `values` are further fields, which a Python program sets.

  Returns:
    The function `get_config` for the environment in the arguments, and the
    command line.
  """
  argv = ['podrl train', *arguments]
  command_line = parse_command_line(argv, has_task=True, values=values)
  command_line = command_line._replace(command=f'{podrl_command()} train')
  return functools.partial(_get_config, command_line), command_line


def _find_task(command_line: CommandLine) -> tuple[Task, Fields]:
  """Returns the environment, and the configuration of a resumed run."""
  text, values = command_line.task, command_line.flags
  saved: Fields = {}
  if values.resume and files.is_run(values.workdir):
    saved = check_trust(
      values.workdir,
      files.read_config(values.workdir),
      values.trust,
      command_line.named(),
    )
    suite, name = saved['env.suite'], saved['env.name']
    if text in ('', name, f'{suite}:{name}'):
      return Task(suite, name), saved
  if not text and values.resume and values.workdir:
    raise ValueError(
      f'--workdir={files.short(values.workdir)} contains no run to resume, '
      'because it has no config.json; check the path'
    )
  if not text:
    raise ValueError(
      'give the name of an environment, as in podrl train CartPole-v1; the '
      'command podrl envs lists the names'
    )
  return find_task(text), saved


def _get_config(
  command_line: CommandLine, agent: str, variant: str
) -> dict[str, Any]:
  """Makes the configuration for an environment and an agent."""
  check_choice('variant', variant, ('',))
  task, saved = _find_task(command_line)
  config = base(task, agent)
  kept = 'env.options', 'env.path'
  config |= {k: saved[k] for k in kept if k in saved}
  # A field may belong to an optimiser that the kind of environment sets later.
  config, _ = command_line.apply(config, is_complete=False)
  # `make_spec` uses devices, so JAX must be set up first.
  build.set_up_jax(config, cluster.num_processes())
  if task.note and jax.process_index() == 0:
    print(task.note, file=sys.stderr)
  spec = build.make_spec(config)
  chosen = command_line.fields()
  config, usual = specialise(config, spec, chosen)
  steps = config['total_env_steps'] if 'total_env_steps' in chosen else usual
  warnings = _warnings(task, config, spec, steps, usual)
  if jax.process_index() == 0 and not saved:
    for warning in warnings:
      print(f'warning: {warning}', file=sys.stderr)
  return config


def _warnings(
  task: Task, config: Fields, spec: EnvSpec, steps: int, usual: int
) -> list[str]:
  """Returns why a run may not learn.

  `steps` are the environment steps of the run, and `usual` those that the agent
  has by default.
  """
  found, agent = [], config['agent.name']
  if steps < _FEW_STEPS * usual:
    found.append(
      f'{steps:,} steps are few: for a task of this kind, {agent} has '
      f'{usual:,} by default'
    )
  if isinstance(spec.action, Box):
    bounds = np.abs(np.stack([spec.action.low, spec.action.high]))
    far = bounds[np.isfinite(bounds) & (bounds >= LARGEST_BOUND)]
    # The largest float of a dtype means that there is no bound.
    if far.size and (largest := far.min()) < 1e30:
      found.append(
        f'the bound {largest:g} of the actions counts as infinite; let the '
        f'environment scale actions from bounds below {LARGEST_BOUND:g}'
      )
  needs_memory = SUITES[task.suite].needs_memory(task.name)
  if needs_memory and 'network.recurrent' not in config:
    found.append(
      f'{task.name} needs a memory, which {agent} does not have; use '
      '--agent=ppo or --agent=r2d2'
    )
  return found
