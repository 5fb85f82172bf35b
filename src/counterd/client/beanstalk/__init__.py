"""Clients for the beanstalk protocol, blocking and for asyncio. The beanstalk clients also work with beanstalkd.

Client has a method for every command. Worker calls a function for each job, and keeps the job reserved while the
function runs. Then it deletes the job, retries it or buries it. AsyncClient and AsyncWorker have the same methods for
asyncio.

Floor: side (ARCHITECTURE.md). The package needs only the wire module and counterd.errors, and works without any
compiled module.
"""

from __future__ import annotations

from typing import Any

from counterd.client._command import AsyncBase, SyncBase
from counterd.client._tasks import Commanded as AioCommanded
from counterd.client._threads import Commanded
from counterd.client.beanstalk._queue import ClientCommands, Inserted, JobCommands, Peeked, Recorded
from counterd.client.beanstalk._worker import AsyncWorker, Worker
from counterd.client.beanstalk._working import Bury, Retry
from counterd.protocols.beanstalk.errors import DeadlineSoon, Draining, JobTooBig, NoRoom, Refused

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


class Job(JobCommands, SyncBase):
    """A reserved job. id: the number of the job on the server. body: bytes."""


class Client(ClientCommands["Job"], Commanded):
    """A connection to a server. If it is lost, the client makes a new one. Use the client in a `with`, or close() it.

    The client connects with its first call. Threads may share a client. The calls of all threads use one connection and
    are answered in order, so a reserve() that waits delays later calls. Give each thread that reserves its own client,
    as Worker does. After a fork the connection belongs to the parent; the child connects with its first call.

    host: a host, beanstalk://HOST[:PORT], beanstalks://HOST[:PORT] (with TLS) or beanstalk+unix:///PATH, or several of
    these, which are tried in order. All of them must lead to the same server. port: the port for hosts without a port.
    path: the path of a Unix socket, in place of host and port. tls: True or an ssl.SSLContext, as for
    counterd.client.Client, which also describes URLs. use: the tube that put() adds jobs to. watch: the tube, or tubes,
    that jobs are reserved from. timeout: how many seconds each call may take, in addition to the seconds that a
    reserve() waits; then the call raises Timeout. A job that arrives after the timeout is released again.
    connect_timeout: how many seconds connecting to one address may take, and the TLS handshake. None means the same as
    timeout.

    Reserved jobs belong to the connection. When the connection is lost, the server makes these jobs ready again for any
    worker. If the connection is lost during a call, the call is repeated once on a new connection, if that is safe.
    Otherwise the call raises ConnectionLost: after a put(), for example, nobody knows whether the job was added. If
    that matters, use put_unique() with `keep`.

    Every call may raise Refused, Timeout, ProtocolError or ConnectionLost. Arguments that do not fit the protocol raise
    ValueError before anything is sent. After a failed attempt to connect, calls fail immediately until the next
    attempt, 0.05 to 2 s later.
    """

    _job = Job

    def pipeline(self) -> Pipeline:
        """Collects commands and sends them together: `client.pipeline().put("a").put("b").execute()`."""
        return Pipeline(self)


class Pipeline(Recorded["Job"]):
    """Commands that are sent together. Client.pipeline() makes a Pipeline."""

    def execute(self) -> list[Any]:
        """Sends the commands and returns their results in order, including refusals.

        The pipeline is empty afterwards.
        """
        results: list[Any] = self._client._drive(self._steps())
        return results


class AsyncJob(JobCommands, AsyncBase):
    """A reserved job. id: the number of the job on the server. body: bytes."""


class AsyncClient(ClientCommands["AsyncJob"], AioCommanded):
    """The Client for the tasks of one event loop. Use the client in an `async with`, or await close().

    AsyncClient has the same arguments, results and errors as Client. If a reserve() is cancelled and a job arrives
    later, the job is released again. Prefer reserve(timeout) to cancelling, because later calls wait until the server
    has answered the cancelled reserve(). If this client has no reserved job, it ends the connection instead and makes a
    new one.
    """

    _job = AsyncJob

    def pipeline(self) -> AsyncPipeline:
        """Collects commands and sends them together: `await client.pipeline().put("a").put("b").execute()`."""
        return AsyncPipeline(self)


class AsyncPipeline(Recorded["AsyncJob"]):
    """Commands that are sent together. AsyncClient.pipeline() makes an AsyncPipeline."""

    async def execute(self) -> list[Any]:
        """Does the same as Pipeline.execute()."""
        results: list[Any] = await self._client._drive(self._steps())
        return results
