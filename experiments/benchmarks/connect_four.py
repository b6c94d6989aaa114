"""Plays runs of Connect Four against a plain alpha-beta search.

  python experiments/benchmarks/connect_four.py RUN [RUN ...] [--games=100]
      [--depth=4]

The opponent looks `depth` moves ahead. If no game ends within this depth, it
counts the lines of four that only one side can still fill: 1, 4 and 16 points
for one, two and three stones. Of equal moves, it chooses at random. The runs
take greedy actions, so the first move of each game is random. Each side begins
half of the games. The output has a line for each run.
"""

from collections.abc import Sequence
import functools

from absl import app, flags
import jax
import numpy as np

import podrl
from podrl.envs import SUITES, games

_GAMES = flags.DEFINE_integer('games', 100, 'Number of games of each run.', 2)
_DEPTH = flags.DEFINE_integer('depth', 4, 'Moves of the search.', 1)

_ROWS, _COLUMNS = 6, 7
# The middle columns come first, so that the search cuts off more moves.
_ORDER = (3, 2, 4, 1, 5, 0, 6)


def _lines() -> list[int]:
  """Returns all lines of four as masks; bit r * 7 + c is a cell."""
  found = []
  for row in range(_ROWS):
    for column in range(_COLUMNS):
      for down, right in (0, 1), (1, 0), (1, 1), (1, -1):
        cells = [(row + i * down, column + i * right) for i in range(4)]
        if all(r < _ROWS and 0 <= c < _COLUMNS for r, c in cells):
          found.append(sum(1 << (r * _COLUMNS + c) for r, c in cells))
  return found


_LINES = _lines()
_WIN = 10_000


def _wins(stones: int) -> bool:
  return any(line & stones == line for line in _LINES)


def _moves(mine: int, theirs: int) -> list[tuple[int, int]]:
  """Returns pairs (column, cell) of the legal moves; row 5 is the lowest."""
  taken, found = mine | theirs, []
  for column in _ORDER:
    for row in reversed(range(_ROWS)):
      cell = 1 << (row * _COLUMNS + column)
      if not taken & cell:
        found.append((column, cell))
        break
  return found


def _estimate(mine: int, theirs: int) -> int:
  total = 0
  for line in _LINES:
    own, other = (line & mine).bit_count(), (line & theirs).bit_count()
    if own and not other:
      total += 4 ** (own - 1)
    elif other and not own:
      total -= 4 ** (other - 1)
  return total


@functools.lru_cache(2**20)
def search(mine: int, theirs: int, depth: int, low: int, high: int) -> int:
  """Returns the value for the player who moves; fail-soft alpha-beta.

  Args:
    mine: the stones of this player.
    theirs: the stones of the other player, who has just moved.
    depth: the moves to look ahead.
    low: values up to this one need not be exact.
    high: values from this one on need not be exact.
  """
  if _wins(theirs):
    return -_WIN - depth  # An early loss is worse.
  moves = _moves(mine, theirs)
  if not moves:
    return 0
  if depth == 0:
    return _estimate(mine, theirs)
  best = -2 * _WIN
  for _, cell in moves:
    value = -search(theirs, mine | cell, depth - 1, -high, -low)
    best, low = max(best, value), max(low, value)
    if low >= high:
      break
  return best


def _choose(
  mine: int, theirs: int, depth: int, rng: np.random.Generator
) -> int:
  """Returns one of the best columns."""
  values = {
    column: -search(theirs, mine | cell, depth - 1, -2 * _WIN, 2 * _WIN)
    for column, cell in _moves(mine, theirs)
  }
  best = max(values.values())
  return int(rng.choice([k for k, x in values.items() if x == best]))


def _bits(plane: np.ndarray) -> int:
  return sum(1 << int(i) for i in np.flatnonzero(plane))


def play(path: str, num_games: int, depth: int) -> np.ndarray:
  """Plays games; returns the results of the run, -1, 0 or 1, `[N]`."""
  loaded = podrl.load(path)
  game = SUITES['pgx'].game_for_two('connect_four')
  assert game is not None
  rng = np.random.default_rng(0)
  keys = jax.random.split(jax.random.key(0), num_games)
  state = jax.jit(jax.vmap(game.init))(keys)
  # The run is player 0; each side begins half of the games.
  begins = np.arange(num_games) % 2
  state = state.replace(current_player=np.asarray(begins, np.int32))
  observe = jax.jit(jax.vmap(game.observe))
  step = jax.jit(jax.vmap(game.step))
  to_env_state = jax.jit(jax.vmap(games.to_env_state))
  results, is_over = np.zeros(num_games), np.zeros(num_games, bool)
  num_moves = 0
  while not is_over.all():
    player = np.asarray(state.current_player)
    obs = observe(state, player)
    boards = np.asarray(obs.obs).reshape(num_games, -1, 2)
    action, _ = loaded(obs, env_state=to_env_state(state, keys))
    for i in np.flatnonzero(~is_over):
      if num_moves == 0:
        action[i] = rng.integers(_COLUMNS)
      elif player[i] == 1:
        mine, theirs = (_bits(boards[i, :, k]) for k in (0, 1))
        action[i] = _choose(mine, theirs, depth, rng)
    state = step(state, action, keys)
    num_moves += 1
    ended = np.asarray(state.terminated) & ~is_over
    results = np.where(ended, np.asarray(state.rewards)[:, 0], results)
    is_over |= ended
  return results


def main(argv: Sequence[str]) -> None:
  for path in argv[1:]:
    results = play(path, _GAMES.value, _DEPTH.value)
    wins, draws, losses = ((results == x).sum() for x in (1, 0, -1))
    print(
      f'{path}: {wins} wins, {draws} draws and {losses} losses in '
      f'{len(results)} games against a search of depth {_DEPTH.value}'
    )


if __name__ == '__main__':
  app.run(main)
