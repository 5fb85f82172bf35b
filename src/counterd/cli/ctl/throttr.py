"""`counterctl throttr`: shows and changes quotas, buffers and channels.

Floor 5 (ARCHITECTURE.md). A command that changes something prints nothing on success. A refusal prints one line, and
the exit status is 1.
"""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from counterd.cli.ctl.common import (
    DURATION,
    EXIT_NOT_AVAILABLE,
    Bytes,
    Group,
    Server,
    address_options,
    chosen_address,
    glob,
    refused,
    say,
    shown,
    timeout_below,
    until_interrupted,
)
from counterd.cli.ctl.output import Column, Kind, Output, output_option, span
from counterd.errors import EventsLost
from counterd.protocols.throttr.wire import KEY_MAX, PORT, TTL_UNITS_NS, TTLType, ValueSize, ttl_units

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.client._addresses import Address
    from counterd.client.throttr import Client, ListEntry

SCHEME = "throttr"
SIZES = tuple(size.name.lower() for size in ValueSize)
KEY = Bytes("key", 0, KEY_MAX)
CHANNEL = Bytes("channel", 0, KEY_MAX)
DATA = Bytes("value", 0, sys.maxsize)  # the server's value_size sets the limit
QUOTA = click.IntRange(0, ValueSize.UINT64.maximum)
EVERYBODY = b"*"  # the channel to which every connection is subscribed

KEY_COLUMN = Column("key", Kind.BYTES)
TTL_COLUMN = Column("ttl", Kind.SPAN)


class ThrottrTarget(Server):
    """The server of the throttr protocol."""

    what = "keys"
    protocol = "the throttr protocol, or has another --value-size"

    def __init__(self, address: Address, timeout: float, value_size: str) -> None:
        super().__init__(address, timeout)
        self.value_size = value_size

    def connect(self) -> Client:
        """Returns a client of this server."""
        from counterd.client.throttr import Client

        return Client(**self.arguments, value_size=self.value_size)


pass_target = click.make_pass_decorator(ThrottrTarget)
ttl_option = click.option("--ttl", type=DURATION, required=True, help="The time to live, such as 60s or 500ms.")
keys_argument = click.argument("keys", metavar="KEY...", nargs=-1, required=True, type=KEY)


@click.group(cls=Group)
@address_options(SCHEME, PORT, "THROTTR_URL")
@click.option(
    "--value-size",
    type=click.Choice(SIZES),
    default="uint16",
    help="The server's throttr.value_size. The server does not send it to its clients.  [default: uint16]",
)
@output_option
@click.pass_context
def throttr(context: click.Context, /, timeout: float, value_size: str, **_: object) -> None:
    """Shows and changes quotas, buffers and channels."""
    timeout = timeout_below(context, timeout, "keys")
    context.obj = ThrottrTarget(chosen_address(context, SCHEME, PORT), timeout, value_size)


def seconds_of(ttl: int, ttl_type: int) -> float:
    """Converts a remaining TTL to seconds. The result is an int if it is a whole number."""
    ns = ttl * unit_ns(ttl_type)
    return ns // 10**9 if ns % 10**9 == 0 else ns / 1e9


def unit_ns(ttl_type: int) -> int:
    """Returns the unit of a TTL type in ns. An unknown type counts as seconds."""
    return TTL_UNITS_NS.get(ttl_type, TTL_UNITS_NS[TTLType.SECONDS])


def units_of(ttl: float, target: ThrottrTarget) -> tuple[int, int]:
    """Converts seconds to a number and a TTL type.

    Prefers the TTL type seconds, because servers show the remaining time in whole units.
    """
    most = ValueSize.named(target.value_size).maximum
    if ttl == int(ttl) and 0 < ttl <= most:
        return int(ttl), TTLType.SECONDS
    ttl_type, count = ttl_units(ttl, most)
    return count, ttl_type


def ask_each(
    target: ThrottrTarget,
    keys: Sequence[bytes],
    ask: Callable[[Client, bytes], Sequence[Any] | None],
    columns: Sequence[Column],
    output: Output,
) -> None:
    """Shows a row for each key, even for a key that does not exist. In that case the exit status is 1."""
    with target.connect() as client:
        found = [(key, ask(client, key)) for key in keys]
    nothing = (None,) * len(columns)
    output.rows([KEY_COLUMN, *columns], ((key, *(nothing if row is None else row)) for key, row in found))
    if any(row is None for _, row in found):
        click.get_current_context().exit(EXIT_NOT_AVAILABLE)


# ---- keys ----


@throttr.command()
@keys_argument
@output_option
@pass_target
def query(target: ThrottrTarget, keys: tuple[bytes, ...], output: Output) -> None:
    """Shows quotas and their remaining time to live."""

    def ask(client: Client, key: bytes) -> Sequence[Any] | None:
        found = client.query(key)
        return found and (found.quota, seconds_of(found.ttl, found.ttl_type))

    ask_each(target, keys, ask, [Column("quota", Kind.NUMBER, nothing="not found"), TTL_COLUMN], output)


@throttr.command()
@click.argument("key", type=KEY)
@click.argument("quota", type=QUOTA)
@ttl_option
@pass_target
def insert(target: ThrottrTarget, key: bytes, quota: int, ttl: float) -> None:
    """Creates a key with a quota. The exit status is 1 if the key exists already."""
    with target.connect() as client:
        if not client.insert(key, quota, *units_of(ttl, target)):
            refused(f"{shown(key)} exists already, or the server's memory is full")


def change(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the arguments that update, incr and decr share."""
    function = click.option("--ttl", type=DURATION, help=("Change the remaining time to live instead of the quota."))(
        function
    )
    return click.argument("key", type=KEY)(function)


@throttr.command()
@change
@click.argument("quota", type=QUOTA, required=False)
@pass_target
def update(target: ThrottrTarget, key: bytes, quota: int | None, ttl: float | None) -> None:
    """Replaces the quota of a key. With --ttl, replaces the remaining time to live of the key instead."""
    from counterd.client.throttr import Change

    if quota is None and ttl is None:
        raise click.UsageError("use either QUOTA or --ttl")
    change_key(target, key, Change.PATCH, quota, ttl)


@throttr.command()
@change
@click.argument("by", type=QUOTA, required=False)
@pass_target
def incr(target: ThrottrTarget, key: bytes, by: int | None, ttl: float | None) -> None:
    """Adds BY (default 1) to the quota of a key. With --ttl, extends the remaining time to live of the key instead."""
    from counterd.client.throttr import Change

    change_key(target, key, Change.INCREASE, by, ttl)


@throttr.command()
@change
@click.argument("by", type=QUOTA, required=False)
@pass_target
def decr(target: ThrottrTarget, key: bytes, by: int | None, ttl: float | None) -> None:
    """Subtracts BY (default 1) from the quota of a key. With --ttl, shortens the remaining time to live of the key
    instead.

    The exit status is 1 if the quota is less than BY; the quota then does not change.
    """
    from counterd.client.throttr import Change

    change_key(target, key, Change.DECREASE, by, ttl)


def change_key(target: ThrottrTarget, key: bytes, how: int, value: int | None, ttl: float | None) -> None:
    """Changes the quota of a key by value (default 1), or its TTL by ttl seconds."""
    from counterd.client.throttr import Attribute

    if value is not None and ttl is not None:
        raise click.UsageError("use either the amount or --ttl")
    with target.connect() as client:
        if ttl is None:
            if not client.update(key, Attribute.QUOTA, how, 1 if value is None else value):
                refused(f"{shown(key)}: the quota does not exist, or its new value would be out of range")
            return
        found = client.query(key)  # a TTL is changed in the unit in which it was created
        if found is None:
            refused(f"{shown(key)}: not found")
        count, rest = divmod(round(ttl * 1e9), unit_ns(found.ttl_type))
        if rest:
            step = span(unit_ns(found.ttl_type) / 1e9)
            raise ValueError(
                f"the time to live of {shown(key)} changes in steps of {step}; {ttl:g} s is not a multiple"
            )
        if not client.update(key, Attribute.TTL, how, count):
            refused(f"{shown(key)}: not found")


@throttr.command()
@keys_argument
@pass_target
def purge(target: ThrottrTarget, keys: tuple[bytes, ...]) -> None:
    """Removes keys."""
    with target.connect() as client:
        missing = [key for key in keys if not client.purge(key)]
    if missing:
        refused(f"not found: {', '.join(map(shown, missing))}")


@throttr.command("set")
@click.argument("key", type=KEY)
@click.argument("value", type=DATA)
@ttl_option
@pass_target
def set_(target: ThrottrTarget, key: bytes, value: bytes, ttl: float) -> None:
    """Creates or replaces a buffer. The exit status is 1 if the key is a quota."""
    with target.connect() as client:
        if not client.set(key, value, *units_of(ttl, target)):
            refused(f"{shown(key)} is a quota, or the server's memory is full")


@throttr.command()
@keys_argument
@output_option
@pass_target
def get(target: ThrottrTarget, keys: tuple[bytes, ...], output: Output) -> None:
    """Shows buffers and their remaining time to live."""

    def ask(client: Client, key: bytes) -> Sequence[Any] | None:
        found = client.get(key)
        return found and (found.value, seconds_of(found.ttl, found.ttl_type))

    ask_each(target, keys, ask, [Column("value", Kind.BYTES, nothing="not found"), TTL_COLUMN], output)


ORDERS: dict[str, Callable[[ListEntry], Any]] = {
    "key": lambda entry: entry.key,
    "expires": lambda entry: (entry.expires_at, entry.key),
    "size": lambda entry: (-entry.bytes_used, entry.key),
}


@throttr.command("list")
@click.option("--match", metavar="GLOB", help="Show only keys that match this pattern, such as 'user:*'.")
@click.option(
    "--sort",
    type=click.Choice(list(ORDERS)),
    default="key",
    help="Sort by key, by the time to live, or by size with the largest first.  [default: key]",
)
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Show at most N rows.")
@output_option
@pass_target
def list_(target: ThrottrTarget, match: str | None, sort: str, limit: int | None, output: Output) -> None:
    """Shows all keys."""
    with target.connect() as client:
        entries = client.list()
    like = glob(match)
    chosen = sorted((entry for entry in entries if like(entry.key)), key=ORDERS[sort])[:limit]
    output.rows(
        [
            KEY_COLUMN,
            Column("type"),
            Column("expires_at", Kind.WHEN, title="expires"),
            Column("bytes_used", Kind.SIZE, title="size"),
        ],
        ((each.key, called(each.key_type), each.expires_at, each.bytes_used) for each in chosen),
    )


def called(member: int) -> str:
    """Returns the name of an enum's member in lower case, or the number if the enum does not have the member."""
    return getattr(member, "name", str(member)).lower()


@throttr.command()
@keys_argument
@output_option
@pass_target
def stat(target: ThrottrTarget, keys: tuple[bytes, ...], output: Output) -> None:
    """Shows how often each key was read and written."""

    def ask(client: Client, key: bytes) -> Sequence[Any] | None:
        found = client.stat(key)
        return found and (found.reads, found.writes, found.reads_per_minute, found.writes_per_minute)

    ask_each(
        target,
        keys,
        ask,
        [
            Column("reads", Kind.NUMBER, nothing="not found"),
            Column("writes", Kind.NUMBER),
            Column("reads_per_minute", Kind.NUMBER, title="reads/min"),
            Column("writes_per_minute", Kind.NUMBER, title="writes/min"),
        ],
        output,
    )


# ---- the server ----


@throttr.command()
@output_option
@pass_target
def info(target: ThrottrTarget, output: Output) -> None:
    """Shows the server's statistics."""
    with target.connect() as client:
        found = client.info()
    output.record([figure(name) for name in found._fields], found)


def figure(name: str) -> Column:
    """Returns the column for a field in the statistics of the server or of a connection."""
    if name in ("running_since", "connected_at"):
        return Column(name, Kind.WHEN)
    if name.endswith(("_bytes", "_bytes_per_minute")):
        return Column(name, Kind.SIZE)
    return Column(name, Kind.TEXT if name == "version" else Kind.NUMBER, detail=name == "timestamp")


# The fields of a connection that have room in a table.
CONNECTION_COLUMNS = {
    "id": Column("id"),
    "type": Column("type", detail=True),
    "kind": Column("kind"),
    "ip_version": Column("ip_version", Kind.NUMBER, detail=True),
    "ip": Column("ip"),
    "port": Column("port"),
    "connected_at": Column("connected_at", Kind.WHEN, title="connected"),
    "read_bytes": Column("read_bytes", Kind.SIZE, title="read"),
    "write_bytes": Column("write_bytes", Kind.SIZE, title="written"),
}


@throttr.command()
@output_option
@pass_target
def connections(target: ThrottrTarget, output: Output) -> None:
    """Shows all connections. The JSON and CSV output has all statistics of each connection."""
    from counterd.client.throttr import ConnectionInfo

    with target.connect() as client:
        found = client.connections()
    columns = [CONNECTION_COLUMNS.get(name, Column(name, detail=True)) for name in ConnectionInfo._fields]
    rows = (each._replace(id=each.id.hex(), type=called(each.type), kind=called(each.kind)) for each in found)  # type: ignore[arg-type]
    output.rows(columns, rows)


# ---- channels ----


@throttr.command()
@output_option
@pass_target
def channels(target: ThrottrTarget, output: Output) -> None:
    """Shows the channels that have subscribers."""
    with target.connect() as client:
        found = client.channels()
    output.rows(
        [
            Column("channel", Kind.BYTES),
            Column("read_bytes", Kind.SIZE, title="delivered"),
            Column("write_bytes", Kind.SIZE, title="published"),
            Column("subscriptions", Kind.NUMBER),
        ],
        sorted(found),
    )


@throttr.command()
@click.argument("channel", type=CHANNEL)
@click.argument("payload", type=DATA)
@pass_target
def publish(target: ThrottrTarget, channel: bytes, payload: bytes) -> None:
    """Sends PAYLOAD to the subscribers of a channel.

    The exit status is 1 if the channel has no subscribers.
    """
    with target.connect() as client:
        if not client.publish(channel, payload):
            refused(f"{shown(channel)} has no subscribers")


@throttr.command()
@click.argument("channels", metavar="CHANNEL...", nargs=-1, required=True, type=CHANNEL)
@output_option
@pass_target
def subscribe(target: ThrottrTarget, channels: tuple[bytes, ...], output: Output) -> None:
    """Shows each message that is published to these channels, until Ctrl-C."""
    add = output.stream([Column("time", Kind.CLOCK), Column("channel", Kind.BYTES), Column("payload", Kind.BYTES)])
    with until_interrupted(), target.connect() as client:
        for channel in {*channels} - {EVERYBODY}:
            if not client.subscribe(channel):
                refused(f"{shown(channel)}: the server's memory has no room for another subscription")
        while True:
            try:
                event = client.next_event()
            except EventsLost as error:
                say(str(error))
                continue
            if event is not None and event.channel in channels:  # events to "*" and to this connection itself come too
                add((datetime.now(timezone.utc), event.channel, event.payload))
