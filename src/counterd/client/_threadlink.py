"""One connection of a blocking client, which any number of threads can use at the same time.

Floor: side (ARCHITECTURE.md). If a thread waits for a reply and no other thread reads, this thread reads for all
threads until it has its own reply. Then another waiting thread reads. So a client needs no thread of its own, and each
thread waits only until its own reply has arrived. The socket never blocks: a thread waits only in poll(), with a
deadline. Bytes that the kernel does not accept are sent before later requests. So each request is sent completely, even
if its caller is interrupted.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from counterd.client import _portable
from counterd.client._baselink import Link
from counterd.client._calls import PROBE_S, UNANSWERED_MAX, Call, Pending, outcomes
from counterd.client._connection import (
    CLOSED,
    PEER_CLOSED,
    POLL_MAX,
    RECEIVE_SIZE,
    DeadlinePassed,
    lost,
    not_answered,
)
from counterd.client._portable import is_mine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.client._calls import Request
    from counterd.client._holding import Held
    from counterd.client._tls import SecureSocket
    from counterd.errors import CounterdError

PUSH_SLICE_S = 0.05  # a thread that only sends checks so often whether another thread still reads
# The shortest wait in seconds, to read what has come already: with a deadline of now, nothing would be read.
_AT_ONCE = 0.001
SETTLE_S = 1.0  # how long an interrupted caller waits for a reply that may grant it something

_ENDED = _portable.PEER_ENDED | select.POLLHUP | select.POLLERR


class ThreadCall(Call):
    """A call for whose reply a thread waits."""

    def __init__(self, granted: Callable[[Any], object] | None = None) -> None:
        self.granted = granted

    def _wake(self) -> None:
        waiter, self.waiter = (
            self.waiter,
            None,
        )  # a signal that comes after release() finds no lock to release once more
        if waiter is not None:
            waiter.release()


class ThreadLink(Link):
    """A connected socket, and the calls that wait for replies on it.

    A thread needs the lock for everything except reading.
    """

    def __init__(
        self,
        connected: socket.socket | SecureSocket,
        where: str,
        timeout: float,
        on_end: Callable[[Any], object],
        on_release: Callable[[Request], object],
        *,
        calls: Pending,
    ) -> None:
        super().__init__(where, timeout, on_end, on_release, calls=calls)
        self._socket = connected
        # Reentrant only because a thread has to know whether it has the lock itself.
        self._lock: Any = threading.RLock()
        self._unsent = bytearray()
        self._reading = 0  # the id of the thread that reads
        self._watched = False
        self._pushing: set[ThreadCall] = set()  # calls whose threads wait until the kernel takes more bytes
        self._waiting: dict[ThreadCall, None] = {}  # calls whose threads wait while another thread reads, in order
        self._poller = select.poll()
        self._poller.register(connected, select.POLLIN)

    def call(self, *request: Any, granted: Callable[[Any], object] | None = None, patience: float = 0.0) -> Any:
        """Sends a request and returns its result. Raises ServerError, Timeout, ConnectionLost or ProtocolError.

        granted: called with the result at the moment of the grant. From then on the caller has to give the grant back.
        An interrupt can raise other exceptions. patience: how many seconds the server may take beyond the timeout.
        """
        call = ThreadCall(granted)
        self._complete((request,), [call], patience=patience)
        if call.error is not None:
            raise call.error
        return call.result  # a call, such as outcome(), would give a signal the chance to lose it

    def call_all(
        self, requests: Sequence[Request], calls: list[ThreadCall] | None = None, patience: float = 0.0
    ) -> list[Any]:
        """Sends requests together, and returns their results, including refusals. Raises any other error of a call.
        Then everything that these calls are granted is given back.

        calls: a list for the calls, so that a caller that is interrupted later can forget() them.
        """
        calls = [] if calls is None else calls
        calls += [ThreadCall() for _ in requests]
        try:
            self._complete(requests, calls, patience=patience)
            return outcomes(calls)
        except BaseException:
            self.forget(*calls)
            raise

    def queue(
        self,
        request: Request,
        granted: Callable[[Any], object] | None,
        seconds: float | None,
        probe: Request,
        sent: Callable[[], object] | None = None,
    ) -> Any:
        """Does the same as call(), for a request that may wait in the server for this many seconds. None means for
        ever.

        probe: a request that is sent from time to time, to check that the server still answers. sent: called when the
        request was sent.
        """
        self._check_interrupted()
        call = ThreadCall(granted)
        deadline = math.inf if seconds is None else time.monotonic() + seconds + self._timeout
        try:
            self._begin((request,), [call])
            if self._unsent:
                self._push(call, time.monotonic() + self._timeout)
            if sent is not None:
                sent()
            while not call.done:
                try:
                    self._wait(call, min(deadline, time.monotonic() + PROBE_S))
                except DeadlinePassed:
                    if time.monotonic() >= deadline:
                        raise
                    self.call(*probe)
        except DeadlinePassed:
            self._give_up([call], 0)
            raise not_answered(self.where, self._timeout) from None
        except BaseException:
            self._give_up([call], SETTLE_S)
            raise
        return call.outcome()

    def release(self, held: Sequence[Held]) -> None:
        """Gives back the permits that the holds have on this connection, with the exceptions of call(). If the call is
        interrupted, disown() gives back the rest."""
        calls = [ThreadCall() for _ in held]
        self._complete([self.calls.release(each.name, each.amount) for each in held], calls, held)
        for call in calls:
            call.outcome()

    def listen(self, seconds: float | None) -> bool:
        """Returns True as soon as the server has sent something without a request, or the connection has ended.

        Returns False after this many seconds.
        """
        self._check_interrupted()
        deadline = math.inf if seconds is None else time.monotonic() + max(seconds, _AT_ONCE)
        call = ThreadCall()
        try:
            with self._lock:
                self.calls.listeners.append(call)
                if self.closed or self.calls.has_unasked():
                    return True
            self._wait(call, deadline)
        except DeadlinePassed:
            return False
        finally:
            if not call.done:
                self._stop_listening(call)
        return True

    def is_alive(self) -> bool:
        with self._lock:
            if not self.closed and self._has_ended():
                self._closed_by_peer(is_plain=self._is_plain())
        return super().is_alive()

    def close(self, why: str = CLOSED, error: Callable[[], CounterdError] | None = None) -> None:
        with self._lock:
            super().close(why, error)
            self._close_unused()  # also if it has ended before, and the thread that read was interrupted then

    def fileno(self) -> int:
        return self._socket.fileno()

    def after_fork(self) -> None:
        """Does the same as Link.after_fork(). A thread of the parent may hold the old lock, so this makes a new one."""
        super().after_fork()
        self._lock = threading.RLock()
        self._socket.close()

    # ---- the background thread ----

    def watch(self, wake: int, seconds: float) -> bool:
        """Waits until the connection ends, the descriptor `wake` is readable, or this many seconds have passed. Returns
        whether `wake` is readable.

        On a system whose poll() does not report the end of a connection, this may return earlier.
        """
        with self._lock:
            self._watched = not self.closed
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        if self._watched:
            poller.register(self._socket, _portable.PEER_ENDED)
            if not _portable.PEER_ENDED:
                seconds = min(seconds, _portable.LOOK_S)
        try:
            ready = dict(poller.poll(math.ceil(min(seconds * 1000, POLL_MAX))))
            ended = any(events & _ENDED for events in ready.values())
            ended = ended or (self._watched and not _portable.PEER_ENDED and _portable.has_ended(self._socket))
        finally:
            with self._lock:
                self._watched = False
                self._pass_on()
        if ended:
            self.close(PEER_CLOSED)
        return wake in ready

    # ---- with the lock ----

    def _hang_up(self) -> None:
        self._unsent.clear()
        if self._is_polled():
            with suppress(OSError):  # wakes the threads in poll(), which close the socket
                self._socket.shutdown(socket.SHUT_RDWR)

    def _has_ended(self) -> bool:
        with self._lock:  # else another thread may close the socket
            return bool(self.closed) or _portable.has_ended(self._socket)

    def _has_interrupted(self) -> bool:
        return is_mine(self._lock)

    def _is_plain(self) -> bool:
        """Returns whether it is TCP without TLS."""
        return getattr(self._socket, "family", None) in (socket.AF_INET, socket.AF_INET6)  # a SecureSocket has none

    def _is_polled(self) -> bool:
        return bool(self._reading or self._watched or self._pushing)

    def _close_unused(self) -> None:
        if not self._is_polled():
            self._socket.close()

    def _send(self, data: bytes) -> None:
        """Sends as many bytes as the kernel accepts. Unsent bytes are sent before the next request."""
        try:
            if not self._unsent:
                sent = self._socket.send(data)
                if sent < len(data):
                    self._unsent += memoryview(data)[sent:]
                return
            self._unsent += data
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self._unsent = self._unsent or bytearray(data)
        except OSError as error:
            self.close(str(error))
        except BaseException:
            self.close("sending was interrupted")  # it is not known how much was sent
            raise

    def _tell(self, *request: Any) -> None:
        call = ThreadCall()
        call.abandoned = True
        self._send(self.calls.add(call, *request))

    def _pass_on(self) -> None:
        """Called when this thread stops using the socket.

        If no thread reads, wakes a waiting thread, so that it reads.
        """
        self._give_back()
        if self.closed:
            self._close_unused()
        if not self._reading:
            for call in list(self._waiting):  # threads take their calls out without the lock
                waiter, call.waiter = call.waiter, None
                if waiter is not None:
                    waiter.release()
                    return

    def _receive(self) -> None:
        """Takes the bytes that have arrived.

        If reading is interrupted, bytes may be missing, so the connection ends.
        """
        try:
            data = self._socket.recv(RECEIVE_SIZE)
            if data:
                self.received(data)
            else:
                self._closed_by_peer(is_plain=self._is_plain())
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))
        except BaseException:
            self.close("reading was interrupted")
            raise

    # ---- without the lock ----

    def _check_interrupted(self) -> None:
        if is_mine(self._lock) or self._reading == threading.get_ident():
            raise interrupted()  # the interrupted call would have to continue first

    def _stop_listening(self, call: ThreadCall) -> None:
        with self._lock:
            call.waiter = None
            if call in self.calls.listeners:
                self.calls.listeners.remove(call)
            self._pass_on()

    def _complete(
        self,
        requests: Sequence[Request],
        calls: list[ThreadCall],
        leaving: Sequence[Held] = (),
        patience: float = 0.0,
    ) -> None:
        self._check_interrupted()
        deadline = time.monotonic() + self._timeout + patience
        try:
            self._begin(requests, calls, leaving)
            if self._unsent and calls:
                self._push(calls[-1], deadline)
            for call in calls:
                self._wait(call, deadline)
        except DeadlinePassed:
            doubt = self.calls.doubt
            self._give_up(calls, 0)
            raise not_answered(self.where, self._timeout + patience, doubt) from None
        except BaseException:
            self._give_up(calls, SETTLE_S)
            raise

    def _begin(self, requests: Sequence[Request], calls: list[ThreadCall], leaving: Sequence[Held] = ()) -> None:
        """Sends all requests, or none.

        leaving: holds that give back their permits; nothing is sent for a hold without permits.
        """
        with self._lock:
            if self.closed:
                raise self._not_sent()
            try:
                if leaving:
                    has = [held in self.holds for held in leaving]
                    self.holds.difference_update(leaving)
                    requests = [request for request, any_left in zip(requests, has, strict=True) if any_left]
                    calls[:] = [call for call, any_left in zip(calls, has, strict=True) if any_left]
                if calls:
                    self._send(self.calls.add_all(calls, requests))
            except BaseException as error:
                if self.calls.IS_ORDERED and not isinstance(error, (ValueError, TypeError)):
                    self.close("sending was interrupted")  # a call that was not sent would take the next one's reply
                if any(held not in self.holds for held in leaving):
                    self.close("giving permits back was interrupted")  # it is not known whether the release was sent
                raise

    def _wait(self, call: ThreadCall, deadline: float) -> None:
        """Waits until the call has its result or error. Raises DeadlinePassed."""
        while not call.done:
            wake, reads = None, 0
            try:
                with self._lock:
                    if call.done:
                        return
                    if self.closed:  # the thread that read its reply was interrupted before it settled the call
                        call.settle(None, lost(self.where, self.closed))
                        return
                    if self._reading:
                        wake = threading.Lock()
                        wake.acquire()
                        call.waiter = wake  # locked: if this is interrupted, another thread may still release it
                        self._waiting[call] = None
                    else:
                        reads = self._reading = threading.get_ident()
                if wake is not None and not wake.acquire(timeout=_seconds_left(deadline)):
                    raise DeadlinePassed
                while reads and not call.done and not self.closed:
                    self._read(self._poller, deadline)
            finally:
                if reads:
                    self._reading = 0  # before taking the lock: others can read even if this is interrupted
                    self._hand_over()
                self._waiting.pop(call, None)

    def _hand_over(self) -> None:
        with self._lock:
            self._pass_on()

    def _read(self, poller: select.poll, deadline: float) -> None:
        """Runs in the thread that reads. Waits for events of the poller, and takes the bytes that have arrived."""
        # SO_RCVTIMEO would save this call, but starts again with every signal.
        ready = poller.poll(min(math.ceil(_seconds_left(deadline) * 1000), POLL_MAX))
        if not ready:
            raise DeadlinePassed
        if ready[0][1] & ~select.POLLOUT:
            with self._lock:
                if not self.closed:
                    self._receive()

    def _push(self, last: ThreadCall, deadline: float) -> None:
        """Sends the bytes that the kernel did not accept at first.

        Reads meanwhile, because the server may wait for that.
        """
        poller = select.poll()
        while self._unsent and not last.done:
            reads = 0
            try:
                with self._lock:
                    if self.closed:
                        return
                    self._pushing.add(last)
                    if not self._reading:
                        reads = self._reading = threading.get_ident()
                poller.register(self._socket, select.POLLIN | select.POLLOUT if reads else select.POLLOUT)
                if reads:
                    self._read(poller, deadline)
                else:
                    poller.poll(min(_seconds_left(deadline), PUSH_SLICE_S) * 1000)
            finally:
                self._pushing.discard(last)
                if reads:
                    self._reading = 0
                self._hand_over()
            with self._lock:
                if not self.closed:
                    self._send(b"")

    def _give_up(self, calls: list[ThreadCall], patience: float) -> None:
        """Gives up these calls. Waits up to `patience` seconds for their grants, to give them back."""
        with self._lock:
            for call in calls:
                call.waiter = None
            self.forget(*calls)
            unanswered = [call for call in calls if call.frame and not call.done]  # else it was not sent, or is over
            self._pass_on()
        deadline = time.monotonic() + patience
        try:
            with suppress(DeadlinePassed):
                for call in unanswered:
                    if patience and self.calls.may_grant(call):
                        self._wait(call, deadline)
        finally:
            self._leave_behind([call for call in unanswered if not call.done])

    def _leave_behind(self, unanswered: list[ThreadCall]) -> None:
        """Called when no thread waits for these calls any more.

        Ends the connection if there are too many such calls, or if they may hide a grant.
        """
        with self._lock:
            for call in unanswered:
                call.waiter = None
            self._pass_on()
            if self._unsent and unanswered:
                self.close("the server accepts no more requests")
            elif self._count_given_up() > UNANSWERED_MAX:
                self.close(f"{UNANSWERED_MAX} calls were not answered")
            elif any(map(self.calls.may_grant, unanswered)):
                self._expect_late_grants()

    def _expect_late_grants(self) -> None:
        """The caller has the lock.

        Nobody would see a grant that arrives now until some thread reads again, which may never happen.
        """
        if self._has_nothing_else():
            self.close("an acquire was not answered in time, and this client holds nothing")

    def _count_given_up(self) -> int:
        pending: dict[int, Any] = self.calls.pending
        return sum(call.abandoned for call in pending.values())

    def _has_nothing_else(self) -> bool:
        return not self.calls.held and self._count_given_up() == len(self.calls.pending)


def interrupted() -> RuntimeError:
    return RuntimeError("a signal handler cannot use the client that it interrupted")


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlinePassed
    return min(left, threading.TIMEOUT_MAX)
