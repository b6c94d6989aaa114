"""`podrl scaling`: formulas, compiled programs, mistakes and measurements."""

import contextlib
import math
import pathlib
import subprocess
import sys
import time

import anakin_breakout
import anakin_cartpole
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sebulba_cartpole

from podrl.run import build
from podrl.tools import scaling
from podrl.tools.scaling import Work

pytestmark = pytest.mark.timeout(300)
_ROOT = pathlib.Path(__file__).parents[2]
_TURNS = 6  # Of the slow test's measurements.
# 50 FLOP/s, 10 bytes/s, 0.5 s an operation; a ring of four.
_CHIP = scaling.Chip(50.0, 1, 10.0, 8.0, 1, 4, 2.0, 5.0, 0.5, 0.25, 3.0)


def test_an_all_reduce_in_a_ring():
  # 2 x 3/4 x 16 bytes at 8 bytes/s are 3 s; 2 x 3 hops of 0.25 s are 1.5 s.
  assert scaling.all_reduce_seconds(16, 4, _CHIP) == pytest.approx(4.5)
  assert scaling.all_reduce_seconds(16, 1, _CHIP) == 0


@pytest.mark.parametrize(
  'torus_dims,num_hops',
  [(1, 2 * 63), (2, 2 * 2 * 7), (3, 2 * 3 * 3), (0, 2 * 6)],
)
def test_hops_of_64_cores(torus_dims, num_hops):  # 8 x 8, 4 x 4 x 4, 2^6.
  chip = _CHIP._replace(torus_dims=torus_dims, pod_size=64)
  assert scaling.all_reduce_seconds(0, 64, chip) == pytest.approx(
    0.25 * num_hops
  )


def test_an_all_reduce_between_pods():
  # In the pod as above, 4.5 s; a core's 16/4 bytes among two pods are
  # 2 x 1/2 x 4 at 2 bytes/s, 2 s; a tree of two has 2 hops of 3 s.
  assert scaling.all_reduce_seconds(16, 8, _CHIP) == pytest.approx(4.5 + 2 + 6)


def test_a_long_all_reduce_costs_its_bytes():
  for chip in scaling.CHIPS.values():
    seconds = scaling.all_reduce_seconds(1e12, chip.pod_size, chip)
    share = 2 * (chip.pod_size - 1) / chip.pod_size
    least = share * 1e12 / chip.link_bandwidth
    assert seconds == pytest.approx(least, rel=0.01)


def test_expected_maximum_of_normals():
  # Of two 1 / sqrt(pi), of three 3 / (2 sqrt(pi)).
  assert scaling.expected_maximum(1) == 0
  assert scaling.expected_maximum(2) == pytest.approx(math.pi**-0.5, abs=1e-4)
  assert scaling.expected_maximum(3) == pytest.approx(
    1.5 * math.pi**-0.5, abs=1e-4
  )
  draws = np.random.default_rng(0).normal(size=(20_000, 128)).max(1).mean()
  assert scaling.expected_maximum(128) == pytest.approx(draws, abs=0.02)


def test_the_deviation_is_that_of_the_middle():
  values = np.random.default_rng(0).normal(5.0, 2.0, 10_000)
  values[:100] = 1e6  # Another process took the core.
  times, work = scaling.Times(values, values), Work(1, 1, 1)
  base = scaling.single(times, work, work, _CHIP, _CHIP, False)
  assert base.deviation == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
  'work,least',
  [
    (Work(400, 20, 2), (8.0, 'compute')),
    (Work(400, 90, 2), (9.0, 'memory')),
    (Work(400, 20, 30), (15.0, 'operations')),
  ],
)
def test_roofline(work, least):
  assert scaling.roofline(work, _CHIP) == least


def test_another_chip_scales_by_rooflines_and_has_a_floor():
  local = _CHIP._replace(peak=5.0, operation_seconds=0.0)
  work = Work(400, 20, 2)  # 80 s here, 8 s there: a tenth of 100 s.
  found = scaling.scale(100.0, work, local, _CHIP)
  assert found == (pytest.approx(10.0), 'compute')
  # 50 operations take at least 25 s.
  work = work._replace(operations=50)
  assert scaling.scale(100.0, work, local, _CHIP) == (25.0, 'operations')


def _times(*stages):
  # Medians 2 and 3; the quartiles of `busy` are 2 and 4.
  busy = np.asarray([1.0, 2.0, 3.0, 4.0, 5.0])
  return scaling.Times(np.asarray([1.0, 2.0, 9.0]), busy, stages)


def test_predictions_add_up():
  act, learn = Work(100, 10, 1), Work(300, 10, 1, 16, num_all_reduces=10)
  base = scaling.single(_times(), act, learn, _CHIP, _CHIP, False)
  # Of a tenth of an update the variance is a tenth; ten are waited for.
  deviation = 10 * math.sqrt((2 / 1.349) ** 2 / 10)
  assert base == (2.0, 3.0, pytest.approx(deviation), 'compute')
  one, two, four = scaling.predict(base, learn, _CHIP, 12, sizes=(1, 2, 4))
  assert one == (1, 2.0, 0.0, 0.0, 1.0, 6.0, 'compute')
  # 2 x 1/2 x 16 / 8 + 2 x 0.25 is 2.5 s.
  waiting = deviation / math.sqrt(math.pi)
  assert two.all_reduce == pytest.approx(10 * 2.5)
  assert two.waiting == pytest.approx(waiting, rel=1e-3)
  assert two.seconds == pytest.approx(3 + 25 + waiting, rel=1e-3)
  assert two.efficiency == pytest.approx(2 / two.seconds)
  assert two.steps_per_second == pytest.approx(24 / two.seconds)
  assert four.all_reduce == pytest.approx(45) and four.limit == 'interconnect'


@pytest.mark.parametrize(
  'environment,overlaps,seconds,limit',
  [
    # On five CPUs the environments take a fifth of what they took on one.
    (100.0, True, 20 + 1, 'environments'),
    (100.0, False, 20 + 1 + 3, 'environments'),
    (5.0, True, 1 + 3, 'compute'),
    (5.0, False, 1 + 1 + 3, 'compute'),
  ],
)
def test_sebulba_on_another_chip(environment, overlaps, seconds, limit):
  local = _CHIP._replace(peak=5.0, operation_seconds=0.0)
  times = _times(environment, 10.0, 30.0)
  # Inference and update take a tenth, by the rooflines' ratio.
  works = Work(10, 0, 0), Work(30, 0, 0)
  base = scaling.single(times, *works, local, _CHIP, overlaps)
  assert base.alone == base.busy == pytest.approx(seconds)
  assert base.limit == limit
  assert base.deviation == pytest.approx(2 / 1.349 / 3 * environment / 5)


def test_the_host_limits_sebulba_here():
  chip, work = _CHIP._replace(host_cpus=1.0), Work(100, 0, 0)
  for environment, limit in (50.0, 'environments'), (20.0, 'compute'):
    times = _times(environment, 10.0, 21.0)
    base = scaling.single(times, work, work, chip, chip, True)
    assert (base.alone, base.busy, base.limit) == (2.0, 3.0, limit)


def test_a_line_is_fitted():
  def row(latency, slope):
    return {str(n): latency + 4 * n * slope for n in scaling.MESSAGE_SIZES}

  rows = [row(2e-4, 1 / 5e8), row(3e-4, 1 / 5e8), row(1e-4, 1 / 5e8)]
  latency, bandwidth = scaling.link(rows)
  assert latency == pytest.approx(2e-4) and bandwidth == pytest.approx(5e8)
  latency, bandwidth = scaling.link([row(2e-4, -1e-12)])  # Noise.
  assert latency >= 0 and bandwidth > 0


def _small(module, *arguments, hidden_sizes=(16, 8)):
  config = module.get_config(*arguments)
  config.env.num_envs, config.unroll_length = 8, 16
  config.network.hidden_sizes = hidden_sizes
  return config


@pytest.mark.parametrize(
  'module,agent',
  [
    (anakin_cartpole, 'ppo'),
    pytest.param(anakin_cartpole, 'impala', marks=pytest.mark.slow),
    (sebulba_cartpole, 'ppo'),
  ],
)
def test_the_program_as_compiled(module, agent):
  config = _small(module, agent)
  act, learn = scaling.read_work(config)
  agent = build.make_agent(config, build.make_spec(config))
  params = jax.eval_shape(agent.init, jax.random.key(0)).params
  # Actor and critic each: 4 x 16 and 16, 16 x 8 and 8; heads for 2 and 1.
  num_params = 2 * (80 + 136) + 18 + 9
  assert sum(x.size for x in jax.tree.leaves(params)) == num_params
  assert learn.all_reduce_bytes == 4 * num_params
  assert learn.num_all_reduces == config.num_epochs * config.num_minibatches
  assert act.all_reduce_bytes == 0
  # Forwards 2 FLOPs a weight and sample; backwards 4, but not to the input.
  weights, first = 2 * (64 + 128) + 16 + 8, 2 * 64
  slots = 16 * 8
  forwards = 2 * weights * slots
  backwards = (4 * weights - 2 * first) * slots
  assert forwards <= act.flops <= 6 * forwards  # And the environments.
  expected = config.num_epochs * (forwards + backwards)
  # And activations, the loss, the optimiser, IMPALA's last time step.
  assert expected <= learn.flops <= 2 * expected


@pytest.mark.slow  # Compiles four times.
def test_flops_grow_with_what_is_done():
  config = _small(anakin_cartpole, 'ppo', hidden_sizes=(128, 128))
  _, once = scaling.read_work(config)
  config.num_epochs *= 2
  _, twice = scaling.read_work(config)
  assert twice.flops == 2 * once.flops
  config.unroll_length *= 2
  acts, longer = scaling.read_work(config)
  assert longer.flops == pytest.approx(2 * twice.flops, rel=0.15)
  config.env.num_envs *= 2
  more_acts, more = scaling.read_work(config)
  assert more.flops == pytest.approx(2 * longer.flops, rel=0.15)
  assert more_acts.flops == pytest.approx(2 * acts.flops, rel=0.15)


def test_hlo_is_read():
  function = jax.jit(lambda x: jnp.tanh(x @ x))
  compiled = function.lower(jnp.ones((8, 8))).compile()
  assert 1 <= scaling.num_operations(compiled.as_text()) <= 3


def _run(*arguments):
  return scaling.run(['scaling', *map(str, arguments)])


@pytest.mark.parametrize(
  'arguments,message',
  [
    (
      ['experiments/nothing.py'],
      'experiments/nothing.py is not an experiment; try',
    ),
    ([__file__], 'is not an experiment: it has no get_config'),
    ([], 'expected one experiment, got 0'),
    (['{}', '--chip=tpu_v9'], '--chip=tpu_v9 is unknown; did you mean tpu_v4'),
    (['{}', '--config.num_envs=4'], 'config.num_envs is not a field; did you'),
    (['{}', '--config.env.num_envs=x'], 'is not of type int'),
    (['--config.env.num_envs', 'x', '{}'], 'is not of type int'),
    (['{}', '--config.env.num_envs'], 'num_envs has no value'),
    (['{}', '--agent=ppq'], 'agent=ppq is unknown'),
    (['{}', '--variant=x'], 'variant=x is unknown'),
    (['{}', '--repeats=0'], '--repeats=0'),
    (['{}', f'--out={__file__}'], f'--out={__file__} is not a directory'),
    (['{}', '--config.env.name=Breakout-MinAtr'], 'Breakout-MinAtr'),
  ],
)
def test_mistakes_are_told_in_a_line(arguments, message, capsys):
  path = str(_ROOT / 'experiments' / 'anakin_breakout.py')
  assert _run(*(x.format(path) for x in arguments)) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ') and error.count('\n') == 1
  assert message in error


def test_the_command_prints_and_draws(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '80')
  monkeypatch.setattr(scaling, 'measure_chip', lambda repeats: _CHIP)
  times = scaling.Times(np.full(3, 0.1), np.full(3, 0.1))
  monkeypatch.setattr(scaling, 'measure_updates', lambda *_: times)
  assert (
    _run(
      _ROOT / 'experiments' / 'anakin_cartpole.py',
      '--chip=tpu_v4',
      f'--out={tmp_path}/new',
      '--config.env.num_envs=8',
    )
    == 0
  )
  *lines, drawn = capsys.readouterr().out.splitlines()
  assert drawn == f'drawn: {tmp_path}/new/scaling.png'
  assert max(map(len, lines)) <= 80 and not any('…' in x for x in lines)
  text = '\n'.join(lines)
  assert 'InstaDeep keeps 96.6%' in text  # 4.79 / (16 x 0.31).
  assert 'Sebulba keeps 84.0%' in text  # 43 / (256 x 0.2).
  for n in scaling.CORES:
    assert any(x.split()[:1] == [f'{n:,}'] for x in lines)
  assert (tmp_path / 'new' / 'scaling.png').read_bytes().startswith(b'\x89PNG')


def test_a_measuring_process_says_why_it_failed():
  with pytest.raises(ValueError, match='failed: TypeError: .*no_such_argument'):
    with scaling.start(('peaks', {'no_such_argument': 1})):
      pass


def test_a_measuring_process_ends_with_its_parent():
  program = (
    'import subprocess, sys, time; probe = subprocess.Popen([sys.executable, '
    '"-m", "podrl.tools.scaling", "0", "peaks", "{}"]); '
    'print(probe.pid, flush=True); time.sleep(300)'
  )
  parent = subprocess.Popen(
    [sys.executable, '-c', program],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  status = pathlib.Path('/proc', parent.stdout.readline().strip(), 'status')
  parent.stdin.write('1\n')
  parent.stdin.flush()
  assert parent.stdout.readline().startswith('[{"flops"')  # It is at work.
  parent.kill()
  end = time.monotonic() + 60
  while status.exists() and 'zombie' not in status.read_text():
    assert time.monotonic() < end
    time.sleep(0.1)
  parent.communicate()


@pytest.mark.slow  # Three processes compile an experiment.
def test_two_processes_here_are_measured():
  times = scaling.measure_updates(_small(sebulba_cartpole, 'ppo'), 1)
  assert min(len(times.alone), len(times.busy) // 2) >= 3
  assert 0 < times.stages[0] < 10 * np.median(times.busy)
  assert len(times.stages) == 3 and min(times.stages) > 0


@pytest.mark.slow  # Only a machine with two cores of its own passes it.
@pytest.mark.parametrize(
  'name,hidden_size,count',
  [
    ('anakin_breakout', 64, 6),
    ('anakin_breakout', 256, 3),
    ('anakin_breakout', 512, 2),
    ('sebulba_cartpole', 64, 30),
    ('sebulba_cartpole', 256, 10),
  ],
)
def test_predictions_hold_for_one_and_two_processes_here(
  name, hidden_size, count, capsys
):
  """In turns of a second or so, that what else runs here disturbs all alike.

  What is predicted from and what is checked are different processes.
  """
  errors = {}
  config = (
    sebulba_cartpole.get_config()
    if 'sebulba' in name
    else (anakin_breakout.get_config('ppo', 'mlp'))
  )
  config.network.hidden_sizes = (hidden_size, hidden_size)
  alone, both = scaling.one_core(config), scaling.one_core(config)
  both['env'] = both['env'] | {'num_envs': 2 * config.env.num_envs}
  names = 'alone', 'busy', 'single', 'double', 'together'
  rows = {which: [] for which in names}
  one, two = (
    ('train', {'fields': alone}),
    scaling.connected('train', fields=both),
  )
  with contextlib.ExitStack() as exit_stack:
    run_pair, run_single, run_double, run_together = (
      exit_stack.enter_context(scaling.start(*tasks))
      for tasks in ([one, one], [one], two, scaling.connected('all_reduces'))
    )
    for _ in range(_TURNS):
      rows['alone'] += run_pair(count, 1)
      rows['busy'] += run_pair(count)
      rows['single'] += run_single(count)
      rows['double'] += run_double(count)
      rows['together'] += run_together(4)
  seconds = {
    which: np.asarray([x['seconds'] for x in rows[which]])
    for which in names[:4]
  }
  latency, bandwidth = scaling.link(rows['together'])
  chip = _CHIP._replace(link_bandwidth=bandwidth, hop_seconds=latency / 2)
  act, learn = scaling.read_work(config)
  times = scaling.Times(seconds['alone'], seconds['busy'])
  base = scaling.single(times, act, learn, chip, chip, False)
  for row, which in zip(
    scaling.predict(base, learn, chip, 1, sizes=(1, 2)), names[2:4]
  ):
    found = float(np.median(seconds[which]))
    errors[row.num_cores] = row.seconds / found - 1
    with capsys.disabled():
      print(
        f'\n{name}, {hidden_size} x {row.num_cores}: predicted '
        f'{row.seconds:.4f} s (busy {base.busy:.4f}, reducing '
        f'{row.all_reduce:.4f}, waiting {row.waiting:.4f}), measured '
        f'{found:.4f} s: '
        f'{errors[row.num_cores]:+.1%}; an all-reduce '
        f'{latency * 1e6:.0f} us + bytes / {bandwidth / 1e9:.2f} GB/s',
        flush=True,
      )
  assert max(map(abs, errors.values())) < 0.2, errors
