"""The throttr protocol for counterbench: its requests and its limits. Floor 5 (ARCHITECTURE.md), pure Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.bench.dialect import FETCH, KEEPING, NAMED, NOOP, VALUE, Dialect, Mistakes, Op
from counterd.protocols.throttr.wire import KEY_MAX, PORT, Attribute, Change, Encoder, TTLType, ValueSize, ttl_units

if TYPE_CHECKING:
    from counterd.bench.options import Options

LASTING = 100  # TTL of the keys that a load needs, in hours


def requests_of(plan: Options, name: bytes) -> dict[str, bytes]:
    """Returns each kind of request for a name.

    "fill" makes the quota of the name, after "clear" has removed an old key.
    """
    encoder = Encoder(ValueSize.named(plan.number_type))
    ttl_type, ttl = ttl_of(plan)
    requests = {
        "noop": encoder.whoami(),
        "query": encoder.query(name),
        "update": encoder.update(name, Attribute.QUOTA, Change.INCREASE, 1),
        "lower": encoder.update(name, Attribute.QUOTA, Change.DECREASE, 1),
        "insert": encoder.insert(name, 0, ttl, ttl_type),
        "purge": encoder.purge(name),
        "set": encoder.set(name, VALUE * plan.buffer_size, LASTING, TTLType.HOURS),
        "get": encoder.get(name),
        "fill": encoder.insert(name, 0, LASTING, TTLType.HOURS),
        "clear": encoder.purge(name),
    }
    return {kind: bytes(request) for kind, request in requests.items()}


def ttl_of(plan: Options) -> tuple[int, int]:
    """Returns --ttl in the form of ttl_units()."""
    return ttl_units(plan.ttl, _number_max(plan))


def mistakes_of(plan: Options) -> Mistakes:
    """Returns the options that are too large for the server's numbers."""
    most = _number_max(plan)
    ttl_wrong = ""
    try:
        ttl_of(plan)
    except ValueError as error:
        ttl_wrong = str(error)
    return [
        (plan.buffer_size > most, f"a buffer must have 0 to {most} bytes, not {plan.buffer_size}"),
        (bool(ttl_wrong), ttl_wrong),
    ]


def _number_max(plan: Options) -> int:
    return ValueSize.named(plan.number_type).maximum


DIALECT = Dialect(
    name="throttr",
    order=1,
    port=PORT,
    ops={"noop": NOOP, "get": FETCH, **KEEPING},
    inner={"lower": Op("lower"), "fill": Op(), "clear": Op()},
    work="update",
    ops_help="query, update (one up, then one down), insert (a new name, with --ttl), purge (of an inserted name), "
    "set, get, noop, or a mix",
    requests=requests_of,
    name_size_max=KEY_MAX,
    fills={"number": ("clear", "fill"), "buffer": ("set",)},
    options=NAMED | {"number-type"},
    mistakes=mistakes_of,
)
