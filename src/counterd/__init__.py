"""counterd: hands out shared, limited things over a network, and takes them back from clients that die."""

from counterd.version import __version__

__all__ = ["__version__"]
