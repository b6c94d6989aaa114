"""Trains agents with many seeds, and writes docs/reference/returns.md.

  python experiments/benchmarks/returns.py [--tasks=CartPole,Catch]
      [--agent=ppo] [--first_seed=100] [--num_seeds=0]
      [--num_devices=2] [--one_program] [--workdir=runs/returns]

The program trains each agent on each task. Under Anakin, the seeds train in one
program. Seeds of agents with convolutions or replay memories train one after
the other instead, unless you add --one_program. The result of each seed becomes
a row of docs/returns.csv. A seed that has a row is skipped, and a run that was
interrupted is resumed. So the same command continues an interrupted benchmark.
Several processes may work at the same time, on different tasks or agents. If
you change the settings of a task, delete its rows. All tasks together take many
hours.
"""

from collections.abc import Iterable, Sequence
import csv
import fcntl
import itertools
from typing import NamedTuple

from absl import app, flags
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
import numpy as np
from scipy import stats
import training

from podrl.agents import ACTOR_CRITICS, AGENTS
from podrl.messages import three_digits
from podrl.records import workdir
from podrl.records.terminal import compact
from podrl.tools import plot

_TASKS_FLAG = flags.DEFINE_list(
  'tasks', [], 'train only tasks whose name contains one of these texts'
)
_AGENTS = flags.DEFINE_multi_enum(
  'agent', list(AGENTS), list(AGENTS), 'agents; repeat the flag for several'
)
_FIRST_SEED = flags.DEFINE_integer('first_seed', 100, 'the first seed', 0)
_NUM_SEEDS = flags.DEFINE_integer(
  'num_seeds', 0, 'seeds of each run; 0 means the number of the task', 0
)
_NUM_DEVICES = flags.DEFINE_integer(
  'num_devices', 2, 'devices of each run; for Sebulba, learner devices', 1
)
_ONE_PROGRAM = flags.DEFINE_bool(
  'one_program', False, 'train all seeds in one program, as is best on a GPU'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/returns', 'directory for the files of the runs'
)

_DOCS = training.ROOT / 'docs'
_CSV = _DOCS / 'returns.csv'
_PAGE = _DOCS / 'reference' / 'returns.md'
_FIGURE = _DOCS / 'images' / 'returns.png'
_BEGIN = '<!-- rows: python experiments/benchmarks/returns.py -->\n'
_END = '<!-- end -->\n'
_SHARES = np.arange(1, 21) / 20  # Where a learning curve has its points.
_COLORS = {
  'ppo': '#1f5fa8',
  'impala': '#c44e00',
  'a2c': '#2f8f4e',
  'pqn': '#8c3fa8',
  'dqn': '#b8860b',
  'rainbow': '#d6336c',
  'r2d2': '#5c6f7b',
  'sac': '#1a9ba1',
  'muzero': '#303030',
}
_FIELDS = (
  'task',
  'agent',
  'num_devices',
  'seed',
  'eval_return',
  'env_steps',
  'seconds',  # Wall time of the run, divided by its number of seeds.
  'curve',  # Mean episode returns after 1/20, 2/20 ... of the steps.
)
Row = dict[str, str]


class Task(NamedTuple):
  """An experiment, perhaps with another variant or environment."""

  experiment: str
  env: str  # Name of the environment.
  threshold: float  # Each seed must reach this evaluated return.
  num_seeds: int = 20
  variant: str = ''
  agents: tuple[str, ...] = ACTOR_CRITICS
  # Fields of the configuration that change.
  settings: dict[str, float | str] = {}

  @property
  def name(self) -> str:
    """The name of the task in the tables."""
    return ' '.join(filter(None, (self.experiment, self.variant, self.env)))


# Landing takes many steps, so agents need foresight, and PPO more steps.
_LUNAR_PPO = Task(
  'sebulba_cartpole',
  'LunarLander-v2',
  200,
  10,
  agents=('ppo',),
  settings={
    'agent.gamma': 0.999,
    'agent.lambda_': 0.98,
    'total_env_steps': 2_000_000,
  },
)
# These agents need more optimiser steps than in CartPole-v1.
_LUNAR_SMALL_BATCHES = _LUNAR_PPO.settings | {
  'env.num_envs': 16,
  'optimizer.learning_rate': 1e-3,
}
_Q_AGENTS = 'dqn', 'rainbow', 'pqn'
_WITH_Q = *ACTOR_CRITICS, *_Q_AGENTS
_WITH_PQN = *ACTOR_CRITICS, 'pqn'
_WITH_SAC = *ACTOR_CRITICS, 'sac'
_TASKS = (
  Task('anakin_cartpole', 'CartPole-v1', 475, agents=_WITH_Q),
  Task('anakin_cartpole', 'CartPole-v1', 475, 10, agents=('muzero',)),
  Task(
    'anakin_cartpole',
    'Acrobot-v1',
    -100,
    agents=(*ACTOR_CRITICS, 'dqn', 'rainbow'),
  ),
  Task(
    'anakin_cartpole',
    'Acrobot-v1',
    -100,
    agents=('pqn',),
    settings={'total_env_steps': 1_000_000},  # PPO has as many.
  ),
  Task('anakin_catch', 'Catch-bsuite', 0.95, agents=_WITH_Q),
  Task(
    'anakin_memory_chain',
    'MemoryChain-bsuite',
    0.9,
    agents=(*_WITH_PQN, 'r2d2'),
  ),
  Task('anakin_pendulum', 'Pendulum-v1', -250, agents=_WITH_SAC),
  Task(
    'anakin_pendulum',
    'MountainCarContinuous-v0',
    85,
    # Its episodes are too long for the discount of Pendulum-v1.
    settings={'agent.gamma': 0.99},
  ),
  Task(
    'anakin_pendulum',
    'MountainCarContinuous-v0',
    85,
    10,
    agents=('sac',),
    # With new noise at each step, none of 20 seeds ever reached the goal.
    settings={'agent.gamma': 0.99, 'agent.noise_steps': 8},
  ),
  Task('anakin_breakout', 'Breakout-MinAtar', 15, 20, 'conv'),
  Task('anakin_breakout', 'Breakout-MinAtar', 15, 3, 'conv', _Q_AGENTS),
  Task('anakin_breakout', 'Breakout-MinAtar', 15, 20, 'mlp'),
  Task('anakin_breakout', 'Asterix-MinAtar', 5, 10, 'conv'),
  Task('anakin_breakout', 'Asterix-MinAtar', 5, 3, 'conv', ('pqn',)),
  Task('anakin_breakout', 'Freeway-MinAtar', 40, 10, 'conv', ('ppo', 'a2c')),
  Task(
    'anakin_breakout',
    'Freeway-MinAtar',
    40,
    10,
    'conv',
    agents=('impala',),
    # With 0.05, 2 of 20 runs stayed below 20.
    settings={'agent.entropy_cost': 0.01},
  ),
  Task('anakin_breakout', 'Freeway-MinAtar', 40, 3, 'conv', ('pqn',)),
  Task('anakin_breakout', 'SpaceInvaders-MinAtar', 50, 10, 'conv'),
  Task('anakin_breakout', 'SpaceInvaders-MinAtar', 50, 3, 'conv', ('pqn',)),
  Task('anakin_pong', 'Pong-misc', 900, agents=_WITH_PQN),
  Task('sebulba_cartpole', 'CartPole-v1', 475, 10, agents=(*_WITH_Q, 'muzero')),
  _LUNAR_PPO,
  # With tanh, 3 of 10 seeds of IMPALA stayed below 200.
  _LUNAR_PPO._replace(
    agents=('impala',),
    settings=_LUNAR_SMALL_BATCHES | {'network.activation': 'relu'},
  ),
  # With 0.01, 2 of 10 seeds of A2C stayed below 200; with relu, 2 of 3. With 2M
  # steps, 1 of 20 runs stayed below 200.
  _LUNAR_PPO._replace(
    agents=('a2c',),
    settings=_LUNAR_SMALL_BATCHES
    | {'agent.entropy_cost': 0.02, 'total_env_steps': 3_000_000},
  ),
  Task('sebulba_half_cheetah', 'HalfCheetah-v4', 1500, 3, agents=_WITH_SAC),
  # IMPALA and A2C do not reach 1,000 with every seed; the page says what was
  # tried.
  Task('sebulba_half_cheetah', 'Hopper-v4', 1000, 3, agents=('ppo', 'sac')),
  Task('sebulba_pong', 'Pong-v5', 15, 3, 'cpu', ('ppo', 'impala', 'pqn')),
  Task('sebulba_breakout', 'Breakout-v5', 15, 3, 'cpu', ('ppo', 'impala')),
)


def _train(task: Task, agent: str, seeds: range) -> list[Row]:
  """Trains an agent on a task, if it is not trained, and reads the results."""
  num_devices, num_seeds = _NUM_DEVICES.value, len(seeds)
  is_anakin = task.experiment.startswith('anakin')
  settings = {
    'seed': seeds.start,
    'num_seeds': num_seeds,
    'log.tensorboard': False,
    'eval.every_env_steps': 0,
    'env.name': task.env,
    **task.settings,
  }
  if is_anakin:
    settings['num_devices'] = num_devices
  else:
    learners = ','.join(map(str, range(num_devices)))
    settings['sebulba.learner_devices'] = learners
    settings['sebulba.actor_devices'] = 0
  numbers = f'{seeds.start}', f'{num_seeds}', f'{num_devices}'
  name = '-'.join([*task.name.split(), agent, *numbers])
  directories = training.train(
    task.experiment,
    settings,
    f'{_WORKDIR.value}/{name}',
    agent,
    task.variant,
  )
  rows = []
  for directory in directories:
    summary = workdir.read_json(f'{directory}/summary.json')
    seconds = summary['wall_seconds'] / (num_seeds if is_anakin else 1)
    run = plot.read_run(directory)
    steps, returns = run.series('env_steps', 'episode_return')
    curve = np.interp(_SHARES * steps[-1], steps, returns)
    values = (
      task.name,
      agent,
      num_devices,
      run.config['seed'],
      f'{summary["eval_return"]:.5g}',
      summary['env_steps'],
      f'{seconds:.1f}',
      ' '.join(f'{x:.4g}' for x in curve),
    )
    rows.append(dict(zip(_FIELDS, map(str, values))))
  return rows


def _key(row: Row) -> tuple[str, ...]:
  """Returns the fields that only one row may have."""
  return row['task'], row['agent'], row['num_devices'], row['seed']


def read_rows() -> list[Row]:
  with _CSV.open(newline='') as file:
    return list(csv.DictReader(file))


def _add_rows(new: Iterable[Row]) -> None:
  """Writes the rows of the seeds that have none yet."""
  with _CSV.open('r+', newline='') as file:
    fcntl.flock(file, fcntl.LOCK_EX)  # Another process may add rows, too.
    known = set(map(_key, csv.DictReader(file)))
    writer = csv.DictWriter(file, _FIELDS, lineterminator='\n')
    writer.writerows(row for row in new if _key(row) not in known)


def seed_ranges(seeds: Iterable[int], size: int) -> list[range]:
  """Splits ascending seeds into ranges of at most `size` seeds."""
  ranges: list[range] = []
  for seed in seeds:
    if ranges and seed == ranges[-1].stop and len(ranges[-1]) < size:
      ranges[-1] = range(ranges[-1].start, seed + 1)
    else:
      ranges.append(range(seed, seed + 1))
  return ranges


def interquartile_mean(values: np.ndarray, axis: int = 0) -> np.ndarray:
  """The mean without the highest and the lowest quarter of the values."""
  return stats.trim_mean(values, 0.25, axis=axis)


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Bootstraps the 95 % interval of the interquartile mean over axis 0.

  Source: Agarwal et al. 2021, arXiv:2108.13264, section 4.1.
  """
  rng = np.random.default_rng(0)
  indices = rng.integers(len(values), size=(2000, len(values)))
  means = interquartile_mean(values[indices], axis=1)
  low, high = np.percentile(means, [2.5, 97.5], axis=0)
  return low, high


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str, int], list[Row]]:
  """Groups rows by task, agent and number of devices, in the tasks' order."""
  groups: dict[tuple[str, str, int], list[Row]] = {}
  for row in rows:
    key = row['task'], row['agent'], int(row['num_devices'])
    groups.setdefault(key, []).append(row)
  tasks, agents = [task.name for task in _TASKS], list(AGENTS)

  def rank(key: tuple[str, str, int]) -> tuple[int, int, int]:
    return tasks.index(key[0]), agents.index(key[1]), -key[2]

  return {key: groups[key] for key in sorted(groups, key=rank)}


def table(rows: Sequence[Row]) -> str:
  """Makes the table of the page."""
  tasks = {(task.name, agent): task for task in _TASKS for agent in task.agents}
  lines = [
    '| task | agent | devices | threshold | seeds that reach it '
    '| interquartile mean | 95 % interval | worst seed | steps '
    '| time per seed |',
    '|---|---|---|---|---|---|---|---|---|---|',
  ]
  for (name, agent, num_devices), group in _groups(rows).items():
    returns = np.array([float(row['eval_return']) for row in group])
    seconds = np.median([float(row['seconds']) for row in group])
    low, high = interval(returns)
    task = tasks[name, agent]
    successes = f'{np.sum(returns >= task.threshold)} of {len(returns)}'
    if len(returns) < task.num_seeds:
      successes += f' ({task.num_seeds} planned)'
    cells = (
      name,
      agent,
      str(num_devices),
      three_digits(task.threshold),
      successes,
      three_digits(interquartile_mean(returns)),
      f'{three_digits(low)} to {three_digits(high)}',
      three_digits(returns.min()),
      compact(int(group[0]['env_steps'])),
      f'{seconds:.0f} s',
    )
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines) + '\n'


def _style(agent: str) -> dict[str, str]:
  # Under Anakin, the curve of A2C covers that of IMPALA.
  return dict(color=_COLORS[agent], ls='--' if agent == 'a2c' else '-')


def draw(rows: Sequence[Row]) -> Figure:
  """Draws learning curves, with a panel for each task.

  Each line is an interquartile mean, and the band is its 95 % interval. If a
  task was run with several numbers of devices, the largest is drawn.
  """
  groups: dict[tuple[str, str], list[Row]] = {}
  for (name, agent, _), group in _groups(rows).items():
    groups.setdefault((name, agent), group)  # The first group has most devices.
  names = list(dict.fromkeys(name for name, _ in groups))
  num_rows = -(-len(names) // 3)
  figure = Figure(figsize=(10, 2.6 * num_rows), layout='constrained')
  panels = figure.subplots(num_rows, 3, squeeze=False).ravel()
  for axes in panels[len(names) :]:
    axes.remove()
  for (name, agent), group in groups.items():
    axes, style = panels[names.index(name)], _style(agent)
    curves = np.array([row['curve'].split() for row in group], float)
    steps = np.mean([int(row['env_steps']) for row in group])
    points = _SHARES * steps
    axes.plot(points, interquartile_mean(curves), **style)
    axes.fill_between(
      points, *interval(curves), color=style['color'], alpha=0.2, lw=0
    )
    axes.set_title(name, fontsize=8)
    axes.xaxis.set_major_formatter(lambda x, _: compact(x) if x else '0')
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  drawn = {agent for _, agent in groups}
  handles = [
    Line2D([], [], label=x, **_style(x)) for x in _COLORS if x in drawn
  ]
  figure.legend(
    handles=handles, loc='outside upper center', ncols=9, fontsize=9
  )
  figure.supxlabel('environment steps', fontsize=9)
  figure.supylabel('episode return', fontsize=9)
  return figure


def _chosen() -> list[tuple[Task, str]]:
  """Returns the tasks and agents that the flags choose."""
  texts, names = _TASKS_FLAG.value, {task.name: None for task in _TASKS}
  for text in texts:
    if not any(text and text in name for name in names):
      raise app.UsageError(f'--tasks={text} matches none of {", ".join(names)}')
  chosen = [
    (task, agent)
    for task, agent in itertools.product(_TASKS, _AGENTS.value)
    if agent in task.agents
    and (not texts or any(text in task.name for text in texts))
  ]
  if not chosen:
    raise app.UsageError(f'no such task takes {", ".join(_AGENTS.value)}')
  return chosen


def main(argv: Sequence[str]) -> None:
  """Trains what is missing, and writes the rows, the page and the picture."""
  if argv[1:]:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  num_devices, first_seed = str(_NUM_DEVICES.value), _FIRST_SEED.value
  chosen = _chosen()
  try:
    for task, agent in chosen:
      known = set(map(_key, read_rows()))
      num_seeds = _NUM_SEEDS.value or task.num_seeds
      missing = [
        seed
        for seed in range(first_seed, first_seed + num_seeds)
        if (task.name, agent, num_devices, str(seed)) not in known
      ]
      # On a CPU, several agents with replay memories or with convolutions are
      # faster one after the other than in one program.
      is_slow = AGENTS[agent].sequence_length or task.variant == 'conv'
      is_separate = is_slow and not _ONE_PROGRAM.value
      for seeds in seed_ranges(missing, 1 if is_separate else num_seeds):
        _add_rows(_train(task, agent, seeds))
  finally:
    rows = read_rows()
    before, _, rest = _PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _PAGE.write_text(f'{before}{_BEGIN}{table(rows)}{_END}{after}')
    draw(rows).savefig(_FIGURE, dpi=120)


if __name__ == '__main__':
  app.run(main)
