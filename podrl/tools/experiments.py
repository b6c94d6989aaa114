"""Reads experiments for the commands that take one."""

from collections.abc import Callable, Mapping
import os
import runpy
import shlex
import sys
from typing import Any

import numpy as np

from podrl.fields import Fields
from podrl.modules import add_to_path
from podrl.run.command_line import CommandLine
from podrl.run.config import completed, parts_directory


def load_experiment(path: str) -> Callable[..., Fields]:
  """Returns an experiment's `get_config`; raises a ValueError for a mistake."""
  if not os.path.isfile(path) or not path.endswith('.py'):
    raise ValueError(
      f'{path} is not an experiment; try experiments/sebulba_cartpole.py'
    )
  # Experiments import one another by name, from their directory.
  directory = os.path.dirname(os.path.abspath(path))
  sys.path.insert(0, directory)
  try:
    module = runpy.run_path(path)
  finally:
    sys.path.remove(directory)
  add_to_path(directory)  # `env.name` may name a module of this directory.
  if 'get_config' not in module:
    raise ValueError(f'{path} is not an experiment: it has no get_config')
  return completed(module['get_config'])


def read_config(command_line: CommandLine) -> dict[str, Any]:
  """Builds an experiment's configuration, which is not checked yet.

  It raises a ValueError if there is no such experiment or field.
  """
  values = command_line.flags
  get_config = load_experiment(command_line.task or 'no file')
  config, _ = command_line.apply(get_config(values.agent, values.variant))
  config['env.path'] = config['env.path'] or parts_directory(config)
  return config


def to_flags(fields: Mapping[str, Any]) -> str:
  """Returns fields of the configuration as overrides, to paste in a shell."""
  texts = [','.join(map(str, np.atleast_1d(x))) for x in fields.values()]
  return shlex.join(f'--config.{k}={text}' for k, text in zip(fields, texts))
