"""Measures recurrent cores by the length of an unroll; a benchmark, not a test.

  python experiments/benchmarks/unrolls.py [--lengths=16,32,64,128,256,512,1024]
      [--envs=16] [--width=64] [--window=64] [--rounds=9]

For each core and length, the program prints the milliseconds that a network
with one layer before the core takes for the loss of an unroll and its gradient.
They are medians of rounds; in each round, every core is measured once.
`--window` is `network.memory_steps` of gtrxl.
"""

from collections.abc import Callable, Sequence
import statistics
import time

from absl import app, flags
import jax
import jax.numpy as jnp

from podrl.networks import actor_critic, cores, torsos

_LENGTHS = flags.DEFINE_list(
  'lengths', '16,32,64,128,256,512,1024', 'Lengths of an unroll.'
)
_NUM_ENVS = flags.DEFINE_integer('envs', 16, 'Environments.', 1)
_WIDTH = flags.DEFINE_integer('width', 64, 'Width of the layers.', 1)
_WINDOW = flags.DEFINE_integer('window', 64, 'Window of gtrxl.', 1)
_ROUNDS = flags.DEFINE_integer('rounds', 9, 'Rounds of measurement.', 1)
_OBS = jax.ShapeDtypeStruct((8,), jnp.float32)
_KINDS = ('none', *cores.CORES)


def make_gradient(kind: str, length: int) -> Callable[[], None]:
  """Builds a function that computes a gradient and waits for it."""
  size, batch = _WIDTH.value, _NUM_ENVS.value
  has_window = kind in cores.CORES and cores.CORES[kind].has_window
  network = actor_critic.make_network(
    lambda: torsos.MLP((size,)),
    _OBS,
    3,
    core=kind,
    core_size=size,
    memory_steps=_WINDOW.value if has_window else 0,
  )
  params = jax.jit(network.init)(jax.random.key(0))
  obs = jax.random.normal(jax.random.key(1), (length, batch, *_OBS.shape))
  is_first = jax.random.bernoulli(jax.random.key(2), 0.02, (length, batch))
  carry = network.initial_carry(batch)

  @jax.jit
  @jax.grad
  def gradient(params, obs, is_first, carry):
    head, value, _ = network.unroll(params, obs, is_first, carry)
    return jnp.mean(jnp.square(head)) + jnp.mean(jnp.square(value))

  def run() -> None:
    jax.block_until_ready(gradient(params, obs, is_first, carry))

  run()  # Compiles it.
  return run


def main(argv: Sequence[str]) -> None:
  """Prints a row for each length."""
  del argv
  print('| length |', ' | '.join(_KINDS), '|')
  print('|---|' + '---|' * len(_KINDS))
  for length in map(int, _LENGTHS.value):
    runs = {kind: make_gradient(kind, length) for kind in _KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for _ in range(_ROUNDS.value):
      for kind, run in runs.items():
        start = time.perf_counter()
        run()
        seconds[kind].append(time.perf_counter() - start)
    row = (f'{1e3 * statistics.median(x):.3g}' for x in seconds.values())
    print(f'| {length} |', ' | '.join(row), '|', flush=True)


if __name__ == '__main__':
  app.run(main)
