"""What the numbers of a policy head mean: a distribution over actions."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podrl.types import Array, Box, Discrete


class Distribution(NamedTuple):
  """A family of distributions over actions, as pure functions.

  Attributes:
    num_params: how many numbers the policy head puts out.
    sample: `(rng_key, head[num_params]) -> action`, unbatched.
    mode: `(head[..., num_params]) -> action[...]`.
    log_prob: `(head[..., num_params], action[...]) -> float32 [...]`.
    entropy: `(head[..., num_params]) -> float32 [...]`, in nats.
  """
  num_params: int
  sample: Callable[[chex.PRNGKey, Array], Array]
  mode: Callable[[Array], Array]
  log_prob: Callable[[Array, Array], Array]
  entropy: Callable[[Array], Array]


def categorical(num_actions: int) -> Distribution:
  """The categorical distribution, its head holding one logit per action."""

  def log_prob(logits: Array, action: Array) -> Array:
    chex.assert_equal_shape_prefix([logits, action], action.ndim)
    # A product with the one-hot action: gathering is slower in the gradient.
    one_hot = jax.nn.one_hot(action, num_actions)
    return jnp.sum(jax.nn.log_softmax(logits) * one_hot, axis=-1)

  def entropy(logits: Array) -> Array:
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

  return Distribution(
      num_params=num_actions,
      sample=jax.random.categorical,
      mode=lambda logits: jnp.argmax(logits, axis=-1),
      log_prob=log_prob,
      entropy=entropy,
  )


def for_action_space(action: Discrete | Box) -> Distribution:
  """The distribution that fits an action space.

  Raises:
    ValueError: where there is none.
  """
  if isinstance(action, Discrete):
    return categorical(action.num_actions)
  raise ValueError(
      f'actions are continuous (a box of shape {action.shape}), and the agents '
      'act on discrete ones; choose an environment with discrete actions')
