"""The suites: a table of environment libraries. Each one has its own file."""

from collections.abc import Callable
from typing import Any, NamedTuple

from podrl.envs import envpool, gymnasium, gymnax
from podrl.types import DeviceEnv, EnvSpec, HostEnv


class Suite(NamedTuple):
  """What the rest of podrl knows about an environment library.

  The functions import the library when they are called. They raise a ValueError
  for a user's mistake.

  Attributes:
    architecture: 'anakin' or 'sebulba'.
    make: `(name, **options) -> DeviceEnv` for Anakin;
      `(name, num_envs, seed, *, num_threads, render=False, **options) ->
      HostEnv` for Sebulba. Environment i has the seed `seed` + i. `render`
      says whether `HostEnv.render` will be called.
    make_spec: `(name, **options) -> EnvSpec`.
    names: `() -> list[str]`, the environments that `make` accepts.
    package: the Python package of the library; a run records its version.
    training_options: options that evaluation does not use, because scores with
      them are not comparable.
    has_env_threads: whether several threads can step the environments of one
      actor; if not, `make` ignores `num_threads`.
  """

  architecture: str
  make: Callable[..., DeviceEnv | HostEnv]
  make_spec: Callable[..., EnvSpec]
  names: Callable[[], list[str]]
  package: str
  training_options: tuple[str, ...] = ()
  has_env_threads: bool = False


_INCOMPARABLE = ('episodic_life', 'reward_clip')


def _suite(module: Any, architecture: str, *fields: Any) -> Suite:
  """Builds the row of an adapter; the module is named like the package."""
  package = module.__name__.rpartition('.')[2]
  makers = module.make, module.make_spec, module.names
  return Suite(architecture, *makers, package, *fields)


SUITES = {
  'gymnax': _suite(gymnax, 'anakin'),
  'envpool': _suite(envpool, 'sebulba', _INCOMPARABLE, True),
  'gymnasium': _suite(gymnasium, 'sebulba', _INCOMPARABLE),
}
