"""A2C: IMPALA with importance ratios of 1; it needs a policy lag of 0."""

from podrl.agents import impala
from podrl.core.distributions import Distribution
from podrl.fields import Fields
from podrl.networks.actor_critic import Network
from podrl.types import Agent

FIELDS = impala.FIELDS
# Without minibatches, small batches give more optimiser steps.
_SMALL_BATCHES: dict[str, Fields] = {
  'action vector': {
    'network.initial_scale': 0.3,
    'optimizer.learning_rate': 2e-3,
  },
  'small image': {'env.num_envs': 16},
  'large image on a CPU': {'unroll_length': 8, 'optimizer.learning_rate': 1e-3},
}
KINDS = {
  kind: {
    **fields,
    'num_epochs': 1,
    'num_minibatches': 1,
    **_SMALL_BATCHES.get(kind, {}),
  }
  for kind, fields in impala.KINDS.items()
}


def check(fields: Fields) -> None:
  """Raises a ValueError if A2C would learn from data of an older policy."""
  for name in ('num_epochs', 'num_minibatches'):
    if fields[name] != 1:
      raise ValueError(
        f'config.{name}={fields[name]} does not fit a2c, which learns from '
        'each step only once; use 1, or --agent=impala'
      )
  if max_lag := fields.get('sebulba.max_lag', 0):
    raise ValueError(
      f'config.sebulba.max_lag={max_lag} does not fit a2c, which learns only '
      'from its current policy; use 0, or --agent=impala'
    )


def make_agent(
  network: Network, distribution: Distribution, **options: float
) -> Agent:
  """Builds an A2C agent; the options are those of `impala.make_agent`.

  Source: Mnih et al. 2016, arXiv:1602.01783, section 4.
  """
  return impala.make_agent(
    network, distribution, off_policy_correction=False, **options
  )
