"""Starts a run, new or resumed: decides its configuration and its files."""

from collections.abc import Callable
import contextlib
import os
import sys
import types
from typing import Any, NamedTuple

from absl import flags
import jax

from podrl import modules
from podrl.envs import SUITES
from podrl.fields import Fields, as_tuples, defaults
from podrl.messages import printable
from podrl.records import checkpoint, workdir
from podrl.records.workdir import short
from podrl.run.cluster import Cluster, version_of_code
from podrl.run.command_line import CommandLine
from podrl.run.config import (
  PARTS,
  change,
  changeable,
  check,
  check_trust,
  make_importable,
  parts_directory,
  table_of,
)


class Files(NamedTuple):
  """The files that a run starts with."""

  workdir: str  # The run's directory.
  init_from: str = ''  # A run that gives the initial parameters, or empty.
  is_resumed: bool = False  # Whether the run in `workdir` is continued.
  num_resumes: int = 0  # How often it has been resumed, this time included.


def _new_run(
  values: flags.FlagValues, config: Fields, directory: str
) -> tuple[Fields, Files]:
  """Returns the configuration and the files of a new run."""
  path = os.path.join(directory, values.workdir or workdir.default_path(config))
  if source := values.init_from:
    checkpoint.find(workdir.run_of_agent(source) or source)
  workdir.check_new(path, config)
  if values.resume:
    text = f'{short(path)} contains no run, so a new run starts'
    print(text, file=sys.stderr)
  # The run may be resumed in another directory.
  own = config['env.path'] or parts_directory(config)
  return {**config, 'env.path': own}, Files(path, values.init_from)


def _refuse_links(path: str, config: Fields) -> None:
  """Raises a ValueError if a run would write to directories elsewhere."""
  agents = {path, *workdir.agents(path, config)}
  names = {os.path.join(x, 'checkpoints') for x in agents} | agents - {path}
  if links := sorted(filter(os.path.islink, names)):
    raise ValueError(
      f'{links[0]} is a link, and you did not make this run; replace the link '
      'with a directory, or add --trust, or trust=True in Python'
    )


def _resume_run(
  path: str,
  config: Fields,
  requested: set[str],
  exit_stack: contextlib.ExitStack,
  trust: bool,
  init_from: str,
) -> tuple[Fields, Files]:
  """Returns the configuration and the files of the run in `path`.

  The configuration has the run's own values, except for the fields `requested`.
  `exit_stack` keeps the run locked. If `trust` is false, perhaps another user
  made the run. A run without a checkpoint begins from `init_from` again.
  """
  if parent := workdir.run_of_agent(path, or_series=True):
    raise ValueError(
      f'--workdir={short(path)} is one agent of {short(parent)}; use '
      f'--workdir={short(parent)}'
    )
  exit_stack.enter_context(workdir.lock(path))  # Lock it before reading it.
  saved = workdir.read_config(path)
  # A run of an earlier version lacks newer fields. The general defaults of such
  # fields do not change the run; the settings of a kind of task might.
  config, messages = workdir.restore_config(
    config,
    {**defaults(table_of(config)), **saved},
    path,
    requested,
    changeable(config),
  )
  total = config['total_env_steps']
  if workdir.is_finished(path, total):
    first = next(iter(workdir.agents(path, config)))
    raise ValueError(
      f'--workdir={short(path)} is finished; to extend it, set '
      f'config.total_env_steps to more than {total}; to start another run '
      f'with its parameters, use --init_from={short(first)}'
    )
  for part, _ in workdir.programs(path, config):
    num_resumes, num_updates, unit = checkpoint.last_progress(part)
    if -(-total // unit) < num_updates:
      raise ValueError(
        f'config.total_env_steps={total} is less than the '
        f'{num_updates * unit} steps that {part} has done; set a larger total'
      )
  for message in messages:
    print(printable(message), file=sys.stderr)
  if not trust:
    _refuse_links(path, saved)
  own = saved.get('env.path', '') if trust else parts_directory(saved)
  config = {**config, 'env.path': config['env.path'] or own}
  has_begun = bool(checkpoint.steps(path))
  return config, Files(path, '' if has_begun else init_from, True, num_resumes)


def _absolute(option: Any) -> Any:
  """Returns the absolute path of a run; other values stay as they are."""
  path = os.path.expanduser(str(option))
  return os.path.abspath(path) if workdir.is_run(path) else option


def resolve_config(
  command_line: CommandLine,
  get_config: Callable[..., Fields],
  cluster: Cluster,
  exit_stack: contextlib.ExitStack,
) -> tuple[Fields, Files]:
  """Decides the configuration and the files, which all processes share.

  `exit_stack` receives the lock of a run that is resumed.

  Raises:
    ValueError: in all processes, for a user's mistake in any process.
  """
  values = command_line.flags
  if cluster.is_distributed:
    names = ('workdir', 'resume', 'init_from', 'agent', 'variant')
    shared = {f'--{name}': values[name].value for name in names}
    shared["podrl's code"] = version_of_code()
    cluster.compare(shared | {'jax': jax.__version__})

  def find_run() -> tuple[bool, str, bool, dict[str, str], str]:
    path, agent, trust = values.workdir, values.agent, values.trust
    is_resumed = bool(path and values.resume and workdir.is_run(path))
    parts: dict[str, str] = {}
    directories = ''
    if is_resumed:
      named = command_line.named()
      own = workdir.read_config(path)
      saved = check_trust(path, own, values.trust, named)
      agent = agent if values['agent'].present else saved['agent.name']
      trust = trust or workdir.is_own(path, own)
      directories = saved.get('env.path', '')
      # The run may not be trusted to name these; see `check_trust`.
      parts = {k: saved[k] for k in PARTS if k not in named}
    return is_resumed, agent, trust, parts, directories

  is_resumed, agent, trust, parts, directories = cluster.decide(find_run)
  modules.add_to_path(*directories.split(os.pathsep))

  def make_config() -> tuple[Fields, set[str]]:
    given, values['trust'].value = values.trust, trust
    try:  # Process 0 decides for all: the others may have another key.
      config = get_config(agent, values.variant)
    finally:
      values['trust'].value = given
    config, requested = command_line.apply(change(config, parts))
    if values.variant:
      requested |= config.keys() - changeable(config)
    if values.init_from and workdir.is_series(config):
      raise ValueError(
        '--init_from does not work with '
        f'config.num_seeds={config["num_seeds"]} in Sebulba; train each seed '
        'with a separate command'
      )
    if values.resume and not values.workdir:
      raise ValueError('--resume continues a run: give its --workdir')
    return config, requested

  config, requested = cluster.attempt(make_config)
  if cluster.is_distributed:
    cluster.compare({f'config.{k}': v for k, v in config.items()})

  def find_files() -> tuple[Fields, Files]:
    modules.current_directory()  # It must exist.
    make_importable(config)
    options, suite = config['env.options'], SUITES.get(config['env.suite'])
    names = [x for x in (suite.policy_options if suite else ()) if x in options]
    paths = {name: _absolute(options[name]) for name in names}
    own = {**config, 'env.options': options | paths}
    own['eval.opponents'] = tuple(map(_absolute, config['eval.opponents']))
    if is_resumed:
      return _resume_run(
        values.workdir, own, requested, exit_stack, trust, values.init_from
      )
    return _new_run(values, own, command_line.directory)

  final, files = cluster.decide(find_files)  # Only process 0 runs this.
  final = types.MappingProxyType(as_tuples(final))
  cluster.attempt(lambda: check(final))
  return final, Files(*files)
