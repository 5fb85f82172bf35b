"""Floor 3: sockets. The only place on the way of a request that knows asyncio."""
