"""Tests the scores over several tasks, and their statistics."""

import numpy as np
import pytest
from scipy import stats
import scores


def _rows(task, agent, num_devices, values):
  row = {'task': task, 'agent': agent, 'num_devices': str(num_devices)}
  return [row | {'eval_return': str(x)} for x in values]


def test_scores_go_from_random_actions_to_the_best_level(monkeypatch):
  tables = {
    'levels': [
      {'environment': 'Hill', 'random': '-200', 'largest': ''},
      {'environment': 'Pole', 'random': '20', 'largest': '500'},
    ],
    'published': [
      {'task': 'a Hill', 'published': '-100'},
      {'task': 'b Hill', 'published': '-110'},
      {'task': 'a Pole', 'published': '400'},
    ],
    'returns': [
      *_rows('a Hill', 'ppo', 1, [0]),
      *_rows('a Hill', 'ppo', 2, [-150, -90]),
      *_rows('b Hill', 'ppo', 2, [-200]),  # An environment counts once.
      *_rows('a Pole', 'ppo', 1, [260]),
      *_rows('a Lake', 'ppo', 1, [7]),  # It has no levels.
    ],
  }
  monkeypatch.setattr(scores, 'read', tables.__getitem__)
  found = scores.scores()
  assert {k: [*v] for k, v in found['ppo'].items()} == {
    'Hill': [2, 0.5, 1.1],
    'Pole': [0.5],
  }


def test_a_profile_gives_each_task_the_same_weight():
  tasks = [np.array([0.2, 0.6, 0.7, 0.9]), np.array([0.6])]
  shares = scores.profile(tasks, np.array([0.1, 0.5, 0.6, 0.8, 1]))
  np.testing.assert_allclose(shares, [1, (3 / 4 + 1) / 2, 1 / 4, 1 / 8, 0])


def test_the_interquartile_mean_is_that_of_all_runs():
  rng = np.random.default_rng(0)
  tasks = [rng.normal(size=8) for _ in range(3)]
  expected = stats.trim_mean(np.concatenate(tasks), 0.25)  # 6 of 24 each.
  assert scores.interquartile_mean(tasks) == pytest.approx(expected)
  # A task with half as many seeds has the same weight.
  tasks[0] = np.repeat(tasks[0][:4], 2)
  expected = scores.interquartile_mean(tasks)
  tasks[0] = tasks[0][::2]
  assert scores.interquartile_mean(tasks) == pytest.approx(expected)


def test_the_probability_of_improvement_is_that_of_mann_and_whitney():
  rng = np.random.default_rng(0)
  tasks = [rng.integers(5, size=n).astype(float) for n in (7, 4)]
  others = [rng.integers(5, size=n).astype(float) for n in (3, 9)]
  expected = [
    stats.mannwhitneyu(x, y).statistic / (len(x) * len(y))
    for x, y in zip(tasks, others)
  ]
  share = scores.improvement(tasks, others)
  assert share == pytest.approx(np.mean(expected))
  assert scores.improvement(others, tasks) == pytest.approx(1 - share)


def test_the_interval_draws_the_seeds_of_each_task_again():
  values = np.random.default_rng(1).normal(size=20)
  expected = stats.bootstrap(
    (values,), np.mean, method='percentile', rng=2
  ).confidence_interval
  # The other task has the same score in all seeds, and widens nothing.
  low, high = scores.interval(
    lambda tasks: np.mean(tasks[0]), [values, np.ones(3)]
  )
  assert low == pytest.approx(expected.low, abs=0.05)
  assert high == pytest.approx(expected.high, abs=0.05)
  low, high = scores.interval(
    lambda tasks: np.mean(tasks[1]), [values, np.ones(3)]
  )
  assert low == high == 1
