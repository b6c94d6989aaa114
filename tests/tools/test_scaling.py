"""Tests `podrl scaling`: interpolation, and what it prints and draws."""

import importlib.util

import pytest

from podrl.run import lowering
from podrl.tools import scaling
from podrl.tools.compile import Analysis, CompiledRun
from podrl.tools.hlo import PARTS, REDUCE, Collective

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
  'kind,num_cores,name',
  [
    ('v3', 4, None),
    ('v3', 2, None),
    ('v3', 8, 'v3-8'),
    ('v3', 2048, 'v3-2048'),
    ('v4', 4, 'v4-8'),
    ('v5e', 1, 'v5e-1'),
    ('v5e', 2, None),
    ('v5e', 256, 'v5e-256'),
    ('v5e', 2048, '8xv5e-256'),
    ('tpu7x', 8, 'tpu7x-8'),
    ('h100', 2048, 'h100:2048'),
  ],
)
def test_a_number_of_cores_has_a_target(kind, num_cores, name):
  target = scaling.find_target(kind, num_cores)
  assert (target and target.name) == name
  assert target is None or target.num_devices == num_cores


def _report(num_devices, seconds):
  parts = dict.fromkeys((*PARTS, 'rest', REDUCE), 0.0)
  parts |= {'acting': seconds, REDUCE: 9.0}  # The result must not use the 9.0.
  collectives = [Collective('all-reduce', 4_000_000, 10)]
  program = Analysis(num_devices, 1.0, {}, collectives, 1, parts, [], {})
  return CompiledRun(
    '',
    num_devices,
    8,
    {'train': program},
    100 * num_devices,
    1,
    False,
    [],
    1,
    1,
  )


def test_times_between_compiled_numbers_are_interpolated():
  all_targets = {n: lowering.parse_target(f'v5e-{n}') for n in (1, 4, 16)}
  reports = {1: _report(1, 0.2), 16: _report(16, 0.4)}
  one, four, sixteen = scaling.predict(reports, all_targets)
  assert (one.num_cores, one.all_reduce) == (1, 0)
  assert one.seconds == pytest.approx(0.2)
  assert one.efficiency == 1 and one.steps_per_second == pytest.approx(500)
  assert (one.is_compiled, four.is_compiled) == (True, False)
  # Ten all-reduces send 2 x 3/4 x 4 MB at 200 GB/s, with 2 x 2 hops of 1 us.
  reducing = 10 * (6e6 / 200e9 + 4e-6)
  assert four.all_reduce == pytest.approx(reducing)
  assert four.seconds == pytest.approx(0.3 + reducing)
  assert four.steps_per_second == pytest.approx(400 / four.seconds)
  assert four.efficiency == pytest.approx(0.2 / four.seconds)
  assert sixteen.seconds == pytest.approx(0.4 + sixteen.all_reduce)


def test_several_cores_act_and_learn_at_the_same_time():
  def report(num_devices, num_actors, num_learners):
    programs = {}
    for name, number, seconds in (
      ('act', num_actors, 0.2),
      ('learn', num_learners, 0.3),
    ):
      parts = dict.fromkeys((*PARTS, 'rest', REDUCE), 0.0) | {'acting': seconds}
      collectives = [Collective('all-reduce', 4_000_000, 10)]
      collectives = collectives if name == 'learn' else []
      programs[name] = Analysis(number, 1.0, {}, collectives, 1, parts, [], {})
    overlaps, steps = num_devices > 1, 100 * num_devices
    return CompiledRun(
      '', num_devices, 8, programs, steps, 1, overlaps, [], 1, 1
    )

  all_targets = {n: lowering.parse_target(f'v5e-{n}') for n in (1, 4, 16)}
  reports = {1: report(1, 1, 1), 16: report(16, 4, 12)}
  one, four, _ = scaling.predict(reports, all_targets)
  assert one.seconds == pytest.approx(0.2 + 0.3)
  # Three learners send 2 x 2/3 x 4 MB.
  assert four.all_reduce == pytest.approx(
    scaling.all_reduce_seconds(4_000_000, 3, lowering.CHIPS['v5e']) * 10
  )
  assert four.seconds == pytest.approx(0.3 + four.all_reduce)


@pytest.mark.slow  # The test above covers the numbers.
@pytest.mark.skipif(
  not importlib.util.find_spec('libtpu'),
  reason='libtpu, the compiler of TPUs, is not installed',
)
def test_the_command_prints_and_draws(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '80')
  monkeypatch.setattr(scaling, 'CORES', (1, 4, 8))
  arguments = ['CartPole-v1', '--agent=a2c', f'--out={tmp_path}']
  arguments += ['--config.unroll_length=2', '--config.env.num_envs=8']
  assert scaling.run(['scaling', *arguments]) == 0
  *lines, drawn = capsys.readouterr().out.splitlines()
  assert drawn == f'drawn: {tmp_path}/scaling.png'
  assert max(map(len, lines)) <= 80 and not any('…' in x for x in lines)
  assert [x.split()[0] for x in lines if '*' in x][:3] == ['1*', '4*', '8*']
  assert (tmp_path / 'scaling.png').read_bytes().startswith(b'\x89PNG')


def test_an_unknown_chip_is_a_mistake(capsys):
  assert scaling.run(['scaling', 'CartPole-v1', '--chip=v9e']) == 2
  assert '--chip=v9e is unknown; did you mean v' in capsys.readouterr().err
