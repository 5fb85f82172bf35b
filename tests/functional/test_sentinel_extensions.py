"""Extensions in a process: loaded and called; and one that blocks, uses CPU, raises or answers wrongly harms only
its own clients."""

from __future__ import annotations

import json
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.wire import Status
from kit import daemon
from kit.sentinels import SETTINGS, Peer, connected, document, write_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.daemon import Daemon

# What a request is for, by its count: see MODULE.
DEFAULT, BLOCK, RAISE, LIE, BURN, LEAVE, WAIT = range(1, 8)

HURRIED = pytest.mark.parametrize("peer", [300], indirect=True)

MODULE = """
import json
import os
import pathlib
import sys
import threading
import time

from counterd.protocols.sentinel.extensions import Status, TokenResult

HERE = pathlib.Path(__file__).parent

class Tokens:
    def __init__(self, context):
        self.default = context.default

    def request_token(self, flow_id, count, prioritized, client):
        if count == 1:
            return self.default.request_token(flow_id, count, prioritized, client)
        if count == 2:
            threading.Event().wait()
        if count == 3:
            raise ConnectionError("the store of tokens is gone")
        if count == 4:
            return client
        while count == 5:
            if (HERE / "enough").exists():
                break
        if count == 6:
            sys.exit(client)
        if count == 7:
            time.sleep(0.2)
        return TokenResult(Status.BLOCKED)

    def release_token(self, token_id):
        return self.default.release_token(token_id)

    def keep_token(self, token_id):
        return self.default.keep_token(token_id)

class Patient:
    def __init__(self, context):
        pass

    def expired(self, tokens):
        return [] if (HERE / "patient").exists() else [token.token_id for token in tokens]

class Rules:
    def __init__(self, context):
        pass

    def load(self):
        return json.loads((HERE / "source.json").read_text())

def lingering(context):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return Tokens(context)

class Nothing:
    def __init__(self, context):
        pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop_tokens.py").write_text(MODULE)
    (tmp_path / "source.json").write_text(json.dumps(document()))
    return tmp_path


@pytest.fixture
def serve(start: Callable[..., Daemon], folder: Path) -> Callable[..., Daemon]:
    """Starts a counterd with rules and extensions of the folder, and counters beside them."""

    def serve(**settings: object) -> Daemon:
        keys = settings if "rules" in settings else {"rules": write_rules(folder), **settings}
        named = {f"sentinel.{name}": value for name, value in keys.items()}
        return start({**SETTINGS, "counter.enable": "true", **named}, env={"PYTHONPATH": str(folder)})

    return serve


@pytest.fixture(params=[60_000])
def peer(request: pytest.FixtureRequest, serve: Callable[..., Daemon]) -> Iterator[tuple[Daemon, Peer]]:
    """A connection to a daemon whose service has that many milliseconds for each call."""
    counterd = serve(token_service="shop_tokens:Tokens", extension_timeout=request.param)
    with connected(counterd) as peer:
        yield counterd, peer


def test_a_service_delegates_to_the_engine(peer: tuple[Daemon, Peer]) -> None:
    counterd, asks = peer
    tokens = [asks.acquire(DEFAULT) for _ in range(3)]
    assert {token.status for token in tokens} == {Status.OK}
    assert asks.acquire(DEFAULT).status == Status.BLOCKED
    kept = asks.keep(tokens[0].token_id)
    assert (kept.status, 0 < kept.left_ms <= 4000) == (Status.OK, True)
    assert [asks.release(tokens[0].token_id) for _ in range(2)] == [Status.RELEASE_OK, Status.ALREADY_RELEASED]
    assert asks.acquire(DEFAULT).status == Status.OK
    assert not counterd.lines("WARN|ERROR")


def test_each_of_many_requests_gets_its_own_answer(peer: tuple[Daemon, Peer]) -> None:
    _, asks = peer
    asks.send(b"".join(wire.acquire(xid, 7 + xid % 2, DEFAULT) for xid in range(400)))
    statuses = [asks.response(xid).status for xid in range(400)]
    assert statuses[1::2] == [Status.NO_RULE] * 200
    assert statuses[::2] == [Status.OK] * 3 + [Status.BLOCKED] * 197


def test_a_failed_call_is_logged_with_its_name(peer: tuple[Daemon, Peer]) -> None:
    counterd, asks = peer
    said = {
        RAISE: "request_token failed: ConnectionError: the store of tokens is gone",
        LIE: "request_token failed: TypeError: expected a TokenResult, not str",
        LEAVE: "request_token failed: SystemExit: 127.0.0.1:",
    }
    for count, text in said.items():
        assert asks.acquire(count).status == Status.FAIL
        line = counterd.wait_for_log(f"ERROR sentinel: token_service shop_tokens:Tokens: {text}")
        assert "protocol=sentinel" in line
    assert "shop_tokens.py" in counterd.lines("ConnectionError")[0], "with its traceback"
    assert asks.acquire(DEFAULT).status == Status.OK


@HURRIED
def test_a_blocking_extension_harms_only_its_own_clients(peer: tuple[Daemon, Peer]) -> None:
    """It cannot keep the process from ending either, which the fixture checks."""
    counterd, asks = peer
    with counterd.client() as counters:
        for number in range(4):
            asks.send(wire.acquire(10 + number, 7, BLOCK))
            assert asks.flow() == Status.OK
            counters.acquire("jobs", maximum=9)
            assert asks.response(10 + number).status == Status.NOT_AVAILABLE
            counterd.wait_for_log("Tokens: request_token takes longer than 300 ms; stuck threads: ", number + 1)
            if number == 0:
                daemon.wait_until(lambda: asks.acquire(DEFAULT).status == Status.OK, "it has a successor")
        counterd.wait_for_log("stuck threads: 4; the extension gets no further calls until one returns")
        assert asks.acquire(DEFAULT).status == Status.NOT_AVAILABLE
        counterd.wait_for_log("request_token was refused: all threads of the extension are stuck in request_token")
        assert len(counterd.lines("takes longer than 300 ms")) == 4, "at once, not when its time is over"
        assert asks.flow() == Status.OK
        assert counters.get("jobs") == 4


def test_an_extension_that_uses_much_cpu_is_named(serve: Callable[..., Daemon], folder: Path) -> None:
    """The limit of half a core is a hundredth here, which a busy machine can provide."""
    (folder / "sitecustomize.py").write_text("from counterd.extensions import worker\nworker.BURNING = 0.01\n")
    counterd = serve(token_service="shop_tokens:Tokens", extension_timeout=300)
    with connected(counterd) as asks:
        burn(counterd, asks, folder)


def burn(counterd: Daemon, asks: Peer, folder: Path) -> None:
    asks.send(wire.acquire(10, 7, BURN))
    with counterd.client() as counters:
        figures = r"\d+\.\d\d s in the last \d+\.\d s"
        counterd.wait_for_log(f"WARN.* sentinel: token_service shop_tokens:Tokens uses much CPU in .*: {figures}")
        counters.acquire("jobs", maximum=9)
        assert asks.flow() == Status.OK
    assert asks.response(10).status == Status.NOT_AVAILABLE
    assert asks.acquire(DEFAULT).status == Status.NOT_AVAILABLE, "a second one would burn as well"
    (folder / "enough").touch()
    daemon.wait_until(lambda: asks.acquire(DEFAULT).status == Status.OK, "it is asked again")


@pytest.mark.parametrize("end", ["stop", "eof"])
def test_pending_calls_are_answered_at_a_stop_or_half_close(peer: tuple[Daemon, Peer], end: str) -> None:
    """The extension answers after the daemon was told to stop, or the client has half-closed."""
    counterd, asks = peer
    asks.send(wire.acquire(1, 7, WAIT) + wire.flow(2, 101, 1))
    assert asks.response(2).status == Status.OK
    if end == "stop":
        counterd.send_signal(signal.SIGTERM)
        counterd.wait_for_log("stopping")
    else:
        asks.connection.shutdown(socket.SHUT_WR)
    assert asks.response(1).status == Status.BLOCKED
    assert asks.connection.recv(1) == b""
    if end == "stop":
        asks.connection.close()
        assert counterd.ended() == 0


def test_an_extension_with_a_running_thread_cannot_keep_the_process(serve: Callable[..., Daemon]) -> None:
    counterd = serve(token_service="shop_tokens:lingering")
    assert counterd.stop() == 0


def test_an_expire_strategy_decides_which_tokens_end(serve: Callable[..., Daemon], folder: Path) -> None:
    (folder / "patient").touch()
    rules = write_rules(folder, document(resourceTimeout=100))
    counterd = serve(expire_strategy="shop_tokens:Patient", rules=rules)
    with connected(counterd) as asks:
        token = asks.acquire(3)
        time.sleep(0.3)
        assert asks.acquire().status == Status.BLOCKED
        (folder / "patient").unlink()
        daemon.wait_until(lambda: asks.acquire(3).status == Status.OK, "its lease is over")
        assert asks.release(token.token_id) == Status.ALREADY_RELEASED


def test_rules_come_from_a_rule_source(serve: Callable[..., Daemon], folder: Path) -> None:
    counterd = serve(rule_source="shop_tokens:Rules", rules="", rules_interval=1)
    with connected(counterd) as asks:
        assert asks.acquire(3).status == Status.OK
        (folder / "source.json").write_text(json.dumps(document(concurrent=4)))
        daemon.wait_until(lambda: asks.acquire().status == Status.OK, "they were fetched again")
        wrong = document()
        wrong["shop"]["flowRules"][0]["count"] = "many"
        (folder / "source.json").write_text(json.dumps(wrong))
        count = len(counterd.lines("ERROR"))
        counterd.send_signal(signal.SIGHUP)
        line = counterd.wait_for_log(
            "ERROR sentinel: rule_source shop_tokens:Rules: nothing changed: load: ", count + 1
        )
        assert 'namespace "shop": flowRules[0] (resource "r7"): count: ' in line
        assert asks.acquire().status == Status.BLOCKED
        assert asks.flow() == Status.OK


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("token_service", "nowhere:Tokens", "no module nowhere"),
        ("token_service", "shop_tokens:Token", "the module shop_tokens has no Token"),
        ("expire_strategy", "shop", "the group counterd.sentinel has no entry point with this name; it has "),
        ("expire_strategy", "shop_tokens:Nothing", "the returned object (Nothing) has no expired"),
        ("rule_source", "shop_tokens:Rules", "load: FileNotFoundError: "),
    ],
)
def test_an_extension_that_fails_ends_the_start(folder: Path, name: str, value: str, why: str) -> None:
    (folder / "source.json").unlink()
    config = folder / "F"
    config.write_text(daemon.config_text({**SETTINGS, f"sentinel.{name}": value}))
    program = ("env", f"PYTHONPATH={folder}", *daemon.MODULE)
    ended = daemon.run("-c", config, program=program)
    told = [
        line for line in ended.stderr.splitlines() if line.startswith(f"{config}:7: sentinel.{name}: {value}: {why}")
    ]
    assert (ended.returncode, len(told)) == (2, 1), ended.stderr
    checked = daemon.run("-c", config, "--check", program=program)
    imported = value in ("shop_tokens:Nothing", "shop_tokens:Rules")
    assert checked.returncode == (0 if imported else 2), "nothing is made only to look at the configuration"
