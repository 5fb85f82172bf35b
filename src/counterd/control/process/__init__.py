"""The life cycle of processes: the daemon, its child processes, drain, limits, privileges, and the service manager.

Floor 4 (ARCHITECTURE.md).
"""
