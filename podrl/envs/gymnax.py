"""gymnax environments as a `DeviceEnv`."""

import ast
import importlib.util
import pathlib
import re
import sys
import types
from typing import Any

import jax
import numpy as np

from podrl.envs import autoreset, spaces
from podrl.types import Box, DeviceEnv, Discrete, Tree

# These environments return images of zeros and ones, in float32.
_BINARY_OBS = frozenset(
  'Asterix-MinAtar Breakout-MinAtar Freeway-MinAtar Seaquest-MinAtar '
  'SpaceInvaders-MinAtar Catch-bsuite DeepSea-bsuite Pong-misc'.split()
)
UNUSABLE = {'MNISTBandit-bsuite': 'downloads a data set'}
# Here, the best action depends on earlier observations and rewards.
_HIDDEN_STATE = frozenset(
  'MemoryChain-bsuite BernoulliBandit-misc GaussianBandit-misc '
  'MetaMaze-misc'.split()
)
# gymnax draws these itself, without any other package.
_DRAWN = ('FourRooms-misc', 'MetaMaze-misc', 'PointRobot-misc')


def _action_space(space: Any) -> Discrete | Box:
  if hasattr(space, 'n'):
    return Discrete(int(space.n))
  return spaces.box(space, space.low, space.high)


class _Deferred(types.ModuleType):
  """A placeholder for a module; the use of an attribute imports the module."""

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):  # The import statement looks for `__path__`.
      raise AttributeError(name)
    if sys.modules.get(self.__name__) is self:
      del sys.modules[self.__name__]
    return getattr(importlib.import_module(self.__name__), name)


def import_gymnax() -> Any:
  """Imports gymnax without its plotting libraries, which load slowly."""
  if 'gymnax' not in sys.modules:
    names = {'matplotlib.pyplot', 'seaborn'} - set(sys.modules)
    sys.modules.update({name: _Deferred(name) for name in names})
    try:
      importlib.import_module('gymnax')
    finally:
      for name in names:
        sys.modules.pop(name, None)
  return importlib.import_module('gymnax')  # Another thread may import it now.


def names() -> list[str]:
  """See `Suite.names`.

  It does not import gymnax, because this takes seconds and uses a device.
  """
  if 'gymnax' in sys.modules:
    known = sys.modules['gymnax'].registered_envs
  else:
    spec: Any = importlib.util.find_spec('gymnax')
    text = pathlib.Path(spec.origin).with_name('registration.py').read_text()
    found = re.search(r'_BUILTIN_ENV_IDS = (\[.*?\])', text, re.DOTALL)
    # Another package can replace the module by an older version.
    known = ast.literal_eval(found[1]) if found else []
  return sorted({*known} - UNUSABLE.keys())


def needs_memory(name: str) -> bool:
  """See `Suite.needs_memory`."""
  return name in _HIDDEN_STATE


def make(name: str, /, **options: Any) -> DeviceEnv:
  """Makes a batch of gymnax environments.

  Args:
    name: the registered name, for example 'CartPole-v1'.
    **options: fields of the environment's parameters, for example
      `max_steps_in_episode=100`.

  Returns:
    A `DeviceEnv`. Images of zeros and ones are bool, `Discrete` observations
    are bool one-hot vectors, and rewards are float32.
  """
  gymnax = import_gymnax()
  env, params = gymnax.make(name)
  params = spaces.replace_numbers(name, params, options)
  limit = params.max_steps_in_episode
  max_steps = spaces.check_whole('max_steps_in_episode', limit)
  space = env.observation_space(params)
  num_categories = getattr(space, 'n', None)

  def observe(obs: Tree) -> Tree:
    if num_categories is not None:
      return jax.nn.one_hot(obs, num_categories, dtype=bool)
    if name in _BINARY_OBS:
      return jax.tree.map(lambda x: x.astype(bool), obs)
    return obs

  def reset(rng_key):
    return env.reset_env(rng_key, params)

  def step(rng_key, env_state, action):
    obs, env_state, reward, terminated, _ = env.step_env(
      rng_key, env_state, action, params
    )
    truncated = env.is_truncated(env_state, params)
    return obs, env_state, reward, terminated, truncated

  def render(env_state: Tree) -> np.ndarray:
    from matplotlib import pyplot

    pyplot.switch_backend('Agg')
    figure, axes = env.render(jax.tree.map(np.asarray, env_state), params)
    figure.set_size_inches(4.8, 4.8)
    axes.set_position((0, 0, 1, 1))
    figure.canvas.draw()
    picture = np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()
    pyplot.close(figure)
    return picture

  actions = _action_space(env.action_space(params))
  spec = spaces.device_spec(reset, actions, max_steps, observe)
  if num_categories is None:
    scale = spaces.scale(spec.obs.dtype, space.low, space.high)
    spec = spec._replace(obs_scale=scale)
  return autoreset.make_device_env(
    spec, reset, step, observe, render=render if name in _DRAWN else None
  )
