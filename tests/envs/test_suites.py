"""Tests which environment a name means."""

import subprocess
import sys

import gymnax
import pytest

from podrl import modules
from podrl.envs import SUITES, find_task


@pytest.mark.parametrize(
  'text,suite,name',
  [
    ('Pong-misc', 'gymnax', 'Pong-misc'),
    ('LunarLander-v2', 'envpool', 'LunarLander-v2'),
    ('GymV26Environment-v0', 'gymnasium', 'GymV26Environment-v0'),
    ('envpool:CartPole-v1', 'envpool', 'CartPole-v1'),
    ('my_package.envs:Walk-v0', 'gymnasium', 'my_package.envs:Walk-v0'),
    ('gymnasium:my_envs:Walk-v0', 'gymnasium', 'my_envs:Walk-v0'),
    ('jax:my_envs:walk', 'jax', 'my_envs:walk'),
  ],
)
def test_a_name_means_one_environment(text, suite, name):
  assert find_task(text) == (suite, name, '')


def test_the_first_of_several_suites_is_taken_and_said():
  task = find_task('CartPole-v1')
  assert task[:2] == ('gymnax', 'CartPole-v1')
  assert task.note == (
    'CartPole-v1 is in gymnax, envpool and gymnasium; podrl uses gymnax; write '
    'envpool:CartPole-v1 for envpool'
  )


@pytest.mark.parametrize(
  'text,near',
  [('Pnog-misc', 'gymnax:Pong-misc'), ('halfcheetah-v4', 'envpool:HalfCheet')],
)
def test_an_unknown_name_gets_near_names_of_all_suites(text, near):
  with pytest.raises(ValueError, match=f'an environment {text}; .*{near}'):
    find_task(text)


def test_the_names_of_gymnax_need_no_import():
  code = (
    'import sys; from podrl.envs import SUITES; '
    'names = SUITES["gymnax"].names(); assert "gymnax" not in sys.modules; '
    'print(*names)'
  )
  outcome = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  names = outcome.stdout.split()
  assert names == SUITES['gymnax'].names()
  assert {*names} == {*gymnax.registered_envs} - {'MNISTBandit-bsuite'}


def test_no_suite_lists_a_task_of_several_players():
  names = SUITES['envpool'].names()
  assert 'Play2048-v1' in names and 'Pong-v5' in names
  assert not {'Chess-v1', 'IntersectionMultiAgent-v1'} & {*names}


def test_only_a_module_outside_of_packages_has_a_directory(
  tmp_path, monkeypatch
):
  (tmp_path / 'my_envs.py').touch()
  (tmp_path / 'my_package').mkdir()
  (tmp_path / 'my_package' / '__init__.py').touch()
  monkeypatch.setattr(sys, 'path', list(sys.path))
  assert modules.module_directory('my_envs:Walk-v0') == ''
  modules.add_to_path(str(tmp_path))
  assert sys.path[-1] == str(tmp_path)
  assert modules.module_directory('my_envs:Walk-v0') == str(tmp_path)
  assert modules.module_directory('my_package.a:Walk-v0') == str(tmp_path)
  assert modules.module_directory('gymnasium.envs:CartPole-v1') == ''
  assert modules.module_directory('CartPole-v1') == ''
  assert modules.module_directory('__main__:Walk-v0') == ''
  # A directory beside the virtual environment is not inside it.
  monkeypatch.setattr(sys, 'prefix', str(tmp_path)[:-1])
  assert modules.module_directory('my_envs:Walk-v0') == str(tmp_path)
  monkeypatch.setattr(sys, 'prefix', str(tmp_path))
  assert modules.module_directory('my_envs:Walk-v0') == ''
