"""Tests who may import whom, and what importing podrl costs."""

import ast
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1] / 'podrl'
_FILES = sorted(_ROOT.rglob('*.py'))
# A file may import from its own floor and from the floors before it.
_FLOORS = (
  ['types', 'messages', 'signals', 'fields', 'modules'],
  ['kernels'],
  ['core'],
  ['networks'],
  ['agents', 'envs'],
  ['records'],
  ['drivers'],
  ['run'],
  ['tools'],
  ['__init__', '__main__'],
)
_LEVEL = {name: i for i, names in enumerate(_FLOORS) for name in names}
# Only these files may contain these words; some of the words are collectives.
_ONLY = {
  'threading|concurrent': (
    'drivers/',
    'run/cluster',
    'signals',
    'run/train',
    'records/',
  ),
  'shard_map': ('drivers/spmd',),
  'Mesh(': ('drivers/spmd',),
  'lax.pmean|lax.pmax|lax.pmin': ('core/learner',),
  'all_gather|all_to_all|psum|ppermute': (),
  'ConfigDict': ('run/config', 'run/train', '__init__'),
  'platform_dependent': ('kernels/__init__',),
}


def _imports(path):
  """Yields the modules of podrl that a file imports, as `floor.name`."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names = (alias.name for alias in node.names)
      yield from (x.removeprefix('podrl.') for x in names if 'podrl.' in x)
    elif isinstance(node, ast.ImportFrom) and node.module == 'podrl':
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module.startswith('podrl.'):
      module = node.module.removeprefix('podrl.')
      yield from (f'{module}.{alias.name}' for alias in node.names)


@pytest.mark.parametrize(
  'path', _FILES, ids=lambda p: str(p.relative_to(_ROOT))
)
def test_imports_go_down(path):
  floor = path.relative_to(_ROOT).with_suffix('').parts[0]
  for name in _imports(path):
    other = name.split('.')[0]
    assert _LEVEL[other] <= _LEVEL[floor], f'{path} imports podrl.{name}'
    is_sibling = {floor, other} == {'agents', 'envs'}
    assert not is_sibling and (other != 'tools' or floor == 'tools'), name


def test_no_circles():
  names = {
    '.'.join(p.relative_to(_ROOT).with_suffix('').parts): p for p in _FILES
  }
  edges = {
    name: {
      y
      for x in _imports(path)
      for y in (x, x.rpartition('.')[0])
      if y in names and y != name
    }
    for name, path in names.items()
  }
  while leaves := [name for name, to in edges.items() if not to & edges.keys()]:
    for name in leaves:
      del edges[name]
  assert not edges


@pytest.mark.parametrize('word', _ONLY)
def test_some_words_have_one_place(word):
  found = {
    str(path.relative_to(_ROOT))
    for path in _FILES
    if any(x in path.read_text() for x in word.split('|'))
  }
  assert all(x.startswith(_ONLY[word]) for x in found), found


def test_the_package_has_at_most_seven_files_of_its_own():
  assert len(list(_ROOT.glob('*.py'))) <= 7


@pytest.mark.parametrize(
  'modules,libraries',
  [
    ('podrl, podrl.run.train', 'gymnax envpool gymnasium matplotlib'),
    ('podrl.tools.plot', 'jax flax optax orbax matplotlib'),
  ],
)
def test_an_import_leaves_libraries_out(modules, libraries):
  """Environments are imported on use; to read runs, JAX is not needed."""
  code = (
    f'import sys, {modules}\nprint({{*{libraries.split()}}} & set(sys.modules))'
  )
  output = subprocess.run(
    [sys.executable, '-c', code], check=True, capture_output=True, text=True
  )
  assert output.stdout.strip() == 'set()'
