"""The games of pgx as a `DeviceEnv`."""

import io
import os
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from podrl.envs import joints, spaces
from podrl.types import Array, DeviceEnv, Discrete, Masked, Tree

_FONT = 'DejaVu Sans'
UNUSABLE = {'bridge_bidding': 'downloads results'}


def names() -> list[str]:
  """See `Suite.names`."""
  return spaces.names_in(
    'pgx', 'core.py', r'(?m)^(?:EnvId = Literal\[)?\s+"([\w-]+)",$'
  )


def make(name: str, **options: Any) -> DeviceEnv:
  """Makes a batch of games.

  The agent is player 0. If a game has several players, the others choose legal
  actions at random; a step of the environment includes their turns, and the
  reward is the agent's sum. pgx itself draws who begins. An observation is
  `Masked`, because an illegal action would lose the game. No game is truncated.

  Args:
    name: the name in pgx, for example '2048'.
    **options: a game has none.
  """
  import pgx

  spaces.check_options(name, options, ())
  env = pgx.make(name)

  def let_others_act(
    rng_key: chex.PRNGKey, state: Any, reward: Array
  ) -> tuple[Any, Array]:
    def act(carry: Tree) -> Tree:
      rng_key, state, reward = carry
      rng_key, action_key, step_key = jax.random.split(rng_key, 3)
      logits = jnp.where(state.legal_action_mask, 0.0, -jnp.inf)
      action = jax.random.categorical(action_key, logits)
      state = env.step(state, action, step_key)
      return rng_key, state, reward + state.rewards[0]

    return jax.lax.while_loop(
      lambda carry: (carry[1].current_player != 0) & ~carry[1].terminated,
      act,
      (rng_key, state, reward),
    )[1:]

  def observe(state: Any) -> Masked:
    obs = state.observation  # That of the player whose turn it is.
    if env.num_players > 1:
      obs = env.observe(state, jnp.int32(0))
    return Masked(obs, state.legal_action_mask)

  def reset(rng_key: chex.PRNGKey) -> tuple[Tree, Tree]:
    if env.num_players == 1:
      state = env.init(rng_key)
    else:
      reset_key, others_key = jax.random.split(rng_key)
      state = env.init(reset_key)
      state, _ = let_others_act(others_key, state, jnp.float32(0))
    return observe(state), state

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
    return observe(state), state, reward, state.terminated, state.truncated

  def render(state: Any) -> np.ndarray:
    import matplotlib
    import resvg_py

    # The machine may lack the fonts that pgx names; matplotlib brings one.
    svg = re.sub(
      'font-family="[^"]*"', f'font-family="{_FONT}"', state.to_svg()
    )
    fonts = os.path.join(matplotlib.get_data_path(), 'fonts', 'ttf')
    png = resvg_py.svg_to_bytes(svg_string=svg, dpi=96, font_dirs=[fonts])
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert('RGB'))

  spec = spaces.device_spec(reset, Discrete(env.num_actions), 0)
  return joints.make_device_env(
    spec, reset, step, reset_chunk=16, render=render
  )
