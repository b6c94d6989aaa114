"""Measures what a tree search costs and what it buys; a benchmark, not a test.

  python experiments/benchmarks/search.py RUN [--checkpoint=last|best|UPDATES]
      [--simulations=1,2,4,8,16,32] [--episodes=512] [--batch=64] [--turns=9]
      [--picture=search.png]

RUN is an Anakin run of the agent `muzero` with discrete actions. For each
number of simulations, the program prints:

- the return with greedy actions, and its bootstrap 95 % interval. With one
  simulation, the action is the most probable one of the policy alone;
- the speed of acting, in time steps per second;
- the search's share of the time of acting: 1 - (time with the policy alone) /
  (time with the search);
- the ratio of the speed to that of mctx alone, with the same network.

The speeds are medians of turns; in each turn, every variant is measured once.
The program draws the tree of the first search, and the returns, to a file.
"""

from collections.abc import Callable, Sequence
import statistics
import time
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import mctx
import numpy as np

from podrl.agents import muzero, muzero_search
from podrl.fields import section
from podrl.records.merging import bootstrap
from podrl.run import build
from podrl.run.policy import Policy, load
from podrl.types import Discrete, Masked, Tree

_CHECKPOINT = flags.DEFINE_string('checkpoint', 'last', 'The checkpoint.')
_SIMULATIONS = flags.DEFINE_list(
  'simulations', '1,2,4,8,16,32', 'Numbers of simulations.'
)
_EPISODES = flags.DEFINE_integer('episodes', 512, 'Episodes of a return.', 1)
_BATCH = flags.DEFINE_integer('batch', 64, 'Environments that act.', 1)
_TURNS = flags.DEFINE_integer('turns', 9, 'Turns of measurement.', 1)
_PICTURE = flags.DEFINE_string('picture', 'search.png', 'The picture to write.')
_SHOWN = 16  # Simulations of the tree in the picture.


def make_bare(
  policy: Policy, num_simulations: int
) -> Callable[[jax.Array, Tree], Any]:
  """Builds `(rng_key, obs[B, ...]) -> output` of mctx, for the whole batch."""
  size = policy.config['agent.support']
  codec = muzero_search.Codec(jnp.arange(-size, size + 1.0))
  fields = section(policy.config, 'network')
  network = muzero.build_network(policy.spec, fields, len(codec.support))
  params, gamma = policy.variables.params, policy.config['agent.gamma']

  def recurrent(params, rng_key, action, hidden):
    hidden, reward = network.step(params, hidden, action)
    logits, value = network.predict(params, hidden)
    output = mctx.RecurrentFnOutput(
      reward=codec.decode(reward),
      discount=jnp.full(len(action), gamma),
      prior_logits=logits,
      value=codec.decode(value),
    )
    return output, hidden

  def search(rng_key, obs):
    hidden = network.represent(params, obs)
    logits, value = network.predict(params, hidden)
    if not num_simulations:
      return jnp.argmax(logits, axis=-1)
    root = mctx.RootFnOutput(
      prior_logits=logits, value=codec.decode(value), embedding=hidden
    )
    return mctx.gumbel_muzero_policy(
      params,
      rng_key,
      root,
      recurrent,
      num_simulations,
      qtransform=muzero_search.gumbel_scores,
    )

  return jax.jit(search)


def with_simulations(
  policy: Policy, num_simulations: int
) -> tuple[dict[str, Any], Any]:
  """Returns the configuration and the agent with other simulations."""
  names = 'search.num_simulations', 'search.eval_num_simulations'
  config = {**policy.config, **dict.fromkeys(names, num_simulations)}
  return config, build.make_agent(config, policy.spec)


def measure_cost(
  policy: Policy, numbers: Sequence[int], timestep: Tree
) -> dict[int, tuple[float, float, float]]:
  """Returns, for each number, the speed, the share and the ratio."""
  keys = jax.random.split(jax.random.key(0), _BATCH.value)
  carry = policy.initial_carry(_BATCH.value)
  programs: dict[Any, Callable[[], Any]] = {}
  bare_policy = make_bare(policy, 0)
  programs['policy'] = lambda: bare_policy(keys[0], timestep.obs)
  for n in numbers:
    act = jax.jit(with_simulations(policy, n)[1].act)
    bare = make_bare(policy, n)
    programs['act', n] = lambda act=act: act(
      policy.variables, keys, timestep, carry
    )
    programs['bare', n] = lambda bare=bare: bare(keys[0], timestep.obs).action
  times: dict[Any, list[float]] = {name: [] for name in programs}
  for program in programs.values():
    jax.block_until_ready(program())
  for _ in range(_TURNS.value):
    for name, program in programs.items():
      start, count = time.perf_counter(), 0
      while time.perf_counter() < start + 0.3:
        jax.block_until_ready(program())
        count += 1
      times[name].append((time.perf_counter() - start) / count)
  found = {}
  for n in numbers:
    acting, bare = times['act', n], times['bare', n]
    share = 1 - statistics.median(np.divide(times['policy'], acting))
    ratio = statistics.median(np.divide(bare, acting))
    found[n] = _BATCH.value / statistics.median(acting), share, ratio
  return found


def measure_returns(
  policy: Policy, numbers: Sequence[int]
) -> dict[int, tuple[float, float, float]]:
  """Returns, for each number, the mean return and its 95 % interval."""
  found = {}
  for n in numbers:
    config, agent = with_simulations(policy, n)
    config['eval.num_episodes'], config['eval.greedy'] = _EPISODES.value, True
    evaluate = build.make_evaluate(config, policy.spec, agent)
    key = jax.random.key(0)
    outcome = evaluate(policy.variables, key, should_stop=lambda: False)
    values = np.asarray(outcome.returns, np.float64)
    found[n] = values.mean(), *map(float, bootstrap(values))
  return found


def draw_tree(axes: Any, tree: mctx.Tree, row: int = 0) -> None:
  """Draws the tree of one search, with visits and values of its states."""
  num_nodes = int(np.sum(tree.node_visits[row] > 0))
  children = np.asarray(tree.children_index[row])
  positions, next_column = {}, 0

  def place(node: int, depth: int) -> float:
    """Puts a state above the middle of those that follow it."""
    nonlocal next_column
    inner = [place(c, depth + 1) for c in children[node] if c >= 0]
    if not inner:
      inner, next_column = [next_column], next_column + 1
    positions[node] = (float(np.mean(inner)), -depth)
    return positions[node][0]

  place(0, 0)
  for node in range(num_nodes):
    x, y = positions[node]
    for action, child in enumerate(children[node]):
      if child < 0:
        continue
      to_x, to_y = positions[child]
      visits = int(tree.children_visits[row, node, action])
      axes.plot(
        [x, to_x],
        [y, to_y],
        color='0.6',
        linewidth=0.6 + 0.4 * visits,
        zorder=1,
      )
      middle = (x + to_x) / 2, (y + to_y) / 2
      axes.annotate(
        str(action),
        middle,
        fontsize=8,
        color='C0',
        ha='center',
        va='center',
        bbox={'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.8},
      )
    text = f'{tree.node_values[row, node]:.1f}\n{tree.node_visits[row, node]}x'
    axes.annotate(
      text,
      (x, y),
      fontsize=7,
      ha='center',
      va='center',
      bbox={'boxstyle': 'round', 'facecolor': 'white', 'edgecolor': '0.3'},
    )
  axes.margins(0.08, 0.12)
  axes.axis('off')


def draw(path: str, tree: mctx.Tree, found: dict[int, Any], title: str) -> None:
  """Draws the tree and the returns to a file."""
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(12, 5), width_ratios=(2.2, 1), layout='constrained'
  )
  draw_tree(left, tree)
  left.set_title(
    f'A search with {_SHOWN} simulations: actions (blue), values and visits'
  )
  numbers = list(found)
  mean, low, high = np.array(list(found.values())).T
  right.plot(numbers, mean, marker='o')
  right.fill_between(numbers, low, high, alpha=0.2)
  right.set_xscale('log', base=2)
  right.set_xticks(numbers, [str(n) for n in numbers])
  right.set_xlabel('simulations (1: the policy alone)')
  right.set_ylabel(f'return of {_EPISODES.value} episodes')
  right.set_title(title)
  right.grid(alpha=0.3)
  figure.savefig(path, dpi=110)


def main(argv: Sequence[str]) -> None:
  """Plays with each number of simulations; prints and draws the returns."""
  if len(argv) != 2:
    raise app.UsageError('give one run, as in search.py runs/mine')
  try:
    policy = load(argv[1], _CHECKPOINT.value)
    numbers = sorted({int(x) for x in _SIMULATIONS.value})
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  if not numbers or numbers[0] < 1:
    raise app.UsageError('--simulations needs whole numbers of at least 1')
  is_fit = (
    build.architecture(policy.config) == 'anakin'
    and isinstance(policy.spec.action, Discrete)
    and not isinstance(policy.spec.obs, Masked)
    and not policy.config['agent.normalize_observation']
  )
  if policy.config['agent.name'] != 'muzero' or not is_fit:
    raise app.UsageError(
      f'{argv[1]} is not an Anakin run of muzero with discrete actions, '
      'and without masks and normalised observations'
    )
  env = build.make_env(policy.config)
  _, timestep = env.reset(jax.random.split(jax.random.key(1), _BATCH.value))
  returns = measure_returns(policy, numbers)
  cost = measure_cost(policy, numbers, timestep)
  print(f'{policy.config["env.name"]}, after {policy.num_updates} updates')
  print(
    '| simulations | return (95 %) | steps/s | share of the search | mctx |'
  )
  print('|---|---|---|---|---|')
  for n in numbers:
    mean, low, high = returns[n]
    speed, share, ratio = cost[n]
    print(
      f'| {n} | {mean:.1f} ({low:.1f} to {high:.1f}) | {speed:,.0f} '
      f'| {share:.0%} | {ratio:.2f} |'
    )
  output = make_bare(policy, _SHOWN)(jax.random.key(0), timestep.obs)
  title = f'{policy.config["env.name"]}, {policy.num_updates} updates'
  draw(_PICTURE.value, jax.device_get(output.search_tree), returns, title)
  print(f'written: {_PICTURE.value}')


if __name__ == '__main__':
  app.run(main)
