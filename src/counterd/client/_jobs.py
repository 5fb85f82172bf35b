"""What counterctl asks a server of the beanstalk protocol: tubes, jobs by pages, and those that are put meanwhile.

Stands beside the floors. One connection, where one call is under way at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from counterd.client._connection import Connection
from counterd.client._queue import Figures, checked
from counterd.errors import ProtocolError
from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk.wire import Reply, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from counterd.client._addresses import Address

# Tubes that are asked for together.
AT_ONCE = 100


class Job(NamedTuple):
    """With its body."""

    id: int
    body: bytes


class Link(Connection):
    """A connection to a server. Its calls raise Refused, Timeout, ConnectionLost and ProtocolError."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._parser = wire.Parser()
        self._replies: list[Reply] = []
        super().__init__(address, timeout)

    # ---- what there is ----

    def tubes(self) -> list[bytes]:
        """Their names."""
        return wire.read_list(self._ask(wire.list_tubes(), Status.OK).body)

    def stats(self) -> Figures:
        return wire.read_dictionary(self._ask(wire.stats(), Status.OK).body)

    def stats_tubes(self, names: Sequence[bytes]) -> Iterator[Figures | None]:
        """All that the server tells of them; None for a tube that is not there."""
        command = wire.inspect_tube
        for at in range(0, len(names), AT_ONCE):
            replies = self._ask_all([command(name) for name in names[at : at + AT_ONCE]])
            if replies[0].status is Status.UNKNOWN_COMMAND:  # beanstalkd
                command = wire.stats_tube
                replies = self._ask_all([command(name) for name in names[at : at + AT_ONCE]])
            for reply in replies:
                yield figures(checked(reply, Status.OK, Status.NOT_FOUND))

    def stats_job(self, job: int) -> Figures | None:
        """None if it is not there."""
        return figures(self._ask(wire.stats_job(job), Status.OK, Status.NOT_FOUND))

    def peek(self, job: int) -> Job | None:
        """None if it is not there."""
        return self._peek(wire.peek(job))

    def peek_next(self, tube: bytes, state: str) -> Job | None:
        """The next job of a tube that is ready, delayed or buried; None if there is none."""
        self._ask(wire.use(tube), Status.USING)
        return self._peek(wire.peek_next(state))

    def page(self, tube: bytes, state: str = "all", first: int = 0, needle: bytes = b"") -> list[Figures]:
        """The first jobs of a tube with at least that id, that are in that state and have the needle in their bodies.

        None where there is no such tube.
        """
        asked = wire.list_jobs(tube, state, first, wire.BATCH_MAX, needle)
        reply = self._ask(asked, Status.OK, Status.NOT_FOUND)
        return wire.read_jobs(reply.body) if reply.status is Status.OK else []

    def jobs(self, tube: bytes, state: str = "all", first: int = 0, needle: bytes = b"") -> Iterator[Figures]:
        """All of them, page by page: what is there throughout is among them once."""
        # A page may lack jobs that have gone while it was made, so a short one is not the last.
        while page := self.page(tube, state, first, needle):
            yield from page
            if (first := id_of(page[-1]) + 1) > wire.ID_MAX:
                return

    def newest(self, tube: bytes) -> int:
        """The highest id of a tube's jobs, 0 if it has none. By halving, as a page has the lowest ids."""
        low, high = 0, wire.ID_MAX
        while low < high:
            middle = low + (high - low + 1) // 2
            page = self.page(tube, first=middle)
            low, high = (id_of(page[-1]), high) if page else (low, middle - 1)
        return low

    # ---- what changes ----

    def put(
        self,
        tube: bytes,
        body: bytes,
        *,
        priority: int,
        delay: int,
        ttr: int,
        key: bytes | None = None,
        keep: int = 0,
    ) -> tuple[int, bool]:
        """The id of the job, and whether it is new, and not another one with that key. Times are in seconds."""
        command = wire.put(body, priority, delay, ttr)
        if key is not None:
            command = wire.put_unique(body, key, keep, priority=priority, delay=delay, ttr=ttr)
        self._ask(wire.use(tube), Status.USING)
        reply = self._ask(command, Status.INSERTED, Status.EXISTS)
        return reply.number or 0, reply.status is Status.INSERTED

    def kick(self, tube: bytes, bound: int) -> int:
        """How many jobs it were."""
        self._ask(wire.use(tube), Status.USING)
        return self._ask(wire.kick(bound), Status.KICKED).number or 0

    def kick_job(self, job: int) -> bool:
        """False if there is none that is buried or delayed."""
        return self._ask(wire.kick_job(job), Status.KICKED, Status.NOT_FOUND).status is Status.KICKED

    def clear(self, tube: bytes, state: str) -> int | None:
        """How many jobs it were; None if there is no such tube."""
        return self._ask(wire.clear_tube(tube, state), Status.CLEARED, Status.NOT_FOUND).number

    # ---- inside ----

    def _peek(self, command: bytes) -> Job | None:
        reply = self._ask(command, Status.FOUND, Status.NOT_FOUND)
        return None if reply.number is None else Job(reply.number, reply.body)

    def _ask(self, command: bytes, *expected: Status) -> Reply:
        (reply,) = self._ask_all([command])
        return checked(reply, *expected)

    def _ask_all(self, commands: Sequence[bytes]) -> list[Reply]:
        """Sends commands together, and returns their replies, one for each."""
        with self._exchange() as deadline:
            self._send(b"".join(commands), deadline)
            while len(self._replies) < len(commands):
                self._receive(deadline)
        replies = self._replies[: len(commands)]
        # A server that does not know a command takes its body for another one.
        self._replies = self._replies[len(commands) :]
        return replies

    def _received(self, data: bytes) -> None:
        self._replies += self._parser.feed(data)


class Tail:
    """The jobs that are put into a tube from now on."""

    def __init__(self, link: Link, tube: bytes) -> None:
        self._link = link
        self._tube = tube
        # A page may lack a job that was put while it was made, and have one that was put after it. What was there when
        # the page was begun it has: up to the newest job that was known by then all are settled after it.
        self._newest = self._settled = link.newest(tube)
        self._known: set[int] = set()  # beyond that

    def look(self) -> list[Figures]:
        """Those that it has not returned before, and that have not gone since."""
        jobs = self._link.jobs(self._tube, first=self._settled + 1)
        new = [job for job in jobs if id_of(job) not in self._known]
        self._known |= {id_of(job) for job in new}
        self._settled, self._newest = self._newest, max(self._known, default=self._newest)
        self._known = {number for number in self._known if number > self._settled}
        return new


def figures(reply: Reply) -> Figures | None:
    """None if there is no such thing."""
    return wire.read_dictionary(reply.body) if reply.status is Status.OK else None


def id_of(job: Figures) -> int:
    """Its id. ProtocolError."""
    if not job["id"].isdecimal():
        raise ProtocolError(f"a job whose id is {job['id']!r}")
    return int(job["id"])
