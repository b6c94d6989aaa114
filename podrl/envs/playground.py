"""MuJoCo Playground's environments as a `DeviceEnv`."""

from typing import Any

from podrl.envs import brax, spaces
from podrl.types import Array, DeviceEnv

# Only MuJoCo Warp, which needs CUDA, or the library's wrappers read these.
_UNUSED = ('vision', 'naconmax', 'njmax', 'action_repeat')

# Only the tasks of the DeepMind Control Suite: for the others, the library
# clones a repository.
NAMES = '_src/dm_control_suite/__init__.py', r'(?m)^    "(\w+)": [a-z]'


def make(name: str, /, *, episode_length: int = 0, **options: Any) -> DeviceEnv:
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
  known = {k: x for k, x in config.items() if k not in _UNUSED}
  spaces.check_numbers(name, options, known)
  steps = {k: options.get(k, config[k]) for k in ('sim_dt', 'ctrl_dt')}
  if not 0 < steps['sim_dt'] <= steps['ctrl_dt']:
    raise ValueError(
      f'env.options.sim_dt={steps["sim_dt"]} must be above 0, and at most '
      f'env.options.ctrl_dt={steps["ctrl_dt"]}'
    )
  overrides = {**options, 'impl': 'jax'}  # The default needs CUDA.
  env = registry.load(name, config_overrides=overrides)
  length = episode_length or int(config.episode_length)

  def to_mujoco(state: Any) -> dict[str, Array]:
    names = ('qpos', 'qvel', 'mocap_pos', 'mocap_quat')
    return {name: getattr(state.data, name) for name in names}

  return brax.from_brax(env, env.mj_model, to_mujoco, length)
