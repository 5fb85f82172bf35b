"""drain.mode = wait: what is held may come back first, and who is waited for is said."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from counterd import errors
from counterd.protocols.counter import wire
from functional import peers

if TYPE_CHECKING:
    from collections.abc import Callable

    import daemon


def test_what_is_held_comes_back_first(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.timeout": 60}, arguments=["--set", "drain.mode=wait"])
    with counterd.client() as client, counterd.connect() as other:
        client.acquire("jobs", 3, maximum=3)
        client.acquire("mail", maximum=3)
        peers.ask(other, wire.acquire(1, b"jobs 2", 1, 1))
        counterd.send_signal(signal.SIGTERM)
        line = counterd.wait_for_log("holdings of counter that are waited for: 3")
        port = other.getsockname()[1]
        assert "3 of jobs by 127.0.0.1:" in line
        assert f"1 of jobs 2 by 127.0.0.1:{port} for " in line
        with pytest.raises(ConnectionRefusedError):
            counterd.connect().close()
        with pytest.raises(errors.NotAvailable, match="Draining"):
            client.acquire("more", maximum=9)
        assert client.get("jobs") == 3
        client.release("jobs", 3)
        other.close()
        assert counterd.process.poll() is None
        client.release("mail")
    assert counterd.ended() == 0
    assert counterd.lines("nothing is held any more")
    assert not counterd.lines("WARN|ERROR")


def test_nothing_is_held(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.mode": "wait", "drain.timeout": 60})
    assert counterd.stop() == 0
    assert counterd.lines("nothing is held any more")


def test_the_timeout(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.mode": "wait", "drain.timeout": 1})
    with counterd.client() as client:
        client.acquire("jobs", maximum=3)
        assert counterd.stop() == 0
        assert counterd.lines("WARN.*draining: holdings that have not come back within .* s: 1")
        with pytest.raises(errors.ConnectionLost):
            client.noop()


def test_a_second_signal(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.mode": "wait", "drain.timeout": 60}, status=1)
    with counterd.client() as client:
        client.acquire("jobs", maximum=3)
        counterd.send_signal(signal.SIGTERM)
        counterd.wait_for_log("that are waited for: 1")
        assert counterd.stop() == 1
