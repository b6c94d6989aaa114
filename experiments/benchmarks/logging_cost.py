"""What logging costs: training with all sinks and with none, in turn.

  python experiments/logging_cost.py [--driver=anakin|sebulba] [--pairs=20]
      [--seconds=2] [--wandb]

Of CartPole with its experiment's settings, one driver trains for so many seconds
with records written to metrics.jsonl, TensorBoard, the terminal and, if asked
for, Weights & Biases (offline), then for as many without any of these; the order
changes from pair to pair. It prints the median ratio of steps per second, with
over without.
"""

from collections.abc import Sequence
import os
import tempfile
import time

from absl import app, flags
import anakin_cartpole
from ml_collections import ConfigDict
import numpy as np
import sebulba_cartpole

from podrl.records import workdir
from podrl.records.recorder import Recorder
from podrl.run import build

_EXPERIMENTS = {'anakin': anakin_cartpole, 'sebulba': sebulba_cartpole}
_ARCHITECTURE = flags.DEFINE_enum(
  'driver', 'anakin', list(_EXPERIMENTS), 'whose driver.'
)
_PAIRS = flags.DEFINE_integer('pairs', 20, 'of turns.', 1)
_SECONDS = flags.DEFINE_float('seconds', 2.0, 'of a turn.', 0.0)
_WANDB = flags.DEFINE_bool('wandb', False, 'with Weights & Biases, offline.')


def measure(
  config: ConfigDict, num_pairs: int, seconds: float, wandb: bool
) -> list[float]:
  """The ratio of each pair."""
  config.total_env_steps = 10**9
  config.log.wandb = wandb
  build.set_up_jax(config)
  run = build.make_run(config)
  with tempfile.TemporaryDirectory() as path:
    workdir.make(path, config)
    recorder = Recorder(
      config,
      'logging',
      path,
      run.spec.frame_skip,
      run.num_updates,
      time.perf_counter(),
    )
    recorder.open({})
    run.driver.start()

    all_sinks = recorder.sinks

    def turn(is_logged: bool) -> float:
      recorder.sinks = all_sinks if is_logged else [[]]
      steps, start = 0, time.perf_counter()
      while time.perf_counter() - start < seconds:
        reports = run.driver.advance(config.log.every_updates)
        steps += reports[0].num_predictions
        recorder.add(reports)
        if recorder.num_updates_since_record >= config.log.every_updates:
          recorder.write()
      recorder.flush()
      return steps / (time.perf_counter() - start)

    try:
      turn(True), turn(False)  # Warm.
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
  """Prints a line for each architecture."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]} is not understood')
  os.environ['WANDB_MODE'] = 'offline'
  os.environ['WANDB_SILENT'] = 'true'
  ratios = measure(
    _EXPERIMENTS[_ARCHITECTURE.value].get_config('ppo', ''),
    _PAIRS.value,
    _SECONDS.value,
    _WANDB.value,
  )
  low, middle, high = np.percentile(ratios, [25, 50, 75])
  print(
    f'{_ARCHITECTURE.value}: with all sinks {middle:.3f} of the rate without '
    f'(quartiles {low:.3f} and {high:.3f}, {len(ratios)} pairs)'
  )


if __name__ == '__main__':
  app.run(main)
