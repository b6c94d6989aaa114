"""The agents: a table of learning algorithms, with one file for each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from podrl.agents import a2c, impala, ppo
from podrl.core import distributions, normalization
from podrl.networks import actor_critic, torsos
from podrl.types import Agent, EnvSpec

_HYPERPARAMS = tuple(
  f'agent.{x}' for x in ('gamma', 'lambda_', 'entropy_cost', 'value_cost')
)


class AgentEntry(NamedTuple):
  """What the rest of podrl knows about an agent.

  Attributes:
    make_agent: `(network, distribution, **fields) -> Agent`.
    defaults: values of configuration fields, by dotted name. The agent adds
      these fields to the base configuration or changes their values. An
      Anakin run ignores the fields of Sebulba, such as `sebulba.max_lag`.
    comments: one line for `--help` about each field that the agent adds.
    kinds: values of configuration fields for each kind of environment. Commands
      that get an environment's name, such as `podrl train NAME`, use these
      values.
    changeable: the fields that a resumed run may change, because they are
      hyperparameters of the agent.
    check: `(fields) -> None`, raises a ValueError if the configuration does
      not fit the agent. `fields` is the flat configuration by dotted name.
    minibatch_unit: `(fields) -> 'steps' | 'environments'`, what is split into
      minibatches. `fields` is the flat configuration by dotted name.
  """

  make_agent: Callable[..., Agent]
  defaults: Mapping[str, Any]
  comments: Mapping[str, str] = {}
  kinds: Mapping[str, Mapping[str, Any]] = {}
  changeable: tuple[str, ...] = _HYPERPARAMS
  check: Callable[[Mapping[str, Any]], None] = lambda fields: None
  minibatch_unit: Callable[[Mapping[str, Any]], str] = lambda fields: (
    'environments'
  )

  def make(
    self,
    spec: EnvSpec,
    fields: Mapping[str, Any],
    network_fields: Mapping[str, Any],
  ) -> Agent:
    """Builds the agent with its distribution, network and normalisation.

    Args:
      spec: describes the environment.
      fields: the fields `agent.*` by short name, without `agent.name`.
      network_fields: the fields `network.*` by short name.

    Raises:
      ValueError: if the distribution or the torso does not fit the environment.
    """
    fields = dict(fields)
    observations = fields.pop('normalize_observation')
    rewards = fields.pop('normalize_reward')
    distribution = distributions.for_action_space(
      spec.action,
      network_fields['distribution'],
      state_dependent_scale=network_fields['state_dependent_scale'],
      initial_scale=network_fields['initial_scale'],
    )
    name, hidden_sizes = network_fields['name'], network_fields['hidden_sizes']
    network = actor_critic.make_network(
      torsos.make_torso(name, spec, hidden_sizes, network_fields['dtype']),
      normalization.as_float(spec.obs) if observations else spec.obs,
      distribution.num_params,
      shared_torso=network_fields['shared_torso'],
      num_constant_params=distribution.num_constant_params,
      core=network_fields['recurrent'],
      core_size=hidden_sizes[-1],
    )
    return normalization.normalize(
      self.make_agent(network, distribution, **fields),
      spec.obs,
      observations=observations,
      rewards=rewards,
    )


AGENTS = {
  'ppo': AgentEntry(
    ppo.make_agent,
    ppo.DEFAULTS,
    ppo.COMMENTS,
    ppo.KINDS,
    (*_HYPERPARAMS, 'agent.clip'),
    ppo.check,
    ppo.minibatch_unit,
  ),
  'impala': AgentEntry(impala.make_agent, impala.DEFAULTS, kinds=impala.KINDS),
  'a2c': AgentEntry(
    a2c.make_agent, a2c.DEFAULTS, kinds=a2c.KINDS, check=a2c.check
  ),
}
