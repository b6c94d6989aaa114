"""Indexing by comparisons: the same results, without gathers and scatters."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.envs import SUITES
from podrl.envs import gymnax as adapter
from podrl.kernels.indexing import compare_indices
from podrl.types import Discrete


def _operations(x, i, j):
  """Writes and reads elements, rows and columns; some are out of bounds."""
  y = x.at[i, j].set(7.0).at[i].set(x[0]).at[:, j].set(x[:, 1])
  rows, columns = jnp.array([0, 2]), jnp.stack([i, j])
  z = x.at[rows, columns].set(jnp.array([5.0, 6.0]))
  part = jax.lax.dynamic_slice(x, (i, jnp.int32(0)), (1, 3))
  whole = x.at[:].set(jnp.ones(3)), x.at[...].set(2.0)
  numbers = jnp.arange(300)
  read = numbers[(i + 200).astype(jnp.uint8)]  # 300 does not fit into a uint8.
  keys = jax.random.key_data(jax.random.split(jax.random.key(0), 4)[i])
  return y, z, x[i, j], part, (x > 3)[i, j], whole, read, keys


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


@pytest.mark.parametrize(
  'size,is_compared', [(2**14, True), (2**14 + 1, False)]
)
def test_a_large_array_is_not_compared(size, is_compared):
  function = compare_indices(lambda x, i: x[i])
  jaxpr = jax.make_jaxpr(function)(jnp.zeros(size), jnp.int32(3))
  assert ('dynamic_slice' not in str(jaxpr)) == is_compared


@pytest.mark.slow
@jax.numpy_rank_promotion('allow')  # Swimmer-misc needs it.
def test_every_environment_can_be_traced():
  for name in SUITES['gymnax'].names():
    env = adapter.make(name)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    state, timestep = jax.eval_shape(env.reset, keys)
    action = env.spec.action
    dtype = jnp.int32 if isinstance(action, Discrete) else jnp.float32
    actions = jax.ShapeDtypeStruct((2, *getattr(action, 'shape', ())), dtype)
    _, stepped = jax.eval_shape(env.step, state, actions)
    assert jax.tree.map(jnp.shape, stepped) == jax.tree.map(jnp.shape, timestep)


def test_a_step_on_a_tpu_names_the_lines_of_its_environment():
  env = adapter.make('Breakout-MinAtar')
  state, _ = jax.eval_shape(env.reset, jax.random.split(jax.random.key(0), 3))
  traced = jax.jit(env.step).trace(state, jax.ShapeDtypeStruct((3,), jnp.int32))
  lowered = traced.lower(lowering_platforms=('tpu',))
  text = lowered.as_text(debug_info=True)
  assert text.count('minatar/breakout.py') > 50


@pytest.mark.parametrize('platform,count', [('tpu', 0), ('cpu', 4)])
def test_a_step_on_a_tpu_has_no_scatters(platform, count):
  env = adapter.make('Catch-bsuite')
  state, _ = jax.eval_shape(env.reset, jax.random.split(jax.random.key(0), 3))
  action = jax.ShapeDtypeStruct((3,), jnp.int32)
  traced = jax.jit(env.step).trace(state, action)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count('"stablehlo.scatter"') == count
  assert '"stablehlo.gather"' not in text
