"""Adapters from environment libraries to podrl's types."""
