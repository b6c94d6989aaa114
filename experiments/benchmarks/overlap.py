"""Measures how well Sebulba overlaps acting and learning; not a test.

  python experiments/benchmarks/overlap.py [--repeats=3]

Each of two actors has a pool of environments, which sleeps in each step. The
learner sleeps in each update. The cost of an update is the length of this sleep
divided by the length of an unroll. The costs go from a quarter to four. For
each cost and each mode, the table has medians of four rates, in updates per
second:

  environment  the environments alone
  acting       inference alone, on an observation that does not change
  update       updates alone
  training     all parts together

Training cannot be faster than the slowest part. If training is nearly as fast
as this part, the parts overlap well.
"""

import argparse
import time

import jax
import numpy as np
import throughput

from podrl.drivers import sebulba, spmd
from podrl.run import build
from podrl.run.config import default_fields
from podrl.types import Discrete, EnvSpec, HostEnv, Learner, TimeStep

_NUM_ACTORS, _NUM_ENVS, _LENGTH = 2, 8, 10
_STEP_SECONDS = 0.05
_COSTS = (0.25, 0.5, 1.0, 2.0, 4.0)  # Update time / unroll time.
_UPDATES = 5  # Updates in one measurement.


def make_env(seconds: float) -> HostEnv:
  """Makes a pool that sleeps in each step; every episode has 9 steps."""
  spec = EnvSpec(
    jax.ShapeDtypeStruct((4,), np.float32), False, Discrete(2), 1, 9
  )
  count = 0

  def timestep(is_first: bool) -> TimeStep:
    return TimeStep(
      np.ones((_NUM_ENVS, 4), np.float32),
      np.full(_NUM_ENVS, 1.0 - is_first, np.float32),
      np.full(_NUM_ENVS, float(count % 10 != 9), np.float32),
      np.full(_NUM_ENVS, is_first),
    )

  def step(action: np.ndarray) -> TimeStep:
    nonlocal count
    del action
    count += 1
    time.sleep(seconds)
    return timestep(count % 10 == 0)

  return HostEnv(spec, lambda: timestep(True), step, lambda: None)


def slow(learner: Learner, seconds: float) -> Learner:
  """Returns the learner with updates that take `seconds` longer."""

  def sleep(loss: np.ndarray) -> np.ndarray:
    time.sleep(seconds)
    return loss

  def update(state, trajectory, rng_key):
    state, metrics = learner.update(state, trajectory, rng_key)
    loss = metrics['loss']
    return state, metrics | {
      'loss': jax.pure_callback(
        sleep, jax.ShapeDtypeStruct(loss.shape, loss.dtype), loss
      )
    }

  return learner._replace(update=update)


def make_driver(cost: float, mode: str) -> sebulba.Sebulba:
  """Makes the driver of two actors and a learner that sleep."""
  config = default_fields('impala', 'Sebulba')
  config['optimizer.anneal'] = False  # The number of updates is not known.
  device = jax.local_devices()[0]
  spec = make_env(0).spec
  agent = build.make_agent(config, spec)
  learner = build.make_learner(config, agent, spec, 1, 1)
  settings = sebulba.Settings(
    num_envs=_NUM_ENVS,
    unroll_length=_LENGTH,
    actors_per_device=_NUM_ACTORS,
    unrolls_per_update=_NUM_ACTORS,
    deterministic=mode == 'deterministic',
    max_lag=1,
    hang_seconds=60.0,
  )
  return sebulba.Sebulba(
    lambda _: make_env(_STEP_SECONDS),
    agent,
    slow(learner, cost * _LENGTH * _STEP_SECONDS),
    spmd.make_mesh([device]),
    [device],
    settings,
    jax.random.key(0),
  )


def main() -> None:
  """Measures all rates and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--repeats',
    type=int,
    default=3,
    choices=range(1, 1000),
    metavar='N',
    help='number of measurements',
  )
  repeats = parser.parse_args().repeats
  # A run uses this setting too.
  jax.config.update('jax_cpu_enable_async_dispatch', False)
  print(
    f'Updates per second, medians of {repeats} repeats; each unroll sleeps '
    f'{_LENGTH * _STEP_SECONDS:g} s'
  )
  columns = (
    'mode',
    'cost',
    'environment',
    'acting',
    'update',
    'training',
    'of slowest',
  )
  print(' '.join(f'{x:>13}' for x in columns))
  for mode in 'deterministic', 'asynchronous':
    for cost in _COSTS:
      functions, _, close = throughput.sebulba_programs(make_driver(cost, mode))
      rates = {name: [] for name in functions}
      try:
        for repeat in range(repeats + 1):
          for name, function in functions.items():
            # Use the unrolls that actors made while other parts ran.
            ahead = 2 if name == 'training' else 0
            function(ahead)
            start = time.perf_counter()
            function(_UPDATES)
            if repeat:  # The first repeat compiles.
              rates[name].append(_UPDATES / (time.perf_counter() - start))
      finally:
        close()
      row = {name: np.median(x) for name, x in rates.items()}
      share = row['training'] / min(
        x for name, x in row.items() if name != 'training'
      )
      cells = (
        mode,
        f'{cost:g}',
        *(f'{x:.2f}' for x in row.values()),
        f'{share:.1%}',
      )
      print(' '.join(f'{x:>13}' for x in cells), flush=True)


if __name__ == '__main__':
  main()
