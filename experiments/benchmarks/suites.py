"""Measures the cost of automatic resets; a benchmark, not a test.

  python experiments/benchmarks/suites.py [--tasks=pgx:minatar-breakout,...]
      [--num_envs=64] [--num_steps=256] [--repeats=7]

For one environment of each suite, the program compares two compiled loops with
random actions. One uses the suite's own functions and its own automatic reset,
under `jax.vmap`. The other steps podrl's `DeviceEnv`. The loops run in turn. The
program prints the median steps per second of each, and the median ratio. Above
1, podrl is faster.
"""

from collections.abc import Callable
import itertools
import statistics
import time
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp

from podrl.envs import SUITES, brax, find_task
from podrl.types import Array, Box, Tree

_DEFAULTS = [
  'pgx:minatar-breakout',
  'navix:Navix-Empty-8x8-v0',
  'xminigrid:MiniGrid-Empty-8x8',
  'jumanji:Snake-v1',
  'brax:ant',
  'craftax:Craftax-Classic-Symbolic-v1',
  'playground:CartpoleBalance',
]
_TASKS = flags.DEFINE_list('tasks', _DEFAULTS, 'environments to measure')
_NUM_ENVS = flags.DEFINE_integer('num_envs', 64, 'number of environments', 1)
_NUM_STEPS = flags.DEFINE_integer('num_steps', 256, 'steps of one repeat', 1)
_REPEATS = flags.DEFINE_integer('repeats', 7, 'number of repeats', 1)

Step = Callable[[Tree, Array, Array], tuple[Tree, Tree]]


def own_loop(suite: str, name: str) -> tuple[Callable[[Array], Tree], Step]:
  """Returns the functions of a suite that resets its environments itself.

  Returns:
    `(rng_key[B]) -> state[B]` and `(state[B], action[B], rng_key[B]) ->
    (state[B], outputs)`, where `outputs` is what a user reads.
  """
  if suite == 'pgx':
    import pgx
    from pgx.experimental import auto_reset

    env: Any = pgx.make(name)
    step = auto_reset(env.step, env.init)

    def step_pgx(state: Any, action: Array, key: Array) -> tuple[Tree, Tree]:
      state = step(state, action, key)
      return state, (state.observation, state.rewards, state.terminated)

    return jax.vmap(env.init), jax.vmap(step_pgx)
  if suite == 'navix':
    import navix

    env = navix.make(name)
    return jax.vmap(env.reset), _batch_step(
      env.step, lambda x: (x.observation, x.reward, x.step_type)
    )
  if suite == 'xminigrid':
    import xminigrid
    from xminigrid.wrappers import GymAutoResetWrapper

    env, params = xminigrid.make(name)
    env = GymAutoResetWrapper(env)
    return jax.vmap(lambda key: env.reset(params, key)), _batch_step(
      lambda state, action: env.step(params, state, action),
      lambda x: (x.observation, x.reward, x.discount),
    )
  if suite == 'jumanji':
    import jumanji
    from jumanji.wrappers import VmapAutoResetWrapper

    env = VmapAutoResetWrapper(jumanji.make(name))
    return lambda keys: env.reset(keys)[0], lambda state, action, key: env.step(
      state, action
    )
  if suite == 'craftax':
    from craftax import craftax_env

    env = craftax_env.make_craftax_env_from_name(name, auto_reset=True)

    def step_craftax(
      state: Any, action: Array, key: Array
    ) -> tuple[Tree, Tree]:
      obs, state, *outputs, _ = env.step(key, state, action)
      return state, (obs, *outputs)

    return jax.vmap(lambda key: env.reset(key)[1]), jax.vmap(step_craftax)
  if suite == 'brax':
    from brax import envs
    from brax.envs.wrappers import training

    env = envs.get_environment(name, backend=brax.default_backend(name))
    env = training.wrap(env, episode_length=1000)
  else:
    from mujoco_playground import registry, wrapper

    env = registry.load(name, config_overrides={'impl': 'jax'})
    env = wrapper.wrap_for_brax_training(env)
  # brax's wrappers accept only keys of the old kind.
  return lambda keys: env.reset(jax.random.key_data(keys)), lambda state, action, key: _read(
    env.step(state, action), lambda x: (x.obs, x.reward, x.done)
  )


def _read(state: Any, outputs: Callable[[Any], Tree]) -> tuple[Any, Tree]:
  return state, outputs(state)


def _batch_step(
  step: Callable[[Any, Array], Any], outputs: Callable[[Any], Tree]
) -> Step:
  return lambda state, action, key: _read(
    jax.vmap(step)(state, action), outputs
  )


def measure(text: str) -> tuple[float, float, float]:
  """Returns the median rates of the suite and of podrl, and the ratio."""
  task = find_task(text)
  env = SUITES[task.suite].make(task.name)
  batch, length = _NUM_ENVS.value, _NUM_STEPS.value
  space = env.spec.action

  def act(rng_key: Array) -> Array:
    if isinstance(space, Box):
      return jax.random.uniform(rng_key, (batch, *space.shape), minval=-1.0)
    return jax.random.randint(rng_key, (batch,), 0, space.num_actions)

  def loop(step: Step) -> Callable[[Tree, Array], Tree]:
    def advance(state: Tree, rng_key: Array) -> tuple[Tree, None]:
      action_key, step_key = jax.random.split(rng_key)
      result = step(state, act(action_key), jax.random.split(step_key, batch))
      # Without this barrier, the compiler would remove the unused outputs.
      return jax.lax.optimization_barrier(result)[0], None

    return jax.jit(
      lambda state, rng_key: jax.lax.scan(
        advance, state, jax.random.split(rng_key, length)
      )[0]
    )

  reset, own_step = own_loop(*task[:2])
  keys = jax.random.split(jax.random.key(0), batch)
  loops = [loop(own_step), loop(lambda s, a, _: env.step(s, a))]
  states = [jax.jit(reset)(keys), jax.jit(env.reset)(keys)[0]]
  rates: list[list[float]] = [[], []]
  for repeat, i in itertools.product(range(_REPEATS.value + 1), range(2)):
    start = time.perf_counter()
    states[i] = jax.block_until_ready(loops[i](states[i], jax.random.key(repeat)))
    if repeat:  # The first one compiles.
      rates[i].append(batch * length / (time.perf_counter() - start))
  own, ours = rates
  ratio = statistics.median(y / x for x, y in zip(own, ours, strict=True))
  return statistics.median(own), statistics.median(ours), ratio


def main(_: list[str]) -> None:
  for text in _TASKS.value:
    own, ours, ratio = measure(text)
    print(f'{text}: {own:,.0f} and {ours:,.0f} steps/s, ratio {ratio:.2f}', flush=True)


if __name__ == '__main__':
  app.run(main)
