"""Tests `podrl train` and `podrl.train` with the name of an environment."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

from absl import logging
import helpers
from helpers import slow
import jax
import numpy as np
import pytest

import podrl
from podrl import __main__ as cli
from podrl import signals
from podrl.envs import brax
from podrl.records import workdir
from podrl.records.terminal import podrl_command
from podrl.run import build, defaults, loop, train
from podrl.tools import evaluate, watch
from podrl.types import DeviceEnv

_TINY = {
  'total_env_steps': 256,
  'env.num_envs': 8,
  'unroll_length': 8,
  'num_minibatches': 1,
  'eval.num_episodes': 2,
  'eval.max_episode_steps': 5,
  'network.hidden_sizes': (8,),
  'log.tensorboard': False,
}
_DEVICES = {'sebulba.actor_devices': 0, 'sebulba.learner_devices': 0}
_FLAGS = [f'--config.{k}={x}' for k, x in _TINY.items()]
_WALK = """
  import gymnasium


  class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(5)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fails=False):
      self.fails = fails

    def reset(self, *, seed=None, options=None):
      self.x = 2
      return self.x, {}

    def step(self, action):
      if self.fails:
        raise OSError('the left leg broke')
      self.x += 2 * int(action) - 1
      return self.x, float(self.x == 4), self.x in (0, 4), False, {}


  gymnasium.register('Walk-v0', Walk)
"""


def _run(monkeypatch, *arguments):
  """Runs `podrl train` and returns its exit code."""
  monkeypatch.setattr(sys, 'argv', ['podrl', 'train', *arguments])
  with pytest.raises(SystemExit) as outcome:
    cli.main()
  return outcome.value.code


@pytest.fixture
def home(tmp_path, monkeypatch):
  """Makes a current directory that contains the module `my_envs`."""
  path = [x for x in sys.path if x != os.getcwd()]
  monkeypatch.setattr(sys, 'path', path)
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'my_envs.py').write_text(textwrap.dedent(_WALK))
  yield tmp_path
  sys.modules.pop('my_envs', None)


def test_the_command_leaves_the_files_of_an_experiment(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  arguments = [x for x in _FLAGS if 'total_env_steps' not in x]
  arguments += ['--config.agent.normalize_observation', '0']
  arguments += ['--config.agent.normalize_reward=0', '--config.num_epochs=1']
  arguments += ['--config.optimizer.learning_rate=1e-3', '--steps=320']
  arguments += ['--seed', '3', '--config.num_devices=1']
  assert _run(monkeypatch, 'Catch-bsuite', '--workdir=a', *arguments) == 0
  assert 'Catch-bsuite, ppo: done' in capsys.readouterr().out
  argv = ['anakin_catch.py', '--workdir=b', *arguments]
  assert train.run(helpers.get_config('anakin_catch'), argv) == 0
  files = [
    {x.relative_to(path) for x in path.rglob('*.json*')}
    for path in (tmp_path / 'a', tmp_path / 'b')
  ]
  assert files[0] == files[1] and len(files[0]) >= 3
  a, b = (workdir.read_config(path) for path in 'ab')
  assert a == b and (a['seed'], a['total_env_steps']) == (3, 320)


def test_a_run_that_is_resumed_knows_its_environment(
  tmp_path, monkeypatch, capsys
):
  path = f'--workdir={tmp_path}/run'
  flags = [path, *_FLAGS, *(f'--config.{k}={x}' for k, x in _DEVICES.items())]
  flags.append('--config.agent.gamma=0.5')
  monkeypatch.setattr(loop.Trainer, '_loop', lambda self: False)
  assert _run(monkeypatch, 'envpool:CartPole-v1', *flags) == signals.FAILED
  monkeypatch.undo()
  capsys.readouterr()
  assert _run(monkeypatch, 'Catch-bsuite', path, '--resume') == signals.MISTAKE
  said = capsys.readouterr().err
  assert 'run is a run of CartPole-v1, not of Catch-bsuite: config.' in said
  assert 'config.env.name is CartPole-v1 in the run' in said
  # Without --resume, the name CartPole-v1 means gymnax.
  assert _run(monkeypatch, 'CartPole-v1', path, '--resume', *_FLAGS) == 0
  config = workdir.read_config(str(tmp_path / 'run'))
  assert config['env.suite'] == 'envpool' and config['agent.gamma'] == 0.5


@pytest.mark.parametrize(
  'arguments,message',
  [
    ([], 'the name of an environment, as in podrl train CartPole-v1'),
    (['--resume', '--workdir=x'], '--workdir=x contains no run to resume'),
    (['Catch-bsuite', 'Pong-misc'], 'expected one environment, got Catch'),
    (['Catch-bsuite', '--sede=1'], '--sede=1 is not understood; did you mean'),
    (['Catch-bsuite', '--steps=many'], 'config.total_env_steps=many is not of'),
    (['Catch-bsuite', '--variant=x'], 'variant=x is unknown'),
    (['Catch-bsuite', '--config.num_minibatches=0'], 'num_minibatches=0 must'),
    (['nowhere:Walk-v0'], "No module named 'nowhere'"),
  ],
)
def test_a_mistake_is_one_line(
  arguments, message, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  assert _run(monkeypatch, *arguments) == signals.MISTAKE
  said = capsys.readouterr().err
  assert said.startswith('error: ') and message in said
  assert said.count('\n') == 1


def test_a_deleted_current_directory_is_one_line(tmp_path, monkeypatch, capsys):
  gone = tmp_path / 'gone'
  gone.mkdir()
  monkeypatch.chdir(gone)
  gone.rmdir()
  for run in (
    lambda: _run(monkeypatch, 'Catch-bsuite'),
    lambda: helpers.run('a', name='anakin_catch'),
  ):
    assert run() == signals.MISTAKE
    said = capsys.readouterr().err
    assert 'the current directory no longer exists' in said
    assert said.count('\n') == 1
  # A process that has not imported envpool yet, which would end it.
  outcome = subprocess.run(
    [sys.executable, '-m', 'podrl', 'envs', 'Catch'],
    capture_output=True,
    text=True,
  )
  assert outcome.returncode == 2
  assert 'the current directory no longer exists' in outcome.stderr


def test_numbers_of_numpy_are_numbers(monkeypatch):
  found = {}

  def parse(arguments, values):
    found.update(values)
    raise ValueError('parsed')

  monkeypatch.setattr(defaults, 'parse_arguments', parse)
  config = {'env.options.g': np.float64(0.5), 'agent.gamma': np.float32(0.5)}
  config['network.hidden_sizes'] = np.array([8, 16])
  with pytest.raises(ValueError, match='parsed'):
    podrl.train('Pendulum-v1', config=config)
  assert found == {
    'env.options.g': 0.5,
    'agent.gamma': 0.5,
    'network.hidden_sizes': [8, 16],
  }
  assert [type(x) for x in found.values()] == [float, float, list]


def test_help_lists_the_fields_of_the_kind(monkeypatch, capsys):
  assert _run(monkeypatch, 'MemoryChain-bsuite', '--help') == 0
  text = capsys.readouterr().out
  assert f'usage: {podrl_command()} train [SUITE:]NAME' in text
  assert '--config.network.recurrent=gru' in text


def test_a_resume_command_repeats_the_agent_and_the_fields():
  arguments = ['Catch-bsuite', '--agent=impala', '--seed=3', '--workdir=a']
  _, command_line = defaults.parse_arguments(
    [*arguments, '--config.unroll_length', '8']
  )
  command = f"{podrl_command()} train '--workdir=my run' --resume"
  assert command_line.resume('my run') == (
    f'{command} --agent=impala --config.unroll_length=8 --config.seed=3'
  )
  assert command_line.resume('my run', '--config.unroll_length=9') == (
    f'{command} --agent=impala --config.seed=3 --config.unroll_length=9'
  )


def test_python_trains_in_any_thread_and_keeps_the_session(tmp_path):
  array, devices = jax.numpy.arange(3), jax.devices()
  cache = jax.config.jax_compilation_cache_dir
  logging.set_verbosity(logging.INFO)
  outcomes = []

  def train_both():
    for name, more in (('Catch-bsuite', {}), ('envpool:CartPole-v1', _DEVICES)):
      path = str(tmp_path / name[:4])
      config = _TINY | more
      outcomes.append(podrl.train(name, workdir=path, config=config))

  thread = threading.Thread(target=train_both)
  thread.start()
  thread.join()
  np.testing.assert_array_equal(array + 1, [1, 2, 3])
  assert jax.devices() == devices
  assert jax.config.jax_compilation_cache_dir == cache
  assert logging.get_verbosity() == logging.INFO
  assert [x.policy.config['env.name'] for x in outcomes] == [
    'Catch-bsuite',
    'CartPole-v1',
  ]
  for outcome in outcomes:
    records = workdir.read_records(outcome.workdir)
    assert outcome.records == records and 'eval_return' in records[-1]
    obs = jax.tree.map(
      lambda x: np.zeros((2, *x.shape), x.dtype), outcome.policy.spec.obs
    )
    assert outcome.policy(obs)[0].shape == (2,)


def test_an_environment_may_change_the_directory(tmp_path, monkeypatch, capsys):
  code = textwrap.dedent(_WALK).replace('Walk-v0', 'Chdir-v0')
  code = code.replace('import gymnasium', 'import os; import gymnasium')
  code = code.replace('self.x = 2', 'self.x = 2; os.chdir("/")')
  (tmp_path / 'walk_elsewhere.py').write_text(code)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  outcome = podrl.train(
    'walk_elsewhere:Chdir-v0', workdir='runs/a', config=_TINY | _DEVICES
  )
  assert outcome.workdir == str(tmp_path / 'runs' / 'a')
  found = {x.name for x in (tmp_path / 'runs' / 'a').iterdir()}
  assert {'config.json', 'checkpoints', 'summary.json'} <= found
  assert 'evaluate runs/a\n' in capsys.readouterr().out
  for command in evaluate, watch:
    monkeypatch.chdir(tmp_path)
    assert command.run([command.__name__, 'runs/a', '--episodes=1']) == 0
  found = {x.name for x in (tmp_path / 'runs' / 'a').iterdir()}
  assert {'evaluation.json', 'episode.gif'} <= found


@pytest.mark.parametrize(
  'name', ['CartPole-v1', slow('Acrobot-v1'), slow('envpool:CartPole-v1')]
)
def test_podrl_computes_in_32_bits(name, tmp_path):
  config = _TINY | (_DEVICES if ':' in name else {})
  plain = podrl.train(name, workdir=str(tmp_path / 'a'), config=config)
  assert 0.01 < plain.records[-1]['largest_observation'] < 10
  obs = np.zeros((2, *plain.policy.spec.obs.shape))
  with jax.enable_x64(True):
    outcome = podrl.train(name, workdir=str(tmp_path / 'b'), config=config)
    assert jax.numpy.arange(2).dtype == np.int64
    loaded = podrl.load(outcome.workdir)
    assert loaded(obs)[0].dtype == plain.policy(obs)[0].dtype
  jax.tree.map(
    np.testing.assert_array_equal,
    plain.policy.variables.params,
    loaded.variables.params,
  )


def test_one_thread_at_a_time_trains(monkeypatch, capsys):
  running, most = [], []
  both = threading.Barrier(2, timeout=20)

  def execute(*args, is_guest, on_record):
    running.append(1)
    most.append(len(running))
    time.sleep(0.2)
    running.pop()
    return train.Outcome(signals.MISTAKE, error='this is a test')

  monkeypatch.setattr(train, 'execute', execute)

  def call():
    both.wait()
    with pytest.raises(ValueError, match='this is a test'):
      podrl.train('Catch-bsuite')

  threads = [threading.Thread(target=call) for _ in range(2)]
  for x in threads:
    x.start()
  for x in threads:
    x.join()
  assert most == [1, 1]
  line = 'Catch-bsuite: this run waits for the run of another thread\n'
  assert capsys.readouterr().err == line


def test_python_raises_mistakes_and_failures(home, capsys):
  with pytest.raises(ValueError, match='similar names: .*gymnax:CartPole-v1'):
    podrl.train('CartPole', workdir='a')
  with pytest.raises(ValueError, match='config.agent.gama is not a field'):
    podrl.train('Catch-bsuite', config={'agent.gama': 0.9}, workdir='a')
  with pytest.raises(ValueError, match='config.agent.gamma=2.0 must be'):
    podrl.train('Catch-bsuite', config={'agent.gamma': 2}, workdir='a')
  assert capsys.readouterr().err == '' and not (home / 'a').exists()
  config = _TINY | _DEVICES | {'env.options.fails': True}
  with pytest.raises(RuntimeError, match='the left leg broke') as failure:
    podrl.train('my_envs:Walk-v0', config=config, workdir='a')
  message = 'environment my_envs:Walk-v0 failed in step: OSError: the left leg'
  assert str(failure.value).startswith(message)
  assert isinstance(failure.value.__cause__.__cause__, OSError)
  assert json.loads((home / 'a' / 'summary.json').read_text())['error']


def test_a_failure_of_an_environment_is_one_line(home, monkeypatch, capfd):
  where = f'({home}/my_envs.py:18, in step)'
  message = (
    'error: environment my_envs:Walk-v0 failed in step: OSError: the left leg '
    f'broke {where}'
  )
  config = [f'--config.{k}={x}' for k, x in (_TINY | _DEVICES).items()]
  path = ['my_envs:Walk-v0', '--workdir=a', *config]
  code = _run(monkeypatch, *path, '--config.env.options.fails=True')
  said = capfd.readouterr().err
  assert code == signals.FAILED and 'Traceback' not in said
  assert said.splitlines()[-1] == message
  # The same with the commands that load the policy.
  assert _run(monkeypatch, *path[:1], '--workdir=b', *config) == signals.DONE
  walk = sys.modules['my_envs'].Walk
  make = walk.__init__
  monkeypatch.setattr(walk, '__init__', lambda self: make(self, fails=True))
  capfd.readouterr()
  for command in evaluate, watch:
    assert command.run([command.__name__, 'b']) == signals.FAILED
    said = capfd.readouterr().err
    assert said == f'{message}\n'


def test_a_function_gets_each_record(tmp_path):
  path, config = tmp_path / 'run', _TINY | {'log.every_updates': 1}
  seen, returns = [], []

  def watch(record, run):
    assert run.workdir == str(path) and run.config['env.name'] == 'Catch-bsuite'
    seen.append(record)
    if len(seen) == 1:
      returns.append(run.evaluate())
      run.add(cleverness=7)
    if len(seen) == 2:
      obs = np.zeros((3, *run.policy().spec.obs.shape), np.float32)
      assert run.policy()(obs)[0].shape == (3,)
      assert run.policy().num_updates == 2
      for name in ('loss', 'eval_return'):
        with pytest.raises(ValueError, match=f'{name} is a metric of podrl'):
          run.add(**{name: 1.0})
      with pytest.raises(ValueError, match='ends in .gif or .mp4'):
        run.draw('x.png')
      assert run.draw(str(path / 'drawn' / 'x.gif')).endswith('drawn/x.gif')
      assert (path / 'drawn' / 'x.gif').read_bytes().startswith(b'GIF89a')
      run.save()
    return len(seen) == 3

  found = podrl.train(
    'Catch-bsuite', workdir=path, config=config, on_record=watch
  )
  first, second, third = found.records  # Of four updates.
  # The function has seen what is written, apart from what it changed itself.
  for x, y in zip(seen, found.records, strict=True):
    own = 'eval_', 'cleverness', 'wall_', 'compile_'
    assert x.keys() <= y.keys()
    assert all(y[k] == x[k] for k in x if not k.startswith(own))
  assert first['eval_return'] == returns[0] and first['cleverness'] == 7
  assert 'eval_return' not in second and 'cleverness' not in second
  assert third['num_updates'] == 3 and 'eval_return' in third
  steps = {int(x.name) for x in (path / 'checkpoints').iterdir()}
  assert {2, 3} <= steps
  assert json.loads((path / 'summary.json').read_text())['exit'] == 'done'


def test_an_error_of_the_function_ends_the_run(tmp_path):
  def watch(record, run):
    raise KeyError('own mistake')

  with pytest.raises(RuntimeError, match='own mistake'):
    podrl.train(
      'Catch-bsuite', workdir=tmp_path / 'run', config=_TINY, on_record=watch
    )


@pytest.mark.parametrize('least,num_updates', [('-1.5', 2), ('2', 4)])
def test_a_run_ends_at_a_return(least, num_updates, tmp_path, capsys):
  config = _TINY | {'stop.eval_return': least, 'eval.every_env_steps': 128}
  found = podrl.train('Catch-bsuite', workdir=tmp_path / 'run', config=config)
  assert found.records[-1]['num_updates'] == num_updates
  said = f'reaches stop.eval_return={least}' in capsys.readouterr().out
  assert said == (num_updates == 2)
  # Such a run is finished.
  with pytest.raises(ValueError, match='is finished'):
    podrl.train('Catch-bsuite', workdir=tmp_path / 'run', resume=True)


def test_python_says_which_objects_it_accepts(home, monkeypatch):
  import gymnasium

  monkeypatch.syspath_prepend(home)
  from my_envs import Walk

  for env, kind in (
    (gymnasium.make('CartPole-v1'), 'this TimeLimit'),
    (Walk, 'this Walk'),
    (None, 'this NoneType'),
  ):
    with pytest.raises(ValueError, match=f'takes the name of .* {kind};'):
      podrl.train(env)

  def walk() -> DeviceEnv: ...

  for function in (lambda: None, walk):  # Only this program could find them.
    with pytest.raises(ValueError, match='-> DeviceEnv, in a module'):
      podrl.train(function)
  with pytest.raises(
    ValueError, match='agent=None must be MODULE:NAME, or one'
  ):
    podrl.train('Catch-bsuite', agent=None)
  with pytest.raises(TypeError, match='not int'):
    podrl.train('Catch-bsuite', workdir=5)
  seen = []
  monkeypatch.setattr(
    defaults, 'parse_arguments', lambda x, _: seen.append(x) or 1 / 0
  )
  with pytest.raises(ZeroDivisionError):
    podrl.train(brax.make)
  assert seen[0][0] == 'jax:podrl.envs.brax:make'


@pytest.mark.parametrize(
  'name,message',
  [
    ('my_envs:walk', 'makes a DeviceEnv, write jax:my_envs:walk\n'),
    ('my_envs:Walk', 'Walk is a class; register it with gymnasium.register\n'),
    ('my_envs:nothing', 'my_envs registers no environment nothing\n'),
    ('my_envs:Walk-v1', 'Walk-v1; did you mean Walk-v0\n'),
  ],
)
def test_a_module_without_this_environment(
  name, message, home, monkeypatch, capsys
):
  with open('my_envs.py', 'a') as file:
    file.write('def walk(): pass\n')
  assert _run(monkeypatch, name) == signals.MISTAKE
  said = f'error: env.name={name} is not a gymnasium environment; '
  found = capsys.readouterr().err
  assert found.startswith(said) and found.endswith(message)


@pytest.fixture
def sigint():
  """Lets Ctrl-C raise; a shell may start the tests with it ignored."""
  previous = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize(
  'num_signals,message', [(1, 'the run is saved in .*'), (2, '')]
)
def test_python_raises_a_signal_and_the_run_can_be_resumed(
  num_signals, message, sigint, tmp_path, monkeypatch
):
  original = loop.Trainer._add

  def interrupt(self, reports):
    for _ in range(num_signals):  # The second one acts at once.
      signal.raise_signal(signal.SIGINT)
    original(self, reports)

  monkeypatch.setattr(loop.Trainer, '_add', interrupt)
  path = str(tmp_path / 'run')
  with pytest.raises(KeyboardInterrupt, match=f'^{message}$'):
    podrl.train('Catch-bsuite', workdir=path, config=_TINY)
  monkeypatch.undo()
  assert workdir.read_json(f'{path}/summary.json')['exit'] == 'interrupted'
  config = {k: x for k, x in _TINY.items() if k.startswith(('eval', 'log'))}
  resumed = podrl.train(
    'Catch-bsuite', workdir=path, resume=True, config=config
  )
  assert resumed.records[-1]['num_updates'] == 4


@pytest.mark.parametrize(
  'mode', ['sync', pytest.param('async', marks=pytest.mark.slow)]
)
def test_a_module_of_the_current_directory_is_found_later(
  mode, home, tmp_path_factory, monkeypatch, capsys
):
  assert str(home) not in sys.path
  more = {'env.options.vectorization_mode': mode, 'env.num_envs': 4}
  config = _TINY | _DEVICES | more
  podrl.train('my_envs:Walk-v0', workdir='run', config=config)
  assert sys.path[-1] == str(home)
  assert workdir.read_config('run')['env.path'] == str(home)
  # A process in another directory finds the module by the path in the run.
  sys.path.remove(str(home))
  del sys.modules['my_envs']
  monkeypatch.chdir(tmp_path_factory.mktemp('elsewhere'))
  assert podrl.load(home / 'run').spec.action.num_actions == 2
  arguments = [str(home / 'run'), '--episodes=2', '--seed=1']
  assert evaluate.run(['evaluate', *arguments]) == 0
  assert 'over 2 episodes' in capsys.readouterr().out


@pytest.mark.slow
def test_the_folder_of_the_clone_does_not_shadow_the_package(tmp_path):
  home = tmp_path / 'home'
  clone = home / 'podrl'
  (clone / 'podrl').mkdir(parents=True)
  for name in ('setup.cfg', 'pyproject.toml', 'README.md', 'LICENSE'):
    (clone / name).write_text((helpers.ROOT / name).read_text())
  for name in ('__init__.py', '__main__.py'):
    text = (helpers.ROOT / 'podrl' / name).read_text()
    (clone / 'podrl' / name).write_text(text)
  subprocess.run([sys.executable, '-m', 'venv', tmp_path / 'venv'], check=True)
  python = tmp_path / 'venv' / 'bin' / 'python'
  install = ['-m', 'pip', 'install', '-q', '--no-deps', '-e', clone]
  subprocess.run([python, *install], check=True)
  code = 'import podrl; print(podrl.load.__name__)'
  outcome = subprocess.run(
    [python, '-c', code], capture_output=True, text=True, cwd=home
  )
  assert outcome.stdout == 'load\n', outcome.stderr


@pytest.mark.parametrize(
  'arguments,expected',
  [
    (['Catch-bsuite', '--agent=muzero', '--steps=2e4'], '20,000 steps are few'),
    (['Catch-bsuite', '--agent=muzero', '--steps=1e5'], ''),
    (['Catch-bsuite', '--agent=muzero'], ''),
    (['MemoryChain-bsuite', '--agent=dqn'], 'dqn does not have; use --agent='),
    (['MemoryChain-bsuite', '--agent=r2d2'], ''),
  ],
)
def test_a_run_that_may_not_learn_says_so(
  arguments, expected, monkeypatch, capsys
):
  monkeypatch.setattr(build, 'set_up_jax', lambda *_: None)
  get_config, command_line = defaults.parse_arguments(arguments)
  get_config(command_line.flags.agent, '')
  said = capsys.readouterr().err
  assert (expected in said) if expected else said == ''


@pytest.mark.parametrize(
  'name,agent,expected',
  [
    ('Pendulum-v1', 'sac', 30_000),
    ('CartPole-v1', 'sac', 30_000),
    ('Breakout-MinAtar', 'sac', 600_000),
    ('Breakout-MinAtar', 'muzero', 600_000),
    ('Breakout-MinAtar', 'rainbow', 800_000),
    ('Breakout-MinAtar', 'pqn', 5_000_000),
    ('Breakout-MinAtar', 'ppo', 2_000_000),
  ],
)
def test_each_agent_has_its_own_budget(name, agent, expected, monkeypatch):
  monkeypatch.setattr(build, 'set_up_jax', lambda *_: None)
  get_config, _ = defaults.parse_arguments([name])
  assert get_config(agent, '')['total_env_steps'] == expected
