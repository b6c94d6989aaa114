"""The README's examples run and learn; its commands are the ones in use."""

import pathlib
import re

from test_train import _run

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / 'README.md').read_text()


def test_the_examples_run_and_learn(tmp_path):
  arguments = ['--config.total_env_steps=2e5', '--config.eval.num_episodes=2']
  assert _run(tmp_path, *arguments, name='anakin_cartpole', tiny=False) == 0
  code = '\n'.join(re.findall(r'```python\n(.*?)```', _README, re.S))
  assert code.count('def ') >= 5
  scope = {'RUN': tmp_path}
  exec(compile(code, 'README.md', 'exec'), scope)
  assert scope['policy_return'] > 150  # At random 22.
  # A random walk from the middle ends right half of the time.
  assert scope['mean_return'] > 0.95
  assert int(scope['state'].learner.num_updates) == 100
  assert 'bonus' in scope['records'].metrics
  assert scope['host_return'] > 0.95
  assert scope['host_driver'].learner.num_updates == 100


def test_ci_calls_the_readmes_test_command():
  commands = re.findall(r'^python3 -m venv .*$', _README, re.M)
  assert len(commands) == 2 and commands[1].endswith('pytest')
  assert "grep -m1 'pytest$' README.md" in (_ROOT / '.ci/run').read_text()


def test_every_picture_is_there():
  assert '@@' not in _README  # A figure that is still to come.
  pictures = re.findall(r'!\[.*?\]\((.*?)\)', _README)
  assert pictures and all((_ROOT / p).stat().st_size > 5000 for p in pictures)
