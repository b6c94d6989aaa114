"""Trains an agent of rejax; `peers.py` starts this in rejax's environment.

python peers_rejax.py ppo|pqn|dqn SETTINGS

SETTINGS is a JSON object with fields of podrl's configuration by name.
The program first prints the number of parameters. Then it waits for lines on
its standard input, and answers each line with one line of JSON:

- `train K`: trains for K updates; prints the seconds and the CPU seconds. The
  first call also compiles.
- `act K`: the same for K unrolls without updates; only PPO.
- `curves N M K`: trains N seeds for K updates, with M evaluations; prints the
  evaluated returns, `[N, M]`.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import rejax


def _make(agent: str, settings: dict, total: int, num_evaluations: int):
  """Makes an algorithm of rejax with the settings of podrl's configuration."""
  num_envs = settings['env.num_envs']
  common = {
    'env': settings['env.name'],
    'num_envs': num_envs,
    'learning_rate': settings['optimizer.learning_rate'],
    'gamma': settings['agent.gamma'],
    'total_timesteps': total,
    'eval_freq': total // max(1, num_evaluations),
    'skip_initial_evaluation': True,
  }
  # Without sizes, the networks of DQN and PQN have two layers of 64 units.
  hidden_sizes = tuple(settings['network.hidden_sizes'])
  if agent == 'dqn':
    return rejax.DQN.create(
      **common,
      # One iteration has one step of each environment.
      num_epochs=(
        settings['replay.sgd_steps_per_update'] // settings['unroll_length']
      ),
      batch_size=settings['replay.batch_size'],
      buffer_size=settings['replay.capacity_steps'],
      fill_buffer=settings['replay.min_steps'],
      target_update_freq=num_envs,
      polyak=0.99,
      max_grad_norm=settings['optimizer.max_grad_norm'],
      agent_kwargs={'activation': 'relu'},
    )
  unroll = {
    'num_steps': settings['unroll_length'],
    'num_epochs': settings['num_epochs'],
    'num_minibatches': settings['num_minibatches'],
  }
  if agent == 'pqn':
    return rejax.PQN.create(
      **common,
      **unroll,
      td_lambda=settings['agent.lambda_'],
      max_grad_norm=settings['optimizer.max_grad_norm'],
      agent_kwargs={'activation': 'relu'},
    )
  return rejax.PPO.create(
    **common,
    **unroll,
    gae_lambda=settings['agent.lambda_'],
    clip_eps=settings['agent.clip'],
    ent_coef=settings['agent.entropy_cost'],
    vf_coef=settings['agent.value_cost'],
    agent_kwargs={'activation': 'tanh', 'hidden_layer_sizes': hidden_sizes},
  )


def main(agent: str, settings: dict) -> None:
  """Answers the lines of the standard input."""
  steps_per_update = settings['env.num_envs'] * settings['unroll_length']
  # One iteration of DQN has only one step of each environment.
  per_update = settings['unroll_length'] if agent == 'dqn' else 1

  algorithm = _make(agent, settings, steps_per_update, 1)
  state = algorithm.init_state(jax.random.key(0))
  if agent == 'ppo':
    params = state.actor_ts.params, state.critic_ts.params
  else:
    params = state.q_ts.params
  answer = {'num_params': sum(x.size for x in jax.tree.leaves(params))}

  @jax.jit
  def train(state, num_updates):
    def body(_, state):
      return algorithm.train_iteration(state)

    return jax.lax.fori_loop(0, num_updates * per_update, body, state)

  @jax.jit
  def act(state, num_unrolls):
    # The result contains the last unroll, or the compiler would remove it.
    return jax.lax.fori_loop(
      1,
      num_unrolls,
      lambda _, last: algorithm.collect_trajectories(last[0]),
      algorithm.collect_trajectories(state),
    )

  while True:
    print(json.dumps(answer), flush=True)
    command, *numbers = sys.stdin.readline().split() or ['end']
    if command in ('train', 'act'):
      function = train if command == 'train' else act
      seconds, cpu_seconds = time.perf_counter(), time.process_time()
      result = jax.block_until_ready(function(state, int(numbers[0])))
      state = result if command == 'train' else result[0]
      answer = {
        'seconds': time.perf_counter() - seconds,
        'cpu_seconds': time.process_time() - cpu_seconds,
      }
    elif command == 'curves':
      num_seeds, num_evaluations, num_updates = map(int, numbers)
      total = num_updates * steps_per_update
      whole = _make(agent, settings, total, num_evaluations)
      keys = jax.vmap(jax.random.key)(jnp.arange(num_seeds))
      _, (_, returns) = jax.jit(jax.vmap(whole.train))(keys)
      answer = {'returns': jnp.mean(returns, axis=-1).tolist()}
    else:
      return


if __name__ == '__main__':
  main(sys.argv[1], json.loads(sys.argv[2]))
