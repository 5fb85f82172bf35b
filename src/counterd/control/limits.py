"""What the operating system allows this process, and how much of it connections may use.

Floor 4.
"""

from __future__ import annotations

import grp
import os
import pwd
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from counterd._core import LIMIT_CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from counterd.net.sockets import UnixSocket

# Descriptors that are not connections: listening sockets, logs, the loop's own, and room for what accept() needs, so
# that a connection too many is refused by us and counted, and never meets EMFILE.
DESCRIPTORS_RESERVED = 64


def raise_descriptors() -> int:
    """Raises the soft limit of open files to the hard one and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = int(Path("/proc/sys/fs/nr_open").read_text())
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def share_descriptors(descriptors: int, rooms: int) -> int:
    """How many of the process's descriptors the connections of each of its rooms may use."""
    return max(1, (descriptors - DESCRIPTORS_RESERVED) // max(1, rooms))


def effective_connections(configured: int, descriptors: int) -> int:
    """How many connections can be let in: the configured number (0 = any), within the descriptors and the engine's."""
    possible = min(descriptors, LIMIT_CONNECTIONS)
    return min(configured, possible) if configured else possible


def become(user: str, group: str, owned: Iterable[UnixSocket]) -> tuple[int, int]:
    """Gives up root for a user and a group, each a name or a number; empty keeps what is. Returns uid and gid.

    owned: sockets whose files go to that user too. Raises LookupError for an unknown name, PermissionError when this
    process may not.
    """
    account = (pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)) if user else None
    uid = account.pw_uid if account else os.geteuid()
    gid = account.pw_gid if account else os.getegid()
    if group:
        gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    if (uid, gid) != (os.geteuid(), os.getegid()):
        for unix in owned:
            unix.chown(uid, gid)
        if account:
            os.initgroups(account.pw_name, gid)
        else:
            os.setgroups([gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    return uid, gid
