"""Clients for the beanstalk protocol, blocking and for asyncio. They work with beanstalkd, too.

Client has a method for every command. Worker calls a function for each job, keeps the job reserved meanwhile, and then
deletes, retries or buries it. AsyncClient and AsyncWorker are the same for asyncio.

Floor: side. Needs only the wire module and counterd.errors, and works where nothing is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterd.client._aioshared import Commanded as AioCommanded
from counterd.client._command import Awaiting, Blocking, Request
from counterd.client._shared import Commanded
from counterd.client.beanstalk._queue import ClientCommands, Inserted, JobCommands, Peeked, Recorded
from counterd.client.beanstalk._worker import AsyncWorker, Worker
from counterd.client.beanstalk._working import Bury, Retry
from counterd.errors import ServerError
from counterd.protocols.beanstalk.errors import DeadlineSoon, Draining, JobTooBig, NoRoom, Refused

if TYPE_CHECKING:
    import asyncio

    from counterd.protocols.beanstalk.wire import Reply

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncPipeline",
    "AsyncWorker",
    "Bury",
    "Client",
    "DeadlineSoon",
    "Draining",
    "Inserted",
    "Job",
    "JobTooBig",
    "NoRoom",
    "Peeked",
    "Pipeline",
    "Refused",
    "Retry",
    "Worker",
]


class Job(JobCommands, Blocking):
    """A reserved job. id: its number on the server. body: bytes."""


class Client(ClientCommands["Job"], Commanded):
    """A connection to a server, which is made again when it is lost. Use it in a `with`, or close() it.

    It connects with the first call. Threads may share a client. Their calls share one connection and are answered in
    order, so calls behind a reserve() that waits have to wait too: give each thread that reserves its own client, as
    Worker does. After a fork the connection belongs to the parent; the child connects with its first call.

    host: a host, beanstalk://HOST[:PORT], beanstalks://HOST[:PORT] (with TLS) or beanstalk+unix:///PATH, or several of
    these, which are tried in order. All of them have to lead to the same server.
    port: for hosts without a port.
    path: of a Unix socket, instead of host and port.
    tls: True or an ssl.SSLContext, as in counterd.client.Client, which also says what a URL may have.
    use: the tube that put() adds jobs to.
    watch: the tube, or tubes, that jobs are reserved from.
    timeout: seconds that each call may take, plus the seconds that a reserve() waits; then it raises Timeout. A job
    that arrives later is released again.
    connect_timeout: seconds for connecting to one address, and for TLS's handshake. None: the same as timeout.

    Reserved jobs belong to the connection. When it is lost, the server makes them ready again for any worker. A call
    whose connection is lost is repeated once on a new connection if that is safe. Otherwise it raises ConnectionLost:
    after a put(), for example, nobody knows whether the job was added. Use put_unique() with `keep` where that matters.

    Every call may raise Refused, Timeout, ProtocolError or ConnectionLost. Arguments that do not fit the protocol raise
    ValueError before anything is sent. After a failed attempt to connect, calls fail at once until the next attempt,
    0.05 to 2 s later.
    """

    def pipeline(self) -> Pipeline:
        """Collects commands and sends them together: `client.pipeline().put("a").put("b").execute()`."""
        return Pipeline(self)

    # ---- inside ----

    def _new_job(self, reply: Reply) -> Job:
        return Job(self, reply)

    def _run_all(self, requests: list[Request[Any]]) -> list[Any]:
        if not requests:
            return []
        patience = sum(request.patience for request in requests)
        link = self._connected(hears=False)
        calls: list[Any] = []
        try:
            calls = link.run([(request,) for request in requests], patience)
            for call in calls:
                if call.error is not None and not isinstance(call.error, ServerError):
                    raise call.error
            return [call.result if call.error is None else call.error for call in calls]
        except BaseException:
            link.forget(calls)
            raise


class Pipeline(Recorded["Job"]):
    """Commands that are sent together. Client.pipeline() makes one."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._client = client

    def execute(self) -> list[Any]:
        """Sends the commands and returns their results in order; refusals are among them. Empties the pipeline."""
        return self._client._run_all(self._taken())


class AsyncJob(JobCommands, Awaiting):
    """A reserved job. id: its number on the server. body: bytes."""


class AsyncClient(ClientCommands["AsyncJob"], AioCommanded):
    """Client for the tasks of one event loop. Use it in an `async with`, or await close().

    It has the arguments, results and errors of Client. If a reserve() is cancelled and a job arrives later, it is
    released again. Prefer reserve(timeout) to cancelling: later calls wait until the server has answered the cancelled
    reserve(). If no job is reserved here, the client ends the connection instead and makes a new one.
    """

    def pipeline(self) -> AsyncPipeline:
        """Collects commands and sends them together: `await client.pipeline().put("a").put("b").execute()`."""
        return AsyncPipeline(self)

    # ---- inside ----

    def _new_job(self, reply: Reply) -> AsyncJob:
        return AsyncJob(self, reply)

    async def _run_all(self, requests: list[Request[Any]]) -> list[Any]:
        if not requests:
            return []
        link = await self._connected(hears=False)
        patience = sum(request.patience for request in requests)
        calls = link.start_all([(request,) for request in requests], patience)
        futures: list[asyncio.Future[Any]] = [call.future for call in calls if call.future is not None]
        try:
            return [await _settled(future) for future in futures]
        except BaseException:
            for call in calls:
                link.forget(call)
            raise


class AsyncPipeline(Recorded["AsyncJob"]):
    """Commands that are sent together. AsyncClient.pipeline() makes one."""

    def __init__(self, client: AsyncClient) -> None:
        super().__init__(client)
        self._client = client

    async def execute(self) -> list[Any]:
        """As Pipeline.execute()."""
        return await self._client._run_all(self._taken())


async def _settled(future: asyncio.Future[Any]) -> Any:
    try:
        return await future
    except ServerError as refusal:
        return refusal
