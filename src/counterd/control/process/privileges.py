"""Gives up privileges after the sockets are open: the user, all capabilities, and the possibility to gain capabilities
again.

Floor 4 (ARCHITECTURE.md). This file uses ctypes for four system calls that the standard library lacks. Changing the
user affects the whole process. The other system calls affect only one thread, so they must be made while there is only
one thread.
"""

from __future__ import annotations

import ctypes
import errno
import os

# <linux/prctl.h>, <linux/capability.h>
PR_SET_DUMPABLE = 4
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522


def drop_privileges(uid: int, gid: int, user: str) -> None:
    """Changes the user and the group of this process for good, and gives up all capabilities. Must not be called while
    the process has other threads.

    user: the name of the user whose supplementary groups apply, or "" for no supplementary groups. If uid and gid do
    not change, the groups do not change either. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _empty_bounding_set(libc)
    if (uid, gid) != (os.geteuid(), os.getegid()):
        if user:
            os.initgroups(user, gid)
        else:
            os.setgroups([gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        # Because of the new user, the kernel forbids core dumps, and access to /proc/self for monitoring.
        _prctl(libc, PR_SET_DUMPABLE, 1)
    _clear_capabilities(libc)
    _prctl(libc, PR_SET_NO_NEW_PRIVS, 1)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(libc: ctypes.CDLL, option: int, argument: int) -> int:
    return _checked(libc.prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0))))


def _empty_bounding_set(libc: ctypes.CDLL) -> None:
    """Empties the bounding set of capabilities, so that not even a program with file capabilities gets a capability.

    Only root can empty the bounding set.
    """
    try:
        for capability in range(64):
            if _prctl(libc, PR_CAPBSET_READ, capability):  # EINVAL after the kernel's last capability
                _prctl(libc, PR_CAPBSET_DROP, capability)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM):
            raise


def _clear_capabilities(libc: ctypes.CDLL) -> None:
    """Clears effective, permitted, inheritable and ambient capabilities."""
    _prctl(libc, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _checked(libc.capset(header, (ctypes.c_uint32 * 6)()))
