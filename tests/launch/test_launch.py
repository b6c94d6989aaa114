"""Tests the launch scripts, with stand-ins for the programs that they call."""

import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
import types

from jax._src.clusters import k8s_cluster
import pytest
import yaml

from podrl.run.command_line import parse_command_line

pytestmark = pytest.mark.timeout(120)
_LAUNCH = pathlib.Path(__file__).parents[2] / 'launch'
_SCRIPTS = sorted(_LAUNCH.glob('*.sh'))
# Without site packages, Python starts five times faster.
_PYTHON = [sys.executable, '-I', '-S']


def _write(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(textwrap.dedent(text))
  path.chmod(0o755)
  return path


def _environment(tools=None, **variables):
  environment = {
    key: value
    for key, value in os.environ.items()
    if key != 'CUDA_VISIBLE_DEVICES'
  } | variables
  if tools:
    environment['PATH'] = f'{tools}:{os.environ["PATH"]}'
  return environment


# Without `env`, scripts of a test in the background would ignore Ctrl-C.
_HEEDING = ('env', '--default-signal=INT')


def _local(count, program, *flags, arguments=(), environment=None):
  """Starts local.sh with processes that run a Python program."""
  return subprocess.Popen(
    [
      *_HEEDING,
      _LAUNCH / 'local.sh',
      str(count),
      *flags,
      '--',
      *_PYTHON,
      '-c',
      textwrap.dedent(_PROLOGUE) + textwrap.dedent(program),
      *arguments,
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=environment or _environment(),
  )


# Each process knows its number, and tells the test its process id.
_PROLOGUE = """
    import os, signal, subprocess, sys, time
    flags = dict(f.split('=') for f in sys.argv if '--' in f and '=' in f)
    index = int(flags['--process_id'])
    def say(*words):
      print(*words, flush=True)
    def meet():  # In the folder of the first argument.
      open(f'{sys.argv[1]}/{index}', 'w').close()
      while len(os.listdir(sys.argv[1])) < int(flags['--num_processes']):
        time.sleep(0.02)
    say('pid', os.getpid())
    """


def _communicate(process, timeout=20):
  """Returns a script's output; kills a script that does not end in time."""
  try:
    return process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    raise


def _finish(process):
  """Returns the exit code, each process's lines without prefix, and stderr."""
  stdout, stderr = _communicate(process)
  lines = {}
  for line in stdout.splitlines():
    index, text = line.split('] ', 1)
    lines.setdefault(int(index.removeprefix('[')), []).append(text)
  return process.returncode, lines, stderr


def _is_alive(pid):
  try:
    state = pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1]
  except FileNotFoundError:
    return False
  return state.split()[0] != 'Z'


def _wait_until(condition, seconds=10):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def _have_ended(pids):
  """Waits for processes to end, which takes a moment after a kill."""
  _wait_until(lambda: not any(map(_is_alive, pids)), seconds=5)


def _pids(lines):
  return [
    int(line.split()[1])
    for process in lines.values()
    for line in process
    if line.startswith('pid ')
  ]


def test_shellcheck_finds_nothing():
  result = subprocess.run(
    [
      shutil.which('shellcheck', path=os.path.dirname(sys.executable))
      or 'shellcheck',
      '--external-sources',
      *_SCRIPTS,
    ],
    capture_output=True,
    text=True,
    cwd=_LAUNCH.parent,
  )
  assert result.returncode == 0, result.stdout + result.stderr


# --- local.sh


def test_local_tells_each_process_who_it_is_and_prefixes_its_lines():
  code, lines, stderr = _finish(
    _local(
      3,
      """
      say(*sorted(flags))
      say(flags['--coordinator'], flags['--num_processes'], sys.argv[1])
      print('to stderr', file=sys.stderr)
      sys.stdout.write('no end')
      """,
      arguments=['two words'],
    )
  )
  assert code == 0 and stderr == ''
  assert sorted(lines) == [0, 1, 2]
  address = lines[0][2].split()[0]
  host, port = address.split(':')
  assert host == '127.0.0.1' and 1024 < int(port) < 65536
  for process in lines.values():
    assert process[1] == '--coordinator --num_processes --process_id'
    assert process[2] == f'{address} 3 two words'
    assert sorted(process[3:]) == ['no end', 'to stderr']


def test_local_shares_the_cores():
  allowed = sorted(os.sched_getaffinity(0))
  program = "say('cores', *sorted(os.sched_getaffinity(0)))"
  code, lines, _ = _finish(_local(len(allowed), program))
  assert code == 0
  # With as many processes as cores, each process gets one core, in order.
  assert [lines[i][1] for i in range(len(allowed))] == [
    f'cores {core}' for core in allowed
  ]
  code, lines, _ = _finish(_local(len(allowed) + 1, program))
  every = ' '.join(map(str, allowed))
  assert {process[1] for process in lines.values()} == {f'cores {every}'}


@pytest.mark.parametrize(
  'count,variables,expected',
  [
    (2, {}, ['0,1', '2,3']),
    (3, {}, ['0', '1', '2,3']),
    (2, {'CUDA_VISIBLE_DEVICES': '3'}, ['3', '3']),
    (2, {'JAX_PLATFORMS': 'cpu'}, [None, None]),
    (5, {'JAX_PLATFORMS': 'cpu'}, [None] * 5),
  ],
)
def test_local_shares_the_gpus(count, variables, expected, tmp_path):
  _write(
    tmp_path / 'nvidia-smi',
    """\
      #!/bin/sh
      for i in 0 1 2 3; do echo "GPU $i: A Model (UUID: GPU-$i)"; done
      """,
  )
  variables = {'JAX_PLATFORMS': '', **variables}
  code, lines, _ = _finish(
    _local(
      count,
      "say(os.environ.get('CUDA_VISIBLE_DEVICES'))",
      environment=_environment(tmp_path, **variables),
    )
  )
  assert code == 0
  assert [lines[i][1] for i in range(count)] == [str(e) for e in expected]


def test_local_refuses_more_processes_than_gpus(tmp_path):
  _write(tmp_path / 'nvidia-smi', '#!/bin/sh\necho "GPU 0: A Model"\n')
  code, lines, stderr = _finish(
    _local(2, '', environment=_environment(tmp_path, JAX_PLATFORMS=''))
  )
  assert (
    code == 2 and not lines and '2 processes do not fit on 1 GPUs' in stderr
  )


def test_local_gives_survivors_time_after_the_first_failure(tmp_path):
  code, lines, stderr = _finish(
    _local(
      2,
      """
      signal.signal(signal.SIGTERM, lambda *_: (say('cut short'), os._exit(9)))
      meet()
      if index == 1:
        sys.exit(3)
      time.sleep(0.5)
      say('process 1 died')
      sys.exit(4)
      """,
      arguments=[str(tmp_path)],
    )
  )
  assert code == 3  # Process 1 was the first to fail.
  assert lines[0][1:] == ['process 1 died']
  assert 'process 1 ended with exit code 3' in stderr


def test_local_ends_the_others_after_the_first_failure(tmp_path):
  process = _local(
    3,
    """
      signal.signal(signal.SIGTERM, lambda *_: (say('saved'), sys.exit(75)))
      if index < 2:
        say('pid', subprocess.Popen(['sleep', '300']).pid)
      meet()
      if index == 2:
        sys.exit(1)
      time.sleep(300)
      """,
    '--grace_seconds=0',
    arguments=[str(tmp_path)],
  )
  code, lines, stderr = _finish(process)
  assert code == 1 and 'SIGTERM to processes 0 1' in stderr
  for index in (0, 1):
    assert lines[index][-1] == 'saved'
  assert len(_pids(lines)) == 5
  _have_ended(_pids(lines))


def test_local_kills_what_ignores_sigterm(tmp_path):
  start = time.monotonic()
  code, lines, stderr = _finish(
    _local(
      2,
      """
      signal.signal(signal.SIGTERM, signal.SIG_IGN)
      meet()
      if index == 0:
        sys.exit(5)
      time.sleep(300)
      """,
      '--grace_seconds=0',
      '--kill_seconds=0',
      arguments=[str(tmp_path)],
    )
  )
  assert code == 5 and 'SIGKILL to processes 1' in stderr
  assert time.monotonic() - start < 10
  _have_ended(_pids(lines))


def test_local_returns_the_code_of_the_first_that_ended(tmp_path):
  code, _, _ = _finish(
    _local(
      2,
      """
      meet()
      if index == 1:
        sys.exit(75)
      time.sleep(0.6)
      sys.exit(130)
      """,
      arguments=[str(tmp_path)],
    )
  )
  assert code == 75


_COUNTS_SIGNALS = """
    count = 0
    def handle(number, frame):
      global count
      count += 1
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    say('ready')
    while not count:
      time.sleep(0.02)
    time.sleep(0.3)
    say('signals:', count)
    sys.exit(75)
    """


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_local_passes_a_signal_once_to_each(number):
  process = _local(2, _COUNTS_SIGNALS)
  ready = [process.stdout.readline() for _ in range(4)]
  assert sum('ready' in line for line in ready) == 2
  process.send_signal(number)
  code, lines, _ = _finish(process)
  assert code == 75
  assert lines == {0: ['signals: 1'], 1: ['signals: 1']}


@pytest.mark.skipif(not shutil.which('setsid'), reason='needs setsid --ctty')
def test_local_passes_a_terminals_ctrl_c_once_to_each():
  ours, theirs = os.openpty()
  process = subprocess.Popen(
    [
      'setsid',
      '--ctty',
      _LAUNCH / 'local.sh',
      '2',
      '--',
      *_PYTHON,
      '-c',
      textwrap.dedent(_PROLOGUE) + textwrap.dedent(_COUNTS_SIGNALS),
    ],
    stdin=theirs,
    stdout=theirs,
    stderr=theirs,
    env=_environment(),
  )
  os.close(theirs)
  text = ''
  while text.count('ready') < 2:
    text += os.read(ours, 1000).decode()
  os.write(ours, b'\x03')
  try:
    while block := os.read(ours, 1000):
      text += block.decode()
  except OSError:
    pass  # Linux raises OSError when a terminal closes.
  assert process.wait(10) == 75
  os.close(ours)
  assert text.count('signals: 1') == 2


def test_local_leaves_no_orphan_where_it_is_killed_itself():
  process = _local(
    2,
    """
      signal.signal(signal.SIGTERM, signal.SIG_IGN)
      say('pid', os.getpid())
      time.sleep(300)
      """,
    '--kill_seconds=1',
  )
  lines = [process.stdout.readline() for _ in range(4)]
  assert all(' pid ' in line for line in lines), lines
  pids = {int(line.split()[2]) for line in lines}
  assert all(map(_is_alive, pids))
  process.kill()
  process.wait()
  _have_ended(pids)
  process.communicate(timeout=10)  # No process keeps the output open.


@pytest.mark.parametrize('output', ['None', 'subprocess.DEVNULL'])
def test_local_ends_grandchildren_and_does_not_wait_for_them(output):
  start = time.monotonic()
  code, lines, _ = _finish(
    _local(
      1,
      f"""
      child = subprocess.Popen(
          ['sleep', '300'], stdout={output}, stderr={output})
      say('pid', child.pid)
      """,
    )
  )
  assert code == 0 and time.monotonic() - start < 10
  assert len(_pids(lines)) == 2
  _have_ended(_pids(lines))


# The first argument is a directory that counts the attempts of a process.
_ATTEMPTS = """
    name = f'{sys.argv[1]}/{index}'
    with open(name, 'a') as file:
      file.write('x')
    attempt = os.path.getsize(name)
    say('attempt', attempt, '--resume' in sys.argv)
    """


def _attempts(tmp_path, program, *flags):
  arguments = [str(tmp_path), '--workdir=run']
  program = textwrap.dedent(_ATTEMPTS) + textwrap.dedent(program)
  return _local(2, program, *flags, arguments=arguments)


@pytest.mark.parametrize('restarts,expected', [(0, 3), (1, 3), (2, 0), (9, 0)])
def test_local_starts_all_again_after_a_failure(restarts, expected, tmp_path):
  code, lines, stderr = _finish(
    _attempts(
      tmp_path,
      'sys.exit(3 * (index == 1 and attempt < 3))',
      f'--restarts={restarts}',
    )
  )
  assert code == expected
  number = min(restarts, 2)
  assert stderr.count('exit code 3; restart ') == number
  for index in range(2):
    told = [x for x in lines[index] if x.startswith('attempt')]
    assert told == [f'attempt {i + 1} {i > 0}' for i in range(number + 1)]


def test_local_does_not_repeat_a_mistake(tmp_path):
  code, lines, stderr = _finish(
    _attempts(tmp_path, 'sys.exit(2)', '--restarts=5')
  )
  assert code == 2 and 'restart' not in stderr and len(lines[0]) == 2


def test_local_starts_nothing_again_after_a_signal(tmp_path):
  process = _attempts(tmp_path, 'time.sleep(300)', '--restarts=5')
  _wait_until(lambda: len(os.listdir(tmp_path)) == 2)
  process.terminate()
  code, lines, stderr = _finish(process)
  assert code == 128 + signal.SIGTERM and 'restart' not in stderr
  _have_ended(_pids(lines))


def test_local_kills_a_suspended_process_after_a_failure(tmp_path):
  code, lines, _ = _finish(
    _attempts(
      tmp_path,
      """
      if attempt == 1 and index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
      while len(os.listdir(sys.argv[1])) < 2:
        time.sleep(0.02)
      time.sleep(0.3)
      sys.exit(attempt == 1)
      """,
      '--restarts=1',
    )
  )
  assert code == 0
  _have_ended(_pids(lines))


@pytest.mark.parametrize(
  'words,message',
  [
    ('', 'arguments are required: N'),
    ('-- x', 'arguments are required: N'),
    ('0 -- x', 'not a valid number of processes'),
    ('2.5 -- x', 'invalid int'),
    ('two -- x', 'invalid int'),
    ('-1 -- x', 'not a valid number of processes'),
    ('2 3 -- x', 'unrecognized arguments: 3'),
    ('2 --grace -- x', 'unrecognized arguments: --grace'),
    ('2', '-- and a command'),
    ('2 --', '-- and a command'),
    ('2 --grace_seconds=long -- x', 'invalid int'),
    ('2 -- x --process_id=1', 'this script sets --process_id'),
    ('2 --restarts=1 -- x', '--restarts needs --workdir=RUN'),
    ('2 --restarts=-1 -- x', '--restarts=-1 must be at least 0'),
  ],
)
def test_local_names_the_mistake_in_a_line(words, message):
  result = subprocess.run(
    [_LAUNCH / 'local.sh', *words.split()], capture_output=True, text=True
  )
  assert result.returncode == 2 and result.stdout == ''
  assert message in result.stderr and result.stderr.count('\n') == 1


@pytest.mark.parametrize('name', ['local.sh', 'slurm.sh', 'tpu_pod.sh'])
def test_help(name):
  result = subprocess.run(
    [_LAUNCH / name, '--help'], capture_output=True, text=True
  )
  assert result.returncode == 0 and result.stderr == ''
  assert (
    f'launch/{name}' in result.stdout and 'python experiments/' in result.stdout
  )


def test_local_dry_run_prints_the_commands(tmp_path):
  _write(
    tmp_path / 'nvidia-smi', '#!/bin/sh\necho "GPU 0: A"; echo "GPU 1: A"\n'
  )
  command = ['python', 'x.py', 'two words']
  result = subprocess.run(
    [_LAUNCH / 'local.sh', '2', '--dry-run', '--', *command],
    capture_output=True,
    text=True,
    env=_environment(tmp_path, JAX_PLATFORMS=''),
    check=True,
  )
  for index, line in enumerate(result.stdout.splitlines()):
    words = shlex.split(line)
    assert words[:4] == [f'CUDA_VISIBLE_DEVICES={index}', *command]
    assert words[5:] == ['--num_processes=2', f'--process_id={index}']
  assert index == 1 and result.stderr == ''


# --- slurm.sh


def _slurm(tmp_path, words, srun='exit 0', state='RUNNING', **variables):
  """Starts slurm.sh as a batch job; returns the process and a log of calls."""
  log = tmp_path / 'calls'
  log.write_text('')
  for name, body in (
    ('srun', srun),
    ('squeue', f'echo {state}'),
    ('scontrol', 'exit 0'),
  ):
    _write(
      tmp_path / name,
      f"""\
        #!/bin/bash
        [[ {name} == squeue ]] || echo "{name} $*" >>{log}
        {body}
        """,
    )
  variables = {'SLURM_JOB_ID': '71', 'SLURM_JOB_NAME': 'pong', **variables}
  process = subprocess.Popen(
    [_LAUNCH / 'slurm.sh', *words],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=_environment(tmp_path, **variables),
  )
  return process, log


def _finish_slurm(process, log):
  stdout, _ = _communicate(process)
  return process.returncode, stdout, log.read_text().splitlines()


@pytest.mark.parametrize('code', [0, 2, 127, 130])
def test_slurm_runs_one_resumable_step_and_returns_its_code(code, tmp_path):
  returned, _, calls = _finish_slurm(
    *_slurm(tmp_path, ['python', 'x.py', '--config.seed=1'], f'exit {code}')
  )
  assert returned == code and len(calls) == 1
  assert calls[0].startswith('srun ')
  assert calls[0].endswith(
    'python x.py --config.seed=1 --workdir=runs/pong-71 --resume'
  )


@pytest.mark.parametrize(
  'words', [['--workdir=mine', '--resume'], ['--workdir', 'mine', '--resume']]
)
def test_slurm_keeps_the_users_workdir(words, tmp_path):
  _, _, calls = _finish_slurm(*_slurm(tmp_path, ['python', 'x.py', *words]))
  assert calls[0].endswith(f'python x.py {" ".join(words)}')


@pytest.mark.parametrize(
  'variables,expected',
  [
    ({'SLURM_GPUS_ON_NODE': '3'}, '0,1,2'),
    ({}, ''),
    ({'SLURM_GPUS_ON_NODE': '3', 'JAX_LOCAL_DEVICE_IDS': '2'}, '2'),
  ],
)
def test_a_slurm_task_has_all_gpus_of_its_node(variables, expected, tmp_path):
  _, stdout, _ = _finish_slurm(
    *_slurm(tmp_path, ['x'], 'echo "ids=${JAX_LOCAL_DEVICE_IDS-}"', **variables)
  )
  assert f'ids={expected}\n' in stdout


def test_slurm_dry_run_prints_the_command(tmp_path):
  code, stdout, calls = _finish_slurm(
    *_slurm(tmp_path, ['--dry-run', 'python', 'x.py', 'a b'], SLURM_JOB_ID='')
  )
  assert code == 0 and not calls
  srun, *_, workdir, resume = words = shlex.split(stdout)
  assert words[-5:-2] == ['python', 'x.py', 'a b'] and srun == 'srun'
  assert [workdir, resume] == ['--workdir=runs/pong-ID', '--resume']


@pytest.mark.parametrize(
  'exit_code,restarts,is_again',
  [(75, '0', True), (75, '99', True), (1, '9', True), (137, '10', False)],
)
def test_slurm_queues_a_job_again(exit_code, restarts, is_again, tmp_path):
  code, stdout, calls = _finish_slurm(
    *_slurm(tmp_path, ['x'], f'exit {exit_code}', SLURM_RESTART_COUNT=restarts)
  )
  assert code == exit_code and ('queued again' in stdout) == is_again
  assert ('a checkpoint' in stdout) == (code == 75)
  assert calls[1:] == ['scontrol requeue 71'] * is_again


def test_slurm_does_not_bring_a_cancelled_job_back(tmp_path):
  code, stdout, calls = _finish_slurm(
    *_slurm(tmp_path, ['x'], 'exit 75', state='COMPLETING')
  )
  assert code == 75 and 'not queued again' in stdout and len(calls) == 1


def test_slurm_survives_sigterm_and_does_not_send_it_to_srun(tmp_path):
  # srun would end its tasks at once; Slurm has already signalled them.
  process, log = _slurm(
    tmp_path,
    ['x'],
    f"""\
      trap 'echo srun was sent it >>{tmp_path}/calls' TERM
      for i in 1 2 3 4 5 6; do sleep 0.1; done
      exit 75""",
  )
  _wait_until(lambda: 'srun' in log.read_text())
  process.terminate()
  code, _, calls = _finish_slurm(process, log)
  assert code == 75 and calls[1:] == ['scontrol requeue 71']


def test_slurm_asks_for_its_signal_early_and_appends():
  options = [
    line.removeprefix('#SBATCH --')
    for line in (_LAUNCH / 'slurm.sh').read_text().splitlines()
    if line.startswith('#SBATCH')
  ]
  assert {
    'ntasks-per-node=1',
    'requeue',
    'open-mode=append',
    'signal=TERM@120',
  } <= set(options)


@pytest.mark.parametrize(
  'words,variables,message',
  [
    ([], {}, 'a command is missing'),
    (['x'], {'SLURM_JOB_ID': ''}, 'not a job of Slurm'),
  ],
)
def test_slurm_names_the_mistake_in_a_line(words, variables, message, tmp_path):
  code, stdout, calls = _finish_slurm(*_slurm(tmp_path, words, **variables))
  assert code == 2 and message in stdout and stdout.count('\n') == 1
  assert not calls


# --- tpu_pod.sh

# This stand-in for gcloud simulates a cloud. It is in bash, which starts faster
# than Python. Each slice that it creates has a folder, `$life`:
# create: the error of the creation;
# states: the slice's state at each query, one per line; the last is repeated;
# setup: the exit code of each call of the setup;
# follow: for each connection, the number of lines printed so far, then an exit
#   code, 'lost' or 'hang';
# gone: the slice's state after the last connection;
# delete: the error of the deletion.
_GCLOUD = r"""
    #!/bin/bash
    cd "${0%/*}" || exit 1
    printf '%s\x1f' "$@" >>calls
    echo >>calls
    plain=() names=()
    for word in "$@"; do
      case $word in
        --*) names+=("${word%%=*}") ;;
        *) plain+=("$word") ;;
      esac
    done
    verb=${plain[*]:0:4}
    for name in "${names[@]}"; do
      known=" $(sed -n "s/^$verb://p" gcloud_flags.txt) --project --quiet"
      known+=' --format '
      [[ $known == *" $name "* ]] && continue
      echo "$verb $name" | tee -a refused >&2
      exit 2
    done
    fail() { echo "ERROR: (gcloud) $1" >&2; exit "${2-1}"; }
    in_turn() {  # Reads the file's next line, or the last again.
      local n=$(($(cat "$life/$1-asked" 2>/dev/null) + 1)) lines
      echo $n >"$life/$1-asked"
      mapfile -t lines <"$life/$1"
      turn=${lines[n > ${#lines[@]} ? ${#lines[@]} - 1 : n - 1]}
    }
    life=$(cat life)
    case $verb in
      *create)
        life=$((life + 1))
        [[ -d $life ]] || life=$((life - 1))
        rm -f $life/*-asked $life/went
        echo $life >life
        [[ -f $life/create ]] && fail "$(cat $life/create)"
        touch exists ;;
      *scp) cp "${plain[4]}" archive ;;
      *describe)
        [[ -f exists ]] || fail 'NOT_FOUND: Resource was not found'
        if [[ -f $life/went ]]; then cat $life/gone
        else in_turn states; echo "$turn"
        fi ;;
      *delete)
        [[ -f exists ]] || fail 'NOT_FOUND: Resource was not found'
        [[ -f $life/delete ]] && fail "$(cat $life/delete)"
        rm exists ;;
      *ssh)
        [[ $* =~ tpu_worker.sh\ ([a-z]+)\ ?([0-9]*) ]]
        case ${BASH_REMATCH[1]} in
          setup) in_turn setup; exit $turn ;;
          follow)
            in_turn follow
            read -r count how <<<"$turn"
            for ((i = BASH_REMATCH[2]; i <= count; i++)); do
              echo "life $life line $i"
            done
            [[ $how == hang ]] && { echo $$ >hangs; exec /bin/sleep 300; }
            [[ -f $life/gone ]] && touch $life/went
            [[ $how == lost ]] && fail 'connection lost' 255
            echo "exit $how" ;;
        esac ;;
      *) echo "$*" | tee -a refused >&2; exit 2 ;;
    esac
    """


class _Cloud:
  """A repository with the scripts, and a gcloud that simulates `lives`."""

  def __init__(self, path, *lives):
    self.path, self.tools = path / 'repository', path / 'tools'
    _write(self.tools / 'gcloud', _GCLOUD.lstrip('\n'))
    shutil.copy(pathlib.Path(__file__).parent / 'gcloud_flags.txt', self.tools)
    sleep = f'[ -f {self.tools}/slow ] && exec /bin/sleep "$@"\nexit 0\n'
    _write(self.tools / 'sleep', f'#!/bin/sh\n{sleep}')
    (self.tools / 'life').write_text('-1\n')
    defaults = {'states': 'ACTIVE', 'setup': '0'}
    for number, life in enumerate(lives):
      for key, text in (defaults | life).items():
        _write(self.tools / str(number) / key, f'{text}\n')
    shutil.copytree(_LAUNCH, self.path / 'launch')
    _write(self.path / 'experiments' / 'x.py', 'print(1)\n')
    self.git('init', '-q')
    self.git('add', '.')
    self.git('-c', 'user.name=a', '-c', 'user.email=a', 'commit', '-qm', 'a')

  def git(self, *words):
    subprocess.run(['git', '-C', self.path, *words], check=True)

  def start(
    self,
    *words,
    accelerator='v4-16',
    command=('python', 'experiments/x.py', '--config.seed=1'),
  ):
    return subprocess.Popen(
      [
        *_HEEDING,
        self.path / 'launch' / 'tpu_pod.sh',
        f'--accelerator={accelerator}',
        '--name=slice',
        '--project=mine',
        '--bucket=gs://bucket/some',
        *(() if '--check' in words else ('--no-check',)),
        *(x for x in words if x != '--check'),
        '--',
        *command,
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=_environment(self.tools),
      cwd=self.path.parent,
    )

  def run(self, *words, **options):
    """Runs the script; returns the exit code, stdout and stderr."""
    process = self.start(*words, **options)
    stdout, stderr = _communicate(process, timeout=30)
    return process.returncode, stdout, stderr

  def calls(self):
    """Returns the words of each call of gcloud, without queries."""
    refused = self.tools / 'refused'
    assert not refused.exists(), refused.read_text()
    calls = [
      line.split('\x1f')[:-1]
      for line in (self.tools / 'calls').read_text().split('\n')
    ]
    return [call for call in calls if call and 'describe' not in call]

  def steps(self):
    """Returns one word for each call of gcloud."""
    steps = []
    for call in self.calls():
      command = [
        w for w in call if w.startswith('--command=bash tpu_worker.sh ')
      ]
      steps.append(command[0].split()[2] if command else call[3])
    return steps

  @property
  def exists(self):
    return (self.tools / 'exists').exists()


@pytest.fixture(scope='module')
def repository(tmp_path_factory):
  return _Cloud(tmp_path_factory.mktemp('cloud')).path


_ONCE = ['create', 'scp', 'setup', 'start', 'follow']
_END = ['delete']


@pytest.mark.parametrize('code', [0, 1, 2])
def test_tpu_runs_once_deletes_and_returns_the_code(code, tmp_path):
  cloud = _Cloud(
    tmp_path,
    {
      'states': 'WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE',
      'follow': f'3 {code}',
    },
  )
  returned, stdout, stderr = cloud.run()
  assert returned == code, stderr
  assert cloud.steps() == _ONCE + _END and not cloud.exists
  lines = [f'life 0 line {i}' for i in (1, 2, 3)]
  assert stdout.splitlines() == [*lines, f'exit {code}']
  assert 'slice: PROVISIONING' in stderr
  fetch = 'gcloud storage rsync --recursive gs://bucket/some/slice runs/slice'
  assert fetch in stderr


@pytest.mark.parametrize(
  'has_libtpu,code,message',
  [
    (True, 0, ''),
    (True, 2, 'the run does not compile for v4-16; --no-check'),
    (False, 0, 'the run is not compiled first'),
  ],
)
def test_tpu_compiles_the_run_first(has_libtpu, code, message, tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '1 0'})
  _write(
    cloud.tools / 'python',
    f"""#!/bin/sh
    case $1 in
      -c) exit {int(not has_libtpu)} ;;
      *) echo "$*" >{cloud.tools}/compiled; exit {code} ;;
    esac
    """,
  )
  returned, _, stderr = cloud.run('--check')
  assert returned == code and message in stderr
  assert (cloud.tools / 'calls').exists() == (code == 0)
  if has_libtpu:
    compiled = (cloud.tools / 'compiled').read_text()
    expected = 'experiments/x.py --config.seed=1 --target=v4-16\n'
    assert compiled == f'-m podrl compile {expected}'
    words = 'CartPole-v1', '--steps=10'
    assert cloud.run('--check', command=('podrl', 'train', *words))[0] == code
    compiled = (cloud.tools / 'compiled').read_text()
    assert (
      compiled == '-m podrl compile CartPole-v1 --steps=10 --target=v4-16\n'
    )


def test_tpu_does_not_compile_a_sweep(tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '1 0'})
  python = f'#!/bin/sh\n[ $1 = -c ] || touch {cloud.tools}/compiled\n'
  _write(cloud.tools / 'python', python)
  words = 'experiments/x.py', '--axis=agent.gamma=0.9,0.99'
  code, _, said = cloud.run('--check', command=('bin/podrl', 'sweep', *words))
  assert code == 0 and 'it is a sweep' in said
  assert not (cloud.tools / 'compiled').exists()


def test_tpu_commands_are_whole(tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '1 0'})
  assert cloud.run('--spot')[0] == 0
  create, scp, setup, start, follow, delete = cloud.calls()
  where = ['--project=mine', '--zone=us-central2-b', '--quiet']
  queued = ['compute', 'tpus', 'queued-resources']
  assert create == queued + [
    'create',
    'slice',
    '--node-id=slice',
    '--runtime-version=tpu-ubuntu2204-base',
    '--accelerator-type=v4-16',
    '--spot',
    '--scopes=https://www.googleapis.com/auth/cloud-platform',
    *where,
  ]
  assert scp[:4] == [*queued, 'scp'] and scp[5:7] == [
    'launch/tpu_worker.sh',
    'slice:',
  ]
  everyone = ['--worker=all', '--batch-size=all', *where]
  assert scp[7:] == everyone and scp[4].endswith('/podrl.tar.gz')
  assert setup == queued + [
    'ssh',
    'slice',
    '--command=bash tpu_worker.sh setup bucket /mnt/podrl',
    *everyone,
  ]
  assert start == queued + [
    'ssh',
    'slice',
    '--command=bash tpu_worker.sh start python '
    'experiments/x.py --config.seed=1 '
    '--workdir=/mnt/podrl/some/slice --resume --coordinator=auto',
    *everyone,
  ]
  assert follow == queued + [
    'ssh',
    'slice',
    '--command=bash tpu_worker.sh follow 1',
    '--worker=0',
    *where,
  ]
  assert delete == queued + ['delete', 'slice', '--force', *where]


@pytest.mark.parametrize(
  'life',
  [
    {'follow': '2 75'},
    {'follow': '2 1', 'gone': 'SUSPENDING'},
    {'follow': '2 lost', 'gone': 'SUSPENDED'},
  ],
)
def test_tpu_goes_on_after_a_preemption(life, tmp_path):
  cloud = _Cloud(tmp_path, life, {'follow': '1 0'})
  code, stdout, stderr = cloud.run()
  assert code == 0, stderr
  assert cloud.steps() == _ONCE + ['delete'] + _ONCE + _END
  assert 'the slice is lost' in stderr and stdout.endswith(
    'life 1 line 1\nexit 0\n'
  )
  assert not cloud.exists


def test_tpu_passes_the_words_of_the_command_on(tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '1 0'})
  words = 'two words', 'me@host', "it's", '$HOME', '*', '--a.map=b.py'
  command = ('python', 'experiments/x.py', *words)
  code, _, stderr = cloud.run(command=command)
  assert code == 0, stderr
  (start,) = [x for x in cloud.calls() if ' start ' in ' '.join(x)]
  (line,) = [x for x in start if x.startswith('--command=')]
  assert shlex.split(line)[3:11] == [*command]


def test_tpu_copies_the_working_tree(tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '1 0'})
  _write(cloud.path / '.gitignore', 'runs/\n')
  _write(cloud.path / 'runs' / 'ignored', '')
  _write(cloud.path / 'new.py', '')
  _write(cloud.path / 'experiments' / 'x.py', 'print(2)\n')
  assert cloud.run()[0] == 0
  with tarfile.open(cloud.tools / 'archive') as archive:
    changed = archive.extractfile('experiments/x.py').read()
    names = archive.getnames()
  assert changed == b'print(2)\n' and 'new.py' in names
  assert 'launch/tpu_worker.sh' in names and 'runs/ignored' not in names


def test_tpu_takes_a_lost_connection_up_where_it_was_lost(tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '2 lost\n0 lost\n5 lost\n6 0'})
  code, stdout, _ = cloud.run()
  assert code == 0
  assert stdout.splitlines() == [f'life 0 line {i}' for i in range(1, 7)] + [
    'exit 0'
  ]
  assert cloud.steps() == _ONCE + ['follow'] * 3 + _END
  assert [
    call[5].split()[-1] for call in cloud.calls() if 'follow' in call[5]
  ] == ['1', '3', '3', '6']


@pytest.mark.parametrize(
  'life,step',
  [
    ({'create': 'RESOURCE_EXHAUSTED: none left'}, []),
    ({'states': 'CREATING\nFAILED'}, ['delete']),
  ],
)
def test_tpu_gives_up_where_there_is_no_slice(life, step, tmp_path):
  cloud = _Cloud(tmp_path, life)
  code, _, stderr = cloud.run()
  assert code == 1 and '--name=slice resumes the run' in stderr
  assert life.get('create', '') in stderr
  assert cloud.steps() == ['create', *step] and not cloud.exists


def test_tpu_gives_up_where_no_run_gets_to_its_first_line(tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '0 75'})
  code, _, stderr = cloud.run()
  assert code == 1 and '3 slices in a row' in stderr
  assert cloud.steps() == (_ONCE + ['delete']) * 3 and not cloud.exists


def test_tpu_repeats_the_setup_of_a_machine_that_does_not_answer_yet(tmp_path):
  cloud = _Cloud(tmp_path / 'a', {'setup': '255\n255\n0', 'follow': '1 0'})
  assert cloud.run()[0] == 0
  assert cloud.steps() == [
    'create',
    *['scp', 'setup'] * 3,
    'start',
    'follow',
    *_END,
  ]
  cloud = _Cloud(tmp_path / 'b', {'setup': '1'})
  assert cloud.run()[0] == 1
  assert cloud.steps() == ['create', *['scp', 'setup'] * 5, *_END]


def test_tpu_keeps_the_slice_and_uses_it_again(tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '1 0'})
  code, _, stderr = cloud.run('--keep')
  assert code == 0 and cloud.steps() == _ONCE and cloud.exists
  assert 'gcloud compute tpus queued-resources delete slice' in stderr
  assert cloud.run()[0] == 0
  assert cloud.steps() == _ONCE + _ONCE[1:] + _END


def test_tpu_says_how_to_delete_what_it_could_not(tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '1 0', 'delete': 'UNAVAILABLE'})
  code, _, stderr = cloud.run()
  assert code == 0 and 'costs money' in stderr
  assert '\ngcloud compute tpus queued-resources delete slice --force' in stderr


@pytest.mark.parametrize(
  'number,code,keep', [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True)]
)
def test_tpu_saves_and_deletes_where_it_is_interrupted(
  number, code, keep, tmp_path
):
  cloud = _Cloud(tmp_path, {'follow': '2 hang'})
  process = cloud.start(*['--keep'] * keep)
  _wait_until((cloud.tools / 'hangs').exists)
  _wait_until(lambda: (cloud.tools / 'hangs').read_text())
  pid = int((cloud.tools / 'hangs').read_text())
  process.send_signal(number)
  _, stderr = _communicate(process)
  assert process.returncode == code, stderr
  assert cloud.steps() == _ONCE + ['stop'] + ['delete'] * (not keep)
  assert cloud.exists == keep
  _have_ended([pid])


def test_tpu_interrupted_in_the_queue_leaves_it(tmp_path):
  cloud = _Cloud(tmp_path, {'states': 'WAITING_FOR_RESOURCES'})
  (cloud.tools / 'slow').touch()
  process = cloud.start()
  _wait_until((cloud.tools / '0' / 'states-asked').exists)
  time.sleep(0.2)  # The script now waits.
  process.send_signal(signal.SIGINT)
  _, stderr = _communicate(process)
  assert process.returncode == 130, stderr
  assert cloud.steps() == ['create', 'delete'] and not cloud.exists


@pytest.mark.parametrize(
  'accelerator,expected',
  [
    (
      'v4-8',
      [
        '--accelerator-type=v4-8',
        '--runtime-version=tpu-ubuntu2204-base',
        '--zone=us-central2-b',
      ],
    ),
    (
      'v5e-256',
      [
        '--accelerator-type=v5litepod-256',
        '--coordinator=auto',
        '--runtime-version=v2-alpha-tpuv5-lite',
      ],
    ),
    (
      'v6e-8',
      ['--accelerator-type=v6e-8', '--runtime-version=v2-alpha-tpuv6e'],
    ),
  ],
)
def test_tpu_dry_run_prints_commands_that_a_shell_accepts(
  accelerator, expected, tmp_path
):
  cloud = _Cloud(tmp_path, {'follow': '1 0'})
  code, stdout, stderr = cloud.run('--dry-run', accelerator=accelerator)
  assert code == 0 and stderr == ''
  assert not (cloud.tools / 'calls').exists()  # No command ran.
  for word in expected:
    assert f' {word}' in stdout
  assert ('--coordinator=auto' in expected) == ('--coordinator=auto' in stdout)
  # The printed commands work in a shell, in the order of a real run.
  script = _write(tmp_path / 'pasted.sh', stdout)
  subprocess.run(
    ['bash', script],
    env=_environment(cloud.tools),
    timeout=30,
    cwd=cloud.path,
    check=True,
    capture_output=True,
  )
  order = list(dict.fromkeys(cloud.steps()))
  assert order == _ONCE + _END and not cloud.exists


@pytest.mark.parametrize(
  'words,message',
  [
    ('--accelerator=v3-8 --', 'is unknown; try v4-8'),
    ('--accelerator=tpu7x-8 --', 'tpu7x needs Kubernetes'),
    ('--accelerator=v4-8 --name=A --', 'small letters, digits'),
    ('--accelerator=v4-8 --bucket=mine --', 'is not gs://NAME'),
    ('--accelerator=v4-8 --spott --', 'is unknown'),
    ('--accelerator=v4-8', 'a command are missing'),
    ('--', '-- and a command are missing'),
    ('-- python experiments/x.py', "--accelerator='' is unknown"),
    (
      '--accelerator=v4-8 -- python experiments/x.py --workdir=a',
      'this script sets --workdir',
    ),
  ],
)
def test_tpu_names_the_mistake_in_a_line(words, message, repository):
  words = words.split()
  if words[-1] == '--' and len(words) > 1:
    words += ['python', 'experiments/x.py']
  result = subprocess.run(
    [repository / 'launch' / 'tpu_pod.sh', '--dry-run', *words],
    capture_output=True,
    text=True,
    env=_environment(repository.parent / 'tools'),
  )
  assert result.returncode == 2 and result.stdout == ''
  assert message in result.stderr and result.stderr.count('\n') == 1


def test_tpu_wants_project_and_bucket(tmp_path):
  cloud = _Cloud(tmp_path, {'follow': '1 0'})
  code, _, stderr = cloud.run('--project=')
  assert code == 2 and '--project is missing' in stderr
  code, _, stderr = cloud.run('--bucket=')
  assert code == 2 and '--bucket= is not gs://NAME' in stderr
  assert not (cloud.tools / 'calls').exists()


# --- tpu_worker.sh


@pytest.fixture
def worker(tmp_path):
  """Runs tpu_worker.sh on a host that has everything it installs."""
  tools, home = tmp_path / 'tools', tmp_path / 'home'
  for name in ('gcsfuse', 'python3'):
    _write(tools / name, f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/calls\n')
  _write(tools / 'mountpoint', '#!/bin/sh\nexit 1\n')
  _write(tools / 'sudo', '#!/bin/sh\nexec "$@"\n')
  (home / 'podrl').mkdir(parents=True)
  shutil.copy(_LAUNCH / 'tpu_worker.sh', home)

  def run(*words, **options):
    return subprocess.run(
      ['bash', 'tpu_worker.sh', *words],
      cwd=home,
      text=True,
      timeout=20,
      env=_environment(tools, HOME=str(home)),
      capture_output=True,
      **options,
    )

  run.home, run.calls = home, tmp_path / 'calls'
  yield run
  run('stop')


def test_worker_runs_detached_and_tells_the_exit_code(worker):
  program = 'import os, sys; print(os.getcwd(), sys.argv[1:]); sys.exit(7)'
  started = worker('start', *_PYTHON, '-c', program, 'two words')
  assert started.returncode == 0 and started.stdout == ''
  followed = worker('follow', '1').stdout.splitlines()
  assert followed == [f"{worker.home}/podrl ['two words']", 'exit 7']
  assert worker('follow', '2').stdout == 'exit 7\n'


def test_worker_stops_a_run_with_sigterm_and_waits_for_it(worker):
  program = """if True:
      import signal, sys, time
      signal.signal(signal.SIGTERM, lambda *_: (
          time.sleep(0.3), print('saved', flush=True), sys.exit(75)))
      print('ready', flush=True)
      time.sleep(300)
      """
  worker('start', *_PYTHON, '-c', program)
  log = worker.home / 'podrl-run.log'
  _wait_until(lambda: 'ready' in log.read_text())
  assert worker('stop').returncode == 0
  assert worker('follow', '1').stdout == 'ready\nsaved\nexit 75\n'


def test_worker_takes_a_run_that_has_vanished_for_preempted(worker):
  worker('start', 'sleep', '300')
  pid = int((worker.home / 'podrl-run.pid').read_text())
  os.killpg(pid, signal.SIGKILL)
  assert worker('follow', '1').stdout == 'exit 75\n'


def test_worker_mounts_the_bucket_and_installs_the_archive(worker):
  home = worker.home
  (home / 'podrl' / 'old').touch()
  new = _write(home / 'tree' / 'new', '')
  archive = ['tar', '-czf', home / 'podrl.tar.gz', '-C', new.parent, 'new']
  subprocess.run(archive, check=True)
  mount = home / 'mount'
  result = worker('setup', 'bucket', str(mount))
  assert result.returncode == 0, result.stderr
  assert [p.name for p in (home / 'podrl').iterdir()] == ['new']
  mounted, *_, installed = worker.calls.read_text().splitlines()
  # A run renames directories, and all hosts must see what one host writes.
  assert mounted.startswith('gcsfuse ') and mounted.endswith(f' bucket {mount}')
  assert {
    '--rename-dir-limit=1000000',
    '--metadata-cache-ttl-secs=0',
    '--enable-streaming-writes=false',
  } <= set(mounted.split())
  assert installed.endswith(f'-e {home}/podrl[tpu]')


# --- kubernetes.yaml


@pytest.fixture
def manifests():
  """The documents of kubernetes.yaml, by their kind."""
  text = (_LAUNCH / 'kubernetes.yaml').read_text()
  return {x['kind']: x for x in yaml.safe_load_all(text)}


def test_kubernetes_manifests_fit_the_schemas_of_the_api(manifests):
  validate = pytest.importorskip('kubernetes_validate').validate
  for manifest in manifests.values():
    for version in '1.31', '1.37':  # Older schemas refuse any onExitCodes.
      validate(manifest, version, strict=True)


def test_kubernetes_pods_resume_a_run_in_their_volume(manifests):
  pod = manifests['Job']['spec']['template']['spec']
  (container,) = pod['containers']
  command = container['command'] + container['args']
  flags = parse_command_line(command[1:]).flags
  assert flags.coordinator == 'auto' and flags.resume
  mounts = {x['mountPath']: x['name'] for x in container['volumeMounts']}
  assert mounts[os.path.dirname(flags.workdir)] == pod['volumes'][0]['name']
  assert (_LAUNCH.parent / command[1]).exists()


def test_jax_finds_the_processes_of_the_job(manifests, monkeypatch):
  job = manifests['Job']

  def make(tree, **names):  # The API has pod_ip where the manifest has podIP.
    return types.SimpleNamespace(**tree, **names)

  def grant(verb, resource):
    rules = manifests['Role']['rules']
    assert any(verb in x['verbs'] and resource in x['resources'] for x in rules)

  def list_pods(namespace, field_selector):
    grant('list', 'pods')
    owner = make({}, kind='Job', controller=True)
    labels = {'job-name': job['metadata']['name']}
    metadata = make({}, labels=labels, owner_references=[owner])
    pod = make(
      {}, metadata=metadata, spec=make(job['spec']['template']['spec'])
    )
    return make({}, items=[pod])

  def read_job(name, namespace):
    grant('get', 'jobs')
    metadata = make(job['metadata'], labels={})
    return make({}, metadata=metadata, spec=make(job['spec']))

  class Cluster(k8s_cluster.K8sCluster):
    _core_api = make({}, list_namespaced_pod=list_pods)
    _batch_api = make({}, read_namespaced_job=read_job)
    _ApiException = RuntimeError
    opt_in_only_method = True  # JAX must not find this class in other tests.

    @classmethod
    def _namespace(cls):
      return 'default'

  monkeypatch.setenv('HOSTNAME', 'localhost')
  monkeypatch.setenv('JOB_COMPLETION_INDEX', '3')
  address = Cluster.get_coordinator_address(None, None)
  service = manifests['Service']
  name = job['metadata']['name']
  # Kubernetes calls the first pod of an indexed job NAME-0.SUBDOMAIN.
  assert address == f'{name}-0.{service["metadata"]["name"]}:55527'
  assert service['spec']['selector'] == {'job-name': name}
  assert service['spec']['clusterIP'] == 'None'
  assert Cluster.get_process_count() == job['spec']['completions']
  assert Cluster.get_process_id() == 3
  assert job['spec']['completionMode'] == 'Indexed'  # It sets the variable.


# --- sky.yaml


def test_sky_runs_one_process_per_node(tmp_path):
  task = yaml.safe_load((_LAUNCH / 'sky.yaml').read_text())
  python = tmp_path / 'podrl-venv' / 'bin' / 'python'
  _write(python, '#!/bin/sh\nprintf "%s\\n" "$@"\n')
  environment = _environment(
    HOME=str(tmp_path),
    NAME=task['envs']['NAME'],
    SKYPILOT_NODE_IPS='10.0.0.7\n10.0.0.8',
    SKYPILOT_NUM_NODES='2',
    SKYPILOT_NODE_RANK='1',
  )
  command = ['bash', '-c', task['run']]
  result = subprocess.run(
    command, env=environment, capture_output=True, text=True, check=True
  )
  flags = parse_command_line(result.stdout.splitlines()).flags
  assert flags.workdir == '/runs/podrl' and flags.resume
  assert flags.coordinator == '10.0.0.7:12345'
  assert flags.num_processes == 2 and flags.process_id == 1
  assert task['resources']['job_recovery']['recover_on_exit_codes'] == [75]
