"""A pool of earlier versions of an agent, which play against it."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.fields import COUNT, Field
from podrl.types import Agent, Array, Tree, Variables

FIELDS = {
  'agent.pool_size': Field(
    16, 'Earlier versions that env.options.opponent=pool keeps.', COUNT
  ),
}

# The games of an update are against this many versions, drawn anew each time.
_NUM_OPPONENTS = 2


class Statistics(NamedTuple):
  """The statistics of an agent with a pool of P versions."""

  agent: Tree  # The statistics of the wrapped agent.
  # The parameters and the statistics of each version, leaves `[P, ...]`.
  versions: tuple[Tree, Tree]
  num_versions: Array  # Int32 `[]`, at least 1.
  num_updates: Array  # Int32 `[]`.
  last_join: Array  # Int32 `[]`, the number of updates when a version joined.
  # Uint32 `[2]`, the data of a fixed key; each update folds `num_updates` into
  # it. It is not a key, because code that reads variables may accept only
  # numbers.
  key_data: Array


def keep_earlier(agent: Agent, size: int) -> Agent:
  """Wraps an agent so that it keeps `size` earlier versions of itself.

  The first is the untrained agent. The others join at equal distances during
  the run, whose number of updates is the hyperparameter 'num_updates'. If a
  resumed run is longer, a new version replaces one of the others, drawn at
  random. So what was learned early is not forgotten.

  Each update plays against a few versions, which it draws. So a game that is
  longer than an unroll may have several opponents, one after another.

  Source: Heinrich et al. 2015, Fictitious self-play in extensive-form games;
  Vinyals et al. 2019, section "Multi-agent learning".
  """

  def inner(variables: Variables) -> Variables:
    return variables._replace(statistics=variables.statistics.agent)

  def init(rng_key: chex.PRNGKey) -> Variables:
    variables = agent.init(rng_key)
    versions = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (size, *jnp.shape(x))),
      (variables.params, variables.statistics),
    )
    statistics = Statistics(
      variables.statistics,
      versions,
      jnp.int32(1),
      jnp.int32(0),
      jnp.int32(0),
      jax.random.key_data(jax.random.fold_in(rng_key, size)),
    )
    hyperparams = variables.hyperparams | {'num_updates': jnp.float32(size)}
    return Variables(variables.params, statistics, hyperparams)

  def absorb(variables: Variables, measured: Tree) -> Variables:
    new = agent.absorb(inner(variables), measured)
    _, versions, number, num_updates, last_join, key_data = variables.statistics
    num_updates += 1
    total = variables.hyperparams['num_updates']
    # After the last update, no game follows.
    joins = (num_updates - last_join >= total / size) & (num_updates < total)
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data), num_updates)
    replaced = jax.random.randint(key, (), min(1, size - 1), size)
    place = jnp.where(number < size, number, replaced)
    versions = jax.tree.map(
      lambda x, y: x.at[place].set(jnp.where(joins, y, x[place])),
      versions,
      (new.params, new.statistics),
    )
    statistics = Statistics(
      new.statistics,
      versions,
      jnp.minimum(number + joins, size),
      num_updates,
      jnp.where(joins, num_updates, last_join),
      key_data,
    )
    return new._replace(statistics=statistics)

  def play_earlier(variables, rng_key, obs, ticket):
    _, versions, number, num_updates, _, key_data = variables.statistics
    pool_key = jax.random.wrap_key_data(key_data)
    drawn = jax.random.randint(
      jax.random.fold_in(pool_key, num_updates), (_NUM_OPPONENTS,), 0, number
    )

    def act(place: Array) -> Array:
      params, statistics = jax.tree.map(lambda x: x[place], versions)
      own = Variables(params, statistics, variables.hyperparams)
      return agent.act_once(own, rng_key, obs)

    # Each version sees all games: a game's own copy of parameters would be
    # slower.
    actions = jnp.stack([act(place) for place in drawn])
    return actions[ticket % _NUM_OPPONENTS]

  def calibrate(variables, trajectory, mean):
    assert agent.calibrate
    new = agent.calibrate(inner(variables), trajectory, mean)
    statistics = variables.statistics._replace(agent=new.statistics)
    return new._replace(statistics=statistics)

  return agent._replace(
    init=init,
    act=lambda variables, *args, **known: agent.act(
      inner(variables), *args, **known
    ),
    prepare=lambda variables, *args: agent.prepare(inner(variables), *args),
    loss=lambda variables, *args: agent.loss(inner(variables), *args),
    measure=lambda variables, *args: agent.measure(inner(variables), *args),
    absorb=absorb,
    calibrate=calibrate if agent.calibrate else None,
    play_earlier=play_earlier,
  )
