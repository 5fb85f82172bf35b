"""Floor 3: sockets. The only place that knows asyncio and uvloop."""
