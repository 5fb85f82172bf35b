"""Floor 5: the commands counterd, counterctl and counterbench."""
