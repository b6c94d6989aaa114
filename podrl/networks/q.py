"""Networks of action values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl.core.observations import merge_time, without_mask, zeros
from podrl.networks import cores
from podrl.networks.torsos import MLP
from podrl.types import Array, Tree


class QNetwork(NamedTuple):
  """Pure functions that compute the values of all actions of each step."""

  init: Callable[[jax.Array], Tree]  # `(rng_key) -> params`.
  # `(batch_size) -> carry`, leaves `[B, ...]`; `()` if the network is not
  # recurrent.
  initial_carry: Callable[[int], Tree]
  # `(params, obs, is_first, carry) -> (outputs, carry)`. It maps `obs`
  # `[T, B, ...]` and `is_first` `[T, B]` to outputs `[T, B, A, N]`, float32,
  # for A actions and N atoms. It takes the carry before the first step and
  # returns the carry after the last step.
  unroll: Callable[[Tree, Tree, Array, Tree], tuple[Array, Tree]]
  obs: Tree  # `jax.ShapeDtypeStruct`s, the observation of one environment.
  is_recurrent: bool  # Whether the outputs of a step depend on earlier steps.


class ActionValues(nn.Module):
  """A torso, perhaps a recurrent core, and a head with N numbers per action.

  The duelling head adds a number for the state to the numbers of the actions,
  whose mean is 0. Source: Wang et al. 2016, arXiv:1511.06581, eq. 9.
  """

  make_torso: Callable[[], nn.Module]  # Builds a torso, an `nn.Module`.
  num_actions: int
  num_atoms: int = 1
  is_duelling: bool = False
  core: str = 'none'  # 'none' or one of `cores.CORES`, before the head.
  core_size: int = 64  # Width of the core.
  num_layers: int = 1  # Layers of the core.
  memory_steps: int = 0  # See the field.

  @nn.compact
  def __call__(
    self, obs: Tree, is_first: Array, carry: Tree
  ) -> tuple[Array, Tree]:
    """Computes `QNetwork.unroll`."""
    torso: Any = self.make_torso()
    features = torso(merge_time(obs)).astype(jnp.float32)
    shape = is_first.shape
    features = features.reshape(*shape, -1)
    if self.core != 'none':
      core = cores.Core(self.core, self.core_size, self.memory_steps)
      features, carry = core(features, is_first, carry)

    outputs = nn.DenseGeneral((self.num_actions, self.num_atoms))(features)
    if self.is_duelling:
      outputs -= jnp.mean(outputs, axis=-2, keepdims=True)
      outputs += nn.DenseGeneral((1, self.num_atoms))(features)
    return outputs, carry


def make_network(
  make_torso: Callable[[], nn.Module],
  obs: Tree,
  num_actions: int,
  **options: Any,
) -> QNetwork:
  """Makes a network of action values.

  Args:
    make_torso: builds a torso, an `nn.Module`.
    obs: tree of `jax.ShapeDtypeStruct` for the observation of one environment.
    num_actions: A, number of actions.
    **options: the other attributes of `ActionValues`.
  """
  module = ActionValues(make_torso, num_actions, **options)

  def initial_carry(batch_size: int) -> Tree:
    if module.core == 'none':
      return ()
    return cores.initial_carry(
      module.core,
      module.core_size,
      batch_size,
      module.num_layers,
      module.memory_steps,
    )

  def init(rng_key: jax.Array) -> Tree:
    first = jnp.ones((1, 1), bool)
    params = module.init(rng_key, zeros(obs, 1, 1), first, initial_carry(1))
    return cores.lengthen(params, module.memory_steps)

  apply: Callable[..., Any] = module.apply

  def unroll(params, obs, is_first, carry):
    return apply(params, without_mask(obs), is_first, carry)

  is_recurrent = module.core != 'none'
  return QNetwork(init, initial_carry, unroll, obs, is_recurrent)


class TwinValues(nn.Module):
  """Two networks of action values with the same inputs.

  For discrete actions, a network returns the values of all actions. For
  continuous actions, the action is an input: an MLP gets it beside the
  observation, and another torso's features are joined with it.
  """

  make_torso: Callable[[], nn.Module]  # Builds a torso, an `nn.Module`.
  num_actions: int  # 0 for continuous actions.
  hidden_size: int  # Width of the layer after features and an action.

  @nn.compact
  def __call__(self, obs: Tree, action: Array | None = None) -> Array:
    """Returns float32 `[2, N, num_actions]`, or `[2, N]`.

    Args:
      obs: leaves `[N, ...]`.
      action: float32 `[N, D]`, in [-1, 1], if the actions are continuous.
    """

    def values(self, obs: Tree, action: Array | None) -> Array:
      torso: Any = self.make_torso()
      if action is None:
        return nn.Dense(self.num_actions)(torso(obs).astype(jnp.float32))
      if isinstance(torso, MLP):
        features = torso((obs, action))
      else:
        features = jnp.concatenate([torso(obs), action], axis=-1)
        features = nn.relu(nn.Dense(self.hidden_size)(features))
      return nn.Dense(1)(features.astype(jnp.float32))[..., 0]

    twins = nn.vmap(
      values,
      in_axes=None,
      axis_size=2,
      variable_axes={'params': 0},
      split_rngs={'params': True},
    )
    return twins(self, obs, action)
