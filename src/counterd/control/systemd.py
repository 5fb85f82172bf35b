"""The one thing systemd needs to be told: sd_notify(3), a datagram to the socket it names.

Floor 4. Written here because it is one system call, and the libraries for it bring a C library or are unmaintained.
"""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Sends a state such as READY=1, if there is anybody to tell. Never fails: the daemon works without."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(state.encode(), address)
