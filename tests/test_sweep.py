"""Every single-player envpool task with discrete actions runs by name alone."""

import json

import envpool
import pytest

from podrl import train
from podrl.envs import envpool_env
from podrl.types import Discrete
from test_train import _get_config

_FAMILIES = ('classic_control', 'toy_text', 'box2d', 'minigrid', 'atari')
_EXEMPT = {}  # Task: the reason.


def _tasks():
  """The tasks of those families whose actions are discrete."""
  specs = envpool.registration.registry.specs
  return sorted(
      name for name in envpool.list_all_envs()
      if specs[name][0].split('.')[1] in _FAMILIES and name not in _EXEMPT
      and isinstance(envpool_env.make_spec(name).action, Discrete))


def test_how_many_there_are():
  # 6 of classic control, 11 of toy text, 2 of box2d, 177 of MiniGrid, 104 of
  # Atari in envpool 1.2.5; a later one may add some.
  assert len(_tasks()) >= 300 - len(_EXEMPT) and not _EXEMPT


@pytest.mark.slow
@pytest.mark.parametrize('name', _tasks())
def test_three_updates(name, tmp_path):
  workdir = tmp_path / 'run'
  argv = ['sebulba_cartpole.py', '--agent=impala', f'--workdir={workdir}',
          f'--config.env.name={name}', '--config.env.num_envs=4',
          '--config.unroll_length=4', '--config.total_env_steps=48',
          '--config.network.hidden_sizes=16', '--config.eval.num_episodes=1',
          '--config.eval.max_episode_steps=5', '--config.log.tensorboard=False',
          '--config.sebulba.actor_devices=0',
          '--config.sebulba.learner_devices=0']
  assert train.run(_get_config('sebulba_cartpole'), argv) == 0
  summary = json.loads((workdir / 'summary.json').read_text())
  assert summary['num_updates'] == 3 and summary['eval_episodes'] == 1
