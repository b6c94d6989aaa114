"""Frames with captions, how fast they follow, and files of them: GIF, MP4."""

from collections.abc import Sequence
import subprocess
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from podrl.types import Box, EnvSpec

_NUM_COLORS = 64  # Of a GIF.
_CAPTION_HEIGHT = 18
_HOLD_SECONDS = 1.0  # An episode's last frame stays as long.
_MIN_WIDTH = 160  # So that a caption fits.

# What gymnasium does not say, or says in modules that need more packages.
_STEPS_PER_SECOND = {
  'Pong-misc': 30.0,
  'Pendulum-v1': 20.0,
  'Hopper': 125.0,
  'Walker2d': 125.0,
  'Humanoid': 67.0,
  'HumanoidStandup': 67.0,
  'CarRacing': 50.0,
  'LunarLander': 50.0,
  'LunarLanderContinuous': 50.0,
  'BipedalWalker': 50.0,
  'BipedalWalkerHardcore': 50.0,
}


class Episode(NamedTuple):
  """An episode of T steps, with K pictures.

  Attributes:
    pictures: uint8 `[H, W, 3]` each, K of them.
    steps: how many steps had been taken at each. The first is 0, the last T, or
      somewhat less where the environment cut the episode at no known length.
    rewards: float32 `[T]`, raw.
    is_over: whether it ended, and was not cut.
    note: why the library did not draw it, or ''.
  """

  pictures: list[np.ndarray]
  steps: list[int]
  rewards: np.ndarray
  is_over: bool
  note: str


def compose(picture: np.ndarray, left: str, right: str) -> np.ndarray:
  """A frame: a picture under a line of two texts.

  Args:
    picture: uint8 `[H, W, 3]`.
    left: text in the upper left corner.
    right: text in the upper right one.

  Returns:
    uint8, with an even number of rows and of columns, which MP4 needs.
  """
  height, width = picture.shape[:2]
  total = max(width, _MIN_WIDTH)
  total += total % 2
  image = Image.new(
    'RGB', (total, height + _CAPTION_HEIGHT + height % 2), '#20242a'
  )
  image.paste(Image.fromarray(picture), ((total - width) // 2, _CAPTION_HEIGHT))
  draw, font = ImageDraw.Draw(image), ImageFont.load_default(12)
  draw.text((5, 2), left, '#ffffff', font)
  draw.text((total - 5, 2), right, '#c8ccd2', font, anchor='ra')
  return np.asarray(image)


def totals(episode: Episode) -> list[str]:
  """The return after each number of steps, `[T + 1]`, as it is drawn."""
  sums = np.concatenate([[0.0], np.cumsum(episode.rewards, dtype=np.float64)])
  digits = 2 if np.any(episode.rewards % 1) else 0
  return [f'{x:.{digits}f}' for x in sums]


def join(
  episodes: Sequence[Episode], fps: float, speed: float
) -> tuple[list[np.ndarray], list[float]]:
  """Frames of episodes one after the other, and the seconds of each."""
  frames, seconds = [], []
  for i, episode in enumerate(episodes, 1):
    number = f'{i}/{len(episodes)}  ' if len(episodes) > 1 else ''
    returns = totals(episode)
    frames += [
      compose(picture, f'{number}return {returns[t]}', f'step {t}')
      for picture, t in zip(episode.pictures, episode.steps)
    ]
    seconds += [1 / fps if fps else x / speed for x in np.diff(episode.steps)]
    seconds.append(_HOLD_SECONDS)
  return frames, seconds


def steps_per_second(suite: str, name: str, spec: EnvSpec) -> float:
  """How fast a task runs in the world that it is of, about."""
  import gymnasium
  from gymnasium.envs.registration import load_env_creator

  if suite == 'envpool':
    import envpool

    if 'atari' in envpool.registration.registry.specs[name][0]:
      return 60 / spec.frame_skip
  known = _STEPS_PER_SECOND.get(name) or _STEPS_PER_SECOND.get(
    name.partition('-')[0]
  )
  if known:
    return known
  try:
    entry = gymnasium.spec(name).entry_point
    entry = entry if callable(entry) else load_env_creator(entry)
    return float(entry.metadata['render_fps'])
  except Exception:  # No such name, or a module that cannot be imported.
    return 25.0 if isinstance(spec.action, Box) else 10.0


def _palette(frames: Sequence[np.ndarray]) -> Image.Image:
  """The colours of a GIF."""
  pixels = np.stack([x[::2, ::2] for x in frames]).astype(np.int32)
  colors, counts = np.unique(pixels @ (1 << 16, 1 << 8, 1), return_counts=True)
  # By the root of their counts, so that small things keep their colours.
  colors = colors.repeat(np.ceil(np.sqrt(counts)).astype(int))
  colors = np.stack([colors >> 16, colors >> 8 & 255, colors & 255], -1)
  return Image.fromarray(colors[None].astype(np.uint8)).quantize(_NUM_COLORS)


def write_gif(
  path: str, frames: Sequence[np.ndarray], seconds: Sequence[float]
) -> None:
  """Writes frames of one size, each for its time, to be repeated forever."""
  palette = _palette(frames)  # One: a palette for each frame costs more.
  images = [
    Image.fromarray(x).quantize(palette=palette, dither=Image.Dither.NONE)
    for x in frames
  ]
  images[0].save(
    path,
    save_all=True,
    append_images=images[1:],
    loop=0,
    # Many viewers take less than 20 ms for 100.
    duration=[10 * max(2, round(100 * x)) for x in seconds],
  )


def find_ffmpeg() -> None:
  """Tells matplotlib of the ffmpeg of imageio-ffmpeg, where there is no other.

  Raises:
    ValueError: if there is none at all.
  """
  import matplotlib
  from matplotlib.animation import FFMpegWriter

  if not FFMpegWriter.isAvailable():
    try:
      import imageio_ffmpeg

      matplotlib.rcParams['animation.ffmpeg_path'] = (
        imageio_ffmpeg.get_ffmpeg_exe()
      )
    except (ImportError, RuntimeError) as error:
      raise ValueError(
        'an .mp4 needs ffmpeg, which is not found; install '
        'ffmpeg or imageio-ffmpeg, or write a .gif'
      ) from error


def write_mp4(
  path: str, frames: Sequence[np.ndarray], seconds: Sequence[float]
) -> None:
  """Writes frames of one size, each for its time, through ffmpeg."""
  from matplotlib.animation import FFMpegWriter
  from matplotlib.figure import Figure

  height, width = frames[0].shape[:2]
  figure = Figure((width / 100, height / 100), 100)
  image = figure.figimage(frames[0])
  fps = 1 / float(np.median(seconds))
  writer = FFMpegWriter(fps)
  try:
    with writer.saving(figure, path, 100):
      for frame, duration in zip(frames, seconds):
        image.set_data(frame)
        for _ in range(max(1, round(duration * fps))):
          writer.grab_frame()
  except subprocess.CalledProcessError as error:
    raise ValueError(
      f'ffmpeg does not write {path}: {(error.stderr or "").strip()[-200:]}'
    ) from error
