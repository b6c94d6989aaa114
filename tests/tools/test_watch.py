"""Watching: episodes, pictures, captions, files, mistakes."""

import ctypes.util
import os
import pathlib
import subprocess
import sys
import textwrap
import types

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

import podrl
from podrl.envs import SUITES
from podrl.run import build
from podrl.run.config import base_config, is_sebulba, sebulba_config
from podrl.run.evaluation import make_evaluate, make_host_evaluate
from podrl.tools import film, pictures, watch
from podrl.types import Agent, Box, Discrete, EnvSpec

_ROOT = pathlib.Path(__file__).parents[2]


def _config(name, suite='gymnax', recurrent='none', **options):
  config = base_config('ppo') if suite == 'gymnax' else sebulba_config('ppo')
  config.env.suite, config.env.name = suite, name
  config.env.options.update(options)
  config.network.name, config.network.hidden_sizes = 'mlp', (8,)
  config.network.recurrent = recurrent
  return config


def _policy(config):
  """What `podrl.run.policy.load` gives, but untrained."""
  spec = (
    build.make_host_spec(config)
    if is_sebulba(config)
    else build.make_env(config).spec
  )
  agent = build.make_agent(config, spec)
  return types.SimpleNamespace(
    config=config, spec=spec, agent=agent, params=agent.init(jax.random.key(3))
  )


def _random_agent(config):
  """An agent that compiles at once."""
  spec = (
    build.make_host_spec(config)
    if is_sebulba(config)
    else build.make_env(config).spec
  ).action

  def act(params, keys, timestep, carry, *, greedy):
    if isinstance(spec, Discrete):
      draw = lambda key: jax.random.randint(key, (), 0, spec.num_actions)
    else:
      draw = lambda key: jax.random.uniform(key, spec.shape, minval=-1.0)
    return jax.vmap(draw)(keys), (), carry

  return Agent(lambda key: (), lambda batch_size: (), act, None, None)


def _record(config, *, max_steps, seed=0, **kwargs):
  return watch.record(
    config,
    _random_agent(config),
    (),
    jax.random.key(seed),
    greedy=False,
    max_steps=max_steps,
    **kwargs,
  )


@pytest.fixture(scope='module')
def registered():
  """gymnasium environments whose pictures show how many steps were taken."""

  class Counter(gymnasium.Env):
    metadata = {'render_modes': ['rgb_array'], 'render_fps': 7}
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
      self.render_mode = render_mode

    def reset(self, seed=None, options=None):
      self._t = 0
      return np.zeros(2, np.float32), {}

    def step(self, action):
      self._t += 1
      return np.full(2, self._t / 7, np.float32), 0.5, self._t == 7, False, {}

    def render(self):
      return np.full((40, 60, 3), 10 * self._t, np.uint8)

  class Blind(Counter):
    render = gymnasium.Env.render

    def __init__(self):
      pass

  class Silent(Counter):
    def render(self):
      return None

  for made in (Counter, Blind, Silent):
    gymnasium.register(f'Watch{made.__name__}-v0', made)
  yield
  for made in (Counter, Blind, Silent):
    del gymnasium.registry[f'Watch{made.__name__}-v0']


@pytest.mark.parametrize(
  'name,suite,recurrent,greedy',
  [
    ('MemoryChain-bsuite', 'gymnax', 'none', False),
    ('CartPole-v1', 'envpool', 'gru', True),
    ('CartPole-v1', 'gymnasium', 'none', False),
  ],
)
def test_an_episode_is_that_of_an_evaluation_of_one(
  name, suite, recurrent, greedy
):
  policy = _policy(_config(name, suite, recurrent))
  arguments = dict(num_episodes=1, max_episode_steps=500, greedy=greedy)
  if suite == 'gymnax':
    evaluate = make_evaluate(
      build.make_env(policy.config), policy.agent, **arguments
    )
  else:
    evaluate = make_host_evaluate(
      lambda num_envs, seed: build.make_host_env(
        policy.config, num_envs, seed, 1, evaluation=True
      ),
      policy.agent,
      **arguments,
    )
  for seed in range(2):
    key = jax.random.key(seed)
    expected = evaluate(policy.params, key, lambda: False)
    episode = watch.record(
      policy.config,
      policy.agent,
      policy.params,
      key,
      greedy=greedy,
      max_steps=500,
    )
    assert len(episode.rewards) == expected.lengths[0] > 1 and episode.is_over
    assert episode.rewards.sum() == expected.returns[0]
    assert episode.steps == list(range(len(episode.rewards) + 1))
    assert len(episode.pictures) == len(episode.steps)


def test_what_training_alone_uses_is_left_out(monkeypatch):
  config, asked = (
    _config(
      'Pong-v5', 'envpool', episodic_life=True, reward_clip=True, img_height=42
    ),
    [],
  )
  suite = SUITES['envpool']
  make = lambda *a, **kwargs: (asked.append(kwargs), suite.make(*a, **kwargs))[
    1
  ]
  monkeypatch.setitem(SUITES, 'envpool', suite._replace(make=make))
  _record(config, max_steps=1)
  assert asked == [{'num_threads': 1, 'render': True, 'img_height': 42}]


def test_strides_and_cuts(registered):
  def steps(max_steps, *, limit=7, **kwargs):
    episode = _record(
      _config(
        'WatchCounter-v0',
        'gymnasium',
        **({'max_episode_steps': limit} if limit < 7 else {}),
      ),
      max_steps=max_steps,
      **kwargs,
    )
    assert [x.max() for x in episode.pictures] == [
      10 * t for t in episode.steps
    ]
    assert len(episode.rewards) == min(max_steps, limit)
    assert episode.is_over == (max_steps >= limit)
    return episode.steps

  assert steps(99, stride=3) == [0, 3, 6, 7]
  assert steps(7, stride=4) == [0, 4, 7]
  assert steps(5, stride=2) == [0, 2, 4, 5]
  assert steps(99, stride=2, limit=5) == [0, 2, 4, 5]  # Truncated.
  # 0 1 2 3 are too many: 0 2; with 4 and 6 they are: 0 4; and the last.
  assert steps(99, max_pictures=3) == [0, 4, 7]


_GYMNAX = [
  x for x in sorted(gymnax.registered_envs) if x != 'MNISTBandit-bsuite'
]  # It downloads a data set when made.


def test_how_many_there_are():
  assert len(_GYMNAX) >= 25  # Of gymnax 1.0.1.


@pytest.mark.parametrize('name', _GYMNAX)
def test_every_gymnax_environment_is_drawn(name):
  # A first state alone: steps take ten times as long to compile.
  env = watch._make_gymnax(
    _config(name), jax.random.split(jax.random.key(0), 1)
  )
  obs = jax.tree.map(lambda x: x[0], env.reset().obs)
  action = env.spec.action
  action = 1 if isinstance(action, Discrete) else np.ones(action.shape)
  drawn = (
    [pictures.fit(env.render())]
    if env.render
    else (pictures.paint(name, env.spec, [obs] * 2, [action, None]))
  )
  assert bool(env.render) == name.startswith(('Four', 'Meta', 'Point'))
  for picture in drawn:
    assert picture.dtype == np.uint8 and picture.shape == drawn[0].shape
    assert 140 <= max(picture.shape[:2]) <= 320 and picture.shape[2:] == (3,)
    # More than paper and ink.
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) >= (
      2 if env.spec.obs.dtype == bool else 3
    )


@pytest.mark.parametrize(
  'name', ['Breakout-MinAtar', 'MountainCar-v0', 'FourRooms-misc']
)
def test_gymnax_environments_move(name):
  episode = _record(_config(name), max_steps=5)
  assert len(episode.pictures) == len(episode.rewards) + 1 and not episode.note
  assert len({x.tobytes() for x in episode.pictures}) > 2


@pytest.mark.parametrize(
  'name,size',
  [
    ('CartPole-v1', (200, 300)),
    ('Pong-v5', (210, 160)),
    ('MiniGrid-Empty-5x5-v0', (320, 320)),
    ('LunarLander-v3', (200, 300)),
    ('Highway-v0', (75, 300)),
    ('Snake-v1', (256, 256)),
  ],
)
def test_envpool_draws(name, size):
  episode = _record(_config(name, 'envpool'), max_steps=12, seed=1)
  assert not episode.note and episode.pictures[0].dtype == np.uint8
  assert {x.shape for x in episode.pictures} == {(*size, 3)}
  assert len({x.tobytes() for x in episode.pictures}) > 2


def test_the_last_picture_is_not_of_the_next_episode():
  episode = _record(_config('CartPole-v1', 'envpool'), max_steps=500)
  first, *_, before, last = (x.astype(int) for x in episode.pictures)
  assert episode.is_over
  assert np.abs(last - before).sum() < 0.5 * np.abs(last - first).sum()


@pytest.mark.parametrize(
  'name,shape',
  [
    ('FrozenLake-v1', (240, 240)),
    ('Taxi-v3', (200, 300)),
    ('Blackjack-v1', (200, 300)),
    ('Catch-v0', (240, 120)),
    ('HalfCheetah-v4', (200, 300)),
  ],
)
def test_what_envpool_does_not_draw_is_drawn_from_observations(name, shape):
  # MuJoCo's tasks among them, where envpool was imported before libEGL.
  episode = _record(_config(name, 'envpool'), max_steps=3)
  assert ('libEGL' if name.startswith('Half') else 'not implemented') in (
    episode.note
  )
  assert {x.shape for x in episode.pictures} == {(*shape, 3)}
  assert (episode.pictures[0] != episode.pictures[-1]).any()


def test_mujoco_draws_in_a_process_of_its_own(tmp_path):
  code = """
    import sys, types
    import jax
    jax.config.update('jax_platforms', 'cpu')
    import podrl
    from podrl.tools import watch
    assert 'envpool' not in sys.modules
    def load(path, name):
      import test_watch
      config = test_watch._config('HalfCheetah-v4', 'envpool')
      return types.SimpleNamespace(
          config=config, spec=test_watch.build.make_host_spec(config),
          agent=test_watch._random_agent(config), params=())
    podrl.run.policy = types.SimpleNamespace(load=load)
    sys.exit(watch.run(['watch', '.', '--max_steps=2']))
  """
  outcome = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code)],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    env=os.environ | {'PYTHONPATH': f'{_ROOT}{os.pathsep}{_ROOT / "tests"}'},
  )
  assert outcome.returncode == 0, outcome.stderr
  has_library = sys.platform != 'linux' or ctypes.util.find_library('EGL')
  assert ('libEGL' in outcome.stdout) == (not has_library)
  # Where a machine cannot use it, there are bars.
  size = (300, 218) if 'EGL' in outcome.stdout else (240, 258)
  with Image.open(tmp_path / 'episode.gif') as image:
    assert (image.size, image.n_frames) == (size, 3)


def test_gymnasium_draws_each_state(registered):
  episode = _record(_config('WatchCounter-v0', 'gymnasium'), max_steps=99)
  assert [x.max() for x in episode.pictures] == [
    10 * t for t in range(8)
  ] and not episode.note
  assert episode.pictures[0].shape == (160, 240, 3)
  assert episode.is_over and film.totals(episode)[-1] == '3.50'


@pytest.mark.filterwarnings('ignore:.*RGB-array rendering')
@pytest.mark.parametrize(
  'name,note',
  [
    ('WatchBlind-v0', 'NotImplementedError'),
    ('WatchSilent-v0', 'it gives no picture'),
  ],
)
def test_gymnasium_without_pictures(registered, name, note):
  episode = _record(_config(name, 'gymnasium'), max_steps=3)
  assert episode.pictures[0].shape == (200, 300, 3)
  assert episode.note == note


def test_returns_and_steps_are_drawn():
  def episode(*rewards, stride=1):
    steps = [*range(0, len(rewards), stride), len(rewards)]
    return film.Episode(
      [np.full((50, 200, 3), t, np.uint8) for t in steps],
      steps,
      np.asarray(rewards, np.float32),
      True,
      '',
    )

  assert film.totals(episode(1, 1, -3)) == ['0', '1', '2', '-1']
  assert film.totals(episode(0.5, 0.25)) == ['0.00', '0.50', '0.75']
  frames, seconds = film.join([episode(1, 2, 3, 4, 5, stride=2)], 0, 10)
  # After 0, 2, 4 and 5 steps.
  expected = [
    film.compose(np.full((50, 200, 3), t, np.uint8), f'return {r}', f'step {t}')
    for t, r in ((0, 0), (2, 3), (4, 10), (5, 15))
  ]
  np.testing.assert_array_equal(frames, expected)
  np.testing.assert_allclose(seconds, [0.2, 0.2, 0.1, 1.0])
  for frame in frames:
    assert (frame[:18, :60] > 200).any() and (frame[:18, -60:] > 190).any()
  one, two = (
    film.compose(np.zeros((50, 200, 3), np.uint8), x, '')
    for x in ('return 1', 'return 2')
  )
  assert (one != two).any()
  frames, seconds = film.join([episode(1), episode(2)], 5, 10)
  np.testing.assert_array_equal(
    frames[3],
    film.compose(np.full((50, 200, 3), 1, np.uint8), '2/2  return 2', 'step 1'),
  )
  np.testing.assert_allclose(seconds, [0.2, 1.0, 0.2, 1.0])


def test_a_gif_is_read_as_it_was_written(tmp_path):
  path = str(tmp_path / 'x.gif')
  colors = np.random.default_rng(0).integers(256, size=(10, 3), dtype=np.uint8)
  frames = [np.full((60, 160, 3), 250, np.uint8) for _ in range(30)]
  for t, frame in enumerate(frames):
    frame[t : t + 9, 3 * t : 3 * t + 12] = colors[t % 10]
  film.write_gif(path, frames, [0.04] * 28 + [0.004, 1.0])
  with Image.open(path) as image:
    assert image.n_frames == 30 and image.size == (160, 60)
    assert image.info['loop'] == 0  # Forever.
    durations = []
    for t, frame in enumerate(frames):
      image.seek(t)
      durations.append(image.info['duration'])
      np.testing.assert_array_equal(image.convert('RGB'), frame)
  assert durations == [40] * 28 + [20, 1000]


@pytest.mark.parametrize(
  'suite,name,expected',
  [
    ('envpool', 'Pong-v5', 15),
    ('envpool', 'CartPole-v1', 50),
    ('envpool', 'Hopper-v4', 125),
    ('envpool', 'HalfCheetah-v4', 25),
    ('gymnax', 'Pendulum-v1', 20),
    ('gymnax', 'MemoryChain-bsuite', 10),
    ('gymnasium', 'WatchCounter-v0', 7),
  ],
)
def test_real_speed(registered, suite, name, expected):
  config = _config(name, suite)
  spec = (
    build.make_env(config).spec
    if suite == 'gymnax'
    else build.make_host_spec(config)
  )
  assert film.steps_per_second(suite, name, spec) == expected


def _spec(shape=(4,), dtype=np.float32, channels_first=False, action=None):
  return EnvSpec(
    jax.ShapeDtypeStruct(shape, dtype),
    channels_first,
    action or Discrete(2),
    1,
    0,
  )


def test_pictures_are_scaled_by_whole_numbers():
  picture = np.arange(10 * 5 * 3, dtype=np.uint8).reshape(10, 5, 3)
  fitted = pictures.fit(picture)
  assert fitted.shape == (240, 120, 3)
  np.testing.assert_array_equal(fitted[::24, ::24], picture)
  np.testing.assert_array_equal(fitted[23::24, 23::24], picture)
  # Down by 3: of 704, the least whole number that gives at most 320.
  large = np.full((704, 352, 3), 7, np.uint8)
  np.testing.assert_array_equal(
    pictures.fit(large), np.full((235, 118, 3), 7, np.uint8)
  )


def test_channels_are_colours():
  obs = np.zeros((10, 10, 10), bool)
  obs[np.arange(10), 2, np.arange(10)] = True
  obs[0, 5, [1, 4]] = True  # The later channel is seen.
  (picture,) = pictures.paint('x', _spec(), [obs], [0])
  cells = picture[::24, ::24]
  assert len(np.unique(cells[:, 2], axis=0)) == 10
  np.testing.assert_array_equal(cells[0, 5], cells[4, 2])
  background = np.delete(cells, [2, 5], 1).reshape(-1, 3)
  assert (background == background[0]).all() and background.max() < 40


def test_screens_are_shown_as_they_are():
  rng = np.random.default_rng(0)
  stack = rng.integers(256, size=(4, 84, 84), dtype=np.uint8)
  (picture,) = pictures.paint('x', _spec(channels_first=True), [stack], [0])
  np.testing.assert_array_equal(
    picture[::3, ::3], stack[3][..., None].repeat(3, -1)
  )
  screen = rng.integers(256, size=(96, 96, 3), dtype=np.uint8)
  (picture,) = pictures.paint('x', _spec(), [screen], [0])
  np.testing.assert_array_equal(picture[::2, ::2], screen)
  dark, light = pictures.paint(
    'x', _spec(), [np.full((6, 6), -2.0), np.full((6, 6), 3.0)], [0, 0]
  )
  assert dark.max() == 0 and light.min() == 255  # Of the episode's range.


def _place(picture, color):
  """The mean (row, column) of the pixels of a colour."""
  color = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
  return np.argwhere((picture == color).all(-1)).mean(0)


def _paint(name, *numbers):
  obs = np.asarray(numbers, np.float32)
  return pictures.paint(name, _spec(obs.shape), [obs], [0])[0]


def test_mechanisms_are_drawn_where_they_are():
  blue, orange, green, red = '#1f5fa8', '#c44e00', '#2f8f4e', '#c0303c'
  # The pole leans right for a positive angle; the cart moves along.
  upright, leaning = (_paint('CartPole-v1', 0, 0, a, 0) for a in (0, 0.3))
  assert abs(_place(upright, orange)[1] - 150) < 2
  assert _place(leaning, orange)[1] > 155
  moved = _paint('CartPole-v1', -2.4, 0, 0, 0)
  assert abs(_place(moved, orange)[1] - 150 * 0.3 / 2.7) < 3
  # Cosine and sine of an angle that is 0 upright and grows to the left.
  up, left, down = (
    _place(_paint('Pendulum-v1', *x, 0), red) for x in ((1, 0), (0, 1), (-1, 0))
  )
  assert (
    up[0] < 90 < 110 < down[0]
    and left[1] < 140
    and (abs(up[1] - 150) < 2 and abs(down[1] - 150) < 2)
  )
  # A car in the valley, and one at the flag.
  valley, top = (_paint('MountainCar-v0', x, 0) for x in (-0.52, 0.5))
  assert _place(valley, blue)[0] > 150 > 80 > _place(top, blue)[0]
  assert abs(_place(top, blue)[1] - _place(valley, green)[1]) < 10
  # Both links hang, or the second is folded back onto the first.
  hanging, folded = (_paint('Acrobot-v1', 1, 0, c, 0, 0, 0) for c in (1, -1))
  assert _place(hanging, blue)[0] - _place(folded, blue)[0] > 15
  straight = _paint('Reacher-misc', 1, 1, 0, 0, 0, 0, -1, 1)
  assert _place(straight, orange)[1] > 225 > 150 > _place(straight, green)[1]
  assert _place(straight, green)[0] < 90
  (lake,) = pictures.paint(
    'FrozenLake-v1', _spec((16,)), [np.arange(16) == 6], [0]
  )
  np.testing.assert_allclose(_place(lake, orange), [90, 150], atol=5)


def test_bars_are_of_the_episode_and_its_actions():
  blue, orange = (
    [int(x[i : i + 2], 16) for i in (1, 3, 5)] for x in ('#1f5fa8', '#c44e00')
  )

  def area(picture, color):
    return int((picture == color).all(-1).sum())

  obs = [np.asarray(x, np.float32) for x in ([1, -4], [2, -4], [4, -4])]
  drawn = pictures.paint('x', _spec((2,)), obs, [0, 1, None])
  first, second, third = (area(x[:, :42], blue) for x in drawn)
  assert abs(2 * first - second) < 40 and abs(2 * second - third) < 80
  assert len({area(x[:, 42:], blue) for x in drawn}) == 1
  assert _where(drawn[0], orange) < 42 < _where(drawn[1], orange)
  assert area(drawn[2], orange) == 0
  # Boxes have a bar for each number; many numbers still fit.
  box = Box((3,), -np.ones(3, np.float32), np.ones(3, np.float32))
  drawn = pictures.paint(
    'x',
    _spec((999,), action=box),
    [np.ones(999)] * 2,
    [np.asarray([1.0, -1.0, 0.5]), None],
  )
  assert area(drawn[0], orange) > 300 and area(drawn[1], orange) == 0
  assert drawn[0].shape == (200, 300, 3)


def _where(picture, color):
  """The mean column of a colour."""
  return np.argwhere((picture == color).all(-1))[:, 1].mean()


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs the command on an untrained run, in its directory."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'r').mkdir()
  loaded = []

  def call(*arguments, config=None):
    def load(path, name):
      if not os.path.isdir(path):
        raise ValueError(f'{path} is not a run')
      loaded.append(name)
      return _policy(config or _config('Catch-v0', 'envpool'))

    monkeypatch.setattr(
      podrl, 'policy', types.SimpleNamespace(load=load), raising=False
    )
    return watch.run(['watch', *arguments])

  call.loaded = loaded
  return call


def test_the_command(run, capsys):
  assert run('r', '--checkpoint=best', '--fps=20') == 0
  assert run.loaded == ['best']
  text = capsys.readouterr().out
  assert 'return ' in text and '9 steps' in text and 'r/episode.gif' in text
  assert 'cut' not in text
  with Image.open('r/episode.gif') as image:
    # Its first 9 steps; 240 x 120 pixels, widened for the caption.
    assert image.n_frames == 10 and image.size == (160, 258)
    assert image.info['duration'] == 50


def test_episodes_seeds_and_samples(run, capsys):
  def watched(*arguments):
    assert run('r', *arguments) == 0
    return pathlib.Path('r/episode.gif').read_bytes()

  plain = watched()
  assert plain == watched() == watched('--greedy')  # As the run evaluates.
  assert len({plain, watched('--seed=1'), watched('--nogreedy')}) == 3
  watched('--episodes=2', '--max_steps=3')
  assert capsys.readouterr().out.count('3 steps, cut by --max_steps') == 2
  with Image.open('r/episode.gif') as image:
    assert image.n_frames == 8


def test_a_cart_pole_is_small_and_in_real_time(run, capsys, monkeypatch):
  agent = _random_agent(_config('CartPole-v1'))

  def act(params, keys, timestep, carry, *, greedy):
    # Balances: pushes to where the pole falls.
    push = timestep.obs[:, 2] + timestep.obs[:, 3] + 0.3 * timestep.obs[:, 1]
    return jnp.where(push > 0, 1, 0), (), carry

  monkeypatch.setattr(
    build, 'make_agent', lambda config, spec: agent._replace(act=act)
  )
  assert run('r', config=_config('CartPole-v1')) == 0
  assert 'return 500, 500 steps' in capsys.readouterr().out
  assert os.path.getsize('r/episode.gif') < 1e6
  with Image.open('r/episode.gif') as image:
    # 50 steps per second: every other is shown, for 40 ms; the last stays.
    assert image.n_frames == 251
    assert sum(image.seek(t) or image.info['duration'] for t in range(251)) == (
      250 * 40 + 1000
    )


def test_mp4_goes_through_ffmpeg(run, tmp_path, monkeypatch):
  # One that keeps what it is given.
  ffmpeg = tmp_path / 'ffmpeg'
  ffmpeg.write_text(
    '#!/bin/sh\necho "$@" > given\nfor last; do :; done\nexec cat > "$last"\n'
  )
  ffmpeg.chmod(0o755)
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  assert run('r', '--out=x.mp4', '--max_steps=4') == 0
  given = (tmp_path / 'given').read_text()
  assert '160x258' in given and 'h264' in given
  # 4 frames, and the last for a second: 10 frames, of 4 bytes a pixel.
  assert os.path.getsize('x.mp4') == 14 * 160 * 258 * 4
  ffmpeg.write_text('#!/bin/sh\necho no such codec >&2\nexit 1\n')
  assert run('r', '--out=x.mp4', '--max_steps=4') == 2


@pytest.mark.parametrize(
  'arguments,message',
  [
    ([], 'expected one run, got 0'),
    (['r', 'r'], 'expected one run, got 2'),
    (['nowhere'], 'nowhere is not a run'),
    (['r', '--out=x.png'], 'must end in .gif or .mp4'),
    (['r', '--out=no/x.gif'], 'not in a directory that can be written'),
    (['r', '--out=d.gif'], 'Is a directory'),
    (['r', '--out=x.mp4'], 'needs ffmpeg'),
    (['r', '--episodes=0'], 'episodes'),
    (['r', '--max_steps=0'], 'max_steps'),
    (['r', '--fps=60'], 'fps'),
    (['r', '--frames=3'], 'frames'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
  run, arguments, message, capsys, monkeypatch
):
  import matplotlib

  monkeypatch.setitem(matplotlib.rcParams, 'animation.ffmpeg_path', 'nowhere')
  monkeypatch.setitem(sys.modules, 'imageio_ffmpeg', None)
  os.mkdir('d.gif')
  assert run(*arguments) == 2
  stderr = capsys.readouterr().err
  assert message in stderr and stderr.count('\n') == 1


def test_help(run, capsys):
  assert run('--help') == 0 and '--nogreedy' in capsys.readouterr().out
