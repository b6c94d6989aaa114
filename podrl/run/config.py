"""The configuration that every experiment starts from, and overrides."""

import ast
from collections.abc import Sequence
import difflib
import json
from typing import Any

from ml_collections import ConfigDict

from podrl.records.workdir import flatten

AGENTS = ('ppo', 'impala', 'a2c')


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
  """Raises a ValueError, with near names, if `value` is not a choice."""
  if value not in choices:
    near = difflib.get_close_matches(str(value), choices, 3, 0.4)
    listed = (
      f'did you mean {" or ".join(near)}'
      if near
      else (f'choose from {", ".join(filter(None, choices)) or "none"}')
    )
    raise ValueError(f'{name}={value} is unknown; {listed}')


def base_config(agent: str) -> ConfigDict:
  """A whole configuration for one agent; locked, `env.options` excepted.

  Args:
    agent: one of `AGENTS`; what goes with it (epochs, unroll length, learning
      rate) follows from it.

  Raises:
    ValueError: if the agent is unknown.
  """
  check_choice('agent', agent, AGENTS)
  is_ppo = agent == 'ppo'
  config = ConfigDict()
  config.seed = 0  # Everything random derives from it.
  config.num_seeds = 1  # Independent agents in one program: seed, seed + 1 ...
  config.total_env_steps = 1_000_000  # Over all environments; rounded up.
  config.num_devices = 0  # 0 is all of an accelerator's; one per core on CPUs.
  config.unroll_length = 64 if is_ppo else 32  # Steps per update.
  config.num_epochs = 2 if is_ppo else 1  # Passes over each unroll.
  config.num_minibatches = 4 if is_ppo else 1  # Optimiser steps in each pass.
  # A directory for XLA's compiled programs; 'auto' is the user's cache
  # directory, 'off' compiles afresh in every run.
  config.compilation_cache = 'auto'
  # Of all machines of the run, in any currency; 0 is unknown.
  config.price_per_hour = 0.0

  config.env = ConfigDict()
  config.env.suite = 'gymnax'  # The library that the environment is from.
  config.env.name = ''  # As the library names it.
  config.env.num_envs = 64  # In total, over all devices.
  config.env.options = ConfigDict()  # Passed to the library.

  config.agent = ConfigDict()
  config.agent.name = agent  # Set by --agent; overriding it is an error.
  config.agent.gamma = 0.99  # Discount per step.
  config.agent.lambda_ = 0.95 if is_ppo else 1.0  # 0 one step, 1 full returns.
  config.agent.entropy_cost = 0.01  # Weight of the entropy bonus.
  config.agent.value_cost = 0.5  # Weight of the value loss.
  config.agent.reward_clip = 0.0  # Clip rewards to plus and minus; 0 is off.
  # By running statistics, and clipped to 10 deviations; rewards by the
  # deviation of discounted returns, before `reward_clip`.
  config.agent.normalize_observation = False
  config.agent.normalize_reward = False
  if is_ppo:
    config.agent.clip = 0.2  # How far the probability ratio may pay.
    config.agent.normalize_advantage = True  # Over the global batch.

  config.network = ConfigDict()
  config.network.name = 'auto'  # Or mlp, conv, nature_cnn, impala_resnet.
  # Of an MLP's layers; the last is the width of any torso's output and memory.
  config.network.hidden_sizes = (64, 64)
  config.network.shared_torso = False  # One torso for both heads, or one each.
  config.network.recurrent = 'none'  # Or gru, lstm: a memory after each torso.
  # Auto fits the actions; or categorical, gaussian (clipped to the bounds of a
  # box), tanh_gaussian (squashed into them).
  config.network.distribution = 'auto'
  # A Gaussian's scale from the network, or one that is the same in all states.
  config.network.state_dependent_scale = False
  config.network.initial_scale = 1.0  # Of a Gaussian; the bounds are -1 and 1.
  # Of a torso's arithmetic; bfloat16 suits accelerators. Parameters are float32.
  config.network.dtype = 'float32'

  config.optimizer = ConfigDict()
  config.optimizer.name = 'adam'  # Or rmsprop, sgd.
  config.optimizer.learning_rate = 1e-3  # At the start.
  config.optimizer.anneal = True  # Linearly to 0 over the run.
  config.optimizer.max_grad_norm = 0.5  # Of the global norm; 0 is off.

  config.eval = ConfigDict()
  config.eval.num_episodes = 128  # Each the first of its own environment.
  config.eval.every_env_steps = 0  # 0 evaluates only at the end.
  config.eval.greedy = True  # The policy's mode, or a sample.
  # Cut there; 0 is the environment's limit, and 10,000 where it has none.
  config.eval.max_episode_steps = 0

  config.log = ConfigDict()
  config.log.every_updates = 10  # Updates to a record.
  config.log.tensorboard = True  # Write TensorBoard events as well.
  config.log.wandb = False  # Send records to Weights & Biases.
  config.log.profile = 0  # Trace so many updates with JAX's profiler.

  config.checkpoint = ConfigDict()
  # Between two checkpoints; 0 is off. The last one is always written.
  config.checkpoint.every_seconds = 300.0
  config.checkpoint.every_env_steps = 0
  config.checkpoint.keep = 2  # Of the newest; the best evaluated stays as well.
  config.checkpoint.grace_seconds = 30.0  # After SIGTERM, until it is saved.

  config.lock()
  config.env.options.unlock()
  return config


def sebulba_config(agent: str) -> ConfigDict:
  """`base_config` for Sebulba: environments on the host, actors and a learner.

  Args:
    agent: one of `AGENTS`.

  Raises:
    ValueError: if the agent is unknown.
  """
  config = base_config(agent)
  config.unlock()
  del config.num_devices  # Devices are named one by one.
  del config.num_seeds  # One program cannot hold the environments.
  config.env.suite = 'envpool'
  config.sebulba = ConfigDict()
  # Indices among this process's devices, which may overlap; empty takes the
  # first quarter to act and the others to learn, one device for both.
  config.sebulba.actor_devices = ()
  config.sebulba.learner_devices = ()
  # Each with its own environments; 0 is two, or one where a CPU of fewer than
  # four cores is the device. The most that there may be, where autotune is on;
  # 0 is then one for each core, from two to eight.
  config.sebulba.threads_per_actor_device = 0
  config.sebulba.env_threads = (
    0  # envpool's, of each actor; 0 shares the cores.
  )
  config.sebulba.unrolls_per_update = 0  # 0 is one of each actor.
  # Or asynchronous: faster where actors are uneven, and no run repeats.
  config.sebulba.mode = 'deterministic'
  # Bound of the updates between the parameters that act and those that learn.
  config.sebulba.max_lag = 0 if agent == 'a2c' else 1
  # Start and park actors while training, for most samples learnt a second.
  config.sebulba.autotune = False  # It needs the asynchronous mode.
  config.sebulba.hang_seconds = 300.0  # So long without a sign is a hang.
  config.lock()
  config.env.options.unlock()
  return config


def is_sebulba(config: ConfigDict) -> bool:
  """Whether a configuration is Sebulba's, else it is Anakin's."""
  return 'sebulba' in config


def _parse(name: str, text: str, default: Any) -> Any:
  """Reads an override's text as a value of its default's type."""
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = {'true': True, 'false': False}.get(text.lower(), text)
  kind = type(default)
  if isinstance(default, str):
    return text
  if isinstance(default, bool):
    if value in (0, 1):
      return bool(value)
  elif isinstance(value, bool):
    pass
  elif isinstance(default, int):
    if (
      isinstance(value, int)
      or isinstance(value, float)
      and (value.is_integer())
    ):
      return int(value)
  elif isinstance(default, float):
    if isinstance(value, int | float) and abs(value) < 1e300:
      return float(value)
  elif isinstance(default, tuple):
    value = value if isinstance(value, tuple | list) else (value,)
    kinds = {type(x) for x in default} or {int}  # Empty: indices of devices.
    if {type(x) for x in value} <= kinds:
      return tuple(value)
  raise ValueError(
    f'config.{name}={text} is not of type {kind.__name__}; '
    f'its default is {default!r}'
  )


def apply_overrides(config: ConfigDict, arguments: Sequence[str]) -> set[str]:
  """Sets fields from `--config.FIELD=VALUE` arguments, in place.

  `1e6` is an integer where one is meant. New fields may be made only under
  `env.options`.

  Returns:
    The fields' names, 'env.options' for any under it.

  Raises:
    ValueError: for an argument of another form, an unknown field (with near
      names) or a value of the wrong type.
  """
  arguments, names = list(arguments), set()
  while arguments:
    argument = arguments.pop(0)
    name, equals, text = argument.lstrip('-').partition('=')
    if not argument.startswith('-') or not name.startswith('config.'):
      near = difflib.get_close_matches(
        name,
        (
          'config',
          'agent',
          'variant',
          'workdir',
          'resume',
          'init_from',
          'help',
        ),
        1,
      )
      raise ValueError(
        f'{argument} is not understood; '
        + (
          f'did you mean --{near[0]}'
          if near and near[0] != name
          else 'overrides have the form --config.FIELD=VALUE'
        )
      )
    if not equals:
      if not arguments:
        raise ValueError(f'{argument} has no value; write {argument}=VALUE')
      text = arguments.pop(0)
    name = name.removeprefix('config.')
    *path, field = name.split('.')
    node = config
    for part in path:
      node = node.get(part) if isinstance(node, ConfigDict) else None
    if path == ['env', 'options'] and field:
      default = node.get(field)
      node[field] = (
        _parse_option(text) if default is None else _parse(name, text, default)
      )
      names.add('env.options')
      continue
    known = sorted(set(flatten(config.to_dict())) - {'env.options'})
    if name not in known:
      near = difflib.get_close_matches(name, known, 3, 0.5) or [
        x for x in known if field and x.endswith(field)
      ]
      raise ValueError(
        f'config.{name} is not a field; '
        + (
          f'did you mean config.{" or config.".join(near)}'
          if near
          else f'the fields are {", ".join(known)}'
        )
      )
    if name == 'agent.name':
      raise ValueError(
        f'config.agent.name={text} cannot be overridden, because what goes '
        f'with the agent would not follow; use --agent={text}'
      )
    node[field] = _parse(name, text, node[field])
    names.add(name)
  return names


def _parse_option(text: str) -> Any:
  """Reads a library's option as a Python literal, else as a string."""
  try:
    value = ast.literal_eval(text)
    json.dumps(value)  # As config.json will hold it.
    return value
  except (ValueError, SyntaxError, TypeError):
    return {'true': True, 'false': False}.get(text.lower(), text)


def describe(config: ConfigDict) -> str:
  """The fields and their values, a line each, as overrides are written."""
  fields = flatten(config.to_dict())
  del fields['env.options']  # Written one by one.
  return '\n'.join(f'  --config.{k}={v}' for k, v in fields.items())
