"""What a pod would give: predicts updates on 1 ... 2,048 cores.

  podrl scaling EXPERIMENT [--chip=local] [--agent=ppo] [--variant=]
      [--out=DIR] [--config.FIELD=VALUE ...]

EXPERIMENT is a file such as experiments/anakin_breakout.py. Scaling is weak: each
core has `config.env.num_envs` environments. A core is what JAX calls a device.

  update(n) = update(1) + optimiser steps x all-reduce(n) + waiting(n)

update(1) is measured here, on one core of the CPU; from two cores on, with the
same work on another core, because cores share caches and memory. For another
chip it is scaled by the ratio of rooflines (FLOPs and bytes of the compiled
program), and at least so many seconds an operation. waiting(n) is for the
slowest of n: the expected maximum of n normals. Here there is one at each of an
update's k all-reduces, with the deviation of the measured updates over sqrt(k), as if
what slows a core came and went between them; of another chip only the host's
environments wait so, once in an update. --chip=local links cores in a ring, as two
processes here are linked. The table's seconds are of one update: all, its
all-reduces, its waiting.
"""

from collections.abc import Sequence
import os

from absl import flags
import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from podrl import tools
from podrl.drivers import spmd
from podrl.records.terminal import compact
from podrl.run.check import check
from podrl.run.config import check_choice, is_sebulba
from podrl.tools import measure
from podrl.tools.chips import CHIPS
from podrl.tools.prediction import Prediction, predict, single
from podrl.tools.program import read_work

# Steps or frames per second, by cores. Hessel et al. 2021, arXiv:2104.06272:
# Anakin on 8 cores; Sebulba on 8 and 2,048. InstaDeep on TPU v4-8 ... v4-128.
_ANAKIN = {8: 5e6}
_SEBULBA = {8: 0.2e6, 2048: 43e6}
_INSTADEEP = {8: 0.31e6, 16: 0.60e6, 32: 1.22e6, 64: 2.41e6, 128: 4.79e6}


def _relative(rates: dict[int, float]) -> dict[int, float]:
  """Rates per core, over that of the fewest cores."""
  first = min(rates)
  return {n: rate / n / (rates[first] / first) for n, rate in rates.items()}


def _time(seconds: float) -> str:
  """Seconds in few characters: 0.0123 is 12.3m."""
  for unit, size in (('', 1.0), ('m', 1e-3)):
    if seconds >= size:
      return f'{seconds / size:.3g}{unit}'
  return f'{seconds * 1e6:.3g}u' if seconds > 1e-9 else '0'


def table(rows: Sequence[Prediction], title: str) -> Table:
  """Predictions, in seconds (m and u are milli and micro), and published rates."""
  lines = Table(
    title=title,
    box=box.SIMPLE_HEAD,
    padding=(0, 1, 0, 0),
    show_edge=False,
    caption=('update, reduce, wait: seconds (m: milli, u: micro)'),
  )
  for name in ('cores', 'update', 'reduce', 'wait', 'steps/s', 'eff.'):
    lines.add_column(name, justify='right', no_wrap=True)
  lines.add_column('limit', no_wrap=True)
  for name in ('Podracer', 'InstaDeep'):
    lines.add_column(name, justify='right', no_wrap=True)
  for row in rows:
    n = row.num_cores
    podracer = [
      f'{name} {compact(rates[n])}'
      for name, rates in (('A', _ANAKIN), ('S', _SEBULBA))
      if n in rates
    ]
    lines.add_row(
      f'{n:,}',
      *(_time(x) for x in (row.seconds, row.all_reduce, row.waiting)),
      compact(row.steps_per_second),
      f'{row.efficiency:.0%}',
      row.limit,
      '\n'.join(podracer),
      compact(_INSTADEEP[n]) if n in _INSTADEEP else '',
    )
  return lines


def verdict(rows: Sequence[Prediction]) -> str:
  """Where the predictions and the published rates agree."""
  found = {row.num_cores: row.efficiency for row in rows}

  def compare(who: str, rates: dict[int, float]) -> str:
    last = max(rates)
    said, own = _relative(rates)[last], found[last] / found[8]
    agree = 'agree' if abs(own - said) <= 0.1 else 'differ'
    return (
      f'8 to {last:,} cores: {who} keeps {said:.1%} of its rate per core, '
      f'this model {own:.1%}: they {agree}.'
    )

  return '\n'.join(
    (
      compare('InstaDeep', _INSTADEEP),
      compare("Podracer's Sebulba", _SEBULBA),
      "A and S are Podracer's Anakin (close to linear from 16 to 128 cores) and "
      'Sebulba; other networks, environments and chips than these.',
    )
  )


def draw(rows: Sequence[Prediction], title: str, path: str) -> None:
  """Draws rates and efficiency into a PNG file."""
  import matplotlib  # Takes a second.

  matplotlib.use('Agg')
  from matplotlib import pyplot
  from matplotlib.ticker import EngFormatter, PercentFormatter, ScalarFormatter

  cores = [row.num_cores for row in rows]
  found = {row.num_cores: row.efficiency for row in rows}
  figure, (rates, shares) = pyplot.subplots(2, figsize=(6.4, 7.2), dpi=110)
  rates.plot(
    cores,
    [row.steps_per_second for row in rows],
    '-o',
    ms=4,
    color='#1f5fa8',
    label='predicted',
  )
  rates.plot(
    cores,
    [n * rows[0].steps_per_second for n in cores],
    ':',
    color='#5a5a5a',
    label='linear',
  )
  shares.plot(
    cores,
    [row.efficiency for row in rows],
    '-o',
    ms=4,
    color='#1f5fa8',
    label='predicted',
  )
  for name, points, style in (
    ("Podracer's Anakin", _ANAKIN, 's'),
    ("Podracer's Sebulba", _SEBULBA, 'D'),
    ('InstaDeep', _INSTADEEP, '^'),
  ):
    rates.plot(
      list(points),
      list(points.values()),
      style,
      color='#c44e00',
      mfc='none',
      label=name,
    )
    if len(points) > 1:
      relative = _relative(points)
      shares.plot(
        list(relative),
        [x * found[8] for x in relative.values()],
        style,
        color='#c44e00',
        mfc='none',
        label=f'{name}, set equal at 8 cores',
      )
  rates.set_yscale('log')
  rates.yaxis.set_major_formatter(EngFormatter(sep=''))
  rates.set_ylabel('steps or frames per second')
  rates.set_title(title, fontsize=10)
  shares.yaxis.set_major_formatter(PercentFormatter(1.0))
  shares.set_ylim(0, 1.1)
  shares.set_ylabel('efficiency')
  for axes in (rates, shares):
    axes.set_xscale('log', base=2)
    axes.set_xticks(cores)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.tick_params(axis='x', labelsize=8)
    axes.set_xlabel('cores')
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  figure.savefig(path)
  pyplot.close(figure)


def _act(
  overrides: Sequence[str], paths: list[str], values: flags.FlagValues
) -> None:
  """Reads, measures, predicts, prints, draws."""
  path = tools.single_path(
    paths, 'experiment', 'scaling experiments/anakin_breakout.py'
  )
  check_choice('--chip', values.chip, ('local', *CHIPS))
  config = tools.read_config(path, overrides, values)
  check(config)
  tools.make_directory(values.out)
  jax.config.update('jax_platforms', 'cpu')
  if jax.config.jax_num_cpu_devices < 1:
    spmd.set_num_cpu_devices(2)  # One core's all-reduce might be left out.
  console = Console(highlight=False, markup=False)
  act, learn = read_work(config)
  console.print('measuring on this machine: about a minute', style='dim')
  local = measure.measure_chip(values.repeats)
  times = measure.measure_updates(config, values.repeats)
  chip = CHIPS.get(values.chip, local)
  overlaps = is_sebulba(config) and config.sebulba.max_lag > 0
  base = single(times, act, learn, local, chip, config.network.dtype, overlaps)
  rows = predict(base, learn, chip, config.unroll_length * config.env.num_envs)
  title = (
    f'{config.env.name}, {config.agent.name}, {config.env.num_envs} '
    f'environments a core, {values.chip}'
  )
  console.print(
    f'an update: {(act.flops + learn.flops) / 1e9:.3g} GFLOP, '
    f'{(act.num_bytes + learn.num_bytes) / 1e9:.3g} GB; '
    f'{learn.num_all_reduces} all-reduces of {learn.all_reduce_bytes:,} bytes\n'
    f'a core here: {local.peak_float32 / 1e9:.3g} GFLOP/s, '
    f'{local.memory_bandwidth / 1e9:.3g} GB/s\nan update here: '
    f'{np.median(times.alone):.4g} s; beside a busy core '
    f'{np.median(times.busy):.4g} s\nan all-reduce of two processes here: '
    f'{2e6 * local.hop_seconds:.0f} us + bytes / '
    f'{local.link_bandwidth / 1e9:.3g} GB/s'
  )
  console.print(table(rows, title))
  console.print(verdict(rows))
  path = os.path.join(values.out, 'scaling.png')
  draw(rows, title, path)
  console.print(f'drawn: {path}', soft_wrap=True)


def run(argv: Sequence[str]) -> int:
  """The command; returns its exit code, as `tools.run_command`."""
  values = flags.FlagValues()
  flags.DEFINE_string(
    'chip', 'local', ', '.join(('local', *CHIPS)), flag_values=values
  )
  flags.DEFINE_string('out', '.', 'where scaling.png goes.', flag_values=values)
  flags.DEFINE_integer(
    'repeats', 3, 'of each measurement.', 1, flag_values=values
  )
  return tools.run_experiment_command(argv, __doc__, values, _act)
