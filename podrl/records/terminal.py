"""What a run shows: a live panel or plain lines, and a summary."""

import os
import sys
import time

from rich import progress
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from podrl.drivers.limits import count, describe
from podrl.records.workdir import Record


def compact(value: float) -> str:
  """Formats a number in few characters: 1234567 is 1.23M."""
  for unit, size in (('G', 1e9), ('M', 1e6), ('k', 1e3)):
    if abs(value) >= size:
      return f'{value / size:.3g}{unit}'
  return f'{value:.4g}'


_STAGES = """\
{actors}: environment {time_environment:.0%} inference {time_inference:.0%} \
waiting {time_actor_waiting:.0%}
learner: update {time_update:.0%} waiting {time_learner_waiting:.0%} \
hand off {time_hand_off:.0%}
lag {policy_lag:.2g} (max {policy_lag_max:.0f})  queue {queue_depth:.2g}  \
predictions {predictions}/s  updates {updates}/s"""
_LIMIT = """
limit: {limit}   cores {busy_cores:.0%}  actor devices \
{busy_actor_devices:.0%}  learner devices {busy_learner_devices:.0%}"""


def describe_stages(record: Record) -> str:
  """Lines on the stages of actors and learner; empty if the record has none."""
  if 'time_update' not in record:
    return ''
  template = _STAGES + (_LIMIT if 'limit' in record else '')
  return template.format(
    actors=count(round(record['num_actors']), 'actor'),
    predictions=compact(record['predictions_per_second']),
    updates=compact(record['updates_per_second']),
    **record,
  )


class Terminal:
  """A live panel in a terminal, plain lines elsewhere, or nothing if silent."""

  def __init__(self, name: str, num_updates: int, is_silent: bool = False):
    self._console = Console(highlight=False, markup=False, quiet=is_silent)
    self._console.on_broken_pipe = self._go_silent  # type: ignore[method-assign]
    self._name = name
    self._num_updates = num_updates
    self._start = time.perf_counter(), 0.0  # (time, share done then)
    self._live = None
    if self._console.is_terminal and not is_silent:
      self._bar = progress.Progress(
        progress.TextColumn('{task.description}'),
        progress.BarColumn(bar_width=None),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(compact=True),
        console=self._console,
        expand=True,
      )
      self._task = self._bar.add_task(name, total=num_updates)
      self._live = Live(self._bar, console=self._console)
      self._live.start()

  def _go_silent(self) -> None:
    """Training continues when nobody reads the output, as after `| head`."""
    self._console.quiet = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

  def resume(self, num_updates: int) -> None:
    """Shows that `num_updates` updates are already done."""
    self._start = time.perf_counter(), num_updates / self._num_updates
    if self._live:
      self._bar.update(self._task, completed=num_updates)

  def say(self, status: str) -> None:
    """Shows what the run is doing."""
    if self._live:
      self._live.update(Group(self._bar, Text(status)))
    else:
      self._console.print(f'{self._name}: {status}', soft_wrap=True)

  def write(self, record: Record) -> None:
    """Shows a record."""
    status = f'{compact(record["steps_per_second"])} steps/s'
    if record['frames'] != record['env_steps']:
      status += f' ({compact(record["frames_per_second"])} frames/s)'
    if 'episode_return' in record:
      status += f'  return {compact(record["episode_return"])}'
    if 'eval_return' in record:
      status += f'  evaluated {compact(record["eval_return"])}'
    details = describe_stages(record).splitlines()
    if self._live:
      self._bar.update(self._task, completed=record['num_updates'])
      details += filter(None, [record.get('limit_sentence')])
      lines = [Text(status), *(Text(x, style='dim') for x in details)]
      self._live.update(Group(self._bar, *lines))
      return
    share = record['num_updates'] / self._num_updates
    start, first_share = self._start
    seconds = time.perf_counter() - start
    seconds_left = seconds * (1 - share) / max(share - first_share, 1e-9)
    self.say(
      f'{share:4.0%}  {compact(record["env_steps"])} steps  '
      f'{seconds_left:.0f} s left  ' + '\n  '.join([status, *details])
    )

  def close(self) -> None:
    """Ends the live panel."""
    if self._live:
      self._live.stop()
      self._live = None

  def print_summary(self, summary: Record, workdir: str) -> None:
    """Prints the last values of a run as a table."""
    title = Text(f'{self._name}: {summary["exit"]}')
    table = Table(title=title, show_header=False, title_justify='left')
    table.add_column()
    table.add_column(overflow='fold')
    if 'eval_return' in summary:
      table.add_row(
        'evaluated return',
        f'{summary["eval_return"]:.2f} +- {summary["eval_return_std"]:.2f} '
        f'over {summary["eval_episodes"]} episodes',
      )
    if 'env_steps' in summary:
      rate = f'{summary["steps_per_second"]:,.0f} (last window)'
      table.add_row('environment steps', f'{summary["env_steps"]:,}')
      table.add_row('steps per second', rate)
    table.add_row(
      'wall time',
      f'{summary["wall_seconds"]:.1f} s, of which '
      f'{summary["compile_seconds"]:.1f} s compiling',
    )
    table.add_row('devices', f'{summary["devices"]} {summary["platform"]}')
    for name, value in describe(summary):
      table.add_row(name, Text(value))
    table.add_row('run', Text(workdir))
    self._console.print(table)
