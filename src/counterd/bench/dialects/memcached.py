"""Memcached's text protocol as counterbench uses it: incr, decr, get, set, mn.

Floor 5 (ARCHITECTURE.md), pure Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.bench.dialect import COUNTING, Dialect, Op

if TYPE_CHECKING:
    from counterd.bench.options import Options


def requests_of(plan: Options, name: bytes) -> dict[str, bytes]:
    """Returns each kind of request for a name. "fill" creates the name, because incr does not."""
    return {
        "noop": b"mn\r\n",
        "get": b"get %b\r\n" % name,
        "acquire": b"incr %b %d\r\n" % (name, plan.resources),
        "release": b"decr %b %d\r\n" % (name, plan.resources),
        "fill": b"set %b 0 0 1\r\n0\r\n" % name,
    }


DIALECT = Dialect(
    name="memcached",
    order=7,
    port=11211,
    ops=COUNTING,
    inner={"fill": Op()},
    requests=requests_of,
    name_size_max=250,
    fills={"number": ("fill",)},
    needs_fill=True,
)
