"""The games of pgx as a `DeviceEnv`."""

from collections.abc import Callable
import functools
import io
import os
import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.envs import autoreset, spaces
from podrl.types import Array, DeviceEnv, Discrete, Masked, Tree

_FONT = 'DejaVu Sans'
# `(rng_key, obs) -> action`, for one player's observation.
Opponent = Callable[[chex.PRNGKey, Masked], Array]

NAMES = 'core.py', r'(?m)^(?:EnvId = Literal\[)?\s+"([\w-]+)",$'
UNUSABLE = {'bridge_bidding': 'downloads results'}


def _choose_at_random(rng_key: chex.PRNGKey, obs: Masked) -> Array:
  logits = jnp.where(obs.action_mask, 0.0, -jnp.inf)
  return jax.random.categorical(rng_key, logits)


def has_large_rewards(name: str) -> bool:
  """See `Suite.has_large_rewards`."""
  return name == '2048'


class Game(NamedTuple):
  """A game for two players, whose states are those of pgx."""

  init: Callable[[chex.PRNGKey], Any]  # `(rng_key) -> state`.
  step: Callable[..., Any]  # `(state, action, rng_key) -> state`.
  observe: Callable[[Any, Array], Masked]  # `(state, player) -> obs`.
  render: Callable[[Any], np.ndarray]  # `(state) -> [H, W, 3]`, uint8.


def game_for_two(name: str) -> Game | None:
  """See `Suite.game_for_two`."""
  import pgx

  env = pgx.make(name)
  if env.num_players != 2:
    return None
  return Game(env.init, env.step, functools.partial(_observe, env), _render)


def _observe(env: Any, state: Any, player: Array) -> Masked:
  """Returns a player's observation, with the legal actions of the next move."""
  obs = state.observation  # That of the player whose turn it is.
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
  name: str, /, *, opponent: Opponent | None = None, **options: Any
) -> DeviceEnv:
  """Makes a batch of games.

  The agent is player 0. If a game has several players, a step of the
  environment includes the turns of the others, and the reward is the agent's
  sum. pgx itself draws who begins. A game that ends before the agent's first
  turn does not count: another one begins. An observation is `Masked`, because
  an illegal action would lose the game. No game is truncated: a limit of moves
  is one of its rules.

  Args:
    name: the name in pgx, for example '2048'.
    opponent: chooses the actions of the other players; the default is a random
      legal action.
    **options: there are no others.
  """
  import pgx

  env = pgx.make(name)
  known = ('opponent',) if env.num_players > 1 else ()
  given = {'opponent': opponent} if opponent else {}
  spaces.check_options(name, {**options, **given}, known)
  choose = opponent or _choose_at_random

  def let_others_act(
    rng_key: chex.PRNGKey, state: Any, reward: Array
  ) -> tuple[Any, Array]:
    def act(carry: Tree) -> Tree:
      rng_key, state, reward = carry
      rng_key, action_key, step_key = jax.random.split(rng_key, 3)
      obs = _observe(env, state, state.current_player)
      action = choose(action_key, obs)
      state = env.step(state, action, step_key)
      return rng_key, state, reward + state.rewards[0]

    return jax.lax.while_loop(
      lambda carry: (carry[1].current_player != 0) & ~carry[1].terminated,
      act,
      (rng_key, state, reward),
    )[1:]

  def begin(carry: Tree) -> Tree:
    rng_key, reset_key, others_key = jax.random.split(carry[0], 3)
    state = env.init(reset_key)
    state, _ = let_others_act(others_key, state, jnp.float32(0))
    return rng_key, state

  def reset(rng_key: chex.PRNGKey) -> tuple[Tree, Tree]:
    if env.num_players == 1:
      state = env.init(rng_key)
    else:
      _, state = jax.lax.while_loop(
        lambda carry: carry[1].terminated, begin, begin((rng_key, None))
      )
    return _observe(env, state, jnp.int32(0)), state

  def step(
    rng_key: chex.PRNGKey, state: Any, action: Array
  ) -> tuple[Tree, Tree, Array, Array, Array]:
    if env.num_players == 1:
      state = env.step(state, action, rng_key)
      reward = state.rewards[0]
    else:
      own_key, others_key = jax.random.split(rng_key)
      state = env.step(state, action, own_key)
      state, reward = let_others_act(others_key, state, state.rewards[0])
    ends = state.terminated, state.truncated
    return _observe(env, state, jnp.int32(0)), state, reward, *ends

  spec = spaces.device_spec(reset, Discrete(env.num_actions), 0)
  return autoreset.make_device_env(
    spec, reset, step, reset_chunk=16, render=_render
  )
