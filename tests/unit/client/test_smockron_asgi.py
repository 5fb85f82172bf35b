"""The middlewares for ASGI and WSGI, called directly: with a gatekeeper whose decisions the test sets, and with a
real one."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import threading
import wsgiref.simple_server
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import smockron_asgi, smockron_wsgi
from counterd.client.smockron import AsyncGatekeeper, Decision, Gatekeeper, Verdict
from kit import loops
from kit.daemon import wait_until
from kit.machine import LONG_S, PATIENCE
from kit.scripted.smockron import Master, unix_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

pytestmark = pytest.mark.usefixtures("unhurried")
PASS = Decision(Verdict.PASS)
LONG = Decision(Verdict.DELAY, LONG_S, 1, number=1)
SHORT = Decision(Verdict.DELAY, 0.001, 1, number=1)
REJECT = Decision(Verdict.REJECT, 6.001, 1)
LOOPS = pytest.mark.parametrize("loop_name", loops.NEW_LOOP)
DISCONNECT = {"type": "http.disconnect"}


class Decider:
    """Stands for a gatekeeper. asked: identifiers and domains. logged: requests for the log of a master. gone: the
    decisions whose requests do not wait any more.
    """

    def __init__(self, decision: Decision = PASS) -> None:
        self.decision = decision
        self.asked: list[tuple[bytes, Any]] = []
        self.logged: list[Any] = []
        self.gone: list[Decision] = []

    def decide(self, identifier: bytes, domain: Any, log_info: Any) -> Decision:
        self.asked.append((identifier, domain))
        self.logged.append(log_info)
        return self.decision

    def gave_up(self, decision: Decision) -> None:
        self.gone.append(decision)


# ---- ASGI ------------------------------------------------------------------------------------------------------------


class Request:
    """An ASGI request that a test drives. coming: the server's messages; after them it waits. sent: the application's
    messages.
    """

    def __init__(self, *coming: dict[str, Any], **scope: Any) -> None:
        self.scope: dict[str, Any] = {
            "type": "http", "path": "/é", "client": ("10.0.0.1", 5), "headers": [(b"x-key", b"k"), (b"X-Key", b"l")],
        } | scope  # fmt: skip
        self.coming = list(coming)
        self.sent: list[Any] = []
        self.reached: list[Any] = []  # what the application has received

    async def receive(self) -> Any:
        if self.coming:
            return self.coming.pop(0)
        return await asyncio.get_running_loop().create_future()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Reads the body, if there is one, and then, if possible, whether the client has disconnected."""
        assert scope is self.scope
        self.reached.append("called")
        for _ in range(scope.get("reads", 0)):
            self.reached.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def serve(self, gatekeeper: Any, **options: Any) -> None:
        await smockron_asgi.Middleware(self.app, gatekeeper, **options)(self.scope, self.receive, self.send)


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def identifier_of(identifier: Any, **scope: Any) -> Any:
    """The identifier with which the middleware asks; None if it does not ask."""
    decider, request = Decider(), Request(**scope)
    loops.run(request.serve(decider, identifier=identifier))
    assert request.reached == ["called"]
    return decider.asked[0][0] if decider.asked else None


@pytest.mark.parametrize(
    ("identifier", "found"),
    [
        ("client", b"10.0.0.1"),
        ("path", "/é".encode()),
        ("header:X-KEY", b"k, l"),
        ("header:other", None),
        (["client", "header:x-key"], b"10.0.0.1 k,%20l"),
        (["header:other", "path"], None),
        (["header:other", "client", "path"], b" 10.0.0.1 /\xc3\xa9"),
        (lambda scope: scope["path"], "/é".encode()),
        (lambda scope: b"\xff", b"\xff"),
        (lambda scope: "\udcff", b"\xff"),
        (lambda scope: None, None),
        (lambda scope: "x" * 4096, b"x" * 4096),
        (lambda scope: "x" * 4097, hashlib.sha256(b"x" * 4097).hexdigest().encode()),
    ],
)
def test_the_identifier_of_an_asgi_request(identifier: Any, found: bytes | None) -> None:
    assert identifier_of(identifier) == found


@pytest.mark.parametrize(
    ("identifier", "missing"),
    [("client", "a client address"), (["client", "header:Other", "path"], "a client address or Other")],
)
def test_requests_without_an_identifier_pass_and_the_first_is_logged(
    identifier: Any, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as those that come through a Unix socket."""
    decider, request = Decider(REJECT), Request(client=None)
    guarded = smockron_asgi.Middleware(request.app, decider, identifier)  # type: ignore[arg-type]

    async def main() -> None:
        for _ in range(2):
            await guarded(request.scope, request.receive, request.send)

    loops.run(main())
    assert (request.reached, decider.asked) == (["called", "called"], [])
    assert [record.getMessage() for record in caplog.records] == [
        f"requests without {missing} pass without a limit (logged once)"
    ]


def test_requests_without_an_identifier_pass_and_the_first_is_logged_wsgi(caplog: pytest.LogCaptureFixture) -> None:
    decider = Decider(REJECT)
    for environ in ({}, {"REMOTE_ADDR": ""}):
        guarded = smockron_wsgi.Middleware(lambda *_: [b"served"], decider)  # type: ignore[arg-type]
        assert [guarded(environ, print) for _ in range(2)] == [[b"served"]] * 2
    assert decider.asked == []
    assert len(caplog.records) == 2  # one of each middleware


@pytest.mark.parametrize("identifier", ["cookie", "header:", "header:X Y", "header:X:", [], ["client", "ip"]])
def test_invalid_kinds_of_identifiers_are_refused(identifier: Any) -> None:
    for module in (smockron_asgi, smockron_wsgi):
        with pytest.raises(ValueError, match=r"^identifier: "):
            module.Middleware(lambda *_: None, Decider(), identifier)  # type: ignore[arg-type,attr-defined]


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_asgi_scopes_than_http_pass(kind: str) -> None:
    decider, request = Decider(REJECT), Request(type=kind)
    loops.run(request.serve(decider))
    assert (request.reached, decider.asked) == (["called"], [])


def test_a_request_that_passes_is_unchanged() -> None:
    decider, request = Decider(), Request(body(b"data"), reads=1)
    loops.run(request.serve(decider, domain="d"))
    assert request.reached == ["called", body(b"data")]
    assert decider.asked == [(b"10.0.0.1", "d")]
    assert decider.gone == []


def test_log_info_of_the_application_reaches_the_gatekeeper() -> None:
    decider, request = Decider(), Request()
    loops.run(request.serve(decider))
    loops.run(request.serve(decider, log_info=lambda scope: scope["path"]))
    serve_wsgi(decider)
    serve_wsgi(decider, log_info=lambda environ: environ["SCRIPT_NAME"])
    assert decider.logged == [b"", "/é", b"", "/a"]


def test_a_rejected_request_gets_503_with_retry_after() -> None:
    request = Request()
    loops.run(request.serve(Decider(REJECT)))
    start, end = request.sent
    assert (start["type"], start["status"], request.reached) == ("http.response.start", 503, [])
    assert dict(start["headers"])[b"retry-after"] == b"7"
    assert dict(start["headers"])[b"content-length"] == b"9"
    assert end == {"type": "http.response.body", "body": b"Rejected\n"}


@LOOPS
@pytest.mark.parametrize("reads", [0, 1, 3])
def test_a_delayed_request_keeps_its_body(loop_name: str, reads: int) -> None:
    decider, request = Decider(SHORT), Request(body(b"a", more=True), body(b"b", more=True), body(b"c"), reads=reads)
    loops.run(request.serve(decider), loop_name)
    assert request.reached == ["called", body(b"a", more=True), body(b"b", more=True), body(b"c")][: reads + 1]
    assert decider.gone == [SHORT]


@LOOPS
def test_messages_after_a_delay_reach_the_application(loop_name: str) -> None:
    """Also if the middleware had already begun to receive one, and the application cancels its first receive()."""
    decider, request = Decider(SHORT), Request(body(b""))
    arrived: asyncio.Future[Any]

    async def receive() -> Any:
        return request.coming.pop(0) if request.coming else await asyncio.shield(arrived)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request.reached.append(await receive())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(receive(), 0.001)
        arrived.set_result(DISCONNECT)
        request.reached.append(await receive())
        request.coming.append({"type": "next"})
        request.reached.append(await receive())

    async def main() -> None:
        nonlocal arrived
        arrived = asyncio.get_running_loop().create_future()
        await smockron_asgi.Middleware(app, decider)(request.scope, receive, request.send)  # type: ignore[arg-type]

    loops.run(main(), loop_name)
    assert request.reached == [body(b""), DISCONNECT, {"type": "next"}]


@LOOPS
def test_a_disconnect_ends_the_delay(loop_name: str) -> None:
    decider, request = Decider(LONG), Request(body(b"a"), DISCONNECT)
    loops.run(request.serve(decider), loop_name)
    assert (request.reached, request.sent, decider.gone) == ([], [], [LONG])


@LOOPS
def test_a_cancelled_request_ends_its_delay(loop_name: str) -> None:
    decider, request = Decider(LONG), Request()

    async def main() -> None:
        serving = asyncio.ensure_future(request.serve(decider))
        await loops.until(lambda: decider.asked, "it was asked")
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()

    loops.run(main(), loop_name)
    assert (request.reached, decider.gone) == ([], [LONG])


def test_a_large_body_is_not_read_ahead_completely() -> None:
    large = [body(bytes(smockron_asgi.READ_AHEAD // 2 + 1), more=True) for _ in range(4)]
    decider, request = Decider(SHORT), Request(*large, DISCONNECT, reads=5)
    loops.run(request.serve(decider))
    assert request.reached == ["called", *large, DISCONNECT]


def test_an_exception_of_the_server_during_a_delay_is_raised() -> None:
    decider, request = Decider(LONG), Request()

    async def main() -> None:
        async def receive() -> Any:
            raise OSError("broken")

        with pytest.raises(OSError, match="broken"):
            await smockron_asgi.Middleware(request.app, decider)(  # type: ignore[arg-type]
                request.scope, receive, request.send
            )

    loops.run(main())
    assert decider.gone == [LONG]


def test_asgi_with_a_gatekeeper() -> None:
    """A client that disconnects is not counted any more, so another one may be delayed in its place."""

    async def main() -> None:
        gone = asyncio.get_running_loop().create_future()
        waiting, rejected = Request(), Request()
        waiting.receive = lambda: asyncio.shield(gone)  # type: ignore[assignment,method-assign]
        options: Any = {"timeout": PATIENCE, "max_delay_s": LONG_S, "max_delayed": 1}
        with Master() as master:
            async with AsyncGatekeeper(master.where, **options) as made:
                assert await made.connect(PATIENCE)
                master.tell("DELAY_UNTIL", b"10.0.0.1", unix_ms() + int(LONG_S * 900))
                await loops.until(lambda: made.stats().told, "it was told")
                serving = asyncio.ensure_future(waiting.serve(made))
                await loops.until(lambda: made.stats().delaying, "it waits")
                await rejected.serve(made)
                assert rejected.sent[0]["status"] == 503
                gone.set_result(DISCONNECT)
                await serving
                assert waiting.reached == []
                assert made.stats().delaying == 0

    loops.run(main())


# ---- WSGI ------------------------------------------------------------------------------------------------------------

ENVIRON = {"REMOTE_ADDR": "10.0.0.1", "SCRIPT_NAME": "/a", "PATH_INFO": "/\xc3\xa9", "HTTP_X_KEY": "\xff"}


def serve_wsgi(decider: Any, **options: Any) -> tuple[list[Any], Iterable[bytes]]:
    """Serves a request; returns the arguments of start_response, and the body."""
    told: list[Any] = []

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        assert environ is ENVIRON
        start_response("200 OK", [])
        return [b"served"]

    middleware = smockron_wsgi.Middleware(app, decider, **options)
    return told, middleware(ENVIRON, lambda status, headers: told.append((status, dict(headers))))


@pytest.mark.parametrize(
    ("identifier", "found"),
    [
        ("client", b"10.0.0.1"),
        ("path", b"/a/\xc3\xa9"),
        ("header:X-Key", b"\xff"),
        ("header:content-type", None),
        (["client", "path"], b"10.0.0.1 /a/\xc3\xa9"),
        (lambda environ: environ["REMOTE_ADDR"], b"10.0.0.1"),
        (lambda environ: None, None),
    ],
)
def test_the_identifier_of_a_wsgi_request(identifier: Any, found: bytes | None) -> None:
    decider = Decider()
    assert serve_wsgi(decider, identifier=identifier, domain="d") == ([("200 OK", {})], [b"served"])
    assert decider.asked == ([] if found is None else [(found, "d")])


def test_a_rejected_request_gets_503_with_retry_after_wsgi() -> None:
    told, found = serve_wsgi(Decider(REJECT))
    assert found == [b"Rejected\n"]
    assert told[0][0] == "503 Service Unavailable"
    assert told[0][1] == {"Content-Type": "text/plain; charset=utf-8", "Content-Length": "9", "Retry-After": "7"}


def test_a_delayed_request_waits_wsgi(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    decider = Decider(LONG)
    assert serve_wsgi(decider, sleep=waits.append)[1] == [b"served"]
    monkeypatch.setattr("time.sleep", waits.append)  # as gevent does
    assert serve_wsgi(decider)[1] == [b"served"]
    assert (waits, decider.gone) == ([LONG_S, LONG_S], [LONG, LONG])


@pytest.fixture
def wsgi_server() -> Iterator[Any]:
    """Starts a real server with an application, and returns its port."""
    servers = []

    class Quiet(wsgiref.simple_server.WSGIRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    def start(app: Any) -> int:
        server = wsgiref.simple_server.make_server("127.0.0.1", 0, app, handler_class=Quiet)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        return server.server_port

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_wsgi_with_a_gatekeeper_and_a_server(wsgi_server: Any) -> None:
    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"served"]

    def get(port: int) -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            connection.request("GET", "/")
            response = connection.getresponse()
            return response.status, response.headers["Retry-After"], response.read()
        finally:
            connection.close()

    with Master() as master, Gatekeeper(master.where, timeout=PATIENCE) as made:
        port = wsgi_server(smockron_wsgi.Middleware(app, made))
        assert get(port) == (200, None, b"served")
        assert made.connect(PATIENCE)
        master.tell("DELAY_UNTIL", b"127.0.0.1", unix_ms() + 100_000)
        wait_until(lambda: made.stats().told, "it was told")
        status, retry_after, text = get(port)
        assert (status, text) == (503, b"Rejected\n")
        assert 0 < int(str(retry_after)) <= 100
        master.tell("FORGET", b"127.0.0.1", 0)
        wait_until(lambda: made.stats().told == 2, "it was told")
        assert get(port)[0] == 200
