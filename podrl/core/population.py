"""Population-based training: bad members continue from copies of good ones.

Source: Jaderberg et al. 2017, arXiv:1711.09846, section 4.1 (truncation
selection; perturbing or resampling hyperparameters).
"""

from collections.abc import Callable, Mapping
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.core.learner import row_keys
from podrl.types import Array, LearnerState

# A fifth of the members, rounded up, is replaced.
_REPLACED = 5
# A hyperparameter of a copy is drawn again with this probability, and otherwise
# multiplied by one of the factors.
_RESAMPLED, _FACTORS = 0.25, (0.8, 1.25)


class Range(NamedTuple):
  """The values of a hyperparameter that evolves."""

  low: float
  high: float
  is_log: bool = False  # Whether values are drawn evenly on a log scale.

  def draw(self, rng_key: chex.PRNGKey) -> Array:
    """Draws a value, float32 `[]`."""
    if not self.is_log:
      return jax.random.uniform(rng_key, (), minval=self.low, maxval=self.high)
    low, high = math.log(self.low), math.log(self.high)
    return jnp.exp(jax.random.uniform(rng_key, (), minval=low, maxval=high))


def choose_parents(rng_key: chex.PRNGKey, scores: Array) -> Array:
  """Chooses from which member each of M members continues.

  The lowest ceil(M / 5) members get a random parent among the highest ceil(M /
  5), and all others continue from themselves. If the score of a parent is not
  finite, the best member replaces it.

  Args:
    scores: float32 `[M]`; NaN is the lowest.

  Returns:
    int32 `[M]`.
  """
  chex.assert_rank(scores, 1)
  number = -(-len(scores) // _REPLACED)
  order = jnp.argsort(jnp.nan_to_num(scores, nan=-jnp.inf, neginf=-jnp.inf))
  order = order.astype(jnp.int32)
  chosen = jax.random.randint(rng_key, (number,), 0, number)
  parents = order[len(scores) - number :][chosen]
  parents = jnp.where(jnp.isfinite(scores[parents]), parents, order[-1])
  return (
    jnp.arange(len(scores), dtype=jnp.int32).at[order[:number]].set(parents)
  )


def vary(rng_key: chex.PRNGKey, value: Array, bounds: Range) -> Array:
  """Draws a new value, or scales `value`, float32 `[]`, within its range."""
  draw_key, resample_key, factor_key = jax.random.split(rng_key, 3)
  factor = jax.random.choice(factor_key, jnp.array(_FACTORS))
  changed = jnp.clip(value * factor, bounds.low, bounds.high)
  is_drawn = jax.random.uniform(resample_key) < _RESAMPLED
  return jnp.where(is_drawn, bounds.draw(draw_key), changed)


def make_exploit(
  ranges: Mapping[str, Range],
) -> Callable[..., tuple[LearnerState, Array]]:
  """Builds the function that replaces bad members.

  A copy has its parent's parameters, target parameters, optimiser state,
  statistics and hyperparameters. Those in `ranges` then vary.

  Returns:
    `(state, scores, rng_key) -> (state, parent)`. The leaves of `state` are
    `[M, ...]`, and it has no memory, because members keep theirs. `scores` is
    float32 `[M]` and `parent` int32 `[M]`.
  """

  def exploit(state, scores, rng_key):
    parent_key, vary_key = jax.random.split(rng_key)
    parent = choose_parents(parent_key, scores)
    members = jnp.arange(len(scores))
    is_copy = parent != members
    state = jax.tree.map(lambda x: x[parent], state)
    hyperparams = dict(state.variables.hyperparams)
    for i, (name, bounds) in enumerate(sorted(ranges.items())):
      key = jax.random.fold_in(vary_key, i)
      new = jax.vmap(lambda key, x: vary(key, x, bounds))(
        row_keys(key, members), hyperparams[name]
      )
      hyperparams[name] = jnp.where(is_copy, new, hyperparams[name])
    variables = state.variables._replace(hyperparams=hyperparams)
    return state._replace(variables=variables), parent

  return exploit
