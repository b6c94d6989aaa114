"""Tests agents that play against themselves, on the page's game of Nim."""

import importlib
import os
import pathlib
import re
import signal
import sys
from typing import NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podrl
from podrl import signals
from podrl.core import pool
from podrl.envs import games
from podrl.records import workdir
from podrl.run import build
from podrl.tools import evaluate, sweep, tournament, train
from podrl.types import (
  Agent,
  DeviceEnv,
  LossOutput,
  Masked,
  TimeStep,
  Variables,
)

_PAGE = helpers.ROOT / 'docs/how-to/self-play.md'
_STONES = np.arange(1, 22)


@pytest.fixture(scope='module', autouse=True)
def nim(tmp_path_factory):
  """The page's module `nim`."""
  (code,) = re.findall(r'```python\n(.*?)```', _PAGE.read_text(), re.S)
  path = tmp_path_factory.mktemp('nim')
  (path / 'nim.py').write_text(code)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(path)
    yield importlib.import_module('nim')
  del sys.modules['nim']


def _obs(stones):
  """What the player sees who moves, for each number of stones."""
  legal = np.arange(1, 4) <= stones[:, None]
  return Masked(np.eye(22, dtype=np.float32)[stones], legal)


def _is_perfect(loaded):
  """Returns whether a policy leaves a multiple of 4 where it can."""
  action, _ = loaded(_obs(_STONES))
  lost = _STONES % 4 == 0
  return np.all(lost | (action + 1 == _STONES % 4))


def _train(path, *arguments, opponent='self', command=train):
  """Trains in Nim with small settings; returns the exit code."""
  return command.run(
    [
      command.__name__.split('.')[-1],
      'jax:nim:nim',
      f'--config.env.options.opponent={opponent}',
      f'--workdir={path}',
      '--config.env.num_envs=8',
      '--config.unroll_length=8',
      '--config.network.hidden_sizes=8',
      '--config.log.every_updates=3',
      '--config.eval.num_episodes=8',
      '--config.total_env_steps=1024',
      *arguments,
    ]
  )


def test_the_command_of_the_page_learns_perfect_play(tmp_path):
  (command,) = re.findall(r'^podrl (train jax:nim.*)$', _PAGE.read_text(), re.M)
  path = tmp_path / 'run'
  assert train.run([*command.split(), f'--workdir={path}']) == 0
  loaded = podrl.load(path)
  assert _is_perfect(loaded)
  obs = jax.tree.map(jnp.asarray, _obs(_STONES))
  size = len(_STONES)
  timestep = TimeStep(obs, np.zeros(size), np.ones(size), np.zeros(size, bool))
  keys = jax.random.split(jax.random.key(0), size)
  _, extras, _ = loaded.agent.act(loaded.variables, keys, timestep, ())
  # The theory of the game says who wins: the value is that of the mover.
  won = np.where(_STONES % 4 == 0, -1, 1)
  np.testing.assert_array_equal(np.sign(extras.value), won)
  last = helpers.read_records(path)[-1]
  assert last['env/first_wins'] + last['env/second_wins'] == pytest.approx(1)
  # 5 of 21 numbers of stones are lost for the player who begins.
  assert last['env/first_wins'] == pytest.approx(16 / 21, abs=0.05)
  assert last['episode_return'] == pytest.approx(11 / 21, abs=0.1)


@pytest.fixture(scope='module')
def perfect(tmp_path_factory):
  """The run of an agent that plays perfectly."""
  path = tmp_path_factory.mktemp('perfect') / 'perfect'
  command = ['train', 'jax:nim:nim', '--agent=pqn', '--steps=200_000']
  command += ['--config.env.options.opponent=self', f'--workdir={path}']
  assert train.run([*command, '--config.eval.num_episodes=8']) == 0
  assert _is_perfect(podrl.load(path))
  return path


@pytest.mark.slow
@pytest.mark.parametrize(
  'agent,arguments',
  [
    ('impala', ['--steps=1_000_000']),
    ('a2c', ['--steps=1_000_000']),
    ('dqn', ['--steps=100_000']),
    ('rainbow', ['--steps=100_000']),
    ('sac', ['--steps=30_000']),
    ('muzero', ['--steps=150_000']),
    ('muzero', ['--steps=30_000', '--config.search.model=env']),
  ],
)
def test_each_agent_learns_perfect_play(agent, arguments, tmp_path):
  command = ['train', 'jax:nim:nim', f'--agent={agent}', *arguments]
  command += [f'--workdir={tmp_path}/run', '--config.eval.num_episodes=8']
  assert train.run([*command, '--config.env.options.opponent=self']) == 0
  assert _is_perfect(podrl.load(tmp_path / 'run'))


def test_an_agent_is_evaluated_against_others(tmp_path, perfect, capsys):
  run = tmp_path / 'run'
  others = f'--config.eval.opponents=first, random,{perfect}'
  assert _train(run, others, '--config.eval.num_episodes=64') == 0
  config = workdir.read_config(str(run))
  assert config['eval.opponents'] == ('first', 'random', str(perfect))
  last = helpers.read_records(run)[-1]
  # Opponents explore, as in training: here, a fifth of the perfect one's moves.
  returns = 'eval_return', 'eval_return_vs_random', 'eval_return_vs_perfect'
  first, at_random, against_perfect = (last[x] for x in returns)
  assert against_perfect < min(first, at_random) - 0.4, last
  capsys.readouterr()
  assert evaluate.run(['evaluate', str(run), '--episodes=8']) == 0
  assert 'over 8 episodes' in capsys.readouterr().out
  assert _train(tmp_path / 'wrong', '--config.eval.opponents=nobody') == 2
  assert 'the opponent nobody is unknown' in capsys.readouterr().err


def test_the_first_opponent_is_the_policy_before_the_first_update(tmp_path):
  """Without learning, the agent and `first` are equal."""
  assert _train(tmp_path, '--config.optimizer.learning_rate=1e-12') == 0
  loaded = podrl.load(tmp_path)
  player = build._first_player(loaded.config, loaded.agent)
  keys = jax.random.split(jax.random.key(0), len(_STONES))
  obs = jax.tree.map(jnp.asarray, _obs(_STONES))
  size = len(_STONES)
  timestep = TimeStep(obs, np.zeros(size), np.ones(size), np.zeros(size, bool))
  expected, *_ = loaded.agent.act(loaded.variables, keys, timestep, ())
  np.testing.assert_array_equal(jax.vmap(player)(keys, obs), expected)


@pytest.mark.parametrize(
  'arguments,message',
  [
    (
      ['--config.network.recurrent=gru'],
      'use a network without a recurrent core',
    ),
    (
      ['--agent=muzero', '--config.search.model=env']
      + ['--config.agent.normalize_observation=True'],
      'search.model=env does not work with config.agent.normalize_observation',
    ),
    (['--agent=muzero'], 'cannot tell the games against earlier versions'),
    (['--config.agent.normalize_reward=True'], 'cannot be normalised together'),
    (['--config.eval.opponents=random,self'], 'must name others'),
    (['--config.eval.opponents=a/first,first'], 'have the same name'),
    (
      ['--agent=muzero', '--config.search.model=env']
      + ['--config.search.reanalyse_fraction=0.5'],
      'search.model=env does not work with config.search.reanalyse_fraction',
    ),
    (['--config.env.options.pool_fraction=2'], 'must be between 0 and 1'),
  ],
)
def test_what_does_not_fit_is_said(arguments, message, tmp_path, capsys):
  assert _train(tmp_path / 'run', *arguments, opponent='pool') == 2
  assert message in capsys.readouterr().err


def _counting_agent():
  """An agent whose only parameter is its number of updates."""

  def absorb(variables, measured):
    params = {'x': variables.params['x'] + 1.0}
    return variables._replace(params=params, statistics=variables.statistics)

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    action = jnp.full(rng_key.shape, variables.params['x'], jnp.int32)
    return action, (), carry

  return Agent(
    lambda rng_key: Variables({'x': jnp.float32(0)}, (), {}),
    lambda env_index: (),
    act,
    lambda *_: (),
    lambda *_: (jnp.float32(0), LossOutput({})),
    absorb=absorb,
  )


def test_versions_join_the_pool_at_equal_distances():
  agent = pool.keep_earlier(_counting_agent(), 4)
  variables = agent.init(jax.random.key(0))
  variables = variables.with_hyperparams({'num_updates': jnp.float32(40)})
  absorb = jax.jit(agent.absorb)
  play = jax.jit(jax.vmap(agent.play_earlier, (None, 0, None, 0)))
  keys = jax.random.split(jax.random.key(1), 8)
  seen = []
  for update in range(1, 41):
    variables = absorb(variables, ())
    statistics = variables.statistics
    joined = [0, *(x for x in (10, 20, 30) if x <= update)]
    assert int(statistics.num_versions) == len(joined)
    versions = np.asarray(statistics.versions[0]['x'])[: len(joined)]
    np.testing.assert_array_equal(versions, joined)
    actions = np.asarray(play(variables, keys, jnp.zeros(()), jnp.arange(8)))
    assert len({*actions}) <= 2  # Two versions, each for half of the tickets.
    np.testing.assert_array_equal(actions, [*actions[:2]] * 4)
    assert {*actions} <= {*joined}
    seen += [*actions[:2]] if update > 30 else []
  assert {*seen} == {0, 10, 20, 30}
  # In a longer run, the pool stays full, and new versions replace old ones.
  variables = variables.with_hyperparams({'num_updates': jnp.float32(400)})
  for _ in range(360):
    variables = absorb(variables, ())
  assert int(variables.statistics.num_versions) == 4
  versions = np.asarray(variables.statistics.versions[0]['x'])
  assert versions[0] == 0 and {*versions[1:]} & {130, 230, 330}
  assert {*versions} <= {0, 10, 20, 30, 130, 230, 330}


def test_a_pool_resumes_bitwise(tmp_path, monkeypatch):
  arguments = ['--config.agent.pool_size=4', '--config.num_devices=2']
  arguments.append('--config.num_seeds=2')
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert _train(whole, *arguments, opponent='pool') == 0
  advance, calls = build.anakin.Anakin.advance, []

  def interrupted(self, *args):
    calls.append(0)
    if len(calls) == 3:
      os.kill(os.getpid(), signal.SIGTERM)
    return advance(self, *args)

  with monkeypatch.context() as patch:
    patch.setattr(build.anakin.Anakin, 'advance', interrupted)
    code = _train(parts, *arguments, opponent='pool')
    assert code == signals.PREEMPTED
  assert _train(parts, *arguments, '--resume', opponent='pool') == 0
  loaded = [podrl.load(x / 'seed_1').variables for x in (whole, parts)]
  for x, y in zip(*map(jax.tree.leaves, loaded), strict=True):
    np.testing.assert_array_equal(x, y)
  versions = loaded[0].statistics.versions[0]
  kernels = [x for x in jax.tree.leaves(versions) if x.ndim == 3]
  # Four different versions.
  assert all(len(np.unique(x, axis=0)) == 4 for x in kernels)


class _Hands(NamedTuple):
  """Rock, paper, scissors; the second player does not see the first hand."""

  hand: jax.Array
  current_player: jax.Array
  rewards: jax.Array
  terminated: jax.Array


_WINS = np.float32([[0, -1, 2], [1, 0, -1], [-2, 1, 0]]) / 2


def _hands(opponent='random', pool_fraction=0.5) -> DeviceEnv:
  def init(rng_key):
    player = jax.random.randint(rng_key, (), 0, 2)
    return _Hands(jnp.int32(-1), player, jnp.zeros(2), jnp.bool(False))

  def step(state, action, rng_key):
    mover, ends = state.current_player, state.hand >= 0
    won = jnp.asarray(_WINS)[action, state.hand]
    rewards = jnp.where(ends, won * (2.0 * jax.nn.one_hot(mover, 2) - 1.0), 0.0)
    return _Hands(jnp.where(ends, state.hand, action), 1 - mover, rewards, ends)

  def observe(state, player):
    return Masked(jnp.ones(1), jnp.ones(3, bool))

  game = games.Game(init, step, observe, num_actions=3)
  return games.make_device_env(game, opponent, pool_fraction)


def _exploitability(agent, variables):
  """Returns what the best reply wins, from 4,096 sampled actions."""
  size = 4096
  obs = Masked(jnp.ones((size, 1)), jnp.ones((size, 3), bool))
  timestep = TimeStep(obs, jnp.zeros(size), jnp.ones(size), jnp.ones(size) > 0)
  keys = jax.random.split(jax.random.key(7), size)
  action, *_ = jax.jit(agent.act)(variables, keys, timestep, ())
  return (_WINS @ (np.bincount(action, minlength=3) / size)).max()


@pytest.mark.slow
def test_a_pool_ends_the_circle_of_rock_paper_scissors(tmp_path, monkeypatch):
  monkeypatch.setattr(sys.modules['nim'], 'hands', _hands, raising=False)
  found = {}
  for opponent in 'self', 'pool':
    seen = found[opponent] = []

    def on_record(record, run, seen=seen):
      loaded = run.policy()
      seen.append(_exploitability(loaded.agent, loaded.variables))

    config = {
      'env.options.opponent': opponent,
      'agent.entropy_cost': 0.1,
      'agent.lambda_': 1.0,
      'agent.normalize_advantage': False,
      'agent.pool_size': 64,
      'network.hidden_sizes': (8,),
      'unroll_length': 8,
      'num_epochs': 1,
      'num_minibatches': 1,
      'optimizer.learning_rate': 0.01,
      'optimizer.anneal': False,
      'log.every_updates': 20,
      'eval.num_episodes': 8,
    }
    if opponent == 'pool':
      config['env.options.pool_fraction'] = 0.9
    podrl.train(
      'jax:nim:hands',
      steps=2e6,
      workdir=tmp_path / opponent,
      config=config,
      on_record=on_record,
    )
  half = {k: x[len(x) // 2 :] for k, x in found.items()}
  # Measured: means 0.25 to 0.30 and 0.03 to 0.04, worst 0.64 and 0.11.
  assert np.mean(half['self']) > 0.15 and np.max(half['self']) > 0.4
  assert np.mean(half['pool']) < 0.07 and np.max(half['pool']) < 0.2


def test_a_ticket_says_who_plays(nim):
  """In a pool, half of the games are against earlier versions."""
  env = nim.nim('pool')
  assert env.spec.has_turns and env.spec.has_pool

  def choose(rng_key, obs, ticket):
    # It takes as many stones as its ticket says, 1 or 2, if it may.
    return jnp.where(obs.action_mask[ticket % 2], ticket % 2, 0)

  env = env.with_pool(choose)
  state, timestep = env.reset(jax.random.split(jax.random.key(0), 256))
  tickets = np.asarray(state.env_state.ticket)
  against = tickets >= 0
  assert 90 < against.sum() < 166
  stones = np.asarray(timestep.obs.obs).argmax(1)
  after, timestep = jax.jit(env.step)(state, jnp.zeros(256, jnp.int32))
  now = np.asarray(timestep.obs.obs).argmax(1)
  goes_on = np.asarray(timestep.discount) != 0
  # Against a version, the agent sees the game at its next turn; there is no
  # sign. Otherwise, the other player moves next.
  signs = np.where(against, 1, -1)
  np.testing.assert_array_equal(timestep.discount[goes_on], signs[goes_on])
  enough = goes_on & (stones > 3)
  taken = np.where(against, 1 + 1 + tickets % 2, 1)
  np.testing.assert_array_equal((stones - now)[enough], taken[enough])


def test_a_tournament_finds_the_strongest(perfect, monkeypatch, capsys):
  monkeypatch.chdir(perfect.parent)
  assert _train('weak', '--config.total_env_steps=64') == 0
  argv = ['tournament', 'perfect', 'weak', 'random', '--games=64']
  argv.append('--random_moves=0')
  assert tournament.run(argv) == 0
  text = capsys.readouterr().out
  assert text.index('perfect') < text.index('random')
  found = workdir.read_json('tournament.json')
  players = {x['name']: x for x in found['players']}
  assert {*players} == {'perfect', 'weak', 'random'}
  best = players['perfect']
  assert best['wins'] + best['losses'] == 128 and best['draws'] == 0
  # As the player who begins, it loses only from a multiple of 4.
  (pair,) = [x for x in found['pairs'] if x['players'] == ['perfect', 'random']]
  assert sum(pair['first_begins'].values()) == 32
  assert pair['first_begins']['wins'] >= 28
  assert best['elo_low'] > max(
    players[x]['elo_high'] for x in ('weak', 'random')
  )
  assert pathlib.Path('tournament.png').stat().st_size > 3000
  for names, message in (
    (['perfect'], 'give at least two players'),
    (['random', 'random'], 'no run is given'),
    (['perfect@77', 'random'], 'checkpoint'),
  ):
    assert tournament.run(['tournament', *names]) == 2
    assert message in capsys.readouterr().err


def test_ratings_are_those_of_the_model():
  strength = np.array([4.0, 2.0, 1.0])
  scores = 100 * strength[:, None] / (strength[:, None] + strength[None])
  np.fill_diagonal(scores, 0.0)
  elo = tournament.rate(scores)
  expected = 400 * np.log10(strength / 2.0)
  np.testing.assert_allclose(elo, expected, atol=1e-4)
  # Two players: 28 wins, 4 draws and 8 losses are 30 points against 10.
  halves = tournament.Pair(np.array([14, 2, 4]), np.array([14, 2, 4]))
  players = tournament.summarise(['a', 'b'], {(0, 1): halves}, 0)['players']
  elo = [x['elo'] for x in players]
  assert elo[0] - elo[1] == pytest.approx(400 * np.log10(30.5 / 10.5))
  assert sum(elo) == pytest.approx(0, abs=1e-6)
  for x in players:
    assert x['elo_low'] < x['elo'] - 10 and x['elo_high'] > x['elo'] + 10
  # Also of a player who never lost.
  never = tournament.Pair(np.array([50, 0, 0]), np.array([50, 0, 0]))
  best, _ = tournament.summarise(['a', 'b'], {(0, 1): never}, 0)['players']
  assert best['elo_low'] < best['elo'] - 50 and best['losses'] == 0


def test_a_population_compares_evaluated_returns(tmp_path):
  arguments = '--random=3', '--evolve_every=256', '--agent=ppo'
  axis = '--axis=optimizer.learning_rate=log:1e-4:1e-2'
  opponents = '--config.eval.opponents=random,first'
  assert _train(tmp_path, *arguments, axis, opponents, command=sweep) == 0
  program = tmp_path / 'program_0'
  decisions = workdir.read_records(str(program), 'decisions.jsonl')
  assert [x['num_updates'] for x in decisions] == [4, 8, 12]
  for decision in decisions:
    for i, score in enumerate(decision['scores']):
      (record,) = [
        x
        for x in helpers.read_records(program / f'member_{i}')
        if x['num_updates'] == decision['num_updates']
      ]
      returns = record['eval_return'], record['eval_return_vs_first']
      assert score == pytest.approx(np.mean(returns), abs=1e-6)
    assert sum(x != i for i, x in enumerate(decision['parents'])) == 1
  assert (tmp_path / 'population.png').stat().st_size > 10_000
