"""Journals: databases from which a protocol's store is restored. Run as a program, it is the writer process."""
