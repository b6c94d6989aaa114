"""Linear recurrences over time, whose steps a program can compute at once."""

import jax

from podrl import kernels


def linear(decay: jax.Array, x: jax.Array, state: jax.Array) -> jax.Array:
  """Computes all states of a linear recurrence, `[T, ...]`.

    s_t = decay_t * s_{t-1} + x_t

  With a decay of 0, the state begins anew.

  Args:
    decay: `[T, ...]`, real or complex, as the other arguments.
    x: `[T, ...]`.
    state: `[...]`, the state before the first step.

  Source: Blelloch 1990, Prefix Sums and Their Applications, section 1.4.
  """
  if len(x) == 1:
    return decay * state[None] + x
  # In parallel, there are more operations, in a tree of log2(T) levels. On two
  # CPU cores, steps in turn were 3 times faster for T from 128 to 1,024.
  forms = dict.fromkeys(('tpu', 'cuda'), _in_parallel)
  return kernels.choose(_in_turn, decay, x, state, **forms)


def _in_turn(decay: jax.Array, x: jax.Array, state: jax.Array) -> jax.Array:
  def step(state, inputs):
    state = inputs[0] * state + inputs[1]
    return state, state

  return jax.lax.scan(step, state, (decay, x))[1]


def _in_parallel(decay: jax.Array, x: jax.Array, state: jax.Array) -> jax.Array:
  def join(first, second):
    """Joins two neighbouring ranges of steps to one step."""
    return first[0] * second[0], first[1] * second[0] + second[1]

  x = x.at[0].add(decay[0] * state)
  return jax.lax.associative_scan(join, (decay, x))[1]
