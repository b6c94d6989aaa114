"""The user's own functions that make a `DeviceEnv`."""

from collections.abc import Callable
import inspect
from typing import Any

import jax

from podrl import modules
from podrl.envs.autoreset import strongly_typed
from podrl.messages import one_line, suggest
from podrl.types import DeviceEnv


def makes_device_env(value: Any) -> bool:
  """Returns whether a value is a Python function annotated `-> DeviceEnv`.

  Any other function could do anything with its arguments, for example
  `os.system`, so podrl does not call it.
  """
  if not inspect.isfunction(value):
    return False
  returns = value.__annotations__.get('return')
  if isinstance(returns, str):  # `from __future__ import annotations` is on.
    return returns.strip('\'"').rpartition('.')[2] == DeviceEnv.__name__
  return returns is DeviceEnv


def is_local(name: str) -> bool:
  """See `Suite.is_local`."""
  return name.startswith('__main__:')


def make(name: str, /, **options: Any) -> DeviceEnv:
  """Calls a function that makes a batch of environments in JAX.

  Args:
    name: 'MODULE:FUNCTION'. The function has the annotation `-> DeviceEnv`;
      see `autoreset.make_device_env`.
    **options: the arguments of the function.
  """
  module_name, colon, function = name.partition(':')
  if not (colon and function):
    raise ValueError(
      f'env.name={name} must be MODULE:FUNCTION, where FUNCTION returns a '
      'DeviceEnv'
    )
  module = modules.import_module('env.name', name, module_name)
  make_env = getattr(module, function, None)
  if not callable(make_env):
    known = [k for k, x in vars(module).items() if makes_device_env(x)]
    raise ValueError(
      f'env.name={name}: the module {module_name} has no function {function}; '
      f'{suggest(function, known)}'
    )
  if not makes_device_env(make_env):
    raise ValueError(
      f'env.name={name}: podrl calls {function} only if it is a Python '
      f'function that says what it returns; write def {function}(...) -> '
      'DeviceEnv'
    )
  try:
    env = make_env(**options)
  except Exception as error:  # The user's code can raise anything.
    raise ValueError(
      f'env.name={name}: {function} failed: {one_line(error, with_kind=True)}'
    ) from error
  if not isinstance(env, DeviceEnv):
    raise ValueError(
      f'env.name={name}: {function} must return a DeviceEnv, not a '
      f'{type(env).__name__}'
    )

  def checked(function: Callable, method: str) -> Callable:
    def call(*arguments):
      state, timestep = strongly_typed(function(*arguments))
      batch = timestep.is_first.shape
      found = jax.tree.map(lambda x: x.shape, timestep.obs)
      wanted = jax.tree.map(lambda x: (*batch, *x.shape), env.spec.obs)
      if found != wanted:
        raise ValueError(
          f'env.name={name}: {method} returns observations of shape {found} '
          f'for a batch of {batch[0]}; the spec says {wanted}'
        )
      return state, timestep

    return call

  # It may implement `DeviceEnv` itself.
  env = env._replace(
    reset=checked(env.reset, 'reset'), step=checked(env.step, 'step')
  )
  try:  # Before anything compiles.
    jax.eval_shape(lambda: env.reset(jax.random.split(jax.random.key(0), 1)))
  except Exception as error:  # The user's code can raise anything.
    text = str(error)
    if not text.startswith(f'env.name={name}: '):
      text = f'env.name={name}: reset failed: '
      text += one_line(error, with_kind=True)
    raise ValueError(text) from error
  return env
