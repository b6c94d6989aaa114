"""Shows a run's policy in the terminal, or lets a person play against it.

  podrl play RUN [--checkpoint=last|best|UPDATES] [--episodes=1] [--nogreedy]
      [--seed=0] [--max_steps=1000] [--trust]

The terminal shows episodes at about the speed of the real task; `podrl watch`
writes the same episodes to a file. In a game of pgx for two, you play against
the policy: at your turn, type the number of an action, or q to end. In such a
game, --max_steps has no effect. A run that somebody else made may need --trust;
see docs/how-to/policy.md.
"""

from collections.abc import Iterator, Sequence
import functools
import itertools
import time

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
from podrl.envs import SUITES, Game, envpool, games
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
  console: Console, episode: video.Episode, durations: Iterator[float]
) -> None:
  """Shows an episode of a task for one player.

  `durations` has the seconds of each picture, then those of later episodes.
  """
  pictures = zip(episode.steps, episode.pictures)
  with Live(console=console, screen=True, auto_refresh=False) as live:
    for step, picture in pictures:
      next_seconds = time.monotonic() + next(durations)
      caption = f'return {episode.returns[step]:.6g}, step {step}'
      live.update(Group(caption, _fit(console, picture)), refresh=True)
      time.sleep(max(0.0, next_seconds - time.monotonic()))
  console.print(video.describe(episode))


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
    console.print('this is not a legal action; type one of the numbers, or q')


def _play(
  console: Console,
  loaded: policy.Policy,
  game: Game,
  rng_key: jax.Array,
  greedy: bool,
) -> bool:
  """Plays one game; the policy is player 0. Returns whether the game ended."""
  state = jax.jit(game.init)(rng_key)
  step, carry, num_moves = jax.jit(game.step), None, 0
  begins = 'the policy begins' if state.current_player == 0 else 'you begin'
  console.print(begins)
  while not state.terminated:
    rng_key, act_key, step_key = jax.random.split(rng_key, 3)
    if int(state.current_player) == 0:
      obs = jax.tree.map(lambda x: x[None], game.observe(state, np.asarray(0)))
      key = None if greedy else act_key
      env_state = jax.tree.map(
        lambda x: x[None], games.to_env_state(state, step_key)
      )
      actions, carry = loaded(obs, carry, rng_key=key, env_state=env_state)
      action = int(actions[0])
      console.print(f'the policy plays {action}')
    else:
      if console.is_terminal and game.render:
        console.print(_fit(console, game.render(state)))
      legal = np.flatnonzero(state.legal_action_mask).tolist()
      answer = _ask(console, legal)
      if answer is None:
        console.print('the game is not finished')
        return False
      action = answer
    state = step(state, action, step_key)
    num_moves += 1
  if console.is_terminal and game.render:
    console.print(_fit(console, game.render(state)))
  results = {0: 'a draw', 1: 'you win', -1: 'the policy wins'}
  result = results[int(np.sign(state.rewards[1]))]
  console.print(f'{result} after {num_moves} moves')
  return True


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Loads the policy, and shows episodes or plays."""
  path = tools.single_path(paths, 'run', 'play RUN')
  console = Console(highlight=False, soft_wrap=True)
  envpool.load_opengl()  # Call it before envpool is imported.
  loaded = policy.load(path, values.checkpoint, trust=values.trust)
  config, rng_key = loaded.config, jax.random.key(values.seed)
  greedy = tools.is_greedy(values, config)
  if game := SUITES[config['env.suite']].game_for_two(config['env.name']):
    for i in range(values.episodes):
      key = jax.random.fold_in(rng_key, i)
      if not _play(console, loaded, game, key, greedy):
        break
    return
  if not console.is_terminal:
    raise ValueError(
      f'the output is not a terminal; podrl watch {path} writes a GIF'
    )
  console.print('recording')
  episodes, _, durations = video.make(
    loaded,
    rng_key,
    greedy=greedy,
    num_episodes=values.episodes,
    max_steps=values.max_steps,
  )
  rest = iter(durations)
  for episode in episodes:
    _show(console, episode, rest)


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = tools.policy_flags(1, 100)
  text = 'The largest number of steps per episode.'
  tools.define_integer('max_steps', 1000, text, 1, 10**9, values)
  return tools.run_command(argv, __doc__, values, _act)
