"""Finds the fastest settings of a Sebulba experiment on this machine.

  podrl balance EXPERIMENT [--agent=ppo] [--variant=] [--out=DIR] [--apply]
      [--max_lag=N] [--size_range=2] [--config.FIELD=VALUE ...]
  podrl balance RUN [--out=DIR]

EXPERIMENT is a file such as experiments/sebulba_pong.py. Short runs measure at
most 12 plans. A plan sets the number of actors, the environments of each actor
(envs), the unroll length (T), the threads that step the environments of one
actor (thr.), and the devices that act and learn. Add the overrides of the best
plan to your command, or use --apply to run the experiment with this plan.

RUN is the directory of a run. The command prints what limited the run. If the
run used autotune, the command also draws what autotune did.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.drivers import culprits, limits
from podrl.drivers.energy import Meter
from podrl.drivers.stages import num_cores
from podrl.envs import SUITES
from podrl.fields import Fields, as_tuples
from podrl.messages import count, one_line, printable
from podrl.records import workdir
from podrl.records.recorder import Window
from podrl.records.terminal import compact
from podrl.records.workdir import Record
from podrl.run import build
from podrl.run.command_line import parse_command_line
from podrl.run.config import check, default_fields
from podrl.run.devices import make_layout
from podrl.tools import experiments

MAX_PLANS, FINAL_ROUNDS = 12, 3
RUNG_SECONDS = (1.0, 2.0, 2.0)  # Length of a run in each round of `search`.
_NUM_SHOWN, _MAX_RANGE = 5, 64
_PAYS = 1.2  # An accelerator pays off if it is this many times faster.
_BUSY = dict(cores='cores', act='actor_devices', learn='learner_devices')
_COLORS = ('#1f5fa8', '#3d7a3a', '#c44e00')
_FIELDS = (  # The configuration's fields that a plan sets, in the plan's order.
  'unroll_length env.num_envs sebulba.threads_per_actor_device '
  'sebulba.env_threads sebulba.actor_devices sebulba.learner_devices'
).split()
_CONSOLE = Console(highlight=False, markup=False)


class Plan(NamedTuple):
  """How Sebulba uses a host."""

  unroll_length: int
  num_envs: int  # Number of environments of all actors.
  threads: int  # Actor threads per actor device.
  env_threads: int  # Threads that step the environments of one actor.
  actor_devices: tuple[int, ...]
  learner_devices: tuple[int, ...]
  unrolls_per_update: int  # 0 means one per actor.

  @property
  def sizes(self) -> tuple[int, int, int, int]:
    """The numbers of actors, environments per actor, steps, and env threads."""
    num_actors = len(self.actor_devices) * self.threads
    num_envs = self.num_envs // num_actors
    return num_actors, num_envs, self.unroll_length, self.env_threads

  @property
  def batch(self) -> int:
    """Environment steps that one update learns from."""
    num_actors, num_envs, length, _ = self.sizes
    return length * num_envs * (self.unrolls_per_update or num_actors)

  def overrides(self, base: 'Plan') -> dict[str, Any]:
    """Returns the fields that turn the plan `base` into this plan."""
    has_same_devices = self[4:6] == base[4:6]
    return dict(zip(_FIELDS[:4] if has_same_devices else _FIELDS, self))


def from_config(config: Fields) -> Plan:
  """Returns a configuration's plan; raises a ValueError for a mistake in it."""
  layout = make_layout(config, build.make_spec(config))
  sizes = config['unroll_length'], config['env.num_envs']
  threads = layout.threads, layout.env_threads
  devices = layout.actor_devices, layout.learner_devices
  return Plan(*sizes, *threads, *devices, config['sebulba.unrolls_per_update'])


def neighbours(plan: Plan, num_devices: int) -> list[Plan]:
  """Returns the plans that differ from `plan` in one setting, by one step.

  The plans may be invalid. If the unroll length changes, the batch size stays
  the same. If the number of threads changes, `num_envs` stays the same.
  """
  num_envs, length = plan.num_envs, plan.unroll_length
  steps: list[dict[str, Any]] = [
    {'num_envs': 2 * num_envs},
    {'num_envs': num_envs // 2},
    {'num_envs': 2 * num_envs, 'unroll_length': length // 2},
    {'num_envs': num_envs // 2, 'unroll_length': 2 * length},
    {'threads': 2 * plan.threads},
    {'threads': plan.threads // 2},
    {'env_threads': 2 * plan.env_threads},
    {'env_threads': plan.env_threads // 2},
  ]
  every = tuple(range(num_devices))
  splits = [(every[:n], every[n:]) for n in (1, 2, 4, 8, 16) if n < num_devices]
  if splits:
    splits.insert(0, (every, every))
  plans = [plan._replace(actor_devices=x, learner_devices=y) for x, y in splits]
  return plans + [plan._replace(**step) for step in steps]


def is_candidate(
  config: Fields, plan: Plan, base: Plan, size_range: float
) -> bool:
  """Returns whether a plan is similar to the configured one and can run."""
  if min(plan[:4]) < 1:
    return False
  num_actors, cores = plan.sizes[0], num_cores()
  sizes = plan.unroll_length / base.unroll_length, plan.batch / base.batch
  most_actors = max(2 * len(plan.actor_devices), 2 * cores, base.sizes[0])
  has_threads = SUITES[config['env.suite']].has_env_threads
  extra = cores // num_actors if has_threads else 0
  most_threads = max(base.env_threads, extra)
  if (
    num_actors > most_actors
    or plan.env_threads > most_threads
    or not all(1 / size_range <= size <= size_range for size in sizes)
  ):
    return False
  try:
    own = {**config, **plan.overrides(base)}
    check(own)
    build.make_run(own)
  except ValueError:
    return False
  return True


def measure(config: Fields, batch: int, seconds: float) -> Record:
  """Runs a driver for some seconds, or for two updates if they take longer.

  Compilation and the first update do not count. The function raises a
  ValueError if the configuration does not fit, or the loss is not finite.

  Returns:
    A record as in metrics.jsonl. Its rates count only the steps that the
    learner used: `batch` steps for each update.
  """
  run = build.make_run(config)
  window, meter = Window(run.spec.frame_skip, 1), Meter(run.devices)
  pace, start, driver = 1, 0.0, run.driver
  try:
    driver.start(lambda state: (state, []))
    while window.num_updates < 2 or time.perf_counter() - start < seconds:
      (report,) = meter.measure(lambda: driver.advance(pace, driver.plan()))
      if not report.is_finite:
        reason = report.culprit and culprits.explain(report.culprit, config)
        reason = reason or 'try a smaller optimizer.learning_rate'
        raise ValueError(f'the loss or gradient is NaN or infinite: {reason}')
      if start:
        window.add(report)
        pace = max(1, int(0.2 * report.num_updates / report.seconds))
      else:  # Ignore the first update: it waits for the first unroll.
        start = time.perf_counter()
  finally:
    hanging = driver.close()
    if hanging:  # Python cannot join a thread that stays in C++.
      error, names = sys.exception(), ', '.join(hanging)
      reason = f': {one_line(error)}' if error else ''
      print(f'error: {names} did not return{reason}', file=sys.stderr)
      sys.stderr.flush()
      os._exit(1)
  record = window.record()
  used = record['updates_per_second'] * batch / record['predictions_per_second']
  for name in ('steps_per_second', 'frames_per_second', 'frames_per_joule'):
    if name in record:
      record[name] *= used
  return record | driver.describe(record)


class PlanError(ValueError):
  """A plan cannot run, for example because it needs too much memory."""


def search(
  base: Plan,
  neighbours_of: Callable[[Plan], Sequence[Plan]],
  run: Callable[[Plan, float], Record],
) -> dict[Plan, Record]:
  """Finds fast plans by successive halving.

  Source: Jamieson and Talwalkar 2016, arXiv:1502.07943, figure 1. Here, the
  first round chooses its plans while it runs. Each new plan is a neighbour of
  the fastest plan that still has neighbours without a record.

  Args:
    base: the configured plan, which every round measures.
    neighbours_of: `(plan) -> plans` that differ from a plan in one setting.
    run: `(plan, seconds) -> record`, which runs a plan for about `seconds`, or
      raises a PlanError. The search leaves out a plan whose first run fails.

  Returns:
    The record of each plan, the best plan first. The configured plan is last,
    unless it is the best.
  """
  first, second, last = RUNG_SECONDS
  runs: dict[Plan, Record] = {}

  def rate(plan: Plan) -> float:
    return runs[plan]['steps_per_second']

  def ranked(plans: Iterable[Plan]) -> list[Plan]:
    return sorted(plans, key=rate, reverse=True)

  failed: set[Plan] = set()
  plan: Plan | None = base
  while plan and len(runs) + len(failed) < MAX_PLANS:
    try:
      runs[plan] = run(plan, first)
    except PlanError as error:
      if plan == base:
        raise
      _CONSOLE.print(f'left out: {error}')
      failed.add(plan)
    near = (x for plan in ranked(runs) for x in neighbours_of(plan))
    plan = next((x for x in near if x not in {*runs, *failed}), None)
  others = ranked({*runs} - {base})
  half = max(2, len(others) // 2)
  for plan in (base, *others[:half]):
    runs[plan] = run(plan, second)
  others[:half] = ranked(others[:half])
  finalists = (base, *others[:2])
  rounds = [[run(x, last) for x in finalists] for _ in range(FINAL_ROUNDS)]
  for plan, records in zip(finalists, zip(*rounds)):
    rates = [record['steps_per_second'] for record in records]
    runs[plan] = records[-1] | {'steps_per_second': float(np.median(rates))}
  others[:2] = ranked(others[:2])
  ranking = [*others, base]
  if others and rate(base) >= rate(others[0]):
    ranking = [base, *others]
  return {plan: runs[plan] for plan in ranking}


def find(config: Fields, size_range: float) -> dict[Plan, Record]:
  """Runs `search` from a configuration, and prints a line for each run.

  T and the batch size may differ from the configuration by at most the factor
  `size_range`. A larger factor may need another learning rate. The function
  raises a ValueError if the configuration does not fit, or its run fails.
  """
  build.make_run(config)  # Raises if the configuration does not fit.
  base = from_config(config)
  num_devices = len(jax.local_devices())
  if jax.default_backend() == 'cpu':  # More devices would share the cores.
    num_devices = 1

  @functools.cache
  def candidates(plan: Plan) -> list[Plan]:
    plans = neighbours(plan, num_devices)
    return [x for x in plans if is_candidate(config, x, base, size_range)]

  def run(plan: Plan, seconds: float) -> Record:
    sizes = map(count, plan.sizes, ('actor', 'environment', 'step'))
    threads = count(plan.env_threads, 'thread')
    name = f'{" x ".join(sizes)}, {threads} each'
    _CONSOLE.print(f'running {name}', style='dim')
    own = {**config, **plan.overrides(base)}
    try:
      return measure(own, plan.batch, seconds)
    except Exception as error:  # An environment or XLA can raise any error.
      raise PlanError(f'{name}: {one_line(error)}') from error

  return search(base, candidates, run)


def table(runs: dict[Plan, Record], base: Plan) -> Table:
  """Returns a table of the best plans and the configured one, in 80 columns."""
  lines = tools.make_table(
    *('', 'actors', 'envs', 'T', 'thr.', 'steps/s', *_BUSY, 'lag', 'limit'),
    left=['limit'],
  )
  for i, (plan, record) in enumerate(runs.items(), 1):
    if i > _NUM_SHOWN and plan != base:
      continue
    name = str(i) if i <= _NUM_SHOWN else 'now'
    cells = [name, *map(str, plan.sizes), compact(record['steps_per_second'])]
    cells += [f'{record[f"busy_{x}"]:.0%}' for x in _BUSY.values()]
    lines.add_row(*cells, f'{record["policy_lag"]:.2g}', record['limit'])
  return lines


def _anakin_config(config: Fields, plan: Plan) -> Fields:
  """Converts Sebulba's configuration to Anakin, with the sizes of a plan."""
  new = default_fields(config['agent.name'], 'Anakin')
  shared = {k: config[k] for k in new.keys() & config.keys()}
  kept = {k: x for k, x in shared.items() if not k.startswith('env.')}
  return {
    **new,
    **kept,
    'env.name': config['env.name'],
    'env.num_envs': plan.num_envs,
    'unroll_length': plan.unroll_length,
    'num_seeds': 1,
  }


def answer() -> None:
  """Reads a configuration from standard input, and prints its steps/s."""
  config, size_range = as_tuples(json.load(sys.stdin))
  check(config)
  build.set_up_jax(config)
  if build.architecture(config) == 'sebulba':
    record, *_ = find(config, size_range).values()
  else:
    batch = config['unroll_length'] * config['env.num_envs']
    record = measure(config, batch, RUNG_SECONDS[-1])
  print(record['steps_per_second'])


def _measure_apart(config: Fields, size_range: float, on_cpu: bool) -> float:
  """Returns what `answer` prints in a new process, or raises a ValueError."""
  environment = os.environ | {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
  process = subprocess.run(
    [sys.executable, '-c', 'from podrl.tools import balance; balance.answer()'],
    text=True,
    input=json.dumps([dict(config), size_range]),
    capture_output=True,
    env=environment | ({'JAX_PLATFORMS': 'cpu'} if on_cpu else {}),
  )
  if process.returncode:
    lines = process.stderr.strip().splitlines() or ['it printed nothing']
    raise ValueError(lines[-1])
  return float(process.stdout.splitlines()[-1])


def compare(
  config: Fields, plan: Plan, rate: float, size_range: float
) -> list[str]:
  """Measures other ways to run an experiment, and returns lines to print.

  `rate` is the steps per second of `plan`, Sebulba's fastest plan.
  """
  platform, anakin = jax.default_backend(), _anakin_config(config, plan)
  rates = {f'Sebulba on {platform}': rate}
  lines = [f'  Sebulba on {platform}: {rate:,.0f} steps/s, plan 1']
  ways = {f'Anakin on {platform}': anakin}
  if platform != 'cpu':
    ways |= {'Sebulba on cpu': config, 'Anakin on cpu': anakin}
  for way, own in ways.items():
    try:
      if own is anakin:
        build.make_env(own)  # Raises if gymnax lacks the environment.
      rates[way] = _measure_apart(own, size_range, way.endswith(' cpu'))
      lines.append(f'  {way}: {rates[way]:,.0f} steps/s')
    except ValueError as error:
      reason = str(error).partition(';')[0]  # The rest lists similar names.
      lines.append(f'  {way}: not measured: {reason}')
  return [verdict(rates), *lines]


def verdict(rates: dict[str, float]) -> str:
  """Says which way to run is the fastest; `rates` are in steps per second."""
  best, *others = sorted(rates, key=rates.__getitem__, reverse=True)
  if not others:
    return 'No other way to run this experiment was measured.'
  is_cpu = best.endswith(' cpu')
  elsewhere = [x for x in others if x.endswith(' cpu') != is_cpu]
  second = (elsewhere or others)[0]
  ratio = rates[best] / rates[second]
  text = f'{best} learns {ratio:.2f} times as fast as {second}.'
  if not elsewhere:
    return text
  opinion = 'pays off' if ratio >= _PAYS else 'hardly pays off'
  return f'An accelerator {"does not pay off" if is_cpu else opinion}: {text}'


@contextlib.contextmanager
def _panels(path: str) -> Iterator[Any]:
  """Yields two axes, one above the other, and writes them to a file."""
  from matplotlib.ticker import EngFormatter

  with tools.figure(path, 6.4, 5) as figure:
    axes = figure.subplots(2, sharex=True)
    axes[0].yaxis.set_major_formatter(EngFormatter(sep=''))
    yield axes
    for x in axes:
      if x.get_legend_handles_labels()[0]:
        place = dict(loc='lower left', bbox_to_anchor=(0, 1))  # Above the axes.
        x.legend(**place, ncols=3, frameon=False, fontsize=8)


def draw(runs: dict[Plan, Record], base: Plan, path: str) -> None:
  """Draws a PNG file: the speed of each plan, and how busy each part was."""
  best, *_ = runs
  plans = sorted(runs, key=lambda x: runs[x]['steps_per_second'])
  places, labels = range(len(plans)), dict.fromkeys(plans, 'measured')
  labels |= {best: 'plan 1', base: 'as configured'}
  with _panels(path) as (rates, shares):
    for label, color in zip(('measured', 'plan 1', 'as configured'), _COLORS):
      group = [i for i in places if labels[plans[i]] == label]
      heights = [runs[plans[i]]['steps_per_second'] for i in group]
      rates.bar(group, heights, color=color, label=label)
    rates.set(ylabel='steps learned per second')
    shifts = -0.2, 0.0, 0.2  # Equal values would hide one another.
    for (name, field), shift, color in zip(_BUSY.items(), shifts, _COLORS):
      values = [runs[x][f'busy_{field}'] for x in plans]
      shares.plot(np.add(places, shift), values, 'o', color=color, label=name)
    ticks = ['{} x {}\nx {}\n{} thr.'.format(*x.sizes) for x in plans]
    shares.set_xticks(places, ticks, fontsize=6)
    text = 'actors x environments x T, environment threads'
    shares.set(ylabel='busy', ylim=(0, 1.05), xlabel=text)


def draw_decisions(run_directory: str, path: str) -> None:
  """Draws what autotune did in a run: speed and active actors over time.

  It raises a ValueError if the run has no record of active actors yet.
  """
  decisions = workdir.read_records(run_directory, 'decisions.jsonl')
  records = [
    x for x in workdir.read_records(run_directory) if 'num_actors' in x
  ]
  if not records:
    raise ValueError(f'{run_directory} has no record yet')
  keys = 'wall_seconds', 'steps_per_second', 'num_actors'
  times, speeds, counts = ([x[k] for x in records] for k in keys)
  with _panels(path) as (rates, actors):
    rates.plot(times, speeds, c=_COLORS[0])
    actors.step(times, counts, where='pre', color='0.35', label='active')
    for is_kept, marker, label, color in (
      (True, '^', 'tried and kept', _COLORS[1]),
      (False, 'x', 'tried and undone', _COLORS[2]),
    ):
      tried = [x for x in decisions if x['is_kept'] == is_kept]
      times, counts = ([x[k] for x in tried] for k in ('wall_seconds', 'tried'))
      actors.plot(times, counts, marker, color=color, label=label)
    for before, after in zip(decisions, decisions[1:]):
      if after['num_drifts'] > before['num_drifts']:
        rates.axvline(after['wall_seconds'], ls=':', color='0.5')
        rates.annotate('new search', (after['wall_seconds'], 0), fontsize=8)
    rates.set(ylabel='steps/s', ylim=(0, None))
    actors.set(ylabel='actors', xlabel='wall time (s)', ylim=(0, None))


def _describe_run(path: str, out: str, options: Sequence[str]) -> None:
  """Prints what limited a run, and draws what autotune did."""
  if options:
    raise ValueError(f'{options[0]} needs an experiment; {path} is a run')
  config = workdir.read_config(path)
  if build.architecture(config) == 'anakin':
    raise ValueError(f'{path} is an Anakin run: it has no actors to balance')
  workdir.refuse_series(path, config)
  if summary := workdir.read_summary(path):
    for name, text in limits.describe(summary):
      print(printable(f'{name}: {text}'))
  else:
    text = f'{path} has not ended; at the end, summary.json names the limit'
    print(printable(text))
  if config['sebulba.autotune']:
    tools.make_directory(out)
    picture = os.path.join(out, 'balance.png')
    draw_decisions(path, picture)
    print(printable(f'drawn: {picture}'))


def _print_limits(config: Fields, best: Record, base: Record) -> None:
  """Prints the speed of the best plan, and what limits the configured one."""
  run, rate = build.make_run(config), best['steps_per_second']
  frames, ratio = rate * run.spec.frame_skip, rate / base['steps_per_second']
  print(
    f'plan 1: {frames:,.0f} frames/s, {ratio:.2f} times as fast as configured'
  )
  base = base | limits.summarise(base, run.devices, config['price_per_hour'])
  for name, text in limits.describe(base):
    print(f'as configured, {name}: {text}')


def _act(arguments: list[str], values: flags.FlagValues) -> None:
  """Searches, prints and draws; with --apply, it also runs the experiment."""
  command_line = parse_command_line(
    ['balance', *arguments], has_task=True, own=[*values]
  )
  path, size_range = command_line.task, values.size_range
  own = [x for x in arguments if x != path]
  if os.path.isdir(path):
    used = [f'--{x}' for x in values if values[x].present and x != 'out']
    _describe_run(path, values.out or path, [*own, *used])
    return
  config = experiments.read_config(command_line)
  if build.architecture(config) == 'anakin':
    raise ValueError(
      f'{path} uses Anakin, which has no actors to balance, because its '
      'environments run on the device; try podrl scaling'
    )
  if not 1 <= size_range <= _MAX_RANGE:
    raise ValueError(
      f'--size_range={size_range:g} is not between 1 and {_MAX_RANGE}'
    )
  fixed = {} if values.max_lag is None else {'sebulba.max_lag': values.max_lag}
  if config['sebulba.autotune']:  # A plan has a fixed number of actors.
    fixed['sebulba.autotune'] = False
  config = {**config, **fixed}
  check(config)
  directory = values.out or '.'
  tools.make_directory(directory)
  build.set_up_jax(config)
  runs, base = find(config, size_range), from_config(config)
  best, *_ = ranking = list(runs)
  _CONSOLE.print(table(runs, base))
  lines = [
    experiments.to_flags(x.overrides(base) | fixed)
    for x in ranking[:_NUM_SHOWN]
  ]
  for i, line in enumerate(lines, 1):
    print(f'{i}  {line}')
  _print_limits(config, runs[best], runs[base])
  others = max(map(limits.others, runs.values()))
  if others > limits.OTHERS_WORTH_NAMING:
    print(
      f'Other programs used up to {others:.0%} of the cores; on a quiet '
      'machine, the order of the plans may differ.'
    )
  picture = os.path.join(directory, 'balance.png')
  draw(runs, base, picture)
  print(f'drawn: {picture}')
  pasted = os.path.join(directory, 'balance.txt')
  workdir.write_text(pasted, lines[0] + '\n')
  print(f'overrides of plan 1: {pasted}')
  rate = runs[best]['steps_per_second']
  print(*compare(config, best, rate, size_range), sep='\n', flush=True)
  if values.apply:
    # Restart Python, because JAX is already set up in this process.
    argv = [sys.executable, path, *own, *lines[0].split()]
    os.execv(sys.executable, argv)


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = flags.FlagValues()
  text = 'Directory for the picture and balance.txt.'
  flags.DEFINE_string('out', None, text, flag_values=values)
  text = 'The largest policy lag of the plans, in updates.'
  tools.define_integer('max_lag', None, text, 0, None, values)
  text = 'The unroll length and the batch may change by at most this factor.'
  flags.DEFINE_float('size_range', 2.0, text, flag_values=values)
  flags.DEFINE_bool('apply', False, 'Train with plan 1.', flag_values=values)
  return tools.run_command(argv, __doc__, values, _act, known_only=True)
