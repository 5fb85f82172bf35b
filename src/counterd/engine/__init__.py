"""The parts that stores are made of: tables, chains, timers, permits.

Floor 1 (ARCHITECTURE.md). These parts know no protocol and no session.
"""
