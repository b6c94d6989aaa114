"""Compiles the experiments for TPU slices: docs/reference/compiled.md.

python docs/compiled.py [TARGET ...]

The script compiles every experiment with each actor-critic agent and variant.
It adds the rows that docs/compiled.csv does not have yet. It needs libtpu, and
takes about a minute for each row.
"""

import csv
import itertools
import pathlib
import re
import sys

import jax

from podrl.agents import ACTOR_CRITICS
from podrl.messages import format_size
from podrl.records.terminal import compact
from podrl.run import lowering
from podrl.tools import compile

_DOCS = pathlib.Path(__file__).parent
_CSV, _PAGE = _DOCS / 'compiled.csv', _DOCS / 'reference' / 'compiled.md'
_BEGIN, _END = '<!-- rows: python docs/compiled.py -->\n', '<!-- end -->\n'
_TARGETS = ('v5e-16', 'v4-8', 'v6e-64')
# Environments per core, where the number of the experiment does not fit.
_NUM_ENVS = {('v5e-16', 'ppo', 'recurrent'): 96}
_FIELDS = (
  'target',
  'experiment',
  'agent',
  'variant',
  'num_envs',
  'memory_bytes',  # Of the program that needs the most memory.
  'all_reduce_bytes',  # Of the largest all-reduce.
  'cycles',  # Of one core in an update; for Sebulba, of a learner core.
  'acting_cycles',  # For Sebulba, of an actor core during an update.
  'steps_per_second',
)
Row = dict[str, str]


def _experiments() -> list[tuple[str, str]]:
  """Returns (name, variant) for each variant of each experiment."""
  found = []
  for path in sorted((_DOCS.parent / 'experiments').glob('*.py')):
    text = path.read_text()
    if 'def get_config(' not in text:
      continue  # It does not train one agent, so there is no run to compile.
    names = re.search(r'--variant=([\w|]+)', text)
    variants = names[1].split('|') if names else ['']
    found += [(path.stem, variant) for variant in variants]
  return found


def _compile(name: str, agent: str, variant: str, target_name: str) -> Row:
  """Compiles one experiment for one target."""
  target = lowering.parse_target(target_name)
  path = str(_DOCS.parent / 'experiments' / f'{name}.py')
  flags = [f'--agent={agent}', f'--variant={variant}']
  if num_envs := _NUM_ENVS.get((target_name, agent, variant)):
    flags.append(f'--config.env.num_envs={num_envs}')
  _, report, _ = compile.compile_command([path, *flags], target)
  programs = report.programs
  main = programs.get('train') or programs['update']
  values = (
    target_name,
    name,
    agent,
    variant,
    report.num_envs,
    max(x.memory['total'] for x in programs.values()),
    max(x.num_bytes for x in main.collectives),
    main.cycles,
    programs['act'].cycles if 'act' in programs else '',
    round(report.steps_per_second),
  )
  return dict(zip(_FIELDS, map(str, values)))


def render(page: str, rows: list[Row]) -> str:
  """Returns the page with a table for each target."""
  parts = []
  for target, group in itertools.groupby(rows, lambda row: row['target']):
    parts.append(
      f'\n## {target}\n\n| experiment | agent | environments | memory per core '
      '| all-reduce, bytes | cycles | steps/s |\n'
      '|---|---|---|---|---|---|---|\n'
    )
    for row in group:
      name = ' '.join(filter(None, (row['experiment'], row['variant'])))
      cycles = [x for x in (row['cycles'], row['acting_cycles']) if x]
      cells = (
        name,
        row['agent'],
        f'{int(row["num_envs"]):,}',
        format_size(int(row['memory_bytes'])),
        f'{int(row["all_reduce_bytes"]):,}',
        ' + '.join(compact(int(x)) for x in cycles),
        compact(int(row['steps_per_second'])),
      )
      parts.append(f'| {" | ".join(cells)} |\n')
  before, _, rest = page.partition(_BEGIN)
  _, _, after = rest.partition(_END)
  return f'{before}{_BEGIN}{"".join(parts)}\n{_END}{after}'


def read() -> list[Row]:
  """Returns the rows of docs/compiled.csv, sorted."""
  if not _CSV.exists():
    return []
  with _CSV.open(newline='') as file:
    rows = list(csv.DictReader(file))
  return sorted(rows, key=lambda row: tuple(row[x] for x in _FIELDS[:4]))


def main(names: list[str]) -> None:
  """Adds the missing rows to docs/compiled.csv, and writes the page."""
  jax.config.update('jax_platforms', 'cpu')
  known = {tuple(row[x] for x in _FIELDS[:4]) for row in read()}
  for target, (name, variant), agent in itertools.product(
    names or _TARGETS, _experiments(), ACTOR_CRITICS
  ):
    if (target, name, agent, variant) in known:
      continue
    row = _compile(name, agent, variant, target)
    print(row, flush=True)
    is_new = not _CSV.exists()
    with _CSV.open('a', newline='') as file:
      writer = csv.DictWriter(file, _FIELDS, lineterminator='\n')
      if is_new:
        writer.writeheader()
      writer.writerow(row)
  _PAGE.write_text(render(_PAGE.read_text(), read()))


if __name__ == '__main__':
  main(sys.argv[1:])
