"""Tests `podrl play` for one player; tests/envs has a game for two."""

import io
import time

import numpy as np
import pytest
from rich.console import Console
import test_watch

from podrl.tools import play


def test_a_character_shows_two_pixels():
  picture = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
  out = io.StringIO()
  console = Console(file=out, force_terminal=True, color_system='truecolor')
  console.print(play.to_segments(picture, 2, 9), end='')

  def cell(upper, lower):
    colors = ';'.join(str(x) for x in picture[upper])
    under = ';'.join(str(x) for x in picture[lower])
    return f'\x1b[38;2;{colors};48;2;{under}m\u2580\x1b[0m'

  lines = [cell((i, 0), (i + 1, 0)) + cell((i, 1), (i + 1, 1)) for i in (0, 2)]
  assert out.getvalue() == '\n'.join([*lines, ''])


@pytest.mark.parametrize('columns,rows', [(80, 10), (20, 40), (1, 1)])
def test_a_picture_fits_the_terminal(columns, rows):
  picture = np.zeros((200, 300, 3), np.uint8)
  segments = play.to_segments(picture, columns, rows).segments
  text = ''.join(x.text for x in segments)
  lines = text.splitlines()
  assert len(lines) <= rows and {len(x) for x in lines} == {len(lines[0])}
  assert 0 < len(lines[0]) <= columns
  if columns == 80:  # A pixel is a square: 2 x 10 pixels are 30 pixels wide.
    assert (len(lines), len(lines[0])) == (10, 30)


@pytest.fixture
def run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'r').mkdir()
  loaded = test_watch._untrained(test_watch._config('Catch-v0', 'envpool'))
  monkeypatch.setattr(play.policy, 'load', lambda *_, trust: loaded)
  monkeypatch.setattr(time, 'sleep', lambda seconds: None)
  return lambda *arguments: play.run(['play', *arguments])


def test_a_terminal_shows_an_episode(run, monkeypatch, capsys):
  monkeypatch.setenv('FORCE_COLOR', '1')
  assert run('r', '--episodes=2') == 0
  text = capsys.readouterr().out
  # Catch-v0 has nine steps, and its return is 1 or -1 at the end.
  for step in range(9):
    assert text.count(f'return 0, step {step} ') == 2
  assert text.count(', 9 steps\n') == 2
  assert text.endswith(('return 1, 9 steps\n', 'return -1, 9 steps\n'))

  def interrupt(seconds):
    raise KeyboardInterrupt

  monkeypatch.setattr(time, 'sleep', interrupt)
  assert run('r') == 130
  outcome = capsys.readouterr()
  assert outcome.out.endswith('\x1b[?1049l')  # The usual screen is back.
  assert outcome.err == 'interrupted\n'


def test_a_file_is_no_terminal(run, capsys):
  assert run('r') == 2
  message = 'the output is not a terminal; podrl watch r writes a GIF'
  assert capsys.readouterr().err == f'error: {message}\n'
