"""The calls of a sidecar to the authority for shared limits, `authority.lua`: keys, arguments and answers. No I/O.

Floor 2. A name belongs to one of PARTITIONS partitions. All keys of a partition are in one slot of a cluster. So one
call carries everything that a sidecar has to say about its names in a partition.
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

VERSION = 1  # of keys, arguments and answers: sidecars with different versions share nothing
PARTITIONS = 16  # a call for each with news, in each tick of each sidecar; a cluster rarely has more masters
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
_WISH = struct.Struct("<7d")  # all numbers are doubles, as Lua's are
_RATE_WISH = struct.Struct("<6d")
_RIGHT = struct.Struct("<5d")
_UNITS = struct.Struct("<2d")
_SHARE = struct.Struct("<6d")
_FILL = struct.Struct("<3d")
_FNV_BASIS, _FNV_PRIME = 2166136261, 16777619  # of FNV-1a with 32 bits


class Mode(enum.IntEnum):
    """PLENTY: the rights may be more than what is in use. EXACT: each request is asked for."""

    PLENTY = 0
    EXACT = 1


class Wish(NamedTuple):
    """A sidecar's request for rights of one name. All numbers are permits.

    maximum: of the client's request, or of the rights that the sidecar wants. least: what is in use, plus what the
    first waiting request needs. want: what the sidecar would like to have, at least `least`. keep: the sidecar goes on
    granting from so many rights until the answer comes; at most `want`, and at most `least` if a request waits. used:
    what is in use. stays: whether the request waits on if it is refused; only then it has a place in the line.
    """

    name: bytes
    maximum: int
    least: int
    want: int
    keep: int
    used: int
    mode: Mode
    stays: bool = True


class RateWish(NamedTuple):
    """A sidecar's request for units of a rate.

    limit: units in each `period_us` microseconds. burst: the most units at once. least: what the first waiting request
    needs, 1 to burst, or 0. want: at least `least`. give: units that the sidecar gives back; negative: units that it
    used without having been granted them.
    """

    name: bytes
    limit: int
    period_us: int
    burst: int
    least: int
    want: int
    give: int = 0


class Right(NamedTuple):
    """The rights of a sidecar to one name, as the authority has decided.

    all_rights, all_used: the sums of all sidecars. waited_for: whether other sidecars wait for rights of this name,
    or had a request refused a moment ago.
    """

    rights: int
    mode: Mode
    all_rights: int
    all_used: int
    waited_for: bool


class Share(NamedTuple):
    """What a sidecar has of a name, as the authority keeps it. waits_for: rights that it waits for, or 0."""

    rights: int
    used: int
    mode: Mode
    waits_for: int


class Units(NamedTuple):
    """units: of a rate that were granted: 0, or `least` to `want`. wait_us: if 0, the time until `least` are there."""

    units: int
    wait_us: int


class Answer(NamedTuple):
    """An answer. learning_ms: for so long the authority gives nobody more. learns_ms: the end of that time, or of the
    last one, on the server's clock; another one after each loss of data. sidecars: that have a lease in this partition.
    again_ms: after so long a sidecar asks again for what was refused. waited: names of which a sidecar waits for
    rights, which may be the asking one; not all of them if they are many. rights, units: in the order of the wishes.
    """

    learning_ms: int
    learns_ms: int
    sidecars: int
    again_ms: int
    waited: list[bytes]
    rights: list[Right]
    units: list[Units]


class StaleCall(Exception):
    """The authority has already had a later call of this sidecar. This call changed nothing."""


class LeaseLost(Exception):
    """The sidecar's lease has ended, and all its rights with it. The sidecar has to come back under a new name."""


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
    """Returns the partition of a name: the same in each sidecar."""
    hashed = _FNV_BASIS
    for byte in name:
        hashed = (hashed ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    return hashed % PARTITIONS


def keys(partition: int, sidecar: str) -> list[str]:
    """Returns the keys of a call."""
    return [_prefix(partition) + name for name in ("leases", "meta", "totals", "waited", "block:" + sidecar)]


def rate_key(name: bytes) -> bytes:
    """Returns the key of a rate."""
    return _prefix(partition_of(name)).encode() + b"rate:" + name


def _prefix(partition: int) -> str:
    return f"counterd:{VERSION}:{{{TAGS[partition]}}}:"


def arguments(
    sidecar: str, call: int, lease_ms: int, wishes: Iterable[Wish], rates: Iterable[RateWish] = ()
) -> list[bytes | str | int]:
    """Returns the arguments of a call.

    sidecar: its name, without spaces; nobody has used that name before, and the sidecar itself takes a new one after
    each lost lease. call: the number of the call in this partition, from 1. lease_ms: the lease from now on; 0: the
    sidecar gives everything back, and says nothing more under this name.
    wishes, rates: together at most LIMITS_MAX, and each name once.
    """
    found: list[bytes | str | int] = [sidecar, call, lease_ms, 0]
    for wish in wishes:
        found += (wish.name, _WISH.pack(*wish[1:]))
    found[3] = len(found) // 2 - 2
    for rate in rates:
        found += (rate.name, _RATE_WISH.pack(*rate[1:]))
    return found


def answer(found: list[Any]) -> Answer:
    """Returns the answer that a server has sent. Raises StaleCall or LeaseLost, or ValueError if it makes no sense."""
    if found == [_STALE]:
        raise StaleCall
    if found == [_LOST]:
        raise LeaseLost
    try:
        status, learning_ms, learns_ms, sidecars, again_ms, waited, packed_rights, packed_units = found
        if status != _DONE or not all(isinstance(name, bytes) for name in waited):
            raise ValueError
        return Answer(
            _number(learning_ms),
            _number(learns_ms, EXACT_MAX),
            _number(sidecars),
            _number(again_ms),
            [*waited],
            [
                Right(_number(rights), Mode(mode), _clipped(every), _clipped(used), bool(waits))
                for rights, mode, every, used, waits in _RIGHT.iter_unpack(packed_rights)
            ],
            [
                Units(_number(granted), _clipped(wait_us, WAIT_MAX_US))
                for granted, wait_us in _UNITS.iter_unpack(packed_units)
            ],
        )
    except (struct.error, TypeError, ValueError, OverflowError) as error:
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
