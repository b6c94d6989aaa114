"""Plans: what is measured, predicted and found."""

import io
import itertools
import os
import types

import jax
import numpy as np
import pytest
from rich.console import Console
import sebulba_cartpole
import synthetic

from podrl.records import workdir
from podrl.run.build import make_host_spec
from podrl.run.config import apply_overrides, sebulba_config
from podrl.tools import balance as command
from podrl.tools import balance_model as model
from podrl.tools import balance_picture as picture
from podrl.tools import balance_search as search
from podrl.tools import balance_simulation as simulation
from podrl.tools import balance_timing as timing
from podrl.tools import balance_worth as worth
from podrl.tools.balance_model import simulate
from podrl.tools.balance_plan import (
  Plan,
  candidates,
  configured,
  from_config,
  overrides,
  to_flags,
)
from podrl.tools.balance_simulation import Costs
from podrl.tools.balance_timing import Host, Run
from podrl.tools.scaling import CHIPS
from podrl.tools.scaling import Work

_PLAN = Plan((0,), (0,), 1, 4, 1, 10, 1, 1, False)
# A step of 10 ms and inference of 5 ms; an update of 80 ms.
_COSTS = Costs(
  (0.01, 0, 0),
  (0, 0, 0),
  np.inf,
  0.0,
  (0, 0.005, 0),
  0.0,
  0.0,
  (0.08, 0, 0),
  0.0,
  0.0,
  64,
  True,
)


def _rate(costs=_COSTS, **changes):
  threads = changes.pop('num_actors', 1)
  changes.setdefault('unrolls_per_update', threads)
  return simulate(_PLAN._replace(threads=threads, **changes), costs)


@pytest.mark.parametrize('deterministic', [False, True])
def test_rates_by_hand(deterministic):
  rate = lambda costs=_COSTS, **changes: (
    _rate(costs, deterministic=deterministic, **changes).steps_per_second
  )
  # An unroll takes 10 x 15 ms, and the update goes on meanwhile.
  assert rate() == pytest.approx(40 / 0.15)
  assert rate(max_lag=0) == pytest.approx(40 / 0.23)  # One after the other.
  assert rate(_COSTS._replace(update=(0.4, 0, 0))) == pytest.approx(40 / 0.4)
  # Four actors wait for one device, 4 x 5 ms a step; or for two servers of
  # environments, or for one core of two where steps need them, 4 x 10 / 2.
  shared = _COSTS._replace(inference=(0, 0.01, 0), exclusive=1.0)
  assert rate(shared, num_actors=4) == pytest.approx(160 / 0.4, rel=0.05)
  two = _COSTS._replace(environment_servers=2)
  assert rate(two, num_actors=4) == pytest.approx(160 / 0.2, rel=0.1)
  cores = _COSTS._replace(
    environment_cores=(0.01, 0, 0), num_cores=2, inference=(0, 0, 0)
  )
  assert rate(cores, num_actors=4) == pytest.approx(160 / 0.2, rel=0.05)


def test_an_accelerator_does_one_thing_at_a_time():
  costs = _COSTS._replace(exclusive=1.0, is_cpu=False)
  # 10 x 5 ms of inference and 80 ms of update, for 10 x 10 ms of steps.
  many = _PLAN._replace(threads=8, max_lag=7)
  assert simulate(many, costs).steps_per_second == (
    pytest.approx(40 / 0.13, rel=0.05)
  )
  apart = many._replace(learner_devices=(1,))
  assert simulate(apart, costs).steps_per_second == pytest.approx(
    40 / 0.08, rel=0.05
  )


def test_permits_and_lag():
  # One unroll learns at a time, two are under way: the others wait.
  few = _rate(num_actors=8, unrolls_per_update=1, max_lag=0)
  assert few.steps_per_second == pytest.approx(40 / 0.23)
  assert few.lag == 0
  for max_lag in range(4):
    found = _rate(num_actors=8, unrolls_per_update=1, max_lag=max_lag)
    assert found.lag <= max_lag
  assert _rate(num_actors=4, deterministic=True, max_lag=2).lag == 2
  # Of uneven environments some are overtaken, which are dropped.
  host = simulation.Simulation(
    _PLAN._replace(threads=8, unrolls_per_update=1, max_lag=3),
    _COSTS._replace(noise=2.0, update=(0.01, 0, 0)),
  )
  host.run(300)
  assert max(host.lags) == 3


@pytest.mark.parametrize(
  'name, changes',
  [
    ('environments', {}),
    ('learner devices', {'update': (0.4, 0, 0)}),
    ('actor devices', {'inference': (0, 0.05, 0), 'exclusive': 1.0}),
    ('cores', {'environment_cores': (0.01, 0, 0), 'num_cores': 0.25}),
    ('hand-off', {'hand_off': 0.5}),
  ],
)
def test_limit(name, changes):
  assert model.limit(_PLAN, _COSTS._replace(**changes)) == name


def test_lag_is_the_limit_of_many_actors():
  plan = _PLAN._replace(threads=8, unrolls_per_update=1, max_lag=0)
  costs = _COSTS._replace(update=(0.15, 0, 0))
  assert model.limit(plan, costs) == 'lag'


def test_bounds_are_bounds():
  rng = np.random.default_rng(0)
  for _ in range(30):
    costs = _COSTS._replace(
      environment=(*rng.uniform(0, 0.02, 1), 0, 0),
      inference=(0, *rng.uniform(0, 0.01, 1), 0),
      update=(*rng.uniform(0, 0.2, 1), 0, 0),
      exclusive=rng.uniform(),
      environment_servers=rng.integers(1, 4),
    )
    threads = int(rng.integers(1, 6))
    plan = _PLAN._replace(threads=threads, unrolls_per_update=threads)
    # Whole updates in a window: its ends count for a little.
    assert simulate(plan, costs).steps_per_second <= (
      1.03 * model.bound(plan, costs)
    )


def test_fit():
  rows = [(1, 1, 8), (1, 1, 64), (1, 2, 16), (1, 2, 256)]
  true = 0.003, 0.001, 0.0002
  np.testing.assert_allclose(
    simulation.fit(rows, np.asarray(rows) @ true), true, rtol=1e-6
  )
  # None is negative; a large value has no more weight than a small one.
  assert simulation.fit([(1, 1), (1, 2)], [2, 1])[1] == 0
  assert simulation.fit([(1,), (1,)], [1, 1000])[0] < 3


def test_servers():
  # 10 ms of two cores for each of 4: every 2.5 ms; every 10 ms on one core.
  assert timing._servers(0.01, 0.0, 0.0026, 4, 2) == np.inf
  assert timing._servers(0.01, 0.01, 0.0052, 4, 2) == np.inf
  assert timing._servers(0.01, 0.0, 0.005, 4, 2) == pytest.approx(2)


def _run(rate):
  return Run(rate, rate, 1.0, 0.001, 0.5, {})


def test_runs_correct_predictions():
  plans = [_PLAN._replace(threads=n) for n in (1, 2, 4, 64)]
  predictions = {
    p: simulate(p, _COSTS)._replace(steps_per_second=100.0) for p in plans
  }
  found = search.calibrate(predictions, {plans[0]: _run(50.0)})
  rates = [found[p].steps_per_second for p in plans]
  assert rates[0] == pytest.approx(50, rel=0.02)
  assert rates == sorted(rates) and rates[-1] < 65  # Part of it is shared.
  assert search.calibrate(predictions, {}) == predictions


def test_table_and_picture(tmp_path):
  plans = [
    _PLAN._replace(threads=n, num_envs=512, unroll_length=128)
    for n in (1, 2, 4, 8, 16, 32)
  ]
  found = search.Found(
    plans[0],
    plans[:0:-1] + plans[:1],
    {p: simulate(p, _COSTS)._replace(steps_per_second=123456.0) for p in plans},
    {plans[0]: _run(50.0), plans[-1]: _run(123456.0)},
    _COSTS,
  )
  console = Console(width=80, file=io.StringIO())
  console.print(picture.table(found, 5))
  lines = console.file.getvalue().splitlines()
  assert '\u2026' not in console.file.getvalue()  # Nothing is cut off.
  assert [x.split()[0] for x in lines[2:]] == ['1', '2', '3', '4', '5', 'now']
  assert '123k' in lines[2] and 'environments' in lines[2]
  path = tmp_path / 'balance.png'
  picture.draw(found, 'CartPole-v1', str(path))
  assert path.stat().st_size > 10_000


def _config(**fields):
  config = sebulba_config('ppo')
  config.env.name = 'CartPole-v1'
  return configured(config, fields)


def test_candidates_run_and_stay_near():
  # Its minibatches divide environments: of small pools they do not.
  fields = {
    'sebulba.max_lag': 2,
    'network.recurrent': 'gru',
    'num_minibatches': 32,
  }
  config = _config(**fields)
  spec = make_host_spec(config)
  base = from_config(config, spec)
  plans = candidates(config, spec, 2.0)
  assert base in plans and len(plans) == len(set(plans)) > 10
  assert len({p.num_actors for p in plans}) > 1
  for plan in plans:
    again = _config(**fields)
    apply_overrides(again, to_flags(overrides(plan, base)).split())
    assert from_config(again, spec) == plan
    assert 0.5 <= plan.batch / base.batch <= 2
    assert 32 <= plan.unroll_length <= 128
    assert plan.max_lag == 2


def test_devices_as_overrides():
  base = _PLAN
  fields = overrides(base._replace(learner_devices=(1, 2)), base)
  config = _config()
  apply_overrides(config, to_flags(fields).split())
  assert config.sebulba.actor_devices == (0,)
  assert config.sebulba.learner_devices == (1, 2)


def _timed(host):
  agent = host.make_agent()

  def make_driver(plan):
    return host.make_driver(
      num_actors=plan.num_actors,
      num_envs=plan.num_envs,
      unroll_length=plan.unroll_length,
      max_lag=plan.max_lag,
      unrolls_per_update=plan.unrolls_per_update,
      deterministic=plan.deterministic,
    )

  # It sleeps: there are as many cores as it likes.
  return Host(
    host.make_env,
    agent,
    host.make_learner(agent),
    make_driver,
    jax.devices(),
    64,
  )


def _draw(rng):
  """Costs of 2 to 20 ms, a host and plans of at most 512 slots an update."""
  costs = synthetic.Costs(
    step=rng.uniform(0.002, 0.02),
    step_per_env=rng.uniform(0, 0.001),
    inference=rng.uniform(0.002, 0.008),
    inference_per_env=rng.uniform(0, 3e-4),
    update=rng.uniform(0.005, 0.1),
    update_per_slot=rng.uniform(0, 3e-4),
  )
  deterministic = bool(rng.integers(2))
  fixed = 0 if deterministic else int(rng.choice([0, 1, 2]))
  max_lag, num_cores = int(rng.integers(3)), rng.choice([None, 2, 3])
  plans = [
    Plan(
      (0,),
      (0,),
      threads,
      num_envs,
      1,
      length,
      fixed or threads,
      max_lag,
      deterministic,
    )
    for threads, num_envs, length in itertools.product(
      (1, 2, 4, 8), (4, 16), (8, 16)
    )
  ]
  return costs, num_cores, [p for p in plans if p.batch <= 512]


def _share_of_best(costs, num_cores, plans, seconds):
  """The found plan's rate over the best of all, by real runs."""
  host = _timed(synthetic.Host(costs, num_cores=num_cores))
  found = search.find(host, plans, plans[0], seconds)
  first = found.ranking[0]
  rates = {
    p: timing.run(
      host.make_driver(p), seconds, p.batch, host.devices
    ).steps_per_second
    for p in plans
  }
  best = max(rates, key=rates.get)
  print(
    f'{costs}, {num_cores} cores\n'
    f'found {first}: {rates[first]:.0f}, predicted '
    f'{found.predictions[first].steps_per_second:.0f}\n'
    f'best {best}: {rates[best]:.0f} of {len(rates)}'
  )
  return rates[first] / rates[best]


def test_measures_what_is_set():
  # Two pools step at a time, and one batch is inferred.
  host = synthetic.Host(
    synthetic.Costs(
      step=0.006,
      step_per_env=0.001,
      inference=0.005,
      inference_per_env=5e-4,
      update=0.03,
      update_per_slot=5e-4,
    ),
    num_cores=2,
  )
  plans = [
    _PLAN._replace(
      threads=n, unrolls_per_update=n, num_envs=num_envs, unroll_length=4
    )
    for n, num_envs in ((1, 4), (4, 16))
  ]
  costs = timing.measure(_timed(host), plans)
  alone = simulation.times(plans[1], costs)
  # Nobody sleeps for less; a loaded machine adds to it, by far at times.
  assert 0.022 * 0.9 <= alone.environment < 0.022 * 2
  assert 4 * 0.013 * 0.9 <= alone.inference < 4 * 0.013 * 6
  assert 0.158 * 0.9 <= alone.update < 0.158 * 2
  assert costs.environment_servers in (1, 2, 3)
  assert costs.exclusive > 0.3


@pytest.mark.slow
@pytest.mark.parametrize('i', range(12))
def test_finds_the_best_plan(i):
  del i
  seed = np.random.SeedSequence().entropy % 2**32
  print('seed', seed)
  costs, num_cores, plans = _draw(np.random.default_rng(seed))
  assert _share_of_best(costs, num_cores, plans, 1.5) >= 0.9


_LOCAL = CHIPS['h100']._replace(
  peak_float32=50e9, memory_bandwidth=10e9, operation_seconds=0.0
)


def _on_chip(act, learn):
  return worth.on_chip(
    _COSTS, _PLAN, act, learn, _LOCAL, CHIPS['h100'], 'float32'
  )


def test_a_large_network_gains_by_an_accelerator():
  # Bound by FLOPs: 494e12 / 50e9 times as fast, but for calls and operations.
  costs = _on_chip(Work(2.5e9, 1.0, 0), Work(4e9, 1.0, 0))
  assert costs.update == pytest.approx((0, 0.08 * 50e9 / 494e12 / 40, 0))
  assert costs.inference[1] == pytest.approx(100e-6)
  assert not costs.is_cpu


def test_a_tabular_agent_loses_by_an_accelerator():
  small = _COSTS._replace(
    environment=(1e-4, 0, 0), inference=(0, 3e-5, 0), update=(5e-4, 0, 0)
  )
  # A thousand operations of an update take 3 us each, whatever their size.
  costs = worth.on_chip(
    small,
    _PLAN,
    Work(1e5, 1e5, 100),
    Work(1e6, 1e6, 1000),
    _LOCAL,
    CHIPS['h100'],
    'float32',
  )
  assert costs.update == pytest.approx((3e-3, 0, 0), abs=1e-9)
  # 100 operations in 10 steps, and a call of 100 us in each.
  assert costs.inference[1] == pytest.approx(130e-6)
  rates = [simulate(_PLAN, x).steps_per_second for x in (small, costs)]
  ways = [
    worth.Way('CPU only', rates[0], '', False),
    worth.Way('one h100', rates[1], '', True),
    worth.Way('Anakin', None, '', False),
  ]
  assert 'accelerator loses: CPU only' in worth.verdict(ways)
  ways[1] = ways[1]._replace(steps_per_second=3 * rates[0])
  assert 'pays: one h100 learns from 3.0 times' in worth.verdict(ways)


def test_anakin_of_the_same_network():
  config = worth.anakin_config(_config(**{'unroll_length': 16}))
  assert config.env.suite == 'gymnax' and config.unroll_length == 16
  assert (
    worth._anakin(
      _config(**{'env.name': 'Pong-v5'}), False, 2.0
    ).steps_per_second
    is None
  )


def test_a_way_that_fails_leaves_the_others_to_be_told():
  config = _config(**{'env.name': 'no-such-task'})
  way = worth._apart('CPU only', config, False, 2.0, 'measured')
  assert way.steps_per_second is None
  assert 'no-such-task' in way.how
  ways = [way, worth.Way('one h100', 7.0, '', True)]
  assert worth.verdict(ways) == 'Whether an accelerator pays is not known.'


def test_plans_that_were_run_are_ranked_by_that():
  plans = [_PLAN._replace(threads=n) for n in (1, 2, 4)]
  predicted = {
    p: model.Prediction(x, 0.5, 0.5, 0.5, 1.0)
    for p, x in zip(plans, (90.0, 100.0, 80.0))
  }
  found = search.Found(
    plans[0], plans, predicted, {plans[2]: _run(95.0)}, _COSTS
  )
  assert [found.rate(p) for p in plans] == [90.0, 100.0, 95.0]


@pytest.mark.parametrize('seconds', [4.0, 40.0])
def test_what_is_run_and_told(monkeypatch, seconds):
  plans = [
    _PLAN._replace(threads=n, unrolls_per_update=n, num_envs=num_envs)
    for n in (1, 2, 4, 8)
    for num_envs in (4, 8, 16)
  ]
  # No plan is much better than another.
  costs = _COSTS._replace(
    environment=(0.002, 0, 0.002), update=(0.01, 0.001, 0)
  )
  rng, now, told = np.random.default_rng(0), [0.0], {p: [] for p in plans}

  def run(plan, *_):
    now[0] += seconds
    rate = 0.7 * simulate(plan, costs).steps_per_second * rng.uniform(0.8, 1.2)
    told[plan].append(rate)
    return _run(rate)._replace(hand_off=0.0)

  monkeypatch.setattr(timing, 'measure', lambda *_: costs)
  monkeypatch.setattr(timing, 'run', run)
  monkeypatch.setattr(search.time, 'perf_counter', lambda: now[0])
  host = Host(None, None, None, lambda plan: plan, (), 2)
  found = search.find(host, plans, plans[0])
  told = {p: rates for p, rates in told.items() if rates}
  assert told.keys() == found.runs.keys()
  for plan, rates in told.items():
    assert found.rate(plan) == pytest.approx(np.median(rates))
  rates = [found.rate(p) for p in found.ranking]
  assert rates == sorted(rates, reverse=True)
  counts = [len(told.get(p, ())) for p in found.ranking]
  if seconds > 10:  # There is no time to try more, or again.
    assert max(counts) == 1 and all(counts[:3]) and not all(counts[:5]), counts
    return
  # Whole turns of the best five and of the configured plan.
  again = [p for p in told if len(told[p]) > 1]
  assert found.base in again and len(again) in (5, 6)
  assert {len(told[p]) for p in again} == {max(counts)}
  # What is predicted of a plan does not know its own runs.
  plan = found.ranking[0]
  raw = model.predict(plans, costs) | {found.base: simulate(found.base, costs)}
  others = {p: x for p, x in found.runs.items() if p != plan}
  assert found.predictions[plan] == search.calibrate(raw, others)[plan]


def test_a_loss_that_is_not_finite_ends_the_measurement():
  closed = []
  driver = types.SimpleNamespace(
    start=lambda: None,
    close=lambda: closed.append(True),
    advance=lambda count: [types.SimpleNamespace(is_finite=False)],
  )
  with pytest.raises(ValueError, match='NaN or infinite'):
    timing.run(driver, 1.0, 64, jax.devices())
  assert closed


def test_gymnasium_does_not_heed_threads():
  config = _config(**{'env.suite': 'gymnasium', 'sebulba.env_threads': 3})
  spec = make_host_spec(config)
  assert from_config(config, spec).env_threads == 1
  assert {p.env_threads for p in candidates(config, spec, 2.0)} == {1}


def test_the_whole_command(tmp_path, monkeypatch, capsys):
  found, started, tmp_path = [], [], tmp_path / 'new'

  def find_for(*arguments, **changes):
    found.append(search_in_full(*arguments, seconds=0.2, **changes))
    return found[0]

  search_in_full = search.find_for
  monkeypatch.setattr(search, 'find_for', find_for)
  monkeypatch.setattr(timing, '_SECONDS', 0.05)
  monkeypatch.setattr(os, 'execv', lambda _, argv: started.append(argv))
  experiment = 'experiments/sebulba_cartpole.py'
  settings = [
    '--config.network.hidden_sizes=8',
    '--config.seed=3',
    '--config.sebulba.mode=asynchronous',
    '--config.sebulba.autotune=True',
  ]
  assert (
    command.run(
      [
        'balance',
        experiment,
        f'--out={tmp_path}',
        '--apply',
        '--size_range=1',
        '--max_lag=2',
        *settings,
      ]
    )
    == 0
  )
  said = capsys.readouterr().out
  first, last = found[0].ranking[0], found[0].ranking[:5][-1]
  # What is to be pasted makes the plan that was searched for.
  config = sebulba_cartpole.get_config()
  apply_overrides(config, started[0][4:])
  assert from_config(config, make_host_spec(config)) == first
  assert config.sebulba.max_lag == first.max_lag == 2
  assert not config.sebulba.autotune  # A plan has its number of actors.
  assert 1 in {p.num_actors for p in found[0].ranking}
  assert started[0][1:8] == [experiment, '--agent=ppo', '--variant=', *settings]
  line = (tmp_path / 'balance.txt').read_text()
  assert line.split() == started[0][8:] and f'1  {line}' in said
  assert f'--config.env.num_envs={last.num_envs * last.num_actors} ' in said
  # The rates are those that were measured.
  ratio = found[0].rate(first) / found[0].runs[found[0].base].steps_per_second
  assert f', {ratio:.2f} times the configured one' in said
  for start in (
    'as configured, limit: ',
    'as configured, energy: ',
    f'  CPU only: {found[0].rate(first):,.0f} steps/s',
    '  one h100: ',
    '  Anakin on the CPU: ',
    '  Anakin on one h100: ',
  ):
    assert f'\n{start}' in said, start
  assert said.count(' steps/s, ') == 4  # Each way has its rate.
  assert (tmp_path / 'balance.png').stat().st_size > 10_000


def test_a_run_is_told_of(tmp_path, capsys):
  path = tmp_path / 'run'
  workdir.make(str(path), _config())
  assert command.run(['balance', str(path), f'--out={tmp_path}']) == 0
  assert 'under way' in capsys.readouterr().out
  (path / 'summary.json').write_text(
    '{"limit": "cores", "limit_sentence": "add some"}'
  )
  assert command.run(['balance', str(path)]) == 0
  assert capsys.readouterr().out.startswith('limit: cores: add some\n')
  for flag in '--config.seed=1', '--apply', '--agent=ppo', '--max_lag=1':
    assert command.run(['balance', str(path), flag]) == 2
    assert f'is a run, which {flag.split("=")[0]}' in capsys.readouterr().err


def test_ctrl_c_ends_in_a_line(monkeypatch, capsys):
  def find_for(*_, **__):
    raise KeyboardInterrupt

  monkeypatch.setattr(search, 'find_for', find_for)
  assert command.run(['balance', 'experiments/sebulba_cartpole.py']) == 130
  assert capsys.readouterr().err == 'interrupted\n'


@pytest.mark.parametrize(
  'arguments, message',
  [
    ([], '0 experiments'),
    (['experiments/anakin_breakout.py'], 'of Anakin'),
    (
      ['experiments/sebulba_cartpole.py', f'--out={__file__}'],
      f'--out={__file__} is no directory: File exists',
    ),
    (
      ['experiments/sebulba_cartpole.py', '--size_range=nan'],
      '--size_range=nan is not between 1 and',
    ),
    (
      ['experiments/sebulba_cartpole.py', '--size_range=inf'],
      '--size_range=inf is not between 1 and',
    ),
    (['experiments/sebulba_cartpole.py', '--chip=h1000'], '--chip=h1000'),
  ],
)
def test_mistakes(arguments, message, capsys):
  assert command.run(['balance', *arguments]) == 2
  assert message in capsys.readouterr().err
