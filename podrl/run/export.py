"""Policies in files that need neither podrl nor the network's code.

The folder of an exported policy contains three files:

- `policy.stablehlo`: the program, as `jax.export` serialises it, with its
  parameters. It takes observations as the environment's library gives them, and
  returns actions that the library accepts, for any number of environments.
- `policy.json`: describes the inputs and outputs of the program.
- `parameters.safetensors`: the network's parameters by name.

If asked for, `policy.onnx` is the same program for runtimes of ONNX.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import re
from typing import Any

import chex
import jax
from jax import export as jax_export
from jax.extend.core import Literal
import jax.numpy as jnp
from jax.random import wrap_key_data
import numpy as np
import safetensors.flax as safetensors

from podrl import kernels
from podrl.messages import one_line
from podrl.networks.torsos import policy_inputs
from podrl.records import workdir
from podrl.run import build
from podrl.run.policy import Policy
from podrl.types import Array, Masked, Tree

PROGRAM, DESCRIPTION = 'policy.stablehlo', 'policy.json'
PARAMETERS, MODEL = 'parameters.safetensors', 'policy.onnx'
_PLATFORMS = 'cpu', 'cuda', 'tpu'
_ONNX_TOLERANCE = 1e-5
# What a program may call beside the operations of StableHLO. Any other name in
# a file of somebody else could be a way to run code on this machine.
_CALLS = frozenset({'shape_assertion'})


@dataclasses.dataclass(frozen=True, repr=False)
class ExportedPolicy:
  """A policy that `podrl export` wrote; it is called like a `Policy`."""

  description: Mapping[str, Any]  # The content of `policy.json`.
  program: jax_export.Exported

  def __repr__(self) -> str:
    name, agent = self.description['environment'], self.description['agent']
    return f'ExportedPolicy({name}, {agent})'

  def initial_carry(self, batch_size: int) -> Tree:
    """Returns the carry for the first step of `batch_size` episodes."""
    leaves = self.description['inputs']['carry']
    return [np.zeros((batch_size, *x['shape'][1:]), x['dtype']) for x in leaves]

  def __call__(
    self,
    obs: Tree,
    carry: Tree = None,
    *,
    is_first: Array | None = None,
    rng_key: chex.PRNGKey | None = None,
  ) -> tuple[Array, Tree]:
    """Chooses actions; see `Policy.__call__`.

    Raises:
      ValueError: if an observation has a wrong shape, or if there is a key and
        the program does not sample, or the reverse.
    """
    samples = 'rng_key' in self.description['inputs']
    if samples != (rng_key is not None):
      raise ValueError(
        'this program samples actions; pass rng_key'
        if samples
        else 'this program has no random numbers; export it with --sample'
      )
    wanted = self.description['inputs']['obs']
    try:
      obs = _as_wanted(obs, wanted)
    except (TypeError, KeyError, IndexError, ValueError) as error:
      raise ValueError(
        f'observations do not have the form {json.dumps(wanted)}'
      ) from error
    batch_size = len(jax.tree.leaves(obs)[0])
    if is_first is None:
      is_first = np.full(batch_size, carry is None)
    if carry is None:
      carry = self.initial_carry(batch_size)
    keys = [] if rng_key is None else [jax.random.key_data(rng_key)]
    action, carry = self._compiled(obs, carry, np.asarray(is_first), *keys)
    return np.array(action), carry

  @functools.cached_property
  def _compiled(self):
    return jax.jit(self.program.call)


def _as_wanted(obs: Tree, wanted: Tree) -> Tree:
  """Gives observations the structure and the dtypes of a description."""
  if isinstance(obs, Masked):
    obs = obs._asdict()
  if isinstance(wanted, dict) and isinstance(wanted.get('dtype'), str):
    x = np.asarray(obs, wanted['dtype'])
    if x.shape[1:] != tuple(wanted['shape'][1:]) or not x.ndim:
      raise ValueError('a wrong shape')
    return x
  if isinstance(wanted, list):
    return tuple(map(_as_wanted, obs, wanted))
  return {name: _as_wanted(obs[name], x) for name, x in wanted.items()}


def _is_anakin(policy: Policy) -> bool:
  return build.architecture(policy.config) == 'anakin'


def example(policy: Policy) -> Tree:
  """Returns observations `[1, ...]` as the environment's library gives them.

  A dictionary has only the leaves that the policy sees.

  Raises:
    ValueError: if podrl changes them before a program can see them.
  """
  spec, names = policy.spec, policy_inputs(policy.config)

  def seen(obs: Tree) -> Tree:
    return {name: obs[name] for name in names} if names else obs

  if _is_anakin(policy):
    zeros = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), spec.obs)
    return zeros._asdict() if isinstance(zeros, Masked) else seen(zeros)
  env = build.make_host_env(policy.config, 1, 0, 1, evaluation=True)
  with contextlib.closing(env):
    zeros = seen(jax.tree.map(np.zeros_like, env.reset().obs))
  if any(np.any(x) for x in jax.tree.leaves(spec.cut(zeros))):
    raise ValueError(
      'the observations have 64 bits and are far from 0, so podrl moves them '
      'before the program sees them; such a policy cannot be exported'
    )
  return zeros


def _row_function(policy: Policy, structure: Any, greedy: bool) -> Callable:
  """Makes the policy's function of one environment, without a batch axis.

  A program for any batch size maps it, so that an agent's own code never sees a
  size that is not a number. Where an episode starts, the carry is the initial
  one.
  """
  is_masked = isinstance(policy.spec.obs, Masked) and _is_anakin(policy)

  def act(obs, carry, is_first, index, rng_key):
    carry = jax.tree.unflatten(structure, carry)
    if is_masked:
      obs = Masked(**obs)
    obs, carry, is_first, index, rng_key = jax.tree.map(
      lambda x: x[None], (obs, carry, is_first, index, rng_key)
    )
    first = policy.agent.initial_carry(index)
    carry = jax.tree.map(
      lambda x, y: jnp.where(is_first[0], x, y), first, carry
    )
    results = policy.act(
      policy.variables, obs, carry, is_first, rng_key, greedy
    )
    action, carry = jax.tree.map(lambda x: x[0], results)
    return action, jax.tree.leaves(carry)

  return act


def _inputs_of(jaxpr: Any, outputs: Sequence[Any]) -> list[bool]:
  """Returns which inputs of a program may change some of its outputs."""
  known = {x for x in outputs if not isinstance(x, Literal)}
  for equation in reversed(jaxpr.eqns):
    if known.intersection(equation.outvars):
      known.update(x for x in equation.invars if not isinstance(x, Literal))
  return [x in known for x in jaxpr.invars]


def _used_carry(act: Callable, obs: Tree, carry: list[Any]) -> list[bool]:
  """Returns which leaves of a carry may change the actions, now or later.

  Others are for learning, for example a return that normalises rewards.
  """
  rest = np.bool(True), np.int32(0), jax.random.key(0)
  jaxpr = jax.make_jaxpr(act)(obs, carry, *rest).jaxpr
  start = len(jax.tree.leaves(obs))
  action, *new = jaxpr.outvars
  used = [False] * len(carry)
  while True:
    outputs = [action, *(x for x, is_used in zip(new, used) if is_used)]
    found = _inputs_of(jaxpr, outputs)[start : start + len(carry)]
    if found == used:
      return used
    used = found


def export(
  policy: Policy, samples: bool = False, onnx: bool = False
) -> dict[str, bytes]:
  """Exports a policy; returns the content of each file by its name.

  Args:
    samples: whether the program has a key as an additional input, and draws
      actions from the policy. Otherwise, it takes the greedy ones.
    onnx: whether there is a `policy.onnx`, too.

  Raises:
    ValueError: if the observations or the program cannot be exported, or if
      ONNX is asked for and its package is missing.
  """
  if onnx and samples:
    raise ValueError('--onnx and --sample exclude each other')
  if onnx:
    _import_onnx()
  obs = jax.tree.map(lambda x: x[0], example(policy))
  carry = jax.eval_shape(lambda: policy.initial_carry(1))
  structure = jax.tree.structure(carry)
  leaves = [np.zeros(x.shape[1:], x.dtype) for x in jax.tree.leaves(carry)]
  act = _row_function(policy, structure, greedy=not samples)
  used = _used_carry(act, obs, leaves)

  def program(obs, carry, is_first, rng_key=None):
    index = jnp.arange(is_first.shape[0])
    key = jax.random.key(0) if rng_key is None else wrap_key_data(rng_key)
    keys = jax.random.split(key, index.shape)
    given = iter(carry)
    whole = [
      next(given) if is_used else jnp.zeros((*index.shape, *x.shape), x.dtype)
      for is_used, x in zip(used, leaves)
    ]
    action, new = jax.vmap(act)(obs, whole, is_first, index, keys)
    return action, [x for x, is_used in zip(new, used) if is_used]

  (batch,) = jax_export.symbolic_shape('batch')
  inputs = {
    'obs': obs,
    'carry': [x for x, is_used in zip(leaves, used) if is_used],
    'is_first': np.bool(True),
  }
  inputs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((batch, *np.shape(x)), x.dtype), inputs
  )
  if samples:
    inputs['rng_key'] = jax.ShapeDtypeStruct((2,), jnp.uint32)
  exporter = jax_export.export(jax.jit(program), platforms=_PLATFORMS)
  order = 'obs', 'carry', 'is_first', 'rng_key'
  arguments = [inputs[name] for name in order if name in inputs]
  try:
    exported = exporter(*arguments)
    content = exported.serialize()
  except (TypeError, ValueError, NotImplementedError) as error:
    raise ValueError(
      f'this policy cannot be exported: {one_line(error)}'
    ) from error
  _check_calls(exported)
  action, new = jax.tree.unflatten(exported.out_tree, exported.out_avals)
  description = {
    'podrl': importlib.metadata.version('podrl'),
    'environment': policy.config['env.name'],
    'agent': policy.config['agent.name'],
    'num_updates': policy.num_updates,
    'platforms': _PLATFORMS,
    'inputs': jax.tree.map(_describe, inputs),
    'outputs': {'action': _describe(action), 'carry': [*map(_describe, new)]},
  }
  variables = {
    'params': policy.variables.params,
    'statistics': policy.variables.statistics,
  }
  paths, _ = jax.tree.flatten_with_path(variables)
  names = {
    jax.tree_util.keystr(path, simple=True, separator='/'): jnp.asarray(x)
    for path, x in paths
  }
  files = {PARAMETERS: safetensors.save(names), PROGRAM: bytes(content)}
  if onnx:
    files[MODEL], description['onnx'] = _to_onnx(program, arguments)
  files[DESCRIPTION] = (workdir.to_json(description, 2) + '\n').encode()
  return files


def _import_onnx() -> tuple[Any, Any]:
  """Returns jax2onnx and onnxruntime."""
  try:
    import jax2onnx
    import onnxruntime
  except ModuleNotFoundError as error:
    raise ValueError(
      f'ONNX needs the package {error.name}; install it with pip install '
      "'podrl[onnx]'"
    ) from error
  return jax2onnx, onnxruntime


def _to_onnx(
  program: Callable, arguments: Sequence[Tree]
) -> tuple[bytes, dict[str, list[str]]]:
  """Converts a program to ONNX; returns it, and the names of its arrays.

  `arguments` are the observations, the carry and `is_first`, as shapes and
  dtypes.
  """
  from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
  from jax.interpreters.partial_eval import dce_jaxpr

  jax2onnx, onnxruntime = _import_onnx()
  specs, structure = jax.tree.flatten(tuple(arguments))
  inputs = [
    '_'.join([name, *(jax.tree_util.keystr((x,), simple=True) for x in path)])
    for name, tree in zip(('obs', 'carry', 'is_first'), arguments)
    for path, _ in jax.tree.flatten_with_path(tree)[0]
  ]

  def call(*leaves: Array) -> list[Array]:
    return jax.tree.leaves(program(*jax.tree.unflatten(structure, leaves)))

  # The converter replaces layers of flax, and its layers cannot be mapped. So
  # it gets a program that is traced already, without its unused operations.
  with kernels.only_plain():
    closed = jax.make_jaxpr(call)(*specs)
  jaxpr, _ = dce_jaxpr(
    closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True
  )
  function = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
  num_carries = len(jaxpr.outvars) - 1
  outputs = ['action', *(f'new_carry_{i}' for i in range(num_carries))]
  for name in 'jax2onnx', 'onnx_ir':  # Their warnings do not concern podrl.
    logging.getLogger(name).setLevel(logging.CRITICAL)
  options = onnxruntime.SessionOptions()
  options.log_severity_level = 3  # Errors only.
  drawn = [_draw((2, *x.shape[1:]), x.dtype) for x in specs]
  try:
    model = jax2onnx.to_onnx(
      lambda *leaves: tuple(function(*leaves)),
      specs,
      model_name='policy',
      input_names=inputs,
      output_names=outputs,
    ).SerializeToString()
    session = onnxruntime.InferenceSession(model, options)
    found = session.run(outputs, dict(zip(inputs, drawn)))
  except Exception as error:  # The converter raises many kinds.
    raise ValueError(
      f'this policy cannot be converted to ONNX: {one_line(error)}'
    ) from error
  for name, x, y in zip(outputs, found, jax.jit(call)(*drawn)):
    difference = np.max(np.abs(np.asarray(x, float) - np.asarray(y, float)))
    if not difference < _ONNX_TOLERANCE:
      raise ValueError(
        f'this policy cannot be converted to ONNX: {name} differs by '
        f'{difference:.2g}'
      )
  return model, {'inputs': inputs, 'outputs': outputs}


def _draw(shape: Sequence[int], dtype: Any) -> np.ndarray:
  """Draws an input that tests a program."""
  rng = np.random.default_rng(0)
  if np.issubdtype(dtype, np.floating):
    return rng.normal(size=shape).astype(dtype)
  high = 256 if dtype == np.uint8 else 2
  return rng.integers(0, high, shape).astype(dtype)


def _describe(x: Any) -> dict[str, Any]:
  """Describes an array for `policy.json`."""
  shape = [size if isinstance(size, int) else str(size) for size in x.shape]
  return {'shape': shape, 'dtype': str(x.dtype)}


def load(path: str, which: str | int, seed: int | None) -> ExportedPolicy:
  """Loads an exported policy; runs no Python code of the folder.

  Raises:
    ValueError: if a file is missing, cannot be read, or calls other code; or
      if `which` or `seed` asks for something that the folder does not have.
  """
  if which != 'last' or seed is not None:
    raise ValueError(
      f'{path} is an exported policy, which has one checkpoint of one agent'
    )
  try:
    with open(os.path.join(path, DESCRIPTION), encoding='utf-8') as file:
      description = json.load(file)
    with open(os.path.join(path, PROGRAM), 'rb') as file:
      program = jax_export.deserialize(bytearray(file.read()))
    description['inputs']['obs'], description['environment']
    # The readers of these formats have no common class of errors.
  except Exception as error:
    raise ValueError(
      f'{path} is not an exported policy: {one_line(error)}'
    ) from error
  _check_calls(program)
  return ExportedPolicy(description, program)


def _check_calls(program: jax_export.Exported) -> None:
  """Raises a ValueError if a program calls code outside of it."""
  text = program.mlir_module()
  calls = set(re.findall(r'custom_call\s*@"?([^\s"(]+)', text))
  if unknown := sorted(calls - _CALLS):
    raise ValueError(
      f'the program calls {unknown[0]}; podrl exports and loads only programs '
      'that call nothing'
    )
