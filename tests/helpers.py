"""Runs small experiments for tests, and reads the files that they write."""

import importlib.util
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.agents import AGENTS
from podrl.envs import autoreset, spaces
from podrl.fields import short
from podrl.run import train
from podrl.run.config import completed, default_fields
from podrl.types import DeviceEnv, Discrete, Sample

ROOT = pathlib.Path(__file__).parents[1]
# The experiments that train an agent by its configuration.
EXPERIMENTS = [
  path
  for path in sorted((ROOT / 'experiments').glob('*.py'))
  if 'def get_config' in path.read_text()
]
# On two CPU devices, this makes 512 / (8 x 8) = 8 updates.
TINY = [
  '--config.total_env_steps=512',
  '--config.env.num_envs=8',
  '--config.unroll_length=8',
  '--config.network.hidden_sizes=8',
  '--config.eval.num_episodes=4',
  '--config.eval.max_episode_steps=20',
  '--config.log.every_updates=3',
  '--config.num_devices=2',
]
# With these settings, an agent carries all that it can from step to step.
MEMORY = [
  '--agent=impala',
  '--config.network.recurrent=gru',
  '--config.agent.normalize_observation=True',
  '--config.agent.normalize_reward=True',
]
# Two equal runs differ in these values of their records.
TIMINGS = {
  'steps_per_second',
  'frames_per_second',
  'updates_per_second',
  'predictions_per_second',
  'wall_seconds',
  'compile_seconds',
}


def slow(*values):
  """Makes a case of `parametrize` that only the slow tests include."""
  return pytest.param(*values, marks=pytest.mark.slow)


# Sections of the fields that agents read.
_OF_AGENTS = ('agent.', 'replay.', 'search.')


def network_fields(agent, /, **fields):
  """Returns the fields of an agent with a small MLP."""
  small = {'name': 'mlp', 'hidden_sizes': (8,), 'activation': 'relu'}
  small |= {'layer_norm': False, 'dtype': 'float32', **fields}
  own = default_fields(agent, 'Anakin')
  return own | {f'network.{k}': x for k, x in small.items()}


def make_agent(name, spec, network=(), **fields):
  """Makes an agent with a small MLP; its other fields have the defaults."""
  values = network_fields(name, **dict(network))
  names = {short(k): k for k in values if k.startswith(_OF_AGENTS)}
  fields = {'gamma': 0.9, **fields}
  own = {names[k]: x for k, x in fields.items()}
  return AGENTS[name].make(spec, values | own)


def prepare(agent, variables, trajectory, mean=lambda x: x, target_params=()):
  """Calls an agent's `prepare` for an unroll, on one device."""
  size = trajectory.env_index.shape[1]
  keys = jax.random.split(jax.random.key(0), size)
  sample = Sample(trajectory, (), np.ones(size, np.float32))
  return agent.prepare(variables, target_params, sample, keys, mean)


def counters(batch, num_steps=0):
  """Returns a trajectory's `env_index` and `num_steps`."""
  index = np.arange(batch, dtype=np.int32)[None]
  return index, np.full_like(index, num_steps)


def copies_of_memory(text, memory, num_devices=1):
  """Counts the copies of a device's storage in the HLO text of a program.

  Rewards and discounts are left out: loops and conditions may copy priorities,
  which have the same shape. They are a small part of a memory.
  """
  storage, priorities = memory
  names = {'float32': 'f32', 'int32': 's32', 'bool': 'pred', 'uint8': 'u8'}

  def kind(x):
    rows, columns, *rest = x.shape
    shape = ','.join(map(str, (rows, columns // num_devices, *rest)))
    return f'{names[str(x.dtype)]}[{shape}]'

  kinds = {kind(x) for x in jax.tree.leaves(storage.rows)} - {kind(priorities)}
  assert len(kinds) >= 3  # Observations, actions and `is_first`.
  assert all(kind in text for kind in kinds)
  copied = re.findall(r'= (\w+\[[\d,]+\])\S* copy\(', text)
  return sum(x in kinds for x in copied)


def get_config(name):
  """Returns the `get_config` of an experiment."""
  path = ROOT / 'experiments' / f'{name}.py'
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config


def fields_of(name, agent='ppo', variant=''):
  """Returns the flat configuration of an experiment."""
  return completed(get_config(name))(agent, variant)


def run(workdir, *arguments, name='anakin_catch', tiny=True):
  """Runs an experiment in this process; returns its exit code."""
  defaults = TINY if tiny else ()
  argv = [f'{name}.py', f'--workdir={workdir}', *defaults, *arguments]
  return train.run(get_config(name), argv)


def read_records(workdir):
  """Reads the records of a run."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def read(workdir):
  """Reads the records and the summary of a run."""
  summary = json.loads((workdir / 'summary.json').read_text())
  return read_records(workdir), summary


def two_inputs() -> DeviceEnv:
  """An environment in JAX whose right action is bit a XOR bit b.

  The image shows a as the channel of its one pixel, and the vector shows b. The
  right action gives 1 and the wrong one -1, so a policy that sees only one of
  the two gets 0, like a random one. An episode has 8 steps.
  """

  def observe(rng_key):
    bits, place = jax.random.split(rng_key)
    a, b = jax.random.bernoulli(bits, shape=(2,)).astype(jnp.int32)
    pixel = jnp.arange(36) == jax.random.randint(place, (), 0, 36)
    image = pixel.reshape(6, 6, 1) * jax.nn.one_hot(a, 2)[None, None]
    image = (255 * image).astype(jnp.uint8)
    vector = jnp.array([b, 1 - b], jnp.float32)
    return {'image': image, 'vector': vector}, a ^ b

  def reset(rng_key):
    obs, answer = observe(rng_key)
    return obs, (answer, jnp.int32(0))

  def step(rng_key, state, action):
    answer, num_steps = state
    obs, following = observe(rng_key)
    reward = jnp.where(action == answer, 1.0, -1.0)
    return obs, (following, num_steps + 1), reward, num_steps == 7, False

  return autoreset.make_device_env(
    spaces.device_spec(reset, Discrete(2), 8), reset, step
  )


def privileged() -> DeviceEnv:
  """An environment in JAX like a robot: only a simulator shows all.

  In each step, `state` shows a bit a, and `privileged_state` shows a bit b. The
  action a gives 1. Whatever the action, b gives 3 or -3, so only who sees b can
  predict the reward. An episode has 8 steps.
  """

  def observe(rng_key):
    a, b = jax.random.bernoulli(rng_key, shape=(2,)).astype(jnp.int32)
    obs = {
      'state': jax.nn.one_hot(a, 2),
      'privileged_state': jax.nn.one_hot(b, 2),
    }
    return obs, (a, b)

  def reset(rng_key):
    obs, bits = observe(rng_key)
    return obs, (bits, jnp.int32(0))

  def step(rng_key, state, action):
    (a, b), num_steps = state
    obs, bits = observe(rng_key)
    reward = jnp.where(action == a, 1.0, 0.0) + 6.0 * b - 3.0
    return obs, (bits, num_steps + 1), reward, num_steps == 7, False

  return autoreset.make_device_env(
    spaces.device_spec(reset, Discrete(2), 8), reset, step
  )
