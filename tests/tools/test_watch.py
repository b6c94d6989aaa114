"""Tests `podrl watch`: episodes, pictures, files, and a user's mistakes."""

import os
import pathlib
import subprocess
import sys
import textwrap

import gymnasium
import gymnax
import imageio.v2 as imageio
import jax
import numpy as np
from PIL import Image
import pytest

from podrl.envs import SUITES
from podrl.run import build, policy, video
from podrl.run.config import default_fields
from podrl.tools import watch
from podrl.types import Agent, Box, Discrete, EnvSpec

_ROOT = pathlib.Path(__file__).parents[2]


def _config(name, suite='gymnax', recurrent='none', **options):
  architecture = 'Anakin' if suite == 'gymnax' else 'Sebulba'
  config = default_fields('ppo', architecture)
  config['env.suite'], config['env.name'] = suite, name
  config['env.options'].update(options)
  config['network.name'], config['network.hidden_sizes'] = 'mlp', (8,)
  config['network.recurrent'] = recurrent
  return config


def _untrained(config):
  """Returns what `policy.load` would return, with new parameters."""
  spec = build.make_spec(config)
  agent = build.make_agent(config, spec)
  return policy.Policy(config, spec, agent, agent.init(jax.random.key(3)), 0)


def _random(config):
  """Makes a policy of random actions, which compiles quickly."""
  spec = build.make_spec(config)

  def sample(key):
    if isinstance(spec.action, Discrete):
      return jax.random.randint(key, (), 0, spec.action.num_actions)
    return jax.random.uniform(key, spec.action.shape, minval=-1.0)

  def act(params, keys, timestep, carry, *, greedy):
    return jax.vmap(sample)(keys), (), carry

  agent = Agent(lambda key: (), lambda batch_size: (), act, None, None)
  return policy.Policy(config, spec, agent, (), 0)


def _record(config, *, max_steps, seed=0, **kwargs):
  key = jax.random.key(seed)
  kwargs |= {'greedy': False, 'max_steps': max_steps}
  return video.record(_random(config), key, **kwargs)


@pytest.fixture(scope='module')
def registered():
  """Registers gymnasium environments that draw how many steps were taken."""

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

  class Modeless(Counter):
    metadata = {'render_modes': []}
    render = gymnasium.Env.render

  classes = Counter, Blind, Silent, Modeless
  names = [f'Watch{x.__name__}-v0' for x in classes]
  for name, made in zip(names, classes):
    gymnasium.register(name, made)
  yield
  for name in names:
    del gymnasium.registry[name]


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
  loaded = _untrained(_config(name, suite, recurrent))
  loaded.config.update({'eval.num_episodes': 1, 'eval.greedy': greedy})
  evaluate = build.make_evaluate(loaded.config, loaded.spec, loaded.agent)
  key = jax.random.key(1)
  expected = evaluate(loaded.variables, key, lambda: False)
  episode = video.record(loaded, key, greedy=greedy, max_steps=500)
  num_steps = expected.lengths[0]
  assert len(episode.returns) == num_steps + 1 > 2 and episode.is_over
  assert episode.returns[-1] == expected.returns[0]
  assert episode.steps == list(range(num_steps + 1))
  assert len(episode.pictures) == num_steps + 1


def test_what_training_alone_uses_is_left_out(monkeypatch):
  config = _config(
    'Pong-v5', 'envpool', episodic_life=True, reward_clip=True, img_height=42
  )
  asked, suite = [], SUITES['envpool']

  def make(*args, **kwargs):
    asked.append(kwargs)
    return suite.make(*args, **kwargs)

  monkeypatch.setitem(SUITES, 'envpool', suite._replace(make=make))
  _record(config, max_steps=1)
  assert asked == [{'num_threads': 1, 'render': True, 'img_height': 42}]


def test_strides_and_cuts(registered):
  def steps(max_steps, *, limit=7, **kwargs):
    options = {'max_episode_steps': limit} if limit < 7 else {}
    config = _config('WatchCounter-v0', 'gymnasium', **options)
    episode = _record(config, max_steps=max_steps, **kwargs)
    shown = [x.max() for x in episode.pictures]
    assert shown == [10 * t for t in episode.steps] and not episode.note
    num_steps = min(max_steps, limit)
    np.testing.assert_array_equal(
      episode.returns, 0.5 * np.arange(num_steps + 1)
    )
    assert episode.is_over == (max_steps >= limit)
    return episode.steps

  assert steps(99, stride=3) == [0, 3, 6, 7]
  assert steps(7, stride=4) == [0, 4, 7]
  assert steps(5, stride=2) == [0, 2, 4, 5]
  assert steps(99, stride=2, limit=5) == [0, 2, 4, 5]  # Step 5 is the last.
  # 0 1 2 3 are too many and become 0 2; 0 2 4 6 become 0 4. The last is added.
  assert steps(99, max_pictures=3) == [0, 4, 7]


@pytest.mark.filterwarnings('error:.*[rR]ender')
@pytest.mark.parametrize(
  'name', ['WatchBlind-v0', 'WatchSilent-v0', 'WatchModeless-v0']
)
def test_gymnasium_without_pictures(registered, name):
  episode = _record(_config(name, 'gymnasium'), max_steps=3)
  assert len(episode.pictures) == 4
  sentence = 'cannot draw itself; the video shows its observations'
  assert episode.note == f'the environment {sentence}'


# MNISTBandit downloads a data set when it is made.
_GYMNAX = sorted({*gymnax.registered_envs} - {'MNISTBandit-bsuite'})


@pytest.mark.slow
@pytest.mark.parametrize('name', _GYMNAX)
def test_every_gymnax_environment_is_drawn(name):
  assert len(_GYMNAX) >= 25  # gymnax 1.0.1 has these.
  # Draw only the first state, because a step compiles ten times longer.
  spec = SUITES['gymnax'].make_spec(name)
  env = video._on_host(_config(name), jax.random.split(jax.random.key(0), 1))
  obs = jax.tree.map(lambda x: x[0], env.reset().obs)
  shape = () if isinstance(spec.action, Discrete) else spec.action.shape
  pictures = video.paint(name, spec, [obs] * 2, [np.ones(shape), None])
  for picture in pictures:
    assert picture.dtype == np.uint8 and picture.shape == pictures[0].shape
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) >= 2


@pytest.mark.parametrize(
  'name,suite,note',
  [
    ('Breakout-MinAtar', 'gymnax', ''),
    ('CartPole-v1', 'envpool', ''),
    ('Pong-v5', 'envpool', ''),
    ('FrozenLake-v1', 'envpool', 'cannot draw itself'),
    # MuJoCo cannot draw if envpool was imported before libEGL.
    ('HalfCheetah-v4', 'envpool', 'libEGL'),
  ],
)
def test_pictures_move(name, suite, note):
  episode = _record(_config(name, suite), max_steps=12, seed=1)
  assert note in episode.note and bool(note) == bool(episode.note)
  assert {x.dtype for x in episode.pictures} == {np.dtype(np.uint8)}
  assert len({x.shape for x in episode.pictures}) == 1
  assert len({x.tobytes() for x in episode.pictures}) > 2


def test_the_last_picture_is_not_of_the_next_episode():
  episode = _record(_config('CartPole-v1', 'envpool'), max_steps=500)
  first, *_, before, last = (x.astype(int) for x in episode.pictures)
  assert episode.is_over
  assert np.abs(last - before).sum() < 0.5 * np.abs(last - first).sum()


@pytest.mark.slow
def test_mujoco_draws_in_a_process_of_its_own(tmp_path):
  code = """
    import sys
    from podrl.tools import watch
    assert 'envpool' not in sys.modules
    import test_watch
    config = test_watch._config('HalfCheetah-v4', 'envpool')
    watch.policy.load = lambda path, name, trust: test_watch._random(config)
    sys.exit(watch.run(['watch', '.', '--max_steps=2']))
  """
  path = f'{_ROOT}{os.pathsep}{_ROOT / "tests" / "tools"}'
  outcome = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code)],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    env=os.environ | {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'},
  )
  assert outcome.returncode == 0, outcome.stderr
  assert '2 steps, stopped by --max_steps' in outcome.stdout
  assert (tmp_path / 'episode.gif').exists()


def _spec(shape=(), channels_first=False):
  obs = jax.ShapeDtypeStruct(shape, np.float32)
  return EnvSpec(obs, channels_first, Discrete(3), 1, 0)


def test_channels_are_colours():
  obs = np.zeros((10, 10, 5), bool)
  obs[np.arange(5), 2, np.arange(5)] = True
  obs[0, 5, [1, 4]] = True  # Channel 4 hides channel 1.
  (picture,) = video.paint('x', _spec(), [obs], [0])
  cells = picture[::24, ::24]
  assert len(np.unique(cells[:5, 2], axis=0)) == 5
  np.testing.assert_array_equal(cells[0, 5], cells[4, 2])
  background = np.delete(cells, [2, 5], 1).reshape(-1, 3)
  assert (background == background[0]).all() and background.max() < 40


def test_screens_are_shown_as_they_are():
  rng = np.random.default_rng(0)
  stack = rng.integers(256, size=(4, 84, 84), dtype=np.uint8)
  (picture,) = video.paint('x', _spec(channels_first=True), [stack], [0])
  newest = stack[3][..., None].repeat(3, -1)
  np.testing.assert_array_equal(picture[::3, ::3], newest)
  screen = rng.integers(256, size=(96, 96, 3), dtype=np.uint8)
  (picture,) = video.paint('x', _spec(), [screen], [0])
  np.testing.assert_array_equal(picture[::2, ::2], screen)
  images = [np.full((6, 6), -2.0), np.full((6, 6), 3.0)]
  dark, light = video.paint('x', _spec(), images, [0, 0])
  assert dark.max() == 0 and light.min() == 255  # The episode sets the range.


def _place(picture, color):
  """Returns the mean (row, column) of the pixels of a colour."""
  color = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
  return np.argwhere((picture == color).all(-1)).mean(0)


def _paint(name, *numbers):
  obs = np.asarray(numbers, np.float32)
  return video.paint(name, _spec(obs.shape), [obs], [0])[0]


def test_mechanisms_are_drawn_where_they_are():
  blue, orange, green, red = '#1f5fa8', '#c44e00', '#2f8f4e', '#c0303c'
  # The pole leans right for a positive angle; the cart moves along.
  upright, leaning = (_paint('CartPole-v1', 0, 0, a, 0) for a in (0, 0.3))
  assert abs(_place(upright, orange)[1] - 150) < 2
  assert _place(leaning, orange)[1] > 155
  moved = _paint('CartPole-v1', -2.4, 0, 0, 0)
  assert abs(_place(moved, orange)[1] - 150 * 0.3 / 2.7) < 3
  # The inputs are cosine and sine of an angle: 0 is upright, left is positive.
  up, left, down = (
    _place(_paint('Pendulum-v1', *x, 0), red) for x in ((1, 0), (0, 1), (-1, 0))
  )
  assert up[0] < 90 < 110 < down[0] and left[1] < 140
  assert abs(up[1] - 150) < 2 and abs(down[1] - 150) < 2
  # One car is in the valley, and one is at the flag.
  valley, top = (_paint('MountainCar-v0', x, 0) for x in (-0.52, 0.5))
  assert _place(valley, blue)[0] > 150 > 80 > _place(top, blue)[0]
  assert abs(_place(top, blue)[1] - _place(valley, green)[1]) < 10
  # Both links hang, or the second link is folded back onto the first.
  hanging, folded = (_paint('Acrobot-v1', 1, 0, c, 0, 0, 0) for c in (1, -1))
  assert _place(hanging, blue)[0] - _place(folded, blue)[0] > 15


def test_bars_grow_with_the_numbers():
  def area(picture):
    return int((picture == (31, 95, 168)).all(-1).sum())

  obs = [np.asarray(x, np.float32) for x in ([1, -4], [2, -4], [4, -4])]
  drawn = video.paint('x', _spec((2,)), obs, [np.int32(0), np.int32(1), None])
  halves = [np.split(x, 2, 1) for x in drawn]
  first, second, third = (area(x) for x, _ in halves)
  # A bar of n rows and 100 columns has n + 1 rows of pixels.
  assert abs(2 * first - second) < 300 and abs(2 * second - third) < 300
  assert len({area(x) for _, x in halves}) == 1
  # The action is drawn below the bars, except after the episode's end.
  shown = [(x[180:] != x[180, 0]).any() for x in drawn]
  assert shown == [True, True, False]
  box = Box((3,), -np.ones(3, np.float32), np.ones(3, np.float32))
  spec = _spec((999,))._replace(action=box)
  (picture,) = video.paint('x', spec, [np.ones(999)], [np.ones(3)])
  assert area(picture) > 1000


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs the command on an untrained run in its own directory."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'r').mkdir()
  loaded = []

  def load(path, name, trust):
    if not os.path.isdir(path):
      raise ValueError(f'{path} is not a run')
    loaded.append(name)
    return _untrained(_config('Catch-v0', 'envpool'))

  def call(*arguments):
    return watch.run(['watch', *arguments])

  monkeypatch.setattr(watch.policy, 'load', load)
  call.loaded = loaded
  return call


def test_the_command(run, capsys):
  os.symlink('elsewhere.gif', 'r/episode.gif')
  assert run('r', '--checkpoint=best', '--fps=20') == 0
  assert run.loaded == ['best']
  text = capsys.readouterr().out
  assert 'return ' in text and '9 steps' in text and 'r/episode.gif' in text
  with Image.open('r/episode.gif') as image:
    assert image.n_frames == 10 and image.info['loop'] == 0
    assert image.info['duration'] == 50
    image.seek(9)
    assert image.info['duration'] == 1000  # The last frame stays longer.
  assert not os.path.lexists('elsewhere.gif')


def test_episodes_seeds_and_samples(run, capsys):
  def watched(*arguments):
    assert run('r', *arguments) == 0
    return pathlib.Path('r/episode.gif').read_bytes()

  plain = watched()
  assert plain == watched('--greedy')  # The run evaluates greedily.
  assert len({plain, watched('--seed=1'), watched('--nogreedy')}) == 3
  watched('--episodes=2', '--max_steps=3')
  assert capsys.readouterr().out.count('3 steps, stopped by --max_steps') == 2
  with Image.open('r/episode.gif') as image:
    assert image.n_frames == 8


def test_files_play_at_real_speed(tmp_path):
  config = _config('CartPole-v1')
  assert video.real_speed(config, _random(config).spec) == 50
  pong = _config('Pong-v5', 'envpool')
  assert video.real_speed(pong, _random(pong).spec) == 15  # 60 / 4.
  robot = _config('LeapCubeReorient-v1', 'envpool')
  assert video.real_speed(robot, _random(robot).spec) == 20  # 1 / 0.05 s.
  # Every other step is shown for 40 ms, and the last for a second.
  steps = list(range(0, 101, 2))
  pictures = [np.full((51, 200, 3), t, np.uint8) for t in steps]
  episode = video.Episode(pictures, steps, np.arange(101.0), True, '')
  frames, seconds = video.to_frames([episode], 50.0, 0.0)
  for name in ('x.gif', 'x.mp4'):
    video.write(str(tmp_path / name), frames, seconds)
  with Image.open(tmp_path / 'x.gif') as image:
    durations = [
      image.seek(i) or image.info['duration'] for i in range(image.n_frames)
    ]
  assert durations == [40] * 50 + [1000]
  with imageio.get_reader(tmp_path / 'x.mp4') as movie:
    shown = [np.asarray(x) for x in movie]
    assert movie.get_meta_data()['fps'] == 25
  assert len(shown) == 50 + 25
  assert shown[0].shape == frames[0].shape
  assert np.abs(shown[25][20:] - frames[25][20:].astype(int)).max() < 8


@pytest.mark.parametrize(
  'arguments,message',
  [
    ([], 'expected one run, got 0'),
    (['r', 'r'], 'expected one run, got 2'),
    (['nowhere'], 'nowhere is not a run'),
    (['r', '--out=x.png'], 'must be a file that ends in .gif or .mp4'),
    (['r', '--out=no/x.gif'], 'no/x.gif cannot be written: No such file'),
    (['r', '--out=d.gif'], 'd.gif cannot be written: Is a directory'),
    (['r', '--episodes=0'], 'episodes'),
    (['r', '--max_steps=0'], 'max_steps'),
    (['r', '--fps=60'], 'fps'),
    (['r', '--fps=nan'], '--fps=nan: must be finite'),
    (['r', '--frames=3'], 'frames'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, message, capsys):
  os.mkdir('d.gif')
  assert run(*arguments) == 2
  stderr = capsys.readouterr().err
  assert message in stderr and stderr.count('\n') == 1


@pytest.mark.parametrize(
  'picture,expected',
  [
    (np.full((9, 8, 3), 0.5, np.float32), 127),  # 0.5 x 255, cut.
    (np.full((9, 8, 3), 200.0), 200),
    (np.full((9, 8), True), 255),
    (np.full((9, 8), 7, np.int64), 7),
    (np.full((9, 8, 1), 7, np.uint8), 7),
    (np.full((9, 8, 4), 7, np.uint8), 7),
    (np.full((9, 8, 3), np.nan), 0),
    ([[[7] * 3] * 8] * 9, 7),
  ],
)
def test_pictures_of_any_dtype_become_rgb(picture, expected):
  found = video.to_rgb(picture)
  assert found.dtype == np.uint8
  np.testing.assert_array_equal(found, np.full((9, 8, 3), expected))


@pytest.mark.parametrize('picture', [None, 'text', np.zeros((9, 8, 2)), []])
def test_what_is_no_picture(picture):
  with pytest.raises(NotImplementedError):
    video.to_rgb(picture)


def test_pictures_of_several_sizes_have_frames_of_one_size():
  pictures = [
    np.full((200 + 10 * t, 180 - t, 3), 9, np.uint8) for t in range(3)
  ]
  episode = video.Episode(pictures, [0, 1, 2], np.zeros(4), True, '')
  frames, _ = video.to_frames([episode], 10.0, 0.0)
  # The caption has 18 rows.
  assert [x.shape for x in frames] == [(18 + 220, 180, 3)] * 3
  # The first picture has 10 black rows above it and below it.
  column = frames[0][18:, 90, 0]
  assert column.tolist() == [0] * 10 + [9] * 200 + [0] * 10
