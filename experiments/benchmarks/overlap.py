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
from collections.abc import Callable
import threading
import time

import jax
import numpy as np

from podrl.drivers import actor as actor_lib
from podrl.drivers import sebulba, spmd
from podrl.run import build
from podrl.run.config import sebulba_config
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


def parts(cost: float, mode: str) -> tuple[dict[str, Callable], Callable]:
  """Returns a function `(num_updates) -> None` for each rate, and `close`."""
  config = sebulba_config('impala')
  config.optimizer.anneal = False  # The number of updates is not known.
  device = jax.local_devices()[0]
  mesh = spmd.make_mesh([device])
  spec = make_env(0).spec
  agent = build.make_agent(config, spec)
  learner = slow(
    build.make_learner(config, agent, spec, 1),
    cost * _LENGTH * _STEP_SECONDS,
  )
  settings = sebulba.Settings(
    num_envs=_NUM_ENVS,
    unroll_length=_LENGTH,
    actors_per_device=_NUM_ACTORS,
    unrolls_per_update=_NUM_ACTORS,
    deterministic=mode == 'deterministic',
    max_lag=1,
    hang_seconds=60.0,
  )
  driver = sebulba.Sebulba(
    lambda _: make_env(_STEP_SECONDS),
    agent,
    learner,
    mesh,
    [device],
    settings,
    jax.random.key(0),
  )

  variables = jax.jit(agent.init)(jax.random.key(1))
  functions = actor_lib.make_actor_functions(agent, lambda x: x, 1)
  actors = [
    actor_lib.Actor(
      i,
      make_env(0),
      functions,
      _LENGTH,
      device,
      [device],
      jax.random.key(2),
      i * _NUM_ENVS,
    )
    for i in range(_NUM_ACTORS)
  ]
  shards = [actor.compile(variables) for actor in actors]
  pools = [make_env(_STEP_SECONDS) for _ in actors]
  update = spmd.map_update(learner, mesh)
  trajectories = tuple(
    spmd.join_shards(x, mesh, spmd.TRAJECTORY) for x in shards
  )
  state = spmd.place(
    learner.init(jax.random.key(3), trajectories[0]), mesh, spmd.REPLICATED
  )
  key = spmd.place(jax.random.key(4), mesh, spmd.REPLICATED)

  def in_threads(function: Callable) -> Callable:
    def run(num_updates: int) -> None:
      threads = [
        threading.Thread(target=function, args=(i, num_updates))
        for i in range(_NUM_ACTORS)
      ]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()

    return run

  def step(i: int, num_updates: int) -> None:
    for _ in range(num_updates * _LENGTH):
      pools[i].step(np.zeros(_NUM_ENVS, np.int32))

  def act(i: int, num_updates: int) -> None:
    for _ in range(num_updates):
      actors[i].unroll(variables, 0)

  def learn(num_updates: int) -> None:
    nonlocal state
    for _ in range(num_updates):
      state, _ = jax.block_until_ready(
        update(state.variables, state._replace(variables=()), trajectories, key)
      )

  def train(num_updates: int) -> None:
    while num_updates > 0:
      num_updates -= driver.advance(num_updates)[0].num_updates

  driver.start()  # After this, the caller must call `close`.
  return {
    'environment': in_threads(step),
    'acting': in_threads(act),
    'update': learn,
    'training': train,
  }, driver.close


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
      functions, close = parts(cost, mode)
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
