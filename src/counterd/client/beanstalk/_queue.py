"""Code that both clients for the beanstalk protocol share: its commands, and the calls of a connection.

Floor: side (ARCHITECTURE.md). No I/O and no clock. Section names are the commands in docs/protocols/beanstalk.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from counterd.client._addresses import read_addresses
from counterd.client._calls import Ordered
from counterd.client._command import CommandBase, PipelineBase, Request, command
from counterd.client._connecting import Connecting
from counterd.client._connection import as_bytes
from counterd.client._steps import CALL_ALL, CONNECT
from counterd.errors import ProtocolError
from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk.errors import refused
from counterd.protocols.beanstalk.wire import Reply, Status

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Sequence

    from counterd.client._calls import Call
    from counterd.client._steps import Steps

PRIORITY = 1 << 16
TTR_S = 60
DEFAULT = b"default"  # the tube that a connection uses and watches at first
Figures = dict[str, str]  # by name
Concurrency = tuple[str | bytes, int]  # the name of a counter, and its maximum
JobT = TypeVar("JobT")
Results = Mapping[Status, "Callable[[Reply], Any]"]  # how to make a result from each reply that is no refusal


class Peeked(NamedTuple):
    """A job that was looked at but not reserved."""

    id: int
    body: bytes


class Inserted(NamedTuple):
    """The result of put_unique(). is_new: False if a job with this key existed; then id is the id of that job."""

    id: int
    is_new: bool


class QueueRequest(Request[Any]):
    """A request of the beanstalk protocol.

    gives: whether replies can bring jobs. job: the job that the request may end. unwanted: a job whose caller no longer
    waits.
    """

    __slots__ = ("gives", "job", "unwanted")

    def __init__(
        self,
        frame: bytes,
        read: Callable[[list[Reply]], Any],
        *,
        gives: bool = False,
        job: int = 0,
        unwanted: int = 0,
        **more: Any,
    ) -> None:
        super().__init__(frame, read, **more)
        self.gives = gives
        self.job = job
        self.unwanted = unwanted


def asked(frame: bytes, results: Results, **more: Any) -> QueueRequest:
    """Makes a request with one reply, which is one of these or a refusal."""

    def read(replies: list[Reply]) -> Any:
        return _result(replies[0], results)

    return QueueRequest(frame, read, **more)


def _result(reply: Reply, results: Results) -> Any:
    return results[checked(reply, *results).status](reply)


def checked(reply: Reply, *expected: Status) -> Reply:
    """Returns the reply if it is expected.

    Raises an error of the protocol if the reply is a refusal, and ProtocolError for any other reply.
    """
    if reply.status in expected:
        return reply
    if (error := refused(reply.status)) is not None:
        raise error
    wanted = " or ".join(status.value for status in expected)
    raise ProtocolError(f"the reply is {reply.status.value}, not {wanted}")


def _yes(reply: Reply) -> bool:
    return True


def _no(reply: Reply) -> bool:
    return False


def _none(reply: Reply) -> None:
    return None


def _number(reply: Reply) -> int:
    return reply.number or 0


def _name(reply: Reply) -> bytes:
    return reply.name


def _figures(reply: Reply) -> Figures:
    return wire.read_dictionary(reply.body)


def _names(reply: Reply) -> list[bytes]:
    return wire.read_list(reply.body)


def _peeked(reply: Reply) -> Peeked:
    return Peeked(_number(reply), reply.body)


def _done(frame: bytes, status: Status, **more: Any) -> Request[bool]:
    """Makes a request whose result is True if the job or the tube exists and the command was done."""
    return asked(frame, {status: _yes, Status.NOT_FOUND: _no}, **more)


def _released(id: int, priority: int, delay: int) -> QueueRequest:
    # BURIED: the server has no room for the delay, and has buried it instead.
    replies = {Status.RELEASED: _yes, Status.BURIED: _yes, Status.NOT_FOUND: _no}
    return asked(wire.release(id, priority, delay), replies, job=id)


def _limited(body: str | bytes, concurrency: Concurrency, **more: Any) -> bytes:
    counter, maximum = concurrency
    return wire.put_limited(as_bytes(body), as_bytes(counter), maximum, **more)


def _looked(frame: bytes) -> Request[Peeked | None]:
    return asked(frame, {Status.FOUND: _peeked, Status.NOT_FOUND: _none}, is_repeatable=True)


def _told(frame: bytes) -> Request[Figures | None]:
    return asked(frame, {Status.OK: _figures, Status.NOT_FOUND: _none}, is_repeatable=True)


class JobCommands(CommandBase):
    """The methods of a reserved job. The methods return False if the job is gone, or is no longer reserved by this
    client. A job is lost in this way when its time to run is over, or when the connection was lost.
    """

    def __init__(self, client: CommandBase, reply: Reply) -> None:
        self.id = _number(reply)
        self.body = reply.body
        self._client = client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}, {len(self.body)} bytes>"

    def _run_command(self, request: Request[Any]) -> Any:
        return self._client._run_command(request)

    @command
    def delete(self) -> Request[bool]:
        """Deletes the job (section "delete"), even if it has become ready again."""
        return _done(wire.delete(self.id), Status.DELETED, job=self.id)

    @command
    def release(self, *, priority: int = PRIORITY, delay: int = 0) -> Request[bool]:
        """Makes the job ready again for any worker, after `delay` seconds (section "release")."""
        return _released(self.id, priority, delay)

    @command
    def bury(self, *, priority: int = PRIORITY) -> Request[bool]:
        """Puts the job aside until somebody kicks it (section "bury")."""
        return _done(wire.bury(self.id, priority), Status.BURIED, job=self.id)

    @command
    def touch(self) -> Request[bool]:
        """Restarts the job's time to run (section "touch")."""
        return _done(wire.touch(self.id), Status.TOUCHED, job=self.id)

    @command
    def stats(self) -> Request[Figures | None]:
        """Returns the server's statistics of the job (section "stats-job"), or None if the job is gone."""
        return _told(wire.stats_job(self.id))


class Commands(CommandBase, Generic[JobT]):
    """The methods of a client for the beanstalk protocol.

    Names and bodies are bytes, or text, which is encoded as UTF-8.
    """

    _tubes: Tubes
    _new_job: Callable[[Reply], JobT]

    # ---- producing ----

    @command
    def put(
        self,
        body: str | bytes,
        *,
        priority: int = PRIORITY,
        delay: int = 0,
        ttr: int = TTR_S,
        concurrency: Concurrency | None = None,
    ) -> Request[int]:
        """Adds a job to the used tube, and returns the id of the job (section "put", or "put-limited").

        priority: jobs with lower numbers are reserved first.
        delay: how many seconds later the job becomes ready.
        ttr: the time to run: how many seconds a worker has for the job.
        concurrency: a counter and its maximum, such as ("mail-api", 5). With concurrency, a worker gets the job only
        while the counter has a free permit, and the job holds this permit while it is reserved. Only counterd has this,
        with both protocols enabled.

        Raises Draining, JobTooBig or NoRoom. Raises Refused if the server has no counters.
        """
        more = {"priority": priority, "delay": delay, "ttr": ttr}
        frame = wire.put(as_bytes(body), **more) if concurrency is None else _limited(body, concurrency, **more)
        return asked(frame, {Status.INSERTED: _number, Status.BURIED: _number})

    @command
    def put_unique(
        self,
        body: str | bytes,
        key: str | bytes,
        keep: int = 0,
        *,
        priority: int = PRIORITY,
        delay: int = 0,
        ttr: int = TTR_S,
        concurrency: Concurrency | None = None,
    ) -> Request[Inserted]:
        """Adds a job unless a job with this key exists in any tube (section "put-unique"). Only counterd has this
        command.

        keep: for how many seconds the key stays taken after the job has ended.
        concurrency: as in put().

        With `keep` it is safe to repeat the command, so the client repeats it if the connection is lost. Without
        `keep`, a repeated command could add the job again after the job has ended.
        """
        more = {"priority": priority, "delay": delay, "ttr": ttr}
        if concurrency is None:
            frame = wire.put_unique(as_bytes(body), as_bytes(key), keep, **more)
        else:
            frame = _limited(body, concurrency, key=as_bytes(key), keep=keep, **more)
        return asked(
            frame,
            {
                Status.INSERTED: lambda reply: Inserted(_number(reply), True),
                Status.EXISTS: lambda reply: Inserted(_number(reply), False),
            },
            is_repeatable=keep > 0,
        )

    @command
    def use(self, tube: str | bytes) -> Request[bytes]:
        """Selects the tube that put() adds jobs to (section "use").

        The client selects the tube again when it reconnects.
        """
        return asked(wire.use(as_bytes(tube)), {Status.USING: self._tubes.uses}, is_repeatable=True)

    @command
    def list_tube_used(self) -> Request[bytes]:
        """Returns the tube that put() adds jobs to (section "list-tube-used")."""
        return asked(wire.list_tube_used(), {Status.USING: _name}, is_repeatable=True)

    # ---- working ----

    @command
    def reserve(self, timeout: int | None = None) -> Request[JobT | None]:
        """Reserves the next ready job of the watched tubes (sections "reserve" and "reserve-with-timeout").

        timeout: how many whole seconds to wait for a job. 0 means no wait. None means for ever.

        Returns None if no job became ready in time, or if the server is about to stop. Raises DeadlineSoon if another
        job that this client has reserved has less than a second of its time to run left. While this call waits, the
        server does not answer other calls of the same client.
        """
        return self._reserving(wire.reserve(timeout), timeout)

    @command
    def reserve_batch(self, count: int, timeout: int = 0) -> Request[list[JobT]]:
        """Reserves up to `count` ready jobs, at most 1,000 (section "batch-reserve"). Only counterd has this command.

        Waits for the first job as reserve() does. Returns an empty list if no job became ready in time.
        """

        def read(replies: list[Reply]) -> list[JobT]:
            head, *jobs = replies
            replied = {Status.JOBS: lambda _: [*map(self._new_job, jobs)], Status.TIMED_OUT: lambda _: []}
            found: list[JobT] = _result(head, replied)
            return found

        return QueueRequest(wire.batch_reserve(count, timeout), read, gives=True, patience=timeout, is_repeatable=True)

    @command
    def reserve_job(self, id: int) -> Request[JobT | None]:
        """Reserves the job with this id if it is ready, delayed or buried (section "reserve-job").

        Otherwise returns None.
        """
        replies: dict[Status, Any] = {Status.RESERVED: self._new_job, Status.NOT_FOUND: _none}
        return QueueRequest(wire.reserve_job(id), lambda found: _result(found[0], replies), gives=True)

    @command
    def watch(self, tube: str | bytes) -> Request[int]:
        """Adds a tube to the tubes that jobs are reserved from (section "watch"). Returns the number of these tubes.

        The client watches the same tubes when it reconnects.
        """
        return self._tubes.watching(as_bytes(tube), is_watched=True)

    @command
    def ignore(self, tube: str | bytes) -> Request[int]:
        """Removes a tube from the tubes that jobs are reserved from (section "ignore"). Returns the number of the
        remaining tubes.

        Raises Refused if the tube is the only one.
        """
        return self._tubes.watching(as_bytes(tube), is_watched=False)

    @command
    def list_tubes_watched(self) -> Request[list[bytes]]:
        """Returns the tubes that jobs are reserved from (section "list-tubes-watched")."""
        return asked(wire.list_tubes_watched(), {Status.OK: _names}, is_repeatable=True)

    # ---- by id ----

    @command
    def delete(self, id: int) -> Request[bool]:
        """Deletes a job that is ready, delayed, buried, or reserved by this client (section "delete").

        Returns False if the job does not exist.
        """
        return _done(wire.delete(id), Status.DELETED, job=id)

    @command
    def peek(self, id: int) -> Request[Peeked | None]:
        """Returns a job in any state, without reserving it (section "peek"). Returns None if the job does not exist."""
        return _looked(wire.peek(id))

    @command
    def kick_job(self, id: int) -> Request[bool]:
        """Makes a buried or delayed job ready (section "kick-job"). Returns False if the job does not exist."""
        return _done(wire.kick_job(id), Status.KICKED)

    @command
    def stats_job(self, id: int) -> Request[Figures | None]:
        """Returns the server's statistics of a job (section "stats-job"). Returns None if the job does not exist."""
        return _told(wire.stats_job(id))

    # ---- of the tube that is used ----

    @command
    def peek_ready(self) -> Request[Peeked | None]:
        """Returns the job of the used tube that would be reserved next (section "peek-ready")."""
        return _looked(wire.peek_next("ready"))

    @command
    def peek_delayed(self) -> Request[Peeked | None]:
        """Returns the delayed job of the used tube that becomes ready next (section "peek-delayed")."""
        return _looked(wire.peek_next("delayed"))

    @command
    def peek_buried(self) -> Request[Peeked | None]:
        """Returns the buried job of the used tube that would be kicked next (section "peek-buried")."""
        return _looked(wire.peek_next("buried"))

    @command
    def kick(self, count: int) -> Request[int]:
        """Kicks up to `count` buried jobs of the used tube, so that they are ready (section "kick").

        If no job is buried, kicks delayed jobs. Returns how many jobs it has made ready.
        """
        return asked(wire.kick(count), {Status.KICKED: _number})

    # ---- tubes ----

    @command
    def list_tubes(self) -> Request[list[bytes]]:
        """Returns the names of all tubes (section "list-tubes")."""
        return asked(wire.list_tubes(), {Status.OK: _names}, is_repeatable=True)

    @command
    def stats_tube(self, tube: str | bytes) -> Request[Figures | None]:
        """Returns the server's statistics of a tube (section "stats-tube"). Returns None if the tube does not exist."""
        return _told(wire.stats_tube(as_bytes(tube)))

    @command
    def inspect_tube(self, tube: str | bytes) -> Request[Figures | None]:
        """Returns the same as stats_tube(), and how long jobs wait in the tube (section "inspect-tube").

        Only counterd has this command.
        """
        return _told(wire.inspect_tube(as_bytes(tube)))

    @command
    def pause_tube(self, tube: str | bytes, delay: int) -> Request[bool]:
        """Stops reserves from a tube for `delay` seconds; 0 ends the pause (section "pause-tube").

        Returns False if the tube does not exist.
        """
        return _done(wire.pause_tube(as_bytes(tube), delay), Status.PAUSED, is_repeatable=True)

    @command
    def clear_tube(self, tube: str | bytes, state: str = "all") -> Request[int | None]:
        """Deletes the jobs of a tube, and returns their number (section "clear-tube"). Only counterd has this command.

        state: "ready", "delayed", "buried", or "all" for these three states.

        Returns None if the tube does not exist.
        """
        return asked(wire.clear_tube(as_bytes(tube), state), {Status.CLEARED: _number, Status.NOT_FOUND: _none})

    @command
    def limit_reserves(self, tube: str | bytes, reserves: int, target: str | bytes) -> Request[None]:
        """Moves jobs that were reserved `reserves` times to another tube (section "limit-reserves"). Only counterd has
        this command.

        reserves: 0 removes the limit.
        target: the tube that such jobs move to. If the target is the same tube, such jobs are buried.
        """
        frame = wire.limit_reserves(as_bytes(tube), reserves, as_bytes(target))
        return asked(frame, {Status.LIMITED: _none}, is_repeatable=True)

    @command
    def list_jobs(
        self,
        tube: str | bytes,
        state: str = "all",
        first: int = 0,
        count: int = 100,
        *,
        search: str | bytes = b"",
    ) -> Request[list[Figures]]:
        """Returns the statistics of the jobs of a tube (sections "list-jobs" and "search-jobs"). Only counterd has
        these commands.

        state: "ready", "reserved", "delayed", "buried" or "all".
        first: the lowest id to list.
        count: how many to list at most; the server lists at most 1,000 at a time.
        search: list only jobs whose body contains these bytes.

        The list is empty if the tube does not exist.
        """
        frame = wire.list_jobs(as_bytes(tube), state, first, count, as_bytes(search))
        replies = {Status.OK: lambda reply: wire.read_jobs(reply.body), Status.NOT_FOUND: lambda _: []}
        return asked(frame, replies, is_repeatable=True)

    @command
    def stats(self) -> Request[Figures]:
        """Returns the server's statistics (section "stats")."""
        return asked(wire.stats(), {Status.OK: _figures}, is_repeatable=True)

    # ---- inside ----

    def _reserving(self, frame: bytes, timeout: int | None) -> Request[JobT | None]:
        replies: dict[Status, Any] = {Status.RESERVED: self._new_job, Status.TIMED_OUT: _none}
        return QueueRequest(
            frame,
            lambda found: _result(found[0], replies),
            gives=True,
            patience=math.inf if timeout is None else timeout,
            is_repeatable=True,
        )


class Recorded(Commands[JobT], PipelineBase):
    """A pipeline: the commands that a client will send together."""

    def __init__(self, client: ClientCommands[JobT]) -> None:
        super().__init__()
        self._client = client
        self._tubes = client._tubes
        self._new_job = client._new_job

    def _steps(self) -> Steps[list[Any]]:
        """Returns the steps that send all requests, and removes them from the pipeline."""
        return self._client._run_all(self._taken())


class Tubes:
    """The tubes that a client uses and watches. The client first sends them to the server on each new connection."""

    def __init__(self, use: str | bytes, watch: str | bytes | Sequence[str | bytes]) -> None:
        self.used = wire.check_name(as_bytes(use))
        watched = [watch] if isinstance(watch, (str, bytes)) else watch
        self.watched = {wire.check_name(as_bytes(tube)): None for tube in watched}
        if not self.watched:
            raise ValueError("the client must watch at least one tube")

    def greeting(self) -> list[Request[Any]]:
        requests: list[Request[Any]] = []
        if self.used != DEFAULT:
            requests.append(asked(wire.use(self.used), {Status.USING: _name}))
        requests += [self.watching(tube, is_watched=True) for tube in self.watched if tube != DEFAULT]
        if DEFAULT not in self.watched:
            requests.append(self.watching(DEFAULT, is_watched=False))
        return requests

    def uses(self, reply: Reply) -> bytes:
        self.used = reply.name
        return reply.name

    def watching(self, tube: bytes, *, is_watched: bool) -> Request[int]:
        def answered(reply: Reply) -> int:
            if is_watched:
                self.watched[tube] = None
            else:
                self.watched.pop(tube, None)
            return _number(reply)

        frame = wire.watch(tube) if is_watched else wire.ignore(tube)
        return asked(frame, {Status.WATCHING: answered}, is_repeatable=True)


class QueueCalls(Ordered):
    """The calls of one connection of the beanstalk protocol. held: how many jobs are reserved.

    If the caller of a job no longer waits, the job is made ready again, with its own priority. The client first asks
    the server for this priority.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parser = wire.Parser()
        self._replies: list[Reply] = []  # so far, to the oldest call
        self._reserved: set[int] = set()

    def feed(self, data: bytes) -> None:
        for reply in self._parser.feed(data):
            self.answered = True
            if not self.pending:
                raise ProtocolError(f"the reply {reply.status.value} came without a request")
            self._replies.append(reply)
            head = self._replies[0]
            if head.status is Status.JOBS and len(self._replies) <= (head.number or 0):
                continue
            replies, self._replies = self._replies, []
            self._answer(replies)

    def _answer(self, replies: list[Reply]) -> None:
        call, result, error = self._read(replies)
        request = call.request
        if request.gives:
            call.jobs = [reply.number or 0 for reply in replies if reply.status is Status.RESERVED]
            self._reserved.update(call.jobs)
        elif request.job and replies[0].status is not Status.TOUCHED:
            self._reserved.discard(request.job)
        self.held = len(self._reserved)
        if not call.settle(result, error):
            self.forget(call)
        if request.unwanted and result is not None:
            self.give_back.append((_released(request.unwanted, int(result["pri"]), 0),))

    def forget(self, call: Call) -> None:
        for job in call.jobs:
            told = _told(wire.stats_job(job))
            self.give_back.append((QueueRequest(told.frame, told.read, unwanted=job),))
        call.jobs = ()

    def may_grant(self, call: Call) -> bool:
        return bool(call.request.gives)


class ClientCommands(Commands[JobT], Connecting):
    """The commands of a client, for blocking clients and for asyncio."""

    _job: Callable[[Any, Reply], JobT]  # makes a job of this client

    def __init__(
        self,
        host: str | Sequence[str] = "127.0.0.1",
        port: int = wire.PORT,
        *,
        path: str | os.PathLike[str] | None = None,
        tls: bool | ssl.SSLContext = False,
        use: str | bytes = "default",
        watch: str | bytes | Sequence[str | bytes] = "default",
        timeout: float = 5.0,
        connect_timeout: float | None = None,
    ) -> None:
        self._tubes = Tubes(use, watch)
        self._new_job = functools.partial(self._job, self)
        addresses = read_addresses(host, port, path, "beanstalk", tls)
        super().__init__(addresses, timeout, connect_timeout)

    def _make_calls(self) -> QueueCalls:
        return QueueCalls()

    def _first_requests(self) -> list[tuple[Request[Any]]]:
        return [(request,) for request in self._tubes.greeting()]

    def _run_all(self, requests: list[Request[Any]]) -> Steps[list[Any]]:
        """Sends requests together. Returns their results, including refusals."""
        if not requests:
            return []
        link = yield CONNECT, False
        calls: list[Any] = []
        try:
            patience = sum(request.patience for request in requests)
            results: list[Any] = yield CALL_ALL, link, [(request,) for request in requests], calls, patience
            return results
        except BaseException:
            link.forget(*calls)
            raise
