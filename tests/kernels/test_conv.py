"""Tests convolutions: each form against XLA's operation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.kernels import conv


def _arguments(image, kernel):
  """Makes images, a kernel and a bias."""
  keys = jax.random.split(jax.random.key(0), 3)
  return list(map(jax.random.normal, keys, (image, kernel, kernel[-1:])))


def _apply_and_grad(convolve, arguments, options):
  def loss(*arguments):
    y = convolve(*arguments, **options)
    return jnp.sum(jnp.sin(y)), y

  return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arguments)


@pytest.mark.parametrize(
  'padding,kernel,stride,size',
  [
    ('VALID', 3, 1, (10, 10)),
    ('SAME', 3, 1, (9, 10)),
    ('VALID', 4, 2, (13, 16)),
    ('SAME', 3, 2, (13, 16)),
    ('SAME', 4, 3, (13, 16)),
  ],
)
def test_matmul_convolution_equals_lax(padding, kernel, stride, size):
  arguments = _arguments((2, *size, 3), (kernel, kernel, 3, 5))
  options = {'stride': stride, 'padding': padding}
  ours = _apply_and_grad(conv._multiply_patches, arguments, options)
  lax = _apply_and_grad(conv._convolve, arguments, options)
  for a, b in zip(*map(jax.tree.leaves, (ours, lax)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# With 8 channels, the bias is added; with fewer, it is a channel's weight.
@pytest.mark.parametrize('channels', [4, 8])
@pytest.mark.parametrize('padding', ['SAME', 'VALID'])
def test_a_bias_may_be_the_weight_of_a_channel(padding, channels):
  arguments = _arguments((2, 6, 5, channels), (3, 3, channels, 7))
  options = {'stride': 2, 'padding': padding}
  ours = _apply_and_grad(conv._convolve_with_ones, arguments, options)
  expected = _apply_and_grad(conv._convolve, arguments, options)
  for x, y in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize('is_plain', [False, True])
@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
def test_a_convolution_fits_the_platform(platform, is_plain, monkeypatch):
  monkeypatch.setenv('PODRL_PLAIN_KERNELS', str(int(is_plain)))
  arguments = _arguments((2, 10, 10, 3), (3, 3, 3, 5))
  options = {'stride': 1, 'padding': 'VALID'}
  loss = jax.grad(lambda *x: jnp.sum(conv.convolve(*x, **options)))
  traced = jax.jit(loss).trace(*arguments)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  uses_xla = is_plain or platform == 'tpu'
  assert ('stablehlo.convolution' in text) == uses_xla
