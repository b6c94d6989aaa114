"""Compares agents of podrl with those of rejax: speed, and learning curves.

  python experiments/benchmarks/peers.py [--compare=speed|acting|learning]
      [--agent=ppo|pqn|dqn] [--tasks=CartPole-v1,Breakout-MinAtar]
      [--num_envs=64] [--num_devices=1] [--repeats=7] [--num_seeds=20]
      [--total_env_steps=500000] [--directory=runs/peers]

Both train the same network with the same settings. rejax has one device. podrl
has `num_devices` CPU devices, which split the same batches. rejax needs an
older gymnax, so the program installs rejax into an environment of its own, in
`directory`. This needs access to a package index.

`speed` measures the two in turn, and prints the medians of the steps per
second, of the CPU time per step, and of the ratios. CPU time changes less than
wall time if other programs use the same cores. `acting` does the same for
unrolls without updates, with the agent PPO.

`learning` trains `num_seeds` agents of PPO with each, and prints the mean area
under the learning curves, which is the mean return during training.
"""

from collections.abc import Callable, Sequence
import json
import os
import pathlib
import subprocess
import time
from typing import Any
import venv

from absl import app, flags
import jax
import numpy as np
import training

from podrl.drivers.anakin import make_unroll
from podrl.fields import Fields
from podrl.records.merging import bootstrap
from podrl.records.terminal import compact
from podrl.run import build
from podrl.run.config import default_fields
from podrl.tools import plot
from podrl.types import Driver

_COMPARE = flags.DEFINE_enum(
  'compare', 'speed', ['speed', 'acting', 'learning'], 'what to compare'
)
_AGENT = flags.DEFINE_enum(
  'agent', 'ppo', ['ppo', 'pqn', 'dqn'], 'agent; only `speed` allows pqn or dqn'
)
_TASKS = flags.DEFINE_list(
  'tasks',
  ['CartPole-v1', 'Acrobot-v1', 'Breakout-MinAtar', 'Asterix-MinAtar'],
  'environments of gymnax',
)
_DIRECTORY = flags.DEFINE_string(
  'directory', 'runs/peers', 'directory for the environment and the runs'
)
_NUM_ENVS = flags.DEFINE_list(
  'num_envs', ['64'], 'numbers of environments, with one row for each'
)
_NUM_DEVICES = flags.DEFINE_integer(
  'num_devices', 1, 'devices of podrl; only `speed` allows several', 1
)
_REPEATS = flags.DEFINE_integer('repeats', 7, 'measurements of speed', 1)
_NUM_SEEDS = flags.DEFINE_integer('num_seeds', 20, 'seeds for learning', 1)
_TOTAL = flags.DEFINE_integer(
  'total_env_steps', 500_000, 'environment steps for learning', 1
)

_NUM_POINTS = 20  # Evaluations of a learning curve.
_SECONDS = 1.5  # One measurement takes about this long.
_MAX_UPDATES = 1024  # One measurement has at most this many updates.


def _settings(task: str, num_envs: int) -> dict[str, Any]:
  """Returns the fields of podrl's configuration; rejax gets the same values."""
  settings = {
    'env.name': task,
    'env.num_envs': num_envs,
    'network.name': 'mlp',
    'network.hidden_sizes': (64, 64),
    'num_devices': _NUM_DEVICES.value,
    'optimizer.anneal': False,
    'agent.gamma': 0.99,
    'agent.normalize_reward': False,
    'agent.normalize_observation': False,
  }
  if _AGENT.value == 'ppo':
    return settings | {
      'unroll_length': 128,
      'num_epochs': 4,
      # With 128 environments or more, each minibatch has 4,096 steps.
      'num_minibatches': max(4, num_envs // 32),
      'agent.lambda_': 0.95,
      'agent.clip': 0.2,
      'agent.entropy_cost': 0.01,
      'agent.value_cost': 0.5,
      'optimizer.learning_rate': 5e-4,
      'optimizer.max_grad_norm': 0.0,
    }
  if _AGENT.value == 'pqn':
    return settings | {
      'unroll_length': 64,
      'num_epochs': 4,
      'num_minibatches': 16,
      'agent.lambda_': 0.95,
      'optimizer.learning_rate': 3e-4,
      'optimizer.max_grad_norm': 10.0,
    }
  unroll_length = max(1, 64 // num_envs)
  return settings | {
    'unroll_length': unroll_length,
    'agent.n_steps': 1,
    'optimizer.learning_rate': 1e-3,
    'optimizer.max_grad_norm': 10.0,
    'replay.capacity_steps': 100_000 // num_envs * num_envs,
    'replay.min_steps': 1000,
    'replay.batch_size': 128,
    # One step of the optimiser for 4 steps of the environments.
    'replay.sgd_steps_per_update': unroll_length * num_envs // 4,
  }


class Rejax:
  """A process that trains an agent of rejax."""

  def __init__(self, settings: dict[str, Any]):
    directory = pathlib.Path(_DIRECTORY.value, 'rejax')
    python, is_complete = directory / 'bin' / 'python', directory / 'complete'
    if not is_complete.exists():
      venv.create(directory, with_pip=True)
      packages = ['rejax==0.1.3', 'gymnax<1']
      subprocess.run(
        [python, '-m', 'pip', 'install', '-q', *packages], check=True
      )
      is_complete.touch()
    script = pathlib.Path(__file__).with_name('peers_rejax.py')
    self._process = subprocess.Popen(
      [python, script, _AGENT.value, json.dumps(settings)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {'PYTHONPATH': '', 'JAX_PLATFORMS': 'cpu'},
    )
    self.num_params = self._read()['num_params']

  def _read(self) -> dict[str, Any]:
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError('rejax failed; its error is above')
    return json.loads(line)

  def ask(self, command: str, *numbers: int) -> dict[str, Any]:
    """Sends a command of `peers_rejax.py` and returns the answer."""
    print(command, *numbers, file=self._process.stdin, flush=True)
    return self._read()

  def close(self) -> None:
    """Ends the process."""
    self._process.communicate('end\n')


def _make_act(config: Fields, driver: Driver) -> Callable[[int], None]:
  """Makes a function that acts for some unrolls, without updates."""
  env = build.make_env(config)
  agent = build.make_agent(config, env.spec)
  unroll = make_unroll(env, agent, config['unroll_length'])
  variables, actors = driver.state.learner.variables, driver.state.actors

  @jax.jit
  def repeat(num_unrolls, actors, variables):
    # The result contains the last trajectory, or the compiler would remove it.
    return jax.lax.fori_loop(
      1,
      num_unrolls,
      lambda i, last: unroll(variables, last[0], i)[:2],
      unroll(variables, actors, 0)[:2],
    )

  def act(num_unrolls: int) -> None:
    nonlocal actors
    result = repeat(num_unrolls, actors, variables)
    actors, *_ = jax.block_until_ready(result)

  return act


def _speed(task: str, num_envs: int) -> tuple[str, ...]:
  """Measures both in turn; returns a row of the table."""
  settings = _settings(task, num_envs)
  config = {**default_fields(_AGENT.value, 'Anakin'), **settings}
  config['log.every_updates'] = _MAX_UPDATES
  config['compilation_cache'] = 'off'
  build.set_up_jax(config)
  run = build.make_run(config)
  driver, steps = run.driver, run.steps_per_update
  driver.start()
  leaves = jax.tree.leaves(driver.learner_state.variables.params)
  num_params = sum(x.size for x in leaves)
  rejax = Rejax(settings)
  if rejax.num_params != num_params:
    raise ValueError(
      f'podrl has {num_params} parameters, rejax {rejax.num_params}'
    )

  is_acting = _COMPARE.value == 'acting'
  function = _make_act(config, driver) if is_acting else driver.advance
  command = 'act' if is_acting else 'train'

  def call(num_updates: int) -> dict[str, float]:
    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    function(num_updates)
    return {
      'seconds': time.perf_counter() - seconds,
      'cpu_seconds': time.process_time() - cpu_seconds,
    }

  sides = [call, lambda num_updates: rejax.ask(command, num_updates)]
  num_first = 1 + settings.get('replay.min_steps', 0) // steps
  counts = []
  for side in sides:
    side(num_first)  # The first call compiles, and fills the memory.
    seconds = side(num_first)['seconds'] / num_first
    counts.append(min(_MAX_UPDATES, max(1, round(_SECONDS / seconds))))
  found = []
  for _ in range(_REPEATS.value):
    for side, num_updates in zip(sides, counts):
      answer = side(num_updates)
      num_steps = num_updates * steps
      found.append(
        (num_steps / answer['seconds'], answer['cpu_seconds'] / num_steps * 1e6)
      )
  rejax.close()
  driver.close()
  values = np.array(found).reshape(-1, 2, 2)  # [repeats, sides, metrics]
  ratios = np.median(values[:, 0] / values[:, 1], axis=0)
  (ours, our_cpu), (theirs, their_cpu) = np.median(values, axis=0)
  return (
    f'{task} x {num_envs:,}',
    f'{num_params:,}',
    compact(ours),
    compact(theirs),
    f'{ratios[0]:.2f}',
    f'{our_cpu:.2f}',
    f'{their_cpu:.2f}',
    f'{ratios[1]:.2f}',
  )


def _learning(task: str, num_envs: int) -> tuple[str, ...]:
  """Trains both with all seeds; returns a row of the table."""
  settings = _settings(task, num_envs) | {'num_minibatches': 4}
  num_seeds, steps = _NUM_SEEDS.value, num_envs * settings['unroll_length']
  num_updates = -(-_TOTAL.value // (steps * _NUM_POINTS)) * _NUM_POINTS
  total = num_updates * steps
  fields = settings | {
    'total_env_steps': total,
    'eval.every_env_steps': total // _NUM_POINTS,
    'eval.num_episodes': 128,
    'eval.greedy': False,
    'num_seeds': num_seeds,
    'log.tensorboard': False,
  }
  paths = training.train(
    'anakin_cartpole', fields, f'{_DIRECTORY.value}/{task}'
  )
  series = [plot.read_run(x).series('env_steps', 'eval_return') for x in paths]
  grid = np.arange(1, _NUM_POINTS + 1) * (total // _NUM_POINTS)
  ours = np.array([np.interp(grid, *x) for x in series])
  rejax = Rejax(settings)
  answer = rejax.ask('curves', num_seeds, _NUM_POINTS, num_updates)
  rejax.close()
  theirs = np.array(answer['returns'])
  cells = [task, str(num_seeds), compact(total)]
  for curves in (ours, theirs):
    areas = curves.mean(axis=1)
    low, high = bootstrap(areas)
    cells.append(f'{areas.mean():.4g} ({low:.4g} to {high:.4g})')
    cells.append(f'{curves[:, -1].mean():.4g}, {curves[:, -1].min():.4g}')
  return tuple(cells)


_SPEED_COLUMNS = (
  'environments',
  'parameters',
  'podrl, steps/s',
  'rejax, steps/s',
  'ratio',
  'podrl, CPU us/step',
  'rejax, CPU us/step',
  'ratio',
)
_COLUMNS = {
  'speed': _SPEED_COLUMNS,
  'acting': _SPEED_COLUMNS,
  'learning': (
    'environment',
    'seeds',
    'steps',
    'podrl, area (95 %)',
    'at the end: mean, worst',
    'rejax, area (95 %)',
    'at the end: mean, worst',
  ),
}


def main(argv: Sequence[str]) -> None:
  """Measures, and prints a table of Markdown."""
  if argv[1:]:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  if not all(n.isdecimal() and int(n) for n in _NUM_ENVS.value):
    raise app.UsageError('--num_envs needs positive integers, such as 64,1024')
  if _AGENT.value == 'dqn' and any(int(n) % 4 for n in _NUM_ENVS.value):
    # Each time that all environments step, rejax takes `num_envs / 4` optimiser
    # steps, rounded down.
    raise app.UsageError('--agent=dqn needs multiples of 4 in --num_envs')
  if _COMPARE.value != 'speed' and _AGENT.value != 'ppo':
    raise app.UsageError(f'--compare={_COMPARE.value} needs --agent=ppo')
  if _COMPARE.value != 'speed' and _NUM_DEVICES.value > 1:
    raise app.UsageError(f'--compare={_COMPARE.value} needs --num_devices=1')
  os.environ['JAX_PLATFORMS'] = 'cpu'  # As for rejax.
  jax.config.update('jax_platforms', 'cpu')  # JAX is imported already.
  measure = _learning if _COMPARE.value == 'learning' else _speed
  columns = _COLUMNS[_COMPARE.value]
  print(f'| {" | ".join(columns)} |\n|{"---|" * len(columns)}', flush=True)
  for task in _TASKS.value:
    for num_envs in map(int, _NUM_ENVS.value):
      print(f'| {" | ".join(measure(task, num_envs))} |', flush=True)


if __name__ == '__main__':
  app.run(main)
