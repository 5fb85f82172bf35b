"""The version, in the one place that everything reads it from. Floor 0."""

__version__ = "0.1.0"
