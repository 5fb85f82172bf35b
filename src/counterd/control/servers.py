"""Which of the servers has a partition of the shared limits, and connections to those that have one.

Floor 4 (ARCHITECTURE.md). A partition belongs to one server: to the master of its slot in a Redis Cluster, or else to
the only master. While a partition has no server, the known servers are asked in turn who has it. That is so at the
start, when a connection fails, and when a server says that it is the wrong one (MOVED, READONLY) or cannot answer
(LOADING, CLUSTERDOWN). So a failover needs no other code. Any other error concerns one call, and not its server.
"""

from __future__ import annotations

import asyncio
import binascii
import re
from typing import TYPE_CHECKING, NamedTuple

from counterd.cluster.lease_protocol import PARTITIONS, TAGS
from counterd.control.link import Link, LinkFailed, Login, OddAnswer, Place, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

# What code raises that expects other types or lengths in an answer.
UNFIT = (AttributeError, IndexError, TypeError, ValueError)
RETRY_S = 0.25  # before servers are asked again who has a partition; a failover of Redis takes seconds
SLOTS = 16384  # of a Redis Cluster

# Partitions by the slot of their keys, which have {TAG} in their names.
PARTITION_OF_SLOT = {binascii.crc_hqx(b"%d" % tag, 0) % SLOTS: number for number, tag in enumerate(TAGS)}


# Errors of a server that can serve no call now, or that has lost the authority, which each new connection loads. Before
# Redis 7, an error in a script has the word after a dash.
UNABLE = re.compile(
    r"(?:^|-)(?:BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOAUTH|NOPERM|NOREPLICAS|NOSCRIPT|OOM|READONLY|WRONGPASS)\b"
    r"|^ERR Function not found"
)


class Map(NamedTuple):
    """What a server knows about a cluster.

    owners: the master of each partition that has one. places: all servers. is_cluster: whether it is a Redis Cluster.
    """

    owners: Mapping[int, Place]
    places: Iterable[Place]
    is_cluster: bool = True


async def check_state(link: Link) -> None:
    """Raises LinkFailed if a server of a Redis Cluster answers no calls now. Its map does not say so."""
    found = await link.ask("CLUSTER", "INFO")
    if not isinstance(found, bytes):
        raise OddAnswer("CLUSTER INFO", found)
    if b"cluster_state:ok" not in found:
        raise LinkFailed("CLUSTERDOWN The cluster is down")


async def read_map(link: Link) -> Map | None:
    """Returns what a server of a Redis Cluster knows, or None if the server is in none. Raises LinkFailed."""
    try:
        found = await link.ask_for_slots()
    except LinkFailed as error:
        if "cluster support disabled" in str(error):
            return None
        raise
    owners: dict[int, Place] = {}
    places: list[Place] = []
    try:
        for first, last, *servers in found:
            # A server that does not know its own address, as in a cluster of one, leaves it out.
            those = [_place(server[0] or link.place.host.encode(), server[1]) for server in servers]
            places += those
            owners |= {number: those[0] for slot, number in PARTITION_OF_SLOT.items() if first <= slot <= last}
    except UNFIT:
        raise OddAnswer("CLUSTER SLOTS", found) from None
    return Map(owners, places)


def _place(host: bytes, port: bytes | int) -> Place:
    """Returns an address in an answer. Raises what is UNFIT."""
    return Place(host.decode(), int(port))


class Role(NamedTuple):
    """What a server without a cluster says about itself.

    is_master, replicas, offset: the one to follow is the largest. places: of its master or replicas.
    """

    is_master: bool
    replicas: int
    offset: int
    places: list[Place]


async def read_role(link: Link) -> Role:
    """Returns the role of a server. Raises LinkFailed."""
    found = await link.ask("ROLE")
    try:
        kind, *rest = found
        if kind == b"master":
            places = [_place(host, port) for host, port, _ in rest[1]]
            return Role(True, len(places), int(rest[0]), places)
        if kind == b"slave":
            return Role(False, 0, 0, [_place(*rest[:2])])
    except UNFIT:
        pass
    raise OddAnswer("ROLE", found)


class Servers:
    """Finds the server of each partition, from start() to close().

    seeds: the servers to ask first. login: of new connections. found: called with each partition that has got a server.
    searched: called after each search.
    owners: the connection to the server of each partition, or None while it has none. why: the last failure, for
    people.
    """

    def __init__(
        self, seeds: Sequence[Place], login: Login, found: Callable[[int], None], searched: Callable[[], None]
    ) -> None:
        self.owners: list[Link | None] = [None] * PARTITIONS
        self.why = "nobody was asked yet"
        self._seeds = seeds
        self._known = [*seeds]  # in the order in which they are to be asked
        self.login = login
        self._found = found
        self._searched = searched
        self._links: dict[Place, Link] = {}
        self._missing = asyncio.Event()  # a partition has no server
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to search."""
        self._missing.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def refused(self, partition: int, why: str) -> Place | None:
        """Looks for another server of a partition if its server cannot serve it, as this error says.

        Returns the server if the error concerns only the call, or else None.
        """
        link = self.owners[partition]
        if link is None:
            return None
        if why.startswith("MOVED "):  # this server knows the right one
            self._known = [link.place, *(each for each in self._known if each != link.place)]
            self.owners[partition] = None
            self._missing.set()
        elif UNABLE.search(why):
            link.cut(why)
        else:
            return link.place
        return None

    def leave(self, partition: int, why: str) -> Place | None:
        """Looks for another server of a partition, and cuts the connection to the one that it has. Returns that one."""
        link = self.owners[partition]
        if link is None:
            return None
        link.cut(why)
        return link.place

    def stop(self) -> None:
        """Searches no more."""
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Searches no more, and closes all connections."""
        self.stop()
        for link in list(self._links.values()):
            link.cut("closed")

    # ---- inside ----

    async def _run(self) -> None:
        while True:
            await self._missing.wait()
            self._missing.clear()
            try:
                await self._search()
            except Exception as error:  # noqa: BLE001 - a bug, which must not be the end of all searches
                what = {"message": "failed to find the cluster", "exception": error}
                asyncio.get_running_loop().call_exception_handler(what)
            self._searched()
            if None in self.owners:
                self._known.append(self._known.pop(0))  # it may know less than the next one
                await asyncio.sleep(RETRY_S)
                self._missing.set()
            else:
                for link in [each for each in self._links.values() if each not in self.owners]:
                    link.cut("not needed")

    async def _search(self) -> None:
        """Asks the known servers, one after the other until one knows, who has the partitions. Connects to these."""
        for place in [*self._known]:
            try:
                found = await read_map(await self._reach(place))
            except LinkFailed as error:
                self._note(place, str(error))
                continue
            owners, places, is_cluster = found or await self._find_master()
            self._known = list(dict.fromkeys([place, *places, *self._seeds]))
            missing: dict[Place, list[int]] = {}
            for partition, owner in owners.items():
                if self.owners[partition] is None:
                    missing.setdefault(owner, []).append(partition)
            await asyncio.gather(*(self._take(*each, is_cluster) for each in missing.items()))
            return

    async def _find_master(self) -> Map:
        """Asks all servers, which are in no Redis Cluster, for their roles. All partitions belong to the master.

        If several are masters, as after a failover, the one with more replicas is the new one.
        """

        async def ask(place: Place) -> tuple[Role, Place] | None:
            try:
                return await read_role(await self._reach(place)), place
            except LinkFailed as error:
                self._note(place, str(error))
                return None

        roles = [each for each in await asyncio.gather(*map(ask, self._known)) if each is not None]
        places = [other for role, place in roles for other in (place, *role.places)]
        masters = [each for each in roles if each[0].is_master]
        return Map(dict.fromkeys(range(PARTITIONS), max(masters)[1]) if masters else {}, places, is_cluster=False)

    async def _take(self, place: Place, partitions: list[int], is_cluster: bool) -> None:
        """Makes a server the one of these partitions."""
        try:
            link = await self._reach(place)
            if is_cluster:
                await check_state(link)
            await link.prepare()
        except LinkFailed as error:
            self._note(place, str(error))
            return
        for partition in partitions:
            self.owners[partition] = link
            self._found(partition)

    async def _reach(self, place: Place) -> Link:
        """Returns the connection to a server, a new one if there is none. Raises LinkFailed."""
        if place not in self._links:
            link = await connect(place, self.login, self._lost)
            try:
                await link.identify()
            except BaseException as error:
                link.cut(str(error))
                raise
            self._links[place] = link
        return self._links[place]

    def _lost(self, link: Link) -> None:
        """Called when a connection ends."""
        self._note(link.place, link.why)
        self._known.sort(key=link.place.__eq__)  # it is asked last: it may not answer, and that takes long
        if self._links.get(link.place) is link:
            del self._links[link.place]
        for partition, owner in enumerate(self.owners):
            if owner is link:
                self.owners[partition] = None
                self._missing.set()

    def _note(self, place: Place, why: str) -> None:
        self.why = f"{place}: {why}"
