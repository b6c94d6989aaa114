"""Trains the agent that a configuration describes."""

from podrl.run.signals import quiet_imports

with quiet_imports():  # Experiments import this first, which takes seconds.
  from podrl.run import train  # noqa: F401
