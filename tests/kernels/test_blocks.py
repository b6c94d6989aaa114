"""Tests how rows of large arrays are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.kernels import blocks


@pytest.mark.parametrize(
  'num_rows,expected', [(1, 1), (8, 1), (16, 1), (96, 6), (51, 3), (509, 1)]
)
def test_a_minibatch_has_at_least_sixteen_blocks(num_rows, expected):
  # 51 rows are 17 blocks of 3; the prime number 509 has only single rows.
  assert blocks.block_size(num_rows) == expected


# Wide rows are sliced, narrow rows are gathered.
@pytest.mark.parametrize('width', [1, 64])
def test_blocks_keep_their_rows_in_order(width):
  parts = jnp.tile(jnp.arange(6.0).reshape(3, 2, 1), width)
  rows = blocks.collect(parts, jnp.array([2, 0]))
  np.testing.assert_array_equal(rows[:, 0], [4, 5, 0, 1])


@pytest.mark.parametrize('platform', ['cpu', 'tpu', 'cuda'])
def test_only_a_gpu_gathers_wide_blocks(platform):
  traced = jax.jit(blocks.collect).trace(
    jnp.zeros((3, 2, 64)), jnp.array([2, 0])
  )
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert ('stablehlo.gather' in text) == (platform == 'cuda')
  assert ('dynamic_slice' in text) == (platform != 'cuda')


def test_all_forms_can_be_plain(monkeypatch):
  """The forms have the same results, but they are different programs."""
  sums, place = jnp.array([1.0, 3.0, 3.0, 7.0]), jnp.array([0.5, 3.0, 9.0])
  parts, order = jnp.arange(384.0).reshape(3, 2, 64), jnp.array([2, 0])

  def read():
    functions = (
      lambda x: blocks.search(x, place),
      lambda x: blocks.collect(parts * x[0], order),
      lambda x: blocks.keep_float32(x) @ sums,
    )
    lowered = [
      jax.jit(f).trace(sums).lower(lowering_platforms=('tpu',))
      for f in functions
    ]
    return [jax.jit(f)(sums) for f in functions], [x.as_text() for x in lowered]

  fast, fast_texts = read()
  monkeypatch.setenv('PODRL_PLAIN_KERNELS', '1')
  plain, plain_texts = read()
  np.testing.assert_array_equal(fast[0], [0, 3, 4])
  for x, y in zip(fast, plain, strict=True):
    np.testing.assert_array_equal(x, y)
  assert all(x != y for x, y in zip(fast_texts, plain_texts, strict=True))
