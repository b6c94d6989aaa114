"""Networks with a policy head and a value head, over sequences of steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podrl import kernels
from podrl.core.observations import (
  hide_illegal,
  merge_time,
  without_mask,
  zeros,
)
from podrl.fields import Field
from podrl.kernels.dense import dot_general
from podrl.networks import cores
from podrl.networks.torsos import MLP, TwinMLP, as_vector
from podrl.types import Array, Tree

FIELDS = {
  'network.shared_torso': Field(False, 'Policy and value share one torso.'),
}

# For wider observations, `TwinMLP` is faster on a CPU than two `MLP`s.
_JOIN_WIDTH = 256


class Network(NamedTuple):
  """Pure functions that compute a policy head and a value for each step."""

  init: Callable[[jax.Array], Tree]  # `(rng_key) -> params`.
  # `(batch_size) -> carry`, leaves `[B, ...]`; `()` if the network is not
  # recurrent.
  initial_carry: Callable[[int], Tree]
  # `(params, obs, is_first, carry) -> (head, value, carry)`. It maps `obs`
  # `[T, B, ...]` and `is_first` `[T, B]` to heads `[T, B, num_params]` and
  # values `[T, B]`, both float32. An illegal action has the logit `ILLEGAL`. It
  # takes the carry before the first step and returns the carry after the last
  # step.
  unroll: Callable[[Tree, Tree, Array, Tree], tuple[Array, Array, Tree]]
  obs: Tree  # `jax.ShapeDtypeStruct`s, the observation of one environment.
  is_recurrent: bool  # Whether the outputs of a step depend on earlier steps.


def feed_forward(module: nn.Module, obs: Tree) -> Network:
  """Makes a network that is not recurrent.

  Args:
    module: maps observations `[N, ...]` to a policy head `[N, num_params]` and
      values `[N]`.
    obs: tree of `jax.ShapeDtypeStruct` for the observation of one environment.
  """
  apply: Callable[..., Any] = module.apply

  def init(rng_key: jax.Array) -> Tree:
    return module.init(rng_key, zeros(obs, 1))

  def unroll(params, obs, is_first, carry):
    head, value = apply(params, merge_time(without_mask(obs)))
    shape = is_first.shape
    head = hide_illegal(head.reshape(*shape, -1), obs)
    return head, value.reshape(shape), carry

  return Network(init, lambda batch_size: (), unroll, obs, is_recurrent=False)


def recurrent(
  module: nn.Module, obs: Tree, initial_carry: Callable[[int], Tree]
) -> Network:
  """Makes a recurrent network.

  Args:
    module: computes `Network.unroll`; it resets the carry where `is_first` is
      true.
    obs: tree of `jax.ShapeDtypeStruct` for the observation of one environment.
    initial_carry: `(batch_size) -> carry`.
  """
  apply: Callable[..., Any] = module.apply

  def init(rng_key: jax.Array) -> Tree:
    is_first = jnp.ones((1, 1), bool)
    return module.init(rng_key, zeros(obs, 1, 1), is_first, initial_carry(1))

  def unroll(params, obs, is_first, carry):
    head, value, carry = apply(params, without_mask(obs), is_first, carry)
    return hide_illegal(head, obs), value, carry

  return Network(init, initial_carry, unroll, obs, is_recurrent=True)


class ActorCritic(nn.Module):
  """A policy head and a value head, with one torso for both or one for each."""

  make_torso: Callable[[], nn.Module]  # Builds a torso, an `nn.Module`.
  num_policy_params: int  # Width of the policy head.
  shared_torso: bool = True  # Whether the two heads share one torso.
  # How many values at the end of the policy head are parameters, which do not
  # depend on the state.
  num_constant_params: int = 0
  # 'none' or one of `cores.CORES`, placed between each torso and its head.
  core: str = 'none'
  core_size: int = 64  # Width of the core.
  num_layers: int = 1  # Layers of the core.
  memory_steps: int = 0  # See the field.
  # Builds the value's own torso, if it differs from the policy's.
  make_value_torso: Callable[[], nn.Module] | None = None

  @nn.compact
  def __call__(
    self, obs: Tree, is_first: Array, carry: Tree
  ) -> tuple[Array, Array, Tree]:
    """Computes `Network.unroll`; the carry is a list with one item per core."""
    features = self._features(merge_time(obs))
    shape = is_first.shape
    if self.core != 'none':
      outputs = []
      for x, core_carry in zip(features, carry, strict=True):
        x = x.astype(jnp.float32).reshape(*shape, -1)
        core = cores.Core(self.core, self.core_size, self.memory_steps)
        outputs.append(core(x, is_first, core_carry))
      features, carry = map(list, zip(*outputs))
    head, value = self._heads(features[0], features[-1])
    return head.reshape(*shape, -1), value.reshape(shape), carry

  def initial_carry(self, batch_size: int) -> Tree:
    """Computes `Network.initial_carry`."""
    if self.core == 'none':
      return ()
    carry = cores.initial_carry(
      self.core, self.core_size, batch_size, self.num_layers, self.memory_steps
    )
    return [carry] if self.shared_torso else [carry, carry]

  def _features(self, obs: Tree) -> list[Array]:
    """Returns features `[N, F]`: one array for both heads, or one for each."""
    torso: Any = self.make_torso()
    if self.shared_torso:
      return [torso(obs)]
    is_wide = as_vector(obs).shape[1] > _JOIN_WIDTH
    if isinstance(torso, MLP) and not torso.layer_norm and is_wide:
      fields = torso.hidden_sizes, torso.activation, torso.dtype, torso.scales
      return list(TwinMLP(*fields)(obs))
    value_torso: Any = (self.make_value_torso or self.make_torso)()
    return [torso(obs), value_torso(obs)]

  def _heads(
    self, policy_features: Array, value_features: Array
  ) -> tuple[Array, Array]:
    """Maps features `[..., F]` to heads `[..., P]` and values `[..., 1]`."""
    orthogonal = nn.initializers.orthogonal
    num_outputs = self.num_policy_params - self.num_constant_params
    # With small initial weights, the first policy hardly depends on the state.
    init = orthogonal(0.01)
    dense = nn.Dense(num_outputs, kernel_init=init, dot_general=dot_general)
    policy = dense(policy_features)
    if size := self.num_constant_params:
      zeros = nn.initializers.zeros_init()
      constant = self.param('constant', zeros, (size,))
      constant = jnp.broadcast_to(constant, (*policy.shape[:-1], size))
      policy = jnp.concatenate([policy, constant], axis=-1)
    value = nn.Dense(1, kernel_init=orthogonal(1.0))(value_features)
    return policy, value


def make_network(
  make_torso: Callable[[], nn.Module],
  obs: Tree,
  num_policy_params: int,
  **options: Any,
) -> Network:
  """Makes an actor-critic network.

  Args:
    make_torso: builds a torso, an `nn.Module`.
    obs: tree of `jax.ShapeDtypeStruct` for the observation of one environment.
    num_policy_params: width of the policy head.
    **options: the other attributes of `ActorCritic`.
  """
  module = ActorCritic(make_torso, num_policy_params, **options)
  network = recurrent(module, obs, module.initial_carry)
  if module.core != 'none':
    return network._replace(
      init=lambda rng_key: cores.lengthen(
        network.init(rng_key), module.memory_steps
      )
    )
  network = network._replace(is_recurrent=False)
  if not isinstance(make_torso(), MLP):
    return network  # A convolution is faster on a joined axis.

  def unroll_steps(params: Tree, obs: Tree, is_first: Array):
    def one_step(obs: Tree, is_first: Array) -> tuple[Array, Array]:
      obs, is_first = jax.tree.map(lambda x: x[None], (obs, is_first))
      head, value, _ = network.unroll(params, obs, is_first, ())
      return head[0], value[0]

    return jax.vmap(one_step)(obs, is_first)

  def unroll_joined(params: Tree, obs: Tree, is_first: Array):
    return network.unroll(params, obs, is_first, ())[:2]

  def unroll_twins(params: Tree, obs: Tree, is_first: Array):
    vectors = merge_time(without_mask(obs))
    head, value = _compute_twins(module, params['params'], vectors)
    head = hide_illegal(head.reshape(*is_first.shape, -1), obs)
    return head, value.reshape(is_first.shape)

  forms = {'tpu': unroll_steps}
  if _is_twin(module):
    forms['cuda'] = unroll_twins

  def unroll(params, obs, is_first, carry):
    # `module` joins time and batch. For that, a TPU would copy the observations
    # to another layout, so a TPU computes each step separately.
    head, value = kernels.choose(unroll_joined, params, obs, is_first, **forms)
    return head, value, carry

  return network._replace(unroll=unroll)


def _is_twin(module: ActorCritic) -> bool:
  """Returns whether the policy and the value have equal MLPs, one for each."""
  torso: Any = module.make_torso()
  is_mlp = isinstance(torso, MLP) and not torso.layer_norm
  is_same = module.make_value_torso in (None, module.make_torso)
  return is_mlp and is_same and not module.shared_torso


def _twin_layers(params: Tree) -> list[Tree]:
  """Joins the layers of both MLPs and both heads, `[2, F, G]` each.

  The first layer is `[F, 2 G]`, because both have the same inputs. The head of
  the value gets columns of zeros.
  """

  def layers_of(name: str) -> list[Tree]:
    return [params[name][f'Dense_{i}'] for i in range(len(params[name]))]

  def join(of_policy: Array, of_value: Array) -> Array:
    sizes = zip(of_policy.shape, of_value.shape, strict=True)
    of_value = jnp.pad(of_value, [(0, n - m) for n, m in sizes])
    return jnp.stack([of_policy, of_value])

  if 'TwinMLP_0' in params:  # Its first layer is joined already.
    first, *rest = layers_of('TwinMLP_0')
    half = len(rest) // 2
    pairs = [*zip(rest[:half], rest[half:], strict=True)]
  else:
    pair, *pairs = zip(layers_of('MLP_0'), layers_of('MLP_1'), strict=True)
    first = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *pair)
  pairs.append((params['Dense_0'], params['Dense_1']))
  return [first, *(jax.tree.map(join, *pair) for pair in pairs)]


def _compute_twins(
  module: ActorCritic, params: Tree, obs: Tree
) -> tuple[Array, Array]:
  """Computes the heads and values of observations `[N, ...]`, with few kernels.

  Each product computes a layer of both MLPs. A GPU takes about as long to start
  a kernel as to multiply small layers. N is the last axis, so that the gradient
  of a bias is a sum over neighbours.
  """
  torso: Any = module.make_torso()
  keep = jax.lax.optimization_barrier  # XLA would compute it several times.
  first, *layers, heads = _twin_layers(params)

  def compute(layer: Tree, product: str, x: Array) -> jax.Array:
    kernel, bias = (layer[k].astype(x.dtype) for k in ('kernel', 'bias'))
    return jnp.einsum(product, keep(kernel), x) + bias[..., None]

  vectors = as_vector(obs, torso.dtype, torso.scales)
  x = keep(torso.activation(compute(first, 'fg,nf->gn', vectors)))
  x = x.reshape(2, -1, x.shape[-1])
  for layer in layers:
    x = keep(torso.activation(compute(layer, 'kfg,kfn->kgn', x)))
  x = compute(heads, 'kfg,kfn->kgn', x.astype(jnp.float32))
  head = x[0].T
  if module.num_constant_params:
    constant = params['constant']
    constant = jnp.broadcast_to(constant, (len(head), constant.size))
    head = jnp.concatenate([head, constant], axis=-1)
  return head, x[1, 0]


def groups(params: Tree) -> Tree:
  """Returns the group of each parameter, 'actor' or 'critic'.

  A torso that both share belongs to the actor. See `make_optimizer`.
  """
  names = params['params']
  has_two = any(k.endswith('_1') and not k.startswith('Dense') for k in names)

  def one(path: tuple[Any, ...], x: Array) -> str:
    part = path[1].key
    if part == 'TwinMLP_0':  # Layers in turn, after one layer of both.
      number = int(path[2].key.rpartition('_')[2])
      half = (len(params['params'][part]) - 1) // 2
      if number == 0:
        return 'actor|critic'
      return 'actor' if number <= half else 'critic'
    is_head = part.startswith('Dense')
    return 'critic' if part.endswith('_1') and (is_head or has_two) else 'actor'

  return jax.tree.map_with_path(one, params)
