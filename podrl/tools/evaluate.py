"""Evaluates the policies of runs.

  podrl evaluate RUN [RUN ...] [--episodes=N] [--checkpoint=last|best|UPDATES]
      [--[no]greedy] [--seed=S] [--out=FILE] [--trust]

This command runs N episodes and prints their mean return, with a bootstrap 95 %
interval. If the runs have several agents, the command prints a line for each of
them, and then their mean, the worst agent and, if the agents differ only in
their seeds, a bootstrap 95 % interval over the agents. It writes these numbers
and the return of every episode to FILE. By default, FILE is evaluation.json in
the directory RUN, or in the directory that contains all the runs. A run that
somebody else made may need --trust; see docs/how-to/policy.md.
"""

from collections.abc import Callable, Mapping, Sequence
import os
from typing import Any

from absl import flags
import jax
import numpy as np

from podrl import tools
from podrl.fields import Fields
from podrl.messages import count, printable, two_decimals
from podrl.records import workdir
from podrl.records.merging import bootstrap, spread
from podrl.records.terminal import describe_spread
from podrl.run import build, policy


def _evaluate(
  path: str, name: str, values: flags.FlagValues, evaluate: Callable | None
) -> tuple[dict[str, Any], Fields, Callable]:
  """Evaluates one agent and prints the result after the `name`.

  Returns the result, the agent's configuration and the compiled evaluation,
  which the next agent of the same run receives as `evaluate`.
  """
  loaded = policy.load(path, values.checkpoint, trust=values.trust)
  config = {**loaded.config, 'eval.num_episodes': values.episodes}
  config['eval.greedy'] = tools.is_greedy(values, config)
  evaluate = evaluate or build.make_evaluate(config, loaded.spec, loaded.agent)
  key = jax.random.key(values.seed)
  outcome = evaluate(loaded.variables, key, should_stop=lambda: False)
  assert outcome is not None  # It was not stopped.
  returns = outcome.returns.astype(np.float64)
  low, high = bootstrap(returns)
  length = outcome.lengths.mean()
  result = {
    'env': config['env.name'],
    'num_updates': loaded.num_updates,
    'greedy': config['eval.greedy'],
    'seed': values.seed,
    'episodes': len(returns),
    'return': returns.mean(),
    'return_low': low,
    'return_high': high,
    'return_std': returns.std(),
    'length': length,
    'returns': returns.tolist(),
  }
  name = printable(name or config['env.name'])
  numbers = float(returns.mean()), float(low), float(high)
  mean, first, last = (two_decimals(x, *numbers) for x in numbers)
  print(
    f'{name}, after {loaded.num_updates} updates: '
    f'{mean} (95 %: {first} to {last}) over '
    f'{len(returns)} episodes of {length:.0f} steps'
  )
  limit = build.episode_limit(config, loaded.spec)
  num_cut = int(np.sum(outcome.lengths >= limit))
  if num_cut and limit != loaded.spec.max_episode_steps:
    print(
      f'{count(num_cut, "episode")} reached the limit of {limit:,} steps, and '
      'counted until then'
    )
  return result, config, evaluate


def _join(
  results: Mapping[str, dict[str, Any]], are_alike: bool
) -> dict[str, Any]:
  """Prints and returns the mean of several agents, by name."""
  first, *_ = found = list(results.values())
  mean = float(np.mean([x['return'] for x in found]))
  fields = spread([x['return'] for x in found], [*results], are_alike)
  kind = 'seeds' if are_alike else 'agents'
  print(
    f'{printable(first["env"])}: {two_decimals(mean)} '
    f'({describe_spread(fields)}), '
    f'mean of {len(found)} {kind} with {count(first["episodes"], "episode")} '
    'each'
  )
  return {
    'env': first['env'],
    'greedy': first['greedy'],
    'seed': first['seed'],
    'episodes': first['episodes'],
    'return': mean,
    **{k.removeprefix('eval_'): x for k, x in fields.items()},
    'length': float(np.mean([x['length'] for x in found])),
    'agents': dict(results),
  }


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Evaluates, prints the result and writes it to a file."""
  if not paths:
    raise ValueError('no run is given; try podrl evaluate RUN')
  directory = tools.common_directory(paths)
  # An environment may change the current directory.
  out = values.out or os.path.join(directory, 'evaluation.json')
  out = workdir.absolute(out)
  if os.path.isdir(directory):  # Otherwise, `load` raises an error.
    tools.check_out(out)
  runs = [workdir.paths_of_agents(path) for path in paths]
  if len(paths) > 1:
    envs = [workdir.read_config(path) for path in paths]
    if len({(x['env.suite'], x['env.name']) for x in envs}) > 1:
      raise ValueError('these runs have different tasks; evaluate each alone')
  is_alone = sum(map(len, runs)) == 1
  results, kinds = {}, set()
  for agents in runs:
    evaluate = None
    for agent in agents:
      name = '' if is_alone else os.path.relpath(agent, directory)
      result, config, evaluate = _evaluate(agent, name, values, evaluate)
      results[name] = result
      kind = workdir.compared(config)
      kinds.add((kind, config['eval.greedy'], config['eval.max_episode_steps']))
  [result, *others] = results.values()
  if others:
    result = _join(results, len(kinds) == 1)
  with tools.writing(out):
    workdir.write_json(out, result)
  print(printable(f'written: {out}'))


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = tools.policy_flags(128, 2**24)
  flags.DEFINE_string('out', '', 'The .json file to write.', values)
  return tools.run_command(argv, __doc__, values, _act)
