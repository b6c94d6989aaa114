"""How anything learns, as pure functions."""
