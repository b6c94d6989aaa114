"""Flax modules that map observations to a policy head and a value."""
