"""Trains the agent that a configuration describes."""

from podrl.signals import quiet_imports

with quiet_imports():  # Importing `train` takes seconds.
  from podrl.run import train  # noqa: F401
