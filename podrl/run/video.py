"""Records episodes of a policy, as the frames of a GIF or an MP4."""

from collections.abc import Callable, Sequence
import math
import os
from typing import Any, NamedTuple
import warnings

import chex
import imageio.v3 as imageio
import jax
import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from podrl.core.learner import fold_into_rows
from podrl.core.returns import of_first_player
from podrl.envs import SUITES
from podrl.fields import Fields
from podrl.messages import one_line
from podrl.run import build, policy
from podrl.types import Array, Box, EnvSpec, HostEnv, TimeStep, Tree, Variables

ENDINGS = '.gif', '.mp4'  # Endings of files that `write` can write.
_MAX_PICTURES = 600  # A file has at most about this many pictures.
_MAX_FPS = 25  # More frames per second make the file larger, not better.
_MIN_SIDE, _MAX_SIDE = 240, 320  # Pictures are scaled to about this size.
_SIZE = (300, 200)  # Size of a drawing, in pixels.
_OVERSAMPLING = 3  # Drawings are made this much larger, then reduced.
_MAX_BARS = 60
_PAPER, _INK, _PALE = '#fafafa', '#33383d', '#b9bfc6'
_BLUE, _ORANGE, _GREEN, _RED = '#1f5fa8', '#c44e00', '#2f8f4e', '#c0303c'
# Colours of the background and of each channel of a 0/1 image.
_CHANNEL_COLORS = (
  '#16181d #f0f0f0 #ff9e2e #54a0eb #e24a4a #65be5c #ba76db #f7d552 #4bc8c8'
).split()
# gymnasium gives no speed for these tasks, or their module may be missing.
_STEPS_PER_SECOND = dict(
  Pong=30, Pendulum=20, Hopper=125, Walker2d=125, LunarLander=50, CarRacing=50
)


class Episode(NamedTuple):
  """An episode of T steps with K pictures."""

  pictures: list[np.ndarray]  # K pictures, uint8 `[H, W, 3]`.
  steps: list[int]  # The number of steps before each picture; the first is 0.
  returns: np.ndarray  # The return after 0, 1 ... T steps, `[T + 1]`.
  is_over: bool  # Whether the episode ended by itself, before `max_steps`.
  note: str  # A sentence that says why the library drew no pictures, or ''.


def record(
  loaded: policy.Policy,
  rng_key: chex.PRNGKey,
  *,
  greedy: bool,
  max_steps: int,
  stride: int = 1,
  max_pictures: int = _MAX_PICTURES,
  should_stop: Callable[[], bool] = lambda: False,
) -> Episode:
  """Records the episode that an evaluation of one episode would run.

  There is one picture every `stride` steps, and always one of the last step. If
  there are more than `max_pictures`, every second picture is removed, and
  `stride` doubles.
  """
  config, agent = loaded.config, loaded.agent
  # gymnasium warns if an environment cannot draw.
  warnings.filterwarnings('ignore', '(?s).*render')
  env, act_keys = _make_env(config, rng_key)

  @jax.jit
  def act(variables: Variables, t: Array, timestep: TimeStep, carry: Tree):
    timestep = timestep._replace(obs=env.spec.observe(timestep.obs))
    keys = fold_into_rows(act_keys, t)
    action, _, carry = agent.act(
      variables, keys, timestep, carry, greedy=greedy
    )
    return action, carry, jax.tree.map(lambda x: x[0], timestep.obs)

  sign: Tree = np.ones(1) if env.spec.has_turns else ()
  returns, is_over = [0.0], False
  moments = []  # Tuples (step, picture or None, observation, action).
  try:
    timestep = env.reset()._replace(info=())
    carry = agent.initial_carry(np.zeros(1, np.int32))
    render, note = _find_renderer(env)
    for t in range(max_steps + 1):
      action, carry, obs = act(loaded.variables, np.int32(t), timestep, carry)
      action = np.asarray(action)
      # Draw now if this may be the last step. The next call of `step` shows
      # whether it was, but then the library can draw only the next episode.
      limits = (max_steps, env.spec.max_episode_steps)
      may_be_last = not timestep.discount[0] or t in limits
      if t % stride == 0 or may_be_last:
        picture = fit(render()) if render else None
        shown = env.spec.to_library(action)[0]
        moments.append((t, picture, jax.tree.map(np.asarray, obs), shown))
      if len(moments) > max_pictures and not may_be_last:
        moments, stride = moments[::2], 2 * stride
      timestep = env.step(action)._replace(info=())
      is_over = bool(timestep.is_first[0])
      if is_over or t == max_steps or should_stop():
        break
      reward, sign = of_first_player(timestep, sign)
      returns.append(returns[-1] + float(reward[0]))
  finally:
    env.close()
  steps, pictures, observations, actions = map(list, zip(*moments))
  if not render:
    if steps[-1] == len(returns) - 1:
      actions[-1] = None  # The episode had ended, so this action was not used.
    pictures = paint(config['env.name'], env.spec, observations, actions)
  return Episode(pictures, steps, np.asarray(returns), is_over, note)


def describe(episode: Episode) -> str:
  """Describes an episode in a line."""
  end = '' if episode.is_over else ', stopped by --max_steps'
  total, steps = episode.returns[-1], len(episode.returns) - 1
  return f'return {total:.6g}, {steps} steps{end}'


def _make_env(
  config: Fields, rng_key: chex.PRNGKey
) -> tuple[HostEnv, chex.PRNGKey]:
  """Makes one environment, and a batch of one random key for actions."""
  if build.architecture(config) == 'anakin':
    reset_keys, act_keys = jax.random.split(rng_key, (2, 1))
    return _on_host(config, reset_keys), act_keys
  seed_key, act_key = jax.random.split(rng_key)
  seed = int(jax.random.randint(seed_key, (), 0, 2**31 - 2))
  try:
    env = build.make_host_env(config, 1, seed, 1, evaluation=True, render=True)
  except ValueError:  # Some gymnasium environments have no render_mode.
    env = build.make_host_env(config, 1, seed, 1, evaluation=True)
  return env, jax.random.split(act_key, 1)


def _on_host(config: Fields, reset_keys: chex.PRNGKey) -> HostEnv:
  """Makes a JAX environment, with the interface of a host environment."""
  env = build.make_env(config)
  reset, step, draw = jax.jit(env.reset), jax.jit(env.step), env.render
  state: Any = None

  def keep(stepped: tuple[Any, TimeStep]) -> TimeStep:
    nonlocal state
    state, timestep = stepped
    return timestep

  return HostEnv(
    env.spec._replace(observe=lambda obs: obs, to_library=lambda x: x),
    reset=lambda: keep(reset(reset_keys)),
    step=lambda action: keep(step(state, action)),
    close=lambda: None,
    render=(lambda: draw(state)) if draw else None,
  )


def _find_renderer(env: HostEnv) -> tuple[Callable | None, str]:
  """Returns (a function that draws, ''), or (None, the reason for None)."""
  draw = env.render
  try:
    if draw is None:
      return None, ''
    to_rgb(draw())
    return lambda: to_rgb(draw()), ''
  except Exception as error:  # Libraries raise many kinds of errors.
    reason = one_line(error)
    what = f'the environment could not draw itself ({reason})'
    is_missing = isinstance(error, NotImplementedError)
    if is_missing or 'not implemented' in reason.lower():
      what = 'the environment cannot draw itself'
    return None, f'{what}; the video shows its observations'


def to_rgb(picture: Any) -> np.ndarray:
  """Converts a library's picture to uint8 `[H, W, 3]`.

  The picture is `[H, W]` or has 1, 3 or 4 channels. If no float is more than 1,
  floats are from 0 to 1; other numbers are from 0 to 255.

  Raises:
    NotImplementedError: if it is no picture.
  """
  x = np.asarray(picture)
  x = x[..., None] if x.ndim == 2 else x
  if x.ndim != 3 or x.shape[2] not in (1, 3, 4) or x.dtype.kind not in 'buif':
    raise NotImplementedError
  x = x.repeat(3, 2) if x.shape[2] == 1 else x[..., :3]
  if x.dtype == np.uint8:
    return x
  x = np.nan_to_num(x.astype(np.float32))
  is_unit = np.asarray(picture).dtype.kind in 'bf' and x.max(initial=0) <= 1
  return np.clip(x * 255 if is_unit else x, 0, 255).astype(np.uint8)


def fit(picture: np.ndarray) -> np.ndarray:
  """Scales a picture, uint8 `[H, W, 3]`, by a whole factor to a good size."""
  side = max(picture.shape[:2])
  if side > _MAX_SIDE:
    return np.asarray(Image.fromarray(picture).reduce(-(-side // _MAX_SIDE)))
  factor = max(1, round(_MIN_SIDE / side))
  return picture.repeat(factor, 0).repeat(factor, 1)


def paint(
  name: str,
  spec: EnvSpec,
  observations: Sequence[Tree],
  actions: Sequence[np.ndarray | None],
) -> list[np.ndarray]:
  """Makes a picture of each observation of an episode, all of the same size.

  `actions` has the action chosen at each observation, or None at the end.
  """
  rows = [[np.asarray(x) for x in jax.tree.leaves(o)] for o in observations]
  shape = rows[0][0].shape if len(rows[0]) == 1 else ()
  sides = shape[1:] if spec.channels_first else shape[:2]
  if len(shape) in (2, 3) and min(sides) > 3:
    images = _to_images(np.concatenate(rows), spec.channels_first)
    return [fit(x) for x in images]
  task = name.rpartition('/')[2].partition('-')[0].removesuffix('Continuous')
  if drawing := _DRAWINGS.get((task, shape)):
    return [drawing(*map(float, row[0])) for row in rows]
  flat = [np.concatenate([np.ravel(x) for x in row]) for row in rows]
  return _draw_bars(np.stack(flat).astype(np.float64), actions)


def _to_images(obs: np.ndarray, channels_first: bool) -> np.ndarray:
  """Converts `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]` to RGB images."""
  obs = np.moveaxis(obs, 1, -1) if channels_first else obs
  obs = obs if obs.ndim == 4 else obs[..., None]
  num_channels = obs.shape[-1]
  if obs.dtype != np.uint8 and np.isin(obs, (0, 1)).all():
    # If several channels of a pixel are 1, the last of them sets the colour.
    last = (obs.astype(bool) * np.arange(1, num_channels + 1)).max(-1)
    palette = [ImageColor.getrgb(x) for x in _CHANNEL_COLORS]
    index = np.where(last, (last - 1) % (len(palette) - 1) + 1, 0)
    return np.asarray(palette, np.uint8)[index]
  # The last frame of a stack is the newest. It is in colour or in gray.
  is_color = num_channels % 3 == 0
  newest = obs[..., -3:] if is_color else obs[..., -1:].repeat(3, -1)
  if obs.dtype == np.uint8:
    return newest
  low, high = newest.min(), newest.max()  # Range over the whole episode.
  return (255.0 * (newest - low) / (high - low or 1)).astype(np.uint8)


def _draw(left: float, right: float, bottom: float, *shapes) -> np.ndarray:
  """Draws shapes in a picture that spans x from `left` to `right`.

  The lower edge of the picture is at y = `bottom`. A shape is (kind, points,
  colour, size): the kind is 'line', 'dots' or 'area'; the size is a width or a
  radius in pixels.
  """
  image = Image.new('RGB', [_OVERSAMPLING * x for x in _SIZE], _PAPER)
  draw = ImageDraw.Draw(image)
  unit = image.width / (right - left)
  for kind, points, color, size in shapes:
    size = round(size * _OVERSAMPLING)
    points = [
      ((x - left) * unit, image.height - (y - bottom) * unit) for x, y in points
    ]
    if kind == 'area':
      draw.polygon(points, color)
    elif kind == 'line':
      draw.line(points, color, size, joint='curve')
    else:
      for point in points:
        draw.circle(point, size, color)
  return np.asarray(image.reduce(_OVERSAMPLING))


def _cart_pole(x, _v, angle, _w) -> np.ndarray:
  tip = (x + math.sin(angle), 0.2 + math.cos(angle))
  corners = ((-0.4, -0.2), (0.4, -0.2), (0.4, 0.2), (-0.4, 0.2))
  return _draw(
    *(-2.7, 2.7, -1.1),
    ('line', [(-9, 0), (9, 0)], _PALE, 2),
    *(('line', [(side, -0.16), (side, 0)], _RED, 3) for side in (-2.4, 2.4)),
    ('area', [(x + i, j) for i, j in corners], _INK, 0),
    ('line', [(x, 0.2), tip], _ORANGE, 7),
    ('dots', [(x, 0.2)], _BLUE, 4),
  )


def _pendulum(cos, sin, _w) -> np.ndarray:
  return _draw(  # The angle is 0 where the pendulum is upright.
    *(-1.95, 1.95, -1.3),
    ('line', [(0, 0), (0, 1.15)], _PALE, 2),
    ('line', [(0, 0), (-sin, cos)], _RED, 12),
    ('dots', [(0, 0), (-sin, cos)], _RED, 6),
    ('dots', [(0, 0)], _INK, 4),
  )


def _mountain_car(x, _v) -> np.ndarray:
  hill = [(p, 0.45 * math.sin(3 * p) + 0.55) for p in np.linspace(-1.3, 0.7)]
  return _draw(
    *(-1.25, 0.65, -0.03),
    ('line', hill, _PALE, 3),
    ('line', [(0.5, 1.0), (0.5, 1.2)], _INK, 2),  # The flag.
    ('area', [(0.5, 1.2), (0.5, 1.14), (0.59, 1.17)], _GREEN, 0),
    ('dots', [(x, 0.45 * math.sin(3 * x) + 0.59)], _BLUE, 8),
  )


def _acrobot(cos_1, sin_1, cos_2, sin_2, *_w) -> np.ndarray:
  elbow = (sin_1, -cos_1)  # Both angles are 0 where the links hang down.
  hand_x = sin_1 + sin_1 * cos_2 + cos_1 * sin_2
  hand_y = -cos_1 - cos_1 * cos_2 + sin_1 * sin_2
  return _draw(
    *(-3.3, 3.3, -2.2),
    ('line', [(-9, 1), (9, 1)], _GREEN, 2),  # The goal's height.
    ('line', [(0, 0), elbow, (hand_x, hand_y)], _BLUE, 7),
    ('dots', [(0, 0), elbow], _ORANGE, 5),
  )


# Each key is a task's name without its version, and an observation's shape.
_DRAWINGS: dict[tuple, Callable[..., np.ndarray]] = {
  ('CartPole', (4,)): _cart_pole,
  ('Pendulum', (3,)): _pendulum,
  ('MountainCar', (2,)): _mountain_car,
  ('Acrobot', (6,)): _acrobot,
}


def _draw_bars(
  values: np.ndarray, actions: Sequence[np.ndarray | None]
) -> list[np.ndarray]:
  """Draws N pictures of `values` `[N, D]` as bars, with the action as text."""
  font = ImageFont.load_default(11)
  num_bars = min(values.shape[1], _MAX_BARS)
  top, bottom = 20, _SIZE[1] - 24
  base = (top + bottom) // 2 if (values < 0).any() else bottom
  largest = np.abs(values).max(0, initial=1e-9)  # Over the whole episode.
  pitch = (_SIZE[0] - 12) / num_bars
  pictures = []
  for row, action in zip(values, actions):
    image = Image.new('RGB', _SIZE, _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((6, 3), 'observation', _INK, font)
    draw.line((6, base, _SIZE[0] - 6, base), _PALE)
    for j in range(num_bars):
      end = base - (base - top) * row[j] / largest[j]
      left = 6 + j * pitch
      box = (left, min(base, end), left + 0.7 * pitch, max(base, end))
      draw.rectangle(box, _BLUE)
    if action is not None:
      numbers = ', '.join(f'{x:.3g}' for x in np.ravel(action)[:6])
      draw.text((6, bottom + 6), f'action {numbers}', _ORANGE, font)
    pictures.append(np.asarray(image))
  return pictures


def add_caption(picture: np.ndarray, left: str, right: str) -> np.ndarray:
  """Adds two texts above a picture; makes its width and height even numbers."""
  height, width = picture.shape[:2]
  total = max(width + width % 2, 160)  # The texts need some width.
  image = Image.new('RGB', (total, 18 + height + height % 2), '#20242a')
  image.paste(Image.fromarray(picture), ((total - width) // 2, 18))
  draw, font = ImageDraw.Draw(image), ImageFont.load_default(12)
  draw.text((5, 2), left, '#ffffff', font)
  draw.text((total - 5, 2), right, '#c8ccd2', font, anchor='ra')
  return np.asarray(image)


def to_frames(
  episodes: Sequence[Episode], steps_per_second: float, fps: float
) -> tuple[list[np.ndarray], list[float]]:
  """Returns the frames of all episodes, and the seconds to show each one."""
  frames, seconds = [], []
  shapes = [x.shape for episode in episodes for x in episode.pictures]
  height, width, _ = np.max(shapes, axis=0)  # A file has one size.
  for i, episode in enumerate(episodes, 1):
    number = f'{i}/{len(episodes)}  ' if len(episodes) > 1 else ''
    digits = 2 if np.any(episode.returns % 1) else 0
    for picture, t in zip(episode.pictures, episode.steps):
      rest = height - len(picture), width - picture.shape[1]
      sides = [(x // 2, x - x // 2) for x in rest]
      picture = np.pad(picture, [*sides, (0, 0)])
      left = f'{number}return {episode.returns[t]:.{digits}f}'
      frames.append(add_caption(picture, left, f'step {t}'))
    strides = np.diff(episode.steps)
    seconds += [1 / fps if fps else x / steps_per_second for x in strides]
    seconds.append(1.0)  # The last frame is shown longer.
  return frames, seconds


def write(path: str, frames: list[np.ndarray], seconds: list[float]) -> None:
  """Writes frames of one size, each with its time, to a GIF or an MP4."""
  if path.endswith('.gif'):
    # Many viewers show a frame for 100 ms if its time is less than 20 ms.
    durations = [10 * max(2, round(100 * x)) for x in seconds]
    imageio.imwrite(path, np.stack(frames), loop=0, duration=durations)
    return
  fps = 1 / float(np.median(seconds))
  counts = [max(1, round(x * fps)) for x in seconds]
  # Without this, imageio forks. A fork is unsafe in a process with threads.
  os.environ.setdefault('IMAGEIO_FFMPEG_NO_PREVENT_SIGINT', '1')
  repeated = np.repeat(np.stack(frames), counts, axis=0)
  imageio.imwrite(path, repeated, fps=fps, macro_block_size=2)


def real_speed(config: Fields, spec: EnvSpec) -> float:
  """Returns about how many steps the real task takes per second."""
  import gymnasium
  from gymnasium.envs.registration import load_env_creator

  name = config['env.name']
  if spec.channels_first and spec.frame_skip > 1:  # Atari.
    return 60 / spec.frame_skip
  if speed := SUITES[config['env.suite']].steps_per_second(name):
    return speed
  if (short_name := name.partition('-')[0]) in _STEPS_PER_SECOND:
    return float(_STEPS_PER_SECOND[short_name])
  try:
    entry: Any = gymnasium.spec(name).entry_point
    entry = entry if callable(entry) else load_env_creator(entry)
    return float(entry.metadata['render_fps'])
  except Exception:  # The name is unknown, or a module cannot be imported.
    return 25.0 if isinstance(spec.action, Box) else 10.0


def make(
  loaded: policy.Policy,
  rng_key: chex.PRNGKey,
  *,
  greedy: bool,
  num_episodes: int = 1,
  max_steps: int = 1000,
  fps: float = 0.0,
  should_stop: Callable[[], bool] = lambda: False,
) -> tuple[list[Episode], list[np.ndarray], list[float]]:
  """Records episodes; returns them, all frames, and the seconds of each frame.

  `fps` is the number of frames per second; 0 means real speed. If `should_stop`
  returns true after a step, the episode ends there.
  """
  speed = real_speed(loaded.config, loaded.spec)
  episodes = [
    record(
      loaded,
      jax.random.fold_in(rng_key, i),
      greedy=greedy,
      max_steps=max_steps,
      stride=1 if fps else math.ceil(speed / _MAX_FPS),
      max_pictures=_MAX_PICTURES // num_episodes,
      should_stop=should_stop,
    )
    for i in range(num_episodes)
  ]
  return episodes, *to_frames(episodes, speed, fps)
