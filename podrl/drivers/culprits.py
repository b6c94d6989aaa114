"""Finds the environment that made a loss NaN or infinite, if there is one.

Each unroll keeps the largest number of each field. This needs an argmax, which
costs very little compared with learning. podrl reports a number only after a
loss that is not finite.
"""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podrl.types import Array, Culprit, Trajectory

_REWARD, _ACTION, _OBSERVATION = 'reward', 'action', 'observation'
# A larger number may be the cause: in float32, the square of 1e20 is infinite.
_LARGE = 1e6
_SMALL = 1e-2  # If all observations are smaller, an agent learns little.
SIZE = 'largest_observation'


class Largest(NamedTuple):
  """A field's first number that is NaN or infinite, or else its largest number.

  All attributes are scalars.
  """

  value: Any  # Float32, the number.
  step: Any  # Int32, modulo 2**32: earlier steps of its environment.
  env: Any  # Int32, index of the environment in the batch.
  element: Any  # Int32, index in the flattened value of one environment.


def find_largest(
  trajectory: Trajectory, num_steps: Array | int
) -> dict[str, Largest]:
  """Finds the largest number, in magnitude, of each float field of an unroll.

  Args:
    trajectory: leaves `[T+1, B, ...]` or `[T, B, ...]`.
    num_steps: steps of each environment before the unroll.

  Returns:
    A `Largest` for the reward, for each array of the observation and for the
    action, by name. Fields of integers or booleans are left out.
  """

  def find(x: Array) -> Largest:
    flat = x.reshape(-1).astype(jnp.float32)
    magnitude = jnp.where(jnp.isfinite(flat), jnp.abs(flat), jnp.inf)
    index = jnp.argmax(magnitude).astype(jnp.int32)
    step, place = jnp.divmod(index, math.prod(x.shape[1:]))
    return Largest(
      flat[index], num_steps + step, *jnp.divmod(place, math.prod(x.shape[2:]))
    )

  timestep = trajectory.timestep
  fields = {_REWARD: timestep.reward, _ACTION: trajectory.action}
  for path, x in jax.tree_util.tree_leaves_with_path(timestep.obs):
    fields[_OBSERVATION + jax.tree_util.keystr(path)] = x
  return {
    name: find(x)
    for name, x in fields.items()
    if jnp.issubdtype(x.dtype, jnp.floating)
  }


def largest_observation(
  largest: Mapping[str, Largest],
) -> dict[str, np.ndarray]:
  """Returns a metric: the largest magnitude of the float observations.

  `largest` is what `find_largest` returned. The result is empty if there are no
  such observations.
  """
  found = [x.value for k, x in largest.items() if k.startswith(_OBSERVATION)]
  return {SIZE: np.max(np.abs(found), axis=0)} if found else {}


def warn_of_size(record: Mapping[str, Any], is_normalized: bool) -> str:
  """Returns a warning if all observations of a record are near 0, or ''.

  `is_normalized` says whether the agent normalises its observations.
  """
  size = record.get(SIZE, 1.0)
  if is_normalized or not 0.0 < size < _SMALL:
    return ''
  return (
    f'observations are at most {size:.1g}, and a network hardly sees such '
    'numbers; use --config.agent.normalize_observation=True'
  )


def find_culprit(
  largest: Mapping[str, Largest], first_env: int, is_failing: bool
) -> Culprit | None:
  """Finds a reward, or a part of an observation, that breaks learning.

  Args:
    largest: what `find_largest` returned for one unroll. If all is well, the
      function reads only the field `value` of each.
    first_env: global index of the first environment of the batch.
    is_failing: whether the loss of this unroll is NaN or infinite. If it is, a
      large finite number may also be the culprit.
  """
  fields = {k: x for k, x in largest.items() if k != _ACTION}
  bad = {k: x for k, x in fields.items() if not math.isfinite(x.value)}
  if not bad and is_failing:
    bad = {k: x for k, x in fields.items() if abs(x.value) > _LARGE}
  if not bad:
    return None
  name, first = min(bad.items(), key=lambda item: item[1].step)
  action = largest.get(_ACTION)
  if action and action.step < first.step and not abs(action.value) <= _LARGE:
    return None  # An earlier action was too large or not finite.
  value, step, env, element = (x.item() for x in first)
  return Culprit(name, value, step % 2**32, first_env + env, element)


def explain(culprit: Culprit, fields: Mapping[str, Any]) -> str:
  """Returns a part of a sentence that describes a culprit and a remedy.

  It returns '' if the configuration, `fields`, already limits the number.
  """
  name, value, step, env, element = culprit
  is_reward, is_finite = name == _REWARD, math.isfinite(value)
  if is_reward:
    is_normalized = fields['agent.normalize_reward']
    is_clipped = fields['agent.reward_clip'] and not math.isnan(value)
    is_harmless = is_finite if is_normalized else is_clipped
    remedy = 'set config.agent.reward_clip or config.agent.normalize_reward'
  else:
    is_harmless = is_finite and fields['agent.normalize_observation']
    remedy = 'set config.agent.normalize_observation=True'
  if is_harmless:
    return ''
  if not is_finite:
    remedy = 'correct the environment'
  text = 'NaN' if math.isnan(value) else f'{value:g}'
  place = '' if is_reward else f' (element {element})'
  return (
    f'environment {env} of {fields["env.name"]} gave the {name} {text}{place} '
    f'in its step {step}; {remedy}'
  )
