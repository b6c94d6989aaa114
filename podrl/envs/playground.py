"""MuJoCo Playground's environments as a `DeviceEnv`."""

from typing import Any

from podrl.envs import brax, spaces
from podrl.types import Array, DeviceEnv


def names() -> list[str]:
  """See `Suite.names`; only the tasks of the DeepMind Control Suite.

  The library clones a repository for the others.
  """
  return spaces.names_in(
    'mujoco_playground',
    '_src/dm_control_suite/__init__.py',
    r'(?m)^    "(\w+)": [a-z]',
  )


def make(name: str, *, episode_length: int = 0, **options: Any) -> DeviceEnv:
  """Makes a batch of environments of MuJoCo Playground, with MJX in JAX.

  Args:
    name: the registered name, for example 'CartpoleBalance'.
    episode_length: the number of steps after which an episode is truncated; 0
      means the library's default.
    **options: fields of the environment's configuration, for example
      `sim_dt=0.005`.
  """
  from mujoco_playground import registry

  config = registry.get_default_config(name)
  known = {k: x for k, x in config.items() if isinstance(x, bool | int | float)}
  spaces.check_options(name, options, known)
  overrides = {**options, 'impl': 'jax'}  # The default needs CUDA.
  env = registry.load(name, config_overrides=overrides)
  length = episode_length or int(config.episode_length)

  def to_mujoco(state: Any) -> dict[str, Array]:
    names = ('qpos', 'qvel', 'mocap_pos', 'mocap_quat')
    return {name: getattr(state.data, name) for name in names}

  return brax.from_brax(env, env.mj_model, to_mujoco, length)
