"""Trains rejax's PPO; `peers.py` starts this program in rejax's environment.

python peers_rejax.py SETTINGS

SETTINGS is a JSON object with the environment and the settings of `peers.py`.
The program first prints the number of parameters. Then it waits for lines on
its standard input, and answers each line with one line of JSON:

- `train K`: trains for K updates; prints the seconds and the CPU seconds. The
  first call also compiles.
- `curves N M K`: trains N seeds for K updates, with M evaluations; prints the
  evaluated returns, `[N, M]`.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import rejax


def main(settings: dict) -> None:
  """Answers the lines of the standard input."""
  steps_per_update = settings['num_envs'] * settings['unroll_length']

  def make(num_updates: int, num_evaluations: int) -> rejax.PPO:
    total = num_updates * steps_per_update
    return rejax.PPO.create(
      env=settings['env'],
      num_envs=settings['num_envs'],
      num_steps=settings['unroll_length'],
      num_epochs=settings['num_epochs'],
      num_minibatches=settings['num_minibatches'],
      learning_rate=settings['learning_rate'],
      gamma=settings['gamma'],
      gae_lambda=settings['lambda_'],
      clip_eps=settings['clip'],
      ent_coef=settings['entropy_cost'],
      vf_coef=settings['value_cost'],
      total_timesteps=total,
      eval_freq=total // max(1, num_evaluations),
      skip_initial_evaluation=True,
      agent_kwargs={'activation': 'tanh', 'hidden_layer_sizes': (64, 64)},
    )

  algorithm = make(1, 1)
  state = algorithm.init_state(jax.random.key(0))
  params = state.actor_ts.params, state.critic_ts.params
  answer = {'num_params': sum(x.size for x in jax.tree.leaves(params))}

  @jax.jit
  def train(state, num_updates):
    def body(_, state):
      return algorithm.train_iteration(state)

    return jax.lax.fori_loop(0, num_updates, body, state)

  while True:
    print(json.dumps(answer), flush=True)
    command, *numbers = sys.stdin.readline().split() or ['end']
    if command == 'train':
      seconds, cpu_seconds = time.perf_counter(), time.process_time()
      state = jax.block_until_ready(train(state, int(numbers[0])))
      answer = {
        'seconds': time.perf_counter() - seconds,
        'cpu_seconds': time.process_time() - cpu_seconds,
      }
    elif command == 'curves':
      num_seeds, num_evaluations, num_updates = map(int, numbers)
      whole = make(num_updates, num_evaluations)
      keys = jax.vmap(jax.random.key)(jnp.arange(num_seeds))
      _, (_, returns) = jax.jit(jax.vmap(whole.train))(keys)
      answer = {'returns': jnp.mean(returns, axis=-1).tolist()}
    else:
      return


if __name__ == '__main__':
  main(json.loads(sys.argv[1]))
