"""Records a run: makes a record of each window of updates, and writes it."""

from collections.abc import Callable, Sequence
import copy
import dataclasses
import functools
import math
import operator
import os
import sys
import time
from typing import Any

import jax
import numpy as np

from podrl.fields import Field, Fields, Range
from podrl.records import merging, workdir
from podrl.records.sinks import (
  EPISODES,
  Lines,
  Sink,
  TensorBoard,
  Wandb,
  Writer,
  open_lines,
)
from podrl.records.terminal import Terminal
from podrl.records.workdir import Record
from podrl.types import Episodes, InfoSums, Report

FIELDS = {
  'log.every_updates': Field(10, 'Updates per record.', Range(1, 2**31 - 1)),
  'log.tensorboard': Field(True, 'Writes TensorBoard events.'),
  'log.wandb': Field(False, 'Sends records to Weights & Biases.'),
  'log.episodes': Field(False, 'Writes each finished episode to episodes.csv.'),
  'log.videos': Field(
    False, 'Writes a video of an episode after each evaluation.'
  ),
  'log.profile': Field(
    0, "Number of updates that JAX's profiler traces.", Range(0, 10**6)
  ),
}

_INFO = 'env/'  # Prefix of the metrics from `TimeStep.info`.
_ENERGY = 'joules_per_second', 'frames_per_joule'


def join_seeds(path: str, directories: Sequence[str]) -> Record:
  """Averages the records of a run's finished seeds, and writes the means.

  It returns the summary. In the summary, times are sums over all seeds, and
  values that are not numbers come from the last seed.
  """
  runs = [
    {record['num_updates']: record for record in workdir.read_records(x)}
    for x in directories
  ]
  shared = [x for x in runs[0] if all(x in records for records in runs)]
  names = [os.path.basename(x) for x in directories]
  merge = functools.partial(merging.merge_seeds, names=names, in_turn=True)
  lines = [merge([x[i] for x in runs]) for i in shared]
  summaries = [workdir.read_summary(x) for x in directories]
  others = {
    k: x for k, x in summaries[-1].items() if not isinstance(x, int | float)
  }
  summary = others | merge(summaries)
  for name in 'wall_seconds', 'compile_seconds':
    summary[name] = sum(x[name] for x in summaries)
  text = ''.join(workdir.to_json(line) + '\n' for line in lines)
  with workdir.write_errors('the means of the seeds', OSError):
    workdir.write_text(os.path.join(path, 'metrics.jsonl'), text)
    workdir.write_json(os.path.join(path, 'summary.json'), summary)
  return summary


def local_part(report: Report) -> Record:
  """Returns the part of a report that other processes do not know, as JSON."""
  return {
    'episodes': _total(report.episodes),
    'num_predictions': report.num_predictions,
    'stages': {**report.stages},
    'own': {k: x.tolist() for k, x in report.own.items()},
    'info': {name: _total(sums) for name, sums in report.info.items()},
    'finished': [*report.finished],
  }


def _total(sums: Sequence[Any]) -> list[float]:
  """Adds up each field of an `Episodes` or an `InfoSums`."""
  return [np.sum(x, dtype=np.float64).item() for x in sums]


def merge_processes(report: Report, others: Sequence[Record]) -> Report:
  """Merges a report with the `local_part` of the other processes' reports."""
  if not others or not report.num_updates:
    return report
  episodes, info = jax.tree.map(
    lambda x: np.array(x, np.float64), ([*report.episodes], {**report.info})
  )
  for other in others:
    for counts, total in zip(episodes, other['episodes']):
      counts.flat[0] += total  # The row does not matter: windows sum all rows.
    for name, sums in other['info'].items():
      rows = info.setdefault(name, InfoSums(*np.zeros((2, report.num_updates))))
      for counts, total in zip(rows, sums):
        counts.flat[0] += total
  parts = [local_part(report), *others]
  merged: dict[str, Any] = {'stages': {}, 'own': {}}
  for field, metrics in merged.items():
    for name in parts[0][field]:
      if all(name in x[field] for x in parts):
        values = [x[field][name] for x in parts]
        metrics[name] = merging.REDUCTIONS[name].processes(values, axis=0)
  merged['num_predictions'] = sum(x['num_predictions'] for x in parts)
  finished = [tuple(row) for x in parts for row in x['finished']]
  merged['finished'] = sorted(finished, key=operator.itemgetter(0))
  return report._replace(episodes=Episodes(*episodes), info=info, **merged)


def describe_energy(used: Sequence[float], frame_skip: int) -> Record:
  """Returns the mean power and the frames per joule.

  Args:
    used: the joules, the environment steps and the seconds of the calls whose
      energy is known, and how often the counter moved during them.
    frame_skip: frames of an environment step.

  The result is empty if the counter moved less than twice. Otherwise, the
  duration of a step of the counter would decide the result.
  """
  joules, num_steps, seconds, num_moves = used
  if num_moves < 2 or not joules:
    return {}
  return {
    'joules_per_second': joules / seconds,
    'frames_per_joule': num_steps * frame_skip / joules,
  }


@dataclasses.dataclass
class Window:
  """Adds up the reports of one agent, and makes a record of each window."""

  frame_skip: int
  sgd_steps_per_update: int
  # These four counts, and `run_energy`, are of the whole run so far.
  env_steps: int = 0
  num_reset_steps: int = 0
  num_updates: int = 0
  num_sgd_steps: int = 0
  # What `describe_energy` needs.
  run_energy: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 4)
  # All other numbers are sums since the last record, as types of JSON.
  rows: list[dict[str, list[float]]] = dataclasses.field(default_factory=list)
  episodes: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 3)
  # For each name of `TimeStep.info`, the sums of `InfoSums`.
  info: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  stages: dict[str, float] = dataclasses.field(default_factory=dict)
  own_energy: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 4)
  num_predictions: int = 0
  num_updates_since_record: int = 0
  seconds: float = 0.0

  def episodes_of(self, report: Report) -> list[tuple[int, float, int]]:
    """Returns `(env_steps, return, length)` of the finished episodes.

    Call it before `add`. `env_steps` is the number of steps of the run at the
    end of the update in which the episode ended.
    """
    # The rows of `report.episodes` may come from several processes.
    number, updates = report.num_updates, [x for x, *_ in report.finished]
    num_resets = np.cumsum(np.bincount(updates, minlength=number))
    steps = np.arange(1, number + 1) * report.num_predictions // max(number, 1)
    env_steps = (self.env_steps + steps - num_resets).tolist()
    return [(env_steps[i], *row) for i, *row in report.finished]

  def add(self, report: Report) -> None:
    """Adds the updates of a driver's report."""
    episodes = [np.array(x, np.float64).sum() for x in report.episodes]
    self.episodes = [x + y for x, y in zip(self.episodes, episodes)]
    for name, sums in report.info.items():
      before = self.info.get(name, [0.0, 0.0])
      self.info[name] = [x + y for x, y in zip(before, _total(sums))]
    if report.num_updates:
      metrics = dict(report.metrics)
      # Before its memory is ready, a learner takes no steps and has no loss.
      always = np.ones(report.num_updates)
      is_learning = metrics.pop('is_learning', always) > 0.0
      rows = {k: x[is_learning] for k, x in metrics.items()} | report.own
      self.rows.append({name: x.tolist() for name, x in rows.items()})
      num_learning = int(np.sum(is_learning))
      self.num_sgd_steps += num_learning * self.sgd_steps_per_update
    num_reset_steps = int(np.sum(report.episodes.num_episodes))
    num_steps = report.num_predictions - num_reset_steps
    stages = dict(report.stages)
    if merging.JOULES in stages:
      joules, moves = stages.pop(merging.JOULES), stages.pop(merging.MOVES)
      used = joules, num_steps, report.seconds, moves
      self.own_energy = [x + y for x, y in zip(self.own_energy, used)]
      self.run_energy = [x + y for x, y in zip(self.run_energy, used)]
    for name, seconds in stages.items():
      self.stages[name] = self.stages.get(name, 0.0) + seconds
    self.num_predictions += report.num_predictions
    self.num_updates_since_record += report.num_updates
    self.seconds += report.seconds
    self.num_updates += report.num_updates
    self.num_reset_steps += num_reset_steps
    self.env_steps += num_steps

  def progress(self) -> Record:
    """Returns the window's state as JSON; `resume` restores it bit for bit."""
    progress = dataclasses.asdict(self)
    del progress['frame_skip'], progress['sgd_steps_per_update']
    return progress

  def resume(self, progress: Record) -> None:
    """Restores what `progress` returned."""
    vars(self).update(progress)

  def record(self) -> Record:
    """Makes the record of the window and begins the next one."""
    num_episodes, return_sum, length_sum = self.episodes
    steps = self.num_predictions - num_episodes
    rate = 1.0 / max(self.seconds, 1e-9)
    record = {
      'env_steps': self.env_steps,
      'num_reset_steps': self.num_reset_steps,
      'frames': self.env_steps * self.frame_skip,
      'num_updates': self.num_updates,
      'num_sgd_steps': self.num_sgd_steps,
      'steps_per_second': steps * rate,
      'frames_per_second': steps * self.frame_skip * rate,
      'updates_per_second': self.num_updates_since_record * rate,
      'predictions_per_second': self.num_predictions * rate,
    }
    if num_episodes:
      record['episode_return'] = return_sum / num_episodes
      record['episode_length'] = length_sum / num_episodes
    for name, (mean_sum, number) in self.info.items():
      if number:
        record[_INFO + name] = mean_sum / number
    for name in self.rows[0] if self.rows else ():
      values = np.concatenate([row[name] for row in self.rows])
      if values.size:
        record[name] = float(merging.REDUCTIONS[name].updates(values))
    record |= {k: seconds * rate for k, seconds in self.stages.items()}
    record |= describe_energy(self.own_energy, self.frame_skip)
    counts = self.env_steps, self.num_reset_steps, self.num_updates
    totals = *counts, self.num_sgd_steps, self.run_energy
    self.resume(Window(0, 0, *totals).progress())
    return record


@dataclasses.dataclass
class Recorder:
  """Records a run of one or several agents, each with its own seed.

  A run of several agents has a directory for each agent, and the run's main
  directory has the means of all agents. Only process 0 writes.

  Attributes:
    sinks: a list of sinks for each directory.
    last: last value of each metric, for each directory.
    best: best evaluated return, and the number of updates at that time.
  """

  config: Fields
  path: str
  frame_skip: int
  total_updates: int
  steps_per_update: int  # Reset steps included.
  sgd_steps_per_update: int  # Optimiser steps of an update that learns.
  start_seconds: float  # `time.perf_counter()` at the start of the process.
  describe: Callable[[Record], Record]  # Makes more fields for a run's record.
  is_writer: bool = True  # Whether this process writes.

  def __post_init__(self):
    config, path = self.config, self.path
    self._agents = directories = [*workdir.agents(path, config)]
    self._merge = functools.partial(
      merging.merge_seeds,
      names=[os.path.basename(x) for x in directories],
      are_alike=workdir.are_alike(config),
    )
    sizes = self.frame_skip, self.sgd_steps_per_update
    self._windows = [Window(*sizes) for _ in directories]
    paths = list(dict.fromkeys([path, *directories]))
    self._paths = paths if self.is_writer else []
    self.sinks: list[list[Sink]] = []
    self.last: list[Record] = [{} for _ in self._paths]
    self.best: tuple[float, int] | None = None
    # For each agent, the number and the sum of the returns since the population
    # last evolved.
    self._scores = [[0.0, 0.0] for _ in directories]
    self._compile_seconds = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    self._files: list[Lines] = []  # `metrics.jsonl` of each directory.
    self._decisions: list[Lines] = []  # `decisions.jsonl`, if it is used.
    self._episodes: list[Lines] = []  # `episodes.csv` of each agent.
    self.terminal = Terminal(
      config, self.total_updates, self.steps_per_update, not self.is_writer
    )
    self._writer = Writer()

  def _on_duration(self, event: str, duration_secs: float, **_) -> None:
    # This event includes the time to read a program from XLA's cache.
    if event == '/jax/core/compile/backend_compile_duration':
      self._compile_seconds += duration_secs

  @property
  def num_updates(self) -> int:
    """Updates of the whole run so far."""
    return self._windows[0].num_updates

  @property
  def num_updates_since_record(self) -> int:
    """Number of updates since the last record."""
    return self._windows[0].num_updates_since_record

  def open(self, progress: Record) -> None:
    """Opens the files; `progress` is empty for a new run."""
    if progress:
      self.last = progress['last'] if self._paths else []
      self.start_seconds -= progress['wall_seconds']
      self._compile_seconds += progress['compile_seconds']
      self.best = progress['best'] and tuple(progress['best'])
      self._scores = progress['scores']
      for window, window_progress in zip(self._windows, progress['windows']):
        window.resume(window_progress)
    num_records = progress.get('num_records', [0] * len(self._paths))
    with workdir.write_errors('the records', OSError):
      for path, last, number in zip(self._paths, self.last, num_records):
        file = os.path.join(path, 'metrics.jsonl')
        lines = open_lines(file, number, 'records', is_new=not progress)
        self._files.append(lines)
        own: list[Sink] = [lines]
        self.sinks.append(own)  # From now on, `close` closes them.
        if self.config['log.tensorboard'] or self.config['log.wandb']:
          config = workdir.read_config(path)
        if self.config['log.tensorboard']:
          purge_step = last.get('env_steps', -1) + 1
          own.append(TensorBoard(path, config, purge_step))
        if self.config['log.wandb']:
          with workdir.write_errors('the run at Weights & Biases'):
            own.append(Wandb(path, config))
      file = os.path.join(self.path, 'decisions.jsonl')
      decides = self.config.get('sebulba.autotune', False)
      decides |= 'population.every_env_steps' in self.config
      if self._paths and (decides or os.path.exists(file)):
        # This deletes the lines that the run will repeat.
        number = progress.get('num_decisions', 0)
        lines = open_lines(file, number, 'decisions')
        self._decisions.append(lines)
      agents = self._agents if self._paths else ()
      files = [os.path.join(path, 'episodes.csv') for path in agents]
      # It is absent or empty if the run kept no episodes before.
      numbers = progress.get('num_episode_lines') or [0] * len(files)
      if self.config['log.episodes'] or any(map(os.path.exists, files)):
        for file, number in zip(files, numbers):
          lines = open_lines(
            file, number, 'lines', EPISODES, is_new=not progress
          )
          self._episodes.append(lines)
        if not self.config['log.episodes']:
          print(
            f'warning: {files[0]} gets no further episodes, because '
            '--config.log.episodes=True is not set now',
            file=sys.stderr,
          )
    if self._paths:
      self.sinks[0].append(self.terminal)

  def add(self, reports: Sequence[Report]) -> None:
    """Adds a driver's reports, one per agent; writes the decisions in them."""
    agents = zip(self._windows, reports, self._scores)
    for i, (window, report, score) in enumerate(agents):
      if report.finished and self._episodes:
        rows = window.episodes_of(report)
        self._writer.write([self._episodes[i]], rows)
      window.add(report)
      score[0] += np.sum(report.episodes.num_episodes).item()
      score[1] += np.sum(report.episodes.return_sum, dtype=np.float64).item()
    for decision in reports[0].decisions:
      self.decide(decision)

  def decide(self, decision: Record) -> None:
    """Writes a decision to `decisions.jsonl`."""
    now = self.times() | {'num_updates': self.num_updates}
    now['env_steps'] = self._windows[0].env_steps
    if self._paths:
      self._writer.write(self._decisions, now | decision)

  def take_scores(self, is_evaluated: bool) -> list[float]:
    """Returns each agent's mean return since the last scores.

    If an agent has ended no episode since then, there are no scores yet, and
    the list is empty.

    Args:
      is_evaluated: whether to return the means of the last evaluated returns
        instead, against all opponents. Returns in training say nothing about
        agents that play against themselves.
    """
    if is_evaluated:
      others = [k for k in self.last[0] if k.startswith('eval_return_vs_')]
      names = ['eval_return', *others]
      return [np.mean([x[k] for k in names]).item() for x in self.last[1:]]
    if not all(n for n, _ in self._scores):
      return []
    scores = [x / n for n, x in self._scores]
    self._scores = [[0.0, 0.0] for _ in scores]
    return scores

  def times(self) -> Record:
    """Returns seconds of wall time and of compilation, summed over resumes."""
    return {
      'wall_seconds': time.perf_counter() - self.start_seconds,
      'compile_seconds': self._compile_seconds,
    }

  def _make(
    self, windows: Sequence[Window], outcomes: Sequence[Record]
  ) -> list[Record]:
    """Makes the records of all directories, and begins new windows."""
    records = [window.record() for window in windows]
    for record, outcome in zip(records, outcomes):
      record |= outcome
    if len(records) > 1:
      records.insert(0, self._merge(records))
    records[0] |= self.describe(records[0])
    return records

  def preview(self, outcomes: Sequence[Record] = ()) -> Record:
    """Returns the run's record that `write` would write now."""
    records = self._make(copy.deepcopy(self._windows), outcomes)
    return records[0] | self.times()

  def write(
    self, outcomes: Sequence[Record] = (), scalars: Record = {}
  ) -> None:
    """Writes each window's record.

    Args:
      outcomes: the evaluations of the agents.
      scalars: further numbers for the run's record.
    """
    records = self._make(self._windows, outcomes)
    records[0] |= scalars
    times = self.times()
    for record, sinks, last in zip(records, self.sinks, self.last):
      last.update(record | times)
      self._writer.write(sinks, record | times)
    score: Any = records[0].get('eval_return')
    is_score = score is not None and math.isfinite(score)
    if is_score and (self.best is None or score > self.best[0]):
      self.best = score, self.num_updates

  def show(self, path: str) -> None:
    """Shows a GIF in TensorBoard and at Weights & Biases."""
    sinks = [x for x in self.sinks[0] if isinstance(x, TensorBoard | Wandb)]
    self._writer.show(sinks, path, self.last[0]['env_steps'])

  def progress(self) -> Record:
    """Writes all records; returns what `open` needs to resume, as JSON."""
    self._writer.flush(self._files + self._decisions + self._episodes)
    return self.times() | {
      'num_records': [file.num_lines for file in self._files],
      'last': self.last,
      'best': self.best,
      'scores': self._scores,
      'num_episode_lines': [file.num_lines for file in self._episodes],
      'num_decisions': sum(sink.num_lines for sink in self._decisions),
      'windows': [window.progress() for window in self._windows],
    }

  def close(self) -> None:
    """Writes the queued records and closes the files."""
    jax.monitoring.unregister_event_duration_listener(self._on_duration)
    sinks = [sink for sinks in self.sinks for sink in sinks]
    try:
      self._writer.close([*sinks, *self._decisions, *self._episodes])
    finally:
      self.terminal.close()  # `sinks` contains it only after `open`.

  def summaries(self, outcome: Record) -> list[Record]:
    """Returns the summary for each directory, the run's main one first.

    It has the last value of each metric, the energy of the whole run, and
    `outcome`.
    """
    used = [
      describe_energy(window.run_energy, self.frame_skip)
      for window in self._windows
    ]
    if len(used) > 1:
      used.insert(0, merging.merge_seeds(used))
    summaries = []
    for last, own in zip(self.last, used):
      kept = {k: x for k, x in last.items() if k not in _ENERGY}
      summaries.append(kept | own | outcome)
    return summaries

  def write_summaries(self, summaries: Sequence[Record]) -> None:
    """Writes what `summaries` returned to each `summary.json`."""
    if self.sinks:  # Before `open`, do not replace an earlier summary.
      for path, summary in zip(self._paths, summaries):
        workdir.write_json(os.path.join(path, 'summary.json'), summary)
