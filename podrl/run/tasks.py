"""Trains an agent in a named environment: `podrl train` and `podrl.train`."""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
import os
import sys
import threading
from typing import Any, NamedTuple

from absl import logging
import jax
from ml_collections import ConfigDict
import numpy as np

from podrl.agents import AGENTS
from podrl.core.distributions import LARGEST_BOUND
from podrl.envs import SUITES, Task, find_task, functions
from podrl.messages import check_choice
from podrl.records import workdir as files
from podrl.records.terminal import podrl_command
from podrl.records.workdir import Record
from podrl.run import build, cluster, defaults, policy
from podrl.run import config as configs
from podrl.run import train as runs
from podrl.run.command_line import (
  CommandLine,
  apply_overrides,
  parse_command_line,
)
from podrl.signals import FAILED, INTERRUPTED, MISTAKE, PREEMPTED
from podrl.types import Box, DeviceEnv, EnvSpec

# A run changes these settings of the whole process, and the verbosity of absl's
# logs; `train` restores them.
_JAX_SETTINGS = (
  'jax_enable_x64',
  'jax_cpu_enable_async_dispatch',
  'jax_enable_compilation_cache',
  'jax_compilation_cache_dir',
  'jax_persistent_cache_min_compile_time_secs',
  'jax_persistent_cache_min_entry_size_bytes',
)

# So only one thread at a time can train.
_training = threading.RLock()
# With less than this part of the usual steps, an agent may not begin to learn.
_FEW_STEPS = 0.2


class Trained(NamedTuple):
  """A finished run.

  Attributes:
    policy: the trained policy; with several agents, the first agent's policy.
    records: the records of `metrics.jsonl`.
    workdir: the run's directory.
  """

  policy: policy.Policy
  records: list[Record]
  workdir: str


def parse(
  arguments: Sequence[str],
) -> tuple[Callable[..., ConfigDict], CommandLine]:
  """Parses the arguments of `podrl train`; raises a ValueError for a mistake.

  Returns:
    The function `get_config` for the environment in the arguments, and the
    command line.
  """
  argv = ['podrl train', *arguments]
  command_line = parse_command_line(argv, has_task=True)
  command_line = command_line._replace(command=f'{podrl_command()} train')
  return functools.partial(_get_config, command_line), command_line


def _find_task(command_line: CommandLine) -> tuple[Task, ConfigDict]:
  """Returns the environment, and the saved `env` fields of a resumed run."""
  text, values = command_line.task, command_line.flags
  saved = ConfigDict()
  if values.resume and files.is_run(values.workdir):
    config = files.read_config(values.workdir)
    is_named = bool(text)
    configs.check_trust(
      values.workdir, config, values.trust, {'env.name'} if is_named else ()
    )
    saved = config.env
    if text in ('', saved.name, f'{saved.suite}:{saved.name}'):
      return Task(saved.suite, saved.name), saved
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
) -> ConfigDict:
  """Makes the configuration for an environment and an agent."""
  check_choice('variant', variant, ('',))
  task, saved = _find_task(command_line)
  config = defaults.base(task, agent)
  config.env.options.update(saved.get('options', {}))
  config.env.path = saved.get('path', '')
  chosen = apply_overrides(config, command_line.overrides)
  # `make_spec` uses devices, so JAX must be set up first.
  build.set_up_jax(config, cluster.num_processes())
  if task.note and jax.process_index() == 0:
    print(task.note, file=sys.stderr)
  spec = build.make_spec(config)
  usual = defaults.specialise(config, spec, chosen)
  steps = config.total_env_steps if 'total_env_steps' in chosen else usual
  warnings = _warnings(task, config, spec, steps, usual)
  if jax.process_index() == 0 and not saved:
    for warning in warnings:
      print(f'warning: {warning}', file=sys.stderr)
  return config


def _warnings(
  task: Task, config: ConfigDict, spec: EnvSpec, steps: int, usual: int
) -> list[str]:
  """Returns why a run may not learn.

  Args:
    config: the settings for the task.
    spec: describes the environment.
    steps: the environment steps of the run.
    usual: those that the agent has by default.
  """
  found, agent = [], config.agent.name
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
  if needs_memory and 'recurrent' not in config.network:
    found.append(
      f'{task.name} needs a memory, which {agent} does not have; use '
      '--agent=ppo or --agent=r2d2'
    )
  return found


def _name_of(env: Any) -> str:
  """Returns the name of an environment that is an object of this program."""
  if functions.makes_device_env(env) and '.' not in env.__qualname__:
    return f'jax:{env.__module__}:{env.__name__}'
  kind = env.__name__ if isinstance(env, type) else type(env).__name__
  if inspect.isfunction(env):
    raise ValueError(
      f'podrl.train takes the function {kind} only if it makes a DeviceEnv: '
      f'write def {env.__name__}(...) -> DeviceEnv, in a module'
    )
  raise ValueError(
    f"podrl.train takes the name of an environment, such as 'CartPole-v1', or "
    'a function of a module that is annotated with -> DeviceEnv, but not this '
    f"{kind}; register a gymnasium class with gymnasium.register('Mine-v0', "
    "Mine), then call podrl.train('gymnasium:Mine-v0')"
  )


def train(
  name: str | Callable[..., DeviceEnv],
  agent: str,
  steps: float | None,
  seed: int,
  seeds: int,
  workdir: str | os.PathLike | None,
  resume: bool,
  config: Mapping[str, Any],
  trust: bool = False,
  on_record: runs.OnRecord | None = None,
) -> Trained:
  """Trains an agent in an environment; see `podrl.train`."""
  if not isinstance(name, str):
    name = _name_of(name)
  if not isinstance(agent, str):
    raise ValueError(f'agent={agent!r} must be one of {", ".join(AGENTS)}')
  workdir = None if workdir is None else os.fspath(workdir)
  options = {'agent': agent, 'steps': steps, 'workdir': workdir}
  options |= {'seed': seed or None, 'seeds': seeds if seeds != 1 else None}
  arguments = [name, *(['--resume'] if resume else ())]
  arguments += ['--trust'] if trust else []
  arguments += [f'--{k}={x}' for k, x in options.items() if x is not None]
  for field, value in config.items():
    if isinstance(value, np.generic | np.ndarray):
      value = value.tolist()
    # The type of an option is unknown, so quotes must mark a string.
    text = repr(value) if field.startswith('env.options.') else value
    arguments.append(f'--config.{field}={text}')
  if not _training.acquire(blocking=False):
    print(
      f'{name}: this run waits for the run of another thread', file=sys.stderr
    )
    _training.acquire()
  try:
    with policy.in_32_bits():
      return _train(arguments, on_record)
  finally:
    _training.release()


def _train(
  arguments: Sequence[str], on_record: runs.OnRecord | None
) -> Trained:
  """Trains an agent with the arguments of `podrl train`."""
  get_config, command_line = parse(arguments)
  # Some settings are not attributes of `jax.config`.
  before = {x: jax.config.values[x] for x in _JAX_SETTINGS}
  verbosity = logging.get_verbosity()
  try:
    outcome = runs.execute(
      get_config, command_line, is_guest=True, on_record=on_record
    )
  finally:
    for setting, value in before.items():
      jax.config.update(setting, value)
    logging.set_verbosity(verbosity)
  if outcome.exit_code == MISTAKE:
    raise ValueError(outcome.error)
  if outcome.exit_code == FAILED:
    raise RuntimeError(outcome.error) from outcome.cause
  if outcome.exit_code == INTERRUPTED:
    raise KeyboardInterrupt(f'the run is saved in {outcome.workdir}')
  if outcome.exit_code == PREEMPTED:
    raise SystemExit(PREEMPTED)
  return Trained(
    # The run has used this configuration, and has written it.
    policy.load(outcome.workdir, seed=0, trust=True),
    files.read_records(outcome.workdir),
    outcome.workdir,
  )
