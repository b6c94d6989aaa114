"""Tests that agents learn: thresholds on small environments, fixed seeds."""

import json
import os
import subprocess
import sys
import textwrap

import gymnasium
import helpers
import numpy as np
import pytest

import podrl
from podrl.run import train


def _evaluated(name, tmp_path, *arguments):
  """Runs an experiment and returns its evaluated return."""
  argv = [f'{name}.py', f'--workdir={tmp_path}/run', *arguments]
  argv += ['--config.num_devices=2'] if name.startswith('anakin') else []
  assert train.run(helpers.get_config(name), argv) == 0
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  return summary['eval_return']


@pytest.mark.parametrize(
  'agent,num_steps',
  [
    ('ppo', 250_000),
    helpers.slow('impala', 500_000),
    helpers.slow('a2c', 500_000),
    helpers.slow('muzero', 60_000),
  ],
)
def test_catch_is_solved(agent, num_steps, tmp_path):
  # A random policy gets about -0.6; the best return is 1.
  arguments = [f'--agent={agent}', '--config.seed=1']
  arguments += [f'--config.total_env_steps={num_steps}']
  assert _evaluated('anakin_catch', tmp_path, *arguments) >= 0.95


@pytest.mark.parametrize(
  'agent,num_steps,fields',
  [
    # With less entropy, a policy that is wrong for one of the four pairs of
    # bits may stay so.
    (
      'ppo',
      30_000,
      {
        'unroll_length': 8,
        'agent.entropy_cost': 0.1,
        'network.activation': 'relu',
        'optimizer.learning_rate': 2e-3,
      },
    ),
    helpers.slow('pqn', 100_000, {}),
    helpers.slow('dqn', 20_000, {}),
  ],
)
def test_an_image_and_a_vector_are_seen_together(
  agent, num_steps, fields, tmp_path
):
  _, records, _ = podrl.train(
    'jax:helpers:two_inputs',
    agent,
    steps=num_steps,
    workdir=f'{tmp_path}/run',
    config={
      'agent.gamma': 0.0,  # No action changes what follows.
      'env.num_envs': 64,
      'network.hidden_sizes': (64, 64),
      'num_devices': 1,
      **fields,
    },
  )
  # A policy that lacks one of the two gets 0; the best return is 8.
  assert records[-1]['eval_return'] == 8
  # A saved policy takes the same dictionaries.
  a, b = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
  image = np.zeros((4, 6, 6, 2), np.uint8)
  image[np.arange(4), 2, 3, a] = 255
  vector = np.stack([b, 1 - b], axis=1).astype(np.float32)
  action, _ = podrl.load(f'{tmp_path}/run')({'image': image, 'vector': vector})
  np.testing.assert_array_equal(action, a ^ b)


@pytest.mark.parametrize(
  'agent,core',
  [('ppo', 'none'), helpers.slow('impala', 'none'), helpers.slow('a2c', 'gru')],
)
def test_a_critic_sees_what_the_policy_must_do_without(agent, core, tmp_path):
  _, records, _ = podrl.train(
    'jax:helpers:privileged',
    agent,
    steps=30_000,
    workdir=f'{tmp_path}/run',
    config={
      'agent.gamma': 0.0,  # No action changes what follows.
      'agent.normalize_reward': False,
      'env.num_envs': 64,
      'network.recurrent': core,
      'num_devices': 1,
      'optimizer.learning_rate': 3e-3,
    },
  )
  # Half of the mean square: 9 / 2 for a critic that does not see b.
  assert records[-1]['value_loss'] < 0.5
  # By the kind of the task, the policy sees only `state`.
  chosen, state = podrl.load(f'{tmp_path}/run'), np.eye(2, dtype=np.float32)
  np.testing.assert_array_equal(chosen({'state': state})[0], [0, 1])
  for b in range(2):
    whole = {'state': state, 'privileged_state': state[[b, b]]}
    np.testing.assert_array_equal(chosen(whole)[0], [0, 1])


_MEMORY_CHAIN = ['--config.seed=1', '--config.total_env_steps=100_000']


@pytest.mark.parametrize(
  'agent,core',
  [
    helpers.slow('impala', 'lstm'),
    helpers.slow('impala', 'gru'),
    helpers.slow('ppo', 'gru'),
    helpers.slow('a2c', 'lstm'),
    helpers.slow('ppo', 'mingru'),
    helpers.slow('ppo', 'lru'),
    helpers.slow('ppo', 'gtrxl'),
  ],
)
def test_a_recurrent_agent_recalls_what_it_saw(agent, core, tmp_path):
  arguments = [f'--agent={agent}', f'--config.network.recurrent={core}']
  arguments += _MEMORY_CHAIN
  if core == 'gtrxl':  # An episode has 7 steps.
    arguments.append('--config.network.memory_steps=8')
  # A right answer gives 1 and a wrong one -1; a random policy gets 0.
  assert _evaluated('anakin_memory_chain', tmp_path, *arguments) >= 0.9


class _Repeat(gymnasium.Env):
  """The action must repeat two numbers in reverse order; each match gives 1."""

  observation_space = gymnasium.spaces.MultiDiscrete([3, 4], start=[1, -2])
  action_space = gymnasium.spaces.MultiDiscrete([4, 3], start=[-2, 1])

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self._obs = self.np_random.integers([1, -2], [4, 2])
    return self._obs, {}

  def step(self, action):
    assert self.action_space.contains(action)
    reward = float(np.sum(action == self._obs[::-1]))
    self._obs = self.np_random.integers([1, -2], [4, 2])
    return self._obs, reward, False, False, {}


@pytest.mark.parametrize('agent', ['ppo', helpers.slow('impala')])
def test_several_discrete_actions_are_learned(agent, tmp_path):
  gymnasium.register('Repeat-v0', _Repeat, max_episode_steps=8)
  arguments = (
    '--config.env.suite=gymnasium --config.env.name=Repeat-v0 '
    '--config.env.num_envs=32 --config.total_env_steps=30_000 '
    '--config.eval.num_episodes=32 --config.sebulba.actor_devices=0 '
    '--config.sebulba.learner_devices=0'
  ).split()
  name = 'sebulba_cartpole'
  # A random policy gets 8 (1/3 + 1/4) = 4.7; the best return is 16.
  found = _evaluated(name, tmp_path, f'--agent={agent}', *arguments)
  assert found >= 15.5
  # The policy takes the library's observations and gives its actions.
  policy, env = podrl.load(tmp_path / 'run'), _Repeat()
  obs, score = env.reset(seed=0)[0], 0.0
  for _ in range(32):
    action, _ = policy(obs[None])
    obs, reward, *_ = env.step(np.asarray(action)[0])
    score += reward
  assert score >= 62


@pytest.mark.slow
@pytest.mark.parametrize('agent', ['impala', 'ppo'])
def test_without_a_memory_there_is_nothing_to_recall(agent, tmp_path):
  arguments = [f'--agent={agent}', '--config.network.recurrent=none']
  arguments += [*_MEMORY_CHAIN, '--config.eval.num_episodes=1024']
  assert _evaluated('anakin_memory_chain', tmp_path, *arguments) <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize('seed', [1, 2, 3])
@pytest.mark.parametrize(
  'arguments,threshold',
  [
    (['anakin_pendulum'], -250),  # A random policy gets about -1,200.
    (['anakin_pendulum', '--config.env.name=MountainCarContinuous-v0'], 85),
    (['anakin_pendulum', '--agent=impala'], -250),
    (['anakin_pendulum', '--config.network.distribution=tanh_gaussian'], -250),
    (['anakin_memory_chain', '--agent=impala'], 0.9),
    (['anakin_breakout', '--agent=impala'], 15),
    (['anakin_breakout', '--agent=a2c'], 15),
    (['sebulba_half_cheetah'], 1500),
    (['sebulba_half_cheetah', '--agent=impala'], 1500),
    (['sebulba_half_cheetah', '--agent=a2c'], 1500),
    (['anakin_cartpole', '--agent=ppo'], 475),
    (['anakin_cartpole', '--agent=impala'], 475),
    (['anakin_cartpole', '--agent=a2c'], 475),
    (['anakin_pong', '--agent=ppo'], 900),
    (['anakin_pong', '--agent=impala'], 900),
    (['sebulba_cartpole', '--agent=ppo'], 475),
  ],
)
def test_larger_tasks_are_solved(arguments, threshold, seed, tmp_path):
  arguments = [*arguments, f'--config.seed={seed}']
  assert _evaluated(*arguments[:1], tmp_path, *arguments[1:]) >= threshold


_REACH = """
  import gymnasium
  import numpy as np


  class Reach(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-5, 5, (6,))
    action_space = gymnasium.spaces.Box(-2, 2, (2,))

    def reset(self, *, seed=None, options=None):
      super().reset(seed=seed)
      self.place, self.target = self.np_random.uniform(-1, 1, (2, 2))
      self.speed = np.zeros(2)
      return self.obs(), {}

    def obs(self):
      parts = self.place, self.speed, self.target
      return np.concatenate(parts).astype(np.float32)

    def step(self, action):
      self.speed = 0.9 * self.speed + 0.1 * action
      self.place = np.clip(self.place + 0.1 * self.speed, -5, 5)
      distance = np.linalg.norm(self.place - self.target)
      return self.obs(), -float(distance), False, False, {}


  gymnasium.register('Reach-v0', Reach, max_episode_steps=100)
"""


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1, 2])
@pytest.mark.parametrize(
  'name,threshold',
  [
    ('CartPole-v1', 475),
    ('Pong-misc', 900),
    ('Pendulum-v1', -250),
    ('MemoryChain-bsuite', 0.9),
    ('LunarLander-v2', 200),
    ('HalfCheetah-v4', 1500),
    ('MiniGrid-Empty-5x5-v0', 0.9),
    # Without actions, the return is about -105. The acceleration
    # 10 (target - place) - 4 speed gives about -8.
    ('reach:Reach-v0', -15),
  ],
)
def test_a_name_is_enough_to_learn(name, threshold, seed, tmp_path):
  (tmp_path / 'reach.py').write_text(textwrap.dedent(_REACH))
  command = ['podrl', 'train', name, f'--seed={seed}', '--workdir=run']
  # Drop the tests' flags, which make programs compile fast but run slowly.
  environment = os.environ | {'XLA_FLAGS': ''}
  command = [sys.executable, '-m', *command]
  subprocess.run(command, cwd=tmp_path, env=environment, check=True)
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['eval_return'] >= threshold
