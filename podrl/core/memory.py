"""A memory for replay: a ring of time steps for each column of the batch.

Each device has its own memory. The latest unroll overwrites the oldest rows. A
sequence of the memory has L transitions of one environment, so it consists of L
+ 1 neighbouring rows of a column. Two unrolls of a column are neighbours only
if the second one goes on where the first one ended. If actors deliver their
unrolls in any order, each actor has its own columns, with their own head.

Add first, and then sample from the new memory: XLA's CPU backend copies the
whole memory if a program still reads the old one.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podrl.core.observations import flatten, unflatten
from podrl.fields import COUNT, FROM_0, Field
from podrl.kernels.blocks import keep_float32, search
from podrl.types import Array, Memory, Sample, TimeStep, Trajectory, Tree

# The smallest and the largest priority of a valid sequence. The sum over all
# sequences must be finite.
_SMALLEST, _LARGEST = 1e-30, 1e25


# All sizes are those of all devices together.
FIELDS = {
  'replay.capacity_steps': Field(
    100_000, 'Environment steps that the memory stores.', COUNT
  ),
  'replay.min_steps': Field(
    1_000, 'Environment steps in the memory before learning begins.', COUNT
  ),
  'replay.batch_size': Field(
    128, 'Sequences that each optimiser step learns from.', COUNT
  ),
  'replay.sgd_steps_per_update': Field(
    16, 'Optimiser steps per update.', COUNT
  ),
  'checkpoint.memory': Field(
    True,
    'Checkpoints contain the replay memory; otherwise, a resumed run fills it '
    'again.',
  ),
}
PRIORITY_FIELDS = {
  'replay.priority_exponent': Field(
    0.0, 'Exponent of the priorities; 0 samples all equally often.', FROM_0
  ),
  'replay.importance_exponent': Field(
    0.4,
    'Exponent of the weights that correct for priorities.',
    FROM_0,
    changeable=True,
  ),
}


class SizeError(ValueError):
  """A memory is too small for its sequences, or too large for its device."""


class Rows(NamedTuple):
  """What a memory stores of each time step; leaves `[R, B, ...]`."""

  timestep: TimeStep  # The observations are vectors, of the newest frame only.
  action: Array
  extras: Tree
  restart: Tree  # Bool, whether all frames are the same; `()` without stacks.


class Blocks(NamedTuple):
  """Which columns of a memory belong together.

  A block has the columns of one actor. `Memory.add` gets unrolls of one block
  each, joined on the batch axis. They are in any order, and several may be of
  the same block. By default, every call of `add` gets an unroll of all columns.
  """

  num_blocks: int = 1
  num_unrolls: int = 1  # Unrolls in one call of `Memory.add`.
  # Devices of a process. The environments of an actor are split over them.
  num_devices: int = 1


class Storage(NamedTuple):
  """A ring of R rows for each of B columns.

  By default, `head` and `num_rows` are `[]`, because all columns share them.
  """

  rows: Rows
  head: Array  # Int32 `[1, B]`, the row that the next unroll begins with.
  num_rows: Array  # Int32 `[1, B]`, rows that are in use, up to R.
  # Int32 `[1, B]`, the environment of each column's latest unroll.
  env_index: Array
  num_steps: Array  # Int32 `[1, B]`, steps of the environment until `head`.
  # Int32 `[1, B]`, latest rows that are neighbours, up to R. If it is negative,
  # the next rows cannot begin a sequence, because their stacks are not known.
  age: Array


def _as_rows(trajectory: Trajectory, frame_stack: int) -> Rows:
  timestep = trajectory.timestep
  obs = flatten(timestep.obs, 2)
  restart: Tree = ()
  if frame_stack > 1:
    frames = obs.reshape(*obs.shape[:2], frame_stack, -1)
    obs = frames[:, :, -1]
    restart = jnp.all(frames == frames[:, :, -1:], axis=(2, 3))
  timestep = timestep._replace(obs=obs)
  return Rows(timestep, trajectory.action, trajectory.extras, restart)


def _stack(rows: Rows, row: Array, column: Array, frame_stack: int) -> Tree:
  """Returns observations `[L + 1, N, D]`; row, column: int32 `[L + 1, N]`."""
  ring = rows.timestep.obs
  newest = jax.tree.map(lambda x: x[row, column], ring)
  if frame_stack == 1:
    return newest
  frames = [newest]
  for _ in range(frame_stack - 1):
    # If all frames of a stack are the same, earlier rows do not belong to it.
    row = jnp.where(rows.restart[row, column], row, row - 1) % len(ring)
    frames.append(ring[row, column])
  return jnp.concatenate(frames[::-1], axis=-1)


def _choose_row(row_sums: Array, uniform: Array) -> Array:
  """Chooses rows, int32 `[N]`, with probabilities proportional to their sums.

  Args:
    row_sums: float32 `[R]`.
    uniform: float32 `[N]`, uniform random numbers in [0, 1).
  """
  sums = jnp.cumsum(row_sums)
  # The total itself would choose an empty row after the last one.
  below = jnp.nextafter(sums[-1], 0.0)
  place = jnp.minimum(uniform * sums[-1], below)
  index = search(sums, place)
  return jnp.minimum(index, len(sums) - 1).astype(jnp.int32)


def _choose_item(parts: Array, place: Array) -> tuple[Array, Array]:
  """Finds the item of each row in which a place is, and the place within it.

  `parts` `[N, K]` are the lengths of the items. `place` `[N]` is between 0 and
  the sum of the row. The items are int; all other numbers are float32.
  """
  sums = jnp.cumsum(parts, axis=1)
  place = jnp.minimum(place, jnp.nextafter(sums[:, -1], 0.0))
  index = jnp.sum(sums <= place[:, None], axis=1)
  index = jnp.minimum(index, parts.shape[1] - 1)
  first = jnp.take_along_axis(sums - parts, index[:, None], axis=1)
  return index, jnp.maximum(place - first[:, 0], 0.0)


def _choose_column(priorities: Array, uniform: Array) -> Array:
  """Chooses a column of each row, int `[N]`; see `_choose_row`.

  Args:
    priorities: float32 `[N, B]`.
    uniform: float32 `[N]`, uniform random numbers in [0, 1).
  """
  num_rows, num_columns = priorities.shape
  # A block and then a column of it: two short sums are faster than a long one.
  size = 2 ** round(math.log2(num_columns) / 2)
  padding = -num_columns % size
  blocks = jnp.pad(priorities, ((0, 0), (0, padding)))
  blocks = blocks.reshape(num_rows, -1, size)
  parts = jnp.sum(blocks, axis=2)
  block, place = _choose_item(parts, uniform * jnp.sum(parts, axis=1))
  columns = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  column = block * size + _choose_item(columns, place)[0]
  # If all priorities are 0, `column` can be too large.
  return jnp.minimum(column, num_columns - 1)


def make_ring(
  obs: Tree,
  *,
  capacity: int,
  min_steps: int,
  batch_size: int,
  sequence_length: int = 1,
  priority_exponent: float = 0.0,
  frame_stack: int = 1,
  blocks: Blocks = Blocks(),
) -> Memory:
  """Makes a memory that samples sequences by their priorities.

  Each sequence has the priority `p ** priority_exponent`, where p is the last
  priority that the loss returned for it. A new sequence gets the largest
  priority in the memory. If there are N sequences, a sample of probability P
  has the importance weight `(1 / (N P)) ** importance_exponent`, divided by the
  largest weight of its batch. `importance_exponent` is a hyperparameter.

  Args:
    obs: tree of `jax.ShapeDtypeStruct` for the observation of one environment.
    capacity: steps that a device stores. It is rounded up, so that the ring has
      a whole number of unrolls.
    min_steps: the memory of a device is ready when it has this many steps and a
      whole sequence.
    batch_size: sequences of a sample on each device.
    sequence_length: L, transitions of a sequence.
    priority_exponent: 0 samples all sequences with the same probability, and
      then all weights are 1.
    frame_stack: see `EnvSpec.frame_stack`. The memory stores each frame once.
    blocks: see `Blocks`. Each block has the same part of the capacity. In
      Sebulba's asynchronous mode, each actor needs a block.

  Raises:
    SizeError: in `init`, if the capacity is too small for one unroll and one
      sequence.

  Source: Schaul et al. 2016, arXiv:1511.05952, section 3.
  """
  length = sequence_length
  num_blocks = blocks.num_blocks
  has_blocks = max(num_blocks, blocks.num_unrolls) > 1

  def init(example):
    unroll_length, num_columns = example.timestep.reward.shape
    unroll_length -= 1
    if has_blocks:
      num_columns = num_columns // blocks.num_unrolls * num_blocks
    num_rows = -(-capacity // (num_columns * unroll_length)) * unroll_length
    least = unroll_length + length + frame_stack
    if num_rows < least:
      raise SizeError(
        f'a memory of {capacity} steps per device is too small for unrolls of '
        f'{unroll_length} steps of {num_columns} environments and sequences of '
        f'{length} steps; it needs {least * num_columns} steps per device'
      )
    # The example may consist of `jax.ShapeDtypeStruct`s.
    stored = jax.eval_shape(lambda x: _as_rows(x, frame_stack), example)
    rows = jax.tree.map(
      lambda x: jnp.zeros((num_rows, num_columns, *x.shape[2:]), x.dtype),
      stored,
    )
    zeros = jnp.zeros((1, num_columns), jnp.int32)
    number = zeros if has_blocks else jnp.zeros((), jnp.int32)
    storage = Storage(rows, number, number, zeros - 1, zeros, zeros)
    return storage, jnp.zeros((num_rows, num_columns))

  def add(memory, trajectory):
    largest: Any = 1.0
    if priority_exponent:
      largest = jnp.max(memory[1])
      largest = jnp.where(largest > 0.0, largest, 1.0)
    if not has_blocks:
      return add_unroll(memory, trajectory, 0, largest)
    width = memory[1].shape[1] // num_blocks
    num_envs = width * blocks.num_devices
    for i in range(blocks.num_unrolls):
      columns = slice(i * width, (i + 1) * width)
      unroll = jax.tree.map(lambda x: x[:, columns], trajectory)
      block = unroll.env_index[0, 0] // num_envs % num_blocks
      memory = add_unroll(memory, unroll, block, largest)
    return memory

  def add_unroll(memory, trajectory, block, largest):
    """Adds one unroll to the columns of a block."""
    storage, priorities = memory
    size = len(priorities)
    unroll_length, num_columns = trajectory.action.shape[:2]
    first = block * num_columns

    def own(x: Any) -> jax.Array:
      """Returns the columns of the block."""
      if not has_blocks:
        return x
      return jax.lax.dynamic_slice_in_dim(x, first, num_columns, axis=1)

    def write(whole: Array, x: Array, row: Array | int = 0) -> Array:
      """Replaces rows of the block, from `row` on."""
      if not has_blocks:
        return jax.lax.dynamic_update_slice_in_dim(whole, x, row, axis=0)
      start = row, first, *[0] * (whole.ndim - 2)
      return jax.lax.dynamic_update_slice(whole, x, start)

    def change(whole: jax.Array, row: Array, x: Any) -> jax.Array:
      """Replaces single rows, `[...]` or `[N]`, of the block."""
      if not has_blocks:
        return whole.at[row].set(x)
      parts = whole.reshape(size, num_blocks, num_columns)
      return parts.at[row, block].set(x).reshape(whole.shape)

    before = Storage(storage.rows, *map(own, storage[1:]))
    head = before.head[0, 0] if has_blocks else before.head
    follows = (
      (trajectory.env_index == before.env_index)
      & (trajectory.num_steps == before.num_steps)
      & (before.head == head)
    )

    # The unroll's last time step has no action yet. The next unroll begins with
    # the same time step and completes the row.
    unroll = _as_rows(trajectory, frame_stack)
    is_known = unroll.restart[:1] if frame_stack > 1 else True
    first_age = jnp.where(is_known, 0, 1 - frame_stack)
    age = jnp.where(follows, before.age, first_age)
    last = (head + unroll_length) % size

    def write_unroll(ring: Array, x: Array) -> Array:
      ring = write(ring, x[:unroll_length], head)
      return ring if len(x) == unroll_length else write(ring, x[-1:], last)

    rows = jax.tree.map(write_unroll, storage.rows, unroll)

    # The priority of a sequence is stored at its first row. `offset` is
    # relative to the new rows.
    def at(offset: Array | int) -> Array:
      return (head + offset) % size

    # If the unroll does not continue its column, this sequence has no last row.
    broken = jnp.where(follows[0], own(priorities[at(-length)][None])[0], 0.0)
    priorities = change(priorities, at(-length), broken)
    # The oldest rows that remain have lost a part of their frame stacks.
    overwritten = jnp.arange(unroll_length + frame_stack)
    priorities = change(priorities, at(overwritten), 0.0)
    completed = jnp.arange(unroll_length) - length + 1
    is_whole = completed[:, None] >= -age
    priorities = change(priorities, at(completed), largest * is_whole)
    after = Storage(
      rows,
      jnp.broadcast_to(last, before.head.shape),
      jnp.minimum(before.num_rows + unroll_length, size),
      trajectory.env_index,
      trajectory.num_steps + unroll_length,
      jnp.minimum(age + unroll_length, size),
    )
    if has_blocks:
      after = Storage(rows, *map(write, storage[1:], after[1:]))
    return after, priorities

  def is_ready(memory):
    storage, priorities = memory
    num_steps = storage.num_rows * priorities.shape[1]
    if has_blocks:
      num_steps = jnp.sum(storage.num_rows)
    is_full_enough = num_steps >= min_steps
    return is_full_enough & jnp.any(priorities > 0.0)

  def sample(memory, rng_key, hyperparams):
    storage, priorities = memory
    size, num_columns = priorities.shape
    uniform = jax.random.uniform(rng_key, (2, batch_size))
    # Short sums are more exact and faster than one over all sequences. On a
    # CPU, a product with ones is faster than a sum over columns.
    ones = jnp.ones((num_columns,))
    row_sums = jnp.dot(priorities, ones, precision='highest')
    row = _choose_row(row_sums, uniform[0])
    column = _choose_column(priorities[row], uniform[1])
    priority = priorities[row, column]
    weight = (priority > 0.0).astype(jnp.float32)
    if priority_exponent:
      # At least 1: without any sequence, 0 to a negative power is infinite.
      number = jnp.maximum(jnp.sum(priorities > 0.0), 1)
      probability = jnp.where(priority > 0.0, priority / jnp.sum(row_sums), 1.0)
      exponent = -hyperparams['importance_exponent']
      weight *= (number * probability) ** exponent
      weight /= jnp.maximum(jnp.max(weight), 1e-8)
    places = (row[None] + jnp.arange(length + 1)[:, None]) % size
    rows = storage.rows
    timestep = jax.tree.map(lambda x: x[places, column[None]], rows.timestep)
    vectors = _stack(rows, places, column[None], frame_stack)
    vectors = jax.tree.map(keep_float32, vectors)
    timestep = timestep._replace(obs=unflatten(vectors, obs, 2))
    action, extras = jax.tree.map(
      lambda x: x[places[:-1], column[None]], (rows.action, rows.extras)
    )
    trajectory = Trajectory(timestep, action, extras, (), (), ())
    return Sample(trajectory, row * num_columns + column, weight)

  def prioritise(priorities, index, priority):
    if not priority_exponent:
      return priorities
    row, column = jnp.divmod(index, priorities.shape[1])
    # A sequence that is not valid keeps the priority 0, and others never get 0.
    # Bounded, because a float32 power can become 0 or infinite.
    new = jnp.maximum(priority, 1e-6) ** priority_exponent
    new = jnp.clip(new, _SMALLEST, _LARGEST)
    old = priorities[row, column]
    # A NaN would stay in the memory after a population replaced its agent.
    is_new = (old > 0.0) & jnp.isfinite(priority)
    return priorities.at[row, column].set(jnp.where(is_new, new, old))

  columns: Any = 1
  same: Any = -1
  head = columns if has_blocks else same
  split_axes = Storage(columns, head, head, columns, columns, columns)
  return Memory(init, add, is_ready, sample, prioritise, (split_axes, 1))
