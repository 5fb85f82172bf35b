"""Floor 3 (ARCHITECTURE.md): sockets. No other code in the path of a request uses asyncio."""
