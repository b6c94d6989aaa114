"""What a run records: windows and files of each agent, and the terminal."""

from collections.abc import Sequence
import os
import time

from ml_collections import ConfigDict
import numpy as np

from podrl.drivers.limits import System, find_limit
from podrl.records import metrics, workdir
from podrl.records.terminal import Terminal
from podrl.records.workdir import Record, WriteError
from podrl.run.config import is_sebulba
from podrl.types import Episodes, Report


def mean_record(records: Sequence[Record]) -> Record:
  """One record of several agents': rates are summed, all else is averaged."""
  mean = {}
  for name in set.intersection(*map(set, records)):
    reduce = np.sum if name.endswith('_per_second') else np.mean
    value = float(reduce([r[name] for r in records]))
    is_count = all(isinstance(r[name], int) for r in records)
    mean[name] = round(value) if is_count else value
  return {k: mean[k] for k in records[0] if k in mean}


def share(report: Report) -> Record:
  """What other processes do not know of a report, as JSON."""
  return {
    'episodes': [np.sum(x, dtype=np.float64).item() for x in report.episodes],
    'num_predictions': report.num_predictions,
    'stages': {**report.stages},
    'own': {k: x.tolist() for k, x in report.own.items()},
  }


def merge(report: Report, others: Sequence[Record]) -> Report:
  """One report of several processes'.

  Episodes, numbers and rates are summed, a maximum is that of all, and what else
  each measures for itself is averaged.

  Args:
    report: of this process.
    others: what `share` gave in the others, of the same updates.
  """
  if not others or not report.num_updates:
    return report

  def one(name: str, value: np.ndarray) -> np.ndarray:
    reduce = (
      np.max
      if name.endswith('_max')
      else (np.sum if name.startswith('num_') else np.mean)
    )
    return reduce([value] + [x['own'][name] for x in others], axis=0)

  episodes = [x.astype(np.float64) for x in report.episodes]
  for other in others:
    for mine, total in zip(episodes, other['episodes']):
      mine.flat[0] += total  # Of whichever update: a window is what is told.
  return report._replace(
    episodes=Episodes(*episodes),
    num_predictions=report.num_predictions
    + sum(x['num_predictions'] for x in others),
    stages={
      k: (np.sum if k.endswith('_per_second') else np.mean)(
        [v] + [x['stages'][k] for x in others]
      )
      for k, v in report.stages.items()
      if all(k in x['stages'] for x in others)
    },
    own={k: one(k, v) for k, v in report.own.items()},
  )


class Recorder:
  """Records of a run of one or more agents, each with a seed of its own.

  A run of several has a directory for each, and the mean in its own. Of several
  processes only the first writes.

  Args:
    config: of the run.
    name: of the experiment.
    path: of the run's directory.
    frame_skip: raw frames in an environment step.
    num_updates: of the whole run.
    start_seconds: when the process began, by `time.perf_counter`.
    is_writer: whether this process writes.
    system: what a Sebulba run works with.
  """

  def __init__(
    self,
    config: ConfigDict,
    name: str,
    path: str,
    frame_skip: int,
    num_updates: int,
    start_seconds: float,
    is_writer: bool = True,
    system: System | None = None,
  ):
    self._config = config
    self._name = name
    self._system = system
    seeds = workdir.seed_directories(path, config)
    self._windows = [
      metrics.Window(frame_skip, config.num_epochs * config.num_minibatches)
      for _ in seeds
    ]
    self._paths = (
      [path, *(x for _, x in seeds if x != path)] if is_writer else []
    )
    self.sinks: list[list[metrics.Sink]] = []  # Of each path.
    self.last: list[Record] = [{} for _ in self._paths]  # Their last values.
    # Of earlier processes of this run.
    self._before = {'wall_seconds': 0.0, 'compile_seconds': 0.0}
    self._start_seconds = start_seconds
    self._clock = metrics.CompileClock()
    self._num_records = self._num_decisions = 0
    self._decisions: metrics.JsonLines | None = None
    self.best: tuple[float, int] | None = None  # Evaluated return, its update.
    self.terminal = Terminal(name, num_updates, not is_writer)
    self._writer = metrics.Writer()

  @property
  def num_updates(self) -> int:
    """Calls of `update` in the whole run so far."""
    return self._windows[0].num_updates

  @property
  def num_updates_since_record(self) -> int:
    """Updates that no record tells of yet."""
    return self._windows[0].num_updates_since_record

  def check_files(self, progress: Record) -> None:
    """Raises a ValueError where records are lost that `progress` counts."""
    for path in self._paths:
      number = len(workdir.read_records(path))
      if number < progress['num_records']:
        raise ValueError(
          f'{path}/metrics.jsonl has {number} records, and had '
          f'{progress["num_records"]} when it was written'
        )

  def open(self, progress: Record) -> None:
    """Opens the files; a run goes on after what `progress` returned.

    Args:
      progress: empty for a run that begins.

    Raises:
      ValueError: if another process writes them.
    """
    if progress:
      self._num_records = progress['num_records']
      self._num_decisions = progress.get('num_decisions', 0)
      self._before = {name: progress[name] for name in self._before}
      self.best = progress['best'] and tuple(progress['best'])
      for window, state in zip(self._windows, progress['windows']):
        window.resume(state)
      self.terminal.resume(self.num_updates)
    try:
      for path in () if progress else self._paths:
        file = os.path.join(path, 'metrics.jsonl')
        if os.path.exists(file) and os.path.getsize(file):
          workdir.set_aside(file)  # Of a beginning that has no checkpoint.
      self._open()
    except OSError as error:
      raise WriteError(f'no record can be written: {error}') from error

  def _open(self) -> None:
    log = self._config.log
    for path, last in zip(self._paths, self.last):
      sinks: list[metrics.Sink] = [metrics.JsonLines(path, self._num_records)]
      self.sinks.append(sinks)
      for record in workdir.read_records(path):
        last.update(record)
      if log.tensorboard:
        sinks.append(metrics.TensorBoard(path, last.get('env_steps', -1) + 1))
      if log.wandb:
        sinks.append(
          metrics.Wandb(path, self._name, workdir.read_config(path).to_dict())
        )
    for sinks in self.sinks[:1]:
      sinks.append(self.terminal)
      if is_sebulba(self._config) and self._config.sebulba.autotune:
        self._decisions = metrics.JsonLines(
          self._paths[0], self._num_decisions, 'decisions.jsonl'
        )

  def add(self, reports: Sequence[Report]) -> None:
    """Adds what a driver reports, an item for each agent."""
    for window, report in zip(self._windows, reports):
      window.add(report)

  def times(self) -> Record:
    """Wall time and time spent compiling, over all processes of the run."""
    return {
      'wall_seconds': self._before['wall_seconds']
      + (time.perf_counter() - self._start_seconds),
      'compile_seconds': (
        self._before['compile_seconds'] + self._clock.seconds
      ),
    }

  def write(self, outcomes: Sequence[Record] = ()) -> None:
    """Writes the windows' records, with what else is known of each agent."""
    records = [window.record() for window in self._windows]
    for record, outcome in zip(records, outcomes):
      record |= outcome
    if len(records) > 1:
      records.insert(0, mean_record(records))
    if self._system and 'busy_cores' in records[0]:
      limit = find_limit(records[0], self._system)
      records[0] |= {'limit': limit.name, 'limit_sentence': limit.sentence}
    self._num_records += 1
    times = self.times()
    for record, sinks, last in zip(records, self.sinks, self.last):
      last.update(record | times)
      self._writer.write(sinks, record | times)
    if 'eval_return' in records[0] and (
      self.best is None or records[0]['eval_return'] > self.best[0]
    ):
      self.best = records[0]['eval_return'], self.num_updates

  def add_decisions(self, decisions: Sequence[Record]) -> None:
    """Writes a line of `decisions.jsonl` for each, with when it was made."""
    when = self.times() | {
      'num_updates': self.num_updates,
      'env_steps': self._windows[0].env_steps,
    }
    for decision in decisions:
      self._num_decisions += 1
      self._writer.write([self._decisions], when | decision)

  def flush(self) -> None:
    """Waits until all records are written."""
    self._writer.flush()

  def progress(self) -> Record:
    """What `open` needs to go on from here, as JSON; all is written by then."""
    self.flush()
    return self.times() | {
      'num_records': self._num_records,
      'best': self.best,
      'num_decisions': self._num_decisions,
      'windows': [window.progress() for window in self._windows],
    }

  def close(self) -> None:
    """Writes what waits and closes the files.

    Raises:
      WriteError: where a sink raised.
    """
    self._clock.close()
    try:
      self._writer.close(
        [sink for sinks in self.sinks for sink in sinks]
        + ([self._decisions] if self._decisions else [])
      )
    finally:
      self.terminal.close()  # It may have had no record.

  def write_summaries(self, more: Record) -> None:
    """Writes each directory's summary: the last values, and `more`."""
    if not self.sinks:  # Nothing was opened: what is there stays.
      return
    for path, last in zip(self._paths, self.last):
      workdir.write_json(os.path.join(path, 'summary.json'), last | more)
