"""Tests returns against arithmetic, a plain loop and rlax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from podrl.core import returns
from podrl.types import TimeStep


def _random_unroll(seed, length=25, batch=4, last_is_reset_step=False):
  """Draws an unroll with terminations, truncations and reset steps."""
  rng = np.random.default_rng(seed)
  values = rng.normal(size=(length + 1, batch)).astype(np.float32)
  rewards = rng.normal(size=(length, batch)).astype(np.float32)
  discounts = np.full((length, batch), 0.97, np.float32)
  weights = np.ones((length, batch), np.float32)
  for b in range(batch):
    for t in rng.choice(np.arange(1, length), 6, replace=False):
      weights[t, b] = 0.0  # This is a reset step.
      rewards[t, b] = 0.0
      if rng.random() < 0.5:
        discounts[t - 1, b] = 0.0
  weights[0, 0] = 0.0
  if last_is_reset_step:
    weights[-1] = 0.0
  return values, rewards, discounts, weights


def _gae_loop(values, rewards, discounts, weights, lambda_):
  """Computes the generalised advantages of one environment in a plain loop."""
  advantages = np.zeros(len(rewards))
  following = 0.0
  for t in reversed(range(len(rewards))):
    if weights[t] == 0.0:
      following = 0.0
      continue
    delta = rewards[t] + discounts[t] * values[t + 1] - values[t]
    following = delta + discounts[t] * lambda_ * following
    advantages[t] = following
  return advantages


def _n_step_loop(values, rewards, discounts, weights, n):
  """Computes the n-step targets of one environment in a plain loop."""
  targets = np.zeros(len(rewards))
  for start in range(len(rewards)):
    t, discount = start, 1.0
    while t < min(start + n, len(rewards)) and weights[t] > 0.0:
      targets[start] += discount * rewards[t]
      discount *= discounts[t]
      t += 1
    targets[start] += discount * values[t]
  return targets


def _lambda_loop(values, rewards, discounts, weights, lambda_):
  """Computes the lambda-returns of one environment in a plain loop."""
  targets = np.zeros(len(rewards))
  following = values[-1]
  for t in reversed(range(len(rewards))):
    mixed = lambda_ * following + (1.0 - lambda_) * values[t + 1]
    following = values[t]  # What a reset step's target is.
    if weights[t] > 0.0:
      following = rewards[t] + discounts[t] * mixed
    targets[t] = following
  return targets


def _project_loop(atoms, probabilities, support):
  """Projects one distribution as algorithm 1 of Bellemare et al. 2017 does."""
  projected = np.zeros(len(support))
  spacing = (support[-1] - support[0]) / (len(support) - 1)
  for atom, probability in zip(atoms, probabilities):
    b = (min(max(atom, support[0]), support[-1]) - support[0]) / spacing
    lower = min(int(np.floor(b)), len(support) - 2)
    projected[lower] += probability * (lower + 1 - b)
    projected[lower + 1] += probability * (b - lower)
  return projected


def test_rewards_of_the_player_who_began():
  """Environment 0 has a game of three moves, and environment 1 no turns yet."""
  # The turn passes twice; the third move ends the game; a reset step; a move.
  discounts = np.array([[-1, 1], [-1, 1], [0, 1], [1, 1], [-1, -1]], 'f')
  rewards = np.array([[2, 1], [3, 1], [5, 1], [0, 1], [7, 1]], 'f')
  is_first = np.array([[0, 0], [0, 0], [0, 0], [1, 0], [0, 0]], bool)
  sign, own, signs = jnp.ones(2), [], []
  for x in zip(rewards, discounts, is_first):
    reward, sign = returns.of_first_player(TimeStep((), *x), sign)
    own.append(np.asarray(reward))
    signs.append(np.asarray(sign))
  expected = [[2, 1], [-3, 1], [5, 1], [0, 1], [7, 1]]
  np.testing.assert_array_equal(own, expected)
  expected = [[-1, 1], [1, 1], [0, 1], [1, 1], [-1, -1]]
  np.testing.assert_array_equal(signs, expected)


def test_without_turns_rewards_stay():
  reward = np.array([2.0, -3.0])
  timestep = TimeStep((), reward, np.array([-1.0, 0.0]), np.zeros(2, bool))
  found, sign = returns.of_first_player(timestep, ())
  assert found is reward and sign == ()


def test_worked_example():
  # gamma is .9, lambda .95. Episode A is truncated at the value .7, and the
  # value 50 starts episode B. t=1: 2 + .9*.7 - .6 = 2.03; t=0: 1 + .9*.6 - .5
  # + .9*.95*2.03 = 2.77565; the reset step at t=2 learns nothing.
  errors = returns.vtrace(
    jnp.asarray([0.5, 0.6, 0.7, 50.0]),
    jnp.asarray([1.0, 2.0, 0.0]),
    0.9 * jnp.ones(3),
    jnp.asarray([1.0, 1.0, 0.0]),
    lambda_=0.95,
  )
  np.testing.assert_allclose(errors, [2.77565, 2.03, 0.0], rtol=1e-6)


def test_weights_mark_the_step_that_arrives_first():
  is_first = jnp.asarray([[True], [False], [True], [False]])
  timestep = TimeStep((), jnp.zeros((4, 1)), jnp.ones((4, 1)), is_first)
  np.testing.assert_array_equal(
    returns.weights(timestep)[:, 0], [1.0, 0.0, 1.0]
  )


@pytest.mark.parametrize('last_is_reset_step', [False, True])
@pytest.mark.parametrize('lambda_', [0.0, 0.95, 1.0])
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_errors_are_gae_where_ratios_are_weights(
  seed, lambda_, last_is_reset_step
):
  unroll = _random_unroll(seed, last_is_reset_step=last_is_reset_step)
  errors = returns.vtrace(*unroll, lambda_=lambda_)
  for b in range(4):
    expected = _gae_loop(*(x[:, b] for x in unroll), lambda_)
    np.testing.assert_allclose(errors[:, b], expected, atol=1e-5)


@pytest.mark.parametrize('lambda_', [0.0, 0.9, 1.0])
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_vtrace_agrees_with_rlax(seed, lambda_):
  values, rewards, discounts, weights = _random_unroll(
    seed, last_is_reset_step=True
  )
  rng = np.random.default_rng(seed)
  ratios = weights * np.exp(rng.normal(size=weights.shape)).astype(np.float32)
  ours = returns.vtrace(values, rewards, discounts, ratios, lambda_=lambda_)
  for b in range(values.shape[1]):
    theirs = rlax.vtrace_td_error_and_advantage(
      values[:-1, b],
      values[1:, b],
      rewards[:, b],
      discounts[:, b],
      ratios[:, b],
      lambda_=lambda_,
    )
    np.testing.assert_allclose(ours[:, b], theirs.errors, atol=1e-5)
    np.testing.assert_allclose(ours[:, b], theirs.pg_advantage, atol=1e-5)


def test_nothing_passes_back_over_a_reset_step():
  values, rewards, discounts, weights = _random_unroll(0)
  weights[10] = 0.0
  before = returns.vtrace(values, rewards, discounts, weights, lambda_=0.95)
  values[11:] += 7.0
  rewards[10:] -= 3.0
  after = returns.vtrace(values, rewards, discounts, weights, lambda_=0.95)
  np.testing.assert_array_equal(before[:11], after[:11])
  assert np.abs(before[11:] - after[11:]).max() > 0.1


def test_gradient_with_respect_to_gamma_agrees_with_differences():
  with jax.enable_x64(True):
    values, rewards, discounts, weights = (
      x.astype(np.float64) for x in _random_unroll(0)
    )
    ratios = weights * np.exp(np.random.default_rng(0).normal(size=(25, 4)))

    def results(gamma):
      discount = gamma * (discounts > 0)
      vtrace = returns.vtrace(values, rewards, discount, ratios, lambda_=0.9)
      n_step = returns.n_step(values, rewards, discount, weights, n=3)
      return jnp.stack([vtrace, n_step])

    gradient = jax.jacfwd(results)(0.97)
    step = 1e-6
    differences = (results(0.97 + step) - results(0.97 - step)) / (2 * step)
    backward = jax.grad(lambda gamma: results(gamma).sum())(0.97)
    np.testing.assert_allclose(gradient, differences, atol=1e-7)
    np.testing.assert_allclose(backward, gradient.sum(), rtol=1e-12)
  assert np.all(np.abs(gradient).max(axis=(1, 2)) > 0.1)


@pytest.mark.parametrize('last_is_reset_step', [False, True])
@pytest.mark.parametrize('n', [1, 2, 5, 25, 100])
@pytest.mark.parametrize('seed', [0, 1])
def test_n_step_agrees_with_a_loop_and_rlax(seed, n, last_is_reset_step):
  unroll = _random_unroll(seed, last_is_reset_step=last_is_reset_step)
  targets = returns.n_step(*unroll, n=n)
  for b in range(4):
    values, rewards, discounts, weights = (x[:, b] for x in unroll)
    expected = _n_step_loop(values, rewards, discounts, weights, n)
    np.testing.assert_allclose(targets[:, b], expected, atol=1e-5)
    # With lambda 0 on arrival at an episode's last step, rlax ignores the reset
    # step that follows. It does not know targets of reset steps.
    last = np.append(weights[1:], np.float32(1))
    theirs = rlax.n_step_bootstrapped_returns(
      rewards, discounts, values[1:], n, last
    )
    theirs = np.where(weights > 0, theirs, values[:-1])
    np.testing.assert_allclose(targets[:, b], theirs, atol=1e-5)


@pytest.mark.parametrize('last_is_reset_step', [False, True])
@pytest.mark.parametrize('lambda_', [0.0, 0.65, 1.0])
@pytest.mark.parametrize('seed', [0, 1])
def test_q_lambda_agrees_with_a_loop_and_rlax(
  seed, lambda_, last_is_reset_step
):
  unroll = _random_unroll(seed, last_is_reset_step=last_is_reset_step)
  targets = returns.q_lambda(*unroll, lambda_=lambda_)
  for b in range(4):
    values, rewards, discounts, weights = (x[:, b] for x in unroll)
    expected = _lambda_loop(values, rewards, discounts, weights, lambda_)
    np.testing.assert_allclose(targets[:, b], expected, atol=1e-5)
    # rlax subtracts the value of the action, which is not the best one here.
    q_values = np.stack([values - 2, values], axis=-1)
    theirs = (
      values[:-1]
      - 2
      + rlax.q_lambda(
        q_values[:-1],
        np.zeros(len(rewards), int),
        rewards,
        discounts,
        q_values[1:],
        lambda_ * np.append(weights[1:], np.float32(1)),
      )
    )
    theirs = np.where(weights > 0, theirs, values[:-1])
    np.testing.assert_allclose(targets[:, b], theirs, atol=1e-5)


def test_targets_of_an_unroll_of_one_step():
  values, rewards = jnp.asarray([[3.0, 3.0], [5.0, 5.0]]), jnp.ones((1, 2))
  arguments = values, rewards, 0.9 * rewards, jnp.asarray([[1.0, 0.0]])
  expected = [[1 + 0.9 * 5, 3.0]]  # The second environment has a reset step.
  for n in (1, 4):
    targets = returns.n_step(*arguments, n=n)
    np.testing.assert_allclose(targets, expected, rtol=1e-6)
  targets = returns.q_lambda(*arguments, lambda_=0.5)
  np.testing.assert_allclose(targets, expected, rtol=1e-6)


def test_targets_at_a_termination_and_at_a_truncation():
  # As the worked example, with gamma .5: the first two steps of episode A, its
  # end at the value .7, the reset step, and episode B with the value 50.
  values = jnp.asarray([[0.5, 0.5], [0.6, 0.6], [0.7, 0.7], [50.0, 50.0]])
  rewards = jnp.asarray([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
  discounts = 0.5 * jnp.asarray([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
  weights = jnp.asarray([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
  # The first is truncated, so .7 counts: 2 + .5*.7 = 2.35, 1 + .5*2.35 = 2.175.
  # The second terminates, so the return is 2, and 1 + .5*2 = 2 before that.
  expected = [[2.175, 2.0], [2.35, 2.0], [0.7, 0.7]]
  for targets in (
    returns.n_step(values, rewards, discounts, weights, n=3),
    returns.q_lambda(values, rewards, discounts, weights, lambda_=1.0),
  ):
    np.testing.assert_allclose(targets, expected, rtol=1e-6)


def _two_player_unroll(seed, length=30):
  """Draws games for two with repeated turns, ends and reset steps.

  Returns the values and rewards of the player who moves, discounts in
  {-0.97, 0, 0.97}, weights, and the player who moves at each time step.
  """
  rng = np.random.default_rng(seed)
  mover = rng.integers(0, 2, length + 1)
  weights, ends = np.ones(length), np.zeros(length, bool)
  for t in rng.choice(np.arange(1, length, 2), 5, replace=False):
    weights[t], ends[t - 1] = 0.0, True
  passes = mover[1:] != mover[:-1]
  discounts = 0.97 * np.where(ends, 0.0, np.where(passes, -1.0, 1.0))
  values = rng.normal(size=length + 1)
  rewards = rng.normal(size=length) * weights
  return values, rewards, discounts, weights, mover


@pytest.mark.parametrize('lambda_', [0.0, 0.8, 1.0])
@pytest.mark.parametrize('seed', range(3))
def test_turns_make_each_target_that_of_negamax(seed, lambda_):
  """Compares with one player's view, in which no discount is negative.

  Player 0 sees all rewards and values with its own sign. Its targets are then
  those of an ordinary task, and the mover's target has the mover's sign.
  """
  values, rewards, discounts, weights, mover = _two_player_unroll(seed)
  assert {-1.0, 0.0, 1.0} == {*np.sign(discounts)}
  sign = np.where(mover == 0, 1.0, -1.0)
  seen = sign * values, sign[:-1] * rewards, np.abs(discounts), weights
  expected = sign[:-1] * _lambda_loop(*seen, lambda_)
  inputs = [np.float32(x)[:, None] for x in (values, rewards, discounts)]
  inputs.append(np.float32(weights)[:, None])
  targets = returns.q_lambda(*inputs, lambda_=lambda_)[:, 0]
  np.testing.assert_allclose(targets, expected, rtol=1e-5, atol=1e-6)
  advantages = sign[:-1] * _gae_loop(*seen, lambda_)
  errors = returns.vtrace(*inputs, lambda_=lambda_)[:, 0]
  np.testing.assert_allclose(errors, advantages, rtol=1e-5, atol=1e-6)
  for n in (1, 3, 40):
    expected = sign[:-1] * _n_step_loop(*seen, n)
    targets = returns.n_step(*inputs, n=n)[:, 0]
    np.testing.assert_allclose(targets, expected, rtol=1e-5, atol=1e-6)


def test_the_worked_example_of_two_players():
  """X moves, O moves, X wins."""
  values = np.float32([0.1, -0.2, 0.6, 9.0])
  rewards, discounts = np.float32([0, 0, 1]), np.float32([-1, -1, 0])
  inputs = values, rewards, discounts, np.ones(3, np.float32)
  for lambda_, expected in (1.0, [1, -1, 1]), (0.0, [0.2, -0.6, 1]):
    targets = returns.q_lambda(*inputs, lambda_=lambda_)
    np.testing.assert_allclose(targets, expected, atol=1e-6)


def test_n_must_be_positive():
  with pytest.raises(AssertionError, match='positive'):
    returns.n_step(*_random_unroll(0), n=0)


def _exact(x, epsilon):
  """h(x) of Pohlen et al. 2018, in float64."""
  x = np.float64(x)
  return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + epsilon * x


_MAGNITUDES = np.geomspace(1e-6, 1e6, 400)
_NUMBERS = np.concatenate([-_MAGNITUDES, [0.0], _MAGNITUDES]).astype(np.float32)


@pytest.mark.parametrize('epsilon', [1e-3, 1e-2])
def test_rescaling_is_exact_in_float32(epsilon):
  rescaled = returns.rescale(_NUMBERS, epsilon=epsilon)
  assert rescaled.dtype == jnp.float32
  # The reference itself has an error of 1e-16 / 1e-6 at the smallest numbers.
  np.testing.assert_allclose(rescaled, _exact(_NUMBERS, epsilon), rtol=4e-7)
  # If h(x) has a relative error e, x has one of at most 2 e.
  inverse = returns.inverse_rescale(rescaled, epsilon=epsilon)
  np.testing.assert_allclose(inverse, _NUMBERS, rtol=1e-6)
  # The same for arguments up to 1e6, by h(h^-1(x)) in float64.
  inverse = returns.inverse_rescale(_NUMBERS, epsilon=epsilon)
  np.testing.assert_allclose(_exact(inverse, epsilon), _NUMBERS, rtol=1e-6)


def test_rescaling_agrees_with_rlax():
  with jax.enable_x64(True):
    x = _NUMBERS.astype(np.float64)
    np.testing.assert_allclose(
      returns.rescale(x), rlax.signed_hyperbolic(x), rtol=1e-9
    )
    # rlax subtracts similar numbers, so its small results have few digits.
    np.testing.assert_allclose(
      returns.inverse_rescale(x), rlax.signed_parabolic(x), rtol=1e-9, atol=1e-9
    )


def test_rescaling_has_its_derivative_at_0():
  # h'(0) = 1/2 + epsilon.
  np.testing.assert_allclose(jax.grad(returns.rescale)(0.0), 0.501, rtol=1e-6)
  np.testing.assert_allclose(
    jax.grad(returns.inverse_rescale)(0.0), 1 / 0.501, rtol=1e-6
  )


@pytest.mark.parametrize('num_atoms', [1, 2, 51, 80])
def test_project_agrees_with_a_loop_and_rlax(num_atoms):
  rng = np.random.default_rng(num_atoms)
  support = np.linspace(-10.0, 10.0, 51, dtype=np.float32)
  # Some atoms are beyond the support, and some are on its points.
  atoms = rng.normal(scale=8.0, size=(6, 3, num_atoms)).astype(np.float32)
  atoms[0] = rng.choice(support, size=atoms[0].shape)
  probabilities = rng.dirichlet(np.ones(num_atoms), (6, 3)).astype(np.float32)
  projected = returns.project(atoms, probabilities, support)
  assert projected.shape == (6, 3, 51)
  for i in np.ndindex(6, 3):
    expected = _project_loop(atoms[i], probabilities[i], support)
    np.testing.assert_allclose(projected[i], expected, atol=1e-5)
    theirs = rlax.categorical_l2_project(atoms[i], probabilities[i], support)
    np.testing.assert_allclose(projected[i], theirs, atol=1e-5)
  np.testing.assert_allclose(projected.sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize('n', [1, 3, 100])
def test_n_step_gives_the_atoms_and_probabilities_of_a_target(n):
  support = np.linspace(-5.0, 5.0, 3, dtype=np.float32)
  probabilities = np.random.default_rng(0).random((26, 4, 3), np.float32)
  _, rewards, discounts, weights = (
    np.repeat(x[..., None], 3, axis=-1) for x in _random_unroll(0)
  )
  supports = np.broadcast_to(support, probabilities.shape)
  atoms = returns.n_step(supports, rewards, discounts, weights, n=n)
  arriving = returns.n_step(
    probabilities, 0 * rewards, np.ones_like(rewards), weights, n=n
  )
  for index in np.ndindex(4, 3):
    slot = (slice(None), *index)
    rest = rewards[slot], discounts[slot], weights[slot]
    expected = _n_step_loop(supports[slot], *rest, n)
    np.testing.assert_allclose(atoms[slot], expected, atol=1e-5)
    # The value of step t is t, so the target is the step that it comes from.
    rest = np.zeros(25), np.ones(25), weights[slot]
    steps = _n_step_loop(np.arange(26.0), *rest, n).astype(int)
    np.testing.assert_array_equal(arriving[slot], probabilities[slot][steps])
