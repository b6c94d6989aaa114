"""Functions for spaces, names and options that several adapters use."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import functools
import importlib.util
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrl.core.observations import without_mask
from podrl.messages import suggest
from podrl.types import (
  Array,
  Box,
  Discrete,
  EnvSpec,
  Masked,
  MultiDiscrete,
  Tree,
)

# Each category is an element of a one-hot vector, or an output of the policy.
# With more categories than this, an unroll would need gigabytes.
_MAX_CATEGORIES = 2**14
# A dict with these keys is a `Masked` observation, as in PettingZoo.
_MASKED = {'observation', 'action_mask'}
# Networks get floats up to this bound as they are; larger ones are scaled.
_LARGEST_FLOAT = 10.0
_NO_BOUND = 1e6  # Larger bounds say nothing about the usual numbers.
_KINDS = ('Box', 'Discrete', 'MultiDiscrete', 'MultiBinary', 'Dict', 'Tuple')
# If the range of a box is a smaller part of its bounds than this, 32 bits do
# not show enough of it.
_SMALLEST_RANGE = 1e-3


def _kind(space: Any) -> str:
  """Returns the name of a space's class, or of the known class it extends."""
  names = [x.__name__ for x in type(space).__mro__]
  return next((x for x in names if x in _KINDS), names[0])


def _check(what: str, space: Any) -> None:
  """Raises a ValueError if a space is empty or has too many categories."""
  fields = {'Discrete': 'n', 'MultiDiscrete': 'nvec'}
  field = fields.get(_kind(space))
  if field and np.sum(getattr(space, field)) > _MAX_CATEGORIES:
    raise ValueError(
      f'{what} are {space}, but podrl accepts at most {_MAX_CATEGORIES} '
      'categories; wrap the environment so that several smaller spaces replace '
      'this one'
    )
  if not math.prod(space.shape or ()):
    raise ValueError(
      f'{what} are {space}, which contains no number; wrap the environment so '
      'that this space contains at least one number'
    )


def obs_spec(space: Any) -> Tree:
  """Describes the result of `observe` by a tree of `jax.ShapeDtypeStruct`.

  `space` is a gymnasium space: a box, one or several categories, or a dict or
  tuple of spaces. Any other space raises a ValueError. A dict of `observation`
  and `action_mask` becomes `Masked`.
  """
  kind = _kind(space)
  if kind == 'Dict':
    parts = {k: obs_spec(v) for k, v in space.spaces.items()}
    if parts.keys() != _MASKED:
      return parts
    leaves = jax.tree.leaves(parts['action_mask'])
    size = sum(math.prod(x.shape) for x in leaves)
    mask = jax.ShapeDtypeStruct((size,), bool)
    return Masked(parts['observation'], mask)
  if kind == 'Tuple':
    return tuple(obs_spec(x) for x in space.spaces)
  _check('observations', space)
  if kind == 'Discrete':
    return jax.ShapeDtypeStruct((int(space.n),), bool)
  if kind == 'MultiDiscrete':
    return jax.ShapeDtypeStruct((int(space.nvec.sum()),), bool)
  if kind in ('Box', 'MultiBinary'):
    return jax.ShapeDtypeStruct(space.shape, _dtype(space))
  raise ValueError(
    f'observations are {space}, which no network accepts; networks accept '
    'boxes, categories and dicts of them'
  )


def scale(dtype: Any, low: Any, high: Any) -> np.ndarray:
  """Returns the scale of numbers with these bounds; networks divide by it.

  Integers become numbers in [-1, 1], and so do floats with bounds above 10. The
  scale is 1 without bounds, which may be infinite or above a million.
  """
  bound = np.maximum(*(np.abs(np.asarray(x, np.float64)) for x in (low, high)))
  largest = _LARGEST_FLOAT if jnp.issubdtype(dtype, jnp.inexact) else 1.0
  is_large = (bound > largest) & (bound < _NO_BOUND)
  return np.where(is_large, bound, 1.0).astype(np.float32)


def obs_scale(space: Any) -> Tree:
  """Returns a scale for each leaf of `obs_spec`; see `EnvSpec.obs_scale`."""
  kind = _kind(space)
  if kind == 'Dict':
    parts = {k: obs_scale(v) for k, v in space.spaces.items()}
    one = np.float32(1)
    return (
      Masked(parts['observation'], one) if parts.keys() == _MASKED else parts
    )
  if kind == 'Tuple':
    return tuple(map(obs_scale, space.spaces))
  if kind == 'Box':
    offset = _offset(space) if np.dtype(space.dtype).itemsize == 8 else 0
    return scale(space.dtype, space.low - offset, space.high - offset)
  return np.float32(1)


def _dtype(space: Any) -> np.dtype:
  """Returns the dtype of an observation's leaf: at most 32 bits.

  Integers that 32 bits cannot contain become floats.
  """
  dtype = np.dtype(space.dtype)
  narrow = {'i8': np.int32, 'u8': np.uint32, 'f8': np.float32}
  small = np.dtype(narrow.get(dtype.str[1:], dtype))
  if small.kind not in 'iu' or small == dtype:
    return small
  limits = np.iinfo(small)
  fits = np.all(space.low >= limits.min) and np.all(space.high <= limits.max)
  return small if fits else np.dtype(np.float32)


def make_cut(space: Any) -> Callable[[Tree], Tree]:
  """Makes a function that converts observations `[B, ...]` to 32 bits.

  The function runs on the host. If the bounds of a box are close together, but
  far from 0, it first subtracts the lower bound, because 32 bits would round
  the differences away. It raises an OverflowError for a number that is finite
  in 64 bits only.
  """
  kind = _kind(space)
  if kind in ('Dict', 'Tuple'):
    items = space.spaces.items() if kind == 'Dict' else enumerate(space.spaces)
    parts = {k: make_cut(v) for k, v in items}
    if all(x is same for x in parts.values()):
      return same
    if kind == 'Dict':
      # A policy need not get what only its critic sees.
      return lambda obs: {k: x(obs[k]) for k, x in parts.items() if k in obs}
    return lambda obs: tuple(part(obs[k]) for k, part in parts.items())
  dtype = np.dtype(space.dtype or np.float32)
  if dtype.itemsize < 8 or kind not in ('Box', 'Discrete', 'MultiDiscrete'):
    return same
  if kind == 'Box':
    offset, small = _offset(space).astype(dtype), _dtype(space)
  else:
    offset, small = _far_start(space), np.dtype(np.int32)
  if not offset.any():
    return lambda obs: _narrow(np.asarray(obs), small)
  return lambda obs: _narrow(np.asarray(obs, dtype) - offset, small)


def _narrow(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Casts an array; raises an OverflowError if a float is too large."""
  try:
    with np.errstate(over='raise'):
      return x.astype(dtype)
  except FloatingPointError:
    with np.errstate(over='ignore'):
      lost = x[np.isinf(x.astype(dtype)) & np.isfinite(x)]
    raise OverflowError(
      f'an observation of {lost[0]:g}; {dtype} cannot contain it; scale it'
    ) from None


def same(obs: Tree) -> Tree:
  """The cut of observations that have 32 bits already."""
  return obs


def is_rounded_away(wide: Sequence[Array], small: Sequence[Array]) -> bool:
  """Returns whether a number changes in 64 bits but is constant in 32 bits.

  Changes of less than 1e-12 of a float may be rounding errors of 64 bits.

  Args:
    wide: the observations `[B, ...]` of some steps.
    small: the same observations after the cut.
  """
  # Networks see floats, so an integer of 32 bits can be too large too.
  x, y = np.concatenate(wide), np.concatenate(small).astype(np.float32)
  spread = np.subtract(x.max(0), x.min(0), dtype=np.longdouble)
  tolerance = 1e-12 if x.dtype.kind == 'f' else 0.0
  is_changing = spread > tolerance * np.abs(x.astype(np.longdouble)).max(0)
  return bool(np.any(is_changing & (y.max(0) == y.min(0))))


def _far_start(space: Any) -> Array:
  """Returns the first category, or 0 if 32 bits can contain all of them."""
  start = np.asarray(space.start, np.int64)
  size = np.asarray(getattr(space, 'nvec', getattr(space, 'n', 0)), np.int64)
  is_near = np.all(start >= -(2**31)) and np.all(start + size < 2**31)
  return np.zeros_like(start) if is_near else start


def _offset(space: Any) -> Array:
  """Returns what `make_cut` subtracts from a box: its lower bound, or 0."""
  low, high = (np.asarray(x, np.float64) for x in (space.low, space.high))
  with np.errstate(invalid='ignore', over='ignore'):
    is_far = high - low < _SMALLEST_RANGE * np.maximum(abs(low), abs(high))
  return np.where(is_far & np.isfinite(low), space.low, 0)


def observe(space: Any, obs: Tree) -> Tree:
  """Converts a library's observations `[B, ...]` to the format of `obs_spec`.

  A category becomes a one-hot vector; several categories become one vector of
  concatenated one-hot vectors. The function runs on the device.
  """
  kind = _kind(space)
  if kind == 'Dict':
    given = {k: v for k, v in space.spaces.items() if k in obs}
    parts = {k: observe(v, obs[k]) for k, v in given.items()}
    if parts.keys() != _MASKED:
      return parts
    leaves = jax.tree.leaves(parts['action_mask'])
    masks = [x.reshape(len(x), -1) != 0 for x in leaves]
    return Masked(parts['observation'], jnp.concatenate(masks, axis=-1))
  if kind == 'Tuple':
    return tuple(map(observe, space.spaces, obs))
  if kind == 'Discrete':
    category = obs.reshape(-1) - int(space.start - _far_start(space))
    return jax.nn.one_hot(category, space.n, dtype=bool)
  if kind == 'MultiDiscrete':
    sizes = space.nvec.reshape(-1).tolist()
    start = space.start - _far_start(space)
    columns = (obs - start[None]).reshape(-1, len(sizes)).T
    one_hot = functools.partial(jax.nn.one_hot, dtype=bool)
    return jnp.concatenate([*map(one_hot, columns, sizes)], axis=-1)
  return obs.reshape(-1, *space.shape)


def action_space(space: Any) -> Discrete | MultiDiscrete | Box:
  """Converts a gymnasium action space; in the result, categories start at 0."""
  kind = _kind(space)
  _check('actions', space)
  if kind == 'Discrete':
    return Discrete(int(space.n))
  if kind == 'MultiDiscrete':
    return MultiDiscrete(tuple(space.nvec.reshape(-1).tolist()))
  if kind == 'MultiBinary':
    return MultiDiscrete((2,) * math.prod(space.shape))
  if kind == 'Box':
    # Round inwards: in float32, 0.4 is larger than the bound 0.4 in float64.
    low, high = (np.asarray(x, np.float32) for x in (space.low, space.high))
    low = np.where(low < space.low, np.nextafter(low, np.float32(np.inf)), low)
    high = np.where(
      high > space.high, np.nextafter(high, np.float32(-np.inf)), high
    )
    if np.dtype(space.dtype).kind in 'iu' and space.dtype.itemsize >= 4:
      # gymnasium replaces infinite bounds by the limits of the dtype.
      limits = np.iinfo(space.dtype)
      low = np.where(space.low == limits.min, np.float32(-np.inf), low)
      high = np.where(space.high == limits.max, np.float32(np.inf), high)
    return Box(space.shape, low, high)
  raise ValueError(
    f'actions are {space}, which no agent accepts; agents accept categories '
    'and boxes'
  )


def env_spec(
  name: str,
  obs_space: Any,
  library_action_space: Any,
  frame_skip: int,
  max_episode_steps: int,
) -> EnvSpec:
  """Builds an `EnvSpec`; an unsupported space is a ValueError."""
  try:
    obs, action = obs_spec(obs_space), action_space(library_action_space)
  except ValueError as error:
    raise ValueError(f'env.name={name}: {error}') from error
  shapes = [x.shape for x in jax.tree.leaves(without_mask(obs))]
  images = [x for x in shapes if len(x) == 3]
  largest = max(images, key=math.prod, default=(0,))
  return EnvSpec(
    obs,
    largest[0] < min(largest[1:], default=0),
    action,
    frame_skip,
    max_episode_steps,
    observe=functools.partial(observe, obs_space),
    to_library=to_library_action(library_action_space),
    obs_scale=without_mask(obs_scale(obs_space)),
    cut=make_cut(obs_space),
  )


def to_library_action(space: Any) -> Callable[[Array], Array]:
  """Builds a function that converts actions `[B, ...]` to the library's format.

  The function adds the number of the space's first category to each category.
  The actions have the dtype of the space, or on a device at most 32 bits. For a
  box of integers, the function first rounds the numbers.
  """
  kind, dtype = _kind(space), np.dtype(space.dtype)
  device_dtype = jax.dtypes.canonicalize_dtype(dtype)
  is_box, is_integer = kind == 'Box', dtype.kind in 'iu'
  start = np.asarray(getattr(space, 'start', 0), np.int64)[None]

  def convert(action: Array) -> Array:
    is_host = isinstance(action, np.ndarray)
    if is_box:
      action = action.round() if is_integer else action
    else:
      action = action.reshape(-1, *space.shape)
      if start.any():
        action = action + (start if is_host else start.astype(np.int32))
    # JAX's arrays are read-only, so copy.
    return action.astype(dtype if is_host else device_dtype)

  return convert


class UnknownOption(ValueError):
  """The environment does not have an option."""


def check_options(
  name: str, options: Iterable[str], known: Collection[str]
) -> None:
  """Raises an `UnknownOption`, with similar names, for an unknown option."""
  for key in options:
    if key not in known:
      advice = suggest(key, sorted(known)) if known else 'it has no options'
      raise UnknownOption(
        f'env.options.{key} is not an option of {name}; {advice}'
      )


def names_in(
  package: str, file: str, pattern: str, omitted: Collection[str] = ()
) -> list[str]:
  """Finds names in the source text of a package, which need not be imported.

  Args:
    file: path inside the package; it can contain `*`.
    pattern: a regular expression whose first group is a name.
    omitted: names that the result does not have.

  Returns:
    The names in order; none if the package is not installed.
  """
  spec = importlib.util.find_spec(package)
  if spec is None or not spec.submodule_search_locations:
    return []
  root = pathlib.Path(spec.submodule_search_locations[0])
  texts = [path.read_text() for path in sorted(root.glob(file))]
  found = {x for text in texts for x in re.findall(pattern, text)}
  return sorted(found.difference(omitted))


def check_numbers(
  name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
  """Checks options whose defaults are numbers, or true or false.

  Raises:
    UnknownOption: if an option has no such default.
    ValueError: if its value is not of the same kind as the default.
  """
  known = {k: np.asarray(x).dtype.kind for k, x in defaults.items()}
  known = {k: x for k, x in known.items() if x in 'biuf'}
  known = {k: x for k, x in known.items() if not np.ndim(defaults[k])}
  check_options(name, options, known)
  for key, value in options.items():
    option, is_bool = f'env.options.{key}={value!r}', isinstance(value, bool)
    if known[key] == 'b':
      if not is_bool:
        raise ValueError(f'{option} must be True or False')
    elif is_bool or not isinstance(value, int | float):
      raise ValueError(f'{option} must be a number')
    elif not abs(value) < 2**31:
      raise ValueError(f'{option} must be between -2**31 and 2**31')


def replace_numbers(name: str, params: Any, options: Mapping[str, Any]) -> Any:
  """Replaces numbers in a library's parameters by a user's options.

  Args:
    params: a dataclass with a method `replace`.

  Raises:
    ValueError: see `check_numbers`.
  """
  check_numbers(name, options, vars(params))
  return params.replace(**options)


def check_whole(option: str, value: Any) -> int:
  """Returns a whole number; one below 1 or of 2**31 or more is a ValueError."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if not is_number or not 1 <= value < 2**31 or value != int(value):
    raise ValueError(
      f'env.options.{option}={value!r} must be a whole number, at least 1 and '
      'below 2**31'
    )
  return int(value)


def box(space: Any, low: Any, high: Any) -> Box:
  """Converts a box whose bounds may be numbers."""
  bounds = [np.broadcast_to(np.float32(x), space.shape) for x in (low, high)]
  return Box(tuple(space.shape), *bounds)


def device_spec(
  reset: Callable[[Any], tuple[Tree, Tree]],
  action: Discrete | MultiDiscrete | Box,
  max_episode_steps: int,
  observe: Callable[[Tree], Tree] = lambda obs: obs,
) -> EnvSpec:
  """Describes an environment whose functions are written in JAX.

  The observation is that of `reset`: some libraries return dtypes that differ
  from those of their spaces.

  Args:
    reset: see `autoreset.make_device_env`.
    observe: see `autoreset.make_device_env`.

  Raises:
    ValueError: if a part of the observation contains no number.
  """
  obs = jax.eval_shape(lambda key: observe(reset(key)[0]), jax.random.key(0))
  for path, x in jax.tree_util.tree_leaves_with_path(obs):
    if not x.size:
      raise ValueError(
        f'the observation{jax.tree_util.keystr(path)} has the shape {x.shape}, '
        'which contains no number; leave it out'
      )
  return EnvSpec(
    obs,
    channels_first=False,
    action=action,
    frame_skip=1,
    max_episode_steps=max_episode_steps,
    observe=observe,
  )


def one_hot_grid(grid: Array, sizes: Sequence[int]) -> Array:
  """Converts a grid of categories to bool `[..., H, W, sum(sizes)]`.

  Args:
    grid: integers `[..., H, W, len(sizes)]`.
    sizes: the number of categories of each channel.
  """
  parts = [
    jax.nn.one_hot(grid[..., i], size, dtype=bool)
    for i, size in enumerate(sizes)
  ]
  return jnp.concatenate(parts, axis=-1)
