"""jumanji's environments as a `DeviceEnv`."""

import copy
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrl.core.observations import without_mask
from podrl.envs import autoreset, spaces
from podrl.messages import one_line
from podrl.types import (
  Array,
  Box,
  DeviceEnv,
  Discrete,
  Masked,
  MultiDiscrete,
  Tree,
)

NAMES = '__init__.py', r'register\(\s*id="([^"]+)"'
UNUSABLE = {'Sokoban-v0': 'downloads its levels'}
_NO_LIMIT = 2**30


def has_large_rewards(name: str) -> bool:
  """See `Suite.has_large_rewards`."""
  return name.startswith('Game2048')


def _action_space(
  space: Any, mask_shape: tuple[int, ...] | None
) -> tuple[Discrete | MultiDiscrete | Box, bool]:
  """Converts a space; also returns whether several categories become one.

  If a mask has an element for each combination of categories, a combination
  must be one category, so that no illegal one can be chosen.
  """
  if hasattr(space, 'minimum') and not hasattr(space, 'num_values'):
    if np.issubdtype(space.dtype, np.integer):
      low, high = np.asarray(space.minimum), np.asarray(space.maximum)
      sizes = np.broadcast_to(high - low + 1, space.shape).reshape(-1)
      return MultiDiscrete(tuple(sizes.tolist())), False
    return spaces.box(space, space.minimum, space.maximum), False
  sizes = np.asarray(space.num_values)
  if not sizes.ndim:
    return Discrete(int(sizes)), False
  if mask_shape == tuple(sizes.reshape(-1)):
    return Discrete(math.prod(mask_shape)), True
  return MultiDiscrete(tuple(sizes.reshape(-1).tolist())), False


def _make_with(name: str, options: dict[str, Any]) -> Any:
  """Makes jumanji's environment; an option that it rejects is a ValueError."""
  import jumanji

  try:
    env: Any = jumanji.make(name, **options)
    state, _ = jax.eval_shape(env.reset, jax.random.key(0))
    jax.eval_shape(env.step, state, env.action_spec.generate_value())
  except Exception as error:  # Each class fails in its own way.
    raise ValueError(
      f'env.options of {name} are not accepted: '
      f'{one_line(error, with_kind=True)}'
    ) from error
  return env


def make(name: str, /, **options: Any) -> DeviceEnv:
  """Makes a batch of jumanji's environments.

  jumanji ends an episode at its time limit with a discount of 0. Here, that
  episode is truncated, unless it also ends for another reason. The rewards of
  several agents are added.

  Args:
    name: the registered name, for example 'Snake-v1'.
    **options: arguments of the environment's class, for example
      `time_limit=100`.

  Returns:
    A `DeviceEnv`. The fields of an observation become a dict, without
    `step_count`: podrl distinguishes truncation from termination, so the value
    of a state does not depend on it. If a field is `action_mask`, the
    observation is `Masked`.
  """
  import jumanji

  limited: Any = jumanji.make(name)
  if options:
    known = {*inspect.signature(type(limited)).parameters} - {'viewer'}
    spaces.check_options(name, options, known)
    if 'time_limit' in options:
      limit = spaces.check_whole('time_limit', options['time_limit'])
      options['time_limit'] = limit
    limited = _make_with(name, options)
  first = jax.eval_shape(limited.reset, jax.random.key(0))
  max_steps = getattr(limited, 'time_limit', 0)
  env: Any = copy.copy(limited)
  if max_steps:
    env.time_limit = _NO_LIMIT
  if name.startswith('SearchAndRescue'):
    # Its rewards fall to 0 towards the time limit.
    pay = limited._reward_fn
    env._reward_fn = lambda found, step, _: pay(found, step, max_steps)
  mask: Any = getattr(first[1].observation, 'action_mask', None)
  space = limited.action_spec
  action_space, is_joint = _action_space(space, mask and mask.shape)
  low = getattr(space, 'minimum', 0)
  fits = mask is not None and mask.size == _num_logits(action_space)

  def observe(obs: Any) -> Tree:
    if not hasattr(obs, '_asdict'):
      return obs
    fields = obs._asdict()
    legal = fields.pop('action_mask', None) if fits else None
    fields.pop('step_count', None)
    fields = _expand(fields)
    if len(fields) == 1:
      (fields,) = fields.values()
    return fields if legal is None else Masked(fields, legal.reshape(-1))

  def to_library(action: Array) -> Array:
    if is_joint:
      action = jnp.stack(jnp.unravel_index(action, mask.shape), axis=-1)
    elif isinstance(action_space, MultiDiscrete):
      action = action.reshape(space.shape) + low
    return jnp.asarray(action, space.dtype)

  def reset(rng_key):
    state, timestep = env.reset(rng_key)
    return observe(timestep.observation), (state, jnp.int32(0))

  def step(rng_key, env_state, action):
    del rng_key  # The state has a key of its own.
    state, num_steps = env_state
    state, timestep = env.step(state, to_library(action))
    num_steps += 1
    return (
      observe(timestep.observation),
      (state, num_steps),
      jnp.sum(timestep.reward),
      timestep.last() & jnp.all(timestep.discount == 0),
      timestep.last() | ((num_steps >= max_steps) if max_steps else False),
    )

  def render(env_state: Tree) -> np.ndarray:
    from jumanji.viewer import MatplotlibViewer
    from matplotlib import pyplot

    pyplot.switch_backend('Agg')
    fields = vars(env).values()
    viewer = next(x for x in fields if isinstance(x, MatplotlibViewer))
    viewer._display = viewer._display_rgb_array
    return np.asarray(viewer.render(env_state[0]))[..., :3].copy()

  spec = spaces.device_spec(reset, action_space, max_steps)._replace(
    observe=jax.vmap(observe),
    to_library=jax.vmap(to_library),
    obs_scale=without_mask(observe(_scales(env.observation_spec))),
  )
  return autoreset.make_device_env(spec, reset, step, render=render)


def _scales(spec: Any) -> Tree:
  """Returns an observation that contains the scale of each of its leaves."""
  if spec._specs:
    return spec._constructor(**{k: _scales(x) for k, x in spec._specs.items()})
  low, high = (getattr(spec, k, np.inf) for k in ('minimum', 'maximum'))
  return spaces.scale(spec.dtype, low, high)


def _num_logits(space: Discrete | MultiDiscrete | Box) -> int:
  """Returns the number of elements of a mask; 0 for a box."""
  return 0 if isinstance(space, Box) else int(np.sum(space.num_actions))


def _expand(obs: Any) -> Tree:
  """Converts nested tuples with names to dicts."""
  obs = obs._asdict() if hasattr(obs, '_asdict') else obs
  return {k: _expand(x) for k, x in obs.items()} if type(obs) is dict else obs
