"""Finds the fastest settings of a Sebulba experiment on this machine.

  podrl balance EXPERIMENT [--agent=ppo] [--variant=] [--out=DIR] [--apply]
      [--max_lag=N] [--size_range=2] [--config.FIELD=VALUE ...]
  podrl balance RUN [--out=DIR]

EXPERIMENT is a file such as experiments/sebulba_pong.py. Short runs measure at
most 12 plans. A plan sets the number of actors, the environments of each actor
(envs), the unroll length (T), the threads that step the environments of one
actor (thr.), and the devices that act and learn. Paste the overrides of the
best plan, or run the experiment with them by --apply.

RUN is the directory of a run. The command prints what limited the run, and
draws what autotune did.
"""

from collections.abc import Callable, Iterator, Sequence
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
from ml_collections import ConfigDict
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.drivers import limits
from podrl.drivers.energy import Meter
from podrl.drivers.stages import num_cores
from podrl.envs import SUITES
from podrl.records import workdir
from podrl.records.recorder import Window
from podrl.records.terminal import compact
from podrl.records.workdir import Record
from podrl.run import build
from podrl.run.config import base_config
from podrl.run.devices import make_layout

MAX_PLANS, FINAL_ROUNDS = 12, 3
RUNG_SECONDS = (1.0, 2.0, 2.0)  # The length of a run in each rung.
_NUM_SHOWN, _MAX_RANGE = 5, 64
_PAYS = 1.2  # An accelerator pays from this speed-up on.
_BUSY = {
  'cores': 'busy_cores',
  'act': 'busy_actor_devices',
  'learn': 'busy_learner_devices',
}
_COLORS = ('#1f5fa8', '#3d7a3a', '#c44e00')
_ABOVE = dict(  # A legend above its axes.
  loc='lower left', bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8
)


class Plan(NamedTuple):
  """How Sebulba uses a host.

  Attributes:
    actor_devices, learner_devices: indices of devices.
    threads: actors for each actor device.
    num_envs: environments of all actors together.
    env_threads: threads that step the environments of one actor.
    unroll_length: T, steps.
    unrolls_per_update: unrolls in one update; 0 means one of each actor.
  """

  actor_devices: tuple[int, ...]
  learner_devices: tuple[int, ...]
  threads: int
  num_envs: int
  env_threads: int
  unroll_length: int
  unrolls_per_update: int

  @property
  def num_actors(self) -> int:
    """Actors on all devices."""
    return len(self.actor_devices) * self.threads

  @property
  def batch(self) -> int:
    """T x environments of one update."""
    unrolls = self.unrolls_per_update or self.num_actors
    return self.unroll_length * self.num_envs * unrolls // self.num_actors

  @property
  def sizes(self) -> tuple[int, int, int, int]:
    """Actors, environments of each, T and environment threads."""
    num_envs = self.num_envs // self.num_actors
    return self.num_actors, num_envs, self.unroll_length, self.env_threads

  def overrides(self, base: 'Plan') -> dict[str, Any]:
    """Returns the fields that change the configuration of `base` to this."""
    fields: dict[str, Any] = {
      'unroll_length': self.unroll_length,
      'env.num_envs': self.num_envs,
      'sebulba.threads_per_actor_device': self.threads,
      'sebulba.env_threads': self.env_threads,
    }
    if self[:2] != base[:2]:
      fields['sebulba.actor_devices'] = self.actor_devices
      fields['sebulba.learner_devices'] = self.learner_devices
    return fields


def from_config(config: ConfigDict) -> Plan:
  """Returns the plan of a configuration; ValueError if it does not fit."""
  layout = make_layout(config, build.make_spec(config))
  num_envs = config.env.num_envs
  devices = layout.actor_devices, layout.learner_devices
  unrolls = config.unroll_length, config.sebulba.unrolls_per_update
  return Plan(*devices, layout.threads, num_envs, layout.env_threads, *unrolls)


def to_flags(fields: dict[str, Any]) -> str:
  """Returns fields as overrides to paste after a command."""
  texts = [','.join(map(str, np.atleast_1d(x))) for x in fields.values()]
  return ' '.join(f'--config.{k}={text}' for k, text in zip(fields, texts))


def with_fields(config: ConfigDict, fields: dict[str, Any]) -> ConfigDict:
  """Returns a copy of a configuration with other values of some fields."""
  copy = config.copy_and_resolve_references()
  copy.update_from_flattened_dict(fields)
  return copy


def neighbours(plan: Plan, num_devices: int) -> list[Plan]:
  """Returns the plans one step from `plan` along each axis, unchecked.

  A step along the unroll length keeps the batch, and one along the threads
  keeps the environments of all actors together.
  """
  every, plans = tuple(range(num_devices)), []
  if num_devices > 1:
    counts = [n for n in (1, 2, 4, 8, 16) if n < num_devices]
    splits = [(every, every)] + [(every[:n], every[n:]) for n in counts]
    plans = [Plan(*split, *plan[2:]) for split in splits]
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
  return plans + [plan._replace(**step) for step in steps]


def is_candidate(
  config: ConfigDict, plan: Plan, base: Plan, size_range: float
) -> bool:
  """Whether a plan is near enough to the configured one, and runs at all."""
  if min(plan.threads, plan.env_threads, plan.unroll_length) < 1:
    return False
  num_devices, cores = len(plan.actor_devices), num_cores()
  sizes = plan.unroll_length / base.unroll_length, plan.batch / base.batch
  most_threads = max(base.env_threads, cores // plan.num_actors)
  if not SUITES[config.env.suite].has_env_threads:
    most_threads = base.env_threads
  if (
    plan.num_actors > max(2 * num_devices, 2 * cores, base.num_actors)
    or plan.env_threads > most_threads
    or not all(1 / size_range <= size <= size_range for size in sizes)
  ):
    return False
  try:
    build.make_run(with_fields(config, plan.overrides(base)))
  except ValueError:
    return False
  return True


def measure(config: ConfigDict, batch: int, seconds: float) -> Record:
  """Runs a driver for a while; compilation and the first updates do not count.

  Args:
    config: the configuration of the run.
    batch: T x environments of one update.
    seconds: how long it runs; it runs at least two updates.

  Returns:
    A record as in metrics.jsonl. Its steps are those that the learner used.

  Raises:
    ValueError: if the configuration does not fit, or the loss is not finite.
  """
  run = build.make_run(config)
  window, meter = Window(run.spec.frame_skip, 1), Meter(run.devices)
  pace, start, driver = 1, 0.0, run.driver
  try:
    driver.start(lambda state: (state, []))
    while window.num_updates < 2 or time.perf_counter() - start < seconds:
      (report,) = meter.measure(lambda: driver.advance(pace, driver.plan()))
      if not report.is_finite:
        raise ValueError(
          'the loss is NaN or infinite; try a smaller optimizer.learning_rate'
        )
      if start:
        window.add(report)
        pace = max(1, int(0.2 * report.num_updates / report.seconds))
      else:  # The first update waits for the first unroll.
        start = time.perf_counter()
  finally:
    driver.close()
  record = window.record()
  used = record['updates_per_second'] * batch / record['predictions_per_second']
  for name in ('steps_per_second', 'frames_per_second', 'frames_per_joule'):
    if name in record:
      record[name] *= used
  return record | driver.describe(record)


def search(
  base: Plan,
  neighbours_of: Callable[[Plan], Sequence[Plan]],
  run: Callable[[Plan, float], Record],
) -> tuple[list[Plan], dict[Plan, Record]]:
  """Finds fast plans by successive halving.

  Source: Jamieson and Talwalkar 2016, arXiv:1502.07943, figure 1. Here the
  first rung chooses its plans as it goes: next comes a neighbour of the fastest
  plan that still has one.

  Args:
    base: the configured plan, which every rung measures.
    neighbours_of: `(plan) -> plans` that differ from a plan in one axis.
    run: `(plan, seconds) -> record`, a run of about that length.

  Returns:
    The plans, the best first (the configured one is first or last), and the
    record of each.
  """
  runs = {base: run(base, RUNG_SECONDS[0])}

  def rate(plan: Plan) -> float:
    return runs[plan]['steps_per_second']

  def first_new() -> Plan | None:
    for plan in sorted(runs, key=rate, reverse=True):
      for neighbour in neighbours_of(plan):
        if neighbour not in runs:
          return neighbour
    return None

  while len(runs) < MAX_PLANS and (plan := first_new()):
    runs[plan] = run(plan, RUNG_SECONDS[0])
  others = sorted({*runs} - {base}, key=rate, reverse=True)
  half = max(2, len(others) // 2)
  for plan in (base, *others[:half]):
    runs[plan] = run(plan, RUNG_SECONDS[1])
  others[:half] = sorted(others[:half], key=rate, reverse=True)
  finalists = (base, *others[:2])
  rounds = [
    [run(plan, RUNG_SECONDS[2]) for plan in finalists]
    for _ in range(FINAL_ROUNDS)
  ]
  for plan, records in zip(finalists, zip(*rounds)):
    rates = [record['steps_per_second'] for record in records]
    runs[plan] = records[-1] | {'steps_per_second': float(np.median(rates))}
  others[:2] = sorted(others[:2], key=rate, reverse=True)
  is_base_best = not others or rate(base) >= rate(others[0])
  return [base] + others if is_base_best else others + [base], runs


def find(
  config: ConfigDict,
  size_range: float,
  say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Plan], dict[Plan, Record], Plan]:
  """Searches around the configuration of a Sebulba run, on this machine.

  Args:
    config: the configuration.
    size_range: how many times smaller or larger than configured T and the batch
      may be; others would need another learning rate.
    say: takes a line for each run.

  Returns:
    What `search` returns, and the configured plan.

  Raises:
    ValueError: if the configuration does not fit this machine, or a run fails.
  """
  build.make_run(config)  # Checks it.
  base = from_config(config)
  # More CPU devices would share the same cores.
  is_cpu = jax.default_backend() == 'cpu'
  num_devices = 1 if is_cpu else len(jax.local_devices())

  @functools.cache
  def candidates(plan: Plan) -> list[Plan]:
    plans = neighbours(plan, num_devices)
    return [x for x in plans if is_candidate(config, x, base, size_range)]

  def run(plan: Plan, seconds: float) -> Record:
    sizes = map(limits.count, plan.sizes, ('actor', 'environment', 'step'))
    threads = limits.count(plan.env_threads, 'thread')
    name = f'{" x ".join(sizes)}, {threads} each'
    say(f'running {name}')
    fields = plan.overrides(base)
    try:
      return measure(with_fields(config, fields), plan.batch, seconds)
    except Exception as error:  # Of an environment or of XLA, for example.
      lines = str(error).splitlines() or [type(error).__name__]
      raise ValueError(f'{name}: {lines[0]}') from error

  return *search(base, candidates, run), base


def table(
  ranking: Sequence[Plan], runs: dict[Plan, Record], base: Plan
) -> Table:
  """Returns the best plans, and the configured one, in 80 columns."""
  rows = {str(i + 1): plan for i, plan in enumerate(ranking[:_NUM_SHOWN])}
  if base not in rows.values():
    rows['now'] = base
  lines = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
  for name in ('', 'actors', 'envs', 'T', 'thr.', 'steps/s', *_BUSY, 'lag'):
    lines.add_column(name, justify='right', no_wrap=True)
  lines.add_column('limit', no_wrap=True)
  for name, plan in rows.items():
    record = runs[plan]
    lines.add_row(
      *map(str, (name, *plan.sizes)),
      compact(record['steps_per_second']),
      *(f'{record[field]:.0%}' for field in _BUSY.values()),
      f'{record["policy_lag"]:.2g}',
      record['limit'],
    )
  return lines


def _anakin_config(config: ConfigDict, plan: Plan) -> ConfigDict:
  """Returns Anakin's configuration with the same agent, network and sizes."""
  fields = config.to_dict()
  new = base_config(config.agent.name)
  for name in ('agent', 'network', 'optimizer'):
    new[name].update(fields[name])
  for name in ('seed', 'num_epochs', 'num_minibatches', 'compilation_cache'):
    new[name] = fields[name]
  new.env.name, new.env.num_envs = config.env.name, plan.num_envs
  new.unroll_length = plan.unroll_length
  return new


def answer() -> None:
  """Measures the configuration on standard input, in a process of its own."""
  fields, size_range = json.load(sys.stdin)
  config = workdir.as_config(fields)
  build.set_up_jax(config)
  if build.architecture(config) == 'sebulba':
    ranking, runs, _ = find(config, size_range)
    record = runs[ranking[0]]
  else:
    batch = config.unroll_length * config.env.num_envs
    record = measure(config, batch, RUNG_SECONDS[-1])
  print(record['steps_per_second'])


def _measure_apart(
  config: ConfigDict, size_range: float, platform: str
) -> float:
  """Returns what `answer` prints; ValueError if its process fails."""
  environment = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
  if platform == 'cpu':
    environment['JAX_PLATFORMS'] = 'cpu'
  process = subprocess.run(
    [sys.executable, '-c', 'from podrl.tools import balance; balance.answer()'],
    text=True,
    input=json.dumps([config.to_dict(), size_range]),
    capture_output=True,
    check=False,
    env=os.environ | environment,
  )
  if process.returncode:
    lines = process.stderr.strip().splitlines() or ['it printed nothing']
    raise ValueError(lines[-1])
  return float(process.stdout.splitlines()[-1])


def compare(
  config: ConfigDict, plan: Plan, rate: float, size_range: float
) -> list[str]:
  """Measures the other ways to run an experiment here; returns lines to print.

  Args:
    config: the configuration.
    plan: the best plan of Sebulba.
    rate: its steps per second.
    size_range: as in `find`.
  """
  platform, anakin = jax.default_backend(), _anakin_config(config, plan)
  rates = {('Sebulba', platform): rate}
  lines = [f'  Sebulba on {platform}: {rate:,.0f} steps/s, plan 1']
  ways = [('Anakin', platform, anakin)]
  if platform != 'cpu':
    ways += [('Sebulba', 'cpu', config), ('Anakin', 'cpu', anakin)]
  for name, platform, fields in ways:
    try:
      if name == 'Anakin':
        build.make_env(fields)  # Raises if gymnax does not have it.
      rate = _measure_apart(fields, size_range, platform)
      rates[name, platform] = rate
      lines.append(f'  {name} on {platform}: {rate:,.0f} steps/s')
    except ValueError as error:
      lines.append(f'  {name} on {platform}: not measured: {error}')
  return [verdict(rates), *lines]


def verdict(rates: dict[tuple[str, str], float]) -> str:
  """Returns what measured rates say, in a sentence.

  Args:
    rates: steps per second of each (architecture, platform).
  """
  best = max(rates, key=rates.__getitem__)
  others = [x for x in rates if (x[1] == 'cpu') != (best[1] == 'cpu')]
  others = others or [x for x in rates if x != best]
  if not others:
    return 'No other way to run this experiment was measured.'
  second = max(others, key=rates.__getitem__)
  ratio = rates[best] / rates[second]
  text = (
    f'{best[0]} on {best[1]} learns {ratio:.2f} times as fast as {second[0]} '
    f'on {second[1]}.'
  )
  if best[1] == second[1]:
    return text
  opinion = 'pays' if ratio >= _PAYS else 'hardly pays'
  return f'An accelerator {"loses" if best[1] == "cpu" else opinion}: {text}'


@contextlib.contextmanager
def _figure(path: str) -> Iterator[Any]:
  """Yields two axes, one above the other, and writes them to a file."""
  import matplotlib  # The import takes a second.

  matplotlib.use('Agg')
  from matplotlib import pyplot
  from matplotlib.ticker import EngFormatter

  figure, axes = pyplot.subplots(2, sharex=True, figsize=(6.4, 5), dpi=110)
  for x in axes:
    x.spines[['top', 'right']].set_visible(False)
  axes[0].yaxis.set_major_formatter(EngFormatter(sep=''))
  yield axes
  figure.tight_layout()
  figure.savefig(path)
  pyplot.close(figure)


def draw(
  ranking: Sequence[Plan], runs: dict[Plan, Record], base: Plan, path: str
) -> None:
  """Draws the speed of each plan, and what was busy, as a PNG file."""
  plans = sorted(ranking, key=lambda x: runs[x]['steps_per_second'])
  places, labels = range(len(plans)), dict.fromkeys(plans, 'measured')
  labels |= {ranking[0]: 'plan 1', base: 'as configured'}
  with _figure(path) as (rates, shares):
    for label, color in zip(('measured', 'plan 1', 'as configured'), _COLORS):
      group = [i for i in places if labels[plans[i]] == label]
      heights = [runs[plans[i]]['steps_per_second'] for i in group]
      rates.bar(group, heights, color=color, label=label)
    rates.set(ylabel='steps learned per second')
    rates.legend(**_ABOVE)
    for (name, field), style, color in zip(_BUSY.items(), 'o^s', _COLORS):
      values = [runs[x][field] for x in plans]
      shares.plot(places, values, style, color=color, label=name)
    shares.set(ylabel='busy', ylim=(0, 1.05))
    ticks = ['{} x {}\nx {}\n{} thr.'.format(*x.sizes) for x in plans]
    shares.set_xticks(places, ticks, fontsize=7)
    shares.set_xlabel('actors x environments x T, environment threads')
    shares.legend(**_ABOVE)


def draw_decisions(run_directory: str, path: str) -> None:
  """Draws what autotune did in a run: speed and active actors over time.

  Args:
    run_directory: the directory of the run, which may not have ended.
    path: the picture's file.

  Raises:
    ValueError: if the run was not tuned, has no record yet, or is damaged.
  """
  if not os.path.exists(os.path.join(run_directory, 'decisions.jsonl')):
    raise ValueError(
      f'{run_directory} has no decisions.jsonl: the file is gone, or the run '
      'did not use --config.sebulba.autotune=True'
    )
  decisions = workdir.read_records(run_directory, 'decisions.jsonl')
  records = workdir.read_records(run_directory)
  records = [record for record in records if 'num_actors' in record]
  if not records:
    raise ValueError(f'{run_directory} has no record yet')
  times = [x['wall_seconds'] for x in records]
  with _figure(path) as (rates, actors):
    rates.plot(times, [x['steps_per_second'] for x in records], c=_COLORS[0])
    counts = [x['num_actors'] for x in records]
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
    actors.legend(**_ABOVE)


def _describe_run(path: str, out: str, options: Sequence[str]) -> None:
  """Prints what limited a run, and draws what autotune did."""
  if options:
    raise ValueError(f'{path} is a run, which {options[0]} cannot change')
  config = workdir.read_config(path)
  if build.architecture(config) == 'anakin':
    raise ValueError(f'{path} is a run of Anakin, which has nothing to balance')
  console = Console(highlight=False, markup=False)
  summary = os.path.join(path, 'summary.json')
  if os.path.exists(summary):
    for name, text in limits.describe(workdir.read_json(summary)):
      console.print(f'{name}: {text}')
  else:
    console.print(f'{path} has not ended; its summary will say what limits it')
  if config.sebulba.autotune:
    tools.make_directory(out)
    picture = os.path.join(out, 'balance.png')
    draw_decisions(path, picture)
    console.print(f'drawn: {picture}', soft_wrap=True)


def _act(
  settings: Sequence[str], paths: list[str], values: flags.FlagValues
) -> None:
  """Searches, prints, draws, and perhaps runs the experiment."""
  path = tools.single_path(
    paths, 'experiment', 'balance experiments/sebulba_pong.py'
  )
  if os.path.isdir(path):
    used = [f'--{x}' for x in values if values[x].present and x != 'out']
    _describe_run(path, values.out or path, [*settings, *used])
    return
  config = tools.read_config(path, settings, values)
  if build.architecture(config) == 'anakin':
    raise ValueError(
      f'{path} uses Anakin, whose environments run on the device: there is '
      'nothing to balance; try podrl scaling'
    )
  if not 1 <= values.size_range <= _MAX_RANGE:
    raise ValueError(
      f'--size_range={values.size_range:g} is not between 1 and {_MAX_RANGE}'
    )
  fixed = {} if values.max_lag is None else {'sebulba.max_lag': values.max_lag}
  if config.sebulba.autotune:  # A plan has a fixed number of actors.
    fixed['sebulba.autotune'] = False
  config = with_fields(config, fixed)
  directory = values.out or '.'
  tools.make_directory(directory)
  build.set_up_jax(config)
  console = Console(highlight=False, markup=False)
  ranking, runs, base = find(
    config, values.size_range, lambda line: console.print(line, style='dim')
  )
  console.print(table(ranking, runs, base))
  shown = ranking[:_NUM_SHOWN]
  lines = [to_flags(plan.overrides(base) | fixed) for plan in shown]
  for i, line in enumerate(lines):
    console.print(f'{i + 1}  {line}', soft_wrap=True)
  best, record, run = runs[ranking[0]], runs[base], build.make_run(config)
  ratio = best['steps_per_second'] / record['steps_per_second']
  frames = best['steps_per_second'] * run.spec.frame_skip
  console.print(
    f'plan 1: {frames:,.0f} frames/s, {ratio:.2f} times the configured one'
  )
  others = max(limits.others(x) for x in runs.values())
  if others > limits.OTHERS_WORTH_NAMING:
    console.print(
      f'Other programs used up to {others:.0%} of the cores; on a quiet '
      'machine, the order of the plans may differ.'
    )
  record |= limits.summarise(record, run.devices, config.price_per_hour)
  for name, text in limits.describe(record):
    console.print(f'as configured, {name}: {text}')
  picture = os.path.join(directory, 'balance.png')
  draw(ranking, runs, base, picture)
  console.print(f'drawn: {picture}', soft_wrap=True)
  pasted = os.path.join(directory, 'balance.txt')
  with open(pasted, 'w', encoding='utf-8') as file:
    file.write(lines[0] + '\n')
  console.print(f'overrides of plan 1: {pasted}', soft_wrap=True)
  rate = best['steps_per_second']
  for line in compare(config, ranking[0], rate, values.size_range):
    console.print(line)
  if values.apply:
    console.file.flush()
    own = [f'--agent={values.agent}', f'--variant={values.variant}', *settings]
    # A new process, because JAX is set up in this one.
    arguments = [sys.executable, path, *own, *lines[0].split()]
    os.execv(sys.executable, arguments)


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code, as `tools.run_command`."""
  values = flags.FlagValues()
  flags.DEFINE_string(
    'out', None, 'Directory of the picture and balance.txt.', flag_values=values
  )
  flags.DEFINE_integer(
    'max_lag', None, 'The most updates of policy lag.', 0, flag_values=values
  )
  flags.DEFINE_float(
    'size_range',
    2.0,
    'How many times smaller or larger than configured T and the batch may be.',
    flag_values=values,
  )
  flags.DEFINE_bool('apply', False, 'Run it with plan 1.', flag_values=values)
  return tools.run_experiment_command(argv, __doc__, values, _act)
