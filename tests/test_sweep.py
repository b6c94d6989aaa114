"""Every task of gymnax and envpool that one agent can act in, by name alone.

The slow tests keep docs/coverage.csv: a row for each task, with its outcome.
"""

import csv
import json
import pathlib

import envpool
import gymnax
import jax
import pytest

from podrl import build
from podrl import train
from podrl.types import Discrete
from test_train import _get_config

_TABLE = pathlib.Path(__file__).parent.parent / 'docs' / 'coverage.csv'
_COLUMNS = ('suite', 'family', 'task', 'observation', 'action', 'outcome')

def _family(name):
  """envpool's module of a task, such as 'mujoco.gym'; the end of a gymnax name."""
  if name not in envpool.registration.registry.specs:
    return name.rpartition('-')[2]
  module = envpool.registration.registry.specs[name][0]
  return '.'.join(module.split('.')[1:3])


def _has_players(name):
  """Whether several agents act: board and card games, and two on a crossing."""
  return (_family(name) == 'pgx' and name != 'Play2048-v1'
          or 'multiagent' in name.lower().replace('-', ''))


def _exemption(name):
  """Why an envpool task of one agent cannot run here, or ''."""
  if _family(name) == 'procgen':
    return 'needs Qt 5 of the system, which no Python package brings'
  if 'Sudoku' in name:
    return "its puzzles are not in envpool's wheel"
  if name == 'VizdoomCustom-v1':
    return "runs the user's own scenario file"
  return ''


_ENVPOOL = [x for x in sorted(envpool.list_all_envs()) if not _has_players(x)]
# Row and reason of those that do not run.
_EXEMPT = [('envpool', _family(x), x, '', '', f'exempt: {_exemption(x)}')
           for x in _ENVPOOL if _exemption(x)]
_EXEMPT.append(('gymnax', _family('MNISTBandit-bsuite'), 'MNISTBandit-bsuite', '', '',
                'exempt: downloads a data set when made'))
_EXEMPT_TASKS = [(row[0], row[2]) for row in _EXEMPT]
_TASKS = [('envpool', x) for x in _ENVPOOL] + [
    ('gymnax', x) for x in sorted(gymnax.registered_envs)]
_RUN = [x for x in _TASKS if x not in _EXEMPT_TASKS]


def test_how_many_there_are():
  # Of envpool 1.2.5 and gymnax 1.0.1; later ones may add some.
  assert len(_ENVPOOL) >= 1629 and len(_TASKS) >= 1629 + 26
  # 50 of Procgen, 4 of Sudoku, 1 of VizDoom, 1 of gymnax.
  assert len(_EXEMPT) == 50 + 4 + 1 + 1
  assert len(_EXEMPT) - 1 < 0.05 * len(_ENVPOOL)


def test_the_table_is_complete():
  with _TABLE.open() as file:
    rows = {(r['suite'], r['task']): tuple(r.values())
            for r in csv.DictReader(file)}
  assert {rows[x][-1] for x in _RUN} == {'passed'}
  assert [rows[x] for x in _EXEMPT_TASKS] == _EXEMPT


def _describe(spec):
  """The observation and action columns of the table."""
  shapes = [f'{x.dtype}[{",".join(map(str, x.shape))}]'
            for x in jax.tree.leaves(spec.obs)]
  action = spec.action
  return ' '.join(shapes), (
      f'{action.num_actions} actions' if isinstance(action, Discrete) else
      f'box[{",".join(map(str, action.shape))}]')


@pytest.fixture(scope='module')
def table():
  """Rows by (suite, task); in the end they join those of the table."""
  rows = {}
  yield rows
  if not rows:
    return
  if _TABLE.exists():
    with _TABLE.open() as file:
      rows = {(r['suite'], r['task']): tuple(r.values())
              for r in csv.DictReader(file)} | rows
  rows |= dict(zip(_EXEMPT_TASKS, _EXEMPT))
  with _TABLE.open('w', newline='') as file:
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(_COLUMNS)
    writer.writerows(sorted(rows.values()))


_TINY = ['--config.env.num_envs=4', '--config.unroll_length=4',
         '--config.total_env_steps=48', '--config.network.hidden_sizes=16',
         '--config.eval.num_episodes=1', '--config.eval.max_episode_steps=5',
         '--config.log.tensorboard=False']
_TINY_HOST = ['--config.sebulba.actor_devices=0',
              '--config.sebulba.learner_devices=0']


@pytest.mark.slow
@pytest.mark.parametrize('suite,name', [
    pytest.param(*x, id=f'{x[0]}-{_family(x[1])}-{x[1]}') for x in _RUN])
def test_three_updates(suite, name, table, tmp_path):
  is_host = suite == 'envpool'
  experiment = 'sebulba_cartpole' if is_host else 'anakin_cartpole'
  argv = [f'{experiment}.py', f'--workdir={tmp_path / "run"}', '--agent=impala',
          f'--config.env.name={name}', *_TINY, *(_TINY_HOST if is_host else ())]
  configs = []

  def get_config(agent, variant):
    configs.append(_get_config(experiment)(agent, variant))
    return configs[0]

  table[suite, name] = suite, _family(name), name, '', '', 'failed'
  # gymnax's Swimmer adds arrays of different ranks.
  with jax.numpy_rank_promotion(
      'allow' if name == 'Swimmer-misc' else 'raise'):
    assert train.run(get_config, argv) == 0
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['num_updates'] == 3 and summary['eval_episodes'] == 1
  spec = (build.make_host_spec if is_host else lambda config: build.make_env(
      config).spec)(configs[0])
  table[suite, name] = suite, _family(name), name, *_describe(spec), 'passed'
  jax.clear_caches()
