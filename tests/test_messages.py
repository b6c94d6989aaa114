"""Tests what a message says of an error in the user's code."""

import pytest

from podrl.messages import EnvironmentFailed, place_of, useful_traceback


def _look_up():
  return {}['speed']


def _step():
  return _look_up()


def _translated():
  try:
    _look_up()
  except KeyError as error:
    raise RuntimeError('no speed') from error


def _caught(function, *args):
  with pytest.raises(BaseException) as found:
    function(*args)
  error = found.value
  # Leave out the frames of pytest and of this function.
  return error.with_traceback(error.__traceback__.tb_next)


def _line(function):
  return function.__code__.co_firstlineno + 1


def test_the_place_is_the_innermost_line_of_the_user():
  error = _caught(_step)
  assert place_of(error) == f'{__file__}:{_line(_look_up)}, in _look_up'
  # The code of the library that raises does not count.
  error = _caught(lambda: pytest.raises(3))
  assert place_of(error).endswith('in <lambda>')
  assert place_of(_caught(pytest.raises, 3)) == ''


def test_a_traceback_begins_in_the_users_code():
  text = useful_traceback(_caught(_step))
  assert text.count('File') == 2 and text.endswith("KeyError: 'speed'\n")
  assert useful_traceback(_caught(_look_up)) == ''  # The place says it all.
  text = useful_traceback(_caught(_translated))
  assert 'direct cause' in text and text.endswith('RuntimeError: no speed\n')
  text = useful_traceback(_caught(pytest.raises, 3))  # No code of the user.
  assert text.startswith('Traceback') and 'site-packages' in text


def test_the_traceback_of_an_environment_is_that_of_its_error():
  error = EnvironmentFailed("environment X failed in step: KeyError: 'speed'")
  error.__cause__ = _caught(_step)
  assert useful_traceback(error) == useful_traceback(error.__cause__) != ''
  error = EnvironmentFailed('X returned None in step 3; it must be a number')
  error.__cause__ = ValueError(str(error))  # A check of podrl.
  assert useful_traceback(error) == ''
