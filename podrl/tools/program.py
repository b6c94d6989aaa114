"""What the compiled programs of an update do: FLOPs, bytes, all-reduces.

XLA counts a loop's body once, however often it runs. So each body is compiled
by itself, a step of acting and a step of the optimiser, and multiplied. Loops
within those (a recurrent core's, an environment's) still count once.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podrl.drivers import spmd
from podrl.drivers.anakin import make_anakin, make_unroll
from podrl.run import build
from podrl.run.config import is_sebulba
from podrl.types import Agent, EnvSpec, TimeStep, Trajectory, Tree

_BYTES = {
  'pred': 1,
  's8': 1,
  'u8': 1,
  'bf16': 2,
  'f16': 2,
  's32': 4,
  'u32': 4,
  'f32': 4,
  's64': 8,
  'u64': 8,
  'f64': 8,
}
_NO_OPERATION = (
  'parameter',
  'constant',
  'tuple',
  'get-tuple-element',
  'bitcast',
)


class Work(NamedTuple):
  """What one core does in an update, or in a part of it.

  Attributes:
    flops: floating-point operations.
    num_bytes: read and written, as XLA counts them.
    operations: instructions that run one after another.
    all_reduce_bytes: of the largest all-reduce.
    num_all_reduces: optimiser steps, of which each has one.
  """

  flops: float
  num_bytes: float
  operations: int
  all_reduce_bytes: int = 0
  num_all_reduces: int = 0


def all_reduces(text: str) -> list[int]:
  """Bytes of each all-reduce in the text of a compiled program."""
  found = []
  for line in text.splitlines():
    if match := re.search(r'= (.*?) all-reduce(-start)?\(', line):
      found.append(
        sum(
          _BYTES[dtype] * int(np.prod([int(x) for x in dims.split(',') if x]))
          for dtype, dims in re.findall(r'(\w+)\[([\d,]*)\]', match[1])
        )
      )
  return found


def num_operations(text: str) -> int:
  """Instructions of a compiled program's entry that do something."""
  entry = text[text.index('ENTRY') :].partition('\n}')[0]
  kinds = re.findall(r'^\s+(?:ROOT )?%?\S+ = .*?([\w-]+)\(', entry, re.M)
  return sum(kind not in _NO_OPERATION for kind in kinds)


def _read(compiled: Any, times: float) -> Work:
  """The work of a program that runs so many times."""
  cost, text = compiled.cost_analysis(), compiled.as_text()
  return Work(
    times * cost['flops'],
    times * cost['bytes accessed'],
    round(times * num_operations(text)),
    max(all_reduces(text), default=0),
  )


def _timestep(spec: EnvSpec, *shape: int) -> TimeStep:
  """The shapes of time steps with these leading axes."""

  def of(dtype: Any, *tail: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*shape, *tail), dtype)

  return TimeStep(
    jax.tree.map(lambda x: of(x.dtype, *x.shape), spec.obs),
    of(jnp.float32),
    of(jnp.float32),
    of(jnp.bool_),
  )


def _trajectory(
  agent: Agent, spec: EnvSpec, params: Tree, length: int, num_envs: int
) -> Trajectory:
  """The shapes of an unroll."""
  carry = jax.eval_shape(lambda: agent.initial_carry(num_envs))
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
  action, extras, _ = jax.eval_shape(
    agent.act, params, keys, _timestep(spec, num_envs), carry
  )

  def lead(tree: Tree, size: int) -> Tree:
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), tree
    )

  return Trajectory(
    _timestep(spec, length + 1, num_envs),
    lead(action, length),
    lead(extras, length),
    lead(carry, 1),
  )


def read_work(config: Any) -> tuple[Work, Work]:
  """The work of an update on one core of several: acting, and learning.

  Args:
    config: whose environments are all one core's.

  Raises:
    ValueError: if the environment is unknown.
  """
  sebulba = is_sebulba(config)
  env = None if sebulba else build.make_env(config)
  spec = build.make_host_spec(config) if sebulba else env.spec
  agent = build.make_agent(config, spec)
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = jax.eval_shape(agent.init, key)
  length, num_envs = config.unroll_length, config.env.num_envs

  if sebulba:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
    act = jax.jit(agent.act).lower(
      params,
      keys,
      _timestep(spec, num_envs),
      jax.eval_shape(lambda: agent.initial_carry(num_envs)),
    )
  else:
    driver = make_anakin(
      env,
      agent,
      build.learner_for(config, agent, 1),
      spmd.make_mesh(jax.devices()[:1]),
      num_envs=num_envs,
      unroll_length=1,
      max_updates=1,
    )
    actors = jax.eval_shape(lambda: driver.init(jax.random.key(0))).actors
    act = jax.jit(make_unroll(env, agent, 1)).lower(params, actors, 0)

  # One minibatch of each of two cores, and what is more or less than it.
  num_steps = config.num_epochs * config.num_minibatches
  envs = max(1, num_envs // config.num_minibatches)
  share = num_envs / (config.num_minibatches * envs)
  step = config.copy_and_resolve_references()
  step.num_epochs = step.num_minibatches = 1
  learner = build.learner_for(step, agent, 1)
  state = jax.eval_shape(lambda key: learner.init(key, None), key)
  update = spmd.map_update(learner, spmd.make_mesh(jax.devices()[:2])).lower(
    state.params,
    state._replace(params=()),
    (_trajectory(agent, spec, params, length, 2 * envs),),
    key,
  )
  learn = _read(update.compile(), num_steps * share)
  return _read(act.compile(), length), learn._replace(num_all_reduces=num_steps)
