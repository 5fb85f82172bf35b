"""The dashboard in a browser, served by the real daemon: what an operator sees and does."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect, sync_playwright

import counterd
from counterd import errors
from counterd.client import throttr
from counterd.protocols.beanstalk import wire
from counterd.protocols.counter import wire as counter
from counterd.protocols.sentinel.wire import Status
from kit import daemon, needs, sentinels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser

    Open = Callable[..., Page]

pytestmark = pytest.mark.needs("chromium")

PAGE = Path(counterd.__file__).parent / "admin" / "dashboard.html"
TOKEN = "open-sesame"
SETTINGS = {"throttr.enable": "true", "throttr.bind": "127.0.0.1", "throttr.port": "0"}
SENTINEL = {**sentinels.SETTINGS, "counter.enable": "true"}
ADMIN = {"admin.enable": "true", "admin.bind": "127.0.0.1:0", "admin.token": TOKEN}
NARROW, WIDE = {"width": 360, "height": 740}, {"width": 1600, "height": 1000}
MS = 1000 * daemon.PATIENCE

# What has to be readable, on what: WCAG 2.1, 1.4.3 for text, and 1.4.11 for what is drawn or framed.
TEXT = [("--ink", "--page"), ("--soft", "--page"), ("--accent", "--page"), ("--page", "--ink")]
TEXT += [(colour, "--card") for colour in ("--ink", "--soft", "--accent", "--bad")] + [("--ink", "--well")]
DRAWN = [(colour, "--card") for colour in ("--edge", "--good", "--warn", "--bad")] + [("--accent", "--well")]

CONTRAST = """([front, back]) => {
    const light = (name) => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = `var(${name})`;
        const parts = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map((one) => one / 255);
        probe.remove();
        const [r, g, b] = parts.map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [low, high] = [light(front), light(back)].sort((one, other) => one - other);
    return (high + 0.05) / (low + 0.05);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for all tests of this file."""
    program = needs.path("chromium")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has to do without
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=options)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[daemon.Daemon]:
    """A daemon with all protocols and the admin endpoint, for all tests of this file."""
    directory = tmp_path_factory.mktemp("dashboard")
    rules = {
        "sentinel.rules": sentinels.write_rules(
            directory, sentinels.document(clientOfflineTime=600_000, resourceTimeout=600_000)
        )
    }
    with daemon.running(directory / "daemon", {**SETTINGS, **SENTINEL, **ADMIN, **rules}) as running:
        yield running


def url(running: daemon.Daemon) -> str:
    (address,) = running.served("admin listens on")
    return f"http://{address.host}:{address.port}/"


@pytest.fixture
def open_page(browser: Browser, served: daemon.Daemon) -> Iterator[Open]:
    """Opens the dashboard in its own window. Whatever the browser complains of fails the test."""
    contexts, complaints = [], []

    def opened(path: str = "", at: str | None = None, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        context.set_default_timeout(MS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((at or url(served)) + path)
        return page

    expect.set_options(timeout=MS)
    opened.complaints = complaints  # type: ignore[attr-defined] - for the tests of what goes wrong
    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def row(page: Page, name: str) -> Any:
    return page.locator("#table tbody tr", has=page.get_by_role("button", name=name, exact=True))


def first(row: Any, count: int) -> Any:
    """The first cells of rows, so that a test does not fail because a table has a new column."""
    return row.locator(f"td:nth-child(-n+{count})")


def test_the_page_is_self_contained() -> None:
    text = PAGE.read_text("utf-8")
    assert len(text.splitlines()) <= 860
    body = text[text.index("</style>") : text.index("<script>")]
    assert not re.search(r"<[^>]*\s(?:on\w+|style|src)=", body)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert text.count("<script") == text.count("<style") == 1


def test_the_script_names_no_protocol() -> None:
    script = PAGE.read_text("utf-8").partition("<script>")[2]
    assert not re.search(r"\b(?:counter|throttr|sentinel|consumption)\b", script)


def test_a_counter_appears_after_its_acquire(open_page: Open, served: daemon.Daemon) -> None:
    page = open_page("#match=db")
    expect(page.locator("#state")).to_have_text("Ready")
    names = page.locator("#table tbody button")
    with served.client() as client:
        assert client.acquire("db pool", 2, maximum=5) == 2
        expect(first(row(page, "db pool"), 5)).to_have_text(["db pool", "", "2", "5", "2"])
        names.first.focus()  # and now nothing moves, whatever changes
        client.acquire("db replica", 6, maximum=6)
        client.acquire("db pool", 1, maximum=5)
        expect(first(row(page, "db replica"), 5)).to_have_text(["db replica", "", "6", "6", "6"])
        expect(row(page, "db replica").locator(".bar")).to_have_class("bar full")
        expect(first(row(page, "db pool"), 5)).to_have_text(["db pool", "", "3", "5", "3"])
        expect(names).to_have_text(["db pool", "db replica"])
        expect(names.first).to_be_focused()
        page.get_by_label("Search by name").focus()
        expect(names).to_have_text(["db replica", "db pool"])


def test_rates_times_and_protocols_are_shown(open_page: Open, served: daemon.Daemon) -> None:
    page = open_page()
    protocols = page.locator("#protocols section")
    expect(protocols.locator("h2")).to_have_text(["counter", "sentinel", "throttr"])
    with served.client() as client:

        def asked() -> bool:
            for _ in range(20):
                with contextlib.suppress(errors.NotAvailable):
                    client.acquire("rated", 1, maximum=1)
            page.wait_for_timeout(100)
            reasons = protocols.first.get_by_text("Refused in the last minute: not available").count()
            return bool(reasons) and tile(page, "Refused") != "0/s"

        daemon.wait_until(asked, "refusals are shown")
    expect(protocols.first.locator("tbody tr", has_text="acquire")).to_be_visible()
    assert tile(page, "Requests") != "0/s"
    assert re.fullmatch(r"[0-9.]+ (?:µs|ms)", tile(page, "Latency, p99"))
    assert re.fullmatch(r"[0-9.,]+(?:0| µs| ms)?", tile(page, "Loop lag"))
    assert re.fullmatch(r"[0-9.]+MiB", tile(page, "Memory"))
    assert page.locator(".tile .line").first.get_attribute("d")


def tile(page: Page, label: str) -> str:
    return page.locator(".tile", has=page.get_by_text(label, exact=True)).locator("p").inner_text()


def test_names_cannot_inject_markup(open_page: Open, served: daemon.Daemon) -> None:
    names = {
        b"<img src=x onerror=alert(1)>": "<img src=x onerror=alert(1)>",
        "Köln".encode(): "Köln",
        b"raw \xff\x00": r"raw \xff\x00",
        "turned\u202eround".encode(): r"turned\u{202e}round",
        b"long " + b"n" * 2000: "long " + "n" * 195 + "…",
    }
    with served.client() as client:
        for name in names:
            client.acquire(name, 1, maximum=2)
        page = open_page()
        for shown in names.values():
            expect(row(page, shown)).to_be_visible()
        assert page.locator("img").count() == 0
        page.get_by_label("Search by name").fill(r"\xff")
        expect(page.locator("#table tbody button")).to_have_text([r"raw \xff\x00"])


def test_search_and_order_are_kept_in_the_link(open_page: Open, served: daemon.Daemon) -> None:
    with served.client() as client:
        for name, amount, maximum in (("sorted a&b=c", 1, 9), ("sorted +%2f", 2, 2), ("other", 1, 1)):
            client.acquire(name, amount, maximum=maximum)
        page = open_page()
        page.get_by_label("Search by name").fill("sorted ")
        names = page.locator("#table tbody button")
        expect(names).to_have_text(["sorted +%2f", "sorted a&b=c"])
        page.get_by_label("Order").select_option("limit")
        expect(names).to_have_text(["sorted a&b=c", "sorted +%2f"])
        expect(page.locator("#table-about")).to_have_text("2 found, by limit")
        page.reload()
        expect(page.get_by_label("Search by name")).to_have_value("sorted ")
        expect(names).to_have_text(["sorted a&b=c", "sorted +%2f"])
        page.get_by_label("Search by name").fill("+%")
        expect(names).to_have_text(["sorted +%2f"])
        page.get_by_label("Search by name").fill("nobody has that")
        expect(page.get_by_text("No name contains this text.")).to_be_visible()
        page.get_by_label("Table").select_option("keys")
        expect(page.locator("#table-title")).to_have_text("Keys")


def test_holders_by_keyboard_alone(open_page: Open, served: daemon.Daemon) -> None:
    with served.client() as client:
        client.acquire("by key", 2, maximum=7)
        page = open_page(f"#match={quote('by key')}")
        expect(row(page, "by key")).to_be_visible()
        page.get_by_label("Rows").focus()
        page.keyboard.press("Tab")  # the list itself, if it scrolls
        if page.evaluate("document.activeElement.tagName") != "BUTTON":
            page.keyboard.press("Tab")
        name = page.get_by_role("button", name="by key", exact=True)
        expect(name).to_be_focused()
        assert name.evaluate("(one) => getComputedStyle(one).outlineStyle") != "none"
        page.keyboard.press("Enter")
        dialog = page.locator("#holders")
        cells = [re.compile(r"127\.0\.0\.1:\d+"), "2", re.compile(r"\d s")]
        expect(first(dialog.locator("tbody"), 3)).to_have_text(cells)
        client.acquire("by key", 1, maximum=7)
        expect(dialog.locator("tbody td").nth(1)).to_have_text("3")
        dialog.locator("tbody button").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#connection")).not_to_be_visible()
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).not_to_be_visible()
        expect(name).to_be_focused()
        page.close()  # it may still ask for what the connection holds


def test_an_open_dialog_shows_the_current_holders(open_page: Open, served: daemon.Daemon) -> None:
    """Also when the name has left the list."""
    with served.client() as client, served.client() as other:
        client.acquire("by now", 2, maximum=3)
        page = open_page(f"#match={quote('by now')}")
        row(page, "by now").get_by_role("button", name="by now", exact=True).click()
        dialog = page.locator("#holders")
        expect(dialog.locator(".facts")).to_contain_text("consumption2")
        expect(dialog.locator("thead th")).not_to_have_count(0)
        page.route("**/counters?*", lambda route: route.fulfill(json={**route.fetch().json(), "rows": [], "total": 0}))
        client.release("by now", 2)
        assert other.get("by now") == 0
        expect(dialog.locator("#holders-about")).to_have_text("Holders: 0")
        expect(dialog.locator(".facts")).not_to_contain_text("consumption2")
        expect(dialog.locator("thead th")).to_have_count(0)


def test_a_connection_is_closed_with_the_token(open_page: Open, served: daemon.Daemon) -> None:
    with served.client() as client:
        client.acquire("ended", 2, maximum=7)
        page = open_page()
        row(page, "ended").get_by_role("button").click()
        page.locator("#holders tbody button").click()
        page.get_by_label("Token").fill("guessed")
        page.get_by_role("button", name="End connection").click()
        expect(page.locator("#refusal")).not_to_be_empty()
        assert client.get("ended") == 2
        assert "401" in open_page.complaints.pop()  # type: ignore[attr-defined]
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="End connection").click()
        expect(page.locator("#said")).to_have_text(re.compile("^Connection counter-.* was ended$"))
        forgive_404(open_page)
    served.wait_for_stats(killed=1, holdings=0)
    stored = "JSON.stringify([{...localStorage}, {...sessionStorage}]) + location + document.cookie"
    assert TOKEN not in page.evaluate(stored)


def test_waiters_and_waits_are_shown(open_page: Open, served: daemon.Daemon) -> None:
    """In the list, beside the holders of a counter, and beside the holdings of a connection."""
    with served.client() as holder, served.connect() as one, served.connect() as other:
        holder.acquire("wanted", 3, maximum=3)
        for at, peer in enumerate((one, one, other)):
            peer.sendall(counter.take(at, [counter.Permit(b"wanted", at + 1, 3)], 600_000, key=b"key %d" % at))
            served.wait_for_stats(waiters=at + 1)
        page = open_page(f"#match={quote('wanted')}")
        row(page, "wanted").get_by_role("button").click()
        dialog = page.locator("#holders")
        expect(dialog.locator(".first tbody tr")).to_have_count(1)
        expect(dialog.locator(".second h3")).to_have_text("Queue: 3")
        expect(dialog.locator(".second tbody td:nth-child(2)")).to_have_text(["1", "2", "3"])
        expect(dialog.locator(".second tbody td:nth-child(7)")).to_have_text(["key 0", "key 1", "key 2"])
        dialog.locator(".second tbody button").first.click()
        expect(page.locator("#connection-about")).to_have_text("Holdings: 0")
        expect(page.locator("#connection .second h3")).to_have_text("Waits: 2")
        expect(page.locator("#connection .second tbody td:first-child")).to_have_text(["wanted", "wanted"])
        one.sendall(counter.cancel(9, 0) + counter.cancel(9, 1))
        expect(page.locator("#connection .second")).to_be_hidden()
        page.keyboard.press("Escape")
        expect(dialog.locator(".second h3")).to_have_text("Queue: 1")
        page.keyboard.press("Escape")
        page.get_by_label("Table").select_option("waiters")
        expect(page.locator("#table tbody tr")).to_have_count(1)
        expect(page.locator("#table tbody td").nth(2)).to_have_text("3")
        page.close()  # it may still ask for what the connection holds
    served.wait_for_stats(waiters=0)


def forgive_404(open_page: Open) -> None:
    """The drawer may have asked for a connection that was gone, and a browser complains of each such answer."""
    complaints = open_page.complaints  # type: ignore[attr-defined]
    complaints[:] = [complaint for complaint in complaints if "404" not in complaint]


def test_the_holdings_of_a_connection_are_shown(open_page: Open, served: daemon.Daemon) -> None:
    """Updated in its drawer: of a holder, and of one in the list of connections."""
    drawer = "#connection"
    with served.client() as client, served.client() as other:
        other.acquire("not its own", 1, maximum=1)
        for number in range(510):
            client.acquire(f"one of many {number}", 1, maximum=1)
        client.acquire("held by it", 2, maximum=7)
        page = open_page(f"#match={quote('held by it')}")
        row(page, "held by it").get_by_role("button").click()
        page.locator("#holders tbody button").click()
        cells = first(page.locator(f"{drawer} tbody tr").first, 3)
        expect(cells).to_have_text(["held by it", "2", re.compile("s$")])
        expect(page.locator("#connection-about")).to_have_text("Holdings: 511")
        expect(page.locator(f"{drawer} tbody tr")).to_have_count(500)
        expect(page.locator(f"{drawer} .first .none")).to_have_text("and 11 more")
        expect(page.locator(f"{drawer} .first tbody")).not_to_contain_text("not its own")
        page.mouse.move(0, 0)  # under it no row moves
        for number in range(510):
            client.release(f"one of many {number}", 1)
        client.acquire("<b>& more", 3, maximum=7)
        expect(page.locator(f"{drawer} tbody td:first-child")).to_have_text(["<b>& more", "held by it"])
        expect(page.locator(f"{drawer} .first .none")).to_be_hidden()
        client.release("held by it", 2)
        client.release("<b>& more", 3)
        expect(page.locator("#connection-about")).to_have_text("Holdings: 0")
        expect(page.locator(f"{drawer} thead th")).to_have_count(0)
    expect(page.locator("#connection-about")).to_have_text("this connection does not exist, or has ended")
    forgive_404(open_page)


def test_holdings_of_connections_of_each_protocol_are_shown(open_page: Open, served: daemon.Daemon) -> None:
    (address,) = served.served("throttr listens on")
    with throttr.Client(*address, timeout=daemon.PATIENCE) as client, sentinels.connected(served) as peer:
        assert client.subscribe("news")
        page = open_page()
        listed = page.locator("#connections")
        seen = client.connection(client.whoami())
        assert seen is not None
        listed.get_by_role("button", name=f"{seen.ip}:{seen.port}").click()
        expect(page.locator("#connection tbody td:first-child")).to_have_text(["news", client.whoami().hex(), "*"])
        expect(page.locator("#connection-about")).to_have_text("Subscriptions: 3")
        page.get_by_role("button", name="Close").click()
        token = peer.acquire(2).token_id
        host, port = peer.connection.getsockname()
        listed.get_by_role("button", name=f"{host}:{port}").click()
        expect(page.locator("#connection tbody td:first-child")).to_have_text([str(token)])
        expect(page.locator("#connection thead").first).to_contain_text("tokenflowcountheldleftkept")
        page.get_by_role("button", name="Close").click()
        assert peer.release(token) == Status.RELEASE_OK
        page.close()  # it may still ask for what the connection holds


def test_connections_are_listed_and_searched(open_page: Open, served: daemon.Daemon) -> None:
    with served.connect() as one, served.connect() as other:
        page = open_page()
        peers = [f"{host}:{port}" for host, port in (one.getsockname(), other.getsockname())]
        for peer in peers:
            expect(page.locator("#connections").get_by_role("button", name=peer)).to_be_visible()
        page.get_by_label("Search connections").fill(peers[1])
        expect(page.locator("#connections tbody button")).to_have_text([peers[1]])
        page.locator("#connections tbody button").click()
        expect(page.locator("#connection .facts")).to_contain_text("requests0")
        page.get_by_role("button", name="Close").click()
        page.get_by_label("Protocol", exact=True).select_option("throttr")
        expect(page.get_by_text("No connection matches this text.")).to_be_visible()
        page.close()  # it may still ask for what the connection holds


def test_a_token_of_an_ended_connection_is_shown(open_page: Open, served: daemon.Daemon) -> None:
    """It has no name to search for, and its id is a number that JavaScript cannot represent."""
    page = open_page("#match=db&table=tokens")
    with sentinels.connected(served) as peer:
        token = str(peer.acquire(2).token_id)
        cells = first(page.locator("#table tbody tr"), 7)
        host, port = peer.connection.getsockname()
        expect(cells).to_have_text(
            [token, str(sentinels.PAY), "2", f"{host}:{port}", re.compile("s$"), re.compile(r"^\d.* s$"), "0"]
        )
        expect(page.get_by_label("Search by name")).to_be_hidden()
        page.get_by_role("button", name=f"{host}:{port}").first.click()
        expect(page.locator("#connection .facts")).to_contain_text("sentinel-")
        page.get_by_role("button", name="Close").click()
    with sentinels.connected(served) as other:
        other.flow()
        page.reload()  # which is sooner than what comes by itself
        expect(cells.nth(3)).to_have_text("gone")
        assert other.release(int(token)) == Status.RELEASE_OK
    page.get_by_label("Table", exact=True).select_option("flows")
    expect(page.locator("#table tbody tr td:first-child")).to_have_text([str(sentinels.PAY), str(sentinels.ASK)])
    forgive_404(open_page)


def test_light_and_dark_mode(open_page: Open) -> None:
    page = open_page(color_scheme="dark", reduced_motion="reduce")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    assert sum(map(int, re.findall(r"\d+", dark))) < 3 * 64
    assert page.evaluate("getComputedStyle(document.querySelector('main')).transitionDuration") == "0s"
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        assert {pair: page.evaluate(CONTRAST, pair) for pair in TEXT if page.evaluate(CONTRAST, pair) < 4.5} == {}
        assert {pair: page.evaluate(CONTRAST, pair) for pair in DRAWN if page.evaluate(CONTRAST, pair) < 3} == {}
    light = page.evaluate(background)
    toggle = page.get_by_role("button", name="Theme: auto")
    toggle.click()  # now the other one, whatever the system has
    assert page.evaluate(background) == dark
    page.reload()
    assert page.evaluate(background) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(background) == light


@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["narrow", "wide"])
def test_the_page_fits_the_window(size: dict[str, int], open_page: Open, served: daemon.Daemon) -> None:
    with served.client() as client:
        client.acquire("fitting " * 20, 1, maximum=7)
        page = open_page(viewport=size)
        shown = row(page, "fitting " * 20).get_by_role("button")
        expect(shown).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        shown.click()
        expect(page.locator("#holders tbody td").first).to_be_visible()
        assert page.evaluate("document.querySelector('#holders').scrollWidth") <= size["width"]


def test_a_queue_with_a_failing_journal(open_page: Open, start: Callable[..., daemon.Daemon], tmp_path: Path) -> None:
    protocol = {"enable": "true", "port": "0", "bind": "127.0.0.1", "journal": tmp_path / "jobs"}
    running = start({**{f"beanstalk.{key}": value for key, value in protocol.items()}, **ADMIN})
    running.addresses = running.served("beanstalk listens on")
    page = open_page("#table=tubes", at=url(running))
    with running.connect() as producer, running.connect() as worker, producer.makefile("rb") as replies:
        producer.sendall(wire.use(b"mail") + wire.put(b"a") + wire.put(b"b") + wire.put(b"c", delay=1000))
        assert [replies.readline().split()[0] for _ in range(4)] == [b"USING", *[b"INSERTED"] * 3]
        worker.sendall(wire.watch(b"mail") + wire.reserve() + wire.bury(1) + wire.reserve())
        gauges = page.get_by_label("beanstalk").locator(".gauges")
        expect(gauges).to_contain_text("ready 0, reserved 1, delayed 1, buried 1")
        cells = first(page.locator("#table tbody tr", has_text="mail"), 8)
        expect(cells).to_have_text(["mail", "0", "1", "1", "1", "0", "0.0 s", re.compile("s$")])
        page.get_by_label("Order").select_option("oldest")
        expect(page.locator("#state")).to_have_text("Ready")
        unlimited = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
        for number in (running.pid, *children(running.pid)):
            resource.prlimit(number, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
        producer.sendall(wire.put(b"x" * 60_000))
        assert replies.readline() == b"INTERNAL_ERROR\r\n"
        expect(page.locator("#state")).to_have_text("Failing")
        expect(page.locator("#notes")).to_contain_text("a journal cannot be written")
        expect(page.locator("#protocols")).to_contain_text("Refused in the last minute: internal error 1")
        resource.prlimit(running.pid, resource.RLIMIT_FSIZE, unlimited)
        expect(page.locator("#state")).to_have_text("Ready")
        expect(page.locator("#notes")).to_be_empty()
        page.close()  # before the daemon ends


def children(pid: int) -> list[int]:
    """The processes of the journal and of the admin endpoint."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_an_unreachable_cluster_is_shown(open_page: Open, start: Callable[..., daemon.Daemon]) -> None:
    page = open_page(at=url(start({**ADMIN, "cluster.url": "redis://127.0.0.1:1", "cluster.unreachable": "share"})))
    text = "counter: 16 partitions have no server that can be reached; cluster.unreachable = share decides"
    expect(page.locator("#notes")).to_have_text(text)
    page.close()  # before the daemon ends


def test_a_drain_and_the_end_of_the_daemon_are_shown(open_page: Open, start: Callable[..., daemon.Daemon]) -> None:
    running = start({**ADMIN, "drain.mode": "wait"})
    page = open_page(at=url(running))
    with running.client() as client:
        client.acquire("held", 1, maximum=1)
        expect(page.locator("#state")).to_have_text("Ready")
        running.send_signal(signal.SIGTERM)
        expect(page.locator("#state")).to_have_text("Draining")
        expect(page.locator("#notes")).to_contain_text("grants nothing new")
    assert running.ended() == 0
    expect(page.locator("#state")).to_have_text("Connection lost")
    expect(page.locator("#notes")).to_have_text(re.compile("^The daemon does not answer"))
    expect(page).to_have_title(re.compile("^Connection lost"))
    open_page.complaints.clear()  # type: ignore[attr-defined] - that nobody answered


def test_the_kept_history_is_bounded(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#state")).to_have_text("Ready")
    days = """(seconds) => {
        const now = kept.at(-1);
        const step = (at) => onStats({ ...now.stats, uptime_seconds: now.at + at, pid: 1 });
        for (let at = 1; at <= seconds; at++) step(at);
        return [kept.length, document.querySelectorAll("#tiles *, #protocols *").length,
            [...tiles.values()].map((one) => one.trend.points.length)];
    }"""
    (_, elements, _), (seconds, later, points) = page.evaluate(days, 190), page.evaluate(days, 200)
    assert (later, seconds <= 100, max(points) <= 200) == (elements, True, True)
