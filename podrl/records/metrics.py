"""Records of a run: what is measured, and where it is written."""

from collections.abc import Iterator, Sequence
import contextlib
import os
import threading
import time
from typing import Any, Protocol

import jax
import numpy as np

from podrl.drivers.exchange import Channel
from podrl.records import workdir
from podrl.records.workdir import Record, WriteError
from podrl.types import Episodes, Report


class CompileClock:
  """Sums the seconds that XLA spends compiling or reading its cache."""

  def __init__(self):
    self.seconds = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, seconds: float, **_) -> None:
    if event == '/jax/core/compile/backend_compile_duration':
      self.seconds += seconds

  def close(self) -> None:
    """Stops listening."""
    jax.monitoring.unregister_event_duration_listener(self._listen)


class Window:
  """Counts a run's updates and sums them up, a record for each window."""

  def __init__(self, frame_skip: int, sgd_steps_per_update: int):
    self._frame_skip = frame_skip
    self._sgd_steps_per_update = sgd_steps_per_update
    self.env_steps = 0
    self.num_updates = 0
    self._clear()

  def _clear(self) -> None:
    self._rows: list[dict[str, np.ndarray]] = []
    self._episodes = np.zeros(len(Episodes._fields))
    self._stages: dict[str, float] = {}
    self._num_predictions = 0
    self._num_updates = 0
    self._seconds = 0.0

  @property
  def num_updates_since_record(self) -> int:
    """Updates that no record tells of yet."""
    return self._num_updates

  def add(self, report: Report) -> None:
    """Adds what a driver reports."""
    # In float64 and row by row: the sums do not depend on how calls divide.
    episodes = Episodes(*(x.astype(np.float64).sum() for x in report.episodes))
    self._episodes += np.asarray(episodes)
    if report.num_updates:
      self._rows.append(report.metrics | report.own)
    for name, seconds in report.stages.items():
      self._stages[name] = self._stages.get(name, 0.0) + seconds
    self._num_predictions += report.num_predictions
    self._num_updates += report.num_updates
    self._seconds += report.seconds
    self.num_updates += report.num_updates
    self.env_steps += report.num_predictions - int(episodes.num_joints)

  def progress(self) -> Record:
    """All of it as JSON, which `resume` takes; floats come back bitwise."""
    return {
      'env_steps': self.env_steps,
      'num_updates': self.num_updates,
      'rows': [{k: x.tolist() for k, x in row.items()} for row in self._rows],
      'episodes': self._episodes.tolist(),
      'stages': {**self._stages},
      'num_predictions': self._num_predictions,
      'num_updates_since_record': self._num_updates,
      'seconds': self._seconds,
    }

  def resume(self, progress: Record) -> None:
    """Goes on from what `progress` returned."""
    self.env_steps = progress['env_steps']
    self.num_updates = progress['num_updates']
    self._rows = [
      {k: np.asarray(x, np.float64) for k, x in row.items()}
      for row in progress['rows']
    ]
    self._episodes = np.asarray(progress['episodes'])
    self._stages = progress['stages']
    self._num_predictions = progress['num_predictions']
    self._num_updates = progress['num_updates_since_record']
    self._seconds = progress['seconds']

  def record(self) -> Record:
    """The record of what was added since the last one."""
    episodes = Episodes(*self._episodes)
    steps = self._num_predictions - episodes.num_joints
    rate = 1.0 / max(self._seconds, 1e-9)
    record = {
      'env_steps': self.env_steps,
      'frames': self.env_steps * self._frame_skip,
      'num_updates': self.num_updates,
      'num_sgd_steps': self.num_updates * self._sgd_steps_per_update,
      'steps_per_second': steps * rate,
      'frames_per_second': steps * self._frame_skip * rate,
      'updates_per_second': self._num_updates * rate,
      'predictions_per_second': self._num_predictions * rate,
    }
    if episodes.num_episodes:
      record['episode_return'] = episodes.return_sum / episodes.num_episodes
      record['episode_length'] = episodes.length_sum / episodes.num_episodes
    for name in self._rows[0] if self._rows else ():
      values = np.concatenate([row[name] for row in self._rows])
      # Counts are as they stand.
      record[name] = float(
        values[-1]
        if name.startswith('num_')
        else values.max()
        if name.endswith('_max')
        else values.mean(dtype=np.float64)
      )
    record |= {k: v * rate for k, v in self._stages.items()}
    if record.get('joules_per_second'):
      record['frames_per_joule'] = (
        record['frames_per_second'] / record['joules_per_second']
      )
    self._clear()
    return record


class Sink(Protocol):
  """Where records go."""

  def write(self, record: Record) -> None:
    """Takes one record."""

  def close(self) -> None:
    """Flushes."""


class JsonLines:
  """`metrics.jsonl`: one object a line, complete after each record.

  Args:
    path: of the directory.
    num_records: to keep of those that are there; the rest was written after
      the checkpoint that a run goes on from.
    name: of another file.
  """

  def __init__(
    self, path: str, num_records: int = 0, name: str = 'metrics.jsonl'
  ):
    self._file = open(os.path.join(path, name), 'a+', encoding='utf-8')
    self._file.seek(0)
    for _ in range(num_records):
      self._file.readline()
    self._file.truncate(self._file.tell())

  def write(self, record: Record) -> None:
    self._file.write(workdir.to_json(record) + '\n')
    self._file.flush()

  def close(self) -> None:
    self._file.close()


class TensorBoard:
  """TensorBoard events, by environment steps.

  Args:
    path: of the directory.
    purge_step: events from here on, of an earlier process, count no longer.
  """

  def __init__(self, path: str, purge_step: int = 0):
    # Not SummaryWriter: its own thread hangs where the disc is full.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2, summary_pb2

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._writer = EventsWriter(os.path.join(path, 'events'))
    self._write(
      purge_step,
      session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
    )

  def _write(self, step: int, **what: Any) -> None:
    self._writer.write_event(
      self._event(step=step, wall_time=time.time(), **what)
    )
    self._writer.flush()

  def write(self, record: Record) -> None:
    # One event for all: one for each takes the time of many records.
    self._write(
      record['env_steps'],
      summary=self._summary(
        value=[
          self._summary.Value(tag=name, simple_value=value)
          for name, value in record.items()
          if not isinstance(value, str)
        ]
      ),
    )

  def close(self) -> None:
    self._writer.close()


class Wandb:
  """Weights & Biases, by environment steps; a run of its own for each seed.

  Args:
    path: of the directory; it names the run, so that a resumed one goes on.
    project: where it is listed.
    config: of the run.
  """

  def __init__(self, path: str, project: str, config: dict[str, Any]):
    import wandb  # An extra.

    name = os.path.abspath(path).strip(os.sep).replace(os.sep, '-')[-120:]
    self._run = wandb.init(
      project=project,
      name=name,
      id=name,
      dir=path,
      config=config,
      resume='allow',
      reinit='create_new',
    )

  def write(self, record: Record) -> None:
    self._run.log(record, step=record['env_steps'])

  def close(self) -> None:
    self._run.finish()


class Writer:
  """Writes records in a thread of its own, so that no sink delays training.

  Where a sink raises, the next call of any method raises a `WriteError`.
  """

  def __init__(self):
    self._queue = Channel(1024)
    self._error: WriteError | None = None
    self._thread = threading.Thread(target=self._run, name='podrl-writer')
    self._thread.start()

  def _run(self) -> None:
    """The thread's."""
    while (item := self._queue.get()) is not None:
      if isinstance(item, threading.Event):
        item.set()
      elif self._error is None:
        sink, record = item
        with self._errors(sink):
          sink.write(record)

  @contextlib.contextmanager
  def _errors(self, sink: Sink) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # Raised in the main thread.
      self._error = self._error or WriteError(
        f'{type(sink).__name__} could not write: {error}'
      )
      self._error.__cause__ = error

  def _check(self) -> None:
    if self._error:
      raise self._error

  def write(self, sinks: Sequence[Sink], record: Record) -> None:
    """Hands on a record; it waits only where very many are waiting."""
    self._check()
    for sink in sinks:
      self._queue.put((sink, record))

  def flush(self) -> None:
    """Waits until all is written."""
    done = threading.Event()
    self._queue.put(done)
    done.wait()
    self._check()

  def close(self, sinks: Sequence[Sink]) -> None:
    """Writes what waits, ends the thread and closes the sinks."""
    self._queue.put(None)
    self._thread.join()
    for sink in sinks:
      with self._errors(sink):
        sink.close()
    self._check()
