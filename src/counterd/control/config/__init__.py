"""The configuration: which keys there are, and their values, from a file and the command line. Floor 4."""
