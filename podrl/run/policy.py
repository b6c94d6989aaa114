"""Loads a trained policy, for use without the trainer."""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import os
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl.fields import Fields
from podrl.messages import count
from podrl.networks.torsos import policy_inputs
from podrl.run import build
from podrl.types import Agent, Array, EnvSpec, TimeStep, Tree, Variables


def observe(spec: EnvSpec, obs: Tree, inputs: Sequence[str] = ()) -> Tree:
  """Converts a library's observations to the observations that agents see.

  The leaves of `obs` are `[B, ...]`. If they already have the shapes of
  `spec.obs`, only their dtypes change. Another shape raises a ValueError. If
  there are `inputs`, only these leaves of a dictionary are needed; the result
  has zeros for other leaves that are missing.
  """
  obs = jax.tree.map(jnp.asarray, obs)
  size = _batch_size(obs)
  seen = None if size is None else _convert(spec, obs, size, inputs)
  if seen is not None:
    return jax.tree.map(lambda like, x: x.astype(like.dtype), spec.obs, seen)
  one = jax.tree.map(lambda x: x[None], obs)
  if _convert(spec, one, 1, inputs) is not None:
    remedy = 'np.array([obs])' if size is None else 'obs[None]'
    if not isinstance(obs, jax.Array):
      remedy = 'jax.tree.map(lambda x: np.asarray(x)[None], obs)'
    raise ValueError(
      f'the batch axis of the observation is missing; pass {remedy}'
    )
  expected: Any = [(size, *x.shape) for x in jax.tree.leaves(spec.obs)]
  if inputs:
    expected = {name: (size, *spec.obs[name].shape) for name in inputs}
  raise ValueError(
    f'observations have the shapes {_shapes(obs)}; give them the shapes of '
    f"the environment's library, or {expected}"
  )


def _shapes(tree: Tree) -> list[tuple[int, ...]]:
  return [x.shape for x in jax.tree.leaves(tree)]


def _batch_size(obs: Tree) -> int | None:
  """Returns B of leaves `[B, ...]`, or None if they have no axis."""
  return next(iter(np.shape(jax.tree.leaves(obs)[0])), None)


def _convert(
  spec: EnvSpec, obs: Tree, size: int, inputs: Sequence[str]
) -> Tree | None:
  """Converts a batch to what agents see; returns None if a shape is wrong."""
  expected = [(size, *x) for x in _shapes(spec.obs)]

  def complete(obs: Tree) -> Tree:
    if not inputs or not isinstance(obs, dict):
      return obs
    others = {k: x for k, x in spec.obs.items() if k not in inputs}
    zeros = {k: jnp.zeros((size, *x.shape)) for k, x in others.items()}
    return zeros | obs

  seen = complete(obs)
  structures: list[Any] = [jax.tree.structure(x) for x in (seen, spec.obs)]
  if structures[0] == structures[1] and _shapes(seen) == expected:
    return seen
  # If this fails, the error of `observe` is clearer.
  with contextlib.suppress(TypeError, KeyError, IndexError, ValueError):
    seen = complete(spec.observe(obs))
    if _shapes(seen) == expected:
      return seen
  return None


def in_32_bits() -> contextlib.AbstractContextManager[Any]:
  """Returns a context in which JAX's new arrays have at most 32 bits."""
  is_64 = jax.dtypes.canonicalize_dtype(np.int64).itemsize == 8
  # Most programs do not need the context, which takes time.
  return jax.enable_x64(False) if is_64 else contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
  """A policy with its variables on one device."""

  config: Fields  # The configuration of the policy's run, by name of field.
  spec: EnvSpec
  agent: Agent
  variables: Variables
  num_updates: int  # The number of updates that produced the parameters.

  def __repr__(self) -> str:
    name, agent = self.config['env.name'], self.config['agent.name']
    return f'Policy({name}, {agent}, {count(self.num_updates, "update")})'

  def initial_carry(self, batch_size: int) -> Tree:
    """Returns the carry for the first step of `batch_size` episodes."""
    return self.agent.initial_carry(jnp.arange(batch_size))

  def __call__(
    self,
    obs: Tree,
    carry: Tree = None,
    *,
    is_first: Array | None = None,
    rng_key: chex.PRNGKey | None = None,
    env_state: Tree = None,
  ) -> tuple[Array, Tree]:
    """Chooses actions.

    Args:
      obs: leaves `[B, *obs_shape]`, as the environment's library gives them.
        Leaves that only the critic sees, see `network.policy_inputs`, may be
        missing.
      carry: the carry that the last call returned; None when episodes start.
      is_first: bool `[B]`, whether an episode starts; by default, it is true
        if `carry` is None.
      rng_key: key to sample actions; without it, actions are the agent's greedy
        ones, for example the policy's mode.
      env_state: the states of the environments `[B]`, for an agent that
        searches in them; see `Agent.plans`.

    Returns:
      Actions `[B, ...]` that the environment's library accepts, and the carry
      `[B, ...]` for the next call. The actions are a numpy array, unless JAX
      traces the call.

    Raises:
      ValueError: if an observation has a wrong shape.
    """
    batch_size = _batch_size(obs) or 1
    leaves = jax.tree.leaves((obs, carry, is_first, rng_key))
    is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    if not is_traced:
      # If this fails, the error of `observe` is clearer.
      with contextlib.suppress(TypeError, KeyError, IndexError, ValueError):
        obs = self.spec.cut(obs)
    if is_first is None:
      is_first = np.full(batch_size, carry is None)
    with contextlib.nullcontext() if is_traced else in_32_bits():
      if carry is None:
        carry = self.initial_carry(batch_size)
      action, carry = self._compiled(
        self.variables, obs, carry, jnp.asarray(is_first), rng_key, env_state
      )
    if isinstance(action, jax.core.Tracer):
      return action, carry
    # gymnasium refuses JAX's arrays. Copied, so that they can be changed.
    return np.array(action), carry

  def act(
    self,
    variables: Variables,
    obs: Tree,
    carry: Tree,
    is_first: Array,
    rng_key: chex.PRNGKey,
    greedy: bool,
    env_state: Tree = None,
  ) -> tuple[Array, Tree]:
    """Does what a call does, as a part of a program.

    Args:
      variables: those of the policy. As an input of the program, they are not
        constants of it.
      obs: leaves `[B, *obs_shape]`, after `spec.cut`.
      carry: leaves `[B, ...]`.
      is_first: bool `[B]`.
      rng_key: a key for each environment, `[B]`.
      env_state: leaves `[B, ...]`; see `Agent.plans`.
    """
    shape = is_first.shape
    obs = observe(self.spec, obs, policy_inputs(self.config))
    timestep = TimeStep(obs, jnp.zeros(shape), jnp.ones(shape), is_first)
    known = self.agent.planning(env_state)
    action, _, carry = self.agent.act(
      variables, rng_key, timestep, carry, greedy=greedy, **known
    )
    return self.spec.to_library(action), carry

  @functools.cached_property
  def _compiled(self):
    @jax.jit
    def act(variables, obs, carry, is_first, rng_key, env_state):
      greedy = rng_key is None
      key = jax.random.key(0) if greedy else rng_key
      keys = jax.random.split(key, is_first.shape)
      return self.act(variables, obs, carry, is_first, keys, greedy, env_state)

    return act


def load(
  path: str | os.PathLike,
  which: str | int = 'last',
  seed: int | None = None,
  trust: bool = False,
) -> Policy:
  """Loads the policy of a run; see `podrl.load`."""
  path = os.path.expanduser(os.fspath(path))
  with in_32_bits():
    return Policy(*build.load_agent(path, which, seed, trust))
