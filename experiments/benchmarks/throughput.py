"""Measures the speed of podrl's parts and of training; a benchmark, not a test.

  python experiments/benchmarks/throughput.py
      [--architecture=anakin|sebulba] [--filter=CartPole] [--num_envs=64,1024]
      [--agent=ppo] [--repeats=5] [--num_devices=0] [--out=throughput.json]

Each row has four rates in steps per second: the environments alone, with random
actions; acting; the update alone; and training. The program first compiles all
parts. Then it measures the four rates in turn, several times, and prints the
median of each rate.

With Anakin, each part is one compiled program, and acting includes the
environments. The last column is the rate of training divided by its bound,
1 / (1 / acting + 1 / update).

With Sebulba, each part uses the same pools and threads as a run, and acting is
inference without steps of the environments. The last column is the rate of
training divided by its bound, the rate of the slowest part. Training cannot
reach this bound if the parts share the same cores, for example on a machine
without an accelerator. PPO and IMPALA have the settings of other trainers. The
other agents have those of `podrl train`, and learn as soon as their memory has
one sequence.
"""

from collections.abc import Callable, Sequence
import json
import threading
import time
from typing import Any

from absl import app, flags, logging
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from podrl.agents import AGENTS
from podrl.drivers import actor as actor_lib
from podrl.drivers import spmd
from podrl.drivers.anakin import make_programs, make_unroll
from podrl.drivers.sebulba import Sebulba
from podrl.envs import Task
from podrl.fields import Fields
from podrl.records.terminal import compact
from podrl.run import build, defaults
from podrl.run import devices as layout
from podrl.run.config import check
from podrl.tools import make_table
from podrl.types import DeviceEnv, HostEnv

_ARCHITECTURE = flags.DEFINE_enum(
  'architecture', 'anakin', ['anakin', 'sebulba'], 'architecture to measure'
)
_AGENT = flags.DEFINE_enum(
  'agent', 'ppo', list(AGENTS), 'agent for Sebulba; Anakin always uses PPO'
)
_FILTER = flags.DEFINE_string(
  'filter', '', 'measure only environments whose name contains this text'
)
_NUM_ENVS = flags.DEFINE_list(
  'num_envs',
  [],
  'numbers of environments, with one row for each; the default for Anakin is '
  '64,1024,4096, and for Sebulba it is 64 for CartPole and 16 for Pong',
)
_REPEATS = flags.DEFINE_integer('repeats', 5, 'number of repeats', 1)
_NUM_DEVICES = flags.DEFINE_integer(
  'num_devices', 0, 'devices for Anakin; 0 means the default of a run', 0
)
_THREADS = flags.DEFINE_integer(
  'threads', 0, 'actors per device for Sebulba; 0 means the default of a run', 0
)
_OUT = flags.DEFINE_string('out', '', 'JSON file to write the rows to')

_NAMES = {
  'anakin': ('CartPole-v1', 'Breakout-MinAtar', 'Pong-misc'),
  'sebulba': ('CartPole-v1', 'Pong-v5'),
}
_MAX_UPDATES = 64  # One call of training makes at most this many updates.
_SECONDS = 1.0  # One measurement takes about this long.


def _is_sebulba(config: Fields) -> bool:
  return build.architecture(config) == 'sebulba'


def get_sebulba_config(name: str, num_envs: int) -> dict[str, Any]:
  """Returns the configuration that is measured with Sebulba."""
  task = Task('envpool', name)
  agent = _AGENT.value
  config = defaults.base(task, agent)
  if agent in ('ppo', 'impala'):
    config['unroll_length'] = 128 if agent == 'ppo' else 20
    if agent == 'ppo':
      config['num_epochs'], config['num_minibatches'] = 4, 4
    is_pong = name == 'Pong-v5'  # Pong uses the Nature CNN.
    config['network.shared_torso'] = is_pong
    config['network.hidden_sizes'] = (512,) if is_pong else (64, 64)
  else:
    config = defaults.make_config(task, agent, build.make_spec(config))
    if 'replay.min_steps' in config:
      config['replay.min_steps'] = 1
  config['env.num_envs'] = num_envs
  config['optimizer.anneal'] = False
  config['compilation_cache'] = 'off'
  config['sebulba.threads_per_actor_device'] = _THREADS.value
  return config


def get_config(name: str, num_envs: int) -> dict[str, Any]:
  """Returns the configuration that is measured with Anakin."""
  config = defaults.base(Task('gymnax', name), 'ppo')
  config['env.num_envs'] = num_envs
  config['unroll_length'] = 128
  config['num_epochs'] = 4
  # With 128 environments or more, each minibatch has 4,096 steps.
  config['num_minibatches'] = max(4, num_envs // 32)
  config['network.name'] = 'mlp'
  config['num_devices'] = _NUM_DEVICES.value
  config['optimizer.anneal'] = False  # Annealing needs a fixed end.
  config['compilation_cache'] = 'off'
  return config


def programs(config: Fields) -> tuple[dict[str, Callable], int, Callable]:
  """Makes a function `(num_updates) -> None` for each part and for training.

  Returns:
    The functions by name, the number of parameters, and a function that frees
    the resources.
  """
  env = build.make_env(config)
  agent = build.make_agent(config, env.spec)
  mesh = spmd.make_mesh(layout.anakin_devices(config))
  learner = build.make_learner(config, agent, env.spec, mesh.size, 1)
  driver = make_programs(
    env,
    agent,
    learner,
    mesh,
    num_envs=config['env.num_envs'],
    unroll_length=config['unroll_length'],
    max_updates=_MAX_UPDATES,
  )
  # The two programs differ only in the agent that acts.
  act = make_unroll(env, agent, config['unroll_length'])
  step = make_unroll(
    env, agent._replace(act=_random_act(env)), config['unroll_length']
  )

  def repeat(function: Callable) -> Callable:
    # The result contains the last outputs, or the compiler would remove them.
    return lambda num_updates, state, *rest: jax.lax.fori_loop(
      1,
      num_updates,
      lambda i, last: function(i, last[0], *rest),
      function(0, state, *rest),
    )

  def update(i, state, trajectory, rng_key):
    return learner.update(state, trajectory, jax.random.fold_in(rng_key, i))

  whole = driver.init(jax.random.key(0))
  variables = whole.learner.variables
  state_specs = (spmd.REPLICATED, spmd.BATCH, spmd.REPLICATED)
  unroll = spmd.device_map(
    lambda variables, actors: act(variables, actors, 0)[1],
    mesh,
    state_specs[:2],
    spmd.TRAJECTORY,
  )
  trajectory = unroll(variables, whole.actors)
  rollouts = {
    name: spmd.device_map(
      repeat(lambda i, actors, variables, f=f: f(variables, actors, i)[:2]),
      mesh,
      (spmd.REPLICATED, spmd.BATCH, spmd.REPLICATED),
      (spmd.BATCH, spmd.TRAJECTORY),
    )
    for name, f in (('environment', step), ('acting', act))
  }
  updates = spmd.device_map(
    repeat(update),
    mesh,
    (spmd.REPLICATED, spmd.REPLICATED, spmd.TRAJECTORY, spmd.REPLICATED),
    spmd.REPLICATED,
  )
  key = jax.random.key(1)
  state = whole

  def train(num_updates: int) -> None:
    nonlocal state  # The call donates the state.
    while num_updates > 0:
      state, _ = driver.train(state, np.int32(min(num_updates, _MAX_UPDATES)))
      num_updates -= _MAX_UPDATES
    jax.block_until_ready(state)

  actors = jax.tree.map(jnp.copy, whole.actors)
  learner_state = jax.tree.map(jnp.copy, whole.learner)
  parts = {
    name: lambda n, f=f: jax.block_until_ready(
      f(np.int32(n), actors, learner_state.variables)
    )
    for name, f in rollouts.items()
  }
  parts['update'] = lambda n: jax.block_until_ready(
    updates(np.int32(n), learner_state, trajectory, key)
  )
  num_params = sum(x.size for x in jax.tree.leaves(variables.params))
  return parts | {'training': train}, num_params, lambda: None


def _random_act(env: DeviceEnv) -> Callable:
  """Makes an `Agent.act` that chooses uniformly random actions."""

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    del variables, timestep, greedy
    action = jax.vmap(
      lambda key: jax.random.randint(key, (), 0, env.spec.action.num_actions)
    )(rng_key)
    return action, (), carry

  return act


def sebulba_programs(
  driver: Sebulba,
) -> tuple[dict[str, Callable], int, Callable]:
  """Makes a function `(num_updates) -> None` for each part and for training.

  The parts have environments of their own. This starts the driver.

  Returns:
    The functions by name, the number of parameters, and a function that frees
    the resources and returns the names of actors that hang.
  """
  settings, agent, mesh = driver.settings, driver.agent, driver.mesh
  length, num_envs = settings.unroll_length, settings.num_envs
  devices = [
    x for x in driver.actor_devices for _ in range(settings.actors_per_device)
  ]
  pools = [driver.make_env(i) for i in range(len(devices))]
  variables = jax.jit(agent.init)(jax.random.key(0))

  def make_still(pool: HostEnv) -> HostEnv:
    timestep = pool.reset()
    xla = pool.xla and pool.xla._replace(
      init=lambda begin, end: pool.xla.init(lambda: False, end)
    )
    return pool._replace(
      reset=lambda: timestep, step=lambda _: timestep, xla=xla
    )

  functions = actor_lib.make_actor_functions(
    agent,
    pools[0].spec.observe,
    len(mesh.local_devices),
    pools[0].xla and pools[0].xla.step,
  )
  actors = [
    actor_lib.Actor(
      i,
      make_still(pool),
      functions,
      length,
      devices[i],
      list(mesh.local_devices),
      jax.random.key(1),
      i * num_envs,
    )
    for i, pool in enumerate(pools)
  ]
  # Zeros, because a program without steps returns undefined observations.
  shards = [
    jax.tree.map(
      jnp.zeros_like, actor.start(jax.device_put(variables, actor.device))
    )
    for actor in actors
  ]
  trajectories = tuple(
    spmd.join_shards(x, mesh, spmd.TRAJECTORY) for x in shards
  )
  update = spmd.map_update(driver.core, mesh)
  shape = jax.eval_shape(spmd.join_unrolls, [x[0] for x in shards])

  def init(key):
    return driver.core.init(key, shape)

  state = spmd.init_learner(init, driver.core, mesh, jax.random.key(0))
  key = spmd.place(jax.random.key(2), mesh, spmd.REPLICATED)

  def in_threads(function: Callable) -> Callable:
    def run(num_updates: int) -> None:
      threads = [
        threading.Thread(target=function, args=(i, num_updates))
        for i in range(len(pools))
      ]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()

    return run

  def step(i: int, num_updates: int) -> None:
    rng = np.random.default_rng(i)
    num_actions = pools[i].spec.action.num_actions
    for _ in range(num_updates * length):
      pools[i].step(rng.integers(num_actions, size=num_envs))

  def act(i: int, num_updates: int) -> None:
    local = jax.device_put(variables, actors[i].device)
    with np.errstate(all='ignore'):
      for _ in range(num_updates):
        actors[i].unroll(local, 0)

  def learn(num_updates: int) -> None:
    nonlocal state, trajectories
    for _ in range(num_updates):
      # A memory joins an unroll to the previous one only if `num_steps`
      # continues.
      trajectories = tuple(
        x._replace(num_steps=x.num_steps + length) for x in trajectories
      )
      state, _ = jax.block_until_ready(
        update(state.variables, state._replace(variables=()), trajectories, key)
      )

  def train(num_updates: int) -> None:
    while num_updates > 0:
      num_updates -= driver.advance(num_updates)[0].num_updates

  def close() -> list[str]:
    for pool in pools:
      pool.close()
    return driver.close()

  driver.start()  # After this, the caller must call `close`.
  parts = {
    'environment': in_threads(step),
    'acting': in_threads(act),
    'update': learn,
    'training': train,
  }
  return parts, sum(x.size for x in jax.tree.leaves(variables.params)), close


def measure(config: Fields, repeats: int) -> dict[str, float]:
  """Measures one row: median rates, and training divided by its bound."""
  functions, num_params, close = (
    sebulba_programs(build.make_run(config).driver)
    if _is_sebulba(config)
    else programs(config)
  )
  try:
    row = _rates(config, functions, repeats)
  finally:
    close()
  parts = [row[x] for x in ('environment', 'acting', 'update')]
  bound = (
    min(parts)
    if _is_sebulba(config)
    else (1 / (1 / row['acting'] + 1 / row['update']))
  )
  return row | {
    'share_of_bound': row['training'] / bound,
    'num_params': num_params,
  }


def _rates(
  config: Fields, functions: dict[str, Callable], repeats: int
) -> dict[str, float]:
  """Measures the median steps per second of each function."""
  steps = config['env.num_envs'] * config['unroll_length']
  counts = {}
  length = AGENTS[config['agent.name']].sequence_length
  num_steps = length(config) if length else 0
  for name, function in functions.items():
    function(1 + num_steps // config['unroll_length'])  # Until learning begins.
    start = time.perf_counter()
    function(1)
    counts[name] = max(1, round(_SECONDS / (time.perf_counter() - start)))
  rates = {name: [] for name in functions}
  for _ in range(repeats):
    for name, function in functions.items():
      ahead = 0  # Updates whose unrolls are ready before the measurement.
      if _is_sebulba(config) and name == 'training':
        ahead = config['sebulba.max_lag'] + 1
        function(ahead)
      start = time.perf_counter()
      function(counts[name])
      seconds = time.perf_counter() - start
      rates[name].append(counts[name] * steps / seconds)
      # The actors still fill the queue of unrolls: wait until it is full.
      time.sleep(1.5 * ahead * seconds / counts[name])
  return {name: float(np.median(x)) for name, x in rates.items()}


def main(argv: Sequence[str]) -> None:
  """Measures all rows, prints the table and writes the file."""
  logging.set_verbosity(logging.WARNING)  # JAX logs each missing backend.
  if len(argv) > 1:
    raise app.UsageError(f'the argument {argv[1]} is unknown')
  unused = (
    {'num_devices': _NUM_DEVICES}
    if _ARCHITECTURE.value == 'sebulba'
    else {'agent': _AGENT, 'threads': _THREADS}
  )
  for name, flag in unused.items():
    if flag.value != flag.default:
      raise app.UsageError(
        f'--architecture={_ARCHITECTURE.value} does not use --{name}'
      )
  all_names = _NAMES[_ARCHITECTURE.value]
  names = [n for n in all_names if _FILTER.value.lower() in n.lower()]
  if not names:
    raise app.UsageError(
      f'--filter={_FILTER.value} matches none of {", ".join(all_names)}'
    )
  if not all(n.isdecimal() and int(n) for n in _NUM_ENVS.value):
    raise app.UsageError('--num_envs needs positive integers, such as 64,1024')
  rows, console = [], Console(highlight=False)
  if _ARCHITECTURE.value == 'sebulba':
    configs = [
      get_sebulba_config(name, int(n))
      for name in names
      for n in (_NUM_ENVS.value or ['16' if name == 'Pong-v5' else '64'])
    ]
  else:
    configs = [
      get_config(name, int(n))
      for name in names
      for n in _NUM_ENVS.value or ['64', '1024', '4096']
    ]
  for config in configs:
    check(config)
  is_sebulba = _is_sebulba(configs[0])
  # Some numbers of environments do not divide over all devices.
  largest = (
    configs[0] if is_sebulba else max(configs, key=layout.num_cpu_devices)
  )
  build.set_up_jax(largest)
  for config in configs:
    rows.append(
      {
        'environment_name': config['env.name'],
        'num_envs': config['env.num_envs'],
        'agent': config['agent.name'],
        'num_minibatches': config.get('num_minibatches', 1),
        **measure(config, _REPEATS.value),
      }
    )
    console.print(
      f'{config["env.name"]}, {config["env.num_envs"]} environments: '
      f'{rows[-1]["training"]:,.0f} steps/s'
    )
  device = jax.devices()[0]
  num_devices = (
    len(jax.devices()) if is_sebulba else len(layout.anakin_devices(largest))
  )
  columns = 'envs parameters stepping acting update training'.split()
  table = make_table(
    *('environment', *columns, 'of bound'),
    left=['environment'],
    title=(
      f'Steps per second, medians of {_REPEATS.value} repeats, {num_devices} '
      f'{device.platform} devices ({device.device_kind})'
    ),
  )
  for row in rows:
    table.add_row(
      row['environment_name'],
      f'{row["num_envs"]:,}',
      f'{row["num_params"]:,}',
      *(
        compact(row[x]) for x in ('environment', 'acting', 'update', 'training')
      ),
      f'{row["share_of_bound"]:.0%}',
    )
  console.print(table)
  if _OUT.value:
    with open(_OUT.value, 'w', encoding='utf-8') as file:
      json.dump(rows, file, indent=2)


if __name__ == '__main__':
  app.run(main)
