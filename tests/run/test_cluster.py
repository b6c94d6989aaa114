"""Tests several processes: agreement, the watchdog, runs of two and four."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import helpers
import jax
from jax._src.distributed import State
import numpy as np
import pytest
from test_resume import _plain

import podrl
from podrl.records import checkpoint
from podrl.records.recorder import Window, local_part, merge_processes
from podrl.run import cluster, loop, train
from podrl.run.cluster import Cluster
from podrl.tools import sweep
from podrl.types import Episodes, Report

pytestmark = pytest.mark.timeout(400)
# One update is one optimiser step for any number of processes.
_ONE_STEP = [
  '--config.num_epochs=1',
  '--config.num_minibatches=1',
  '--config.optimizer.name=sgd',
  '--config.optimizer.learning_rate=0.5',
]
_TINY = [
  '--config.env.num_envs=8',
  '--config.unroll_length=8',
  '--config.eval.num_episodes=5',
  '--config.log.every_updates=4',
  '--config.network.hidden_sizes=8',
  '--config.log.tensorboard=False',
]
_HOST = [
  *_TINY,
  '--config.eval.max_episode_steps=4',
  '--config.sebulba.mode=deterministic',
]


class _Store:
  """Stands in for JAX's coordination service, in one process."""

  def __init__(self):
    self.values = {}
    self._changed = threading.Condition()

  def key_value_set(self, key, value, allow_overwrite=False):
    with self._changed:
      if key in self.values and not allow_overwrite:
        raise jax.errors.JaxRuntimeError('ALREADY_EXISTS')
      self.values[key] = value
      self._changed.notify_all()

  def blocking_key_value_get(self, key, timeout_in_ms):
    with self._changed:
      if not self._changed.wait_for(
        lambda: key in self.values, timeout_in_ms / 1000
      ):
        raise jax.errors.JaxRuntimeError('DEADLINE_EXCEEDED')
      return self.values[key]

  def key_value_try_get(self, key):
    if key not in self.values:
      raise jax.errors.JaxRuntimeError('NOT_FOUND')
    return self.values[key]

  def key_value_dir_get(self, key):
    return [(k, v) for k, v in list(self.values.items()) if k.startswith(key)]

  def key_value_delete(self, key):
    with self._changed:
      del self.values[key]


def _run_cluster(num_processes, function):
  """Returns the results of `function(cluster)` by process, and the store."""
  store, outcomes = _Store(), [None] * num_processes

  def run(i):
    try:
      outcomes[i] = function(Cluster(i, num_processes, store))
    except ValueError as error:
      outcomes[i] = error

  threads = [
    threading.Thread(target=run, args=(i,), daemon=True)
    for i in range(num_processes)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  return outcomes, store


def test_process_0_decides_and_gathers():
  def function(cluster):
    got = []
    for i in range(5):
      got.append(cluster.decide(lambda: [cluster.process, i]))
      got.append(cluster.gather((cluster.process, i)))
    return got

  outcomes, store = _run_cluster(3, function)
  decided = [[0, i] for i in range(5)]
  assert [x[::2] for x in outcomes] == [decided] * 3
  assert outcomes[0][1::2] == [[[p, i] for p in range(3)] for i in range(5)]
  assert outcomes[1][1::2] == outcomes[2][1::2] == [None] * 5
  assert not store.values  # Old keys were deleted.


def test_a_mistake_in_one_process_is_one_in_all():
  def attempt(cluster):
    def function():
      if cluster.process == 1:
        raise ValueError('no such thing')
      return cluster.process

    return cluster.attempt(function)

  outcomes, _ = _run_cluster(3, attempt)
  assert [str(x) for x in outcomes] == ['process 1: no such thing'] * 3

  def everywhere(cluster):
    return cluster.attempt(lambda: int('x'))

  outcomes, _ = _run_cluster(2, everywhere)
  assert {str(x) for x in outcomes} == {
    "invalid literal for int() with base 10: 'x'"
  }

  def decide(cluster):
    return cluster.decide(lambda: int('x'))

  outcomes, _ = _run_cluster(2, decide)
  assert all(isinstance(x, ValueError) for x in outcomes)
  assert _run_cluster(2, lambda x: x.attempt(lambda: x.process))[0] == [0, 1]


def test_values_that_differ_are_named():
  def compare(cluster):
    return cluster.compare(
      {'seed': 3 + (cluster.process == 2), 'sizes': (1, 2)}
    )

  outcomes, _ = _run_cluster(3, compare)
  assert [str(x) for x in outcomes] == [
    'process 2 has seed=4, but process 0 has 3'
  ] * 3
  assert _run_cluster(2, lambda x: x.compare({'a': (1,)}))[0] == [None, None]


def test_alone_nothing_is_asked():
  alone = Cluster()
  assert alone.decide(lambda: (1, 2)) == (1, 2)
  assert alone.gather('x') == ['x']
  assert alone.attempt(lambda: 5) == 5
  assert not alone.is_distributed
  alone.close()


class _Ended(BaseException):
  """Replaces the end of the process."""


@pytest.fixture
def watch(monkeypatch):
  """Runs two watchdogs; returns the messages with which each ended."""
  monkeypatch.setattr(cluster, '_PERIOD_SECONDS', 0.02)
  monkeypatch.setattr(cluster.Watchdog, 'catch_aborts', lambda *_: None)
  monkeypatch.setattr(
    cluster.faulthandler, 'dump_traceback_later', lambda *_, **__: None
  )

  def exit_process(code):
    assert code == 1
    raise _Ended

  monkeypatch.setattr(cluster.os, '_exit', exit_process)
  monkeypatch.setattr(
    threading, 'excepthook', lambda args: None
  )  # `_Ended` ends a thread.

  def run(behave, ended, heartbeat_seconds=0.3, hang_seconds=0.8):
    store, messages = _Store(), {0: [], 1: []}
    dogs = [cluster.Watchdog(heartbeat_seconds, hang_seconds) for _ in range(2)]
    for i, dog in enumerate(dogs):
      dog.on_failure = messages[i].append
      dog.begin(i, 2, store)
    end = time.monotonic() + 20
    while not all(messages[i] for i in ended) and time.monotonic() < end:
      behave(dogs)
      time.sleep(0.01)
    for dog in dogs:
      dog.close()
    return messages

  return run


def test_a_silent_process_is_named(watch):
  def behave(dogs):
    dogs[0].beat()
    dogs[1]._closed.set()

  messages = watch(behave, (0,))
  assert messages[0] == ['process 1 is gone: no sign of life for 0.3 s']


def test_a_hanging_process_is_named_in_all(watch):
  def behave(dogs):
    dogs[0].beat()

  messages = watch(behave, (0, 1), heartbeat_seconds=5.0)
  assert messages[0] == messages[1] == ['no progress for 0.8 s in process 1']


def test_a_process_that_saves_does_not_hang(watch, monkeypatch):
  start, blocks = time.monotonic(), contextlib.ExitStack()

  def behave(dogs):
    if time.monotonic() > start + 3:
      blocks.close()
    elif not dogs[1]._busy_until:
      blocks.enter_context(dogs[1].busy())
    dogs[0].beat()

  messages = watch(behave, (0,), heartbeat_seconds=5.0)
  assert messages[0] == ['no progress for 0.8 s in process 1']
  assert time.monotonic() > start + 3
  # A file system that never answers is found too.
  monkeypatch.setattr(cluster, 'SAVE_SECONDS', 0.1)

  def save_forever(dogs):
    if not dogs[1]._busy_until:
      blocks.enter_context(dogs[1].busy())
    dogs[0].beat()

  messages = watch(save_forever, (0,), heartbeat_seconds=5.0)
  assert messages[0] == ['no progress for 0.8 s in process 1']


@pytest.mark.parametrize('part', ['_start', 'evaluate', '_evolve_safely'])
def test_a_process_that_compiles_does_not_hang(part):
  busy = []

  class Dog(cluster.Watchdog):
    def look(self, *_):
      busy.append(time.monotonic() < self._busy_until)

  dog = Dog(1.0, 1.0)
  trainer = mock.Mock(has_evaluated=False, has_evolved=False)
  trainer.cluster = Cluster(0, 2, object(), dog)
  trainer._compiling = functools.partial(loop.Trainer._compiling, trainer)
  trainer.signals.leaving = lambda leave: contextlib.nullcontext()
  trainer.run.driver.learner_state.memory = ()
  for function in (
    trainer.run.driver.start,
    trainer._evaluate,
    trainer._evolve,
  ):
    function.side_effect = dog.look
  getattr(loop.Trainer, part)(trainer)
  assert busy == [True] and not dog._busy_until


_SLOW_ENV = """
import time
import jax.numpy as jnp
from podrl.envs import autoreset, spaces
from podrl.types import DeviceEnv, Discrete

traced = []

def make() -> DeviceEnv:
  def reset(rng_key):
    return jnp.zeros(2), jnp.zeros(())

  def step(rng_key, state, action):
    traced.append(1)
    if len(traced) == 3:
      time.sleep(20)  # As XLA does, it lets other threads run.
    return jnp.zeros(2), state, 1.0, False, True

  spec = spaces.device_spec(reset, Discrete(2), 0)
  return autoreset.make_device_env(spec, reset, step)
"""


@pytest.mark.slow  # The test above covers it too.
def test_a_long_compilation_is_no_hang(tmp_path, monkeypatch):
  (tmp_path / 'slow_env.py').write_text(_SLOW_ENV)
  monkeypatch.chdir(tmp_path)
  arguments = [*_TINY, '--config.num_devices=1', '--hang_seconds=10']
  arguments += ['--config.total_env_steps=256', f'--workdir={tmp_path / "run"}']
  start = time.monotonic()
  output = _run_pod(2, 'train jax:slow_env:make', *arguments)
  assert time.monotonic() - start > 20 and 'no progress' not in output[0]


def test_all_that_hang_are_named(watch):
  messages = watch(lambda dogs: None, (0, 1), heartbeat_seconds=5.0)
  assert (
    messages[0] == messages[1] == ['no progress for 0.8 s in process 0 and 1']
  )


def test_a_process_that_waits_for_another_does_not_hang():
  beats = []

  class Dog:
    def beat(self):
      beats.append(1)

  class Store(_Store):
    def blocking_key_value_get(self, key, timeout_in_ms):
      if len(beats) < 4:
        raise jax.errors.JaxRuntimeError('DEADLINE_EXCEEDED')
      self.values[key] = 'null'
      return 'null'

  Cluster(0, 2, Store(), Dog()).gather(None)
  assert len(beats) == 4


def test_processes_that_make_progress_are_left_alone(watch):
  start, failed = time.monotonic(), []

  def behave(dogs):
    if time.monotonic() > start + 5 and not failed:
      failed.append(True)  # A second `fail` would block.
      dogs[1].fail('it broke', is_suspect=False)
    for dog in dogs:
      dog.beat()

  messages = watch(behave, (0,), 2.0, 3.0)  # A busy machine meets these limits.
  assert time.monotonic() - start > 5
  assert messages == {0: ['process 1 failed: it broke'], 1: []}


def _report(own):
  return Report(
    {'loss': np.asarray([0.5, 0.25], np.float32)},
    Episodes(*(np.asarray([i, i + 1]) for i in range(3))),
    64,
    1.5,
    True,
    {'time_update': 1.0 + own},
    {
      'policy_lag': np.asarray([own, 1.0]),
      'policy_lag_max': np.asarray([own, 2.0]),
      'num_unrolls_dropped': np.asarray([own, own]),
    },
    finished=[(0, 0.5, own), (1, 1.5, own)],
  )


def test_reports_of_processes_are_one():
  merged = merge_processes(
    _report(0), [json.loads(json.dumps(local_part(_report(i)))) for i in (3, 6)]
  )
  # In each of three processes, the i-th field has the total 2 i + 1.
  assert [float(np.sum(x)) for x in merged.episodes] == [3.0, 9.0, 15.0]
  rows = [(i, i + 0.5, own) for i in range(2) for own in (0, 3, 6)]
  assert merged.finished == rows
  # Each of the two updates has 96 predictions, of which 3 are reset steps.
  window = Window(1, 1)
  steps = [x for x, *_ in window.episodes_of(merged)]
  assert steps == [96 - 3] * 3 + [192 - 6] * 3
  assert merged.num_updates == 2 and merged.num_predictions == 3 * 64
  assert merged.stages == {'time_update': 4.0} and merged.seconds == 1.5
  np.testing.assert_array_equal(merged.own['policy_lag'], [3.0, 1.0])
  np.testing.assert_array_equal(merged.own['policy_lag_max'], [6.0, 2.0])
  np.testing.assert_array_equal(merged.own['num_unrolls_dropped'], [9.0, 9.0])
  np.testing.assert_array_equal(merged.metrics['loss'], [0.5, 0.25])
  assert merge_processes(_report(2), []).own['policy_lag'][0] == 2


def _free_port():
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


class _Pod:
  """Starts the processes of one run on this machine.

  `name` is an experiment, or the words of a `podrl` command.
  """

  def __init__(self, num_processes, name, *arguments, each=None):
    port = _free_port()
    script = helpers.ROOT / 'experiments' / f'{name}.py'
    command = [script] if script.exists() else ['-m', 'podrl', *name.split()]
    self.processes = [
      subprocess.Popen(
        [
          sys.executable,
          *map(str, command),
          *arguments,
          f'--coordinator=127.0.0.1:{port}',
          f'--num_processes={num_processes}',
          f'--process_id={i}',
          *(each[i] if each else ()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
      )
      for i in range(num_processes)
    ]

  def wait(self, seconds=240):
    """Waits for the end; returns the exit codes and the outputs."""
    try:
      output = [p.communicate(timeout=seconds)[0] for p in self.processes]
    finally:
      for process in self.processes:
        process.kill()
    return [p.returncode for p in self.processes], output


def _run_pod(num_processes, name, *arguments):
  codes, output = _Pod(num_processes, name, *arguments).wait()
  assert codes == [0] * num_processes, output
  return output


def _until(path, num_records):
  """Waits until a run has `num_records` records."""
  end = time.monotonic() + 120
  file = path / 'metrics.jsonl'
  while not file.exists() or len(file.read_text().splitlines()) < num_records:
    assert time.monotonic() < end
    time.sleep(0.05)


def _params(path):
  return jax.tree.leaves(podrl.load(str(path)).variables)


def _run_alone(path, name, *arguments):
  assert (
    train.run(
      helpers.get_config(name), [f'{name}.py', f'--workdir={path}', *arguments]
    )
    == 0
  )


def _train_alone_and_in_processes(num_processes, tmp_path, *arguments):
  """Trains in one process with N devices, and in N processes; returns paths."""
  name, arguments = 'anakin_catch', [*_TINY, *arguments]
  alone, pod = tmp_path / 'alone', tmp_path / 'pod'
  _run_alone(alone, name, *arguments, f'--config.num_devices={num_processes}')
  pod_arguments = f'--workdir={pod}', '--config.num_devices=1'
  _run_pod(num_processes, name, *arguments, *pod_arguments)
  assert helpers.read(pod)[1]['processes'] == num_processes
  assert (
    helpers.read(pod)[1]['devices']
    == helpers.read(alone)[1]['devices']
    == num_processes
  )
  return alone, pod


@pytest.mark.parametrize(
  'num_processes,agent',
  [(2, 'ppo')]
  + [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in ((2, 'impala'), (4, 'ppo'), (4, 'impala'))
  ],
)
def test_an_update_of_processes_is_that_of_as_many_devices(
  num_processes, agent, tmp_path
):
  arguments = *_ONE_STEP, f'--agent={agent}', '--config.total_env_steps=64'
  paths = _train_alone_and_in_processes(num_processes, tmp_path, *arguments)
  for a, b in zip(*map(_params, paths), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
  _assert_records_agree(*paths)


@pytest.mark.slow  # This repeats the test above with more updates.
@pytest.mark.parametrize('num_processes', [2, 4])
@pytest.mark.parametrize('agent', ['ppo', 'impala'])
def test_a_run_of_processes_is_that_of_as_many_devices(
  agent, num_processes, tmp_path
):
  # The experience is the same except for rounding.
  arguments = f'--agent={agent}', '--config.total_env_steps=512'
  paths = _train_alone_and_in_processes(num_processes, tmp_path, *arguments)
  _assert_records_agree(*paths)


def _assert_records_agree(alone, pod):
  records = [_plain(helpers.read(x)[0]) for x in (alone, pod)]
  for a, b in zip(*records, strict=True):
    assert a.keys() == b.keys()
    for k in a:
      np.testing.assert_allclose(a[k], b[k], rtol=1e-3, atol=1e-4, err_msg=k)


@pytest.mark.slow
@pytest.mark.parametrize('num_processes', [2, 4])
def test_deterministic_sebulba_in_processes_is_that_of_one(
  num_processes, tmp_path
):
  arguments = [
    *_HOST,
    *_ONE_STEP,
    '--config.total_env_steps=64',
    f'--config.env.num_envs={4 * num_processes}',
  ]
  indices = ','.join(map(str, range(num_processes)))
  _run_alone(
    tmp_path / 'alone',
    'sebulba_cartpole',
    *arguments,
    '--config.sebulba.actor_devices=0',
    f'--config.sebulba.threads_per_actor_device={num_processes}',
    f'--config.sebulba.learner_devices=({indices},)',
  )
  _run_pod(
    num_processes,
    'sebulba_cartpole',
    *arguments,
    f'--workdir={tmp_path / "pod"}',
    '--config.sebulba.actor_devices=0',
    '--config.sebulba.threads_per_actor_device=1',
    '--config.sebulba.learner_devices=0',
  )
  for a, b in zip(
    _params(tmp_path / 'alone'), _params(tmp_path / 'pod'), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
  (alone,), (pod,) = (
    _plain(helpers.read(tmp_path / x)[0]) for x in ('alone', 'pod')
  )
  for k in ('env_steps', 'num_reset_steps', 'policy_lag', 'eval_episodes'):
    assert alone[k] == pod[k]


_ENDLESS = [
  *_TINY,
  '--config.total_env_steps=64e6',
  '--config.checkpoint.every_env_steps=2048',  # It saves every 32 updates.
  '--config.checkpoint.every_seconds=0',
  '--config.num_devices=1',
  '--heartbeat_seconds=3',
]


def _preempt(path, name, arguments):
  """Preempts a run of two processes; returns its number of updates."""
  pod = _Pod(2, name, *arguments, f'--workdir={path}')
  _until(path, 1)
  pod.processes[1].send_signal(signal.SIGTERM)  # One machine is preempted.
  codes, output = pod.wait()
  assert codes == [75, 75], output
  summary = helpers.read(path)[1]
  preempted = checkpoint.find(str(path))
  assert summary['exit'] == 'preempted'
  assert summary['num_updates'] == preempted > 0
  return preempted


@pytest.mark.slow  # The next test also signals one process.
@pytest.mark.parametrize(
  'name,arguments',
  [
    ('anakin_catch', _ENDLESS),
    ('sebulba_cartpole', [*_HOST, '--config.total_env_steps=64e6']),
  ],
)
def test_signals_end_all_at_the_same_update(name, arguments, tmp_path):
  path = tmp_path / 'run'
  preempted = _preempt(path, name, arguments)
  # Both processes resume, then Ctrl-C in a terminal ends them.
  pod = _Pod(2, name, *arguments, f'--workdir={path}', '--resume')
  _until(path, preempted // 4 + 3)
  for process in pod.processes:
    process.send_signal(signal.SIGINT)
  codes, output = pod.wait()
  assert codes == [130, 130], output
  assert f'after update {preempted}' in output[0]
  records, summary = helpers.read(path)
  assert summary['exit'] == 'interrupted'
  assert summary['num_updates'] == checkpoint.find(str(path)) > preempted
  updates = [r['num_updates'] for r in records]
  whole = list(range(4, summary['num_updates'] + 1, 4))
  # An interruption ends a window early, so it adds records at other updates.
  assert [x for x in updates if x % 4 == 0] == whole


@pytest.mark.slow  # Tests of one process cover this too.
def test_seeds_in_processes_are_stopped_resumed_and_extended(tmp_path):
  path = tmp_path / 'run'
  arguments = [*_HOST, '--config.num_seeds=2', f'--workdir={path}']
  arguments += ['--config.log.every_updates=5']
  total = '--config.total_env_steps'
  pod = _Pod(2, 'sebulba_cartpole', *arguments, f'{total}=3_840')
  _until(path / 'seed_1', 1)
  pod.processes[1].send_signal(signal.SIGTERM)
  codes, output = pod.wait()
  assert codes == [75, 75], output
  stopped = checkpoint.find(str(path / 'seed_1'))
  arguments += ['--resume']
  output = _run_pod(2, 'sebulba_cartpole', *arguments, f'{total}=3_840')
  assert 'seed_0 is finished' in output[0]
  assert f'seed_1: resuming after update {stopped}' in output[0]
  counts = [helpers.read(path)[1]['num_updates']]
  _run_pod(2, 'sebulba_cartpole', *arguments, f'{total}=7_680')
  for directory in path, path / 'seed_0', path / 'seed_1':
    counts.append(helpers.read(directory)[1]['num_updates'])
  assert counts[1:] == [2 * counts[0]] * 3


_SWEEP = [
  *_TINY,
  *_ONE_STEP[:-1],
  '--config.total_env_steps=1024',
  '--config.num_devices=1',
]


@pytest.mark.parametrize(
  'arguments',
  [
    # The first program diverges, and the second one begins.
    helpers.slow(
      ['--per_program=1', '--axis=optimizer.learning_rate=1e30,0.05']
    ),
    helpers.slow(
      [
        '--random=4',
        '--evolve_every=512',
        '--axis=optimizer.learning_rate=log:0.01:0.1',
      ]
    ),
  ],
)
def test_a_sweep_of_processes_is_that_of_as_many_devices(arguments, tmp_path):
  arguments = [*_SWEEP, *arguments]
  alone, pod = tmp_path / 'alone', tmp_path / 'pod'
  own = f'--workdir={alone}', '--config.num_devices=2'
  assert sweep.run(['sweep', 'Catch-bsuite', *arguments, *own]) == 0
  own = f'--workdir={pod}'
  output = _run_pod(2, 'sweep Catch-bsuite', *arguments, own)
  assert 'written: ' in output[0] and 'written: ' not in output[1]
  (file,) = (x.name for x in alone.glob('*.json'))
  expected, found = (json.loads((x / file).read_text()) for x in (alone, pod))
  if file == 'population.json':
    assert found['parents'] == expected['parents']
  else:
    assert [x['num_diverged'] for x in found['results']] == [1, 0]
    assert found == expected
  kept = [x.parent for x in alone.rglob('checkpoints') if any(x.iterdir())]
  assert kept
  for path in kept:
    for member in [*path.glob('member_*')] or [path]:
      both = [_params(x / member.relative_to(alone)) for x in (alone, pod)]
      for x, y in zip(*both, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
  # All programs are finished, so the same command only prints the results.
  output = _run_pod(2, 'sweep Catch-bsuite', *arguments, own, '--resume')
  assert output[0].count(' is finished') == len([*alone.glob('program_*')])


@pytest.mark.slow
def test_a_program_that_fails_in_one_process_ends_the_sweep(tmp_path):
  (tmp_path / 'program_0' / 'summary.json').mkdir(parents=True)
  axis = '--axis=network.activation=relu,tanh'
  codes, output = _Pod(
    2, 'sweep Catch-bsuite', *_SWEEP, axis, f'--workdir={tmp_path}'
  ).wait()
  assert codes == [1, 1], output
  assert 'no summary could be written' in output[0]
  assert 'another process of the run failed' in output[1]
  assert not (tmp_path / 'program_1').exists()


def test_processes_with_other_axes_are_a_mistake(tmp_path):
  each = [['--axis=agent.gamma=0.9,0.99'], ['--axis=agent.gamma=0.9,0.95']]
  codes, output = _Pod(
    2, 'sweep Catch-bsuite', *_SWEEP, f'--workdir={tmp_path}', each=each
  ).wait()
  assert codes == [2, 2], output
  for text in output:
    assert "error: process 1 has the sweep's arguments=['--axis" in text


@pytest.mark.parametrize(
  'victim,is_resumed',
  [(1, False)]
  + [pytest.param(i, True, marks=pytest.mark.slow) for i in range(2)],
)
def test_kill_9_of_one_ends_the_other(victim, is_resumed, tmp_path):
  path = tmp_path / 'run'
  before = _preempt(path, 'anakin_catch', _ENDLESS) if is_resumed else 0
  resume = ['--resume'] if is_resumed else []
  pod = _Pod(2, 'anakin_catch', *_ENDLESS, f'--workdir={path}', *resume)
  end = time.monotonic() + 120
  while not checkpoint.steps(path)[:1] > [before]:
    assert time.monotonic() < end
    time.sleep(0.05)
  pod.processes[victim].kill()
  start = time.monotonic()
  codes, output = pod.wait()
  assert time.monotonic() - start < 30
  assert codes[victim] == -9 and codes[1 - victim] == 1
  assert f'process {victim} is gone' in output[1 - victim], output[1 - victim]
  assert not before or f'after update {before}' in output[0]
  if victim:
    assert 'process 1 is gone' in helpers.read(path)[1]['error']
  saved = checkpoint.find(str(path))
  assert saved > before
  if victim == 0:  # One process can resume the run of two.
    _resume_alone(path, saved)


def _resume_alone(path, saved):
  """Resumes a run of two processes in one process, and then stops it."""
  process = subprocess.Popen(
    [
      sys.executable,
      str(helpers.ROOT / 'experiments' / 'anakin_catch.py'),
      f'--workdir={path}',
      '--resume',
      '--config.log.every_updates=4',
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  _until(path, saved // 4 + 20)  # The pod wrote the records before `saved`.
  process.send_signal(signal.SIGINT)
  output = process.communicate(timeout=60)[0]
  assert process.returncode == 130, output
  assert f'resuming after update {saved}' in output


@pytest.mark.slow  # A program of the sweep above has a NaN loss, too.
def test_an_error_in_one_process_ends_all(tmp_path):
  # The loss is NaN in all processes at once, and each of them reports it.
  codes, output = _Pod(
    2,
    'anakin_pendulum',
    *_TINY,
    '--config.num_devices=1',
    '--config.optimizer.learning_rate=1e30',
    '--config.total_env_steps=6400',
    '--config.optimizer.max_grad_norm=0',
    '--heartbeat_seconds=3',
    f'--workdir={tmp_path / "run"}',
  ).wait()
  assert codes == [1, 1]
  assert all('NaN' in x for x in output)


@pytest.mark.slow  # The tests of `Cluster` above cover these too.
@pytest.mark.parametrize(
  'each,message',
  [
    (
      [['--config.seed=1'], ['--config.seed=2']],
      'process 1 has config.seed=2, but process 0 has 1',
    ),
    (
      [['--config.num_devices=1'], ['--config.num_devices=1', '--agent=dqn']],
      "process 1 has --agent='dqn', but process 0 has 'ppo'",
    ),
    (
      [[], ['--num_processes=3']],
      'process 1 has num_processes=3, but process 0 has 2',
    ),
    (
      [['--config.env.num_envs=6', '--config.num_devices=2']] * 2,
      'num_envs=6 does not divide over 4 devices',
    ),
  ],
)
def test_a_mistake_is_one_line_in_each(each, message, tmp_path):
  codes, output = _Pod(
    2, 'anakin_catch', *_TINY, f'--workdir={tmp_path / "run"}', each=each
  ).wait()
  assert codes == [2, 2]
  for text in output:
    errors = [x for x in text.splitlines() if x.startswith('error: ')]
    assert len(errors) == 1 and message in errors[0], text
    assert 'Traceback' not in text
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'arguments,message',
  [
    (['--num_processes=2'], '--process_id together'),
    (['--coordinator=x:1', '--num_processes=2'], '--process_id together'),
    (
      ['--coordinator=x:1', '--num_processes=2', '--process_id=2'],
      '--process_id=2 is not between 0 and 1',
    ),
    (
      ['--coordinator=x', '--num_processes=2', '--process_id=1'],
      'x is not HOST:PORT',
    ),
    (
      ['--coordinator=x:65536', '--num_processes=2', '--process_id=1'],
      'x:65536 is not HOST:PORT',
    ),
    (
      [
        f'--coordinator=127.0.0.1:{_free_port()}',
        '--num_processes=2',
        '--process_id=1',
        '--start_seconds=1',
      ],
      'process 1: no coordinator answered at 127.0.0.1',
    ),
    (['--heartbeat_seconds=nan'], '--heartbeat_seconds=nan: must be finite'),
    (['--hang_seconds=inf'], '--hang_seconds=inf: must be finite'),
  ],
)
def test_a_mistake_in_the_flags(arguments, message, tmp_path, capsys):
  assert (
    train.run(
      helpers.get_config('anakin_catch'),
      ['x.py', f'--workdir={tmp_path / "run"}', *arguments],
    )
    == 2
  )
  said = capsys.readouterr().err
  assert message in said and said.count('\n') == 1


def test_where_jax_detects_no_cluster_a_line_says_what_to_do(
  tmp_path, monkeypatch, capsys
):
  # Like `jax.distributed.initialize`, which does this before any device.
  monkeypatch.setattr(jax.distributed, 'initialize', State().initialize)
  arguments = ['x.py', '--coordinator=auto', f'--workdir={tmp_path / "run"}']
  assert train.run(helpers.get_config('anakin_catch'), arguments) == 2
  said = capsys.readouterr().err
  assert said.startswith('error: this process: JAX detected no cluster here')
  assert 'the package kubernetes' in said and said.count('\n') == 1


@pytest.mark.parametrize(
  'error,message,exit_code',
  [
    (RuntimeError('it\nbroke'), 'RuntimeError: it broke', 1),
    (KeyboardInterrupt(), 'KeyboardInterrupt', 130),
  ],
)
def test_an_unforeseen_error_before_training_reaches_all(
  error, message, exit_code, monkeypatch
):
  messages = []

  class Dog:
    def beat(self):
      pass

    def fail(self, message, is_suspect):
      messages.append(message)

  def resolve_config(*_):
    raise error

  def exit_process(code):
    assert code == exit_code
    raise _Ended

  joined = Cluster(1, 2, _Store(), Dog())
  monkeypatch.setattr(train, 'connect', lambda _: joined)
  monkeypatch.setattr(train, 'resolve_config', resolve_config)
  monkeypatch.setattr(train.os, '_exit', exit_process)
  with pytest.raises(_Ended):
    train.run(helpers.get_config('anakin_catch'), ['x.py'])
  assert messages == [message]


def test_others_that_never_come_are_reported_in_a_line(tmp_path):
  outcome = subprocess.run(
    [
      sys.executable,
      str(helpers.ROOT / 'experiments' / 'anakin_catch.py'),
      f'--coordinator=127.0.0.1:{_free_port()}',
      '--num_processes=2',
      '--process_id=0',
      '--start_seconds=2',
    ],
    capture_output=True,
    text=True,
    timeout=100,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert outcome.returncode == 1
  assert outcome.stderr.splitlines()[-1] == (
    'error: process 0: the other processes did not connect within 2 s, or no '
    "coordinator could start; see JAX's messages above"
  )


def test_the_version_of_the_code_is_that_of_its_files(tmp_path, monkeypatch):
  (tmp_path / 'envs').mkdir()
  for name in 'cluster.py', 'envs/x.py':
    (tmp_path / name).write_text('1')
  monkeypatch.setattr(cluster, '__file__', str(tmp_path / 'cluster.py'))
  before = cluster.version_of_code()
  assert before == cluster.version_of_code()
  (tmp_path / 'envs' / 'x.py').write_text('2')
  assert cluster.version_of_code() != before
