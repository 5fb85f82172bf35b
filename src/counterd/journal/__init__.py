"""Journals: databases from which the store of a protocol is restored.

If this package is run as a program, it is the process that writes a journal.
"""
