"""Functions for scores over several tasks.

  python experiments/benchmarks/scores.py

As a command, it measures only the returns of random actions, and writes them to
docs/levels.csv.

A score is 0 at the return of random actions and 1 at the best level that is
known: the largest possible return or, where there is none, the best published
one. docs/published.csv has what others published.

Source of the aggregates: Agarwal et al. 2021, arXiv:2108.13264.
"""

from collections.abc import Callable, Sequence
import csv
import pathlib
from typing import Any

import numpy as np

_DOCS = pathlib.Path(__file__).resolve().parents[2] / 'docs'
_NUM_EPISODES = {'anakin': 1024, 'sebulba': 128}
Row = dict[str, str]
Scores = Sequence[np.ndarray]  # The scores of the seeds `[N]` of each task.


def read(name: str) -> list[Row]:
  """Reads docs/NAME.csv."""
  with (_DOCS / f'{name}.csv').open(newline='') as file:
    return list(csv.DictReader(file))


def random_levels() -> dict[str, float]:
  """Returns the mean return of random actions, by environment."""
  return {x['environment']: float(x['random']) for x in read('levels')}


def best_levels() -> dict[str, float]:
  """Returns the return whose score is 1, by environment."""
  best: dict[str, float] = {}
  for row in read('published'):
    name, level = row['task'].split()[-1], float(row['published'])
    best[name] = max(level, best.get(name, level))
  largest = {x['environment']: x['largest'] for x in read('levels')}
  return best | {k: float(x) for k, x in largest.items() if x}


def scores() -> dict[str, dict[str, np.ndarray]]:
  """Returns the scores of the seeds `[N]`, by agent and environment.

  An environment counts once: if several tasks have it, the first one counts.
  A run with one device counts as much as a run with two.
  """
  low, best = random_levels(), best_levels()
  found: dict[str, dict[str, np.ndarray]] = {}
  tasks: dict[str, str] = {}
  rows = read('returns')
  for row in rows:
    tasks.setdefault(row['task'].split()[-1], row['task'])
  groups: dict[tuple[str, str], list[Row]] = {}
  for row in rows:
    groups.setdefault((row['task'], row['agent']), []).append(row)
  for env, task in tasks.items():
    for (name, agent), seeds in groups.items():
      if name == task and env in best:
        values = np.array([float(x['eval_return']) for x in seeds])
        score = (values - low[env]) / (best[env] - low[env])
        found.setdefault(agent, {})[env] = score
  return found


def profile(tasks: Scores, points: np.ndarray) -> np.ndarray:
  """Returns the share of runs whose score is above each point (section 4.2).

  All tasks have the same weight. `points` and the result are `[P]`.
  """
  return np.mean([np.mean(x[:, None] > points, 0) for x in tasks], 0)


def interquartile_mean(tasks: Scores) -> float:
  """Returns the mean of the middle half of all runs (section 4.3).

  A run has the weight 1 / N, where N is the number of seeds of its task.
  """
  weights = np.concatenate([np.full(len(x), 1 / len(x)) for x in tasks])
  values = np.concatenate(tasks)
  order = np.argsort(values)
  ends = np.cumsum(weights[order]) / len(tasks)
  middle = np.diff(np.clip(ends, 0.25, 0.75), prepend=0.25)
  return float(2 * np.sum(middle * values[order]))


def improvement(tasks: Scores, others: Scores) -> float:
  """Returns the probability that a run of an agent beats one of another.

  It is the mean over tasks; equal scores count as one half (section 4.3).
  """
  shares = [
    np.mean((x[:, None] > y) + 0.5 * (x[:, None] == y))
    for x, y in zip(tasks, others, strict=True)
  ]
  return float(np.mean(shares))


def interval(
  statistic: Callable[..., Any], *agents: Scores
) -> tuple[np.ndarray, np.ndarray]:
  """Bootstraps the 95 % interval of a statistic of agents (section 4.1).

  The seeds of each task are drawn again, separately from those of other tasks.
  """
  rng = np.random.default_rng(0)
  samples = [
    statistic(*([rng.choice(x, len(x)) for x in tasks] for tasks in agents))
    for _ in range(2000)
  ]
  low, high = np.percentile(samples, [2.5, 97.5], axis=0)
  return low, high


def _measure(name: str) -> float:
  """Returns the mean return of the first episodes with random actions."""
  import jax

  from podrl import envs
  from podrl.types import Discrete

  suite, name, _ = envs.find_task(name)
  entry, rng = envs.SUITES[suite], np.random.default_rng(0)
  num_envs = _NUM_EPISODES[entry.architecture]
  if entry.architecture == 'anakin':
    env = entry.make(name)
    keys = jax.random.split(jax.random.key(0), num_envs)
    state, _ = jax.jit(env.reset)(keys)
    advance = jax.jit(env.step)
  else:
    env = entry.make(name, num_envs, 0, num_threads=2)
    env.reset()
  space = env.spec.action
  is_over, total = np.zeros(num_envs, bool), np.zeros(num_envs)
  while not is_over.all():
    if isinstance(space, Discrete):
      action = rng.integers(space.num_actions, size=num_envs, dtype='i4')
    else:
      shape = num_envs, *space.shape
      action = rng.uniform(space.low, space.high, shape).astype('f4')
    if entry.architecture == 'anakin':
      state, timestep = advance(state, action)
    else:
      timestep = env.step(action)
    is_over |= np.asarray(timestep.is_first)
    total += np.where(is_over, 0, timestep.reward)
  return float(total.mean())


def main() -> None:
  rows = read('levels')
  for row in rows:
    row['random'] = f'{_measure(row["environment"]):.4g}'
  with (_DOCS / 'levels.csv').open('w', newline='') as file:
    writer = csv.DictWriter(file, [*rows[0]], lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)


if __name__ == '__main__':
  main()
