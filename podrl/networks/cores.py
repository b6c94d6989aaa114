"""Recurrent cores: GRU and LSTM over sequences that contain episode ends."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl.fields import Field, Range
from podrl.types import Array, Tree

CORES = ('none', 'gru', 'lstm')

FIELDS = {
  'network.recurrent': Field('none', 'Recurrent core after a torso.', CORES),
  'network.memory_steps': Field(
    0,
    'Steps for which an untrained core remembers; 0 means about 2.',
    Range(0, 10**6),
  ),
}


class Core(nn.Module):
  """A recurrent layer whose carry is reset to zero at each episode's start.

  GRU: Cho et al. 2014, arXiv:1406.1078; LSTM: Hochreiter and Schmidhuber 1997.
  """

  kind: str  # 'gru' or 'lstm'.
  size: int  # Width of the outputs and of the carry.

  @nn.compact
  def __call__(
    self, x: Array, is_first: Array, carry: Tree
  ) -> tuple[Array, Tree]:
    """Maps `[T, B, features]` to outputs `[T, B, size]` and the last carry."""
    cell = {'gru': nn.GRUCell, 'lstm': nn.OptimizedLSTMCell}[self.kind]

    def step(cell, carry, inputs):
      x, is_first = inputs
      carry = jax.tree.map(
        lambda c: jnp.where(is_first[:, None], 0.0, c), carry
      )
      return cell(carry, x)

    scan = nn.scan(
      step, variable_broadcast='params', split_rngs={'params': False}
    )
    carry, outputs = scan(cell(self.size), carry, (x, is_first))
    return outputs, carry


def initial_carry(kind: str, size: int, batch_size: int) -> Tree:
  """The carry of a `Core` at the start of an episode; leaves `[B, size]`."""
  zeros = jnp.zeros((batch_size, size))
  return zeros if kind == 'gru' else (zeros, zeros)  # LSTM: cell and output.


def lengthen(params: Tree, num_steps: int) -> Tree:
  """Changes initial biases, so that a `Core` remembers for up to `num_steps`.

  The usual gates of an untrained core forget half of the carry in each step.
  Here, the time constants of the units are from 1 to `num_steps` - 1, evenly
  spaced: the bias of a forget gate is the log of its time constant, and the
  bias of the input gate is minus that number.

  Args:
    params: a network's parameters, straight from its initialisation.
    num_steps: at least 2; 0 changes nothing.

  Source: Tallec and Ollivier 2018, arXiv:1804.11188, section 3.2.
  """
  if not num_steps:
    return params
  signs = {'hf': 1, 'hi': -1, 'iz': 1}  # LSTM, LSTM, GRU; flax's names.

  def change(path: tuple[Any, ...], x: Array) -> Array:
    names = [entry.key for entry in path]
    if names[-1] != 'bias' or names[-2] not in signs:
      return x
    return signs[names[-2]] * jnp.log(
      jnp.linspace(1.0, num_steps - 1.0, len(x))
    )

  return jax.tree.map_with_path(change, params)
