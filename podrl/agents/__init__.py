"""The agents: a table of learning algorithms, with one file for each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
import numpy as np

from podrl import modules
from podrl.agents import a2c, acting, dqn, impala, muzero, ppo, pqn, r2d2, sac
from podrl.core import normalization, pool
from podrl.fields import Fields, Table, hyperparams
from podrl.networks import actor_critic
from podrl.types import Agent, Box, EnvSpec, Masked, Tree, Variables


class AgentEntry(NamedTuple):
  """What the rest of podrl knows about an agent.

  Everywhere, `fields` is the whole configuration by name, such as
  'agent.gamma'.

  Attributes:
    make_agent: `(spec, fields) -> Agent`. It raises a ValueError if the agent
      or its network does not fit the environment. `make` adds the
      hyperparameters, see `Field.changeable`.
    fields: the fields that the agent and its parts read, by name; at least
      `acting.FIELDS`. The fields that only one optimiser has are left out.
    defaults: values of fields that are not the agent's own, such as
      `env.num_envs`. A run ignores the fields that it does not have.
    kinds: values of fields for each kind of environment. Commands that get an
      environment's name, such as `podrl train NAME`, use these values.
    check: `(fields) -> None`, raises a ValueError if the configuration does
      not fit the agent.
    minibatch_unit: `(fields) -> 'steps' | 'environments'`, what is split into
      minibatches.
    target_update: `(fields) -> target_update`; see `make_learner`. If it is
      None or returns None, the agent has no target parameters.
    sequence_length: `(fields) -> int`, transitions of each sequence that the
      agent's memory gives. None means that the agent has no memory.
    warn: `(record) -> str`, a warning about a record of metrics, or ''.
    groups: `(params) -> names`, the group of each parameter; see
      `make_optimizer`. None means that there are no groups.
  """

  make_agent: Callable[[EnvSpec, Fields], Agent]
  fields: Table
  defaults: Fields = {}
  kinds: Mapping[str, Fields] = {}
  check: Callable[[Fields], None] = lambda fields: None
  minibatch_unit: Callable[[Fields], str] = lambda fields: 'environments'
  target_update: Callable[[Fields], Callable[..., Any] | None] | None = None
  sequence_length: Callable[[Fields], int] | None = None
  warn: Callable[[Fields], str] = lambda record: ''
  groups: Callable[[Tree], Tree] | None = None

  def make(self, spec: EnvSpec, fields: Fields) -> Agent:
    """Builds the agent with its network, normalisation and hyperparameters.

    Raises:
      ValueError: if the agent or its network does not fit the environment.
    """
    _check_mask(spec)
    if spec.has_turns and fields.get('network.recurrent', 'none') != 'none':
      raise ValueError(
        'a recurrent network that plays against itself would mix the memories '
        'of the two players; use a network without a recurrent core'
      )
    if spec.has_turns and fields['agent.normalize_reward']:
      raise ValueError(
        'the rewards of two players cannot be normalised together; use '
        '--config.agent.normalize_reward=False'
      )
    observations = fields['agent.normalize_observation']
    seen = spec
    if observations:
      obs = normalization.as_float(spec.obs)
      seen = spec._replace(obs=obs, obs_scale=None)
    agent = self.make_agent(seen, fields)
    if not isinstance(agent, Agent):
      raise ValueError(
        f'make_agent must return an Agent, not a {type(agent).__name__}'
      )
    declared = hyperparams(self.fields, fields)

    def init(rng_key: chex.PRNGKey) -> Variables:
      variables = agent.init(rng_key)
      values = {k: jnp.float32(x) for k, x in declared.items()}
      return variables._replace(hyperparams=variables.hyperparams | values)

    made = normalization.normalize(
      agent._replace(init=init),
      spec.obs,
      observations=observations,
      rewards=fields['agent.normalize_reward'],
    )
    if spec.has_pool:
      made = pool.keep_earlier(made, fields['agent.pool_size'])
    return made


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


# The agents with a policy and a value; experiments have settings for these.
ACTOR_CRITICS = ('ppo', 'impala', 'a2c')


def sgd_steps_per_update(fields: Fields) -> int:
  """Returns the optimiser steps of an update that learns."""
  if 'replay.sgd_steps_per_update' in fields:
    return fields['replay.sgd_steps_per_update']
  return fields['num_epochs'] * fields['num_minibatches']


def _actor_critic(module: Any, **options: Any) -> AgentEntry:
  """Builds the row of an agent with a policy and a value from its module."""
  return AgentEntry(
    acting.with_network(module.make_agent, module.FIELDS),
    module.FIELDS,
    kinds=module.KINDS,
    groups=actor_critic.groups,
    **options,
  )


def _with_memory(module: Any, **options: Any) -> AgentEntry:
  """Builds the row of an agent with a memory from its module."""
  return AgentEntry(
    module.make_agent,
    module.FIELDS,
    module.DEFAULTS,
    module.KINDS,
    **({'target_update': dqn.target_update} | options),
  )


_DQN = _with_memory(
  dqn,
  check=dqn.check,
  sequence_length=lambda fields: fields['agent.n_steps'],
  warn=dqn.warn_of_ends,
)
AGENTS = {
  'ppo': _actor_critic(ppo, check=ppo.check, minibatch_unit=ppo.minibatch_unit),
  'impala': _actor_critic(impala),
  'a2c': _actor_critic(a2c, defaults={'sebulba.max_lag': 0}, check=a2c.check),
  'pqn': AgentEntry(
    pqn.make_agent,
    pqn.FIELDS,
    {'env.num_envs': 32},
    pqn.KINDS,
    minibatch_unit=ppo.minibatch_unit,
  ),
  'dqn': _DQN,
  'rainbow': _DQN._replace(fields=dqn.RAINBOW_FIELDS),
  'r2d2': _with_memory(
    r2d2, check=r2d2.check, sequence_length=r2d2.sequence_length
  ),
  'sac': _with_memory(sac, sequence_length=lambda fields: 1, groups=sac.groups),
  'muzero': _with_memory(
    muzero,
    sequence_length=muzero.sequence_length,
    target_update=muzero.target_update,
    warn=dqn.warn_of_ends,
  ),
}
# A program may add more agents, which the commands of podrl do not have.
BUILT_IN = frozenset(AGENTS)


def find(name: str) -> AgentEntry:
  """Returns a row of the table, or the user's `AgentEntry` MODULE:NAME.

  It raises a ValueError for another name or another object.
  """
  if name in AGENTS:
    return AGENTS[name]
  found = modules.find('agent', name, AGENTS)
  if not isinstance(found, AgentEntry):
    raise ValueError(
      f'agent={name} must be a podrl.agents.AgentEntry, not a '
      f'{type(found).__name__}'
    )
  modules.check_table('agent', name, found.fields)
  return found


def make(spec: EnvSpec, fields: Fields) -> Agent:
  """Makes the agent of a configuration; raises a ValueError for a mistake."""
  name = fields['agent.name']
  with modules.one_line_errors('agent', name):
    return find(name).make(spec, fields)


def check(fields: Fields) -> None:
  """Raises a ValueError if a configuration does not fit its agent."""
  name = fields['agent.name']
  with modules.one_line_errors('agent', name):
    find(name).check(fields)
