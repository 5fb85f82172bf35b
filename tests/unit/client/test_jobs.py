"""Pages of jobs, and those that are put meanwhile, beside a server that says what a test has written down.

The commands are asked of the real one: tests/functional/test_counterctl_beanstalk.py
"""

from __future__ import annotations

import itertools
import random
import socket
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client._addresses import Address
from counterd.client._jobs import Job, Link, Tail, checked, id_of
from counterd.errors import ConnectionLost, ProtocolError, Timeout
from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk.errors import Refused
from counterd.protocols.beanstalk.wire import Reply, Status
from steps import Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from steps import Step


@pytest.fixture
def linked() -> Iterator[Callable[..., Link]]:
    """Makes a connection to a server that takes these steps."""
    made: list[tuple[Script, Link]] = []

    def link(*steps: Step, timeout: float = 5.0) -> Link:
        server = Script(steps, socket.create_server(("127.0.0.1", 0)))
        made.append((server, Link(Address("127.0.0.1", server.port), timeout)))
        return made[-1][1]

    yield link
    for server, connected in made:
        connected.close()
        server.stop()


def document(*ids: int) -> bytes:
    body = b"---\n" + b"".join(b"- id: %d\n  state: ready\n" % number for number in ids)
    return b"OK %d\r\n%b\r\n" % (len(body), body)


def asked(first: int) -> bytes:
    return wire.list_jobs(b"t", first=first, count=wire.BATCH_MAX)


# ---- one connection ----


def test_replies_come_however_they_are_cut(linked: Callable[..., Link]) -> None:
    link = linked((wire.peek(1), b"FOUND 1 2\r\na"), lambda it: it.sendall(b"b\r\n"), (wire.peek(2), b"NOT_FOUND\r\n"))
    assert (link.peek(1), link.peek(2)) == (Job(1, b"ab"), None)


def test_tubes_are_asked_for_together(linked: Callable[..., Link]) -> None:
    asked = wire.inspect_tube(b"a") + wire.inspect_tube(b"b")
    link = linked((asked, b"NOT_FOUND\r\nOK 12\r\n---\nname: b\n\r\n"))
    assert list(link.stats_tubes([b"a", b"b"])) == [None, {"name": "b"}]


def test_beanstalkd_tells_less_of_a_tube(linked: Callable[..., Link]) -> None:
    link = linked(
        (wire.inspect_tube(b"a"), b"UNKNOWN_COMMAND\r\n"), (wire.stats_tube(b"a"), b"OK 12\r\n---\nname: a\n\r\n")
    )
    assert list(link.stats_tubes([b"a"])) == [{"name": "a"}]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"DRAINING\r\n", "the server is draining, and takes no jobs"),
        (b"JOB_TOO_BIG\r\n", "the body is longer than the server takes"),
        (b"OUT_OF_MEMORY\r\n", "the server has no room for it"),
        (b"INTERNAL_ERROR\r\n", "the server cannot write it to its journal"),
        (b"BAD_FORMAT\r\n", "the server does not take these arguments"),
        (b"UNKNOWN_COMMAND\r\nUNKNOWN_COMMAND\r\n", "the server does not know this command, which is counterd's own"),
    ],
)
def test_what_is_refused(linked: Callable[..., Link], reply: bytes, why: str) -> None:
    asked = wire.put_unique(b"x", b"k", 7, priority=1, delay=2, ttr=3)
    link = linked((wire.use(b"t"), b"USING t\r\n"), (asked, reply))
    with pytest.raises(Refused) as refused:
        link.put(b"t", b"x", priority=1, delay=2, ttr=3, key=b"k", keep=7)
    assert str(refused.value) == refused.value.text == why


def test_another_reply_is_not_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="the reply TOUCHED, where INSERTED or EXISTS was to come"):
        checked(Reply(Status.TOUCHED), Status.INSERTED, Status.EXISTS)
    with pytest.raises(ProtocolError, match="a job whose id is 'x'"):
        id_of({"id": "x"})


def test_a_server_that_says_something_else_nothing_or_goodbye(linked: Callable[..., Link]) -> None:
    with pytest.raises(ProtocolError, match="no reply begins like this"):
        linked((wire.stats(), b"HTTP/1.0 400\r\n")).stats()
    with pytest.raises(ConnectionLost, match="closed the connection"):
        linked((wire.stats(), None)).stats()
    with pytest.raises(Timeout, match=r"did not answer within 0\.05 s"):
        linked((wire.stats(), b"OK 10\r\n"), lambda it: it.recv(1), timeout=0.05).stats()


# ---- pages ----


def test_a_short_page_is_not_the_last(linked: Callable[..., Link]) -> None:
    """Jobs may have gone while it was made."""
    link = linked((asked(0), document(3, 5)), (asked(6), document(9)), (asked(10), document()))
    assert [id_of(job) for job in link.jobs(b"t")] == [3, 5, 9]


def test_nothing_follows_the_highest_id(linked: Callable[..., Link]) -> None:
    assert [id_of(job) for job in linked((asked(0), document(wire.ID_MAX))).jobs(b"t")] == [wire.ID_MAX]


def test_a_tube_that_is_not_there_has_no_jobs(linked: Callable[..., Link]) -> None:
    assert list(linked((asked(0), b"NOT_FOUND\r\n")).jobs(b"t")) == []


class Jobs(Link):
    """In the place of a server: its jobs, and how many one page has."""

    def __init__(self, *ids: int, at_once: int = 3) -> None:
        self.ids = set(ids)
        self._at_once = at_once

    def page(self, tube: bytes, state: str = "all", first: int = 0, needle: bytes = b"") -> list[dict[str, str]]:
        return self.listed(number for number in self.ids if number >= first)

    def listed(self, ids: Any) -> list[dict[str, str]]:
        return [{"id": str(number)} for number in sorted(ids)[: self._at_once]]


@pytest.mark.parametrize("ids", [(), (1,), (7, 8, 9, 10, 11), (5, 1 << 40), (wire.ID_MAX,), range(1, 1000)])
def test_the_newest_is_found(ids: Sequence[int]) -> None:
    assert Jobs(*ids).newest(b"t") == max(ids, default=0)


# ---- those that are put meanwhile ----


def test_each_new_job_is_seen_once() -> None:
    jobs = Jobs(1, 2)
    tail = Tail(jobs, b"t")
    assert tail.look() == []
    jobs.ids |= {3, 4, 5, 6, 7, 8}
    assert [id_of(job) for job in tail.look()] == [3, 4, 5, 6, 7, 8]
    jobs.ids -= {1, 4, 8}
    assert tail.look() == []
    jobs.ids |= {1 << 20}
    assert [id_of(job) for job in tail.look()] == [1 << 20]
    assert tail.look() == []


class Racing(Jobs):
    """Jobs are put while a page is made. Of those any may be missing in it, also one with a lower id than one of it."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__(1, 2, 3)
        self._generator = generator
        self._next = itertools.count(4)
        self.puts = 200

    def page(self, tube: bytes, state: str = "all", first: int = 0, needle: bytes = b"") -> list[dict[str, str]]:
        there = {number for number in self.ids if number >= first}
        new = {next(self._next) for _ in range(min(self._generator.randrange(4), self.puts))}
        self.puts -= len(new)
        self.ids |= new
        return self.listed(there | {number for number in new if self._generator.random() < 0.5})


@pytest.mark.parametrize("seed", range(50))
def test_no_job_is_missed_that_is_put_while_others_are_listed(seed: int) -> None:
    jobs = Racing(random.Random(seed))
    tail = Tail(jobs, b"t")
    before = set(jobs.ids)
    seen: list[int] = []
    while jobs.puts:
        seen += [id_of(job) for job in tail.look()]
    for _ in range(2):
        seen += [id_of(job) for job in tail.look()]
    assert len(seen) == len(set(seen))
    assert set(seen) >= jobs.ids - before
