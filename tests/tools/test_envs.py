"""Tests `podrl envs`."""

import os
import subprocess
import sys

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


def test_a_reader_that_ends_first_is_no_mistake():
  reader, writer = os.pipe()
  os.close(reader)
  command = [sys.executable, '-m', 'podrl', 'envs']
  outcome = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
  os.close(writer)
  assert outcome.returncode == 141 and outcome.stderr == b''
