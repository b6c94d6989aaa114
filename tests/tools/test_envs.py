"""Tests `podrl envs`."""

from podrl.tools import envs


def test_names_that_contain_a_word_are_listed(capsys):
  assert envs.run(['envs', 'pong-misc']) == 0
  said = capsys.readouterr().out
  assert 'gymnax (Anakin): 1\n  gymnax:Pong-misc\nenvpool (Sebulba): 0' in said


def test_an_unknown_word_gets_near_names(capsys):
  assert envs.run(['envs', 'CartPloe']) == 2
  said = capsys.readouterr().err
  assert said.startswith('error: no name contains CartPloe; similar names: ')
  assert 'gymnax:CartPole-v1' in said
