"""Shows what a run's agent does: an episode as a GIF or an MP4.

  podrl watch RUN [--out=FILE.gif|FILE.mp4] [--checkpoint=last|best|N]
      [--episodes=1] [--nogreedy] [--seed=0] [--max_steps=1000] [--fps=0]

FILE is episode.gif in the run's directory by default; MP4 needs ffmpeg. The
pictures are the library's own where it draws any, else of what the agent
observed, and played at about real speed; above each are the return so far and
the number of steps.
"""

from collections.abc import Callable, Sequence
import math
import os

from absl import flags
import chex
import jax
from ml_collections import ConfigDict
import numpy as np

from podrl import tools
from podrl.envs import envpool
from podrl.run import build
from podrl.run.config import is_sebulba
from podrl.tools import film, pictures
from podrl.tools.film import Episode
from podrl.types import Agent, HostEnv, TimeStep, Tree

_MAX_FRAMES = 600  # In a file, about.
_MAX_FPS = 25  # That are worth their bytes.

# gymnax draws these itself, without packages that are not installed.
_DRAWN_BY_GYMNAX = ('FourRooms-misc', 'MetaMaze-misc', 'PointRobot-misc')


def _make_gymnax(config: ConfigDict, rng_key: chex.PRNGKey) -> HostEnv:
  """One gymnax environment, as if it were on the host."""
  env = build.make_env(config)
  reset_env, step_env = map(jax.jit, (env.reset, env.step))
  state = None

  def reset() -> TimeStep:
    nonlocal state
    state, timestep = reset_env(rng_key)
    return timestep

  def step(action: np.ndarray) -> TimeStep:
    nonlocal state
    state, timestep = step_env(state, action)
    return timestep

  def render() -> np.ndarray:
    import gymnax
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    library_env, params = gymnax.make(config.env.name)
    figure, axes = library_env.render(
      jax.tree.map(lambda x: np.asarray(x[0]), state.env_state),
      params.replace(**config.env.options),
    )
    figure.set_size_inches(4.8, 4.8)
    axes.set_position((0, 0, 1, 1))
    figure.canvas.draw()
    picture = np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()
    pyplot.close(figure)
    return picture

  return HostEnv(
    env.spec,
    reset,
    step,
    lambda: None,
    render=render if config.env.name in _DRAWN_BY_GYMNAX else None,
  )


def _make_host(config: ConfigDict, seed: int) -> HostEnv:
  """One environment on the host, able to draw if it can be made so."""
  try:
    return build.make_host_env(config, 1, seed, 1, evaluation=True, render=True)
  except ValueError:  # Some of gymnasium's know of no drawing.
    return build.make_host_env(config, 1, seed, 1, evaluation=True)


def record(
  config: ConfigDict,
  agent: Agent,
  params: Tree,
  rng_key: chex.PRNGKey,
  *,
  greedy: bool,
  max_steps: int,
  stride: int = 1,
  max_pictures: int = _MAX_FRAMES,
) -> Episode:
  """Takes one episode; it is the one that an evaluation of one would take.

  Args:
    config: of the run, whose environment it is.
    agent: whose `act` is watched.
    params: its parameters.
    rng_key: of the environment and the actions.
    greedy: take the policy's mode rather than a sample.
    max_steps: where an episode that does not end is cut.
    stride: a picture of every so many steps, and of the last.
    max_pictures: about so many; the stride is doubled where there were more.
  """
  if is_sebulba(config):
    seed_key, act_key = jax.random.split(rng_key)
    env = _make_host(
      config, int(jax.random.randint(seed_key, (), 0, 2**31 - 2))
    )
    keys = jax.random.split(act_key, 1)
  else:
    reset_keys, keys = jax.random.split(rng_key, (2, 1))
    env = _make_gymnax(config, reset_keys)

  @jax.jit
  def act(params: Tree, t: chex.Array, timestep: TimeStep, carry: Tree):
    timestep = timestep._replace(obs=env.observe(timestep.obs))
    action, _, carry = agent.act(
      params,
      jax.vmap(jax.random.fold_in, (0, None))(keys, t),
      timestep,
      carry,
      greedy=greedy,
    )
    return action, carry, jax.tree.map(lambda x: x[0], timestep.obs)

  rewards, looks, is_over = [], [], False  # A look: step, picture, obs, action.
  try:
    timestep, carry = env.reset(), agent.initial_carry(1)
    render, note = _try_to_render(env.render)
    for t in range(max_steps + 1):
      action, carry, obs = act(params, np.int32(t), timestep, carry)
      action = np.asarray(action)
      # The step after an episode's last would tell, when its picture is gone.
      may_be_last = not timestep.discount[0] or t in (
        max_steps,
        env.spec.max_episode_steps,
      )
      if t % stride == 0 or may_be_last:
        looks.append(
          (
            t,
            pictures.fit(render()) if render else None,
            jax.tree.map(np.asarray, obs),
            action[0],
          )
        )
      if len(looks) > max_pictures and not may_be_last:
        looks, stride = looks[::2], 2 * stride
      timestep = env.step(action)
      is_over = bool(timestep.is_first[0])
      if is_over or t == max_steps:
        break
      rewards.append(timestep.reward[0])
  finally:
    env.close()
  steps, drawn, observations, actions = map(list, zip(*looks))
  if not render:
    if steps[-1] == len(rewards):
      actions[-1] = None  # Nothing came of it.
    # Where the user gives a map, a drawing of the usual one would be wrong.
    name = '' if 'desc' in config.env.options else config.env.name
    drawn = pictures.paint(name, env.spec, observations, actions)
  return Episode(drawn, steps, np.asarray(rewards, np.float32), is_over, note)


def _try_to_render(render: Callable | None) -> tuple[Callable | None, str]:
  """What draws, or None and the reason why nothing does."""
  try:
    if render and np.shape(render())[2:] != (3,):
      raise ValueError('it gives no picture')
    return render, ''
  except Exception as error:  # Whatever a library's renderer raises.
    return None, ' '.join(str(error).split()) or type(error).__name__


def _define_flags() -> flags.FlagValues:
  values = flags.FlagValues()
  for define, name, default, text, bounds in (
    (flags.DEFINE_string, 'out', '', 'the file, .gif or .mp4.', {}),
    (
      flags.DEFINE_string,
      'checkpoint',
      'last',
      'last, best or a number of updates.',
      {},
    ),
    (
      flags.DEFINE_integer,
      'episodes',
      1,
      'how many, one after the other.',
      {'lower_bound': 1, 'upper_bound': 100},
    ),
    (
      flags.DEFINE_bool,
      'greedy',
      None,
      "the policy's mode, or a sample; by default as the run evaluates.",
      {},
    ),
    (
      flags.DEFINE_integer,
      'seed',
      0,
      'of environments and actions.',
      {'lower_bound': 0, 'upper_bound': 2**31 - 1},
    ),
    (
      flags.DEFINE_integer,
      'max_steps',
      1000,
      'that an episode may have.',
      {'lower_bound': 1, 'upper_bound': 10**9},
    ),
    (
      flags.DEFINE_float,
      'fps',
      0.0,
      'frames per second; 0 is real speed.',
      {'lower_bound': 0.0, 'upper_bound': 50.0},
    ),
  ):
    define(name, default, text, flag_values=values, **bounds)
  return values


def _check_out(out: str) -> Callable[..., None]:
  """What writes the file; a mistake is found before the work."""
  write = {'.gif': film.write_gif, '.mp4': film.write_mp4}.get(
    os.path.splitext(out)[1]
  )
  if not write:
    raise ValueError(f'--out={out} must end in .gif or .mp4')
  if write is film.write_mp4:
    film.find_ffmpeg()
  return write


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Loads, records, writes."""
  path = tools.single_path(paths, 'runs', 'watch RUN')
  out = values.out or os.path.join(path, 'episode.gif')
  write = _check_out(out)
  envpool.load_opengl()  # Before the run's environment is known.
  from podrl.run import policy

  loaded = policy.load(path, values.checkpoint)
  if not os.access(os.path.dirname(out) or '.', os.W_OK):
    raise ValueError(f'--out={out} is not in a directory that can be written')
  config = loaded.config
  speed = film.steps_per_second(config.env.suite, config.env.name, loaded.spec)
  greedy = config.eval.greedy if values.greedy is None else values.greedy
  episodes = []
  for i in range(values.episodes):
    episode = record(
      config,
      loaded.agent,
      loaded.params,
      jax.random.fold_in(jax.random.key(values.seed), i),
      greedy=greedy,
      max_steps=values.max_steps,
      stride=1 if values.fps else math.ceil(speed / _MAX_FPS),
      max_pictures=_MAX_FRAMES // values.episodes,
    )
    print(
      f'return {film.totals(episode)[-1]}, {len(episode.rewards)} steps'
      f'{"" if episode.is_over else ", cut by --max_steps"}'
    )
    episodes.append(episode)
  frames, seconds = film.join(episodes, values.fps, speed)
  write(out, frames, seconds)
  if episodes[0].note:
    print(f'drawn from observations: {episodes[0].note}')
  print(
    f'written: {out}, {len(frames)} frames, {os.path.getsize(out) / 1e6:.2f} MB'
  )


def run(argv: Sequence[str]) -> int:
  """The command; returns its exit code, as `tools.run_command`."""
  return tools.run_command(argv, __doc__, _define_flags(), _act)
