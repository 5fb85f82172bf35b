"""What a load process asks, as bytes, in each of the protocols that it speaks.

A side, pure Python. What the answers mean is in _words.pxd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.protocols.counter import wire

if TYPE_CHECKING:
    from counterd.bench.plan import Plan


def requests_of(plan: Plan, name: bytes) -> dict[str, bytes]:
    """Each kind of request for that name; "fill" makes it exist, where acquire and release do not."""
    amount = str(plan.resources).encode()
    if plan.protocol == "counter":
        return {
            "noop": wire.noop(0),
            "get": wire.get(0, name),
            "acquire": wire.acquire(0, name, plan.resources, plan.maximum),
            "release": wire.release(0, name, plan.resources),
        }
    if plan.protocol == "redis":
        one = plan.resources == 1
        return {
            "noop": _resp(b"PING"),
            "get": _resp(b"GET", name),
            "acquire": _resp(b"INCR", name) if one else _resp(b"INCRBY", name, amount),
            "release": _resp(b"DECR", name) if one else _resp(b"DECRBY", name, amount),
            "fill": _resp(b"SET", name, b"0"),
        }
    return {
        "noop": b"mn\r\n",
        "get": b"get %b\r\n" % name,
        "acquire": b"incr %b %b\r\n" % (name, amount),
        "release": b"decr %b %b\r\n" % (name, amount),
        "fill": b"set %b 0 0 1\r\n0\r\n" % name,
    }


def _resp(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
