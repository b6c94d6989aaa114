"""Evaluates a run's policy.

  podrl evaluate RUN [--episodes=N] [--checkpoint=last|best|UPDATES]
      [--[no]greedy] [--seed=S] [--out=FILE] [--trust]

This command runs N episodes and prints their mean return, with a bootstrap 95 %
interval. It writes these numbers and the return of every episode to FILE. By
default, FILE is evaluation.json in the directory RUN. A run that somebody else
made may need --trust; see docs/how-to/policy.md.
"""

from collections.abc import Sequence
import os

from absl import flags
import jax
import numpy as np

from podrl import tools
from podrl.messages import count, printable
from podrl.records import workdir
from podrl.run import build, policy
from podrl.run.evaluation import bootstrap


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Evaluates, prints the result and writes it to a file."""
  path = tools.single_path(paths, 'run', 'evaluate RUN')
  out = values.out or os.path.join(path, 'evaluation.json')
  if os.path.isdir(path):  # If it is not, `load` says so.
    tools.check_out(out)
  loaded = policy.load(path, values.checkpoint, trust=values.trust)
  config = loaded.config
  config.eval.num_episodes = values.episodes
  if values.greedy is not None:
    config.eval.greedy = values.greedy
  evaluate = build.make_evaluate(config, loaded.spec, loaded.agent)
  key = jax.random.key(values.seed)
  outcome = evaluate(loaded.variables, key, should_stop=lambda: False)
  assert outcome is not None  # It was not stopped.
  returns = outcome.returns.astype(np.float64)
  low, high = bootstrap(returns)
  length = outcome.lengths.mean()
  result = {
    'env': config.env.name,
    'num_updates': loaded.num_updates,
    'greedy': config.eval.greedy,
    'seed': values.seed,
    'episodes': len(returns),
    'return': returns.mean(),
    'return_low': low,
    'return_high': high,
    'return_std': returns.std(),
    'length': length,
    'returns': returns.tolist(),
  }
  name = printable(config.env.name)
  print(
    f'{name}, after {loaded.num_updates} updates: '
    f'{returns.mean():.2f} (95 %: {low:.2f} to {high:.2f}) over '
    f'{len(returns)} episodes of {length:.0f} steps'
  )
  limit = build.episode_limit(config, loaded.spec)
  num_cut = int(np.sum(outcome.lengths >= limit))
  if num_cut and limit != loaded.spec.max_episode_steps:
    print(
      f'{count(num_cut, "episode")} reached the limit of {limit:,} steps, and '
      'counted until then'
    )
  with tools.writing(out):
    workdir.write_json(out, result)
  print(printable(f'written: {out}'))


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = tools.policy_flags(128, 2**24)
  flags.DEFINE_string('out', '', 'The .json file to write.', values)
  return tools.run_command(argv, __doc__, values, _act)
