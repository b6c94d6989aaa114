"""Games of several players as a `DeviceEnv`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.envs import autoreset, spaces
from podrl.types import Array, DeviceEnv, Discrete, Masked, Tree

# `(rng_key, obs) -> action`, for one player's observation.
Opponent = Callable[[chex.PRNGKey, Masked], Array]

# What an option `opponent` can be besides an `Opponent`: a player who chooses
# legal actions at random, the agent itself, or, in a part of the games, an
# earlier version of the agent.
RANDOM, SELF, POOL = 'random', 'self', 'pool'


class Game(NamedTuple):
  """A game whose states have these attributes of pgx's states.

  `current_player` is an int32 `[]`, `rewards` is float32 `[num_players]`, and
  `terminated` is a bool `[]`.
  """

  # `(rng_key) -> state`; it should draw who begins.
  init: Callable[[chex.PRNGKey], Any]
  step: Callable[..., Any]  # `(state, action, rng_key) -> state`.
  observe: Callable[[Any, Array], Masked]  # `(state, player) -> obs`.
  num_actions: int
  num_players: int = 2
  # `(state) -> [H, W, 3]`, uint8; None if the game cannot be drawn.
  render: Callable[[Any], np.ndarray] | None = None


class Match(NamedTuple):
  """The state of an environment: a game, and who plays it."""

  state: Any
  # Int32 `[]`. At least 0: the agent is player 0, and the number says against
  # whom it plays. Otherwise, the agent plays both sides.
  ticket: Array
  first_player: Array  # Int32 `[]`, who began.
  total: Array  # Float32 `[]`, rewards so far of the first player.


def choose_at_random(rng_key: chex.PRNGKey, obs: Masked) -> Array:
  """Chooses a legal action; it is an `Opponent`."""
  logits = jnp.where(obs.action_mask, 0.0, -jnp.inf)
  return jax.random.categorical(rng_key, logits)


def to_env_state(state: Any, rng_key: chex.PRNGKey) -> Tree:
  """Returns a game's state as that of an environment, for a search."""
  match = Match(state, jnp.int32(-1), jnp.int32(0), jnp.float32(0))
  return autoreset.make_state(match, rng_key)


def make_device_env(
  game: Game,
  opponent: Opponent | str | None = RANDOM,
  pool_fraction: float = 0.5,
) -> DeviceEnv:
  """Makes a batch of games.

  With the opponent 'self', the agent plays both sides of a game for two, see
  `EnvSpec.has_turns`. Otherwise, the agent is player 0. A step of the
  environment then includes the turns of the others, and the reward is the
  agent's sum. A game that ends before the agent's first turn does not count:
  another one begins. No game is truncated.

  Args:
    opponent: how the other players choose their actions: an `Opponent`,
      'random', 'self' or 'pool'. With 'pool', earlier versions of the agent
      play a part of the games, and the agent plays both sides of the others.
      None means 'random'.
    pool_fraction: this part.

  Raises:
    ValueError: if the game cannot have this opponent.
  """
  if opponent in (SELF, POOL) and game.num_players != 2:
    raise ValueError(
      f'the opponent {opponent} needs a game for two players, but this game '
      f'has {game.num_players}'
    )
  _check(game)
  itself = _make(game, None, 0.0)
  if opponent == SELF:
    return itself
  if opponent == POOL:
    if not 0 < pool_fraction < 1:
      raise ValueError(f'pool_fraction={pool_fraction} must be between 0 and 1')
    env = _make(game, _ignoring_ticket(choose_at_random), pool_fraction)
    spec = env.spec._replace(
      has_pool=True,
      # A search imagines that the agent plays both sides.
      simulate=itself.spec.simulate,
    )
    return env._replace(
      spec=spec, with_pool=lambda choose: _make(game, choose, pool_fraction)
    )
  if opponent in (None, RANDOM):
    opponent = choose_at_random
  if not callable(opponent):
    raise ValueError(
      f'the opponent {opponent} is unknown; give {RANDOM}, {SELF}, {POOL}, or '
      'the directory of a run (in eval.opponents, also first)'
    )
  return _make(game, _ignoring_ticket(opponent), 1.0)


def _check(game: Game) -> None:
  """Raises a ValueError if the game's functions do not fit together."""
  state = jax.eval_shape(game.init, jax.random.key(0))
  if state.rewards.shape != (game.num_players,):
    raise ValueError(
      f'the rewards of a game for {game.num_players} players have the shape '
      f'{state.rewards.shape}; they must have {(game.num_players,)}'
    )
  obs = jax.eval_shape(game.observe, state, state.current_player)
  if not isinstance(obs, Masked):
    raise ValueError(
      'observe must return Masked(obs, action_mask), not a '
      f'{type(obs).__name__}'
    )


def _ignoring_ticket(choose: Opponent) -> Callable[..., Array]:
  return lambda rng_key, obs, ticket: choose(rng_key, obs)


def _make(
  game: Game, choose: Callable[..., Array] | None, fraction: float
) -> DeviceEnv:
  """Makes games.

  Args:
    choose: `(rng_key, obs, ticket) -> action`, how the other players act. If it
      is None, tickets are ignored: the agent plays both sides.
    fraction: the part of the games in which the others act.
  """

  def player(match: Match) -> Array:
    """Returns for whom the agent sees and acts."""
    current = match.state.current_player
    return jnp.where(match.ticket < 0, current, 0) if choose else current

  def let_others_act(rng_key, state, ticket, reward):
    if choose is None:
      return state, reward

    def waits(carry: Tree) -> Array:
      is_theirs = (ticket >= 0) & (carry[1].current_player != 0)
      return is_theirs & ~carry[1].terminated

    def act(carry: Tree) -> Tree:
      rng_key, state, reward = carry
      rng_key, action_key, step_key = jax.random.split(rng_key, 3)
      obs = game.observe(state, state.current_player)
      action = choose(action_key, obs, ticket)
      state = game.step(state, action, step_key)
      return rng_key, state, reward + state.rewards[0]

    return jax.lax.while_loop(waits, act, (rng_key, state, reward))[1:]

  def begin(carry: Tree) -> Tree:
    rng_key, reset_key, others_key = jax.random.split(carry[0], 3)
    state = game.init(reset_key)
    first_player = state.current_player
    ticket = jnp.int32(0 if choose else -1)
    if 0 < fraction < 1:
      kind_key, ticket_key = jax.random.split(jax.random.fold_in(reset_key, 1))
      ticket = jax.random.randint(ticket_key, (), 0, 2**16)
      is_theirs = jax.random.bernoulli(kind_key, fraction)
      ticket = jnp.where(is_theirs, ticket, -1)
    state, _ = let_others_act(others_key, state, ticket, jnp.float32(0))
    return rng_key, Match(state, ticket, first_player, jnp.float32(0))

  def reset(rng_key):
    _, match = jax.lax.while_loop(
      lambda carry: carry[1].state.terminated, begin, begin((rng_key, None))
    )
    return game.observe(match.state, player(match)), match

  def step(rng_key, match, action):
    own_key, others_key = jax.random.split(rng_key)
    mover = player(match)
    state = game.step(match.state, action, own_key)
    state, reward = let_others_act(
      others_key, state, match.ticket, state.rewards[mover]
    )
    sign = jnp.where(mover == match.first_player, 1.0, -1.0)
    match = match._replace(state=state, total=match.total + sign * reward)
    obs = game.observe(state, player(match))
    return obs, match, reward, state.terminated, jnp.bool(False)

  def info(match: Match) -> dict[str, Array]:
    """Tells who won, if the agent has played both sides."""
    is_end = match.state.terminated & (match.ticket < 0)
    found = {
      'first_wins': match.total > 0.0,
      'draws': match.total == 0.0,
      'second_wins': match.total < 0.0,
    }
    return {k: jnp.where(is_end, x, jnp.nan) for k, x in found.items()}

  render, has_turns = game.render, fraction < 1
  env = autoreset.make_device_env(
    spaces.device_spec(reset, Discrete(game.num_actions), 0),
    reset,
    step,
    reset_chunk=16,
    render=(lambda match: render(match.state)) if render else None,
    info=info if has_turns else lambda match: {},
    # A search may simulate both sides, even if the agent learns only one.
    player=player if game.num_players == 2 else None,
  )
  return env._replace(spec=env.spec._replace(has_turns=has_turns))
