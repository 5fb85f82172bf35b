"""The same scenarios for every protocol's clients, in both shapes.

thing.py says how a protocol describes what its clients take; counter.py and others do that, one file for each protocol.
A scenario is written once, in its test file, for all of them.
"""
