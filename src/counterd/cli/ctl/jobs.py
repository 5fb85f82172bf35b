"""What the commands of `counterctl beanstalk` ask a server: jobs by pages, and those that are put meanwhile.

Floor 5. A connection of its own, where one command goes out at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.cli.ctl.common import refused
from counterd.client._connection import Connection
from counterd.errors import ProtocolError
from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk.wire import Reply, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from counterd.client._addresses import Address

# What a reply says that is not the one that was hoped for.
REFUSALS = {
    Status.DRAINING: "the server is draining, and takes no jobs",
    Status.JOB_TOO_BIG: "the body is longer than the server takes",
    Status.OUT_OF_MEMORY: "the server has no room for it",
    Status.INTERNAL_ERROR: "the server cannot write it to its journal",
    Status.BAD_FORMAT: "the server does not take these arguments",
    Status.UNKNOWN_COMMAND: "the server does not know this command, which is counterd's own",
}


class Link(Connection):
    """A connection to a server."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._parser = wire.Parser()
        self._replies: list[Reply] = []
        super().__init__(address, timeout)

    def ask_all(self, commands: Sequence[bytes]) -> list[Reply]:
        """Sends commands together, and returns their replies. None of them may have more than one."""
        with self._exchange() as deadline:
            self._send(b"".join(commands), deadline)
            while len(self._replies) < len(commands):
                self._receive(deadline)
        replies = self._replies[: len(commands)]
        # A server that does not know a command takes its body for another one.
        self._replies = self._replies[len(commands) :]
        return replies

    def ask(self, command: bytes, *expected: Status) -> Reply:
        """The reply, if it is one of these; else the command of counterctl ends."""
        (reply,) = self.ask_all([command])
        return checked(reply, *expected)

    def use(self, tube: bytes) -> None:
        """What is put, kicked or peeked at next is of that tube."""
        self.ask(wire.use(tube), Status.USING)

    def page(self, tube: bytes, state: str = "all", first: int = 0, needle: bytes = b"") -> list[dict[str, str]]:
        """The first jobs of a tube with at least that id, that are in that state and have the needle in their bodies.

        As stats-job tells of them. None where there is no such tube.
        """
        asked = wire.list_jobs(tube, state, first, wire.BATCH_MAX, needle)
        reply = self.ask(asked, Status.OK, Status.NOT_FOUND)
        return wire.read_jobs(reply.body) if reply.status is Status.OK else []

    def jobs(self, tube: bytes, state: str = "all", first: int = 0, needle: bytes = b"") -> Iterator[dict[str, str]]:
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

    def look(self) -> list[dict[str, str]]:
        """Those that it has not returned before, as stats-job tells of them. Not those that have gone since."""
        jobs = self._link.jobs(self._tube, first=self._settled + 1)
        new = [job for job in jobs if id_of(job) not in self._known]
        self._known |= {id_of(job) for job in new}
        self._settled, self._newest = self._newest, max(self._known, default=self._newest)
        self._known = {number for number in self._known if number > self._settled}
        return new


def checked(reply: Reply, *expected: Status) -> Reply:
    """The reply, if it is one of these; else the command of counterctl ends. ProtocolError if none would be right."""
    if reply.status in expected:
        return reply
    if reply.status in REFUSALS:
        refused(REFUSALS[reply.status])
    raise ProtocolError(f"the reply {reply.status.value}, where {' or '.join(expected)} was to come")


def id_of(job: dict[str, str]) -> int:
    """Its id. ProtocolError."""
    if not job["id"].isdecimal():
        raise ProtocolError(f"a job whose id is {job['id']!r}")
    return int(job["id"])
