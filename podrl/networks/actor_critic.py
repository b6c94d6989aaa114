"""Networks: a policy and a value over time, of torsos, a memory and heads."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl.networks.torsos import MLP, TwinMLP, as_vector
from podrl.types import Array, Tree

CORES = ('none', 'gru', 'lstm')

# Wider observations are worth joining two first layers (measured on a CPU).
_JOIN_WIDTH = 256


class Network(NamedTuple):
  """A policy head and a value for each step of a sequence, as pure functions.

  Attributes:
    init: `(rng_key) -> params`.
    initial_carry: `(batch_size) -> carry`, leaves `[B, ...]`; `()` where
      nothing is remembered.
    unroll: `(params, obs, is_first, carry) -> (head, value, carry)`: of
      observations `[T, B, ...]` and `is_first` `[T, B]`, heads
      `[T, B, num_params]` and values `[T, B]`, both float32. `carry` is the
      one before the first step, then the one after the last.
    is_recurrent: whether a step's outputs depend on earlier ones.
  """

  init: Callable[[jax.Array], Tree]
  initial_carry: Callable[[int], Tree]
  unroll: Callable[[Tree, Tree, Array, Tree], tuple[Array, Array, Tree]]
  is_recurrent: bool


def feed_forward(module: nn.Module, obs: Tree) -> Network:
  """A network without memory.

  Args:
    module: from observations `[N, ...]` to a policy head `[N, num_params]` and
      values `[N]`.
    obs: tree of `jax.ShapeDtypeStruct`, one environment's observation.
  """

  def init(rng_key: jax.Array) -> Tree:
    return module.init(
      rng_key, jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), obs)
    )

  def unroll(
    params: Tree, obs: Tree, is_first: Array, carry: Tree
  ) -> tuple[Array, Array, Tree]:
    shape = is_first.shape
    head, value = module.apply(
      params, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
    )
    return head.reshape(*shape, -1), value.reshape(shape), carry

  return Network(init, lambda batch_size: (), unroll, is_recurrent=False)


def recurrent(
  module: nn.Module, obs: Tree, initial_carry: Callable[[int], Tree]
) -> Network:
  """A network with a memory.

  Args:
    module: does what `Network.unroll` does; it forgets where `is_first`.
    obs: tree of `jax.ShapeDtypeStruct`, one environment's observation.
    initial_carry: `(batch_size) -> carry`.
  """

  def init(rng_key: jax.Array) -> Tree:
    example = jax.tree.map(lambda x: jnp.zeros((1, 1, *x.shape), x.dtype), obs)
    return module.init(
      rng_key, example, jnp.ones((1, 1), bool), initial_carry(1)
    )

  return Network(init, initial_carry, module.apply, is_recurrent=True)


class Core(nn.Module):
  """A recurrent layer whose carry starts from zero where an episode does.

  GRU: Cho et al. 2014, arXiv:1406.1078; LSTM: Hochreiter and Schmidhuber 1997.

  Attributes:
    kind: 'gru' or 'lstm'.
    size: width of its outputs and of its carry.
  """

  kind: str
  size: int

  @nn.compact
  def __call__(
    self, x: Array, is_first: Array, carry: Tree
  ) -> tuple[Array, Tree]:
    """From `[T, B, features]` to outputs `[T, B, size]` and the last carry."""
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


class ActorCritic(nn.Module):
  """A policy head and a value head on one torso, or on one torso each.

  Attributes:
    make_torso: builds a torso, an `nn.Module`.
    num_policy_params: width of the policy head.
    shared_torso: whether the two heads share one torso.
    num_constant_params: how many of the policy's numbers, the last, are
      parameters, the same in all states.
    core: of each torso, a memory between it and its head; one of `CORES`.
    core_size: width of that memory.
  """

  make_torso: Callable[[], nn.Module]
  num_policy_params: int
  shared_torso: bool = True
  num_constant_params: int = 0
  core: str = 'none'
  core_size: int = 64

  @nn.compact
  def __call__(
    self, obs: Tree, is_first: Array, carry: Tree
  ) -> tuple[Array, Array, Tree]:
    """As `Network.unroll`, with a carry for each torso that has a memory."""
    features = self._features(
      jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
    )
    if self.core != 'none':
      outputs = [
        Core(self.core, self.core_size)(
          x.astype(jnp.float32).reshape(*is_first.shape, -1), is_first, c
        )
        for x, c in zip(features, carry, strict=True)
      ]
      features, carry = map(list, zip(*outputs))
    head, value = self._heads(features[0], features[-1])
    return (
      head.reshape(*is_first.shape, -1),
      value.reshape(is_first.shape),
      carry,
    )

  def _features(self, obs: Tree) -> list[Array]:
    """Of observations `[N, ...]`, `[N, F]`: for both heads, or for each."""
    torso = self.make_torso()
    if self.shared_torso:
      return [torso(obs)]
    if isinstance(torso, MLP) and as_vector(obs).shape[1] > _JOIN_WIDTH:
      return list(
        TwinMLP(torso.hidden_sizes, torso.activation, torso.dtype)(obs)
      )
    return [torso(obs), self.make_torso()(obs)]

  def _heads(
    self, policy_features: Array, value_features: Array
  ) -> tuple[Array, Array]:
    """Of features `[..., F]`, the policy's numbers `[..., P]` and values."""
    num_outputs = self.num_policy_params - self.num_constant_params
    # A small policy head starts the policy close to uniform.
    policy = nn.Dense(
      num_outputs, kernel_init=nn.initializers.orthogonal(0.01)
    )(policy_features)
    if self.num_constant_params:
      constant = self.param(
        'constant', nn.initializers.zeros_init(), (self.num_constant_params,)
      )
      policy = jnp.concatenate(
        [
          policy,
          jnp.broadcast_to(constant, (*policy.shape[:-1], constant.size)),
        ],
        axis=-1,
      )
    value = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(
      value_features
    )
    return policy, value


def make_network(
  make_torso: Callable[[], nn.Module],
  obs: Tree,
  num_policy_params: int,
  *,
  shared_torso: bool = True,
  num_constant_params: int = 0,
  core: str = 'none',
  core_size: int = 64,
) -> Network:
  """The actor-critic network of an agent.

  Args:
    make_torso: builds a torso, an `nn.Module`.
    obs: tree of `jax.ShapeDtypeStruct`, one environment's observation.
    num_policy_params: width of the policy head.
    shared_torso: as in `ActorCritic`, and so are the others.
    num_constant_params: the same.
    core: the same.
    core_size: the same.
  """

  def initial_carry(batch_size: int) -> Tree:
    if core == 'none':
      return ()
    zeros = jnp.zeros((batch_size, core_size))
    carry = zeros if core == 'gru' else (zeros, zeros)  # The cell, the state.
    return [carry] * (1 if shared_torso else 2)

  module = ActorCritic(
    make_torso,
    num_policy_params,
    shared_torso,
    num_constant_params,
    core,
    core_size,
  )
  return recurrent(module, obs, initial_carry)._replace(
    is_recurrent=core != 'none'
  )
