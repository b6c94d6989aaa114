"""Indexing by comparisons: the same results, without gathers and scatters."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.envs import gymnax as adapter
from podrl.envs.indexing import compare_indices


def _operations(x, i, j):
  """Writes and reads elements, rows and columns; some are out of bounds."""
  y = x.at[i, j].set(7.0).at[i].set(x[0]).at[:, j].set(x[:, 1])
  rows, columns = jnp.array([0, 2]), jnp.stack([i, j])
  z = x.at[rows, columns].set(jnp.array([5.0, 6.0]))
  part = jax.lax.dynamic_slice(x, (i, jnp.int32(0)), (1, 3))
  return y, z, x[i, j], part, (x > 3)[i, j]


@pytest.mark.parametrize('i,j', [(0, 0), (2, 1), (3, 2), (-1, 5), (9, -9)])
def test_comparisons_have_the_same_results(i, j):
  x = np.arange(12, dtype=np.float32).reshape(4, 3)
  index = jnp.int32(i), jnp.int32(j)
  expected = jax.jit(_operations)(x, *index)
  compared = jax.jit(compare_indices(_operations))(x, *index)
  jax.tree.map(np.testing.assert_array_equal, compared, expected)


@pytest.mark.parametrize('name', ['Breakout-MinAtar', 'Pong-misc'])
def test_an_environment_has_the_same_steps(name):
  env, params = gymnax.make(name)
  keys = jax.random.split(jax.random.key(0), 3)
  _, state = jax.vmap(env.reset_env, (0, None))(keys, params)

  def step(state, action):
    key = jax.random.key(0)  # These environments do not use it.
    return env.step_env(key, state, action, params)[:4]

  plain, other = (jax.jit(jax.vmap(f)) for f in (step, compare_indices(step)))
  action = jnp.arange(3)
  for _ in range(12):
    expected = plain(state, action)
    jax.tree.map(np.testing.assert_array_equal, other(state, action), expected)
    state = expected[1]


@pytest.mark.parametrize('platform,count', [('tpu', 0), ('cpu', 4)])
def test_a_step_on_a_tpu_has_no_scatters(platform, count):
  env = adapter.make('Catch-bsuite')
  state, _ = jax.eval_shape(env.reset, jax.random.split(jax.random.key(0), 3))
  action = jax.ShapeDtypeStruct((3,), jnp.int32)
  traced = jax.jit(env.step).trace(state, action)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count('"stablehlo.scatter"') == count
  assert '"stablehlo.gather"' not in text
