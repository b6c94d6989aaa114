"""The training loop: what follows on what, in one process or in several."""

from collections.abc import Callable
import contextlib
import functools
import os
import sys
import time

import jax
from ml_collections import ConfigDict
import numpy as np

from podrl.drivers import spmd
from podrl.drivers.machine import Meter
from podrl.records import checkpoint
from podrl.records.recorder import Recorder, local_part, merge_processes
from podrl.records.workdir import Record
from podrl.run import build
from podrl.run.cluster import Cluster
from podrl.run.config import Files
from podrl.run.signals import PREEMPTED, Signals
from podrl.types import Tree

_SECONDS_PER_ROUND = 0.5  # So long may a signal wait.


class Mistake(ValueError):
  """The user's, seen only after the devices were used."""


def own_devices(run: build.Run) -> list[jax.Device]:
  """The devices of a run that this process has."""
  return [x for x in run.devices if x.process_index == jax.process_index()]


def begin(
  run: build.Run,
  files: Files,
  params: Tree | None,
  recorder: Recorder,
  together: Cluster,
  state: Tree,
) -> tuple[Tree, list[dict]]:
  """The first state and what drivers saved; opens a resumed run.

  Args:
    run: that begins.
    files: of it.
    params: of another run, to begin with.
    recorder: opened here where the run is resumed.
    together: the processes.
    state: of a driver that has just begun.

  Raises:
    Mistake: where what is on disc does not fit.
  """

  def accept(progress: Record) -> None:
    if progress['total_updates'] != run.num_updates:
      raise checkpoint.OtherRunError(
        f'{progress["total_updates"]} updates make the run, and '
        f'{run.num_updates} on these devices'
      )
    recorder.check_files(progress)

  def choose() -> tuple[int, Record] | None:
    found = checkpoint.newest_intact(
      files.workdir, accept, lambda x: print(x, file=sys.stderr)
    )
    print(
      f'{files.workdir}: '
      + (
        f'going on after update {found[0]}' + run.resume_note
        if found
        else 'no checkpoint yet, it begins again'
      ),
      file=sys.stderr,
    )
    if found and found[1]['num_devices'] != len(run.devices):
      print(
        f'{found[1]["num_devices"]} devices before, {len(run.devices)} now: '
        'it will not be the same bit for bit',
        file=sys.stderr,
      )
    return found

  try:
    found = together.decide(choose) if files.is_resumed else None
    if params is not None:
      state = checkpoint.with_params(
        state, spmd.like(params, checkpoint.learner_of(state).params)
      )
    if found:
      step, progress = found
      state = together.attempt(
        lambda: checkpoint.read_state(files.workdir, step, state)
      )
    else:
      progress = {}
    if files.is_resumed:
      recorder.open(progress)
  except ValueError as error:
    raise Mistake(str(error)) from error
  return state, progress.get('drivers', [])


def loop(
  config: ConfigDict,
  run: build.Run,
  path: str,
  recorder: Recorder,
  save: Callable[[], None],
  signals: Signals,
  together: Cluster,
) -> bool:
  """Trains until the last update or a signal; whether it is the former.

  Process 0 says what all do next, round by round.

  Args:
    config: of the run.
    run: whose driver has started.
    path: of the run.
    recorder: that is open.
    save: writes a checkpoint.
    signals: noted meanwhile.
    together: the processes.
  """
  periods = [
    x
    for x in (
      config.log.every_updates,
      run.eval_every_updates,
      run.checkpoint_every_updates,
    )
    if x
  ]
  profile_end = recorder.num_updates + config.log.profile
  saved_seconds, pace = time.perf_counter(), 1
  meter = Meter(own_devices(run))

  def is_due(period: int) -> bool:
    return bool(period) and recorder.num_updates % period == 0

  def choose() -> tuple[int | None, bool, int, dict]:
    """How to end, if at all; whether to save; updates to run; the plan."""
    num_updates, every_seconds = (
      recorder.num_updates,
      config.checkpoint.every_seconds,
    )
    is_saved = bool(
      num_updates
      and is_due(run.checkpoint_every_updates)
      or (
        every_seconds and (time.perf_counter() - saved_seconds >= every_seconds)
      )
      or (recorder.best and recorder.best[1] == num_updates)
    )
    ends = (
      [num_updates - num_updates % x + x for x in periods]
      + [run.num_updates]
      + [profile_end] * (profile_end > num_updates)
    )
    return (
      signals.exit_code,
      is_saved,
      min(pace, min(ends) - num_updates),
      run.driver.plan(),
    )

  with contextlib.ExitStack() as profile:
    if config.log.profile and together.process == 0:
      profile.enter_context(
        jax.profiler.trace(
          os.path.join(path, 'profile'), create_perfetto_trace=True
        )
      )
    while True:
      is_last = recorder.num_updates == run.num_updates
      is_eval = is_last or is_due(run.eval_every_updates)
      if recorder.num_updates_since_record and (
        is_eval or is_due(config.log.every_updates)
      ):
        outcomes = (
          _evaluate(run, recorder, signals, together) if is_eval else []
        )
        if run.driver.error:  # Of a thread, meanwhile.
          raise run.driver.error
        if outcomes is None:  # The window stays, for whoever goes on.
          signals.note(together.decide(lambda: signals.exit_code))
          return False
        recorder.write(outcomes)
      if is_last:
        return True
      if together.is_preempted():
        signals.note(PREEMPTED)
      exit_code, is_saved, num_updates, plan = together.decide(choose)
      if exit_code is not None:
        signals.note(exit_code)
        return False
      if is_saved:
        save()
        saved_seconds = time.perf_counter()
      if recorder.num_updates >= profile_end:
        profile.close()
      reports = meter.over(
        functools.partial(run.driver.advance, num_updates, plan)
      )
      if together.is_distributed and run.driver.error:
        raise run.driver.error  # The others wait for what it would have learnt.
      pace = max(
        1,
        min(
          2 * pace,
          int(_SECONDS_PER_ROUND * reports[0].num_updates / reports[0].seconds),
        ),
      )
      told = (
        together.gather([signals.exit_code, [*map(local_part, reports)]]) or []
      )
      for exit_code, _ in told:
        signals.note(exit_code)
      recorder.add(
        [
          merge_processes(report, [shares[i] for _, shares in told[1:]])
          for i, report in enumerate(reports)
        ]
      )
      for i, report in enumerate(reports):
        if not report.is_finite:
          raise FloatingPointError(
            f'the loss of seed {config.seed + i} is NaN or infinite at update '
            f'{recorder.num_updates + 1}; try a smaller '
            'optimizer.learning_rate'
          )


def _evaluate(
  run: build.Run, recorder: Recorder, signals: Signals, together: Cluster
) -> list[Record] | None:
  """What an evaluation of each agent gives; None where it was stopped."""
  recorder.terminal.say('evaluating')
  params = spmd.copy_to_first_device(run.driver.learner.params)

  def should_stop() -> bool:
    together.beat()
    return signals.is_set() or run.driver.error is not None

  outcomes = []
  for i, rng_key in enumerate(run.eval_keys):
    outcome = run.evaluate(
      jax.tree.map(lambda x: x[i], params)
      if len(run.eval_keys) > 1
      else (params),
      jax.random.fold_in(rng_key, recorder.num_updates),
      should_stop,
    )
    outcomes.append(outcome and outcome.returns.tolist())
  told = together.gather([signals.exit_code, outcomes])

  def summarise() -> list[Record] | None:
    for exit_code, _ in told:
      signals.note(exit_code)
    if any(x is None for _, outcomes in told for x in outcomes):
      return None
    return [
      {
        'eval_return': np.mean(returns).item(),
        'eval_return_std': np.std(returns).item(),
        'eval_episodes': len(returns),
      }
      for returns in (np.concatenate(x) for x in zip(*(y for _, y in told)))
    ]

  return together.decide(summarise)
