"""Shows a run: a live panel or plain lines, and a summary at the end."""

from collections.abc import Callable, Sequence
import contextlib
import functools
import os
import shlex
import shutil
import sys
import time
from typing import Any

from rich import progress
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from podrl.fields import Fields
from podrl.messages import count, printable, two_decimals
from podrl.records import workdir as files
from podrl.records.workdir import Record, num_agents, short


def podrl_command() -> str:
  """Returns how to call podrl in this shell."""
  # The shell finds `podrl` only if its virtual environment is active.
  # `python -m` would import modules of the current directory first.
  if shutil.which('podrl'):
    return 'podrl'
  script = shutil.which('podrl', path=os.path.dirname(sys.executable))
  python = shlex.quote(sys.executable)
  return shlex.quote(script) if script else f'{python} -m podrl'


def compact(value: float) -> str:
  """Formats a number in few characters: 1234567 is 1.23M."""
  least = 9.995e8, 9.995e5, 1e3  # From 999,500 on, `.3g` would give 1e+03k.
  for unit, size, smallest in zip('GMk', (1e9, 1e6, 1e3), least):
    if abs(value) >= smallest:
      return f'{value / size:.3g}{unit}'
  return f'{value:.4g}'


_STAGES = """\
{actors}: environment {time_environment:.0%} inference {time_inference:.0%} \
waiting {time_actor_waiting:.0%}
learner: update {time_update:.0%} waiting {time_learner_waiting:.0%} \
hand off {time_hand_off:.0%}
policy lag {policy_lag:.2g} (max {policy_lag_max:.0f})  \
queue {queue_depth:.2g}  predictions {predictions}/s  updates {updates}/s"""
_LIMIT = """
limit: {limit}; busy: cores {busy_cores:.0%}, actor/learner devices \
{busy_actor_devices:.0%}/{busy_learner_devices:.0%}"""


def describe_stages(record: Record) -> str:
  """Describes the stages of actors and learner; '' for Anakin's records."""
  if 'time_update' not in record:
    return ''
  template = _STAGES + (_LIMIT if 'limit' in record else '')
  return template.format(
    actors=count(round(record['num_actors']), 'actor'),
    predictions=compact(record['predictions_per_second']),
    updates=compact(record['updates_per_second']),
    **record,
  )


def describe_spread(record: Record) -> str:
  """Describes how the agents of a record differ; '' for a single agent."""
  found = []
  if 'eval_return_low' in record:
    ends = record['eval_return_low'], record['eval_return_high']
    low, high = (two_decimals(x, *ends) for x in ends)
    found.append(f'95 %: {low} to {high}')
  if 'eval_return_worst' in record:
    worst, name = record['eval_return_worst'], record['eval_return_worst_agent']
    found.append(f'worst: {two_decimals(worst)}, {name}')
  return '; '.join(found)


def print_text(text: str) -> None:
  """Prints a text; exits quietly if its reader has ended, as `head` does."""
  Console(highlight=False, markup=False).print(text, soft_wrap=True)


def _goes_on(method: Callable[..., None]) -> Callable[..., None]:
  """Makes a method of `Terminal` go on if the terminal no longer exists."""

  @functools.wraps(method)
  def call(self: 'Terminal', *args: Any, **kwargs: Any) -> None:
    try:
      method(self, *args, **kwargs)
    except OSError:
      self._go_silent()

  return call


class Terminal:
  """Shows a live panel in a terminal, plain lines elsewhere, or nothing."""

  def __init__(
    self,
    config: Fields,
    num_updates: int,
    steps_per_update: int,
    is_silent: bool = False,
  ):
    self._console = Console(highlight=False, markup=False, quiet=is_silent)
    self._console.on_broken_pipe = self._go_silent  # type: ignore[method-assign]
    self._config = config
    name = printable(f'{config["env.name"]}, {config["agent.name"]}')
    self._name = name
    self._num_updates = num_updates
    self._steps_per_update = steps_per_update  # Reset steps included.
    self._num_agents = num_agents(config)
    self._live: Live | None = None
    self._start = 0.0, 0.0  # (time, share of the run that was done then)
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

  def _go_silent(self) -> None:
    """Stops all output after its reader has ended, for example `| head`."""
    self._console.quiet = True
    with contextlib.suppress(OSError, AttributeError):  # It has no descriptor.
      null = os.open(os.devnull, os.O_WRONLY)
      os.dup2(null, sys.stdout.fileno())
      try:
        os.write(sys.stderr.fileno(), b'')
      except OSError:  # stderr has lost the same terminal.
        os.dup2(null, sys.stderr.fileno())

  @_goes_on
  def begin(self) -> None:
    """Shows how many updates and steps are planned, and that podrl compiles."""
    if self._live:
      self._live.start()
    steps, length = self._steps_per_update, self._config['unroll_length']
    num_envs = self._config['env.num_envs']
    text = f'{count(self._num_updates, "update")} of {steps:,} steps'
    if steps == num_envs * length:
      text += f' ({count(num_envs, "environment")} x {length})'
    text += f' = {self._num_updates * steps:,} steps, reset steps included'
    if self._num_agents > 1:
      text += f', for each of {self._num_agents} agents'
    is_plain = not self._live
    self._console.print(f'{self._name}: {text}', soft_wrap=is_plain)
    self.say('compiling')

  @_goes_on
  def start(self, num_updates: int) -> None:
    """Shows that training starts after `num_updates` earlier updates."""
    self._start = time.perf_counter(), num_updates / self._num_updates
    if self._live:
      self._bar.update(self._task, completed=num_updates)
    self.say('training')

  @_goes_on
  def say(self, status: str) -> None:
    """Shows what the run is doing."""
    if self._live:
      self._live.update(Group(self._bar, Text(status)))
    else:
      self._console.print(f'{self._name}: {status}', soft_wrap=True)

  @_goes_on
  def write(self, record: Record) -> None:
    """Shows a record."""
    status = f'{compact(record["steps_per_second"])} steps/s'
    if record['frames'] != record['env_steps']:
      status += f' ({compact(record["frames_per_second"])} frames/s)'
    for key, name in ('episode_return', 'return'), ('eval_return', 'evaluated'):
      if key in record:
        status += f'  {name} {two_decimals(record[key])}'
    if 'eval_return' in record and (spread := describe_spread(record)):
      status += f' ({spread})'
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

  @_goes_on
  def close(self) -> None:
    """Ends the live panel."""
    if live := self._live:
      self._live = None
      live.stop()

  @_goes_on
  def print_summary(
    self,
    summary: Record,
    workdir: str,
    resume_command: str = '',
    *,
    rows: Sequence[tuple[str, str]] = (),
    is_local: bool = False,
  ) -> None:
    """Prints the last values of a run as a table, and useful next commands.

    Args:
      summary: the contents of `summary.json`.
      resume_command: printed if a signal ended the run.
      rows: names and values for further rows of the table.
      is_local: whether only the running program has the agent or environment,
        so that other commands cannot use the run.
    """
    title = Text(f'{self._name}: {summary["exit"]}')
    table = Table(title=title, show_header=False, title_justify='left')
    table.add_column()
    table.add_column(overflow='fold')
    if 'eval_return' in summary:
      mean, deviation = summary['eval_return'], summary['eval_return_std']
      text = two_decimals(mean, deviation)
      episodes = count(summary['eval_episodes'], 'episode')
      if self._num_agents > 1:
        kind = 'members' if 'members' in self._config else 'seeds'
        if spread := describe_spread(summary):
          text += f' ({spread})'
        text += f', mean of {self._num_agents} {kind} with {episodes} each'
      else:
        text += f' +- {two_decimals(deviation, mean)} '
        text += f'(standard deviation, {episodes})'
      table.add_row('evaluated return', text)
    if 'num_reset_steps' in summary:
      rate = f'{summary["steps_per_second"]:,.0f} (last record)'
      table.add_row('environment steps', self._describe_steps(summary))
      table.add_row('steps per second', rate)
    table.add_row(
      'wall time',
      f'{summary["wall_seconds"]:.1f} s, including '
      f'{summary["compile_seconds"]:.1f} s of compiling',
    )
    devices = f'{summary["devices"]} x {summary["platform"].upper()}'
    table.add_row('devices', devices)
    for name, value in rows:
      table.add_row(name, Text(printable(value)))
    workdir = short(workdir)
    table.add_row('run', Text(printable(workdir)))
    self._console.print(table)
    podrl = podrl_command()
    if summary['exit'] == 'done':
      agent = next(iter(files.agents(workdir, self._config)))
      commands = [('plot', workdir), ('watch', agent), ('evaluate', workdir)]
      for command, path in commands[: 1 if is_local else 3]:
        line = f'{podrl} {command} {shlex.quote(path)}'
        self._console.print(printable(line), soft_wrap=True)
    elif is_local and resume_command.startswith(f'{podrl} '):
      pass  # Only the running program can resume the run.
    elif summary['exit'] in ('interrupted', 'preempted'):
      self._console.print(printable(resume_command), soft_wrap=True)

  def _describe_steps(self, summary: Record) -> str:
    """Describes the sum of a summary's environment steps and reset steps."""
    steps, num_reset_steps = summary['env_steps'], summary['num_reset_steps']
    done = summary['num_updates'] * self._steps_per_update
    budget = self._num_updates * self._steps_per_update
    total = steps + num_reset_steps
    text = f'{steps:,} + {count(num_reset_steps, "reset step")} = {total:,}'
    if total > done:
      number = count(round(summary['num_unrolls_dropped']), 'dropped unroll')
      text += f', including {total - done:,} in {number}'
    if done < budget:
      text += f' (planned: {budget:,})'
    return text
