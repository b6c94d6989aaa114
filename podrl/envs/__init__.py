"""The suites: a table of environment libraries, with one file for each."""

from collections.abc import Callable, Mapping
import functools
import importlib.util
import itertools
import types
from typing import Any, NamedTuple

from podrl.envs import (
  brax,
  craftax,
  envpool,
  functions,
  gymnasium,
  gymnax,
  jumanji,
  navix,
  pgx,
  playground,
  spaces,
  xminigrid,
)
from podrl.envs.games import Game
from podrl.messages import similar, suggest
from podrl.types import DeviceEnv, EnvSpec


class Suite(NamedTuple):
  """What the rest of podrl knows about an environment library.

  The functions import the library when they are called. They raise a ValueError
  for a user's mistake.

  Attributes:
    architecture: 'anakin' or 'sebulba'.
    make: `(name, **options) -> DeviceEnv` for Anakin;
      `(name, num_envs, seed, *, num_threads, render=False, **options) ->
      HostEnv` for Sebulba. `seed` has a seed below 2**31 for each environment;
      if it is a number, environment i has the seed `seed` + i. `render` says
      whether `HostEnv.render` will be called.
    make_spec: `(name, **options) -> EnvSpec`; raises the errors of `make`.
    names: `() -> list[str]`, the names that `make` accepts; imports no library
      that is written in JAX, and returns no names if `is_installed` is false.
    package: the distribution of the library; a run records its version.
    unusable: maps each environment that `names` leaves out to the reason.
    is_installed: `() -> bool`, whether the package is installed. If not, `pip
      install 'podrl[SUITE]'` installs it.
    training_options: options that evaluation does not use, because they change
      the return of an episode.
    has_env_threads: whether several threads can step the environments of one
      actor; if not, `make` ignores `num_threads`.
    needs_memory: `(name) -> bool`, whether only a policy with a memory can
      solve the environment.
    has_large_rewards: `(name) -> bool`, whether rewards are far above 1, so
      that agents learn better from normalised ones.
    policy_options: options that say who plays against the agent. If a value
      names a run, `make` gets its policy instead, as a function `(rng_key, obs)
      -> action` of one observation.
    small_options: `(name) -> options` that make large images small enough for
      a machine without an accelerator.
    steps_per_second: `(name) -> float`, steps of the real task in a second; 0
      if the library does not say it.
    game_for_two: `(name) -> Game | None`, the game in which `podrl play` lets a
      person play against a policy; None if it is no game for two.
    is_local: `(name) -> bool`, whether only the running program has the
      environment, so that no command of podrl can make it.
  """

  architecture: str
  make: Callable[..., Any]
  make_spec: Callable[..., EnvSpec]
  names: Callable[[], list[str]]
  package: str
  unusable: Mapping[str, str] = types.MappingProxyType({})
  is_installed: Callable[[], bool] = lambda: True
  training_options: tuple[str, ...] = ()
  has_env_threads: bool = False
  needs_memory: Callable[[str], bool] = lambda name: False
  has_large_rewards: Callable[[str], bool] = lambda name: False
  policy_options: tuple[str, ...] = ()
  small_options: Callable[[str], dict[str, Any]] = lambda name: {}
  steps_per_second: Callable[[str], float] = lambda name: 0.0
  game_for_two: Callable[[str], Game | None] = lambda name: None
  is_local: Callable[[str], bool] = lambda name: False


_INCOMPARABLE = ('episodic_life', 'reward_clip')


def _host_suite(module: Any, **fields: Any) -> Suite:
  """Builds the row of an adapter; its module has the name of the package."""
  package = module.__name__.rpartition('.')[2]
  makers = module.make, module.make_spec, module.names
  return Suite('sebulba', *makers, package, **fields)


def _device_suite(module: Any, package: str = '', **fields: Any) -> Suite:
  """Builds the row of an adapter for Anakin.

  Args:
    module: the adapter. `NAMES` has the file of the library that contains the
      names of its environments, and a pattern that finds them; see
      `spaces.names_in`. An adapter without `NAMES` has a function `names`.
      `UNUSABLE` says why podrl lacks some environments.
    package: what the adapter imports; the default is the name of the module.
  """
  suite = module.__name__.rpartition('.')[2]
  unusable = getattr(module, 'UNUSABLE', {})
  if not (names := getattr(module, 'names', None)):
    file, pattern = module.NAMES
    where = package or suite, file, pattern, unusable
    names = functools.partial(spaces.names_in, *where)

  def is_installed() -> bool:
    return importlib.util.find_spec(package or suite) is not None

  def make(name: str, /, **options: Any) -> DeviceEnv:
    if not is_installed():
      raise ValueError(
        f'env.suite={suite} is not installed; install it with: pip install '
        f"'podrl[{suite}]'"
      )
    if name in unusable:
      raise ValueError(
        f'env.name={name} {unusable[name]}; choose another environment'
      )
    if name not in names():
      raise ValueError(
        f'env.name={name} is not an environment of {suite}; '
        f'{suggest(name, names())}'
      )
    return module.make(name, **options)

  return Suite(
    'anakin',
    make,
    _spec_of(make),
    names,
    suite,
    unusable,
    is_installed,
    **fields,
  )


def _spec_of(make: Callable[..., DeviceEnv]) -> Callable[..., EnvSpec]:
  return lambda name, /, **options: make(name, **options).spec


# If several suites have an environment of one name, podrl uses the first.
SUITES = {
  'gymnax': _device_suite(gymnax, needs_memory=gymnax.needs_memory),
  'envpool': _host_suite(
    envpool,
    training_options=_INCOMPARABLE,
    has_env_threads=True,
    needs_memory=envpool.needs_memory,
    small_options=envpool.small_options,
    steps_per_second=envpool.steps_per_second,
  ),
  'gymnasium': _host_suite(
    gymnasium, training_options=_INCOMPARABLE, is_local=gymnasium.is_local
  ),
  'pgx': _device_suite(
    pgx,
    has_large_rewards=pgx.has_large_rewards,
    policy_options=('opponent', 'pool_fraction'),
    game_for_two=pgx.game_for_two,
  ),
  'navix': _device_suite(navix),
  'xminigrid': _device_suite(xminigrid, needs_memory=xminigrid.needs_memory),
  'jumanji': _device_suite(
    jumanji, has_large_rewards=jumanji.has_large_rewards
  ),
  'brax': _device_suite(brax),
  'craftax': _device_suite(craftax),
  'playground': _device_suite(playground, 'mujoco_playground'),
  'jax': Suite(
    'anakin',
    functions.make,
    _spec_of(functions.make),
    list,
    'jax',
    policy_options=('opponent', 'pool_fraction'),
    is_local=functions.is_local,
  ),
}

# A program may add more suites, which the commands of podrl do not have.
BUILT_IN = frozenset(SUITES)


class Task(NamedTuple):
  """An environment; if other suites have its name, `note` says so."""

  suite: str
  name: str
  note: str = ''


def similar_names(text: str) -> str:
  """Returns a list of similar names, each with its suite, or 'none'."""
  names = {suite: row.names() for suite, row in SUITES.items()}
  near = similar(text, itertools.chain(*names.values()))
  found = [f'{k}:{x}' for x in near for k in SUITES if x in names[k]]
  return ', '.join(found) or 'none'


def find_task(text: str) -> Task:
  """Finds the environment `[SUITE:]NAME` or, of gymnasium, `MODULE:NAME`.

  Without a prefix, a name that no suite has is a ValueError.
  """
  prefix, colon, name = text.partition(':')
  if colon:
    is_suite = prefix in SUITES
    return Task(prefix, name) if is_suite else Task('gymnasium', text)
  owners = [suite for suite, row in SUITES.items() if text in row.names()]
  # The error of `make` then says why podrl lacks the environment.
  owners = owners or [k for k, row in SUITES.items() if text in row.unusable]
  if not owners:
    raise ValueError(
      f'no suite has an environment {text}; similar names: '
      f'{similar_names(text)}; to list all names, run: podrl envs'
    )
  suite, *others = owners
  if not others:
    return Task(suite, text)
  *first, last = owners
  return Task(
    suite,
    text,
    f'{text} is in {", ".join(first)} and {last}; podrl uses {suite}; '
    f'write {others[0]}:{text} for {others[0]}',
  )
