"""counterd: hands out shared, limited things over a network, and takes them back from clients that die."""

from typing import TYPE_CHECKING

from counterd.version import __version__

__all__ = ["__version__"]

if not TYPE_CHECKING:  # a type checker would believe that the module has every name

    def __getattr__(name: str) -> object:
        if name in ("Client", "AsyncClient"):
            raise ImportError(f"counterd has no {name}: write `from counterd.client import {name}`")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
