"""The calls of a daemon to the authority for shared limits, `authority.lua`: keys, arguments and answers. No I/O.

Floor 2. A name belongs to one of PARTITIONS partitions. All keys of a partition are in one slot of a cluster. So one
call carries everything that a daemon has to say about its names in a partition.
"""

from __future__ import annotations

import enum
import functools
import reprlib
import struct
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1  # of keys, arguments and answers: daemons with different versions share nothing
PARTITIONS = 16  # a call for each with changes, in each tick of each daemon; a cluster rarely has more masters
# In the names of a partition's keys, for the slot. The slots of these are 1,024 apart, within 60, so that masters
# with equal parts of the slots have equal numbers of partitions, up to one.
TAGS = (18, 3, 65, 223, 19, 2, 64, 222, 265, 23, 218, 49, 264, 22, 219, 48)
assert len(TAGS) == PARTITIONS
LIMITS_MAX = 1000  # in one call: a Lua function takes fewer than 8,000 arguments
LIBRARY = f"counterd_{VERSION}"  # of Functions; its function has the same name
UINT32_MAX = 0xFFFFFFFF  # of permits, in the stores
EXACT_MAX = 1 << 53  # up to this, Lua's numbers are exact
WAIT_MAX_US = 1 << 52  # more than a century; as nanoseconds, and added to a time, it fits into 63 bits
SHOWN_MAX = 200
_STALE, _LOST, _DONE = 0, 1, 2
_LEASE_REQUEST = struct.Struct("<7d")  # all numbers are doubles, as Lua's are
_RATE_REQUEST = struct.Struct("<6d")
_LEASE_GRANT = struct.Struct("<5d")
_RATE_GRANT = struct.Struct("<2d")
_SHARE = struct.Struct("<6d")
_FILL = struct.Struct("<3d")
_FNV_BASIS, _FNV_PRIME = 2166136261, 16777619  # of FNV-1a with 32 bits


class Mode(enum.IntEnum):
    """How a daemon may use its rights to a name."""

    PLENTY = 0  # the rights may be more than what is in use
    EXACT = 1  # each request is asked for


_MODES: dict[float, Mode] = {float(mode): mode for mode in Mode}  # as they come in an answer


class LeaseRequest(NamedTuple):
    """A daemon's request for rights to one name. All numbers are permits."""

    name: bytes
    maximum: int  # of the client's request, or of the rights that the daemon wants
    least: int  # what is in use, plus what the first waiting request needs
    want: int  # what the daemon would like to have, at least `least`
    keep: int  # it grants from so many until the answer comes: at most `want`; if a request waits, at most `least`
    used: int  # what is in use
    mode: Mode
    stays: bool = True  # the request waits on if it is refused; only then it has a place in the line


class RateRequest(NamedTuple):
    """A daemon's request for units of a rate."""

    name: bytes
    limit: int  # units in each period; 0: the daemon does not know the rate any more
    period_us: int
    burst: int  # the most units at once
    least: int  # what the first waiting request needs, 1 to burst, or 0
    want: int  # at least `least`
    give: int = 0  # units that the daemon gives back; negative: it used them without having been granted them


class LeaseGrant(NamedTuple):
    """The rights of a daemon to one name, as the authority has decided."""

    rights: int
    mode: Mode
    all_rights: int  # of all daemons
    all_used: int  # by all daemons
    waited_for: bool  # other daemons wait for rights to this name, or had a request refused a moment ago


class RateGrant(NamedTuple):
    """The units of a rate that a daemon was granted."""

    units: int  # 0, or `least` to `want`
    wait_us: int  # if 0 units were granted: the time until `least` are there


class Share(NamedTuple):
    """What a daemon has of a name, as the authority keeps it."""

    rights: int
    used: int
    mode: Mode
    waits_for: int  # rights that it waits for, or 0


class Answer(NamedTuple):
    """The authority's answer to a call."""

    recovering_ms: int  # for so long the server recovers: it gives nobody more
    recovered_ms: int  # the end of its last recovery, on the server's clock: another one after each loss of data
    daemons: int  # that have a lease in this partition
    again_ms: int  # after so long a daemon asks again for what was refused
    waited: list[bytes]  # names to which a daemon, maybe the asking one, waits for rights; not all if they are many
    counters: list[LeaseGrant]  # in the order of the requests
    rates: list[RateGrant]  # likewise


class StaleCall(Exception):
    """The authority has already had a later call of this daemon. This call changed nothing."""


class LeaseLost(Exception):
    """The daemon's lease has ended, and all its rights with it. The daemon has to come back under a new name."""


def share(packed: bytes) -> Share:
    """Returns a value of the hash whose key is the last one of keys()."""
    rights, used, mode, waits_for, _, _ = _SHARE.unpack(packed)
    return Share(int(rights), int(used), Mode(mode), int(waits_for))


def full_us(packed: bytes) -> float:
    """Returns the moment from which on all units of a rate are there, on the server's clock, of a value of rate_key().

    There is no value if all are there.
    """
    return float(_FILL.unpack(packed)[0])


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
    """Returns the partition of a name: the same in each daemon."""
    hashed = _FNV_BASIS
    for byte in name:
        hashed = (hashed ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    return hashed % PARTITIONS


def keys(partition: int, daemon: str) -> list[str]:
    """Returns the keys of a call. daemon: as in arguments()."""
    return [_prefix(partition) + name for name in ("leases", "meta", "totals", "waited", "block:" + daemon)]


def rate_key(name: bytes) -> bytes:
    """Returns the key of a rate."""
    return _prefix(partition_of(name)).encode() + b"rate:" + name


def _prefix(partition: int) -> str:
    return f"counterd:{VERSION}:{{{TAGS[partition]}}}:"


def arguments(
    daemon: str, call: int, lease_ms: int, requests: Iterable[LeaseRequest], rates: Iterable[RateRequest] = ()
) -> list[bytes | str | int]:
    """Returns the arguments of a call.

    daemon: the name of the caller in this partition, without spaces. Nobody has used that name before, and the daemon
    takes a new one after each lost lease. call: the number of the call under this name, from 1. lease_ms: the lease
    from now on; 0: the daemon gives everything back, and says nothing more under this name.
    requests, rates: together at most LIMITS_MAX, and each name once.
    """
    found: list[bytes | str | int] = [daemon, call, lease_ms, 0]
    for request in requests:
        found += (request.name, _LEASE_REQUEST.pack(*request[1:]))
    found[3] = len(found) // 2 - 2
    for rate in rates:
        found += (rate.name, _RATE_REQUEST.pack(*rate[1:]))
    return found


def answer(found: list[Any]) -> Answer:
    """Returns the answer that a server has sent. Raises StaleCall or LeaseLost, or ValueError if it makes no sense."""
    if found == [_STALE]:
        raise StaleCall
    if found == [_LOST]:
        raise LeaseLost
    try:
        status, recovering_ms, recovered_ms, daemons, again_ms, waited, counters, rates = found
        if status != _DONE or not all(isinstance(name, bytes) for name in waited):
            raise ValueError
        return Answer(
            _number(recovering_ms),
            _number(recovered_ms, EXACT_MAX),
            _number(daemons),
            _number(again_ms),
            [*waited],
            [
                LeaseGrant(_number(rights), _MODES[mode], _clipped(every), _clipped(used), bool(waits))
                for rights, mode, every, used, waits in _LEASE_GRANT.iter_unpack(counters)
            ],
            [
                RateGrant(_number(granted), _clipped(wait_us, WAIT_MAX_US))
                for granted, wait_us in _RATE_GRANT.iter_unpack(rates)
            ],
        )
    except (struct.error, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the authority answered {shown(found)}") from error


class _Short(reprlib.Repr):
    """Writes the beginning of what may be large or nested."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist = 4, 8

    def repr_bytes(self, found: bytes, _level: int) -> str:
        return repr(found[:SHOWN_MAX])


def shown(found: Any) -> str:
    """Returns what a server has sent, for people: at most SHOWN_MAX characters."""
    return _Short().repr(found)[:SHOWN_MAX]


def _number(found: float, most: int = UINT32_MAX) -> int:
    """Returns a number of an answer. Raises ValueError if it is too large, or TypeError if it is none."""
    if not 0 <= found <= most:  # true of NaN
        raise ValueError
    return int(found)


def _clipped(found: float, most: int = UINT32_MAX) -> int:
    """Returns a number that may be larger than what a store can have. Raises as int() does."""
    return max(0, min(int(found), most))
