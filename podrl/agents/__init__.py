"""Agents: learning algorithms as pure functions."""
