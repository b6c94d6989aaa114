"""Trains an experiment for a benchmark."""

from collections.abc import Mapping, Sequence
import hashlib
import importlib
import json
import pathlib
import subprocess
import sys
from typing import Any

from podrl.records import workdir

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / 'experiments'))  # For their settings.


def run(command: Sequence[str]) -> None:
  """Runs a program; if it fails, ends with the same exit status."""
  process = subprocess.Popen(command)
  while process.returncode is None:
    try:
      process.wait()
    except KeyboardInterrupt:  # The program saves its run, and ends.
      continue
  if process.returncode:
    sys.exit(process.returncode)


def train(
  experiment: str,
  settings: Mapping[str, Any],
  path: str,
  agent: str = 'ppo',
  variant: str = '',
) -> list[str]:
  """Trains an experiment, or continues its run; a finished run is kept.

  Args:
    experiment: name of a file in experiments/, such as 'anakin_cartpole'.
    settings: fields of the configuration that change, by their full names.
    path: the directory of the run. A hash of all settings is added to it, so
      runs with other settings have other directories.
    agent: the argument of the experiment.
    variant: the argument of the experiment.

  Returns:
    The directory of each agent.
  """
  config = importlib.import_module(experiment).get_config(agent, variant)
  text = json.dumps([config.to_dict(), settings], sort_keys=True)
  path = f'{path}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'
  is_trained = workdir.is_run(path) and workdir.is_finished(
    path, workdir.read_config(path).total_env_steps
  )
  if not is_trained:
    run(
      [
        sys.executable,
        str(ROOT / 'experiments' / f'{experiment}.py'),
        f'--agent={agent}',
        f'--variant={variant}',
        f'--workdir={path}',
        '--resume',
        *(f'--config.{k}={v}' for k, v in settings.items()),
      ]
    )
  return list(workdir.agents(path, workdir.read_config(path)))
