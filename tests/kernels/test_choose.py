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
    *_, loop = jax.make_jaxpr(scan)(xs).eqns
  assert loop.params['unroll'] == expected
  last, rows = scan(xs)
  np.testing.assert_array_equal(last, 15)
  np.testing.assert_array_equal(rows, [0, 0, 2, 9, 24, 50])


def test_a_turn_of_long_steps_on_a_gpu_is_short(monkeypatch):
  def step(total, x):
    inside = jax.jit(lambda y: y * y + 1.0)
    powers, _ = jax.lax.scan(lambda y, _: (y * y, None), x, length=3)
    return total + inside(powers), x

  def scan(xs):
    return kernels.scan(step, 0.0, xs, gpu=8)

  # A step has nine: a scan and three products, a call and the two inside, a
  # conversion of 0.0, and a sum.
  monkeypatch.setattr(kernels, '_MAX_EQUATIONS', 4 * 9)
  device = AbstractDevice('gpu', 1, 'gpu')
  with use_abstract_mesh(AbstractMesh((1,), ('x',), abstract_device=device)):
    *_, loop = jax.make_jaxpr(scan)(jnp.arange(8.0)).eqns
  assert loop.params['unroll'] == 4


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_outputs_of_steps_are_averaged(platform):
  def step(total, x):
    return total + x, {'x': 1.0 * x, 'square': jnp.stack([x, x * x])}

  device = AbstractDevice(platform, 1, platform)
  with use_abstract_mesh(AbstractMesh((1,), ('x',), abstract_device=device)):
    jaxpr = jax.make_jaxpr(lambda x: kernels.scan_means(step, 0.0, x))
    closed = jaxpr(jnp.arange(4.0))
  last, square, x = jax.core.eval_jaxpr(
    closed.jaxpr, closed.consts, jnp.arange(4.0)
  )
  np.testing.assert_allclose([last, x], [6, 1.5])
  np.testing.assert_allclose(square, [1.5, 3.5])
  loop = next(x for x in closed.eqns if x.primitive.name == 'scan')
  assert len(loop.outvars) == (2 if platform == 'gpu' else 3)
