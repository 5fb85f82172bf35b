"""A client as a process of its own, for the tests that kill it: acquires, says so, and holds until it is ended.

    python holder.py HOST PORT NAME RESOURCES [DUMPS]

DUMPS: also asks for that many Dumps. For each line of its input it sends a Noop. It reads no answer to either.
"""

from __future__ import annotations

import signal
import socket
import sys

from counterd.protocols.counter import wire

host, port, name, resources = sys.argv[1:5]
with socket.create_connection((host, int(port))) as connection:
    connection.sendall(wire.acquire(1, name.encode(), int(resources), 0xFFFFFFFF))
    response = connection.recv(wire.HEADER_SIZE + 4, socket.MSG_WAITALL)
    assert response[2] == 0, response
    if len(sys.argv) > 5:
        connection.sendall(wire.dump(2) * int(sys.argv[5]))
    print("holding", flush=True)
    for _ in sys.stdin:
        connection.sendall(wire.noop(3))
    signal.pause()
