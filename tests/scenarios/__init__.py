"""The same scenarios for the clients of every protocol, blocking and for asyncio.

resource.py says how a protocol describes what its clients take; counter.py and others do that, one file for each
protocol. A scenario is written once, in its test file, for all of them."""
