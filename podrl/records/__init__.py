"""Writes a run's files, reads them, and shows the run in the terminal."""
