"""Finds the plans that learn from the most steps a second."""

import collections
from collections.abc import Callable, Sequence
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from podrl.drivers.limits import count
from podrl.run import build
from podrl.run.devices import num_cores
from podrl.tools import balance_model as model
from podrl.tools import balance_timing as timing
from podrl.tools.balance_model import Prediction
from podrl.tools.balance_plan import (
  Plan,
  best_of_each,
  candidates,
  configured,
  from_config,
  overrides,
)
from podrl.tools.balance_simulation import Costs
from podrl.tools.balance_timing import Host, Run

# Of what the model leaves out, in logarithms of rates: the deviations of what
# all plans share, of what near ones do, and of a measurement; how far "near"
# reaches, in octaves of each of a plan's sizes.
_SHARED, _NEAR, _NOISE, _REACH = 0.3, 0.15, 0.04, 1.5
_TRIED = 3  # Of the best plans all are run,
_MAX_ROUNDS = 6  # unless it takes more runs: each may change which they are.
_EARLY_SECONDS = 50.0  # In a search's first so many seconds
_TRIED_EARLY, _MAX_REPEATS = 5, 2  # more are, and those again in turn.


class Found(NamedTuple):
  """What a search found.

  Attributes:
    base: the configured plan.
    ranking: plans, the fastest first, as `rate` has it.
    predictions: of each plan that was not left out early, corrected by the runs
      of the others (how long a hand-off takes the configured plan's says).
    runs: of those that were tried, the median where there were several.
    costs: fitted.
  """

  base: Plan
  ranking: list[Plan]
  predictions: dict[Plan, Prediction]
  runs: dict[Plan, Run]
  costs: Costs

  def rate(self, plan: Plan) -> float:
    """Steps per second: measured where the plan was run, else predicted."""
    known = self.runs if plan in self.runs else self.predictions
    return known[plan].steps_per_second


def _sizes(plan: Plan) -> np.ndarray:
  """A plan's sizes, in octaves; whether devices do both is two of them."""
  is_shared = bool({*plan.actor_devices} & {*plan.learner_devices})
  return np.log2(
    [
      plan.num_actors,
      plan.num_envs,
      plan.unroll_length,
      plan.env_threads,
      len(plan.actor_devices),
      len(plan.learner_devices),
      4 if is_shared else 1,
    ]
  )


def calibrate(
  predictions: dict[Plan, Prediction], runs: dict[Plan, Run]
) -> dict[Plan, Prediction]:
  """Predictions, corrected by runs: most near these, less so farther off.

  What the model leaves out, log(measured / predicted), is a Gaussian process
  over the plans' sizes. Source: Kennedy and O'Hagan 2001, Bayesian calibration
  of computer models, section 4; the mean of Rasmussen and Williams 2006,
  Gaussian Processes for Machine Learning, eq. 2.25.

  Args:
    predictions: of the model.
    runs: of some of these plans.
  """
  known = [plan for plan in runs if plan in predictions]
  if not known:
    return predictions
  errors = np.log(
    [runs[p].steps_per_second / predictions[p].steps_per_second for p in known]
  )
  at = np.stack([_sizes(p) for p in known])

  def covariance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    squares = ((x[:, None] - y[None]) ** 2).sum(-1)
    return _SHARED**2 + _NEAR**2 * np.exp(-squares / (2 * _REACH**2))

  weights = np.linalg.solve(
    covariance(at, at) + _NOISE**2 * np.eye(len(known)), errors
  )
  factors = np.exp(
    covariance(np.stack([_sizes(p) for p in predictions]), at) @ weights
  )
  return {
    plan: x._replace(steps_per_second=x.steps_per_second * float(factor))
    for (plan, x), factor in zip(predictions.items(), factors)
  }


def _rates(
  predictions: dict[Plan, Prediction] | dict[Plan, Run],
) -> dict[Plan, float]:
  return {p: x.steps_per_second for p, x in predictions.items()}


def find(
  host: Host,
  plans: Sequence[Plan],
  base: Plan,
  seconds: float = 2.0,
  say: Callable[[str], None] = lambda line: None,
) -> Found:
  """Measures a host and ranks plans for it.

  The configured plan and the best for some numbers of actors are run; what they
  reach corrects all predictions. So are the three that then look best, one by
  one, until all of those were run; where that is soon done the best five, and then
  again in turn.

  Args:
    host: to use.
    plans: to choose from, `base` among them.
    base: the configured plan.
    seconds: of each run of the driver, compilation left out.
    say: takes lines on how it goes.
  """
  start = time.perf_counter()
  say('timing environments, inference and updates: about a minute in all')
  costs = timing.measure(host, plans)
  tried: dict[Plan, list[Run]] = collections.defaultdict(list)
  runs: dict[Plan, Run] = {}

  def is_early() -> bool:
    return time.perf_counter() - start < _EARLY_SECONDS

  def run(plan: Plan) -> None:
    say(f'running {describe(plan)}' + ' again' * (plan in runs))
    tried[plan].append(
      timing.run(host.make_driver(plan), seconds, plan.batch, host.devices)
    )
    tried[plan].sort(key=lambda x: x.steps_per_second)
    runs[plan] = tried[plan][len(tried[plan]) // 2]._replace(
      steps_per_second=float(
        np.median([x.steps_per_second for x in tried[plan]])
      )
    )

  run(base)
  costs = costs._replace(hand_off=float(runs[base].hand_off))
  predictions = model.predict(list(plans), costs)
  predictions[base] = model.simulate(base, costs)
  best = best_of_each(plans, _rates(predictions))
  counts = list(best)
  for i in sorted({0, len(counts) // 2, len(counts) - 1}):
    if best[counts[i]] not in runs:
      run(best[counts[i]])
  for _ in range(_MAX_ROUNDS):
    rates = _rates(calibrate(predictions, runs)) | _rates(runs)
    number = _TRIED_EARLY if is_early() else _TRIED
    left = [p for p in sorted(rates, key=rates.get)[-number:] if p not in runs]
    if not left:
      break
    run(left[-1])
  rates = _rates(runs)
  again = dict.fromkeys([base, *sorted(rates, key=rates.get)[-_TRIED_EARLY:]])
  for _ in range(_MAX_REPEATS):
    if is_early():  # Whole turns: all are as often run.
      for plan in again:
        run(plan)
  corrected = calibrate(predictions, runs) | {
    plan: calibrate(predictions, {p: runs[p] for p in runs if p != plan})[plan]
    for plan in runs
  }
  found = Found(base, [], corrected, runs, costs)
  return found._replace(
    ranking=sorted(found.predictions, key=found.rate, reverse=True)
  )


def describe(plan: Plan) -> str:
  """A plan in a few words."""
  return (
    f'{count(plan.num_actors, "actor")} x '
    f'{count(plan.num_envs, "environment")} x {plan.unroll_length} steps, '
    f'{count(plan.env_threads, "thread")} each'
  )


def make_host(config: Any, base: Plan) -> Host:
  """The host as a configuration uses it."""
  spec = build.make_host_spec(config)
  agent = build.make_agent(config, spec)

  def make_driver(plan: Plan) -> Any:
    return build.make_run(configured(config, overrides(plan, base))).driver

  return Host(
    lambda num_envs, seed, num_threads: build.make_host_env(
      config, num_envs, config.seed + seed, num_threads
    ),
    agent,
    build.learner_for(config, agent, 1000),
    make_driver,
    jax.local_devices(),
    num_cores(),
  )


def find_for(
  config: Any,
  size_range: float,
  seconds: float = 2.0,
  say: Callable[[str], None] = lambda line: None,
) -> Found:
  """`find` for a configuration, under its bound of the policy lag.

  Args:
    config: of an experiment of Sebulba.
    size_range: as `plan.candidates`.
    seconds: of each run.
    say: takes lines on how it goes.

  Raises:
    ValueError: where the configuration does not fit this machine.
  """
  spec = build.make_host_spec(config)
  base = from_config(config, spec)
  plans = candidates(config, spec, size_range)
  return find(make_host(config, base), plans, base, seconds, say)
