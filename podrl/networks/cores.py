"""Recurrent cores over sequences that contain episode ends."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl.fields import COUNT, Field, Fields, Range
from podrl.kernels import recurrence
from podrl.networks import gtrxl
from podrl.types import Array, Tree


class Core(nn.Module):
  """A recurrent part whose carry begins anew at each episode's start."""

  kind: str  # A name in `CORES`.
  size: int  # Width of the outputs and of each layer.
  memory_steps: int = 0  # See the field.

  @nn.compact
  def __call__(
    self, x: Array, is_first: Array, carry: Tree
  ) -> tuple[Array, Tree]:
    """Maps `[T, B, features]` to outputs `[T, B, size]` and the last carry."""
    return CORES[self.kind].unroll(self, x, is_first, carry)


def initial_carry(
  kind: str,
  size: int,
  batch_size: int,
  num_layers: int = 1,
  memory_steps: int = 0,
) -> Tree:
  """The carry of a `Core` at the start of an episode; leaves `[B, ...]`."""
  carry = CORES[kind].initial_carry(batch_size, size, memory_steps)
  return (carry,) * num_layers if CORES[kind].has_layers else carry


def _unroll_cell(make_cell: Callable[[int], nn.Module]) -> Callable[..., Any]:
  """Builds `Kind.unroll` from `(size) -> cell`; a cell computes one step."""

  def unroll(core, x, is_first, carry):
    def step(cell, carry, inputs):
      x, is_first = inputs
      carry = jax.tree.map(
        lambda c: jnp.where(is_first[:, None], 0.0, c), carry
      )
      return cell(carry, x)

    scan = nn.scan(
      step, variable_broadcast='params', split_rngs={'params': False}
    )
    carry, outputs = scan(make_cell(core.size), carry, (x, is_first))
    return outputs, carry

  return unroll


def _unroll_layers(make_layer: Callable[[int, int], Any]) -> Callable[..., Any]:
  """Builds `Kind.unroll` of layers; `(size, memory_steps) -> layer`.

  There is a layer for each item of the carry.
  """

  def unroll(core, x, is_first, carry):
    if x.shape[-1] != core.size:  # Each layer adds to its input.
      x = gtrxl.dense(core.size, 'input')(x)
    carries = []
    for layer_carry in carry:
      layer = make_layer(core.size, core.memory_steps)
      x, layer_carry = layer(x, is_first, layer_carry)
      carries.append(layer_carry)
    return x, tuple(carries)

  return unroll


class MinGRU(nn.Module):
  """A GRU whose gate and content do not depend on its state.

    h_t = (1 - z_t) * h_{t-1} + z_t * content_t
    output_t = x_t + h_t

  The gate z_t and the content are linear in the normalised input, except that
  the gate has a sigmoid.

  Source: Feng et al. 2024, arXiv:2410.01201, section 3.1.
  """

  size: int
  memory_steps: int

  @nn.compact
  def __call__(
    self, x: Array, is_first: Array, carry: jax.Array
  ) -> tuple[Array, Array]:
    """Maps `[T, B, size]` to outputs `[T, B, size]` and the last state."""

    def gate_bias(rng_key: jax.Array, shape: Any, dtype: Any) -> Array:
      del rng_key
      if not self.memory_steps:
        return jnp.zeros(shape, dtype)
      return -jnp.log(_time_constants(self.size, self.memory_steps))

    y = nn.LayerNorm(name='norm')(x)
    gate = nn.sigmoid(gtrxl.dense(self.size, 'gate', bias_init=gate_bias)(y))
    content = gtrxl.dense(self.size, 'content')(y)
    decay = jnp.where(is_first[:, :, None], 0.0, 1.0 - gate)
    states = recurrence.linear(decay, gate * content, carry)
    return x + states, states[-1]


class LRU(nn.Module):
  """A linear recurrence with complex eigenvalues that do not depend on inputs.

    u_t = norm(x_t)
    s_t = eigenvalues * s_{t-1} + scale * (B u_t)
    y_t = gelu(real(C s_t) + D * u_t)
    output_t = x_t + sigmoid(V y_t) * (W y_t)

  Source: Orvieto et al. 2023, arXiv:2303.06349, sections 3.3, 3.4 and 4.
  """

  size: int
  memory_steps: int

  @nn.compact
  def __call__(
    self, x: Array, is_first: Array, carry: tuple[Array, Array]
  ) -> tuple[Array, tuple[Array, Array]]:
    """Maps `[T, B, size]` to outputs `[T, B, size]` and the last state.

    The state is its real and its imaginary part, `[B, size]` each.
    """
    modulus = self._first_moduli()

    def vector(name: str, init: Callable[[jax.Array], Array]) -> Array:
      return self.param(name, init)[None, None]

    def first_phases(rng_key: jax.Array) -> Array:
      return jax.random.uniform(rng_key, (self.size,), maxval=2 * jnp.pi)

    rate = jnp.exp(vector('nu_log', lambda _: jnp.log(-jnp.log(modulus))))
    phase = jnp.exp(vector('theta_log', lambda key: jnp.log(first_phases(key))))
    scale = jnp.exp(
      vector('gamma_log', lambda _: 0.5 * jnp.log1p(-jnp.square(modulus)))
    )
    eigenvalues = jnp.exp(jax.lax.complex(-rate, phase))

    u = nn.LayerNorm(name='norm')(x)
    inputs = gtrxl.dense(2 * self.size, 'B', use_bias=False)(u)
    real, imaginary = jnp.split(inputs, 2, axis=-1)
    inputs = jax.lax.complex(scale * real, scale * imaginary)
    decay = jnp.where(is_first[:, :, None], 0.0, eigenvalues)
    states = recurrence.linear(decay, inputs, jax.lax.complex(*carry))
    real, imaginary = jnp.real(states), jnp.imag(states)

    outputs = jnp.concatenate([real, imaginary], axis=-1)
    outputs = gtrxl.dense(self.size, 'C', use_bias=False)(outputs)
    direct = vector('D', lambda key: jax.random.normal(key, (self.size,)))
    y = nn.gelu(outputs + direct * u)
    y = nn.sigmoid(gtrxl.dense(self.size, 'V')(y)) * gtrxl.dense(
      self.size, 'W'
    )(y)
    return x + y, (real[-1], imaginary[-1])

  def _first_moduli(self) -> Array:
    """Returns the moduli of the eigenvalues of a new layer, `[size]`."""
    if self.memory_steps:
      constants = _time_constants(self.size, self.memory_steps)
      return constants / (1.0 + constants)
    # Evenly spaced over the area of the unit disk.
    return jnp.sqrt((jnp.arange(self.size) + 0.5) / self.size)


def _zeros(batch_size: int, size: int, memory_steps: int) -> Array:
  del memory_steps
  return jnp.zeros((batch_size, size))


def _two_zeros(*sizes: int) -> tuple[Array, Array]:
  """The cell and the output of an LSTM, or the two parts of a complex state."""
  zeros = _zeros(*sizes)
  return zeros, zeros


class Kind(NamedTuple):
  """A kind of core."""

  # `(core, x, is_first, carry) -> (outputs, carry)`, see `Core.__call__`. It
  # makes the layers of `core`.
  unroll: Callable[[Core, Array, Array, Tree], tuple[Array, Tree]]
  # `(batch_size, size, memory_steps) -> carry` of one layer.
  initial_carry: Callable[[int, int, int], Tree]
  has_layers: bool = False  # Whether it can have several layers.
  # Whether `memory_steps` is the length of a window, whose steps are the carry.
  has_window: bool = False


# GRU: Cho et al. 2014, arXiv:1406.1078; LSTM: Hochreiter and Schmidhuber 1997.
CORES = {
  'gru': Kind(_unroll_cell(nn.GRUCell), _zeros),
  'lstm': Kind(_unroll_cell(nn.OptimizedLSTMCell), _two_zeros),
  'mingru': Kind(_unroll_layers(MinGRU), _zeros, has_layers=True),
  'lru': Kind(_unroll_layers(LRU), _two_zeros, has_layers=True),
  'gtrxl': Kind(
    _unroll_layers(gtrxl.Layer),
    gtrxl.initial_carry,
    has_layers=True,
    has_window=True,
  ),
}

FIELDS = {
  'network.recurrent': Field(
    'none', 'Recurrent core after a torso.', ('none', *CORES)
  ),
  'network.num_layers': Field(
    1, 'Layers of a core; gru and lstm have one.', COUNT
  ),
  'network.memory_steps': Field(
    0,
    'Steps for which an untrained core remembers; 0 means its usual number. '
    'For gtrxl, the length of its window.',
    Range(0, 10**6),
  ),
}


def check(fields: Fields) -> None:
  """Raises a ValueError if the fields do not fit the kind of core."""
  name = fields.get('network.recurrent', 'none')
  kind = CORES.get(name)
  num_layers = fields.get('network.num_layers', 1)
  if num_layers > 1 and not (kind and kind.has_layers):
    names = [name for name, kind in CORES.items() if kind.has_layers]
    raise ValueError(
      f'config.network.num_layers={num_layers} needs a core that can have '
      f'several layers; set config.network.recurrent to {" or ".join(names)}'
    )
  memory_steps = fields.get('network.memory_steps', 0)
  if kind and kind.has_window:
    if not memory_steps:
      raise ValueError(
        f'config.network.recurrent={name} needs the length of its window; set '
        'config.network.memory_steps to at least 1'
      )
  elif memory_steps == 1:
    raise ValueError('config.network.memory_steps=1 must be 0, or at least 2')


def options(fields: Fields) -> dict[str, Any]:
  """Returns the options of a network that describe its core."""
  return {
    'core': fields.get('network.recurrent', 'none'),
    'core_size': fields['network.hidden_sizes'][-1],
    'num_layers': fields.get('network.num_layers', 1),
    'memory_steps': fields.get('network.memory_steps', 0),
  }


def _time_constants(size: int, num_steps: int) -> Array:
  """Returns time constants from 1 to `num_steps` - 1, evenly spaced, `[size]`.

  A unit with the time constant c keeps c / (1 + c) of its state in each step.

  Source: Tallec and Ollivier 2018, arXiv:1804.11188, section 3.2.
  """
  return jnp.linspace(1.0, num_steps - 1.0, size)


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
  signs = {'hf': 1, 'hi': -1, 'iz': 1}  # flax's names in LSTM, LSTM, GRU.

  def change(path: tuple[Any, ...], x: Array) -> Array:
    names = [entry.key for entry in path]
    if names[-1] != 'bias' or names[-2] not in signs:
      return x
    return signs[names[-2]] * jnp.log(_time_constants(len(x), num_steps))

  return jax.tree.map_with_path(change, params)
