"""Tests linear recurrences against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.kernels import recurrence

_T, _SHAPE = 7, (3, 2)


def _inputs(dtype):
  rng = np.random.default_rng(0)
  decay, x = (rng.normal(size=(2, _T, *_SHAPE)) for _ in range(2))
  state = rng.normal(size=(2, *_SHAPE))
  if not np.issubdtype(dtype, np.complexfloating):
    decay, x, state = decay[0], x[0], state[0]
  else:
    decay, x, state = (y[0] + 1j * y[1] for y in (decay, x, state))
  decay[3] = decay[5, 0] = 0.0  # The state begins anew.
  return tuple(y.astype(dtype) for y in (decay, x, state))


@pytest.mark.parametrize('form', [recurrence.linear, recurrence._in_parallel])
@pytest.mark.parametrize(
  'dtype,tolerance', [(np.float32, 1e-5), (np.complex128, 1e-10)]
)
def test_states_and_gradients_are_those_of_a_loop(dtype, tolerance, form):
  decay, x, first = _inputs(dtype)
  expected, state = [], first
  for t in range(_T):
    state = decay[t] * state + x[t]
    expected.append(state)
  weight = np.random.default_rng(1).normal(size=decay.shape)
  # With the loss sum(weight * real(state)), backwards in time.
  of_decay, of_x, of_state = np.zeros_like(decay), np.zeros_like(x), 0.0
  for t in reversed(range(_T)):
    of_x[t] = weight[t] + of_state
    of_decay[t] = of_x[t] * (expected[t - 1] if t else first)
    of_state = of_x[t] * decay[t]

  def loss(decay, x, state):
    states = form(decay, x, state)
    return jnp.sum(weight.astype(states.real.dtype) * states.real), states

  with jax.enable_x64(tolerance < 1e-5):
    gradient = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    found, states = gradient(decay, x, first)
  assert states.dtype == dtype
  np.testing.assert_allclose(states, expected, rtol=tolerance, atol=tolerance)
  for a, b in zip(found, (of_decay, of_x, of_state)):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('platform', ['cpu', 'tpu', 'cuda'])
def test_only_a_cpu_computes_the_steps_in_turn(platform):
  traced = jax.jit(recurrence.linear).trace(*_inputs(np.float32))
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert ('stablehlo.while' in text) == (platform == 'cpu')


def test_a_single_step_has_no_loop():
  decay, x, state = _inputs(np.float32)
  linear = jax.jit(recurrence.linear)
  assert 'while' not in linear.lower(decay[:1], x[:1], state).as_text()
  found = linear(decay[:1], x[:1], state)
  np.testing.assert_allclose(found[0], decay[0] * state + x[0], rtol=1e-6)
