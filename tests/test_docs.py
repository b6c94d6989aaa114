"""Tests that examples in the docs run, and that the files they name exist."""

import importlib
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import types
from typing import NamedTuple

import anakin_cartpole
import jax
import jax.numpy as jnp
import nbclient
import nbformat
import numpy as np
import pytest

import podrl
from podrl.agents import AGENTS
from podrl.core import meta
from podrl.records import workdir
from podrl.run import train
from podrl.run.config import all_fields
from podrl.tools import export
from podrl.tools import train as train_tool

_ROOT = pathlib.Path(__file__).parents[1]
_DOCS = _ROOT / 'docs'
_PAGES = [_ROOT / 'README.md', *sorted(_DOCS.rglob('*.md'))]
_TEXT = {page: page.read_text() for page in _PAGES}


def _code(page):
  """Returns the Python examples of a page as one program."""
  return '\n'.join(re.findall(r'```python\n(.*?)```', _TEXT[page], re.S))


def _execute(scope, *names):
  """Runs the examples of pages of the site as one program."""
  code = '\n'.join(_code(_DOCS / name) for name in names)
  exec(compile(code, ' and '.join(names), 'exec'), scope)


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  """Makes a directory with a trained run, `runs/mine`."""
  path = tmp_path_factory.mktemp('home')
  arguments = ['--config.total_env_steps=2e5', '--config.eval.num_episodes=2']
  arguments += ['--config.num_devices=2', f'--workdir={path}/runs/mine']
  argv = ['anakin_cartpole.py', *arguments]
  assert train.run(anakin_cartpole.get_config, argv) == 0
  return path


def _metrics_page():
  """Returns the names that the page of metrics documents."""
  text = _TEXT[_DOCS / 'reference/metrics.md']
  rows = re.findall(r'^\| (`.*?) \|', text, re.M)
  return set(re.findall(r'`(\w+)`', ' '.join(rows)))


def test_the_tutorials_code_runs_and_learns(home):
  scope = {}
  _execute(scope, 'tutorials/environment.md', 'tutorials/agent.md')
  # A random walk from the middle ends on the right only half of the time.
  assert scope['mean_return'] > 0.95
  assert int(scope['state'].learner.num_updates) == 100
  assert 'bonus' in scope['records'].metrics
  assert scope['host_return'] > 0.95
  assert scope['host_driver'].learner_state.num_updates == 100
  report = scope['reports'][-1]
  measured = {*report.metrics, *report.own, *report.stages} - {'bonus'}
  assert measured <= _metrics_page()
  records = workdir.read_records(str(home / 'runs' / 'mine'))
  recorded = set().union(*records)
  assert recorded <= _metrics_page()
  derived = scope['host_driver'].describe({name: 1.0 for name in measured})
  assert derived.keys() <= _metrics_page()
  # The page names nothing else except metrics of SAC, MuZero and other agents
  # with values, of several agents, of sweeps, of meta-gradients, and energy,
  # which few measure.
  others = {
    'eval_return_low',
    'eval_return_high',
    'eval_return_worst',
    'eval_return_worst_agent',
    'reward_loss',
    'targets_at_ends',
    'value',
    'temperature',
    'joules_per_second',
    'frames_per_joule',
  }
  others |= {'is_frozen', 'outer_loss', 'meta_grad_norm', *meta.NAMES}
  others |= {'turn_loss', 'eval_return_vs_NAME'}  # Of self-play.
  others |= {'num_processes'}
  assert _metrics_page() <= measured | recorded | derived.keys() | others


def test_the_tutorials_agent_learns_from_replay(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  # The page replaces this row, and `monkeypatch` removes it at the end.
  monkeypatch.setitem(AGENTS, 'q_learning', AGENTS['dqn'])
  scope = {}
  _execute(scope, 'tutorials/q-learning.md')
  assert scope['mean_return'] > 0.5  # A random policy gets -0.6.
  learner = scope['state'].learner
  # An update adds 4 x 32 steps, so the eighth one reaches 1,000 steps.
  assert int(learner.num_sgd_steps) == 8 * (200 - 7)
  last = scope['rows'][-1]
  assert last['eval_return'] > 0.5
  assert 'value' in last and last.keys() <= _metrics_page()


def test_the_parts_of_the_page_work_together(tmp_path, monkeypatch):
  text = _TEXT[_DOCS / 'how-to/parts.md']
  *parts, last = re.findall(r'```python\n(.*?)```', text, re.S)
  (tmp_path / 'my_parts.py').write_text('\n'.join(parts))
  command = re.search(r'```bash\n(podrl train.*?)```', text, re.S)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  argv = shlex.split(command[1].replace('\\\n', ' '))[1:]
  assert train_tool.run([*argv, '--steps=30_000', '--workdir=run']) == 0
  config = workdir.read_config('run')
  assert (config['network.width'], config['agent.bonus']) == (32, 0.02)
  assert workdir.read_records('run')[-1]['bonus'] > 0
  monkeypatch.delitem(sys.modules, 'my_parts')
  outcomes = []
  original = podrl.train
  monkeypatch.setattr(
    podrl,
    'train',
    lambda *args, **options: outcomes.append(original(*args, **options)),
  )
  exec(compile(last, 'parts.md', 'exec'), {})
  records = outcomes[0].records
  *others, last = [x['eval_return'] for x in records if 'eval_return' in x]
  assert last >= 475 and all(x < 475 for x in others)
  assert records[-1]['env_steps'] < 1_900_000  # It planned 2 million.
  assert 'return_per_step' in records[-1]


def test_the_tables_of_fields_are_those_of_the_configuration():
  tables = runpy.run_path(str(_DOCS / 'tables.py'))
  for page, text in _TEXT.items():
    assert text == tables['render'](text), f'{page}: run python docs/tables.py'
  page = _TEXT[_DOCS / 'reference/configuration.md']
  assert [x for x in all_fields() if f'\n| `{x}` |' not in page] == []
  for name, entry in AGENTS.items():
    assert all(f'\n| {kind} | {name} |' in page for kind in entry.kinds)


def test_the_published_returns_are_beside_those_of_podrl():
  page = _TEXT[_DOCS / 'reference/returns.md']
  rows = re.findall(r'^\| \S+ \| \w+ \|(.*)\|$', page, re.M)
  rows = [[x.strip() for x in row.split('|')] for row in rows]
  # An agent on Pendulum-v1 gets -1,202 with random actions, so it can go up by
  # 1,045 to -157; podrl's -147 is 1,055 above, 1.01 times as much.
  assert ['29.9k', '-147', '-157', '20k', '1.01', 'SB3: SAC'] in rows
  # -274.4 with random actions: (6,389 + 274.4) / (9,535 + 274.4).
  source = 'SB3: SAC, HalfCheetah-v3'
  assert ['300k', '6,389', '9,535', '1M', '0.68', source] in rows
  sources = {row[-1].split(':')[0] for row in rows if ': ' in row[-1]}
  named = re.findall(r'^- \*(\w+)\* (?:is|has)', page, re.M)
  assert len(sources) > 5 and sources == set(named)


def test_the_page_of_compiled_experiments_has_all_rows():
  compiled = runpy.run_path(str(_DOCS / 'compiled.py'))
  rows, page = compiled['read'](), _TEXT[_DOCS / 'reference/compiled.md']
  assert len(rows) >= 4
  assert page == compiled['render'](page, rows), 'run python docs/compiled.py'
  experiments = {(row['experiment'], row['variant']) for row in rows}
  assert experiments == set(compiled['_experiments']())


def test_the_tutorials_experiment_is_one(tmp_path):
  script = tmp_path / 'mountain_car.py'
  script.write_text(_code(_DOCS / 'tutorials/first-run.md'))
  get_config = runpy.run_path(str(script))['get_config']
  assert get_config('impala', 'long').total_env_steps == 5_000_000


def test_a_trained_policy_is_used(home, monkeypatch):
  scope = {'RUN': home / 'runs' / 'mine'}
  _execute(scope, 'how-to/policy.md')
  assert scope['policy_return'] > 150  # A random policy gets 22.
  assert scope['gymnasium_return'] > 150
  monkeypatch.chdir(home)
  assert export.run(['export', 'runs/mine', '--out=exported']) == 0
  code = "import sys; sys.modules['podrl'] = None; DIR = 'exported'\n"
  code += _code(_DOCS / 'how-to/export.md') + "\nprint('action', action)"
  found = subprocess.check_output([sys.executable, '-c', code], text=True)
  assert re.fullmatch(r'action \[[01] [01]\]\n', found)
  trained = podrl.load('runs/mine'), [], 'runs/mine'
  monkeypatch.setattr(podrl, 'train', lambda name, agent: trained)
  for page in (_ROOT / 'README.md', _DOCS / 'index.md'):
    scope = {'obs': np.zeros((3, 4))}
    exec(compile(_code(page), page.name, 'exec'), scope)
    assert scope['action'].shape == (3,)


def test_podrl_train_in_a_program_learns(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  scope = {}
  _execute(scope, 'getting-started.md')
  assert scope['records'][-1]['eval_return'] > 300  # A random policy gets 22.
  assert scope['policy'](np.zeros((3, 4)))[0].shape == (3,)
  assert (tmp_path / scope['path'] / 'summary.json').exists()


class _Limit(NamedTuple):
  max_timesteps: int

  def replace(self, **fields):
    return self._replace(**fields)


def test_the_adapters_of_other_suites_tell_a_time_limit_apart(monkeypatch):
  """Runs them with an imitation of both suites, which are not installed.

  Its episodes end after four steps, and also when the action is 1.
  """

  class State(NamedTuple):
    timestep: int

  def reset(rng_key, params):
    return jnp.zeros(3), State(jnp.int32(0))

  def step(rng_key, state, action, params):
    state = State(state.timestep + 1)
    truncated = state.timestep >= params.max_timesteps
    info = {'terminated': action == 1, 'truncated': truncated}
    return jnp.zeros(3), state, 1.0, (action == 1) | truncated, info

  env = types.SimpleNamespace(
    reset=reset,
    step=step,
    reset_env=reset,
    step_env=step,
    action_space=lambda params: types.SimpleNamespace(n=2),
  )
  limit = _Limit(4)
  modules = {
    'kinetix': {},
    'kinetix.environment': {
      'ActionType': types.SimpleNamespace(DISCRETE=0),
      'ObservationType': types.SimpleNamespace(SYMBOLIC_FLAT=0),
      'make_kinetix_env': lambda *_, auto_reset: env,
    },
    'kinetix.util': {
      'saving': types.SimpleNamespace(
        load_from_json_file=lambda path: (None, None, limit)
      )
    },
    'popgym_arcade': {'make': lambda name: (env, limit)},
  }
  for name, contents in modules.items():
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
  scope = {}
  _execute(scope, 'reference/environments.md')
  for make in (scope['kinetix'], scope['popgym']):
    device_env = make()
    state, _ = device_env.reset(jax.random.split(jax.random.key(0), 1))
    seen = []
    for action in (0, 0, 0, 0, 0, 0, 1, 0):
      state, steps = device_env.step(state, jnp.full(1, action, jnp.int32))
      seen.append((bool(steps.is_first[0]), float(steps.discount[0])))
    limited = [(False, 1.0)] * 4 + [(True, 1.0)]
    assert seen == [*limited, (False, 1.0), (False, 0.0), (True, 1.0)]


def test_every_example_is_tested():
  tested = {'README.md', 'first-run.md', 'environment.md', 'agent.md'}
  tested |= {'policy.md', 'getting-started.md', 'q-learning.md'}
  tested |= {'environments.md', 'parts.md', 'export.md', 'index.md'}
  tested |= {'self-play.md'}
  assert {page.name for page in _PAGES if _code(page)} == tested


def test_ci_calls_the_readmes_test_command():
  readme = _TEXT[_ROOT / 'README.md']
  commands = re.findall(r'^python3 -m venv .*$', readme, re.M)
  assert len(commands) == 2 and commands[1].endswith('pytest')
  assert "grep -m1 'pytest$' README.md" in (_ROOT / '.ci/run').read_text()


def test_the_readme_is_short():
  readme = _TEXT[_ROOT / 'README.md']
  assert len(readme.splitlines()) <= 180 and len(readme.split()) <= 1500


def test_the_readmes_speeds_are_those_of_the_benchmarks():
  figures = runpy.run_path(str(_DOCS / 'figures.py'))
  found = figures['ratios'](_TEXT[_DOCS / 'benchmarks.md'])
  assert found['Pong-misc'] == {'rejax': 6.59, 'PureJaxRL': 6.59}
  assert found['Pong-v5, envpool'] == {'Cleanba': 2.76, 'InstaDeep': 3.01}
  for peer in ('PureJaxRL', 'rejax', 'Cleanba'):
    ratios = [x[peer] for x in found.values() if peer in x]
    text = f'{min(ratios):.1f} to {max(ratios):.1f} times |'
    (row,) = re.findall(rf'^\| \[{peer}\].*', _TEXT[_ROOT / 'README.md'], re.M)
    assert len(ratios) > 1 and row.endswith(f'| {text}'), row


def test_pictures_and_files_that_pages_name_exist():
  num_pictures = 0
  for page, text in _TEXT.items():
    assert '@@' not in text, page  # @@ marks a missing figure.
    for bang, path in re.findall(r'(!?)\[[^]]*\]\(([^)#]+)[^)]*\)', text):
      if not path.startswith('http'):
        assert (page.parent / path).is_file(), (page, path)
        num_pictures += bool(bang)
        assert not bang or (page.parent / path).stat().st_size > 5000
    for path in re.findall(r'\b(?:experiments|launch)/\w+[/\w]*\.\w+', text):
      assert (_ROOT / path).is_file() or 'NAME' in path, (page, path)
  assert num_pictures >= 8


def test_every_page_is_in_the_sites_navigation():
  navigation = (_ROOT / 'mkdocs.yml').read_text()
  pages = [str(x.relative_to(_DOCS)) for x in _PAGES[1:]]
  assert len(pages) >= 12
  assert all(f': {x}\n' in navigation for x in pages)


def test_the_site_calls_no_other_host():
  text = (_ROOT / 'mkdocs.yml').read_text()
  # The theme would ask GitHub about the repository, and Google for its fonts.
  assert 'repo_url' not in text and '://' not in text
  assert re.search('^  font: false', text, re.M)
  names = 'analytics extra_javascript social privacy mermaid'.split()
  assert not [x for x in names if x in text]
  assert not re.search('url|@import', (_DOCS / 'style.css').read_text())
  for page, text in _TEXT.items():
    assert not re.search(r'!\[[^]]*\]\(http|<(img|script|iframe)', text), page


def test_the_notebook_runs(tmp_path):
  notebook = nbformat.read(_DOCS / 'notebooks' / 'first_run.ipynb', 4)
  cells = [x for x in notebook.cells if x.cell_type == 'code']
  assert sum('steps=3e5' in x.source for x in cells) == 1
  for cell in cells:
    cell.source = cell.source.replace('steps=3e5', 'steps=2048')
  resources = {'metadata': {'path': str(tmp_path)}}
  client = nbclient.NotebookClient(notebook, timeout=500, resources=resources)
  client.execute()
  pictures = [
    kind
    for cell in cells
    for output in cell.outputs
    for kind in output.get('data', {})
    if kind.startswith('image/')
  ]
  assert pictures == ['image/png', 'image/gif']
  (action,) = cells[-1].outputs
  assert re.fullmatch(r'array\(\[[01], [01]\].*', action.data['text/plain'])


def test_pages_promise_only_what_was_tried():
  for page, text in _TEXT.items():
    text = ' '.join(text.split())
    assert 'github.com/podrl' not in text, page  # There is no such address.
    for match in re.finditer('bit for bit', text):
      around = text[max(0, match.start() - 600) : match.end() + 600]
      assert 'CPU' in around or 'GPU' in around, (page, around)
  for page in (_ROOT / 'README.md', _DOCS / 'index.md'):
    first = ' '.join(_TEXT[page].split('## ')[0].split())
    assert 'has run on CPUs and on [one GPU]' in first
    assert 'not yet on real hardware' in first


def test_the_api_page_names_what_exists():
  text = _TEXT[_DOCS / 'reference/api.md']
  names = re.findall(r'^::: (\S+)', text, re.M)
  assert names
  for name in names:
    try:
      importlib.import_module(name)
    except ModuleNotFoundError:
      module, _, attribute = name.rpartition('.')
      assert hasattr(importlib.import_module(module), attribute), name
