"""Tests exported policies against the policies that they come from."""

import json
import subprocess
import sys

from flax.traverse_util import flatten_dict
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import podrl
from podrl.records import workdir
from podrl.run import build, export, policy
from podrl.tools import export as command
from podrl.types import Box, Discrete, EnvSpec, Masked

_BOX = Box((2,), np.float32([-1, -2]), np.float32([1, 3]))
_SIZE = 3


def _policy(agent, obs, action, **fields):
  """Makes a policy with random parameters; `obs` has shapes and dtypes."""
  small = {'env.name': 'x', 'network.hidden_sizes': (8,)}
  config = helpers.fields_of('anakin_catch', agent) | small | fields
  spec = EnvSpec(obs, False, action, 1, 0)
  made = build.make_agent(config, spec)
  rng = np.random.default_rng(0)
  variables = jax.jit(made.init)(jax.random.key(0))
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype), variables.params
  )
  statistics = jax.tree.map(
    lambda x: rng.uniform(1, 2, x.shape).astype(x.dtype), variables.statistics
  )
  variables = variables._replace(params=params, statistics=statistics)
  return policy.Policy(config, spec, made, variables, 7)


def _leaf(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


_GRU, _NORMALIZED = (
  {'network.recurrent': 'gru'},
  {
    'agent.normalize_observation': True,
    'agent.normalize_reward': True,
  },
)
_LRU = {'network.recurrent': 'lru', 'network.num_layers': 2}
_GTRXL = {'network.recurrent': 'gtrxl', 'network.memory_steps': 3}
_IMAGE, _MASK = _leaf(8, 8, 3, dtype=jnp.uint8), _leaf(4, dtype=bool)
_POLICIES = {
  'mlp': lambda: _policy('ppo', _leaf(3), Discrete(4), **_NORMALIZED),
  'conv': lambda: _policy('dqn', _leaf(10, 10, 2, dtype=bool), Discrete(4)),
  'gru': lambda: _policy('impala', _leaf(3), Discrete(4), **_GRU),
  'lru': lambda: _policy('ppo', _leaf(3), Discrete(4), **_LRU),
  'gtrxl': lambda: _policy('impala', _leaf(4), Discrete(4), **_GTRXL),
  'gaussian': lambda: _policy('ppo', _leaf(3), _BOX),
  'squashed': lambda: _policy(
    'sac', _leaf(3), _BOX, **{'agent.random_fraction': 0.0}
  ),
  'masked': lambda: _policy('ppo', Masked(_leaf(3), _MASK), Discrete(4)),
  'privileged': lambda: _policy(
    'ppo',
    {'state': _leaf(3), 'privileged_state': _leaf(5)},
    Discrete(4),
    **_GRU,
    **_NORMALIZED,
    **{'network.policy_inputs': 'state', 'network.shared_torso': False},
  ),
  'search': lambda: _policy('muzero', _leaf(3), Discrete(4)),
  'tree': lambda: _policy('ppo', {'x': _leaf(3), 'y': (_IMAGE,)}, Discrete(4)),
}
# What a program of somebody else does, beside the page's ten lines.
_ELSEWHERE = """
import sys
sys.modules['podrl'] = sys.modules['flax'] = None
import jax
import numpy as np
jax.config.update('jax_platforms', 'cpu')
for name in sys.argv[2:]:
  folder = f'{sys.argv[1]}/{name}'
  with open(f'{folder}/policy.stablehlo', 'rb') as file:
    program = jax.export.deserialize(bytearray(file.read()))
  data = np.load(f'{folder}.npz')
  structure, _ = jax.tree.unflatten(program.in_tree, program.in_avals)
  obs, carry, *_ = structure
  call = jax.jit(program.call)
  carry = [np.zeros((data['size'], *x.shape[1:]), x.dtype) for x in carry]
  for t, is_first in enumerate((True, False, False)):
    leaves = [data[f'obs{t}_{i}'] for i in range(len(jax.tree.leaves(obs)))]
    action, carry = call(
      jax.tree.unflatten(jax.tree.structure(obs), leaves),
      carry,
      np.full(data['size'], is_first),
    )
    difference = np.abs(np.asarray(action, float) - data[f'action{t}'])
    assert np.all(difference < 1e-6), (name, difference)
"""


def _observations(example, seed):
  rng = np.random.default_rng(seed)

  def draw(x):
    shape = (_SIZE, *x.shape[1:])
    if x.dtype == np.float32:
      return rng.normal(size=shape).astype(np.float32)
    return rng.integers(0, 256 if x.dtype == np.uint8 else 2, shape, x.dtype)

  return jax.tree.map(draw, example)


def _given(obs):
  """Returns what `Policy` takes for the observation of an exported one."""
  is_masked = isinstance(obs, dict) and 'action_mask' in obs
  return Masked(**obs) if is_masked else obs


def _write(directory, made, **options):
  for name, content in export.export(made, **options).items():
    (directory / name).write_bytes(content)


def test_exported_policies_act_alike_without_podrl(tmp_path):
  for name, make in _POLICIES.items():
    made = make()
    (tmp_path / name).mkdir()
    _write(tmp_path / name, made)
    data, carry, actions = {'size': _SIZE}, None, []
    for t in range(3):
      obs = _observations(export.example(made), t)
      data |= {f'obs{t}_{i}': x for i, x in enumerate(jax.tree.leaves(obs))}
      data[f'action{t}'], carry = made(_given(obs), carry)
      actions.append(data[f'action{t}'])
    assert len(np.unique(actions)) > 1, name
    np.savez(tmp_path / f'{name}.npz', **data)
  command = [sys.executable, '-c', _ELSEWHERE, str(tmp_path), *_POLICIES]
  subprocess.run(command, check=True, cwd=tmp_path)


_CONVERTED = ['mlp', 'conv', 'gru', 'gaussian', 'squashed', 'masked', 'tree']


@pytest.mark.parametrize('name', _CONVERTED)
def test_onnx_acts_alike(name, tmp_path):
  pytest.importorskip('jax2onnx')  # The extra `onnx` brings it.
  import onnxruntime

  made = _POLICIES[name]()
  _write(tmp_path, made, onnx=True)
  names = json.loads((tmp_path / 'policy.json').read_text())['onnx']
  session = onnxruntime.InferenceSession(tmp_path / 'policy.onnx')
  assert [x.name for x in session.get_inputs()] == names['inputs']
  assert {x.shape[0] for x in session.get_inputs()} == {'batch'}
  carry, new, actions = None, [], []
  for t in range(3):
    obs = _observations(export.example(made), t)
    if not t:
      new = [
        np.zeros((_SIZE, *x.shape[1:]), np.float32)
        for x in session.get_inputs()
        if x.name.startswith('carry_')
      ]
    leaves = *jax.tree.leaves((obs, new)), np.full(_SIZE, t == 0)
    action, *new = session.run(
      names['outputs'], dict(zip(names['inputs'], leaves, strict=True))
    )
    expected, carry = made(_given(obs), carry)
    np.testing.assert_allclose(action, expected, atol=1e-5)
    actions.append(action)
  assert len(np.unique(actions)) > 1
  assert len(new) == (name == 'gru')


def test_what_onnx_cannot_do_is_said(monkeypatch):
  with monkeypatch.context() as patch:
    patch.setitem(sys.modules, 'jax2onnx', None)
    with pytest.raises(ValueError, match=r"install 'podrl\[onnx\]'"):
      export.export(_POLICIES['mlp'](), onnx=True)
  pytest.importorskip('jax2onnx')
  with pytest.raises(ValueError, match='--onnx and --sample exclude'):
    export.export(_POLICIES['mlp'](), samples=True, onnx=True)
  with pytest.raises(ValueError, match='cannot be converted to ONNX: .*random'):
    export.export(_POLICIES['search'](), onnx=True)


@pytest.mark.parametrize(
  'name', ['mlp', 'gru', 'gtrxl', 'masked', 'privileged']
)
def test_a_loaded_export_is_called_like_a_policy(name, tmp_path):
  made = _POLICIES[name]()
  _write(tmp_path, made, samples=True)
  loaded = podrl.load(tmp_path)
  assert repr(loaded).startswith('ExportedPolicy(x, ')
  with pytest.raises(ValueError, match='is an exported policy, not a run'):
    workdir.read_config(str(tmp_path))
  carry = loaded_carry = None
  actions = set()
  for t in range(4):
    obs = _given(_observations(export.example(made), t))
    key, is_first = jax.random.key(t), np.array([t == 0, True, t == 0])
    action, carry = made(obs, carry, is_first=is_first, rng_key=key)
    found, loaded_carry = loaded(
      obs, loaded_carry, is_first=is_first, rng_key=key
    )
    np.testing.assert_array_equal(found, action)
    actions |= set(action.tolist())
  assert len(actions) > 1
  with pytest.raises(ValueError, match='pass rng_key'):
    loaded(obs)


def test_only_what_actions_need_is_carried(tmp_path):
  made = _POLICIES['mlp']()
  # The agent carries the return of each environment, to scale rewards.
  assert jax.tree.leaves(made.initial_carry(1))
  _write(tmp_path, made)
  loaded = podrl.load(tmp_path)
  assert loaded.description['inputs']['carry'] == []
  assert loaded.description['inputs']['obs'] == {
    'shape': ['batch', 3],
    'dtype': 'float32',
  }
  parameters = load_file(tmp_path / 'parameters.safetensors')
  params = flatten_dict(made.variables.params, sep='/')
  assert params.keys() == {
    name.removeprefix('params/') for name in parameters if 'params/' in name
  }
  for name, value in params.items():
    np.testing.assert_array_equal(parameters[f'params/{name}'], value)
  with pytest.raises(ValueError, match='--sample'):
    loaded(np.zeros((2, 3)), rng_key=jax.random.key(0))
  for wrong in (np.zeros(3), np.zeros((2, 4)), {'x': np.zeros((2, 3))}):
    with pytest.raises(ValueError, match='do not have the form'):
      loaded(wrong)
  with pytest.raises(ValueError, match='one checkpoint'):
    podrl.load(tmp_path, which='best')


def test_what_only_the_critic_sees_is_no_input(tmp_path):
  made = _POLICIES['privileged']()
  _write(tmp_path, made)
  loaded = podrl.load(tmp_path)
  assert [*loaded.description['inputs']['obs']] == ['state']
  # The critic has a GRU of its own, whose carry is as wide.
  assert [x['shape'] for x in loaded.description['inputs']['carry']] == [
    ['batch', 8]
  ]
  state, others = np.eye(3, dtype=np.float32), np.ones((3, 5), np.float32)
  expected, _ = made({'state': state})
  for obs in ({'state': state}, {'state': state, 'privileged_state': others}):
    np.testing.assert_array_equal(loaded(obs)[0], expected)
    np.testing.assert_array_equal(made(obs)[0], expected)
  with pytest.raises(ValueError, match=r"\{'state': \(3, 3\)\}"):
    made({'privileged_state': others})


def test_categories_go_in_and_out_as_the_library_has_them(tmp_path):
  config = helpers.fields_of('sebulba_cartpole') | {'env.name': 'FrozenLake-v1'}
  spec = build.make_spec(config)
  agent = build.make_agent(config, spec)
  variables = agent.init(jax.random.key(0))
  made = policy.Policy(config, spec, agent, variables, 1)
  _write(tmp_path, made)
  loaded = podrl.load(tmp_path)
  obs = np.arange(16)
  np.testing.assert_array_equal(loaded(obs)[0], made(obs)[0])


@pytest.mark.parametrize(
  'damage,message',
  [
    ('call', 'only programs that call nothing'),
    ('bytes', 'is not an exported policy'),
    ('missing', r'is not an exported policy: .*policy\.stablehlo'),
    ('json', 'is not an exported policy'),
  ],
)
def test_a_folder_that_podrl_did_not_write_is_refused(
  damage, message, tmp_path
):
  _write(tmp_path, _POLICIES['mlp']())
  program = tmp_path / 'policy.stablehlo'
  if damage == 'call':
    other = jax.export.export(jax.jit(jnp.linalg.cholesky))(jnp.eye(3))
    program.write_bytes(other.serialize())
  elif damage == 'bytes':
    program.write_bytes(b'\x00' * 99)
  elif damage == 'missing':
    program.unlink()
  else:
    (tmp_path / 'policy.json').write_text('[]')
  with pytest.raises(ValueError, match=message):
    podrl.load(tmp_path)


def test_the_command_writes_beside_the_run(tmp_path, capsys):
  assert helpers.run(tmp_path / 'run') == 0
  capsys.readouterr()
  assert command.run(['export', str(tmp_path / 'run')]) == 0
  out = tmp_path / 'run' / 'exported'
  assert capsys.readouterr().out == f'written: {out}\n'
  obs = np.zeros((2, 10, 5), bool)
  action = podrl.load(tmp_path / 'run')(obs)[0]
  np.testing.assert_array_equal(podrl.load(out)(obs)[0], action)
  assert json.loads((out / 'policy.json').read_text())['agent'] == 'ppo'
  assert command.run(['export', str(tmp_path)]) == 2
