"""Pictures of what an agent observed, where a library draws none itself.

First images, then what is known by name, then bars of any numbers.
"""

from collections.abc import Callable, Sequence
import math

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from podrl.types import Array, Discrete, EnvSpec, Tree

_SIZE = (300, 200)  # Of a drawing, in pixels.
_MIN_SIDE = 240  # Images are scaled up to about this.
_MAX_SIDE = 320  # And down to at most this.
_FINENESS = 3  # Drawings are made so much larger, for smooth edges.
_MAX_BARS = 300
_PAPER, _INK, _PALE = '#fafafa', '#33383d', '#b9bfc6'
_BLUE, _ORANGE, _GREEN, _RED = '#1f5fa8', '#c44e00', '#2f8f4e', '#c0303c'
_NIGHT = (22, 24, 29)
# Of an image's channels, the later over the earlier.
_CHANNELS = np.asarray(
  [
    (240, 240, 240),
    (255, 158, 46),
    (84, 160, 235),
    (226, 74, 74),
    (101, 190, 92),
    (186, 118, 219),
    (247, 213, 82),
    (75, 200, 200),
    (240, 140, 190),
    (165, 115, 80),
  ],
  np.uint8,
)

_Shape = tuple[str, Sequence[tuple[float, float]], str, float]


def fit(picture: np.ndarray) -> np.ndarray:
  """Scales a picture by a whole number to a size fit to be watched.

  Args:
    picture: uint8 `[H, W, 3]`.
  """
  side = max(picture.shape[:2])
  if side > _MAX_SIDE:
    return np.asarray(Image.fromarray(picture).reduce(-(-side // _MAX_SIDE)))
  factor = max(1, round(_MIN_SIDE / side))
  return picture.repeat(factor, 0).repeat(factor, 1)


def paint(
  name: str,
  spec: EnvSpec,
  observations: Sequence[Tree],
  actions: Sequence[Array | None],
) -> list[np.ndarray]:
  """Pictures of one episode's observations.

  Args:
    name: of the environment.
    spec: of the environment.
    observations: as `spec.obs` says, in the order of time.
    actions: that were chosen there; None at an episode's end.

  Returns:
    uint8 `[H, W, 3]` each, all of one size.
  """
  leaves = [jax.tree.leaves(obs) for obs in observations]
  only = [np.asarray(x[0]) for x in leaves] if len(leaves[0]) == 1 else None
  if (
    only
    and only[0].ndim in (2, 3)
    and min(only[0].shape[1:] if spec.channels_first else only[0].shape[:2]) > 3
  ):
    return [fit(x) for x in _images(np.stack(only), spec.channels_first)]
  if only:
    key = (name.rpartition('/')[2].partition('-')[0], *only[0].shape)
    if key in _DRAWINGS:
      return [_DRAWINGS[key](x) for x in only]
  flat = np.stack(
    [
      np.concatenate([np.ravel(x).astype(np.float64) for x in row])
      for row in leaves
    ]
  )
  return _bars(flat, actions, spec)


def _images(obs: np.ndarray, channels_first: bool) -> np.ndarray:
  """uint8 `[N, H, W, 3]` of `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]`."""
  obs = np.moveaxis(obs, 1, -1) if channels_first else obs
  obs = obs if obs.ndim == 4 else obs[..., None]
  num_channels = obs.shape[-1]
  if obs.dtype != np.uint8 and np.isin(obs, (0, 1)).all():
    # 0 where nothing is, else 1 and the last channel that is set.
    which = (obs.astype(bool) * np.arange(1, num_channels + 1)).max(-1)
    wheel = _CHANNELS[np.arange(num_channels) % len(_CHANNELS)]
    return np.concatenate([np.asarray([_NIGHT], np.uint8), wheel])[which]
  # The newest of a stack, in colour or in gray.
  newest = (
    obs[..., -3:] if num_channels % 3 == 0 else obs[..., -1:].repeat(3, -1)
  )
  if obs.dtype == np.uint8:
    return newest
  low, high = newest.min(), newest.max()  # Over the episode.
  return (255.0 * (newest - low) / (high - low or 1)).astype(np.uint8)


def _draw(
  view: tuple[float, float, float], shapes: Sequence[_Shape]
) -> np.ndarray:
  """Draws shapes.

  Args:
    view: the least and the greatest x that are seen, and the least y.
    shapes: (kind, points, colour, thickness or radius in pixels) each; of kind
      'line', 'dots' or 'area'.
  """
  left, right, bottom = view
  image = Image.new('RGB', [_FINENESS * x for x in _SIZE], _PAPER)
  draw = ImageDraw.Draw(image)
  unit = image.width / (right - left)
  for kind, points, color, size in shapes:
    size = round(size * _FINENESS)
    points = [
      ((x - left) * unit, image.height - (y - bottom) * unit) for x, y in points
    ]
    if kind == 'area':
      draw.polygon(points, color)
    if kind == 'line':
      draw.line(points, color, size, joint='curve')
    if kind == 'dots':
      for x, y in points:
        draw.ellipse((x - size, y - size, x + size, y + size), color)
  return np.asarray(image.reduce(_FINENESS))


def _cart_pole(obs: np.ndarray) -> np.ndarray:
  x, _, angle, _ = map(float, obs)
  tip = (x + math.sin(angle), 0.2 + math.cos(angle))
  ends = [('line', [(end, -0.16), (end, 0.0)], _RED, 3) for end in (-2.4, 2.4)]
  cart = [
    (x + i, j) for i, j in ((-0.4, -0.2), (0.4, -0.2), (0.4, 0.2), (-0.4, 0.2))
  ]
  return _draw(
    (-2.7, 2.7, -1.1),
    [
      ('line', [(-9, 0), (9, 0)], _PALE, 2),
      *ends,
      ('area', cart, _INK, 0),
      ('line', [(x, 0.2), tip], _ORANGE, 7),
      ('dots', [tip], _ORANGE, 3),
      ('dots', [(x, 0.2)], _BLUE, 4),
    ],
  )


def _pendulum(obs: np.ndarray) -> np.ndarray:
  cos, sin, _ = map(float, obs)  # Of an angle that is 0 upright.
  return _draw(
    (-1.95, 1.95, -1.3),
    [
      ('line', [(0, 0), (0, 1.15)], _PALE, 2),
      ('line', [(0, 0), (-sin, cos)], _RED, 12),
      ('dots', [(0, 0), (-sin, cos)], _RED, 6),
      ('dots', [(0, 0)], _INK, 4),
    ],
  )


def _mountain_car(obs: np.ndarray, goal: float = 0.5) -> np.ndarray:
  height = lambda x: 0.45 * math.sin(3 * x) + 0.55
  x = float(obs[0])
  hill = [(p, height(p)) for p in np.linspace(-1.3, 0.7, 81)]
  flag = [(goal, height(goal) + y) for y in (0, 0.2, 0.14)]
  flag.append((goal + 0.09, flag[0][1] + 0.17))
  return _draw(
    (-1.25, 0.65, -0.03),
    [
      ('area', [*hill, (0.7, -1), (-1.3, -1)], '#dfe3e8', 0),
      ('line', hill, _PALE, 3),
      ('line', flag[:2], _INK, 2),
      ('area', flag[1:], _GREEN, 0),
      ('dots', [(x, height(x) + 0.04)], _BLUE, 8),
    ],
  )


def _acrobot(obs: np.ndarray) -> np.ndarray:
  cos_1, sin_1, cos_2, sin_2 = map(float, obs[:4])  # Angles 0 are hanging.
  elbow = (sin_1, -cos_1)
  hand = (
    sin_1 + sin_1 * cos_2 + cos_1 * sin_2,
    -cos_1 - cos_1 * cos_2 + sin_1 * sin_2,
  )
  return _draw(
    (-3.3, 3.3, -2.2),
    [
      ('line', [(-9, 1), (9, 1)], _GREEN, 2),  # Where the hand is to be.
      ('line', [(0, 0), elbow, hand], _BLUE, 7),
      ('dots', [hand], _BLUE, 3),
      ('dots', [(0, 0), elbow], _ORANGE, 5),
    ],
  )


def _reacher(obs: np.ndarray) -> np.ndarray:
  cos, sin, _, goal = obs.reshape(4, 2).tolist()
  elbow, hand = (cos[0], sin[0]), (sum(cos), sum(sin))
  return _draw(
    (-3.45, 3.45, -2.3),
    [
      ('dots', [goal], _GREEN, 8),
      ('line', [(0, 0), elbow, hand], _BLUE, 5),
      ('dots', [(0, 0), elbow], _INK, 4),
      ('dots', [hand], _ORANGE, 5),
    ],
  )


def _swimmer(obs: np.ndarray) -> np.ndarray:
  *urchins, place, _, goal = obs.reshape(-1, 2).tolist()
  return _draw(
    (-1.8, 1.8, -1.2),
    [
      ('dots', urchins, _INK, 7),
      ('dots', [goal], _GREEN, 8),
      ('dots', [place], _ORANGE, 6),
    ],
  )


def _frozen_lake(obs: np.ndarray) -> np.ndarray:
  from gymnasium.envs.toy_text.frozen_lake import MAPS

  side = math.isqrt(len(obs))
  colors = {
    'S': (196, 214, 232),
    'F': (225, 236, 246),
    'H': (44, 72, 110),
    'G': (47, 143, 78),
  }
  tiles = (
    np.asarray(
      [[colors[x] for x in row] for row in MAPS[f'{side}x{side}']], np.uint8
    )
    .repeat(12, 0)
    .repeat(12, 1)
  )
  y, x = divmod(int(obs.argmax()), side)
  tiles[::12] = tiles[:, ::12] = 255
  tiles[12 * y + 4 : 12 * y + 9, 12 * x + 4 : 12 * x + 9] = (196, 78, 0)
  return fit(tiles)


# By the name without its version, and the shape of an observation.
_DRAWINGS: dict[tuple, Callable[[np.ndarray], np.ndarray]] = {
  ('CartPole', 4): _cart_pole,
  ('Pendulum', 3): _pendulum,
  ('MountainCar', 2): _mountain_car,
  ('Acrobot', 6): _acrobot,
  ('MountainCarContinuous', 2): lambda obs: _mountain_car(obs, 0.45),
  ('Reacher', 8): _reacher,
  ('Swimmer', 16): _swimmer,
  ('FrozenLake', 16): _frozen_lake,
  ('FrozenLake', 64): _frozen_lake,
  ('FrozenLake8x8', 64): _frozen_lake,
}


def _bars(
  values: np.ndarray, actions: Sequence[Array | None], spec: EnvSpec
) -> list[np.ndarray]:
  """Bars of numbers `[N, D]`, and of the actions chosen on seeing them."""
  font = ImageFont.load_default(11)
  is_box = not isinstance(spec.action, Discrete)
  chosen = [
    np.full(spec.action.shape if is_box else (), np.nan)
    if a is None
    else np.asarray(a, np.float64)
    for a in actions
  ]
  acts = None  # They are told by their number.
  if is_box:
    acts = np.stack(chosen).reshape(len(chosen), -1)
  elif spec.action.num_actions <= 30:
    acts = np.stack([np.arange(spec.action.num_actions) == a for a in chosen])
  pictures = []
  for i, (row, action) in enumerate(zip(values, chosen)):
    image = Image.new('RGB', _SIZE, _PAPER)
    draw = ImageDraw.Draw(image)
    _row(draw, font, values, row, 16, 104, 'observation', _BLUE)
    if acts is None:
      text = '' if np.isnan(action) else f': {int(action)}'
      draw.text((6, 138), f'action{text}', _INK, font)
    else:
      _row(draw, font, acts, acts[i], 152, 44, 'action', _ORANGE)
    pictures.append(np.asarray(image))
  return pictures


def _row(
  draw: ImageDraw.ImageDraw,
  font: ImageFont.ImageFont,
  values: np.ndarray,
  row: np.ndarray,
  top: int,
  height: int,
  title: str,
  color: str,
) -> None:
  """Draws one of the rows `[N, D]`: a bar is full at its column's greatest."""
  shown = min(len(row), _MAX_BARS)
  is_one_hot = np.isin(values, (0, 1)).all() and (values.sum(1) == 1).all()
  if is_one_hot and len(row) > 1:
    title = f'{title}: {row.argmax()} of 0 to {len(row) - 1}'
  elif shown < len(row):
    title = f'{title}: the first {shown} of {len(row)} numbers'
  draw.text((6, top - 14), title, _INK, font)
  most = np.nanmax(np.abs(values), 0, initial=1e-9)
  base = top + (height // 2 if (values < 0).any() else height - 1)
  pitch = min(36.0, (_SIZE[0] - 12) / shown)
  width = pitch - 5 if pitch >= 12 else max(0.0, pitch - 2)
  for j, value in enumerate(row[:shown]):
    left = 6 + j * pitch
    draw.line((left, base, left + width, base), _PALE)
    if value and not np.isnan(value):
      end = base - round((base - top) * value / most[j])
      ends = min(base, end), max(base, end)
      draw.rectangle((left, ends[0], left + width, ends[1]), color)
    if shown <= 8 and not is_one_hot:
      draw.text((left, top + height + 1), f'{value:.2g}', _INK, font)
