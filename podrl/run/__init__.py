"""From a configuration to a trained agent."""

from podrl.run.signals import quiet_imports

with quiet_imports():  # Experiments begin with these, which take seconds.
  from podrl.run import train  # noqa: F401
