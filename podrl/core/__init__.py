"""The mathematics of learning, as pure functions."""
