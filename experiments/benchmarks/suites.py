"""Compares podrl's resets with those of the suites; a benchmark, not a test.

  python experiments/benchmarks/suites.py [--tasks=pgx:2048,brax:ant]
      [--num_envs=64] [--num_steps=256] [--repeats=7]

For each task, the program measures two compiled loops with random actions. The
first uses the suite's own functions, `jax.vmap` and the suite's own automatic
reset. The second steps podrl's `DeviceEnv`, which also converts observations.
The loops run in turn. The program prints the median steps per second of both,
and the median ratio. Above 1, podrl is faster.
"""

from collections.abc import Callable
import itertools
import statistics
import time
from typing import Any, NamedTuple

from absl import app, flags
import jax

from podrl.envs import SUITES, brax, find_task
from podrl.types import Array, Box, Tree

_TASKS = flags.DEFINE_list(
  'tasks',
  [
    'pgx:minatar-breakout',
    'navix:Navix-Empty-8x8-v0',
    'xminigrid:MiniGrid-Empty-8x8',
    'jumanji:Snake-v1',
    'brax:ant',
    'craftax:Craftax-Classic-Symbolic-v1',
    'playground:CartpoleBalance',
  ],
  'SUITE:NAME of each environment; games of pgx must have one player',
)
_NUM_ENVS = flags.DEFINE_integer('num_envs', 64, 'number of environments', 1)
_NUM_STEPS = flags.DEFINE_integer('num_steps', 256, 'steps of a repeat', 1)
_REPEATS = flags.DEFINE_integer('repeats', 7, 'number of repeats', 1)


class Loop(NamedTuple):
  """A batch of environments that resets itself.

  Attributes:
    reset: `(rng_key[B]) -> state[B]`.
    step: `(state[B], action[B], rng_key[B]) -> (state[B], outputs)`. `outputs`
      is what a user reads.
  """

  reset: Callable[[Array], Tree]
  step: Callable[[Tree, Array, Array], tuple[Tree, Tree]]


def pgx(name: str) -> Loop:
  """Steps a batch of environments of pgx, with its own reset."""
  import pgx
  from pgx.experimental import auto_reset

  env: Any = pgx.make(name)
  if env.num_players > 1:
    raise app.UsageError(f'--tasks=pgx:{name}: this game has several players')
  advance = auto_reset(env.step, env.init)

  def step(state: Any, action: Array, rng_key: Array) -> tuple[Tree, Tree]:
    state = advance(state, action, rng_key)
    return state, (state.observation, state.rewards, state.terminated)

  return Loop(jax.vmap(env.init), jax.vmap(step))


def navix(name: str) -> Loop:
  """Steps a batch of environments of navix, with its own reset."""
  import navix

  env = navix.make(name)

  def step(state: Any, action: Array, rng_key: Array) -> tuple[Tree, Tree]:
    state = env.step(state, action)
    return state, (state.observation, state.reward, state.step_type)

  return Loop(jax.vmap(env.reset), jax.vmap(step))


def xminigrid(name: str) -> Loop:
  """Steps a batch of environments of XLand-MiniGrid, with its own reset."""
  import xminigrid
  from xminigrid import wrappers

  env, params = xminigrid.make(name)
  env = wrappers.GymAutoResetWrapper(env)

  def step(state: Any, action: Array, rng_key: Array) -> tuple[Tree, Tree]:
    state = env.step(params, state, action)
    return state, (state.observation, state.reward, state.discount)

  return Loop(jax.vmap(lambda key: env.reset(params, key)), jax.vmap(step))


def jumanji(name: str) -> Loop:
  """Steps a batch of environments of jumanji, with its own reset."""
  import jumanji
  from jumanji import wrappers

  env: Any = wrappers.AutoResetWrapper(jumanji.make(name))
  if hasattr(env.action_spec, 'num_values') and env.action_spec.shape:
    raise app.UsageError(f'--tasks=jumanji:{name}: an action has several parts')
  return Loop(
    jax.vmap(lambda rng_key: env.reset(rng_key)[0]),
    jax.vmap(lambda state, action, rng_key: env.step(state, action)),
  )


def craftax(name: str) -> Loop:
  """Steps a batch of environments of Craftax, with its own reset."""
  from craftax import craftax_env

  env = craftax_env.make_craftax_env_from_name(name, auto_reset=True)

  def step(state: Any, action: Array, rng_key: Array) -> tuple[Tree, Tree]:
    obs, state, reward, done, _ = env.step(rng_key, state, action)
    return state, (obs, reward, done)

  return Loop(jax.vmap(lambda rng_key: env.reset(rng_key)[1]), jax.vmap(step))


def _wrapped(env: Any) -> Loop:
  """Uses an environment in the wrappers of brax, or of MuJoCo Playground."""

  def step(state: Any, action: Array, rng_key: Array) -> tuple[Tree, Tree]:
    state = env.step(state, action)
    return state, (state.obs, state.reward, state.done)

  # The wrappers accept only keys that are arrays of numbers.
  return Loop(lambda rng_key: env.reset(jax.random.key_data(rng_key)), step)


def own_brax(name: str) -> Loop:
  """Steps a batch of environments of brax, with its own reset."""
  from brax import envs
  from brax.envs.wrappers import training

  env = envs.get_environment(name, backend=brax.default_backend(name))
  return _wrapped(training.wrap(env, episode_length=1000))


def playground(name: str) -> Loop:
  """Steps a batch of environments of MuJoCo Playground, with its own reset."""
  from mujoco_playground import registry, wrapper

  env = registry.load(name, config_overrides={'impl': 'jax'})
  return _wrapped(wrapper.wrap_for_brax_training(env))


OWN = {
  'pgx': pgx,
  'navix': navix,
  'xminigrid': xminigrid,
  'jumanji': jumanji,
  'brax': own_brax,
  'craftax': craftax,
  'playground': playground,
}


def measure(suite: str, name: str) -> tuple[float, float, float]:
  """Returns the median rates of the suite and of podrl, and the ratio."""
  env = SUITES[suite].make(name)
  batch, length = _NUM_ENVS.value, _NUM_STEPS.value
  space = env.spec.action

  def act(rng_key: Array) -> Array:
    if isinstance(space, Box):
      return jax.random.uniform(rng_key, (batch, *space.shape), minval=-1.0)
    return jax.random.randint(rng_key, (batch,), 0, space.num_actions)

  def compile_steps(loop: Loop) -> Callable[[Tree, Array], tuple[Tree, Tree]]:
    def step(state: Tree, rng_key: Array) -> tuple[Tree, Tree]:
      action_key, step_key = jax.random.split(rng_key)
      keys = jax.random.split(step_key, batch)
      return loop.step(state, act(action_key), keys)

    # The result contains all outputs, or the compiler would remove them.
    return jax.jit(
      lambda state, rng_key: jax.lax.scan(
        step, state, jax.random.split(rng_key, length)
      )
    )

  ours = Loop(lambda keys: env.reset(keys)[0], lambda s, a, _: env.step(s, a))
  loops = [OWN[suite](name), ours]
  functions = [compile_steps(loop) for loop in loops]
  keys = jax.random.split(jax.random.key(0), batch)
  states = [jax.jit(loop.reset)(keys) for loop in loops]
  rates: list[list[float]] = [[], []]
  for repeat, i in itertools.product(range(_REPEATS.value + 1), range(2)):
    start = time.perf_counter()
    result = functions[i](states[i], jax.random.key(repeat))
    states[i], _ = jax.block_until_ready(result)
    if repeat:  # The first one compiles.
      rates[i].append(batch * length / (time.perf_counter() - start))
  ratios = [rate / theirs for theirs, rate in zip(*rates, strict=True)]
  return *map(statistics.median, rates), statistics.median(ratios)


def main(argv: list[str]) -> None:
  """Measures the tasks, and prints a row of Markdown for each."""
  if argv[1:]:
    raise app.UsageError(f'the argument {argv[1]} is unknown; use --tasks')
  for text in _TASKS.value:
    try:
      task = find_task(text)
    except ValueError as error:
      raise app.UsageError(str(error)) from error
    if task.suite not in OWN:
      raise app.UsageError(f'--tasks={text}: suites are {", ".join(OWN)}')
    theirs, ours, ratio = measure(task.suite, task.name)
    print(
      f'| `{text}` | {theirs:,.0f} | {ours:,.0f} | {ratio:.2f} |', flush=True
    )


if __name__ == '__main__':
  app.run(main)
