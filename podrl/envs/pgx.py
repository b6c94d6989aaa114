"""The games of pgx as a `DeviceEnv`."""

import functools
import io
import os
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from podrl.envs import autoreset, games, spaces
from podrl.envs.games import Game, Opponent
from podrl.types import Array, DeviceEnv, Discrete, Masked

_FONT = 'DejaVu Sans'

NAMES = 'core.py', r'(?m)^(?:EnvId = Literal\[)?\s+"([\w-]+)",$'
UNUSABLE = {'bridge_bidding': 'downloads results'}


def has_large_rewards(name: str) -> bool:
  """See `Suite.has_large_rewards`."""
  return name == '2048'


def game_for_two(name: str) -> Game | None:
  """See `Suite.game_for_two`."""
  import pgx

  env = pgx.make(name)
  return _game(env) if env.num_players == 2 else None


def _game(env: Any) -> Game:
  return Game(
    env.init,
    env.step,
    functools.partial(_observe, env),
    env.num_actions,
    env.num_players,
    _render,
  )


def _observe(env: Any, state: Any, player: Array) -> Masked:
  """Returns a player's observation, with the legal actions of the next move."""
  obs = state.observation  # What the player who moves next sees.
  if env.num_players > 1:
    obs = env._observe(state, player)  # `observe` would warn.
  return Masked(obs, state.legal_action_mask)


def _render(state: Any) -> np.ndarray:
  """Returns a picture of a state, uint8 `[H, W, 3]`."""
  import matplotlib
  from PIL import Image
  import resvg_py

  # The machine may lack the fonts that pgx names; matplotlib brings one.
  svg = re.sub('font-family="[^"]*"', f'font-family="{_FONT}"', state.to_svg())
  fonts = os.path.join(matplotlib.get_data_path(), 'fonts', 'ttf')
  png = resvg_py.svg_to_bytes(svg_string=svg, dpi=96, font_dirs=[fonts])
  return np.asarray(Image.open(io.BytesIO(bytes(png))).convert('RGB'))


def make(
  name: str, /, *, opponent: Opponent | str | None = None, **options: Any
) -> DeviceEnv:
  """Makes a batch of games.

  pgx itself draws who begins. An observation is `Masked`, because an illegal
  action would lose the game. No game is truncated: a limit of moves is one of
  its rules.

  Args:
    name: the name in pgx, for example '2048'.
    opponent: see `games.make_device_env`; only for games of several players.
    **options: `pool_fraction`, likewise.
  """
  import pgx

  env = pgx.make(name)
  known = ('opponent', 'pool_fraction') if env.num_players > 1 else ()
  given = {'opponent': opponent} if opponent else {}
  spaces.check_options(name, {**options, **given}, known)
  if env.num_players > 1:
    return games.make_device_env(_game(env), opponent, **options)

  def reset(rng_key):
    state = env.init(rng_key)
    return _observe(env, state, jnp.int32(0)), state

  def step(rng_key, state, action):
    state = env.step(state, action, rng_key)
    obs = _observe(env, state, jnp.int32(0))
    return obs, state, state.rewards[0], state.terminated, state.truncated

  spec = spaces.device_spec(reset, Discrete(env.num_actions), 0)
  return autoreset.make_device_env(
    spec, reset, step, reset_chunk=16, render=_render
  )
