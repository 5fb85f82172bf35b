"""What is served at which path, and to which clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from importlib import resources

import pytest

from counterd.admin import events, metrics, site
from counterd.admin.site import page_policy, parameters_of
from counterd.ipc import Refused
from unit.admin.serving import BUSY, PROTOCOL, STATS, World, serve, until

# ---- paths ----------------------------------------------------------------------------------------------------------


def test_answers_of_the_daemon_are_served_as_json() -> None:
    async def scene(world: World) -> None:
        async with world.client() as client:  # one connection for all
            assert (await client.request("/stats")).json == STATS
            assert (await client.request("/config")).json == {"path": "/c", "values": []}
            answer = await client.request("/connections?limit=5&after=fake-1-2&protocol=fake")
            assert answer.json == {"rows": [], "next": None}
            assert answer.headers["content-type"] == "application/json"
            assert world.link.asked[-1] == (
                "connections",
                {"parameters": {"limit": "5", "after": "fake-1-2", "protocol": "fake"}},
            )
            assert (await client.request("/stats", "HEAD")).status == 200

    serve(scene)


def test_liveness_and_readiness() -> None:
    async def scene(world: World) -> None:
        assert (await world.get("/livez")).body == b"ok\n"
        assert (await world.get("/readyz")).status == 200
        world.link.answers["ping"] = {"state": "draining"}
        assert (await world.get("/livez")).status == 200
        answer = await world.get("/readyz")
        assert (answer.status, answer.body) == (503, b"draining\n")
        world.link.answers["ping"] = Refused(503, "the daemon has not answered within 1 s")
        assert (await world.get("/livez")).status == 503
        assert (await world.get("/readyz")).status == 503

    serve(scene)


def test_metrics_in_two_formats() -> None:
    async def scene(world: World) -> None:
        answer = await world.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b"\ncounterd_ready 1.0\n" in answer.body
        answer = await world.get("/metrics", Accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
        assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert answer.body.endswith(b"# EOF\n")
        world.link.answers["figures"] = BUSY
        assert (await world.get("/metrics")).status == 503

    serve(scene)


def test_metrics_of_rows_only_where_there_are_tables() -> None:
    async def scene(world: World) -> None:
        figures = {figure.key: 0 for figure in (*metrics.LISTENER_FIGURES, *PROTOCOL.figures)}
        protocol = {"figures": figures, "outcomes": [], "histograms": {}}
        world.link.answers["figures"] = {**STATS, "protocols": {"fake": protocol}}
        assert b'\ncounterd_thing_size{name="a b\\\\xff",protocol="fake"} 1.0\n' in (await world.get("/metrics")).body
        assert ("table", {"table": "things", "parameters": {"limit": "1000"}}) in world.link.asked
        world.link.answers["table"] = BUSY
        answer = await world.get("/metrics")
        assert (answer.status, b"counterd_thing_size{" in answer.body) == (200, False)

    serve(scene)


def test_concurrent_requests_share_the_figures_and_their_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        go, ask, encode = asyncio.Event(), world.link.ask, site.metrics.encode
        rendered = []

        async def slow(*arguments: object, **named: object) -> object:
            await go.wait()
            return await ask(*arguments, **named)

        def counted(*arguments: object) -> bytes:
            rendered.append(arguments)
            return encode(*arguments)

        monkeypatch.setattr(site.metrics, "encode", counted)
        world.link.ask = slow
        paths = ["/metrics"] * 10 + ["/stats"] * 5 + ["/config"] * 5 + ["/things"] * 5 + ["/connections"] * 5
        asked = [asyncio.create_task(world.get(path)) for path in paths]
        await until(lambda: len(world.site.peers.busy) == len(paths))
        go.set()
        answers = [await task for task in asked]
        assert {answer.status for answer in answers} == {200}
        asked_for = sorted(what for what, _ in world.link.asked)
        assert asked_for == ["config", "connections", "figures", "table", "table"]  # one for the metrics
        assert len(rendered) == 1
        assert {answer.body for answer in answers[20:25]} == {
            b'{"rows": [{"name": "a%20b%FF", "size": 1}], "total": 1}'
        }
        openmetrics = "application/openmetrics-text;version=1.0.0"
        assert (await world.get("/metrics", Accept=openmetrics)).body.endswith(b"# EOF\n")
        assert (len(world.link.asked), len(rendered)) == (7, 2)

    serve(scene)


def test_a_client_that_disconnects_does_not_cancel_the_shared_question() -> None:
    async def scene(world: World) -> None:
        go, ask = asyncio.Event(), world.link.ask

        async def slow(*arguments: object, **named: object) -> object:
            await go.wait()
            return await ask(*arguments, **named)

        world.link.ask = slow
        async with world.client() as client:
            client.writer.write(b"GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: world.site.peers.busy)
            other = asyncio.create_task(world.get("/stats"))
            await until(lambda: len(world.site.peers.busy) == 2)
            client.writer.transport.abort()
            await until(lambda: len(world.site.peers.busy) == 1)
        go.set()
        assert (await other).json == STATS
        assert len(world.link.asked) == 1

    serve(scene)


def test_names_are_bytes_on_the_way_in_and_out() -> None:
    async def scene(world: World) -> None:
        every = "".join(f"%{byte:02x}" for byte in range(256))
        answer = await world.get(f"/things?match={every}&sort=size")
        what, asked = world.link.asked[0]
        assert (what, asked["table"], asked["parameters"]["sort"]) == ("table", "things", "size")
        assert asked["parameters"]["match"].encode("latin-1") == bytes(range(256))
        assert answer.json == {"rows": [{"name": "a%20b%FF", "size": 1}], "total": 1}
        await world.get("/things?match=a+b%2B")
        assert world.link.asked[1][1]["parameters"] == {"match": "a b+"}

    serve(scene)


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/things/", "//stats", "/stats/", "/Stats",
     "/dashboard.html", "http://localhost/stats", "*", "/things%00", "/%73tats", "/static/../stats"],
)  # fmt: skip
def test_other_paths_are_not_found(path: str) -> None:
    async def scene(world: World) -> None:
        assert (await world.get(path)).status in (400, 404)
        assert world.link.asked == []

    serve(scene)


def test_other_methods_are_refused() -> None:
    async def scene(world: World) -> None:
        for method in ("POST", "PUT", "OPTIONS", "PATCH", "TRACE", "DELETE"):
            answer = await world.get("/stats", method, Authorization="Bearer t")
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
        answer = await world.get("/connections/fake-1-2")
        assert (answer.status, answer.headers["allow"]) == (405, "DELETE")
        answer = await world.get("/drain/fake")
        assert (answer.status, answer.headers["allow"]) == (405, "DELETE, PUT")
        assert (await world.get("/events", "HEAD")).status == 405
        assert world.link.asked == []

    serve(scene, token="t")


def test_bodies_are_refused_unread() -> None:
    async def scene(world: World) -> None:
        for headers in ({"Content-Length": "1000000000"}, {"Transfer-Encoding": "chunked"}):
            async with world.client() as client:
                client.writer.write(
                    b"GET /stats HTTP/1.1\r\nHost: localhost\r\n"
                    + b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
                    + b"\r\n5\r\nxxxxx"
                )
                assert (await client.answer()).status == 413
                assert await client.ends() == b""
        assert world.link.asked == []

    serve(scene)


def test_request_smuggling_is_impossible() -> None:
    """A Content-Length and chunks at once: what a proxy takes for a body must not be taken for a request here."""

    async def scene(world: World) -> None:
        async with world.client() as client:
            client.writer.write(
                b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"0\r\n\r\nGET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            assert (await client.answer()).status in (400, 413)
            assert await client.ends() == b""
        assert world.link.asked == []

    serve(scene)


def test_refusals_of_the_daemon_are_passed_on() -> None:
    async def scene(world: World) -> None:
        world.link.answers["table"] = Refused(400, "sort: expected one of size, not 'x'")
        answer = await world.get("/things?sort=x")
        assert (answer.status, answer.json) == (400, {"error": "sort: expected one of size, not 'x'"})
        world.link.answers["table"] = BUSY
        answer = await world.get("/things")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")

    serve(scene)


def test_an_exception_is_reported_to_the_daemon_and_not_to_the_client() -> None:
    async def scene(world: World) -> None:
        world.link.answers["figures"] = ZeroDivisionError("secret")
        answer = await world.get("/stats")
        assert (answer.status, answer.json) == (500, {"error": "internal error"})
        assert world.link.notes == ["GET /stats: ZeroDivisionError: secret"]

    serve(scene)


# ---- security -------------------------------------------------------------------------------------------------------


def test_every_answer_has_the_security_headers() -> None:
    async def scene(world: World) -> None:
        for path in ("/stats", "/", "/nothing", "/metrics", "/stats?"):
            headers = (await world.get(path, "POST" if path == "/stats?" else "GET")).headers
            assert "default-src 'none'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
            assert headers["server"] == "counterd"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert not [name for name in headers if name.startswith("access-control-")]

    serve(scene)


def test_host_and_origin_are_checked_first() -> None:
    async def scene(world: World) -> None:
        assert (await world.get("/stats", host="evil.example")).status == 403
        assert (await world.get("/stats", Origin="http://evil.example")).status == 403
        assert (await world.get("/nothing", host="evil.example")).status == 403
        assert world.link.asked == []

    serve(scene)


def test_closing_needs_the_token() -> None:
    async def scene(world: World) -> None:
        answer = await world.get("/connections/fake-1-2", "DELETE")
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert (await world.get("/connections/fake-1-2", "DELETE", Authorization="Bearer x")).status == 401
        assert world.link.asked == []
        answer = await world.get("/connections/fake-1-%32", "DELETE", Authorization="Bearer t")
        assert (answer.status, answer.json) == (200, {"closed": "x"})
        assert world.link.asked == [("close", {"connection": "fake-1-2"})]

    serve(scene, token="t")


def test_drain_mode_needs_the_token() -> None:
    async def scene(world: World) -> None:
        world.link.answers["drain"] = {"protocol": "fake", "drain_mode": True}
        for method, on in (("PUT", True), ("DELETE", False)):
            world.link.asked.clear()
            assert (await world.get("/drain/fake", method)).status == 401
            assert (await world.get("/drain/fake", method, Authorization="Bearer x")).status == 401
            assert world.link.asked == []
            answer = await world.get("/drain/f%61ke", method, Authorization="Bearer t")
            assert (answer.status, answer.json) == (200, {"protocol": "fake", "drain_mode": True})
            assert world.link.asked == [("drain", {"protocol": "fake", "on": on})]

    serve(scene, token="t")


def test_without_a_token_nothing_can_be_changed() -> None:
    async def scene(world: World) -> None:
        for path, method in (("/connections/fake-1-2", "DELETE"), ("/drain/fake", "PUT"), ("/drain/fake", "DELETE")):
            answer = await world.get(path, method, Authorization="Bearer ")
            assert (answer.status, answer.json["error"].split(":")[0]) == (403, "read-only")
        assert world.link.asked == []

    serve(scene)


def test_settings_can_change_while_serving() -> None:
    async def scene(world: World) -> None:
        assert (await world.get("/livez", host="a.example")).status == 403
        world.site.configure({"token": "", "allow": [], "hosts": ["a.example"]})
        assert (await world.get("/livez", host="a.example")).status == 200

    serve(scene)


# ---- the dashboard --------------------------------------------------------------------------------------------------


def test_the_dashboards_policy_allows_only_its_own_script() -> None:
    page = resources.files("counterd.admin").joinpath("dashboard.html").read_bytes()

    async def scene(world: World) -> None:
        answer = await world.get("/")
        assert answer.body == page
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        for tag in ("script", "style"):
            (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.decode(), re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
        assert "unsafe" not in policy

    serve(scene)


def test_the_policy_of_a_page_without_scripts_allows_none() -> None:
    assert "script-src 'none'; style-src 'none'" in page_policy("<p>script</p>")


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "STATS_PERIOD_S", 0.01)

    async def scene(world: World) -> None:
        async with world.client() as client:
            client.writer.write(b"GET /events?table=things&match=%ff HTTP/1.1\r\nHost: localhost\r\n\r\n")
            status, headers = await client.head()
            assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            assert "default-src 'none'" in headers["content-security-policy"]
            text = b""
            while text.count(b"event: stats") < 3 or b"event: table" not in text:
                text += await asyncio.wait_for(client.reader.read(65_536), 10)
            assert b"retry: 2000\n\n" in text
            (table,) = set(re.findall(rb"event: table\ndata: (.*)\n", text))
            assert json.loads(table) == {"rows": [{"name": "a%20b%FF", "size": 1}], "total": 1}
            assert ("table", {"table": "things", "parameters": {"match": "\xff"}}) in world.link.asked

    serve(scene)


def test_a_stream_ends_with_its_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "STATS_PERIOD_S", 0.01)

    async def scene(world: World) -> None:
        async with world.client() as client:
            client.writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await client.head()
            assert len(world.site._hub.listeners) == 1
        await until(lambda: not world.site._hub.listeners)

    serve(scene)


def test_invalid_streams_are_refused() -> None:
    async def scene(world: World) -> None:
        world.link.answers["table"] = Refused(404, "no table")
        assert (await world.get("/events?table=nothing")).status == 404
        assert (await world.get("/events?match=x")).status == 400
        world.link.answers["table"] = Refused(400, "sort: bad")
        assert (await world.get("/events?table=things&sort=x")).status == 400

    serve(scene)


def test_a_client_with_many_streams_keeps_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it reads none of them. Its own oldest streams end."""
    monkeypatch.setattr(events, "LISTENERS_MAX", 4)
    monkeypatch.setattr(events, "STATS_PERIOD_S", 0.001)
    asked = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def scene(world: World) -> None:
        async with contextlib.AsyncExitStack() as stack:
            greedy = []
            for _ in range(4):
                greedy.append(await stack.enter_async_context(world.client()))
                greedy[-1].writer.write(asked)
                await greedy[-1].head()
            one = await stack.enter_async_context(world.client(("127.0.0.2", 0)))
            one.writer.write(asked)
            assert (await one.head())[0] == 200
            assert b"event: stats" in await greedy[0].ends()
            for _ in range(8):
                greedy.append(await stack.enter_async_context(world.client()))
                greedy[-1].writer.write(asked)
                assert (await greedy[-1].head())[0] == 200
            for client in greedy[:-3]:
                await client.ends()
            for client in (one, *greedy[-3:]):
                await asyncio.wait_for(client.reader.readuntil(b"event: stats"), 10)
            await until(lambda: len(world.site._hub.listeners) == 4)
            assert not world.link.notes

    serve(scene)


def test_a_stream_is_not_refused_because_the_daemon_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """When many pages are opened at once, with a table each, the daemon answers some of them later."""
    monkeypatch.setattr(events, "TABLE_PERIOD_S", 0.001)

    async def scene(world: World) -> None:
        world.link.answers["table"] = BUSY
        async with world.client() as client:
            client.writer.write(b"GET /events?table=things HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await client.head())[0] == 200
            world.link.answers["table"] = lambda: {"rows": [], "total": 7}
            await asyncio.wait_for(client.reader.readuntil(b'"total": 7'), 10)

    serve(scene)


# ---- queries --------------------------------------------------------------------------------------------------------


def test_query_parameters_are_decoded() -> None:
    assert parameters_of("") == {}
    assert parameters_of("a=&b=%00%e4%C3%A4") == {"a": "", "b": "\0\xe4\xc3\xa4"}
    assert parameters_of("a=%zz") == {"a": "%zz"}
    assert parameters_of("a=\udcff") == {"a": "\xff"}


@pytest.mark.parametrize("query", ["a", "a=1&a=2", "&", "a=1&&b=2", "&".join(f"k{n}=1" for n in range(17))])
def test_invalid_queries_are_refused(query: str) -> None:
    with pytest.raises(Refused) as info:
        parameters_of(query)
    assert info.value.status == 400
