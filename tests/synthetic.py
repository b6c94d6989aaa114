"""A synthetic host: environments, inference and updates that only sleep.

Sleeping needs neither the GIL nor a core, so the rate of a driver follows from
these costs alone, on any machine.
"""

import contextlib
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podrl.core.learner import make_learner
from podrl.drivers import sebulba, spmd
from podrl.types import (
  Agent,
  Discrete,
  EnvSpec,
  HostEnv,
  LossOutput,
  TimeStep,
  Variables,
)


@dataclasses.dataclass
class Costs:
  """Seconds of each call; a test may change them while a driver runs.

  Attributes:
    step: seconds of a pool's step.
    step_per_env: seconds added for each environment of the pool.
    inference: seconds of the inference of a batch.
    inference_per_env: seconds added for each environment of the batch.
    update: seconds of an update.
    update_per_slot: seconds added for each slot (T x B) of the update.
    noise: standard deviation of the logarithm of a call's seconds.
  """

  step: float = 0.0
  step_per_env: float = 0.0
  inference: float = 0.0
  inference_per_env: float = 0.0
  update: float = 0.0
  update_per_slot: float = 0.0
  noise: float = 0.1


class Host:
  """A synthetic host with costs, cores and devices.

  Args:
    costs: the costs of its calls.
    num_cores: number of pools that can step at the same time; None is no limit.
    seed: seed of the noise.
  """

  def __init__(self, costs: Costs, num_cores: int | None = None, seed: int = 0):
    self.costs = costs
    self._cores = (
      threading.Semaphore(num_cores) if num_cores else contextlib.nullcontext()
    )
    # A device runs one call at a time. The learner has its own device.
    self._actor_device = threading.Lock()
    self._learner_device = threading.Lock()
    self._rng = np.random.default_rng(seed)
    self._rng_lock = threading.Lock()

  def _sleep(self, seconds: float) -> None:
    noise = self.costs.noise
    with self._rng_lock:
      factor = self._rng.lognormal(-(noise**2) / 2, noise) if noise else 1.0
    if seconds:
      time.sleep(seconds * factor)

  def make_env(
    self, num_envs: int, seed: int = 0, num_threads: int = 1
  ) -> HostEnv:
    """Makes a pool whose episodes never end, with reward 1."""
    del seed, num_threads
    timestep = TimeStep(
      np.zeros((num_envs, 1), np.float32),
      np.ones(num_envs, np.float32),
      np.ones(num_envs, np.float32),
      np.zeros(num_envs, bool),
    )

    def step(action: np.ndarray) -> TimeStep:
      del action
      with self._cores:
        self._sleep(self.costs.step + self.costs.step_per_env * num_envs)
      return jax.tree.map(np.copy, timestep)

    spec = EnvSpec(
      jax.ShapeDtypeStruct((1,), jnp.float32), False, Discrete(2), 1, 0
    )
    return HostEnv(
      spec,
      lambda: timestep._replace(is_first=np.ones(num_envs, bool)),
      step,
      lambda: None,
    )

  def _call(
    self,
    device: threading.Lock,
    name: str,
    size: int,
    per_one: str,
    x: jax.Array,
  ) -> jax.Array:
    """Sleeps after `x` is ready; returns zeros that are ready afterwards."""

    def sleep(x):
      with device:
        self._sleep(
          getattr(self.costs, name) + getattr(self.costs, per_one) * size
        )
      return np.zeros_like(x)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

  def make_agent(self) -> Agent:
    """Makes an agent with one parameter, which never changes."""

    def act(variables, rng_key, timestep, carry, *, greedy=False):
      del rng_key, greedy
      num_envs = timestep.is_first.shape[0]
      zero = self._call(
        self._actor_device,
        'inference',
        num_envs,
        'inference_per_env',
        variables.params + timestep.reward[0],
      )
      return jnp.zeros(num_envs, jnp.int32) + zero.astype(jnp.int32), (), carry

    def loss(variables, target_params, batch, rng_key):
      del target_params, batch, rng_key
      return 0.0 * variables.params, LossOutput({})

    return Agent(
      lambda rng_key: Variables(jnp.zeros(()), (), {}),
      lambda env_index: (),
      act,
      lambda variables, target_params, sample, rng_key, mean: (
        sample.trajectory.timestep.reward
      ),
      loss,
    )

  def make_learner(self, agent: Agent):
    """Makes a learner whose update sleeps."""
    learner = make_learner(agent, optax.sgd(0.0))

    def update(state, trajectory, rng_key):
      size = trajectory.action.shape[0] * trajectory.action.shape[1]
      zero = self._call(
        self._learner_device,
        'update',
        size,
        'update_per_slot',
        trajectory.timestep.reward[0, 0] + trajectory.action[0, 0],
      )
      state, metrics = learner.update(state, trajectory, rng_key)
      variables = state.variables
      variables = variables._replace(params=variables.params + zero)
      return state._replace(variables=variables), metrics

    return learner._replace(update=update)

  def make_driver(
    self,
    *,
    num_actors: int,
    num_envs: int,
    unroll_length: int,
    unrolls_per_update: int,
    max_lag: int = 1,
    deterministic: bool = False,
    learner_device: int = 0,
    **settings,
  ) -> sebulba.Sebulba:
    """Makes Sebulba on this host; each actor has `num_envs` environments."""
    agent = self.make_agent()
    device = jax.devices()[0]
    return sebulba.Sebulba(
      lambda actor: self.make_env(num_envs),
      agent,
      self.make_learner(agent),
      spmd.make_mesh([jax.devices()[learner_device]]),
      [device],
      sebulba.Settings(
        num_envs=num_envs,
        unroll_length=unroll_length,
        actors_per_device=num_actors,
        unrolls_per_update=unrolls_per_update,
        deterministic=deterministic,
        max_lag=max_lag,
        hang_seconds=60.0,
        **settings,
      ),
      jax.random.key(0),
    )


def rate(driver: sebulba.Sebulba, seconds: float) -> float:
  """Measures a driver's steps per second over a window of `seconds`."""
  start, steps = time.perf_counter(), 0
  while time.perf_counter() - start < seconds:
    steps += sum(r.num_predictions for r in driver.advance(1))
  return steps / (time.perf_counter() - start)
