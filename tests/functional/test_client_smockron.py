"""The gatekeepers against a real counterd: limits, several masters and gatekeepers, and a killed master."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import threading
import wsgiref.simple_server
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import smockron_asgi, smockron_wsgi
from counterd.client.smockron import AsyncGatekeeper, Gatekeeper, Rejected, Verdict
from kit import loops
from kit.daemon import Daemon, wait_until
from kit.machine import PATIENCE, own_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kit.certificates import Files

pytestmark = pytest.mark.usefixtures("unhurried")
# So slow that no test takes long enough to be let through once more. The burst and one more pass: 11.
RULES = {
    "d": {"rate": "1/hour", "burst": 10},
    "e": {"interval": "1 hour", "burst": 0},
    "fast": {"rate": "1000/sec", "burst": 1},
}
PASSING = 11
FAR_S = 1e6  # seconds
LOOPS = pytest.mark.parametrize("loop_name", loops.NEW_LOOP)


@pytest.fixture
def serve(start: Callable[..., Daemon], tmp_path: Path) -> Callable[..., Daemon]:
    """Starts a master with RULES, or others."""

    def served(rules: Any = None, *, status: int = 0, **settings: Any) -> Daemon:
        path = tmp_path / "rules.json"
        path.write_text(json.dumps(RULES if rules is None else rules))
        keys = {"enable": "true", "bind": "127.0.0.1", "port": 0, "control_port": 0, "rules": path} | settings
        return start(
            {"counter.enable": "false"} | {f"smockron.{key}": value for key, value in keys.items()}, status=status
        )

    return served


def where(daemon: Daemon) -> tuple[str, str]:
    """Both addresses."""
    accounting = daemon.address_of("smockron")
    control = daemon.address_of("smockron-control")
    return f"{accounting.host}:{accounting.port}", f"{control.host}:{control.port}"


def gatekeeper(masters: Any, domain: str = "d", **options: Any) -> Gatekeeper:
    made = Gatekeeper(masters, domain, **{"timeout": PATIENCE, **options})
    assert made.connect(PATIENCE)
    return made


def told(made: Any, count: int) -> None:
    wait_until(lambda: made.stats().told >= count, f"{count} control messages")


def use_up(made: Gatekeeper, identifier: str = "a", domain: str | None = None) -> None:
    """Requests until nothing more passes, and waits for the master's messages."""
    before = made.stats().told
    for _ in range(PASSING):
        assert made.decide(identifier, domain).verdict is Verdict.PASS
    told(made, before + 1)


def test_the_request_after_the_burst_waits(serve: Callable[..., Daemon]) -> None:
    with gatekeeper(where(serve()), max_delay_s=7200) as made:
        use_up(made)
        first = made.decide("a")
        assert first.verdict is Verdict.DELAY
        assert 0 < first.delay_s <= 3600
        told(made, 2)
        second = made.decide("a")
        assert (second.verdict, second.until_ms - first.until_ms) == (Verdict.DELAY, 3_600_000)
        told(made, 3)
        assert made.decide("a").verdict is Verdict.REJECT
        assert made.decide("b").verdict is Verdict.PASS
        assert made.stats()[:4] == (PASSING + 1, 2, 1, 2)


def test_all_gatekeepers_delay_after_a_control_message(serve: Callable[..., Daemon]) -> None:
    master = where(serve())
    with gatekeeper(master) as one, gatekeeper(master) as other:
        use_up(one)
        told(other, 1)
        with pytest.raises(Rejected, match=r"^a was rejected in d: retry in 3[0-9]+ s$"):
            other.admit("a").__enter__()


@LOOPS
def test_all_gatekeepers_delay_after_a_control_message_asyncio(serve: Callable[..., Daemon], loop_name: str) -> None:
    master = where(serve())

    async def main() -> None:
        async with AsyncGatekeeper(master, "d", timeout=PATIENCE) as made:
            assert await made.connect(PATIENCE)
            for _ in range(PASSING):
                async with made.admit("a"):
                    pass
            await loops.until(lambda: made.stats().told, "a control message")
            with pytest.raises(Rejected):
                async with made.admit("a"):
                    raise AssertionError
            for _ in range(50):  # waits are milliseconds, of which some are over when it is decided
                async with made.admit("a", "fast"):
                    pass
            assert made.stats().delaying == 0

    loops.run(main(), loop_name)


def test_decisions_before_the_connection_are_accounted(serve: Callable[..., Daemon]) -> None:
    master = where(serve())
    with gatekeeper(master) as other, Gatekeeper(master, "d", timeout=PATIENCE) as made:
        for _ in range(PASSING):
            made.decide("a")
        told(other, 1)
        told(made, 1)
        assert made.decide("a").verdict is Verdict.REJECT


def test_each_domain_has_its_master(serve: Callable[..., Daemon]) -> None:
    masters = {"d": where(serve({"d": RULES["d"]})), "e": where(serve({"e": RULES["e"]}))}
    with gatekeeper(masters) as made:
        use_up(made)
        assert made.decide("a", "e").verdict is Verdict.PASS
        told(made, 2)
        assert made.decide("a", "e").verdict is Verdict.REJECT
        assert made.decide("b", "e").verdict is Verdict.PASS


def test_a_killed_master_is_reconnected_to(serve: Callable[..., Daemon], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "counterd.client.smockron")
    host = own_address()
    first = serve(bind=host, status=-9)
    accounting, control = (address.rsplit(":", 1)[1] for address in where(first))
    with gatekeeper(where(first), max_delay_s=FAR_S) as made:
        use_up(made)
        first.kill()
        wait_until(lambda: made.stats().away, "it saw that")
        assert made.decide("a").verdict is Verdict.DELAY, "what it was told counts"
        assert made.decide("b").verdict is Verdict.PASS
        serve(bind=host, port=accounting, control_port=control)
        assert made.connect(PATIENCE)
        use_up(made, "c")
        assert made.decide("c").verdict is Verdict.DELAY
        assert made.stats().away == {}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith(f"cannot reach the master at {host}:{accounting}; requests pass: {host}:")
    assert said[1].startswith(f"the master at {host}:{accounting} is back after ")


def test_gatekeepers_over_tls(serve: Callable[..., Daemon], pem: Files) -> None:
    plain = where(serve(**{"tls.cert": pem.server}))
    master = tuple(f"smockrons://{address}?cacert={pem.cacert}" for address in plain)
    with gatekeeper(master) as made:
        use_up(made)

    async def main() -> None:
        async with AsyncGatekeeper(master, "d", timeout=PATIENCE) as made:  # type: ignore[arg-type]
            assert await made.connect(PATIENCE)

    loops.run(main())


def test_gatekeepers_over_unix_sockets(serve: Callable[..., Daemon], short_path: Path) -> None:
    serve(socket=short_path / "a", control_socket=short_path / "c")
    with gatekeeper((f"smockron+unix://{short_path}/a", f"smockron+unix://{short_path}/c")) as made:
        use_up(made)


def test_two_web_applications_share_a_limit(serve: Callable[..., Daemon]) -> None:
    """One for WSGI, with a server, and one for ASGI, called directly: requests admitted by one count for the other."""
    master = where(serve())

    def wsgi(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"served"]

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    async def status_of_asgi(gate: AsyncGatekeeper) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/", "headers": [], "client": ("127.0.0.1", 1)}
        await smockron_asgi.Middleware(asgi, gate)(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        return int(sent[0]["status"])

    with gatekeeper(master) as made:
        server = wsgiref.simple_server.make_server("127.0.0.1", 0, smockron_wsgi.Middleware(wsgi, made))
        server.RequestHandlerClass = type("Quiet", (server.RequestHandlerClass,), {"log_message": lambda *_: None})
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def get() -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)
            connection.request("GET", "/")
            response = connection.getresponse()
            response.read()
            connection.close()
            return response

        async def main() -> None:
            async with AsyncGatekeeper(master, "d", timeout=PATIENCE) as gate:
                assert await gate.connect(PATIENCE)
                for _ in range(PASSING):
                    assert (await asyncio.to_thread(get)).status == 200
                await loops.until(lambda: gate.stats().told, "a control message")
                assert await status_of_asgi(gate) == 503

        try:
            loops.run(main())
            told(made, 1)
            response = get()
            assert response.status == 503
            assert 0 < int(response.headers["Retry-After"]) <= 3600
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
