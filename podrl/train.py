"""The main of every experiment: `train.main(get_config)`."""

from collections.abc import Callable, Sequence
import datetime
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
from podrl.config import AGENTS, apply_overrides, describe

DONE, FAILED, MISTAKE, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130

_SECONDS_PER_CALL = 0.5  # So long may a signal wait.


class _Signals:
  """Notes Ctrl-C and SIGTERM; a second one ends the process at once.

  The handlers only set a flag: an exception in the middle of a call would
  leave donated, deleted arrays behind.
  """

  def __init__(self):
    self.exit_code = None
    self._previous = {
        number: signal.signal(number, self._handle)
        for number in (signal.SIGINT, signal.SIGTERM)}

  def _handle(self, number: int, frame) -> None:
    del frame
    self.exit_code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
    for signal_number in self._previous:
      signal.signal(signal_number, signal.SIG_DFL)

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
    The exit code: 0 done, 1 failed, 2 the user's mistake, 75 ended by SIGTERM,
    130 by Ctrl-C.
  """
  start_seconds = time.perf_counter()
  signals = _Signals()
  try:
    name = os.path.splitext(os.path.basename(argv[0]))[0]
    config, workdir = _parse(get_config, argv, name)
    if config is None:
      return DONE
    build.check(config)
    _check_workdir(workdir)
    _set_up_jax(config)
    experiment = build.make_run(config)
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
  flags.DEFINE_string(
      'agent', 'ppo', f'{", ".join(AGENTS)}', flag_values=values)
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
  # Where devices were made already (a test, XLA_FLAGS), they stay.
  if jax.config.jax_num_cpu_devices < 1 and (
      'device_count' not in os.environ.get('XLA_FLAGS', '')):
    spmd.set_num_cpu_devices(build.num_cpu_devices(config))
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
      config.env.num_envs, config.unroll_length, run.spec.frame_skip)
  terminal = metrics.Terminal(name, run.num_updates)
  sinks: list[metrics.Sink] = [metrics.JsonLines(workdir), terminal]
  if config.log.tensorboard:
    sinks.append(metrics.TensorBoard(workdir))
  last: metrics.Record = {}
  state = None

  def write(record: metrics.Record) -> None:
    record |= {
        'num_sgd_steps': int(state.learner.num_sgd_steps),
        'wall_seconds': time.perf_counter() - start_seconds,
        'compile_seconds': clock.seconds}
    last.update(record)
    for sink in sinks:
      sink.write(record)

  def evaluate() -> metrics.Record:
    terminal.say('evaluating')
    # On one device, and a copy: training donates the state.
    params = spmd.copy_to_first_device(state.learner.params)
    key = jax.random.fold_in(run.eval_key, window.num_updates)
    outcome = run.evaluate(params, key, signals.is_set)
    if outcome is None:
      return {}
    return {'eval_return': float(outcome.returns.mean(dtype=np.float64)),
            'eval_return_std': float(outcome.returns.std(dtype=np.float64)),
            'eval_episodes': len(outcome.returns)}

  exit_code, error = FAILED, None
  try:
    if not signals.is_set():
      terminal.say('compiling')
      state = run.driver.init(run.init_key)
      # No update: it compiles, so that the first window is not the compiler's.
      state, _ = jax.block_until_ready(run.driver.train(state, np.int32(0)))
    updates_per_call, periods = 1, [config.log.every_updates]
    if run.eval_every_updates:
      periods.append(run.eval_every_updates)
    while window.num_updates < run.num_updates and not signals.is_set():
      num_updates = min(
          updates_per_call, run.num_updates - window.num_updates,
          *(period - window.num_updates % period for period in periods))
      call_start = time.perf_counter()
      state, records = run.driver.train(state, np.int32(num_updates))
      is_finite = bool(records.is_finite)
      seconds = time.perf_counter() - call_start
      if not is_finite:
        num_updates = int(state.learner.num_updates) - window.num_updates - 1
      window.add(records, num_updates, seconds)
      if not is_finite:
        write(window.record())
        raise FloatingPointError(
            f'the loss is NaN or infinite at update {window.num_updates + 1}; '
            'try a smaller optimizer.learning_rate')
      updates_per_call = min(
          2 * updates_per_call, run.max_updates_per_call,
          max(1, int(_SECONDS_PER_CALL * num_updates / seconds)))
      is_last = window.num_updates == run.num_updates
      is_eval = is_last or run.eval_every_updates and (
          window.num_updates % run.eval_every_updates == 0)
      is_due = window.num_updates % config.log.every_updates == 0
      if is_eval or is_due or signals.is_set():
        record = window.record()
        write(record | evaluate() if is_eval else record)
    exit_code = DONE if signals.exit_code is None else signals.exit_code
  except Exception as exception:  # Told, and recorded in the summary.
    error = f'{type(exception).__name__}: {exception}'
    if not isinstance(exception, FloatingPointError):
      traceback.print_exc()
  finally:
    for sink in sinks:
      sink.close()
    clock.close()
    outcome = {DONE: 'done', FAILED: 'failed', PREEMPTED: 'preempted',
               INTERRUPTED: 'interrupted'}[exit_code]
    summary = last | {
        'wall_seconds': time.perf_counter() - start_seconds,
        'compile_seconds': clock.seconds,
        **_describe_machine(run), 'exit': outcome}
    if state is not None:
      summary['num_params'] = sum(
          x.size for x in jax.tree.leaves(state.learner.params))
    if error:
      summary['error'] = error
      print(f'error: {error}', file=sys.stderr)
    with open(os.path.join(workdir, 'summary.json'), 'w') as file:
      file.write(metrics.to_json(summary, indent=2) + '\n')
    terminal.print_summary(f'{name}: {outcome}', _summary_rows(
        summary, workdir))
  return exit_code


def _describe_machine(run: build.Run) -> metrics.Record:
  """What the run ran on."""
  packages = ('jax', 'jaxlib', 'flax', 'optax', 'gymnax')
  return {
      'platform': run.mesh.devices.flat[0].platform,
      'devices': run.mesh.size,
      'processes': jax.process_count(),
      'versions': {'podrl': podrl.__version__} | {
          p: importlib.metadata.version(p) for p in packages}}


def _summary_rows(
    summary: metrics.Record, workdir: str) -> list[tuple[str, str]]:
  """The summary as a person reads it."""
  rows = []
  if 'eval_return' in summary:
    rows.append(('evaluated return', (
        f'{summary["eval_return"]:.2f} +- {summary["eval_return_std"]:.2f} '
        f'over {summary["eval_episodes"]} episodes')))
  if 'env_steps' in summary:
    rows += [
        ('environment steps', f'{summary["env_steps"]:,}'),
        ('steps per second', f'{summary["steps_per_second"]:,.0f} (last window)')]
  rows += [
      ('wall time', (f'{summary["wall_seconds"]:.1f} s, of which '
                     f'{summary["compile_seconds"]:.1f} s compiling')),
      ('devices', f'{summary["devices"]} {summary["platform"]}'),
      ('run', workdir)]
  return rows
