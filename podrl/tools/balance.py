"""Finds the balance between CPU and accelerator for an experiment of Sebulba.

  podrl balance EXPERIMENT [--agent=ppo] [--variant=] [--out=DIR]
      [--max_lag=N] [--size_range=2] [--apply] [--config.FIELD=VALUE ...]
  podrl balance RUN [--out=DIR]

EXPERIMENT is a file such as experiments/sebulba_pong.py. For about a minute its
environments, inference and updates are timed on this machine, and short runs of
the driver; a model of the host then ranks plans: actor threads, environments of
each (envs), steps of an unroll (T), the threads that step an actor's
environments (thr.), the devices that act and that learn. It says what each
would give, what it gave where it was run, how busy that keeps cores, actor
devices and learner devices, the policy lag, and what limits it. The overrides
of the best are to paste, or --apply runs the experiment with them. At last it
says whether an accelerator is worth it.

RUN is the directory of a run: what limited it, and a picture of what autotune did.
"""

from collections.abc import Sequence
import os
import sys

from absl import flags
import numpy as np
from rich.console import Console

from podrl import tools
from podrl.drivers import limits, machine
from podrl.records import workdir
from podrl.records.workdir import Record
from podrl.run import build
from podrl.run.build import set_up_jax
from podrl.run.config import check, check_choice, is_sebulba
from podrl.run.loop import own_devices
from podrl.tools import balance_history as history
from podrl.tools import balance_picture as picture
from podrl.tools import balance_search as search
from podrl.tools import balance_worth as worth
from podrl.tools.balance_plan import configured, overrides, to_flags
from podrl.tools.scaling import CHIPS

_BEST = 5  # So many plans are told.
_MAX_RANGE = 64  # Of --size_range.


def _act(
  settings: Sequence[str], paths: list[str], values: flags.FlagValues
) -> None:
  """Reads, measures, searches, prints, draws, and perhaps runs."""
  path = tools.single_path(
    paths, 'experiment', 'balance experiments/sebulba_pong.py'
  )
  console = Console(highlight=False, markup=False)
  if os.path.isdir(path):
    named = [f'--{x}' for x in values if values[x].present and x != 'out']
    _tell_of_run(console, path, values.out or path, [*settings, *named])
    return
  check_choice('--chip', values.chip, tuple(CHIPS))
  config = tools.read_config(path, settings, values)
  if not is_sebulba(config):
    raise ValueError(
      f'{path} is of Anakin, whose environments are on the device: there '
      'is nothing to balance; try podrl scaling'
    )
  if not 1 <= values.size_range <= _MAX_RANGE:
    raise ValueError(
      f'--size_range={values.size_range:g} is not between 1 and {_MAX_RANGE}'
    )
  fixed = {} if values.max_lag is None else {'sebulba.max_lag': values.max_lag}
  if config.sebulba.autotune:  # A plan has its number of actors.
    fixed['sebulba.autotune'] = False
  config = configured(config, fixed)
  check(config)
  directory = values.out or '.'
  tools.make_directory(directory)
  set_up_jax(config)
  found = search.find_for(
    config, values.size_range, say=lambda line: console.print(line, style='dim')
  )
  frame_skip = build.make_host_spec(config).frame_skip
  console.print(picture.table(found, _BEST, frame_skip))
  lines = [
    to_flags(overrides(plan, found.base) | fixed)
    for plan in found.ranking[:_BEST]
  ]
  for i, line in enumerate(lines):
    console.print(f'{i + 1}  {line}', soft_wrap=True)
  rates = [found.rate(x) for x in (found.ranking[0], found.base)]
  console.print(
    f'plan 1: {rates[0] * frame_skip:,.0f} frames/s, '
    f'{rates[0] / rates[1]:.2f} times the configured one'
  )
  others = float(
    np.median([limits.others(x.record) for x in found.runs.values()])
  )
  if others > limits.TOLD:
    console.print(
      f'Other programs took {others:.0%} of the cores meanwhile: measured '
      'again on a quiet machine, plans may rank otherwise.'
    )
  run = build.make_run(config)
  record = found.runs[found.base].record
  for name in 'frames_per_second', 'frames_per_joule':
    if name in record:
      record = record | {name: record[name] * frame_skip}
  _tell(
    console,
    'as configured, ',
    record
    | machine.summarise(
      record, own_devices(run), run.system, config.price_per_hour
    ),
  )
  out = os.path.join(directory, 'balance.png')
  picture.draw(found, f'{config.env.name}, {config.agent.name}', out)
  console.print(f'drawn: {out}', soft_wrap=True)
  out = os.path.join(directory, 'balance.txt')
  with open(out, 'w', encoding='utf-8') as file:
    file.write(lines[0] + '\n')
  console.print(f'overrides of plan 1: {out}', soft_wrap=True)
  for line in worth.compare(config, found, values.chip, values.size_range):
    console.print(line)
  if values.apply:
    console.file.flush()
    # Afresh: this process has set up JAX, and holds what it measured.
    os.execv(
      sys.executable,
      [
        sys.executable,
        path,
        f'--agent={values.agent}',
        f'--variant={values.variant}',
        *settings,
        *lines[0].split(),
      ],
    )


def _tell(console: Console, prefix: str, summary: Record) -> None:
  """Prints what a summary says of the balance."""
  for name, text in machine.describe(summary):
    console.print(f'{prefix}{name}: {text}')


def _tell_of_run(
  console: Console, path: str, out: str, settings: Sequence[str]
) -> None:
  """What limited a run, and its decisions."""
  if settings:
    raise ValueError(f'{path} is a run, which {settings[0]} cannot change')
  config = workdir.read_config(path)
  if not is_sebulba(config):
    raise ValueError(f'{path} is a run of Anakin, which has nothing to balance')
  summary = os.path.join(path, 'summary.json')
  if os.path.exists(summary):
    _tell(console, '', workdir.read_json(summary))
  else:
    console.print(f'{path} is under way: what limits it is told at its end')
  if config.sebulba.autotune:
    tools.make_directory(out)
    picture_path = os.path.join(out, 'balance.png')
    history.draw(path, picture_path)
    console.print(f'drawn: {picture_path}', soft_wrap=True)


def run(argv: Sequence[str]) -> int:
  """The command; returns its exit code, as `tools.run_command`."""
  values = flags.FlagValues()
  flags.DEFINE_string(
    'out',
    None,
    'where balance.png and balance.txt go; the '
    'working directory, or that of RUN, by default.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'max_lag',
    None,
    'bound of the policy lag, in updates; the configured one by default.',
    0,
    flag_values=values,
  )
  flags.DEFINE_float(
    'size_range',
    2.0,
    'how many times smaller or larger than configured an '
    "unroll's length and an update's batch may be.",
    flag_values=values,
  )
  flags.DEFINE_string(
    'chip',
    'h100',
    'compared with where there is none: ' + ', '.join(CHIPS),
    flag_values=values,
  )
  flags.DEFINE_bool(
    'apply',
    False,
    'run the experiment with the best plan, in runs/NAME/TIME.',
    flag_values=values,
  )
  return tools.run_experiment_command(argv, __doc__, values, _act)
