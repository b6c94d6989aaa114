"""Anakin's driver as the command line runs it: calls, reported."""

from collections.abc import Callable
import time

import chex
import jax
import numpy as np

from podrl.drivers import spmd
from podrl.drivers.anakin import Anakin, AnakinState
from podrl.types import LearnerState, Report


class Runner:
  """Runs the driver from the host, call by call.

  Args:
    driver: of `make_anakin`.
    rng_key: of the whole run; `[S]` for several seeds.
    max_updates: bound of the updates in one call.
    predictions_per_update: this process's environments times an unroll's steps.
  """

  error = None  # There are no threads: what is wrong is raised at once.

  def __init__(
    self,
    driver: Anakin,
    rng_key: chex.PRNGKey,
    max_updates: int,
    predictions_per_update: int,
  ):
    self._driver = driver
    self._rng_key = rng_key
    self._max_updates = max_updates
    self._predictions_per_update = predictions_per_update
    self._state: AnakinState | None = None

  def start(
    self,
    restore: Callable[[AnakinState], tuple[AnakinState, dict]] = lambda x: (
      x,
      {},
    ),
  ) -> None:
    """Makes the state and compiles.

    Args:
      restore: from the first state to the one to begin with, and to what
        `progress` returned then.
    """
    state, _ = restore(self._driver.init(self._rng_key))
    # No update: it compiles, so that the first window is not the compiler's.
    self._state, _ = jax.block_until_ready(
      self._driver.train(state, np.int32(0))
    )

  @property
  def state(self) -> AnakinState | None:
    """All of the run, once started; the next `advance` deletes it."""
    return self._state

  @property
  def learner(self) -> LearnerState | None:
    """The learner's part of it."""
    return self._state and self._state.learner

  def progress(self) -> dict:
    """What the state does not hold, as JSON: nothing."""
    return {}

  def advance(self, num_updates: int) -> list[Report]:
    """Runs so many updates, or as many as one call may; a report for each seed."""
    num_updates = min(num_updates, self._max_updates)
    start = time.perf_counter()
    self._state, records = self._driver.train(
      self._state, np.int32(num_updates)
    )
    records = spmd.fetch(records)
    seconds = time.perf_counter() - start
    loss = records.metrics['loss'].reshape(self._max_updates, -1)
    if not records.is_finite:
      num_updates = int(np.argmin(np.isfinite(loss).all(1)))

    def report(seed: int) -> Report:
      rows = jax.tree.map(
        lambda x: (
          x[:num_updates, ..., seed]
          if self._rng_key.ndim
          else (x[:num_updates])
        ),
        (records.metrics, records.episodes),
      )
      return Report(
        *rows,
        num_predictions=num_updates * self._predictions_per_update,
        seconds=seconds,
        stages={},
        own={},
        is_finite=bool(
          records.is_finite or np.isfinite(loss[num_updates, seed])
        ),
      )

    return [report(seed) for seed in range(loss.shape[1])]

  def stop(self) -> None:
    """Nothing: a call of `advance` ends by itself."""

  def close(self) -> list[str]:
    """Nothing; returns the names of threads that hang, of which it has none."""
    return []
