"""The files of a run.

config.json      the configuration that the run uses, with a signature
metrics.jsonl    one record per line
episodes.csv     one finished episode per line, with log.episodes
videos/          one GIF per evaluation, with log.videos
decisions.jsonl  one decision of sebulba.autotune, or of a population, per line
checkpoints/     one directory per checkpoint, named by its number of updates
.lock            locked by the process that writes the run, whose name it has
summary.json     the last value of each metric, and how the run ended
seed_0/ ...      with several seeds, a directory with these files for each seed
member_0/ ...    the same for each member of a sweep, see `agents`

Anakin trains several agents together, and saves all of them in the run's
checkpoints. With Sebulba, each seed is a separate run with its own checkpoints
(`is_series`). At the end, the run's directory gets the means of all agents.
"""

from collections.abc import Iterator, Set
import contextlib
import datetime
import errno
import fcntl
import glob
import hashlib
import hmac
import itertools
import json
import math
import os
import re
import secrets
import shutil
import socket
from typing import Any
import uuid

import numpy as np

from podrl.fields import Fields, as_tuples, flatten, nest
from podrl.messages import one_line, printable

Record = dict[str, Any]

# A resumed run may change these fields, because they do not change what it
# learns, apart from rounding errors.
MOVABLE = tuple(
  'compilation_cache gpu_deterministic price_per_hour eval. stop. log. '
  'checkpoint. num_devices env.path sebulba.actor_devices '
  'sebulba.learner_devices sebulba.env_threads sebulba.hang_seconds'.split()
)
# Fields, or prefixes of fields, in which compared runs may differ.
SEEDS = ('seed', 'num_seeds') + MOVABLE
_TASK = {'env.name', 'env.suite', 'agent.name'}
_NAMES = 'agent.name', 'env.name', 'network.name', 'optimizer.name'
_REQUIRED = {*_NAMES}
# The configuration of a run whose agent is loaded must also have these.
_REQUIRED_TO_LOAD = _REQUIRED.union(
  'agent.normalize_reward env.num_envs env.suite total_env_steps'.split()
)
# A checkpoint or a compilation may need longer than --hang_seconds, but no
# longer than this.
SAVE_SECONDS = 3600
_SIGNATURE = 'signature'  # A field of `config.json` that is not a setting.


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


def to_json(value: Any, indent: int | None = None) -> str:
  """Returns strict JSON, in which NaN and infinity become null."""
  text = json.dumps(value, default=np.generic.item)
  finite = json.loads(text, parse_constant=lambda name: None)
  return json.dumps(finite, indent=indent)


def open_no_link(path: str, flags: int) -> int:
  """Opens a file, but not through a link; an `opener` of `open`."""
  return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
  """Yields the name of a temporary file, which then replaces the file `path`.

  So the file is written atomically, and never through a link. It raises an
  OSError if this fails. Both names have the same ending.
  """
  directory, name = os.path.split(path)
  temporary = os.path.join(directory, f'.{uuid.uuid4().hex}-{name}')
  try:
    yield temporary
    os.replace(temporary, path)
  finally:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(temporary)


def write_text(path: str, text: str) -> None:
  """Writes a file; see `replacing`."""
  with replacing(path) as temporary:
    with open(temporary, 'w', encoding='utf-8') as file:
      file.write(text)


def write_json(path: str, value: Any) -> None:
  """Writes a JSON file; see `write_text`."""
  write_text(path, to_json(value, indent=2) + '\n')


def read_json(path: str) -> dict[str, Any]:
  """Reads a JSON object; raises a ValueError if the file contains none."""
  try:
    with open(path, encoding='utf-8') as file:
      value = json.load(file)
    if not isinstance(value, dict):
      raise ValueError('it does not contain a JSON object')
    return value
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f'{path} cannot be read: {error}') from error


def key_path() -> str:
  """Returns the file with the key that signs this user's runs."""
  home = os.environ.get('XDG_STATE_HOME', '')
  if not os.path.isabs(home):
    home = os.path.expanduser('~/.local/state')
  return os.path.join(home, 'podrl', 'key')


def _read_key() -> bytes:
  """Reads the user's key; empty if others could have read or written it."""
  try:
    descriptor = os.open(key_path(), os.O_RDONLY | os.O_NOFOLLOW)
  except OSError:
    return b''
  with open(descriptor, 'rb') as file:
    status = os.fstat(descriptor)
    is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
    return file.read() if is_private else b''


def _make_key() -> None:
  """Makes the user's key if there is none; without a home, there is no key."""
  path = key_path()
  temporary = f'{path}-{uuid.uuid4().hex}'
  with contextlib.suppress(OSError):
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(temporary, flags, 0o600), 'wb') as file:
      file.write(secrets.token_bytes(32))
    try:
      os.link(temporary, path)  # It fails if another process was first.
    finally:
      os.unlink(temporary)


def _signature(fields: dict[str, Any]) -> str:
  """Returns the signature of a configuration; empty if there is no key."""
  text = json.dumps(json.loads(to_json(fields)), sort_keys=True)
  key = _read_key()
  return hmac.new(key, text.encode(), hashlib.sha256).hexdigest() if key else ''


def _write_config(path: str, config: Fields) -> None:
  """Writes and signs the `config.json` of a run that this user makes."""
  if not os.path.lexists(key_path()):
    _make_key()
  fields = nest(config)
  signature = _signature(fields)
  signed = fields | ({_SIGNATURE: signature} if signature else {})
  write_json(os.path.join(path, 'config.json'), signed)


def is_own(path: str, config: Fields) -> bool:
  """Returns whether this user's key signed `config` of the run in `path`.

  The signature is that of the contents, so it holds in any directory.
  """
  saved = read_json(os.path.join(path, 'config.json'))
  found = saved.pop(_SIGNATURE, None)
  expected = _signature(saved)
  return (
    bool(expected)
    and hmac.compare_digest(
      str(found).encode(errors='replace'), expected.encode()
    )
    and flatten(as_tuples(saved)) == config
  )


def sign(path: str, config: Fields) -> None:
  """Signs the configuration of a run, if its directory can be written."""
  if not is_own(path, config):
    with contextlib.suppress(OSError):
      _write_config(path, config)


def task_name(config: Fields) -> str:
  """Returns the task's name, with only characters that suit a file name."""
  return re.sub(r'[^\w.+-]+', '-', config['env.name'])


def agent_name(config: Fields) -> str:
  """Returns the agent's name; see `task_name`."""
  return re.sub(r'[^\w.+-]+', '-', config['agent.name'])


_start = ''  # The current directory of the last command.


def note_start() -> str:
  """Returns the current directory, which `short` uses; '' if it is deleted."""
  global _start
  try:
    _start = os.getcwd()
  except OSError:
    _start = ''
  return _start


def absolute(path: str) -> str:
  """Returns a path that stays the same if the current directory changes.

  An environment may change it. A leading `~` becomes the home directory: bash
  does not replace it in `--workdir=~/x`.
  """
  path = os.path.expanduser(path)
  try:
    return os.path.abspath(path) if path else ''
  except OSError:  # The current directory is deleted; a later message says so.
    return path


def short(path: str) -> str:
  """Returns a path as the user may type it where the command started."""
  return path.removeprefix(os.path.join(_start, '')) if _start else path


def default_path(config: Fields) -> str:
  """Returns the directory of a run that begins now: `runs/TASK/AGENT-TIME`."""
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')
  return os.path.join('runs', task_name(config), f'{agent_name(config)}-{now}')


def is_run(path: str) -> bool:
  """Returns whether a directory contains a run, finished or not."""
  return os.path.exists(os.path.join(path, 'config.json'))


def read_summary(path: str) -> dict[str, Any]:
  """Reads a run's `summary.json`; it is empty if the run has not ended."""
  file = os.path.join(path, 'summary.json')
  return read_json(file) if os.path.exists(file) else {}


def is_finished(path: str, total_env_steps: int) -> bool:
  """Returns whether the run in a directory has done all its updates.

  Until an extended run ends, its summary still has the earlier total.
  """
  summary = read_summary(path)
  is_done = summary.get('exit') == 'done'
  return is_done and summary.get('total_env_steps') == total_env_steps


def is_series(config: Fields) -> bool:
  """Returns whether the seeds are separate runs, trained one after another."""
  return 'sebulba.mode' in config and config.get('num_seeds', 1) > 1


def refuse_series(path: str, config: Fields) -> None:
  """Raises a ValueError if a run has its agents in separate runs."""
  if is_series(config):
    raise ValueError(
      f'{path} has {num_agents(config)} agents; name one, for example '
      f'{path}/seed_0'
    )


def run_of_agent(path: str, *, or_series: bool = False) -> str | None:
  """Returns the run that contains an agent's directory `RUN/seed_N`, or None.

  RUN/member_N is an agent's directory too. In a series, each seed is a separate
  run. The result is then None, or the directory of the series if `or_series` is
  true.
  """
  path = os.path.abspath(path)
  parent, name = os.path.split(path)
  if not (name.startswith(('seed_', 'member_')) and is_run(parent)):
    return None
  config = read_config(parent)
  is_agent = path in agents(parent, config)
  return parent if is_agent and (or_series or not is_series(config)) else None


def num_agents(config: Fields) -> int:
  """Returns the number of agents of a run."""
  return len(config.get('members', ())) or config.get('num_seeds', 1)


def are_alike(config: Fields) -> bool:
  """Returns whether the agents of a run differ only in their seeds."""
  own = [dict(x) | {'seed': 0} for x in config.get('members', ())]
  return all(x == own[0] for x in own)


def compared(fields: Fields) -> str:
  """Returns a text that is equal for runs that differ only in `SEEDS`."""
  kept = {k: v for k, v in fields.items() if not k.startswith(SEEDS)}
  return json.dumps(kept, sort_keys=True)


def agents(path: str, config: Fields) -> dict[str, Fields]:
  """Maps the directory of each agent of a run to that agent's configuration.

  The agents of a sweep differ in the fields of `config.members`, a tuple with a
  dictionary of fields for each. Those of other runs differ only in their seeds.
  """
  number = num_agents(config)
  if number == 1:
    return {path: config}
  seeds = [{'seed': config['seed'] + i, 'num_seeds': 1} for i in range(number)]
  kind = 'member' if 'members' in config else 'seed'
  base = {k: x for k, x in config.items() if k != 'members'}
  return {
    os.path.join(path, f'{kind}_{i}'): base | own
    for i, own in enumerate(config.get('members', seeds))
  }


def paths_of_agents(path: str) -> list[str]:
  """Returns the directories of a run's agents; `path` may be one of them."""
  if not is_run(path) or run_of_agent(path):
    return [path]
  return [*agents(path, read_config(path))]


def programs(path: str, config: Fields) -> list[tuple[str, Fields]]:
  """Returns each program's directory and configuration; see `is_series`."""
  if not is_series(config):
    return [(path, config)]
  return [*agents(path, config).items()]


def set_aside(path: str) -> None:
  """Renames a file or directory, so that its name is free again."""
  os.rename(path, free_name(path))


def free_name(path: str) -> str:
  """Returns an unused name, to which a file or directory can be renamed."""
  name, numbers = f'{path}.set_aside', itertools.count(1)
  while os.path.lexists(name):
    name = f'{path}.set_aside_{next(numbers)}'
  return name


def read_config(path: str, required: Set[str] = _REQUIRED) -> dict[str, Any]:
  """Reads the configuration of a run.

  It raises a ValueError if there is no run, or if a required field is missing.
  """
  if not is_run(path):
    message = f'{path} is not a run: it has no config.json'
    if os.path.exists(os.path.join(path, 'policy.json')):
      message = f'{path} is an exported policy, not a run; use podrl.load'
    inside = glob.glob(os.path.join(glob.escape(path), '*', 'config.json'))
    if inside:
      newest = max(inside, key=os.path.getmtime)
      message += f'; it contains the run {os.path.dirname(newest)}'
    raise ValueError(message)
  fields = read_json(os.path.join(path, 'config.json'))
  fields.pop(_SIGNATURE, None)
  config = flatten(as_tuples(fields))
  for name in (*_NAMES, 'env.path', 'env.suite'):
    if not str(config.get(name, '')).isprintable():
      raise ValueError(
        f'{path}/config.json has control characters in {name}='
        f'{ascii(config[name])}'
      )
  has_options = isinstance(config.get('env.options'), dict)
  if not (has_options and required <= config.keys()):
    raise ValueError(f'{path}/config.json is not the configuration of a run')
  return config


def parse_record(line: str) -> Record:
  """Reads a line of `metrics.jsonl`; raises a ValueError if it is damaged."""
  try:
    record = json.loads(line)
  except RecursionError as error:
    raise ValueError('it has too many brackets') from error
  fields = record if isinstance(record, dict) else {}
  for name in 'num_updates', 'env_steps':
    value: Any = fields.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < math.inf):
      raise ValueError('it is not a record')
  if any(isinstance(x, int) and abs(x) >= 2**63 for x in fields.values()):
    raise ValueError('a number is too large')  # No array can contain it.
  return record


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
      records.append(parse_record(line))
    except ValueError as error:
      raise ValueError(f'{path} is damaged in line {number}') from error
  return records


def check_new(path: str, config: Fields) -> None:
  """Raises a ValueError if a new run cannot be written to a directory.

  The directory must be writable. Neither this directory nor the directories of
  the run's seeds may contain a run.
  """
  if is_run(path):
    raise ValueError(
      f'--workdir={path} already contains a run; add --resume to continue it, '
      'or choose another directory'
    )
  names = [
    os.path.join(directory, name)
    for directory in dict.fromkeys([path, *agents(path, config)])
    for name in ('metrics.jsonl', 'checkpoints')
  ]
  if found := [os.path.relpath(x, path) for x in names if os.path.exists(x)]:
    raise ValueError(
      f'--workdir={path} contains {" and ".join(found)} of a run, but its '
      'config.json is missing; restore that file from a backup, or choose '
      'another directory'
    )
  parent = os.path.abspath(path)
  while not os.path.lexists(parent):
    parent = os.path.dirname(parent)
  if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
    raise ValueError(
      f'--workdir={path} cannot be written: {parent} is not a directory with '
      'write permission; choose another directory'
    )


def make(path: str, config: Fields) -> None:
  """Writes a new run to a locked directory, or raises a ValueError."""
  check_new(path, config)  # Another run may have begun and ended since.
  try:
    # The run's main file comes last: without it, there is no run.
    contents = {**agents(path, config), path: config}
    for directory, own in contents.items():
      os.makedirs(directory, exist_ok=True)
      _write_config(directory, own)
  except OSError as error:
    raise ValueError(
      f'--workdir={path} cannot be written ({error.strerror}); '
      'choose another directory'
    ) from error


def update_config(path: str, config: Fields, changeable: Set[str]) -> None:
  """Writes what a resumed run changes to each `config.json`, and signs it.

  These are the fields `changeable`, and `env.path`: this user trusts the path
  of `config`, but perhaps not the saved one. It raises a `WriteError` if this
  fails.
  """
  # Write the run's main file first. If the process is killed before the next
  # file, a resumed run reads the new values and writes the other files.
  contents = {path: config} | agents(path, config)
  for directory, own in contents.items():
    saved, names = read_config(directory), {*changeable, 'env.path'}
    updated = saved | {k: own[k] for k in names & own.keys() & saved.keys()}
    if updated != saved or not is_own(directory, saved):
      with write_errors('config.json', OSError):
        _write_config(directory, updated)


@contextlib.contextmanager
def lock(path: str) -> Iterator[None]:
  """Locks a run's directory, new or not.

  Raises:
    ValueError: if this fails, or if the file system lacks an operation that a
      run needs.
    WriteError: if the disk is full, which may pass.
  """
  with contextlib.ExitStack() as stack:
    try:
      os.makedirs(path, exist_ok=True)
      # The lock needs a separate file, because a run replaces its other files.
      # The file is open for writing, because NFS requires this for a lock.
      name = os.path.join(path, '.lock')
      descriptor = open_no_link(name, os.O_RDWR | os.O_CREAT)
      file = stack.enter_context(open(descriptor, 'r+', errors='replace'))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        holder = printable(' '.join(file.read(200).split()))
        raise ValueError(
          f'{holder or "another process"} is writing to {path}; stop that '
          'process first'
        ) from error
      file.truncate(0)
      file.write(f'process {os.getpid()} of {socket.gethostname()}')
      file.flush()
      os.fsync(file)  # Other hosts then see it, even in a bucket.
    except OSError as error:
      raise _kind(error)(
        f'--workdir={path} cannot be locked ({error.strerror}); choose another '
        'directory'
      ) from error
    _check_file_system(path)
    yield


def _kind(error: OSError) -> type[Exception]:
  """Returns `WriteError` for a full disk, and ValueError otherwise."""
  is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
  return WriteError if is_full else ValueError


def _check_file_system(path: str) -> None:
  """Raises an error if a directory refuses an operation of a run; see `lock`.

  Otherwise, a bucket that is mounted as a directory would make the run fail at
  its first checkpoint, and lose what it has learned until then.
  """
  probe = os.path.join(path, f'.probe-{uuid.uuid4().hex}')
  file, what = os.path.join(probe, 'file'), 'create a directory'
  try:
    os.mkdir(probe)
    what = 'create a file'
    write_text(file, 'line\n')
    what = 'rename a file to the name of another'
    write_text(file, 'line\n')
    what = 'append to a file'
    with open(file, 'a', encoding='utf-8', opener=open_no_link) as lines:
      lines.write('line\n')
    what = 'rename a directory'
    os.rename(probe, f'{probe}-renamed')
    probe = f'{probe}-renamed'
    what = 'delete a directory'
    shutil.rmtree(probe)
  except OSError as error:
    shutil.rmtree(probe, ignore_errors=True)
    raise _kind(error)(
      f'--workdir={path}: its file system cannot {what} ({error.strerror}), '
      'which a run needs; choose another directory, or mount the bucket in '
      'another way'
    ) from error


def restore_config(
  config: Fields,
  theirs: Fields,
  path: str,
  overridden: Set[str],
  changeable: Set[str],
) -> tuple[dict[str, Any], list[str]]:
  """Gives `config` the values of a run, except those of `MOVABLE` fields.

  `theirs` is the configuration of the run in `path`, with newer fields too.
  `overridden` names the fields that the command line sets. Their values must be
  equal to those of the run, unless the fields are `changeable`. The members of
  a population have hyperparameters of their own, so only its total may change.
  The function returns the result, and a message for each field that differed.
  """
  ours = dict(config)
  is_population = 'population.every_env_steps' in theirs
  changeable = {'total_env_steps'} if is_population else changeable
  differing = [
    name
    for name, value in theirs.items()
    if name in ours and value != ours[name] and not name.startswith(MOVABLE)
  ]
  changed = overridden & {*differing} & changeable
  is_other_task = not _TASK.isdisjoint(differing)
  if refused := '; '.join(
    f'config.{name} is {theirs[name]} in the run, but {ours[name]} now'
    for name in differing
    if name not in changed and (name in overridden or is_other_task)
  ):
    name = theirs['env.name']
    what = f'{path} was run with another configuration'
    if name != ours['env.name']:
      what = f'{path} is a run of {name}, not of {ours["env.name"]}'
    raise ValueError(
      f'{what}: {refused}; '
      'use --init_from to start a new run with its parameters'
    )
  if unknown := ', '.join(sorted(set(theirs) - set(ours))):
    raise ValueError(
      f'{path} has fields that this experiment does not have: {unknown}; '
      'use the experiment and the version of podrl that wrote this run'
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
    if isinstance(ours[name], float) and type(value) is int:
      value = float(value)
    if type(value) is not type(ours[name]):
      raise ValueError(
        f'{path}/config.json has {name}={value!r}, which is not of type '
        f'{type(ours[name]).__name__}'
      )
    ours[name] = value
  return ours, messages


def find_agent(
  path: str, seed: int | None = None
) -> tuple[str, dict[str, Any], int]:
  """Returns a run's path and configuration, and the index of its agent.

  Args:
    path: a run, or `seed_N` in a run of several agents.
    seed: index of the agent.

  Raises:
    ValueError: if there is no such agent, or `seed` is None for several agents.
  """
  path = os.path.abspath(path)
  if parent := run_of_agent(path):
    index = int(path.rpartition('_')[2])
    if seed not in (None, index):
      raise ValueError(f'{path} has no agent {seed}; leave the seed out')
    path, seed = parent, index
  config = read_config(path, _REQUIRED_TO_LOAD)
  paths = [*agents(path, config)]
  number = len(paths)
  if seed is None and number > 1:
    raise ValueError(
      f'{path} has {number} agents; name one, for example {paths[0]}'
    )
  seed = seed or 0
  if not 0 <= seed < number:
    raise ValueError(
      f'{path} has no agent {seed}; use a number from 0 to {number - 1}'
    )
  if is_series(config):
    return find_agent(paths[seed])
  return path, config, seed
