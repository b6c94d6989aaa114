"""Tests that a run from elsewhere imports and overwrites nothing."""

import json
import os
import pathlib
import shutil
import stat
import sys
import textwrap
from unittest import mock

import helpers
import jax
import pytest

import podrl
from podrl import modules
from podrl.fields import nest
from podrl.messages import printable
from podrl.records import workdir
from podrl.records.sinks import Lines
from podrl.run import build, defaults, start, train
from podrl.run import config as configs
from podrl.run.config import (
  check_trust,
  default_fields,
)
from podrl.tools import balance, evaluate, plot, watch

_CORRIDOR = """
  import jax
  import jax.numpy as jnp
  from podrl.envs import autoreset
  from podrl.types import DeviceEnv, Discrete, EnvSpec

  def walk() -> DeviceEnv:
    def reset(rng_key):
      return jnp.zeros(1), jnp.int32(0)

    def step(rng_key, x, action):
      return jnp.zeros(1), x + 1, jnp.float32(action), x == 2, False

    obs = jax.ShapeDtypeStruct((1,), jnp.float32)
    spec = EnvSpec(obs, False, Discrete(2), 1, 3)
    return autoreset.make_device_env(spec, reset, step)
"""
_TINY = {
  'total_env_steps': 64,
  'env.num_envs': 8,
  'unroll_length': 8,
  'num_minibatches': 1,
  'num_devices': 1,
  'eval.num_episodes': 2,
  'network.hidden_sizes': (8,),
  'log.tensorboard': False,
}


@pytest.fixture
def home(tmp_path, monkeypatch):
  """Makes a current directory, with a key of its own."""
  path = [x for x in sys.path if x != os.getcwd()]
  monkeypatch.setattr(sys, 'path', path)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path / 'state'))
  return tmp_path


def _download(run, suite, name, path='', **options):
  """Writes a run as somebody else could, with an empty checkpoint."""
  is_anakin = suite in ('jax', 'pgx', 'gymnax')
  config = default_fields('ppo', 'Anakin' if is_anakin else 'Sebulba')
  config['env.suite'], config['env.name'] = suite, name
  config['env.path'] = path
  config['env.options'].update(options)
  (run / 'checkpoints/8').mkdir(parents=True)
  workdir.write_json(str(run / 'config.json'), nest(config))
  (run / 'metrics.jsonl').write_text(
    '{"num_updates": 8, "env_steps": 9, "episode_return": 1.0, '
    '"wall_seconds": 1.0}\n'
  )
  return str(run)


def _evil(home):
  """Writes a module `evil` that leaves a file when it is imported."""
  (home / 'away').mkdir()
  code = 'import pathlib; pathlib.Path(__file__).with_name("ran").touch()\n'
  code += 'def walk(**options): pathlib.Path(__file__).with_name("ran").touch()'
  (home / 'away/evil.py').write_text(code)
  return str(home / 'away')


def _ways(path):
  """Yields each way to use a saved run; each returns what it said."""
  yield 'load', lambda: podrl.load(path)
  yield 'evaluate', lambda: evaluate.run(['evaluate', path])
  yield 'watch', lambda: watch.run(['watch', path])
  yield 'train', lambda: podrl.train('', workdir=path, resume=True)
  get_config = helpers.get_config('anakin_catch')
  yield (
    'experiment',
    lambda: train.run(get_config, ['x.py', f'--workdir={path}', '--resume']),
  )
  yield (
    'init_from',
    lambda: helpers.run(path + '-new', f'--init_from={path}'),
  )
  yield 'plot', lambda: plot.run(['plot', path])
  yield 'balance', lambda: balance.run(['balance', path])


@pytest.mark.parametrize('way', [name for name, _ in _ways('')])
@pytest.mark.parametrize('kind', ['os:system', 'jax', 'gymnasium', 'path'])
def test_a_run_from_elsewhere_runs_nothing(kind, way, home, capsys):
  away = _evil(home)
  path = _download(
    home / 'run',
    *{
      'os:system': ('jax', 'os:system'),
      'jax': ('jax', 'evil:walk'),
      'gymnasium': ('gymnasium', 'evil:Walk-v0'),
      'path': ('gymnax', 'Catch-bsuite'),
    }[kind],
    path=away,
    **({'command': f'touch {away}/ran'} if kind == 'os:system' else {}),
  )
  error = ''
  try:
    dict(_ways(path))[way]()
  except ValueError as mistake:
    error = str(mistake)
  assert not os.path.exists(f'{away}/ran')
  assert away not in sys.path
  error += capsys.readouterr().err
  if kind != 'path' and way in ('load', 'evaluate', 'watch', 'train'):
    assert 'add --trust' in error and error.count('\n') <= 1
    what = {
      'os:system': f'system of the module os ({os.__spec__.origin})',
      'jax': f'walk of the module evil ({away}/evil.py)',
      'gymnasium': f'Walk-v0 of the module evil ({away}/evil.py)',
    }[kind]
    assert what in error


@pytest.mark.parametrize('name', ['a\nerror: x', 'a\x1b[31m:f', 'a\u202e:f'])
def test_a_name_cannot_write_on_the_terminal(name, home, capsys):
  path = _download(home / 'run', 'jax', name)
  for _, act in _ways(path):
    try:
      act()
    except ValueError as mistake:
      print(mistake)
  shown = capsys.readouterr()
  text = shown.out + shown.err
  assert 'config.json has control characters in env.name=' in text
  assert name not in text and '\nerror: x' not in text


def test_the_file_that_would_be_imported_is_named(home):
  """A folder with the name of the module does not hide the module."""
  (home / 'evil').mkdir()
  (home / 'evil/evil.py').write_text('')
  found = modules.describe_import('evil:walk', str(home / 'evil'))
  assert found == f'walk of the module evil ({home}/evil/evil.py)'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Makes a directory with `run`, its module `code/mine.py`, and `state`."""
  path = tmp_path_factory.mktemp('trained')
  (path / 'code').mkdir()
  (path / 'code/mine.py').write_text(textwrap.dedent(_CORRIDOR))
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_STATE_HOME', str(path / 'state'))
    patch.syspath_prepend(path / 'code')
    podrl.train('jax:mine:walk', workdir=str(path / 'run'), config=_TINY)
    del sys.modules['mine']
  return path


@pytest.fixture
def run(trained, home):
  """Returns a copy of the trained run, which this user has made."""
  shutil.copytree(trained / 'state', 'state')
  shutil.copytree(trained / 'run', 'run')
  yield home / 'run'
  sys.modules.pop('mine', None)


@pytest.fixture
def stopped(monkeypatch):
  """Stops `train` where it would build a run; returns the configurations."""
  seen = []

  def stop(config, *_):
    seen.append(config)
    raise ValueError('stopped')

  monkeypatch.setattr(train, '_train_programs', stop)
  return seen


def test_an_own_run_needs_no_flag_wherever_it_is(run, monkeypatch, capsys):
  key = run.parent / 'state/podrl/key'
  assert stat.S_IMODE(key.stat().st_mode) == 0o600
  assert len(key.read_bytes()) == 32
  (run.parent / 'elsewhere').mkdir()
  monkeypatch.chdir('elsewhere')
  shutil.copytree(run, 'copied')
  assert podrl.load('copied').num_updates == 1
  del sys.modules['mine']
  run.rename('moved')
  assert evaluate.run(['evaluate', 'moved', '--episodes=2']) == 0
  # A resumed run signs what it changes.
  podrl.train('', workdir='moved', resume=True, steps=128)
  assert workdir.read_config('moved')['total_env_steps'] == 128
  assert podrl.load('moved').num_updates == 2
  # After a change by hand, or with another key, the run is a stranger's.
  text = pathlib.Path('moved/config.json').read_text()
  for changed in (
    text.replace('"total_env_steps": 128', '"total_env_steps": 129'),
    text.replace('"signature": "', '"signature": "é'),
    json.dumps(nest(workdir.read_config('moved'))),
  ):
    assert changed != text
    pathlib.Path('moved/config.json').write_text(changed)
    with pytest.raises(ValueError, match='add --trust'):
      podrl.load('moved')
  pathlib.Path('moved/config.json').write_text(text)
  monkeypatch.setenv('XDG_STATE_HOME', str(run.parent / 'other'))
  capsys.readouterr()
  assert evaluate.run(['evaluate', 'moved']) == 2
  assert 'walk of the module mine (' in capsys.readouterr().err
  # The user says it once, as for a run of an earlier version.
  assert podrl.load('moved', trust=True).num_updates == 2
  assert podrl.load('moved').num_updates == 2


def test_a_key_that_others_can_read_signs_nothing(run):
  config, key = workdir.read_config('run'), run.parent / 'state/podrl/key'
  assert workdir.is_own('run', config)
  os.chmod(key, 0o640)
  with pytest.raises(ValueError, match=f'the key {key}; if you trust'):
    check_trust('run', config, False)
  os.chmod(key, 0o600)
  key.rename('key')
  key.symlink_to(run.parent / 'key')
  assert not workdir.is_own('run', config)


def test_without_a_home_a_run_is_not_signed(home):
  (home / 'state').write_text('')  # It cannot be a directory.
  config = default_fields('ppo', 'Anakin')
  config['env.name'] = 'mine:walk'
  workdir.make('run', config)
  assert '"signature"' not in (home / 'run/config.json').read_text()
  assert not workdir.is_own('run', config)


def test_the_first_of_several_processes_makes_the_key(home, monkeypatch):
  link = os.link

  def be_second(source, target):
    pathlib.Path(target).write_bytes(b'f' * 32)
    os.chmod(target, 0o600)
    link(source, target)

  monkeypatch.setattr(os, 'link', be_second)
  config = default_fields('ppo', 'Anakin')
  config['env.name'] = 'mine:walk'
  workdir.make('run', config)
  assert workdir.is_own('run', config)
  assert os.listdir(home / 'state/podrl') == ['key']
  assert (home / 'state/podrl/key').read_bytes() == b'f' * 32


def test_a_name_on_the_command_line_is_trusted_but_not_the_saved_path(
  run, trained, stopped, monkeypatch
):
  (run.parent / 'away').mkdir()
  code = 'raise RuntimeError("a module from elsewhere")'
  (run.parent / 'away/mine.py').write_text(code)
  config = workdir.read_config('run')
  config['env.path'] = str(run.parent / 'away')
  workdir.write_json('run/config.json', nest(config))
  with pytest.raises(ValueError, match='mine .*/away/mine.py.*add --trust'):
    podrl.train('', workdir='run', resume=True)
  monkeypatch.syspath_prepend(trained / 'code')
  with pytest.raises(ValueError, match='stopped'):
    podrl.train('jax:mine:walk', workdir='run', resume=True, steps=128)
  assert stopped[0]['env.path'] == str(trained / 'code')
  workdir.update_config(
    'run', stopped[0], configs.changeable(stopped[0])
  )  # A run does this when it starts.
  saved = workdir.read_config('run')
  assert saved['env.path'] == str(trained / 'code')
  assert workdir.is_own('run', saved)


def test_a_run_from_elsewhere_must_not_link_to_other_directories(
  home, stopped, capsys
):
  path = _download(home / 'run', 'gymnax', 'Catch-bsuite')
  (home / 'run/checkpoints').rename(home / 'precious')
  (home / 'run/checkpoints').symlink_to(home / 'precious')
  get_config = helpers.get_config('anakin_catch')
  argv = ['x.py', f'--workdir={path}', '--resume']
  assert train.run(get_config, argv) == 2
  said = capsys.readouterr().err
  assert f'{path}/checkpoints is a link, and you did not make this run' in said
  assert train.run(get_config, [*argv, '--trust']) == 2
  assert capsys.readouterr().err.endswith('error: stopped\n')


@pytest.mark.parametrize('name', ['evil:walk', 'go_9x9'])
def test_an_opponent_imports_nothing(name, home):
  suite = 'pgx' if name == 'go_9x9' else 'jax'
  path = _download(home / 'opponent', suite, name, path=_evil(home))
  config = default_fields('ppo', 'Anakin')
  config['env.suite'], config['env.name'] = 'pgx', 'tic_tac_toe'
  config['env.options']['opponent'] = path
  with pytest.raises(ValueError, match=f'has learned {suite}:{name}, not pgx'):
    build.make_env(config)
  assert not (home / 'away/ran').exists()


def test_process_0_decides_for_all(run, monkeypatch):
  get_config, command_line = defaults.parse_arguments(
    [f'--workdir={run}', '--resume']
  )
  # Another process may have another key.
  monkeypatch.setenv('XDG_STATE_HOME', str(run.parent / 'other'))
  with pytest.raises(ValueError, match='add --trust'):
    get_config('ppo', '')
  cluster = mock.Mock(is_distributed=False, attempt=lambda function: function())
  decisions = [(True, 'ppo', True, {}, ''), ValueError('process 0 fails later')]
  cluster.decide = mock.Mock(side_effect=decisions)
  with pytest.raises(ValueError, match='process 0 fails later'):
    start.resolve_config(command_line, get_config, cluster, None)
  assert not command_line.flags.trust  # A sweep uses the flags again.


def test_a_compilation_cache_from_elsewhere_is_not_read(run, stopped):
  """Compiled programs are code, and a run could name its own directory."""
  config = workdir.read_config('run')
  config['compilation_cache'] = str(run.parent / 'away')
  workdir.write_json('run/config.json', nest(config))
  before = jax.config.jax_compilation_cache_dir
  podrl.load('run', trust=True)
  assert jax.config.jax_compilation_cache_dir == before
  with pytest.raises(ValueError, match='stopped'):
    podrl.train('', workdir='run', resume=True, steps=128)
  assert stopped[0]['compilation_cache'] == 'auto'


def test_no_file_is_written_through_a_link(home):
  path = _download(home / 'run', 'gymnax', 'Catch-bsuite')
  (home / 'precious').write_text('precious')

  def link(name):
    (home / 'run' / name).unlink(missing_ok=True)
    (home / 'run' / name).symlink_to(home / 'precious')

  link('curve.png')
  assert plot.run(['plot', path]) == 0
  link('summary.json')
  workdir.write_json(f'{path}/summary.json', {})
  link('.lock')
  with pytest.raises(ValueError, match='locked .Too many levels of symbolic'):
    with workdir.lock(path):
      pass
  link('metrics.jsonl')
  with pytest.raises(OSError, match='Too many levels of symbolic links'):
    Lines(f'{path}/metrics.jsonl')
  assert (home / 'precious').read_text() == 'precious'
  assert (home / 'run/curve.png').stat().st_size > 5000
  assert not (home / 'run/summary.json').is_symlink()
  assert sorted(os.listdir(path)) == [
    *('.lock', 'checkpoints', 'config.json', 'curve.png', 'metrics.jsonl'),
    'summary.json',
  ]


@pytest.mark.filterwarnings('error:Glyph')
@pytest.mark.parametrize('way', [name for name, _ in _ways('')] + ['--y'])
def test_names_cannot_control_the_terminal(way, home, capsys):
  evil = 'x\x1b]0;owned\x07\x9b31m\u202e\r'
  path = _download(home / f'run{evil}', 'gymnax', evil)
  lines = pathlib.Path(path, 'metrics.jsonl')
  record = json.loads(lines.read_text()) | {evil: 1.0}
  lines.write_text(json.dumps(record) + '\n')
  summary = {'limit': evil, 'limit_sentence': evil, 'exit': evil}
  workdir.write_json(f'{path}/summary.json', summary)
  ways = dict(_ways(path))
  ways['--y'] = lambda: plot.run(['plot', path, '--y=x'])
  try:
    ways[way]()
  except ValueError:
    assert way in ('load', 'train')  # In Python, nothing is printed.
  said = ''.join(capsys.readouterr())
  assert not set(said) & set(evil[1:2] + '\x07\x9b\u202e\r')
  assert way in ('load', 'train') or '\\x1b]0;owned\\x07\\x9b31m' in said


def test_an_escaped_text_can_be_read():
  assert printable('a\tb\nc é 漢 \x00\x7f\udc80') == (
    'a\tb\nc é 漢 \\x00\\x7f\\udc80'
  )
