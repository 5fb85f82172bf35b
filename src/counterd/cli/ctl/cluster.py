"""`counterctl cluster`, which asks the servers through which daemons share limits.

Floor 5 (ARCHITECTURE.md). The command reads the address of the servers, and the password, where counterd reads them, so
that no password is on the command line. It works as well while no daemon runs.
"""

from __future__ import annotations

import importlib.util
import math
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from counterd.cli.ctl.common import NAME, Server, refused, say, shown
from counterd.cli.ctl.output import Column, Kind, Output, output_option, shown_text
from counterd.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from counterd.cluster.lease_protocol import Share
    from counterd.control.config.keys import Cluster as Settings
    from counterd.control.link import Link

SCANNED = 1000  # counters of a daemon that a server is asked for at a time: about a millisecond of its time
PAGES_MAX = 100_000  # of them: as many counters as a daemon can have

DAEMONS = (
    Column("daemon"),
    Column("lease_seconds", Kind.SPAN, "lease"),
    Column("partitions", Kind.NUMBER),
    Column("counters", Kind.NUMBER),
    Column("rights", Kind.NUMBER),
    Column("used", Kind.NUMBER),
)
SHARES = (
    Column("daemon", nothing="all"),
    Column("rights", Kind.NUMBER),
    Column("used", Kind.NUMBER),
    Column("mode"),
    Column("waits_for", Kind.NUMBER, "waits for"),
    Column("full_seconds", Kind.SPAN, "rate full in"),
)

T = TypeVar("T")


@click.command()
@click.argument("name", type=NAME, required=False)
@click.option("--evict", metavar="DAEMON", help="End the leases of a daemon, so that others get its permits.")
@click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The configuration file of a daemon of the cluster.  [default: as for counterd]",
)
@click.option(
    "--servers",
    metavar="URL",
    envvar="COUNTERD_CLUSTER",
    show_envvar=True,
    help="The servers, as in cluster.url, in place of those in the file.",
)
@output_option
@click.pass_context
def cluster(
    context: click.Context,
    /,
    name: bytes | None,
    evict: str | None,
    config: Path | None,
    servers: str | None,
    output: Output,
) -> None:
    """Shows the daemons that share limits: when the lease of each ends, and which permits it may use (rights). With
    NAME, the command shows the rights to one counter, and when all units of the rate with this name are there again.

    The figures are those of the last tick of each daemon. A daemon that is evicted although it is running loses its
    rights, and with cluster.on_loss = drop it closes the connections that hold shared permits.

    The exit status is 1 if there is no such daemon, or if no daemon has rights to the counter and no units of the rate
    are taken.
    """
    if name is not None and evict is not None:
        raise click.UsageError("give either NAME or --evict")
    if importlib.util.find_spec("hiredis") is None:
        raise click.UsageError("this needs the extra redis: in the source tree, run pip install '.[redis]'")
    server = context.find_object(Server)
    assert server is not None  # the group has made it
    settings, timeout = settings_of(config, servers), server.timeout
    if evict is not None:
        ended = asked(settings, timeout, lambda links: end_leases(links, evict))
        if not ended:
            refused(f"no daemon {shown_text(evict)} has a lease")
        say(f"ended the leases of {shown_text(evict)} in {ended} partitions")
        return
    if name is None:
        rows = asked(settings, timeout, read_daemons)
        output.rows(DAEMONS, rows)
    else:
        rows = asked(settings, timeout, lambda links: read_shares(links, name))
        output.rows(SHARES, rows)
    if not rows:
        refused("no daemon has a lease" if name is None else unused(name, settings.prefix.encode()))


def unused(name: bytes, prefix: bytes) -> str:
    """Says why there is nothing to show of a name."""
    if not name.startswith(prefix):
        return f"{shown(name)} is not shared: it does not begin with cluster.prefix, {shown(prefix)}"
    return f"no daemon has rights to {shown(name)}"


def settings_of(config: Path | None, servers: str | None) -> Settings:
    """Returns the settings of the cluster. Raises UsageError."""
    from counterd.control.config import loading
    from counterd.control.config.keys import Cluster, read_servers
    from counterd.protocols import find_protocols

    try:
        if servers:
            return Cluster(url=read_servers(servers))
        found = loading.load(loading.find_file(config), (), find_protocols())
    except ValueError as error:
        raise click.UsageError(f"--servers: {error}") from None
    except loading.ConfigError as error:
        raise click.UsageError(str(error)) from None
    if not found.process.cluster.url:
        raise click.UsageError(f"{found.path} has no cluster.url; name another file with -c, or --servers URL")
    return found.process.cluster


def asked(settings: Settings, timeout: float, ask: Callable[[list[Link]], Awaitable[T]]) -> T:
    """Connects to the server of each partition, and returns what ask() returns. Raises UsageError or ConnectionLost."""
    import asyncio

    from counterd.control.cluster import read_login
    from counterd.control.config.keys import split_servers
    from counterd.control.config.loading import ConfigError
    from counterd.control.link import LinkFailed, Place
    from counterd.control.servers import Servers

    async def run() -> T:
        complete = asyncio.Event()

        def look() -> None:
            if None not in servers.owners:
                complete.set()

        seeds = [Place(*each) for each in split_servers(settings.url).places]
        servers = Servers(seeds, login, lambda _: None, look)
        servers.start()
        try:
            await asyncio.wait_for(complete.wait(), timeout)
            return await ask([link for link in servers.owners if link is not None])
        except asyncio.TimeoutError:
            raise ConnectionLost(f"cannot reach the servers of the cluster: {servers.why}") from None
        finally:
            servers.close()

    try:
        login = read_login(settings, str)
        return asyncio.run(run())
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except LinkFailed as error:
        raise ConnectionLost(f"a server of the cluster cannot answer: {error}") from None


# ---- what servers are asked ----


class Lease(NamedTuple):
    """A lease in a partition."""

    name: str  # under which the daemon has it
    daemon: str
    left_s: float  # until it ends


async def answered(link: Link, read: Callable[[Any], T], *words: bytes | str | int) -> T:
    """Asks a server, and returns what read() makes of the answer. Raises LinkFailed."""
    from counterd.control.link import LinkFailed, OddAnswer

    try:
        found = await link.ask(*words)
        try:
            return read(found)
        except (AttributeError, IndexError, OverflowError, TypeError, ValueError, struct.error):
            raise OddAnswer(str(words[0]), found) from None
    except LinkFailed as error:
        raise LinkFailed(f"{link.place}: {error}") from None


def read_time(found: Any) -> float:
    """Returns the time of a server's clock, in seconds. This function and the next ones read answers, and raise what
    answered() expects if an answer makes no sense."""
    if not isinstance(found, list):  # the numbers of bytes could be taken for it
        raise TypeError
    seconds, micros = map(int, found)
    return seconds + micros / 1e6


def read_scores(found: Any) -> dict[str, float]:
    """Returns the members of a sorted set and their scores."""
    scores = {found[at].decode(): float(found[at + 1]) for at in range(0, len(found), 2)}
    if not all(map(math.isfinite, scores.values())):
        raise ValueError
    return scores


def read_share(packed: Any) -> Share | None:
    from counterd.cluster import lease_protocol

    return lease_protocol.share(packed) if packed is not None else None


def read_full(packed: Any) -> float | None:
    """Returns when all units of a rate are there, in seconds of the server's clock."""
    from counterd.cluster import lease_protocol

    found = lease_protocol.full_us(packed) / 1e6 if packed is not None else None
    if found is not None and not math.isfinite(found):
        raise ValueError
    return found


def read_page(found: Any) -> tuple[bytes, list[Share]]:
    """Returns the cursor and the values of an answer to HSCAN."""
    from counterd.cluster import lease_protocol

    cursor, page = found
    if not isinstance(cursor, bytes):
        raise TypeError
    return cursor, [lease_protocol.share(packed) for packed in page[1::2]]


async def read_leases(link: Link, partition: int) -> list[Lease]:
    """Returns the leases in a partition."""
    from counterd.cluster import lease_protocol
    from counterd.control.cluster import daemon_of

    ends_ms = await answered(link, read_scores, "ZRANGE", lease_protocol.keys(partition, "")[0], 0, -1, "WITHSCORES")
    now_s = await answered(link, read_time, "TIME")
    return [Lease(name, daemon_of(name), end_ms / 1e3 - now_s) for name, end_ms in ends_ms.items()]


async def read_daemons(links: list[Link]) -> list[tuple[Any, ...]]:
    """Returns the rows of DAEMONS. The lease of a daemon is the one that was renewed last."""
    from counterd.cluster import lease_protocol

    left: dict[str, float] = {}
    sums: dict[str, Counter[str]] = {}
    for partition, link in enumerate(links):
        for name, daemon, left_s in await read_leases(link, partition):
            shares = await scan(link, lease_protocol.keys(partition, name)[-1])
            if left_s <= 0 and not shares:
                continue  # nothing has to be taken back from it
            left[daemon] = max(left_s, left.get(daemon, left_s))
            of_one = sums.setdefault(daemon, Counter())
            of_one["partitions"] += 1
            for share in shares:
                of_one.update(counters=1, rights=share.rights, used=share.used)
    names = ("partitions", "counters", "rights", "used")
    return [(daemon, left[daemon], *(sums[daemon][name] for name in names)) for daemon in sorted(left)]


async def scan(link: Link, key: str) -> list[Share]:
    """Returns what a daemon has of each counter. Raises LinkFailed."""
    from counterd.control.link import LinkFailed

    cursor, shares = b"0", []
    for _ in range(PAGES_MAX):
        cursor, page = await answered(link, read_page, "HSCAN", key, cursor, "COUNT", SCANNED)
        shares += page
        if cursor == b"0":
            return shares
    raise LinkFailed(f"{link.place}: HSCAN does not end")


async def read_shares(links: list[Link], name: bytes) -> list[tuple[Any, ...]]:
    """Returns the rows of SHARES: first the sums of all daemons, and what is known of the rate."""
    from counterd.cluster import lease_protocol

    partition = lease_protocol.partition_of(name)
    link = links[partition]
    rows = []
    for lease, daemon, _ in await read_leases(link, partition):
        share = await answered(link, read_share, "HGET", lease_protocol.keys(partition, lease)[-1], name)
        if share is not None:
            rows.append((daemon, share.rights, share.used, share.mode.name.lower(), share.waits_for, None))
    full_s = await answered(link, read_full, "GET", lease_protocol.rate_key(name))
    if full_s is not None:
        full_s = max(full_s - await answered(link, read_time, "TIME"), 0)
    sums = (sum(row[1] for row in rows), sum(row[2] for row in rows), None, sum(row[4] for row in rows))
    return [(None, *sums, full_s), *sorted(rows)] if rows or full_s is not None else []


async def end_leases(links: list[Link], daemon: str) -> int:
    """Ends all leases of a daemon. Returns how many there were. The next call of any daemon takes its rights back."""
    from counterd.cluster import lease_protocol

    ended = 0
    for partition, link in enumerate(links):
        for lease in await read_leases(link, partition):
            if lease.daemon == daemon:
                leases = lease_protocol.keys(partition, "")[0]
                ended += await answered(link, int, "ZADD", leases, "XX", "CH", 1, lease.name)
    return ended
