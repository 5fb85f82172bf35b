"""Client(resume=): holdings outlast their connection, and the client resumes them; with real daemons."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client, Hold, Permit, Rate
from counterd.errors import ConnectionLost, NotAvailable
from kit.cuts import CUTS, GRACE_S, HOST
from kit.daemon import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit import daemon
    from kit.cuts import Relay


@pytest.fixture
def client(relay: Relay) -> Iterator[Client]:
    with Client(HOST, relay.port, resume=GRACE_S, name="billing-3") as made:
        yield made


def test_a_client_that_resumes_loses_nothing(
    counterd: daemon.Daemon, relay: Relay, client: Client, other: Client
) -> None:
    with client.hold("a", 2, maximum=3) as hold, client.take(Permit("b"), Rate("r", 5, 10, 3600)) as taken:
        assert client.acquire("c", maximum=1) == 1
        for _ in range(CUTS):
            relay.cut()
            assert not hold.lost
            assert not taken.lost
            assert client.acquire("d", maximum=1) == 1
            assert [other.get(name) for name in "abcd"] == [2, 1, 1, 1]
            client.release("d")
        taken.settle("r", 2)
        with other.take(Rate("r", 8, 10, 3600)):
            pass
    assert [other.get(name) for name in "abcd"] == [0, 0, 1, 0]
    client.release("c")
    figures = counterd.stats()
    assert figures["resumed"] == figures["command:resume"] - 1 == CUTS
    assert figures["command:who"] == CUTS + 1
    assert figures["internal_errors"] == 0


def test_the_client_reconnects_without_a_call(
    counterd: daemon.Daemon, relay: Relay, client: Client, other: Client
) -> None:
    with client.hold("a", maximum=1) as hold:
        relay.is_open = False
        relay.cut()
        counterd.wait_for_stats(kept=1)
        assert not hold.lost
        with pytest.raises(NotAvailable):
            other.acquire("a", maximum=1)
        relay.is_open = True
        counterd.wait_for_stats(kept=0, resumed=1)
    wait_until(lambda: other.get("a") == 0, "it is given back")


def test_leaving_a_hold_without_a_connection(
    counterd: daemon.Daemon, relay: Relay, client: Client, other: Client
) -> None:
    """It raises nothing, as the permits were held all the time. They are given back as soon as possible."""
    with client.hold("a", maximum=1):
        relay.is_open = False
        relay.cut()
        counterd.wait_for_stats(kept=1)
    assert other.get("a") == 1
    relay.is_open = True
    wait_until(lambda: other.get("a") == 0, "it is given back")
    assert counterd.stats()["resumed"] == 1


def test_holdings_are_lost_after_the_grace_time(counterd: daemon.Daemon, relay: Relay, other: Client) -> None:
    told: list[Hold] = []
    with Client(HOST, relay.port, resume=0.05) as client:
        client.acquire("b", maximum=1)
        hold = client.hold("a", maximum=1, on_lost=told.append)
        with pytest.raises(ValueError, match="mine"), hold:  # noqa: PT012
            relay.is_open = False
            relay.cut()
            counterd.wait_for_stats(kept=0, holdings=0)
            wait_until(lambda: hold.lost, "the client knows")
            wait_until(lambda: told == [hold], "the function was told")
            relay.is_open = True
            raise ValueError("mine")
        with pytest.raises(ConnectionLost, match="has been given back"):
            client.get("a", 0)
        with client.hold("a", maximum=1):  # which waits until it may connect again
            assert other.get("a") == 1


def test_a_restarted_server_refuses_to_resume(start: Callable[..., daemon.Daemon]) -> None:
    """It knows no token, so the holdings are lost."""
    one = start()
    with Client(HOST, one.address.port, resume=GRACE_S) as client:
        hold = client.hold("a", maximum=1).__enter__()
        assert one.stop() == 0
        start({"counter.port": one.address.port})
        wait_until(lambda: hold.lost, "the client knows")
        with pytest.raises(ConnectionLost, match="lost 1 of a"):
            hold.__exit__(None, None, None)


def test_requests_with_lost_replies_are_executed_once(
    counterd: daemon.Daemon, relay: Relay, client: Client, other: Client
) -> None:
    """The requests sent before the cut are executed exactly once."""

    def mute() -> None:
        client.noop()  # it has resumed
        relay.muted = True

    assert client.acquire("a", maximum=9) == 1
    mute()
    assert client.acquire("a", 2, maximum=9) == 2
    wait_until(lambda: other.get("a") == 3, "what the lost request got is given back")
    mute()
    client.release("a", 2)
    wait_until(lambda: other.get("a") == 1, "2 are released once")
    mute()
    with client.take(Permit("a", 4, maximum=9), Permit("b")):
        wait_until(lambda: (other.get("a"), other.get("b")) == (5, 1), "they are taken once")
        mute()
    wait_until(lambda: (other.get("a"), other.get("b")) == (1, 0), "they are released once")
    mute()
    with pytest.raises(ConnectionLost):
        client.pipeline().acquire("a", 3, maximum=9).acquire("c", 1, maximum=1).release("a", 1).execute()
    wait_until(lambda: other.get("a") == 0, "the release of the pipeline was executed, its acquires are given back")
    assert other.get("c") == 0
    relay.expect_loss(5)
    assert counterd.stats()["resumed"] == 5


@pytest.mark.parametrize("resume", [0, GRACE_S])
def test_a_lost_reply_to_the_last_release_raises_nothing(relay: Relay, other: Client, resume: float) -> None:
    """The permits were held until then, and are given back."""
    with Client(HOST, relay.port, resume=resume) as client:

        def mute() -> None:
            client.noop()
            relay.muted = True

        with client.hold("a", maximum=1):
            mute()
        wait_until(lambda: other.get("a") == 0, "it is given back")
        with client.take(Permit("a"), Permit("b")):
            mute()
        wait_until(lambda: other.get("a") == other.get("b") == 0, "they are given back")
        client.acquire("a", maximum=1)
        mute()
        client.release("a")
        wait_until(lambda: other.get("a") == 0, "it is given back")
        with client.hold("a", maximum=1):
            assert other.get("a") == 1
    relay.expect_loss(3)


def test_a_release_after_the_connection_has_ended(relay: Relay, other: Client) -> None:
    with Client(HOST, relay.port) as client:
        with pytest.raises(ConnectionLost, match="lost 1 of a"), client.hold("a", maximum=1):
            relay.cut()
        with pytest.raises(ConnectionLost, match="lost 1 of a"), client.take(Permit("a")):
            relay.cut()
        client.acquire("a", maximum=1)
        relay.cut()
        with pytest.raises(ConnectionLost):
            client.release("a")
    wait_until(lambda: other.get("a") == 0, "all is given back")


def test_a_lost_reply_to_resume_is_asked_for_again(
    counterd: daemon.Daemon, relay: Relay, client: Client, other: Client
) -> None:
    with client.hold("a", maximum=1) as hold:
        relay.muted = True
        relay.cut()
        relay.expect_loss()
        counterd.wait_for_stats(kept=0, resumed=2)
        assert not hold.lost
        assert other.get("a") == 1
    wait_until(lambda: other.get("a") == 0, "it is given back")


def test_waiting_takes_go_on_after_a_resume(relay: Relay, client: Client, other: Client) -> None:
    assert other.acquire("a", maximum=1) == 1
    with client.hold("b", maximum=1):
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(client.take(Permit("a"), timeout=GRACE_S).acquire()))
        waiting.start()
        wait_until(lambda: other.stats()["waiters"] == "1", "it waits")
        relay.cut()
        wait_until(lambda: int(other.stats()["resumed"]) == 1, "it has resumed")
        wait_until(lambda: other.stats()["waiters"] == "1", "it waits again")
        other.release("a")
        waiting.join()
        (taken,) = got
        taken.release()


def test_close_gives_everything_back(counterd: daemon.Daemon, relay: Relay, other: Client) -> None:
    client = Client(HOST, relay.port, resume=GRACE_S)
    hold = client.hold("a", maximum=1).__enter__()
    client.close()
    assert other.get("a") == 0
    assert hold.lost
    figures = counterd.stats()
    assert (figures["kept"], figures["command:goodbye"]) == (0, 1)


def test_holdings_of_a_killed_client_come_back_after_the_grace_time(
    counterd: daemon.Daemon, relay: Relay, other: Client
) -> None:
    child = os.fork()
    if not child:
        client = Client(HOST, relay.port, resume=0.3)
        client.acquire("a", maximum=1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: other.get("a", 0) == 0 and counterd.stats()["expired_stays"] == 1, "it comes back")


def test_a_forked_child_has_no_token_of_its_parent(
    counterd: daemon.Daemon, relay: Relay, client: Client, other: Client
) -> None:
    """The child connects on its own, before and after the connection of the parent is cut."""
    with client.hold("a", maximum=2) as hold:
        child = os.fork()
        if not child:
            try:
                granted = client.acquire("a", maximum=2)
                client.close()
                os._exit(granted)
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        relay.cut()
        counterd.wait_for_stats(resumed=1)
        assert not hold.lost
        assert other.get("a") == 1
    wait_until(lambda: other.get("a") == 0, "it is given back")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"resume": -1}, ValueError),
        ({"resume": 1e10}, ValueError),
        ({"resume": "1"}, TypeError),
        ({"name": "x" * 65}, ValueError),
        ({"name": "a\n"}, ValueError),
        ({"name": b"a"}, AttributeError),
    ],
)
def test_invalid_arguments_are_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Client(**given)
