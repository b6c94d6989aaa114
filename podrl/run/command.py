"""What an experiment's command line says, and the run that it finds on disc."""

from collections.abc import Callable, Sequence
import contextlib
import datetime
import os
import sys
from typing import NamedTuple

from absl import flags
import jax
from ml_collections import ConfigDict

from podrl.records import checkpoint, workdir
from podrl.records.workdir import flatten
from podrl.run import cluster
from podrl.run.check import check, check_sinks
from podrl.run.cluster import Cluster
from podrl.run.config import AGENTS, apply_overrides, describe


class Files(NamedTuple):
  """What a run finds on disc.

  Attributes:
    workdir: its own directory.
    init_from: a run whose parameters it begins with, or empty.
    is_resumed: whether it goes on with what `workdir` holds.
    num_resumes: how often it has done so.
  """

  workdir: str
  init_from: str = ''
  is_resumed: bool = False
  num_resumes: int = 0


class Line(NamedTuple):
  """A command line.

  Attributes:
    script: as it was called.
    name: of the experiment.
    values: of the flags.
    rest: overrides of the configuration.
  """

  script: str
  name: str
  values: flags.FlagValues
  rest: Sequence[str]


def read(argv: Sequence[str]) -> Line:
  """Reads the flags.

  Args:
    argv: the script's name, then its arguments.

  Raises:
    ValueError: for a flag that has no value, or a wrong one.
  """
  values = flags.FlagValues()
  flags.DEFINE_string('agent', 'ppo', ', '.join(AGENTS), flag_values=values)
  flags.DEFINE_string(
    'variant',
    '',
    'of the experiment; empty is its default.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'workdir', '', 'of the run; empty is runs/NAME/TIME.', flag_values=values
  )
  flags.DEFINE_bool(
    'resume', False, 'go on with the run in --workdir.', flag_values=values
  )
  flags.DEFINE_string(
    'init_from', '', 'a run whose parameters to begin with.', flag_values=values
  )
  flags.DEFINE_string(
    'coordinator',
    '',
    'HOST:PORT of process 0 of several, or auto where JAX '
    'knows them, as on TPUs.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_processes', None, 'of the run.', 1, flag_values=values
  )
  flags.DEFINE_integer(
    'process_id', None, "this one's index.", 0, flag_values=values
  )
  flags.DEFINE_float(
    'start_seconds',
    120.0,
    'that processes wait for one another.',
    1.0,
    flag_values=values,
  )
  flags.DEFINE_float(
    'heartbeat_seconds',
    10.0,
    'after which a silent process is dead.',
    1.0,
    flag_values=values,
  )
  flags.DEFINE_float(
    'hang_seconds',
    600.0,
    'after which one that gets no further hangs.',
    1.0,
    flag_values=values,
  )
  flags.DEFINE_bool(
    'help', False, 'show this.', short_name='h', flag_values=values
  )
  try:
    rest = values(argv, known_only=True)[1:]
  except flags.Error as error:
    raise ValueError(str(error)) from error
  name = os.path.splitext(os.path.basename(argv[0]))[0]
  return Line(argv[0], name, values, rest)


def show_help(line: Line, get_config: Callable[..., ConfigDict]) -> None:
  """Prints the flags, and the fields of the configuration."""
  config = get_config(line.values.agent, line.values.variant)
  print(
    f'usage: python {line.script} [flags]\n{line.values.get_help()}'
    f'\nfields, with their defaults:\n{describe(config)}'
  )


def join(line: Line) -> Cluster:
  """Joins the processes of the run; alone where there is one.

  Raises:
    ValueError: if they cannot be joined.
  """
  values = line.values
  return cluster.start(
    values.coordinator,
    values.num_processes,
    values.process_id,
    start_seconds=values.start_seconds,
    heartbeat_seconds=values.heartbeat_seconds,
    hang_seconds=values.hang_seconds,
  )


def settle(
  line: Line,
  get_config: Callable[..., ConfigDict],
  together: Cluster,
  held: contextlib.ExitStack,
) -> tuple[ConfigDict, Files]:
  """The configuration and the files of the run, the same in all processes.

  Only process 0 looks at the disc.

  Args:
    line: of `read`.
    get_config: `(agent, variant) -> ConfigDict`.
    together: the processes.
    held: gets the lock of a run that is gone on with.

  Raises:
    ValueError: for a user's mistake, in any process.
  """
  values = line.values
  if together.is_distributed:
    together.compare(
      {
        f'--{k}': values[k].value
        for k in ('workdir', 'resume', 'init_from', 'agent', 'variant')
      }
      | {"podrl's code": cluster.version_of_code(), 'jax': jax.__version__}
    )
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')

  def find() -> tuple[str, bool, str]:
    path = values.workdir or os.path.join('runs', line.name, now)
    is_resumed = values.resume and workdir.is_run(path)
    agent = values.agent
    if is_resumed and not values['agent'].present:
      agent = workdir.read_config(path).agent.name
    return path, is_resumed, agent

  path, is_resumed, agent = together.decide(find)

  def parse() -> tuple[ConfigDict, set[str]]:
    config = get_config(agent, values.variant)
    asked = apply_overrides(config, line.rest)
    if values.variant:
      asked |= set(flatten(config.to_dict()))
    if values.resume and (not values.workdir or values.init_from):
      raise ValueError(
        '--resume goes on with a run: it needs --workdir, and --init_from '
        'begins another'
      )
    return config, asked

  config, asked = together.attempt(parse)
  if together.is_distributed:
    together.compare(
      {f'config.{k}': v for k, v in flatten(config.to_dict()).items()}
    )

  def look() -> tuple[dict, Files]:
    files = _look(config, path, values, asked, is_resumed, held)
    return config.to_dict(), files

  fields, files = together.decide(look)
  if together.is_distributed:
    config = workdir.as_config(fields)

  def check_all() -> None:
    check(config)
    check_sinks(config)

  together.attempt(check_all)
  return config, Files(*files)


def _look(
  config: ConfigDict,
  path: str,
  values: flags.FlagValues,
  asked: set[str],
  is_resumed: bool,
  held: contextlib.ExitStack,
) -> Files:
  """What is on disc; gives the configuration a resumed run's values."""
  if values.init_from:
    checkpoint.find(values.init_from)
  if not is_resumed:
    workdir.check_new(path)
    if values.resume:
      print(f'{path} holds no run: it begins', file=sys.stderr)
    return Files(path, values.init_from)
  if parent := workdir.run_of_agent(path):
    raise ValueError(
      f'--workdir={path} is one agent of {parent}; go on with that'
    )
  held.enter_context(workdir.lock(path))  # Before anything of it is read.
  if workdir.is_finished(path):
    raise ValueError(
      f'--workdir={path} is finished; --init_from={path} begins '
      'another run with its parameters'
    )
  for field in workdir.restore_config(config, path, asked):
    print(f'of the run: config.{field}', file=sys.stderr)
  return Files(path, '', True, checkpoint.count_resumes(path))
