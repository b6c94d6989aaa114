"""Checkpoints: the whole of a run, written by orbax while training goes on.

Each is a directory `checkpoints/NUM_UPDATES` of three items: `params`, what a
policy needs; `state`, the rest of the driver's; and `progress`, JSON. It gets its
name only when it is whole, with the digests of its files: orbax itself lets a bit
that has turned pass.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import glob
import os
import re
import shutil
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from podrl.records import digests, workdir
from podrl.records.workdir import WriteError
from podrl.types import LearnerState, Tree

_ROOM = 2**20  # Bytes, beside the arrays' own.

# jitted: one dispatch, and all of it copied before the next update.
_copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def learner(state: Tree) -> LearnerState:
  """The learner's part of a driver's state."""
  return state if isinstance(state, LearnerState) else state.learner


def with_params(state: Tree, params: Tree) -> Tree:
  """A driver's state with other parameters."""
  changed = learner(state)._replace(params=params)
  return (
    changed
    if isinstance(state, LearnerState)
    else state._replace(learner=changed)
  )


def _directory(path: str) -> str:
  return os.path.join(os.path.abspath(path), 'checkpoints')


def _one_line(error: BaseException) -> str:
  return ' '.join(str(error).split())[:200] or type(error).__name__


class OtherRunError(ValueError):
  """A checkpoint is whole, and of a run that goes another way."""


class _Keep:
  """A policy of orbax's that preserves one step."""

  def __init__(self):
    self.step: int | None = None

  def should_preserve(self, checkpoints: Sequence, *, context) -> list[bool]:
    del context
    return [checkpoint.step == self.step for checkpoint in checkpoints]


class Checkpoints:
  """Writes the checkpoints of a run.

  Args:
    path: of the run.
    keep: how many of the newest stay.
  """

  def __init__(self, path: str, keep: int):
    logging.set_verbosity(logging.FATAL)  # Orbax tells of every file.
    self._path = path
    self._best = _Keep()
    self._num_updates = 0  # Of the one that is being written.
    options = ocp.CheckpointManagerOptions(
      cleanup_tmp_directories=True,
      # Called before it gets its name.
      async_options=ocp.AsyncOptions(
        post_finalization_callback=self._write_digests
      ),
      preservation_policy=checkpoint_managers.AnyPreservationPolicy(
        [checkpoint_managers.LatestN(keep), self._best]
      ),
    )
    with self._errors():
      self._manager = ocp.CheckpointManager(_directory(path), options=options)

  def _write_digests(self) -> None:
    if jax.process_index():
      return
    for directory in glob.glob(
      os.path.join(
        glob.escape(_directory(self._path)),
        f'{self._num_updates}.orbax-checkpoint-tmp*',
      )
    ):
      digests.write(directory)

  def save(
    self,
    num_updates: int,
    state: Tree,
    progress: dict[str, Any],
    best: int | None,
  ) -> None:
    """Begins to write one, unless it is there; waits for the one before.

    Args:
      num_updates: its name.
      state: of the driver, which may go on at once.
      progress: JSON.
      best: the one that stays for its evaluation.

    Raises:
      WriteError: if one could not be written.
    """
    self._best.step = best
    if num_updates == self._manager.latest_step():
      return
    # Seen before: orbax's threads print pages where a disc turns out full.
    needed = sum(x.nbytes for x in jax.tree.leaves(state)) + _ROOM
    free = shutil.disk_usage(_directory(self._path)).free
    if free < needed:
      raise WriteError(
        f'checkpoint {num_updates} needs {needed / 2**20:.1f} MiB of '
        f'{_directory(self._path)}, which has {free / 2**20:.1f} left'
      )
    with self._errors():
      self._manager.wait_until_finished()
      self._num_updates = num_updates
      state = _copy(state)  # What is donated meanwhile would be overwritten.
      if not self._manager.save(
        num_updates,
        args=ocp.args.Composite(
          params=ocp.args.StandardSave(learner(state).params),
          state=ocp.args.StandardSave(with_params(state, ())),
          progress=ocp.args.JsonSave(progress),
        ),
      ):
        raise ValueError('there is a newer one')

  def wait(self) -> None:
    """Waits until all is written.

    Raises:
      WriteError: if something could not be.
    """
    with self._errors():
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits as well, and ends orbax's threads; what `wait` raised is known."""
    with contextlib.suppress(WriteError), self._errors():
      self._manager.close()

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # Orbax raises whatever the file system does.
      raise WriteError(
        f'checkpoint {self._num_updates} could not be written: '
        f'{_one_line(error)}'
      ) from error


def steps(path: str) -> list[int]:
  """The checkpoints of a run, the newest first."""
  directory = _directory(path)
  if not os.path.lexists(directory):
    return []
  if not os.path.isdir(directory):
    raise ValueError(f'{directory} is not a directory that can be read')
  return sorted(
    (
      int(x) for x in os.listdir(directory) if re.fullmatch(r'0|[1-9][0-9]*', x)
    ),
    reverse=True,
  )


def _read(directory: str, name: str, like: Tree) -> Tree:
  """An item of a checkpoint, laid out as the arrays of `like` are."""
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(os.path.join(directory, name), like)


def _read_progress(directory: str) -> dict[str, Any]:
  # Not by orbax, which would wait for the other processes.
  return workdir.read_json(os.path.join(directory, 'progress', 'metadata'))


def find(path: str, which: str = 'last') -> tuple[str, int]:
  """The run's directory and one checkpoint of it.

  Args:
    path: of the run.
    which: 'last', 'best' by its evaluations, or a number of updates.

  Raises:
    ValueError: if there is none.
  """
  if not workdir.is_run(path):
    raise ValueError(f'{path} is not a run: it has no config.json')
  if parent := workdir.run_of_agent(path):
    raise ValueError(f'{path} is one agent of {parent}; name that')
  found = steps(path)
  if not found:
    raise ValueError(f'{path} has no checkpoint yet')
  if which == 'last':
    return path, found[0]
  if which == 'best':
    evaluated = [
      (r['eval_return'], r['num_updates'])
      for r in workdir.read_records(path)
      if 'eval_return' in r and r['num_updates'] in found
    ]
    if not evaluated:
      raise ValueError(f'{path} has no checkpoint that was evaluated')
    return path, max(evaluated)[1]
  if which not in map(str, found):
    raise ValueError(
      f'{path} has no checkpoint {which}; it has {", ".join(map(str, found))}'
    )
  return path, int(which)


def peek(path: str) -> dict[str, Any] | None:
  """The `progress` of the newest checkpoint where it can be read."""
  for step in steps(path):
    directory = os.path.join(_directory(path), str(step))
    try:
      digests.check(directory)
      return _read_progress(directory)
    except Exception:  # `choose` will tell.
      continue
  return None


def read_params(path: str, step: int, like: Tree) -> Tree:
  """The parameters of one checkpoint.

  Args:
    path: of the run.
    step: of `steps`.
    like: their shapes, `jax.ShapeDtypeStruct`.

  Returns:
    The parameters, on this process's first device.

  Raises:
    ValueError: if they cannot be read, or have other shapes.
  """
  directory = os.path.join(_directory(path), str(step))
  try:
    digests.check(directory)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return _read(
      directory,
      'params',
      jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like
      ),
    )
  except digests.NewerFormatError:
    raise
  except Exception as error:  # Orbax raises whatever its files make it.
    raise ValueError(
      f'the parameters of {directory} cannot be read, or are those of another '
      f'network: {_one_line(error)}'
    ) from error


def choose(
  path: str,
  accept: Callable[[dict[str, Any]], None],
  say: Callable[[str], None],
) -> tuple[int, dict[str, Any]] | None:
  """The newest checkpoint that is whole, or None where a run has none.

  Newer ones are renamed `checkpoints/NUM_UPDATES.set_aside`.

  Args:
    path: of the run.
    accept: raises a ValueError where `progress` does not fit the run's files,
      and an `OtherRunError` where no checkpoint of it would fit.
    say: takes a line for each that is passed over.

  Returns:
    Its name and `progress`.

  Raises:
    ValueError: if there are some and none is whole.
    NewerFormatError: where a newer version wrote one.
    OtherRunError: as `accept` does.
  """
  passed_over = []
  for step in steps(path):
    directory = os.path.join(_directory(path), str(step))
    try:
      digests.check(directory)
      progress = _read_progress(directory)
      accept(progress)
    except (digests.NewerFormatError, OtherRunError):
      raise
    except Exception as error:  # Whatever damaged files make of it.
      passed_over.append(directory)
      say(f'checkpoint {step} is passed over: {_one_line(error)}')
      continue
    for damaged in passed_over:  # Its name is wanted again.
      workdir.set_aside(damaged)
    return step, progress
  if passed_over:
    raise ValueError(
      f'no checkpoint of {path} can be gone on with; take a copy of it, if '
      'there is one'
    )
  return None


def read_state(path: str, step: int, like: Tree) -> Tree:
  """A driver's state, laid out as `like`; all processes read it together."""
  directory = os.path.join(_directory(path), str(step))
  return with_params(
    _read(directory, 'state', with_params(like, ())),
    _read(directory, 'params', learner(like).params),
  )
