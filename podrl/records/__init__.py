"""A run as files, and on the terminal."""
