"""The main of every experiment: `train.main(get_config)`."""

from collections.abc import Callable, Sequence
import contextlib
import faulthandler
import functools
import os
import sys
import time
import traceback
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from podrl.core.learner import trained
from podrl.drivers import machine
from podrl.records import checkpoint, workdir
from podrl.records.recorder import Recorder
from podrl.records.workdir import WriteError
from podrl.run import build, loop
from podrl.run import config as configs
from podrl.run.cluster import Cluster
from podrl.run.config import Files
from podrl.run.devices import describe_machine
from podrl.run.signals import (
  DONE,
  FAILED,
  INTERRUPTED,
  MISTAKE,
  PREEMPTED,
  Signals,
)
from podrl.types import Tree


def main(get_config: Callable[..., ConfigDict]) -> None:
  """Runs an experiment from the command line and exits with its code.

  Args:
    get_config: `(agent, variant) -> ConfigDict`.
  """
  sys.exit(run(get_config, sys.argv))


def run(get_config: Callable[..., ConfigDict], argv: Sequence[str]) -> int:
  """Runs an experiment.

  Args:
    get_config: `(agent, variant) -> ConfigDict`.
    argv: the script's name, then its arguments.

  Returns:
    0 done, 1 failed, 2 the user's mistake, 75 ended by SIGTERM, 130 by Ctrl-C.
  """
  start_seconds = time.perf_counter()
  signals = Signals()
  held = contextlib.ExitStack()
  together = Cluster()
  try:
    line = configs.parse_command_line(argv)
    if line.flags.help:
      configs.print_help(line, get_config)
      return DONE
    together = configs.join_cluster(line)
    signals.is_distributed = together.is_distributed
    config, files = configs.resolve_config(line, get_config, together, held)
    together.attempt(lambda: build.set_up_jax(config, together.num_processes))
    if together.is_distributed:
      together.compare(
        {
          'num_processes': together.num_processes,
          'devices': [x.platform for x in jax.local_devices()],
        }
      )
    run, params = together.attempt(
      functools.partial(_prepare, config, files, together.process == 0, held)
    )
    recorder = Recorder(
      config,
      line.name,
      files.workdir,
      run.spec.frame_skip,
      run.num_updates,
      start_seconds,
      run.driver.describe,
      together.process == 0,
    )
    signals.grace_seconds = config.checkpoint.grace_seconds
    exit_code = _train(
      Job(config, run, files, params, recorder, signals, together)
    )
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    exit_code = MISTAKE
  except BaseException as error:
    if together.is_distributed:  # The watchdog would live on, and all wait.
      traceback.print_exc()
      together.watchdog.fail(_describe(error), is_suspect=True)
      sys.stdout.flush()
      os._exit(FAILED)
    raise
  finally:
    signals.close()
    held.close()
  together.close()
  return exit_code


def _describe(error: BaseException) -> str:
  """An exception in one line."""
  return f'{type(error).__name__}: {" ".join(str(error).split())}'


class Job(NamedTuple):
  """All that a run needs, once nothing of it can be a mistake of the user's."""

  config: ConfigDict
  run: build.Run
  files: Files
  params: Tree | None
  recorder: Recorder
  signals: Signals
  together: Cluster


def _prepare(
  config: ConfigDict, files: Files, is_first: bool, held: contextlib.ExitStack
) -> tuple[build.Run, Tree | None]:
  """Makes what is run, reads what it begins with, and makes its directory."""
  run = build.make_run(config, files.num_resumes)
  for warning in run.warnings:
    print(f'warning: {warning}', file=sys.stderr)
  params = (
    checkpoint.read_params(
      files.init_from, checkpoint.find(files.init_from), run.params
    )
    if files.init_from
    else None
  )
  if is_first and not files.is_resumed:
    workdir.make(files.workdir, config)
    held.enter_context(workdir.lock(files.workdir))
  return run, params


def _train(job: Job) -> int:
  """Trains, evaluates and writes the run's files; returns the exit code."""
  config, run, files, params, recorder, signals, together = job
  checkpoints: checkpoint.Checkpoints | None = None

  def save() -> None:
    drivers = together.gather(run.driver.progress())
    checkpoints.save(
      recorder.num_updates,
      run.driver.state,
      recorder.progress()
      | {
        'total_updates': run.num_updates,
        'drivers': drivers,
        'num_resumes': files.num_resumes,
        'num_devices': len(run.devices),
      },
      recorder.best and recorder.best[1],
    )

  def end_with_others(message: str) -> None:
    """Of the watchdog: another process failed."""
    _conclude(job, FAILED, message)

  exit_code, error = FAILED, None
  try:
    if together.is_distributed:
      together.watchdog.on_failure = end_with_others
    else:
      signals.on_signal = run.driver.stop
    recorder.terminal.say('compiling')
    if not files.is_resumed:
      recorder.open({})
    is_finished = False
    if together.is_distributed or not signals.is_set():
      run.driver.start(
        functools.partial(loop.begin, run, files, params, recorder, together)
      )
      checkpoints = checkpoint.Checkpoints(
        files.workdir, config.checkpoint.keep
      )
      if params is not None:  # Nothing else on disc knows of them.
        save()
      is_finished = loop.loop(
        config, run, files.workdir, recorder, save, signals, together
      )
      save()
      if recorder.num_updates_since_record:
        recorder.write()  # The checkpoint's window is whole all the same.
      checkpoints.wait()
      if not is_finished:
        recorder.terminal.say(f'saved after update {recorder.num_updates}')
    exit_code = DONE if is_finished else signals.exit_code
  except loop.Mistake as mistake:
    exit_code, error = MISTAKE, str(mistake)
  except BaseException as exception:  # Told, and recorded in the summary.
    error = _describe(exception)
    if together.is_distributed:
      together.watchdog.fail(
        error, is_suspect=not isinstance(exception, FloatingPointError)
      )
    if not isinstance(exception, FloatingPointError | WriteError):
      traceback.print_exc()
    with contextlib.suppress(WriteError):
      if (
        checkpoints
        and not together.is_distributed
        and not isinstance(exception, FloatingPointError | WriteError)
        and not any(x.is_deleted() for x in jax.tree.leaves(run.driver.state))
      ):
        save()  # What was learnt is sound: an environment broke.
      if recorder.num_updates_since_record:
        recorder.write()
    if together.is_distributed:  # Nobody is left to end in order with.
      exit_code = _conclude(job, FAILED, error)
      sys.stdout.flush()
      os._exit(exit_code)
  finally:
    hanging = _close(run)
    if checkpoints:
      checkpoints.close()
    if hanging:
      exit_code, error = (
        exit_code or FAILED,
        error or (f'{", ".join(hanging)} did not return'),
      )
    exit_code = _conclude(job, exit_code, error)
  if hanging:  # A thread that stays in C++ cannot be joined.
    sys.stdout.flush()
    os._exit(exit_code)
  return exit_code


def _conclude(job: Job, exit_code: int, error: str | None) -> int:
  """Closes the records and writes the summaries; returns the exit code."""
  run, recorder = job.run, job.recorder
  try:
    recorder.close()
  except WriteError as exception:
    exit_code, error = exit_code or FAILED, error or str(exception)
  if error:
    print(f'error: {error}', file=sys.stderr)
  if exit_code == MISTAKE:
    return exit_code
  outcome = {
    DONE: 'done',
    FAILED: 'failed',
    PREEMPTED: 'preempted',
    INTERRUPTED: 'interrupted',
  }[exit_code]
  more = (
    recorder.times()
    | describe_machine(run.devices, run.suite)
    | {'exit': outcome}
  )
  if job.together.process == 0:
    more |= machine.summarise(
      recorder.last[0],
      loop.own_devices(run),
      job.config.price_per_hour,
    )
  if error:
    more['error'] = error
  if run.driver.learner is not None:
    more['num_params'] = sum(
      x.size for x in jax.tree.leaves(trained(run.driver.learner.params))
    ) // len(run.eval_keys)
  try:
    recorder.write_summaries(more)
  except OSError as exception:
    print(f'error: no summary could be written: {exception}', file=sys.stderr)
    exit_code = exit_code or FAILED
  if job.together.process == 0:
    recorder.terminal.print_summary(recorder.last[0] | more, job.files.workdir)
  return exit_code


def _close(run: build.Run) -> list[str]:
  """Ends the driver; names threads that hang, with all stacks."""
  hanging = run.driver.close()
  if hanging:
    print(f'{hanging} did not return; all stacks:', file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
  return hanging
