"""Where Sebulba's time goes."""

from collections.abc import Mapping, Sequence

import numpy as np

from podrl.actor import PARKED, STAGES


def add_up(learner: Mapping[str, float],
           actors: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Seconds in each stage, by the keys of records; actors' are means."""
  seconds = {**learner} | {
      stage: np.mean([x[stage] for x in actors]) for stage in actors[0]}
  return {f'time_{stage}': float(x) for stage, x in seconds.items()}


def leave_out_parked(stages: dict[str, float]) -> dict[str, float]:
  """Of actors the means over those that were not parked meanwhile."""
  names = [f'time_{stage}' for stage in STAGES]
  active = max(sum(stages[name] for name in names), 1e-9)
  scale = 1 + stages[f'time_{PARKED}'] / active
  return {k: x * scale if k in names else x
          for k, x in stages.items() if k != f'time_{PARKED}'}
