"""The beanstalk protocol: jobs that are reserved by a client, and by a worker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from counterd.client.beanstalk import AsyncClient, AsyncWorker, Client, Worker
from kit import loops
from kit.machine import LONG_S, PATIENCE
from kit.shapes import BLOCKING, got
from scenarios.resource import FORKED, INTERRUPTED, Resource, Visit

if TYPE_CHECKING:
    from pathlib import Path

TTR_S = int(LONG_S)


def settings(directory: Path) -> dict[str, Any]:
    return {}


class Jobs(Resource):
    """What the scenarios' uses of jobs have in common. The names are tubes."""

    PROTOCOL = "beanstalk"
    _observer: Client | None = None

    def names(self, number: int) -> tuple[bytes, bytes]:
        return b"one-%d" % number, b"other-%d" % number

    @property
    def observer(self) -> Client:
        if self._observer is None:
            self._observer = Client(*self.server.where("beanstalk"), timeout=PATIENCE)
        return self._observer

    def put(self, name: bytes) -> int:
        """Adds a job to a tube. Returns its number."""
        self.observer.use(name)
        return self.observer.put(name, ttr=TTR_S)

    def figure(self, name: bytes, figure: str) -> int:
        return int((self.observer.stats_tube(name) or {}).get(figure, 0))

    def in_use(self, name: bytes) -> int:
        return self.figure(name, "current-jobs-reserved")

    async def begin(self, visit: Visit) -> None:
        self.put(self.ONE)

    def end(self) -> None:
        """No job was lost, and none is there twice, unless it was deleted."""
        self.observer.clear_tube(self.ONE)

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()


class Reserved(Jobs):
    NAME = "beanstalk reserve"

    def client(self, shape: str, **options: Any) -> Any:
        kind = Client if shape == BLOCKING else AsyncClient
        return kind(*self.where(), **{"timeout": PATIENCE, "watch": self.ONE, **options})

    async def take(self, client: Any, name: bytes) -> Any:
        job = await got(client.reserve_job(self.put(name)))
        assert job is not None
        return job

    async def give(self, client: Any, taken: Any) -> None:
        assert await got(taken.delete())

    async def when_back(self, client: Any, taken: Any) -> None:
        await loops.until(lambda: self.asks(client), "it is connected again")
        assert not await got(taken.touch()), "it is not reserved any more"
        self.in_use(self.ONE)  # is repeated, so that the observer is connected again
        self.observer.delete(taken.id)

    def waiter(self, make: Any) -> Any:
        return make(watch=self.OTHER)

    def waiting(self, client: Any) -> Any:
        return client.reserve

    async def ask(self, client: Any) -> None:
        await got(client.list_tube_used())

    async def agrees(self, visit: Visit) -> bool:
        """The jobs that the program has are its own, unless the interruption ended the connection."""
        await self.ask(visit.client)
        visit.has = sum([not await self.is_lost(visit.client, job) for job in visit.prepared or ()])
        return self.in_use(self.ONE) == visit.has

    async def is_lost(self, client: Any, taken: Any) -> bool:
        return not await got(taken.touch())


async def reserve(visit: Visit) -> None:
    visit.prepared = [await got(visit.client.reserve(int(PATIENCE)))]


async def reserve_batch(visit: Visit) -> None:
    visit.prepared = await got(visit.client.reserve_batch(5))


async def reserve_on_a_new_connection(visit: Visit) -> None:
    await got(visit.client.list_tube_used())
    visit.relay.cut()
    visit.prepared = [await got(visit.client.reserve(0))]


async def pipeline(visit: Visit) -> None:
    used, job, watched = await got(visit.client.pipeline().list_tube_used().reserve(0).list_tubes_watched().execute())
    visit.prepared = [job]
    assert (used, watched) == (b"default", [visit.name])


async def worked_on(visit: Visit) -> None:
    visit.prepared = [job] = [await got(visit.client.reserve(0))]
    assert await got(job.touch())
    assert (await got(job.stats()))["state"] == "reserved"


async def closed(visit: Visit) -> None:
    assert await got(visit.another.reserve(0))
    await got(visit.another.close())


class RunningWorker:
    """A running worker of either shape. Its function works on a job until it may end. stops: after the first job."""

    def __init__(self, resource: Working, shape: str, *, stops: bool = False) -> None:
        self.begun = threading.Semaphore(0)
        self.ends = threading.Semaphore(0)
        self.done = 0
        self._shape = shape
        self._stops = stops
        where = resource.where()
        self.worker: Any
        if shape == BLOCKING:
            self.worker = Worker(self._work, lambda: Client(*where, watch=resource.ONE))
        else:
            self.worker = AsyncWorker(self._work_too, lambda: AsyncClient(*where, watch=resource.ONE))

    def _work(self, job: Any) -> None:
        self.begun.release()
        assert self.ends.acquire(timeout=LONG_S)
        self._end()

    async def _work_too(self, job: Any) -> None:
        self.begun.release()
        await loops.until(lambda: self.ends.acquire(blocking=False), "it may end")
        self._end()

    def _end(self) -> None:
        self.done += 1
        if self._stops:
            self.worker.stop()

    async def __aenter__(self) -> RunningWorker:
        run = self.worker.run
        self._running = asyncio.create_task(asyncio.to_thread(run) if self._shape == BLOCKING else run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.worker.stop()
        assert await self._running


class Working(Jobs):
    """A worker's job. It says in the log what it lost, and works on."""

    NAME = "beanstalk worker"
    LACKS: ClassVar = {
        INTERRUPTED: "run() takes SIGINT itself, and stops the worker",
        FORKED: "neither its threads nor its tasks run in the child; its clients are those of beanstalk reserve",
    }

    IS_ALONE = True

    async def when_back(self, client: RunningWorker, taken: bytes) -> None:
        await self.give(client, taken)

    def client(self, shape: str, **options: Any) -> RunningWorker:
        return RunningWorker(self, shape)

    async def take(self, client: RunningWorker, name: bytes) -> bytes:
        self.put(name)
        await loops.until(lambda: client.begun.acquire(blocking=False), "it works on the job")
        return name

    async def give(self, client: RunningWorker, taken: bytes) -> None:
        before = client.done
        client.ends.release()
        await loops.until(lambda: client.done > before, "it has worked on the job")

    async def ask(self, client: RunningWorker) -> None:
        """Does nothing, as a worker asks by itself."""

    async def while_away(self, client: RunningWorker) -> None:
        """Checks nothing, as the worker waits for the server."""

    async def is_lost(self, client: RunningWorker, taken: bytes) -> bool:
        return True

    async def works(self, client: RunningWorker) -> bool:
        """Works on another job, also on one that another connection of the worker has lost."""
        self.put(self.ONE)
        client.ends.release(9)
        await loops.until(lambda: not self.figure(self.ONE, "current-jobs-ready"), "it has begun all jobs")
        return True

    def waiter(self, make: Any) -> Any:
        return contextlib.nullcontext()

    def visitor(self, shape: str) -> Any:
        return AsyncClient(*self.where())


async def runs(visit: Visit) -> None:
    """Runs a worker with one job. The interruption hits its run()."""
    running = RunningWorker(visit.resource, visit.shape, stops=True)
    running.ends.release()
    assert await running.worker.run()


Reserved.USES = (reserve, reserve_batch, reserve_on_a_new_connection, pipeline, worked_on, closed)
Working.USES = (runs,)
RESOURCES = [Reserved, Working]
