"""Trains an agent with many settings, as many as possible in one program.

  podrl sweep [SUITE:]NAME --axis=FIELD=VALUES [--axis=...] [--seeds=N]
      [--random=N] [--evolve_every=STEPS] [--per_program=N]
      [--workdir=DIR] [--resume]
      [--agent=ppo] [--steps=1e6] [--config.FIELD=VALUE ...]
  podrl sweep EXPERIMENT.py --axis=FIELD=VALUES ...

VALUES is a list such as 1e-4,3e-4,1e-3, or log:LOW:HIGH:N or linear:LOW:HIGH:N
for N numbers. The command trains every combination of the values of all axes
with every seed. With --random=N, it trains N settings; each takes a random
value from every axis, and a range has no number of values: log:LOW:HIGH. The
settings depend on --seed.

With --evolve_every=STEPS, the members are a population: after every STEPS steps
of each member, the worst fifth continues from copies of the best fifth, and
changes the values that come from a range.

The members of a sweep are its settings with their seeds. Members that differ
only in hyperparameters of the agent and in the learning rate share a program.
With Sebulba, members train one after another. At the end, the command prints
the returns and the best setting, and draws them.
"""

import ast
from collections.abc import Callable, Collection, Sequence
import itertools
import json
import math
import os
import shlex
import sys
from typing import Any, NamedTuple

from absl import flags
import numpy as np
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.fields import Fields, parse, short
from podrl.messages import check_choice, count
from podrl.records import workdir
from podrl.records.merging import bootstrap
from podrl.records.terminal import podrl_command
from podrl.run import build, defaults, train
from podrl.run import config as configs
from podrl.run.cluster import Cluster, connect
from podrl.run.command_line import CommandLine, parse_command_line
from podrl.signals import DONE
from podrl.tools import experiments
from podrl.tools import population as populations

# Flags for fields that cannot be an axis.
_INSTEAD = {
  'seed': '--seeds=N',
  'num_seeds': '--seeds=N',
  'total_env_steps': '--steps=N',
}
_CONSOLE = Console(highlight=False, markup=False)
_COLOR = '#1f5fa8'

Setting = dict[str, Any]  # Values of fields, by dotted name.


class Axis(NamedTuple):
  """The values of one field, or the range that random values come from."""

  field: str
  values: tuple[Any, ...]  # Empty for a range.
  low: float = 0.0
  high: float = 0.0
  is_log: bool = False

  def draw(self, rng: np.random.Generator) -> Any:
    """Draws a random value."""
    if self.values:
      return self.values[rng.integers(len(self.values))]
    if self.is_log:
      value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
    else:
      value = rng.uniform(self.low, self.high)
    return float(_text(value))  # The value that the table prints.


def parse_axis(text: str, config: Fields, is_random: bool) -> Axis:
  """Parses FIELD=VALUES; raises a ValueError if it has another form.

  `config` gives the types of the values.
  """
  field, _, values = text.partition('=')
  check_choice('--axis', field, sorted(config.keys() - {'agent.name'}))
  kind, *numbers = values.split(':')
  if kind not in ('log', 'linear'):
    return Axis(field, _parse_values(field, values, config[field]))
  form = f'{kind}:LOW:HIGH' + ('' if is_random else ':N')
  try:
    texts = [*numbers, '2'] if is_random else numbers
    low, high, size = map(float, texts)
  except ValueError as error:
    raise ValueError(f'--axis={text} must be {field}={form}') from error
  lowest = 0.0 if kind == 'log' else -math.inf
  if not lowest < low < high < math.inf:
    raise ValueError(f'--axis={text} must be {field}={form}, with LOW < HIGH')
  if not (2 <= size < 2**16 and size == int(size)):
    raise ValueError(f'--axis={text} needs a whole number of values, 2 or more')
  default = config[field]
  if isinstance(default, bool) or not isinstance(default, int | float):
    raise ValueError(f'--axis={text}: {field} is not a number; list its values')
  if is_random and isinstance(default, int):
    raise ValueError(f'--axis={text}: {field} is an integer; list its values')
  if is_random:
    return Axis(field, (), low, high, kind == 'log')
  space = np.geomspace if kind == 'log' else np.linspace
  found = [float(f'{x:.6g}') for x in space(low, high, int(size))]
  return Axis(field, _parse_values(field, repr(found)[1:-1], default))


def _parse_values(field: str, text: str, default: Any) -> tuple[Any, ...]:
  """Parses values that are separated by commas, with the type of `default`."""
  try:
    values = ast.literal_eval(f'({text},)')
  except (ValueError, SyntaxError, TypeError):
    values = text.split(',')
  parsed = [parse(field, str(x), default) for x in values]
  found = tuple(dict.fromkeys(parsed))
  if len(found) < len(values):
    raise ValueError(f'--axis={field}={text} has a value twice')
  return found


def make_settings(
  axes: Sequence[Axis], num_random: int, seed: int
) -> list[Setting]:
  """Returns all combinations of the axes, or random ones."""
  names = [axis.field for axis in axes]
  if not num_random:
    values = itertools.product(*(axis.values for axis in axes))
    return [dict(zip(names, x)) for x in values]
  rng = np.random.default_rng(seed)
  found = [
    {axis.field: axis.draw(rng) for axis in axes} for _ in range(num_random)
  ]
  # Equal settings would be equal runs, so each counts once.
  return list({repr(x): x for x in found}.values())


class MemberGroup(NamedTuple):
  """The members of a sweep that one run trains."""

  fields: Setting  # The same for all members.
  members: tuple[Setting, ...]  # Empty for a single member.


def make_programs(
  settings: Sequence[Setting], config: Fields, per_program: int
) -> list[MemberGroup]:
  """Divides the settings, each with all seeds, into as few runs as possible.

  `per_program` is the largest number of members of a run; 0 means no limit.
  With Sebulba, each run has one member.
  """
  if build.architecture(config) == 'sebulba':
    per_program = 1
  own = configs.member_fields(config)
  groups: dict[tuple, list[Setting]] = {}
  for setting in settings:
    shared = tuple((k, x) for k, x in setting.items() if k not in own)
    member = {k: x for k, x in setting.items() if k in own}
    seeds = range(config['seed'], config['seed'] + config['num_seeds'])
    groups.setdefault(shared, []).extend(member | {'seed': x} for x in seeds)
  programs = []
  for shared, members in groups.items():
    size = per_program or len(members)
    for start in range(0, len(members), size):
      part = tuple(members[start : start + size])
      fields = dict(shared) | {'num_seeds': 1}
      if len(part) == 1:
        fields, part = fields | part[0], ()
      programs.append(MemberGroup(fields, part))
  return programs


class Result(NamedTuple):
  """The trained members of one setting."""

  setting: Setting
  returns: np.ndarray  # Float64 `[N]`, of the members that did not diverge.
  num_diverged: int
  training_return: float  # Mean over training and members.

  @property
  def rank(self) -> tuple[int, float, float]:
    """The best setting has the largest rank.

    No member diverges, then the returns are high, and then learning is fast.
    """
    mean = float(self.returns.mean()) if self.returns.size else -math.inf
    return -self.num_diverged, mean, self.training_return


def read_results(
  directories: Sequence[str], settings: Sequence[Setting]
) -> list[Result]:
  """Reads the last evaluation of all members in the directories of the runs."""
  found: dict[str, list[tuple[float | None, bool, float]]] = {}
  for directory in directories:
    config = workdir.read_config(directory)
    for path, own in workdir.agents(directory, config).items():
      records = workdir.read_records(path)
      last = records[-1] if records else {}
      training = [x.get('episode_return') for x in records]
      finite = [x for x in training if x is not None]  # None stands for NaN.
      key = repr({k: own[k] for k in settings[0]})
      score = last.get('eval_return')
      is_diverged = (
        score is None
        or last.get('is_frozen', 0.0) > 0.0
        or workdir.read_summary(directory).get('diverged', False)
      )
      ending = score, is_diverged, float(np.mean(finite or [0]))
      found.setdefault(key, []).append(ending)
  results = []
  for setting in settings:
    endings = found[repr(setting)]
    returns = np.array([x for x, is_diverged, _ in endings if not is_diverged])
    number = len(endings) - len(returns)
    mean = float(np.mean([x[2] for x in endings]))
    results.append(Result(setting, returns, number, mean))
  return results


def _text(value: Any) -> str:
  return f'{value:.6g}' if isinstance(value, float) else str(value)


def table(results: Sequence[Result]) -> Table:
  """Makes a table with a row for each setting, the best one first."""
  names = [*map(short, results[0].setting)]
  rows = tools.make_table(
    *names, 'members', 'return', '95 %', 'worst', 'diverged'
  )
  for result in sorted(results, key=lambda x: x.rank, reverse=True):
    cells = ['', '', '']
    if (returns := result.returns).size:
      low, high = bootstrap(returns)
      cells = [f'{returns.mean():,.2f}', '', f'{returns.min():,.2f}']
      if returns.size > 1:
        cells[1] = f'{low:,.2f} to {high:,.2f}'
    number = str(returns.size + result.num_diverged)
    diverged = str(result.num_diverged or '')
    values = map(_text, result.setting.values())
    rows.add_row(*values, number, *cells, diverged)
  return rows


def draw(results: Sequence[Result], title: str, path: str) -> None:
  """Draws the returns over each axis, one panel per axis, into a file."""
  fields = [*results[0].setting]
  with tools.figure(path, 4.6 * len(fields) + 0.4, 3.6) as figure:
    panels = figure.subplots(1, len(fields), squeeze=False, sharey=True)[0]
    for field, axes in zip(fields, panels):
      values = list(dict.fromkeys(x.setting[field] for x in results))
      is_number = all(type(x) in (int, float) for x in values)
      values = sorted(values) if is_number else values
      places = np.array(values if is_number else range(len(values)), float)
      returns = [
        np.concatenate(
          [x.returns for x in results if x.setting[field] == value]
        )
        for value in values
      ]
      for place, own in zip(places, returns):
        axes.plot([place] * len(own), own, 'o', color=_COLOR, ms=3, alpha=0.35)
      kept = [i for i, own in enumerate(returns) if own.size]
      means = [returns[i].mean() for i in kept]
      bands = np.reshape([bootstrap(returns[i]) for i in kept], (-1, 2))
      axes.plot(places[kept], means, color=_COLOR, lw=1.8)
      axes.fill_between(places[kept], *bands.T, color=_COLOR, alpha=0.2, lw=0)
      if is_number and places.min() > 0 and places.max() / places.min() >= 20:
        axes.set_xscale('log')
      elif not is_number:
        axes.set_xticks(places, map(str, values))
      axes.set_xlabel(field)
    panels[0].set_ylabel('evaluated return')
    figure.suptitle(title, fontsize=10)
    text = 'dots: members; line: their mean; band: its 95 % interval'
    figure.supxlabel(text, fontsize=8, color='#606060')


def _experiment(
  argv: Sequence[str], own: Collection[str] = ()
) -> tuple[Callable[..., Fields], CommandLine]:
  """Parses the arguments of a training command; see `defaults.parse_arguments`.

  Hints may name the flags `own`.
  """
  command_line = parse_command_line(argv, has_task=True, own=own)
  if command_line.task.endswith('.py'):
    get_config = experiments.load_experiment(command_line.task)
  else:
    get_config, command_line = defaults.parse_arguments(argv[1:])
  command = f'{podrl_command()} sweep {shlex.quote(command_line.task)}'
  return get_config, command_line._replace(command=command)


def _population(axes: Sequence[Axis], values: flags.FlagValues) -> Setting:
  """Returns the fields of a population; none if there is no population."""
  if not values.evolve_every:
    return {}
  ranges = tuple(
    (x.field, x.low, x.high, x.is_log) for x in axes if not x.values
  )
  return {
    'population.every_env_steps': values.evolve_every,
    'population.ranges': ranges,
  }


def _check_population(
  programs: Sequence[MemberGroup], population: Setting, config: Fields
) -> None:
  """Raises a ValueError if the members cannot evolve together."""
  if not population['population.ranges']:
    raise ValueError(
      '--evolve_every needs --random and an axis with a range, for example '
      '--random=8 --axis=optimizer.learning_rate=log:1e-5:1e-1'
    )
  if len(programs) > 1 or not programs[0].members:
    own = ', '.join(sorted(configs.member_fields(config) - {'seed'}))
    raise ValueError(
      '--evolve_every needs one program with several members; use an Anakin '
      f'environment, no --per_program, and only axes of {own}'
    )


class _Plan(NamedTuple):
  """What the command line asks for."""

  get_config: Callable[..., Fields]
  command_line: CommandLine
  config: Fields  # Without the axes.
  settings: list[Setting]
  programs: list[MemberGroup]
  population: Setting
  path: str  # Directory of the sweep.
  arguments: list[str]  # Arguments that only `podrl sweep` has.

  @property
  def directories(self) -> list[str]:
    """Returns the directory of each program."""
    numbers = range(len(self.programs))
    return [os.path.join(self.path, f'program_{i}') for i in numbers]


def _make_plan(
  get_config: Callable[..., Fields],
  command_line: CommandLine,
  values: flags.FlagValues,
) -> _Plan:
  """Plans the sweep; raises a ValueError for a user's mistake."""
  if not values.axis:
    raise ValueError(
      'give an axis, for example --axis=optimizer.learning_rate=1e-4,1e-3'
    )
  options = command_line.flags
  if options.init_from:
    raise ValueError('--init_from does not work with a sweep')
  if options.resume and not options.workdir:
    raise ValueError(
      '--resume continues the sweep in --workdir: give --workdir'
    )
  config, _ = command_line.apply(get_config(options.agent, options.variant))
  axes = [parse_axis(x, config, values.random > 0) for x in values.axis]
  fields = [axis.field for axis in axes]
  used = [x.lstrip('-').partition('=')[0] for x in command_line.overrides]
  for field in fields:
    if field in _INSTEAD:
      raise ValueError(f'--axis={field}: use {_INSTEAD[field]} instead')
    if f'config.{field}' in used or fields.count(field) > 1:
      raise ValueError(f'--axis={field}: set a field only once')
  settings = make_settings(axes, values.random, config['seed'])
  programs = make_programs(settings, config, values.per_program)
  if population := _population(axes, values):
    _check_population(programs, population, config)
  agent = workdir.agent_name(config)
  path = options.workdir or workdir.default_path(config).replace(
    f'{agent}-', f'sweep-{agent}-'
  )
  own = [f'--axis={x}' for x in values.axis]
  for name in ('random', 'evolve_every', 'per_program'):
    if values[name].present:
      own.append(f'--{name}={values[name].value}')
  plan = _Plan(
    get_config, command_line, config, settings, programs, population, path, own
  )
  _check(plan)
  return plan


def _check(plan: _Plan) -> None:
  """Raises a ValueError for a wrong value, or if there is another sweep."""
  path, configs_of = plan.path, {}
  for directory, program in zip(plan.directories, plan.programs):
    config = _add_members(plan.config, program, plan.population)
    configs.check(config)
    configs_of[directory] = config
  names = os.listdir(path) if os.path.isdir(path) else []
  found = [os.path.join(path, x) for x in names if x.startswith('program_')]
  found = [x for x in found if workdir.is_run(x)]
  if found and not plan.command_line.flags.resume:
    raise ValueError(
      f'--workdir={path} already contains a sweep; add --resume to continue '
      'it, or choose another directory'
    )
  for directory in found:
    why = ''
    if own := configs_of.get(directory):
      saved, new = map(_identity, (workdir.read_config(directory), own))
      if saved == new:
        continue
      name = min(k for k in saved | new if saved.get(k) != new.get(k))
      why = (
        f': {name} is {saved.get(name)} in the run, but {new.get(name)} here'
      )
    raise ValueError(
      f'{directory} does not belong to this sweep{why}; repeat the arguments '
      'of the sweep that began there, or choose another --workdir'
    )


def _identity(config: Fields) -> dict[str, Any]:
  """Returns the fields that a program and its saved run have in common."""
  others = (*workdir.MOVABLE, 'total_env_steps')
  fields = json.loads(json.dumps(dict(config)))
  return {k: x for k, x in fields.items() if not k.startswith(others)}


def _train(plan: _Plan, cluster: Cluster) -> train.Outcome:
  """Trains all programs; stops if one ends early."""

  def say(text: str) -> None:
    if cluster.process == 0:
      print(text, file=sys.stderr)

  number = len(plan.settings) * plan.config['num_seeds']
  say(
    f'{count(len(plan.settings), "setting")} x '
    f'{count(plan.config["num_seeds"], "seed")} = {count(number, "member")} in '
    f'{count(len(plan.programs), "program")}'
  )
  total = plan.config['total_env_steps']
  for directory, program in zip(plan.directories, plan.programs):
    if cluster.decide(lambda: _is_finished(directory, total)):
      say(f'{directory} is finished')
      continue
    outcome = train.execute(
      _with_members(plan, program),
      _for_program(plan.command_line, plan.path, directory, plan.arguments),
      cluster=cluster,
    )
    if outcome.is_diverged:  # The other members go on.
      say(f'{directory}: {outcome.error.split(";")[0]}')
    elif outcome.exit_code:
      return outcome
  return train.Outcome(DONE)


def _conclude(plan: _Plan) -> None:
  """Writes, prints and draws the returns."""
  results = read_results(plan.directories, plan.settings)
  contents = [
    {
      'setting': x.setting,
      'returns': x.returns.tolist(),
      'num_diverged': x.num_diverged,
    }
    for x in results
  ]
  out = os.path.join(plan.path, 'sweep')
  workdir.write_json(f'{out}.json', {'results': contents})
  draw(
    results,
    f'{plan.config["env.name"]}, {plan.config["agent.name"]}',
    f'{out}.png',
  )
  best = max(results, key=lambda x: x.rank)
  _CONSOLE.print(table(results))
  _CONSOLE.print(f'best: {experiments.to_flags(best.setting)}', soft_wrap=True)
  _CONSOLE.print(f'written: {out}.json, {out}.png', soft_wrap=True)


def _sweep(arguments: list[str], values: flags.FlagValues) -> int:
  """Trains the members, prints and draws their returns."""
  get_config, command_line = _experiment(['podrl sweep', *arguments], [*values])
  # Connect first, because a plan needs the environment's specification, which
  # may use devices.
  with connect(command_line.flags) as cluster:
    plan = cluster.attempt(lambda: _make_plan(get_config, command_line, values))
    cluster.compare(
      {
        '--workdir': command_line.flags.workdir,
        "the sweep's arguments": plan.arguments,
        'the number of programs': len(plan.programs),
      }
    )
    # Use the path of process 0, because a default path contains the time.
    plan = plan._replace(path=cluster.decide(lambda: plan.path))
    outcome = _train(plan, cluster)
    if cluster.process == 0 and not outcome.exit_code:
      if plan.population:
        populations.conclude(plan.directories[0], plan.path)
      else:
        _conclude(plan)
  return train.report(outcome)


def _is_finished(directory: str, total_env_steps: int) -> bool:
  """Returns whether a program has done all its updates, or has diverged."""
  if not workdir.is_run(directory):
    return False
  is_finished = workdir.is_finished(directory, total_env_steps)
  return is_finished or workdir.read_summary(directory).get('diverged', False)


def _with_members(plan: _Plan, program: MemberGroup) -> Callable[..., Fields]:
  """Returns a `get_config` for one program of a sweep."""
  # An axis may be a field of a part that the command line names.
  parts = {name: plan.config[name] for name in configs.PARTS}

  def get(agent: str, variant: str) -> Fields:
    config = configs.change(plan.get_config(agent, variant), parts)
    return _add_members(config, program, plan.population)

  return get


def _add_members(
  config: Fields, program: MemberGroup, population: Setting
) -> Fields:
  """Returns the configuration of one program of a sweep."""
  config = configs.change(config, program.fields)
  if not program.members:
    return config
  return {**config, 'members': program.members, **population}


def _for_program(
  command_line: CommandLine, path: str, directory: str, own: Sequence[str]
) -> CommandLine:
  """Returns the command line for one program; members have the seeds."""
  kept = command_line.overrides
  own = [*own, *(x for x in kept if _is_seed(x))]
  kept = [x for x in kept if not _is_seed(x)]
  command_line.flags['workdir'].value = directory
  return command_line._replace(overrides=kept, sweep=(path, *own))


def _is_seed(override: str) -> bool:
  name = override.lstrip('-').partition('=')[0]
  return name in ('config.seed', 'config.num_seeds')


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `train.run`."""
  values = flags.FlagValues()
  text = 'FIELD=VALUES, an axis of the sweep; may be given several times.'
  flags.DEFINE_multi_string('axis', [], text, flag_values=values)
  text = 'The number of random settings; 0 means all combinations.'
  tools.define_integer('random', 0, text, 0, 2**16, values)
  text = 'Steps of a member after which the population evolves; 0 means never.'
  tools.define_integer('evolve_every', 0, text, 0, 2**40, values)
  text = 'The largest number of members in a program; 0 means no limit.'
  tools.define_integer('per_program', 0, text, 0, 2**16, values)
  return tools.run_command(argv, __doc__, values, _sweep, known_only=True)
