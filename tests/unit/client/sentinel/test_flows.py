"""The step machines of the clients for tokens. The test performs each step and sets the clock."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from counterd.client._baselink import Link
from counterd.client._connection import CLOSED, FORKED
from counterd.client._steps import CALL_ALL, CONNECT, TAKE
from counterd.client._threadlink import ThreadLink
from counterd.client.sentinel._flows import Commands, HoldSteps
from counterd.client.sentinel._tokens import Answer, Token
from counterd.errors import ConnectionLost, ProtocolError, Timeout
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.errors import TokenLost, TokenRefused
from counterd.protocols.sentinel.wire import MessageType, Response, Status

AWAY = ConnectionLost("cannot connect to there")
CUT = ConnectionLost("the server closed it")
TOKEN = Token(7, 101, 1)
GRANT = Response(1, MessageType.ACQUIRE, Status.OK, token_id=7)
FLOW = (wire.flow, 101, 1, False)


class Client(Commands[HoldSteps]):
    """A client whose commands return their steps. soon: how often it was asked to connect soon. at: the time of its
    timer.
    """

    LINK = ThreadLink
    _drive = _connected = _reconnect = _open = _wait = None  # the test does that
    _make_hold = HoldSteps
    _new_waiter = threading.Event

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"fallback": "closed", **options})
        self.now = 100.0
        self.soon = 0
        self.told: list[Any] = []
        self.at = math.inf

    def _run_command(self, made: Any) -> Any:
        return made

    def _now(self) -> float:
        return self.now

    def _connect_soon(self) -> None:
        self.soon += 1

    @property
    def sent_back(self) -> list[int]:
        """The ids of the tokens that were released."""
        returns = [*self.told, *self._link.calls.give_back]
        return [request[-1] for request in returns if request[0] is not wire.keep]

    def _due(self, at: float) -> None:
        self.at = at

    # ---- what a test does ----

    def connect(self, *, answered: bool = True) -> Any:
        self._link = Link("there", 1.0, print, self._on_release, calls=self._make_calls())
        self._link.calls.answered = answered
        self._link._tell = lambda *request: self.told.append(request)
        return self._link

    def held(self, **options: Any) -> HoldSteps:
        """A hold that has a token."""
        hold = self.hold(101, **options)
        steps = hold._entering()
        grant(steps)
        return hold


def grant(steps: Any) -> None:
    """Answers the steps of a hold that enters, until it has the token."""
    act, *arguments = next(steps)
    if act is CONNECT:
        act, *arguments = steps.send(SimpleNamespace(closed="", calls=SimpleNamespace(answered=True)))
    assert act is TAKE
    granted = responded(MessageType.ACQUIRE, Status.OK, token_id=TOKEN.id)
    arguments[-1](granted)
    assert ended(steps, granted) is None


def ended(steps: Any, sent: Any = None) -> Any:
    """The value that the steps return after the last of them."""
    with pytest.raises(StopIteration) as end:
        steps.send(sent)
    return end.value.value


def responded(kind: MessageType, status: int, **more: int) -> Response:
    return Response(1, kind, status, **more)


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_the_first_call_connects() -> None:
    client = Client()
    steps = client.flow(101)
    assert next(steps) == (CONNECT,)
    link = client.connect()
    assert steps.send(link) == (TAKE, link, FLOW, None)
    assert ended(steps, responded(MessageType.FLOW, Status.OK, remaining=4)) == Answer(0, 4)
    assert next(client.flow(101))[0] is TAKE, "the next one does not"


def test_a_call_whose_connection_is_lost_is_repeated_once() -> None:
    client = Client()
    first = client.connect()
    steps = client.ping()
    next(steps)
    first.closed = "the server closed it"
    assert steps.throw(CUT) == (CONNECT,)
    again = client.connect()
    assert steps.send(again)[:2] == (TAKE, again)
    with pytest.raises(ConnectionLost):
        steps.throw(CUT)


@pytest.mark.parametrize("why", ["silent", "closed"])
def test_a_call_on_an_unanswered_or_closed_connection_is_not_repeated(why: str) -> None:
    """The server accepts and closes without a reply, or the client was closed."""
    client = Client(fallback="open")
    client.connect(answered=why != "silent")
    steps = client.ping()
    next(steps)
    client._closed = why == "closed"
    with pytest.raises(ConnectionLost):
        steps.throw(CUT)


def test_calls_after_a_failed_connect_do_not_connect() -> None:
    client = Client(fallback="open")
    steps = client.flow(101)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.throw(AWAY)
    assert end.value.value == Answer(0, fallback=True)
    assert ended(client.flow(101)) == Answer(0, fallback=True)
    assert client.soon == 1
    with pytest.raises(ConnectionLost, match=r"^cannot connect to there$"):
        next(client.ping())
    client._on_connected()
    assert next(client.flow(101)) == (CONNECT,), "as there was a connection meanwhile"


@pytest.mark.parametrize("error", [AWAY, Timeout("no reply"), ProtocolError("nonsense")])
def test_a_closed_client_does_not_fall_back(error: Exception) -> None:
    client = Client(fallback="open")
    client.connect(answered=False)
    steps = client.flow(101)
    next(steps)
    client._closed = True
    with pytest.raises(type(error)):
        steps.throw(error)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_acquire_returns_a_token() -> None:
    client = Client()
    link = client.connect()
    steps = client.acquire(101)
    act, through, request, granted = next(steps)
    assert (act, through, request) == (TAKE, link, (wire.acquire, 101, 1, False))
    granted(GRANT)
    token = ended(steps, GRANT)
    assert (token.id, token.flow_id, client._fallback.tokens()) == (7, 101, [token])


def test_a_grant_at_the_deadline_counts() -> None:
    client = Client()
    client.connect()
    steps = client.acquire(101)
    next(steps)[3](GRANT)
    with pytest.raises(StopIteration) as end:
        steps.throw(Timeout("no reply"))
    assert end.value.value.id == 7


def test_an_interrupted_acquire_gives_back_its_token() -> None:
    client = Client()
    client.connect()
    steps = client.acquire(101)
    next(steps)[3](GRANT)
    steps.close()
    assert client.sent_back == [7]
    steps = client.release(TOKEN)
    next(steps)
    steps.close()
    assert client.sent_back[1:] == [TOKEN.id], "once more: nobody knows whether the first was sent"


def test_a_failed_release_is_not_sent_again() -> None:
    client = Client()
    client.connect()
    steps = client.release(TOKEN)
    next(steps)
    with pytest.raises(Timeout):
        steps.throw(Timeout("no reply"))
    steps = client.release(TOKEN)
    next(steps)
    with pytest.raises(TokenRefused):
        steps.send(responded(MessageType.RELEASE, Status.FAIL))
    assert client.sent_back == []


def test_a_repeated_release_accepts_already_released() -> None:
    """The first request may have released the token before the connection was lost, so this is no loss."""
    client = Client()
    gone = responded(MessageType.RELEASE, Status.ALREADY_RELEASED)
    for steps, result in ((client.release(TOKEN), True), (client.held()._leaving(None), None)):
        client.connect()
        next(steps)
        client._link.closed = "the server closed it"
        assert steps.throw(CUT) == (CONNECT,)
        assert steps.send(client.connect())[2] == (wire.release, 7)
        assert ended(steps, gone) is result
    assert client.stats().lost == 0


# ---- holds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "raises"), [(Status.RELEASE_OK, False), (Status.ALREADY_RELEASED, True)])
def test_leaving_a_hold_releases_its_token(status: int, raises: bool) -> None:
    client = Client()
    client.connect()
    hold = client.held()
    steps = hold._leaving(None)
    assert next(steps)[2] == (wire.release, 7)
    with pytest.raises(TokenLost if raises else StopIteration):
        steps.send(responded(MessageType.RELEASE, status))
    assert (hold.token, hold.lost, client._leases.holds) == (None, False, {})
    assert client.stats().lost == raises
    entering = hold._entering()
    next(entering)
    with pytest.raises(RuntimeError, match="already in use"):
        next(hold._entering())


@pytest.mark.parametrize("error", [AWAY, Timeout("no reply")])
def test_leaving_a_hold_without_a_connection_raises_nothing(error: Exception) -> None:
    """The token ends with its lease."""
    client = Client()
    client.connect(answered=False)
    steps = client.held()._leaving(None)
    next(steps)
    with pytest.raises(StopIteration):
        steps.throw(error)
    assert client.stats().lost == 0


def test_a_garbage_collected_hold_releases_without_waiting() -> None:
    client = Client()
    hold = client.held()
    token = hold.token
    assert ended(hold._leaving(GeneratorExit)) is None
    assert client.sent_back == [token.id]


@pytest.mark.parametrize("why", [CLOSED, FORKED])
@pytest.mark.parametrize("kind", [None, GeneratorExit])
def test_a_token_of_a_closed_or_forked_client_is_no_loss(why: str, kind: type[BaseException] | None) -> None:
    """A child does not give back what its parent holds."""
    client = Client()
    hold = client.held()
    client._leases.forget(why)
    assert hold.lost
    assert ended(hold._leaving(kind)) is None
    assert (client.sent_back, client.stats().lost) == ([], 0)


def test_an_interrupted_hold_has_nothing() -> None:
    client = Client()
    hold = client.hold(101)
    steps = hold._entering()
    next(steps)
    hold._token = TOKEN
    steps.close()
    assert (client.sent_back, hold.token) == ([TOKEN.id], None)
    steps = hold._entering()
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt)
    next(hold._entering())


# ---- leases ---------------------------------------------------------------------------------------------------------


def test_all_due_leases_are_kept_with_one_write() -> None:
    client = Client()
    link = client.connect()
    holds = [client.held(), client.held()]
    assert client.at == client._due_at() == 100.0
    steps = client._keeping()
    assert next(steps) == (CONNECT,)
    assert steps.send(link) == (CALL_ALL, link, [(wire.keep, 7)] * 2)
    client.now = 101.0
    assert ended(steps, [responded(MessageType.KEEP, Status.OK, left_ms=9000), None]) is None
    assert client._leases.usual == {101: 8.0}, "of 9 s that began when it was asked"
    assert [lease.due for lease in client._leases.holds] == [104.0, 101.1]
    assert client._due_at() == 101.1
    assert not any(hold.lost for hold in holds)


def test_without_a_connection_a_lease_runs_out() -> None:
    told: list[Any] = []
    client = Client()
    client.connect()
    hold = client.held(on_lost=told.append)
    (lease,) = client._leases.holds
    lease.ends = 103.0
    client._link.closed = "the server closed it"
    client._attempts.retry_at = 101.5
    assert client._due_at() == 101.5, "then it may connect"
    client.now = 103.0
    steps = client._keeping()
    next(steps)
    with pytest.raises(StopIteration):
        steps.throw(AWAY)
    assert (told, client._due_at(), client.stats().lost) == ([hold], math.inf, 1)
    with pytest.raises(TokenLost, match="its lease is over"):
        hold.raise_if_lost()


def test_a_new_connection_keeps_the_leases_of_all_tokens() -> None:
    client = Client()
    client.connect()
    steps = client.acquire(101)
    next(steps)[3](GRANT)
    mine = ended(steps, GRANT)
    client.held()
    client.connect()
    client._on_connected()
    assert client.told == [(wire.keep, mine.id)], "that of the hold is due"
    assert client._due_at() == 0.0


def test_without_leases_the_keeper_connects_only_if_asked() -> None:
    client = Client()
    assert ended(client._keeping()) is None
    assert next(client._keeping(connects=True)) == (CONNECT,)
