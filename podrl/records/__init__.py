"""Writes a run to files and to the terminal, and reads its files."""
