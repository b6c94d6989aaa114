"""Tests whole runs: files, records, exit codes, mistakes, signals, NaN."""

import json
import os
import signal
import subprocess
import sys
import time

import helpers
import jax
import numpy as np
import pytest

from podrl import signals
from podrl.drivers import spmd
from podrl.records import checkpoint
from podrl.run import build, command_line, loop, start, train

_SCRIPTS = [x for x in helpers.EXPERIMENTS if x.name.startswith('anakin_')]

_TINY_HOST = [
  '--config.total_env_steps=512',
  '--config.env.num_envs=8',
  '--config.unroll_length=8',
  '--config.eval.num_episodes=2',
  '--config.eval.max_episode_steps=4',
  '--config.log.every_updates=3',
  '--config.network.hidden_sizes=8',
  '--config.sebulba.actor_devices=0',
  '--config.sebulba.learner_devices=0',
]


@pytest.mark.parametrize(
  'name,agent',
  [
    ('sebulba_pong', 'impala'),
  ]
  + [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
      ('sebulba_cartpole', 'ppo'),
      ('sebulba_cartpole', 'impala'),
      ('sebulba_cartpole', 'a2c'),
      ('sebulba_breakout', 'ppo'),
      ('sebulba_half_cheetah', 'ppo'),
      ('sebulba_half_cheetah', 'impala'),
      ('sebulba_half_cheetah', 'a2c'),
      ('sebulba_pong --variant=recurrent', 'ppo'),
    )
  ],
)
def test_every_host_experiment_runs_tiny(name, agent, tmp_path):
  workdir = tmp_path / 'run'
  name, *arguments = name.split()
  if name in ('sebulba_pong', 'sebulba_breakout') and not arguments:
    arguments = ['--variant=cpu']
  arguments += _TINY_HOST
  assert (
    helpers.run(workdir, f'--agent={agent}', *arguments, name=name, tiny=False)
    == 0
  )
  records, summary = helpers.read(workdir)
  # The run has 512 / (8 x 8) = 8 updates, and records at 3, 6 and 8.
  assert [r['num_updates'] for r in records] == [3, 6, 8]
  assert summary['exit'] == 'done' and summary['eval_episodes'] == 2
  frame_skip = {'sebulba_cartpole': 1, 'sebulba_half_cheetah': 5}.get(name, 4)
  assert records[-1]['frames'] == records[-1]['env_steps'] * frame_skip
  assert records[-1]['policy_lag'] == (0 if agent == 'a2c' else 1)
  for record in records:
    shares = {k: v for k, v in record.items() if k.startswith('time_')}
    # It is a difference of two times.
    assert abs(shares.pop('time_behind_update')) <= 1.1
    assert len(shares) == 6 and all(0 <= x <= 1.1 for x in shares.values())


@pytest.mark.parametrize('agent', ['ppo', 'impala'])
@pytest.mark.parametrize(
  'path',
  helpers.EXPERIMENTS,
  ids=lambda p: p.stem,
)
def test_every_experiment_is_built(path, agent):
  config = helpers.fields_of(path.stem, agent)
  run = build.make_run(config)
  assert run.num_updates > 0


def test_a_run_makes_its_environment_once(monkeypatch):
  suite, names = build.SUITES['gymnax'], []

  def make(name, **options):
    names.append(name)
    return suite.make(name, **options)

  counted = suite._replace(make=make, make_spec=lambda *_, **__: 1 / 0)
  monkeypatch.setitem(build.SUITES, 'gymnax', counted)
  build.make_run(helpers.fields_of('anakin_catch'))
  assert names == ['Catch-bsuite']


# These have a convolution, and continuous actions with normalisation. The runs
# of test_policy have a recurrent core.
_FAST = ('anakin_breakout', 'anakin_pendulum')


@pytest.mark.parametrize(
  'name,agent',
  [(name, 'ppo') for name in _FAST]
  + [
    pytest.param(path.stem, agent, marks=pytest.mark.slow)
    for path in _SCRIPTS
    for agent in ('ppo', 'impala', 'a2c')
    if agent != 'ppo' or path.stem not in _FAST
  ],
)
def test_every_experiment_runs_tiny(name, agent, tmp_path):
  workdir = tmp_path / 'run'
  assert helpers.run(workdir, f'--agent={agent}', name=name) == 0
  records, summary = helpers.read(workdir)
  # The run has 512 / (8 x 8) = 8 updates, and records at 3, 6 and 8.
  assert [r['num_updates'] for r in records] == [3, 6, 8]
  assert summary['exit'] == 'done' and summary['eval_episodes'] == 4
  config = json.loads((workdir / 'config.json').read_text())
  assert config['agent']['name'] == agent
  per_update = config['num_epochs'] * config['num_minibatches']
  assert summary['num_sgd_steps'] == 8 * per_update
  assert list(workdir.glob('events.out.tfevents.*'))


def test_env_steps_leave_reset_steps_out(tmp_path, capsys):
  helpers.run(tmp_path / 'run')
  shown = capsys.readouterr().out
  assert '8 updates of 64 steps (8 environments x 8) = 512 steps' in shown
  assert '464 + 48 reset steps = 512' in shown
  records, _ = helpers.read(tmp_path / 'run')
  # An episode has 9 steps and a reset step. So in 64 steps, each of 8
  # environments has 6 reset steps (9, 19 ... 59). In its first 24 steps, it has
  # 2 (9 and 19).
  assert records[0]['env_steps'] == 8 * (24 - 2)
  assert records[-1]['env_steps'] == 8 * (64 - 6)
  assert [r['num_reset_steps'] for r in records[::2]] == [8 * 2, 8 * 6]
  assert records[0]['episode_length'] == 9
  assert records[-1]['frames'] == records[-1]['env_steps']


def test_runs_with_the_same_seed_are_equal(tmp_path):
  for name, seed in zip('abc', (3, 3, 4)):
    assert helpers.run(tmp_path / name, f'--config.seed={seed}') == 0
  a, b, c = (
    [
      {k: v for k, v in r.items() if k not in helpers.TIMINGS}
      for r in helpers.read(tmp_path / name)[0]
    ]
    for name in 'abc'
  )
  assert a == b != c


@pytest.mark.parametrize(
  'name,arguments',
  [
    ('anakin_catch', helpers.TINY),
    pytest.param('sebulba_cartpole', _TINY_HOST, marks=pytest.mark.slow),
  ],
)
def test_other_hyperparameters_compile_nothing(name, arguments, tmp_path):
  events, options = [], {'name': name, 'tiny': False}
  # No other test has layers of this width, so no program is in the cache.
  arguments = [*arguments, '--config.network.hidden_sizes=21']

  def run(workdir, *arguments):
    """Returns how many programs the run added to the cache."""
    events.clear()
    assert helpers.run(tmp_path / workdir, *arguments, **options) == 0
    return sum(x.endswith('cache_misses') for x in events)

  values = (
    'total_env_steps=1024',
    'optimizer.learning_rate=0.002',
    'agent.gamma=0.9',
    'agent.lambda_=0.8',
    'agent.entropy_cost=0.1',
    'agent.value_cost=0.2',
    'agent.clip=0.3',
  )
  more = [f'--config.{x}' for x in values]

  def listen(event, **_):
    events.append(event)

  jax.monitoring.register_event_listener(listen)
  try:
    assert run('one', *arguments) > 0 == run('two', *arguments, *more)
  finally:
    jax.monitoring.unregister_event_listener(listen)
  one, two = (helpers.read_records(tmp_path / x) for x in ('one', 'two'))
  assert len(two) > len(one) and one[0]['loss'] != two[0]['loss']


@pytest.mark.slow  # Tests of resumed runs compare parameters bit by bit too.
def test_parameters_are_bitwise_reproducible():
  def params(num_calls):
    config = helpers.fields_of('anakin_catch')
    config, _ = command_line.apply_overrides(config, helpers.TINY)
    run = build.make_run(config)
    run.driver.start()
    left = 4
    while left:
      left -= run.driver.advance(min(left, 4 // num_calls))[0].num_updates
    return jax.device_get(run.driver.learner_state.variables.params)

  for x, y in zip(*map(jax.tree.leaves, (params(2), params(1)))):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  'arguments,message',
  [
    (['--agent=pp'], 'agent=pp is unknown; did you mean ppo'),
    (['--variant=x'], 'variant=x is unknown'),
    (['--config.env.name=Catch'], 'Catch-bsuite'),
    (['--config.env.suite=gym'], 'did you mean gymnax'),
    (['--config.env.suite=envpool'], 'works only with sebulba'),
    (['--config.env.options.size=3'], 'max_steps_in_episode'),
    (['--config.env.options.name=x'], 'name is not an option of'),
    (['--config.search.num_samples=1'], 'a field of muzero, which'),
    (['--config.replay.min_steps=1'], 'of dqn, rainbow, r2d2, sac, muzero, wh'),
    (
      ['--agent=dqn', '--config.meta.decay=1'],
      'a field of ppo, impala, a2c, which this run does not use',
    ),
    (
      [
        '--config.env.name=Pendulum-v1',
        '--config.network.distribution=categorical',
      ],
      'use gaussian',
    ),
    (['--config.network.distribution=gaussian'], 'use categorical'),
    (['--config.network.distribution=gausian'], 'did you mean gaussian'),
    (['--config.network.recurrent=grru'], 'did you mean gru'),
    (
      ['--config.network.recurrent=gru', '--config.num_minibatches=3'],
      'does not divide 4, the environments per update on each of 2 devices',
    ),
    (['--config.network.num_layers=2'], 'mingru or lru or gtrxl'),
    (
      ['--config.network.recurrent=gtrxl'],
      'set config.network.memory_steps to at least 1',
    ),
    (
      [
        '--agent=r2d2',
        '--config.network.recurrent=gtrxl',
        '--config.network.memory_steps=4',
      ],
      'does not fit r2d2, whose memory stores the carry of each step',
    ),
    (['--config.env.num_envs=9'], 'try 8 or 10'),
    (['--config.env.num_envs=0'], 'at least 1'),
    (['--config.eval.num_episodes=1e20'], 'at most'),
    (['--config.total_env_steps=1e15'], 'only 2**31 - 1; set a smaller total'),
    (['--config.env.options.max_steps_in_episode=99999999999'], '2**31'),
    (['--config.unroll_length=-1'], 'at least 1'),
    (['--config.num_minibatches=7'], 'try 4 or 8'),
    (
      [
        '--config.num_devices=5',
        '--config.env.num_envs=5',
        '--config.num_minibatches=1',
      ],
      '5, but there are 4',
    ),
    (['--config.num_devices=-1'], 'at least 0'),
    (['--config.agent.gamma=2'], 'at least 0 and at most 1'),
    (['--config.optimizer.learning_rate=nan'], 'not of type float'),
    (['--config.optimizer.learning_rate=0'], 'more than 0'),
    (['--config.optimizer.learning_rate=1' + 400 * '0'], 'not of type float'),
    (['--config.optimizer.name=adm'], 'did you mean adam'),
    (['--config.network.name=cnn'], 'config.network.name=cnn'),
    (['--config.network.name=nature_cnn'], '36 x 36'),
    (['--config.network.hidden_sizes=(0,)'], 'at least 1'),
    (['--config.network.hidden_sizes=()'], 'one or more widths'),
    (['--agent=a2c', '--config.num_epochs=2'], '--agent=impala'),
    (['--confg.seed=1'], 'not understood'),
    (['extra'], 'not understood'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
  arguments, message, tmp_path, capsys
):
  assert helpers.run(tmp_path / 'run', *arguments) == signals.MISTAKE
  stderr = capsys.readouterr().err
  assert message in stderr and stderr.count('\n') == 1
  assert not (tmp_path / 'run').exists()


def test_a_memory_that_does_not_fit_the_container_is_refused(
  tmp_path, monkeypatch, capsys
):
  (tmp_path / 'memory.max').write_text('1000000\n')
  monkeypatch.setattr(spmd, '_LIMIT', str(tmp_path / 'memory.max'))
  assert helpers.run(tmp_path / 'run', '--agent=dqn') == signals.MISTAKE
  # The machine's four devices share 1 MB.
  message = 'each device, which has 0.000233 GiB left; divide the capacity by'
  assert message in capsys.readouterr().err


def test_a_workdir_is_never_overwritten(tmp_path, capsys):
  assert helpers.run(tmp_path) == 0
  before = (tmp_path / 'metrics.jsonl').read_text()
  assert helpers.run(tmp_path) == signals.MISTAKE
  assert 'already contains a run' in capsys.readouterr().err
  assert (tmp_path / 'metrics.jsonl').read_text() == before
  (tmp_path / 'file').write_text('')
  assert helpers.run(tmp_path / 'file') == signals.MISTAKE
  assert helpers.run(tmp_path / 'file' / 'below') == signals.MISTAKE
  assert 'cannot be written' in capsys.readouterr().err


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_a_run(tmp_path):
  workdir = tmp_path / 'run[/b]'  # The name looks like markup.
  command = ' '.join(
    [
      sys.executable,
      str(helpers.ROOT / 'experiments' / 'anakin_catch.py'),
      *helpers.TINY,
      '--config.log.every_updates=1',
      f"'--workdir={workdir}'",
    ]
  )
  outcome = subprocess.run(
    ['bash', '-o', 'pipefail', '-c', f'{command} | head -1'],
    capture_output=True,
    text=True,
  )
  assert outcome.returncode == 0, outcome.stderr
  assert helpers.read(workdir)[1]['exit'] == 'done'


def test_help_tells_the_fields(capsys):
  assert train.run(helpers.get_config('anakin_catch'), ['x.py', '--help']) == 0
  out = capsys.readouterr().out
  assert '--config.optimizer.learning_rate=0.001' in out and '--workdir' in out


def test_a_nan_stops_the_run_at_its_update(tmp_path, capsys):
  # The first step makes the parameters so large that the next loss overflows.
  code = helpers.run(
    tmp_path / 'run',
    '--config.optimizer.learning_rate=1e30',
    '--config.optimizer.name=sgd',
    '--agent=impala',
    '--config.checkpoint.every_env_steps=64',  # Its parameters diverged.
  )
  assert code == signals.FAILED
  records, summary = helpers.read(tmp_path / 'run')
  said = capsys.readouterr().err
  assert summary['error'] in said and said.count('\n') == 1
  assert summary['error'].endswith(
    'is NaN or infinite at update 2; start another run with '
    '--config.optimizer.learning_rate=0.001'
  )
  assert summary['exit'] == 'failed'
  assert records[-1]['num_updates'] == 1 and np.isfinite(records[-1]['loss'])


def test_evaluation_between(tmp_path):
  assert helpers.run(tmp_path / 'run', '--config.eval.every_env_steps=128') == 0
  records, _ = helpers.read(tmp_path / 'run')
  # Evaluations are every 128 / 64 = 2 updates; other records are every 3.
  assert [r['num_updates'] for r in records if 'eval_return' in r] == [
    2,
    4,
    6,
    8,
  ]


_INTERRUPTED = signal.SIGINT, 130, 'interrupted'
_PREEMPTED = signal.SIGTERM, 75, 'preempted'


@pytest.mark.parametrize(
  'name,moment,number,code,outcome',
  [
    ('anakin_catch', 'compiling', *_PREEMPTED),
    ('sebulba_cartpole', 'training', *_INTERRUPTED),
  ]
  + [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
      ('anakin_catch', 'training', *_INTERRUPTED),
      ('anakin_catch', 'training', *_PREEMPTED),
      ('anakin_catch', 'compiling', *_INTERRUPTED),
      ('sebulba_cartpole', 'training', *_PREEMPTED),
      ('sebulba_cartpole', 'compiling', *_INTERRUPTED),
      ('sebulba_cartpole', 'compiling', *_PREEMPTED),
    )
  ],
)
def test_signals_end_a_run_with_its_summary(
  name, number, code, outcome, moment, tmp_path
):
  process = _start_until(tmp_path, moment, name)
  process.send_signal(number)
  summary = _end(process, tmp_path, code, outcome)
  assert ('num_updates' in summary) or moment == 'compiling'


@pytest.mark.slow
def test_ctrl_c_ends_environments_in_processes_of_their_own(tmp_path):
  process = _start_until(
    tmp_path,
    'training',
    'sebulba_cartpole',
    '--config.env.suite=gymnasium',
    '--config.env.options.vectorization_mode=async',
    '--config.env.num_envs=4',
    '--config.num_minibatches=1',
  )
  os.killpg(process.pid, signal.SIGINT)  # A terminal signals all processes.
  summary = _end(process, tmp_path, 130, 'interrupted')
  assert summary['env_steps'] > 0
  with pytest.raises(ProcessLookupError):  # All processes end, now or soon.
    for _ in range(100):
      os.killpg(process.pid, 0)
      time.sleep(0.1)


def _start_until(tmp_path, moment, name, *arguments):
  """Starts an endless run in its own process group; waits until `moment`."""
  workdir = tmp_path / 'run'
  # Without cached programs, the run compiles for seconds.
  cache = {'XDG_CACHE_HOME': str(tmp_path)} if moment == 'compiling' else {}
  process = subprocess.Popen(
    [
      sys.executable,
      str(helpers.ROOT / 'experiments' / f'{name}.py'),
      f'--workdir={workdir}',
      '--config.total_env_steps=1e9',
      '--config.log.every_updates=1',
      *arguments,
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | cache,
    start_new_session=True,
  )
  wanted = workdir / (
    'config.json' if moment == 'compiling' else 'metrics.jsonl'
  )
  while process.poll() is None and not (
    wanted.exists() and wanted.stat().st_size
  ):
    time.sleep(0.05)
  return process


def _end(process, tmp_path, code, outcome):
  """Waits for the end of a run, checks it and returns the summary."""
  out, _ = process.communicate(timeout=120)
  assert process.returncode == code, out
  _, summary = helpers.read(tmp_path / 'run')
  assert summary['exit'] == outcome and 'Traceback' not in out
  return summary


@pytest.mark.parametrize(
  'platform', ['cuda', pytest.param('abc', marks=pytest.mark.slow)]
)
def test_a_platform_that_is_not_there_is_one_line(platform):
  outcome = subprocess.run(
    [sys.executable, str(helpers.ROOT / 'experiments' / 'sebulba_pong.py')],
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': platform, 'CUDA_VISIBLE_DEVICES': ''},
  )
  assert outcome.returncode == signals.MISTAKE
  assert outcome.stderr.startswith(
    f'error: JAX_PLATFORMS={platform}: JAX finds no {platform.upper()} on this '
    'machine; unset it, or use cpu'
  )
  assert outcome.stderr.endswith((' cpu\n', ')\n'))
  assert outcome.stderr.count('\n') == 1


@pytest.mark.parametrize('agent', ['ppo', 'impala', 'a2c'])
def test_atari_has_settings_for_each_machine(agent, monkeypatch):
  get_config = helpers.get_config('sebulba_pong')
  small, full = get_config(agent, 'cpu'), get_config(agent, 'cleanba')
  assert small.network.name == 'conv' and full.network.name == 'impala_resnet'
  assert full.env.options.repeat_action_probability == 0.25
  assert 'stack_num' not in small.env.options
  for is_found, expected in (False, small), (True, full):
    monkeypatch.setattr(spmd, 'has_accelerator', lambda: is_found)
    assert get_config(agent) == expected
    recurrent = get_config(agent, 'recurrent')
    assert recurrent.env.options.stack_num == 1
    del recurrent.env.options.stack_num
    assert recurrent.network.recurrent == 'lstm'
    recurrent.network.recurrent = 'none'
    assert recurrent == expected


@pytest.mark.parametrize(
  'given,is_deterministic,is_in_use,expected',
  [
    ('', True, False, {'deterministic_ops=true', 'enable_triton_gemm=false'}),
    ('', False, False, set()),
    ('', True, True, set()),  # XLA has read the flags already.
    (
      '--xla_gpu_enable_triton_gemm=true',
      True,
      False,
      {'deterministic_ops=true', 'enable_triton_gemm=true'},
    ),
  ],
)
def test_a_gpu_is_deterministic(
  given, is_deterministic, is_in_use, expected, monkeypatch
):
  config = helpers.fields_of('anakin_catch')
  config |= {'gpu_deterministic': is_deterministic, 'compilation_cache': 'off'}
  monkeypatch.setattr(jax.config, 'update', lambda *_: None)
  monkeypatch.setattr(spmd, 'is_in_use', lambda: is_in_use)
  for has_gpus in (False, True):
    monkeypatch.setenv('XLA_FLAGS', given)
    monkeypatch.setattr(spmd, 'has_gpu_packages', lambda: has_gpus)
    build.set_up_jax(config)
    flags = os.environ['XLA_FLAGS'].split()
    wanted = [f'--xla_gpu_{x}' for x in expected] if has_gpus else given.split()
    assert sorted(flags) == sorted(wanted)


class _Reads(dict):
  """Remembers each key that is read alone."""

  def __init__(self, values):
    super().__init__(values)
    self.keys_read = set()

  def __getitem__(self, key):
    self.keys_read.add(key)
    return super().__getitem__(key)

  def get(self, key, default=None):
    self.keys_read.add(key)
    return super().get(key, default)


@pytest.mark.parametrize('name', ['anakin_catch', 'sebulba_cartpole'])
def test_every_field_is_read(name, tmp_path, monkeypatch):
  own = helpers.fields_of(name) | {'meta.learning_rate': 0.01}
  tiny = helpers.TINY if name.startswith('anakin') else _TINY_HOST
  own, _ = command_line.apply_overrides(own, tiny)
  config = _Reads(own)
  files = start.Files(str(tmp_path / 'run'))
  monkeypatch.setattr(train, 'resolve_config', lambda *_: (config, files))
  assert train.run(None, ['x.py']) == 0
  # An optimiser gets its fields as arguments, the first stage of a run reads
  # `env.path`, and only a game reads the size of its pool.
  unread = {x for x in own.keys() - config.keys_read if 'optimizer' not in x}
  assert unread == {'env.path', 'agent.pool_size'}


def test_a_run_that_is_too_short_to_learn_warns(tmp_path, capfd):
  argv = '--agent=dqn', '--config.replay.min_steps=513'
  assert helpers.run(tmp_path / 'run', *argv) == 0
  assert (
    'warning: the run has 512 steps, fewer than config.replay.min_steps=513, '
    'so the agent never learns'
  ) in capfd.readouterr().err
  assert helpers.read_records(tmp_path / 'run')[-1]['num_sgd_steps'] == 0


# It stays in C, as XLA does for minutes, so no handler of a signal runs. A
# thread that locks a mutex twice waits for ever, and uses no processor.
_SLOW = """
import ctypes, sys
import anakin_catch
from podrl.run import build, train

_, where, *arguments = sys.argv
make_env, make_evaluate = build.make_env, build.make_evaluate

def slow(env):
  def step(*args):
    print('COMPILING', flush=True)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
    return env.step(*args)

  return env._replace(step=step)

if where == 'update':
  build.make_env = lambda config: slow(make_env(config))
else:
  build.make_evaluate = lambda config, spec, agent, env: make_evaluate(
    config, spec, agent, slow(env)
  )
sys.exit(train.run(anakin_catch.get_config, ['x.py', *arguments]))
"""


@pytest.mark.parametrize(
  'where,number,code,outcome',
  [
    ('update', *_INTERRUPTED),
    ('evaluation', *_PREEMPTED),
    helpers.slow('update', *_PREEMPTED),
    helpers.slow('evaluation', *_INTERRUPTED),
  ],
)
def test_a_signal_ends_a_run_that_compiles_for_long(
  where, number, code, outcome, tmp_path, capfd
):
  workdir = tmp_path / 'run'
  argv = [sys.executable, '-c', _SLOW, where, f'--workdir={workdir}']
  path = os.pathsep.join(filter(None, sys.path))
  process = subprocess.Popen(
    [*argv, *helpers.TINY],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'},
  )
  for line in process.stdout:
    if line == 'COMPILING\n':
      break
  process.send_signal(number)
  start = time.monotonic()
  out, _ = process.communicate(timeout=120)
  assert process.returncode == code, out
  assert time.monotonic() - start < 30.0  # The grace time is longer, as is C.
  assert 'Traceback' not in out and 'Thread 0x' not in out
  assert out.splitlines()[-1].endswith(' '.join(['--resume', *helpers.TINY]))
  records, summary = helpers.read(workdir)
  assert summary['exit'] == outcome
  is_trained = where == 'evaluation'
  assert checkpoint.steps(str(workdir)) == [8] * is_trained
  assert [x['num_updates'] for x in records] == [3, 6, 8] * is_trained
  assert summary.get('num_updates') == (8 if is_trained else None)
  capfd.readouterr()
  assert helpers.run(workdir, '--resume') == 0
  found = 'resuming after update 8' if is_trained else 'no checkpoint yet'
  assert found in capfd.readouterr().err
  records, summary = helpers.read(workdir)
  assert [x['num_updates'] for x in records] == [3, 6, 8]
  assert 'eval_return' in records[-1] and summary['exit'] == 'done'


def test_the_last_evaluation_begins_after_a_checkpoint(
  tmp_path, monkeypatch, capfd
):
  saved, evaluate = [], loop.Trainer._evaluate

  def note(self):
    saved.append(checkpoint.steps(str(tmp_path / 'run')))
    return evaluate(self)

  monkeypatch.setattr(loop.Trainer, '_evaluate', note)
  every = '--config.eval.every_env_steps=192'  # After 3 and 6 of 8 updates.
  assert helpers.run(tmp_path / 'run', every) == 0
  # Only the first evaluation compiles, and the last one may be lost.
  assert [x[:1] for x in saved] == [[3], [3], [8]]
  said = capfd.readouterr().out
  assert said.count('compiling the evaluation') == 1
  # The evaluation changes the progress of the last checkpoint, and a longer run
  # keeps its record.
  longer = '--config.total_env_steps=576'
  assert helpers.run(tmp_path / 'run', every, '--resume', longer) == 0
  records, _ = helpers.read(tmp_path / 'run')
  assert [x['num_updates'] for x in records] == [3, 6, 8, 9]
