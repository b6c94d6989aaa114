"""Replaces seaborn in the processes that tests start.

gymnax imports seaborn for drawings that podrl does not use. That takes most of
the time in which a short run starts.
"""
