"""The files of a run.

config.json      the configuration that the run uses
metrics.jsonl    one record per line
decisions.jsonl  one decision of sebulba.autotune per line
checkpoints/     one directory per checkpoint, named by its number of updates
summary.json     the last value of each metric, and how the run ended
seed_0/ ...      with several seeds: the same files per seed, but no checkpoints
"""

from collections.abc import Iterator, Set
import contextlib
import datetime
import fcntl
import functools
import itertools
import json
import os
import re
from typing import Any
import uuid

from ml_collections import ConfigDict
import numpy as np

Record = dict[str, Any]

# A resumed run may change these fields, because they do not change what it
# learns, apart from rounding errors.
MOVABLE = tuple(
  'compilation_cache price_per_hour eval. log. checkpoint. num_devices '
  'env.path sebulba.actor_devices sebulba.learner_devices sebulba.env_threads '
  'sebulba.hang_seconds'.split()
)
# It may change these only where its command line sets them; `config.json` then
# gets the new value.
CHANGEABLE = ('total_env_steps',)
_TASK = {'env.name', 'env.suite', 'agent.name'}
_REQUIRED = {'agent.name', 'env.name', 'network.name', 'optimizer.name'}


class WriteError(RuntimeError):
  """A file of the run could not be written, for example on a full disk."""


@contextlib.contextmanager
def write_errors(what: str, kind: type[Exception] = Exception) -> Iterator:
  """Turns errors of one kind into a `WriteError` that says what failed."""
  try:
    yield
  except kind as error:
    message = f'{what} could not be written: {one_line(error)}'
    raise WriteError(message) from error


def one_line(error: BaseException) -> str:
  """The message of an exception in one line."""
  return ' '.join(str(error).split())[:200] or type(error).__name__


def flatten(config: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns fields by dotted name; `env.options` stays one field, a dict."""
  fields: dict[str, Any] = {}
  for key, value in config.items():
    name = prefix + key
    is_section = isinstance(value, dict) and name != 'env.options'
    fields |= flatten(value, f'{name}.') if is_section else {name: value}
  return fields


def to_json(value: Any, indent: int | None = None) -> str:
  """Returns strict JSON, in which NaN and infinity become null."""
  text = json.dumps(value, default=np.generic.item)
  finite = json.loads(text, parse_constant=lambda name: None)
  return json.dumps(finite, indent=indent)


def write_json(path: str, value: Any, *, overwrite: bool = True) -> None:
  """Writes a JSON file atomically; raises an OSError if it cannot."""
  directory, name = os.path.split(path)
  temporary = os.path.join(directory, f'.{name}-{uuid.uuid4().hex}')
  publish = os.replace if overwrite else os.link  # Links never overwrite.
  try:
    with open(temporary, 'w', encoding='utf-8') as file:
      file.write(to_json(value, indent=2) + '\n')
    publish(temporary, path)
  finally:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(temporary)


def read_json(path: str) -> dict[str, Any]:
  """Reads a JSON object; raises a ValueError if the file contains none."""
  try:
    with open(path, encoding='utf-8') as file:
      value = json.load(file)
    if not isinstance(value, dict):
      raise ValueError('it does not hold a JSON object')
    return value
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f'{path} cannot be read: {error}') from error


def task_name(config: ConfigDict) -> str:
  """The name of the task, with only characters that suit a file name."""
  return re.sub(r'[^\w.+-]+', '-', config.env.name)


def default_path(config: ConfigDict) -> str:
  """The directory of a run that begins now: `runs/TASK/AGENT-TIME`."""
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')
  return os.path.join('runs', task_name(config), f'{config.agent.name}-{now}')


def is_run(path: str) -> bool:
  """Whether a directory holds a run, finished or not."""
  return os.path.exists(os.path.join(path, 'config.json'))


def is_finished(path: str, total_env_steps: int) -> bool:
  """Whether the run in a directory has done all its updates.

  An extended run has the summary of its smaller total until it ends again.
  """
  file = os.path.join(path, 'summary.json')
  summary = read_json(file) if os.path.exists(file) else {}
  is_done = summary.get('exit') == 'done'
  return is_done and summary.get('total_env_steps') == total_env_steps


def run_of_agent(path: str) -> str | None:
  """Returns the run whose directory contains `seed_N` of one agent, or None."""
  parent, name = os.path.split(os.path.abspath(path))
  is_seed = re.fullmatch(r'seed_\d+', name) and is_run(parent)
  if not is_seed or os.path.exists(os.path.join(path, 'checkpoints')):
    return None
  return parent if read_config(parent).get('num_seeds', 1) > 1 else None


def seed_directories(path: str, config: ConfigDict) -> list[tuple[int, str]]:
  """Returns the seed and the directory of each agent of a run."""
  seeds = range(config.get('num_seeds', 1))
  if len(seeds) == 1:
    return [(config.seed, path)]
  return [(config.seed + i, os.path.join(path, f'seed_{i}')) for i in seeds]


def set_aside(path: str) -> None:
  """Renames a file or directory, so that its name is free again."""
  free_name, numbers = f'{path}.set_aside', itertools.count(1)
  while os.path.lexists(free_name):
    free_name = f'{path}.set_aside_{next(numbers)}'
  os.rename(path, free_name)


def as_config(fields: dict[str, Any]) -> ConfigDict:
  """Makes a configuration from the contents of `config.json`."""

  def tuples(value: Any) -> Any:  # JSON has no tuples.
    if isinstance(value, dict):
      return {k: tuples(v) for k, v in value.items()}
    return tuple(value) if isinstance(value, list) else value

  config = ConfigDict(tuples(fields)).lock()
  config.env.options.unlock()
  return config


def read_config(path: str) -> ConfigDict:
  """Reads the configuration of a run; raises a ValueError if there is none."""
  if not is_run(path):
    raise ValueError(f'{path} is not a run: it has no config.json')
  fields = read_json(os.path.join(path, 'config.json'))
  names = flatten(fields)
  has_options = isinstance(names.get('env.options'), dict)
  if not (has_options and _REQUIRED <= set(names)):
    raise ValueError(f'{path}/config.json is not the configuration of a run')
  return as_config(fields)


def read_records(path: str, name: str = 'metrics.jsonl') -> list[Record]:
  """Reads the records of a run; an incomplete last line is ignored."""
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
  """Raises a ValueError if a directory cannot be written or holds a run."""
  names = ('config.json', 'metrics.jsonl', 'checkpoints')
  if any(os.path.exists(os.path.join(path, name)) for name in names):
    raise ValueError(
      f'--workdir={path} already holds a run; add --resume to continue it, or '
      'choose another directory'
    )
  parent = os.path.abspath(path)
  while not os.path.lexists(parent):
    parent = os.path.dirname(parent)
  if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
    raise ValueError(
      f'--workdir={path} cannot be written: {parent} is not a directory with '
      'write permission; choose another directory'
    )


def make(path: str, config: ConfigDict) -> None:
  """Creates the directories of a run and writes its configuration."""
  try:
    for seed, directory in seed_directories(path, config):
      os.makedirs(directory, exist_ok=True)
      if directory != path:
        fields = config.to_dict() | {'seed': seed, 'num_seeds': 1}
        write_json(os.path.join(directory, 'config.json'), fields)
    file = os.path.join(path, 'config.json')
    write_json(file, config.to_dict(), overwrite=False)
  except OSError as error:
    raise ValueError(
      f'--workdir={path} cannot be written ({error.strerror}); '
      'choose another directory'
    ) from error


def update_config(path: str, config: ConfigDict) -> None:
  """Writes the values of `CHANGEABLE` fields to the files of a run."""
  fields = flatten(config.to_dict())
  values = {name: fields[name] for name in CHANGEABLE}
  # The run's own file comes first: a run that is killed in between resumes with
  # the new values, and writes the other files then.
  directories = [x for _, x in seed_directories(path, config)]
  for directory in dict.fromkeys([path, *directories]):
    saved = read_config(directory)
    if not values.items() <= flatten(saved.to_dict()).items():
      saved.update_from_flattened_dict(values)
      write_json(os.path.join(directory, 'config.json'), saved.to_dict())


@contextlib.contextmanager
def lock(path: str) -> Iterator[None]:
  """Locks a run; raises a ValueError if another process is writing to it."""
  # The directory, not a file in it: files are replaced while the run is locked.
  directory = os.open(path, os.O_RDONLY)
  try:
    try:
      fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(
        f'another process is writing to {path}; stop that process first'
      ) from error
    yield
  finally:
    os.close(directory)


def restore_config(
  config: ConfigDict, path: str, overridden: Set[str]
) -> list[str]:
  """Copies the configuration of a run, except `MOVABLE` fields, into `config`.

  `overridden` names the fields that the command line sets; they must not differ
  from those of the run, unless they are `CHANGEABLE`. It returns a message for
  each field that differed.
  """
  ours, theirs = (flatten(c.to_dict()) for c in (config, read_config(path)))
  differing = [
    name
    for name, value in theirs.items()
    if name in ours and value != ours[name] and not name.startswith(MOVABLE)
  ]
  changed = overridden & {*differing} & {*CHANGEABLE}
  is_other_task = not _TASK.isdisjoint(differing)
  if refused := '; '.join(
    f'config.{name} is {theirs[name]} in the run, but {ours[name]} now'
    for name in differing
    if name not in changed and (name in overridden or is_other_task)
  ):
    raise ValueError(
      f'{path} was run with another configuration: {refused}; '
      'use --init_from to start a new run with its parameters'
    )
  if unknown := ', '.join(sorted(set(theirs) - set(ours))):
    raise ValueError(
      f'{path} has fields that this experiment does not have: {unknown}; '
      'resume it with the experiment and the version of podrl that wrote it'
    )
  messages = []
  for name in differing:
    value = theirs[name]
    if name in changed:
      messages.append(f'config.{name}={ours[name]} replaces {value}')
      continue
    messages.append(
      f'the resumed run keeps its saved value: config.{name}={value}'
    )
    *parents, field = name.split('.')
    try:
      functools.reduce(getattr, parents, config)[field] = value
    except TypeError as error:
      raise ValueError(
        f'{path}/config.json has {name}={value!r}: {error}'
      ) from error
  return messages
