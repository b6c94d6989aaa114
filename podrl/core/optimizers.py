"""The optimisers that a configuration can choose."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from podrl.types import Array, Hyperparams, Tree

# The derivative of a step, for meta-gradients, would be NaN at a gradient of 0.
# A small number under the root of the second moment avoids this. It changes
# only steps whose gradients are about 1e-8 or smaller.
_EPS_ROOT = 1e-16

# Cleanba adds 0.01 for a loss that it sums over minibatches of 20 x 32 steps.
# podrl's losses are means, so its gradients are 640 times smaller. This number
# is twice the one that follows: steps are 0.5 to 1 times Cleanba's. With half
# of it, the entropy on Pong-v5 fell from 1.79 to 1.74 in the first update; with
# this number, to 1.78.
_RMS_EPS = 0.02 / 640


class ElementwiseTransformation(optax.GradientTransformationExtraArgs):
  """An optimiser for which the arrangement of the parameters does not matter.

  The learner gives it all parameters as one vector. See `elementwise`.
  """

  is_elementwise = True


def elementwise(
  optimizer: optax.GradientTransformation,
) -> ElementwiseTransformation:
  """Marks an optimiser that may get all parameters as one vector.

  This is faster. It is right if each number changes by its own gradients and by
  the norm of all gradients only, as with Adam. It is wrong for masks, for
  groups of parameters, and for a norm of each layer.
  """
  return ElementwiseTransformation(*optax.with_extra_args_support(optimizer))


def scale_by_rms(decay: float, eps: float) -> optax.GradientTransformation:
  """Divides gradients by the root of their mean square, plus `eps`.

    nu = decay nu + (1 - decay) g^2;  g / (sqrt(nu + 1e-16) + eps)

  Unlike `optax.scale_by_rms`, it has a derivative at a gradient of 0.

  Source: torch.optim.RMSprop, as Huang et al. 2023, arXiv:2310.00036, use it.
  """

  def init(params: Tree) -> optax.ScaleByRmsState:
    return optax.ScaleByRmsState(optax.tree.zeros_like(params))

  def update(
    updates: Tree, state: optax.ScaleByRmsState, params: Tree = None
  ) -> tuple[Tree, optax.ScaleByRmsState]:
    del params
    nu = optax.tree.update_moment(updates, state.nu, decay, 2)
    updates = jax.tree.map(
      lambda g, n: g / (jnp.sqrt(n + _EPS_ROOT) + eps), updates, nu
    )
    return updates, optax.ScaleByRmsState(nu)

  return optax.GradientTransformation(init, update)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
  'adam': lambda: optax.scale_by_adam(eps=1e-5, eps_root=_EPS_ROOT),
  'radam': lambda: optax.scale_by_radam(eps_root=_EPS_ROOT),
  'rmsprop': lambda: scale_by_rms(decay=0.99, eps=_RMS_EPS),
  'sgd': optax.identity,
}


def make_optimizer(
  name: str, *, learning_rate: float, anneal: bool, max_grad_norm: float
) -> ElementwiseTransformation:
  """Makes an optimiser.

  The optimiser's `update` takes an argument `hyperparams`, which contains
  'learning_rate' and 'anneal_steps'. The learning rate of step t is

    learning_rate * max(0, 1 - t / anneal_steps).

  Args:
    name: a key of `OPTIMIZERS`.
    learning_rate: used if `hyperparams` does not contain 'learning_rate'.
    anneal: whether the rate falls to 0; otherwise it stays constant, and
      'anneal_steps' is not needed.
    max_grad_norm: a gradient with a larger global norm is scaled down to this
      norm; 0 means no bound.
  """

  def scale(
    updates: Tree,
    num_steps: Array,
    params: Tree = None,
    *,
    hyperparams: Hyperparams | None = None,
    **others: Tree,
  ) -> tuple[Tree, Array]:
    del params, others
    values = {'learning_rate': learning_rate, **(hyperparams or {})}
    rate = values['learning_rate']
    if anneal:
      rate *= jnp.maximum(0.0, 1.0 - num_steps / values['anneal_steps'])
    return jax.tree.map(lambda x: -rate * x, updates), num_steps + 1

  steps = [
    OPTIMIZERS[name](),
    optax.GradientTransformationExtraArgs(
      lambda params: jnp.zeros((), jnp.int32), scale
    ),
  ]
  if max_grad_norm:
    steps.insert(0, optax.clip_by_global_norm(max_grad_norm))
  return elementwise(optax.chain(*steps))
