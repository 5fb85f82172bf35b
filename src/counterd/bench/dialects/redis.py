"""Redis as counterbench uses it: RESP2, with a counterpart of all requests for counters and keys.

Floor 5 (ARCHITECTURE.md), pure Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.bench.dialect import COUNTING, FETCH, KEEPING, VALUE, Dialect, Mistakes, Op

if TYPE_CHECKING:
    from counterd.bench.options import Options


def resp(*words: bytes) -> bytes:
    """Encodes a request of redis."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def requests_of(plan: Options, name: bytes) -> dict[str, bytes]:
    """Returns each kind of request for a name. "fill" creates the name, and "fetch" is a get of a buffer."""
    amount = () if plan.resources == 1 else (b"%d" % plan.resources,)
    by = b"BY" if amount else b""
    return {
        "noop": resp(b"PING"),
        "get": resp(b"GET", name),
        "acquire": resp(b"INCR" + by, name, *amount),
        "release": resp(b"DECR" + by, name, *amount),
        "query": resp(b"GET", name),
        "update": resp(b"INCRBY", name, b"1"),
        "lower": resp(b"DECRBY", name, b"1"),
        "insert": resp(b"SET", name, b"0", b"PX", b"%d" % max(1, round(plan.ttl * 1e3))),
        "purge": resp(b"DEL", name),
        "set": resp(b"SET", name, VALUE * plan.buffer_size),
        "fetch": resp(b"GET", name),
        "fill": resp(b"SET", name, b"0"),
    }


def mistakes_of(plan: Options) -> Mistakes:
    """Returns a mistake if a TTL has a unit that redis does not know."""
    fraction = round(plan.ttl * 1e9) % 1_000_000
    return [("insert" in plan.work.weights and fraction != 0, "redis counts a TTL in milliseconds")]


DIALECT = Dialect(
    name="redis",
    order=5,
    port=6379,
    ops={**COUNTING, **KEEPING},
    inner={"lower": Op("lower"), "fetch": FETCH, "fill": Op()},
    sent=lambda plan, op: (
        "fetch" if op == "get" and (plan.value_size is not None or "set" in plan.work.weights) else op
    ),
    requests=requests_of,
    name_size_max=65535,
    fills={"number": ("fill",), "buffer": ("set",)},
    mistakes=mistakes_of,
)
