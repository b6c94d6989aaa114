"""Tests `podrl compile`: compiled programs, TPU slices, and mistakes."""

import importlib.util
import json
import math
import pathlib
import sys
import textwrap
import types

import helpers
import jax
import jax.numpy as jnp
import pytest

from podrl.core import memory
from podrl.drivers import spmd
from podrl.run import build, devices, lowering
from podrl.run.command_line import parse_command_line
from podrl.tools import compile, experiments, hlo
from podrl.tools.hlo import Collective
from podrl.types import Discrete, TimeStep, Trajectory

pytestmark = pytest.mark.timeout(300)
_ROOT = pathlib.Path(__file__).parents[2]
_needs_libtpu = pytest.mark.skipif(
  not importlib.util.find_spec('libtpu'),
  reason='libtpu, the compiler of TPUs, is not installed',
)

# The loop over updates has no constant bound, so it counts once. It contains a
# loop of five environment steps, and a branch of at most 30 cycles. An update
# takes 1,000 + 5 x (100 + 2) + 30 cycles.
_TEXT = textwrap.dedent("""\
    HloModule jit_train, is_scheduled=true

    FileNames
    1 "/home/me/podrl/podrl/core/learner.py"
    2 "/usr/lib/python3/site-packages/flax/linen/linear.py"

    FunctionNames
    1 "f"

    FileLocations
    1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=3}
    2 {file_name_id=2 function_name_id=1 line=287 end_line=287 column=3}

    StackFrames
    1 {file_location_id=1 parent_frame_id=1}
    2 {file_location_id=2 parent_frame_id=2}

    %fused (p: f32[8]) -> f32[8] {
      ROOT %p = f32[8]{0:T(256)} parameter(0)
    }

    %less (s: (s32[], f32[8])) -> pred[] {
      %n = s32[]{:T(128)} constant(5)
      ROOT %c = pred[]{:T(512)} compare(%i, %n), backend_config={"estimated_cycles":"2"}
    }

    %step (s: (s32[], f32[8])) -> (s32[], f32[8]) {
      %a = f32[8]{0:T(256)S(1)} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(train)/while/body/acting/while/body/vmap(environment)/add" stack_frame_id=2}, backend_config={"estimated_cycles":"100"}
      ROOT %t = (s32[], f32[8]{0:T(256)}) tuple(%i, %a)
    }

    %short (p: f32[8]) -> f32[8] {
      ROOT %neg = f32[8] negate(%p), backend_config={"estimated_cycles":"3"}
    }

    %long (p: f32[8]) -> f32[8] {
      ROOT %copy = f32[8] copy(%p), backend_config={"estimated_cycles":"30"}
    }

    %always (s: (s32[], f32[8])) -> pred[] {
      ROOT %c.1 = pred[] compare(%i, %m), direction=LT
    }

    %update (s: (s32[], f32[8])) -> (s32[], f32[8]) {
      %w = (s32[], f32[8]{0:T(256)}) while(%t.1), condition=%less, body=%step, metadata={op_name="jit(train)/while/body/acting/while" stack_frame_id=1}
      %b = f32[8] conditional(%i, %x, %x), branch_computations={%short, %long}, metadata={op_name="jit(train)/while/body/update/cond"}
      %first = f32[8] conditional(%i, %x, %x), branch_computations={%short, %long}, metadata={op_name="jit(train)/while/body/update/calibrate/cond"}
      %r = (f32[3]{0:T(128)}, bf16[2,3]{1,0:T(8,128)(2,1)}) all-reduce(%x, %y), channel_id=1, to_apply=%add, metadata={op_name="jit(train)/while/body/update/psum"}
      %big = f32[8] fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(train)/jvp(update)/prepare/dot" stack_frame_id=1}, backend_config={"estimated_cycles":"1000"}
    }

    ENTRY %main (s: (s32[], f32[8])) -> (s32[], f32[8]) {
      ROOT %outer = (s32[], f32[8]{0:T(256)}) while(%s), condition=%always, body=%update
    }
    """)  # noqa: E501


def _program(calls=1, num_devices=4, num_updates=1):
  return lowering.Program(None, num_devices, calls, num_updates)


def test_cycles_are_summed_by_part():
  target = lowering.parse_target('v5e-4')
  found = hlo.analyse(_TEXT, _program(), target)
  collectives, cycles, seconds, slowest, kernels = found
  assert not kernels  # Only a GPU has them.
  assert cycles == 1000 + 5 * (100 + 2) + 30 + 3
  in_cycles = {k: round(x * 1.5e9) for k, x in seconds.items()}
  reducing = lowering.all_reduce_seconds(24, 4, target.chip)
  assert seconds['all-reduce'] == pytest.approx(reducing)
  del in_cycles['all-reduce']
  assert in_cycles == {
    'environment': 500,
    'acting': 10,  # The loop's condition takes 5 x 2.
    'prepare': 1000,
    'update': 30 + 3,
    'rest': 0,
  }
  # The arrays have 3 x 4 and 2 x 3 x 2 bytes.
  assert collectives == [Collective('all-reduce', 24, 1)]
  assert [(x.part, x.cycles, x.source) for x in slowest[:3]] == [
    ('prepare', 1000, 'podrl/core/learner.py:7'),
    ('environment', 500, 'flax/linen/linear.py:287'),
    ('update', 30, ''),
  ]


def test_the_kernels_of_a_gpu_are_counted_by_part():
  # Five rounds of a loop compute its condition and a fusion. The branches and
  # the last fusion run once; the all-reduce is none.
  found = hlo.analyse(_TEXT, _program(), lowering.parse_target('h100:4'))
  expected = {'acting': 5, 'environment': 5, 'update': 2, 'prepare': 1}
  assert found[-1] == expected | {'rest': 1}  # The condition of the outer loop.


def test_a_program_of_a_step_counts_often():
  program = _program(calls=20)
  collectives, cycles, *_ = hlo.analyse(
    _TEXT, program, lowering.parse_target('v5e-4')
  )
  assert cycles == 20 * 1543 and collectives[0].times == 20


def test_what_a_call_does_once_counts_little_in_one_of_its_updates():
  copy = '%c.2 = f32[8] copy(%p), backend_config={"estimated_cycles":"400"}'
  text = _TEXT.replace('  ROOT %outer', f'  {copy}\n  ROOT %outer')
  program = _program(num_updates=100)
  found = hlo.analyse(text, program, lowering.parse_target('v5e-4'))
  collectives, cycles, seconds, *_ = found
  assert cycles == 1543 + 400 // 100 and collectives[0].times == 1
  assert seconds['rest'] == pytest.approx(4 / 1.5e9)


@pytest.mark.parametrize(
  'shape,expected',
  [
    ('f32[8,4]{1,0:T(8,128)}', 128),
    ('(pred[], s32[]{:T(128)}, bf16[5]{0})', 15),
    ('u8[2,84,84]', 14112),
    ('token[]', 0),
  ],
)
def test_bytes(shape, expected):
  assert hlo.num_bytes(shape) == expected


def test_seconds_have_three_digits():
  values = 1234.0, 999.6, 2.0, 0.9996, 0.25, 2e-6
  expected = ['1,234 s', '1,000 s', '2 s', '1 s', '250 ms', '2 us']
  assert list(map(compile.format_seconds, values)) == expected


def test_a_gpu_has_a_roofline():
  text = textwrap.dedent("""\
      %gemm (a: f32[512,1024], b: f32[1024,256]) -> f32[512,256] {
        %a = f32[512,1024] parameter(0)
        %b = f32[1024,256] parameter(1)
        ROOT %dot = f32[512,256] dot(%a, %b), lhs_contracting_dims={1}
      }

      ENTRY %main (a: f32[512,1024], b: f32[1024,256]) -> f32[512,256] {
        %a.1 = f32[512,1024]{1,0} parameter(0)
        %b.1 = f32[1024,256]{1,0} parameter(1)
        %fusion = f32[512,256]{1,0} fusion(%a.1, %b.1), calls=%gemm
        ROOT %copy = f32[512,256]{1,0} copy(%fusion)
      }
      """)
  chip = lowering.CHIPS['h100']
  module = hlo.read_module(text)
  runs = list(hlo.walk(module))
  *_, product, copy = runs

  def seconds(chip):
    return [hlo.roofline_seconds(x, module, chip) for x in (product, copy)]

  # A kernel this small takes only the time of its start.
  assert seconds(chip) == pytest.approx([3e-6, 3e-6])
  # The product has 2 x 512 x 1024 x 256 FLOPs; float32 runs at 1/2 TFLOP/s.
  slow = chip._replace(peak=1, memory_bandwidth=1e9)
  assert seconds(slow)[0] == pytest.approx(2 * 2**27 / 0.5e12)
  # It reads 512 x 1024 and 1024 x 256 numbers, and writes 512 x 256.
  slow = chip._replace(memory_bandwidth=1)
  assert seconds(slow)[0] == pytest.approx(4 * 2**17 * (4 + 2 + 1) / 1e9)
  assert seconds(slow)[1] == pytest.approx(4 * 2**17 * 2 / 1e9)


def _compile(config, name):
  target = lowering.parse_target(name)
  with spmd.compiling_for(target.platform):
    return compile.compile_for(config, target)


_needs_cuda = pytest.mark.skipif(
  not importlib.util.find_spec('jax_cuda13_plugin'),
  reason='the compiler of GPUs is not installed',
)


@_needs_cuda
@pytest.mark.parametrize(
  'name,acting,optimiser',
  [
    ('CartPole-v1', 12, 25),
    ('Breakout-MinAtar', 22, 24),
    ('Pong-misc', 23, 29),
  ],
)
def test_a_gpu_starts_few_kernels_in_a_step(name, acting, optimiser):
  fields = {
    'env.num_envs': 4096,
    'unroll_length': 128,
    'num_epochs': 4,
    'num_minibatches': 32,
    'network.name': 'mlp',
  }
  flags = [f'--config.{k}={x}' for k, x in fields.items()]
  target = lowering.parse_target('h200:1')
  compile.set_up_process([target])
  _, report, _ = compile.compile_command([name, *flags], target, False)
  kernels = report.kernels_per_step('train')
  assert 5 < kernels['acting step'] <= acting
  assert 15 < kernels['optimiser step'] <= optimiser


@_needs_libtpu
def test_anakin_compiles_for_a_tpu_slice():
  config = helpers.fields_of('anakin_catch')
  config['env.num_envs'], config['unroll_length'] = 64, 4
  report, texts = _compile(config, 'v5e-16')
  (train,) = report.programs.values()
  assert texts.keys() == {'train'}
  assert (report.num_devices, train.num_devices) == (16, 16)
  assert report.num_steps == 64 * 4
  # There is one all-reduce per optimiser step, and one for `prepare`'s mean.
  small, large = sorted(train.collectives, key=lambda x: x.num_bytes)
  assert (small.kind, small.times) == ('all-reduce', 1)
  assert small.num_bytes <= 1024
  num_steps = config['num_epochs'] * config['num_minibatches']
  assert (large.kind, large.times) == ('all-reduce', num_steps)
  extra = large.num_bytes - 4 * report.num_params
  assert report.num_params > 10_000 and 0 < extra <= 1024
  # Each parameter and Adam's two moments of it take 12 bytes.
  arguments = train.memory['arguments']
  assert 12 * report.num_params < arguments < 24 * report.num_params + 2**17
  assert train.memory['total'] < 8 * 2**20
  assert all(train.seconds.values()) and train.cycles > 10_000
  assert sum('.py:' in x.source for x in train.slowest) >= 5


@pytest.mark.slow
@_needs_libtpu
def test_the_members_of_a_sweep_compile_for_a_tpu_slice():
  arguments = ['Catch-bsuite', '--config.env.num_envs=16', '--agent=impala']
  target = lowering.parse_target('v3-16')
  compile.set_up_process([target])
  _, report, _ = compile.compile_command(arguments, target, False, 32)
  _, one, _ = compile.compile_command(arguments, target, False, 0)
  assert report.num_steps == 32 * one.num_steps
  # Each of 8 groups of members has 2 devices, which average gradients.
  sizes = [x.num_bytes for x in report.programs['train'].collectives]
  assert max(sizes) > 4 * one.num_params * 32 // 8


@_needs_libtpu
def test_sebulba_compiles_for_a_tpu_slice():
  config = helpers.fields_of('sebulba_cartpole')
  config['unroll_length'], config['env.num_envs'] = 4, 64
  config['sebulba.learner_devices'] = (1, 2)
  config['sebulba.threads_per_actor_device'] = 2
  report, texts = _compile(config, 'v5e-16')
  update, act = report.programs.values()
  # Each of four hosts has one actor device and two learner devices.
  assert (update.num_devices, act.num_devices) == (8, 4)
  large = max(update.collectives, key=lambda x: x.num_bytes)
  extra = large.num_bytes - 4 * report.num_params
  assert 0 < extra <= 1024
  num_steps = config['num_epochs'] * config['num_minibatches']
  assert sum(x.times for x in update.collectives) == num_steps + 1
  assert act.collectives == [] and update.memory['total'] < 8 * 2**20
  assert {k for k, x in act.seconds.items() if x} == {'acting'}
  assert report.overlaps
  assert report.seconds == pytest.approx(
    max(sum(x.seconds.values()) for x in (update, act))
  )


@_needs_libtpu
def test_the_parts_of_an_update_take_as_long_as_the_whole(monkeypatch):
  config = helpers.fields_of('sebulba_cartpole')
  config['unroll_length'], config['env.num_envs'] = 4, 64
  parts, _ = _compile(config, 'v5e-1')
  assert parts.programs.keys() == {'begin', 'steps', 'end', 'act'}
  assert not parts.overlaps
  make_layout = lowering.make_layout

  def whole(*arguments):
    return make_layout(*arguments)._replace(is_sliced=False)

  monkeypatch.setattr(lowering, 'make_layout', whole)
  expected, _ = _compile(config, 'v5e-1')
  assert expected.programs.keys() == {'update', 'act'}
  cycles = [
    sum(x.cycles for k, x in report.programs.items() if k != 'act')
    for report in (parts, expected)
  ]
  assert cycles[0] == pytest.approx(cycles[1], rel=0.1)


@_needs_libtpu
@pytest.mark.slow
def test_the_compiler_says_how_much_memory_is_missing():
  config = helpers.fields_of('anakin_catch', 'impala')
  target = lowering.parse_target('v5e-1')
  config['env.num_envs'] = 2**23
  with spmd.compiling_for('tpu'):
    lowered = lowering.lower(config, lowering.make_machine(target))
    # One call makes all updates until the next record.
    assert (
      lowered.programs['train'].num_updates == config['log.every_updates'] > 1
    )
    with pytest.raises(compile.TooLarge) as caught:
      compile.compile_program(lowered.programs['train'], target.chip)
  needed, limit = caught.value.args
  assert 15 * 2**30 < limit < 16 * 2**30 and 2 * limit < needed < 2**40


@_needs_libtpu
def test_a_tpu_does_not_convert_the_whole_memory():
  """Without a barrier, a product would read a bfloat16 copy of the memory."""
  ring = memory.make_ring(
    jax.ShapeDtypeStruct((3,), jnp.float32),
    capacity=2**16,
    min_steps=1,
    batch_size=64,
  )
  number, index = jnp.zeros((2, 2)), jnp.zeros((1, 2), jnp.int32)
  timestep = TimeStep(jnp.zeros((2, 2, 3)), number, number, number == 0)
  unroll = Trajectory(timestep, number[:1], (), (), index, index)
  state = jax.eval_shape(ring.init, unroll)

  def products(state, keys):
    def add_product(total, key):
      before, after = ring.sample(state, key, {}).trajectory.timestep.obs
      return total + before.T @ after, None

    return jax.lax.scan(add_product, jnp.zeros((3, 3)), keys)[0]

  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
  device, *_ = lowering.make_machine(lowering.parse_target('v5e-1')).devices
  sharding = jax.sharding.SingleDeviceSharding(device)
  with spmd.compiling_for('tpu'):
    program = jax.jit(products, in_shardings=sharding).lower(state, keys)
    text = program.compile().as_text()
  assert 'f32[32768,2,3]' in text and 'bf16[32768,2,3]' not in text


def test_what_does_not_fit_is_refused_with_what_fits(monkeypatch):
  tried = []

  def compile_once(config, target, machine):
    num_envs = config['env.num_envs']
    tried.append(num_envs)
    assert num_envs % 16 == 0  # There are 4 devices and 4 minibatches.
    needed = 2**30 + 2**20 * num_envs
    if needed > 2**34:
      raise compile.TooLarge(needed if num_envs < 2**17 else math.inf, 2**34)
    program = types.SimpleNamespace(memory={'total': needed})
    return types.SimpleNamespace(programs={'train': program}), {}

  monkeypatch.setattr(compile, 'compile_once', compile_once)
  config = helpers.fields_of('anakin_catch')
  config |= {'unroll_length': 1, 'num_devices': 4, 'env.num_envs': 2**18}
  machine = devices.Machine(jax.devices(), 0, 1)
  with spmd.compiling_for('tpu'), pytest.raises(ValueError) as caught:
    compile.compile_for(
      config, lowering.parse_target('v5e-4'), machine, factor=4
    )
  message, _, fits = str(caught.value).rpartition('; ')
  assert message == (
    'config.env.num_envs=65536 does not fit on v5e-4: a core has 16 GiB but '
    'needs more'
  )
  # 15,360 environments of 1 MiB fit beside 1 GiB; this is 15 times 2^10.
  assert fits == '3584 fits'  # For each of 4 devices.
  assert tried == [2**18, 2**17, 2**16, 2**13, 14_336]


@_needs_libtpu
def test_the_command_prints_writes_and_draws(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '80')
  out = tmp_path / 'new'
  arguments = ['CartPole-v1', '--agent=a2c', f'--out={out}', '--scale']
  arguments += ['--target=v5e-4,v4-8', '--config.unroll_length=2']
  assert compile.run(['compile', *arguments]) == 0
  *printed, _ = capsys.readouterr().out.splitlines()
  assert max(map(len, printed)) <= 80 and not any('…' in x for x in printed)
  for name in 'v5e-4', 'v4-8':
    assert f'CartPole-v1, a2c, 256 environments, {name}' in printed
    assert 'HloModule' in (out / f'compile-{name}-train.txt').read_text()
  reports = json.loads((out / 'compile.json').read_text())
  assert [x['target'] for x in reports] == ['v5e-4', 'v4-8']
  assert reports[0]['programs']['train']['collectives']
  assert (out / 'compile.png').read_bytes().startswith(b'\x89PNG')


def test_an_experiment_may_contain_its_environment(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, 'path', sys.path[:])
  text = (_ROOT / 'experiments' / 'anakin_meta.py').read_text()
  path = tmp_path / 'own_corridor.py'
  path.write_text(text.replace('anakin_meta:', 'own_corridor:'))
  argv = ['podrl compile', str(path), '--variant=corridor']
  config = experiments.read_config(parse_command_line(argv, has_task=True))
  assert config['env.name'] == 'own_corridor:corridor'
  assert config['env.path'] == str(tmp_path)  # For other processes.
  assert build.make_env(config).spec.action == Discrete(2)
  monkeypatch.delitem(sys.modules, 'own_corridor')


@pytest.mark.parametrize(
  'arguments,message',
  [
    (['experiments/nothing.py'], 'nothing.py is not an experiment; try'),
    ([], 'no file is not an experiment'),
    ([__file__], 'is not an experiment: it has no get_config'),
    (['{}', '--target='], '--target is empty; try --target=v5e-16'),
    (['{}', '--target=v5f-16'], '--target=v5f-16 is unknown; did you mean v5'),
    (['{}', '--target=v5e-17'], '--target=v5e-17 is unknown; did you mean v5e'),
    (['{}', '--target=2xh100:8'], 'only TPUs have slices; use h100:8'),
    (['{}', '--config.num_envs=4'], 'config.num_envs is not a field; did you'),
    (['{}', '--agent=ppq'], 'agent=ppq is unknown'),
    (['{}', '--colour=red'], '--colour=red is not understood'),
    (['CartPole-v9'], 'no suite has an environment CartPole-v9'),
  ],
)
def test_mistakes_are_told_in_a_line(arguments, message, capsys):
  path = str(_ROOT / 'experiments' / 'anakin_catch.py')
  assert compile.run(['compile', *(x.format(path) for x in arguments)]) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ') and error.count('\n') == 1
  assert message in error
