"""The configuration: its keys, and their values from a file and the command line. Floor 4 (ARCHITECTURE.md)."""
