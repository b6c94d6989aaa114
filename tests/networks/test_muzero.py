"""Tests MuZero's network: sizes and ranges of hidden states, and actions."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.networks import muzero
from podrl.types import Discrete, EnvSpec

_A, _M, _N = 3, 7, 4
_SHAPES = {
  'vector': (5,),
  'minatar': (10, 10, 4),
  'atari': (4, 84, 84),
}


def _network(kind, channels, **fields):
  dtype = jnp.uint8 if kind == 'atari' else jnp.float32
  obs = jax.ShapeDtypeStruct(_SHAPES[kind], dtype)
  spec = EnvSpec(obs, kind == 'atari', Discrete(_A), 1, 0)
  fields = {'layer_norm': True, 'dtype': 'float32'} | fields
  own = helpers.network_fields('muzero', channels=channels, **fields)
  return muzero.make_network(spec, own, num_policy_params=_A, num_bins=_M), obs


@pytest.mark.parametrize(
  'kind,channels,hidden',
  [
    ('vector', 0, (8,)),
    ('minatar', 0, (8,)),
    ('minatar', 6, (10, 10, 6)),
    ('atari', 6, (11, 11, 6)),
  ],
)
def test_hidden_states_are_scaled_and_depend_on_the_action(
  kind, channels, hidden
):
  network, obs = _network(kind, channels, name='auto')
  params = jax.jit(network.init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  obs = rng.uniform(0, 255, (_N, *obs.shape)).astype(obs.dtype)
  state = jax.jit(network.represent)(params, obs)
  action = np.arange(_N) % _A
  following, reward, _ = jax.jit(network.step)(params, state, action)
  policy, value = jax.jit(network.predict)(params, following)
  assert state.shape == following.shape == (_N, *hidden)
  assert reward.shape == value.shape == (_N, _M)
  assert policy.shape == (_N, _A)
  for x in (state, following):
    axes = tuple(range(1, x.ndim))
    np.testing.assert_allclose(x.min(axes), 0, atol=1e-6)
    np.testing.assert_allclose(x.max(axes), 1, atol=1e-6)
  # Equal states and other actions lead to other states.
  same = jnp.broadcast_to(state[:1], state.shape)
  following, *_ = jax.jit(network.step)(params, same, action)
  first = following[0]
  np.testing.assert_allclose(following[3], first, atol=1e-5)
  assert abs(following[1] - first).max() > 0.01
  assert abs(following[2] - first).max() > 0.01


@pytest.mark.parametrize('channels,hidden', [(0, (8,)), (6, (10, 10, 6))])
def test_a_hidden_state_depends_on_all_leaves(channels, hidden):
  shapes = {'far': (10, 10, 4), 'near': (5, 5, 1), 'speed': (3,)}
  obs = {k: jax.ShapeDtypeStruct(x, jnp.uint8) for k, x in shapes.items()}
  spec = EnvSpec(obs, False, Discrete(_A), 1, 0)
  own = helpers.network_fields(
    'muzero', channels=channels, name='auto', layer_norm=True, dtype='float32'
  )
  network = muzero.make_network(spec, own, num_policy_params=_A, num_bins=_M)
  rng = np.random.default_rng(0)
  obs, other = (
    {k: rng.integers(0, 256, (_N, *x), np.uint8) for k, x in shapes.items()}
    for _ in range(2)
  )
  params = jax.jit(network.init)(jax.random.key(0))
  represent = jax.jit(network.represent)
  state = represent(params, obs)
  assert state.shape == (_N, *hidden)
  for key in shapes:
    changed = represent(params, obs | {key: other[key]})
    assert abs(changed - state).max() > 0.01


def test_the_dynamics_add_to_the_hidden_image():
  network, obs = _network('minatar', 6, name='auto')
  params = jax.jit(network.init)(jax.random.key(0))
  dynamics = params['params']['dynamics']
  params['params']['dynamics'] = jax.tree.map(jnp.zeros_like, dynamics)
  obs = np.random.default_rng(0).uniform(size=(_N, *obs.shape))
  state = jax.jit(network.represent)(params, obs.astype(np.float32))
  following, *_ = jax.jit(network.step)(params, state, np.zeros(_N, np.int32))
  np.testing.assert_allclose(following, state, atol=1e-6)


@pytest.mark.parametrize(
  'kind,fields,reason',
  [
    ('vector', {}, 'without an image'),
    ('minatar', {'name': 'conv'}, 'with network.name=conv'),
    ('minatar', {'dtype': 'bfloat16'}, 'with network.dtype=bfloat16'),
    ('minatar', {'layer_norm': False}, 'with network.layer_norm=False'),
  ],
)
def test_channels_that_do_not_fit_are_refused(kind, fields, reason):
  with pytest.raises(
    ValueError, match=f'network.channels=6 cannot .* {reason}'
  ):
    _network(kind, 6, **{'name': 'auto'} | fields)
