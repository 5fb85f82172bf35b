"""The clients of the beanstalk protocol, blocking and for asyncio, against counterd and beanstalkd; and the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client.beanstalk import (
    AsyncClient,
    AsyncWorker,
    Bury,
    Client,
    DeadlineSoon,
    Inserted,
    Job,
    JobTooBig,
    NoRoom,
    Peeked,
    Refused,
    Retry,
    Worker,
)
from counterd.errors import ConnectionLost, OutOfMemory, Timeout
from kit import cuts, loops, reference
from kit.certificates import client_context
from kit.daemon import Daemon, running, wait_until
from kit.machine import LONG_S, PATIENCE
from kit.shapes import BLOCKING, SHAPES, answered, got, opened, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.certificates import Files

ALONE = {"counter.enable": "false", "beanstalk.enable": "true", "beanstalk.bind": "127.0.0.1", "beanstalk.port": 0}
LONG = int(LONG_S)


@pytest.fixture(scope="module")
def counterd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("counterd"), ALONE | {"beanstalk.max_job_size": 1000}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def peer() -> Iterator[reference.Address]:
    with reference.beanstalkd() as address:
        yield address


def port_of(daemon: Daemon) -> int:
    return daemon.address_of("beanstalk").port


@pytest.fixture
def port(counterd: Daemon) -> Iterator[int]:
    """The port of a counterd without jobs."""
    yield port_of(counterd)
    with Client(port=port_of(counterd)) as client:
        for tube in client.list_tubes():
            client.pause_tube(tube, 0)
            client.clear_tube(tube)


def made(shape: str, *arguments: Any, **options: Any) -> Any:
    return (Client if shape == BLOCKING else AsyncClient)(*arguments, **{"timeout": PATIENCE, **options})


# ---- all commands ----------------------------------------------------------------------------------------------------


async def standard_commands(shape: str, port: int) -> None:
    """The commands of beanstalkd."""
    async with opened(made(shape, port=port, use="std", watch=["std"])) as client:
        first, second = await got(client.put("a")), await got(client.put(b"b", priority=5, ttr=9))
        assert (await got(client.list_tube_used()), await got(client.list_tubes_watched())) == (b"std", [b"std"])
        assert b"std" in await got(client.list_tubes())
        job = await got(client.reserve(0))
        assert (job.id, job.body) == (second, b"b")
        figures = await got(job.stats())
        assert (figures["pri"], figures["ttr"], figures["state"]) == ("5", "9", "reserved")
        assert await got(job.touch())
        assert await got(job.release(priority=7))
        assert [await got(each) for each in (job.touch(), job.release(), job.bury())] == [False] * 3
        assert await got(client.peek(first)) == Peeked(first, b"a")
        assert await got(client.peek_ready()) == Peeked(second, b"b")
        assert (await got(client.stats_job(second)))["pri"] == "7"
        job = await got(client.reserve_job(second))
        assert await got(job.bury(priority=8))
        assert await got(client.peek_buried()) == Peeked(second, b"b")
        assert await got(client.kick(10)) == 1
        later = await got(client.put("c", delay=LONG))
        assert await got(client.peek_delayed()) == Peeked(later, b"c")
        assert await got(client.kick_job(later))
        assert not await got(client.kick_job(later))
        assert [await got(client.delete(id)) for id in (first, second, later, later)] == [True, True, True, False]
        assert await got(job.stats()) is None
        nothing = [client.reserve(0), client.peek(first), client.peek_ready(), client.peek_buried()]
        assert [await got(each) for each in nothing] == [None] * 4
        assert await got(client.stats_job(first)) is None
        assert await got(client.reserve_job(first)) is None
        assert await got(client.watch("other")) == 2
        assert await got(client.ignore("other")) == 1
        with pytest.raises(Refused, match="at least one tube"):
            await got(client.ignore("std"))
        assert await got(client.pause_tube("std", LONG))
        assert (await got(client.stats_tube("std")))["pause"] == str(LONG)
        assert await got(client.pause_tube("std", 0))
        assert not await got(client.pause_tube("nothing", 1))
        assert await got(client.stats_tube("nothing")) is None
        assert (await got(client.stats()))["current-jobs-ready"] == "0"
        assert await got(client.use("default")) == b"default"


@SHAPES
def test_the_commands_of_beanstalkd(port: int, shape: str) -> None:
    run(shape, standard_commands(shape, port))


@pytest.mark.needs("beanstalkd")
@SHAPES
def test_the_commands_against_beanstalkd(peer: reference.Address, shape: str) -> None:
    run(shape, standard_commands(shape, peer.port))


@SHAPES
def test_the_commands_of_counterd(port: int, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, port=port, use="own", watch="own")) as client:
            first = await got(client.put_unique("a", shape, LONG))
            assert first == Inserted(first.id, True)
            assert await got(client.put_unique("b", shape)) == Inserted(first.id, False)
            assert await got(client.delete(first.id))
            assert await got(client.put_unique("b", shape)) == Inserted(first.id, False), "the key is taken for a while"
            ids = await got(client.pipeline().put("x1").put("x2").put("y").execute())
            assert [job["id"] for job in await got(client.list_jobs("own"))] == [str(id) for id in ids]
            assert [job["id"] for job in await got(client.list_jobs("own", search="y"))] == [str(ids[2])]
            assert [job["id"] for job in await got(client.list_jobs("own", "ready", ids[1], 1))] == [str(ids[1])]
            assert await got(client.list_jobs("nothing")) == []
            assert await got(client.limit_reserves("own", 1, "dead")) is None
            assert (await got(client.inspect_tube("own")))["max-reserves"] == "1"
            assert await got(client.inspect_tube("nothing")) is None
            jobs = await got(client.reserve_batch(2))
            assert [job.body for job in jobs] == [b"x1", b"x2"]
            assert await got(jobs[0].release())
            assert (await got(client.stats_job(ids[0])))["tube"] == "dead"
            assert await got(client.limit_reserves("own", 0, "own")) is None
            assert await got(client.clear_tube("own")) == 1
            assert await got(client.clear_tube("nothing")) is None
            assert await got(client.reserve_batch(2)) == []

    run(shape, scenario())


# ---- refusals --------------------------------------------------------------------------------------------------------


@SHAPES
def test_refusals_have_their_errors(counterd: Daemon, port: int, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, port=port)) as client:
            with pytest.raises(JobTooBig, match="longer than the server allows"):
                await got(client.put(bytes(1001)))
            id = await got(client.put("a", ttr=1))
            job = await got(client.reserve(0))
            with pytest.raises(DeadlineSoon):
                await got(client.reserve(LONG))
            assert await got(job.delete())
            assert job.id == id
            results = await got(client.pipeline().put(bytes(1001)).peek(id).stats_tube("default").execute())
            assert isinstance(results[0], JobTooBig)
            assert (results[1], results[2]["name"]) == (None, "default")
            assert await got(client.pipeline().execute()) == []
        for wrong in ({"use": "-"}, {"watch": []}, {"watch": ["a b"]}, {"timeout": 0}):
            with pytest.raises(ValueError, match=r"."):
                made(shape, port=port, **wrong)
        async with opened(made(shape, port=port)) as client:
            for call in (lambda: client.put("a", priority=-1), lambda: client.use(""), lambda: client.kick(-1)):
                with pytest.raises(ValueError, match=r"."):
                    await got(call())

    run(shape, scenario())


@SHAPES
def test_a_server_without_room_and_one_that_drains(start: Callable[..., Daemon], shape: str) -> None:
    daemon = start(ALONE | {"beanstalk.max_jobs_per_tube": 1, "beanstalk.max_tubes": 2})
    port = port_of(daemon)

    async def scenario() -> None:
        async with opened(made(shape, port=port, use="a")) as client:
            await got(client.put("a"))
            with pytest.raises(NoRoom) as caught:
                await got(client.put("b"))
            assert isinstance(caught.value, OutOfMemory)
            with pytest.raises(NoRoom):
                await got(client.use("b"))
            assert await got(client.list_tube_used()) == b"a"
            async with opened(made(shape, port=port, use="b")) as other:
                for _ in range(2):  # nothing is ever put into another tube than that
                    with pytest.raises((NoRoom, ConnectionLost)):
                        await got(other.put("b"))
            assert (await got(client.stats_tube("default")))["total-jobs"] == "0"

    run(shape, scenario())


# ---- connections -----------------------------------------------------------------------------------------------------


@SHAPES
def test_tubes_are_selected_again_after_a_restart(start: Callable[..., Daemon], shape: str) -> None:
    daemon = start(ALONE)
    port = port_of(daemon)

    async def scenario() -> None:
        async with opened(made(shape, port=port)) as client:
            await got(client.use("a"))
            await got(client.watch("b"))
            await got(client.watch("c"))
            await got(client.ignore("default"))
            daemon.stop()
            start(ALONE | {"beanstalk.port": port})
            assert await got(client.list_tube_used()) == b"a", "it may be asked again, so that is no error"
            assert await got(client.list_tubes_watched()) == [b"b", b"c"]

    run(shape, scenario())


@SHAPES
def test_a_put_is_not_sent_twice(start: Callable[..., Daemon], shape: str) -> None:
    daemon = start(ALONE)
    port = port_of(daemon)

    async def scenario() -> None:
        async with opened(made(shape, port=port)) as client:
            await got(client.put("a"))
            job = await got(client.reserve(0))
            daemon.kill()
            with pytest.raises(ConnectionLost):
                await got(client.put("b"))
            start(ALONE | {"beanstalk.port": port})
            await loops.until(lambda: put(client), "it is connected again")
            assert await got(job.delete()) in (True, False)

    async def put(client: Any) -> bool:
        try:
            return bool(await got(client.put("c")))
        except ConnectionLost:
            return False

    run(shape, scenario())


@SHAPES
def test_a_job_reserved_too_late_is_released_with_its_priority(port: int, shape: str) -> None:
    """No caller gets it, and the jobs that this client has reserved stay reserved."""

    async def scenario(relay: cuts.Relay) -> None:
        hasty = made(shape, port=relay.port, timeout=0.1, connect_timeout=PATIENCE)
        async with opened(hasty) as client, opened(made(shape, port=port)) as other:
            await got(other.put("held"))
            held = await loops.until(lambda: answered(lambda: client.reserve(0)), "it has one")
            late = await got(other.put("late", priority=7))
            relay.hold_back()
            with pytest.raises(Timeout):
                await got(client.reserve(0))
            await loops.until(lambda: has_reserved(other, late), "it was reserved")
            relay.go_on()
            await loops.until(lambda: is_ready(other, late, held), "it is ready again")
            assert (await got(other.stats_job(late)))["pri"] == "7"
            assert await answered(held.delete)

    async def has_reserved(client: Any, id: int) -> bool:
        figures = await got(client.stats_job(id))
        return bool(figures["reserves"] == "1")

    async def is_ready(client: Any, id: int, held: Any) -> bool:
        assert await answered(held.touch), "the blocking client reads when it is used"
        figures = await got(client.stats_job(id))
        return figures["state"] == "ready" and figures["reserves"] == "1"

    with cuts.Relay(("127.0.0.1", port)) as relay:
        run(shape, scenario(relay))


@pytest.mark.parametrize("loop_name", loops.NEW_LOOP)
def test_a_cancelled_reserve_blocks_no_other_call(port: int, loop_name: str) -> None:
    async def main() -> None:
        async with AsyncClient(port=port, timeout=PATIENCE) as client:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.reserve(), 0.01)
            id = await client.put("a")
            job = await client.reserve(0)
            assert job is not None
            assert job.id == id

    loops.run(main(), loop_name)


def test_threads_share_a_client(port: int) -> None:
    with Client(port=port, timeout=PATIENCE) as client:
        ids: list[int] = []
        threads = [threading.Thread(target=lambda: ids.extend(client.put("a") for _ in range(50))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(ids)) == 400
        assert client.clear_tube("default") == 400


@SHAPES
def test_over_tls_and_a_unix_socket(start: Callable[..., Daemon], pem: Files, short_path: Path, shape: str) -> None:
    settings = {"beanstalk.tls.cert": pem.server, "beanstalk.socket": short_path / "b"}
    daemon = start(ALONE | settings)

    async def scenario() -> None:
        secure = made(shape, "localhost", port_of(daemon), tls=client_context())
        async with opened(secure) as client, opened(made(shape, path=short_path / "b")) as other:
            id = await got(client.put("a"))
            assert await got(other.peek(id)) == Peeked(id, b"a")

    run(shape, scenario())


# ---- workers ---------------------------------------------------------------------------------------------------------


class Bench:
    """A tube, and a worker of either shape for it. done: the bodies that its function has been given.

    through: the port to which the worker connects, if it is another.
    """

    def __init__(
        self, shape: str, port: int, function: Callable[[Job], object], count: int = 2, through: int = 0, **options: Any
    ) -> None:
        self.client = Client(port=port, use="work", watch="work", timeout=PATIENCE)
        self.shape = shape
        port = through or port
        self.done: list[bytes] = []
        self.result: bool | None = None

        def work(job: Job) -> None:
            self.done.append(job.body)
            function(job)

        async def work_too(job: Any) -> None:
            self.done.append(job.body)
            await asyncio.to_thread(function, job)

        self.worker: Any
        if shape == BLOCKING:
            self.worker = Worker(
                work, lambda: Client(port=port, watch="work", timeout=PATIENCE), threads=count, **options
            )
        else:
            self.worker = AsyncWorker(work_too, lambda: AsyncClient(port=port, watch="work"), tasks=count, **options)

    def put(self, *bodies: str, **options: Any) -> list[int]:
        return [self.client.put(body, **options) for body in bodies]

    @contextlib.contextmanager
    def runs(self, grace: float | None = None) -> Iterator[None]:
        """Runs the worker during the block, and stops it then."""
        loop: list[asyncio.AbstractEventLoop] = []

        async def main() -> None:
            loop.append(asyncio.get_running_loop())
            self.result = await self.worker.run(grace=grace)

        def thread() -> None:
            if self.shape == BLOCKING:
                self.result = self.worker.run(grace=grace)
            else:
                loops.run(main(), self.shape)

        running = threading.Thread(target=thread)
        running.start()
        try:
            yield
        finally:
            if self.shape == BLOCKING:
                self.worker.stop()
            else:
                wait_until(lambda: loop, "it runs")
                loop[0].call_soon_threadsafe(self.worker.stop)
            running.join(PATIENCE)
            assert not running.is_alive()

    def figure(self, name: str) -> int:
        figures = self.client.stats_tube("work")
        return int(figures[name]) if figures else 0


@pytest.fixture
def bench(port: int, shape: str) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(function: Callable[[Job], object] = bool, **options: Any) -> Bench:
        benches.append(Bench(shape, port, function, **options))
        return benches[-1]

    yield make
    for each in benches:
        each.client.close()


@SHAPES
def test_a_worker_deletes_a_job_after_its_function_returns(bench: Callable[..., Bench]) -> None:
    work = bench()
    work.put("a", "b", "c")
    with work.runs():
        wait_until(lambda: work.figure("cmd-delete") >= 3, "all are deleted")
    assert sorted(work.done) == [b"a", b"b", b"c"]
    assert work.result is True


@SHAPES
def test_a_failed_job_is_retried_and_then_buried(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    def fails(job: Job) -> None:
        raise OSError("no printer")

    work = bench(fails, attempts=3, backoff=(0, 0))
    (id,) = work.put("a", priority=9)
    with work.runs():
        wait_until(lambda: work.figure("current-jobs-buried"), "it is buried")
    assert work.done == [b"a"] * 3
    figures = work.client.stats_job(id)
    assert figures is not None
    assert (figures["pri"], figures["reserves"], figures["releases"]) == ("9", "3", "2")
    assert [record.message.partition("; ")[2] for record in caplog.records] == [
        "the job is tried again in 0 s", "the job is tried again in 0 s", "the job is buried"
    ]  # fmt: skip
    assert all("no printer" in str(record.exc_info) for record in caplog.records)


@SHAPES
def test_a_function_can_release_or_bury_its_job(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    def function(job: Job) -> None:
        raise Bury if job.body == b"bury" else Retry(LONG)

    work = bench(function)
    work.put("bury", "later")
    with work.runs():
        wait_until(lambda: work.figure("current-jobs-buried") and work.figure("current-jobs-delayed"), "both ended")
    assert sorted(work.done) == [b"bury", b"later"]
    assert caplog.records == [], "that is no failure"


@SHAPES
def test_a_worker_touches_a_long_job(start: Callable[..., Daemon], shape: str) -> None:
    ends = threading.Event()
    work = Bench(shape, port_of(start(ALONE)), lambda job: ends.wait(LONG_S))
    (id,) = work.put("a", ttr=3)
    with work.runs():
        wait_until(lambda: int(work.client.stats()["cmd-touch"]) >= 3, "it is touched again and again")
        ends.set()
        wait_until(lambda: work.client.stats_job(id) is None, "it is deleted")
    assert set(work.done) == {b"a"}
    work.client.close()


@SHAPES
def test_a_stopped_worker_finishes_its_jobs(bench: Callable[..., Bench]) -> None:
    begun, ends = threading.Event(), threading.Event()

    def function(job: Job) -> None:
        begun.set()
        ends.wait(LONG_S)

    work = bench(function)
    work.put("a")
    with work.runs():
        assert begun.wait(PATIENCE)
        threading.Timer(0.1, ends.set).start()
    assert work.result is True
    work.put("b")
    assert work.client.reserve(0) is not None, "nobody else reserves it"
    assert work.done == [b"a"]


@SHAPES
def test_a_stopped_worker_waits_for_a_limited_time(bench: Callable[..., Bench]) -> None:
    begun, ends = threading.Event(), threading.Event()

    def function(job: Job) -> None:
        begun.set()
        ends.wait(LONG_S)

    work = bench(function)
    (id,) = work.put("a")
    with work.runs(grace=0.01):
        assert begun.wait(PATIENCE)
        if work.shape != BLOCKING:  # a task is cancelled, but what it has a thread do is waited for
            threading.Timer(0.2, ends.set).start()
    assert work.result is False
    wait_until(lambda: (work.client.stats_job(id) or {}).get("state") == "ready", "it is ready again")
    ends.set()


@SHAPES
def test_a_lost_job_is_reported(start: Callable[..., Daemon], shape: str, caplog: pytest.LogCaptureFixture) -> None:
    begun, ends = threading.Event(), threading.Event()

    def function(job: Job) -> None:
        begun.set()
        ends.wait(LONG_S)

    daemon = start(ALONE)
    work = Bench(shape, port_of(daemon), function)
    work.put("a")
    with work.runs():
        assert begun.wait(PATIENCE)
        daemon.kill()
        start(ALONE | {"beanstalk.port": port_of(daemon)})  # without a journal: it knows no job
        ends.set()
        wait_until(
            lambda: any("was gone" in text or "it is not known" in text for text in caplog.messages), "that is told"
        )
    work.client.close()


@SHAPES
def test_a_worker_deletes_its_job_after_a_lost_connection(
    start: Callable[..., Daemon], shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun, ends = threading.Event(), threading.Event()

    def function(job: Any) -> None:
        before.append(relay.accepted)
        relay.cut()
        begun.set()
        ends.wait(LONG_S)

    before: list[int] = []  # connections
    port = port_of(start(ALONE))
    relay = cuts.Relay(("127.0.0.1", port))
    work = Bench(shape, port, function, count=1, through=relay.port)  # nobody else reserves the job
    (id,) = work.put("a")
    with relay, work.runs():
        assert begun.wait(PATIENCE)
        wait_until(lambda: relay.accepted > before[0], "the worker knows of the loss")
        ends.set()
        wait_until(lambda: work.client.stats_job(id) is None, "it is deleted")
    assert not [text for text in caplog.messages if "was gone" in text]
    work.client.close()


def test_a_signal_stops_a_worker_in_the_main_thread(port: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Client(port=port) as client:
        client.put("a")
        worker = Worker(lambda job: os.kill(os.getpid(), signal.SIGTERM), lambda: Client(port=port, timeout=PATIENCE))
        assert worker.run()
        assert client.stats_tube("default")["current-jobs-ready"] == "0"  # type: ignore[index]
    assert signal.getsignal(signal.SIGTERM) is before


@SHAPES
def test_a_worker_waits_for_its_server(
    start: Callable[..., Daemon], shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    daemon = start(ALONE)
    port = port_of(daemon)
    work = Bench(shape, port, bool)
    with work.runs():
        work.put("a")
        wait_until(lambda: work.done == [b"a"], "it works")
        daemon.stop()
        wait_until(lambda: any("no jobs can be reserved" in text for text in caplog.messages), "that is told")
        start(ALONE | {"beanstalk.port": port})

        def put() -> bool:
            try:
                work.put("b")
            except ConnectionLost:
                return False
            return True

        wait_until(put, "it is there again")
        wait_until(lambda: work.done == [b"a", b"b"], "it works again")
    assert any("jobs can be reserved again" in text for text in caplog.messages)
    work.client.close()


def test_invalid_arguments_of_workers_are_refused(port: int) -> None:
    for options in ({"threads": 0}, {"attempts": 0}, {"backoff": (2, 1)}, {"backoff": (-1, 1)}):
        with pytest.raises(ValueError, match=r"."):
            Worker(bool, lambda: Client(port=port), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tasks"):
        AsyncWorker(bool, lambda: AsyncClient(port=port), tasks=0)  # type: ignore[arg-type]
