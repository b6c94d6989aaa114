"""launch/local.sh N [--grace_seconds=30] [--kill_seconds=30] -- COMMAND ...

Runs N processes of one run on this machine, for example

  launch/local.sh 2 -- python experiments/anakin_cartpole.py --workdir=runs/two

Each process gets --coordinator, --num_processes and --process_id, and its share
of the cores and of the GPUs. The lines that process I prints begin with [I].

The exit code is that of the first process that fails. The other processes then
have grace_seconds to end before they get SIGTERM, and kill_seconds more before
they get SIGKILL. The script passes each Ctrl-C and SIGTERM to every process.
"""

from collections.abc import Iterator, Sequence
import contextlib
import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time


def say(message: str) -> None:
  print(f'local.sh: {message}', file=sys.stderr, flush=True)


def fail(message: str, code: int = 2) -> None:
  say(message)
  sys.exit(code)


def parse(argv: Sequence[str]) -> tuple[int, dict[str, int], list[str]]:
  """Returns the number of processes, the seconds by name, and the command."""
  words, command = list(argv), None
  if '--' in words:
    split = words.index('--')
    words, command = words[:split], words[split + 1 :]
  if {'-h', '--help'} & set(words):
    print(__doc__.strip())
    sys.exit(0)
  count, seconds = 0, {'grace_seconds': 30, 'kill_seconds': 30}
  for word in words:
    if match := re.fullmatch('--(grace_seconds|kill_seconds)=(.*)', word):
      if not re.fullmatch('[0-9]+', match[2]):
        fail(f'{word} is not a number of seconds')
      seconds[match[1]] = int(match[2])
    elif word.startswith('-'):
      fail(f"{word} is unknown; put the command's flags after --")
    elif count:
      fail(f"'{word}' is one word too many before --")
    elif not re.fullmatch('[1-9][0-9]{0,3}', word):
      fail(f"'{word}' is not a number of processes; try 2")
    else:
      count = int(word)
  if not count:
    fail('how many processes? try: launch/local.sh 2 -- COMMAND')
  if command is None:
    fail('-- and a command are missing; try: launch/local.sh 2 -- COMMAND')
  if not command:
    fail('a command is missing after --')
  for word in command:
    if re.match('--(coordinator|num_processes|process_id)', word):
      fail(f'this script sets {word.partition("=")[0]}; leave it out')
  return count, seconds, command


def find_gpus() -> list[str]:
  """Returns the GPUs to share; none if the user has chosen them already."""
  has_chosen = 'CUDA_VISIBLE_DEVICES' in os.environ
  if has_chosen or os.environ.get('JAX_PLATFORMS') == 'cpu':
    return []
  if not shutil.which('nvidia-smi'):
    return []
  listing = subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True)
  return re.findall(r'^GPU (\d+):', listing.stdout, re.MULTILINE)


def find_port() -> int:
  """Returns a free port below those that outgoing connections take."""
  for port in random.sample(range(20_000, 32_000), 100):
    with socket.socket() as listener, contextlib.suppress(OSError):
      listener.bind(('127.0.0.1', port))
      return port
  fail('found no free port between 20000 and 31999', 1)


def share(items: Sequence, index: int, count: int) -> Sequence:
  return items[index * len(items) // count : (index + 1) * len(items) // count]


def start(
  count: int, command: Sequence[str], gpus: Sequence[str]
) -> Iterator[subprocess.Popen]:
  """Starts the processes, each in a group that a terminal's Ctrl-C spares."""
  port, cores = find_port(), []
  if hasattr(os, 'sched_getaffinity'):  # Not on macOS.
    cores = sorted(os.sched_getaffinity(0))
  for index in range(count):
    environment = dict(os.environ)
    if gpus:
      environment['CUDA_VISIBLE_DEVICES'] = ','.join(share(gpus, index, count))
    if count <= len(cores):  # A process inherits the cores of its parent.
      os.sched_setaffinity(0, share(cores, index, count))
    flags = f'--coordinator=127.0.0.1:{port} --num_processes={count}'
    yield subprocess.Popen(
      [*command, *flags.split(), f'--process_id={index}'],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      env=environment,
      start_new_session=True,
    )
  if cores:
    os.sched_setaffinity(0, cores)


def send(number: int, groups: Sequence[int]) -> None:
  """Signals process groups, also those whose first process has ended."""
  for group in groups:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(group, number)


def is_alive(group: int) -> bool:
  try:
    os.killpg(group, 0)
  except ProcessLookupError:
    return False
  return True


def guard(pipe: int, kill_seconds: int) -> None:
  """Ends all processes if this script is killed; runs in a forked process.

  The process groups come through a pipe, which closes when the script ends.
  """
  os.setsid()
  with open(pipe) as file:
    words = file.read().split()
  if words[-1:] != ['done']:
    groups = [int(word) for word in words]
    send(signal.SIGTERM, groups)
    end = time.monotonic() + kill_seconds
    while any(map(is_alive, groups)) and time.monotonic() < end:
      time.sleep(0.1)
    send(signal.SIGKILL, groups)
  os._exit(0)


def print_lines(index: int, process: subprocess.Popen) -> None:
  with contextlib.suppress(BrokenPipeError), process.stdout:
    for line in process.stdout:
      line = b'[%d] %s\n' % (index, line.removesuffix(b'\n'))
      sys.stdout.buffer.write(line)
      sys.stdout.buffer.flush()


def start_thread(function, *arguments) -> threading.Thread:
  thread = threading.Thread(target=function, args=arguments, daemon=True)
  thread.start()
  return thread


def main() -> int:
  count, seconds, command = parse(sys.argv[1:])
  gpus = find_gpus()
  if gpus and count > len(gpus):
    fail(
      f'{count} processes do not fit on {len(gpus)} GPUs; '
      f'try {len(gpus)}, or JAX_PLATFORMS=cpu'
    )
  read_end, write_end = os.pipe()
  if not os.fork():
    os.close(write_end)
    guard(read_end, seconds['kill_seconds'])
  os.close(read_end)
  life = open(write_end, 'w', buffering=1)

  # Pairs of a process and its exit code, or of None and a signal to pass on.
  events: queue.SimpleQueue = queue.SimpleQueue()
  passed = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM}
  if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As nohup sets it.
    passed[signal.SIGHUP] = signal.SIGTERM
  for number in passed:
    signal.signal(number, lambda number, _: events.put((None, passed[number])))

  groups, readers = [], []
  try:
    for index, process in enumerate(start(count, command, gpus)):
      groups.append(process.pid)
      print(process.pid, file=life)
      readers.append(start_thread(print_lines, index, process))
      start_thread(lambda i, p: events.put((i, p.wait())), index, process)
  except OSError as error:
    fail(f'cannot run {command[0]}: {error.strerror}', 127)

  running, code = set(range(count)), 0
  deadline, next_signal = float('inf'), signal.SIGTERM
  while running:
    left = max(0.0, deadline - time.monotonic())
    try:
      index, number = events.get(timeout=min(left, threading.TIMEOUT_MAX))
    except queue.Empty:
      say(f'{next_signal.name} to {" ".join(map(str, sorted(running)))}')
      send(next_signal, groups)
      if next_signal == signal.SIGKILL:
        break
      deadline = time.monotonic() + seconds['kill_seconds']
      next_signal = signal.SIGKILL
      continue
    if index is None:
      send(number, groups)
      continue
    running.remove(index)
    if number and not code:
      code = 128 - number if number < 0 else number
      deadline = time.monotonic() + seconds['grace_seconds']
      if running:
        say(
          f'process {index} ended with {code}; waiting '
          f'{seconds["grace_seconds"]} s for the other {len(running)}'
        )

  # A process that a command has left behind may keep its output open.
  for number, patience in (
    (signal.SIGTERM, 1),
    (signal.SIGKILL, seconds['kill_seconds']),
    (signal.SIGKILL, 1),
  ):
    end = time.monotonic() + patience
    for reader in readers:
      reader.join(max(0.0, end - time.monotonic()))
    if any(x.is_alive() for x in readers):
      send(number, groups)
  send(signal.SIGKILL, groups)
  print('done', file=life)
  return code


if __name__ == '__main__':
  sys.exit(main())
