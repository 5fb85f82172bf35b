"""Pages of jobs, and jobs that are put meanwhile, with a scripted server.

The commands run against the real server in tests/functional/test_counterctl_beanstalk.py."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import TYPE_CHECKING, Any, cast

import pytest

from counterd.cli.ctl.beanstalk.jobs import Tail, id_of, jobs_of, newest_of, tubes_of
from counterd.client.beanstalk import Client
from counterd.errors import ProtocolError
from counterd.protocols.beanstalk import wire
from kit.machine import PATIENCE
from kit.scripted.script import Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kit.scripted.script import Step


@pytest.fixture
def connected() -> Iterator[Callable[..., Client]]:
    """Makes a client of a server that executes these steps."""
    with contextlib.ExitStack() as stack:

        def client(*steps: Step) -> Client:
            server = stack.enter_context(Script(*steps))
            return stack.enter_context(Client(port=server.port, timeout=PATIENCE))

        yield client


def document(*ids: int) -> bytes:
    body = b"---\n" + b"".join(b"- id: %d\n  state: ready\n" % number for number in ids)
    return b"OK %d\r\n%b\r\n" % (len(body), body)


def asked(first: int) -> bytes:
    return wire.list_jobs(b"t", first=first, count=wire.BATCH_MAX)


def test_tubes_are_inspected_with_one_write(connected: Callable[..., Client]) -> None:
    asked = wire.inspect_tube(b"a") + wire.inspect_tube(b"b")
    client = connected((asked, b"NOT_FOUND\r\nOK 12\r\n---\nname: b\n\r\n"))
    assert list(tubes_of(client, [b"a", b"b"])) == [None, {"name": "b"}]


def test_beanstalkd_reports_less_about_a_tube(connected: Callable[..., Client]) -> None:
    client = connected(
        (wire.inspect_tube(b"a"), b"UNKNOWN_COMMAND\r\n"), (wire.stats_tube(b"a"), b"OK 12\r\n---\nname: a\n\r\n")
    )
    assert list(tubes_of(client, [b"a"])) == [{"name": "a"}]


def test_an_invalid_job_id_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="a job whose id is 'x'"):
        id_of({"id": "x"})


# ---- pages ----


def test_a_short_page_is_not_the_last(connected: Callable[..., Client]) -> None:
    """Jobs may have been deleted while the server made it."""
    client = connected((asked(0), document(3, 5)), (asked(6), document(9)), (asked(10), document()))
    assert [id_of(job) for job in jobs_of(client, b"t")] == [3, 5, 9]


def test_nothing_follows_the_highest_id(connected: Callable[..., Client]) -> None:
    assert [id_of(job) for job in jobs_of(connected((asked(0), document(wire.ID_MAX))), b"t")] == [wire.ID_MAX]


def test_an_unknown_tube_has_no_jobs(connected: Callable[..., Client]) -> None:
    assert list(jobs_of(connected((asked(0), b"NOT_FOUND\r\n")), b"t")) == []


class Jobs:
    """Stands for a client: the jobs of its server, and how many a page may list."""

    def __init__(self, *ids: int, at_once: int = 3) -> None:
        self.ids = set(ids)
        self._at_once = at_once

    def list_jobs(
        self, tube: bytes, state: str, first: int, count: int, *, search: bytes = b""
    ) -> list[dict[str, str]]:
        return self.listed(number for number in self.ids if number >= first)

    def listed(self, ids: Any) -> list[dict[str, str]]:
        return [{"id": str(number)} for number in sorted(ids)[: self._at_once]]


@pytest.mark.parametrize("ids", [(), (1,), (7, 8, 9, 10, 11), (5, 1 << 40), (wire.ID_MAX,), range(1, 1000)])
def test_the_newest_job_is_found(ids: Sequence[int]) -> None:
    assert newest_of(cast("Client", Jobs(*ids)), b"t") == max(ids, default=0)


# ---- those that are put meanwhile ----


def test_each_new_job_is_seen_once() -> None:
    jobs = Jobs(1, 2)
    tail = Tail(cast("Client", jobs), b"t")
    assert tail.look() == []
    jobs.ids |= {3, 4, 5, 6, 7, 8}
    assert [id_of(job) for job in tail.look()] == [3, 4, 5, 6, 7, 8]
    jobs.ids -= {1, 4, 8}
    assert tail.look() == []
    jobs.ids |= {1 << 20}
    assert [id_of(job) for job in tail.look()] == [1 << 20]
    assert tail.look() == []


class Racing(Jobs):
    """A server on which jobs are put while a page is made. Any of them may be missing in it, also one with a lower id
    than others in it.
    """

    def __init__(self, generator: random.Random) -> None:
        super().__init__(1, 2, 3)
        self._generator = generator
        self._next = itertools.count(4)
        self.puts = 200

    def list_jobs(
        self, tube: bytes, state: str, first: int, count: int, *, search: bytes = b""
    ) -> list[dict[str, str]]:
        there = {number for number in self.ids if number >= first}
        new = {next(self._next) for _ in range(min(self._generator.randrange(4), self.puts))}
        self.puts -= len(new)
        self.ids |= new
        return self.listed(there | {number for number in new if self._generator.random() < 0.5})


@pytest.mark.parametrize("seed", range(50))
def test_jobs_put_during_a_listing_are_not_missed(seed: int) -> None:
    jobs = Racing(random.Random(seed))
    tail = Tail(cast("Client", jobs), b"t")
    before = set(jobs.ids)
    seen: list[int] = []
    while jobs.puts:
        seen += [id_of(job) for job in tail.look()]
    for _ in range(2):
        seen += [id_of(job) for job in tail.look()]
    assert len(seen) == len(set(seen))
    assert set(seen) >= jobs.ids - before
