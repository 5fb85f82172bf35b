"""Floor 3: sockets. The only code in the path of a request that uses asyncio."""
