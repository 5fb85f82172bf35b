"""Floor 3: sockets. No other code in the path of a request uses asyncio."""
