"""The model of a host: from costs and a plan to steps per second.

The host is a closed queueing network (`simulation.py`). Mean value analysis
(Reiser and Lavenberg 1980, Journal of the ACM 27(2)) solves such networks for
exponential times. Here times are nearly constant and updates wait for batches,
where that is too low by up to half; so events are simulated, and the bounds of
Denning and Buzen 1978 (Computing Surveys 10(3)), that no station works more
than all the time, only sort out what need not be.
"""

from collections.abc import Sequence
from typing import NamedTuple

from podrl.tools.balance_plan import Plan
from podrl.tools.balance_simulation import Costs, Simulation, Station, times

_WARM_UP = 4  # Updates that do not count.
_UPDATES = 16  # That do.


class Prediction(NamedTuple):
  """What a plan would give.

  Attributes:
    steps_per_second: learnt.
    busy_cores: the share of cores at work; so for the mean actor device,
      learner device.
    busy_actor_devices: the same.
    busy_learner_devices: the same.
    lag: mean policy lag, in updates.
  """

  steps_per_second: float
  busy_cores: float
  busy_actor_devices: float
  busy_learner_devices: float
  lag: float


def bound(plan: Plan, costs: Costs) -> float:
  """Steps per second that no station lets the plan exceed."""
  t = times(plan, costs)
  steps = plan.unroll_length * plan.num_envs  # Of an unroll.
  acting = plan.unroll_length * t.environment + t.inference
  update = t.update + costs.hand_off
  # Every unroll holds a permit from its beginning until it is learnt.
  in_flight = plan.unrolls_per_update * (plan.max_lag + 1)
  cores = (
    plan.unroll_length * t.environment * t.environment_cores
    + t.inference * costs.inference_cores
    + t.update * costs.update_cores / plan.unrolls_per_update
  )
  return steps * min(
    plan.num_actors / acting,
    plan.unrolls_per_update / update,
    in_flight / (acting + update),
    costs.num_cores / max(cores, 1e-9),
    len(plan.actor_devices) / max(t.inference * costs.exclusive, 1e-9),
    costs.environment_servers / max(plan.unroll_length * t.environment, 1e-9),
  )


def simulate(plan: Plan, costs: Costs) -> Prediction:
  """What a plan would give."""
  run = Simulation(plan, costs)
  run.run(_WARM_UP + plan.max_lag)
  start, cores, lags = run.now, run.core_seconds, len(run.lags)
  acting = [x.busy_seconds for x in run.actor_stations]
  learning = [x.busy_seconds for x in run.learner_stations]
  first = run.num_updates
  run.run(first + _UPDATES)
  seconds = run.now - start

  def share(stations: list[Station], before: list[float]) -> float:
    return min(
      1.0,
      sum(x.busy_seconds - y for x, y in zip(stations, before))
      / len(stations)
      / seconds,
    )

  return Prediction(
    (run.num_updates - first) * plan.batch / seconds,
    (run.core_seconds - cores) / seconds / costs.num_cores,
    share(run.actor_stations, acting),
    share(run.learner_stations, learning),
    sum(run.lags[lags:]) / max(1, len(run.lags) - lags),
  )


def predict(
  plans: Sequence[Plan], costs: Costs, least: float = 0.6
) -> dict[Plan, Prediction]:
  """Predictions of the plans whose bounds let them be among the best.

  For each number of actors alike: those are to be compared.

  Args:
    plans: to choose from.
    costs: fitted.
    least: the share of the best known that a plan's bound must reach.
  """
  best: dict[int, float] = {}
  found = {}
  for limit, plan in sorted(
    ((bound(plan, costs), plan) for plan in plans), reverse=True
  ):
    if limit >= least * best.get(plan.num_actors, 0.0):
      found[plan] = simulate(plan, costs)
      best[plan.num_actors] = max(
        best.get(plan.num_actors, 0.0), found[plan].steps_per_second
      )
  return found


_RELIEFS = {  # What is halved, or doubled, to see whether it was the limit.
  'cores': lambda p, c: (p, c._replace(num_cores=2 * c.num_cores)),
  'environments': lambda p, c: (
    p,
    c._replace(
      environment=tuple(x / 2 for x in c.environment),
      environment_cores=tuple(x / 2 for x in c.environment_cores),
    ),
  ),
  'actor devices': lambda p, c: (
    p,
    c._replace(inference=tuple(x / 2 for x in c.inference)),
  ),
  'learner devices': lambda p, c: (
    p,
    c._replace(update=tuple(x / 2 for x in c.update)),
  ),
  'hand-off': lambda p, c: (p, c._replace(hand_off=c.hand_off / 2)),
  'lag': lambda p, c: (p._replace(max_lag=p.max_lag + 1), c),
}


def limit(plan: Plan, costs: Costs) -> str:
  """What limits a plan: that of which twice as much helps most."""
  gains = {
    name: simulate(*relieve(plan, costs)).steps_per_second
    for name, relieve in _RELIEFS.items()
  }
  name = max(gains, key=gains.get)
  # Halved environments free cores as well: then it is the cores.
  return (
    'cores'
    if gains['cores'] >= 0.9 * gains[name]
    and (gains['cores'] > 1.1 * simulate(plan, costs).steps_per_second)
    else name
  )
