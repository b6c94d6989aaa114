"""Tests the learner core: device counts, minibatches, collectives."""

import functools
import itertools
import re

import helpers
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podrl.agents import a2c, acting, exploring, impala, muzero_search, ppo
from podrl.core import distributions, normalization, optimizers
from podrl.core import learner as learner_lib
from podrl.core.memory import make_ring
from podrl.drivers import spmd
from podrl.networks import actor_critic as networks
from podrl.networks import torsos
from podrl.types import (
  Agent,
  Box,
  Discrete,
  EnvSpec,
  LossOutput,
  Memory,
  Sample,
  TimeStep,
  Trajectory,
  Variables,
)

_OBS = jax.ShapeDtypeStruct((5,), jnp.float32)
_T, _B = 12, 8


_BOX = Box((2,), np.float32([-1, 0]), np.float32([1, 3]))


def _agent(name, is_full=False, core='gru'):
  """Makes an agent; a full one is recurrent, continuous and normalised."""
  dist = (
    distributions.gaussian(_BOX, squash=True)
    if is_full
    else distributions.categorical(3)
  )
  network = networks.make_network(
    lambda: torsos.MLP((16, 16)),
    _OBS,
    dist.num_params,
    shared_torso=False,
    num_constant_params=dist.num_constant_params,
    core=core if is_full else 'none',
    core_size=8,
    memory_steps=4,
  )
  make_agent = {'ppo': ppo, 'impala': impala, 'a2c': a2c}[name].make_agent
  agent = make_agent(network, dist)
  return normalization.normalize(
    agent, _OBS, observations=is_full, rewards=is_full
  )


def _trajectory(agent, seed=0, length=_T, batch=_B):
  """Makes a random trajectory with terminations, truncations, reset steps."""
  rng = np.random.default_rng(seed)
  is_first = rng.random((length + 1, batch)) < 0.15
  is_first[1, 0] = is_first[-1, 1] = True  # Add a reset step at each end.
  ended = np.roll(is_first, -1, 0)
  discount = np.where(ended & (rng.random(ended.shape) < 0.5), 0.0, 1.0)
  timestep = TimeStep(
    rng.normal(size=(length + 1, batch, 5)).astype(np.float32),
    np.where(is_first, 0.0, rng.normal(size=is_first.shape)).astype(np.float32),
    discount.astype(np.float32),
    is_first,
  )
  carry = jax.tree.map(
    lambda x: rng.normal(size=(1, *x.shape)).astype(np.float32),
    agent.initial_carry(np.arange(batch)),
  )
  action, extras, _ = jax.eval_shape(
    agent.act,
    jax.eval_shape(agent.init, jax.random.key(0)),
    jax.random.split(jax.random.key(0), batch),
    jax.tree.map(lambda x: x[0], timestep),
    agent.initial_carry(np.arange(batch)),
  )
  if action.ndim == 2:
    action = rng.normal(size=(length, *action.shape)).astype(np.float32)
  else:
    action = rng.integers(0, 3, (length, batch)).astype(np.int32)
  # An untrained policy gives actions about this probability or density.
  log_prob = np.log(rng.uniform(0.2, 0.5, (length, batch))).astype(np.float32)
  value = (
    extras.value
    if extras.value == ()
    else rng.normal(size=(length, batch)).astype(np.float32)
  )
  return Trajectory(
    timestep,
    action,
    acting.Extras(action, log_prob, value),
    carry,
    *helpers.counters(batch),
  )


def make_update(agent, optimizer, num_devices, **kwargs):
  """Returns a learner, and its update mapped over `num_devices` devices."""
  learner = learner_lib.make_learner(agent, optimizer, **kwargs)
  mesh = spmd.make_mesh(jax.devices()[:num_devices])
  return learner._replace(init=jax.jit(learner.init)), spmd.device_map(
    learner.update,
    mesh,
    (spmd.REPLICATED, spmd.TRAJECTORY, spmd.REPLICATED),
    spmd.REPLICATED,
  )


def _with_idle_leaf(agent):
  """Adds a parameter that the agent's loss does not use."""

  def unused(function):
    return lambda variables, *args, **kw: function(
      variables._replace(params=variables.params['used']), *args, **kw
    )

  def init(key):
    variables = agent.init(key)
    params = {'used': variables.params, 'idle': jnp.ones(3)}
    return variables._replace(params=params)

  return agent._replace(
    init=init,
    act=unused(agent.act),
    prepare=unused(agent.prepare),
    loss=unused(agent.loss),
  )


@pytest.mark.parametrize(
  'name,core',
  [
    ('impala', 'none'),
    ('ppo', 'gru'),
    helpers.slow('ppo', 'none'),
    helpers.slow('a2c', 'none'),
    helpers.slow('impala', 'gru'),
    helpers.slow('ppo', 'mingru'),
    helpers.slow('a2c', 'lru'),
    helpers.slow('impala', 'gtrxl'),
  ],
)
def test_one_two_and_four_devices_agree(name, core):
  is_full = core != 'none'
  agent = _agent(name, is_full, core)
  agent = agent if is_full else _with_idle_leaf(agent)
  trajectory = _trajectory(agent)
  outcomes = []
  for num_devices in (1, 4) if is_full else (1, 2, 4):
    learner, update = make_update(agent, optax.sgd(1.0), num_devices)
    state = learner.init(jax.random.key(0), trajectory)
    if is_full:  # The first unroll gives no variance.
      _, *moments = state.variables.statistics
      moments = [x._replace(count=jnp.ones(())) for x in moments]
      statistics = normalization.Statistics((), *moments)
      variables = state.variables._replace(statistics=statistics)
      state = state._replace(variables=variables)
    new, metrics = update(state, trajectory, jax.random.key(1))
    before, after = (x.variables._replace(hyperparams={}) for x in (state, new))
    change = jax.tree.map(lambda a, b: a - b, before, after)
    outcomes.append(jax.device_get((change, after, metrics)))
  change = outcomes[0][0]
  if is_full:
    assert all(map(np.any, jax.tree.leaves(change)))  # Statistics change too.
  else:
    assert not np.any(change.params['idle'])
  assert max(np.abs(x).max() for x in jax.tree.leaves(change)) > 0.01
  for other in outcomes[1:]:
    for a, b in zip(jax.tree.leaves(outcomes[0]), jax.tree.leaves(other)):
      np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
  'name,is_full,num_devices,num_epochs',
  [('ppo', True, 2, 2), ('impala', False, 1, 1)]
  + [helpers.slow('ppo', False, 1, 2), helpers.slow('impala', True, 2, 2)],
)
def test_an_update_in_parts_has_the_same_bits(
  name, is_full, num_devices, num_epochs
):
  agent = _agent(name, is_full)
  trajectory = _trajectory(agent)
  learner = learner_lib.make_learner(
    agent, optax.adam(1e-2), num_epochs=num_epochs, num_minibatches=4
  )
  mesh = spmd.make_mesh(jax.devices()[:num_devices])
  state = jax.jit(learner.init)(jax.random.key(0), trajectory)
  state, key = spmd.place((state, jax.random.key(1)), mesh, spmd.REPLICATED)
  trajectories = (spmd.place(trajectory, mesh, spmd.TRAJECTORY),)

  def inputs():
    rest = jax.tree.map(jnp.copy, state._replace(variables=()))
    return state.variables, rest, trajectories, key

  expected = spmd.map_update(learner, mesh)(*inputs())
  lowered = spmd.lower_update(learner, mesh, inputs(), is_sliced=True)
  begin, steps, end = (x.compile() for x in lowered.values())
  num_steps = 4 * num_epochs
  for bounds in ([0, num_steps], [0, 1, 3, num_steps], range(num_steps + 1)):
    first, work, means = begin(*inputs())
    new = first
    for low, high in itertools.pairwise(map(np.int32, bounds)):
      new, means = steps(new, work, means, low, high)
    found = end(new, means)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    # Only the state that actors still use is not donated.
    assert all(x.is_deleted() for x in jax.tree.leaves(first.variables.params))
  assert int(expected[0].num_sgd_steps) == num_steps


def test_an_update_of_one_step_has_no_parts():
  agent = _agent('a2c')
  assert learner_lib.make_learner(agent, optax.sgd(1.0)).parts is None


def test_an_update_is_the_gradient_of_the_loss():
  agent = _agent('ppo')
  trajectory = _trajectory(agent)
  learner, update = make_update(agent, optax.sgd(1.0), 1)
  state = learner.init(jax.random.key(0), trajectory)
  new, _ = update(state, trajectory, jax.random.key(1))
  variables = state.variables

  def loss(params):
    batch = helpers.prepare(agent, variables, trajectory)
    changed = variables._replace(params=params)
    return agent.loss(changed, (), batch, jax.random.key(0))[0]

  grads = jax.jit(jax.grad(loss))(variables.params)
  for old, new, grad in zip(
    *map(jax.tree.leaves, (variables.params, new.variables.params, grads))
  ):
    np.testing.assert_allclose(new, old - grad, atol=1e-6)
  assert int(state.num_updates) == 0


def _all_reduces(hlo):
  """Returns the kind and the bytes of each collective in an HLO text."""
  kinds = (
    'all-reduce',
    'all-gather',
    'all-to-all',
    'collective-permute',
    'reduce-scatter',
    'collective-broadcast',
    'ragged-all-to-all',
  )
  found = []
  for line in hlo.splitlines():
    if '/calibrate/' in line:  # Only the first update runs it.
      continue
    match = re.search(r'= (.*?) (' + '|'.join(kinds) + r')(-start)?\(', line)
    if match:
      shapes = re.findall(r'(f32|s32|u32|f16|bf16)\[([\d,]*)\]', match[1])
      found.append(
        (
          match[2],
          sum(
            int(re.search(r'\d+', dtype)[0])
            // 8
            * int(np.prod([int(d) for d in dims.split(',') if d]))
            for dtype, dims in shapes
          ),
        )
      )
  return found


@pytest.mark.parametrize(
  'name,num_epochs,num_minibatches,is_full',
  [
    ('ppo', 3, 2, True),
    ('impala', 1, 1, True),
    ('impala', 2, 2, False),
    helpers.slow('ppo', 1, 1, False),
    helpers.slow('ppo', 3, 2, False),
    helpers.slow('impala', 1, 1, False),
    helpers.slow('a2c', 1, 1, False),
  ],
)
def test_collectives_of_the_compiled_update(
  name, num_epochs, num_minibatches, is_full
):
  agent = _agent(name, is_full)
  trajectory = _trajectory(agent)
  learner, update = make_update(
    agent,
    optax.adam(1e-3),
    4,
    num_epochs=num_epochs,
    num_minibatches=num_minibatches,
  )
  state = jax.eval_shape(learner.init, jax.random.key(0), trajectory)
  compiled = update.lower(state, trajectory, jax.random.key(1)).compile()
  found = sorted(_all_reduces(compiled.as_text()), key=lambda x: x[1])
  assert {kind for kind, _ in found} == {'all-reduce'}
  num_bytes = sum(x.size * 4 for x in jax.tree.leaves(state.variables[:2]))
  *small, (_, largest) = found
  # A scan contains one instruction for all its steps.
  assert num_bytes <= largest <= num_bytes + 1024
  assert len(small) == (1 if name == 'ppo' else 0)
  assert all(size <= 1024 for _, size in small)


def test_the_hlo_reader_sees_a_collective_too_many():
  agent = _agent('a2c')
  wasteful = agent._replace(
    prepare=lambda variables, target, sample, key, mean: agent.prepare(
      variables,
      target,
      jax.tree.map(
        lambda x: x + mean(x) if x.dtype == jnp.float32 else x, sample
      ),
      key,
      mean,
    )
  )
  learner, update = make_update(wasteful, optax.sgd(1.0), 2)
  trajectory = _trajectory(agent)
  state = jax.eval_shape(learner.init, jax.random.key(0), trajectory)
  text = update.lower(state, trajectory, jax.random.key(1)).compile().as_text()
  assert len(_all_reduces(text)) > 1


def _counting_agent():
  """Makes an agent whose gradient is the sum of the rows that it sees."""
  return Agent(
    init=lambda key: Variables(jnp.zeros(16), (), {}),
    initial_carry=lambda n: (),
    act=None,
    prepare=lambda variables, target, sample, key, mean: (
      sample.trajectory.action
    ),
    loss=lambda variables, target, batch, key: (
      -jnp.sum(variables.params * jnp.sum(batch, 0)),
      LossOutput({}),
    ),
  )


def _unroll_of(rows):
  """Makes a trajectory whose actions are the rows of a batch."""
  return Trajectory((), rows, (), (), *helpers.counters(1))


@pytest.mark.parametrize(
  'num_epochs,num_minibatches', [(1, 4), (3, 8), (2, 1), (1, 1)]
)
def test_an_epoch_learns_from_every_row_once(num_epochs, num_minibatches):
  learner, update = make_update(
    _counting_agent(),
    optax.sgd(1.0),
    1,
    num_epochs=num_epochs,
    num_minibatches=num_minibatches,
  )
  state = learner.init(jax.random.key(0), ())
  state, _ = update(state, _unroll_of(jnp.eye(16)), jax.random.key(1))
  np.testing.assert_array_equal(
    state.variables.params, num_epochs * np.ones(16)
  )
  assert int(state.num_sgd_steps) == num_epochs * num_minibatches
  assert int(state.num_updates) == 1


@pytest.mark.parametrize('scale,expected', [(1.0, np.inf), (0.0, np.nan)])
def test_a_bad_gradient_makes_the_loss_nan(scale, expected):
  agent = _counting_agent()._replace(  # The parameters are 0, and so the loss.
    loss=lambda variables, target, batch, key: (
      jnp.sum(jnp.sqrt(scale * variables.params)),
      LossOutput({}),
    )
  )
  learner, update = make_update(agent, optax.sgd(1.0), 1)
  state = learner.init(jax.random.key(0), ())
  _, metrics = update(state, _unroll_of(jnp.eye(16)), jax.random.key(1))
  np.testing.assert_array_equal(metrics['grad_norm'], expected)
  assert np.isnan(metrics['loss'])


def test_each_epoch_has_other_minibatches():
  agent = _counting_agent()
  order = []

  def loss(variables, target, batch, key):
    jax.debug.callback(lambda x: order.append(x[:, 0]), batch, ordered=True)
    return jnp.sum(variables.params), LossOutput({})

  _, update = make_update(
    agent._replace(loss=loss),
    optax.sgd(1.0),
    1,
    num_epochs=3,
    num_minibatches=2,
  )
  learner = learner_lib.make_learner(agent, optax.sgd(1.0))
  state = learner.init(jax.random.key(0), ())
  rows = jnp.arange(64.0)[:, None]
  jax.block_until_ready(update(state, _unroll_of(rows), jax.random.key(1)))
  jax.effects_barrier()
  epochs = np.reshape(order, (3, 64))
  np.testing.assert_array_equal(np.sort(epochs), [np.arange(64)] * 3)
  assert len({tuple(np.sort(epoch[:32])) for epoch in epochs}) == 3


def test_minibatches_that_do_not_divide_are_refused():
  learner, update = make_update(
    _counting_agent(), optax.sgd(1.0), 1, num_minibatches=5
  )
  with pytest.raises(ValueError, match='num_minibatches=5 .* 16'):
    state = learner.init(jax.random.key(0), ())
    update(state, _unroll_of(jnp.eye(16)), jax.random.key(1))


@pytest.mark.parametrize(
  'target_update,expected',
  [
    (
      lambda new, old, n: optax.periodic_update(new, old, n, 3),
      [0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 6.0],
    ),
    (
      lambda new, old, n: optax.incremental_update(new, old, 0.5),
      [0.5, 1.25, 2.125],
    ),
  ],
)
def test_target_params_follow_after_each_optimiser_step(
  target_update, expected
):
  agent, seen = _counting_agent(), []

  def loss(variables, target, batch, key):
    jax.debug.callback(lambda x: seen.append(float(x[0])), target, ordered=True)
    return agent.loss(variables, target, batch, key)

  learner, update = make_update(
    agent._replace(loss=loss), optax.sgd(1.0), 1, target_update=target_update
  )
  state = learner.init(jax.random.key(0), ())
  targets = []
  for i in range(len(expected)):
    state, _ = update(state, _unroll_of(jnp.eye(16)), jax.random.key(i))
    targets.append(float(state.target_params[0]))
  jax.effects_barrier()
  # Each update adds 1 to each parameter.
  assert targets == expected
  assert seen == [0.0, *expected[:-1]]


def test_the_keys_of_prepare_do_not_come_from_a_key_of_the_loss():
  agent, prepare_keys, loss_keys = _counting_agent(), [], []

  def prepare(variables, target, sample, key, mean):
    jax.debug.callback(prepare_keys.append, jax.random.key_data(key))
    return sample.trajectory.action

  def loss(variables, target, batch, key):
    jax.debug.callback(loss_keys.append, jax.random.key_data(key))
    return agent.loss(variables, target, batch, key)

  agent_with_spies = agent._replace(prepare=prepare, loss=loss)
  learner, update = make_update(agent_with_spies, optax.sgd(1.0), 1)
  state = learner.init(jax.random.key(0), ())
  update(state, _unroll_of(jnp.eye(16)), jax.random.key(1))
  jax.effects_barrier()
  (prepare_key,), (loss_keys,) = prepare_keys, loss_keys
  assert prepare_key.shape == (1, 2) and loss_keys.shape == (16, 2)
  derived = jax.vmap(jax.random.split)(jax.random.wrap_key_data(loss_keys))
  derived = np.asarray(jax.random.key_data(derived)).reshape(-1, 2)
  assert prepare_key[0].tolist() not in derived.tolist()


def test_advantages_are_normalized_over_the_global_batch():
  # The halves differ by 100; each device's own moments would hide that.
  advantage = jnp.concatenate([jnp.arange(8.0), 100.0 + jnp.arange(8.0)])
  weight = jnp.ones(16).at[3].set(0.0)
  mesh = spmd.make_mesh(jax.devices()[:2])
  mean = functools.partial(jax.lax.pmean, axis_name='devices')
  ours = spmd.device_map(
    lambda a, w: ppo.normalize(a, w, mean),
    mesh,
    (spmd.BATCH, spmd.BATCH),
    spmd.BATCH,
  )(advantage, weight)
  valid = np.delete(np.asarray(advantage), 3)
  expected = (np.asarray(advantage) - valid.mean()) / valid.std()
  np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize('mean', [1e3, 1e4, 1e5])
def test_a_large_mean_of_the_advantages_leaves_no_noise(mean):
  noise = np.random.default_rng(0).normal(size=(128, 64))
  advantage = jnp.asarray(mean + noise, jnp.float32)
  found = ppo.normalize(advantage, jnp.ones_like(advantage), lambda x: x)
  assert abs(found.mean()) < 0.1 and found.std() < 1.1


_CAPACITY = 4096  # Steps on each device; far more than in any other array.


def _replay_agent():
  spec = EnvSpec(_OBS, False, Discrete(3), 1, 0)
  return helpers.make_agent('dqn', spec, n_steps=1)


def _replay_unroll(number=0):
  """Makes the unroll of all environments with this number."""
  trajectory = _trajectory(_agent('impala'))
  return trajectory._replace(
    extras=exploring.Extras(()),
    carry=(),
    num_steps=np.full_like(trajectory.num_steps, number * _T),
  )


def _make_replay_update(
  agent,
  num_devices,
  memory,
  num_steps=3,
  trajectory=None,
  optimizer=optax.sgd(0.1),
  **options,
):
  """Returns the initial state and the mapped update of a learner."""
  learner = learner_lib.make_learner(
    agent,
    optimizer,
    num_epochs=num_steps,
    memory=memory,
    target_update=lambda new, old, n: optax.periodic_update(new, old, n, 4),
  )
  mesh = spmd.make_mesh(jax.devices()[:num_devices])
  trajectory = trajectory or _replay_unroll()
  shard = jax.tree.map(lambda x: x[:, : _B // num_devices], trajectory)
  state = spmd.init_learner(
    lambda key: learner.init(key, shard), learner, mesh, jax.random.key(0)
  )
  specs = spmd.specs(learner.split_axes)
  update = spmd.device_map(
    learner.update,
    mesh,
    (specs, spmd.TRAJECTORY, spmd.REPLICATED),
    (specs, spmd.REPLICATED),
    **options,
  )
  return state, update


def _ring(num_devices, **options):
  defaults = {'capacity': _CAPACITY, 'min_steps': 1, 'batch_size': 8}
  options = defaults | {'priority_exponent': 0.5} | options
  options['batch_size'] //= num_devices
  return make_ring(_OBS, **options)


def test_a_sample_gets_the_priorities_of_its_loss():
  memory = _ring(1, priority_exponent=1.0)
  agent = _replay_agent()

  def loss(variables, target, batch, key):
    value, output = agent.loss(variables, target, batch, key)
    return value, output._replace(priority=jnp.full(8, 3.0))

  state, update = _make_replay_update(
    agent._replace(loss=loss), 1, memory, num_steps=1
  )
  state, _ = update(state, _replay_unroll(), jax.random.key(0))
  priorities = np.asarray(state.memory[1])
  # New sequences have the priority 1; a sample has 8 sequences.
  assert {*np.unique(priorities)} == {0.0, 1.0, 3.0}
  assert 1 <= np.sum(priorities == 3.0) <= 8


@pytest.mark.parametrize('has_memory', [False, True])
def test_the_noise_of_a_row_does_not_depend_on_the_devices(has_memory):
  normal = jax.vmap(jax.random.normal)
  agent = _counting_agent()._replace(
    prepare=lambda variables, target, sample, key, mean: (
      sample.trajectory.action[0] + normal(key)
    ),
    loss=lambda variables, target, batch, key: (
      jnp.sum(variables.params) * jnp.mean(batch * normal(key)),
      LossOutput({}),
    ),
  )
  unroll = Trajectory(
    (), np.arange(8.0, dtype=np.float32)[None], (), (), *helpers.counters(8)
  )
  found = []
  for num_devices in (1, 2, 4):
    memory = _latest_unroll() if has_memory else None
    state, update = _make_replay_update(
      agent, num_devices, memory, num_steps=1, trajectory=unroll
    )
    state, _ = update(state, unroll, jax.random.key(3))
    found.append(np.asarray(state.variables.params))
  assert np.abs(found[0]).max() > 0.01
  np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
  np.testing.assert_allclose(found[2], found[0], rtol=1e-5)


def _latest_unroll(length=1):
  """Makes a memory with one unroll; it gives the first steps of all rows."""

  def sample(memory, rng_key, hyperparams):
    trajectory = memory[0]
    size = trajectory.action.shape[1]
    trajectory = jax.tree.map(
      lambda x: x[: length + (len(x) == _T + 1)], trajectory
    )
    return Sample(trajectory, jnp.arange(size), jnp.ones(size))

  return Memory(
    init=lambda example: (jax.tree.map(jnp.zeros_like, example), ()),
    add=lambda memory, trajectory: (trajectory, ()),
    is_ready=lambda memory: jnp.array(True),
    sample=sample,
    prioritise=lambda priorities, index, priority: priorities,
    split_axes=(1, ()),
  )


@pytest.mark.parametrize('name', ['dqn', helpers.slow('muzero')])
def test_devices_agree_on_a_fixed_sample(name):
  agent, memory, outcomes = _replay_agent(), _latest_unroll(), []
  trajectory = _replay_unroll()
  if name == 'muzero':
    spec = EnvSpec(_OBS, False, Discrete(3), 1, 0)
    agent = helpers.make_agent(name, spec, num_unroll_steps=2, n_steps=3)
    memory = _latest_unroll(5)
    rng = np.random.default_rng(0)
    policy = rng.dirichlet(np.ones(3), (_T, _B)).astype(np.float32)
    trajectory = trajectory._replace(extras=muzero_search.Extras(policy))
  for num_devices in (1, 2, 4):
    state, update = _make_replay_update(
      agent, num_devices, memory, trajectory=trajectory
    )
    new, metrics = update(state, trajectory, jax.random.key(1))
    assert np.any(
      ravel_pytree(new.variables.params)[0]
      != ravel_pytree(state.variables.params)[0]
    )
    outcomes.append(
      jax.device_get((new.variables.params, new.target_params, metrics))
    )
  for other in outcomes[1:]:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6),
      outcomes[0],
      other,
    )


def test_learning_waits_until_the_memory_is_ready():
  agent = _replay_agent()
  # Each device adds _T * _B / 2 = 48 steps per unroll; 100 need three unrolls.
  state, update = _make_replay_update(agent, 2, _ring(2, min_steps=100))
  before = ravel_pytree(state.variables.params)[0]
  for number, num_sgd_steps in enumerate((0, 0, 3, 6)):
    trajectory = _replay_unroll(number)
    state, metrics = update(state, trajectory, jax.random.key(number))
    assert int(state.num_sgd_steps) == num_sgd_steps
    assert int(state.num_updates) == number + 1
    assert float(metrics['is_learning']) == (num_sgd_steps > 0)
    assert (float(metrics['loss']) > 0) == (num_sgd_steps > 0)
    # Statistics are absorbed from the first unroll on.
    assert float(state.variables.statistics.num_updates) == number + 1
    after = ravel_pytree(state.variables.params)[0]
    assert bool(jnp.any(after != before)) == (num_sgd_steps > 0)
  # The target follows every 4 steps: it is from step 4, and the rest is not.
  target = ravel_pytree(state.target_params)[0]
  assert jnp.any(target != after) and jnp.any(target != before)


def test_devices_begin_to_learn_at_the_same_update():
  memory = _latest_unroll()._replace(
    is_ready=lambda memory: jnp.all(memory[0].num_steps > 0)
  )
  state, update = _make_replay_update(_replay_agent(), 2, memory)
  trajectory = _replay_unroll(1)
  # The memory of one device is ready before that of the other. If this device
  # learned, it would wait for the other one, and XLA would end the process.
  half = trajectory.num_steps * (np.arange(_B) < _B // 2)[None]
  for num_steps, expected in ((half, 0), (trajectory.num_steps, 3)):
    unroll = trajectory._replace(num_steps=num_steps)
    state, metrics = update(state, unroll, jax.random.key(0))
    assert float(metrics['is_learning']) == (expected > 0)
    counts = [int(x.data) for x in state.num_sgd_steps.addressable_shards]
    assert counts == [expected] * 2


def test_devices_draw_different_samples():
  agent, seen = _replay_agent(), []
  memory = _ring(2)

  def sample(*arguments):
    found = memory.sample(*arguments)
    jax.debug.callback(lambda x: seen.append(x.tolist()), found.index)
    return found

  state, update = _make_replay_update(
    agent, 2, memory._replace(sample=sample), num_steps=1
  )
  update(state, _replay_unroll(), jax.random.key(0))
  jax.effects_barrier()
  first, second = seen
  assert first != second


@pytest.fixture(scope='module')
def replay_program():
  """The compiled update of a learner with a memory, and its state."""
  agent = _replay_agent()
  state, update = _make_replay_update(agent, 4, _ring(4), donate=(0,))
  arguments = state, _replay_unroll(), jax.random.key(0)
  return update.lower(*arguments).compile().as_text(), state


def test_collectives_of_an_update_with_a_memory(replay_program):
  text, state = replay_program
  small, large = sorted(_all_reduces(text), key=lambda x: x[1])
  num_bytes = 4 * sum(x.size for x in jax.tree.leaves(state.variables.params))
  assert small[0] == large[0] == 'all-reduce'
  assert small[1] <= 1024 and num_bytes <= large[1] <= num_bytes + 1024


def test_an_update_does_not_copy_the_memory(replay_program):
  text, state = replay_program
  assert not helpers.copies_of_memory(text, state.memory, num_devices=4)


def test_the_hlo_reader_sees_a_copy_of_the_memory():
  agent, memory = _replay_agent(), _ring(4)
  old = []

  def add(ring, trajectory):  # A sample of the memory before the unroll.
    old[:] = [ring]
    return memory.add(ring, trajectory)

  def sample(ring, *arguments):
    return memory.sample((old[0][0], ring[1]), *arguments)

  wasteful = memory._replace(add=add, sample=sample)
  state, update = _make_replay_update(agent, 4, wasteful, donate=(0,))
  arguments = state, _replay_unroll(), jax.random.key(0)
  text = update.lower(*arguments).compile().as_text()
  assert helpers.copies_of_memory(text, state.memory, num_devices=4)


def _name_of_first_layer(params):
  """Returns 'first' for the first layer of each torso, else 'rest'."""

  def label(path, x):
    names = [key.key for key in path]
    is_first = names[-3].startswith('MLP') and names[-2] == 'Dense_0'
    return 'first' if is_first else 'rest'

  return jax.tree_util.tree_map_with_path(label, params)


def _is_matrix(params):
  return jax.tree.map(lambda x: x.ndim == 2, params)


# Rules that need the tree: a mask, frozen parameters, a norm for each array,
# orthogonal steps for each matrix, and two learning rates.
_RULES = {
  'mask': lambda: optax.adamw(1e-2, weight_decay=10.0, mask=_is_matrix),
  'freeze': lambda: optax.multi_transform(
    {'first': optax.set_to_zero(), 'rest': optax.sgd(0.1)}, _name_of_first_layer
  ),
  'norm': lambda: optax.lamb(1e-2),
  'muon': lambda: optax.contrib.muon(1e-2),
  'rates': lambda: optax.multi_transform(
    {'first': optax.adam(1e-3), 'rest': optax.adam(1e-2)}, _name_of_first_layer
  ),
}


def _by_hand(agent, optimizer, variables, trajectories):
  """Returns the parameters after one step of optax for each trajectory."""
  params = variables.params
  state = optimizer.init(params)

  @jax.jit
  def step(params, state, trajectory):
    def loss(params):
      changed = variables._replace(params=params)
      batch = helpers.prepare(agent, changed, trajectory)
      return agent.loss(changed, (), batch, jax.random.key(0))[0]

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  for trajectory in trajectories:
    params, state = step(params, state, trajectory)
  return params


@pytest.mark.parametrize(
  'rule,num_devices',
  [
    ('norm', 1),
    *((rule, 2) for rule in _RULES),
    *(helpers.slow(rule, 1) for rule in _RULES if rule != 'norm'),
  ],
)
def test_an_optimizer_sees_the_tree_of_parameters(rule, num_devices):
  agent, optimizer = _agent('impala'), _RULES[rule]()
  trajectories = [_trajectory(agent, seed) for seed in range(3)]
  learner, update = make_update(agent, optimizer, num_devices)
  state = learner.init(jax.random.key(0), trajectories[0])
  expected = _by_hand(agent, optimizer, state.variables, trajectories)
  flat = (
    _by_hand(agent, optax.flatten(optimizer), state.variables, trajectories)
    if rule in ('norm', 'muon')
    else state.variables.params
  )
  first = state.variables.params
  for i, trajectory in enumerate(trajectories):
    state, _ = update(state, trajectory, jax.random.key(i))
  found = state.variables.params
  for a, b in zip(*map(jax.tree.leaves, (found, expected))):
    np.testing.assert_allclose(a, b, atol=2e-5)
  # One vector would give other parameters.
  assert any(
    np.abs(a - b).max() > 1e-3
    for a, b in zip(*map(jax.tree.leaves, (found, flat)))
  )
  if rule == 'freeze':
    labels = jax.tree.leaves(_name_of_first_layer(first))
    is_same = [
      np.array_equal(a, b)
      for a, b in zip(*map(jax.tree.leaves, (found, first)))
    ]
    assert is_same == [label == 'first' for label in labels]
    assert sum(is_same) == 4  # Kernel and bias of two torsos.


def test_members_of_a_population_have_trees_too():
  agent, optimizer = _agent('impala'), _RULES['freeze']()
  trajectories = [_trajectory(agent, seed) for seed in range(2)]
  learner = learner_lib.make_learner(agent, optimizer)
  keys = jax.random.split(jax.random.key(0), 2)
  states = jax.jit(jax.vmap(learner.init, (0, None)))(keys, trajectories[0])
  members = jax.tree.map(lambda *x: np.stack(x), *trajectories)
  mesh = spmd.make_mesh(jax.devices()[:1])
  update = spmd.device_map(
    jax.vmap(learner.update), mesh, (spmd.REPLICATED,) * 3, spmd.REPLICATED
  )
  found, _ = update(states, members, keys)
  for i, trajectory in enumerate(trajectories):
    variables = jax.tree.map(lambda x: x[i], states.variables)
    expected = _by_hand(agent, optimizer, variables, [trajectory])
    own = jax.tree.map(lambda x: x[i], found.variables.params)
    for a, b in zip(*map(jax.tree.leaves, (own, expected))):
      np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize('num_devices', [1, 2])
def test_a_rule_for_a_layer_works_with_a_memory(num_devices):
  state, update = _make_replay_update(
    _replay_agent(),
    num_devices,
    _ring(num_devices),
    optimizer=optax.multi_transform(
      {'first': optax.set_to_zero(), 'rest': optax.sgd(0.1)},
      _name_of_first_layer,
    ),
  )
  new, metrics = update(state, _replay_unroll(), jax.random.key(1))
  assert metrics['is_learning'] == 1.0
  labels = jax.tree.leaves(_name_of_first_layer(state.variables.params))
  pair = new.variables.params, state.variables.params
  is_same = [np.array_equal(*x) for x in zip(*map(jax.tree.leaves, pair))]
  assert is_same == [label == 'first' for label in labels]
  assert sum(is_same) == 2  # A kernel and a bias.


def test_an_elementwise_optimizer_gives_the_same_parameters_on_one_vector():
  agent = _agent('impala')
  trajectories = [_trajectory(agent, seed) for seed in range(3)]
  found = []
  for mark in (optimizers.elementwise, lambda x: x):
    optimizer = mark(
      optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    )
    learner, update = make_update(agent, optimizer, 1)
    state = learner.init(jax.random.key(0), trajectories[0])
    for i, trajectory in enumerate(trajectories):
      state, _ = update(state, trajectory, jax.random.key(i))
    found.append(jax.device_get(state))
  vector, tree = (jax.tree.leaves(x.opt_state[1][0].mu) for x in found)
  assert len(vector) == 1 and len(tree) > 1
  for a, b in zip(*(jax.tree.leaves(x.variables.params) for x in found)):
    np.testing.assert_allclose(a, b, atol=2e-6)
