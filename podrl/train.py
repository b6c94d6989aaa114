"""The main of every experiment: `train.main(get_config)`."""

from collections.abc import Callable, Sequence
import datetime
import faulthandler
import importlib.metadata
import os
import signal
import sys
import time
import traceback

from absl import flags
import jax
from ml_collections import ConfigDict
import numpy as np

import podrl
from podrl import build
from podrl import metrics
from podrl import spmd
from podrl.check import check
from podrl.config import AGENTS, apply_overrides, describe, is_sebulba
from podrl.layout import num_cpu_devices
from podrl.learner import trained

DONE, FAILED, MISTAKE, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


class _Signals:
  """Notes Ctrl-C and SIGTERM; a second one ends the process at once.

  The handlers only set a flag: an exception in the middle of a call would
  leave donated, deleted arrays behind.
  """

  def __init__(self):
    self.exit_code = None
    self.on_signal: Callable[[], None] = lambda: None  # Called by the first.
    self._previous = {
        number: signal.signal(number, self._handle)
        for number in (signal.SIGINT, signal.SIGTERM)}

  def _handle(self, number: int, frame) -> None:
    del frame
    self.exit_code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
    for signal_number in self._previous:
      signal.signal(signal_number, signal.SIG_DFL)
    self.on_signal()

  def is_set(self) -> bool:
    """Whether one came."""
    return self.exit_code is not None

  def close(self) -> None:
    """Puts the previous handlers back."""
    for number, handler in self._previous.items():
      signal.signal(number, handler)


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
  signals = _Signals()
  try:
    name = os.path.splitext(os.path.basename(argv[0]))[0]
    config, workdir = _parse(get_config, argv, name)
    if config is None:
      return DONE
    check(config)
    _check_workdir(workdir)
    _set_up_jax(config)
    experiment = build.make_run(config)
    for warning in experiment.warnings:
      print(f'warning: {warning}', file=sys.stderr)
    _make_workdir(workdir, config)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return MISTAKE
  else:
    return _train(config, experiment, name, workdir, signals, start_seconds)
  finally:
    signals.close()


def _parse(
    get_config: Callable[..., ConfigDict], argv: Sequence[str], name: str
) -> tuple[ConfigDict | None, str]:
  """Reads the command line; no config where only help was asked for."""
  values = flags.FlagValues()
  flags.DEFINE_string('agent', 'ppo', ', '.join(AGENTS), flag_values=values)
  flags.DEFINE_string(
      'variant', '', 'of the experiment; empty is its default.',
      flag_values=values)
  flags.DEFINE_string(
      'workdir', '', 'of the run; empty is runs/NAME/TIME.', flag_values=values)
  flags.DEFINE_bool('help', False, 'show this.', short_name='h',
                    flag_values=values)
  try:
    rest = values(argv, known_only=True)[1:]
  except flags.Error as error:
    raise ValueError(str(error)) from error
  config = get_config(values.agent, values.variant)
  if values.help:
    print(f'usage: python {argv[0]} [flags]\n{values.get_help()}'
          f'\nfields, with their defaults:\n{describe(config)}')
    return None, ''
  apply_overrides(config, rest)
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')
  return config, values.workdir or os.path.join('runs', name, now)


def _check_workdir(workdir: str) -> None:
  """Raises a ValueError where a run cannot be written, or one is."""
  if os.path.exists(os.path.join(workdir, 'config.json')):
    raise ValueError(
        f'--workdir={workdir} holds another run; choose a new directory')
  parent = os.path.abspath(workdir)
  while not os.path.lexists(parent):
    parent = os.path.dirname(parent)
  if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
    raise ValueError(
        f'--workdir={workdir} cannot be written, because of {parent}; '
        'choose another directory')


def _make_workdir(workdir: str, config: ConfigDict) -> None:
  """Makes the directory and writes the configuration as run."""
  try:
    os.makedirs(workdir, exist_ok=True)
    # 'x': of two runs started together only one gets the directory.
    with open(os.path.join(workdir, 'config.json'), 'x') as file:
      file.write(metrics.to_json(config.to_dict(), indent=2) + '\n')
  except OSError as error:
    raise ValueError(
        f'--workdir={workdir} cannot be written ({error.strerror}); '
        'choose another directory') from error


def _set_up_jax(config: ConfigDict) -> None:
  """Sets what must be set before the first use of a device."""
  # Devices made already (by a test, XLA_FLAGS) stay.
  if jax.config.jax_num_cpu_devices < 1 and (
      'device_count' not in os.environ.get('XLA_FLAGS', '')) and (
      not spmd.has_accelerator()):
    spmd.set_num_cpu_devices(num_cpu_devices(config))
    # An actor's small programs are faster in its own thread than in another.
    jax.config.update('jax_cpu_enable_async_dispatch', not is_sebulba(config))
  cache = config.compilation_cache
  if cache == 'off':
    jax.config.update('jax_enable_compilation_cache', False)
    return
  if cache == 'auto':
    cache = os.path.join(
        os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'),
        'podrl', 'xla')
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def _train(
    config: ConfigDict, run: build.Run, name: str, workdir: str,
    signals: _Signals, start_seconds: float) -> int:
  """Trains, evaluates and writes the run's files; returns the exit code."""
  clock = metrics.CompileClock()
  window = metrics.Window(
      run.spec.frame_skip, config.num_epochs * config.num_minibatches)
  terminal = metrics.Terminal(name, run.num_updates)
  sinks: list[metrics.Sink] = [metrics.JsonLines(workdir), terminal]
  if config.log.tensorboard:
    sinks.append(metrics.TensorBoard(workdir))
  last: metrics.Record = {}

  def times() -> metrics.Record:
    return {'wall_seconds': time.perf_counter() - start_seconds,
            'compile_seconds': clock.seconds}

  def write(record: metrics.Record) -> None:
    last.update(record | times())
    for sink in sinks:
      sink.write(record | times())

  exit_code, error = FAILED, None
  try:
    signals.on_signal = run.driver.stop
    terminal.say('compiling')
    if not signals.is_set():
      run.driver.start()
    _loop(config, run, window, terminal, write, signals)
    exit_code = signals.exit_code or DONE
  except BaseException as exception:  # Told, and recorded in the summary.
    error = f'{type(exception).__name__}: {" ".join(str(exception).split())}'
    if window.num_updates_since_record:
      write(window.record())
    if not isinstance(exception, FloatingPointError):
      traceback.print_exc()
  finally:
    hanging = _close(run)
    if hanging:
      exit_code, error = exit_code or FAILED, error or (
          f'{", ".join(hanging)} did not return')
    for sink in sinks:
      sink.close()
    clock.close()
    outcome = {DONE: 'done', FAILED: 'failed', PREEMPTED: 'preempted',
               INTERRUPTED: 'interrupted'}[exit_code]
    summary = last | times() | _describe_machine(run) | {'exit': outcome}
    if error:
      summary['error'] = error
      print(f'error: {error}', file=sys.stderr)
    with open(os.path.join(workdir, 'summary.json'), 'w') as file:
      file.write(metrics.to_json(summary, indent=2) + '\n')
    terminal.print_summary(summary, workdir)
  if hanging:
    sys.stdout.flush()
    os._exit(exit_code)  # A thread that stays in C++ cannot be joined.
  return exit_code


def _close(run: build.Run) -> list[str]:
  """Ends the driver; names threads that hang, all stacks printed."""
  hanging = run.driver.close()
  if hanging:
    print(f'{hanging} did not return; all stacks:', file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
  return hanging


def _loop(
    config: ConfigDict, run: build.Run, window: metrics.Window,
    terminal: metrics.Terminal, write: Callable[[metrics.Record], None],
    signals: _Signals) -> None:
  """Trains until the last update or a signal, a record for each window."""
  periods = [p for p in (config.log.every_updates, run.eval_every_updates) if p]

  def evaluate() -> metrics.Record:
    terminal.say('evaluating')
    params = spmd.copy_to_first_device(run.driver.learner.params)
    key = jax.random.fold_in(run.eval_key, window.num_updates)
    outcome = run.evaluate(
        params, key, lambda: signals.is_set() or run.driver.error is not None)
    if outcome is None:
      return {}
    return {'eval_return': float(outcome.returns.mean(dtype=np.float64)),
            'eval_return_std': float(outcome.returns.std(dtype=np.float64)),
            'eval_episodes': len(outcome.returns)}

  while window.num_updates < run.num_updates and not signals.is_set():
    report = run.driver.advance(min(
        run.num_updates - window.num_updates,
        *(period - window.num_updates % period for period in periods)))
    window.add(report)
    if not report.is_finite:
      raise FloatingPointError(
          f'the loss is NaN or infinite at update {window.num_updates + 1}; '
          'try a smaller optimizer.learning_rate')
    is_last = window.num_updates == run.num_updates
    is_eval = is_last or run.eval_every_updates and (
        window.num_updates % run.eval_every_updates == 0)
    is_due = window.num_updates % config.log.every_updates == 0
    # A signal may end a window before its first update.
    if window.num_updates_since_record and (
        is_eval or is_due or signals.is_set()):
      outcome = evaluate() if is_eval else {}  # May raise: the window stays.
      write(window.record() | outcome)
    if is_eval and run.driver.error:  # Of a thread, meanwhile.
      raise run.driver.error


def _describe_machine(run: build.Run) -> metrics.Record:
  """What the run ran on."""
  packages = ('jax', 'jaxlib', 'flax', 'optax', run.suite)
  machine = {
      'platform': run.devices[0].platform,
      'devices': len(run.devices),
      'processes': jax.process_count(),
      'versions': {'podrl': podrl.__version__} | {
          p: importlib.metadata.version(p) for p in packages}}
  if run.driver.learner is not None:
    machine['num_params'] = sum(
        x.size for x in jax.tree.leaves(trained(run.driver.learner.params)))
  return machine
