"""Recurrent cores: GRU and LSTM over sequences that contain episode ends."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl.types import Array, Tree

CORES = ('none', 'gru', 'lstm')


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
