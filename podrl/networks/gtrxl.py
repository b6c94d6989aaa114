"""GTrXL: a gated transformer that sees a window of earlier steps."""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl.kernels.dense import dot_general
from podrl.types import Array

_MAX_HEADS = 4
_HIDDEN_FACTOR = 4  # Width of the hidden layer, divided by that of the core.
_GATE_BIAS = 2.0  # Lets an untrained gate keep most of its first input.
_MASKED = -1e30  # The softmax of this logit is exactly 0.


class Carry(NamedTuple):
  """What a layer remembers of M steps."""

  cache: Array  # Float32 `[B, M, size]`, the layer's inputs, the newest last.
  # Float32 `[B]`, how many of these steps belong to the current episode.
  num_steps: Array


def initial_carry(batch_size: int, size: int, memory_steps: int) -> Carry:
  """Returns the carry of a layer at the start of an episode."""
  cache = jnp.zeros((batch_size, memory_steps, size))
  return Carry(cache, jnp.zeros((batch_size,)))


class Layer(nn.Module):
  """A layer in which a step attends to itself and to the M steps before it.

    y = gate(x, relu(attention(norm([stop_gradient(cache), x]))))
    output = gate(y, relu(mlp(norm(y))))

  A step attends only to steps of its own episode. Each step has a window of the
  same length, so an unroll and single steps give the same outputs.

  Source: Parisotto et al. 2019, arXiv:1910.06764, section 3.
  """

  size: int
  memory_steps: int  # M, at least 1.

  @nn.compact
  def __call__(
    self, x: Array, is_first: Array, carry: Carry
  ) -> tuple[Array, Carry]:
    """Maps `[T, B, size]` to outputs `[T, B, size]` and the last carry."""
    cache = jnp.swapaxes(jax.lax.stop_gradient(carry.cache), 0, 1)
    steps = jnp.concatenate([cache, x])
    is_visible = visible(is_first, carry.num_steps, self.memory_steps)

    normed = nn.LayerNorm(name='attention_norm')(steps)
    y = Attention(self.memory_steps, name='attention')(normed, is_visible)
    y = Gate(name='attention_gate')(x, nn.relu(y))
    hidden = nn.LayerNorm(name='mlp_norm')(y)
    hidden = nn.relu(dense(_HIDDEN_FACTOR * self.size, 'hidden')(hidden))
    hidden = nn.relu(dense(self.size, 'mlp')(hidden))
    output = Gate(name='mlp_gate')(y, hidden)

    newest = slice(-self.memory_steps, None)
    num_steps = jnp.sum(is_visible[:, -1, newest], axis=1, dtype=x.dtype)
    return output, Carry(jnp.swapaxes(steps[newest], 0, 1), num_steps)


def visible(is_first: Array, num_steps: Array, memory_steps: int) -> Array:
  """Returns to which steps each step attends, bool `[B, T, M + T]`.

  The earlier steps are the M steps of the cache and the T steps of the unroll.

  Args:
    is_first: bool `[T, B]`.
    num_steps: float32 `[B]`, see `Carry`.
    memory_steps: M.
  """
  # In the cache, the current episode has the number 0, and others have -1.
  age = memory_steps - jnp.arange(memory_steps)
  is_other = age[None] > num_steps[:, None]
  episode = jnp.cumsum(is_first, axis=0).T
  episodes = jnp.concatenate([-is_other.astype(episode.dtype), episode], axis=1)
  is_same = episode[:, :, None] == episodes[:, None]
  place = jnp.arange(episodes.shape[1])
  distance = place[memory_steps:, None] - place[None]
  is_near = (distance >= 0) & (distance <= memory_steps)
  return is_same & is_near[None]


class Attention(nn.Module):
  """Attention to a window of steps, which also depends on their distance.

    softmax((q_i + u) . k_j + (q_i + w) . r_{i-j}) v_j

  Source: Dai et al. 2019, arXiv:1901.02860, section 3.3.
  """

  memory_steps: int  # M.

  @nn.compact
  def __call__(self, x: Array, is_visible: Array) -> Array:
    """Maps M + T steps, `[M + T, B, F]`, to outputs of the last T steps.

    Args:
      x: the steps, normalised.
      is_visible: bool `[B, T, M + T]`.
    """
    size = x.shape[-1]
    num_heads = math.gcd(size, _MAX_HEADS)

    heads = num_heads, size // num_heads

    def project(x: Array, name: str) -> Array:
      x = dense(size, name, use_bias=False)(x)
      return x.reshape(*x.shape[:-1], *heads)

    def bias(name: str) -> Array:
      zeros = nn.initializers.zeros_init()
      return self.param(name, zeros, heads)[None, None]

    query = project(x[self.memory_steps :], 'query')
    key, value = project(x, 'key'), project(x, 'value')
    distance = project(_sinusoids(self.memory_steps + 1, size), 'distance')
    of_steps = jnp.einsum('tbhd,sbhd->bhts', query + bias('u'), key)
    of_distances = jnp.einsum('tbhd,mhd->bhtm', query + bias('w'), distance)
    logits = of_steps + _at_steps(of_distances)
    logits *= heads[1] ** -0.5
    logits = jnp.where(is_visible[:, None], logits, _MASKED)
    weights = nn.softmax(logits)
    outputs = jnp.einsum('bhts,sbhd->tbhd', weights, value)
    outputs = outputs.reshape(*outputs.shape[:2], size)
    return dense(size, 'output', use_bias=False)(outputs)


def dense(size: int, name: str, **options: Any) -> nn.Dense:
  """Makes a dense layer whose products are podrl's."""
  return nn.Dense(size, name=name, dot_general=dot_general, **options)


def _sinusoids(number: int, size: int) -> Array:
  """Codes of the distances 0, 1, ..., `[number, size]`.

  Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
  """
  half = -(-size // 2)
  rate = 10_000.0 ** (-jnp.arange(half) / half)
  angle = jnp.arange(number)[:, None] * rate[None]
  codes = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=1)
  return codes[:, :size]


def _at_steps(of_distances: Array) -> Array:
  """Moves logits `[..., T, M + 1]` of distances to steps `[..., T, M + T]`.

  Step t of the unroll has the place M + t among the M + T steps, so the
  distance m belongs to the place M + t - m. All other places have zeros.
  """
  *rest, length, num_distances = of_distances.shape
  # Rows of M + T + 1 numbers, joined and cut into rows of M + T numbers: row t
  # moves to the right by t places.
  padding = [(0, 0)] * len(rest) + [(0, 0), (0, length)]
  rows = jnp.pad(jnp.flip(of_distances, -1), padding)
  width = num_distances + length - 1
  flat = rows.reshape(*rest, -1)[..., : length * width]
  return flat.reshape(*rest, length, width)


class Gate(nn.Module):
  """Joins a stream with new content, like the step of a GRU.

  Source: Parisotto et al. 2019, arXiv:1910.06764, section 3.2, 'Gated-
  Recurrent-Unit-type gating'.
  """

  @nn.compact
  def __call__(self, x: Array, y: Array) -> Array:
    """Joins the stream `x` with `y`; all are `[..., size]`."""
    size = x.shape[-1]
    init = nn.initializers.constant(_GATE_BIAS)
    bias = self.param('bias', init, (size,))
    of_y = dense(3 * size, 'y', use_bias=False)(y)
    of_x = dense(2 * size, 'x', use_bias=False)(x)
    reset, update, content = jnp.split(of_y, 3, axis=-1)
    x_reset, x_update = jnp.split(of_x, 2, axis=-1)
    reset = nn.sigmoid(reset + x_reset)
    bias = jnp.broadcast_to(bias, update.shape)
    update = nn.sigmoid(update + x_update - bias)
    kept = dense(size, 'kept', use_bias=False)(reset * x)
    return (1.0 - update) * x + update * jnp.tanh(content + kept)
