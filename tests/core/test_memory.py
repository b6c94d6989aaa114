"""Tests the memory against a plain list of transitions, in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from podrl.core import memory as memory_lib
from podrl.core.memory import make_ring
from podrl.types import TimeStep, Trajectory

_OBS = jax.ShapeDtypeStruct((2,), jnp.uint8)


def _unroll(env_index, num_steps, length):
  """Makes an unroll whose numbers tell the environment and the step."""
  env_index, num_steps = np.int32([env_index]), np.int32([num_steps])
  step = num_steps + np.arange(length + 1)[:, None]
  number = (100 * env_index + step).astype(np.float32)
  obs = np.stack([step % 256, env_index + 0 * step], -1).astype(np.uint8)
  timestep = TimeStep(obs, number, np.ones_like(number), step % 5 == 0)
  action, extras = step[:-1].astype(np.int32), {'x': -number[:-1]}
  return Trajectory(timestep, action, extras, (), env_index, num_steps)


def _make(**options):
  defaults = {'capacity': 24, 'min_steps': 1, 'batch_size': 64}
  memory = make_ring(_OBS, **(defaults | options))
  return memory._replace(
    add=jax.jit(memory.add),
    sample=jax.jit(memory.sample),
    prioritise=jax.jit(memory.prioritise),
  )


class _Model:
  """The same memory as lists: the latest rows of each column, and breaks."""

  def __init__(self, num_columns, num_rows, length):
    self.columns = [[] for _ in range(num_columns)]  # (env, step, piece).
    self.num_rows, self.length = num_rows, length
    self.next, self.piece = [None] * num_columns, [0] * num_columns

  def add(self, unroll):
    size = len(unroll.action)
    for b, column in enumerate(self.columns):
      env, step = int(unroll.env_index[0, b]), int(unroll.num_steps[0, b])
      self.piece[b] += self.next[b] != (env, step)
      # The row of the last time step is overwritten. If the unroll goes on, it
      # begins with the same time step.
      del column[-1:]
      column += [(env, step + t, self.piece[b]) for t in range(size + 1)]
      del column[: -self.num_rows]
      self.next[b] = env, step + size

  def sequences(self):
    """Returns the set of (environment, first step) that may be sampled."""
    return {
      (column[i][0], column[i][1])
      for column in self.columns
      for i in range(len(column) - self.length)
      if column[i][2] == column[i + self.length][2]
    }


@pytest.mark.parametrize('length', [1, 3, 5])
@pytest.mark.parametrize('capacity', [24, 60])
def test_samples_are_all_whole_sequences_and_no_others(length, capacity):
  rng = np.random.default_rng(0)
  memory = _make(capacity=capacity, sequence_length=length, batch_size=2048)
  unroll_length, num_columns = 3, 2
  num_rows = -(-capacity // 6) * 3
  model = _Model(num_columns, num_rows, length)
  state = memory.init(_unroll([0, 1], [0, 0], unroll_length))
  next_steps = np.zeros(3, int)
  columns = [0, 1]
  for update in range(40):
    if rng.random() < 0.2:  # Another environment takes over a column.
      columns[rng.integers(2)] = 2 if 2 not in columns else rng.integers(2)
      columns = columns if columns[0] != columns[1] else [0, 1]
    if rng.random() < 0.1:  # An unroll is lost.
      next_steps[columns[0]] += unroll_length
    unroll = _unroll(columns, next_steps[columns], unroll_length)
    next_steps[columns] += unroll_length
    model.add(unroll)
    state = memory.add(state, unroll)
    found = memory.sample(state, jax.random.key(update), {})
    trajectory, expected = found.trajectory, model.sequences()
    assert trajectory.timestep.obs.dtype == np.uint8
    if not expected:
      assert not found.weight.any()
      continue
    np.testing.assert_array_equal(found.weight, 1.0)
    first = np.asarray(trajectory.timestep.reward[0])
    seen = {(int(x // 100), int(x % 100)) for x in first}
    if next_steps.max() < 100:  # The numbers tell both.
      assert seen == expected
    # Everything in a sequence belongs to the same steps.
    steps = first + np.arange(length + 1)[:, None]
    np.testing.assert_array_equal(trajectory.timestep.reward, steps)
    np.testing.assert_array_equal(trajectory.extras['x'], -steps[:-1])
    np.testing.assert_array_equal(trajectory.action, steps[:-1] % 100)
    obs = np.stack([steps % 100, steps // 100], -1)
    np.testing.assert_array_equal(trajectory.timestep.obs, obs)
    np.testing.assert_array_equal(
      trajectory.timestep.is_first, steps % 100 % 5 == 0
    )
    if next_steps.max() + unroll_length >= 100:
      break
  assert update > 15


def test_each_actor_has_its_own_ring_in_any_order_of_unrolls():
  rng = np.random.default_rng(0)
  length, unroll_length, width, num_rows = 5, 3, 2, 12
  memory = _make(
    capacity=3 * width * num_rows,
    min_steps=60,
    sequence_length=length,
    batch_size=2048,
    priority_exponent=1.0,
    # Of two devices, this one has environments 0 and 1 of 4 of each actor.
    blocks=memory_lib.Blocks(3, 2, num_devices=2),
  )
  models = [_Model(width, num_rows, length) for _ in range(3)]

  def join(unrolls):
    return jax.tree.map(lambda *x: np.concatenate(x, 1), *unrolls)

  state = memory.init(join([_unroll([0, 1], [0, 0], unroll_length)] * 2))
  assert state[1].shape == (num_rows, 3 * width)
  next_steps, used, orders = np.zeros(3, int), np.zeros(3, int), set()
  while next_steps.max() < 90:
    actors = np.sort(rng.choice(3, 2, p=[0.5, 0.3, 0.2]))
    orders.add(tuple(actors.tolist()))
    unrolls = []
    for actor in actors:
      if rng.random() < 0.1:  # An unroll is lost.
        next_steps[actor] += unroll_length
      env_index = [4 * actor, 4 * actor + 1]
      steps = [next_steps[actor]] * width
      unrolls.append(_unroll(env_index, steps, unroll_length))
      models[actor].add(unrolls[-1])
      next_steps[actor] += unroll_length
      used[actor] = min(used[actor] + unroll_length, num_rows)
    state = memory.add(state, join(unrolls))
    expected = set().union(*(x.sequences() for x in models))
    is_full_enough = used.sum() * width >= 60
    assert bool(memory.is_ready(state)) == (is_full_enough and bool(expected))
    key = jax.random.key(next_steps.sum())
    found = memory.sample(state, key, {'importance_exponent': 0.0})
    if not expected:
      assert not found.weight.any()
      continue
    first = np.asarray(found.trajectory.timestep.reward[0])
    assert {(int(x // 100), int(x % 100)) for x in first} == expected
    steps = first + np.arange(length + 1)[:, None]
    np.testing.assert_array_equal(found.trajectory.timestep.reward, steps)
    np.testing.assert_array_equal(found.trajectory.action, steps[:-1] % 100)
    obs = np.stack([steps % 100, steps // 100], -1)
    np.testing.assert_array_equal(found.trajectory.timestep.obs, obs)
  assert {(0, 0), (0, 1), (0, 2), (1, 2)} <= orders and used.min() == num_rows


def test_an_update_may_take_several_unrolls_of_a_single_actor():
  blocks = memory_lib.Blocks(1, 3)
  memory = _make(capacity=64, sequence_length=6, blocks=blocks)
  steps = np.int32([[0, 0, 4, 4, 8, 8]])
  unroll = _unroll([0, 1] * 3, [0] * 6, 4)
  state = memory.init(unroll)
  assert state[1].shape == (32, 2)
  for update in range(2):
    unroll = _unroll([0, 1] * 3, (steps + 12 * update)[0], 4)
    state = memory.add(state, unroll)
  # 24 steps of each environment have 19 sequences of 6 steps.
  np.testing.assert_array_equal((state[1] > 0).sum(0), 24 - 5)


def _frame(env, step):
  return (50 * env + step) % 251


def _frame_stack(env, step, size):
  """Returns the latest frames; each seventh step begins a new stack."""
  begin = step - step % 7
  return [_frame(env, max(begin, step - i)) for i in range(size)][::-1]


def test_stacks_are_those_of_a_plain_list_and_each_frame_is_stored_once():
  rng = np.random.default_rng(0)
  length, unroll_length, size = 2, 4, 3
  obs = jax.ShapeDtypeStruct((size, 1), jnp.uint8)
  memory = make_ring(
    obs,
    capacity=48,
    min_steps=1,
    batch_size=2048,
    sequence_length=length,
    frame_stack=size,
  )
  add, sample = jax.jit(memory.add), jax.jit(memory.sample)

  def make_unroll(columns, num_steps):
    unroll = _unroll(columns, num_steps, unroll_length)
    stacks = [
      [_frame_stack(e, n + t, size) for e, n in zip(columns, num_steps)]
      for t in range(unroll_length + 1)
    ]
    stacks = np.array(stacks, np.uint8)[..., None]
    return unroll._replace(timestep=unroll.timestep._replace(obs=stacks))

  model = _Model(2, 24, length)
  next_steps, columns = np.zeros(3, int), [0, 1]
  state = memory.init(make_unroll(columns, next_steps[columns]))
  assert state[0].rows.timestep.obs.shape == (24, 2, 1)
  num_missing = 0
  for update in range(20):
    if rng.random() < 0.2:
      columns = [[0, 1], [2, 1], [0, 2]][rng.integers(3)]
    if rng.random() < 0.2:
      next_steps[columns[0]] += unroll_length
    unroll = make_unroll(columns, next_steps[columns])
    next_steps[columns] += unroll_length
    model.add(unroll)
    state = add(state, unroll)
    found = sample(state, jax.random.key(update), {})
    timestep = jax.tree.map(np.asarray, found.trajectory.timestep)
    first = timestep.reward[0].astype(int)
    for n in range(len(first)):
      env, step = divmod(first[n], 100)
      expected = [_frame_stack(env, step + t, size) for t in range(length + 1)]
      assert np.array_equal(timestep.obs[:, n, :, 0], expected)

    # Only sequences whose first stack is not complete are missing.
    seen = {divmod(x, 100) for x in first}
    assert seen <= model.sequences()
    places = {
      (env, step): (piece, row)
      for column in model.columns
      for row, (env, step, piece) in enumerate(column)
    }
    for env, step in model.sequences() - seen:
      num_missing += 1
      piece, row = places[env, step]
      oldest = max(step - size + 1, step - step % 7)
      is_complete = places.get((env, oldest), (-1,))[0] == piece
      assert not is_complete or row < size - 1
  assert num_missing > 10 and next_steps.max() < 100


def test_sequences_go_on_after_2_to_the_31_steps_of_an_environment():
  memory = _make(capacity=48, sequence_length=6)
  first = 2**31 - 8
  unroll = _unroll([0, 1], [0, 0], 4)
  state = memory.init(unroll)
  # N steps have N - 5 sequences of 6 steps, in each of two columns. The last
  # unroll does not follow, and overwrites the end of a sequence.
  for steps, num_sequences in ((0, 0), (4, 6), (8, 14), (12, 22), (20, 20)):
    number = (first + steps + 2**31) % 2**32 - 2**31
    num_steps = np.full((1, 2), number, np.int32)
    state = memory.add(state, unroll._replace(num_steps=num_steps))
    assert np.sum(state[1] > 0) == num_sequences


def _filled(**options):
  memory = _make(capacity=64, batch_size=20_000, **options)
  state = memory.init(_unroll([0, 1, 2, 3], [0] * 4, 4))
  for i in range(3):
    state = memory.add(state, _unroll([0, 1, 2, 3], [4 * i] * 4, 4))
  return memory, state


def test_sampling_frequencies_and_weights_follow_the_priorities():
  alpha, beta = 0.6, 0.4
  memory, (storage, priorities) = _filled(priority_exponent=alpha)
  index = np.flatnonzero(np.asarray(priorities))
  assert index.size == 48  # 12 steps of 4 environments.
  np.testing.assert_array_equal(np.asarray(priorities).ravel()[index], 1.0)
  raw = np.random.default_rng(0).exponential(size=48).astype(np.float32)
  priorities = memory.prioritise(priorities, jnp.asarray(index), raw)
  expected = raw.astype(float) ** alpha
  expected /= expected.sum()
  hyperparams = {'importance_exponent': jnp.float32(beta)}
  sample = memory.sample((storage, priorities), jax.random.key(1), hyperparams)
  counts = np.bincount(sample.index, minlength=priorities.size)
  assert counts.sum() == counts[index].sum() == 20_000
  assert stats.chisquare(counts[index], 20_000 * expected).pvalue > 0.01
  weight = (1 / (48 * expected)) ** beta
  place = np.searchsorted(index, sample.index)
  expected_weight = weight[place] / weight[place].max()
  np.testing.assert_allclose(sample.weight, expected_weight, rtol=1e-5)


def test_uniform_samples_are_uniform():
  memory, state = _filled()
  sample = memory.sample(state, jax.random.key(2), {})
  counts = np.bincount(sample.index, minlength=state[1].size)
  counts = counts[np.asarray(state[1]).ravel() > 0]
  assert counts.size == 48 and counts.sum() == 20_000
  assert stats.chisquare(counts).pvalue > 0.01


def test_no_exponent_makes_a_valid_sequence_invalid_or_infinite():
  memory, (_, priorities) = _filled(priority_exponent=20.0)
  index = jnp.flatnonzero(priorities)[:2]
  changed = memory.prioritise(priorities, index, jnp.float32([0.0, 1e6]))
  assert (changed.ravel()[index] > 0.0).all()
  assert np.isfinite(changed.sum())


def test_a_priority_that_is_not_finite_changes_nothing():
  memory, (_, priorities) = _filled(priority_exponent=0.5)
  index = jnp.flatnonzero(priorities)[:3]
  changed = memory.prioritise(
    priorities, index, jnp.float32([4.0, np.nan, np.inf])
  )
  expected = np.array(priorities)
  expected.ravel()[index[0]] = 2.0  # The square root of 4.
  np.testing.assert_allclose(changed, expected)


def test_new_sequences_get_the_largest_priority():
  memory, (storage, priorities) = _filled(priority_exponent=0.5)
  index = jnp.flatnonzero(priorities.ravel() > 0.0)
  changed = memory.prioritise(priorities, index, jnp.linspace(1.0, 9.0, 48))
  # A place without a sequence keeps the priority 0.
  empty = jnp.flatnonzero(priorities.ravel() == 0.0)
  changed = memory.prioritise(changed, empty, jnp.ones(empty.size))
  assert np.count_nonzero(changed) == 48
  _, after = memory.add((storage, changed), _unroll([0, 1, 2, 3], [12] * 4, 4))
  np.testing.assert_allclose(after[12:16], 3.0)  # The square root of 9.


@pytest.mark.parametrize('num_columns', [1, 3, 7, 64, 150])
def test_samples_of_any_number_of_columns_follow_the_priorities(num_columns):
  columns = np.arange(num_columns)
  memory = _make(
    capacity=12 * num_columns, batch_size=50_000, priority_exponent=1.0
  )
  unroll = _unroll(columns, 0 * columns, 4)
  storage, priorities = memory.add(memory.init(unroll), unroll)
  index = jnp.flatnonzero(priorities > 0.0)
  raw = np.random.default_rng(0).exponential(size=index.size) + 0.1
  raw[::3] = 1e-6  # These are almost never in a sample.
  raw = raw.astype(np.float32)
  priorities = memory.prioritise(priorities, index, raw)
  hyperparams = {'importance_exponent': jnp.float32(0.0)}
  sample = memory.sample((storage, priorities), jax.random.key(1), hyperparams)
  counts = np.bincount(sample.index, minlength=priorities.size)[index]
  assert counts.sum() == 50_000 and counts[::3].sum() < 10
  likely, expected = (np.delete(x, slice(0, None, 3)) for x in (counts, raw))
  expected *= likely.sum() / expected.sum()
  assert stats.chisquare(likely, expected, sum_check=False).pvalue > 0.01


def test_a_choice_among_columns_without_priorities_is_a_column():
  for num_columns in (1, 3, 5):
    zeros = jnp.zeros((4, num_columns))
    column = memory_lib._choose_column(zeros, jnp.linspace(0.0, 0.9, 4))
    assert (column < num_columns).all()


def test_the_memory_is_ready_after_enough_steps():
  memory = _make(capacity=24, min_steps=12)
  state = memory.init(_unroll([0, 1], [0, 0], 3))
  ready = []
  for i in range(9):
    state = memory.add(state, _unroll([0, 1], [3 * i] * 2, 3))
    ready.append(bool(memory.is_ready(state)))
  assert ready == [False] + [True] * 8  # 6 steps, then 12.


def test_a_capacity_for_less_than_a_sequence_is_refused():
  memory = _make(capacity=8, sequence_length=4)
  with pytest.raises(ValueError, match='8 steps .* it needs 16'):
    memory.init(_unroll([0, 1], [0, 0], 3))


def test_a_memory_without_a_whole_sequence_gives_weights_of_0():
  memory = _make(sequence_length=5, priority_exponent=0.6)
  # The drivers know only the shapes of an example.
  example = _unroll([0, 1], [0, 0], 3)
  state = memory.init(
    jax.eval_shape(lambda: jax.tree.map(jnp.asarray, example))
  )
  state = memory.add(state, example)  # 3 steps, but a sequence has 5.
  hyperparams = {'importance_exponent': jnp.float32(0.4)}
  sample = memory.sample(state, jax.random.key(0), hyperparams)
  np.testing.assert_array_equal(sample.weight, 0.0)
