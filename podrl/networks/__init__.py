"""Flax modules, from observations to heads."""
