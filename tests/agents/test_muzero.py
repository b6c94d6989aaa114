"""Tests MuZero: its search, its targets and its loss against plain loops."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import test_games

from podrl.agents import AGENTS, acting, muzero, muzero_search
from podrl.core import returns
from podrl.envs import games
from podrl.fields import defaults
from podrl.networks.muzero import MuZeroNetwork
from podrl.types import (
  Box,
  Discrete,
  EnvSpec,
  MultiDiscrete,
  Sample,
  TimeStep,
  Trajectory,
)

_OBS = jax.ShapeDtypeStruct((3,), jnp.float32)
_A, _B, _K, _N_STEPS, _GAMMA = 3, 6, 3, 2, 0.9
_T = _K + _N_STEPS  # Transitions of a sequence.
_NETWORK = {'layer_norm': True}
_FIELDS = helpers.network_fields('muzero', **_NETWORK)


def _make(action=Discrete(_A), **changes):
  fields = {
    'num_unroll_steps': _K,
    'n_steps': _N_STEPS,
    'support': 4,
    'num_simulations': 4,
  }
  spec = EnvSpec(_OBS, False, action, 1, 0)
  return helpers.make_agent('muzero', spec, _NETWORK, **fields | changes)


def _network():
  spec = EnvSpec(_OBS, False, Discrete(_A), 1, 0)
  return muzero.build_network(spec, _FIELDS, num_bins=9)


def _draw_params(variables, rng, scale):
  """Draws parameters from a normal distribution."""
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape, scale=scale).astype(np.float32),
    variables.params,
  )


@functools.cache
def _variables():
  """The variables of an agent, with random parameters."""
  variables = jax.jit(_make().init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  params = _draw_params(variables, rng, 0.5)
  return variables._replace(params=params)


def _sample():
  """Sequences with reset steps at every position, with and without an end."""
  rng = np.random.default_rng(1)
  shape = (_T + 1, _B)
  is_first = np.zeros(shape, bool)
  discount = np.ones(shape, np.float32)
  for row in range(1, _B):
    is_first[row, row] = True  # The reset step leads to step `row`.
    discount[row - 1, row] = row % 2  # Even rows terminate.
  reward = np.where(is_first, 0.0, rng.normal(size=shape)).astype(np.float32)
  obs = rng.normal(size=(*shape, 3)).astype(np.float32)
  policy = rng.dirichlet(np.ones(_A), size=(_T, _B)).astype(np.float32)
  action = rng.integers(_A, size=(_T, _B)).astype(np.int32)
  trajectory = Trajectory(
    TimeStep(obs, reward, discount, is_first),
    action,
    muzero_search.Extras(policy),
    (),
    (),
    (),
  )
  return Sample(trajectory, np.arange(_B), np.linspace(0.5, 1.0, _B))


def _prepare(agent, sample, params=None, statistics=()):
  variables = _variables()._replace(statistics=statistics)
  keys = jax.random.split(jax.random.key(3), _B)
  target_params = variables.params if params is None else params
  return jax.jit(
    lambda variables, sample: agent.prepare(
      variables, target_params, sample, keys, lambda x: x
    )
  )(variables, sample)


def _expected_targets(sample, num_unroll_steps=_K, n_steps=_N_STEPS):
  """The targets, step by step, for one row after another."""
  timestep, _, extras, *_ = sample.trajectory
  network, params = _network(), _variables().params
  codec = muzero_search.Codec(jnp.arange(-4.0, 5.0))
  values = [
    codec.decode(network.predict(params, network.represent(params, obs))[1])
    for obs in timestep.obs
  ]
  for b in range(_B):
    resets = [t for t in range(_T) if timestep.is_first[t + 1, b]]
    end = resets[0] if resets else _T + 1  # Last step of the first episode.
    has_terminated = bool(resets) and timestep.discount[end, b] == 0
    for k in range(num_unroll_steps + 1):
      reward, value, policy, weight, policy_weight = 0.0, 0.0, None, 1.0, 0.0
      if k < end or (k == end and not has_terminated):
        policy, policy_weight = extras.policy[k, b], 1.0
        last = min(num_unroll_steps + n_steps, end)
        factor = 1.0
        for t in range(k + 1, last + 1):
          value += factor * timestep.reward[t, b]
          factor *= _GAMMA * timestep.discount[t, b]
        value += factor * values[last][b]
      if k <= end:
        reward = timestep.reward[k, b]
      elif not has_terminated:
        weight = 0.0
      yield b, k, reward, value, policy, weight, policy_weight


def test_targets_are_those_of_a_plain_loop():
  sample = _sample()
  batch = _prepare(_make(), sample)
  targets, num_absorbed = batch.targets, 0
  for b, k, reward, value, policy, weight, policy_weight in _expected_targets(
    sample
  ):
    place = f'row {b}, step {k}'
    assert targets.weight[b, k] == weight, place
    assert targets.policy_weight[b, k] == policy_weight, place
    if weight:
      np.testing.assert_allclose(targets.value[b, k], value, atol=1e-5)
    if weight and k:
      np.testing.assert_allclose(targets.reward[b, k - 1], reward, atol=1e-6)
    if policy is not None:
      np.testing.assert_array_equal(targets.policy[b, k], policy)
    num_absorbed += weight > policy_weight
  assert num_absorbed == 3 + 1  # From the end on: row 2, 1 to 3; row 4, 3.
  np.testing.assert_array_equal(batch.obs, sample.trajectory.timestep.obs[0])
  np.testing.assert_array_equal(batch.action.T, sample.trajectory.action[:_K])
  is_reset_step = sample.trajectory.timestep.is_first[1]
  np.testing.assert_allclose(
    batch.importance, np.where(is_reset_step, 0.0, sample.weight)
  )


def test_the_loss_is_that_of_a_plain_loop():
  agent, variables = _make(), _variables()
  batch = _prepare(agent, _sample())
  loss, output = jax.jit(agent.loss)(variables, (), batch, None)
  network = _network()
  support = np.arange(-4.0, 5.0)

  def log_softmax(x):
    return x - np.log(np.exp(x).sum())

  def code(x):
    h = np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x
    return np.maximum(0.0, 1.0 - abs(h - support))

  total, targets = 0.0, batch.targets
  for b in range(_B):
    hidden = network.represent(variables.params, batch.obs[b : b + 1])
    for k in range(_K + 1):
      scale = batch.importance[b] / (_K if k else 1)
      if k:
        hidden, reward, _ = network.step(
          variables.params, hidden, batch.action[b : b + 1, k - 1]
        )
        each = -code(targets.reward[b, k - 1]) @ log_softmax(reward[0])
        total += scale * targets.weight[b, k] * each
      policy, value = network.predict(variables.params, hidden)
      each = -targets.policy[b, k] @ log_softmax(policy[0])
      total += scale * targets.policy_weight[b, k] * each
      each = -code(targets.value[b, k]) @ log_softmax(value[0])
      total += 0.25 * scale * targets.weight[b, k] * each
  np.testing.assert_allclose(loss, total / _B, rtol=1e-5)
  values = network.predict(
    variables.params, network.represent(variables.params, batch.obs)
  )[1]
  codec = muzero_search.Codec(jnp.arange(-4.0, 5.0))
  errors = abs(codec.decode(values) - targets.value[:, 0])
  # Row 1 begins where its episode ends, so it never gets another value.
  errors = np.where(np.arange(_B) == 1, 0.0, errors)
  np.testing.assert_allclose(output.priority, errors, atol=1e-5)


@pytest.mark.parametrize('step', [0, helpers.slow(1), helpers.slow(2)])
def test_half_of_the_gradient_passes_each_step_of_the_model(step):
  agent, variables, network = _make(), _variables(), _network()
  batch = _prepare(agent, _sample())
  targets = jax.tree.map(jnp.zeros_like, batch.targets)._replace(
    policy=batch.targets.policy,
    policy_weight=jnp.zeros((_B, _K + 1)).at[:, step].set(1.0),
  )

  def loss(params):
    """The agent's loss if only the policy of one step counts."""
    changed = variables._replace(params=params)
    return agent.loss(changed, (), batch._replace(targets=targets), None)[0]

  def whole_loss(params):
    """The same, with the whole gradient."""
    hidden = network.represent(params, batch.obs)
    for k in range(step):
      hidden, *_ = network.step(params, hidden, batch.action[:, k])
    policy = jax.nn.log_softmax(network.predict(params, hidden)[0])
    each = -jnp.sum(batch.targets.policy[:, step] * policy, axis=1)
    return jnp.mean(batch.importance * each) / (_K if step else 1)

  half, whole = (
    jax.jit(jax.grad(f))(variables.params)['params']['encoder']['bias']
    for f in (loss, whole_loss)
  )
  assert abs(whole).max() > 1e-5
  np.testing.assert_allclose(half, whole / 2**step, rtol=1e-3, atol=1e-8)


def test_numbers_survive_their_code():
  codec = muzero_search.Codec(jnp.arange(-20.0, 21.0))
  numbers = np.linspace(-300.0, 300.0, 101).astype(np.float32)
  probabilities = codec.encode(numbers)
  np.testing.assert_allclose(probabilities.sum(-1), 1.0, atol=1e-5)
  assert ((probabilities > 0).sum(-1) <= 2).all()
  decoded = codec.decode(jnp.log(probabilities))
  np.testing.assert_allclose(decoded, numbers, rtol=1e-4, atol=1e-4)
  # Schrittwieser et al., appendix F: sign(x) (sqrt(|x| + 1) - 1) + 0.001 x.
  assert returns.rescale(jnp.float32(3.0)) == pytest.approx(1.003)


_CODEC = muzero_search.Codec(jnp.arange(-20.0, 21.0))


def _model(transitions, rewards, value, prior, signs=None):
  """A perfect model of a deterministic MDP, or of a game for two.

  transitions, rewards: `[S, A]`; value: `[S]` and prior: `[S, A]`, logits, are
  what the model predicts. In a game, signs `[S, A]` is -1 if the turn passes,
  else 1.
  """
  transitions, rewards, value, prior = map(
    jnp.asarray, (transitions, rewards, value, prior)
  )

  def logits(x):
    return jnp.log(_CODEC.encode(x) + 1e-30)

  def step(params, hidden, action):
    del params
    state = hidden[:, 0].astype(int)
    following = transitions[state, action].astype(jnp.float32)
    turn = () if signs is None else 20.0 * jnp.asarray(signs)[state, action]
    return following[:, None], logits(rewards[state, action]), turn

  def predict(params, hidden):
    del params
    state = hidden[:, 0].astype(int)
    return prior[state], logits(value[state])

  return MuZeroNetwork(
    lambda rng_key: (), lambda params, obs: obs, step, predict
  )


def _search(
  model,
  states,
  gamma,
  num_simulations,
  *,
  kind='gumbel',
  greedy,
  has_turns=False,
):
  """Searches from each of the states of a model."""
  search = muzero_search.make_search(model, _CODEC, kind, has_turns=has_turns)
  search = jax.jit(search, static_argnums=(4, 5))
  obs = np.asarray(states, np.float32)[:, None]
  keys = jax.random.split(jax.random.key(0), len(obs))
  return search((), keys, obs, gamma, num_simulations, greedy)


@pytest.mark.parametrize('has_turns', [False, True])
@pytest.mark.parametrize('kind', ['gumbel', 'muzero'])
def test_a_search_in_a_perfect_model_finds_what_dynamic_programming_finds(
  kind, has_turns
):
  rng = np.random.default_rng(0)
  num_states = 6
  transitions = rng.integers(num_states, size=(num_states, 2))
  rewards = rng.normal(size=(num_states, 2)).astype(np.float32)
  signs = np.ones((num_states, 2), np.float32)
  if has_turns:
    signs[rng.random(signs.shape) < 0.7] = -1.0
  values = np.zeros(num_states, np.float32)
  for _ in range(200):
    values = np.max(rewards + 0.7 * signs * values[transitions], axis=1)
  q = (rewards + 0.7 * signs * values[transitions]).astype(np.float32)
  is_clear = abs(q[:, 0] - q[:, 1]) > 0.1
  assert is_clear.sum() >= 4

  def run(predicted_value, prior, num_simulations):
    model = _model(
      transitions,
      rewards,
      predicted_value,
      prior,
      signs if has_turns else None,
    )
    return _search(
      model,
      np.arange(num_states),
      0.7,
      num_simulations,
      kind=kind,
      greedy=True,
      has_turns=has_turns,
    )

  # The model predicts nothing, so only the search can see rewards ahead.
  action, extras = run(0.0 * values, 0.0 * q, 400)
  np.testing.assert_array_equal(action[is_clear], q.argmax(1)[is_clear])
  np.testing.assert_array_equal(
    extras.policy.argmax(1)[is_clear], q.argmax(1)[is_clear]
  )


def test_a_search_in_the_environment_finds_what_dynamic_programming_finds():
  """The game of `test_games`, whose moves may keep the turn."""
  # Value of n stones for the player who moves, and the best moves.
  value, best = {0: 0.0}, {}
  for n in range(1, 8):
    q = []
    for action in range(min(3, n)):
      left = n - action - 1
      sign = 1.0 if action == 1 else -1.0
      q.append(1.0 if left == 0 else sign * value[left])
    value[n] = max(q)
    best[n] = {a for a, x in enumerate(q) if x == value[n]}
  assert {len(x) for x in best.values()} > {1}
  env = games.make_device_env(test_games.GAME, 'self')
  agent = helpers.make_agent(
    'muzero', env.spec, model='env', num_simulations=200, gamma=1.0
  )
  variables = agent.init(jax.random.key(0))
  stones = np.arange(1, 8)
  size = len(stones)
  state, timestep = env.reset(jax.random.split(jax.random.key(1), size))
  match = state.env_state
  game = match.state._replace(stones=jnp.asarray(stones))
  state = state._replace(env_state=match._replace(state=game))
  obs = jax.vmap(test_games.GAME.observe)(game, game.current_player)
  timestep = timestep._replace(obs=obs, info=())
  keys = jax.random.split(jax.random.key(2), size)
  act = jax.jit(functools.partial(agent.act, greedy=False))
  _, extras, _ = act(variables, keys, timestep, (), env_state=state)
  # The untrained network knows nothing: its values and logits are 0.
  found = np.argmax(extras.policy, axis=1)
  for n, action in zip(stones.tolist(), found.tolist()):
    assert action in best[n], n
  # Without the states, the agent cannot search.
  action, extras, _ = act(variables, keys, timestep, ())
  assert extras == () and np.all(obs.action_mask[np.arange(size), action])


def test_the_model_learns_whose_turn_it_is():
  """The loss of the turn, and no turn after the end of a game."""
  spec = EnvSpec(_OBS, False, Discrete(_A), 1, 0, has_turns=True)
  fields = {'num_unroll_steps': _K, 'n_steps': _N_STEPS, 'support': 4}
  agent = helpers.make_agent('muzero', spec, _NETWORK, **fields)
  variables = jax.jit(agent.init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  params = _draw_params(variables, rng, 0.5)
  variables = variables._replace(params=params)
  sample = _sample()
  timestep = sample.trajectory.timestep
  sign = np.where(rng.random(timestep.discount.shape) < 0.5, -1, 1)
  sign = np.where(timestep.is_first, 1, sign).astype(np.float32)
  timestep = timestep._replace(discount=timestep.discount * sign)
  sample = sample._replace(
    trajectory=sample.trajectory._replace(timestep=timestep)
  )
  keys = jax.random.split(jax.random.key(3), _B)
  prepare = jax.jit(
    lambda variables, sample: agent.prepare(
      variables, (), sample, keys, lambda x: x
    )
  )
  batch = prepare(variables, sample)
  _, output = jax.jit(agent.loss)(variables, (), batch, None)
  network = muzero.build_network(
    spec, helpers.network_fields('muzero', **_NETWORK), num_bins=9
  )
  total = 0.0
  for b in range(_B):
    hidden = network.represent(params, batch.obs[b : b + 1])
    for k in range(1, _K + 1):
      action = batch.action[b : b + 1, k - 1]
      hidden, _, turn = network.step(params, hidden, action)
      firsts = timestep.is_first[1 : k + 1, b]
      is_over = firsts.any() or timestep.discount[k, b] == 0
      again = 1 / (1 + np.exp(-float(turn[0])))
      likelihood = again if timestep.discount[k, b] > 0 else 1 - again
      if not is_over:
        total -= batch.importance[b] * np.log(likelihood) / _K
  np.testing.assert_allclose(output.metrics['turn_loss'], total / _B, rtol=1e-4)


def test_the_policy_of_a_gumbel_search_is_better_than_the_prior_on_bandits():
  rng = np.random.default_rng(0)
  rewards = rng.normal(size=(50, 4)).astype(np.float32)
  transitions = np.arange(50)[:, None] + np.zeros(4, int)
  model = _model(transitions, rewards, rewards.mean(1), 0.0 * rewards)
  action, extras = _search(model, np.arange(50), 0.0, 8, greedy=False)
  np.testing.assert_allclose(extras.policy.sum(1), 1.0, atol=1e-5)
  improved = (extras.policy * rewards).sum(1)
  assert (improved > rewards.mean(1)).all()
  chosen = rewards[np.arange(50), action]
  assert chosen.mean() > rewards.mean() + 0.5


def test_greedy_actions_have_their_own_number_of_simulations(monkeypatch):
  seen = []

  def make_search(*arguments):
    search = muzero_make_search(*arguments)

    def counted(params, rng_key, obs, gamma, num_simulations, greedy, *others):
      seen.append((num_simulations, greedy))
      return search(
        params, rng_key, obs, gamma, num_simulations, greedy, *others
      )

    return counted

  muzero_make_search = muzero_search.make_search
  monkeypatch.setattr(muzero, 'make_search', make_search)
  agent = _make(num_simulations=3, eval_num_simulations=5)
  steps = jax.tree.map(lambda x: x[0], _sample().trajectory.timestep)
  keys = jax.random.split(jax.random.key(1), _B)
  for greedy in (False, True):
    act = functools.partial(agent.act, greedy=greedy)
    jax.eval_shape(act, _variables(), keys, steps, ())
  assert seen == [(3, False), (5, True)]


def test_rewards_are_clipped():
  sample = _sample()
  whole = _prepare(_make(), sample).targets.reward
  clipped = _prepare(_make(reward_clip=0.1), sample).targets.reward
  assert abs(whole).max() > 0.5
  np.testing.assert_allclose(clipped, np.clip(whole, -0.1, 0.1))


def test_targets_have_the_unit_of_normalised_rewards():
  agent, sample = _make(normalize_reward=True), _sample()
  statistics = agent.init(jax.random.key(0)).statistics
  moments = statistics.discounted_return._replace(variance=jnp.asarray(25.0))
  statistics = statistics._replace(discounted_return=moments)
  batch = _prepare(agent, sample, statistics=statistics)
  trajectory = sample.trajectory
  timestep = trajectory.timestep
  by_hand = timestep._replace(reward=timestep.reward / np.float32(5.0))
  trajectory = trajectory._replace(timestep=by_hand)
  expected = _prepare(_make(), sample._replace(trajectory=trajectory))
  assert np.abs(expected.targets.reward).max() > 0.1
  chex.assert_trees_all_close(batch.targets, expected.targets, rtol=1e-5)


def test_the_actions_of_an_environment_depend_on_its_key_alone():
  agent, variables = _make(), _variables()
  steps = jax.tree.map(lambda x: x[0], _sample().trajectory.timestep)
  keys = jax.random.split(jax.random.key(1), _B)
  act = jax.jit(agent.act)
  action, extras, _ = act(variables, keys, steps, ())
  some = jax.tree.map(lambda x: x[2:4], steps)
  fewer_action, fewer, _ = act(variables, keys[2:4], some, ())
  np.testing.assert_array_equal(action[2:4], fewer_action)
  np.testing.assert_allclose(extras.policy[2:4], fewer.policy, atol=1e-5)


def test_reanalyse_changes_only_the_targets_of_a_part_of_the_rows():
  sample = _sample()
  whole = _prepare(_make(), sample)
  batch = _prepare(_make(reanalyse_fraction=0.5), sample)
  changed = batch._replace(targets=whole.targets)
  jax.tree.map(np.testing.assert_array_equal, changed, whole)
  targets, old = batch.targets, whole.targets
  for name in ('reward', 'weight', 'policy_weight'):
    np.testing.assert_array_equal(getattr(targets, name), getattr(old, name))
  np.testing.assert_allclose(targets.value, old.value, 1e-5, 1e-6)
  is_new = np.array(
    [(targets.policy[b] != old.policy[b]).any() for b in range(_B)]
  )
  np.testing.assert_array_equal(is_new, [True, False] * 3)
  # The new searches use the target parameters.
  zeros = jax.tree.map(np.zeros_like, _variables().params)
  other = _prepare(_make(reanalyse_fraction=0.5), sample, zeros).targets
  assert (other.policy[::2] != targets.policy[::2]).any()
  np.testing.assert_array_equal(other.policy[1::2], targets.policy[1::2])
  # The newest parameters predict the values.
  np.testing.assert_allclose(other.value, targets.value, 1e-5, 1e-6)


def test_targets_of_new_searches_are_those_of_a_plain_loop(monkeypatch):
  """Every step whose policy is a target has been searched again."""

  def search(params, rng_key, obs, gamma, num_simulations, greedy):
    return None, muzero_search.Extras(jax.nn.softmax(obs))

  sample = _sample()
  timestep = sample.trajectory.timestep
  # Without numbers below 0, no target is a small difference of large numbers.
  timestep = timestep._replace(reward=abs(timestep.reward))
  plain = _network()

  def predict(params, hidden):
    policy, value = plain.predict(params, hidden)
    return policy, value + 4.0 * jnp.arange(9)[None]

  network = plain._replace(predict=predict)
  monkeypatch.setattr(muzero, 'build_network', lambda *_, **__: network)
  _, fresh = search(None, None, timestep.obs[:-1], None, None, None)
  trajectory = sample.trajectory._replace(timestep=timestep)
  sample = sample._replace(trajectory=trajectory)
  searched = sample._replace(trajectory=trajectory._replace(extras=fresh))
  monkeypatch.setattr(muzero, 'make_search', lambda *arguments: search)
  sizes = {'num_unroll_steps': 1, 'n_steps': 4}  # Not every step is used.
  agent = _make(reanalyse_fraction=1.0, **sizes)
  targets = _prepare(agent, sample).targets
  for b, k, _, value, policy, weight, _ in _expected_targets(searched, **sizes):
    if weight:
      np.testing.assert_allclose(targets.value[b, k], value, rtol=1e-5)
    if policy is not None:
      np.testing.assert_allclose(targets.policy[b, k], policy, rtol=1e-6)


def test_one_simulation_takes_the_most_probable_action():
  """Before any simulation, all values of the tree are equal."""
  zeros = np.zeros((1, 3), np.float32)
  value, prior = np.float32([7.0]), np.float32([[0.0, 0.1, 0.2]])
  model = _model(zeros.astype(int), zeros, value, prior)
  action, _ = _search(model, [0], 1.0, 1, greedy=True)
  assert action[0] == 2


def test_values_are_compared_on_the_scale_of_the_whole_tree():
  """A small difference at the root does not overrule the prior.

  State 0 leads to 1 or 2, and these to 3 with the rewards 0.1 and 0. From 3
  on, each action leads to 3. Action 0 of state 3 has the reward -100.
  """
  transitions = np.array([[1, 2], [3, 3], [3, 3], [3, 3]])
  rewards = np.float32([[0, 0], [0.1, 0.1], [0, 0], [-100, 0]])
  priors = np.float32([[0, 1], [0, 0], [0, 0], [0, 0]])
  model = _model(transitions, rewards, np.zeros(4, np.float32), priors)
  action, _ = _search(model, [0], 1.0, 16, greedy=True)
  assert action[0] == 1


def test_a_part_of_the_prior_is_uniform_unless_actions_are_greedy():
  """All values are equal, so the improved policy is the prior."""
  zeros, prior = np.zeros((1, 4), np.float32), np.float32([[30, 0, 0, 0]])
  model = _model(zeros.astype(int), zeros, zeros[:, 0], prior)
  search = muzero_search.make_search(
    model, _CODEC, 'gumbel', uniform_fraction=0.4
  )
  search = jax.jit(search, static_argnums=(4, 5))
  keys, obs = jax.random.split(jax.random.key(0), 1), zeros[:, :1]
  _, extras = search((), keys, obs, 1.0, 100, True)
  np.testing.assert_allclose(extras.policy, [[1, 0, 0, 0]], atol=1e-5)
  _, extras = search((), keys, obs, 1.0, 100, False)
  # 0.6 + 0.4 / 4, and 0.4 / 4.
  np.testing.assert_allclose(extras.policy, [[0.7, 0.1, 0.1, 0.1]], atol=1e-5)


def test_a_part_of_the_actions_is_random_unless_they_are_greedy(monkeypatch):
  number, fraction = 2_000, 0.3
  steps = jax.tree.map(lambda x: x[0, :1], _sample().trajectory.timestep)
  steps = jax.tree.map(lambda x: np.repeat(x, number, 0), steps)
  keys = jax.random.split(jax.random.key(1), number)

  def search(params, rng_key, obs, gamma, num_simulations, greedy, env_state):
    """Chooses action 1."""
    action = jnp.ones(number, jnp.int32)
    return action, muzero_search.Extras(jax.nn.one_hot(action, _A))

  monkeypatch.setattr(muzero, 'make_search', lambda *_: search)
  agent = _make(random_fraction=fraction)
  action, extras, _ = agent.act(_variables(), keys, steps, ())
  expected = np.full(_A, fraction / _A) + np.eye(_A)[1] * (1 - fraction)
  # The frequencies have a standard error of at most 0.01.
  found = np.bincount(action, minlength=_A) / number
  np.testing.assert_allclose(found, expected, atol=0.03)
  # The target of the policy does not change.
  np.testing.assert_array_equal(extras.policy, np.eye(_A)[[1] * number])
  assert (agent.act(_variables(), keys, steps, (), greedy=True)[0] == 1).all()
  box = Box((2,), -np.ones(2, np.float32), np.ones(2, np.float32))
  with pytest.raises(ValueError, match='0.3 needs discrete actions'):
    _make(box, random_fraction=fraction)


def test_only_reanalyse_needs_target_parameters():
  entry = AGENTS['muzero']
  fields = defaults(entry.fields)
  assert entry.target_update(fields) is None
  fields['search.reanalyse_fraction'] = 0.1
  assert entry.target_update(fields) is not None


_BOX = Box((2,), np.float32([-1, 0]), np.float32([1, 10]))


@pytest.mark.slow
def test_a_search_prefers_the_best_samples_of_a_continuous_action():
  """One step of reward -|a - (0.5, 8)|, on the scale of the box."""
  distribution = acting.bounded_distribution(_BOX)

  def step(params, hidden, action):
    del params
    error = abs(action - jnp.array([[0.5, 8.0]])) / jnp.array([[1.0, 5.0]])
    return hidden, jnp.log(_CODEC.encode(-error.sum(-1)) + 1e-30)

  def predict(params, hidden):
    del params
    value = _CODEC.encode(jnp.zeros(len(hidden)))
    return jnp.zeros((len(hidden), 4)), jnp.log(value + 1e-30)

  model = MuZeroNetwork(
    lambda rng_key: (), lambda params, obs: obs, step, predict
  )
  for kind, num_simulations in (('gumbel', 60), ('muzero', 400)):
    search = muzero_search.make_search(model, _CODEC, kind, distribution, 12)
    search = jax.jit(search, static_argnums=(4, 5))
    keys = jax.random.split(jax.random.key(0), 40)
    obs = np.zeros((40, 1), np.float32)
    action, extras = search((), keys, obs, 0.0, num_simulations, True)
    assert extras.samples.shape == (40, 12, 2)
    candidates = np.asarray(distribution.to_action(extras.samples))
    errors = abs(candidates - [0.5, 8.0]) / [1.0, 5.0]
    best = errors.sum(-1).argmin(1)
    np.testing.assert_allclose(action, candidates[np.arange(40), best], 1e-5)
    np.testing.assert_array_equal(extras.policy.argmax(1), best)
    # Rows with other keys have other samples. The first is the mode, because
    # the actions are greedy.
    np.testing.assert_allclose(candidates[:, 0], [[0.0, 5.0]] * 40, atol=1e-6)
    assert len(np.unique(candidates[:, 1:, 0])) == 40 * 11


def test_the_loss_of_samples_is_that_of_a_plain_loop():
  agent = _make(_BOX, num_samples=5)
  variables = jax.jit(agent.init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  params = _draw_params(variables, rng, 0.3)
  variables = variables._replace(params=params)
  sample = _sample()
  samples = rng.normal(size=(_T, _B, 5, 2)).astype(np.float32)
  policy = rng.dirichlet(np.ones(5), size=(_T, _B)).astype(np.float32)
  extras = muzero_search.Extras(policy, samples)
  action = rng.uniform([-1, 0], [1, 10], (_T, _B, 2)).astype(np.float32)
  trajectory = sample.trajectory._replace(action=action, extras=extras)
  sample = sample._replace(trajectory=trajectory)
  keys = jax.random.split(jax.random.key(3), _B)
  batch = agent.prepare(variables, (), sample, keys, lambda x: x)
  _, output = jax.jit(agent.loss)(variables, (), batch, None)

  spec = EnvSpec(_OBS, False, _BOX, 1, 0)
  network = muzero.build_network(spec, _FIELDS, num_bins=9)
  total = 0.0
  for b in range(_B):
    hidden = network.represent(params, batch.obs[b : b + 1])
    for k in range(_K + 1):
      if k:
        hidden, *_ = network.step(params, hidden, action[k - 1, b][None])
      head = np.asarray(network.predict(params, hidden)[0][0], np.float64)
      # The scale is 1 where the head is 0; see `distributions.gaussian`.
      scale = np.log1p(np.exp(head[2:] + np.log(np.expm1(0.999)))) + 0.001
      for x, weight in zip(samples[k, b], policy[k, b]):
        log_prob = scipy.stats.norm.logpdf(x, head[:2], scale)
        # The action is tanh(x), stretched to widths of 2 and 10.
        log_prob -= np.log(1 - np.tanh(x) ** 2) + np.log([1, 5])
        share = batch.importance[b] / (_K if k else 1)
        share *= batch.targets.policy_weight[b, k]
        total -= share * weight * log_prob.sum()
  np.testing.assert_allclose(
    output.metrics['policy_loss'], total / _B, rtol=1e-4
  )


def test_an_action_space_that_does_not_fit_is_refused():
  with pytest.raises(ValueError, match='one discrete action'):
    _make(MultiDiscrete((2, 2)))
  unbounded = Box((1,), np.float32([-np.inf]), np.float32([np.inf]))
  with pytest.raises(ValueError, match='actions with bounds'):
    _make(unbounded)


def test_targets_do_not_depend_on_how_rows_are_spread_over_devices():
  agent, variables, sample = (
    _make(reanalyse_fraction=0.5),
    _variables(),
    _sample(),
  )
  keys = jax.random.split(jax.random.key(3), _B)

  @jax.jit
  def prepare(sample, keys):
    params = variables.params
    return agent.prepare(variables, params, sample, keys, lambda x: x)

  def rows(begin):
    trajectory = jax.tree.map(
      lambda x: x[:, begin : begin + 2], sample.trajectory
    )
    index, weight = sample.index[begin : begin + 2], sample.weight
    return Sample(trajectory, index, weight[begin : begin + 2])

  whole = prepare(sample, keys)
  parts = [prepare(rows(i), keys[i : i + 2]) for i in range(0, _B, 2)]
  joined = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), joined, whole
  )
