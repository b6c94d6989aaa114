"""Tests agents: acting, learning, reset steps, and the table of agents."""

import contextlib

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from podrl import fields
from podrl.agents import AGENTS, a2c, impala, ppo
from podrl.core import distributions, losses
from podrl.networks import actor_critic as networks
from podrl.networks import torsos
from podrl.run.config import default_fields
from podrl.types import (
  Box,
  Discrete,
  EnvSpec,
  MultiDiscrete,
  TimeStep,
  Trajectory,
)

_OBS = jax.ShapeDtypeStruct((5,), jnp.float32)
_SPACES = {
  'discrete': Discrete(3),
  'multi': MultiDiscrete((3, 2)),
  'box': Box((2,), np.float32([-1, 0]), np.float32([1, 3])),
}
_T, _B, _RESET_STEP = 14, 4, 6  # In environment 0, step 6 is a reset step.


def _agent(name, core='gru', space='discrete', dist_name='auto', **kwargs):
  dist = distributions.for_action_space(_SPACES[space], dist_name)
  network = networks.make_network(
    lambda: torsos.MLP((16,)),
    _OBS,
    dist.num_params,
    shared_torso=False,
    num_constant_params=dist.num_constant_params,
    core=core,
    core_size=8,
    # Shorter than an episode, for the core that needs a window.
    memory_steps=4 if core == 'gtrxl' else 0,
  )
  if name == 'ppo':
    return network, dist, ppo.make_agent(network, dist, **kwargs)
  return (
    network,
    dist,
    {'impala': impala, 'a2c': a2c}[name].make_agent(network, dist, **kwargs),
  )


def _steps(seed=0):
  rng = np.random.default_rng(seed)
  is_first = rng.random((_T + 1, _B)) < 0.15
  is_first[:, 0] = np.arange(_T + 1) == _RESET_STEP
  # Half of the episodes terminate, the others are truncated.
  is_terminal = np.roll(is_first, -1, 0) & (np.arange(_B) % 2 == 0)
  return TimeStep(
    rng.normal(size=(_T + 1, _B, 5)).astype(np.float32),
    np.where(is_first, 0, rng.normal(size=is_first.shape)).astype(np.float32),
    1 - is_terminal.astype(np.float32),
    is_first,
  )


def _scaled(factor, variables):
  """Multiplies all parameters by a factor."""
  params = jax.tree.map(lambda x: factor * np.asarray(x), variables.params)
  return variables._replace(params=params)


def _prepare(agent):
  """Compiles the agent's `prepare` for one device."""
  return jax.jit(
    lambda variables, trajectory: helpers.prepare(agent, variables, trajectory)
  )


def _act_through(agent, variables, steps):
  """Acts one step at a time, from a carry that is not zero."""
  first = carry = jax.tree.map(
    lambda x: x + 0.5, agent.initial_carry(np.arange(_B))
  )
  rows, act = [], jax.jit(agent.act)
  for t in range(_T):
    action, extras, carry = act(
      variables,
      jax.random.split(jax.random.key(t), _B),
      jax.tree.map(lambda x: x[t], steps),
      carry,
    )
    rows.append((action, extras))
  actions, extras = jax.tree.map(lambda *x: np.stack(x), *rows)
  first = jax.tree.map(lambda x: x[None], first)
  counters = helpers.counters(_B)
  return Trajectory(steps, actions, extras, first, *counters), carry


@pytest.mark.parametrize(
  'name,core,space',
  [
    ('ppo', 'none', 'multi'),
    ('ppo', 'lstm', 'box'),
    ('impala', 'gru', 'multi'),
    helpers.slow('ppo', 'gru', 'discrete'),
    helpers.slow('impala', 'gtrxl', 'discrete'),
    helpers.slow('impala', 'lstm', 'discrete'),
  ],
)
def test_steps_act_as_the_unrolled_network_does(name, core, space):
  network, dist, agent = _agent(name, core, space)
  variables = jax.jit(agent.init)(jax.random.key(0))
  # Larger parameters make the policy far from uniform.
  variables = _scaled(3.0, variables)
  params = variables.params
  steps = _steps()
  trajectory, carry = _act_through(agent, variables, steps)
  unroll = jax.jit(network.unroll)
  head, values, _ = unroll(
    params,
    steps.obs,
    steps.is_first,
    jax.tree.map(lambda x: x[0], trajectory.carry),
  )
  log_prob = jax.jit(dist.log_prob)(head[:-1], trajectory.extras.sample)
  np.testing.assert_allclose(log_prob, trajectory.extras.log_prob, atol=1e-5)
  if name != 'ppo':
    return
  np.testing.assert_allclose(values[:-1], trajectory.extras.value, atol=1e-5)
  # The last step has no action; its value is the bootstrap.
  _, last, _ = unroll(
    params, *jax.tree.map(lambda x: x[-1:], (steps.obs, steps.is_first)), carry
  )
  batch = _prepare(agent)(variables, trajectory)
  shape = (_B, _T) if core != 'none' else (_B * _T, 1)
  assert batch.log_prob.shape == batch.advantage.shape == shape
  bare = ppo.make_agent(network, dist, normalize_advantage=False)
  targets = np.asarray(_prepare(bare)(variables, trajectory).target)
  final = (
    targets.reshape(_B, _T)[:, -1]
    if core != 'none'
    else (targets.reshape(_T, _B)[-1])
  )
  expected = np.where(
    steps.is_first[-1],
    values[-2],
    steps.reward[-1] + 0.99 * steps.discount[-1] * last[0],
  )
  np.testing.assert_allclose(final, expected, atol=1e-5)


def test_greedy_acting_takes_the_mode():
  network, dist, agent = _agent('ppo', 'lstm', 'box')
  variables = jax.jit(agent.init)(jax.random.key(0))
  steps = _steps()
  first = jax.tree.map(lambda x: x[0], steps)
  keys = jax.random.split(jax.random.key(0), _B)
  carry = agent.initial_carry(np.arange(_B))
  act = jax.jit(agent.act, static_argnames='greedy')
  action, extras, _ = act(variables, keys, first, carry, greedy=True)
  head, _, _ = jax.jit(network.unroll)(
    variables.params, first.obs[None], first.is_first[None], carry
  )
  mode = np.asarray(head)[0, :, :2]
  np.testing.assert_allclose(extras.sample, mode, atol=1e-6)
  np.testing.assert_allclose(action, dist.to_action(mode), atol=1e-6)


@pytest.mark.parametrize(
  'name,dist_name', [('ppo', 'gaussian'), ('impala', 'tanh_gaussian')]
)
def test_actions_stay_inside_their_bounds(name, dist_name):
  _, _, agent = _agent(name, 'gru', 'box', dist_name)
  variables = _scaled(20.0, jax.jit(agent.init)(jax.random.key(0)))
  trajectory, _ = _act_through(agent, variables, _steps())
  box = _SPACES['box']
  action = np.asarray(trajectory.action)
  assert np.all(action >= box.low) and np.all(action <= box.high)
  assert len(np.unique(action)) > 10


def _mixed(before, after):
  """Joins two trajectories at the reset step; the carry is from the first."""

  # The ignored action, which precedes the reset step, is from the first
  # trajectory.
  def join(a, b):
    return np.concatenate([a[:_RESET_STEP], b[_RESET_STEP:]])

  parts = before._replace(carry=()), after._replace(carry=())
  return jax.tree.map(join, *parts)._replace(carry=before.carry)


@pytest.mark.parametrize(
  'name,core,space',
  [
    ('ppo', 'gru', 'box'),
    ('impala', 'lstm', 'box'),
    ('ppo', 'mingru', 'discrete'),
    helpers.slow('ppo', 'lstm', 'discrete'),
    helpers.slow('a2c', 'gru', 'discrete'),
    helpers.slow('a2c', 'gtrxl', 'discrete'),
    helpers.slow('ppo', 'gtrxl', 'box'),
  ],
)
def test_a_reset_step_separates_the_gradients_of_two_episodes(
  name, core, space
):
  kwargs = {'normalize_advantage': False} if name == 'ppo' else {}
  _, _, agent = _agent(name, core, space, **kwargs)
  variables = _scaled(3.0, jax.jit(agent.init)(jax.random.key(0)))
  acting = _scaled(0.9, variables)
  runs = []
  for seed in (0, 1):
    trajectory, _ = _act_through(agent, acting, _steps(seed))
    one = jax.tree.map(lambda x: x[:, :1], trajectory)  # Keep one environment.
    runs.append(one._replace(carry=jax.tree.map(lambda x: x + seed, one.carry)))

  @jax.jit
  def gradient(trajectory):
    batch = helpers.prepare(agent, variables, trajectory)

    def loss(params):
      changed = variables._replace(params=params)
      return agent.loss(changed, (), batch, jax.random.key(0))[0]

    return jax.grad(loss)(variables.params)

  (a, b) = runs
  aa, ab, ba, bb = map(gradient, (a, _mixed(a, b), _mixed(b, a), b))
  # A reset step separates what is before it from what is after it. So the
  # gradients of (a, a) and (b, b) have the same sum as those of (a, b) and (b,
  # a).
  sizes = []
  for w, x, y, z in zip(*map(jax.tree.leaves, (aa, ab, ba, bb))):
    np.testing.assert_allclose(w + z, x + y, atol=1e-5)
    sizes.append(float(np.abs(w - x).max()))
  assert max(sizes) > 1e-3


@pytest.mark.parametrize(
  'name,core,space',
  [
    ('ppo', 'gru', 'box'),
    ('impala', 'none', 'multi'),
    ('a2c', 'none', 'discrete'),
    helpers.slow('ppo', 'none', 'discrete'),
    helpers.slow('impala', 'lstm', 'box'),
  ],
)
def test_targets_depend_on_gamma_but_not_on_parameters(
  name, core, space, monkeypatch
):
  _, _, agent = _agent(name, core, space)
  variables = _scaled(3.0, jax.jit(agent.init)(jax.random.key(0)))
  trajectory, _ = _act_through(agent, _scaled(0.9, variables), _steps())

  def gradient():
    def loss(variables):
      batch = helpers.prepare(agent, variables, trajectory)
      return agent.loss(variables, (), batch, jax.random.key(0))[0]

    return jax.jit(jax.grad(loss))(variables)

  flowing = gradient()
  for function in (losses.policy_gradient, losses.ppo_clip, losses.value):

    def stopped(x, target, weight, function=function, **kwargs):
      return function(x, jax.lax.stop_gradient(target), weight, **kwargs)

    monkeypatch.setattr(losses, function.__name__, stopped)
  expected = gradient()
  chex.assert_trees_all_close(flowing.params, expected.params, atol=1e-6)
  assert abs(flowing.hyperparams['gamma']) > 1e-3
  assert expected.hyperparams['gamma'] == 0.0


@pytest.mark.parametrize('name', ['ppo', 'impala', 'a2c'])
@pytest.mark.parametrize('reward_clip', [0.0, 0.4])
def test_the_loss_is_that_of_rlax(name, reward_clip):
  costs = {'entropy_cost': 0.3, 'value_cost': 0.7}
  kwargs = {'reward_clip': reward_clip, 'lambda_': 0.9, **costs}
  if name == 'ppo':
    kwargs['normalize_advantage'] = False
  network, dist, agent = _agent(name, **kwargs)
  variables = jax.jit(agent.init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  variables = variables._replace(
    params=jax.tree.map(
      lambda x: 0.5 * rng.normal(size=x.shape).astype(np.float32),
      variables.params,
    )
  )
  # The policy that acted has other parameters than the one that learns.
  old = _scaled(0.5, variables)
  steps = _steps()
  trajectory, _ = _act_through(agent, old, steps)
  batch = _prepare(agent)(old, trajectory)
  loss, _ = jax.jit(agent.loss)(variables, (), batch, jax.random.key(0))

  carry = jax.tree.map(lambda x: x[0], trajectory.carry)
  inputs = steps.obs, steps.is_first, carry
  unroll = jax.jit(network.unroll)
  head, values, _ = unroll(variables.params, *inputs)
  log_prob = dist.log_prob(head[:-1], trajectory.extras.sample)
  ratio = np.exp(log_prob - trajectory.extras.log_prob)
  assert np.abs(ratio - 1.0).max() > 0.3  # So that clipping matters.
  weight = 1.0 - steps.is_first[1:]
  reward = steps.reward[1:]
  if reward_clip:
    reward = np.clip(reward, -reward_clip, reward_clip)
  # PPO's targets come from the policy that acted.
  baseline = unroll(old.params, *inputs)[1] if name == 'ppo' else values
  found = jax.vmap(
    lambda *x: rlax.vtrace_td_error_and_advantage(*x, lambda_=0.9), 1, 1
  )(
    baseline[:-1],
    baseline[1:],
    reward,
    0.99 * steps.discount[1:],
    weight * (ratio if name == 'impala' else 1.0),
  )
  if name == 'ppo':
    clipped = np.clip(ratio, 0.8, 1.2)
    gain = np.minimum(ratio * found.errors, clipped * found.errors)
  else:
    gain = log_prob * found.pg_advantage
  target = baseline[:-1] + found.errors
  error = 0.5 * np.square(values[:-1] - target)
  entropy = dist.entropy(head[:-1])
  expected = np.mean(weight * (-gain + 0.7 * error - 0.3 * entropy))
  np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_a_ratio_that_overflows_is_bounded():
  _, _, agent = _agent('impala', 'none', 'box')
  variables = jax.jit(agent.init)(jax.random.key(0))
  trajectory, _ = _act_through(agent, variables, _steps())
  trajectory.extras.log_prob[_RESET_STEP - 1, 0] = -500.0
  batch = _prepare(agent)(variables, trajectory)
  loss, _ = jax.jit(agent.loss)(variables, (), batch, jax.random.key(0))
  assert np.isfinite(loss)


def _fields(name, **changes):
  return default_fields(name, 'Sebulba') | changes


def test_every_agent_accepts_its_own_defaults():
  for name, entry in AGENTS.items():
    entry.check(_fields(name))
    fields.check(entry.fields, _fields(name))


@pytest.mark.parametrize(
  'name,field,value',
  [
    ('ppo', 'agent.clip', 0.0),
    ('muzero', 'agent.support', 0),
    ('muzero', 'agent.random_fraction', 1.5),
    ('a2c', 'num_epochs', 2),
    ('a2c', 'num_minibatches', 4),
    ('a2c', 'sebulba.max_lag', 1),
    ('pqn', 'agent.initial_epsilon', 1.5),
    ('dqn', 'agent.final_epsilon', -0.1),
    ('dqn', 'agent.n_steps', 0),
    ('dqn', 'agent.n_steps', 2**24 + 1),
    ('dqn', 'agent.target_period', 0),
    ('dqn', 'agent.target_rate', 0.0),
    ('dqn', 'agent.num_atoms', 0),
    ('dqn', 'agent.min_value', 10.0),
    ('r2d2', 'agent.n_steps', 0),
    ('r2d2', 'agent.epsilon', 1.5),
    ('r2d2', 'agent.epsilon_exponent', -1.0),
    ('r2d2', 'agent.priority_mix', 1.5),
    ('sac', 'agent.target_rate', 2.0),
    ('sac', 'agent.initial_temperature', 0.0),
    ('sac', 'agent.noise_steps', 0),
    ('sac', 'agent.noise_steps', 10**10),
    ('sac', 'agent.random_fraction', -0.1),
    ('sac', 'agent.caution', 1.1),
    ('sac', 'agent.random_fraction', float('nan')),
    ('sac', 'agent.target_entropy', float('inf')),
  ],
)
def test_a_field_that_does_not_fit_the_agent(name, field, value):
  values = _fields(name, **{field: value})
  with pytest.raises(ValueError, match=f'config.{field}={value}'):
    fields.check(AGENTS[name].fields, values)
    AGENTS[name].check(values)


def test_only_networks_without_a_core_divide_steps():
  recurrent = {'network.recurrent': 'gru'}
  for name, entry in AGENTS.items():
    expected = 'steps' if name in ('ppo', 'pqn') else 'environments'
    assert entry.minibatch_unit(_fields(name)) == expected
    unit = entry.minibatch_unit(_fields(name, **recurrent))
    assert unit == 'environments'


# Fields of `make_agent`, and the transitions that a sample then has.
_SHORT = {
  'dqn': ({'n_steps': 1}, 1),
  'rainbow': ({'n_steps': 1}, 1),
  'r2d2': ({'n_steps': 1, 'burn_in': 0}, 2),
  'sac': ({}, 1),
  'muzero': ({'n_steps': 1, 'num_unroll_steps': 1, 'num_simulations': 2}, 2),
}
_IMAGES = {
  'minatar': jax.ShapeDtypeStruct((10, 10, 4), bool),
  'large': jax.ShapeDtypeStruct((64, 64, 3), np.uint8),
}


@pytest.mark.parametrize(
  'name,space,image',
  [
    *((name, 'discrete', 'minatar') for name in AGENTS),
    ('sac', 'box', 'minatar'),
    *(helpers.slow(name, 'discrete', 'large') for name in AGENTS),
    helpers.slow('sac', 'box', 'large'),
  ],
)
def test_an_agent_sees_the_image_of_a_dictionary(name, space, image):
  obs = {'image': _IMAGES[image], 'vector': _OBS}
  spec = EnvSpec(obs, False, _SPACES[space], 1, 0)
  fields, length = _SHORT.get(name, ({}, 2))
  agent = helpers.make_agent(name, spec, {'name': 'auto'}, **fields)
  rng = np.random.default_rng(0)
  variables = jax.jit(agent.init)(jax.random.key(0))
  params = jax.tree.map(  # Some heads are zero at first.
    lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32),
    variables.params,
  )
  variables = variables._replace(params=params)
  shape = length + 1, _B
  pixels = rng.integers(0, 256, (*shape, *obs['image'].shape))
  if image == 'minatar':
    pixels = pixels < 128
  timestep = TimeStep(
    {
      'image': pixels.astype(obs['image'].dtype),
      'vector': rng.normal(size=(*shape, 5)).astype(np.float32),
    },
    *np.ones((2, *shape), np.float32),
    np.zeros(shape, bool),
  )
  timestep = jax.tree.map(jnp.asarray, timestep)
  carry = first = agent.initial_carry(np.arange(_B))
  rows = []
  for t in range(length):
    now, keys = jax.tree.map(lambda x, t=t: x[t], timestep), jax.random.key(t)
    action, extras, carry = jax.jit(agent.act)(
      variables, jax.random.split(keys, _B), now, carry
    )
    rows.append((action, extras))
  action, extras = jax.tree.map(lambda *x: jnp.stack(x), *rows)
  first = jax.tree.map(lambda x: x[None], first)

  @jax.jit
  @jax.value_and_grad
  def loss(params, pixels):
    seen = timestep._replace(obs=timestep.obs | {'image': pixels})
    trajectory = Trajectory(seen, action, extras, first, *helpers.counters(_B))
    own = variables._replace(params=params)
    batch = helpers.prepare(agent, own, trajectory, target_params=params)
    rows = len(jax.tree.leaves(batch)[0])
    keys = jax.random.split(jax.random.key(0), rows)
    return agent.loss(own, params, batch, keys)[0]

  total, grads = loss(params, timestep.obs['image'])
  kernels = [
    x
    for path, x in jax.tree_util.tree_leaves_with_path(grads)
    if 'Conv_0' in jax.tree_util.keystr(path) and x.ndim >= 4
  ]
  assert kernels and all(np.any(x) for x in kernels)
  # With the images of other environments, the loss is another.
  swapped, _ = loss(params, timestep.obs['image'][:, ::-1])
  assert abs(swapped - total) > 1e-5


@pytest.mark.parametrize(
  'obs,changes,message',
  [
    ({'a': _OBS, 'b': _OBS}, {'policy_inputs': 'a,c'}, 'c is unknown.* a, b$'),
    (_OBS, {'policy_inputs': 'a'}, 'a dictionary without a mask'),
    (
      {'a': _OBS, 'b': _OBS},
      {'policy_inputs': 'a', 'shared_torso': True},
      'network.shared_torso=False',
    ),
  ],
)
def test_inputs_of_the_policy_that_do_not_fit(obs, changes, message):
  spec = EnvSpec(obs, False, Discrete(3), 1, 0)
  with pytest.raises(ValueError, match=message):
    helpers.make_agent('ppo', spec, changes)


def test_normalised_observations_are_not_divided_again():
  spec = EnvSpec(_OBS, False, Discrete(3), 1, 0, obs_scale=255.0)
  obs = np.random.default_rng(0).normal(size=(_B, 5)).astype(np.float32)
  ones = np.ones(_B, np.float32)
  timestep = TimeStep(obs, ones, ones, np.zeros(_B, bool))
  for is_normalized in (False, True):
    values = []
    for scale in (255.0, None):
      agent = helpers.make_agent(
        'ppo',
        spec._replace(obs_scale=scale),
        normalize_observation=is_normalized,
      )
      variables = agent.init(jax.random.key(0))
      carry = agent.initial_carry(np.arange(_B))
      keys = jax.random.split(jax.random.key(0), _B)
      values.append(jax.jit(agent.act)(variables, keys, timestep, carry))
    same = all(map(np.array_equal, *map(jax.tree.leaves, values)))
    assert same == is_normalized


@pytest.mark.parametrize(
  'changes,is_refused',
  [
    ({}, True),
    ({'unroll_length': 2}, False),
    ({'env.num_envs': 2}, False),
    ({'agent.normalize_advantage': False}, False),
  ],
)
def test_one_step_has_no_deviation_of_advantages(changes, is_refused):
  values = {'env.num_envs': 1, 'unroll_length': 1, 'agent.clip': 0.2} | {
    'agent.normalize_advantage': True,
    **changes,
  }
  expected = pytest.raises(ValueError, match='unroll_length=1 give one step')
  with expected if is_refused else contextlib.nullcontext():
    ppo.check(values)


@pytest.mark.parametrize('name', AGENTS)
def test_no_two_hyperparameters_have_the_same_name(name):
  """Hyperparameters have the short names of their fields."""
  names = [k for k, x in AGENTS[name].fields.items() if x.changeable]
  assert len({*map(fields.short, names)}) == len(names) > 1
