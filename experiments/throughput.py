"""How fast podrl's parts and its full training are; a benchmark, not a test.

  python experiments/throughput.py [--filter=CartPole] [--num_envs=64,1024]
      [--repeats=5] [--num_devices=0] [--out=throughput.json]

For each row: environments alone (random actions, the same scan), acting alone
(environments and policy), the update alone, and full training, each a compiled
program of the same length, run in turn, warm; medians of steps per second.
Full training is also given as a share of the bound that its parts imply,
1 / (1 / acting + 1 / update).
"""

from collections.abc import Callable, Sequence
import json
import time

from absl import app
from absl import flags
from absl import logging
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
from rich.console import Console
from rich.table import Table

from podrl import build
from podrl import layout
from podrl import spmd
from podrl.anakin import make_anakin, make_unroll
from podrl.check import check
from podrl.config import base_config
from podrl.metrics import compact
from podrl.types import DeviceEnv, Tree

_FILTER = flags.DEFINE_string('filter', '', 'only environments named like it')
_NUM_ENVS = flags.DEFINE_list('num_envs', ['64', '1024', '4096'], 'the rows')
_REPEATS = flags.DEFINE_integer('repeats', 5, 'of each measurement', 1)
_NUM_DEVICES = flags.DEFINE_integer('num_devices', 0, '0 is the default', 0)
_OUT = flags.DEFINE_string('out', '', 'a JSON file to write')

_NAMES = ('CartPole-v1', 'Breakout-MinAtar', 'Pong-misc')
_MAX_UPDATES = 64  # In one call of training.
_SECONDS = 1.  # About so long is one measurement.


def get_config(name: str, num_envs: int) -> ConfigDict:
  """What is timed: settings that learn, with two separate torsos."""
  config = base_config('ppo')
  config.env.name = name
  config.env.num_envs = num_envs
  config.unroll_length = 128
  config.num_epochs = 4
  # Four minibatches of 64 environments; a batch of 4,096 steps beyond.
  config.num_minibatches = max(4, num_envs // 32)
  config.network.name = 'mlp'
  config.num_devices = _NUM_DEVICES.value
  config.optimizer.anneal = False  # There is no end to anneal to.
  return config


def programs(config: ConfigDict) -> tuple[dict[str, Callable], int]:
  """The parts and the whole, each `(num_updates) -> None`, warm.

  Returns:
    Them by name, and the number of parameters.
  """
  env = build.make_env(config)
  agent = build.make_agent(config, env.spec)
  mesh = spmd.make_mesh(layout.devices(config))
  learner = build.learner_for(config, agent, num_updates=1)
  driver = make_anakin(
      env, agent, learner, mesh, num_envs=config.env.num_envs,
      unroll_length=config.unroll_length, max_updates=_MAX_UPDATES)
  # The same unroll; what it acts with is all that differs.
  act = make_unroll(env, agent, config.unroll_length)
  step = make_unroll(
      env, agent._replace(act=_random_act(env)), config.unroll_length)

  def repeat(function: Callable) -> Callable:
    return lambda num_updates, state, *rest: jax.lax.fori_loop(
        0, num_updates, lambda i, state: function(i, state, *rest), state)

  def used(actors: Tree, trajectory: Tree) -> Tree:
    # All of the trajectory is needed, or the compiler would leave it out.
    actors, _ = jax.lax.optimization_barrier((actors, trajectory))
    return actors

  def update(i, state, trajectory, rng_key):
    return learner.update(state, trajectory, jax.random.fold_in(rng_key, i))[0]

  whole = driver.init(jax.random.key(0))
  params = whole.learner.params
  state_specs = (spmd.REPLICATED, spmd.BATCH, spmd.REPLICATED)
  unroll = spmd.device_map(
      lambda params, actors: act(params, actors, 0)[1], mesh,
      state_specs[:2], spmd.TRAJECTORY)
  trajectory = unroll(params, whole.actors)
  rollouts = {
      name: spmd.device_map(
          repeat(lambda i, actors, params, f=f: used(*f(
              params, actors, i)[:2])), mesh,
          (spmd.REPLICATED, spmd.BATCH, spmd.REPLICATED), spmd.BATCH)
      for name, f in (('environment', step), ('acting', act))}
  updates = spmd.device_map(
      repeat(update), mesh,
      (spmd.REPLICATED, spmd.LEARNER_STATE, spmd.TRAJECTORY, spmd.REPLICATED),
      spmd.LEARNER_STATE)
  key = jax.random.key(1)
  state = whole

  def train(num_updates: int) -> None:
    nonlocal state  # Donated.
    while num_updates > 0:
      state, _ = driver.train(state, np.int32(min(num_updates, _MAX_UPDATES)))
      num_updates -= _MAX_UPDATES
    jax.block_until_ready(state)

  actors = jax.tree.map(jnp.copy, whole.actors)
  learner_state = jax.tree.map(jnp.copy, whole.learner)
  parts = {
      name: lambda n, f=f: jax.block_until_ready(
          f(np.int32(n), actors, learner_state.params))
      for name, f in rollouts.items()}
  parts['update'] = lambda n: jax.block_until_ready(
      updates(np.int32(n), learner_state, trajectory, key))
  return parts | {'training': train}, sum(
      x.size for x in jax.tree.leaves(params))


def _random_act(env: DeviceEnv) -> Callable:
  """An `Agent.act` of uniformly random actions, without a network."""
  def act(params, rng_key, timestep, carry, *, greedy=False):
    del params, timestep, greedy
    action = jax.vmap(lambda key: jax.random.randint(
        key, (), 0, env.spec.action.num_actions))(rng_key)
    return action, (), carry

  return act


def measure(config: ConfigDict, repeats: int) -> dict[str, float]:
  """One row: median steps per second of each part, and the share."""
  functions, num_params = programs(config)
  steps = config.env.num_envs * config.unroll_length
  counts = {}
  for name, function in functions.items():
    function(1)
    start = time.perf_counter()
    function(1)
    counts[name] = max(1, round(_SECONDS / (time.perf_counter() - start)))
  rates = {name: [] for name in functions}
  for _ in range(repeats):
    for name, function in functions.items():
      start = time.perf_counter()
      function(counts[name])
      rates[name].append(counts[name] * steps / (time.perf_counter() - start))
  row = {name: float(np.median(x)) for name, x in rates.items()}
  bound = 1 / (1 / row['acting'] + 1 / row['update'])
  return row | {'share_of_bound': row['training'] / bound,
                'num_params': num_params}


def main(argv: Sequence[str]) -> None:
  """Prints the table and writes it."""
  logging.set_verbosity(logging.WARNING)  # JAX tells of each missing backend.
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]} is not understood')
  names = [n for n in _NAMES if _FILTER.value.lower() in n.lower()]
  if not names:
    raise app.UsageError(f'--filter={_FILTER.value} leaves none of {_NAMES}')
  if not all(n.isdecimal() and int(n) for n in _NUM_ENVS.value):
    raise app.UsageError('--num_envs takes counts, such as 64,1024')
  rows, console = [], Console(highlight=False)
  configs = [get_config(name, int(n)) for name in names
             for n in _NUM_ENVS.value]
  if jax.config.jax_num_cpu_devices < 1:
    spmd.set_num_cpu_devices(layout.num_cpu_devices(configs[0]))
  for config in configs:
    check(config)
  for config in configs:
    rows.append({
        'environment_name': config.env.name, 'num_envs': config.env.num_envs,
        'num_minibatches': config.num_minibatches,
        **measure(config, _REPEATS.value)})
    console.print(f'{config.env.name}, {config.env.num_envs} environments: '
                  f'{rows[-1]["training"]:,.0f} steps/s')
  device = jax.devices()[0]
  table = Table(title=(
      f'Steps per second, {len(layout.devices(configs[0]))} {device.platform} '
      f'devices ({device.device_kind}), medians of {_REPEATS.value}'))
  table.add_column('environments')
  for column in ('parameters', 'stepping', 'acting', 'update', 'training',
                 'of bound'):
    table.add_column(column, justify='right')
  for row in rows:
    table.add_row(
        f'{row["environment_name"]} x {row["num_envs"]}',
        f'{row["num_params"]:,}',
        *(compact(row[x]) for x in (
            'environment', 'acting', 'update', 'training')),
        f'{row["share_of_bound"]:.0%}')
  console.print(table)
  if _OUT.value:
    with open(_OUT.value, 'w', encoding='utf-8') as file:
      json.dump(rows, file, indent=2)


if __name__ == '__main__':
  app.run(main)
