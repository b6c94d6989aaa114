"""The suites: a table of environment libraries, each in a file of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from podrl.envs import envpool, gymnasium, gymnax
from podrl.types import DeviceEnv, EnvSpec, HostEnv


class Suite(NamedTuple):
  """What the rest of podrl knows of an environment library.

  The functions import the library when they are called, and raise a ValueError
  for a user's mistake.

  Attributes:
    architecture: 'anakin' or 'sebulba'.
    make: `(name, **options) -> DeviceEnv` for Anakin;
      `(name, num_envs, seed, *, num_threads, render=False, **options) ->
      HostEnv` for Sebulba. Environment i has the seed `seed` + i. `render`
      says whether `HostEnv.render` will be called.
    make_spec: `(name, **options) -> EnvSpec`.
    names: `() -> list[str]`, the environments that `make` accepts.
    package: the distribution whose version a run records.
    training_options: options that evaluation leaves out, because they make
      scores incomparable.
    has_env_threads: whether several threads can step the environments of one
      actor; otherwise `make` ignores `num_threads`.
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
  """The row of an adapter that is called like its library's distribution."""
  package = module.__name__.rpartition('.')[2]
  makers = module.make, module.make_spec, module.names
  return Suite(architecture, *makers, package, *fields)


SUITES = {
  'gymnax': _suite(gymnax, 'anakin'),
  'envpool': _suite(envpool, 'sebulba', _INCOMPARABLE, True),
  'gymnasium': _suite(gymnasium, 'sebulba', _INCOMPARABLE),
}
