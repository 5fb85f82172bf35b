"""The calls of a sidecar to the authority for shared limits, `authority.lua`: keys, arguments and answers. No I/O.

Floor 2. A name belongs to one of PARTITIONS partitions. All keys of a partition are in one slot of a cluster. So one
call carries everything that a sidecar has to say about its names in a partition.
"""

from __future__ import annotations

import enum
import functools
import zlib
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1  # of keys, arguments and answers: sidecars with different versions share nothing
PARTITIONS = 16  # a call for each with news, in each tick of each sidecar; a cluster rarely has more masters
LIBRARY = f"counterd_{VERSION}"  # of Functions; its function has the same name
KEYS = 4
_STALE, _LOST = 0, 1


class Mode(enum.IntEnum):
    """PLENTY: the rights may be more than what is in use. EXACT: each request is asked for."""

    PLENTY = 0
    EXACT = 1


class Wish(NamedTuple):
    """A sidecar's request for rights of one limit. All numbers are permits.

    maximum: of the client's request, or of the rights that the sidecar wants. least: what is in use, plus what the
    first waiting request needs. want: what the sidecar would like to have, at least `least`. keep: the sidecar goes on
    granting from so many rights until the answer comes; at most `want`, and `used` if a request waits. used: what is in
    use.
    """

    name: bytes
    maximum: int
    least: int
    want: int
    keep: int
    used: int
    mode: Mode


class Right(NamedTuple):
    """The rights of a sidecar to one limit, as the authority has decided.

    all_rights, all_used: the sums of all sidecars. waited_for: whether a sidecar waits for rights of this limit.
    """

    rights: int
    mode: Mode
    all_rights: int
    all_used: int
    waited_for: bool


class Answer(NamedTuple):
    """An answer. learning_ms: for so long the authority gives nobody more. rights: in the order of the wishes."""

    learning_ms: int
    rights: list[Right]


class StaleCall(Exception):
    """The authority has already had a later call of this sidecar. This call changed nothing."""


class LeaseLost(Exception):
    """The sidecar's lease has ended, and all its rights with it. The sidecar has to come back under a new name."""


@functools.cache
def script() -> bytes:
    """Returns the script for EVAL and EVALSHA, for servers without Functions."""
    return _source() + b"\nreturn tick(KEYS, ARGV)\n"


@functools.cache
def library() -> bytes:
    """Returns the library for FUNCTION LOAD."""
    head = f"#!lua name={LIBRARY}\n".encode()
    return head + _source() + f"\nredis.register_function('{LIBRARY}', tick)\n".encode()


@functools.cache
def _source() -> bytes:
    return resources.files(__package__).joinpath("authority.lua").read_bytes()


def partition_of(name: bytes) -> int:
    """Returns the partition of a name: the same in each sidecar."""
    return zlib.crc32(name) % PARTITIONS


def keys(partition: int, sidecar: str) -> list[str]:
    """Returns the keys of a call."""
    prefix = f"counterd:{VERSION}:{{{partition}}}:"
    return [prefix + "leases", prefix + "meta", prefix + "counters", prefix + "block:" + sidecar]


def arguments(sidecar: str, call: int, run: str, lease_ms: int, wishes: Iterable[Wish]) -> list[bytes | str | int]:
    """Returns the arguments of a call.

    sidecar: its name, without spaces; nobody has used that name before, and the sidecar itself takes a new one after
    each lost lease. call: the number of the call in this partition, from 1. run: the run ID of the called server.
    """
    found: list[bytes | str | int] = [sidecar, call, run, lease_ms]
    for wish in wishes:
        found += (*wish[:-1], int(wish.mode))  # hiredis writes no enums
    return found


def answer(found: list[int]) -> Answer:
    """Returns the answer that a server has sent. Raises StaleCall or LeaseLost."""
    if found[0] == _STALE:
        raise StaleCall
    if found[0] == _LOST:
        raise LeaseLost
    width = len(Right._fields)
    rights = [
        Right(rights, Mode(mode), every, used, bool(waits))
        for rights, mode, every, used, waits in (found[at : at + width] for at in range(2, len(found), width))
    ]
    return Answer(found[1], rights)
