"""The optimisers that a configuration can choose."""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podrl import modules
from podrl.fields import (
  ABOVE_0,
  FROM_0,
  Field,
  Range,
  Table,
  defaults,
  section,
  with_defaults,
)
from podrl.types import Array, Tree

_Values = Mapping[str, Any]  # The fields `optimizer.*`, by short name.

# The derivative of a step, for meta-gradients, would be NaN at a gradient of 0.
# A small number under the root of the second moment avoids this. It changes
# only steps whose gradients are about 1e-8 or smaller.
_EPS_ROOT = 1e-16

# Cleanba adds 0.01 for a loss that it sums over minibatches of 20 x 32 steps.
# podrl's losses are means, so its gradients are 640 times smaller. This number
# is twice 0.01 / 640: steps are 0.5 to 1 times Cleanba's. With half of this
# number, the entropy on Pong-v5 fell from 1.79 to 1.74 in the first update;
# with this number, to 1.78.
_RMS_EPS = 0.02 / 640


def is_elementwise(optimizer: optax.GradientTransformation) -> bool:
  """Returns whether an optimiser is marked by `elementwise`."""
  return getattr(optimizer, 'is_elementwise', False)


class ElementwiseTransformation(optax.GradientTransformationExtraArgs):
  """An optimiser for which the arrangement of the parameters does not matter.

  The learner gives it all parameters as one vector. See `elementwise`.
  """

  is_elementwise = True


def elementwise(
  optimizer: optax.GradientTransformation,
) -> ElementwiseTransformation:
  """Marks an optimiser that may get all parameters as one vector.

  This is faster. The mark is right if the change of each number depends only on
  its own gradients and on the norm of all gradients, as with Adam. The mark is
  wrong for masks, for groups of parameters, and for a norm of each layer.
  """
  return ElementwiseTransformation(*optax.with_extra_args_support(optimizer))


def follow_kl(
  optimizer: optax.GradientTransformation, desired_kl: float, num_sgd_steps: int
) -> optax.GradientTransformation:
  """Makes an optimiser's steps shorter while the policy changes too much.

  A factor multiplies the steps. It starts at 1. It falls while the metric
  `approx_kl` is above 2 `desired_kl`, and rises again, at most to 1, while it
  is below half of it. During an update it changes by at most a factor of 1.5.

  Args:
    optimizer: any optax transformation. The result's `update` needs an
      argument `metrics`, and raises a ValueError if they lack `approx_kl`.
    desired_kl: in nats.
    num_sgd_steps: optimiser steps of an update.

  Source: the learning rate of Rudin et al. 2021, arXiv:2109.11978, table 3,
  which their code changes after each minibatch, and which may rise too.
  """

  def update(updates, factor, params=None, *, metrics, **others):
    del params, others
    if 'approx_kl' not in metrics:
      raise ValueError(
        f'optimizer.desired_kl={desired_kl} needs a loss with the metric '
        'approx_kl; add the metric, or set --config.optimizer.desired_kl=0'
      )
    kl = metrics['approx_kl']
    change = (kl < desired_kl / 2).astype(jnp.float32) - (kl > 2 * desired_kl)
    factor = jnp.clip(factor * 1.5 ** (change / num_sgd_steps), 1e-3, 1.0)
    return jax.tree.map(lambda x: factor * x, updates), factor

  follow = optax.GradientTransformationExtraArgs(
    lambda params: jnp.ones(()), update
  )
  chain = optax.chain(optimizer, follow)
  return elementwise(chain) if is_elementwise(optimizer) else chain


def scale_by_rms(decay: float, eps: float) -> optax.GradientTransformation:
  """Divides gradients by the root of their mean square, plus `eps`.

    nu = decay nu + (1 - decay) g^2;  g / (sqrt(nu + 1e-16) + eps)

  Unlike `optax.scale_by_rms`, it has a derivative at a gradient of 0.

  Source: torch.optim.RMSprop, as Huang et al. 2023, arXiv:2310.00036, use it.
  """

  def init(params):
    return optax.ScaleByRmsState(optax.tree.zeros_like(params))

  def update(updates, state, params=None):
    del params
    nu = optax.tree.update_moment(updates, state.nu, decay, 2)
    updates = jax.tree.map(
      lambda g, n: g / (jnp.sqrt(n + _EPS_ROOT) + eps), updates, nu
    )
    return updates, optax.ScaleByRmsState(nu)

  return optax.GradientTransformation(init, update)


class Optimizer(NamedTuple):
  """A row of the table of optimisers.

  Attributes:
    make: `(values) -> optimizer`, an optax transformation. `values` has the
      fields `optimizer.*` by short name; `num_sgd_steps`, the number of
      optimiser steps of the whole run; and `groups`, see `make_optimizer`.
    fields: what the optimiser reads besides its name and `learning_rate`, by
      name (`optimizer.momentum`).
  """

  make: Callable[[_Values], optax.GradientTransformation]
  fields: Table = {}


_DECAY = Range(0, 0.999999)
_BETAS = {
  'optimizer.b1': Field(0.9, 'Decay of the mean gradient.', _DECAY),
  'optimizer.b2': Field(0.999, 'Decay of the mean squared gradient.', _DECAY),
  'optimizer.eps': Field(1e-8, 'Avoids a division by 0.', ABOVE_0),
}


def group_fields(*groups: str) -> dict[str, Field]:
  """Returns the fields of groups of parameters; see `make_optimizer`."""
  return {
    f'optimizer.{group}_factor': Field(
      1.0, f'Multiplies the learning rate of the {group}.', FROM_0
    )
    for group in groups
  }


def _decays(params: Tree) -> Tree:
  """Returns whether each array is a kernel, and neither a bias nor a scale."""

  def one(path: tuple[Any, ...], x: Array) -> bool:
    last = getattr(path[-1], 'key', '') if path else ''
    return x.ndim > 1 and last not in ('bias', 'scale')

  return jax.tree.map_with_path(one, params)


def _schedule(values: _Values, rate: Array, total: Array, step: Array) -> Array:
  """Returns the learning rate of a step; see `make_optimizer`."""
  if warmup := values['warmup_steps']:
    rate *= jnp.minimum(1.0, (step + 1) / warmup)
    step, total = jnp.maximum(step - warmup, 0), jnp.maximum(total - warmup, 1)
  if not values['anneal']:
    return rate
  if values['schedule'] == 'linear':
    rate *= jnp.maximum(0.0, 1.0 - step / total)
  elif values['schedule'] == 'cosine':
    rate *= 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(1.0, step / total)))
  return rate


def _own(
  scale: Callable[[_Values], optax.GradientTransformation], values: _Values
) -> optax.GradientTransformation:
  """Makes one of podrl's own optimisers; see `make_optimizer`."""
  factors = {
    k.removesuffix('_factor'): x
    for k, x in values.items()
    if k.endswith('_factor')
  }
  groups = values['groups']
  has_factors = groups and any(x != 1.0 for x in factors.values())

  def factor(group: str, x: Array) -> Array:
    """Returns what multiplies a group's array: a number, or one per column."""
    parts = [factors[part] for part in group.split('|')]
    if len(parts) == 1:
      return parts[0]
    row = np.repeat(np.asarray(parts, 'f'), x.shape[-1] // len(parts))
    return row.reshape((1,) * (x.ndim - 1) + row.shape)

  def update(updates, num_steps, params=None, *, hyperparams=None, **others):
    del params, others
    known = {'anneal_steps': values['num_sgd_steps'], **values}
    known |= hyperparams or {}
    rate, total = known['learning_rate'], known['anneal_steps']
    rate = _schedule(values, rate, total, num_steps)
    updates = jax.tree.map(lambda x: -rate * x, updates)
    if has_factors:
      updates = jax.tree.map(
        lambda x, group: factor(group, x) * x, updates, groups(updates)
      )
    return updates, num_steps + 1

  steps = [
    scale(values),
    optax.GradientTransformationExtraArgs(
      lambda params: jnp.zeros((), jnp.int32), update
    ),
  ]
  if bound := values['max_grad_norm']:
    steps.insert(0, optax.clip_by_global_norm(bound))
  if decay := values['weight_decay']:
    steps.insert(-1, optax.add_decayed_weights(decay, _decays))
  optimizer = optax.chain(*steps)
  # Decay and factors depend on the array that a number is in.
  return optimizer if decay or has_factors else elementwise(optimizer)


def _row(
  scale: Callable[[_Values], optax.GradientTransformation], **fields: Field
) -> Optimizer:
  """Makes a row of the table; `fields` are the optimiser's own ones."""
  own = {f'optimizer.{k}': x for k, x in fields.items()}
  return Optimizer(functools.partial(_own, scale), own)


def _betas(eps: float) -> dict[str, Field]:
  return section(with_defaults(_BETAS, {'optimizer.eps': eps}), 'optimizer')


OPTIMIZERS = {
  'adam': _row(
    lambda x: optax.scale_by_adam(
      x['b1'], x['b2'], x['eps'], eps_root=_EPS_ROOT
    ),
    **_betas(1e-5),
  ),
  'radam': _row(
    lambda x: optax.scale_by_radam(
      x['b1'], x['b2'], x['eps'], eps_root=_EPS_ROOT
    ),
    **_betas(1e-8),
  ),
  'rmsprop': _row(
    lambda x: scale_by_rms(x['decay'], x['eps']),
    decay=Field(0.99, 'Decay of the mean squared gradient.', _DECAY),
    eps=Field(_RMS_EPS, 'Avoids a division by 0.', ABOVE_0),
  ),
  'sgd': _row(
    lambda x: optax.trace(x['momentum']) if x['momentum'] else optax.identity(),
    momentum=Field(
      0.0, 'Fraction of the previous step that each step adds.', _DECAY
    ),
  ),
}


# The fields of every optimiser.
BASE = {
  'optimizer.name': Field('adam', 'The optimiser.', tuple(OPTIMIZERS)),
  'optimizer.learning_rate': Field(1e-3, 'Initial learning rate.', ABOVE_0),
}
# The fields of podrl's own optimisers.
FIELDS = BASE | {
  'optimizer.learning_rate': BASE['optimizer.learning_rate']._replace(
    changeable=True
  ),
  'optimizer.anneal': Field(True, 'The learning rate follows the schedule.'),
  'optimizer.schedule': Field(
    'linear',
    'How the learning rate falls to 0: linearly, as a half cosine, or never.',
    ('linear', 'cosine', 'constant'),
  ),
  'optimizer.warmup_steps': Field(
    0,
    'Optimiser steps in which the learning rate rises linearly.',
    Range(0, 2**31 - 1),
  ),
  'optimizer.max_grad_norm': Field(
    0.5, 'Clips the gradient to this norm; 0 means off.', FROM_0
  ),
  'optimizer.weight_decay': Field(
    0.0,
    'Each step shrinks kernels by this number times the learning rate (AdamW).',
    FROM_0,
  ),
}


def find(name: str) -> Optimizer:
  """Returns a row of the table, or the user's optimiser `MODULE:NAME`.

  The user's is an `Optimizer`, or a function like `Optimizer.make`. Its
  parameters with defaults are fields. It raises a ValueError for other values.
  """
  if name in OPTIMIZERS:
    return OPTIMIZERS[name]
  what = 'config.optimizer.name'
  found = modules.find(what, name, OPTIMIZERS)
  if isinstance(found, Optimizer):
    modules.check_table(what, name, found.fields)
    return found
  if not callable(found):
    raise ValueError(
      f'{what}={name} must be an Optimizer, or a function that makes an optax '
      f'transformation, not a {type(found).__name__}'
    )
  own = modules.fields_of(found, 'optimizer', name, skipped=1)

  def make(values: _Values) -> optax.GradientTransformation:
    options = {k: values[k] for k in section(own, 'optimizer')}
    return found(values, **options)

  return Optimizer(make, own)


def make_optimizer(
  name: str,
  *,
  num_sgd_steps: int = 1,
  groups: Callable[[Tree], Tree] | None = None,
  **values: Any,
) -> optax.GradientTransformation:
  """Makes an optimiser.

  Except for a user's optimiser, `update` takes an argument `hyperparams`, which
  may contain 'learning_rate', and 'anneal_steps' in place of `num_sgd_steps`.
  With `anneal`, the learning rate of step t of N is

    learning_rate * max(0, 1 - t / N)              if `schedule` is 'linear',
    learning_rate * (1 + cos(pi min(1, t / N))) / 2   if it is 'cosine'.

  With W > 0 `warmup_steps`, the first W steps have the learning rates
  learning_rate * (t + 1) / W. The schedule begins after them: t then counts
  from there, and N is smaller by W.

  Args:
    name: a key of `OPTIMIZERS`, or MODULE:NAME.
    num_sgd_steps: optimiser steps of the whole run.
    groups: `(params) -> names`, the group of each array of the parameters. The
      field 'NAME_factor' multiplies the learning rate of a group. 'A|B' is an
      array whose columns belong half to A and half to B.
    **values: the fields `optimizer.*` by short name.
  """
  optimizer = find(name)
  # The user's optimiser may be a row of the table with another name.
  known = section(
    {**defaults(FIELDS), **defaults(optimizer.fields)}, 'optimizer'
  )
  own = {'num_sgd_steps': num_sgd_steps, 'groups': groups}
  values = known | values | own
  if name in OPTIMIZERS:
    return optimizer.make(values)
  try:
    made: Any = optimizer.make(values)
  except Exception as error:  # The user's code can raise anything.
    raise modules.failed('config.optimizer.name', name, error) from error
  if not (hasattr(made, 'init') and hasattr(made, 'update')):
    raise ValueError(
      f'config.optimizer.name={name} must make an optax transformation, not a '
      f'{type(made).__name__}'
    )
  return made
