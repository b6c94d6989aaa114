"""The model of scaling: how long an update takes on n cores, and why.

update(n) = update(1) + optimiser steps x all-reduce(n) + waiting(n)
"""

from collections.abc import Sequence
import math
import statistics
from typing import NamedTuple

import numpy as np

from podrl.tools.chips import Chip, all_reduce_seconds
from podrl.tools.measure import Times
from podrl.tools.program import Work

SIZES = tuple(2**i for i in range(12))


class Single(NamedTuple):
  """One core's update, without others.

  Attributes:
    alone: seconds.
    busy: seconds where other cores work too.
    deviation: seconds; the slowest of n is `expected_maximum(n)` of these late.
    limit: what takes most of it.
  """

  alone: float
  busy: float
  deviation: float
  limit: str


class Prediction(NamedTuple):
  """An update on n cores.

  Attributes:
    num_cores: n.
    seconds: of the whole.
    all_reduce: seconds of it, of all optimiser steps.
    waiting: seconds of it.
    efficiency: one core's seconds over these.
    steps_per_second: environment steps, of all cores.
    limit: what costs most.
  """

  num_cores: int
  seconds: float
  all_reduce: float
  waiting: float
  efficiency: float
  steps_per_second: float
  limit: str


def expected_maximum(num_draws: int) -> float:
  """Of so many standard normals: integral of x d(Phi(x)^n)."""
  if num_draws == 1:
    return 0.0
  x = np.linspace(-8.0, 8.0, 4001)
  power = np.asarray([statistics.NormalDist().cdf(v) for v in x]) ** num_draws
  return float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(power)))


def robust_deviation(values: np.ndarray) -> float:
  """The deviation of the normal that has these quartiles."""
  low, high = np.percentile(values, [25, 75])
  return float(high - low) / 1.349


def roofline(work: Work, chip: Chip, dtype: str) -> tuple[float, str]:
  """The least seconds that a program takes, and what bounds it.

  max(FLOPs / peak, bytes / bandwidth, operations x the least time of one).

  Source: Williams et al. 2009, Roofline; its last term is not theirs.
  """
  peak = chip.peak_bfloat16 if dtype == 'bfloat16' else chip.peak_float32
  return max(
    (work.flops / peak, 'compute'),
    (work.num_bytes / chip.memory_bandwidth, 'memory'),
    (work.operations * chip.operation_seconds, 'operations'),
  )


def scale(
  seconds: float, work: Work, local: Chip, chip: Chip, dtype: str
) -> tuple[float, str]:
  """What takes so long here, on another chip, and what bounds it there."""
  least, limit = roofline(work, chip, dtype)
  ratio = (
    roofline(work._replace(operations=0), chip, dtype)[0]
    / (roofline(work, local, 'float32')[0])
  )
  return max(
    (seconds * ratio, limit if limit != 'operations' else 'compute'),
    (least, limit),
  )


def single(
  times: Times,
  act: Work,
  learn: Work,
  local: Chip,
  chip: Chip,
  dtype: str,
  overlaps: bool,
) -> Single:
  """One core's update on a chip.

  An accelerator runs nothing else: what varies there is the host's share, for
  which an update waits once. On this machine's cores what disturbs one is taken to
  come and go between an update's k all-reduces: there the seconds deviate by
  1 / sqrt(k) of what the update's do, and the slowest is waited for k times. (Of
  what lasts longer that is too much, of two processes here it was nearer than once.)

  Args:
    times: measured here.
    act: an unroll's work.
    learn: an update's work.
    local: this machine's core.
    chip: the chip, perhaps the same.
    dtype: of the network.
    overlaps: whether Sebulba's environments step while the learner learns.
  """
  alone, busy = float(np.median(times.alone)), float(np.median(times.busy))
  deviation = robust_deviation(times.busy)
  if chip is local:
    deviation *= math.sqrt(max(1, learn.num_all_reduces))
  both = Work(*np.add(act, learn))
  if not times.stages:  # Anakin.
    if chip is local:
      return Single(alone, busy, deviation, roofline(both, local, 'float32')[1])
    parts = [roofline(x, local, 'float32')[0] for x in (act, learn)]
    scaled = [
      scale(alone * part / sum(parts), work, local, chip, dtype)
      for part, work in zip(parts, (act, learn))
    ]
    seconds = sum(x for x, _ in scaled)
    return Single(seconds, seconds, 0.0, max(scaled)[1])
  environment, inference = (
    times.stages[x] for x in ('environment', 'inference')
  )
  update = times.stages['update'] + times.stages['hand_off']
  if chip is local:
    return Single(
      alone,
      busy,
      deviation,
      'environments'
      if (environment > inference + update)
      else roofline(both, local, 'float32')[1],
    )
  environment /= chip.host_cpus
  inference, _ = scale(inference, act, local, chip, dtype)
  update, limit = scale(update, learn, local, chip, dtype)
  device = inference + update
  seconds = (
    max(environment + inference, device) if overlaps else (environment + device)
  )
  is_host = environment > (update if overlaps else device)
  return Single(
    seconds,
    seconds,
    deviation / busy * environment,
    'environments' if is_host else limit,
  )


def predict(
  base: Single,
  learn: Work,
  chip: Chip,
  steps_per_core: int,
  sizes: Sequence[int] = SIZES,
) -> list[Prediction]:
  """Updates on several numbers of cores.

  Args:
    base: one core's.
    learn: its all-reduces.
    chip: that links them.
    steps_per_core: environment steps in one update.
    sizes: numbers of cores.
  """
  rows = []
  for n in sizes:
    own = base.alone if n == 1 else base.busy
    reducing = learn.num_all_reduces * all_reduce_seconds(
      learn.all_reduce_bytes, n, chip
    )
    waiting = base.deviation * expected_maximum(n)
    seconds = own + reducing + waiting
    _, limit = max(
      (own, base.limit), (reducing, 'interconnect'), (waiting, 'waiting')
    )
    rows.append(
      Prediction(
        n,
        seconds,
        reducing,
        waiting,
        base.alone / seconds,
        n * steps_per_core / seconds,
        limit,
      )
    )
  return rows
