"""Floor 5: the commands."""
