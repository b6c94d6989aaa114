"""What XLA's compilers force on podrl, out of the way of the mathematics.

Each function has a plain form, a few lines of JAX that define its result, and
forms that are faster on some platforms. podrl chooses between them only in
`choose` and, for loops, in `scan` and `scan_means`. With the environment
variable PODRL_PLAIN_KERNELS=1, all new programs contain the plain forms. So if
a result looks wrong, this variable says whether a fast form is the reason.
`only_plain` does the same for a block.
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
import os
from typing import Any

import jax
from jax.extend import core
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

# Of a turn on a GPU. With eight steps, brax's inverted pendulum, whose step has
# 77,000, took 87 s to compile on a CPU core.
_MAX_EQUATIONS = 28_000

_only_plain = contextvars.ContextVar('only_plain', default=False)


def is_plain() -> bool:
  """Returns whether programs shall contain plain forms only."""
  variable = os.environ.get('PODRL_PLAIN_KERNELS', '')
  return _only_plain.get() or variable not in ('', '0')


@contextlib.contextmanager
def only_plain() -> Iterator[None]:
  """A block in which functions are traced anew, with plain forms only."""
  # Functions that were traced before contain other forms, so forget them.
  jax.clear_caches()
  token = _only_plain.set(True)
  try:
    yield
  finally:
    _only_plain.reset(token)
    jax.clear_caches()


def scan(
  step: Callable[..., Any], first: Any, inputs: Any, **steps_per_turn: int
) -> Any:
  """`jax.lax.scan` whose turns have several steps on some platforms.

  Steps of the same turn share operations. Each operation has a fixed cost on a
  TPU or a GPU. A CPU would only take longer to compile. On a GPU, turns of long
  steps have fewer steps, because XLA would compile them for minutes.

  Args:
    step: `(carry, input) -> (carry, output)`.
    first: the first carry.
    inputs: tree of arrays, one step after another on axis 0.
    **steps_per_turn: a power of two by platform, 'tpu' or 'gpu'; 1 for others,
      and for programs without a mesh.
  """
  turn = steps_per_turn.get(_platform(), 1)
  if turn > 1 and _platform() == 'gpu':
    one = jax.tree.map(lambda x: x[0], inputs)
    size = _num_equations(jax.make_jaxpr(step)(first, one).jaxpr)
    while turn > 1 and turn * size > _MAX_EQUATIONS:
      turn //= 2
  return jax.lax.scan(step, first, inputs, unroll=turn)


def _num_equations(jaxpr: core.Jaxpr) -> int:
  """Counts the operations that a program executes, with all rounds of scans."""
  total = 0
  for x in jaxpr.eqns:
    parts = [
      getattr(p, 'jaxpr', p) for p in jax.tree.leaves(list(x.params.values()))
    ]
    inside = [_num_equations(p) for p in parts if isinstance(p, core.Jaxpr)]
    total += 1 + x.params.get('length', 1) * sum(inside)
  return total


def scan_means(
  step: Callable[..., Any], first: Any, inputs: Any
) -> tuple[Any, Any]:
  """`scan` whose outputs are averaged over the steps."""
  if _platform() != 'gpu':
    last, outputs = jax.lax.scan(step, first, inputs)
    return last, jax.tree.map(lambda x: jnp.mean(x, axis=0), outputs)
  unravels: list[Callable[[jax.Array], Any]] = []

  def packed_step(carry: Any, x: Any) -> tuple[Any, jax.Array]:
    carry, outputs = step(carry, x)
    vector, unravel = ravel_pytree(outputs)
    unravels.append(unravel)
    return carry, vector

  # A GPU would store each output with a kernel of its own.
  last, vectors = scan(packed_step, first, inputs, gpu=4)
  return last, unravels[0](jnp.mean(vectors, axis=0))


def _platform() -> str:
  """Returns the platform of the mesh; '' without a mesh, or for plain forms."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return '' if device is None or is_plain() else device.platform


def choose(
  plain: Callable[..., Any], *arguments: Any, **forms: Callable[..., Any]
) -> Any:
  """Calls the form for the platform that a program is compiled for.

  The devices of a program's mesh say which platform this is. Without a mesh,
  JAX traces all forms, and chooses when it compiles.

  Args:
    plain: the form for all other platforms.
    *arguments: trees of arrays.
    **forms: faster forms by platform, 'cpu', 'cuda' or 'tpu'. Their results
      have the shapes and dtypes of the plain form's.
  """
  if is_plain():
    return plain(*arguments)
  if _platform() in ('cpu', 'tpu'):
    return forms.get(_platform(), plain)(*arguments)
  return jax.lax.platform_dependent(*arguments, default=plain, **forms)
