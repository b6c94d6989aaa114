"""Every single-agent task trains, given only its name.

gymnasium's tasks are those of envpool and what the user's modules register.

The slow tests write docs/coverage.csv: a row for each task, with its outcome.
"""

import collections
import csv
import fcntl
import json
import pathlib

import envpool
import helpers
import jax
import pytest

from podrl.envs import SUITES
from podrl.records import workdir
from podrl.run import build, train
from podrl.types import Box

_ENVPOOL_VERSION = '1.2.5'  # The one that the table was made with.
_TABLE = pathlib.Path(__file__).parents[2] / 'docs' / 'coverage.csv'
_COLUMNS = ('suite', 'family', 'task', 'observation', 'action', 'outcome')


def _family(name):
  """Returns envpool's module of a task, such as 'mujoco.gym'."""
  module = envpool.registration.registry.specs[name][0]
  return '.'.join(module.split('.')[1:3])


def _has_players(name):
  """Returns whether several agents act, as in board and card games."""
  return (
    _family(name) == 'pgx'
    and name != 'Play2048-v1'
    or 'multiagent' in name.lower().replace('-', '')
  )


def _exemption(task):
  """Returns why a single-agent task cannot run here, or ''."""
  _, family, name = task
  if family == 'procgen':
    return 'needs Qt 5 of the system, which no Python package brings'
  if 'Sudoku' in name:
    return "its puzzles are not in envpool's wheel"
  if name == 'VizdoomCustom-v1':
    return "runs the user's own scenario file"
  if family == 'vizdoom':  # Some tasks pass at times.
    return 'at times envpool hangs or crashes while it makes one'
  return ''


_ENVPOOL = [
  ('envpool', _family(x), x)
  for x in sorted(envpool.list_all_envs())
  if not _has_players(x)
]
# The suites in JAX that are installed; the extra `suites` installs them all.
_JAX_SUITES = {
  suite: row
  for suite, row in SUITES.items()
  if row.architecture == 'anakin' and row.names()
}
_JAX = [
  (suite, x.rpartition('-')[2] if suite == 'gymnax' else '', x)
  for suite, row in _JAX_SUITES.items()
  for x in row.names()
]
_EXEMPT = {x: _exemption(x) for x in _ENVPOOL if _exemption(x)} | {
  (suite, 'bsuite' if suite == 'gymnax' else '', x): reason
  for suite, row in _JAX_SUITES.items()
  for x, reason in row.unusable.items()
}
_RUN = [x for x in _ENVPOOL + _JAX if x not in _EXEMPT]


# The tasks that the versions of November 2026 have, without exempt ones. Later
# versions may have more. Procgen has 50 exempt tasks, Sudoku 4, and VizDoom 21.
_LEAST = {'gymnax': 25, 'pgx': 20, 'navix': 41, 'xminigrid': 44, 'brax': 10}
_LEAST |= {'jumanji': 25, 'craftax': 4, 'playground': 25, 'envpool': 1629 - 75}


def test_how_many_there_are():
  found = collections.Counter(suite for suite, *_ in _RUN)
  assert all(
    found[suite] >= _LEAST[suite] for suite in ['envpool', *_JAX_SUITES]
  )
  exempt = collections.Counter(suite for suite, *_ in _EXEMPT)
  assert exempt['envpool'] == 50 + 4 + 21
  assert exempt.total() <= 0.05 * found.total()


def _read_table():
  """Reads the table; each row's key is its first three columns."""
  with _TABLE.open() as file:
    rows = [tuple(row.values()) for row in csv.DictReader(file)]
  return {row[:3]: row for row in rows}


def test_the_table_is_complete():
  rows = _read_table()
  passed = [x for x, row in rows.items() if row[-1] == 'passed']
  assert collections.Counter(suite for suite, *_ in passed) == _LEAST
  # Later versions of envpool have tasks that the table does not have.
  is_later = envpool.__version__ != _ENVPOOL_VERSION
  new = {x for x in _ENVPOOL if is_later and x not in rows}
  assert {rows[x][-1] for x in _RUN if x not in new} == {'passed'}
  assert {x: rows[x][-1] for x in _EXEMPT} == {
    x: f'exempt: {reason}' for x, reason in _EXEMPT.items()
  }


def _describe(spec):
  """Returns the observation and action columns of the table."""
  shapes = [
    f'{x.dtype}[{",".join(map(str, x.shape))}]'
    for x in jax.tree.leaves(spec.obs)
  ]
  action = spec.action
  return ' '.join(shapes), (
    f'box[{",".join(map(str, action.shape))}]'
    if isinstance(action, Box)
    else f'{action.num_actions} actions'
  )


def _note(*row):
  """Writes a row of the table; several processes may write at once."""
  with _TABLE.open('a+', newline='') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    rows = [
      r
      for r in csv.reader(file)
      if r[:3] not in (list(row[:3]), list(_COLUMNS[:3]))
    ]
    file.truncate(0)
    csv.writer(file, lineterminator='\n').writerows(
      [_COLUMNS, *sorted([*rows, list(row)])]
    )


_TINY = [
  '--config.env.num_envs=4',
  '--config.unroll_length=4',
  '--config.total_env_steps=48',
  '--config.network.hidden_sizes=16',
  '--config.eval.num_episodes=1',
  '--config.eval.max_episode_steps=5',
  '--config.network.shared_torso=True',
  '--config.log.tensorboard=False',
]
_TINY_HOST = [
  '--config.sebulba.actor_devices=0',
  '--config.sebulba.learner_devices=0',
]


@pytest.mark.slow
def test_the_exempt_are_noted():
  for task, reason in _EXEMPT.items():
    _note(*task, '', '', f'exempt: {reason}')


@pytest.mark.slow
@pytest.mark.parametrize('task', _RUN, ids='-'.join)
def test_three_updates(task, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # VizDoom writes files here.
  suite, _, name = task
  is_host = suite == 'envpool'
  experiment = 'sebulba_cartpole' if is_host else 'anakin_cartpole'
  argv = [
    f'{experiment}.py',
    f'--workdir={tmp_path / "run"}',
    '--agent=impala',
    f'--config.env.suite={suite}',
    f'--config.env.name={name}',
    *_TINY,
    *(_TINY_HOST if is_host else ()),
  ]
  _note(*task, '', '', 'failed')  # This row remains after a crash.
  # Most suites add arrays of different ranks, and so does gymnax's Swimmer.
  is_strict = suite in ('envpool', 'gymnax') and name != 'Swimmer-misc'
  with jax.numpy_rank_promotion('raise' if is_strict else 'allow'):
    assert train.run(helpers.get_config(experiment), argv) == 0
    spec = build.make_spec(workdir.read_config(str(tmp_path / 'run')))
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['num_updates'] == 3 and summary['eval_episodes'] == 1
  _note(*task, *_describe(spec), 'passed')
