"""Tests that `cores.lengthen` sets how long an untrained core remembers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.networks import cores, q, torsos

_SIZE, _MEMORY_STEPS = 6, 11
_TAU = np.linspace(1, 10, 6)  # Time constants from 1 to `_MEMORY_STEPS` - 1.
_OBS = jax.ShapeDtypeStruct((5,), jnp.float32)


def _network(core, memory_steps):
  network = q.make_network(
    lambda: torsos.MLP((8,)),
    _OBS,
    3,
    core=core,
    core_size=_SIZE,
    memory_steps=memory_steps,
  )
  return jax.jit(network.init)(jax.random.key(0))


def _step(core, x, num_steps=1, cell_bias=0.0):
  """Steps an untrained core whose products are 0, so only biases count.

  `x` is the state before the first step. Returns the state after `num_steps`.
  """
  carry = np.full((1, _SIZE), x, np.float32)
  carry = carry if core == 'gru' else (carry, np.zeros_like(carry))
  module = cores.Core(core, _SIZE)
  inputs = np.zeros((num_steps, 1, 4), np.float32)
  is_first = np.zeros((num_steps, 1), bool)
  params = module.init(jax.random.key(0), inputs, is_first, carry)
  params = cores.lengthen(params, _MEMORY_STEPS)

  def change(path, x):
    *_, layer, name = (entry.key for entry in path)
    if name == 'kernel':
      return jnp.zeros_like(x)
    return x + cell_bias if layer in ('hg', 'in') else x

  params = jax.tree.map_with_path(change, params)
  _, carry = jax.jit(module.apply)(params, inputs, is_first, carry)
  return carry[0] if core == 'gru' else carry[0][0]


@pytest.mark.parametrize('core', ['gru', 'lstm'])
def test_units_keep_a_share_that_follows_from_their_time_constants(core):
  share = _TAU / (1 + _TAU)  # From 1/2 to 10/11 per step.
  np.testing.assert_allclose(_step(core, 1.0), share, rtol=1e-5)
  np.testing.assert_allclose(_step(core, 1.0, 7), share**7, rtol=1e-5)


@pytest.mark.parametrize('core', ['gru', 'lstm'])
def test_the_new_content_has_the_other_share(core):
  # With a large bias, the tanh of the new content is 1.
  content = _step(core, 0.0, cell_bias=50.0)
  np.testing.assert_allclose(content, 1 / (1 + _TAU), rtol=1e-5)


@pytest.mark.parametrize(
  'core,gates', [('gru', {'iz'}), ('lstm', {'hf', 'hi'}), ('none', set())]
)
def test_only_the_biases_of_these_gates_change(core, gates):
  usual, longer = _network(core, 0), _network(core, _MEMORY_STEPS)
  changed = set()
  before, after = map(jax.tree.leaves_with_path, (usual, longer))
  for (path, x), (_, y) in zip(before, after, strict=True):
    if np.any(x != y):
      changed.add('/'.join(entry.key for entry in path[-2:]))
  assert changed == {f'{gate}/bias' for gate in gates}


def test_no_steps_change_nothing():
  params = _network('lstm', 0)
  assert cores.lengthen(params, 0) is params
