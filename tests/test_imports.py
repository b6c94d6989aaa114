"""Who may import whom, and what importing podrl costs."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parent.parent / 'podrl'
_FILES = sorted(_ROOT.rglob('*.py'))


def _imports(path):
  """The modules that a file imports, anywhere in it, dotted."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
      found.add(node.module)
  return found


def _podrl_imports(path):
  modules = {'.'.join(f.relative_to(_ROOT).with_suffix('').parts)
             for f in _FILES}
  return {x.removeprefix('podrl.') for x in _imports(path)
          if x.removeprefix('podrl.') in modules}


def _name(path):
  return '.'.join(path.relative_to(_ROOT).with_suffix('').parts)


_MAY = {  # What each may import of podrl; who is absent may import anything.
    'types': set(), '__init__': {'policy'}, 'config': set(),
    'agents.__init__': set(), 'envs.__init__': set(),
    'returns': {'types'}, 'losses': {'types'}, 'distributions': {'types'},
    'torsos': {'types'}, 'networks': {'types', 'torsos'},
    'normalization': {'types'}, 'learner': {'types'}, 'spmd': {'types'},
    'evaluate': {'types', 'cli', 'config', 'build', 'plot', 'policy', 'workdir'},
    'envs.gymnax_env': {'types'}, 'channel': set(), 'cli': {'config'},
    'envs.gymnasium_env': {'types'},
    'envs.envpool_env': {'types', 'envs.gymnasium_env'},
    'check': {'config', 'distributions', 'networks', 'torsos', 'optimizers'},
    'layout': {'config', 'check', 'types', 'spmd'},
    'actor': {'types', 'channel'},
    'sebulba': {'types', 'spmd', 'channel', 'actor', 'layout', 'settings',
                'balance.stages'},
    'settings': set(), 'balance.__init__': set(), 'balance.tuner': set(),
    'balance.stages': {'actor', 'channel'}, 'balance.history': {'workdir'},
    'balance.limits': set(), 'balance.machine': {'types', 'balance.limits'},
    'anakin': {'types', 'spmd'},
    'agents.actor_critic': {
        'types', 'returns', 'losses', 'distributions', 'networks'},
    'agents.ppo': {'types', 'returns', 'losses', 'distributions', 'networks',
                   'agents.actor_critic'},
    'workdir': {'config'}, 'signals': set(),
    'terminal': {'workdir', 'balance.machine'},
    'metrics': {'types', 'channel', 'workdir'},
    'recorder': {'types', 'config', 'workdir', 'metrics', 'terminal',
                 'balance.limits'},
    'checkpoint': {'types', 'workdir', 'digests'}, 'digests': {'workdir'},
    'plot': {'cli', 'config', 'workdir', 'terminal'},
    'optimizers': set(), 'runner': {'types', 'anakin', 'spmd'},
    'watchdog': set(), 'cluster': {'watchdog'},
    'command': {'config', 'check', 'workdir', 'checkpoint', 'cluster'},
    'loop': {'types', 'workdir', 'signals', 'spmd', 'checkpoint', 'cluster',
             'recorder', 'command', 'build', 'balance.machine'},
    'pictures': {'types'}, 'film': {'types'},
    'chips': set(), 'prediction': {'chips', 'measure', 'program'},
    'probe': {'types', 'spmd', 'learner', 'layout', 'build', 'workdir', 'cluster'},
    'measure': {'config', 'chips', 'probe'},
    'program': {'types', 'spmd', 'config', 'build', 'anakin'},
    'scaling': {'cli', 'config', 'check', 'spmd', 'terminal', 'chips', 'measure',
                'program', 'prediction'},
    'balance.plan': {'types', 'check', 'layout'},
    'balance.simulation': {'balance.plan'},
    'balance.model': {'balance.plan', 'balance.simulation'},
    'balance.idle': {'types', 'learner'},
    'balance.timing': {'types', 'spmd', 'actor', 'sebulba', 'metrics',
                       'balance.plan', 'balance.simulation', 'balance.idle',
                       'balance.machine', 'balance.stages', 'prediction'},
    'balance.search': {'build', 'layout', 'balance.plan', 'balance.simulation',
                       'balance.limits', 'balance.model', 'balance.timing'},
    'balance.picture': {'terminal', 'balance.plan', 'balance.model',
                        'balance.search'},
    'balance.worth': {'config', 'chips', 'workdir', 'layout', 'build', 'measure',
                      'program', 'prediction', 'balance.plan', 'balance.model',
                      'balance.simulation', 'balance.search'},
    'balance.__main__': {'cli', 'config', 'check', 'chips', 'layout', 'build',
                         'loop', 'workdir', 'balance.plan', 'balance.search',
                         'balance.picture', 'balance.worth', 'balance.history',
                         'balance.limits', 'balance.machine'},
    'watch': {'types', 'cli', 'config', 'build', 'policy', 'envs.envpool_env',
              'pictures', 'film'},
}
_FREE = {'build', 'train', 'policy'}


def test_every_file_is_ruled():
  assert {_name(f) for f in _FILES} == set(_MAY) | _FREE


@pytest.mark.parametrize('path', _FILES, ids=_name)
def test_imports(path):
  name, source, imports = _name(path), path.read_text(), _imports(path)
  if name in _MAY:
    assert _podrl_imports(path) <= _MAY[name]
  if name not in ('channel', 'sebulba', 'metrics', 'watchdog'):
    assert 'threading' not in imports and 'concurrent' not in imports
  if name != 'spmd':
    assert not re.search(r'shard_map\(|(?<!spmd\.)\bMesh\b|NamedSharding', source)
  if name != 'learner':
    assert not re.search(
        r'lax\.(p(mean|sum|max|min|permute)|all_gather|all_to_all|psum_scatter)',
        source)
  if name not in ('config', 'check', 'layout', 'build', 'train', 'command',
                  'workdir', 'recorder', 'policy', 'watch', 'loop'):
    assert not any('ml_collections' in x for x in imports)
  assert len(source.splitlines()) <= 300


def test_podrl_imports_no_environment_library():
  code = ('import sys, podrl, podrl.build, podrl.train; '
          'print([m for m in ("gymnax", "envpool", "matplotlib", "gymnasium") '
          'if m in sys.modules])')
  outcome = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert outcome.stdout.strip() == '[]'
