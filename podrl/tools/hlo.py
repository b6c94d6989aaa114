"""Reads the text of compiled programs: instructions, collectives and times."""

import collections
from collections.abc import Iterator
import dataclasses
import math
import re
from typing import NamedTuple

from podrl.core.learner import CALIBRATE
from podrl.run.lowering import Chip, Program, Target, all_reduce_seconds

# Scopes of the programs, then all other instructions.
PARTS = ('environment', 'acting', 'prepare', 'update')
REST, REDUCE = 'rest', 'all-reduce'
ROWS = (*PARTS, REST, REDUCE)
_COLLECTIVES = (
  'all-reduce',
  'all-gather',
  'all-to-all',
  'reduce-scatter',
  'collective-permute',
  'collective-broadcast',
)


def _find(pattern: str, text: str) -> str:
  """Returns the first group of the first match, or ''."""
  found = re.search(pattern, text)
  return found[1] if found else ''


class Instruction(NamedTuple):
  """An instruction of a compiled program."""

  name: str
  shape: str  # Type of its result, for example f32[8,128]{1,0:T(8,128)}.
  kind: str  # For example fusion or while.
  text: str  # Operands and attributes.

  def called(self, *attributes: str) -> list[str]:
    """Returns the computations that these attributes name, such as `calls`."""
    pattern = rf'\b(?:{"|".join(attributes)})=(\{{.*?\}}|[^,]*)'
    names = ' '.join(re.findall(pattern, self.text))
    return re.findall(r'[\w.-]+', names)


# The computations of a compiled program by name; the first to run is _ENTRY.
Module = dict[str, list[Instruction]]
_ENTRY = 'ENTRY'


def read_module(text: str) -> Module:
  """Parses the text of a compiled program."""
  module: Module = {}
  body: list[Instruction] = []
  for line in text.splitlines():
    if header := re.match(r'(ENTRY )?%?([\w.-]+) \(.*\{$', line):
      body = module[_ENTRY if header[1] else header[2]] = []
    elif found := re.match(
      r'\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)', line
    ):
      body.append(Instruction(*found.groups()))
  return module


def _arrays(shape: str) -> list[tuple[str, int]]:
  """Returns the type and the number of elements of each array in a shape."""
  return [
    (kind, math.prod(int(x) for x in dims.split(',') if x))
    for kind, dims in re.findall(r'\b([a-z]+\d*)\[([\d,]*)\]', shape)
  ]


def num_bytes(shape: str) -> int:
  """Returns the bytes of an array, or of a tuple of arrays, without padding."""
  total = 0
  for kind, size in _arrays(shape):  # Types are f32, pred and so on.
    bits = 8 if kind == 'pred' else int(re.sub(r'\D', '', kind) or 0)
    total += size * bits // 8
  return total


def num_trips(loop: Instruction, module: Module, default: int) -> int:
  """Returns how often a loop runs, or `default` if that is not a constant."""
  if known := _find(r'known_trip_count.{,5}n.{,5}?(\d+)', loop.text):
    return int(known)
  names, found = loop.called('condition'), []
  for name in names:
    for instruction in module[name]:
      names += instruction.called('calls')
      if instruction.kind == 'constant' and 's32[]' in instruction.shape:
        found.append(int(instruction.text.split(')')[0]))
  return max(found, default=default)


def part_of(instruction: Instruction) -> str:
  """Returns the innermost of `PARTS` in an instruction's name, or ''."""
  # A transformation makes names such as vmap(acting); jit(update) is a program.
  words = [
    x.rstrip(')').split('(')[-1]
    for x in _find(r'op_name="([^"]*)"', instruction.text).split('/')
    if not x.startswith('jit(')
  ]
  return next((x for x in reversed(words) if x in PARTS), '')


def sources(text: str) -> dict[str, str]:
  """Returns FILE:LINE of each stack frame, from the tables before a program."""

  def section(name: str, pattern: str) -> dict[str, tuple[str, ...]]:
    table = text.partition(f'\n{name}\n')[2].partition('\n\n')[0]
    return {
      x: rest for x, *rest in re.findall(rf'^(\d+) {pattern}', table, re.M)
    }

  files = section('FileNames', '"(.*)"')
  locations = section('FileLocations', r'.*file_name_id=(\d+).*\bline=(\d+)')
  frames = section('StackFrames', r'.*file_location_id=(\d+)()')
  found = {}
  for frame, (location, _) in frames.items():
    file, line = locations.get(location, ('', ''))
    path = ''.join(files.get(file, ''))
    path = re.sub(r'.*/(?=podrl/)|.*/site-packages/', '', path)
    found[frame] = f'{path}:{line}'
  return found


class Execution(NamedTuple):
  """An instruction, how often one call of the program runs it, and its part."""

  instruction: Instruction
  computation: str
  times: int
  part: str

  @property
  def cycles(self) -> int:
    """The compiler's estimate for all `times` together."""
    found = _find(r'"estimated_cycles":"(\d+)"', self.instruction.text)
    return self.times * int(found or 0)


def walk(
  module: Module,
  num_updates: int = 1,
  computation: str = _ENTRY,
  times: int = 1,
  part: str = REST,
) -> Iterator[Execution]:
  """Yields the instructions that run.

  Only the longest branch of a conditional counts, or the shortest one if the
  longest runs only in the first update. If the number of iterations of a loop
  is not a constant, the loop counts once. But the outermost loop is Anakin's
  loop over updates, and counts `num_updates` times.
  """
  for instruction in module[computation]:
    own = part_of(instruction) or part
    yield Execution(instruction, computation, times, own)
    if instruction.kind == 'while':
      trips = times * num_trips(instruction, module, num_updates)
      for name in instruction.called('condition', 'body'):
        yield from walk(module, 1, name, trips, own)
    elif instruction.kind == 'conditional':
      names = instruction.called(
        'branch_computations', 'true_computation', 'false_computation'
      )
      branches = [list(walk(module, 1, name, times, own)) for name in names]
      choose = min if f'/{CALIBRATE}/' in instruction.text else max
      yield from choose(branches, key=lambda runs: sum(x.cycles for x in runs))
    elif instruction.kind in ('call', 'async-start'):
      for name in instruction.called('to_apply', 'calls'):
        yield from walk(module, num_updates, name, times, own)


def _operands(instruction: Instruction, body: list[Instruction]) -> list[str]:
  """Returns the shapes of an instruction's operands; `body` contains it."""
  shapes = {x.name: x.shape for x in body}
  names = re.findall(r'%([\w.-]+)', instruction.text.split('), ')[0])
  return [shapes.get(name, '') for name in names]


_FREE = (
  'parameter constant tuple get-tuple-element bitcast while conditional call '
  'after-all iota partition-id replica-id'
).split()
_START_SECONDS = 3e-6  # A GPU needs about this time to start a kernel.


def roofline_seconds(run: Execution, module: Module, chip: Chip) -> float:
  """Estimates an instruction's time on a GPU, from its bytes and its FLOPs.

  A product of matrices `[M, K]` and `[K, N]` has 2 M K N FLOPs. This is twice
  the square root of (M K) (K N) (M N), where each factor is the number of
  elements of one matrix. For a convolution, the root has one more factor: the
  number of elements of the convolution's window.
  """
  instruction = run.instruction
  if instruction.kind in _FREE or instruction.kind.startswith(_COLLECTIVES):
    return 0.0
  body = module[run.computation]
  read = sum(map(num_bytes, _operands(instruction, body)))
  seconds = (read + num_bytes(instruction.shape)) / chip.memory_bandwidth / 1e9
  inside = [(instruction, body)]
  for name in instruction.called('calls'):
    inside += [(x, module[name]) for x in module.get(name, ())]
  flops = 0.0
  for x, body in inside:
    if x.kind in ('dot', 'convolution') or '="__cu' in x.text:  # Or a library.
      shapes = [x.shape, *_operands(x, body)[:2]]
      sizes = [_arrays(shape)[0][1] for shape in shapes if _arrays(shape)]
      window = _find(r'window=\{size=([\dx]+)', x.text)
      sizes += map(int, window.split('x')) if window else []
      flops += 2 * math.sqrt(math.prod(sizes))
  # JAX multiplies float32 as TF32, at half the rate of bfloat16.
  is_float32 = 'f32[' in instruction.shape
  seconds = max(seconds, flops * (1 + is_float32) / chip.peak / 1e12)
  return run.times * max(seconds, _START_SECONDS)


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective, and how often it runs in an update."""

  kind: str
  num_bytes: int
  times: float


@dataclasses.dataclass(frozen=True)
class Costly:
  """An instruction that takes much of the time of an update."""

  share: float
  cycles: float  # 0 on GPUs.
  part: str
  kind: str
  shape: str
  source: str  # FILE:LINE, or empty.


def analyse(
  text: str, program: Program, target: Target, default: str = REST
) -> tuple[
  list[Collective], int, dict[str, float], list[Costly], dict[str, float]
]:
  """Returns what an update consists of.

  These are its collectives, its cycles, its seconds by part, its slowest
  instructions, and for a GPU its kernels by part. Each copy counts as a kernel.
  `default` is the part of instructions without a scope.
  """
  module, chip = read_module(text), target.chip
  lines_of = sources(text)
  collectives, rows, cycles = [], [], 0
  seconds = dict.fromkeys(ROWS, 0.0)
  kernels: dict[str, float] = collections.defaultdict(float)

  def per_update(value: float) -> float:
    return value * program.calls / program.num_updates

  for run in walk(module, program.num_updates, part=default):
    kind = run.instruction.kind.removesuffix('-start')
    if kind in _COLLECTIVES:
      size, times = num_bytes(run.instruction.shape), per_update(run.times)
      collectives.append(Collective(kind, size, times))
      one = all_reduce_seconds(size, program.num_devices, chip)
      seconds[REDUCE] += times * one
      continue
    if chip.clock:
      cycles += run.cycles
      spent = per_update(run.cycles) / chip.clock / 1e9
    else:
      spent = per_update(roofline_seconds(run, module, chip))
      if spent:
        kernels[run.part] += per_update(run.times)
    seconds[run.part] += spent
    rows.append((spent, run))
  total = sum(spent for spent, _ in rows) or 1.0
  rows.sort(key=lambda row: -row[0])
  slowest = [
    Costly(
      spent / total,
      per_update(x.cycles),
      x.part,
      x.instruction.kind,
      x.instruction.shape.split('{')[0].lstrip('('),
      lines_of.get(_find(r'stack_frame_id=(\d+)', x.instruction.text), ''),
    )
    for spent, x in rows[:10]
  ]
  cycles = round(per_update(cycles))
  return collectives, cycles, seconds, slowest, dict(kernels)
