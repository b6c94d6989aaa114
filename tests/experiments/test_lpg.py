"""Tests the experiment that learns an update rule."""

import importlib.util

import helpers
import jax
import numpy as np
import pytest


@pytest.fixture(scope='module')
def lpg():
  path = helpers.ROOT / 'experiments/anakin_lpg.py'
  spec = importlib.util.spec_from_file_location('anakin_lpg', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_a_task_pays_as_often_as_it_punishes(lpg):
  for seed in range(5):
    following, reward, is_end = lpg.sample_task(jax.random.key(seed))
    assert following.shape == (25, 4)
    assert np.all((following >= 0) & (following < 25))
    assert np.sum(reward == 1) == np.sum(reward == -1) in (1, 2, 3)
    assert not np.any(is_end & (reward == 0))


def test_the_rule_learns_from_the_agents_rewards(lpg):
  first, _ = lpg.learn_rule(0)
  rule, rewards = lpg.learn_rule(1)
  assert rewards.shape == (1, 48)
  changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, rule)
  # Adam moves each number by at most its learning rate.
  assert all(0 < x < 1.01e-3 for x in jax.tree.leaves(changes))


@pytest.mark.slow
def test_the_rule_trains_an_agent_on_another_environment(lpg):
  rule, _ = lpg.learn_rule(200)
  assert lpg.train_on_catch(rule)[-50:].mean() >= 0.9
