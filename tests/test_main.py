"""Tests `podrl COMMAND`, and Ctrl-C while a program starts."""

import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

from podrl import __main__ as cli


def _podrl(monkeypatch, *arguments):
  """Runs the command line and returns its exit code."""
  monkeypatch.setattr(sys, 'argv', ['podrl', *arguments])
  with pytest.raises(SystemExit) as outcome:
    cli.main()
  return outcome.value.code


@pytest.mark.parametrize('arguments', [(), ('-h',), ('--help',), ('help',)])
def test_help_lists_the_commands(arguments, monkeypatch, capsys):
  assert _podrl(monkeypatch, *arguments) == 0
  text = capsys.readouterr().out
  assert all(f'\n  {name} ' in text for name in cli.COMMANDS)


@pytest.mark.parametrize('name', cli.COMMANDS)
def test_each_command_has_help(name, monkeypatch, capsys):
  assert _podrl(monkeypatch, name, '--help') == 0
  text = capsys.readouterr().out
  assert f'\n  podrl {name} ' in text and '--[no]help' in text


def test_help_of_a_command_and_the_version(monkeypatch, capsys):
  assert _podrl(monkeypatch, 'help', 'plot') == 0
  assert '\n  podrl plot ' in capsys.readouterr().out
  assert _podrl(monkeypatch, '--version') == 0
  version = importlib.metadata.version('podrl')
  assert capsys.readouterr().out == f'podrl {version}\n'


@pytest.mark.parametrize(
  'arguments,message',
  [
    ('evaluate x --chekpoint=3', 'evaluate has no flag --chekpoint; did you '),
    ('plot x --ouput=3', 'plot has no flag --ouput; did you mean --out'),
    ('watch x --q', 'watch has no flag --q; podrl watch --help lists its fl'),
    ('sweep CartPole-v1 --axes=3', '--axes=3 is not understood; did you mean '),
    ('balance x.py --aply', '--aply is not understood; did you mean --apply'),
    ('compile x.py --targets=3', '--targets=3 is not understood; did you mean'),
    ('scaling x.py --oout=3', '--oout=3 is not understood; did you mean --out'),
    ('train x --sede=3', '--sede=3 is not understood; did you mean --seed'),
  ],
)
def test_an_unknown_flag_gets_near_names(
  arguments, message, monkeypatch, capsys
):
  assert _podrl(monkeypatch, *arguments.split()) == 2
  said = capsys.readouterr().err
  assert said.startswith(f'error: {message}') and said.count('\n') == 1


def test_an_unknown_command_gets_near_names(monkeypatch, capsys):
  assert _podrl(monkeypatch, 'wacth') == 2
  stderr = capsys.readouterr().err
  assert stderr == 'error: podrl has no command wacth; did you mean watch\n'
  assert _podrl(monkeypatch, 'xyz') == 2
  assert 'plot, watch, play' in capsys.readouterr().err


# Runs a script, and sends Ctrl-C to itself when a given module is imported.
_INTERRUPT = """
import os, runpy, signal, sys

class Finder:
  def find_spec(self, name, path=None, target=None):
    if name == module:
      os.kill(os.getpid(), signal.SIGINT)

# A background job ignores SIGINT at its start.
signal.signal(signal.SIGINT, signal.default_int_handler)
module = sys.argv.pop(1)
del sys.argv[0]
sys.meta_path.insert(0, Finder())
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.parametrize(
  'script,module',
  [
    ('experiments/sebulba_pong.py', 'numpy'),  # numpy raises ImportError.
    ('podrl/__main__.py', 'podrl.tools.plot'),
  ],
)
def test_ctrl_c_during_imports_ends_in_one_line(script, module, tmp_path):
  path = str(pathlib.Path(cli.__file__).parents[1] / script)
  outcome = subprocess.run(
    [sys.executable, '-c', _INTERRUPT, module, path, 'plot', 'nowhere'],
    capture_output=True,
    text=True,
    cwd=tmp_path,
  )
  assert (outcome.returncode, outcome.stdout) == (130, '')
  assert outcome.stderr == 'interrupted\n'
