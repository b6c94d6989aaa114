"""Where records go: files, TensorBoard, Weights & Biases and the terminal."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
import itertools
import os
import re
import shutil
import struct
import sys
import threading
import time
from typing import Any, NamedTuple
import uuid

from podrl.fields import Fields, nest
from podrl.records import workdir
from podrl.records.terminal import Terminal
from podrl.records.workdir import Record, WriteError

# The groups of metrics in TensorBoard and Weights & Biases. TensorBoard sorts
# the groups by name, with capital letters first.
_GROUPS = {
  'Return': r'(episode|eval)_.*',
  'lag': r'policy_lag.*|queue_depth|num_(actors|actor_waits|unrolls_dropped)',
  'loss': r'(.*_)?(loss|grad_norm)|value|targets_at_ends',
  'policy': r'entropy|approx_kl|temperature|largest_observation',
  'speed': r'.*_seconds?|frames_per_joule|(time|busy|idle)_.*',
  'steps': r'env_steps|frames|num_.*',
}
_VIDEO = 'Return/video'  # The tag of the videos.


def tag(name: str) -> str:
  """Returns the name of a metric in TensorBoard and Weights & Biases.

  The name begins with its group, for example 'Return/episode_return'. A name
  that contains a slash does not change. Names that no group has, such as the
  user's own, get the group 'other'.
  """
  if '/' in name:
    return name
  found = (k for k, names in _GROUPS.items() if re.fullmatch(names, name))
  return f'{next(found, "other")}/{name}'


class Format(NamedTuple):
  """How a file of lines contains what `Lines.write` gets."""

  to_lines: Callable[[Any], list[str]]
  check: Callable[[str], Any]  # Raises a ValueError for a damaged line.
  header: str = ''  # The first line, or '' if there is none.


def _check_episode(line: str) -> None:
  steps, episode_return, length = line.split(',')
  int(steps), float(episode_return), int(length)


# `write` gets a record.
JSON = Format(lambda record: [workdir.to_json(record)], workdir.parse_record)
# `write` gets the `(env_steps, return, length)` of several episodes.
EPISODES = Format(
  lambda rows: [f'{steps},{x:.9g},{length}' for steps, x, length in rows],
  _check_episode,
  'env_steps,episode_return,episode_length',
)


class Lines:
  """A text file of lines, flushed after each `write`.

  An existing file keeps its first `num_lines` lines; a resumed run writes the
  later lines again. If one of the kept lines is damaged, a copy of the file is
  made, and the file itself keeps only the lines before the damaged one.

  Its attribute `num_lines` is the number of lines in the file.
  """

  def __init__(self, file: str, num_lines: int = 0, form: Format = JSON):
    self._form = form
    self._file = open(
      file,
      'a+',
      encoding='utf-8',
      errors='replace',
      opener=workdir.open_no_link,
    )
    self._file.seek(0)
    self.num_lines, end = 0, 0
    for line in itertools.islice(iter(self._file.readline, ''), num_lines):
      try:
        if not form.header or line != f'{form.header}\n':
          form.check(line if line.endswith('\n') else '')
      except ValueError:
        shutil.copyfile(file, workdir.free_name(file))
        break
      self.num_lines, end = self.num_lines + 1, self._file.tell()
    self._file.truncate(end)
    if form.header and not self.num_lines:
      self._append([form.header])

  def write(self, record: Any) -> None:
    self._append(self._form.to_lines(record))

  def sync(self) -> None:
    """Waits until all lines are on the disk, or in the mounted bucket."""
    os.fsync(self._file)

  def _append(self, lines: Sequence[str]) -> None:
    self._file.writelines(f'{line}\n' for line in lines)
    self._file.flush()
    self.num_lines += len(lines)

  def close(self) -> None:
    self._file.close()


def open_lines(
  file: str,
  number: int,
  kind: str,
  form: Format = JSON,
  *,
  is_new: bool = False,
) -> Lines:
  """Opens a file that had `number` lines, and reports those that are lost.

  If the run is new, an existing file is of an earlier start that saved no
  checkpoint. It is set aside.
  """
  if is_new and os.path.exists(file) and os.path.getsize(file):
    workdir.set_aside(file)
  lines = Lines(file, number, form)
  if (lost := number - lines.num_lines) > 0:
    print(
      f'warning: {file}: {lost} of the {number} {kind} before the checkpoint '
      'are lost; the run continues from the checkpoint, which is intact',
      file=sys.stderr,
    )
  return lines


class TensorBoard:
  """A file of TensorBoard events, whose step is `env_steps`.

  TensorBoard ignores older events whose step is `purge_step` or later. It shows
  the configuration as a text, and as hyperparameters with the returns.
  """

  def __init__(self, path: str, config: Fields, purge_step: int = 0):
    # Do not use SummaryWriter: its thread hangs when the disk is full.
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2, summary_pb2

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._writer = EventsWriter(os.path.join(path, 'events'))
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write(purge_step, session_log=start)
    cells = {
      k: str(x).replace('|', r'\|').replace('\n', ' ')
      for k, x in config.items()
    }
    rows = [f'| {k} | {x} |' for k, x in cells.items()]
    text = '\n'.join(['| field | value |', '|---|---|', *rows])
    values = {
      k: x if isinstance(x, bool | int | float) else str(x)
      for k, x in config.items()
    }
    # Without `_hparams_/experiment`, TensorBoard compares the fields of all
    # runs, and all their metrics.
    _, *session = summary.hparams(values, {})
    for contents in summary.text('config', text), *session:
      self._write(purge_step, summary=contents)

  def _write(self, step: int, **contents: Any) -> None:
    event = self._event(step=step, wall_time=time.time(), **contents)
    self._writer.write_event(event)
    self._writer.flush()

  def write(self, record: Record) -> None:
    summary = self._summary()  # One summary per metric would be much slower.
    for name, value in record.items():
      if not isinstance(value, str):
        summary.value.add(tag=tag(name), simple_value=value)
    self._write(record['env_steps'], summary=summary)

  def show(self, path: str, env_steps: int) -> None:
    """Shows a GIF."""
    with open(path, 'rb') as file:
      content = file.read()
    width, height = struct.unpack_from('<HH', content, 6)  # As GIF89a says.
    summary = self._summary()
    image = summary.value.add(tag=_VIDEO).image
    image.width, image.height, image.colorspace = width, height, 3
    image.encoded_image_string = content
    self._write(env_steps, summary=summary)

  def close(self) -> None:
    self._writer.close()


class Wandb:
  """A run at Weights & Biases, whose step is `env_steps`.

  Each run and each seed has an id there, which the directory keeps. So a
  resumed run continues, and another run in the same path gets another id.
  """

  def __init__(self, path: str, config: Fields):
    import wandb  # The extra `wandb` installs it.

    name = os.path.abspath(path).strip(os.sep).replace(os.sep, '-')[-120:]
    file = os.path.join(path, 'wandb_id')
    if not os.path.exists(file):
      with open(file, 'w') as f:
        f.write(uuid.uuid4().hex)
    with open(file) as f:
      run_id = f.read()
    self._run = wandb.init(
      project=workdir.task_name(config),
      name=name,
      id=run_id,
      dir=path,
      config=nest(config),
      resume='allow',
      reinit='create_new',
    )

  def write(self, record: Record) -> None:
    values = {tag(name): value for name, value in record.items()}
    self._run.log(values, step=record['env_steps'])

  def show(self, path: str, env_steps: int) -> None:
    """Shows a GIF."""
    import wandb

    self._run.log({_VIDEO: wandb.Video(path)}, step=env_steps)

  def close(self) -> None:
    self._run.finish()


Sink = Lines | TensorBoard | Wandb | Terminal
_MAX_QUEUED = 1024  # Records that wait to be written.


class Writer:
  """Writes records in a separate thread, so that no sink delays training.

  After a sink fails, the next call of any method raises a `WriteError`.
  """

  def __init__(self):
    self._executor = ThreadPoolExecutor(1, 'podrl-writer')
    # A sink that hangs must not fill the memory with queued records.
    self._free = threading.BoundedSemaphore(_MAX_QUEUED)
    self._error: WriteError | None = None

  def _call(self, sink: Sink, method: Callable, *arguments: Any) -> None:
    """Calls a method of a sink, but no `write` or `show` after a failure."""
    try:
      if not arguments or self._error is None:
        method(*arguments)
    except Exception as error:  # `_check` raises it in the main thread.
      message = f'{type(sink).__name__} could not write: {error}'
      self._error = self._error or WriteError(message)
      self._error.__cause__ = error
    finally:
      if arguments:
        self._free.release()

  def _check(self) -> None:
    if self._error:
      raise self._error

  def write(self, sinks: Sequence[Sink], record: Any) -> None:
    """Queues a record for each sink."""
    for sink in sinks:
      self._queue(sink, sink.write, record)

  def show(
    self, sinks: Sequence[TensorBoard | Wandb], path: str, env_steps: int
  ) -> None:
    """Queues a GIF for each sink."""
    for sink in sinks:
      self._queue(sink, sink.show, path, env_steps)

  def _queue(self, sink: Sink, method: Callable, *arguments: Any) -> None:
    self._check()
    self._free.acquire()
    self._executor.submit(self._call, sink, method, *arguments)

  def flush(self, files: Sequence[Lines] = ()) -> None:
    """Waits until all records are written, and `files` are on the disk."""
    for file in files:
      self._executor.submit(self._call, file, file.sync)
    self._executor.submit(self._check).result()

  def close(self, sinks: Sequence[Sink]) -> None:
    """Writes the queued records, closes the sinks and ends the thread."""
    for sink in sinks:
      self._executor.submit(self._call, sink, sink.close)
    self._executor.shutdown()
    self._check()
