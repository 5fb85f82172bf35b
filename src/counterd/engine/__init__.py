"""The parts that stores are made of: tables, chains, timers, permits. Floor 1; no part knows a protocol or a session."""
