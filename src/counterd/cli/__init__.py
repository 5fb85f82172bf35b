"""Floor 5 (ARCHITECTURE.md): the commands counterd, counterctl and counterbench."""
