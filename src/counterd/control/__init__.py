"""Floor 4: configuration, logs, statistics, limits and the life of the process."""
