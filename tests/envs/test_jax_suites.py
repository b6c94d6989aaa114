"""Tests the adapters of the suites that are written in JAX.

A test is skipped where its suite is not installed; the extra `suites` brings
all.
"""

import ctypes.util
import functools
import importlib
import io
import subprocess
import sys

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.envs import SUITES, xminigrid
from podrl.records import workdir
from podrl.run import policy
from podrl.tools import play, train
from podrl.types import Box, Discrete, Masked, MultiDiscrete, TimeStep

_ONE = {
  'pgx': 'minatar-breakout',
  'navix': 'Navix-Empty-5x5-v0',
  'xminigrid': 'MiniGrid-Empty-5x5',
  'jumanji': 'Snake-v1',
  'brax': 'inverted_pendulum',
  'craftax': 'Craftax-Classic-Symbolic-v1',
  'playground': 'CartpoleBalance',
}
_PACKAGES = {**dict(zip(_ONE, _ONE)), 'playground': 'mujoco_playground'}
# XLA needs a minute and more for a program of these.
_LARGE = 'brax', 'craftax', 'playground'


@pytest.fixture(autouse=True)
def _allow_promotion():
  # The libraries add arrays of different ranks, which tests of podrl forbid.
  with jax.numpy_rank_promotion('allow'):
    yield


def _make(suite, name='', **options):
  pytest.importorskip(_PACKAGES[suite])
  return SUITES[suite].make(name or _ONE[suite], **options)


def _unroll(env, actions, num_envs=1, seed=0):
  """Plays `actions[T]` everywhere; returns time steps `[T + 1, B]` in numpy."""
  state, first = env.reset(jax.random.split(jax.random.key(seed), num_envs))

  def step(state, action):
    action = jnp.broadcast_to(action, (num_envs, *action.shape))
    return env.step(state, action)

  _, rest = jax.jit(lambda x: jax.lax.scan(step, x, actions))(state)
  return jax.tree.map(lambda x, y: np.concatenate([x[None], y]), first, rest)


@pytest.mark.parametrize('suite', _PACKAGES)
def test_a_suite_that_is_missing_is_named(suite, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  assert SUITES[suite].names() == []
  with pytest.raises(ValueError, match=rf"pip install 'podrl\[{suite}\]'"):
    SUITES[suite].make(_ONE[suite])


def test_names_import_no_suite():
  code = (
    'import sys; from podrl.envs import SUITES; '
    'print(sum(len(x.names()) for k, x in SUITES.items() if k != "envpool")); '
    f'assert not {{*{list(_PACKAGES.values())}}} & {{*sys.modules}}'
  )
  subprocess.run([sys.executable, '-c', code], check=True)


def _registered(suite):
  """Returns the names that the library itself lists."""
  package = pytest.importorskip(_PACKAGES[suite])
  if suite == 'pgx':
    return set(package.available_envs())
  if suite == 'navix':
    return set(package.registry())
  if suite == 'xminigrid':
    return set(package.registered_environments())
  if suite == 'jumanji':
    return set(package.registered_environments()) - {'Sokoban-v0'}
  if suite == 'brax':
    return set(importlib.import_module('brax.envs')._envs) - {'fast', 'swimmer'}
  if suite == 'playground':
    return set(package.registry.dm_control_suite.ALL_ENVS)
  return {
    f'Craftax-{x}-v1'
    for x in ('Symbolic', 'Pixels', 'Classic-Symbolic', 'Classic-Pixels')
  }


@pytest.mark.parametrize('suite', _PACKAGES)
def test_the_names_are_those_of_the_library(suite):
  assert set(SUITES[suite].names()) == _registered(suite)


@pytest.mark.parametrize('suite', _PACKAGES)
def test_an_unknown_name_or_option_is_said(suite):
  pytest.importorskip(_PACKAGES[suite])
  with pytest.raises(ValueError, match=f'not an environment of {suite}; '):
    SUITES[suite].make('Nothing-v0')
  with pytest.raises(ValueError, match=r'no_such_option is not an option of'):
    SUITES[suite].make(_ONE[suite], no_such_option=0)
  with pytest.raises(ValueError, match='name is not an option of'):
    SUITES[suite].make(_ONE[suite], name=0)


@pytest.mark.parametrize(
  'suite,options,message',
  [
    ('navix', {'max_steps': 'abc'}, "max_steps='abc' must be a whole number"),
    ('navix', {'max_steps': True}, 'max_steps=True must be a whole number'),
    ('xminigrid', {'view_size': 4}, 'view_size=4 must be odd'),
    ('xminigrid', {'view_size': True}, 'view_size=True must be a number'),
    ('xminigrid', {'height': 1}, 'height=1 must be at least 5'),
    ('xminigrid', {'render_mode': 3}, 'render_mode is not an option'),
    ('jumanji', {'time_limit': -3}, 'time_limit=-3 must be a whole number'),
    ('jumanji', {'num_rows': 0}, 'options of Snake-v1 are not accepted: Index'),
    ('jumanji', {'time_limit': 2.5}, 'time_limit=2.5 must be a whole number'),
    ('jumanji', {'viewer': 3}, 'viewer is not an option'),
    ('brax', {'episode_length': 2.5}, 'episode_length=2.5 must be a whole'),
    ('craftax', {'day_length': 'x'}, "day_length='x' must be a number"),
    ('playground', {'sim_dt': 0}, 'sim_dt=0 must be above 0'),
    ('playground', {'ctrl_dt': -1}, 'ctrl_dt=-1'),
    ('playground', {'vision': True}, 'vision is not an option'),
  ],
)
def test_a_wrong_option_is_said(suite, options, message):
  with pytest.raises(ValueError, match=message):
    _make(suite, **options)


@pytest.mark.parametrize(
  'suite', [helpers.slow(x) if x in _LARGE else x for x in _PACKAGES]
)
def test_one_environment_of_each_suite_trains(suite, tmp_path):
  pytest.importorskip(_PACKAGES[suite])
  argv = [
    f'--config.env.suite={suite}',
    f'--config.env.name={_ONE[suite]}',
    '--config.env.num_envs=4',
    '--config.num_minibatches=1',
    '--config.total_env_steps=96',
    '--config.eval.max_episode_steps=4',
  ]
  assert helpers.run(tmp_path / 'run', *argv) == 0
  _, summary = helpers.read(tmp_path / 'run')
  assert summary['exit'] == 'done' and summary['num_updates'] == 3
  argv += ['--resume', '--config.total_env_steps=128']
  assert helpers.run(tmp_path / 'run', *argv) == 0
  _, summary = helpers.read(tmp_path / 'run')
  assert summary['exit'] == 'done' and summary['num_updates'] == 4


# A limit of the episode, and an action that ends nothing before the limit.
_LIMITS = [
  ('navix', {'max_steps': 4}, jnp.int32(0)),
  ('xminigrid', {'max_steps': 4}, jnp.int32(1)),
  ('brax', {'episode_length': 4}, jnp.zeros(1)),
  ('craftax', {'max_timesteps': 4}, jnp.int32(0)),
  ('playground', {'episode_length': 4}, jnp.zeros(1)),
]


@pytest.mark.parametrize(
  'suite,options,action',
  [helpers.slow(*x) if x[0] in _LARGE else x for x in _LIMITS],
)
def test_a_time_limit_truncates(suite, options, action):
  env = _make(suite, **options)
  assert env.spec.max_episode_steps == 4
  steps = _unroll(env, jnp.broadcast_to(action, (11, *action.shape)), 3)
  # Four steps, the reset step, four steps, the reset step.
  expected = [t % 5 == 0 for t in range(12)]
  np.testing.assert_array_equal(steps.is_first, np.tile(expected, (3, 1)).T)
  assert np.all(steps.discount == 1)
  assert np.all(steps.reward[steps.is_first] == 0)


def test_snakes_time_limit_truncates_and_its_death_terminates():
  # Up: the snake dies at the upper edge, after 12 steps at most.
  dies = _unroll(_make('jumanji'), jnp.zeros(12, jnp.int32))
  end = int(np.argmax(dies.is_first[1:, 0]))  # The step before the reset step.
  assert dies.is_first[end + 1, 0] and dies.discount[end, 0] == 0
  assert np.sum(dies.discount == 0) >= 1
  # A circle: up, right, down, left. It touches no edge where there is room.
  circle = jnp.arange(11) % 4
  for seed in range(10):
    env = _make('jumanji', time_limit=4.0)
    steps = _unroll(env, circle, seed=seed)
    if not np.any(steps.discount == 0):
      break
  assert isinstance(env.spec.max_episode_steps, int)
  first = np.flatnonzero(steps.is_first[:, 0])
  assert list(first) == [0, 5, 10] and np.all(steps.discount == 1)


def test_a_death_in_craftax_terminates():
  env = _make('craftax')
  state, _ = env.reset(jax.random.split(jax.random.key(0), 2))
  health = jnp.asarray([0, 9])
  inner = state.env_state.replace(player_health=health)
  step, idle = jax.jit(env.step), jnp.zeros(2, jnp.int32)
  state, steps = step(state._replace(env_state=inner), idle)
  assert list(steps.discount) == [0, 1]
  _, steps = step(state, idle)
  assert list(steps.is_first) == [True, False]


def test_jumanjis_numbers_are_divided_by_their_bounds():
  spec = _make('jumanji', 'Minesweeper-v0').spec
  assert spec.obs_scale == {'board': 8, 'num_mines': 99}
  assert spec.obs_scale.keys() == spec.obs.obs.keys()
  assert _make('jumanji', 'Snake-v1').spec.obs_scale == 1


def test_rewards_that_depend_on_the_time_limit_are_kept():
  jumanji = pytest.importorskip('jumanji')
  name = 'SearchAndRescue-v0'
  env, own = _make('jumanji', name), jumanji.make(name)
  state, _ = env.reset(jax.random.split(jax.random.key(0), 1))
  own_state = jax.tree.map(lambda x: x[0], state.env_state[0])

  def step(carry, rng_key):
    state, own_state = carry
    action = jax.random.uniform(rng_key, (1, 2, 2), minval=-1)
    own_state, own_step = own.step(own_state, action[0])
    state, steps = env.step(state, action)
    return (state, own_state), (steps.reward[0], own_step.reward.sum())

  keys = jax.random.split(jax.random.key(1), own.time_limit - 1)
  _, (ours, theirs) = jax.lax.scan(step, (state, own_state), keys)
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)
  assert len(np.unique(theirs)) > 2


@pytest.mark.parametrize(
  'suite,name', [('brax', 'reacher'), ('playground', 'CartpoleBalance')]
)
def test_the_metrics_of_a_suite_are_its_info(suite, name):
  env = _make(suite, name)
  keys = jax.random.split(jax.random.key(0), 3)
  state, first = jax.eval_shape(env.reset, keys)
  action = jnp.zeros((3, *env.spec.action.shape))
  _, second = jax.eval_shape(env.step, state, action)
  metrics = state.env_state[0].metrics
  assert first.info.keys() == second.info.keys() == metrics.keys()
  assert len(metrics) >= 2
  for x in jax.tree.leaves((first.info, second.info)):
    assert x.shape == (3,) and x.dtype == np.float32


@pytest.mark.slow
def test_a_fall_in_brax_terminates():
  steps = _unroll(_make('brax'), jnp.ones((40, 1)))
  ends = np.flatnonzero(steps.discount[:, 0] == 0)
  assert ends.size and np.all(steps.is_first[ends[ends < 40] + 1, 0])


def test_a_goal_terminates_and_rewards():
  # The agent of Empty-5x5 looks right: go twice, turn right, go twice.
  actions = jnp.asarray([2, 2, 1, 2, 2, 0, 0])
  steps = _unroll(_make('navix'), actions)
  assert list(steps.reward[:, 0]) == [0, 0, 0, 0, 0, 1, 0, 0]
  assert list(steps.discount[:, 0]) == [1, 1, 1, 1, 1, 0, 1, 1]
  assert list(np.flatnonzero(steps.is_first[:, 0])) == [0, 6]
  # XLand-MiniGrid: 0 goes forward, 1 turns right; it pays less for more steps.
  env = _make('xminigrid')
  steps = _unroll(env, jnp.asarray([0, 0, 1, 0, 0, 2, 2]))
  reward = 1 - 0.9 * 5 / env.spec.max_episode_steps
  np.testing.assert_allclose(steps.reward[:, 0], [0] * 5 + [reward, 0, 0])
  assert steps.discount[5, 0] == 0 and steps.is_first[6, 0]


@pytest.mark.parametrize('suite', ['navix', 'xminigrid'])
def test_cells_are_one_hot(suite):
  env = _make(suite)
  sizes = {'navix': (11, 6, 4), 'xminigrid': (13, 12)}[suite]
  steps = _unroll(env, jnp.arange(6))
  assert env.spec.obs.dtype == bool and env.spec.obs.shape[-1] == sum(sizes)
  for part in np.split(steps.obs, np.cumsum(sizes)[:-1], axis=-1):
    assert np.all(part.sum(-1) == 1)


def test_a_combination_of_actions_is_one_legal_action():
  jumanji = pytest.importorskip('jumanji')
  env, own = _make('jumanji', 'Tetris-v0'), jumanji.make('Tetris-v0')
  assert env.spec.action == Discrete(4 * 10)
  state, steps = env.reset(jax.random.split(jax.random.key(3), 1))
  own_state = jax.tree.map(lambda x: x[0], state.env_state[0])
  for _ in range(5):
    assert isinstance(steps.obs, Masked)
    action = int(np.flatnonzero(steps.obs.action_mask[0])[-1])
    pair = np.asarray(divmod(action, 10), np.int32)
    found = env.spec.to_library(jnp.asarray([action]))
    np.testing.assert_array_equal(found, pair[None])
    own_state, own_step = own.step(own_state, pair)
    state, steps = env.step(state, jnp.asarray([action]))
    assert float(steps.reward[0]) == float(own_step.reward)
    mask = own_step.observation.action_mask.reshape(-1)
    np.testing.assert_array_equal(steps.obs.action_mask[0], mask)
    # A policy sees the same in the library's observations.
    own_obs = jax.tree.map(lambda x: x[None], own_step.observation)
    seen = policy.observe(env.spec, own_obs)
    jax.tree.map(np.testing.assert_array_equal, seen, steps.obs)
    with pytest.raises(ValueError, match='the batch axis'):
      policy.observe(env.spec, own_step.observation)


def test_kinds_of_actions():
  assert _make('jumanji', 'Cleaner-v0').spec.action == MultiDiscrete((4, 4, 4))
  assert _make('jumanji', 'RubiksCube-v0').spec.action == MultiDiscrete(
    (6, 1, 3)
  )
  action = _make('jumanji', 'SearchAndRescue-v0').spec.action
  assert isinstance(action, Box) and action.shape == (2, 2)


def test_the_others_play_legally_between_the_agents_turns():
  env = _make('pgx', 'tic_tac_toe')
  batch = 64
  state, steps = env.reset(jax.random.split(jax.random.key(0), batch))
  marks = np.asarray(steps.obs.obs).sum((1, 2))
  # The agent begins in half of the games; else one mark of the other is there.
  assert {tuple(x) for x in marks.tolist()} == {(0, 0), (0, 1)}
  assert 16 < np.sum(marks) < 48
  step, total = jax.jit(env.step), np.zeros(batch)
  for _ in range(20):
    action = jnp.argmax(steps.obs.action_mask, -1)
    ended = np.asarray(steps.discount) == 0
    state, steps = step(state, action)
    np.testing.assert_array_equal(steps.is_first, ended)
    total += np.asarray(steps.reward)
    assert set(np.unique(steps.reward)) <= {-1.0, 0.0, 1.0}
    mine, theirs = np.asarray(steps.obs.obs).sum((1, 2)).T
    going = np.asarray(steps.discount) == 1
    assert np.all(np.isin((theirs - mine)[going], (0, 1)))
  assert np.any(total > 0) and np.any(total < 0)


def test_no_game_ends_before_the_agents_first_turn():
  env = _make('pgx', 'sparrow_mahjong')
  # Of games that are not drawn again, about 1 in 70 ends too early.
  state, steps = jax.jit(env.reset)(jax.random.split(jax.random.key(0), 512))
  game = state.env_state.state
  assert not np.any(game.terminated)
  assert np.all(game.current_player == 0)
  assert np.all(steps.obs.action_mask.any(1))


def test_an_opponent_plays_from_its_own_side():
  pytest.importorskip('pgx')

  def choose(rng_key, obs):  # The first square, if the other has begun.
    del rng_key
    mine, theirs = jnp.sum(obs.obs, (0, 1))  # The planes of tic-tac-toe.
    order = jnp.where(theirs > mine, jnp.arange(9), jnp.arange(9)[::-1])
    return jnp.argmin(jnp.where(obs.action_mask, order, 9))

  env = SUITES['pgx'].make('tic_tac_toe', opponent=choose)
  state, steps = env.reset(jax.random.split(jax.random.key(0), 32))
  begins = np.asarray(steps.obs.obs[..., 1]).sum((1, 2)) == 0
  assert 0 < begins.sum() < 32
  _, steps = env.step(state, jnp.full(32, 4))  # The middle.
  theirs = np.asarray(steps.obs.obs[..., 1]).reshape(-1, 9)
  assert np.all(theirs[begins] == np.eye(9)[0])
  # Where the other begins, it takes the last two squares.
  assert np.all(theirs[~begins] == np.eye(9)[7] + np.eye(9)[8])


@pytest.mark.parametrize('seed', range(4))
def test_a_person_plays_against_a_policy(seed, monkeypatch, capsys):
  pytest.importorskip('pgx')

  class LowestSquare:
    config = {
      'env.suite': 'pgx',
      'env.name': 'tic_tac_toe',
      'eval.greedy': True,
    }

    def __call__(self, obs, carry, *, rng_key, env_state):
      assert obs.obs.shape == (1, 3, 3, 2) and rng_key is None
      # It sees its own stones in the first plane.
      mine, theirs = np.asarray(obs.obs).sum((0, 1, 2))
      assert mine == len(seen) and theirs - mine in (0, 1)
      seen.append(0)
      return np.argmax(obs.action_mask, 1), carry

  def play_with(*answers):
    seen.clear()
    monkeypatch.setattr('sys.stdin', io.StringIO('\n'.join([*answers, ''])))
    assert play.run(['play', 'run', f'--seed={seed}']) == 0
    return capsys.readouterr().out

  seen = []
  monkeypatch.setattr(policy, 'load', lambda *_, trust: LowestSquare())
  # The policy takes 0, 1 and 3, and the person a diagonal: 4, 2 and 6.
  text = play_with('x', '4', '4', '9', '2', '6')
  assert text.count('not a legal action') == 3
  begins = text.startswith('the policy begins\nthe policy plays 0\n')
  assert begins or text.startswith('you begin\nlegal actions: 0 1 2 3 4 ')
  assert f'you win after {5 + begins} moves' in text
  text = play_with('8', '7', '4')  # The policy takes the first row.
  assert f'the policy wins after {6 - begins} moves' in text
  for answers in ('8', 'q'), ('8',):
    assert play_with(*answers).endswith('the game is not finished\n')


@pytest.mark.slow
def test_a_saved_run_is_an_opponent(tmp_path, monkeypatch, capsys):
  pytest.importorskip('pgx')
  argv = [
    '--config.env.suite=pgx',
    '--config.env.name=tic_tac_toe',
    '--config.env.num_envs=8',
    '--config.total_env_steps=1024',
  ]
  # Without a recurrent network, the carry of this run never changes an action.
  rewards = '--config.agent.normalize_reward=True'
  assert helpers.run(tmp_path / 'first', *argv, rewards) == 0
  monkeypatch.chdir(tmp_path)
  argv.append('--config.env.options.opponent=first')
  assert helpers.run(tmp_path / 'second', *argv) == 0
  _, summary = helpers.read(tmp_path / 'second')
  assert summary['exit'] == 'done'
  # The path is absolute, so that the run can be used in another directory.
  saved = workdir.read_config(str(tmp_path / 'second'))
  assert saved['env.options']['opponent'] == str(tmp_path / 'first')
  more = '--resume', '--config.total_env_steps=2048'
  assert helpers.run(tmp_path / 'second', *argv, *more) == 0
  argv[1] = '--config.env.name=connect_four'
  assert helpers.run(tmp_path / 'third', *argv) != 0
  assert 'has learned pgx:tic_tac_toe, not' in capsys.readouterr().err


_DRAWS = """
import sys, jax, numpy as np
from podrl.envs import SUITES, envpool
envpool.load_opengl()
env = SUITES[sys.argv[1]].make(sys.argv[2])
step = jax.jit(env.step)
state, _ = jax.jit(env.reset)(jax.random.split(jax.random.key(1), 2))
pictures = [env.render(state)]
shape = getattr(env.spec.action, 'shape', ())
dtype = np.float32 if shape else np.int32
for action in range(4):
  state, _ = step(state, np.full((2, *shape), action, dtype))
  pictures.append(env.render(state))
assert all(x.dtype == np.uint8 and x.shape[2] == 3 for x in pictures)
assert len({x.shape for x in pictures}) == 1
assert len({x.tobytes() for x in pictures}) > 1
"""


@pytest.mark.parametrize(
  'suite', [helpers.slow(x) if x in _LARGE else x for x in _PACKAGES]
)
def test_a_suite_draws_its_environments(suite):
  pytest.importorskip(_PACKAGES[suite])
  if suite in ('brax', 'playground') and not ctypes.util.find_library('EGL'):
    pytest.skip('MuJoCo needs libEGL to draw')
  command = [sys.executable, '-c', _DRAWS, suite, _ONE[suite]]
  subprocess.run(command, check=True)


def test_a_ruleset_of_xland_is_an_option(capsys, monkeypatch):
  pytest.importorskip(_PACKAGES['xminigrid'])
  monkeypatch.setattr(xminigrid, '_told', set())
  name = 'XLand-MiniGrid-R1-9x9'
  for _ in range(2):
    SUITES['xminigrid'].make(name)
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and 'has no goal, so no reward' in said
  # Goal 1 is to hold a tile; 3 is a ball and 1 is red.
  options = {'goal': (1, 3, 1, 0, 0), 'init_tiles': ((3, 1), (3, 2))}
  env = SUITES['xminigrid'].make(name, **options)
  state, _ = env.reset(jax.random.split(jax.random.key(0), 64))
  total, step = 0.0, jax.jit(env.step)
  for i in range(200):
    key = jax.random.fold_in(jax.random.key(1), i)
    state, timestep = step(state, jax.random.randint(key, (64,), 0, 6))
    total += float(timestep.reward.sum())
  assert total > 0 and capsys.readouterr().err == ''


@pytest.mark.parametrize(
  'options,message',
  [
    ({'goal': (1, 2)}, r'goal=\(1, 2\) must be rows of 5 numbers'),
    ({'goal': (1,) * 10}, 'must be 5 numbers'),
    ({'goal': (1, 3, 1, 0, -1)}, 'numbers from 0 to 255'),
    ({'rules': 'text'}, "rules='text' must be rows of 7 numbers"),
    ({'init_tiles': ((3, 1.5),)}, 'must be rows of 2 numbers'),
  ],
)
def test_a_wrong_ruleset_is_one_line(options, message):
  pytest.importorskip(_PACKAGES['xminigrid'])
  with pytest.raises(ValueError, match=message):
    SUITES['xminigrid'].make('XLand-MiniGrid-R1-9x9', **options)


_ROWS = '012', '345', '678', '036', '147', '258', '048', '246'


@functools.cache
def _solve(mine, theirs):
  """Returns the value of tic-tac-toe for the player who moves, and its moves.

  `mine` and `theirs` are frozen sets of squares.
  """
  if any({*map(int, row)} <= theirs for row in _ROWS):
    return -1, ()
  values = {
    i: -_solve(theirs, mine | {i})[0] for i in {*range(9)} - mine - theirs
  }
  best = max(values.values(), default=0)
  return best, tuple(i for i, x in values.items() if x == best)


def _board_obs(boards):
  """What the player sees who moves, for pairs of sets of squares."""
  planes = np.zeros((len(boards), 9, 2), bool)
  for plane, (mine, theirs) in zip(planes, boards):
    plane[[*mine], 0], plane[[*theirs], 1] = True, True
  return Masked(planes.reshape(-1, 3, 3, 2), ~planes.any(-1))


def _play_board(own, other, own_begins, num_games):
  """Returns the results of `own`, and all boards at which somebody moved."""
  boards = [(frozenset(), frozenset())] * num_games
  results, seen = np.full(num_games, np.nan), set()
  for ply in range(9):
    is_own = (ply % 2 == 0) == own_begins
    open_games = np.flatnonzero(np.isnan(results))
    seen |= {boards[i] for i in open_games}
    moves = (own if is_own else other)([boards[i] for i in open_games])
    for i, move in zip(open_games, moves):
      mine, theirs = boards[i]
      assert move not in mine | theirs
      boards[i] = theirs, mine | {int(move)}
      if _solve(*boards[i])[1] == ():  # Lost or full.
        lost = _solve(*boards[i])[0]
        results[i] = -lost if is_own else lost
  return results, seen


@pytest.mark.slow
@pytest.mark.parametrize('agent', ['ppo', 'muzero'])
def test_self_play_solves_tic_tac_toe(agent, tmp_path):
  pytest.importorskip('pgx')
  command = ['train', 'pgx:tic_tac_toe', f'--agent={agent}']
  command += ['--config.env.options.opponent=self', f'--workdir={tmp_path}/run']
  assert train.run(command) == 0
  loaded = policy.load(tmp_path / 'run')
  rng = np.random.default_rng(0)

  def own(boards, rng_key=None):
    size = len(boards)
    empty = [(frozenset(), frozenset())] * (1000 - size)  # One compilation.
    return loaded(_board_obs(boards + empty), rng_key=rng_key)[0][:size]

  def sampled(boards):
    return own(boards, jax.random.key(rng.integers(2**31)))

  def at_random(boards):
    return [rng.choice([*{*range(9)} - x - y]) for x, y in boards]

  def perfect(boards):
    return [rng.choice(_solve(*board)[1]) for board in boards]

  for begins in (True, False):
    results, _ = _play_board(own, at_random, begins, 1000)
    assert np.all(results >= 0)
    results, _ = _play_board(own, perfect, begins, 1000)
    assert np.mean(results == 0) >= 0.95 and not np.any(results > 0)
  if agent != 'ppo':
    return
  # The positions that occur while the agent learns.
  _, seen = _play_board(sampled, sampled, True, 1000)
  seen = sorted(seen, key=lambda board: [*map(sorted, board)])
  obs = jax.tree.map(jnp.asarray, _board_obs(seen))
  size = len(seen)
  steps = TimeStep(obs, np.zeros(size), np.ones(size), np.zeros(size, bool))
  keys = jax.random.split(jax.random.key(0), size)
  _, extras, _ = loaded.agent.act(loaded.variables, keys, steps, ())
  found = np.asarray(extras.value)
  found = np.where(np.abs(found) < 1 / 3, 0, np.sign(found))
  exact = [_solve(*board)[0] for board in seen]
  assert size > 500 and np.mean(found == exact) >= 0.95
