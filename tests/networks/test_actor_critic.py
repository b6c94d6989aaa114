"""Tests networks: heads, memories against plain loops, steps and unrolls."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.networks import actor_critic as networks
from podrl.networks import cores, torsos
from podrl.types import Discrete, EnvSpec

_OBS = jax.ShapeDtypeStruct((5,), jnp.float32)
_OPTIONS = {'lru': {'num_layers': 2}, 'gtrxl': {'memory_steps': 3}}


def _network(core, shared_torso=False):
  network = networks.make_network(
    lambda: torsos.MLP((16,)),
    _OBS,
    3,
    shared_torso=shared_torso,
    core=core,
    core_size=8,
    **_OPTIONS.get(core, {}),
  )
  return network._replace(
    init=jax.jit(network.init), unroll=jax.jit(network.unroll)
  )


def _sequence(seed=0, length=12, batch=4):
  """Makes observations and `is_first`; some of the steps are reset steps."""
  rng = np.random.default_rng(seed)
  is_first = rng.random((length, batch)) < 0.2
  is_first[5:6, 0] = True
  return rng.normal(size=(length, batch, 5)).astype(np.float32), is_first


def _random_carry(network, batch=4):
  return jax.tree.map(
    lambda x: jax.random.normal(jax.random.key(3), x.shape),
    network.initial_carry(batch),
  )


def test_separate_torsos_share_nothing():
  network = _network('none')
  params = network.init(jax.random.key(0))
  obs, is_first = _sequence(length=1, batch=1)
  of_policy, of_value = jax.jit(
    jax.jacrev(
      lambda p: [x.ravel()[0] for x in network.unroll(p, obs, is_first, ())[:2]]
    )
  )(params)
  for x, y in zip(jax.tree.leaves(of_value), jax.tree.leaves(of_policy)):
    assert not (np.any(x) and np.any(y))


@pytest.mark.parametrize(
  'num_inputs,hidden_sizes,num_constants,activation',
  [
    (5, (16,), 0, 'tanh'),
    (5, (16, 8), 3, 'relu'),
    (300, (16, 8, 4), 0, 'tanh'),  # The first layers are one array.
  ],
)
def test_two_mlps_are_one_program_on_a_gpu(
  num_inputs, hidden_sizes, num_constants, activation
):
  module = networks.ActorCritic(
    lambda: torsos.MLP(hidden_sizes, torsos.ACTIVATIONS[activation]),
    6,
    shared_torso=False,
    num_constant_params=num_constants,
  )
  obs = jax.ShapeDtypeStruct((num_inputs,), jnp.float32)
  network = networks.recurrent(module, obs, module.initial_carry)
  assert networks._is_twin(module)
  keys = jax.random.split(jax.random.key(0), 3)
  params = jax.tree.map(  # Biases too.
    lambda x: x + 0.1 * jax.random.normal(keys[2], x.shape),
    jax.jit(network.init)(keys[0]),
  )
  x = jax.random.normal(keys[1], (20, num_inputs))
  weight = np.random.default_rng(0).normal(size=(20, 7)).astype(np.float32)

  def joined(params):
    head, value = networks._compute_twins(module, params['params'], x)
    return jnp.concatenate([head, value[:, None]], axis=1)

  def separate(params):
    head, value, _ = network.unroll(
      params, x[None], jnp.zeros((1, 20), bool), ()
    )
    return jnp.concatenate([head[0], value[0][:, None]], axis=1)

  np.testing.assert_allclose(joined(params), separate(params), atol=1e-5)
  gradients = [
    jax.grad(lambda p, f=f: jnp.sum(weight * f(p)))(params)
    for f in (joined, separate)
  ]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *gradients
  )


@pytest.mark.parametrize('platform', ['cpu', 'cuda'])
def test_only_a_gpu_joins_two_mlps(platform):
  network = networks.make_network(
    lambda: torsos.MLP((16,)), _OBS, 3, shared_torso=False
  )
  params = network.init(jax.random.key(0))
  obs, is_first = jnp.zeros((1, 4, 5)), jnp.zeros((1, 4), bool)
  traced = jax.jit(lambda *x: network.unroll(*x, ())).trace(
    params, obs, is_first
  )
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  is_joined = platform == 'cuda'
  assert ('optimization_barrier' in text) == is_joined
  assert text.count('dot_general') == (2 if is_joined else 4)


_CAMERA = jax.ShapeDtypeStruct((6, 6, 2), jnp.float32)


@pytest.mark.parametrize(
  'state,other,core',
  [
    (_OBS, _OBS, 'none'),
    (_OBS, _OBS, 'gru'),
    (_CAMERA, _OBS, 'none'),
    (_OBS, _CAMERA, 'none'),
  ],
)
def test_a_policy_does_not_depend_on_what_only_its_critic_sees(
  state, other, core
):
  like, scale = {'state': state, 'other': other}, {'state': 2, 'other': 4}
  spec = EnvSpec(like, False, Discrete(3), 1, 100, obs_scale=scale)
  fields = helpers.network_fields('ppo', name='auto', policy_inputs='state')
  policy_torso, value_torso = torsos.build_torsos(spec, fields)
  network = networks.make_network(
    policy_torso,
    like,
    3,
    make_value_torso=value_torso,
    shared_torso=False,
    core=core,
    core_size=8,
  )
  params = jax.jit(network.init)(jax.random.key(0))
  obs = {
    name: jax.random.normal(jax.random.key(i), (1, 1, *x.shape))
    for i, (name, x) in enumerate(like.items())
  }
  is_first, carry = jnp.ones((1, 1), bool), network.initial_carry(1)

  @jax.jit
  @jax.jacrev
  def derivatives(obs):
    return network.unroll(params, obs, is_first, carry)[:2]

  of_head, of_value = derivatives(obs)
  assert np.any(of_head['state']) and not np.any(of_head['other'])
  assert np.any(of_value['state']) and np.any(of_value['other'])
  found = networks.groups(params)['params']
  groups = [{*jax.tree.leaves(found[f'Selected_{i}'])} for i in range(2)]
  assert groups == [{'actor'}, {'critic'}]


@pytest.mark.parametrize(
  'platform,obs', [('cpu', '12x5xf32'), ('tpu', '3x4x5xf32')]
)
def test_only_a_tpu_keeps_time_and_batch_apart_in_an_mlp(platform, obs):
  network = _network('none')
  params = jax.eval_shape(network.init, jax.random.key(0))
  trace = network.unroll.trace(params, *_sequence(length=3), ())
  lowered = trace.lower(lowering_platforms=(platform,)).as_text()
  # Only the first layer of each torso takes observations.
  assert lowered.count(f'(tensor<{obs}>, tensor<5x16xf32>)') == 2


@pytest.mark.parametrize(
  'name,image,core',
  [
    ('mlp', (3, 3, 1), 'gru'),
    ('nature_cnn', (36, 36, 2), 'none'),
    pytest.param('impala_resnet', (9, 9, 2), 'lstm', marks=pytest.mark.slow),
  ],
)
def test_bfloat16_torsos_keep_float32_parameters_and_heads(name, image, core):
  obs = jax.ShapeDtypeStruct(image, jnp.float32)
  spec = EnvSpec(obs, False, Discrete(3), 1, 100)

  def network(dtype):
    return networks.make_network(
      torsos.make_torso(name, spec, hidden_sizes=(16,), dtype=dtype),
      obs,
      3,
      core=core,
    )

  params = jax.jit(network(jnp.float32).init)(jax.random.key(1))
  assert {
    x.dtype
    for x in jax.tree.leaves(
      jax.eval_shape(network(jnp.bfloat16).init, jax.random.key(1))
    )
  } == {jnp.dtype('float32')}
  exact, rounded = (
    jax.jit(network(t).unroll)(
      params,
      jax.random.uniform(jax.random.key(0), (1, 2, *image)),
      jnp.ones((1, 2), bool),
      network(t).initial_carry(2),
    )[:2]
    for t in (jnp.float32, jnp.bfloat16)
  )
  for x, y in zip(exact, rounded):
    assert y.dtype == jnp.float32 and np.any(x != y)
    np.testing.assert_allclose(x, y, rtol=0.1, atol=0.02)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _gru(p, x, h):
  """Steps a GRU: Cho et al. 2014, v3, with the reset gate after the product."""

  def dense(name, y):
    return y @ p[name]['kernel'] + p[name].get('bias', 0)

  r = _sigmoid(dense('ir', x) + dense('hr', h))
  z = _sigmoid(dense('iz', x) + dense('hz', h))
  n = np.tanh(dense('in', x) + r * dense('hn', h))
  h = (1 - z) * n + z * h
  return h, h


def _lstm(p, x, carry):
  """Steps an LSTM: Hochreiter and Schmidhuber 1997, with Gers's forget gate."""
  c, h = carry

  def gate(g):
    hidden = h @ p[f'h{g}']['kernel'] + p[f'h{g}']['bias']
    return x @ p[f'i{g}']['kernel'] + hidden

  c = _sigmoid(gate('f')) * c + _sigmoid(gate('i')) * np.tanh(gate('g'))
  h = _sigmoid(gate('o')) * np.tanh(c)
  return h, (c, h)


@pytest.mark.parametrize('kind,cell', [('gru', _gru), ('lstm', _lstm)])
def test_a_core_is_a_plain_loop_that_forgets_at_first_steps(kind, cell):
  core = cores.Core(kind, 6)
  x, is_first = _sequence()
  zeros = np.zeros((4, 6), np.float32)
  carry = zeros if kind == 'gru' else (zeros, zeros)
  carry = jax.tree.map(lambda c: c + np.float32(0.5), carry)
  init_with_output = jax.jit(core.init_with_output)
  outputs, params = init_with_output(jax.random.key(0), x, is_first, carry)
  (params,) = jax.device_get(params)['params'].values()
  params = jax.tree.map(np.asarray, params)
  expected = []
  for x_t, first in zip(x, is_first):
    carry = jax.tree.map(lambda c: np.where(first[:, None], 0, c), carry)
    y, carry = cell(params, x_t, carry)
    expected.append(y)
  np.testing.assert_allclose(outputs[0], expected, atol=1e-5)
  for a, b in zip(jax.tree.leaves(outputs[1]), jax.tree.leaves(carry)):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize('shared_torso', [False, True])
@pytest.mark.parametrize('core', cores.CORES)
def test_steps_equal_the_unroll(core, shared_torso):
  network = _network(core, shared_torso)
  params = network.init(jax.random.key(0))
  obs, is_first = _sequence()
  carry = first_carry = _random_carry(network)
  heads, values = [], []
  for t in range(len(obs)):
    head, value, carry = network.unroll(
      params, obs[t : t + 1], is_first[t : t + 1], carry
    )
    heads.append(head[0])
    values.append(value[0])
  unrolled = network.unroll(params, obs, is_first, first_carry)
  stepped = jnp.stack(heads), jnp.stack(values), carry
  for a, b in zip(jax.tree.leaves(unrolled), jax.tree.leaves(stepped)):
    np.testing.assert_allclose(a, b, atol=1e-5)
  # The network remembers: another carry changes the steps before a reset step.
  forgetful, _, _ = network.unroll(
    params, obs, is_first, network.initial_carry(4)
  )
  assert not np.allclose(forgetful, unrolled[0], atol=1e-5)


@pytest.mark.parametrize('core', cores.CORES)
def test_nothing_passes_a_reset_step(core):
  network = _network(core)
  params = network.init(jax.random.key(0))
  obs, is_first = _sequence()

  def after(obs, carry):
    head, value, _ = network.unroll(params, obs, is_first, carry)
    return head[5:, 0], value[5:, 0]

  jacobian = jax.jit(jax.jacrev(after, (0, 1)))
  changes = jacobian(obs, _random_carry(network))
  for of_obs, of_carry in changes:
    of_obs = np.asarray(of_obs)  # [..., T, B, 5]
    assert np.any(of_obs[..., 5:, 0, :])
    assert not np.any(of_obs[..., :5, 0, :])
    assert not any(np.any(x) for x in jax.tree.leaves(of_carry))


def test_constant_parameters_are_the_same_in_all_states():
  network = networks.make_network(
    lambda: torsos.MLP((16,)), _OBS, 5, num_constant_params=2
  )
  params = jax.jit(network.init)(jax.random.key(0))
  params['params']['constant'] += jnp.float32([7, 8])
  obs, is_first = _sequence()
  head, _, _ = jax.jit(network.unroll)(params, obs, is_first, ())
  assert head.shape == (12, 4, 5)
  np.testing.assert_array_equal(
    head[..., 3:], np.broadcast_to(np.float32([7, 8]), (12, 4, 2))
  )
  assert len(np.unique(head[..., 0])) == 48


@pytest.mark.parametrize('shared', [True, False])
@pytest.mark.parametrize('core', ['none', 'gru'])
@pytest.mark.parametrize('shape', [(3,), (20, 20)])
def test_groups_are_what_each_output_depends_on(shared, core, shape):
  """A wide observation has one layer for the torsos of both heads."""
  obs = jax.ShapeDtypeStruct(shape, jnp.float32)
  spec = EnvSpec(obs, False, Discrete(2), 1, 0)
  network = networks.make_network(
    torsos.make_torso('mlp', spec, (6, 4)),
    obs,
    2,
    shared_torso=shared,
    core=core,
    core_size=4,
  )
  params = network.init(jax.random.key(0))
  # Not at their first values: the biases are 0 there.
  params = jax.tree.map(lambda x: x + 0.01, params)
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(1, 2, *shape)) / 10, jnp.zeros((1, 2), bool)
  carry = jax.tree.map(lambda x: x + 0.5, network.initial_carry(2))

  def outputs(params):
    head, value, _ = network.unroll(params, *inputs, carry)
    return head.sum(), value.sum()

  of_head, of_value = (
    jax.grad(lambda x: outputs(x)[i])(params) for i in range(2)
  )

  def check(name, head, value):
    parts = name.split('|')
    pieces = zip(
      parts,
      np.split(np.asarray(head), len(parts), axis=-1),
      np.split(np.asarray(value), len(parts), axis=-1),
    )
    for part, head, value in pieces:
      if part == 'critic':
        assert not head.any() and value.any()
      else:
        assert head.any()
        assert shared or not value.any()

  names = networks.groups(params)
  assert jax.tree.structure(names) == jax.tree.structure(params)
  jax.tree.map(check, names, of_head, of_value)
