"""Reset steps: how all adapters represent the end of an episode.

The step after the last step of an episode is the *reset step*: its action is
ignored, and it returns the first time step of the next episode, as in dm_env.
"""

from collections.abc import Callable, Sequence
import functools
import inspect
import signal
from typing import Any, NamedTuple, NoReturn

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podrl import kernels
from podrl.kernels.indexing import compare_indices
from podrl.messages import EnvironmentFailed, describe, one_line
from podrl.types import (
  Array,
  DeviceEnv,
  EnvSpec,
  HostEnv,
  TimeStep,
  Tree,
  XlaEnv,
)


class AutoresetState(NamedTuple):
  """The state of one environment."""

  # The state in the environment's library. `()` replaces each array without
  # elements: with JAX 0.11.2, several of them in the results of a program for
  # several devices crash the compiler, and orbax does not save them.
  env_state: Tree
  rng_key: chex.PRNGKey  # Fixed; each step folds `num_steps` into it.
  # Int32 `[]`, steps since the first reset, reset steps included.
  num_steps: Array
  # Bool `[]`, whether the last step ended an episode. If true, the next step
  # resets the environment.
  is_last: Array


def make_state(env_state: Tree, rng_key: chex.PRNGKey) -> AutoresetState:
  """Returns the state of one environment in the middle of an episode."""
  return AutoresetState(
    _without_empty(env_state), rng_key, jnp.int32(0), jnp.bool(False)
  )


def make_device_env(
  spec: EnvSpec,
  reset: Callable[[chex.PRNGKey], tuple[Tree, Tree]],
  step: Callable[
    [chex.PRNGKey, Tree, Array], tuple[Tree, Tree, Array, Array, Array]
  ],
  observe: Callable[[Tree], Tree] = lambda obs: obs,
  *,
  reset_chunk: int = 0,
  render: Callable[[Tree], np.ndarray] | None = None,
  info: Callable[[Tree], dict[str, Array]] = lambda env_state: {},
  player: Callable[[Tree], Array] | None = None,
) -> DeviceEnv:
  """Builds a batch of environments from the functions of one environment.

  Args:
    reset: `(rng_key) -> (obs, env_state)`.
    step: `(rng_key, env_state, action) -> (obs, env_state, reward, terminated,
      truncated)`. If an environment is both terminated and truncated, it counts
      as terminated: the discount is 0.
    observe: `(obs) -> obs`, converts an observation of `reset` or `step` to the
      format of `spec.obs`. Only the selected observation is converted, because
      this is faster.
    reset_chunk: with 0, each step of the batch computes a reset of every
      environment, but uses only those of ended episodes; this is fast where a
      reset is cheap. Otherwise, a loop resets `reset_chunk` environments at a
      time, and only those whose episode has ended. Both give the same results.
      With chunks, a TPU does not replace indices by comparisons.
    render: `(env_state) -> uint8 [H, W, 3]`, draws an environment on the host.
    info: `(env_state) -> dict` of numbers by name, for `TimeStep.info`. The
      metric `env/NAME` is the mean over the steps of an episode.
    player: `(env_state) -> player`, an integer: who moves next in a zero-sum
      game for two. The agent then plays both, see `EnvSpec.has_turns`; the
      reward of `step` is that of the player who moved.
  """

  @functools.cache
  def shapes() -> tuple[Tree, Tree]:
    return jax.eval_shape(reset, jax.random.key(0))

  def reset_one(rng_key: chex.PRNGKey) -> tuple[AutoresetState, TimeStep]:
    reset_key, step_key = jax.random.split(rng_key)
    obs, env_state = first(reset_key)
    state = AutoresetState(env_state, step_key, jnp.int32(0), jnp.bool(False))
    obs = observe(obs)
    reward, discount, is_first = jnp.zeros(()), jnp.ones(()), jnp.bool(True)
    timestep = TimeStep(obs, reward, discount, is_first, report(env_state))
    return strongly_typed((state, timestep))

  def report(env_state: Tree) -> Tree:
    found = info(_with_empty(env_state, shapes()[1]))
    return {
      name: jnp.asarray(_to_scalar(f'info {name!r}', x), jnp.float32)
      for name, x in found.items()
    } or ()

  def next_key(state: AutoresetState) -> chex.PRNGKey:
    # The step and the reset may use the same key: only one of them counts.
    return jax.random.fold_in(state.rng_key, state.num_steps)

  def advance(state: AutoresetState, action: Array) -> Tree:
    old_obs, old = shapes()
    env_state = _with_empty(state.env_state, old)
    obs, new, *others = step(next_key(state), env_state, action)
    _check_shapes(obs, old_obs)
    _check_dtypes(new, old)
    names = 'reward', 'terminated', 'truncated'
    return obs, _without_empty(new), *map(_to_scalar, names, others)

  def first(rng_key: chex.PRNGKey) -> tuple[Tree, Tree]:
    obs, env_state = reset(rng_key)
    return obs, _without_empty(env_state)

  def begin(state: AutoresetState) -> Tree:
    return first(next_key(state))

  def arrive(state, results, begun):
    obs, env_state, reward, terminated, truncated = results
    is_first = state.is_last
    if begun:
      obs, env_state = jax.tree.map(
        lambda x, y: jnp.where(is_first, x, y), begun, (obs, env_state)
      )
    env_state = jax.tree.map(
      lambda new, old: jnp.asarray(new, old.dtype), env_state, state.env_state
    )
    is_last = jnp.logical_or(terminated, truncated) & ~is_first
    goes_on = jnp.logical_or(is_first, jnp.logical_not(terminated))
    discount = goes_on.astype(jnp.float32)
    if player:
      states = state.env_state, env_state
      before, after = (player(_with_empty(x, shapes()[1])) for x in states)
      passes = (before != after) & ~is_first
      discount = jnp.where(passes, -discount, discount)
    timestep = TimeStep(
      obs=observe(obs),
      reward=jnp.where(is_first, 0.0, jnp.asarray(reward, jnp.float32)),
      discount=discount,
      is_first=is_first,
      info=report(env_state),
    )
    num_steps = state.num_steps + 1
    state = AutoresetState(env_state, state.rng_key, num_steps, is_last)
    return strongly_typed((state, timestep))

  def step_one(state, action):
    return arrive(state, advance(state, action), begin(state))

  def step_on_platform(state, action):
    fast = compare_indices(step_one)
    return kernels.choose(step_one, state, action, tpu=fast)

  def step_batch(state, action):
    obs, env_state, *others = jax.vmap(advance)(state, action)
    obs, env_state = _reset_some(begin, state, (obs, env_state), reset_chunk)
    results = obs, env_state, *others
    return jax.vmap(arrive, (0, 0, None))(state, results, ())

  def simulate(rng_key, state, action):
    # With the environment's own key, an agent would foresee random events.
    state = state._replace(rng_key=rng_key)
    after, timestep = arrive(state, advance(state, action), ())
    discount = jnp.where(state.is_last, 0.0, timestep.discount)
    return after, timestep._replace(discount=discount)

  def render_first(state: AutoresetState) -> np.ndarray:
    assert render
    env_state = jax.tree.map(lambda x: x[0], state.env_state)
    return render(_with_empty(env_state, shapes()[1]))

  return DeviceEnv(
    spec._replace(has_turns=player is not None, simulate=simulate),
    jax.vmap(reset_one),
    step_batch if reset_chunk else jax.vmap(step_on_platform),
    render_first if render else None,
  )


def _to_scalar(name: str, x: Any) -> Array:
  """Returns an array with one element as `[]`, or raises a ValueError."""
  if np.size(x) != 1:
    shape = np.shape(x)
    raise ValueError(
      f'the {name} of one environment has shape {shape}; it must be one number'
    )
  return jnp.reshape(x, ())


def _check_shapes(new: Tree, old: Tree) -> None:
  """Raises a ValueError if observations of `step` differ from `reset`'s."""
  after_step, after_reset = (jax.tree.map(np.shape, x) for x in (new, old))
  if after_step != after_reset:
    raise ValueError(
      f'observations have shape {after_reset} after `reset`, but {after_step} '
      'after `step`'
    )


def _check_dtypes(new: Tree, old: Tree) -> None:
  """Raises a ValueError if a whole number of `reset` becomes fractional."""

  def check(path: Any, x: Array, y: Array) -> None:
    is_fraction = jnp.issubdtype(jnp.result_type(x), jnp.floating)
    if is_fraction and not jnp.issubdtype(y.dtype, jnp.floating):
      raise ValueError(
        f'{jax.tree_util.keystr(path)} of the environment state is {y.dtype} '
        'after `reset`, but a fraction after `step`; begin with a fraction, '
        'for example 0.0'
      )

  jax.tree_util.tree_map_with_path(check, new, old)


def strongly_typed(tree: Tree) -> Tree:
  """Removes weak types, which would make JAX compile a program again.

  Some leaves of a library's state are Python numbers, which become arrays.
  """
  return jax.tree.map(
    lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), tree
  )


def _without_empty(tree: Tree) -> Tree:
  """Replaces the arrays without elements by `()`."""
  return jax.tree.map(lambda x: x if np.size(x) else (), tree)


def _with_empty(tree: Tree, shapes: Tree) -> Tree:
  """Reverses `_without_empty`; `shapes` describes the result."""
  leaves = iter(jax.tree.leaves(tree))
  return jax.tree.map(
    lambda x: next(leaves) if x.size else jnp.zeros(x.shape, x.dtype), shapes
  )


def _reset_some(
  begin: Callable[[AutoresetState], Tree],
  state: AutoresetState,
  others: Tree,
  chunk: int,
) -> Tree:
  """Returns `others[B]`, with `begin(state)` where an episode has ended."""
  size = len(state.is_last)
  begin_all = jax.vmap(begin)

  def reset_chunk(carry: Tree) -> Tree:
    waiting, result = carry
    # Places that are left over have the index `size`; nothing is written there.
    rows = jnp.nonzero(waiting, size=min(chunk, size), fill_value=size)[0]
    begun = begin_all(jax.tree.map(lambda x: x[rows], state))
    return waiting.at[rows].set(False), jax.tree.map(
      lambda x, new: x.at[rows].set(new), result, begun
    )

  first = jax.tree.map(
    lambda x, like: jnp.asarray(x, like.dtype),
    others,
    jax.eval_shape(begin_all, state),
  )
  return jax.lax.while_loop(
    lambda carry: jnp.any(carry[0]), reset_chunk, (state.is_last, first)
  )[1]


def raise_interrupt(error: BaseException) -> None:
  """Raises a KeyboardInterrupt again if it comes from the user.

  A run replaces Python's handler of Ctrl-C, so that only the environment's own
  code can raise a KeyboardInterrupt. Elsewhere, the user interrupts.
  """
  handler: Any = signal.getsignal(signal.SIGINT)
  is_default = inspect.unwrap(handler) is signal.default_int_handler
  if isinstance(error, KeyboardInterrupt) and is_default:
    raise error


def _fail(name: str, method: str, error: BaseException) -> NoReturn:
  """Raises an `EnvironmentFailed` that names the environment."""
  raise_interrupt(error)
  text = one_line(error)
  # The message lacks the environment's name.
  if not text.startswith(f'{name} '):
    text = f'environment {name} failed in {method}: {describe(error)}'
  raise EnvironmentFailed(text) from error


def make_host_env(
  name: str,
  spec: EnvSpec,
  envs: Any,
  seed: int | Sequence[int] | None,
  *,
  close: Callable[[], None],
  render: Callable[[], np.ndarray],
  xla: XlaEnv | None = None,
  info: Callable[[Any], Tree] = lambda info: (),
) -> HostEnv:
  """Builds a `HostEnv` from a library's batch of environments.

  If an environment raises anything in `reset` or `step`, the `HostEnv` raises
  an `EnvironmentFailed`.

  Args:
    name: the environment's name, for messages.
    spec: describes one environment; its `cut` is applied here.
    envs: has the interface of `gymnasium.vector.VectorEnv`, and resets an
      environment in the step after an episode's last step (gymnasium's
      next-step mode). `envs` does not need to report which steps are first.
    seed: the argument `seed` of `envs.reset`.
    close: see `HostEnv`.
    render: see `HostEnv`.
    xla: see `HostEnv`, but its `step` takes and returns what `envs.step` does.
    info: converts the fifth result of `envs.step` to a `TimeStep.info`.
  """
  num_envs = envs.num_envs
  is_last: Array = np.zeros(num_envs, bool)

  def cut(obs: Tree) -> Tree:
    try:
      return spec.cut(obs)
    except OverflowError as error:
      raise EnvironmentFailed(f'{name} returned {error}') from None

  def reset() -> TimeStep:
    try:
      obs, _ = envs.reset(seed=seed)
    except BaseException as error:
      _fail(name, 'reset', error)
    reward = np.zeros(num_envs, np.float32)
    discount, is_first = np.ones(num_envs, np.float32), np.ones(num_envs, bool)
    return TimeStep(cut(obs), reward, discount, is_first)

  def step(action: np.ndarray) -> TimeStep:
    nonlocal is_last
    library_action = spec.to_library(action)
    try:
      obs, reward, terminated, truncated, found = envs.step(library_action)
    except BaseException as error:
      _fail(name, 'step', error)
    is_last, timestep = _arrive(
      is_last, cut(obs), reward, terminated, truncated
    )
    return timestep._replace(info=info(found) or ())

  if xla:
    xla = _with_reset_steps(xla, spec, num_envs, info)
  return HostEnv(spec, reset, step, close, render, xla)


def _arrive(
  is_last: Array,
  obs: Tree,
  reward: Array,
  terminated: Array,
  truncated: Array,
  xp: Any = np,
) -> tuple[Array, TimeStep]:
  """Converts the results of one step of `envs`; see `make_host_env`.

  `is_last`, bool `[B]`, says whether the previous step ended an episode. The
  first result says whether this step did. For traced arrays, `xp` is
  `jax.numpy`.
  """
  is_first, is_real = is_last, ~is_last
  is_last = (terminated | truncated) & is_real
  reward = xp.where(is_first, np.float32(0), reward)
  discount = 1 - (terminated & is_real).astype(np.float32)
  timestep = TimeStep(
    obs, reward.astype(np.float32, copy=False), discount, is_first
  )
  return is_last, timestep


def _with_reset_steps(
  xla: XlaEnv, spec: EnvSpec, num_envs: int, info: Callable[[Any], Tree]
) -> XlaEnv:
  """Builds `HostEnv.xla`; see `make_host_env`."""

  def init(begin: Callable[[], bool], end: Callable[[], None]) -> Tree | None:
    env_state = xla.init(begin, end)
    return (env_state, np.zeros(num_envs, bool)) if env_state else None

  def step(env_state: Tree, action: Array) -> tuple[Tree, TimeStep]:
    env_state, is_last = env_state
    env_state, result = xla.step(env_state, spec.to_library(action))
    is_last, timestep = _arrive(is_last, *result[:4], xp=jnp)
    timestep = timestep._replace(info=info(result[4]) or ())
    return (env_state, is_last), timestep

  return XlaEnv(init, step)
