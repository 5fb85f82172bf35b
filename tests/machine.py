"""What the machine that runs the tests has."""

from __future__ import annotations

import socket


def has_ipv6() -> bool:
    """Whether ::1 can be bound."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
