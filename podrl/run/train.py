"""Trains: `podrl.train`, and `podrl.main` with `run(get_config, argv)`."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import inspect
import os
import sys
import threading
import time
from typing import Any, NamedTuple

from absl import logging
import jax
from ml_collections import ConfigDict
import numpy as np

from podrl.agents import AGENTS, sgd_steps_per_update
from podrl.envs import functions
from podrl.fields import Fields
from podrl.messages import (
  count,
  printable,
  useful_traceback,
)
from podrl.records import checkpoint, workdir
from podrl.records import recorder as records
from podrl.records.terminal import Terminal
from podrl.records.workdir import Record, WriteError
from podrl.run import build, defaults, policy
from podrl.run import config as configs
from podrl.run.cluster import Cluster, connect
from podrl.run.command_line import CommandLine, parse_command_line, print_help
from podrl.run.loop import (
  OnRecord,
  Outcome,
  Trainer,
  exit_now,
  print_error,
  print_summary,
)
from podrl.run.start import Files, resolve_config
from podrl.signals import (
  DONE,
  FAILED,
  INTERRUPTED,
  MISTAKE,
  PREEMPTED,
  Signals,
)
from podrl.types import DeviceEnv, Variables

# Prefixes of the fields that decide which parameters an agent has.
_SHAPING = (
  'agent.name',
  'agent.normalize_',
  'network.',
  'env.name',
  'env.options',
)


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


def run(get_config: Callable[..., ConfigDict], argv: Sequence[str]) -> int:
  """Runs an experiment.

  Args:
    get_config: `(agent, variant) -> ConfigDict`.
    argv: name of the script, then its arguments.

  Returns:
    The exit code: 0 done, 1 failed, 2 the user's mistake, 75 ended by SIGTERM,
    130 ended by Ctrl-C.
  """
  complete = configs.completed(get_config)
  try:
    command_line = parse_command_line(argv)
    if command_line.flags.help:
      print_help(command_line, complete)
      return DONE
  except ValueError as error:
    print_error(str(error))
    return MISTAKE
  return run_to_exit(complete, command_line)


def run_to_exit(
  get_config: Callable[..., Fields], command_line: CommandLine
) -> int:
  """Runs an experiment, prints its error and returns its exit code.

  `get_config` is `(agent, variant) -> Fields`.
  """
  return report(execute(get_config, command_line))


def report(outcome: Outcome) -> int:
  """Prints the error of a run and returns its exit code."""
  if outcome.cause:
    print(useful_traceback(outcome.cause), end='', file=sys.stderr)
  if outcome.error:
    print_error(outcome.error)
  if outcome.is_hanging:  # Python cannot join a thread that stays in C++.
    exit_now(outcome.exit_code)
  return outcome.exit_code


def execute(
  get_config: Callable[..., Fields],
  command_line: CommandLine,
  *,
  is_guest: bool = False,
  cluster: Cluster | None = None,
  on_record: OnRecord | None = None,
) -> Outcome:
  """Runs an experiment.

  Args:
    get_config: see `run_to_exit`.
    command_line: the parsed arguments.
    is_guest: whether the run is part of another program.
    cluster: the processes, if they are connected already.
    on_record: see `podrl.train`; only for runs of one process.

  Returns:
    How the run ended; a user's mistake is an outcome too.
  """
  start_seconds = time.perf_counter()
  signals = Signals(is_guest)
  try:
    joined = (
      contextlib.nullcontext(cluster)
      if cluster
      else connect(command_line.flags)
    )
    with joined as cluster, contextlib.ExitStack() as exit_stack:
      signals.is_distributed = cluster.is_distributed
      with signals.leaving(_leave_nothing(cluster)):
        config, files = resolve_config(
          command_line, get_config, cluster, exit_stack
        )
        num_processes = cluster.num_processes
        cluster.attempt(lambda: build.set_up_jax(config, num_processes))
      if cluster.is_distributed:
        platforms = [x.platform for x in jax.local_devices()]
        cluster.compare({'num_processes': num_processes, 'devices': platforms})
      signals.grace_seconds = config['checkpoint.grace_seconds']
      return _train_programs(
        config,
        files,
        start_seconds,
        signals,
        cluster,
        exit_stack,
        command_line,
        on_record,
      )
  except ValueError as error:
    return Outcome(MISTAKE, error=str(error))
  except WriteError as error:
    return Outcome(FAILED, error=str(error))
  finally:
    signals.close()


def _leave_nothing(cluster: Cluster) -> Callable[[int], int] | None:
  """Returns how `Signals` may end a process that has not begun to train."""
  return None if cluster.is_distributed else lambda exit_code: exit_code


def _train_programs(
  config: Fields,
  root: Files,
  start_seconds: float,
  signals: Signals,
  cluster: Cluster,
  exit_stack: contextlib.ExitStack,
  command_line: CommandLine,
  on_record: OnRecord | None,
) -> Outcome:
  """Trains the programs of a run one after another; stops if one ends early.

  `root` has the files of the whole run; `exit_stack` receives the locks of the
  directories. The result is the outcome of the last program that ran.
  """
  is_series, is_writer = workdir.is_series(config), cluster.process == 0
  programs = workdir.programs(root.workdir, config)
  for number, (path, program) in enumerate(programs):
    files = root
    if is_series:
      find = functools.partial(_find_seed, path, program)
      if (found := cluster.decide(find)) is None:
        continue
      files = Files(*found)

    def begin() -> tuple[build.Run, Variables | None]:
      built = build.make_run(program, files.num_resumes)
      for warning in built.warnings:
        print(f'warning: {warning}', file=sys.stderr)
      variables = None
      if files.init_from:
        variables = _read_initial(files.init_from, program, built.variables)
      if is_writer and not root.is_resumed and number == 0:
        exit_stack.enter_context(workdir.lock(root.workdir))
        workdir.make(root.workdir, config)
      if is_writer and is_series:
        try:
          workdir.update_config(
            root.workdir, config, configs.changeable(config)
          )
        except WriteError as error:
          raise ValueError(str(error)) from error
        exit_stack.enter_context(workdir.lock(path))
      return built, variables

    with signals.leaving(_leave_nothing(cluster)):
      built, variables = cluster.attempt(begin)
    recorder = records.Recorder(
      program,
      path,
      built.spec.frame_skip,
      built.num_updates,
      built.steps_per_update,
      sgd_steps_per_update(program),
      start_seconds,
      built.driver.describe,
      is_writer,
    )
    resume = functools.partial(command_line.resume, root.workdir)
    outcome = Trainer(
      program,
      built,
      files,
      variables,
      recorder,
      signals,
      cluster,
      resume,
      on_record,
    ).train()
    # Without this, the processes would go on with different programs.
    codes = cluster.gather(outcome.exit_code) or []
    if cluster.decide(lambda: any(codes)) and not outcome.exit_code:
      error = 'another process of the run failed'
      outcome = outcome._replace(exit_code=FAILED, error=error)
    if cluster.watchdog:  # Later failures must not change this program's files.
      cluster.watchdog.on_failure = print_error
    if outcome.exit_code:
      return outcome._replace(workdir=root.workdir)
    start_seconds = time.perf_counter()
  if is_series and is_writer:
    try:
      summary = records.join_seeds(root.workdir, [path for path, _ in programs])
    except WriteError as error:
      return Outcome(FAILED, root.workdir, str(error))
    steps_per_update = checkpoint.last_progress(programs[0][0])[2]
    terminal = Terminal(config, summary['num_updates'], steps_per_update)
    print_summary(terminal, config, summary, root.workdir)
  return Outcome(DONE, root.workdir)


def _find_seed(path: str, config: Fields) -> Files | None:
  """Returns the files of a run's seed, or None if the seed is finished."""
  is_finished = workdir.is_finished(path, config['total_env_steps'])
  text = 'is finished' if is_finished else f'trains seed {config["seed"]}'
  print(printable(f'{path} {text}'), file=sys.stderr)
  if is_finished:
    return None
  num_resumes, *_ = checkpoint.last_progress(path)
  return Files(path, '', bool(checkpoint.steps(path)), num_resumes)


def _read_initial(path: str, config: Fields, like: Variables) -> Variables:
  """Reads initial variables from a run, or from one agent of a run.

  `like` has the shapes of this run's variables, which contain all its agents.
  """
  num_agents = workdir.num_agents(config)
  if num_agents == 1:
    path, theirs, seed = workdir.find_agent(path)
  else:
    theirs, seed = workdir.read_config(path), None
    number = workdir.num_agents(theirs)
    if number != num_agents:
      raise ValueError(
        f'--init_from={path} has {count(number, "agent")}, but this run '
        f'has {num_agents}; use config.num_seeds={number}'
      )
  try:
    return checkpoint.read_agent(
      path, theirs, seed, checkpoint.find(path), like
    )
  except checkpoint.IncompatibleError as error:
    there, here = theirs, config
    differing = [
      f'config.{k} is {there[k]} in that run, {x} in this run'
      for k, x in here.items()
      if k.startswith(_SHAPING) and k in there and there[k] != x
    ]
    raise ValueError('; '.join([str(error), *differing])) from error


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
  on_record: OnRecord | None = None,
) -> Trained:
  """Trains an agent in an environment; see `podrl.train`."""
  if not isinstance(name, str):
    name = _name_of(name)
  if not isinstance(agent, str):
    names = ', '.join(AGENTS)
    raise ValueError(f'agent={agent!r} must be MODULE:NAME, or one of {names}')
  workdir = None if workdir is None else os.fspath(workdir)
  options = {'agent': agent, 'steps': steps, 'workdir': workdir}
  options |= {'seed': seed or None, 'seeds': seeds if seeds != 1 else None}
  arguments = [name, *(['--resume'] if resume else ())]
  arguments += ['--trust'] if trust else []
  arguments += [f'--{k}={x}' for k, x in options.items() if x is not None]
  values = {
    k: x.tolist() if isinstance(x, np.generic | np.ndarray) else x
    for k, x in config.items()
  }
  if not _training.acquire(blocking=False):
    print(
      f'{name}: this run waits for the run of another thread', file=sys.stderr
    )
    _training.acquire()
  try:
    with policy.in_32_bits():
      return _train(arguments, values, on_record)
  finally:
    _training.release()


def _train(
  arguments: Sequence[str], values: Fields, on_record: OnRecord | None
) -> Trained:
  """Trains an agent with the arguments of `podrl train`, and other fields."""
  get_config, command_line = defaults.parse_arguments(arguments, values)
  # Some settings are not attributes of `jax.config`.
  before = {x: jax.config.values[x] for x in _JAX_SETTINGS}
  verbosity = logging.get_verbosity()
  try:
    outcome = execute(
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
    workdir.read_records(outcome.workdir),
    outcome.workdir,
  )
