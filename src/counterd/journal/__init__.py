"""Journals: databases from which a protocol's store is restored. Run as a program, this is the writer process."""
