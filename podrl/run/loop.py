"""The training loop: it trains, evaluates, saves and records one run.

All processes of a run execute the same loop. Process 0 decides everything that
depends on a clock or a signal, and the other processes follow.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import math
import os
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from podrl import agents, envs
from podrl.core.memory import SizeError
from podrl.core.optimizers import BASE
from podrl.drivers import culprits, limits, spmd
from podrl.drivers.anakin import Anakin
from podrl.drivers.energy import Meter
from podrl.fields import Fields, short
from podrl.messages import (
  EnvironmentFailed,
  format_size,
  one_line,
  place_of,
  printable,
  useful_traceback,
)
from podrl.records import checkpoint, workdir
from podrl.records import recorder as records
from podrl.records.terminal import Terminal
from podrl.records.workdir import Record, WriteError
from podrl.run import build, policy
from podrl.run import config as configs
from podrl.run.cluster import Cluster
from podrl.run.devices import describe_machine
from podrl.run.start import Files
from podrl.signals import (
  DONE,
  FAILED,
  INTERRUPTED,
  MISTAKE,
  NAMES,
  Signals,
  dump_stacks,
)
from podrl.types import Culprit, Report, Tree, Variables

_ROUND_SECONDS = 0.5  # A signal waits at most about this long.
_LARGE = 1e6  # Parameters above this size have diverged.
_COPY_RATE = 30e6  # Bytes per second; copies take about 1 % of a CPU's time.
_MAX_FAILURES = 3  # A run with so many failures after an update is not resumed.
_EVOLVE_STREAM = 2**32 - 1  # Folded into the seed's key, for populations.


class _Mistake(ValueError):
  """A mistake of the user that podrl finds only after it has used devices."""


class Running:
  """A run that trains, for the function `on_record` of `podrl.train`.

  Attributes:
    workdir: the directory of the run.
    config: its configuration, a read-only mapping from the names of fields.
  """

  def __init__(
    self, trainer: 'Trainer', outcomes: list[Record], record: Record = {}
  ):
    self._trainer, self._outcomes, self._record = trainer, outcomes, record
    self._scalars: Record = {}
    self.workdir = trainer.files.workdir
    self.config = trainer.config

  def policy(self) -> policy.Policy:
    """Returns the current policy; with several agents, the first agent's."""
    trainer, run = self._trainer, self._trainer.run
    assert run.driver.learner_state is not None
    variables = spmd.copy_to_first_device(run.driver.learner_state.variables)
    if len(run.eval_keys) > 1:
      variables = jax.tree.map(lambda x: x[0], variables)
    agent = build.make_agent(trainer.config, run.spec)
    number = trainer.recorder.num_updates
    return policy.Policy(self.config, run.spec, agent, variables, number)

  def evaluate(self) -> float:
    """Evaluates, unless this was done; the record contains the result.

    Returns:
      The mean evaluated return, over all agents; NaN if a signal stopped it.
    """
    if not self._outcomes:
      self._outcomes = self._trainer.evaluate() or []
    returns = [x['eval_return'] for x in self._outcomes]
    return float(np.mean(returns)) if returns else math.nan

  def save(self) -> None:
    """Writes a checkpoint; the last `checkpoint.keep` of them are kept."""
    self._trainer.save_and_wait()

  def draw(self, path: str = '') -> str:
    """Writes a video of an episode to a .gif or .mp4 file.

    The episode has at most 1,000 steps. With several agents, it is that of the
    first; `eval.greedy` says whether its actions are greedy.

    Args:
      path: the file; by default `videos/UPDATES.gif` in the run's directory.

    Returns:
      The path of the file.

    Raises:
      ValueError: if the path has another ending.
    """
    from podrl.run import video  # Only drawing needs its libraries.

    if path and not path.endswith(video.ENDINGS):
      raise ValueError(f'{path} must be a file that ends in .gif or .mp4')
    loaded = self.policy()
    out = os.path.expanduser(path) or os.path.join(
      self.workdir, 'videos', f'{loaded.num_updates}.gif'
    )
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    rng_key = self._trainer.run.eval_keys[0]
    greedy = self.config['eval.greedy']
    _, frames, seconds = video.make(
      loaded, rng_key, greedy=greedy, should_stop=self._trainer.signals.is_set
    )
    with (
      workdir.write_errors('the video', OSError),
      workdir.replacing(out) as temporary,
    ):
      video.write(temporary, frames, seconds)
    return out

  def add(self, **scalars: float) -> None:
    """Adds numbers to the record, and so to TensorBoard and to W&B.

    Raises:
      ValueError: if a name is that of a metric of podrl.
    """
    for name in scalars:
      if name in self._record or name.startswith('eval_'):
        raise ValueError(f'{name} is a metric of podrl; choose another name')
    self._scalars |= {k: float(x) for k, x in scalars.items()}


# Called with each record before it is written; if it returns True, the run
# ends after this record.
OnRecord = Callable[[Record, Running], bool | None]


class Outcome(NamedTuple):
  """How a run ended."""

  exit_code: int
  workdir: str = ''  # Empty if the run has no directory.
  error: str = ''  # The error in one line, or empty.
  cause: BaseException | None = None  # The exception, if it is unexpected.
  is_hanging: bool = False  # Whether a thread did not end.
  is_diverged: bool = False  # Whether a loss was NaN or infinite.


def exit_now(exit_code: int) -> None:
  """Ends the process without waiting for its threads."""
  sys.stdout.flush()
  os._exit(exit_code)


def print_error(message: str) -> None:
  print(f'error: {printable(message)}', file=sys.stderr, flush=True)


def print_summary(
  terminal: Terminal,
  config: Fields,
  summary: Record,
  path: str,
  resume_command: str = '',
) -> None:
  """Prints a summary, and commands if they can use the run."""
  suite, name = config['env.suite'], config['env.name']
  is_known = suite in envs.BUILT_IN and not any(
    x.startswith('__main__:') for x in configs.names_of_parts(config)
  )
  own = config['agent.name']
  is_known &= own in agents.BUILT_IN or ':' in own
  terminal.print_summary(
    summary,
    path,
    resume_command,
    rows=limits.describe(summary),
    is_local=not is_known or envs.SUITES[suite].is_local(name),
  )


def _local_devices(run: build.Run) -> list[jax.Device]:
  """Returns the devices of a run that belong to this process."""
  return [x for x in jax.local_devices() if x in run.devices]


@dataclasses.dataclass
class Trainer:
  """Trains one run, alone or as one of several processes."""

  config: Fields
  run: build.Run
  files: Files
  variables: Variables | None  # Initial variables, from another run.
  recorder: records.Recorder
  signals: Signals
  cluster: Cluster
  # Given more overrides, it returns the command that continues the whole run.
  resume: Callable[..., str]
  on_record: OnRecord | None = None
  checkpoints: checkpoint.Checkpoints | None = None
  saved_seconds: float = 0.0  # When the last periodic checkpoint was written.
  host_copy: checkpoint.HostCopy | None = None
  copied_seconds: float = -math.inf  # When the last host copy was begun.
  copied_bytes: int = 0  # Its size.
  # `num_failures`: failures after update `failed_at`, this attempt included.
  failed_at: int = -1
  num_failures: int = 0
  notes: Record = dataclasses.field(default_factory=dict)  # For a record.
  updates_per_round: int = 1
  has_warned: bool = False  # Whether the agent has warned of its records.
  profile_end: int = 0  # The number of updates at which profiling ends.
  has_evaluated: bool = False  # Whether the evaluation is compiled.
  has_drawn: bool = False  # Whether an episode was drawn.
  has_evolved: bool = False  # Whether the population's program is compiled.
  is_stopped: bool = False  # Whether the run ends before its last update.
  # The hyperparameters of a population's members, after it has evolved.
  hyperparams: dict[str, list[float]] = dataclasses.field(default_factory=dict)

  def train(self) -> Outcome:
    """Trains, evaluates and writes the run's files."""
    path = self.files.workdir
    outcome = Outcome(FAILED, path)
    try:
      outcome = Outcome(self._train(), path)
    except _Mistake as mistake:
      outcome = Outcome(MISTAKE, path, str(mistake))
    except KeyboardInterrupt:  # A second Ctrl-C, in a program that calls podrl.
      outcome = Outcome(INTERRUPTED, path)
      raise
    except BaseException as exception:
      outcome = self._fail(exception)
    finally:
      if hanging := self.run.driver.close():
        names = ', '.join(hanging)
        print(f'{names} did not return; all stacks follow:', file=sys.stderr)
        sys.stderr.flush()
        dump_stacks()
        outcome = outcome._replace(
          exit_code=outcome.exit_code or FAILED,
          error=outcome.error or f'{names} did not return',
          is_hanging=True,
        )
      if self.checkpoints:
        self.checkpoints.close()
      outcome = self._conclude(outcome)
    return outcome

  def _train(self) -> int:
    """Trains until the end or a signal; returns the exit code."""
    recorder, signals = self.recorder, self.signals

    def on_failure(message: str) -> None:
      print_error(message)
      self._save_copy(message)
      self._conclude(Outcome(FAILED, error=message))

    if self.cluster.watchdog:  # Called if another process fails.
      self.cluster.watchdog.on_failure = on_failure
    else:
      signals.on_signal = self.run.driver.stop
    recorder.terminal.begin()
    if not self.files.is_resumed:
      recorder.open({})
    is_alone = not self.cluster.is_distributed
    if signals.is_set() and is_alone and self.variables is None:
      return signals.exit_code or FAILED
    self._start()
    # Wait until every process has compiled. The checkpoints then connect the
    # processes, and that fails if one of them is more than 30 seconds late.
    self.cluster.attempt(lambda: None)
    if not self.checkpoints:
      self._open_checkpoints()
      # A resumed run cannot get the initial variables elsewhere.
      if self.variables is not None:
        self._save()
    is_finished = self._loop()
    assert self.checkpoints is not None
    self._save()
    if recorder.num_updates_since_record:
      # After `_save`: a resumed run continues this window.
      recorder.write(scalars=self.notes)
    self.checkpoints.wait()
    if is_finished:
      return DONE
    recorder.terminal.say(f'saved after update {recorder.num_updates}')
    return signals.exit_code or FAILED

  def _open_checkpoints(self) -> None:
    self.checkpoints = checkpoint.Checkpoints(
      self.files.workdir,
      self.config['checkpoint.keep'],
      self.config.get('checkpoint.memory', False),
      self.cluster.busy,
    )

  @contextlib.contextmanager
  def _compiling(self) -> Iterator[None]:
    """A block in which XLA may compile for long, and nothing can get lost.

    A signal then ends the process without waiting for XLA. Several processes
    wait instead, because none of them may end alone; meanwhile, none of them
    counts as hanging.
    """
    leave = None if self.cluster.is_distributed else self._leave
    with self.signals.leaving(leave), self.cluster.busy():
      yield

  def _leave(self, exit_code: int) -> int:
    """Ends the run while the main thread compiles; returns the exit code."""
    recorder, path = self.recorder, self.files.workdir
    outcome = Outcome(exit_code, path)
    if self.variables is not None and not self.checkpoints:
      error = (
        'the parameters of --init_from were not saved yet; start the run '
        'again, in another --workdir'
      )
      outcome = Outcome(FAILED, path, error)
      print_error(error)
    elif self.checkpoints:
      recorder.terminal.say(f'saved after update {recorder.num_updates}')
    with contextlib.suppress(WriteError):
      if self.failed_at == recorder.num_updates:
        checkpoint.set_failures(path, self.failed_at, 0)
      if recorder.sinks and recorder.num_updates_since_record:
        recorder.write()  # The checkpoint is older, so a resume repeats it.
    return self._conclude(outcome).exit_code

  def save_and_wait(self, state: Tree = None) -> None:
    """Writes a checkpoint, and waits until it is complete; see `_save`."""
    self._save(state)
    assert self.checkpoints is not None
    self.checkpoints.wait()

  def _fail(self, exception: BaseException) -> Outcome:
    """Saves what is valid after a failure."""
    is_nan = isinstance(exception, FloatingPointError)
    is_expected = is_nan or isinstance(exception, WriteError)
    has_kind = is_expected or isinstance(exception, EnvironmentFailed)
    error = one_line(exception, with_kind=not has_kind)
    if not has_kind and (place := place_of(exception)):
      error += f' ({place})'
    # All processes raise the error for NaN, at the same update.
    watchdog = None if is_nan else self.cluster.watchdog
    if watchdog:
      watchdog.fail(error, is_suspect=True)
      # If all processes have failed, no other one saves it.
      self._save_copy(error)
    with contextlib.suppress(WriteError):
      if self.checkpoints and not watchdog and not is_expected:
        leaves = jax.tree.leaves(self.run.driver.state)
        if not any(x.is_deleted() for x in leaves):
          if self.failed_at != self.recorder.num_updates:
            self.failed_at, self.num_failures = self.recorder.num_updates, 1
          self._save()  # The state is valid, for example after an actor failed.
      if self.recorder.num_updates_since_record:
        self.recorder.write(scalars=self.notes)
    cause = None if is_expected else exception
    outcome = Outcome(
      FAILED, self.files.workdir, error, cause, is_diverged=is_nan
    )
    if watchdog:  # The other processes end too, so no collective can follow.
      if cause:
        print(useful_traceback(cause), end='', file=sys.stderr)
      print_error(error)
      exit_now(self._conclude(outcome).exit_code)
    return outcome

  def _conclude(self, outcome: Outcome) -> Outcome:
    """Closes the records and writes the summaries."""
    recorder, exit_code = self.recorder, outcome.exit_code or FAILED
    try:
      recorder.close()
    except WriteError as exception:
      error = outcome.error or str(exception)
      outcome = outcome._replace(exit_code=exit_code, error=error)
    if outcome.exit_code == MISTAKE:
      return outcome
    ending = self._describe(outcome)
    summaries = recorder.summaries(ending)
    try:
      recorder.write_summaries(summaries)
    except OSError as exception:
      error = f'no summary could be written: {exception}'
      error = '; '.join(filter(None, [outcome.error, error]))
      outcome = outcome._replace(exit_code=exit_code, error=error)
    if self.cluster.process == 0:
      path = self.files.workdir
      print_summary(
        recorder.terminal, self.config, summaries[0], path, self.resume()
      )
    return outcome

  def _describe(self, outcome: Outcome) -> Record:
    """Makes all fields of a summary except the last value of each metric."""
    run, recorder, config = self.run, self.recorder, self.config
    machine = describe_machine(run.devices, config['env.suite'])
    ending = recorder.times() | machine
    ending['exit'] = NAMES[outcome.exit_code]
    ending['total_env_steps'] = config['total_env_steps']
    if self.cluster.process == 0:
      last, price = recorder.last[0], config['price_per_hour']
      ending |= limits.summarise(last, _local_devices(run), price)
    if outcome.error:
      ending['error'] = outcome.error
    if outcome.is_diverged:
      ending['diverged'] = True
    if run.driver.learner_state is not None:
      leaves = jax.tree.leaves(run.driver.learner_state.variables.params)
      ending['num_params'] = sum(x.size for x in leaves) // len(run.eval_keys)
    return ending

  def _start(self) -> None:
    """Starts the driver, and prints the size of the learner's memory."""
    driver, config = self.run.driver, self.config
    try:
      with self._compiling():
        driver.start(self._restore)
    except SizeError as error:
      capacity = config['replay.capacity_steps']
      message = f'config.replay.capacity_steps={capacity}: {error}'
      raise _Mistake(message) from error
    assert driver.learner_state is not None
    arrays = jax.tree.leaves(driver.learner_state.memory)
    if arrays:
      size = sum(x.addressable_data(0).nbytes for x in arrays)
      text = f'the memory of {config["replay.capacity_steps"]:,} steps needs'
      self.recorder.terminal.say(f'{text} {format_size(size)} per device')

  def _restore(self, state: Tree) -> tuple[Tree, list[dict[str, Any]]]:
    """Restores a driver's initial state; see `types.Restore`."""
    with self.signals.leaving(None), self.cluster.busy():  # It changes files.
      state, progress = self._read_state(state)
      if self.variables is not None and not self.cluster.is_distributed:
        # Save the variables before the driver compiles: a resumed run cannot
        # get them elsewhere.
        self._open_checkpoints()
        self.save_and_wait(state)
    return state, progress

  def _read_state(self, state: Tree) -> tuple[Tree, list[dict[str, Any]]]:
    files, found, progress = self.files, None, {}
    try:
      if files.is_resumed:
        found = self.cluster.decide(self._find_checkpoint)
      if self.variables is not None:
        ours = checkpoint.learner_of(state).variables
        initial = self.variables._replace(hyperparams=ours.hyperparams)
        changes = {'variables': spmd.like(initial, ours)}
        targets = checkpoint.learner_of(state).target_params
        if jax.tree.leaves(targets):
          changes['target_params'] = spmd.like(initial.params, targets)
        state = checkpoint.change_learner(state, **changes)
      if found:
        step, progress = found
        state = self.cluster.attempt(
          lambda: checkpoint.read_state(files.workdir, step, state)
        )
        self.hyperparams = progress.get('hyperparams', {})
        if self.hyperparams:
          variables = checkpoint.learner_of(state).variables
          own = {k: np.array(x, 'f') for k, x in self.hyperparams.items()}
          own = spmd.like(own, {k: variables.hyperparams[k] for k in own})
          variables = variables.with_hyperparams(own)
          state = checkpoint.change_learner(state, variables=variables)
      if files.is_resumed:
        if self.cluster.process == 0:
          workdir.update_config(
            files.workdir, self.config, configs.changeable(self.config)
          )
        self.recorder.open(progress)
      if found:  # A process that is killed cannot count, so count now.
        step, number = found[0], progress.get('num_failures', 0) + 1
        self.failed_at, self.num_failures = step, number
        if self.cluster.process == 0:
          checkpoint.set_failures(files.workdir, step, number)
    except ValueError as error:
      raise _Mistake(str(error)) from error
    return state, progress.get('drivers', [])

  def _find_checkpoint(self) -> tuple[int, Record] | None:
    """Finds the checkpoint to resume from and prints its number of updates."""
    path, num_devices = self.files.workdir, len(self.run.devices)
    found = checkpoint.newest_intact(path, self.run.steps_per_update)
    message = f'{path}: no checkpoint yet, so the run starts from step 0'
    if found:
      step, progress = found
      self._check_failures(step, progress)
      message = f'{path}: resuming after update {step}{self.run.resume_note}'
      if progress['num_devices'] != num_devices:
        message += (
          f'\n{progress["num_devices"]} devices before, {num_devices} now: '
          'rounding and minibatch order differ, so the run is not bit-for-bit '
          'the same'
        )
      before, now = len(progress['drivers']), self.cluster.num_processes
      if before != now:
        message += f'\n{before} processes before, {now} now'
        self.notes['num_processes'] = now
    print(printable(message), file=sys.stderr)
    return found

  def _check_failures(self, step: int, progress: Record) -> None:
    """Raises a ValueError if the run failed too often after a checkpoint."""
    path, number = self.files.workdir, progress.get('num_failures', 0)
    if number < _MAX_FAILURES:
      return
    checkpoint.set_failures(path, step, 0)
    reason = progress.get('reason') or workdir.read_summary(path).get('error')
    reason = reason or 'a process was killed'
    raise ValueError(
      f'{path} failed {number} times after update {step}, so it is not resumed '
      f'({reason}); the same command tries again'
    )

  def _progress(self, drivers: Any) -> Record:
    """Returns what a resumed run needs beside the state, as JSON."""
    run, recorder = self.run, self.recorder
    progress = recorder.progress() | {
      'steps_per_update': run.steps_per_update,
      'drivers': drivers,
      'num_resumes': self.files.num_resumes,
      'num_devices': len(run.devices),
    }
    if self.hyperparams:
      progress['hyperparams'] = self.hyperparams
    if self.failed_at == recorder.num_updates and not self.signals.is_set():
      progress['num_failures'] = self.num_failures
    return progress

  def _save(self, state: Tree = None) -> None:
    """Writes a checkpoint of a state, by default the driver's."""
    run, recorder = self.run, self.recorder
    assert self.checkpoints is not None
    progress = self._progress(self.cluster.gather(run.driver.progress()))
    best = recorder.best and recorder.best[1]
    state = run.driver.state if state is None else state
    self.checkpoints.save(recorder.num_updates, state, progress, best)

  def _renew_copy(self) -> None:
    """Begins a copy of the state in host memory, in every process."""
    run = self.run
    drivers = self.cluster.gather(run.driver.progress())
    progress = self.cluster.decide(lambda: self._progress(drivers))
    state = checkpoint.change_learner(run.driver.state, memory=())
    self.copied_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    self.host_copy = self.host_copy or checkpoint.HostCopy(self.files.workdir)
    make = functools.partial(spmd.gather, state)
    with self.cluster.busy():  # It compiles once.
      self.host_copy.renew(self.recorder.num_updates, make, progress)

  def _save_copy(self, reason: str) -> None:
    """Writes the copy in host memory, because another process is lost."""
    try:
      step = self.host_copy and self.host_copy.write(reason)
    except WriteError as error:
      print_error(str(error))
    else:
      if step is not None:
        text = f'saved after update {step}, from a copy in host memory'
        print(text, file=sys.stderr, flush=True)

  def _loop(self) -> bool:
    """Trains; returns false if a signal came before the last update."""
    recorder, cluster, driver = self.recorder, self.cluster, self.run.driver
    num_profiled = self.config['log.profile']
    recorder.terminal.start(recorder.num_updates)
    self.saved_seconds, self.copied_seconds = time.perf_counter(), -math.inf
    self.profile_end = recorder.num_updates + num_profiled
    meter = Meter(_local_devices(self.run))
    with contextlib.ExitStack() as profile:
      if num_profiled and cluster.process == 0:
        path = os.path.join(self.files.workdir, 'profile')
        trace = jax.profiler.trace(path, create_perfetto_trace=True)
        profile.enter_context(trace)
      while True:
        if not self._write_record_if_due():
          return False
        if self.is_stopped or recorder.num_updates == self.run.num_updates:
          return True
        self.signals.keep()
        exit_code, is_save, is_copy, num_updates, plan = cluster.decide(
          self._next_round
        )
        if exit_code is not None:
          self.signals.note(exit_code)
          return False
        if is_save:
          self._save()
          self.saved_seconds = time.perf_counter()
        if self.host_copy:
          self.host_copy.settle()
        if is_copy:
          self._renew_copy()
          self.copied_seconds = time.perf_counter()
        if recorder.num_updates and self._is_due(self.run.evolve_every_updates):
          self._evolve_safely()
        if recorder.num_updates >= self.profile_end:
          profile.close()
        reports = meter.measure(lambda: driver.advance(num_updates, plan))
        if cluster.is_distributed and driver.error:
          raise driver.error  # Otherwise, the other processes wait forever.
        rate = reports[0].num_updates / reports[0].seconds
        most = min(2 * self.updates_per_round, int(_ROUND_SECONDS * rate))
        self.updates_per_round = max(1, most)
        self._add(reports)

  def _is_due(self, period: int) -> bool:
    return bool(period) and self.recorder.num_updates % period == 0

  def _next_round(self) -> tuple[int | None, bool, bool, int, dict[str, Any]]:
    """Decides in process 0 what all processes do next.

    Returns five values: the exit code if a signal ends the run, or None;
    whether to save; whether to renew the copy in host memory; the number of
    updates to run; and the driver's plan.
    """
    run, config, recorder = self.run, self.config, self.recorder
    num_updates = recorder.num_updates
    save_period = run.checkpoint_every_updates
    every_seconds = config['checkpoint.every_seconds']
    seconds = time.perf_counter() - self.saved_seconds
    is_save = bool(
      (num_updates and self._is_due(save_period))
      or (every_seconds and seconds >= every_seconds)
      or (recorder.best and recorder.best[1] == num_updates)
    )
    seconds = time.perf_counter() - self.copied_seconds
    host_seconds = config['checkpoint.host_seconds']
    is_copy = self.cluster.is_distributed and host_seconds > 0.0
    is_copy &= seconds >= max(host_seconds, self.copied_bytes / _COPY_RATE)
    periods = [config['log.every_updates'], run.eval_every_updates, save_period]
    periods.append(run.evolve_every_updates)
    ends = [num_updates - num_updates % x + x for x in periods if x]
    ends += [x for x in (run.num_updates, self.profile_end) if x > num_updates]
    num_updates = min(self.updates_per_round, *(x - num_updates for x in ends))
    plan = self.run.driver.plan()
    return self.signals.exit_code, is_save, is_copy, num_updates, plan

  def _evolve_safely(self) -> None:
    """Evolves; nothing gets lost if this compiles for long."""
    if self.has_evolved:
      self._evolve()
      return
    self.save_and_wait()
    with self._compiling():
      self._evolve()
    self.has_evolved = True

  def _evolve(self) -> None:
    """Replaces the worst members of a population; see `core.population`."""
    recorder, driver = self.recorder, self.run.driver
    assert isinstance(driver, Anakin)
    scores = self.cluster.decide(
      lambda: recorder.take_scores(is_evaluated=self.run.spec.has_turns)
    )
    if not scores:  # A member without an ended episode cannot be compared.
      return
    # No other key of the run is folded with this number.
    rng_key = jax.random.fold_in(
      jax.random.key(self.config['seed']), _EVOLVE_STREAM
    )
    rng_key = jax.random.fold_in(rng_key, recorder.num_updates)
    parents, values = driver.exploit(scores, rng_key)
    # Keep only these: others depend on the run's length, which may change.
    fields = configs.member_fields(self.config)
    own = {*map(short, fields)}
    self.hyperparams = {k: x for k, x in values.items() if k in own}
    decision = {'scores': scores, 'parents': parents}
    recorder.decide(decision | {'hyperparams': self.hyperparams})

  def _gather(self, value: Any) -> list[Any]:
    """Gathers JSON values in process 0; notes the signals of all processes."""
    gathered = self.cluster.gather([self.signals.exit_code, value]) or []
    for exit_code, _ in gathered:
      self.signals.note(exit_code)
    return [value for _, value in gathered]

  def _add(self, reports: Sequence[Report]) -> None:
    """Adds the reports of all processes to the records; checks their losses."""
    parts = self._gather([records.local_part(report) for report in reports])
    others, merge = parts[1:], records.merge_processes
    self.recorder.add([merge(x, own) for x, *own in zip(reports, *others)])
    for i, report in enumerate(reports):
      if not report.is_finite:
        found = self._gather(report.culprit)
        step = self._find_sound_checkpoint()
        message = self.cluster.decide(lambda: self._explain(i, found, step))
        raise FloatingPointError(message)

  def _find_sound_checkpoint(self) -> int | None:
    """Returns the newest checkpoint, or None if its parameters diverged."""
    path = self.files.workdir
    assert self.checkpoints is not None
    self.checkpoints.wait()
    for step in self.cluster.decide(lambda: checkpoint.steps(path)[:1]):
      params = checkpoint.read_variables(path, step, self.run.variables).params
      # For NaN, this is false.
      if all(np.all(np.abs(x) < _LARGE) for x in jax.tree.leaves(params)):
        return step
    return None

  def _explain(
    self, agent: int, found: Sequence[Any], checkpoint_step: int | None
  ) -> str:
    """Says why a loss or gradient is not finite, and what to do now.

    `found` has the `Report.culprit` of each process, as JSON.
    """
    text = (
      f'the loss or gradient of seed {self.config["seed"] + agent} is NaN or '
      f'infinite at update {self.recorder.num_updates + 1}'
    )
    for culprit in filter(None, found):
      if reason := culprits.explain(Culprit(*culprit), self.config):
        return f'{text}: {reason}'
    default = BASE['optimizer.learning_rate'].default
    rate = min(self.config['optimizer.learning_rate'] / 10, default)
    advice = f'--config.optimizer.learning_rate={rate:g}'
    own = configs.changeable(self.config)
    if checkpoint_step is None or 'optimizer.learning_rate' not in own:
      return f'{text}; start another run with {advice}'
    return (
      f'{text}; continue from update {checkpoint_step} with a smaller learning '
      f'rate: {self.resume(advice)}'
    )

  def _write_record_if_due(self) -> bool:
    """Evaluates and writes a record if due; returns false after a signal."""
    run, recorder, signals = self.run, self.recorder, self.signals
    is_end = recorder.num_updates == run.num_updates
    is_evaluation = is_end or self._is_due(run.eval_every_updates)
    is_due = is_evaluation or self._is_due(self.config['log.every_updates'])
    if not is_due or not recorder.num_updates_since_record:
      return True
    outcomes: list[Record] | None = []
    if is_evaluation:
      outcomes = self.evaluate(is_end)
    scalars: Record = {}
    if outcomes is not None and self.on_record and recorder.sinks:
      preview = recorder.preview(outcomes)
      running = Running(self, outcomes, {**preview})
      self._stop_if(
        bool(self.on_record(preview, running)), 'on_record returned True'
      )
      outcomes, scalars = running._outcomes, running._scalars
    if outcomes and (least := self.config['stop.eval_return']):
      mean = np.mean([x['eval_return'] for x in outcomes])
      text = (
        f'the evaluated return {mean:,.2f} reaches stop.eval_return={least}'
      )
      self._stop_if(bool(mean >= float(least)), text)
    if self.is_stopped and not outcomes:
      outcomes = self.evaluate(is_end=True)
    if run.driver.error:  # An actor failed during the evaluation.
      raise run.driver.error
    if outcomes is None:  # The resumed run will write this record.
      signals.note(self.cluster.decide(lambda: signals.exit_code))
      return False
    recorder.write(outcomes, scalars | self.notes)
    self.notes = {}
    if outcomes and self.config['log.videos']:
      self._draw_safely()
    if self.cluster.process == 0 and not self.has_warned:
      config, record = self.config, recorder.last[0]
      warning = agents.find(config['agent.name']).warn(record)
      warning = warning or culprits.warn_of_size(
        record, config['agent.normalize_observation']
      )
      self.has_warned = bool(warning)
      if warning:
        print(f'warning: {warning}', file=sys.stderr)
    return True

  def _draw_safely(self) -> None:
    """Draws an episode; nothing gets lost if this compiles for long."""
    if self.has_drawn:
      with self.cluster.busy():
        self.cluster.attempt(self._draw)
      return
    self.save_and_wait()
    with self._compiling():
      self.cluster.attempt(self._draw)
    self.has_drawn = True

  def _draw(self) -> None:
    """Draws an episode of the policy that was evaluated, in process 0."""
    if not self.recorder.sinks:
      return
    self.recorder.terminal.say('drawing an episode')
    try:
      self.recorder.show(Running(self, []).draw())
    except WriteError:
      raise
    except Exception as error:  # A renderer can raise anything.
      text = printable(one_line(error, with_kind=True))
      print(f'warning: no video for log.videos: {text}', file=sys.stderr)

  def _stop_if(self, is_reached: bool, reason: str) -> None:
    """Ends the run after the record that is being made."""
    if is_reached and not self.is_stopped:
      self.is_stopped = True
      self.recorder.terminal.say(f'the run ends early: {reason}')

  def evaluate(self, is_end: bool = False) -> list[Record] | None:
    """Evaluates each agent; nothing gets lost if this compiles for long.

    It returns None if a signal stopped any process.
    """
    if self.has_evaluated and not is_end:
      return self._evaluate()
    self.save_and_wait()
    with self._compiling():
      outcomes = self._evaluate()
    self.has_evaluated = True
    return outcomes

  def _evaluate(self) -> list[Record] | None:
    """Evaluates each agent; returns None if a signal stopped any process."""
    run, signals, cluster = self.run, self.signals, self.cluster
    say, num_chunks = self.recorder.terminal.say, 0
    say('evaluating' if self.has_evaluated else 'compiling the evaluation')
    assert run.driver.learner_state is not None
    variables = spmd.copy_to_first_device(run.driver.learner_state.variables)

    def should_stop() -> bool:
      nonlocal num_chunks
      num_chunks += 1
      if num_chunks == 3 and not self.has_evaluated:  # All is compiled.
        say('evaluating')
      cluster.beat()
      return signals.is_set() or run.driver.error is not None

    returns: list[list[float] | None] = []
    for i, rng_key in enumerate(run.eval_keys):
      own = variables
      if len(run.eval_keys) > 1:
        own = jax.tree.map(lambda x: x[i], variables)
      rng_key = jax.random.fold_in(rng_key, self.recorder.num_updates)
      for k, evaluate in enumerate((run.evaluate, *run.others.values())):
        key = jax.random.fold_in(rng_key, k) if k else rng_key
        evaluation = evaluate(own, key, should_stop)
        returns.append(evaluation and evaluation.returns.tolist())
    parts = self._gather(returns)
    names = [f'eval_return_vs_{name}' for name in run.others]

    def merge() -> list[Record] | None:
      if any(x is None for part in parts for x in part):
        return None
      found = [*map(np.concatenate, zip(*parts))]
      outcomes = []
      for i in range(0, len(found), 1 + len(names)):
        returns, *others = found[i : i + 1 + len(names)]
        outcome = {
          'eval_return': np.mean(returns).item(),
          'eval_return_std': np.std(returns).item(),
          'eval_episodes': len(returns),
        }
        means = [np.mean(x).item() for x in others]
        outcomes.append(outcome | dict(zip(names, means)))
      return outcomes

    return cluster.decide(merge)
