"""Writes a run's policy to files that need neither podrl nor its network.

  podrl export RUN [--out=DIR] [--checkpoint=last|best|UPDATES] [--[no]sample]
      [--onnx] [--trust]

By default, DIR is the directory `exported` in the directory RUN. The program
policy.stablehlo runs with JAX on a CPU, an NVIDIA GPU or a TPU, for any number
of environments; policy.json describes its inputs and outputs. The file
parameters.safetensors contains the network's parameters. With --onnx,
policy.onnx is the program for runtimes of ONNX. docs/how-to/export.md
shows how to use these files. If RUN contains several agents, choose one of its
directories, for example RUN/seed_0. A run that somebody else made may need
--trust; see docs/how-to/policy.md.
"""

from collections.abc import Sequence
import contextlib
import os

from absl import flags

from podrl import tools
from podrl.messages import printable
from podrl.records import workdir
from podrl.run import export, policy


def _act(paths: list[str], values: flags.FlagValues) -> None:
  """Loads the policy and writes the files."""
  path = tools.single_path(paths, 'run', 'export RUN')
  loaded = policy.load(path, values.checkpoint, trust=values.trust)
  # An environment may change the current directory.
  out = workdir.absolute(values.out or os.path.join(path, 'exported'))
  tools.make_directory(out)
  files = export.export(loaded, values.sample, values.onnx)
  with tools.writing(out):
    for name, content in files.items():
      with open(os.path.join(out, name), 'wb') as file:
        file.write(content)
    if not values.onnx:  # It would be that of an earlier export.
      with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(out, export.MODEL))
  print(printable(f'written: {out}'))


def run(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code; see `tools.run_command`."""
  values = flags.FlagValues()
  tools.define_checkpoint(values)
  text = 'Draw actions from the policy; by default, take the most probable one.'
  flags.DEFINE_bool('sample', False, text, values)
  text = 'Write policy.onnx too; needs the extra onnx.'
  flags.DEFINE_bool('onnx', False, text, values)
  flags.DEFINE_string('out', '', 'The directory to write.', values)
  return tools.run_command(argv, __doc__, values, _act)
