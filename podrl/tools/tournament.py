"""Lets policies play a game for two against each other, and rates them.

  podrl tournament PLAYER PLAYER ... [--games=N] [--random_moves=2]
      [--[no]greedy] [--seed=S] [--out=FILE] [--trust]

A PLAYER is the directory of a run, RUN@UPDATES, RUN@best, or the word random,
which stands for legal actions at random. The runs have the same game of pgx, or
the same `jax:` environment, with any opponent. Each pair plays N games; each
player begins half of them. The first moves of a game are random, or greedy
players would repeat the same games. With --nogreedy, the players act as in
training, with its exploration.

The ratings are Elo: a player with 400 points more scores ten times as many
points, where a draw is half a point. They are the most likely ones under the
model of Bradley and Terry, and their mean is 0. The interval is a Bayesian 95 %
interval. For ratings and intervals, a third of a win, of a draw and of a loss
is added to each pair, so that a player who never loses has a finite rating.

The command prints a table, writes all results to FILE, which ends in .json, and
draws the ratings in a .png file beside it. By default, FILE is tournament.json
in the directory that contains all runs.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
import os
from typing import Any, NamedTuple

from absl import flags
import chex
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from podrl import tools
from podrl.core.learner import fold_into_rows
from podrl.core.returns import of_first_player
from podrl.envs import SUITES, games
from podrl.fields import Fields
from podrl.messages import printable
from podrl.records import workdir
from podrl.run import build, policy
from podrl.types import Array, DeviceEnv, TimeStep, Tree

_NUM_SAMPLES = 1000  # Samples of the probabilities of results.
_PRIOR = 1 / 3  # Wins, draws and losses that are added to each pair.


class Player(NamedTuple):
  """A player; `choose` compiles once for all its games."""

  name: str
  # `(rng_key[B], TimeStep[B], env_state[B]) -> action[B]`.
  choose: Callable[..., Array]


class Pair(NamedTuple):
  """The results of two players, from the view of the first of them.

  Each has the numbers of wins, draws and losses, int `[3]`.
  """

  begins: np.ndarray  # The games that the first player began.
  follows: np.ndarray  # The others.


def _random(rng_key: chex.PRNGKey, timestep: TimeStep, env_state: Tree):
  del env_state
  return jax.vmap(games.choose_at_random)(rng_key, timestep.obs)


def _of_policy(loaded: policy.Policy, greedy: bool) -> Callable[..., Array]:
  agent = loaded.agent

  @jax.jit
  def choose(variables, rng_key, timestep, env_state):
    carry = agent.initial_carry(jnp.arange(rng_key.size))
    known = agent.planning(env_state)
    return agent.act(
      variables, rng_key, timestep, carry, greedy=greedy, **known
    )[0]

  return functools.partial(choose, loaded.variables)


def _split(text: str) -> tuple[str, str]:
  """Returns the run and the checkpoint of a player."""
  path, at, which = text.rpartition('@')
  return (path, which) if at and not workdir.is_run(text) else (text, 'last')


def play(
  env: DeviceEnv,
  players: Sequence[Player],
  num_games: int,
  seed: int,
  random_moves: int = 0,
  max_steps: int = 10_000,
) -> dict[tuple[int, int], Pair]:
  """Lets each pair of players play.

  Args:
    env: the game, played from both sides, see `EnvSpec.has_turns`.
    num_games: games of each pair; the first player of a pair begins the first
      half of them.
    seed: all random numbers depend on it.
    random_moves: moves at the start of each game that are random.
    max_steps: after this many moves, a game counts as it stands.

  Returns:
    The results of each pair of indices.
  """
  begins = np.arange(num_games) < (num_games + 1) // 2
  at_random = jax.jit(_random)
  start = jax.jit(env.reset)

  @jax.jit
  def advance(carry, own, other):
    state, _, sign, total, is_over = carry
    is_own = begins == (sign > 0)
    state, timestep = env.step(state, jnp.where(is_own, own, other))
    is_over |= timestep.is_first
    reward, sign = of_first_player(timestep, sign)
    total += jnp.where(is_over, 0.0, reward)
    return state, timestep._replace(info=()), sign, total, is_over

  results = {}
  pairs = itertools.combinations(range(len(players)), 2)
  for number, (i, j) in enumerate(pairs):
    key = jax.random.fold_in(jax.random.key(seed), number)
    reset_key, *act_keys = jax.random.split(key, 3)
    state, timestep = start(jax.random.split(reset_key, num_games))
    keys = [jax.random.split(k, num_games) for k in act_keys]
    zeros = jnp.zeros(num_games)
    carry = state, timestep._replace(info=()), zeros + 1.0, zeros, zeros > 0
    for t in range(max_steps):
      if np.all(carry[-1]):
        break
      chosen = []
      for k, own in zip((i, j), keys):
        choose = players[k].choose if t >= random_moves else at_random
        chosen.append(choose(fold_into_rows(own, t), carry[1], carry[0]))
      carry = advance(carry, *chosen)
    total = np.asarray(carry[3]) * np.where(begins, 1, -1)
    each = np.stack([total > 0, total == 0, total < 0], axis=1)
    results[i, j] = Pair(each[begins].sum(0), each[~begins].sum(0))
  return results


def rate(scores: np.ndarray) -> np.ndarray:
  """Fits the Elo ratings `[..., K]` of K players; their mean is 0.

  Args:
    scores: `[..., K, K]`, the points of each player against each other one,
      where a draw is half a point; more than 0 beside the diagonal.

  Source: Hunter 2004, MM algorithms for generalized Bradley-Terry models, eq.
  30.
  """
  number = scores + np.swapaxes(scores, -1, -2)
  points = scores.sum(-1)
  skill = np.ones(points.shape)
  for _ in range(100_000):
    sums = skill[..., :, None] + skill[..., None, :]
    new = points / (number / sums).sum(-1)
    new /= np.exp(np.log(new).mean(-1, keepdims=True))
    change = np.abs(np.log(new / skill)).max()
    skill = new
    if change < 1e-8:
      break
  return 400.0 * np.log10(skill)


def _scores(counts: np.ndarray, pairs: Sequence[tuple[int, int]], size: int):
  """Returns `rate`'s scores from counts `[..., pairs, 3]`."""
  scores = np.zeros((*counts.shape[:-2], size, size))
  for k, (i, j) in enumerate(pairs):
    scores[..., i, j] = counts[..., k, 0] + 0.5 * counts[..., k, 1]
    scores[..., j, i] = counts[..., k, 2] + 0.5 * counts[..., k, 1]
  return scores


def summarise(
  names: Sequence[str], results: dict[tuple[int, int], Pair], seed: int
) -> dict[str, Any]:
  """Returns what the command writes to its file."""
  pairs, size = [*results], len(names)
  counts = np.stack([x.begins + x.follows for x in results.values()])
  rng = np.random.default_rng(seed)
  known = counts + _PRIOR
  drawn = np.stack(
    [x.sum() * rng.dirichlet(x, _NUM_SAMPLES) for x in known], axis=1
  )
  elo = rate(_scores(known, pairs, size))
  low, high = np.percentile(
    rate(_scores(drawn, pairs, size)), [2.5, 97.5], axis=0
  )
  kinds = 'wins', 'draws', 'losses'

  def total(player: int) -> dict[str, int]:
    own = [
      c if i == player else c[::-1]
      for (i, j), c in zip(pairs, counts)
      if player in (i, j)
    ]
    return dict(zip(kinds, np.sum(own, axis=0).tolist()))

  return {
    'players': [
      {
        'name': name,
        'elo': float(elo[k]),
        'elo_low': float(low[k]),
        'elo_high': float(high[k]),
        **total(k),
      }
      for k, name in enumerate(names)
    ],
    'pairs': [
      {
        'players': [names[i], names[j]],
        'first_begins': dict(zip(kinds, pair.begins.tolist())),
        'second_begins': dict(zip(kinds, pair.follows.tolist())),
      }
      for (i, j), pair in results.items()
    ],
  }


def _draw(path: str, players: Sequence[dict[str, Any]]) -> None:
  """Draws the ratings, the best player at the top."""
  ordered = sorted(players, key=lambda x: x['elo'])
  with tools.figure(path, 7, 1.2 + 0.35 * len(players)) as figure:
    axes = figure.add_subplot()
    elo = np.array([x['elo'] for x in ordered])
    low, high = (
      np.array([x[f'elo_{end}'] for x in ordered]) for end in ('low', 'high')
    )
    ends = np.maximum(0.0, [elo - low, high - elo])
    axes.errorbar(elo, range(len(elo)), xerr=ends, fmt='o', color='#1f5fa8')
    axes.set_yticks(range(len(elo)), [printable(x['name']) for x in ordered])
    axes.set_ylim(-0.6, len(elo) - 0.4)
    axes.set_xlabel('Elo rating, with 95 % interval; the mean is 0')
    axes.grid(axis='x', alpha=0.3)


def _load(
  texts: Sequence[str], values: flags.FlagValues
) -> tuple[list[Player], Fields]:
  """Loads the players; returns them and the configuration of one run."""
  players, configs = [], []
  for text in texts:
    if text == games.RANDOM:
      players.append(Player(text, jax.jit(_random)))
      continue
    path, which = _split(text)
    for agent in workdir.paths_of_agents(path):
      loaded = policy.load(agent, which, trust=values.trust)
      name = agent if which == 'last' else f'{agent}@{which}'
      greedy = bool(values.greedy)
      players.append(Player(name, _of_policy(loaded, greedy)))
      build.check_can_play(path, loaded.config)
      configs.append(loaded.config)
  if len(players) < 2 or not configs:
    raise ValueError(
      'give at least two players, one of them a run; try podrl tournament RUN '
      'random'
    )
  first, *others = configs
  if 'opponent' not in SUITES[first['env.suite']].policy_options:
    raise ValueError(f'{first["env.name"]} is no game for two')
  for config in others:
    names, options = zip(build.game(first), build.game(config))
    if names[0] != names[1]:
      raise ValueError(
        f'the runs have different games: {names[0]} and {names[1]}'
      )
    if options[0] != options[1]:
      raise ValueError(
        f'the games of the runs have different options: {options[0]} and '
        f'{options[1]}'
      )
  return players, first


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Plays, prints and writes the results."""
  texts = [os.path.expanduser(x) for x in paths]
  runs = [_split(x)[0] for x in texts if x != games.RANDOM]
  if not runs:
    raise ValueError('no run is given; try podrl tournament RUN random')
  directory = tools.common_directory(sorted({*runs}))
  out = workdir.absolute(
    values.out or os.path.join(directory, 'tournament.json')
  )
  if not out.endswith('.json'):
    raise ValueError(f'--out={values.out} must end in .json')
  players, config = _load(texts, values)
  tools.check_out(out)
  env = build.make_env(config, games.SELF)
  limit = build.episode_limit(config, env.spec)
  numbers = values.games, values.seed, values.random_moves, limit
  results = play(env, players, *numbers)
  # Several players from one run all have the name of the run.
  start = os.path.dirname(directory) if workdir.is_run(directory) else directory
  names = [
    x.name if x.name == games.RANDOM else os.path.relpath(x.name, start)
    for x in players
  ]
  found = {
    'env': config['env.name'],
    'greedy': bool(values.greedy),
    'seed': values.seed,
    'games_per_pair': values.games,
  }
  found |= summarise(names, results, values.seed)
  table = tools.make_table(
    'player', 'Elo', '95 %', 'wins', 'draws', 'losses', left=['player']
  )
  for x in sorted(found['players'], key=lambda x: -x['elo']):
    table.add_row(
      printable(x['name']),
      f'{x["elo"]:.0f}',
      f'{x["elo_low"]:.0f} to {x["elo_high"]:.0f}',
      *(str(x[k]) for k in ('wins', 'draws', 'losses')),
    )
  Console(highlight=False, soft_wrap=True).print(table)
  picture = f'{out.removesuffix(".json")}.png'
  with tools.writing(out):
    workdir.write_json(out, found)
    _draw(picture, found['players'])
  print(printable(f'written: {out}, {picture}'))


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = flags.FlagValues()
  text = 'Games of each pair of players.'
  tools.define_integer('games', 200, text, 2, 2**20, values)
  text = 'Random moves at the start of each game.'
  tools.define_integer('random_moves', 2, text, 0, 2**20, values)
  text = 'Take the most probable actions instead of samples.'
  flags.DEFINE_bool('greedy', True, text, values)
  text = 'The seed of the games and the actions.'
  tools.define_integer('seed', 0, text, 0, 2**31 - 1, values)
  flags.DEFINE_bool('trust', False, tools.TRUST, values)
  flags.DEFINE_string('out', '', 'The .json file to write.', values)
  return tools.run_command(argv, __doc__, values, _act)
