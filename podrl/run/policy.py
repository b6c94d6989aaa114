"""A trained policy, for use without the trainer."""

import dataclasses
import functools
import os

import chex
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from podrl.records import checkpoint, workdir
from podrl.run import build
from podrl.run.config import is_sebulba
from podrl.types import Agent, Array, EnvSpec, TimeStep, Tree


def observe(spec: Tree, obs: Tree) -> Tree:
  """A library's own observations as those that agents see.

  Args:
    spec: `EnvSpec.obs`, leaves `[*obs_shape]`.
    obs: leaves `[B, *obs_shape]`, or integers `[B]`, categories from 0 on, where
      the specification is of their one-hot vector.

  Raises:
    ValueError: if a shape is another.
  """

  def one(spec: jax.ShapeDtypeStruct, x: Array) -> Array:
    x = jnp.asarray(x)
    if x.shape[1:] == spec.shape:
      return x.astype(spec.dtype)
    is_category = jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 1
    if is_category and spec.dtype == bool and len(spec.shape) == 1:
      return x[:, None] == jnp.arange(spec.shape[0], dtype=x.dtype)[None]
    raise ValueError(
      f'an observation has shape {x.shape}; the policy takes '
      f'{("B",) + spec.shape}'.replace("'", '')
    )

  return jax.tree.map(one, spec, obs)


@dataclasses.dataclass(frozen=True)
class Policy:
  """A policy, its parameters on one device.

  Attributes:
    config: of the run.
    spec: of its environment.
    agent: whose `act` it calls.
    params: of the agent.
    num_updates: that made them.
  """

  config: ConfigDict
  spec: EnvSpec
  agent: Agent
  params: Tree
  num_updates: int

  def initial_carry(self, batch_size: int) -> Tree:
    """What is carried into the first step of so many episodes."""
    return self.agent.initial_carry(batch_size)

  def __call__(
    self,
    obs: Tree,
    carry: Tree = None,
    *,
    is_first: Array | None = None,
    rng_key: chex.PRNGKey | None = None,
  ) -> tuple[Array, Tree]:
    """Chooses actions.

    Args:
      obs: leaves `[B, *obs_shape]`, as the environment's library gives them.
      carry: what the last call returned; None begins episodes.
      is_first: bool `[B]`, where an episode begins; by default where `carry` is
        None.
      rng_key: draws a sample; without, it is the policy's mode.

    Returns:
      Actions, int32 `[B]` or float32 `[B, *shape]` within their bounds, and the
      carry `[B, ...]`.

    Raises:
      ValueError: if an observation has another shape.
    """
    batch_size = len(jax.tree.leaves(obs)[0])
    if is_first is None:
      is_first = np.full(batch_size, carry is None)
    if carry is None:
      carry = self.initial_carry(batch_size)
    keys = jax.random.split(
      jax.random.key(0) if rng_key is None else rng_key, batch_size
    )
    return self._act(
      self.params,
      keys,
      obs,
      jnp.asarray(is_first),
      carry,
      greedy=rng_key is None,
    )

  @functools.cached_property
  def _act(self):
    @functools.partial(jax.jit, static_argnames='greedy')
    def act(params, keys, obs, is_first, carry, *, greedy):
      timestep = TimeStep(
        observe(self.spec.obs, obs),
        jnp.zeros(is_first.shape),
        jnp.ones(is_first.shape),
        is_first,
      )
      action, _, carry = self.agent.act(
        params, keys, timestep, carry, greedy=greedy
      )
      return action, carry

    return act


def load(
  path: str | os.PathLike, which: str = 'last', seed: int | None = None
) -> Policy:
  """Loads the policy of a run; see `podrl.load`."""
  path = os.path.normpath(path)
  if parent := workdir.run_of_agent(path):
    path, seed = parent, int(path.rpartition('_')[2])
  config = workdir.read_config(path)
  num_seeds = config.get('num_seeds', 1)
  if seed is None and num_seeds > 1:
    raise ValueError(f'{path} has {num_seeds} agents; name one, {path}/seed_0')
  seed = seed or 0
  if not 0 <= seed < num_seeds:
    raise ValueError(f'{path} has no agent {seed}; it has {num_seeds}')
  step = checkpoint.find(path, which)
  spec = (
    build.make_host_spec(config)
    if is_sebulba(config)
    else (build.make_env(config).spec)
  )
  agent = build.make_agent(config, spec)
  keys = jax.random.split(jax.random.key(0), num_seeds)
  shapes = (
    jax.eval_shape(jax.vmap(agent.init), keys)
    if num_seeds > 1
    else jax.eval_shape(agent.init, keys[0])
  )
  params = checkpoint.read_params(path, step, shapes)
  if num_seeds > 1:
    params = jax.tree.map(lambda x: x[seed], params)
  return Policy(config, spec, agent, params, step)
