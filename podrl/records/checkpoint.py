"""Checkpoints: orbax writes the state of a run while training continues.

A checkpoint is a directory `checkpoints/NUM_UPDATES` with these items:
`variables`, all that a policy needs; `memory`, what a learner remembers, if the
checkpoint contains it; `state`, the rest of the driver's state; and `progress`,
all other data as JSON. A checkpoint gets its name only when it is complete. It
has SHA-256 digests of its files, because orbax does not detect damaged data.
If the run saves again after the same update, the file of the digests gets the
newer progress. A checkpoint has no hyperparameters, because the configuration
contains them. Only those of a population, which change during the run, are in
`progress`.

If a process of a run is lost, another process writes its `HostCopy` as a
checkpoint. There, each item is one npz file, because orbax needs all processes.
"""

from collections.abc import Callable, Iterator
import contextlib
import copy
import glob
import hashlib
import json
import os
import re
import shutil
import sys
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from podrl.fields import COUNT, FROM_0, SECONDS, Field, Fields
from podrl.messages import one_line, printable
from podrl.records import workdir
from podrl.records.workdir import Record, WriteError
from podrl.types import LearnerState, Tree, Variables

FIELDS = {
  'checkpoint.every_seconds': Field(
    300.0, 'Seconds between checkpoints; 0 means off.', FROM_0
  ),
  'checkpoint.every_env_steps': Field(
    0, 'Steps between checkpoints; 0 means off.', FROM_0
  ),
  'checkpoint.keep': Field(
    2, 'Number of newest checkpoints to keep, besides the best one.', COUNT
  ),
  'checkpoint.grace_seconds': Field(
    30.0, 'Time limit for saving a checkpoint after SIGTERM.', SECONDS
  ),
  'checkpoint.host_seconds': Field(
    10.0,
    'Seconds between copies of the state in host memory, which a run of '
    'several processes saves if it loses one; 0 means off. Copies move at most '
    '30 MB per second on average.',
    FROM_0,
  ),
}

_FORMAT = 7  # Version of the checkpoint format; podrl reads only this one.
_EXTRA_BYTES = 2**20  # Size of a checkpoint without its arrays.
# Older checkpoints of this format do not have these fields of NamedTuples.
_NEW_FIELDS = 'info', 'episode_info'
_ARRAYS = 'arrays.npz'  # The file of an item that a `HostCopy` wrote.
_UNFINISHED = '.unfinished'  # Ends the name of a copy that is being written.
_MAX_REASON = 200  # A message contains at most this much of an orbax error.

# One jitted call copies all arrays before the next update can donate them.
_copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


class IncompatibleError(ValueError):
  """A checkpoint does not fit this run or this version of podrl."""


def learner_of(state: Tree) -> LearnerState:
  """Returns the learner's part of a driver's state."""
  return state if isinstance(state, LearnerState) else state.learner


def change_learner(state: Tree, **changes: Tree) -> Tree:
  """Returns a driver's state with other fields of the `LearnerState`."""
  learner = learner_of(state)._replace(**changes)
  is_whole = isinstance(state, LearnerState)
  return learner if is_whole else state._replace(learner=learner)


def _directory(path: str, *names: Any) -> str:
  return os.path.join(os.path.abspath(path), 'checkpoints', *map(str, names))


def _by_path(tree: Tree) -> dict[str, Any]:
  """Maps the path of each array in a tree to the array."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _describe(tree: Tree) -> dict[str, str]:
  """Maps the path of each array in a tree to its type and shape."""
  arrays = _by_path(tree).items()
  return {name: f'{x.dtype}{[*x.shape]}' for name, x in arrays}


def _difference(theirs: dict[str, str], ours: dict[str, str]) -> str:
  """Describes the first array that differs; empty means that none does."""
  for name in [*ours, *theirs]:
    there, here = (x.get(name, 'missing') for x in (theirs, ours))
    if there != here:
      return f'{name} is {there} in the checkpoint, {here}'
  return ''


def _raise(error: OSError) -> None:
  raise error


def _system_error(error: BaseException | None) -> OSError | None:
  """Returns the error of the system that kept a file from being read, if any.

  A file that is missing is damage, but one that cannot be read, for example
  because of its permissions, may be intact.
  """
  missing = FileNotFoundError, NotADirectoryError, IsADirectoryError
  while error:
    if isinstance(error, OSError) and not isinstance(error, missing):
      return error
    error = error.__cause__
  return None


def _digests(directory: str) -> dict[str, str]:
  """Maps the relative path of each file in a subdirectory to its digest."""
  digests = {}
  for parent, _, names in os.walk(directory, onerror=_raise):
    for name in names if parent != directory else ():
      path = os.path.join(parent, name)
      with open(path, 'rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
      digests[os.path.relpath(path, directory)] = digest
  return digests


def _verify(directory: str) -> None:
  """Raises a ValueError if a checkpoint's files differ from its digests."""
  contents = workdir.read_json(os.path.join(directory, 'digests.json'))
  if contents['format'] != _FORMAT:
    raise IncompatibleError(
      f'another version of podrl wrote {directory}, with checkpoint format '
      f'{contents["format"]}; this version reads only format {_FORMAT}'
    )
  written, found = contents['sha256'], _digests(directory)
  for name in sorted(written.keys() | found.keys()):
    if written.get(name) != found.get(name):
      raise ValueError(f'its file {name} is damaged or missing')


class Checkpoints:
  """Writes a run's checkpoints; keeps the best one and the `keep` newest.

  If `with_memory` is true, the checkpoints contain the learner's memory. Each
  method runs in a block of `busy`, because it may wait for the file system.
  """

  def __init__(
    self,
    path: str,
    keep: int,
    with_memory: bool = True,
    busy: Callable[[], Any] = contextlib.nullcontext,
  ):
    logging.set_verbosity(logging.FATAL)  # Orbax would log every file.
    self._path = path
    self._busy = busy
    self._with_memory = with_memory
    self._num_updates = 0  # Number of the checkpoint being written.
    self._policies: list = [checkpoint_managers.LatestN(keep)]
    policy = checkpoint_managers.AnyPreservationPolicy(self._policies)
    # Orbax calls this before it gives the checkpoint its name.
    async_options = ocp.AsyncOptions(
      timeout_secs=workdir.SAVE_SECONDS,
      post_finalization_callback=self._write_digests,
    )
    options = ocp.CheckpointManagerOptions(
      cleanup_tmp_directories=True,
      async_options=async_options,
      preservation_policy=policy,
    )
    with self._errors():
      self._manager = ocp.CheckpointManager(_directory(path), options=options)
      if not jax.process_index():  # The processes that wrote these are gone.
        for name in os.listdir(_directory(path)):
          if name.endswith(_UNFINISHED):
            shutil.rmtree(_directory(path, name))

  def _write_digests(self) -> None:
    if jax.process_index():
      return
    final = glob.escape(_directory(self._path, self._num_updates))
    for directory in glob.glob(f'{final}.orbax-checkpoint-tmp*'):
      contents = {'format': _FORMAT, 'sha256': _digests(directory)}
      workdir.write_json(os.path.join(directory, 'digests.json'), contents)

  def save(
    self, num_updates: int, state: Tree, progress: Record, best: int | None
  ) -> None:
    """Writes a checkpoint in the background; an existing one gets `progress`.

    The driver can continue at once, except that `save` waits until a memory is
    written. `progress` is JSON that a resumed run needs in addition to the
    state. `best` is the number of updates at the best evaluation; orbax keeps
    that checkpoint.
    """
    if best is not None:
      self._policies[1:] = [checkpoint_managers.CustomSteps([best])]
    if num_updates == self._manager.latest_step():
      self._replace_progress(num_updates, progress)
      return
    memory = learner_of(state).memory if self._with_memory else ()
    state = change_learner(state, memory=())
    directory = _directory(self._path)
    with self._errors():
      self._manager.wait_until_finished()
      self._num_updates = num_updates
      # Check the space: on a full disk, orbax's threads print many errors.
      _check_space(directory, num_updates, (state, memory))
      state = _copy(state)  # The next update deletes or overwrites the state.
      variables = learner_of(state).variables._replace(hyperparams={})
      # Copied: orbax reads it in a thread, while the run changes its lists.
      progress = copy.deepcopy(progress) | {
        'arrays': _describe(variables),
        'memory': _describe(memory),
      }
      others = change_learner(state, variables=())
      items = {
        'variables': ocp.args.StandardSave(variables),
        'state': ocp.args.StandardSave(others),
        'progress': ocp.args.JsonSave(progress),
      }
      if jax.tree.leaves(memory):
        items['memory'] = ocp.args.StandardSave(memory)
      if not self._manager.save(num_updates, args=ocp.args.Composite(**items)):
        raise ValueError('there is a newer checkpoint')
      # A device may have no room for a copy of the memory.
      if jax.tree.leaves(memory):
        self._manager.wait_until_finished()

  def _replace_progress(self, num_updates: int, progress: Record) -> None:
    """Replaces the progress of a checkpoint, for example after an evaluation.

    The new progress is in the file of the digests, which is replaced atomically
    and has no digest itself.
    """
    with self._errors():
      self._manager.wait_until_finished()
      if jax.process_index():
        return
      before = _read_progress(self._path, num_updates)
      progress = progress | {k: before[k] for k in ('arrays', 'memory')}
      _write_progress(self._path, num_updates, progress)

  def wait(self) -> None:
    """Waits until all checkpoints are written, or raises a `WriteError`."""
    with self._errors():
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for the checkpoints and ends orbax's threads; ignores errors."""
    with contextlib.suppress(WriteError), self._errors():
      self._manager.close()

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    # Catch every exception: file systems make orbax raise many kinds.
    with self._busy(), workdir.write_errors(f'checkpoint {self._num_updates}'):
      yield


def _write_progress(path: str, step: int, progress: Record) -> None:
  file = _directory(path, step, 'digests.json')
  contents = workdir.read_json(file) | {'progress': progress}
  workdir.write_text(file, json.dumps(contents))  # It keeps NaN.


def set_failures(path: str, step: int, number: int) -> None:
  """Stores how often the run has failed after a checkpoint.

  Raises:
    WriteError: if the file cannot be written.
  """
  with workdir.write_errors(f'checkpoint {step}', OSError):
    progress = _read_progress(path, step) | {'num_failures': number}
    _write_progress(path, step, progress)


def _check_space(directory: str, num_updates: int, tree: Tree) -> None:
  """Raises a `WriteError` if a disk has no room for a checkpoint."""
  free = shutil.disk_usage(directory).free
  needed = sum(x.nbytes for x in jax.tree.leaves(tree)) + _EXTRA_BYTES
  if free < needed:
    raise WriteError(
      f'checkpoint {num_updates} needs {needed / 2**20:.1f} MiB on the disk of '
      f'{directory}, which has {free / 2**20:.1f} MiB left'
    )


class HostCopy:
  """A copy of a run's state in the memory of this process.

  If the run loses another process, this process can still write the copy. The
  loop renews it without waiting: until a new copy has arrived, the earlier one
  counts.
  """

  def __init__(self, path: str):
    self._path = path
    # Each has the number of updates, the state and the progress.
    self._copy: tuple[int, Tree, Record] | None = None
    self._next: tuple[int, Tree, Record] | None = None
    # An older copy, whose memory is used again on a CPU.
    self._spare: Tree = None

  def renew(
    self, num_updates: int, make: Callable[[Tree], Tree], progress: Record
  ) -> None:
    """Begins a copy of a state.

    `make` takes an earlier copy, whose memory it may use, or None. It returns
    the copy of the state, without its memory, from `spmd.gather`.
    """
    spare, self._spare = self._spare, None
    state = make(spare)
    for x in jax.tree.leaves(state):
      x.copy_to_host_async()
    self._next = num_updates, state, progress

  def settle(self) -> None:
    """Replaces the copy by the next one, if that has arrived."""
    following = self._next  # The watchdog's thread calls this too.
    if following and all(x.is_ready() for x in jax.tree.leaves(following[1])):
      number, state, progress = following
      jax.block_until_ready(state)  # Raises the error of a copy that failed.
      before, self._next = self._copy, None
      if jax.default_backend() == 'cpu':
        self._spare = before and before[1]
      else:  # The copy leaves the device.
        state = jax.tree.map(np.asarray, state)
      self._copy = number, state, progress

  def write(self, reason: str) -> int | None:
    """Writes the copy as a checkpoint, because the run ends for a `reason`.

    Returns:
      Its number of updates. It is None if there is no copy, if there is a newer
      checkpoint, or if another process writes this one.

    Raises:
      WriteError: if a file cannot be written.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self.settle()  # The loss may have made the next copy fail.
    if not self._copy:
      return None
    number, state, progress = self._copy
    variables = learner_of(state).variables._replace(hyperparams={})
    others = change_learner(state, variables=())
    items = {'variables': variables, 'state': others}
    progress = progress | {
      'arrays': _describe(variables),
      'memory': {},
      'num_failures': 1,
      'reason': reason,
    }
    directory = _directory(self._path, number)
    temporary = directory + _UNFINISHED
    with workdir.write_errors(f'checkpoint {number}'):
      if steps(self._path)[:1] >= [number]:
        return None
      try:
        os.mkdir(temporary)  # This succeeds in only one process.
      except FileExistsError:
        return None
      try:
        _check_space(temporary, number, items)
        for name in *items, 'progress':
          os.mkdir(os.path.join(temporary, name))
        for name, tree in items.items():
          np.savez(os.path.join(temporary, name, _ARRAYS), **_by_path(tree))
        file = os.path.join(temporary, 'progress', 'metadata')
        workdir.write_text(file, json.dumps(progress))
        contents = {'format': _FORMAT, 'sha256': _digests(temporary)}
        workdir.write_json(os.path.join(temporary, 'digests.json'), contents)
        os.rename(temporary, directory)
      except BaseException:  # Free the space: the disk may be full.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return number


def steps(path: str) -> list[int]:
  """Lists a run's checkpoints by their number of updates, newest first."""
  directory = _directory(path)
  if not os.path.lexists(directory):
    return []
  if not os.path.isdir(directory):
    raise ValueError(f'{directory} is not a directory that can be read')
  try:
    names = os.listdir(directory)
  except OSError as error:
    raise ValueError(f'{directory} cannot be read: {error.strerror}') from error
  found = [int(x) for x in names if re.fullmatch(r'0|[1-9][0-9]*', x)]
  return sorted(found, reverse=True)


def find(path: str, which: str | int = 'last') -> int:
  """Finds a checkpoint; returns its number of updates.

  Args:
    path: directory of the run.
    which: 'last', 'best' (by evaluation), or a number of updates.
  """
  workdir.refuse_series(path, workdir.read_config(path))
  found = steps(path)
  if not found:
    raise ValueError(f'{path} has no checkpoint yet')
  if which == 'last':
    return found[0]
  if which == 'best':
    evaluated = [
      (record['eval_return'], record['num_updates'])
      for record in workdir.read_records(path)
      if record.get('eval_return') is not None
      and record['num_updates'] in found
    ]
    if not evaluated:
      raise ValueError(f'{path} has no checkpoint that was evaluated')
    return max(evaluated)[1]
  if str(which) not in map(str, found):
    listed = ', '.join(map(str, found))
    raise ValueError(f'{path} has no checkpoint {which}; it has {listed}')
  return int(which)


def _read(path: str, step: int, item: str, like: Tree) -> Tree:
  """Reads an item of a checkpoint, with the shardings of `like`.

  Fields that are newer than the checkpoint keep their value in `like`.
  """
  directory = _directory(path, step, item)
  file = os.path.join(directory, _ARRAYS)
  if os.path.exists(file):
    return _read_copy(file, like)
  with _quiet(), ocp.StandardCheckpointer() as reader:
    saved = reader.metadata(directory).item_metadata.tree
    read = reader.restore(directory, _without_new_fields(like, saved))
  return _with_new_fields(like, read)


def _read_copy(file: str, like: Tree) -> Tree:
  """Reads an item that a `HostCopy` wrote; see `_read`."""

  def spread(host: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(
      host.shape, sharding, lambda index: host[index]
    )

  with np.load(file, allow_pickle=False) as arrays:

    def read(name: str, x: Any) -> jax.Array:
      if name not in arrays:
        if {*_NEW_FIELDS}.isdisjoint(name.split('/')):
          raise ValueError(f'{file} has no array {name}')
        return x
      host = arrays[name]
      if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        # numpy's files have no names for some types, such as bfloat16.
        return spread(host.view(x.dtype).reshape(x.shape), x.sharding)
      return jax.random.wrap_key_data(
        spread(host, x.sharding), impl=jax.random.key_impl(x)
      )

    leaves = [read(name, x) for name, x in _by_path(like).items()]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Hides a warning of orbax about a file that podrl does not write."""
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.FATAL)
  try:
    yield
  finally:
    logging.set_verbosity(verbosity)


def _without_new_fields(like: Tree, saved: Tree) -> Tree:
  """Removes the fields that are missing in `saved`, a tree of dicts and lists.

  A NamedTuple becomes a dict if a field of it, or below it, is removed.
  """
  if type(like) is tuple:
    items = tuple(map(_without_new_fields, like, saved))
    return items if any(x is not y for x, y in zip(items, like)) else like
  if not hasattr(like, '_fields') or not isinstance(saved, dict):
    return like
  fields = {
    name: _without_new_fields(x, saved.get(name))
    for name, x in like._asdict().items()
    if name in saved or name not in _NEW_FIELDS
  }
  is_same = all(fields.get(k, fields) is x for k, x in like._asdict().items())
  return like if is_same else fields


def _with_new_fields(like: Tree, read: Tree) -> Tree:
  """Reverses `_without_new_fields`, with the new fields of `like`."""
  if type(like) is tuple:
    return tuple(map(_with_new_fields, like, read))
  if not hasattr(like, '_fields') or not isinstance(read, dict):
    return read
  fields = {k: _with_new_fields(getattr(like, k), x) for k, x in read.items()}
  return like._replace(**fields)


def _read_progress(path: str, step: int) -> Record:
  with contextlib.suppress(ValueError):  # `_verify` finds damaged digests.
    contents = workdir.read_json(_directory(path, step, 'digests.json'))
    if 'progress' in contents:  # It is newer than the item below.
      return contents['progress']
  # Read the file without orbax, which would wait for the other processes.
  return workdir.read_json(_directory(path, step, 'progress', 'metadata'))


def last_progress(path: str) -> tuple[int, int, int]:
  """Reads the progress of a run from its newest readable checkpoint.

  Returns:
    The number of resumes, including the one that is about to begin; the number
    of updates; and environment steps per update. Without a checkpoint, these
    are (0, 0, 1).
  """
  for step in steps(path):
    with contextlib.suppress(ValueError, KeyError, TypeError):
      progress = _read_progress(path, step)  # Digests are not checked here.
      return progress['num_resumes'] + 1, step, progress['steps_per_update']
  return 0, 0, 1


def read_variables(path: str, step: int, like: Variables) -> Variables:
  """Reads the variables of one checkpoint onto this process's first device.

  `like` has a `jax.ShapeDtypeStruct` for each array. The hyperparameters of
  the result are empty.

  Raises:
    IncompatibleError: if the checkpoint has other arrays.
    ValueError: if the checkpoint is damaged.
  """
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shapes = jax.tree.map(
    lambda x: x.update(sharding=device), like._replace(hyperparams={})
  )
  try:
    _verify(_directory(path, step))
    # Compare first, because orbax's error about a difference is very long.
    theirs, ours = _read_progress(path, step)['arrays'], _describe(shapes)
    # Older runs have counters of float32, which orbax converts.
    for name, there in theirs.items():
      if there == ours.get(name, '').replace('int32', 'float32'):
        theirs[name] = ours[name]
    if difference := _difference(theirs, ours):
      raise IncompatibleError(
        f'the parameters of {path} do not fit: {difference} in the agent'
      )
    return _read(path, step, 'variables', shapes)
  except IncompatibleError:
    raise
  except Exception as error:  # Damaged files can make orbax raise anything.
    reason = one_line(error)[:_MAX_REASON]
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
      reason = f'{error.strerror or reason}; the files may be intact'
    raise ValueError(
      f'the parameters of {_directory(path, step)} cannot be read: {reason}'
    ) from error


def newest_intact(
  path: str, steps_per_update: int
) -> tuple[int, Record] | None:
  """Finds the newest intact checkpoint: its number of updates and `progress`.

  If newer checkpoints are damaged, the function reports them and renames them
  to `checkpoints/NUM_UPDATES.set_aside`. Without checkpoints, it returns None.

  Raises:
    IncompatibleError: if the number of steps per update has changed.
    ValueError: if all checkpoints are damaged, or one cannot be read.
  """
  skipped = []
  for step in steps(path):
    try:
      _verify(_directory(path, step))
      progress = _read_progress(path, step)
      if (before := progress['steps_per_update']) != steps_per_update:
        raise IncompatibleError(
          f'an update of the run has {before} environment steps, but on these '
          f'devices it would have {steps_per_update}; use the same devices'
        )
    except IncompatibleError:
      raise
    except Exception as error:  # Damaged files can raise anything.
      if refusal := _system_error(error):
        directory = _directory(path, step)
        reason = refusal.strerror or one_line(refusal)
        raise ValueError(
          f'{directory} cannot be read ({reason}), but may be intact; make it '
          'readable, or rename it to continue from an older checkpoint'
        ) from error
      skipped.append(step)
      reason = one_line(error)[:_MAX_REASON]
      text = printable(f'checkpoint {step} is skipped: {reason}')
      print(text, file=sys.stderr)
      continue
    for damaged in skipped:  # A new checkpoint may need the same name.
      workdir.set_aside(_directory(path, damaged))
    return step, progress
  if skipped:
    raise ValueError(f'no checkpoint of {path} can be used; restore a backup')
  return None


def _read_memory(path: str, step: int, like: Tree) -> Tree:
  """Reads a memory and deletes `like`; without a saved memory, returns `like`.

  Raises:
    IncompatibleError: if the saved memory has other arrays.
  """
  saved = _read_progress(path, step)['memory']
  if not saved:
    return like
  if difference := _difference(saved, _describe(like)):
    raise IncompatibleError(
      f'the memory of {path} does not fit: {difference} in this run; use the '
      'same devices and the same version of podrl, or start a new run'
    )
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
  )
  for x in jax.tree.leaves(like):  # A device may have no room for both.
    x.delete()
  return _read(path, step, 'memory', shapes)


def read_state(path: str, step: int, like: Tree) -> Tree:
  """Reads a driver's state; all processes must call this together.

  The state has the shardings and the hyperparameters of `like`, and also its
  memory if the checkpoint contains none. This function may delete the memory of
  `like`.

  Raises:
    IncompatibleError: if the checkpoint has another memory.
    ValueError: if the system does not read a file.
  """
  others = change_learner(like, variables=(), memory=())
  ours = learner_of(like).variables
  try:
    state = _read(path, step, 'state', others)
    variables = _read(path, step, 'variables', ours._replace(hyperparams={}))
    memory = _read_memory(path, step, learner_of(like).memory)
  except IncompatibleError:
    raise
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{_directory(path, step)} is intact, but could not be read again: '
      f'{one_line(error)[:_MAX_REASON]}; resume once more'
    ) from error
  variables = variables._replace(hyperparams=ours.hyperparams)
  return change_learner(state, variables=variables, memory=memory)


def read_agent(
  path: str, config: Fields, seed: int | None, step: int, like: Variables
) -> Variables:
  """Reads the variables of one agent; see `read_variables`.

  `workdir.find_agent` returns the first three arguments. If `seed` is None, the
  result contains all agents of the run.
  """
  number = workdir.num_agents(config)
  if number == 1 or seed is None:
    return read_variables(path, step, like)
  like = jax.tree.map(lambda x: x.update(shape=(number, *x.shape)), like)
  variables = read_variables(path, step, like)
  return jax.tree.map(lambda x: x[seed], variables)
