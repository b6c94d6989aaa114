"""Shows a run's policy in the terminal, or lets a person play against it.

  podrl play RUN [--checkpoint=last|best|UPDATES] [--episodes=1] [--nogreedy]
      [--seed=0] [--max_steps=1000] [--trust]

The terminal shows episodes at about the speed of the real task; `podrl watch`
writes them to a file. In a game of pgx for two, you play against the policy: at
your turn, type the number of an action, or q to end. A run that somebody else
made may need --trust; see docs/how-to/policy.md.
"""

from collections.abc import Sequence
import functools
import itertools
import time
from typing import Any

from absl import flags
import jax
import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console, Group
from rich.live import Live
from rich.segment import Segment, Segments
from rich.style import Style

from podrl import tools
from podrl.envs import envpool, pgx
from podrl.run import policy, video

_MAX_COLUMNS = 100  # A larger picture takes too long to print.


@functools.lru_cache(2**16)
def _style(upper: tuple[int, int, int], lower: tuple[int, int, int]) -> Style:
  return Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))


def to_segments(picture: np.ndarray, columns: int, rows: int) -> Segments:
  """Makes a text of a picture, uint8 `[H, W, 3]`, that fits a terminal.

  A character shows two pixels, one above the other, which are about square.
  """
  height, width, _ = picture.shape
  scale = min(columns / width, 2 * rows / height)
  size = max(1, int(width * scale)), 2 * max(1, int(height * scale / 2))
  pixels = np.asarray(Image.fromarray(picture).resize(size)).tolist()
  segments = []
  for upper, lower in zip(pixels[::2], pixels[1::2]):
    for (x, y), cells in itertools.groupby(zip(upper, lower)):
      text = '\u2580' * len(list(cells))
      segments.append(Segment(text, _style(tuple(x), tuple(y))))
    segments.append(Segment.line())
  return Segments(segments)


def _fit(console: Console, picture: np.ndarray) -> Segments:
  """Makes a picture of the size of the terminal; four lines stay free."""
  width, height = console.size
  return to_segments(picture, min(width, _MAX_COLUMNS), max(height - 4, 1))


def _show(
  console: Console,
  loaded: policy.Policy,
  rng_key: jax.Array,
  greedy: bool,
  max_steps: int,
) -> None:
  """Shows an episode of a task for one player."""
  console.print('recording an episode')
  episodes, _, durations = video.make(
    loaded, rng_key, greedy=greedy, max_steps=max_steps
  )
  (episode,) = episodes
  returns, pictures = episode.returns, zip(episode.steps, episode.pictures)
  with Live(console=console, screen=True, auto_refresh=False) as live:
    for (step, picture), duration in zip(pictures, durations):
      next_seconds = time.monotonic() + duration
      caption = f'return {returns[step]:.6g}, step {step}'
      live.update(Group(caption, _fit(console, picture)), refresh=True)
      time.sleep(max(0.0, next_seconds - time.monotonic()))
  end = '' if episode.is_over else ', stopped by --max_steps'
  console.print(f'return {returns[-1]:.6g}, {len(returns) - 1} steps{end}')


def _ask(console: Console, legal: Sequence[int]) -> int | None:
  """Asks for an action until it is legal; None ends the game."""
  console.print(f'legal actions: {" ".join(map(str, legal))}')
  while True:
    try:
      text = console.input('your action: ').strip()
    except EOFError:
      console.print()
      return None
    if text in ('q', 'quit', 'exit'):
      return None
    if text.isdecimal() and int(text) in legal:
      return int(text)
    console.print('this is no legal action; type one of the numbers, or q')


def _play(
  console: Console,
  loaded: policy.Policy,
  game: Any,
  rng_key: jax.Array,
  greedy: bool,
) -> bool:
  """Plays one game; the policy is player 0. It returns false after q."""
  state = jax.jit(game.init)(rng_key)
  step, carry, num_moves = jax.jit(game.step), None, 0
  begins = 'the policy begins' if state.current_player == 0 else 'you begin'
  console.print(begins)
  while not state.terminated:
    rng_key, act_key, step_key = jax.random.split(rng_key, 3)
    if int(state.current_player) == 0:
      obs = pgx.observe(game, state, np.asarray(0))
      obs = jax.tree.map(lambda x: x[None], obs)
      key = None if greedy else act_key
      actions, carry = loaded(obs, carry, rng_key=key)
      action = int(actions[0])
      console.print(f'the policy plays {action}')
    else:
      if console.is_terminal:
        console.print(_fit(console, pgx.render(state)))
      legal = np.flatnonzero(state.legal_action_mask).tolist()
      answer = _ask(console, legal)
      if answer is None:
        console.print('the game is not finished')
        return False
      action = answer
    state = step(state, action, step_key)
    num_moves += 1
  if console.is_terminal:
    console.print(_fit(console, pgx.render(state)))
  results = 'a draw', 'you win', 'the policy wins'
  result = results[int(np.sign(state.rewards[1]))]
  console.print(f'{result} after {num_moves} moves')
  return True


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Loads the policy, and shows episodes or plays."""
  path = tools.single_path(paths, 'run', 'play RUN')
  console = Console(highlight=False, soft_wrap=True)
  envpool.load_opengl()  # Call it before envpool is imported.
  loaded = policy.load(path, values.checkpoint, trust=values.trust)
  greedy = values.greedy
  if greedy is None:
    greedy = loaded.config['eval.greedy']
  keys = jax.random.split(jax.random.key(values.seed), values.episodes)
  game = None
  if loaded.config['env.suite'] == 'pgx':
    import pgx as library

    game = library.make(loaded.config['env.name'])
  if game and game.num_players == 2:
    for key in keys:
      if not _play(console, loaded, game, key, greedy):
        break
    return
  if not console.is_terminal:
    raise ValueError(
      f'the output is no terminal; podrl watch {path} writes a GIF'
    )
  for key in keys:
    _show(console, loaded, key, greedy, values.max_steps)


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = tools.policy_flags(1, 100)
  text = 'The largest number of steps per episode.'
  tools.define_integer('max_steps', 1000, text, 1, 10**9, values)
  return tools.run_command(argv, __doc__, values, _act)
