"""The life of processes: the daemon, its children, its end; what the system allows it, and what its manager hears.

Floor 4.
"""
