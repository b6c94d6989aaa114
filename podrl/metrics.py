"""Records of a run: what is measured, and where it is written."""

import json
import math
import os
import sys
import time
from typing import Any, Protocol

import jax
import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn)
from rich.table import Table
from rich.text import Text

from podrl.types import Episodes, Report

Record = dict[str, Any]


class CompileClock:
  """Sums the seconds that XLA spends compiling or reading its cache."""

  def __init__(self):
    self.seconds = 0.
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, seconds: float, **_) -> None:
    if event == '/jax/core/compile/backend_compile_duration':
      self.seconds += seconds

  def close(self) -> None:
    """Stops listening."""
    jax.monitoring.unregister_event_duration_listener(self._listen)


class Window:
  """Counts a run's updates and sums them up, a record for each window."""

  def __init__(self, frame_skip: int, sgd_steps_per_update: int):
    self._frame_skip = frame_skip
    self._sgd_steps_per_update = sgd_steps_per_update
    self.env_steps = 0
    self.num_updates = 0
    self._clear()

  def _clear(self) -> None:
    self._rows: list[dict[str, np.ndarray]] = []
    self._episodes = np.zeros(len(Episodes._fields))
    self._stages: dict[str, float] = {}
    self._num_predictions = 0
    self._num_updates = 0
    self._seconds = 0.

  @property
  def num_updates_since_record(self) -> int:
    """Updates that no record tells of yet."""
    return self._num_updates

  def add(self, report: Report) -> None:
    """Adds what a driver reports."""
    # In float64 and row by row: the sums do not depend on how calls divide.
    episodes = Episodes(*(
        x.astype(np.float64).sum() for x in report.episodes))
    self._episodes += np.asarray(episodes)
    if report.num_updates:
      self._rows.append(report.metrics)
    for name, seconds in report.stages.items():
      self._stages[name] = self._stages.get(name, 0.) + seconds
    self._num_predictions += report.num_predictions
    self._num_updates += report.num_updates
    self._seconds += report.seconds
    self.num_updates += report.num_updates
    self.env_steps += report.num_predictions - int(episodes.num_joints)

  def record(self) -> Record:
    """The record of what was added since the last one."""
    episodes = Episodes(*self._episodes)
    steps = self._num_predictions - episodes.num_joints
    rate = 1. / max(self._seconds, 1e-9)
    record = {
        'env_steps': self.env_steps,
        'frames': self.env_steps * self._frame_skip,
        'num_updates': self.num_updates,
        'num_sgd_steps': self.num_updates * self._sgd_steps_per_update,
        'steps_per_second': steps * rate,
        'frames_per_second': steps * self._frame_skip * rate,
        'updates_per_second': self._num_updates * rate,
        'predictions_per_second': self._num_predictions * rate,
    }
    if episodes.num_episodes:
      record['episode_return'] = episodes.return_sum / episodes.num_episodes
      record['episode_length'] = episodes.length_sum / episodes.num_episodes
    for name in self._rows[0] if self._rows else ():
      values = np.concatenate([row[name] for row in self._rows])
      # Counts are running totals.
      is_max = name.endswith('_max') or name.startswith('num_')
      record[name] = float(
          values.max() if is_max else values.mean(dtype=np.float64))
    record |= {k: v * rate for k, v in self._stages.items()}
    self._clear()
    return record


def to_json(record: Record, indent: int | None = None) -> str:
  """Strict JSON: NaN and infinities, which it does not have, become null."""
  def plain(value: Any) -> Any:
    if isinstance(value, dict):
      return {k: plain(v) for k, v in value.items()}
    if isinstance(value, np.generic):
      value = value.item()
    return None if isinstance(value, float) and not math.isfinite(
        value) else value
  return json.dumps(plain(record), indent=indent, allow_nan=False)


class Sink(Protocol):
  """Where records go."""

  def write(self, record: Record) -> None:
    """Takes one record."""

  def close(self) -> None:
    """Flushes."""


class JsonLines:
  """`metrics.jsonl`: one object a line, complete after each record."""

  def __init__(self, workdir: str):
    self._file = open(
        os.path.join(workdir, 'metrics.jsonl'), 'a', encoding='utf-8')

  def write(self, record: Record) -> None:
    self._file.write(to_json(record) + '\n')
    self._file.flush()

  def close(self) -> None:
    self._file.close()


class TensorBoard:
  """TensorBoard events, by environment steps."""

  def __init__(self, workdir: str):
    from tensorboardX import SummaryWriter  # Only where it is wanted.
    self._writer = SummaryWriter(workdir)

  def write(self, record: Record) -> None:
    for name, value in record.items():
      self._writer.add_scalar(name, value, record['env_steps'])

  def close(self) -> None:
    self._writer.close()


def compact(value: float) -> str:
  """A number in a few characters: 1234567 is 1.23M."""
  for unit, size in (('G', 1e9), ('M', 1e6), ('k', 1e3)):
    if abs(value) >= size:
      return f'{value / size:.3g}{unit}'
  return f'{value:.4g}'


def describe_stages(record: Record) -> str:
  """Where Sebulba's time went, in one line; empty for other records."""
  if 'time_update' not in record:
    return ''

  def share(name: str) -> str:
    label = name.removeprefix('actor_').removeprefix('learner_')
    return f'{label.replace("_", " ")} {record["time_" + name]:.0%}'

  actors = ' '.join(map(share, ('environment', 'inference', 'actor_waiting')))
  learner = ' '.join(map(share, ('update', 'learner_waiting', 'hand_off')))
  return (f'actors: {actors}  learner: {learner}  '
          f'lag {record["policy_lag"]:.2g} (max {record["policy_lag_max"]:.0f})  '
          f'queue {record["queue_depth"]:.2g}  '
          f'predictions {compact(record["predictions_per_second"])}/s  '
          f'updates {compact(record["updates_per_second"])}/s')


class Terminal:
  """A live panel in a terminal, plain lines elsewhere."""

  def __init__(self, name: str, num_updates: int):
    self._console = Console(highlight=False, markup=False)
    self._console.on_broken_pipe = self._go_silent
    self._num_updates = num_updates
    self._start = time.perf_counter()
    self._name = name
    self._live = None
    if self._console.is_terminal:
      self._progress = Progress(
          TextColumn('{task.description}'), BarColumn(bar_width=None),
          TaskProgressColumn(), TimeRemainingColumn(compact=True),
          TextColumn('{task.fields[status]}'),
          console=self._console, expand=True)
      self._task = self._progress.add_task(
          name, total=num_updates, status='compiling')
      self._live = Live(self._progress, console=self._console)
      self._live.start()

  def _go_silent(self) -> None:
    """Nobody reads any more, as after `| head`: training goes on."""
    self._console.quiet = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

  def say(self, status: str) -> None:
    """Shows what the run is doing."""
    if self._live:
      self._progress.update(self._task, status=status)
    else:
      self._console.print(f'{self._name}: {status}', soft_wrap=True)

  def write(self, record: Record) -> None:
    done = record['num_updates']
    status = f'{compact(record["steps_per_second"])} steps/s'
    if record['frames'] != record['env_steps']:
      status += f' ({compact(record["frames_per_second"])} frames/s)'
    if 'episode_return' in record:
      status += f'  return {compact(record["episode_return"])}'
    if 'eval_return' in record:
      status += f'  evaluated {compact(record["eval_return"])}'
    stages = describe_stages(record)
    if self._live:
      self._progress.update(self._task, completed=done, status=status)
      if stages:
        self._live.update(Group(self._progress, Text(stages, style='dim')))
      return
    share = done / self._num_updates
    left = (time.perf_counter() - self._start) * (1 / max(share, 1e-9) - 1)
    self.say(f'{share:4.0%}  {compact(record["env_steps"])} steps  '
             f'{left:.0f} s left  {status}' + (stages and f'\n  {stages}'))

  def close(self) -> None:
    if self._live:
      self._live.stop()
      self._live = None

  def print_summary(self, summary: Record, workdir: str) -> None:
    """Prints the run's summary as a person reads it."""
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
    table = Table(title=Text(f'{self._name}: {summary["exit"]}'), show_header=False,
                  title_justify='left')
    table.add_column()
    table.add_column(overflow='fold')
    for name, value in rows:
      table.add_row(name, Text(value))
    self._console.print(table)
