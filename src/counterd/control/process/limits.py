"""The operating system's limits for this process, and how many connections they allow.

Floor 4 (ARCHITECTURE.md).
"""

from __future__ import annotations

import os
import pwd
import resource
from pathlib import Path

from counterd._core import LIMIT_CONNECTIONS
from counterd.control.config.keys import account_number

# Descriptors that are not connections: of listening sockets, logs and the loop, and some for accept(). Because of those
# for accept(), the daemon itself refuses and counts a connection too many, and accept() does not fail with EMFILE.
DESCRIPTORS_RESERVED = 64
# With fewer descriptors the daemon could not open its files, or could not accept a connection. It needs 13, and 11 for
# admin. A protocol needs two for its poller, three for listening sockets (two addresses and a path), and three for
# connections.
LEAST_DESCRIPTORS = 24
LEAST_OF_PROTOCOL = 8


def raise_descriptors() -> int:
    """Raises the soft limit of open files to the hard limit, and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = int(Path("/proc/sys/fs/nr_open").read_text())
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def least_descriptors(protocols: int) -> int:
    """Returns how many descriptors the daemon needs to serve `protocols` protocols."""
    return LEAST_DESCRIPTORS + LEAST_OF_PROTOCOL * protocols


def share_descriptors(descriptors: int, protocols: int) -> int:
    """Returns how many of the process's descriptors the connections of each protocol may use."""
    return max(1, (descriptors - DESCRIPTORS_RESERVED) // max(1, protocols))


def effective_connections(configured: int, descriptors: int) -> int:
    """Returns how many connections can be open: the configured number (0 means any), but no more than the descriptors
    and the engine allow."""
    possible = min(descriptors, LIMIT_CONNECTIONS)
    return min(configured, possible) if configured else possible


def identity(user: str, group: str) -> tuple[int, int, str]:
    """Returns the uid and gid of a user and a group, and the user's name. Each argument is a name or a number.

    An empty argument keeps the current uid or gid. Raises LookupError for an unknown name.
    """
    account = (pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)) if user else None
    uid = account.pw_uid if account else os.geteuid()
    gid = account.pw_gid if account else os.getegid()
    if group:
        gid = account_number("group", group)
    return uid, gid, account.pw_name if account else ""
