"""A run as files: what its directory holds, and whether it may be gone on with.

config.json    the configuration as run
metrics.jsonl  a record a line
decisions.jsonl  of sebulba.autotune, a decision a line
checkpoints/   one directory for each, named by its number of updates
summary.json   the last of each value, and how the run ended
seed_0/ ...    with several seeds: these files, but checkpoints, of each
"""

from collections.abc import Iterator, Set
import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import tempfile
from typing import Any

from ml_collections import ConfigDict
import numpy as np

Record = dict[str, Any]


class WriteError(RuntimeError):
  """A file of a run could not be written, as on a disc that is full."""


# Fields that change nothing of what is learnt.
IDLE = ('compilation_cache', 'price_per_hour', 'eval.', 'log.', 'checkpoint.')
# Fields, besides, with which a run may go on in another way.
MOVABLE = IDLE + (
  'num_devices',
  'sebulba.actor_devices',
  'sebulba.learner_devices',
  'sebulba.env_threads',
  'sebulba.hang_seconds',
)


def flatten(config: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """Fields by dotted name; `env.options` stays one field, a dictionary."""
  fields = {}
  for key, value in config.items():
    if isinstance(value, dict) and prefix + key != 'env.options':
      fields |= flatten(value, f'{prefix}{key}.')
    else:
      fields[prefix + key] = value
  return fields


def to_json(value: Any, indent: int | None = None) -> str:
  """Strict JSON: NaN and infinities, which it does not have, become null."""

  def plain(value: Any) -> Any:
    if isinstance(value, dict):
      return {k: plain(v) for k, v in value.items()}
    if isinstance(value, np.generic):
      value = value.item()
    return (
      None if isinstance(value, float) and not math.isfinite(value) else value
    )

  return json.dumps(plain(value), indent=indent, allow_nan=False)


def write_json(path: str, value: Any, *, overwrite: bool = True) -> None:
  """Writes a file of JSON whole, or not at all.

  Raises:
    FileExistsError: if it exists and must not be overwritten.
    OSError: if it cannot be written.
  """
  directory, name = os.path.split(path)
  with tempfile.NamedTemporaryFile(
    'w', dir=directory or '.', prefix=f'.{name}-', delete=False
  ) as file:
    try:
      file.write(to_json(value, indent=2) + '\n')
      file.flush()
      os.chmod(file.name, 0o644)
      if overwrite:
        os.replace(file.name, path)
      else:
        os.link(file.name, path)  # Of two together only one succeeds.
    finally:
      with contextlib.suppress(FileNotFoundError):
        os.unlink(file.name)


def read_json(path: str) -> dict[str, Any]:
  """Reads an object.

  Raises:
    ValueError: if there is none.
  """
  try:
    with open(path, encoding='utf-8') as file:
      value = json.load(file)
    if not isinstance(value, dict):
      raise ValueError('it holds no object')
    return value
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f'{path} cannot be read: {error}') from error


def is_run(path: str) -> bool:
  """Whether a directory holds a run, which may be under way."""
  return os.path.exists(os.path.join(path, 'config.json'))


def run_of_agent(path: str) -> str | None:
  """The run of several agents of which a directory is one agent's, if it is."""
  parent, name = os.path.split(os.path.abspath(path))
  if (
    not re.fullmatch(r'seed_\d+', name)
    or not is_run(parent)
    or (os.path.exists(os.path.join(path, 'checkpoints')))
  ):
    return None
  return parent if read_config(parent).get('num_seeds', 1) > 1 else None


def set_aside(path: str) -> str:
  """Renames a file or directory, and returns its new name."""
  for i in itertools.count():
    name = f'{path}.set_aside' + (f'_{i}' if i else '')
    if not os.path.lexists(name):
      os.rename(path, name)
      return name


def is_finished(path: str) -> bool:
  """Whether a run has come to its end."""
  summary = os.path.join(path, 'summary.json')
  return os.path.exists(summary) and read_json(summary).get('exit') == 'done'


def read_config(path: str) -> ConfigDict:
  """The configuration of a run.

  Raises:
    ValueError: if there is none, or it is no configuration.
  """
  if not is_run(path):
    raise ValueError(f'{path} is not a run: it has no config.json')
  fields = read_json(os.path.join(path, 'config.json'))
  flat = flatten(fields)
  if not {'agent.name', 'env.name', 'network.name', 'optimizer.name'} <= set(
    flat
  ) or not isinstance(flat.get('env.options'), dict):
    raise ValueError(f'{path}/config.json is no configuration of a run')
  return as_config(fields)


def as_config(fields: dict[str, Any]) -> ConfigDict:
  """The configuration that JSON tells of."""

  def tuples(value: Any) -> Any:  # JSON knows lists alone.
    if isinstance(value, dict):
      return {k: tuples(v) for k, v in value.items()}
    return tuple(value) if isinstance(value, list) else value

  config = ConfigDict(tuples(fields)).lock()
  config.env.options.unlock()
  return config


def read_records(path: str, name: str = 'metrics.jsonl') -> list[Record]:
  """The lines of `metrics.jsonl`; a last one that has no end is left out.

  Args:
    path: of the run's directory.
    name: of another file, whose lines also tell of when they were written.

  Raises:
    ValueError: if there is no such file, or a line is damaged.
  """
  path = os.path.join(path, name)
  try:
    with open(path, encoding='utf-8') as file:
      lines = file.read().split('\n')
  except (OSError, ValueError) as error:
    raise ValueError(f'{path} cannot be read: {error}') from error
  records = []
  for number, line in enumerate(lines[:-1], 1):
    try:
      record = json.loads(line)
      if not {'num_updates', 'env_steps'} <= set(record):
        raise ValueError
      records.append(record)
    except (ValueError, TypeError) as error:
      raise ValueError(f'{path} is damaged in line {number}') from error
  return records


def check_new(path: str) -> None:
  """Raises a ValueError where a run cannot be written, or one is."""
  if any(
    os.path.exists(os.path.join(path, name))
    for name in ('config.json', 'metrics.jsonl', 'checkpoints')
  ):
    raise ValueError(
      f'--workdir={path} holds another run; go on with it by --resume, or '
      'choose a new directory'
    )
  parent = os.path.abspath(path)
  while not os.path.lexists(parent):
    parent = os.path.dirname(parent)
  if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
    raise ValueError(
      f'--workdir={path} cannot be written, because of {parent}; '
      'choose another directory'
    )


def make(path: str, config: ConfigDict) -> None:
  """Makes the directories and writes the configurations as run.

  Raises:
    ValueError: if they cannot be written, or hold a run.
  """
  try:
    os.makedirs(path, exist_ok=True)
    for seed, directory in seed_directories(path, config):
      if directory != path:
        os.makedirs(directory, exist_ok=True)
        write_json(
          os.path.join(directory, 'config.json'),
          config.to_dict() | {'seed': seed, 'num_seeds': 1},
        )
    write_json(
      os.path.join(path, 'config.json'), config.to_dict(), overwrite=False
    )
  except OSError as error:
    raise ValueError(
      f'--workdir={path} cannot be written ({error.strerror}); '
      'choose another directory'
    ) from error


def seed_directories(path: str, config: ConfigDict) -> list[tuple[int, str]]:
  """The seed and the directory of each of a run's agents."""
  num_seeds = config.get('num_seeds', 1)
  if num_seeds == 1:
    return [(config.seed, path)]
  return [
    (config.seed + i, os.path.join(path, f'seed_{i}')) for i in range(num_seeds)
  ]


@contextlib.contextmanager
def lock(path: str) -> Iterator[None]:
  """Holds a run for this process alone.

  Raises:
    ValueError: if another process has it.
  """
  with open(os.path.join(path, 'config.json'), encoding='utf-8') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(
        f'{path} is being written by another process; end that one first'
      ) from error
    yield


def settle(config: ConfigDict, path: str, asked: Set[str]) -> list[str]:
  """Gives a configuration the values of the run that it is to go on with.

  Args:
    config: of the command line, changed in place. What it says of devices,
      evaluation, logs and checkpoints stays.
    path: of the run.
    asked: names of the fields that the command line sets.

  Returns:
    The fields that had other values, written `NAME=VALUE` as the run has them.

  Raises:
    ValueError: where a field that was asked for, or the task, is another one
      than the run's: named, with both values.
  """
  ours, theirs = (flatten(c.to_dict()) for c in (config, read_config(path)))
  differing = [
    k
    for k in theirs
    if k in ours and theirs[k] != ours[k] and (not k.startswith(MOVABLE))
  ]
  task = {'env.name', 'env.suite', 'agent.name'} & set(differing)
  refused = [k for k in differing if k in asked or task]
  if refused:
    raise ValueError(
      f'{path} was run with another configuration: '
      + '; '.join(
        f'config.{k} is {theirs[k]} there and {ours[k]} here' for k in refused
      )
      + '; --init_from takes the parameters alone'
    )
  if extra := sorted(set(theirs) - set(ours)):
    raise ValueError(
      f'{path} has fields that this experiment does not know, as of another '
      f'experiment or a newer version: {", ".join(extra)}'
    )
  for name in differing:
    *parents, field = name.split('.')
    node = config
    for parent in parents:
      node = node[parent]
    try:
      node[field] = theirs[name]
    except TypeError as error:
      raise ValueError(
        f'{path}/config.json has {name}={theirs[name]!r}: {error}'
      ) from error
  return [f'{k}={theirs[k]}' for k in differing]
