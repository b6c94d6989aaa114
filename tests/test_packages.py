"""Tests the source package and the wheel that users install."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """Builds the source package of a tag, then its wheel, and unpacks that."""
  copy = tmp_path_factory.mktemp('copy')
  for name in ('setup.cfg', 'pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(_ROOT / name, copy)
  ignored = shutil.ignore_patterns('__pycache__')
  shutil.copytree(_ROOT / 'podrl', copy / 'podrl', ignore=ignored)
  author = ['-c', 'user.name=a', '-c', 'user.email=a@b']
  for arguments in (
    *(['init', '--quiet'], ['add', '.'], ['commit', '--quiet', '-m', 'all']),
    ['tag', 'v1.2.3'],
  ):
    subprocess.run(['git', *author, *arguments], check=True, cwd=copy)
  code = 'from setuptools.build_meta import build_sdist; build_sdist("source")'
  subprocess.run([sys.executable, '-c', code], check=True, cwd=copy)
  (source,) = (copy / 'source').iterdir()
  command = [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-index']
  command += ['--no-build-isolation', '--quiet', '--wheel-dir=wheels']
  subprocess.run([*command, str(source)], check=True, cwd=copy)
  (wheel,) = (copy / 'wheels').iterdir()
  site = tmp_path_factory.mktemp('site')
  zipfile.ZipFile(wheel).extractall(site)
  return site


def test_the_wheel_has_every_file_and_nothing_else(site):
  files = {str(x.relative_to(_ROOT)) for x in (_ROOT / 'podrl').rglob('*.py')}
  found = [x.relative_to(site) for x in site.rglob('*') if x.is_file()]
  assert {str(x) for x in found if 'dist-info' not in x.parts[0]} == files
  (metadata,) = site.glob('podrl-1.2.3.dist-info')  # The version is the tag's.
  assert (metadata / 'entry_points.txt').read_text().split() == [
    '[console_scripts]',
    *'podrl = podrl.__main__:main'.split(),
  ]
  assert list(metadata.rglob('LICENSE'))


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_folder(site, tmp_path):
  environment = {**os.environ, 'PYTHONPATH': str(site)}

  def run(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.check_output(
      command, cwd=tmp_path, env=environment, text=True
    )

  assert run('-m', 'podrl', '--version') == 'podrl 1.2.3\n'
  run('-m', 'podrl', 'train', 'CartPole-v1', '--steps=2048', '--workdir=run')
  assert 'written: ' in run('-m', 'podrl', 'export', 'run')
  path = run('-c', 'import podrl; print(podrl.__file__)')
  assert path.startswith(str(site))
