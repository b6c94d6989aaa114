"""Records an episode of a run's policy as a GIF or an MP4.

  podrl watch RUN [--out=FILE.gif|FILE.mp4] [--checkpoint=last|best|UPDATES]
      [--episodes=1] [--nogreedy] [--seed=0] [--max_steps=1000] [--fps=0]
      [--trust]

By default, FILE is episode.gif in the directory RUN. If the environment's
library can draw pictures, FILE shows them. Otherwise, it shows the image that
the agent observed, a drawing of a classic control task, or the observed numbers
as bars. The text above each picture shows the return so far and the number of
steps. FILE plays at about the speed of the real task. A run that somebody else
made may need --trust; see docs/how-to/policy.md.
"""

from collections.abc import Sequence
import math
import os

from absl import flags
import jax

from podrl import tools
from podrl.envs import envpool
from podrl.messages import printable
from podrl.records import workdir
from podrl.run import policy, video


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Loads the policy, records the episodes and writes the file."""
  path = tools.single_path(paths, 'run', 'watch RUN')
  # An environment may change the current directory.
  out = workdir.absolute(values.out or os.path.join(path, 'episode.gif'))
  if not out.endswith(video.ENDINGS):
    raise ValueError(f'--out={out} must be a file that ends in .gif or .mp4')
  if os.path.isdir(path):  # Otherwise, `load` raises an error.
    tools.check_out(out)
  envpool.load_opengl()  # Call it before envpool is imported.
  loaded = policy.load(path, values.checkpoint, trust=values.trust)
  episodes, frames, seconds = video.make(
    loaded,
    jax.random.key(values.seed),
    greedy=tools.is_greedy(values, loaded.config),
    num_episodes=values.episodes,
    max_steps=values.max_steps,
    fps=values.fps,
  )
  for episode in episodes:
    print(video.describe(episode))
  with tools.writing(out), workdir.replacing(out) as temporary:
    video.write(temporary, frames, seconds)
  if episodes[0].note:
    print(episodes[0].note)
  size = os.path.getsize(out) / 1e6
  text = f'written: {out}, {len(frames)} frames, {size:.2f} MB'
  print(printable(text))


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = tools.policy_flags(1, 100)
  flags.DEFINE_string('out', '', 'The .gif or .mp4 file to write.', values)
  text = 'The largest number of steps per episode.'
  tools.define_integer('max_steps', 1000, text, 1, 10**9, values)
  text = 'Frames per second; 0 means real speed.'
  flags.DEFINE_float('fps', 0.0, text, 0.0, 50.0, values)
  flags.register_validator('fps', math.isfinite, 'must be finite', values)
  return tools.run_command(argv, __doc__, values, _act)
