"""Puts the server of a test where the examples of the documentation expect theirs: on the default ports.

The interpreter imports a module of this name by itself, in every process that has this directory in PYTHONPATH, so also
in those that an example starts. COUNTERD_EXAMPLES_SERVERS has pairs of ports, `11215=40001 9000=40002`. The client and
the text of the examples stay as they are; an example that connects to anything else over IP does not get there.
"""

import os
import socket

_connect = socket.socket.connect
_PORTS = dict(pair.split("=") for pair in os.environ["COUNTERD_EXAMPLES_SERVERS"].split())


def _redirected(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        host, port = address[:2]
        if host != "127.0.0.1" or str(port) not in _PORTS:
            # Not an OSError: a client would try elsewhere, and an example may expect one.
            raise RuntimeError(f"an example connects to {host}:{port}, and the test has no server for that")
        address = (host, int(_PORTS[str(port)]))
    return _connect(self, address)


socket.socket.connect = _redirected
