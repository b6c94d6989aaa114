"""The main of every experiment: `train.main(get_config)`."""

from collections.abc import Callable, Sequence
import contextlib
import faulthandler
import functools
import os
import sys
import time
import traceback

import jax
from ml_collections import ConfigDict
import numpy as np

from podrl import build
from podrl import checkpoint
from podrl import command
from podrl import spmd
from podrl import workdir
from podrl.check import check, check_sinks
from podrl.command import Files
from podrl.layout import describe_machine, set_up_jax
from podrl.learner import trained
from podrl.recorder import Recorder
from podrl.signals import (
    DONE, FAILED, INTERRUPTED, MISTAKE, PREEMPTED, Signals)
from podrl.types import Tree
from podrl.workdir import Record, WriteError


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
  try:
    name = os.path.splitext(os.path.basename(argv[0]))[0]
    config, files = command.parse(get_config, argv, name, held)
    if config is None:
      return DONE
    check(config)
    check_sinks(config)
    set_up_jax(config)
    experiment = build.make_run(config, files.num_resumes)
    for warning in experiment.warnings:
      print(f'warning: {warning}', file=sys.stderr)
    params = checkpoint.read_params(
        *checkpoint.find(files.init_from), experiment.params
    ) if files.init_from else None
    if not files.is_resumed:
      workdir.make(files.workdir, config)
      held.enter_context(workdir.lock(files.workdir))
    recorder = Recorder(
        config, name, files.workdir, experiment.spec.frame_skip,
        experiment.num_updates, start_seconds)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return MISTAKE
  else:
    signals.grace_seconds = config.checkpoint.grace_seconds
    return _train(config, experiment, files, params, recorder, signals)
  finally:
    signals.close()
    held.close()


class _Mistake(ValueError):
  """The user's, seen only after the devices were used."""


def _begin(
    run: build.Run, files: Files, params: Tree | None, recorder: Recorder,
    state: Tree) -> tuple[Tree, dict]:
  """The first state and what the driver should know; opens a resumed run.

  Raises:
    _Mistake: where what is on disc does not fit.
  """
  def accept(progress: Record) -> None:
    if progress['total_updates'] != run.num_updates:
      raise checkpoint.OtherRunError(
          f'{progress["total_updates"]} updates make the run, and '
          f'{run.num_updates} on these devices')
    recorder.check_files(progress)

  found = None
  try:
    if files.is_resumed:
      found = checkpoint.read_newest(
          files.workdir, state, accept, lambda x: print(x, file=sys.stderr))
      print(f'{files.workdir}: ' + (
          f'going on after update {found[1]["windows"][0]["num_updates"]}'
          + run.resume_note if found else 'no checkpoint yet, it begins again'),
          file=sys.stderr)
      if found and found[1]['num_devices'] != len(run.devices):
        print(f'{found[1]["num_devices"]} devices before, {len(run.devices)} now: '
              'it will not be the same bit for bit', file=sys.stderr)
    if params is not None:
      state = checkpoint.with_params(state, jax.tree.map(
          lambda x, old: jax.device_put(x, old.sharding), params,
          checkpoint.learner(state).params))
    state, progress = found or (state, {})
    if files.is_resumed:
      recorder.open(progress)
  except ValueError as error:
    raise _Mistake(str(error)) from error
  return state, progress.get('driver', {})


def _train(
    config: ConfigDict, run: build.Run, files: Files, params: Tree | None,
    recorder: Recorder, signals: Signals) -> int:
  """Trains, evaluates and writes the run's files; returns the exit code."""
  checkpoints: checkpoint.Checkpoints | None = None

  def save() -> None:
    checkpoints.save(
        recorder.num_updates, run.driver.state,
        recorder.progress() | {
            'total_updates': run.num_updates, 'driver': run.driver.progress(),
            'num_resumes': files.num_resumes, 'num_devices': len(run.devices)},
        recorder.best and recorder.best[1])

  exit_code, error = FAILED, None
  try:
    signals.on_signal = run.driver.stop
    recorder.terminal.say('compiling')
    if not files.is_resumed:
      recorder.open({})
    is_finished = False
    if not signals.is_set():
      run.driver.start(functools.partial(
          _begin, run, files, params, recorder))
      checkpoints = checkpoint.Checkpoints(
          files.workdir, config.checkpoint.keep)
      if params is not None:  # Nothing else on disc knows of them.
        save()
      is_finished = _loop(config, run, files, recorder, save, signals)
      save()
      if recorder.num_updates_since_record:
        recorder.write()  # The checkpoint's window is whole all the same.
      checkpoints.wait()
      if not is_finished:
        recorder.terminal.say(f'saved after update {recorder.num_updates}')
    exit_code = DONE if is_finished else signals.exit_code
  except _Mistake as mistake:
    exit_code, error = MISTAKE, str(mistake)
  except BaseException as exception:  # Told, and recorded in the summary.
    error = f'{type(exception).__name__}: {" ".join(str(exception).split())}'
    if not isinstance(exception, FloatingPointError | WriteError):
      traceback.print_exc()
    with contextlib.suppress(WriteError):
      if checkpoints and not isinstance(
          exception, FloatingPointError | WriteError) and not any(
              x.is_deleted() for x in jax.tree.leaves(run.driver.state)):
        save()  # What was learnt is sound: an environment broke.
      if recorder.num_updates_since_record:
        recorder.write()
  finally:
    hanging = _close(run)
    if checkpoints:
      checkpoints.close()
    if hanging:
      exit_code, error = exit_code or FAILED, error or (
          f'{", ".join(hanging)} did not return')
    exit_code = _conclude(run, files, recorder, exit_code, error)
  if hanging:  # A thread that stays in C++ cannot be joined.
    sys.stdout.flush()
    os._exit(exit_code)
  return exit_code


def _conclude(
    run: build.Run, files: Files, recorder: Recorder, exit_code: int,
    error: str | None) -> int:
  """Closes the records and writes the summaries; returns the exit code."""
  try:
    recorder.close()
  except WriteError as exception:
    exit_code, error = exit_code or FAILED, error or str(exception)
  if error:
    print(f'error: {error}', file=sys.stderr)
  if exit_code == MISTAKE:
    return exit_code
  outcome = {DONE: 'done', FAILED: 'failed', PREEMPTED: 'preempted',
             INTERRUPTED: 'interrupted'}[exit_code]
  more = recorder.times() | describe_machine(
      run.devices, run.suite) | {'exit': outcome}
  if error:
    more['error'] = error
  if run.driver.learner is not None:
    more['num_params'] = sum(x.size for x in jax.tree.leaves(
        trained(run.driver.learner.params))) // len(run.eval_keys)
  try:
    recorder.write_summaries(more)
  except OSError as exception:
    print(f'error: no summary could be written: {exception}', file=sys.stderr)
    exit_code = exit_code or FAILED
  recorder.terminal.print_summary(recorder.last[0] | more, files.workdir)
  return exit_code


def _close(run: build.Run) -> list[str]:
  """Ends the driver; names threads that hang, with all stacks."""
  hanging = run.driver.close()
  if hanging:
    print(f'{hanging} did not return; all stacks:', file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
  return hanging


def _loop(
    config: ConfigDict, run: build.Run, files: Files, recorder: Recorder,
    save: Callable[[], None], signals: Signals) -> bool:
  """Trains until the last update or a signal; whether it is the former."""
  periods = [x for x in (config.log.every_updates, run.eval_every_updates,
                         run.checkpoint_every_updates) if x]
  profile_end = recorder.num_updates + config.log.profile
  saved_seconds = time.perf_counter()

  def is_due(period: int) -> bool:
    return bool(period) and recorder.num_updates % period == 0

  with contextlib.ExitStack() as profile:
    if config.log.profile:
      profile.enter_context(jax.profiler.trace(
          os.path.join(files.workdir, 'profile'), create_perfetto_trace=True))
    while True:
      num_updates = recorder.num_updates
      is_last = num_updates == run.num_updates
      is_eval = is_last or is_due(run.eval_every_updates)
      if recorder.num_updates_since_record and (
          is_eval or is_due(config.log.every_updates)):
        outcomes = _evaluate(run, recorder, signals) if is_eval else []
        if run.driver.error:  # Of a thread, meanwhile.
          raise run.driver.error
        if outcomes is None:
          return False  # The window stays, for whoever goes on.
        recorder.write(outcomes)
      if is_last:
        return True
      if signals.is_set():
        return False
      now, every_seconds = time.perf_counter(), config.checkpoint.every_seconds
      if num_updates and is_due(run.checkpoint_every_updates) or (
          every_seconds and now - saved_seconds >= every_seconds) or (
          recorder.best and recorder.best[1] == num_updates):
        save()
        saved_seconds = now
      if num_updates >= profile_end:
        profile.close()
      ends = [num_updates - num_updates % x + x for x in periods] + [
          run.num_updates] + [profile_end] * (profile_end > num_updates)
      reports = run.driver.advance(min(ends) - num_updates)
      recorder.add(reports)
      for i, report in enumerate(reports):
        if not report.is_finite:
          raise FloatingPointError(
              f'the loss of seed {config.seed + i} is NaN or infinite at update '
              f'{recorder.num_updates + 1}; try a smaller '
              'optimizer.learning_rate')


def _evaluate(
    run: build.Run, recorder: Recorder, signals: Signals
) -> list[Record] | None:
  """What an evaluation of each agent gives; None where it was stopped."""
  recorder.terminal.say('evaluating')
  params = spmd.copy_to_first_device(run.driver.learner.params)
  records = []
  for i, key in enumerate(run.eval_keys):
    outcome = run.evaluate(
        jax.tree.map(lambda x: x[i], params) if len(run.eval_keys) > 1 else (
            params), jax.random.fold_in(key, recorder.num_updates),
        lambda: signals.is_set() or run.driver.error is not None)
    if outcome is None:
      return None
    records.append({
        'eval_return': float(outcome.returns.mean(dtype=np.float64)),
        'eval_return_std': float(outcome.returns.std(dtype=np.float64)),
        'eval_episodes': len(outcome.returns)})
  return records
