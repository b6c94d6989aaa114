"""Measures what logging costs; a benchmark, not a test.

  python experiments/benchmarks/logging_cost.py [--driver=anakin|sebulba]
      [--pairs=20] [--seconds=2] [--wandb]

The driver trains CartPole with the settings of the CartPole experiment. The
measurement consists of pairs of turns. In one turn of a pair, the program
writes records to metrics.jsonl, TensorBoard and the terminal; with --wandb, it
also writes to Weights & Biases (offline). In the other turn, it writes no
records. The order of the two turns changes from pair to pair. The program
divides the speed with records by the speed without records, and prints the
median of this ratio over the pairs.
"""

from collections.abc import Sequence
import os
import pathlib
import runpy
import tempfile
import time
from typing import Any

from absl import app, flags
import numpy as np

from podrl.agents import sgd_steps_per_update
from podrl.fields import Fields
from podrl.records import workdir
from podrl.records.recorder import Recorder
from podrl.run import build
from podrl.run.config import completed

_ARCHITECTURE = flags.DEFINE_enum(
  'driver', 'anakin', ['anakin', 'sebulba'], 'architecture to measure.'
)
_PAIRS = flags.DEFINE_integer('pairs', 20, 'number of pairs of turns.', 1)
_SECONDS = flags.DEFINE_float('seconds', 2.0, 'seconds of each turn.', 0.1)
_WANDB = flags.DEFINE_bool('wandb', False, 'use Weights & Biases, offline.')


def get_config(architecture: str) -> dict[str, Any]:
  """Returns the configuration of the architecture's CartPole experiment."""
  experiments = pathlib.Path(__file__).parents[1]
  path = experiments / f'{architecture}_cartpole.py'
  own = runpy.run_path(str(path))['get_config']
  return completed(own)('ppo', '')


def measure(
  config: Fields, num_pairs: int, seconds: float, wandb: bool
) -> list[float]:
  """Returns, for each pair, the speed with records / without records."""
  config['total_env_steps'] = 10**9
  config['log.wandb'] = wandb
  build.set_up_jax(config)
  run = build.make_run(config)
  with tempfile.TemporaryDirectory() as path:
    workdir.make(path, config)
    recorder = Recorder(
      config,
      path,
      run.spec.frame_skip,
      run.num_updates,
      run.steps_per_update,
      sgd_steps_per_update(config),
      time.perf_counter(),
      run.driver.describe,
    )
    recorder.open({})
    run.driver.start()

    all_sinks = recorder.sinks

    def turn(is_logged: bool) -> float:
      recorder.sinks = all_sinks if is_logged else [[]]
      steps, start = 0, time.perf_counter()
      while time.perf_counter() - start < seconds:
        reports = run.driver.advance(config['log.every_updates'])
        steps += reports[0].num_predictions
        recorder.add(reports)
        if recorder.num_updates_since_record >= config['log.every_updates']:
          recorder.write()
      recorder.progress()  # This waits until all records are written.
      return steps / (time.perf_counter() - start)

    try:
      turn(True), turn(False)  # These two turns compile, and are not measured.
      ratios = []
      for i in range(num_pairs):
        rates = {
          x: turn(x) for x in ((True, False) if i % 2 else (False, True))
        }
        ratios.append(rates[True] / rates[False])
    finally:
      recorder.sinks = all_sinks
      run.driver.close()
      recorder.close()
  return ratios


def main(argv: Sequence[str]) -> None:
  """Measures the ratio of each pair, and prints the median and quartiles."""
  if len(argv) > 1:
    raise app.UsageError(f'the argument {argv[1]} is unknown')
  os.environ['WANDB_MODE'] = 'offline'
  os.environ['WANDB_SILENT'] = 'true'
  ratios = measure(
    get_config(_ARCHITECTURE.value),
    _PAIRS.value,
    _SECONDS.value,
    _WANDB.value,
  )
  low, middle, high = np.percentile(ratios, [25, 50, 75])
  print(
    f'{_ARCHITECTURE.value}: the speed with records is {middle:.3f} times the '
    f'speed without records (quartiles {low:.3f} and {high:.3f}, {len(ratios)} '
    'pairs)'
  )


if __name__ == '__main__':
  app.run(main)
