"""counterd: hands out shared, limited things over the wire, and always gets them back."""

from counterd.version import __version__

__all__ = ["__version__"]
