"""Makes one record of several: of updates, processes and agents.

This file needs only numpy, so that commands which read records start quickly.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
import operator
from typing import NamedTuple

import numpy as np

from podrl.records.workdir import Record

# What `energy.Meter` adds to the stages of a report; neither is in seconds.
JOULES, MOVES = 'joules', 'counter_moves'
_NUM_RESAMPLES = 2000  # Number of resampled means per bootstrap interval.


class Reduction(NamedTuple):
  """How the values of one metric become one value."""

  updates: Callable = np.mean  # Combines the updates of a window.
  processes: Callable = np.mean  # Combines the processes of a run.
  seeds: Callable = np.mean  # Combines the agents of a run.


_COUNT = Reduction(operator.itemgetter(-1), np.sum)
_RATE = Reduction(seeds=np.sum)
_ROUNDED_DOWN = Reduction(seeds=lambda x: sum(x) // len(x))
# All other metrics are averaged, for example losses.
REDUCTIONS = defaultdict(Reduction) | {
  # Steps are rounded down and reset steps up, so that their sum stays exact.
  'env_steps': _ROUNDED_DOWN,
  'frames': _ROUNDED_DOWN,
  'num_reset_steps': Reduction(seeds=lambda x: -(-sum(x) // len(x))),
  'num_actors': _COUNT,
  'num_unrolls_dropped': _COUNT,
  'num_actor_waits': _COUNT,
  'policy_lag_max': Reduction(np.max, np.max),
  'largest_observation': Reduction(np.max, np.max, np.max),
  JOULES: Reduction(processes=np.sum),
  MOVES: Reduction(processes=np.min),
  'joules_per_second': _RATE,
  'steps_per_second': _RATE,
  'frames_per_second': _RATE,
  'updates_per_second': _RATE,
  'predictions_per_second': _RATE,
}


def bootstrap(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Computes a 95 % confidence interval of the mean by resampling.

  Every call draws the same random samples.

  Args:
    values: float64 `[N, ...]`, one row for each run or episode.

  Returns:
    The lower end and the upper end of the interval, `[...]` each.

  Source: Efron 1979, Bootstrap Methods; the percentile interval.
  """
  rng = np.random.default_rng(0)
  draws = rng.integers(len(values), size=(_NUM_RESAMPLES, len(values)))
  means = np.stack([values[draw].mean(0) for draw in draws])
  return tuple(np.percentile(means, [2.5, 97.5], axis=0))


def spread(
  returns: Sequence[float], names: Sequence[str], are_alike: bool
) -> Record:
  """Returns fields that say how the evaluated returns of N agents differ.

  Args:
    returns: float `[N]`, the mean return of each agent.
    names: `[N]`, the names of the agents.
    are_alike: whether the agents differ only in their seeds. If not, the mean
      has no interval.
  """
  values = np.array(returns, np.float64)
  worst = int(np.argmin(values))  # If there is a NaN, this is its index.
  fields = {
    'eval_return_std': np.std(values).item(),
    'eval_return_worst': values[worst].item(),
    'eval_return_worst_agent': names[worst],
  }
  if are_alike:
    low, high = map(float, bootstrap(values))
    fields |= {'eval_return_low': low, 'eval_return_high': high}
  return fields


def merge_seeds(
  records: Sequence[Record],
  names: Sequence[str] = (),
  *,
  are_alike: bool = True,
  in_turn: bool = False,
) -> Record:
  """Merges records of several agents; keeps only numbers that all records have.

  Args:
    names: the names of the agents; `are_alike`: see `spread`.
    in_turn: whether the agents ran one after another. In this case, the rates
      of the agents are averaged instead of added.
  """
  merged = {}
  for name in records[0]:
    values = [x[name] for x in records if isinstance(x.get(name), int | float)]
    if len(values) == len(records):
      reduce = REDUCTIONS[name].seeds
      value = float(
        (np.mean if in_turn and reduce is np.sum else reduce)(values)
      )
      is_count = all(isinstance(x, int) for x in values)
      merged[name] = round(value) if is_count else value
  if names and all('eval_return' in x for x in records):
    # In a record that was read from a file, None stands for NaN.
    returns = [np.float64(x['eval_return']).item() for x in records]
    merged['eval_return'] = float(np.mean(returns))
    merged |= spread(returns, names, are_alike)
  return merged
