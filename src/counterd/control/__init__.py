"""Floor 4: configuration, logs, statistics, limits and the life cycle of the process."""
