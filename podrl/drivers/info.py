"""Averages what environments report in `TimeStep.info`.

Both architectures compute the same numbers: for each episode that ended, and
each name, the mean over the episode's steps. Reset steps do not count, nor do
values that are NaN or infinite.
"""

from collections.abc import Iterable, Mapping, Sequence
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from podrl.types import Array, InfoSums, Tree

_MAX_NAMES = 100  # An environment could invent new names in every step.


class Running(NamedTuple):
  """Sums over the steps of each episode so far; leaves `[B, K]`.

  The K columns are in the order of the sorted names. A checkpoint contains
  them, and a name may contain characters that no file name can contain.
  """

  total: Array  # Float32, sum of the values that count.
  number: Array  # Int32, number of these values.


def begin(info: Tree, num_envs: int) -> Tree:
  """Returns a `Running` without values; `()` if there is no `info`."""
  if not info:
    return ()
  shape = num_envs, len(info)
  return Running(jnp.zeros(shape), jnp.zeros(shape, jnp.int32))


def step(
  running: Tree, info: Tree, is_first: Array
) -> tuple[Tree, dict[tuple[str, ...], InfoSums]]:
  """Adds the `info` of one step to a `Running`.

  Args:
    running: what `begin` returned, or an earlier call of this function.
    info: `TimeStep.info`, `[B]` each.
    is_first: bool `[B]`.

  Returns:
    The new `Running`, and what `by_name` takes: a dict whose only key is the
    tuple of the names. Its value is the `InfoSums` of the episodes that ended
    before this step, with leaves `[B, K]`. Without `info`, both are empty.

  Raises:
    ValueError: if `info` has other names or shapes than it should.
  """
  num_names = running.total.shape[1] if running else 0
  if len(info) != num_names:
    raise ValueError(
      f'the info of the environments has {num_names} names after `reset`, but '
      f'{len(info)} after `step`: {", ".join(sorted(info)) or "none"}; return '
      'the same names'
    )
  if not info:
    return (), {}
  for name, x in info.items():
    if np.shape(x) != is_first.shape:
      raise ValueError(
        f'info[{name!r}] of {is_first.size} environments has shape '
        f'{np.shape(x)}; it must be one number for each environment'
      )
  names = tuple(sorted(info))
  values = jnp.stack([jnp.asarray(info[x], jnp.float32) for x in names], axis=1)
  is_reset = is_first[:, None]
  has_ended = is_reset & (running.number > 0)
  mean = running.total / jnp.maximum(running.number, 1)
  ended = {names: InfoSums(jnp.where(has_ended, mean, 0.0), has_ended)}
  counts = jnp.isfinite(values) & ~is_reset
  total = jnp.where(is_reset, 0.0, running.total)
  number = jnp.where(is_reset, 0, running.number)
  running = Running(total + jnp.where(counts, values, 0.0), number + counts)
  return running, ended


def by_name(ended: dict[tuple[str, ...], InfoSums]) -> dict[str, InfoSums]:
  """Sums what `step` returned in T steps, with leaves `[T, B, K]`."""
  found = {}
  for names, sums in ended.items():
    means = jnp.sum(sums.mean_sum, axis=(0, 1))
    numbers = jnp.sum(sums.num_episodes, axis=(0, 1), dtype=jnp.int32)
    for i, name in enumerate(names):
      found[name] = InfoSums(means[i], numbers[i])
  return found


class Averages:
  """Computes the same sums on the host, for one actor's environments.

  A name may be missing in some steps. Only the first 100 names count.
  """

  def __init__(self):
    self._running: dict[str, tuple[np.ndarray, np.ndarray]] = {}

  def add(
    self, infos: Sequence[Tree], is_first: np.ndarray
  ) -> dict[str, InfoSums]:
    """Returns the sums over the episodes that ended in one unroll.

    Args:
      infos: T times `TimeStep.info`, `[B]` each.
      is_first: bool `[T, B]`.
    """
    seen = dict.fromkeys([*self._running, *(k for x in infos for k in x)])
    if not seen:
      return {}
    num_envs = is_first.shape[1]
    missing = np.full(num_envs, np.nan, np.float32)
    # Segment 0 of an environment is the episode that was open before, and each
    # reset step begins the next segment. The last segment stays open.
    segment = np.cumsum(is_first, axis=0)
    last, env = segment[-1], np.arange(num_envs)
    shape = last.max() + 1, num_envs
    is_closed = np.arange(shape[0])[:, None] < last
    place = segment * num_envs + env
    found = {}
    for name in itertools.islice(seen, _MAX_NAMES):
      x = np.stack([dict(info).get(name, missing) for info in infos])
      counts = np.isfinite(x) & ~is_first
      size = shape[0] * num_envs
      total, number = (
        np.bincount(place[counts], weights, size).reshape(shape)
        for weights in (x[counts], None)
      )
      if name in self._running:
        before = self._running[name]
        total[0], number[0] = total[0] + before[0], number[0] + before[1]
      self._running[name] = total[last, env], number[last, env]
      has_ended = is_closed & (number > 0)
      means = total[has_ended] / number[has_ended]
      found[name] = InfoSums(means.sum().item(), has_ended.sum().item())
    return found


def add_up(parts: Iterable[Mapping[str, InfoSums]]) -> dict[str, InfoSums]:
  """Adds the sums of each name that occurs."""
  added: dict[str, InfoSums] = {}
  for part in parts:
    for name, sums in part.items():
      before: Any = added.get(name, (0, 0))
      added[name] = InfoSums(*(x + y for x, y in zip(before, sums)))
  return added


def to_columns(rows: Sequence[Mapping[str, InfoSums]]) -> dict[str, InfoSums]:
  """Returns the sums of N updates, `[N]` each; 0 where a name is missing."""
  names = dict.fromkeys(name for row in rows for name in row)
  return {
    name: InfoSums(
      *map(np.array, zip(*(row.get(name, (0.0, 0)) for row in rows)))
    )
    for name in names
  }
