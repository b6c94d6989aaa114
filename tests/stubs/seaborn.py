"""Replaces seaborn in the processes that tests start.

gymnax imports seaborn for drawings that podrl does not use. This import
takes most of the time that a short run needs to start.
"""
