"""Learns an update rule, and lets it train an agent on Catch.

python experiments/anakin_lpg.py [--meta_steps=200] [--image=lpg.png]

A population of agents learns small random environments. They share an update
rule: a network that reads an unroll backwards and says how the policy and a
vector of predictions should change. The rule learns from the agents' rewards.
Then the rule trains a new agent on Catch, which it has never seen.

Source: Oh et al. 2020, arXiv:2007.08794.
"""

import os

from absl import app, flags
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from podrl import tools, types
from podrl.core import returns
from podrl.core.learner import make_learner
from podrl.drivers import anakin, spmd
from podrl.envs import autoreset, gymnax

_META_STEPS = flags.DEFINE_integer('meta_steps', 200, 'Steps of the rule.', 1)
_IMAGE = flags.DEFINE_string('image', 'lpg.png', 'The picture to write.')

_NUM_AGENTS, _NUM_ENVS, _UNROLL, _NUM_UPDATES = 48, 16, 20, 4
_LIFETIME = 50  # Meta-steps after which an agent begins again in a new task.
_NUM_STATES, _NUM_ACTIONS, _MAX_STEPS = 25, 4, 20  # Sizes of the random tasks.
_NUM_PREDICTIONS, _CATCH_UPDATES, _CATCH_ENVS = 16, 400, 64


def sample_task(rng_key):
  """Draws a random task, for `make_env`.

  Returns:
    The next state of each action `[S, A]`, the reward for reaching each state
    `[S]`, and whether reaching it ends the episode `[S]`.
  """
  keys, shape = jax.random.split(rng_key, 4), (_NUM_STATES, _NUM_ACTIONS)
  following = jax.random.randint(keys[0], shape, 0, _NUM_STATES)
  order = jax.random.permutation(keys[1], _NUM_STATES)
  number = jax.random.randint(keys[2], (), 1, 4)
  reward = 1.0 * (order < number) - 1.0 * (order >= _NUM_STATES - number)
  ends = jax.random.bernoulli(keys[3], 0.7)
  return following, reward, (reward != 0) & ends


def make_env(following, reward, is_end):
  """Builds a batch of environments from the tables of `sample_task`."""

  def reset(rng_key):
    state = jax.random.randint(rng_key, (), 0, _NUM_STATES)
    return state, (state, jnp.int32(0))

  def step(rng_key, state, action):
    new, time = following[state[0], action], state[1] + 1
    ends = is_end[new], time >= _MAX_STEPS
    return new, (new, time), reward[new], *ends

  states = jnp.arange(_NUM_STATES)
  obs = jax.ShapeDtypeStruct(states.shape, bool)
  spec = types.EnvSpec(obs, False, types.Discrete(_NUM_ACTIONS), 1, _MAX_STEPS)
  return autoreset.make_device_env(spec, reset, step, lambda x: states == x)


class Network(nn.Module):
  """Maps observations `[N, ...]` to logits of actions and of predictions."""

  num_actions: int

  @nn.compact
  def __call__(self, obs):
    x = obs.reshape(len(obs), -1).astype(jnp.float32)
    x = nn.tanh(nn.Dense(64)(x))
    return nn.Dense(self.num_actions)(x), nn.Dense(_NUM_PREDICTIONS)(x)


class Rule(nn.Module):
  """Maps inputs `[T, B, F]` to weights of actions, targets of predictions."""

  @nn.compact
  def __call__(self, inputs, is_reset_step):
    def step(cell, carry, row):
      x, is_reset_step = row
      carry, hidden = cell(carry, x)
      # Nothing passes from an episode to the one before.
      return jnp.where(is_reset_step[..., None], 0.0, carry), hidden

    x = nn.relu(nn.Dense(32)(inputs))
    options = {'variable_broadcast': 'params', 'split_rngs': {'params': False}}
    carry = jnp.zeros((x.shape[1], 32))
    scan = nn.scan(step, reverse=True, **options)
    _, hidden = scan(nn.GRUCell(32), carry, (x, is_reset_step))
    return nn.Dense(1)(hidden)[..., 0], nn.Dense(_NUM_PREDICTIONS)(hidden)


def evaluate(network, variables, trajectory):
  """Returns log-probabilities.

  Returns:
    The log-probabilities of all actions `[T+1, B, A]`, of the chosen actions
    `[T, B]`, and of the predictions `[T+1, B, P]`.
  """
  obs = trajectory.timestep.obs
  heads = network.apply(variables.params, obs.reshape(-1, *obs.shape[2:]))
  heads = [jax.nn.log_softmax(x.reshape(*obs.shape[:2], -1)) for x in heads]
  actions = trajectory.action[..., None]
  log_prob = jnp.take_along_axis(heads[0][:-1], actions, -1)[..., 0]
  return heads[0], log_prob, heads[1]


def make_agent(spec, rule):
  """Builds an agent that learns by `hyperparams['rule']`, and its learner."""
  network = Network(spec.action.num_actions)

  def init(rng_key):
    params = network.init(rng_key, jnp.zeros((1, *spec.obs.shape)))
    return types.Variables(params, (), {'rule': rule})

  def act(variables, rng_key, timestep, carry, *, greedy=False):
    logits, _ = network.apply(variables.params, timestep.obs)
    return jax.vmap(jax.random.categorical)(rng_key, logits), (), carry

  def prepare(variables, target_params, sample, *others):
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), sample.trajectory)

  def loss(variables, target_params, batch, rng_key):
    trajectory = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batch)
    timestep = trajectory.timestep
    _, log_prob, predictions = evaluate(network, variables, trajectory)
    prob, states = jnp.exp(log_prob), jnp.exp(predictions)
    numbers = [timestep.reward[1:], timestep.discount[1:], prob]
    inputs = [jnp.stack(numbers, -1), states[:-1], states[1:]]
    weight = returns.weights(timestep)
    x = jax.lax.stop_gradient(jnp.concatenate(inputs, -1))
    params = variables.hyperparams['rule']
    change, targets = Rule().apply(params, x, weight == 0)
    distance = predictions[:-1] - jax.nn.log_softmax(targets)
    divergence = jnp.sum(jnp.exp(predictions[:-1]) * distance, -1)
    total = jnp.mean(weight * (0.5 * divergence - log_prob * change))
    return total, types.LossOutput({'change': jnp.mean(weight * change)})

  agent = types.Agent(init, lambda index: (), act, prepare, loss)
  return agent, make_learner(agent, optax.adam(5e-3, eps_root=1e-16))


def outer_loss(variables, trajectory):
  """The policy-gradient loss of fresh data, and the entropy's bonus."""
  timestep, network = trajectory.timestep, Network(_NUM_ACTIONS)
  policy, log_prob, _ = evaluate(network, variables, trajectory)
  weight, values = returns.weights(timestep), 0.0 * timestep.reward
  discount = 0.97 * timestep.discount[1:]
  gains = returns.vtrace(values, timestep.reward[1:], discount, weight)
  gains -= jnp.mean(gains, 1, keepdims=True)  # Over the environments.
  gains /= jnp.std(gains) + 0.1
  entropy = -jnp.sum(jnp.exp(policy) * policy, -1)[:-1]
  return -jnp.mean(weight * (log_prob * gains + 0.02 * entropy))


def begin(rng_key, rule):
  """Begins a member of the population: a task, a learner and environments."""
  *keys, reset_key, act_key = jax.random.split(rng_key, 4)
  task = sample_task(keys[0])
  env = make_env(*task)
  state = make_agent(env.spec, rule)[1].init(keys[1], None)
  first = env.reset(jax.random.split(reset_key, _NUM_ENVS))
  keys, index = jax.random.split(act_key, _NUM_ENVS), jnp.arange(_NUM_ENVS)
  first = index, *first, (), keys, jnp.zeros(_NUM_ENVS), index * 0
  return task, state, anakin.Actors(*first)


def live(rule, member, rng_key):
  """Lets a member learn; returns the outer loss, and its state and reward."""
  task, state, actors = member
  env = make_env(*task)
  agent, learner = make_agent(env.spec, rule)
  unroll = anakin.make_unroll(env, agent, _UNROLL)
  variables = state.variables.with_hyperparams({'rule': rule})

  def update(carry, rng_key):
    state, actors = carry
    actors, trajectory, *_ = unroll(state.variables, actors, state.num_updates)
    return (learner.update(state, trajectory, rng_key)[0], actors), None

  carry = state._replace(variables=variables), actors
  keys = jax.random.split(rng_key, _NUM_UPDATES)
  (state, actors), _ = jax.lax.scan(update, carry, keys)
  # The next unroll uses the keys of `num_updates`, so this unroll uses others.
  number = jnp.iinfo(jnp.int32).max - state.num_updates
  actors, trajectory, *_ = unroll(state.variables, actors, number)
  loss = outer_loss(state.variables, trajectory)
  return loss, ((task, state, actors), jnp.mean(trajectory.timestep.reward))


def meta_step(rule, members, rng_key):
  """Returns the rule's gradient `[1, ...]`, the members and their rewards."""

  def loss(rule):
    losses, outputs = jax.vmap(live, (None, 0, 0))(rule, members, rng_key)
    return jnp.mean(losses), outputs

  grads, outputs = jax.grad(loss, has_aux=True)(rule)
  return jax.tree.map(lambda x: x[None], grads), *outputs


def learn_rule(num_steps):
  """Returns the rule, and the rewards of the members, `[steps, agents]`."""
  inputs = jnp.zeros((1, 1, 3 + 2 * _NUM_PREDICTIONS))
  rule = Rule().init(jax.random.key(0), inputs, inputs[..., 0] > 0)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
  opt_state, rewards = optimizer.init(rule), []
  number = np.gcd(_NUM_AGENTS, jax.local_device_count())
  mesh = spmd.make_mesh(jax.local_devices()[:number], number)
  inputs = spmd.REPLICATED, spmd.MEMBERS, spmd.MEMBERS
  step = spmd.device_map(meta_step, mesh, inputs, (spmd.MEMBERS,) * 3)
  begin_all = jax.jit(jax.vmap(begin, (0, None)))
  for i in range(num_steps):
    keys = jax.random.split(jax.random.key(1 + i), _NUM_AGENTS)
    if i % _LIFETIME == 0:
      members = begin_all(keys, rule)
    grads, members, reward = step(rule, members, keys)
    # The mean over the devices is computed on the host.
    grads = jax.tree.map(lambda x: x.mean(0), jax.device_get(grads))
    updates, opt_state = optimizer.update(grads, opt_state)
    rule = optax.apply_updates(rule, updates)
    rewards.append(reward)
    if (i + 1) % _LIFETIME == 0:
      print(f'{i + 1:,} meta-steps: reward {np.mean(rewards[-_LIFETIME:]):.3f}')
  return rule, np.asarray(rewards)


def train_on_catch(rule):
  """Trains a new agent by the rule; returns the mean return of each update."""
  env = gymnax.make('Catch-bsuite')
  programs = anakin.make_programs(
    env,
    *make_agent(env.spec, rule),
    spmd.make_mesh(jax.local_devices()[:1]),
    num_envs=_CATCH_ENVS,
    unroll_length=_UNROLL,
    max_updates=_CATCH_UPDATES,
  )
  state = programs.init(jax.random.key(0))
  episodes = programs.train(state, np.int32(_CATCH_UPDATES))[1].episodes
  return np.asarray(episodes.return_sum / episodes.num_episodes)[:, 0]


def main(_):
  spmd.set_num_cpu_devices(os.cpu_count() or 1)
  rule, rewards = learn_rule(_META_STEPS.value)
  curve = train_on_catch(rule)
  with tools.figure(_IMAGE.value, 9, 3.2) as figure:
    left, right = figure.subplots(1, 2)
    left.plot(rewards.mean(1), lw=1)
    left.set(xlabel='meta-steps', ylabel='reward per step of the population')
    right.plot(np.arange(_CATCH_UPDATES) * _CATCH_ENVS * _UNROLL / 1e3, curve)
    right.set(
      xlabel='thousands of environment steps', ylabel='episode return on Catch'
    )
  print(f'return on Catch: {curve[-50:].mean():.2f}; drawn: {_IMAGE.value}')


if __name__ == '__main__':
  app.run(main)
