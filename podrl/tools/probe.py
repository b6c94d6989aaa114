"""A process that measures: updates, all-reduces, or what a core can do.

  python -m podrl.tools.probe TASK CORE

It is pinned to one core, reads its arguments as a line of JSON from its standard
input, makes ready with one CPU device, and then runs as often as each further
line says. Rows of measurements are its answers. `podrl.tools.measure` starts it.
"""

from collections.abc import Callable
import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podrl.core.learner import make_learner
from podrl.drivers import spmd
from podrl.records import workdir
from podrl.run import build, cluster
from podrl.run import devices as layout
from podrl.types import Agent

SIZES = (256, 65_536, 262_144, 1_048_576)  # Float32s of one all-reduce.
_NUM_STEPS = 20  # Optimiser steps, so all-reduces, in one call of the probe.
_PR_SET_PDEATHSIG = 1  # Of Linux's prctl.

Row = dict[str, float]


def _join(coordinator: str, process: int) -> None:
  """Joins the two of a pair; an empty coordinator leaves them apart."""
  if coordinator:
    cluster.start(
      coordinator,
      2,
      process,
      start_seconds=60.0,
      heartbeat_seconds=30.0,
      hang_seconds=3600.0,
    )


def _train(
  fields: dict[str, Any], coordinator: str = '', process: int = 0
) -> Callable[[int], list[Row]]:
  """Updates of an experiment: `count -> rows`, one for each."""
  _join(coordinator, process)
  config = workdir.as_config(fields)
  layout.set_up_jax(config, 2 if coordinator else 1)
  driver = build.make_run(config).driver
  driver.start()

  def run(count: int) -> list[Row]:
    reports = [driver.advance(1)[0] for _ in range(count)]
    if not all(x.is_finite for x in reports):
      raise ValueError('the loss is NaN or infinite')
    return [{'seconds': x.seconds, **x.stages} for x in reports]

  return run


def _all_reduces(
  coordinator: str = '', process: int = 0
) -> Callable[[int], list[Row]]:
  """Updates of the learner with a loss that costs next to nothing.

  What they take longer among two processes than in one is their all-reduces.
  """
  spmd.set_num_cpu_devices(1, 2)
  _join(coordinator, process)
  mesh = spmd.make_mesh(jax.devices())

  def make(size: int) -> Callable[[], float]:
    agent = Agent(
      init=lambda key: jnp.ones(size),
      initial_carry=lambda n: (),
      act=None,
      prepare=lambda params, trajectory, mean: trajectory,
      loss=lambda params, target, batch, key: (
        jnp.sum(params * params) * jnp.mean(batch),
        {},
      ),
    )
    learner = make_learner(agent, optax.sgd(1e-6), num_epochs=_NUM_STEPS)
    update = spmd.map_update(learner, mesh)
    key = spmd.place(jax.random.key(0), mesh, spmd.REPLICATED)
    state = spmd.place(
      learner.init(jax.random.key(0), None), mesh, spmd.LEARNER_STATE
    )
    data = spmd.place(jnp.ones((1, 2)), mesh, spmd.TRAJECTORY)

    def call() -> float:
      nonlocal state
      start = time.perf_counter()
      state, _ = jax.block_until_ready(
        update(state.params, state._replace(params=()), (data,), key)
      )
      return (time.perf_counter() - start) / _NUM_STEPS

    return call

  calls = {str(size): make(size) for size in SIZES}
  return lambda count: [
    {size: call() for size, call in calls.items()} for _ in range(count)
  ]


def _peaks() -> Callable[[int], list[Row]]:
  """One core's matrix products, FLOP/s, and memory, bytes/s."""
  spmd.set_num_cpu_devices(1)
  side, size = 1024, 1 << 24
  matrix, vector = jnp.ones((side, side)), jnp.ones(size)
  multiply = jax.jit(lambda x: x @ x)
  add = jax.jit(lambda x: x + 1, donate_argnums=0)  # Fresh pages would cost.

  def timed(function: Callable, x: jax.Array) -> tuple[float, jax.Array]:
    start = time.perf_counter()
    y = function(x).block_until_ready()
    return time.perf_counter() - start, y

  def run(count: int) -> list[Row]:
    nonlocal vector
    rows = []
    for _ in range(count):
      multiplying, _ = timed(multiply, matrix)
      adding, vector = timed(add, vector)
      rows.append(
        {'flops': 2 * side**3 / multiplying, 'bytes': 2 * 4 * size / adding}
      )
    return rows

  return run


_TASKS = {'train': _train, 'all_reduces': _all_reduces, 'peaks': _peaks}


def main(task: str, core: str) -> None:
  """Measures as long as somebody asks."""
  os.sched_setaffinity(0, {int(core)})  # Before JAX makes its threads.
  # An all-reduce would wait on for ever, were the parent gone.
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  # What libraries print is no reply.
  replies = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)

  def say(rows: list[Row]) -> None:
    print(json.dumps(rows), file=replies, flush=True)

  run = _TASKS[task](**json.loads(sys.stdin.readline()))
  say(run(1))
  for line in sys.stdin:
    say(run(json.loads(line)))


if __name__ == '__main__':
  main(*sys.argv[1:])
