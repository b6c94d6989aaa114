"""Value targets: V-trace, GAE, Q(lambda), n-step returns, and their scales.

No function stops gradients, so that a target has a derivative with respect to
gamma. Callers stop gradients at the network outputs that they pass.
"""

import chex
import jax
import jax.numpy as jnp

from podrl.types import Array, TimeStep, Tree


def weights(timestep: TimeStep) -> Array:
  """Returns float32 `[T, ...]`: 1 for a real transition, 0 for a reset step.

  The leaves of `timestep` are `[T+1, ...]`.
  """
  return 1.0 - timestep.is_first[1:].astype(jnp.float32)


def of_first_player(timestep: TimeStep, sign: Tree) -> tuple[Array, Tree]:
  """Returns the rewards of the player who began, `[B]`, and the next sign.

  Args:
    timestep: the step `[B]` after the move.
    sign: float32 `[B]`, 1 if the player who began has moved, else -1; or `()`
      without turns (see `EnvSpec.has_turns`), where rewards stay as they are.
  """
  if isinstance(sign, tuple):
    return timestep.reward, sign
  after = jnp.where(timestep.is_first, 1.0, sign * jnp.sign(timestep.discount))
  return sign * timestep.reward, after


def vtrace(
  values: Array,
  rewards: Array,
  discounts: Array,
  ratios: Array,
  *,
  lambda_: float | Array = 1.0,
) -> Array:
  """V-trace(lambda) errors, with importance ratios of at most 1.

    delta_t = min(1, ratio_t) (r_t + discount_t v_{t+1} - v_t)
    error_t = delta_t + discount_t lambda min(1, ratio_t) error_{t+1}

  A ratio of 0 marks a reset step. The error of a reset step is 0, so errors of
  the next episode do not reach the previous episode. If every other ratio is 1,
  the errors are the advantages of GAE(lambda).

  Args:
    values: `[T+1, ...]` float32, the values of all time steps.
    rewards: `[T, ...]` float32, received on arrival at step t + 1.
    discounts: `[T, ...]` float32, gamma included; 0 if the episode terminated.
    ratios: `[T, ...]` float32, importance ratio of the action at step t; 0 for
      a reset step. This ratio is the action's probability under the current
      policy divided by its probability under the behaviour policy.
    lambda_: from 0 (one-step returns) to 1 (full returns).

  Returns:
    The errors `[T, ...]` float32. `values[:-1] + errors` are the value targets.
    Because all bounds of the ratio are 1, the errors are also the advantages of
    the policy gradient, already multiplied by the clipped ratio.

  Source: Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and remark 1 (V-trace),
  section 4.2 (advantages); Schulman et al. 2015, arXiv:1506.02438, eq. 16.
  """
  chex.assert_equal_shape([values[1:], rewards, discounts, ratios])
  clipped = jnp.minimum(1.0, ratios)
  deltas = clipped * (rewards + discounts * values[1:] - values[:-1])
  decays = discounts * lambda_ * clipped

  def backward(error, delta_and_decay):
    delta, decay = delta_and_decay
    error = delta + decay * error
    return error, error

  _, errors = jax.lax.scan(
    backward,
    jnp.zeros_like(deltas[0]),
    (deltas, decays),
    reverse=True,
    unroll=16,
  )
  return errors


def q_lambda(
  values: Array,
  rewards: Array,
  discounts: Array,
  weights: Array,
  *,
  lambda_: float | Array,
) -> Array:
  """Peng's Q(lambda) targets `[T, ...]`: V-trace errors plus the values.

    target_t = r_t + discount_t (lambda target_{t+1} + (1 - lambda) v_{t+1})

  The last target of an unroll or of an episode bootstraps from the value on
  arrival. The target of a reset step is its value.

  Args:
    values: `[T+1, ...]` float32, the largest action value of each time step.
    rewards: `[T, ...]` float32, received on arrival at step t + 1.
    discounts: `[T, ...]` float32, gamma included; 0 if the episode terminated.
    weights: `[T, ...]` float32, 0 for a reset step, else 1.
    lambda_: from 0 (one-step returns) to 1 (full returns).

  Source: Peng and Williams 1994; Gallici et al. 2024, arXiv:2407.04811 (PQN).
  """
  errors = vtrace(values, rewards, discounts, weights, lambda_=lambda_)
  return values[:-1] + errors


def n_step(
  values: Array, rewards: Array, discounts: Array, weights: Array, *, n: int
) -> Array:
  """n-step targets `[T, ...]`: up to n rewards, then a bootstrap value.

    target_t = r_t + discount_t (r_{t+1} + discount_{t+1} (... + v_{t+n}))

  If the episode or the unroll ends inside the window, the target bootstraps
  from the value of its last time step. The target of a reset step is its value.

  A categorical agent calls this function twice, with its N atoms as the last
  axis. If `values` is the support in every time step, the targets are the atoms
  of the target distribution. If `values` are probabilities, rewards are 0 and
  discounts are 1, the targets are the probabilities of these atoms.

  Args:
    values: `[T+1, ...]` float32, from which the targets bootstrap.
    rewards: `[T, ...]` float32, received on arrival at step t + 1.
    discounts: `[T, ...]` float32, gamma included; 0 if the episode terminated.
    weights: `[T, ...]` float32, 0 for a reset step, else 1.
    n: at least 1, the largest number of rewards in a target.

  Source: Sutton and Barto 2018, eq. 7.1; Hessel et al. 2018, arXiv:1710.02298,
  "Multi-step learning".
  """
  chex.assert_equal_shape([values[1:], rewards, discounts, weights])
  chex.assert_scalar_positive(n)
  targets = values
  for _ in range(min(n, len(rewards))):
    backups = rewards + discounts * targets[1:]
    targets = jnp.where(weights > 0, backups, values[:-1])
    targets = jnp.concatenate([targets, values[-1:]])
  return targets[:-1]


def rescale(x: Array, *, epsilon: float = 1e-3) -> Array:
  """Compresses values, so that networks can predict large returns.

    h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x

  `rescale(n_step(inverse_rescale(values), ...))` is the target of a network
  that predicts rescaled values.

  Source: Pohlen et al. 2018, arXiv:1805.11593; Kapturowski et al. 2019,
  section 2.3.
  """
  # sqrt(|x| + 1) - 1 would lose most digits of a small x.
  return x / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + epsilon * x


def inverse_rescale(x: Array, *, epsilon: float = 1e-3) -> Array:
  """The inverse of `rescale`.

  With u = sqrt(|y| + 1) - 1, |h(y)| is epsilon u^2 + (1 + 2 epsilon) u. The
  code solves this for u in a form that does not subtract similar numbers.
  """
  b = 1.0 + 2.0 * epsilon
  u = 2.0 * x / (b + jnp.sqrt(b**2 + 4.0 * epsilon * jnp.abs(x)))
  return u * (jnp.abs(u) + 2.0)


def project(atoms: Array, probabilities: Array, support: Array) -> Array:
  """Projects distributions onto a support; returns probabilities `[..., N]`.

  Each atom splits its probability between its two neighbours in the support,
  so that the mean stays the same. Atoms beyond the support move to its ends.
  The projection of one atom with probability 1 is the two-hot code of a value.

  Args:
    atoms: `[..., M]` float32, for example the targets of `n_step`.
    probabilities: `[..., M]` float32.
    support: `[N]` float32, increasing and evenly spaced; N is at least 2.

  Source: Bellemare et al. 2017, arXiv:1707.06887, eq. 7.
  """
  chex.assert_equal_shape([atoms, probabilities])
  chex.assert_rank(support, 1)
  spacing = (support[-1] - support[0]) / (len(support) - 1)
  atoms = jnp.clip(atoms, support[0], support[-1])[..., None]
  grid = jnp.expand_dims(support, range(probabilities.ndim))
  # A sum of triangles: TPUs are slow at scattering, and round matrix products.
  triangles = jnp.maximum(1.0 - jnp.abs(atoms - grid) / spacing, 0.0)
  return jnp.sum(triangles * probabilities[..., None], axis=-2)
