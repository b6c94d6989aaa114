"""Tests how a form is chosen."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
import numpy as np
import pytest

from podrl import kernels


@pytest.mark.parametrize(
  'platform,traced',
  [
    ('cpu', ['cpu']),
    ('tpu', ['plain']),
    ('gpu', ['plain', 'cpu', 'cuda']),  # Which library it has, a mesh hides.
    (None, ['plain', 'cpu', 'cuda']),
  ],
)
def test_only_the_form_of_the_meshs_platform_is_traced(platform, traced):
  found = []

  def form(name):
    def double(x):
      found.append(name)
      return x + x

    return double

  def call(x):
    forms = {name: form(name) for name in ('cpu', 'cuda')}
    return kernels.choose(form('plain'), x, **forms)

  device = platform and AbstractDevice(platform, 1, platform)
  with use_abstract_mesh(AbstractMesh((1,), ('x',), abstract_device=device)):
    jax.make_jaxpr(call)(1.0)
  assert sorted(found) == sorted(traced)


@pytest.mark.parametrize(
  'platform,plain,expected',
  [('gpu', '', 4), ('tpu', '', 1), (None, '', 1), ('gpu', '1', 1)],
)
def test_a_turn_has_several_steps_on_some_platforms(
  monkeypatch, platform, plain, expected
):
  monkeypatch.setenv('PODRL_PLAIN_KERNELS', plain)

  def add(total, x):
    return total + x, total * x

  def scan(xs):
    return kernels.scan(add, 0.0, xs, gpu=4)

  device = platform and AbstractDevice(platform, 1, platform)
  xs = jnp.arange(6.0)
  with use_abstract_mesh(AbstractMesh((1,), ('x',), abstract_device=device)):
    (loop,) = jax.make_jaxpr(scan)(xs).eqns
  assert loop.params['unroll'] == expected
  last, rows = scan(xs)
  np.testing.assert_array_equal(last, 15)
  np.testing.assert_array_equal(rows, [0, 0, 2, 9, 24, 50])
