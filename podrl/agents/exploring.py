"""Functions that all agents with action values use: exploring and acting."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.agents import acting
from podrl.core.observations import hide_illegal
from podrl.fields import FRACTION, Field, Fields, with_defaults
from podrl.kernels import categorical
from podrl.networks import cores, torsos
from podrl.networks.q import QNetwork, make_network
from podrl.types import Array, Discrete, EnvSpec, Masked, Tree, Variables

FIELDS = with_defaults(acting.FIELDS, {'network.activation': 'relu'}) | {
  'agent.initial_epsilon': Field(
    1.0,
    'Probability of a random action at the start.',
    FRACTION,
    changeable=True,
  ),
  'agent.final_epsilon': Field(
    0.05,
    'Probability of a random action at the end.',
    FRACTION,
    changeable=True,
  ),
  'agent.exploration_fraction': Field(
    0.25,
    'Part of the updates in which this probability falls.',
    FRACTION,
    changeable=True,
  ),
}


class Extras(NamedTuple):
  """What `act` returns with each action; leaves `[B, ...]`."""

  value: Array | tuple[()]  # Float32, the largest action value, or `()`.


class Statistics(NamedTuple):
  """The agent's statistics: a counter that the exploration rate depends on."""

  num_updates: Array  # Int32 `[]`.


def num_actions(spec: EnvSpec) -> int:
  """Returns the number of actions, or raises a ValueError.

  It raises if the environment does not have one discrete action.
  """
  if not isinstance(spec.action, Discrete):
    raise ValueError(
      'the agent needs one discrete action, not a '
      f'{type(spec.action).__name__}; --agent=ppo accepts it'
    )
  return spec.action.num_actions


def check_random_fraction(fraction: float, spec: EnvSpec) -> None:
  """Raises a ValueError if actions that are not discrete shall be random."""
  if fraction and not isinstance(spec.action, Discrete):
    raise ValueError(
      f'agent.random_fraction={fraction} needs discrete actions; use 0'
    )


def build_network(spec: EnvSpec, fields: Fields, **options: Any) -> QNetwork:
  """Builds the network; it raises a ValueError if actions are not discrete."""
  count = num_actions(spec)
  return make_network(
    torsos.build_torso(spec, fields),
    spec.obs,
    count,
    **cores.options(fields),
    **options,
  )


def make_init(
  init: Callable[[chex.PRNGKey], Tree],
) -> Callable[[chex.PRNGKey], Variables]:
  """Builds `Agent.init` from a network's `init`.

  A run adds the hyperparameter 'num_updates', its number of updates.
  """
  init_variables = acting.make_init(init, num_updates=1.0)
  statistics = Statistics(jnp.zeros((), jnp.int32))
  return lambda rng_key: init_variables(rng_key)._replace(statistics=statistics)


def epsilon(variables: Variables) -> Array:
  """Returns the probability of a random action, which falls linearly."""
  hyperparams = variables.hyperparams
  start, end = (hyperparams[f'{name}_epsilon'] for name in ('initial', 'final'))
  duration = hyperparams['exploration_fraction'] * hyperparams['num_updates']
  done = variables.statistics.num_updates / jnp.maximum(duration, 1.0)
  return start + (end - start) * jnp.minimum(done, 1.0)


def absorb(variables: Variables, measured: Tree) -> Variables:
  """Counts an update; see `Agent.absorb`."""
  del measured
  count = variables.statistics.num_updates + 1
  return variables._replace(statistics=Statistics(count))


def choose(values: Array, action: Array) -> Array:
  """Returns the values of the chosen actions, `[...]`.

  Args:
    values: `[..., A]` float32.
    action: `[...]`, an integer for each choice.
  """
  chex.assert_rank(values, action.ndim + 1)
  chex.assert_equal_shape_prefix([values, action], action.ndim)
  return categorical.select(values, action)


def explore(
  rng_key: chex.PRNGKey, values: Array, probability: Array, obs: Tree = ()
) -> Array:
  """Chooses the best actions, or random ones with some probability.

  Args:
    rng_key: `[B]`, one key for each environment.
    values: `[B, A]` float32, from `hide_illegal`.
    probability: float32 `[]` or `[B]`.
    obs: `[B, ...]`; if it is `Masked`, random actions are legal ones.

  Returns:
    The actions, int32 `[B]`.
  """
  size = values.shape[-1]

  def choose_one(rng_key, best, probability, obs):
    keys = jax.random.split(rng_key)
    if isinstance(obs, Masked):
      logits = hide_illegal(jnp.zeros(size), obs)
      other = jax.random.categorical(keys[0], logits).astype(jnp.int32)
    else:
      other = jax.random.randint(keys[0], (), 0, size, jnp.int32)
    is_random = jax.random.uniform(keys[1]) < probability
    return jnp.where(is_random, other, best)

  best = jnp.argmax(values, axis=-1).astype(jnp.int32)
  probability = jnp.broadcast_to(probability, best.shape)
  return jax.vmap(choose_one)(rng_key, best, probability, obs)


def make_act(
  network: QNetwork,
  to_values: Callable[[Array], Array],
  *,
  stores_value: bool = False,
) -> Callable[..., tuple[Array, Extras, Tree]]:
  """Builds `Agent.act`.

  Args:
    to_values: maps outputs `[..., A, N]` to values `[..., A]`.
    stores_value: whether the `Extras` have the value.
  """

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    obs, is_first = jax.tree.map(
      lambda x: x[None], (timestep.obs, timestep.is_first)
    )
    outputs, carry = network.unroll(variables.params, obs, is_first, carry)
    values = hide_illegal(to_values(outputs[0]), timestep.obs)
    extras = Extras(jnp.max(values, axis=-1) if stores_value else ())
    if greedy:
      return jnp.argmax(values, axis=-1).astype(jnp.int32), extras, carry
    probability = epsilon(variables)
    action = explore(rng_key, values, probability, timestep.obs)
    return action, extras, carry

  return act
