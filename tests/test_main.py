"""`podrl COMMAND`."""

import sys

import pytest

from podrl import __main__ as cli


def _podrl(monkeypatch, *arguments):
  """Runs the command line and returns its exit code."""
  monkeypatch.setattr(sys, 'argv', ['podrl', *arguments])
  with pytest.raises(SystemExit) as outcome:
    cli.main()
  return outcome.value.code


@pytest.mark.parametrize('arguments', [(), ('-h',), ('--help',)])
def test_help_lists_the_commands(arguments, monkeypatch, capsys):
  assert _podrl(monkeypatch, *arguments) == 0
  text = capsys.readouterr().out
  assert all(f'\n  {name} ' in text for name in cli.COMMANDS)


@pytest.mark.parametrize('name', cli.COMMANDS)
def test_each_command_has_help(name, monkeypatch, capsys):
  assert _podrl(monkeypatch, name, '--help') == 0
  text = capsys.readouterr().out
  assert f'\n  podrl {name} ' in text and '--[no]help' in text


def test_an_unknown_command_gets_near_names(monkeypatch, capsys):
  assert _podrl(monkeypatch, 'wacth') == 2
  stderr = capsys.readouterr().err
  assert stderr == 'error: podrl has no command wacth; try watch\n'
  assert _podrl(monkeypatch, 'xyz') == 2
  assert 'plot, watch, evaluate' in capsys.readouterr().err
