"""Tests products, their gradients, and the ReLU."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.kernels import dense


@pytest.mark.parametrize('is_plain', [False, True])
def test_relu_and_its_gradient(is_plain, monkeypatch):
  monkeypatch.setenv('PODRL_PLAIN_KERNELS', str(int(is_plain)))
  x = jnp.array([-2.0, 0.0, 3.0])
  y, pullback = jax.vjp(dense.relu, x)
  np.testing.assert_array_equal(y, [0, 0, 3])
  np.testing.assert_array_equal(
    pullback(jnp.array([5.0, 6.0, 7.0]))[0], [0, 0, 7]
  )


@pytest.mark.parametrize('num_outputs', [1, 2, 8, 9, 32])
def test_a_dense_layer_has_the_gradient_of_a_matrix_product(num_outputs):
  rng = np.random.default_rng(0)
  x, kernel, grad = (
    rng.normal(size=shape).astype(np.float32)
    for shape in ((3, 50, 16), (3, 16, num_outputs), (3, 50, num_outputs))
  )

  # Agents of several seeds have kernels of their own.
  @jax.vmap
  def gradients(x, kernel, grad):
    x, grad = x.reshape(5, 10, 16), grad.reshape(5, 10, num_outputs)
    options = {'use_bias': False, 'dot_general': dense.dot_general}
    layer = nn.Dense(num_outputs, **options)

    def loss(x, kernel):
      return jnp.sum(grad * layer.apply({'params': {'kernel': kernel}}, x))

    return jax.grad(loss, (0, 1))(x, kernel)

  x_grad, kernel_grad = jax.jit(gradients)(x, kernel, grad)
  expected = np.swapaxes(x, 1, 2).astype(np.float64) @ grad
  np.testing.assert_allclose(kernel_grad, expected, atol=1e-5)
  expected = grad @ np.swapaxes(kernel, 1, 2)
  np.testing.assert_allclose(x_grad.reshape(x.shape), expected, atol=1e-5)


@pytest.mark.parametrize('is_plain', [False, True])
@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
def test_only_a_cpu_copies_the_input(platform, is_plain, monkeypatch):
  monkeypatch.setenv('PODRL_PLAIN_KERNELS', str(int(is_plain)))
  x, kernel = jnp.zeros((5, 16)), jnp.zeros((16, 32))
  loss = jax.grad(lambda kernel, x: jnp.sum(dense.multiply(x, kernel)))
  lowered = jax.jit(loss).trace(kernel, x).lower(lowering_platforms=(platform,))
  is_copied = platform == 'cpu' and not is_plain
  assert ('optimization_barrier' in lowered.as_text()) == is_copied


@pytest.mark.parametrize('form', [dense._separate_means, dense._joined_means])
def test_means(form):
  arrays = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
  means = form(list(arrays))
  np.testing.assert_allclose(means, arrays.mean((1, 2)), atol=1e-6)
  assert all(x.shape == () for x in means)
