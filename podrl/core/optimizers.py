"""The optimisers that a configuration can name."""

import optax

OPTIMIZERS = {
  'adam': lambda rate: optax.adam(rate, eps=1e-5),
  'rmsprop': lambda rate: optax.rmsprop(rate, decay=0.99, eps=1e-5),
  'sgd': optax.sgd,
}


def make_optimizer(
  name: str, *, learning_rate: float, anneal: int, max_grad_norm: float
) -> optax.GradientTransformation:
  """Makes an optimiser.

  Args:
    name: a key of `OPTIMIZERS`.
    learning_rate: the initial learning rate.
    anneal: steps over which the rate falls linearly to 0; 0 keeps it constant.
    max_grad_norm: bound of the gradient's global norm; 0 disables it.
  """
  rate = learning_rate
  if anneal:
    rate = optax.linear_schedule(learning_rate, 0.0, anneal)
  optimizer = OPTIMIZERS[name](rate)
  if not max_grad_norm:
    return optimizer
  return optax.chain(optax.clip_by_global_norm(max_grad_norm), optimizer)
