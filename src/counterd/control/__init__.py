"""Floor 4 (ARCHITECTURE.md): configuration, logs, statistics, limits and the life cycle of the process."""
