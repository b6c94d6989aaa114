"""What a search found, for people: a table and a picture."""

from rich import box
from rich.table import Table

from podrl.records.terminal import compact
from podrl.tools.balance_model import limit
from podrl.tools.balance_plan import Plan, best_of_each
from podrl.tools.balance_search import Found

_DEVICES = (
  ('cores', 'busy_cores'),
  ('actor devices', 'busy_actor_devices'),
  ('learner devices', 'busy_learner_devices'),
)


def table(found: Found, count: int, frame_skip: int = 1) -> Table:
  """The best few plans, and the configured one, in 80 columns.

  Args:
    found: by the search.
    count: so many of the best.
    frame_skip: raw frames in a step. Of a plan that was not run the energy is
      that of its rate at the power that the configured one took.
  """
  watts = found.runs[found.base].record.get('joules_per_second')
  lines = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
  for name in (
    '',
    'actors',
    'envs',
    'T',
    'thr.',
    'steps/s',
    'run',
    'cores',
    'act',
    'learn',
    'lag',
  ):
    lines.add_column(name, justify='right', no_wrap=True)
  if watts:
    lines.add_column('f/J', justify='right', no_wrap=True)
  lines.add_column('limit', no_wrap=True)

  def add(name: str, plan: Plan) -> None:
    x, run = found.predictions[plan], found.runs.get(plan)
    lines.add_row(
      name,
      str(plan.num_actors),
      str(plan.num_envs),
      str(plan.unroll_length),
      str(plan.env_threads),
      compact(x.steps_per_second),
      compact(run.steps_per_second) if run else '',
      *(f'{getattr(x, field):.0%}' for _, field in _DEVICES),
      f'{(run or x).lag:.2g}',
      *(
        [
          compact(
            (run or x).steps_per_second
            * frame_skip
            / (run.record['joules_per_second'] if run else watts)
          )
        ]
        if watts
        else []
      ),
      limit(plan, found.costs),
    )

  for i, plan in enumerate(found.ranking[:count]):
    add(str(i + 1), plan)
  if found.base not in found.ranking[:count]:
    add('now', found.base)
  return lines


def draw(found: Found, title: str, path: str) -> None:
  """Draws rates and utilisation against the number of actors, a PNG file."""
  import matplotlib  # Takes a second.

  matplotlib.use('Agg')
  from matplotlib import pyplot
  from matplotlib.ticker import EngFormatter, PercentFormatter, ScalarFormatter

  best = best_of_each(
    found.ranking,
    {plan: x.steps_per_second for plan, x in found.predictions.items()},
  )
  counts = list(best)
  predicted = [found.predictions[plan] for plan in best.values()]
  figure, (rates, shares) = pyplot.subplots(2, figsize=(6.4, 6.4), dpi=110)
  rates.plot(
    counts,
    [x.steps_per_second for x in predicted],
    '-',
    lw=1.5,
    color='#1f5fa8',
    label='predicted, the best of so many actors',
  )
  first = found.ranking[0]
  for plans, style, size, label in (
    (
      [p for p in found.runs if p not in (found.base, first)],
      'o',
      5,
      'measured',
    ),
    (
      [p for p in found.runs if p == found.base],
      's',
      7,
      'measured, as configured',
    ),
    (
      [p for p in found.runs if p == first != found.base],
      '*',
      12,
      'measured, the plan',
    ),
  ):
    if plans:
      rates.plot(
        [p.num_actors for p in plans],
        [found.runs[p].steps_per_second for p in plans],
        style,
        ms=size,
        color='#c44e00',
        mfc='none',
        label=label,
      )
  rates.set_ylim(
    0,
    1.15
    * max(
      [x.steps_per_second for x in predicted]
      + [x.steps_per_second for x in found.runs.values()]
    ),
  )
  rates.yaxis.set_major_formatter(EngFormatter(sep=''))
  rates.set_ylabel('steps learnt per second')
  rates.set_title(title, fontsize=10)
  for (name, field), style, color in zip(
    _DEVICES, ('-o', '--^', ':s'), ('#1f5fa8', '#3d7a3a', '#c44e00')
  ):
    shares.plot(
      counts,
      [getattr(x, field) for x in predicted],
      style,
      ms=4,
      color=color,
      label=name,
    )
  shares.plot(
    [p.num_actors for p in found.runs],
    [x.busy_cores for x in found.runs.values()],
    'o',
    ms=5,
    color='#1f5fa8',
    mfc='none',
    label='cores, measured',
  )
  shares.yaxis.set_major_formatter(PercentFormatter(1.0))
  shares.set_ylim(0, 1.05)
  shares.set_ylabel('busy')
  for axes in (rates, shares):
    axes.set_xscale('log', base=2)
    axes.set_xticks(counts)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel('actors')
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(
      frameon=False,
      fontsize=8,
      ncols=2,
      loc='upper center',
      bbox_to_anchor=(0.5, -0.18),
    )
  figure.tight_layout()
  figure.savefig(path)
  pyplot.close(figure)
