"""The agents: a table of learning algorithms, each in a file of its own."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from podrl.agents import a2c, impala, ppo
from podrl.types import Agent, EnvSpec


class AgentEntry(NamedTuple):
  """What the rest of podrl knows of an agent.

  Attributes:
    defaults: configuration fields by dotted name that the agent adds to the
      base configuration or sets to another value. Fields of an architecture
      that the run does not use are skipped.
    comments: one line for `--help` on each field that the agent adds.
    check: `(fields) -> None`, raises a ValueError if the configuration does
      not fit the agent. `fields` is the flat configuration by dotted name.
    make: `(spec, fields, network) -> Agent`, from the fields `agent.*` and
      `network.*` by short name, `agent.name` left out.
    minibatch_unit: `(fields) -> 'steps' | 'environments'`, what the minibatches
      divide. `fields` is the flat configuration.
  """

  defaults: Mapping[str, Any]
  comments: Mapping[str, str]
  check: Callable[[Mapping[str, Any]], None]
  make: Callable[[EnvSpec, Mapping[str, Any], Mapping[str, Any]], Agent]
  minibatch_unit: Callable[[Mapping[str, Any]], str]


AGENTS = {
  name: AgentEntry(
    module.DEFAULTS,
    module.COMMENTS,
    module.check,
    module.make,
    module.minibatch_unit,
  )
  for name, module in {'ppo': ppo, 'impala': impala, 'a2c': a2c}.items()
}
