"""What a person sees of a run: a live panel, or plain lines, and a summary."""

import os
import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
  BarColumn,
  Progress,
  TaskProgressColumn,
  TextColumn,
  TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from podrl.drivers.machine import describe
from podrl.records.workdir import Record


def compact(value: float) -> str:
  """A number in a few characters: 1234567 is 1.23M."""
  for unit, size in (('G', 1e9), ('M', 1e6), ('k', 1e3)):
    if abs(value) >= size:
      return f'{value / size:.3g}{unit}'
  return f'{value:.4g}'


def describe_stages(record: Record) -> str:
  """Where Sebulba's time went, in lines; empty for other records."""
  if 'time_update' not in record:
    return ''

  def share(name: str) -> str:
    label = name.removeprefix('actor_').removeprefix('learner_')
    return f'{label.replace("_", " ")} {record["time_" + name]:.0%}'

  limit = (
    ''
    if 'limit' not in record
    else (
      f'\nlimit: {record["limit"]}   '
      + '  '.join(
        f'{x.replace("_", " ")} {record["busy_" + x]:.0%}'
        for x in ('cores', 'actor_devices', 'learner_devices')
      )
    )
  )
  actors = ' '.join(map(share, ('environment', 'inference', 'actor_waiting')))
  learner = ' '.join(map(share, ('update', 'learner_waiting', 'hand_off')))
  number = round(record['num_actors'])
  return (
    f'{number} actor{"s" * (number > 1)}: {actors}\nlearner: {learner}\n'
    f'lag {record["policy_lag"]:.2g} (max {record["policy_lag_max"]:.0f})  '
    f'queue {record["queue_depth"]:.2g}  '
    f'predictions {compact(record["predictions_per_second"])}/s  '
    f'updates {compact(record["updates_per_second"])}/s{limit}'
  )


class Terminal:
  """A live panel in a terminal, plain lines elsewhere, or nothing."""

  def __init__(self, name: str, num_updates: int, is_silent: bool = False):
    self._console = Console(highlight=False, markup=False, quiet=is_silent)
    self._console.on_broken_pipe = self._go_silent
    self._num_updates = num_updates
    self._start = time.perf_counter(), 0.0  # And the share done by then.
    self._name = name
    self._live = None
    if self._console.is_terminal and not is_silent:
      self._progress = Progress(
        TextColumn('{task.description}'),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
        console=self._console,
        expand=True,
      )
      self._task = self._progress.add_task(name, total=num_updates)
      self._live = Live(self._progress, console=self._console)
      self._live.start()

  def resume(self, num_updates: int) -> None:
    """Begins with so many updates done."""
    self._start = time.perf_counter(), num_updates / self._num_updates
    if self._live:
      self._progress.update(self._task, completed=num_updates)

  def _go_silent(self) -> None:
    """Nobody reads any more, as after `| head`: training goes on."""
    self._console.quiet = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

  def say(self, status: str) -> None:
    """Shows what the run is doing."""
    if self._live:
      self._show(status, '')
    else:
      self._console.print(f'{self._name}: {status}', soft_wrap=True)

  def _show(self, status: str, stages: str) -> None:
    """Shows the bar, what is known below it, and Sebulba's times."""
    self._live.update(
      Group(
        self._progress,
        Text(status),
        *(Text(x, style='dim') for x in stages.split('\n') if x),
      )
    )

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
      self._progress.update(self._task, completed=done)
      self._show(status, f'{stages}\n{record.get("limit_sentence", "")}')
      return
    share = done / self._num_updates
    start, first_share = self._start
    left = (
      (time.perf_counter() - start)
      * (1 - share)
      / max(share - first_share, 1e-9)
    )
    self.say(
      f'{share:4.0%}  {compact(record["env_steps"])} steps  '
      f'{left:.0f} s left  {status}'
      + (''.join(f'\n  {x}' for x in stages.split('\n') if x))
    )

  def close(self) -> None:
    if self._live:
      self._live.stop()
      self._live = None

  def print_summary(self, summary: Record, workdir: str) -> None:
    """Prints the run's summary as a person reads it."""
    rows = []
    if 'eval_return' in summary:
      rows.append(
        (
          'evaluated return',
          (
            f'{summary["eval_return"]:.2f} +- {summary["eval_return_std"]:.2f} '
            f'over {summary["eval_episodes"]} episodes'
          ),
        )
      )
    if 'env_steps' in summary:
      rows += [
        ('environment steps', f'{summary["env_steps"]:,}'),
        (
          'steps per second',
          f'{summary["steps_per_second"]:,.0f} (last window)',
        ),
      ]
    rows += [
      (
        'wall time',
        (
          f'{summary["wall_seconds"]:.1f} s, of which '
          f'{summary["compile_seconds"]:.1f} s compiling'
        ),
      ),
      ('devices', f'{summary["devices"]} {summary["platform"]}'),
      *describe(summary),
      ('run', workdir),
    ]
    table = Table(
      title=Text(f'{self._name}: {summary["exit"]}'),
      show_header=False,
      title_justify='left',
    )
    table.add_column()
    table.add_column(overflow='fold')
    for name, value in rows:
      table.add_row(name, Text(value))
    self._console.print(table)
