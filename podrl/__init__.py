"""podrl: reinforcement learning on anything from a laptop to a TPU pod."""

__version__ = '0.1.0'
