"""Tests how a form is chosen."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
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
