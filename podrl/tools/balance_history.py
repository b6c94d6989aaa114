"""Draws what autotune did: active actors and speed over a run's wall time."""

import os
from typing import Any

from podrl.records import workdir

_COLORS = {
  'rate': '#1f5fa8',
  'actors': '#5a5a5a',
  True: '#2f8f4e',
  False: '#c44e00',
}


def read_decisions(path: str) -> list[dict[str, Any]]:
  """The decisions of a run, in their order; a line without end is left out.

  Args:
    path: of the run's directory.

  Returns:
    `tuner.Decision`'s fields, with `wall_seconds`, `env_steps` and
    `num_updates` of when it was made.

  Raises:
    ValueError: if the run was not tuned, or a line is damaged.
  """
  if not os.path.exists(os.path.join(path, 'decisions.jsonl')):
    raise ValueError(
      f'{path} has no decisions.jsonl: it is gone, or the run '
      'had no --config.sebulba.autotune=True'
    )
  return workdir.read_records(path, 'decisions.jsonl')


def draw(run_directory: str, path: str) -> None:
  """Draws a run's active actors and steps a second, its decisions marked.

  Args:
    run_directory: of the run, which may be under way.
    path: of the picture, .png or .svg.

  Raises:
    ValueError: if the run was not tuned, has no record yet or is damaged.
  """
  decisions = read_decisions(run_directory)
  records = [
    r for r in workdir.read_records(run_directory) if 'num_actors' in r
  ]
  if not records:
    raise ValueError(f'{run_directory} has no record yet')
  import matplotlib  # Takes a second.

  matplotlib.use('Agg')
  from matplotlib import pyplot
  from matplotlib.ticker import EngFormatter, MaxNLocator

  figure, (rates, actors) = pyplot.subplots(
    2, sharex=True, figsize=(6.4, 4.6), dpi=110
  )
  seconds = [r['wall_seconds'] for r in records]
  rates.plot(
    seconds,
    [r['steps_per_second'] for r in records],
    lw=1.5,
    color=_COLORS['rate'],
  )
  rates.set_ylabel('steps/s')
  rates.set_ylim(0, None)
  rates.yaxis.set_major_formatter(EngFormatter(sep=''))
  actors.step(
    seconds,
    [r['num_actors'] for r in records],
    where='pre',
    lw=1.5,
    color=_COLORS['actors'],
    label='active, at each record',
  )
  for is_kept, marker, label in (
    (True, '^', 'tried and kept'),
    (False, 'x', 'tried and undone'),
  ):
    found = [d for d in decisions if d['is_kept'] == is_kept]
    actors.plot(
      [d['wall_seconds'] for d in found],
      [d['tried'] for d in found],
      marker,
      ms=7,
      color=_COLORS[is_kept],
      label=label,
      zorder=3,
    )
  for before, after in zip(decisions, decisions[1:]):
    if after['num_drifts'] > before['num_drifts']:
      rates.axvline(after['wall_seconds'], lw=0.8, ls=':', color='0.5')
      rates.annotate(
        'searched anew',
        (after['wall_seconds'], 0),
        (3, 4),
        textcoords='offset points',
        fontsize=8,
        color='0.4',
      )
  actors.set_ylabel('actors')
  actors.set_ylim(0, None)
  actors.yaxis.set_major_locator(MaxNLocator(integer=True))
  actors.set_xlabel('wall time (s)')
  actors.legend(
    frameon=False,
    fontsize=8,
    ncol=3,
    loc='upper left',
    bbox_to_anchor=(0, -0.25),
  )
  for axes in rates, actors:
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_xlim(0, None)
  figure.tight_layout()
  figure.savefig(path, bbox_inches='tight')
  pyplot.close(figure)
