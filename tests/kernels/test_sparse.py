"""Tests products of zeros and ones against numpy's."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.kernels import sparse
from podrl.networks import torsos


def _bits(num_rows, width, max_ones):
  """Makes rows of 0 to `max_ones` ones; the first row has `max_ones`."""
  rng = np.random.default_rng(0)
  x = np.zeros((num_rows, width), bool)
  counts = rng.integers(0, max_ones + 1, num_rows)
  counts[0] = max_ones
  for row, count in zip(x, counts):
    row[rng.choice(width, count, replace=False)] = True
  x[-1] = False
  x[-1, [0, width - 1]] = True  # The first and the last column.
  return x


def _loss(x, kernel):
  return jnp.sum(jnp.sin(sparse.multiply_bools(x, kernel)))


# The widths have padded words, several words of summary, and no padding.
@pytest.mark.parametrize('num_rows,width', [(64, 257), (40, 1100), (256, 2048)])
def test_ones_are_found(num_rows, width):
  max_ones = width * num_rows // (10 * (num_rows + 48))
  x = _bits(num_rows, width, max_ones)
  columns, count = jax.jit(sparse._find)(x)
  assert count == max_ones
  assert columns.shape == (max_ones, num_rows)
  for row, found in zip(x, np.sort(columns, axis=0).T):
    (ones,) = np.nonzero(row)
    rest = [width] * (max_ones - len(ones))
    np.testing.assert_array_equal(found, [*ones, *rest])


# 22 is the limit: 400 * 64 // (10 * (64 + 48)).
@pytest.mark.parametrize('max_ones', [2, 22, 23, 300])
def test_products_and_gradients_are_those_of_matrices(max_ones):
  x = _bits(64, 400, max_ones)
  kernel = np.random.default_rng(1).normal(size=(400, 24)).astype(np.float32)
  y = jax.jit(sparse.multiply_bools)(x, kernel)
  np.testing.assert_allclose(y, x @ kernel.astype(float), rtol=1e-4, atol=1e-4)
  gradient = jax.jit(jax.grad(_loss, 1))(x, kernel)
  expected = x.T.astype(float) @ np.cos(x @ kernel.astype(float))
  np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_derivatives_of_higher_order_and_forward_mode():
  x = _bits(64, 400, 9)
  rng = np.random.default_rng(1)
  kernel, direction = rng.normal(size=(2, 400, 24)).astype(np.float32)

  def along(direction):
    return jax.jvp(lambda k: jax.grad(_loss, 1)(x, k), (kernel,), (direction,))

  # The gradient is x^T cos(x k), so its derivative is -x^T (sin(x k) * x d).
  a, d = x @ kernel.astype(float), x @ direction.astype(float)
  expected = -x.T.astype(float) @ (np.sin(a) * d)
  _, forward = jax.jit(along)(direction)
  np.testing.assert_allclose(forward, expected, rtol=1e-3, atol=1e-3)
  reverse = jax.jit(
    jax.grad(lambda k: jnp.sum(jax.grad(_loss, 1)(x, k) * direction))
  )(kernel)
  np.testing.assert_allclose(reverse, expected, rtol=1e-3, atol=1e-3)


# The sums of a vectorised function's results give a shared argument's gradient.
@pytest.mark.parametrize('axes', [(0, 0), (None, 0), (0, None), (1, 2)])
def test_products_may_be_vectorized(axes):
  x = np.stack([_bits(64, 400, 9), _bits(64, 400, 300)])
  kernel = np.random.default_rng(1).normal(size=(2, 400, 8)).astype(np.float32)
  xs, kernels = (
    [v[0]] * 2 if a is None else v for v, a in zip((x, kernel), axes)
  )
  x, kernel = (
    v[0] if a is None else np.moveaxis(v, 0, a)
    for v, a in zip((x, kernel), axes)
  )
  each = jax.jit(jax.vmap(jax.grad(_loss, 1), axes))(x, kernel)
  whole = jax.jit(jax.grad(lambda k: jnp.sum(jax.vmap(_loss, axes)(x, k))))(
    kernel
  )
  expected = np.stack(
    [a.T.astype(float) @ np.cos(a @ b) for a, b in zip(xs, kernels)]
  )
  np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-4)
  if axes[1] is None:
    total = expected.sum(axis=0)
  else:
    total = np.moveaxis(expected, 0, axes[1])
  np.testing.assert_allclose(whole, total, rtol=1e-4, atol=1e-4)


def test_each_device_multiplies_its_rows():
  x = _bits(128, 400, 22)
  x[100] = True  # Only the second device has a row with too many ones.
  kernel = np.random.default_rng(1).normal(size=(400, 8)).astype(np.float32)
  mesh = jax.sharding.Mesh(jax.devices()[:2], ('d',))
  gradient = jax.shard_map(
    lambda k, x: jax.lax.psum(jax.grad(_loss, 1)(x, k), 'd'),
    mesh=mesh,
    in_specs=(jax.P(), jax.P('d')),
    out_specs=jax.P(),
    check_vma=False,
  )
  expected = x.T.astype(float) @ np.cos(x @ kernel.astype(float))
  found = jax.jit(gradient)(kernel, x)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  'shape,dtype,expected',
  [
    ((256, 257), bool, True),
    ((255, 257), bool, False),  # 65,535 values.
    ((256, 256), bool, False),
    ((256, 257), np.uint8, False),
  ],
)
def test_only_large_bools_are_fast(shape, dtype, expected):
  assert sparse.is_fast(np.zeros(shape, dtype)) == expected


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
def test_only_a_cpu_adds_rows(platform):
  x, kernel = jnp.zeros((3, 64, 400), bool), jnp.zeros((400, 8))
  multiply = jax.vmap(sparse.multiply_bools, (0, None))
  loss = jax.jit(jax.value_and_grad(lambda k: jnp.sum(multiply(x, k))))
  lowered = loss.trace(kernel).lower(lowering_platforms=(platform,))
  assert ('stablehlo.while' in lowered.as_text()) == (platform == 'cpu')


@pytest.mark.parametrize('torso', [torsos.MLP(), torsos.TwinMLP()])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_bools_and_floats_have_the_same_features(torso, dtype):
  torso = torso.clone(dtype=dtype)
  obs = {'a': _bits(200, 300, 5).reshape(200, 10, 30)}
  obs['b'] = _bits(200, 30, 3)
  floats = jax.tree.map(lambda x: x.astype(np.float32), obs)
  params = torso.init(jax.random.key(0), floats)
  shapes = jax.eval_shape(torso.init, jax.random.key(0), obs)
  chex.assert_trees_all_equal_shapes_and_dtypes(params, shapes)
  lowered = jax.jit(torso.apply).lower(params, obs)
  # The sum of a few rows has no more rounding than the product in float32.
  assert ('stablehlo.while' in lowered.as_text()) == (dtype == 'float32')
  features = lowered.compile()(params, obs)
  expected = jax.jit(torso.apply)(params, floats)
  chex.assert_trees_all_close(features, expected, rtol=1e-4, atol=1e-5)
