"""podrl: reinforcement learning in JAX on CPUs, GPUs and TPUs."""

from collections.abc import Callable, Mapping
import os
import sys
from typing import TYPE_CHECKING, Any

# `import podrl` loads no other module of podrl: each function imports its own.
if TYPE_CHECKING:
  from ml_collections import ConfigDict

  from podrl.run.export import ExportedPolicy
  from podrl.run.loop import OnRecord
  from podrl.run.policy import Policy
  from podrl.run.train import Trained
  from podrl.types import DeviceEnv


def load(
  path: str | os.PathLike,
  which: str | int = 'last',
  seed: int | None = None,
  trust: bool = False,
) -> 'Policy | ExportedPolicy':
  """Loads the policy of a run, or a policy that `podrl export` wrote.

  Args:
    path: the directory of the run, of one of its agents (`RUN/seed_2`), or of
      an exported policy.
    which: 'last', 'best' (the highest evaluated return, as a mean over all
      agents), or the number of updates of a checkpoint.
    seed: index of the agent, from 0, if the run has several agents.
    trust: whether to import the modules of parts `MODULE:NAME` even if you did
      not make the run. Their code can do anything that you can do.

  Raises:
    ValueError: if the run, the checkpoint or the agent does not exist, cannot
      be read, or needs `trust`.
  """
  path = os.path.expanduser(os.fspath(path))
  if os.path.isfile(os.path.join(path, 'policy.json')):
    from podrl.run import export

    return export.load(path, which, seed)
  from podrl.run import policy

  return policy.load(path, which, seed, trust)


def train(
  name: 'str | Callable[..., DeviceEnv]',
  agent: str = 'ppo',
  *,
  steps: float | None = None,
  seed: int = 0,
  seeds: int = 1,
  workdir: str | os.PathLike | None = None,
  resume: bool = False,
  config: Mapping[str, Any] | None = None,
  trust: bool = False,
  on_record: 'OnRecord | None' = None,
) -> 'Trained':
  """Trains an agent in an environment, like the command `podrl train`.

  The run writes the same files as a run of that command. If JAX has already
  started, the run uses the devices that JAX has. It computes in 32 bits. If
  several threads call this function, their runs follow one another.

  Args:
    name: `[SUITE:]NAME` of an environment, or `MODULE:NAME` if a module
      registers it with gymnasium; or a function of a module, annotated with
      `-> DeviceEnv`, as with the name `jax:MODULE:FUNCTION`.
    agent: 'ppo', 'impala', 'a2c', 'pqn', 'dqn', 'rainbow', 'r2d2', 'sac',
      'muzero', or `MODULE:NAME` of an `AgentEntry`.
    steps: environment steps; the default depends on the kind of environment.
    seed: all random numbers depend on this number.
    seeds: number of independent agents.
    workdir: directory of the run; by default `runs/TASK/AGENT-TIME`.
    resume: whether to continue the run in `workdir`.
    config: fields of the configuration, for example `{'agent.gamma': 0.9}`.
    trust: whether a resumed run may import a module that only its saved
      configuration names, even if you did not make the run; see `load`.
    on_record: called with each record, and with the run: it can evaluate, save,
      add numbers to the record, and give the policy; see
      `podrl.run.loop.Running`. If it returns True, the run ends after this
      record.

  Returns:
    The policy, the records and the directory of the run.

  Raises:
    ValueError: for a mistake in the arguments.
    RuntimeError: if the run failed.
    KeyboardInterrupt: after Ctrl-C. The run is saved first.
    SystemExit: with code 75, after SIGTERM. The run is saved first.
  """
  from podrl.run import train as implementation

  return implementation.train(
    name,
    agent,
    steps,
    seed,
    seeds,
    workdir,
    resume,
    config or {},
    trust,
    on_record,
  )


def main(get_config: Callable[..., 'ConfigDict']) -> None:
  """Runs an experiment from the command line; exits with the run's exit code.

  Args:
    get_config: `(agent, variant) -> ConfigDict`.
  """
  from podrl.run import train

  sys.exit(train.run(get_config, sys.argv))
