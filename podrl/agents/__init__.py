"""The agents: a table of learning algorithms, with one file for each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from podrl.agents import (
  a2c,
  acting,
  dqn,
  exploring,
  impala,
  muzero,
  ppo,
  pqn,
  r2d2,
  sac,
)
from podrl.core import normalization
from podrl.types import Agent, Box, EnvSpec, Masked

_Fields = Mapping[str, Any]  # Values of fields, by name.


class AgentEntry(NamedTuple):
  """What the rest of podrl knows about an agent.

  Attributes:
    make_agent: `(spec, fields, network_fields) -> Agent`. `fields` has the
      fields `agent.*`, `replay.*` and `search.*` by short name, and
      `network_fields` has the fields `network.*`. It raises a ValueError if
      the agent or its network does not fit the environment.
    defaults: values of configuration fields, by dotted name. The agent adds
      these fields to the base configuration or changes their values. An
      Anakin run ignores the fields of Sebulba, such as `sebulba.max_lag`.
    comments: one line for `--help` about each field that the agent adds.
    kinds: values of configuration fields for each kind of environment. Commands
      that get an environment's name, such as `podrl train NAME`, use these
      values.
    unused: fields of the base configuration that the agent does not have.
    changeable: the fields that a resumed run may change, because they are
      hyperparameters of the agent.
    check: `(fields) -> None`, raises a ValueError if the configuration does
      not fit the agent. `fields` is the flat configuration by dotted name.
    minibatch_unit: `(fields) -> 'steps' | 'environments'`, what is split into
      minibatches. `fields` is the flat configuration by dotted name.
    target_update: `(fields) -> target_update`; see `make_learner`. If it is or
      returns None, the agent has no target parameters. `fields` as above.
    sequence_length: `(fields) -> int`, transitions of each sequence that the
      agent's memory gives. None means that the agent has no memory. `fields` as
      above.
    warn: `(record) -> str`, a warning about a record of metrics, or ''.
  """

  make_agent: Callable[[EnvSpec, _Fields, _Fields], Agent]
  defaults: _Fields
  comments: Mapping[str, str] = {}
  kinds: Mapping[str, _Fields] = {}
  unused: tuple[str, ...] = ()
  changeable: tuple[str, ...] = ()
  check: Callable[[_Fields], None] = lambda fields: None
  minibatch_unit: Callable[[_Fields], str] = lambda fields: 'environments'
  target_update: Callable[[_Fields], Callable[..., Any] | None] | None = None
  sequence_length: Callable[[_Fields], int] | None = None
  warn: Callable[[_Fields], str] = lambda record: ''

  def make(
    self, spec: EnvSpec, fields: _Fields, network_fields: _Fields
  ) -> Agent:
    """Builds the agent with its network and normalisation.

    Args:
      spec: describes the environment.
      fields: the fields `agent.*`, `replay.*` and `search.*` by short name,
        without `agent.name`.
      network_fields: the fields `network.*` by short name.

    Raises:
      ValueError: if the agent or its network does not fit the environment.
    """
    _check_mask(spec)
    fields = dict(fields)
    observations = fields.pop('normalize_observation')
    rewards = fields.pop('normalize_reward')
    seen = spec
    if observations:
      obs = normalization.as_float(spec.obs)
      seen = spec._replace(obs=obs, obs_scale=None)
    return normalization.normalize(
      self.make_agent(seen, fields, network_fields),
      spec.obs,
      observations=observations,
      rewards=rewards,
    )


def _check_mask(spec: EnvSpec) -> None:
  """Raises a ValueError if a mask does not fit the actions."""
  if not isinstance(spec.obs, Masked):
    return
  if isinstance(spec.action, Box):
    raise ValueError('continuous actions cannot have a mask; remove the mask')
  if spec.frame_stack > 1:
    raise ValueError(
      'observations with a mask cannot have a frame_stack; use frame_stack=1'
    )
  size = int(np.sum(spec.action.num_actions))
  mask = spec.obs.action_mask
  if mask.shape != (size,) or mask.dtype != bool:
    raise ValueError(
      f'the mask of {spec.action} must be bool {(size,)}, not {mask.dtype} '
      f'{mask.shape}'
    )


# The agents with a policy and a value; the settings of experiments are theirs.
ACTOR_CRITICS = ('ppo', 'impala', 'a2c')


def sgd_steps_per_update(fields: _Fields) -> int:
  """Returns the optimiser steps of an update that learns.

  `fields` is the flat configuration by dotted name.
  """
  if 'replay.sgd_steps_per_update' in fields:
    return fields['replay.sgd_steps_per_update']
  return fields['num_epochs'] * fields['num_minibatches']


def _with_memory(
  module: Any, sequence_length: Callable[[_Fields], int], **fields: Any
) -> AgentEntry:
  """Builds the row of an agent with a memory from its module."""
  return AgentEntry(
    module.make_agent,
    module.DEFAULTS,
    module.COMMENTS,
    module.KINDS,
    unused=module.UNUSED,
    changeable=module.CHANGEABLE,
    check=module.check,
    sequence_length=sequence_length,
    **({'target_update': dqn.target_update} | fields),
  )


_DQN = _with_memory(
  dqn, lambda fields: fields['agent.n_steps'], warn=dqn.warn_of_ends
)
AGENTS = {
  'ppo': AgentEntry(
    acting.with_network(ppo.make_agent),
    ppo.DEFAULTS,
    ppo.COMMENTS,
    ppo.KINDS,
    changeable=(*acting.CHANGEABLE, 'agent.clip'),
    check=ppo.check,
    minibatch_unit=ppo.minibatch_unit,
  ),
  'impala': AgentEntry(
    acting.with_network(impala.make_agent),
    impala.DEFAULTS,
    kinds=impala.KINDS,
    changeable=acting.CHANGEABLE,
  ),
  'a2c': AgentEntry(
    acting.with_network(a2c.make_agent),
    a2c.DEFAULTS,
    kinds=a2c.KINDS,
    changeable=acting.CHANGEABLE,
    check=a2c.check,
  ),
  'pqn': AgentEntry(
    pqn.make_agent,
    pqn.DEFAULTS,
    exploring.COMMENTS,
    pqn.KINDS,
    unused=exploring.UNUSED,
    changeable=('agent.gamma', 'agent.lambda_', *exploring.CHANGEABLE),
    check=pqn.check,
    minibatch_unit=ppo.minibatch_unit,
  ),
  'dqn': _DQN,
  'rainbow': _DQN._replace(defaults=dqn.RAINBOW),
  'r2d2': _with_memory(r2d2, r2d2.sequence_length),
  'sac': _with_memory(sac, lambda fields: 1),
  'muzero': _with_memory(
    muzero,
    muzero.sequence_length,
    target_update=muzero.target_update,
    warn=dqn.warn_of_ends,
  ),
}
# A program may add more, which the commands of podrl do not have.
BUILT_IN = frozenset(AGENTS)
