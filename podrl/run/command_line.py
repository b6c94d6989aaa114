"""Parses the command line of a run: flags, overrides of fields, and hints."""

from collections.abc import Callable, Collection, Sequence
import itertools
import math
import shlex
import types
from typing import Any, NamedTuple

from absl import flags

from podrl.agents import AGENTS
from podrl.fields import Fields, Range, convert, parse, section
from podrl.fields import short as short_name
from podrl.messages import TRUST, similar, suggest
from podrl.records import workdir
from podrl.records.terminal import print_text
from podrl.records.workdir import short
from podrl.run.config import (
  PARTS,
  all_fields,
  change,
  make_table,
  owners,
  table_of,
)


def _absolute_cache(value: str) -> str:
  """Makes the path in a value of `compilation_cache` absolute."""
  return value if value in ('', 'auto', 'off') else workdir.absolute(value)


def _with_absolute_path(override: str) -> str:
  """Makes the path in an override of `compilation_cache` absolute."""
  name, _, value = override.partition('=')
  is_path = name.endswith('config.compilation_cache')
  return f'{name}={_absolute_cache(value)}' if is_path else override


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits arguments into overrides and all other arguments.

  An override may be two arguments, `--config.FIELD VALUE`. In the result, it is
  one argument: `--config.FIELD=VALUE`, or `--config.FIELD` if it has no value.
  """
  overrides, others, remaining = [], [], iter(arguments)
  for argument in remaining:
    if not argument.startswith(('--config.', '-config.')):
      others.append(argument)
    elif '=' in argument:
      overrides.append(argument)
    else:
      overrides.append('='.join([argument, *itertools.islice(remaining, 1)]))
  return overrides, others


# Words of other trainers (Stable-Baselines3, CleanRL, rejax, brax), after what
# podrl calls the same thing: a flag, a field, or what to do instead.
_WORDS = {
  '--steps': 'total_timesteps num_timesteps n_timesteps timesteps total_steps '
  'num_env_steps num_frames frames num_train_steps',
  '--agent': 'algo algorithm alg',
  '--seeds': 'n_seeds num_seeds',
  '--workdir': 'logdir log_dir log_folder log_path output_dir out_dir exp_name '
  'experiment_name run_name save_dir save_path checkpoint_dir ckpt_dir '
  'model_dir',
  '--init_from': 'trained_agent load_model model_path load_path pretrained '
  'restore checkpoint_path load_checkpoint load ckpt checkpoint resume_from',
  'env.num_envs': 'n_envs envs num_environments',
  'unroll_length': 'num_steps n_steps rollout_length rollout_steps horizon',
  'num_epochs': 'update_epochs n_epochs ppo_epochs num_update_epochs '
  'num_updates_per_batch',
  'num_minibatches': 'num_mini_batch',
  'write --config.num_minibatches=N, the number of parts, not their size': ''
  'batch_size minibatch_size mini_batch_size',
  'num_devices': 'n_devices devices num_gpus gpus',
  'agent.gamma': 'discount discounting discount_factor',
  'agent.lambda_': 'gae_lambda lambda lam td_lambda',
  'agent.clip': 'clip_coef clip_range clip_eps clip_epsilon clipping_epsilon',
  'agent.entropy_cost': 'ent_coef entropy_coef entropy_coeff',
  'agent.value_cost': 'vf_coef value_coef vf_coeff value_loss_coef',
  'agent.normalize_advantage': 'norm_adv normalize_advantages',
  'agent.normalize_observation': 'normalize_observations norm_obs normalize',
  'agent.normalize_reward': 'norm_reward normalize_rewards',
  'agent.reward_clip': 'clip_rewards clip_reward reward_clipping',
  'agent.n_steps': 'n_step nstep multi_step num_steps_td',
  'agent.initial_temperature': 'alpha ent_coef_init init_temperature',
  'agent.initial_epsilon': 'start_e exploration_initial_eps eps_start',
  'agent.final_epsilon': 'end_e exploration_final_eps eps_end',
  'agent.target_period': 'target_network_frequency target_update_interval '
  'target_update_freq',
  'agent.target_rate': 'tau polyak',
  'network.name': 'network policy policy_type net model arch',
  'network.hidden_sizes': 'net_arch hidden_layer_sizes hidden_dim hidden_size '
  'policy_kwargs agent_kwargs policy_hidden_layer_sizes',
  'network.recurrent': 'lstm use_lstm rnn use_rnn',
  'network.activation': 'activation_fn',
  'optimizer.name': 'optimizer optim',
  'optimizer.learning_rate': 'lr policy_lr q_lr step_size',
  'optimizer.anneal': 'anneal_lr',
  'optimizer.schedule': 'lr_schedule lr_scheduler',
  'optimizer.eps': 'adam_eps opt_eps epsilon',
  'optimizer.b1': 'beta1 beta_1',
  'optimizer.b2': 'beta2 beta_2',
  'optimizer.warmup_steps': 'warmup lr_warmup',
  'optimizer.desired_kl': 'target_kl kl_target kl_threshold',
  'optimizer.max_grad_norm': 'max_gradient_norm grad_clip clip_grad_norm',
  'eval.num_episodes': 'eval_episodes n_eval_episodes num_eval_episodes '
  'n_eval_envs num_eval_envs',
  'eval.every_env_steps': 'eval_freq eval_frequency eval_interval eval_every '
  'num_evals',
  'eval.greedy': 'deterministic deterministic_eval',
  'log.every_updates': 'log_interval log_freq log_every',
  'log.tensorboard': 'use_tensorboard',
  'log.videos': 'capture_video record_video video',
  'log.episodes': 'monitor monitor_dir',
  'log.wandb': 'track use_wandb wandb_project wandb_project_name wandb_entity',
  'checkpoint.every_env_steps': 'save_freq save_interval save_every '
  'checkpoint_freq checkpoint_frequency',
  'sebulba.threads_per_actor_device': 'num_workers n_workers workers '
  'num_actors num_rollout_workers vec_env',
  'sebulba.env_threads': 'num_threads n_threads',
  'replay.capacity_steps': 'buffer_size memory_size replay_size '
  'max_replay_size',
  'replay.min_steps': 'learning_starts min_replay_size fill_buffer '
  'start_steps warmup_steps',
  'replay.sgd_steps_per_update': 'gradient_steps grad_updates_per_step',
  'write --config.replay.sgd_steps_per_update=N: with unrolls of '
  '--config.unroll_length steps, N optimiser steps for each': 'train_freq '
  'train_frequency',
  'write the name without a flag, as in podrl train CartPole-v1': 'env env_id '
  'env_name environment task gym_id game',
  'write --config.env.options.NAME=VALUE for each': 'env_kwargs env_params',
  'set the environment variable JAX_PLATFORMS, for example to cpu': 'device '
  'cuda no_cuda gpu platform accelerator',
  'later, podrl watch RUN records an episode': 'render no_render',
  'TensorBoard events are in the directory of the run; see --workdir': ''
  'tensorboard_log tb_log tensorboard_dir',
  'podrl --version prints the version': 'version',
  'podrl evaluate RUN evaluates a trained policy': 'eval evaluate test '
  'eval_only',
  'podrl sweep trains with many settings, or a population': 'sweep tune optuna '
  'hyperparameter_search population',
  'give the environment steps, as in --steps=1e6': 'num_updates total_updates '
  'iterations num_iterations',
  '--agent=rainbow has priorities, a duelling head and a distribution': ''
  'dueling duelling prioritized per distributional',
  'write --config.agent.normalize_reward=True, or clip rewards with '
  '--config.agent.reward_clip=VALUE': 'reward_scaling reward_scale',
  'a run in several processes needs --coordinator, --num_processes and '
  '--process_id': 'distributed multihost rank local_rank world_size',
  'podrl always saves checkpoints, in the directory of the run': 'save_model '
  'upload_model save save_replay_buffer',
  'podrl always shows the progress': 'verbose progress progress_bar quiet',
  "write --config.env.options.NAME=VALUE if the environment's library has such "
  'an option': 'episode_length time_limit action_repeat frame_skip frame_stack '
  'backend render_mode',
  'podrl has no such setting': 'clip_vloss clip_range_vf use_sde '
  'torch_deterministic policy_frequency '
  'num_resets_per_eval max_devices_per_host',
}


def _fields_named(word: str, known: Collection[str]) -> list[str]:
  """Returns the fields whose name, or its last part, is `word`."""
  found = [x for x in known if word in (x, short_name(x))]
  # The fields of meta-gradients have the names of those that they tune.
  return [x for x in found if not x.startswith('meta.')] or found


def _similar_fields(word: str, known: Collection[str]) -> list[str]:
  """Returns similar fields; the last part of a field counts first."""
  near = similar(word, [short_name(x) for x in known])
  return _fields_named(near[0], known) if near else similar(word, known)


def explain_unknown(
  argument: str, known: Collection[str], options: Collection[str]
) -> str:
  """Says that an argument is not understood, and what to write instead.

  Args:
    argument: the argument, with or without `--` and `=VALUE`.
    known: the fields of the configuration.
    options: the flags of the command.
  """
  flag, _, value = argument.lstrip('-').partition('=')
  word = flag.replace('-', '_').lower()
  flags_of = {field: name for name, field in _SHORT.items()}
  known = [x for x in known if x not in ('env.options', 'agent.name')]
  every = all_fields()
  meant = next((k for k, x in _WORDS.items() if word in x.split()), '')

  def write(name: str, value: str) -> str:
    is_switch = name in every and isinstance(every[name].default, bool)
    value = value or ('True' if is_switch else 'VALUE')
    name = flags_of.get(name, name)
    return f'--{name if name in options else f"config.{name}"}={value}'

  last_parts = [short_name(x) for x in known]
  if flag in options and not argument.startswith('-'):
    advice = f'write --{argument}'
  elif word == 'config':
    advice = 'overrides have the form --config.FIELD=VALUE'
  elif found := _fields_named(word, known):
    advice = f'write {" or ".join(write(x, value) for x in found)}'
  elif ' ' in meant:
    advice = meant
  elif meant in known or meant.startswith('--'):  # Other values may be needed.
    advice = f'write {write(meant.removeprefix("--"), "")}'
  elif found := [meant] if meant else _fields_named(word, sorted(every)):
    owner = owners(found[0])
    advice = f'{found[0]} is a field of {owner}, which this run does not use'
  elif near := similar(word, [*options, *last_parts], 0.6):
    found = [f'config.{x}' for x in _fields_named(near[0], known)]
    names = [near[0]] if near[0] in options else found
    advice = f'did you mean --{" or --".join(names)}'
  else:
    advice = '--help lists all flags and fields'
  return f'{argument} is not understood; {advice}'


def apply_overrides(
  config: Fields,
  arguments: Sequence[str],
  values: Fields = types.MappingProxyType({}),
  *,
  is_complete: bool = True,
) -> tuple[dict[str, Any], set[str]]:
  """Sets fields from `--config.FIELD=VALUE` arguments, and from `values`.

  An integer field also accepts `1e6`. Only `env.options` accepts new fields. If
  `is_complete` is false, unknown fields are left out, because another part may
  have them.

  Returns:
    The configuration, and the names of the fields that were set; each option
    counts as 'env.options'.

  Raises:
    ValueError: for an argument of another form, an unknown field, or a value of
      the wrong type.
  """
  names = set()
  overrides, others = _split_overrides(arguments)
  if others:
    raise ValueError(explain_unknown(others[0], config, [*_make_flags()]))
  settings: list[tuple[str, Any, Callable[..., Any]]] = []
  for argument in overrides:
    name, equals, text = _split_override(argument)
    if not equals:
      raise ValueError(f'{argument} has no value; write {argument}=VALUE')
    settings.append((name, text, parse))
  settings += [(name, value, convert) for name, value in values.items()]
  # Another part can bring the fields that the other arguments set.
  changed = change(config, {k: x for k, x, _ in settings if k in PARTS})
  options = changed['env.options'] = dict(config['env.options'])
  for name, value, read in settings:
    option = name.removeprefix('env.options.')
    if option != name:
      options[option] = read(name, value, options.get(option))
      names.add('env.options')
      continue
    if name == 'agent.name':
      raise ValueError(
        f'config.agent.name={value} cannot be overridden, because the defaults '
        f'of other fields depend on the agent; use --agent={value}'
      )
    if not (name in changed or is_complete):
      continue
    if name == 'env.options' or name not in changed:
      raise ValueError(_explain_field(name, changed))
    changed[name] = read(name, value, changed[name])
    names.add(name)
  return changed, names


def _split_override(argument: str) -> tuple[str, str, str]:
  """Returns the field, '=' (or '') and the value of an override."""
  return argument.partition('config.')[2].partition('=')


def _explain_field(name: str, config: Fields) -> str:
  """Says that an override has no field, and what to write instead."""
  if name == 'env.options':
    return (
      f'config.{name} cannot be set as a whole; set single options with '
      f'--config.{name}.NAME=VALUE'
    )
  head = name.partition('.')[0]
  part = config.get(f'{head}.name', '')
  if ':' in part and name in all_fields():
    own = ', '.join(sorted(section(config, head).keys() - {'name'}))
    return (
      f'config.{name} is not a field of {head}.name={part}, which has {own}'
    )
  if owner := owners(name):
    return f'config.{name} is a field of {owner}, which this run does not use'
  known = sorted(config.keys() - {'env.options'})
  if any(name in x.split() for x in _WORDS.values()):
    return explain_unknown(name, known, [])
  near = _fields_named(short_name(name), known)
  near = near or _similar_fields(short_name(name), known)
  advice = suggest(name, known)
  if near:
    advice = f'did you mean config.{" or config.".join(near)}'
  return f'config.{name} is not a field; {advice}'


class CommandLine(NamedTuple):
  """A parsed command line."""

  command: str  # The command that starts the program, without arguments.
  flags: flags.FlagValues
  overrides: Sequence[str]  # Arguments that override fields.
  task: str = ''  # The environment's name, for `podrl train`.
  # For a program of a sweep: the sweep's directory, then its own arguments.
  sweep: tuple[str, ...] = ()
  directory: str = ''  # The current directory at the start.
  names_task: bool = True  # Whether the user has named the environment.
  # Fields that a Python program sets, see `podrl.train`.
  values: Fields = types.MappingProxyType({})

  def fields(self) -> set[str]:
    """Returns the names of the fields that the user sets."""
    return {_split_override(x)[0] for x in self.overrides} | self.values.keys()

  def apply(
    self, config: Fields, *, is_complete: bool = True
  ) -> tuple[dict[str, Any], set[str]]:
    """Sets the user's fields; see `apply_overrides`."""
    return apply_overrides(
      config, self.overrides, self.values, is_complete=is_complete
    )

  def named(self) -> set[str]:
    """Returns the fields that the user has set; their modules are known.

    A script decides the environment, as the name on a command line does.
    """
    has_agent = self.flags['agent'].present
    own = {'agent.name'} if has_agent else set()
    return self.fields() | own | ({'env.name'} if self.names_task else set())

  def resume(self, workdir: str, *more: str) -> str:
    """Returns the command that resumes the run in `workdir`.

    The arguments `more` replace the overrides of the same fields.
    """
    fields = {x.partition('=')[0] for x in more}
    # The type of an option is unknown, so quotes must mark a string.
    texts = [
      f'--config.{k}={repr(x) if k.startswith("env.options.") else x}'
      for k, x in self.values.items()
    ]
    kept = [*self.overrides, *texts]
    kept = [x for x in kept if x.partition('=')[0] not in fields]
    chosen = [x for x in ('agent', 'variant') if self.flags[x].present]
    chosen = [f'--{x}={self.flags[x].value}' for x in chosen]
    path, *own = self.sweep or (short(workdir),)
    arguments = [f'--workdir={path}', '--resume', *own, *chosen, *kept, *more]
    return f'{self.command} {shlex.join(arguments)}'


# Flags that are short names of fields.
_SHORT = {'steps': 'total_env_steps', 'seed': 'seed', 'seeds': 'num_seeds'}


def _make_flags() -> flags.FlagValues:
  """Defines the flags of an experiment."""
  values = flags.FlagValues()
  for name, default, comment in (
    ('agent', 'ppo', f'the agent: {", ".join(AGENTS)}; or MODULE:NAME.'),
    ('variant', '', "the experiment's variant; empty means the default."),
    ('workdir', '', "the run's directory; empty means runs/TASK/AGENT-TIME."),
    ('init_from', '', 'a run that provides the initial parameters.'),
    ('coordinator', '', 'HOST:PORT of process 0; auto lets JAX find it.'),
  ):
    flags.DEFINE_string(name, default, comment, values)
  for name, field in _SHORT.items():
    comment = f'short for --config.{field}.'
    flags.DEFINE_string(name, None, comment, values)
  flags.DEFINE_bool('resume', False, 'continue the run in --workdir.', values)
  flags.DEFINE_bool('trust', False, TRUST, values)
  flags.DEFINE_bool('help', False, 'show this help.', values, short_name='h')
  for name, low, comment in (
    ('num_processes', 1, 'number of processes of the run.'),
    ('process_id', 0, 'index of this process, from 0.'),
  ):
    flags.DEFINE_integer(name, None, comment, low, flag_values=values)
  for name, seconds, comment in (
    ('start_seconds', 120.0, 'seconds to wait for other processes to start.'),
    (
      'heartbeat_seconds',
      10.0,
      'seconds without a sign of life until a process counts as dead.',
    ),
    (
      'hang_seconds',
      600.0,
      'seconds without progress until a process counts as hanging.',
    ),
  ):
    flags.DEFINE_float(name, seconds, comment, 1.0, flag_values=values)
    flags.register_validator(name, math.isfinite, 'must be finite', values)
  return values


def parse_command_line(
  argv: Sequence[str],
  *,
  has_task: bool = False,
  own: Collection[str] = (),
  values: Fields = types.MappingProxyType({}),
) -> CommandLine:
  """Parses a command line; raises a ValueError for a wrong flag.

  Args:
    argv: the script's path or the command, then its arguments.
    has_task: whether one of the arguments is the name of an environment.
    own: further flags of the command, which hints may name.
    values: fields that a Python program sets.
  """
  if cache := values.get('compilation_cache'):
    values = {**values, 'compilation_cache': _absolute_cache(str(cache))}
  options = _make_flags()
  try:
    arguments = options(argv, known_only=True)[1:]
  except flags.Error as error:
    raise ValueError(str(error)) from error
  directory = workdir.note_start()
  for flag in ('workdir', 'init_from'):
    options[flag].value = workdir.absolute(options[flag].value or '')
  overrides, others = _split_overrides(arguments)
  if unknown := [x for x in others if x.startswith('-')]:
    tables = [make_table(options.agent, x) for x in ('Anakin', 'Sebulba')]
    known = dict.fromkeys(itertools.chain(*tables))
    raise ValueError(explain_unknown(unknown[0], known, [*options, *own]))
  overrides = list(map(_with_absolute_path, overrides))
  tasks = [x for x in others if has_task and not x.startswith('-')]
  if len(tasks) > 1:
    raise ValueError(f'expected one environment, got {" ".join(tasks)}')
  for flag, field in _SHORT.items():
    if (value := options[flag].value) is not None:
      start = f'config.{field}='
      is_set = any(x.lstrip('-').startswith(start) for x in overrides)
      if is_set or field in values:
        raise ValueError(
          f'--{flag} and --config.{field} set the same field; use one of them'
        )
      overrides.append(f'--config.{field}={value}')
  # `apply_overrides` says which arguments are unknown.
  arguments = overrides + [x for x in others if x not in tasks]
  task = tasks[0] if tasks else ''
  command = f'python {shlex.quote(argv[0])}'
  return CommandLine(
    command,
    options,
    arguments,
    task,
    directory=directory,
    names_task=bool(task) or not has_task,
    values=values,
  )


def print_help(
  command_line: CommandLine, get_config: Callable[..., Fields]
) -> None:
  """Prints the flags and the fields, with values, choices and comments."""
  values = command_line.flags
  config = get_config(values.agent, values.variant)
  overrides, _ = _split_overrides(command_line.overrides)
  pairs = ((name, text) for name, _, text in map(_split_override, overrides))
  config = change(config, {k: text for k, text in pairs if k in PARTS})
  table = table_of(config)
  name = ' [SUITE:]NAME' if command_line.task else ''
  lines = [f'usage: {command_line.command}{name} [flags]', values.get_help()]
  lines.append('\nfields, with the values of this command:')
  for name, value in config.items():
    comment, allowed = table[name].comment, table[name].allowed
    if allowed and not isinstance(allowed, Range):
      names = ', '.join(allowed)
      more = ', or MODULE:NAME' if name in PARTS else ''
      comment += f' One of {names}{more}.'
    if name == 'env.options':
      name, value = 'env.options.NAME', 'VALUE'
    if name != 'agent.name':  # The flag --agent sets it.
      lines.append(f'  --config.{name}={value}\n      {comment}')
  print_text('\n'.join(lines))
