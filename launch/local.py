"""launch/local.sh N [OPTIONS] -- COMMAND ...

Runs N processes of one run on this machine, for example

  launch/local.sh 2 -- python experiments/anakin_cartpole.py --workdir=runs/two

The script passes --coordinator, --num_processes and --process_id to each
process, and gives it a share of the cores and of the GPUs. Each printed line
begins with the number of its process, for example [0].

The exit code of the script is that of the first process that fails. After a
failure, a suspended process gets SIGKILL at once, where the system has /proc.
The other processes have grace_seconds to end. Then the script sends SIGTERM to
them. After kill_seconds more, it sends SIGKILL. If the script itself gets
Ctrl-C or SIGTERM, it passes the signal to every process.

With --restarts=M, the script starts all processes again after a failure, at
most M times, with --resume. The command needs --workdir then. After a mistake
(exit code 2) or a signal to the script, it does not restart them. These options
exist, with their defaults:

  --grace_seconds=30  time for the others to end after a failure
  --kill_seconds=30   time between SIGTERM and SIGKILL
  --restarts=0        how often a run that fails is started again
  --dry-run           print the commands and run none
"""

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import os
import queue
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NoReturn


class Parser(argparse.ArgumentParser):
  """Prints this file's docstring as help, and each mistake as one line."""

  def format_help(self) -> str:
    return __doc__

  def error(self, message: str) -> NoReturn:
    fail(message)


def say(message: str) -> None:
  with contextlib.suppress(OSError):  # The disk of the log may be full.
    print(f'local.sh: {message}', file=sys.stderr, flush=True)


def fail(message: str, code: int = 2) -> NoReturn:
  say(message)
  sys.exit(code)


def parse(argv: list[str]) -> argparse.Namespace:
  """Reads the command line; a mistake ends the script."""
  parser = Parser(allow_abbrev=False)
  parser.add_argument('N', type=int)
  parser.add_argument('--grace_seconds', type=int, default=30)
  parser.add_argument('--kill_seconds', type=int, default=30)
  parser.add_argument('--restarts', type=int, default=0)
  parser.add_argument('--dry-run', action='store_true')
  split = argv.index('--') if '--' in argv else len(argv)
  args = parser.parse_args(argv[:split])
  args.command = argv[split + 1 :]
  if not 0 < args.N < 10_000:
    fail(f"'{args.N}' is not a valid number of processes; try 2")
  if not args.command:
    fail('-- and a command are missing; try: launch/local.sh 2 -- COMMAND')
  if args.restarts < 0:
    fail(f'--restarts={args.restarts} must be at least 0')
  if args.restarts and not any(
    re.match('--workdir(=|$)', x) for x in args.command
  ):
    fail('--restarts needs --workdir=RUN in the command, to continue this run')
  for word in args.command:
    if re.match('--(coordinator|num_processes|process_id)', word):
      fail(f'this script sets {word.partition("=")[0]}; leave it out')
  return args


def find_gpus() -> list[str]:
  """Returns the GPUs to share; [] if the user chose GPUs or the CPU."""
  has_chosen = 'CUDA_VISIBLE_DEVICES' in os.environ
  has_chosen |= os.environ.get('JAX_PLATFORMS') == 'cpu'
  if has_chosen or not shutil.which('nvidia-smi'):
    return []
  listing = subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True)
  return re.findall(r'^GPU (\d+):', listing.stdout, re.MULTILINE)


def find_port() -> int:
  """Returns a free port below the system's range for outgoing connections."""
  for port in random.sample(range(20_000, 32_000), 100):
    with socket.socket() as listener, contextlib.suppress(OSError):
      listener.bind(('127.0.0.1', port))
      return port
  fail('found no free port between 20000 and 31999', 1)


def share(items: Sequence, index: int, count: int) -> Sequence:
  return items[index * len(items) // count : (index + 1) * len(items) // count]


def start(
  args: argparse.Namespace, gpus: Sequence[str]
) -> Iterator[subprocess.Popen]:
  """Starts each process in its own group, which Ctrl-C does not reach."""
  count, port, cores = args.N, find_port(), []
  if hasattr(os, 'sched_getaffinity'):  # macOS has no such function.
    cores = sorted(os.sched_getaffinity(0))
  for index in range(count):
    own = {}
    if gpus:
      own['CUDA_VISIBLE_DEVICES'] = ','.join(share(gpus, index, count))
    flags = f'--coordinator=127.0.0.1:{port} --num_processes={count}'
    command = [*args.command, *flags.split(), f'--process_id={index}']
    if args.dry_run:
      print(*(f'{k}={x}' for k, x in own.items()), shlex.join(command))
      continue
    if count <= len(cores):  # A process inherits the cores of its parent.
      os.sched_setaffinity(0, share(cores, index, count))
    yield subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      env=os.environ | own,
      start_new_session=True,
    )
  if cores:
    os.sched_setaffinity(0, cores)


def send(number: int, groups: Sequence[int]) -> None:
  """Sends a signal to process groups, even if their first process has ended."""
  for group in groups:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(group, number)


def is_alive(group: int) -> bool:
  try:
    os.killpg(group, 0)
  except ProcessLookupError:
    return False
  return True


def is_stopped(process: int) -> bool:
  """Returns whether a process is suspended, so that it cannot end."""
  try:
    with open(f'/proc/{process}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] == 'T'
  except OSError:  # The process has ended, or macOS has no /proc.
    return False


def guard(pipe: int, count: int, kill_seconds: int) -> None:
  """Runs in a forked process; ends the run if this script is killed.

  The script writes the process groups to a pipe, which closes when the script
  ends.
  """
  os.setsid()
  with open(pipe) as file:
    words = file.read().split()
  if words[-1:] != ['done']:
    # The groups of the last attempt.
    groups = [int(word) for word in words[-count:]]
    send(signal.SIGTERM, groups)
    end = time.monotonic() + kill_seconds
    while any(map(is_alive, groups)) and time.monotonic() < end:
      time.sleep(0.1)
    send(signal.SIGKILL, groups)
  os._exit(0)


def print_lines(index: int, process: subprocess.Popen) -> None:
  with process.stdout:
    for line in process.stdout:
      line = b'[%d] %s\n' % (index, line.removesuffix(b'\n'))
      try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
      except BrokenPipeError:
        return
      except OSError:  # On a full disk, the line is lost, but not the run.
        continue


def start_thread(function, *arguments) -> threading.Thread:
  thread = threading.Thread(target=function, args=arguments, daemon=True)
  thread.start()
  return thread


def run(
  args: argparse.Namespace, gpus: Sequence[str], life, events: queue.SimpleQueue
) -> tuple[int, bool]:
  """Runs all processes once.

  Each process group is written to `life`. An item of `events` is (process, exit
  code) or (None, signal to pass on).

  Returns:
    The exit code, and whether the script got a signal.
  """
  running, readers, is_over = {}, [], False
  try:
    for index, process in enumerate(start(args, gpus)):
      running[process.pid] = index
      print(process.pid, file=life)
      readers.append(start_thread(print_lines, index, process))
      start_thread(lambda p: events.put((p.pid, p.wait())), process)
  except OSError as error:
    fail(f'cannot run {args.command[0]}: {error.strerror}', 127)

  groups, code = [*running], 0
  deadline, next_signal = None, signal.SIGTERM
  while running:
    left = None if deadline is None else max(0, deadline - time.monotonic())
    try:
      process, number = events.get(timeout=left)
    except queue.Empty:
      names = ' '.join(map(str, sorted(running.values())))
      say(f'sending {next_signal.name} to processes {names}')
      send(next_signal, groups)
      if next_signal == signal.SIGKILL:
        break
      deadline = time.monotonic() + args.kill_seconds
      next_signal = signal.SIGKILL
      continue
    if process is None:
      is_over = True
      send(number, groups)
      continue
    index = running.pop(process, None)  # None if an earlier attempt started it.
    if number and not code and index is not None:
      code = 128 - number if number < 0 else number
      deadline = time.monotonic() + args.grace_seconds
      if running:
        seconds, others = args.grace_seconds, len(running)
        say(
          f'process {index} ended with exit code {code}; waiting {seconds} s '
          f'for the others; still running: {others}'
        )
    if code:
      send(signal.SIGKILL, [x for x in running if is_stopped(x)])

  # A command may start a process that outlives it and keeps the output open.
  for number, seconds in (
    (signal.SIGTERM, 1),
    (signal.SIGKILL, args.kill_seconds),
    (signal.SIGKILL, 1),
  ):
    end = time.monotonic() + seconds
    for reader in readers:
      reader.join(max(0, end - time.monotonic()))
    if any(reader.is_alive() for reader in readers):
      send(number, groups)
  send(signal.SIGKILL, groups)
  return code, is_over


def main() -> int:
  args = parse(sys.argv[1:])
  gpus = find_gpus()
  if gpus and args.N > len(gpus):
    fail(
      f'{args.N} processes do not fit on {len(gpus)} GPUs; '
      f'try {len(gpus)}, or JAX_PLATFORMS=cpu'
    )
  read_end, write_end = os.pipe()
  if not os.fork():
    os.close(write_end)
    guard(read_end, args.N, args.kill_seconds)
  os.close(read_end)
  life = open(write_end, 'w', buffering=1)

  events: queue.SimpleQueue = queue.SimpleQueue()
  passed = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM}
  if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores SIGHUP.
    passed[signal.SIGHUP] = signal.SIGTERM
  for number in passed:
    signal.signal(number, lambda number, _: events.put((None, passed[number])))

  number = 0
  while True:
    code, is_over = run(args, gpus, life, events)
    # 2 is a mistake in the command.
    if is_over or code in (0, 2) or number == args.restarts:
      break
    number += 1
    say(f'exit code {code}; restart {number} of {args.restarts}')
    if '--resume' not in args.command:
      args.command.append('--resume')
  print('done', file=life)
  return code


if __name__ == '__main__':
  sys.exit(main())
