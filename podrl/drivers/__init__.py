"""The architectures: they call the agents and learners."""
