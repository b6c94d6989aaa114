"""brax's environments as a `DeviceEnv`."""

from collections.abc import Callable
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from podrl.envs import autoreset, spaces
from podrl.messages import check_choice
from podrl.types import Array, Box, DeviceEnv

_PICTURE = 240, 320  # Height and width of a picture, in pixels.
NAMES = 'envs/__init__.py', r"(?m)^    '(\w+)': \w+\."
UNUSABLE = {
  'fast': 'is a dummy for measurements',
  'swimmer': 'does not run with present versions of JAX',
}
_BACKENDS = ('spring', 'generalized', 'positional', 'mjx')
# Agents do not solve these with 'spring': PPO reached 205 of 1,000 on the
# inverted pendulum with it, and 1,000 with 'mjx'.
_DEFAULTS = {'inverted_pendulum': 'mjx', 'inverted_double_pendulum': 'mjx'}


def default_backend(name: str) -> str:
  """Returns the physics that `make` uses unless a user names another."""
  return _DEFAULTS.get(name, 'spring')


def make(
  name: str, /, *, backend: str = '', episode_length: int = 1000, **options: Any
) -> DeviceEnv:
  """Makes a batch of brax's environments.

  Args:
    name: the registered name, for example 'ant'.
    backend: the physics: 'spring' is fast, and the default except for the
      pendulums; 'generalized' is exact; 'mjx' is MuJoCo's.
    episode_length: the number of steps after which an episode is truncated;
      brax's environments have no limit of their own.
    **options: must be empty.
  """
  from brax import envs

  spaces.check_options(name, options, ('backend', 'episode_length'))
  backend = backend or default_backend(name)
  check_choice('env.options.backend', backend, _BACKENDS)
  env = envs.get_environment(name, backend=backend)

  def to_mujoco(state: Any) -> dict[str, Array]:
    return {'qpos': state.pipeline_state.q, 'qvel': state.pipeline_state.qd}

  return from_brax(env, env.sys.mj_model, to_mujoco, episode_length)


def from_brax(
  env: Any,
  mj_model: Any,
  to_mujoco: Callable[[Any], dict[str, Array]],
  episode_length: int,
) -> DeviceEnv:
  """Makes a batch of environments that have the interface of brax's.

  Args:
    mj_model: MuJoCo's model, to draw.
    to_mujoco: `(state) -> fields` of `mujoco.MjData`.
    episode_length: the number of steps after which an episode is truncated.
  """
  import mujoco

  episode_length = spaces.check_whole('episode_length', episode_length)

  def reset(rng_key):
    state = env.reset(rng_key)
    return state.obs, (state, jnp.int32(0))

  def step(rng_key, env_state, action):
    del rng_key  # The state has a key of its own, if it needs one.
    state, num_steps = env_state[0], env_state[1] + 1
    new = env.step(state, action)
    ends = new.done > 0, num_steps >= episode_length
    return new.obs, (new, num_steps), new.reward, *ends

  @functools.cache
  def make_renderer() -> mujoco.Renderer:
    return mujoco.Renderer(mj_model, *_PICTURE)

  def render(env_state: Any) -> np.ndarray:
    data = mujoco.MjData(mj_model)
    for key, value in to_mujoco(env_state[0]).items():
      setattr(data, key, value)
    mujoco.mj_forward(mj_model, data)
    renderer = make_renderer()
    renderer.update_scene(data, 0 if mj_model.ncam else -1)
    return renderer.render()

  def info(env_state: Any) -> dict[str, Array]:
    metrics = env_state[0].metrics
    return {name: x for name, x in metrics.items() if jnp.size(x) == 1}

  high = np.ones(env.action_size, np.float32)
  action = Box(high.shape, -high, high)
  spec = spaces.device_spec(reset, action, episode_length)
  return autoreset.make_device_env(
    spec, reset, step, reset_chunk=16, render=render, info=info
  )
