"""Tests how long untrained cores remember, and new cores by plain loops."""

import functools

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


# Plain loops over single steps and environments, in float64.


def _norm(p, x):
  x = (x - x.mean()) / np.sqrt(x.var() + 1e-6)
  return x * p['scale'] + p['bias']


def _dense(p, x):
  return x @ p['kernel'] + p.get('bias', 0.0)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _mingru(p, x, state):
  """Feng et al. 2024, arXiv:2410.01201, algorithm 5."""
  (state,) = state
  y = _norm(p['norm'], x)
  gate = _sigmoid(_dense(p['gate'], y))
  state = (1 - gate) * state + gate * _dense(p['content'], y)
  return x + state, (state,)


def _lru(p, x, state):
  """Orvieto et al. 2023, arXiv:2303.06349, appendix A, with real matrices."""
  modulus, phase = np.exp(-np.exp(p['nu_log'])), np.exp(p['theta_log'])
  y = _norm(p['norm'], x)
  real, imaginary = np.split(_dense(p['B'], y), 2)
  state = modulus * np.exp(1j * phase) * (state[0] + 1j * state[1])
  state = state + np.exp(p['gamma_log']) * (real + 1j * imaginary)
  output = _dense(p['C'], np.concatenate([state.real, state.imag]))
  z = _gelu(output + p['D'] * y)
  z = _sigmoid(_dense(p['V'], z)) * _dense(p['W'], z)
  return x + z, (state.real, state.imag)


def _gate(p, x, y):
  """Parisotto et al. 2019, arXiv:1910.06764, the last gate of section 3.2."""
  size = len(x)
  wr, wz, wg = np.split(p['y']['kernel'], 3, axis=1)
  ur, uz = np.split(p['x']['kernel'], 2, axis=1)
  r = _sigmoid(y @ wr + x @ ur)
  z = _sigmoid(y @ wz + x @ uz - p['bias'])
  content = np.tanh(y @ wg + (r * x) @ p['kept']['kernel'])
  assert content.shape == (size,)
  return (1 - z) * x + z * content


def _gtrxl(p, x, state):
  """Steps a layer; the state is a list of its earlier inputs, newest last."""
  size, attention = len(x), p['attention']
  steps = [_norm(p['attention_norm'], y) for y in [*state, x]]
  num_heads, outputs = 2, []
  width = size // num_heads
  for head in range(num_heads):
    part = slice(head * width, (head + 1) * width)

    def project(name, y):
      return y @ attention[name]['kernel'][:, part]

    query, logits = project('query', steps[-1]), []
    for i, step in enumerate(steps):
      distance = len(steps) - 1 - i
      angle = distance / 10_000 ** (np.arange(size // 2) / (size // 2))
      code = project('distance', np.concatenate([np.sin(angle), np.cos(angle)]))
      logit = (query + attention['u'][head]) @ project('key', step)
      logit += (query + attention['w'][head]) @ code
      logits.append(logit / np.sqrt(width))
    weights = np.exp(logits) / np.sum(np.exp(logits))
    values = [project('value', step) for step in steps]
    outputs.append(sum(w * v for w, v in zip(weights, values)))
  y = np.concatenate(outputs) @ attention['output']['kernel']
  y = _gate(p['attention_gate'], x, np.maximum(y, 0))
  hidden = np.maximum(_dense(p['hidden'], _norm(p['mlp_norm'], y)), 0)
  output = _gate(p['mlp_gate'], y, np.maximum(_dense(p['mlp'], hidden), 0))
  return output, [*state, x][-_WINDOW:]


_WINDOW, _WIDTH, _T = 3, 6, 8
_PLAIN = {'mingru': _mingru, 'lru': _lru, 'gtrxl': _gtrxl}


def _loop(kind, params, x, is_first, carry):
  """Steps two layers for each environment; returns outputs `[T, B, size]`."""
  columns = []
  for b in range(x.shape[1]):
    states = [jax.tree.map(lambda c: c[b], layer) for layer in carry]
    if kind == 'gtrxl':
      states = [list(s.cache[_WINDOW - int(s.num_steps) :]) for s in states]
    else:
      states = [jax.tree.leaves(s) for s in states]
    outputs = []
    for t in range(len(x)):
      y = x[t, b]
      if len(y) != _WIDTH:  # A layer adds to its input.
        y = _dense(params['input'], y)
      if is_first[t, b]:
        empty = [] if kind == 'gtrxl' else [np.zeros(_WIDTH)] * 2
        states = [empty[: len(s)] for s in states]
      for i, name in enumerate(k for k in sorted(params) if k != 'input'):
        y, states[i] = _PLAIN[kind](params[name], y, states[i])
      outputs.append(y)
    columns.append(outputs)
  return np.swapaxes(np.array(columns), 0, 1)


def _case(kind, dtype):
  """Makes a core of two layers and inputs with a reset at every position."""
  core = cores.Core(kind, _WIDTH, _WINDOW)
  rng = np.random.default_rng(0)
  num_features = 4 if dtype == np.float32 else _WIDTH
  x = rng.normal(size=(_T, _T + 1, num_features)).astype(dtype)
  is_first = np.eye(_T, _T + 1, dtype=bool)  # The last environment has none.
  is_first[6, 2] = True
  carry = cores.initial_carry(kind, _WIDTH, _T + 1, 2, _WINDOW)
  init = jax.jit(core.init)
  params = init(jax.random.key(0), x, is_first, carry)['params']

  def draw(x):
    return 0.5 * rng.normal(size=x.shape).astype(dtype)

  params, carry = jax.tree.map(draw, (params, carry))
  if kind == 'gtrxl':
    num_steps = (np.arange(_T + 1) % (_WINDOW + 1)).astype(dtype)
    carry = tuple(layer._replace(num_steps=num_steps) for layer in carry)

  def unroll(params, x, carry, is_first=is_first):
    return core.apply({'params': params}, x, is_first, carry)

  return unroll, params, x, is_first, carry


_DTYPES = pytest.mark.parametrize(
  'dtype,tolerance', [(np.float32, 1e-5), (np.float64, 1e-10)]
)


@_DTYPES
@pytest.mark.parametrize('kind', _PLAIN)
def test_a_core_with_layers_is_a_plain_loop(
  kind, dtype, tolerance, monkeypatch
):
  monkeypatch.setenv('PODRL_PLAIN_KERNELS', '1')  # In parallel.
  with jax.enable_x64(dtype == np.float64):
    unroll, params, x, is_first, carry = _case(kind, dtype)
    outputs, _ = jax.jit(unroll)(params, x, carry)
  assert outputs.dtype == dtype
  params, x, carry = jax.tree.map(np.float64, (params, x, carry))
  expected = _loop(kind, params, x, is_first, carry)
  np.testing.assert_allclose(outputs, expected, rtol=tolerance, atol=tolerance)


@_DTYPES
@pytest.mark.parametrize('kind', _PLAIN)
def test_an_unroll_in_parallel_is_its_steps_in_turn(
  kind, dtype, tolerance, monkeypatch
):
  monkeypatch.setenv('PODRL_PLAIN_KERNELS', '1')
  with jax.enable_x64(dtype == np.float64):
    unroll, params, x, is_first, carry = _case(kind, dtype)
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(_T, _T + 1, _WIDTH)).astype(dtype)

    def step(params, x, carry):
      def one(carry, inputs):
        x, is_first = (y[None] for y in inputs)
        outputs, carry = unroll(params, x, carry, is_first)
        return carry, outputs[0]

      carry, outputs = jax.lax.scan(one, carry, (x, is_first))
      return outputs, carry

    def loss(function, *inputs):
      outputs, carry = function(*inputs)
      leaves = jax.tree.leaves(carry)
      total = jnp.sum(weights * outputs) + sum(map(jnp.sum, leaves))
      return total, (outputs, carry)

    # A transformer's gradient stays inside the unroll, so it has none here.
    arguments = () if kind == 'gtrxl' else (1, 2, 3)
    found, expected = (
      jax.jit(
        jax.grad(loss, arguments, has_aux=True) if arguments else loss,
        static_argnums=0,
      )(function, params, x, carry)
      for function in (unroll, step)
    )
  if kind == 'gtrxl':
    found, expected = found[1], expected[1]
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_the_gradient_of_a_transformer_is_that_of_the_plain_loop():
  rng = np.random.default_rng(1)
  with jax.enable_x64(True):
    unroll, params, x, is_first, carry = _case('gtrxl', np.float64)
    weights = rng.normal(size=(_T, _T + 1, _WIDTH))

    def loss(params, x, carry):
      return jnp.sum(weights * unroll(params, x, carry)[0])

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))(params, x, carry)
  *gradient, of_carry = jax.device_get(gradient)
  # Nothing flows to steps before the unroll.
  assert not any(np.any(x) for x in jax.tree.leaves(of_carry))
  direction = jax.tree.map(lambda x: rng.normal(size=x.shape), (params, x))

  def plain(distance):
    inputs = jax.tree.map(lambda a, b: a + distance * b, (params, x), direction)
    return np.sum(weights * _loop('gtrxl', *inputs, is_first, carry))

  slope = (plain(1e-5) - plain(-1e-5)) / 2e-5
  products = jax.tree.map(lambda a, b: np.sum(a * b), gradient, [*direction])
  np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-5)


@pytest.mark.parametrize('kind', _PLAIN)
def test_a_carry_never_reaches_the_next_episode(kind):
  unroll, params, x, is_first, carry = _case(kind, np.float32)
  other = jax.tree.map(lambda c: c + 1.0, carry)
  run = jax.jit(unroll)
  outputs, last = run(params, x, carry)
  others, other_last = run(params, x, other)
  changes = np.any(outputs != others, axis=-1)
  assert not changes[np.cumsum(is_first, axis=0) > 0].any()
  assert changes[0, 1:].all()  # Environment 0 has a reset at its first step.
  # Nor does it reach the next unroll.
  run = jax.jit(functools.partial(unroll, is_first=np.zeros_like(is_first)))
  outputs, others = (run(params, x, c)[0] for c in (last, other_last))
  np.testing.assert_array_equal(outputs[:, :-1], others[:, :-1])


def test_a_new_linear_core_remembers_for_memory_steps():
  share = _TAU / (1 + _TAU)
  layers = {}
  for kind in 'mingru', 'lru':
    for steps in 0, _MEMORY_STEPS:
      params = jax.jit(cores.Core(kind, _SIZE, steps).init)(
        jax.random.key(0),
        jnp.zeros((1, 1, 4)),
        jnp.ones((1, 1), bool),
        cores.initial_carry(kind, _SIZE, 1),
      )['params']
      (name,) = params.keys() - {'input'}
      layers[kind, steps] = params[name]
  usual = layers['mingru', 0]
  np.testing.assert_array_equal(usual['gate']['bias'], np.zeros(_SIZE))
  bias = layers['mingru', _MEMORY_STEPS]['gate']['bias']
  np.testing.assert_allclose(1 - _sigmoid(bias), share, rtol=1e-5)
  # The usual eigenvalues are spread evenly over the area of the unit disk.
  area = (np.arange(_SIZE) + 0.5) / _SIZE
  for steps, modulus in (0, np.sqrt(area)), (_MEMORY_STEPS, share):
    p = layers['lru', steps]
    np.testing.assert_allclose(np.exp(-np.exp(p['nu_log'])), modulus, rtol=1e-5)
    # States then have the scale of the inputs: arXiv:2303.06349, eq. 7.
    scale = np.exp(p['gamma_log'])
    np.testing.assert_allclose(scale**2, 1 - modulus**2, rtol=1e-5)
    phase = np.exp(p['theta_log'])
    assert 0 < phase.min() < phase.max() < 2 * np.pi


@pytest.mark.parametrize(
  'fields,message',
  [
    ({'recurrent': 'gru', 'num_layers': 2}, 'mingru or lru or gtrxl'),
    ({'recurrent': 'none', 'num_layers': 2}, 'mingru or lru or gtrxl'),
    ({'recurrent': 'gtrxl', 'memory_steps': 0}, 'network.memory_steps to at'),
    ({'recurrent': 'lru', 'memory_steps': 1}, 'network.memory_steps=1 must be'),
    ({'recurrent': 'gtrxl', 'memory_steps': 1, 'num_layers': 3}, None),
    ({'recurrent': 'lstm', 'memory_steps': 2}, None),
  ],
)
def test_fields_that_do_not_fit_a_core(fields, message):
  fields = {f'network.{k}': x for k, x in fields.items()}
  if message is None:
    cores.check(fields)
    return
  with pytest.raises(ValueError, match=message):
    cores.check(fields)
