"""The version of counterd. All other code reads it from this file. Floor 0 (ARCHITECTURE.md)."""

__version__ = "0.1.0"
