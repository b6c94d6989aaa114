"""The user's own functions that make a `DeviceEnv`."""

from typing import Any

from podrl.envs import spaces
from podrl.messages import one_line, suggest
from podrl.types import DeviceEnv


def make(name: str, /, **options: Any) -> DeviceEnv:
  """Calls a function that makes a batch of environments in JAX.

  Args:
    name: 'MODULE:FUNCTION'. The function returns a `DeviceEnv`; see
      `joints.make_device_env`.
    **options: the arguments of the function.
  """
  module_name, colon, function = name.partition(':')
  if not (colon and function):
    raise ValueError(
      f'env.name={name} must be MODULE:FUNCTION, where FUNCTION returns a '
      'DeviceEnv'
    )
  module = spaces.import_module(name, module_name)
  if not callable(getattr(module, function, None)):
    known = [k for k, x in vars(module).items() if callable(x) and k[0] != '_']
    raise ValueError(
      f'env.name={name}: the module {module_name} has no function {function}; '
      f'{suggest(function, known)}'
    )
  try:
    env = getattr(module, function)(**options)
  except Exception as error:  # The user's code can raise anything.
    raise ValueError(
      f'env.name={name}: {function} failed: {one_line(error, with_kind=True)}'
    ) from error
  if not isinstance(env, DeviceEnv):
    raise ValueError(
      f'env.name={name}: {function} must return a DeviceEnv, not a '
      f'{type(env).__name__}'
    )
  return env
