"""What the operating system allows this process, and how much of it connections may use.

Floor 4.
"""

from __future__ import annotations

import os
import pwd
import resource
from pathlib import Path

from counterd._core import LIMIT_CONNECTIONS
from counterd.control.config.keys import account_number

# Descriptors that are not connections: listening sockets, logs, the loop's own, and room for what accept() needs, so
# that a connection too many is refused by us and counted, and never meets EMFILE.
DESCRIPTORS_RESERVED = 64
# With fewer it could not open what it needs, or would be ready and turn everybody away. Counted: 13 and 11 for admin;
# of a room two for its poller, the listening sockets of two addresses and a path, and three connections.
LEAST_DESCRIPTORS = 24
LEAST_OF_ROOM = 8


def raise_descriptors() -> int:
    """Raises the soft limit of open files to the hard one and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = int(Path("/proc/sys/fs/nr_open").read_text())
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def least_descriptors(rooms: int) -> int:
    """How many a process needs that serves so many rooms."""
    return LEAST_DESCRIPTORS + LEAST_OF_ROOM * rooms


def share_descriptors(descriptors: int, rooms: int) -> int:
    """How many of the process's descriptors the connections of each of its rooms may use."""
    return max(1, (descriptors - DESCRIPTORS_RESERVED) // max(1, rooms))


def effective_connections(configured: int, descriptors: int) -> int:
    """How many connections can be let in: the configured number (0 = any), within the descriptors and the engine's."""
    possible = min(descriptors, LIMIT_CONNECTIONS)
    return min(configured, possible) if configured else possible


def identity(user: str, group: str) -> tuple[int, int, str]:
    """The uid and gid that a user and a group mean, each a name or a number, and the user's name; empty keeps what is.

    Raises LookupError for an unknown name.
    """
    account = (pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)) if user else None
    uid = account.pw_uid if account else os.geteuid()
    gid = account.pw_gid if account else os.getegid()
    if group:
        gid = account_number("group", group)
    return uid, gid, account.pw_name if account else ""
