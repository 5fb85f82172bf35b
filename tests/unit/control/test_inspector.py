"""The answers to the admin process. The services are stand-ins; tests/functional/test_admin.py has real ones."""

from __future__ import annotations

import json
import resource
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import pytest
import structlog

from counterd.control import connections
from counterd.control import inspector as module
from counterd.control.daemon_status import DaemonStatus
from counterd.control.inspector import Inspector
from counterd.ipc import Refused
from counterd.net.server import Histogram
from counterd.settings import Setting, boolean, integer, octal_mode
from counterd.tables import CONNECTION, Column, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class Connection:
    """A connection from an address, or from a process on this machine."""

    def __init__(self, number: int, serial: int, since_ns: int = 0, tls: tuple[str, str, str] | None = None) -> None:
        self.number = number
        self.id = f"{number}-{serial}"
        self.since_ns = self.entered_ns = since_ns
        self.active_ns = time.monotonic_ns()
        self.requests = 10 * number
        self._tls = tls

    def origin(self) -> str:
        return f"127.0.0.1:{5000 + self.number}"

    def tls(self) -> tuple[str, str, str] | None:
        return self._tls


class Server:
    def __init__(self, connections: Iterable[Connection]) -> None:
        self.connections = {connection.number: connection for connection in connections}
        self.arriving: set[Connection] = set()
        self.killed: list[str] = []

    def figures(self) -> dict[str, int]:
        return {"killed": len(self.killed)}

    def histograms(self) -> dict[str, Histogram]:
        return {"batch_seconds": Histogram((0.5, 1.0), (3, 2, 1), 4.5)}

    def find(self, own: str) -> Connection | None:
        return next((connection for connection in self.connections.values() if connection.id == own), None)

    def evict(self, number: int) -> None:
        self.killed.append(f"{number}-0")

    def kill(self, connection: Connection) -> None:
        self.killed.append(connection.id)
        del self.connections[connection.number]


class Walk:
    """A walk that takes some steps, and then returns these rows."""

    def __init__(self, rows: list[tuple[Any, ...]], steps: int = 1) -> None:
        self._rows = rows
        self._steps = steps
        self.total = len(rows) + 7

    def step(self) -> bool:
        self._steps -= 1
        return self._steps <= 0

    def rows(self) -> list[tuple[Any, ...]]:
        return self._rows


COLUMNS = (
    Column("name", "name", "of it"),
    Column("holder", "connection", "who has it"),
    Column("since", "since", "when it came"),
    Column("amount", "integer", "how much"),
)
SETTINGS = {
    setting.key: setting
    for setting in (
        Setting("a.number", integer(0, 9), 1, "things", reload=True),
        Setting("a.switch", boolean, False),
        Setting("a.mode", octal_mode, 0o660, "octal permissions"),
        Setting("a.list", str, ()),
        Setting("a.token", str, "", secret=True),
    )
}


def service(
    name: str,
    connections: Iterable[Connection] = (),
    opened: Callable[..., Any] | None = None,
    drain_mode: Callable[[bool], None] | None = None,
    columns: tuple[Column, ...] = COLUMNS,
) -> Any:
    """opened: begins a walk, given the store and the parameters as they were read."""
    tables = (
        ()
        if opened is None
        else (
            Table(
                f"things_{name}",
                "Things.",
                columns,
                ("amount",),
                lambda store, **values: opened(store, values),
                {"connection": CONNECTION},
            ),
        )
    )
    store = SimpleNamespace(
        snapshot=lambda: {"things": 5},
        outcomes=lambda: [("take", "ok", 3)],
        holdings_of=lambda number: number + 1,
        about=lambda number: ("ends" * (number == 5), 1 << 60 if number == 5 else None),
        evict=lambda number, now_ns: number == 5,
    )
    return SimpleNamespace(
        spec=SimpleNamespace(name=name, tables=lambda: tables, drain_mode=drain_mode),
        server=Server(connections),
        store=store,
        set_drain_mode=drain_mode,
        snapshot=store.snapshot,
        failing=False,
        borrowers={},
        addresses=lambda: {"one": ["127.0.0.1:1", "unix:/s"], "one-more": ["127.0.0.1:2"]},
    )


def inspector(*services: Any) -> Inspector:
    values = {"a.number": 2, "a.switch": True, "a.mode": 0o644, "a.list": ("x", "y"), "a.token": "s3cret"}
    origins = dict.fromkeys(values, "default") | {"a.number": "f:1"}
    config: Any = SimpleNamespace(path="/c", values=values, origins=origins)
    status = DaemonStatus(config, SETTINGS, lambda: 3, time.monotonic_ns() - 5_000_000_000, "ready", 4, 5)
    lag: Any = SimpleNamespace(last=0.001, max=0.5, histogram=lambda: Histogram((1.0,), (1, 0), 0.1))
    status.loop_lag = lag
    return Inspector(status, services)


def ask(asked: Inspector, what: str, **arguments: Any) -> Any:
    """Returns the answer, whether it comes at once or in steps."""
    return finish(asked.answer({"ask": what, **arguments}))[0]


def finish(answer: Any) -> tuple[Any, int]:
    """Returns the answer, and the number of pauses before it."""
    pauses = 0
    while not isinstance(answer, bytes):
        try:
            next(answer)
            pauses += 1
        except StopIteration as done:
            answer = done.value
    return json.loads(answer), pauses


def refused(asked: Inspector, what: str, **arguments: Any) -> tuple[int, str]:
    with pytest.raises(Refused) as info:
        ask(asked, what, **arguments)
    return info.value.status, str(info.value)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_figures_of_the_daemon_and_of_each_protocol() -> None:
    asked = inspector(service("one"), service("two"))
    asked.restarts = 2
    figures = ask(asked, "figures")
    assert figures["state"] == "ready"
    assert 5 <= figures["uptime_seconds"] < 60
    assert figures["loop"] == {"lag_seconds": 0.001, "lag_max_seconds": 0.5}
    assert figures["log"] == {"lines_lost": 3}
    assert (figures["internal_errors"], figures["memory_errors"]) == (4, 5)
    assert figures["admin"] == {"restarts": 2}
    assert figures["histograms"] == {"loop_lag_seconds": {"bounds": [1.0], "counts": [1, 0], "sum": 0.1}}
    assert list(figures["protocols"]) == ["one", "two"]
    assert figures["protocols"]["one"] == {
        "addresses": ["127.0.0.1:1", "unix:/s", "one-more 127.0.0.1:2"],
        "figures": {"killed": 0, "things": 5},
        "outcomes": [["take", "ok", 3]],
        "histograms": {"batch_seconds": {"bounds": [0.5, 1.0], "counts": [3, 2, 1], "sum": 4.5}},
    }


def test_figures_of_the_process() -> None:
    begun = time.time()
    process = ask(inspector(), "figures")["process"]
    assert process["cpu_seconds"] > 0
    assert process["resident_bytes"] > 1 << 20
    assert 3 < process["open_fds"] < process["max_fds"]
    assert begun - 6 < process["start_time_seconds"] < time.time() - 4


def test_figures_when_no_descriptor_is_left() -> None:
    asked = inspector()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        process = ask(asked, "figures")["process"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert process["resident_bytes"] > 1 << 20
    assert process["open_fds"] > process["max_fds"] == 3


def test_descriptors_are_counted_if_the_kernel_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = service("one", [Connection(1, 1)])
    asked = inspector(counted)
    before = ask(asked, "figures")["process"]["open_fds"]
    monkeypatch.setattr(module, "DESCRIPTORS", SimpleNamespace(stat=lambda: SimpleNamespace(st_size=0)))
    monkeypatch.setattr(module, "FIGURES_PERIOD_NS", 0)
    counted.server.connections[2] = Connection(2, 2)
    assert abs(ask(asked, "figures")["process"]["open_fds"] - (before + 1)) <= 1


@pytest.mark.parametrize(("failing", "state"), [(False, "ready"), (True, "failing")])
def test_the_state_reports_a_failing_journal(failing: bool, state: str) -> None:
    one = service("one")
    one.failing = failing
    asked = inspector(one, service("two"))
    assert ask(asked, "ping") == {"state": state}
    assert ask(asked, "figures")["state"] == state


def test_figures_are_reused_within_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = inspector(service("one"))
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: 10**15)
    assert asked.figures() is asked.figures()
    before = asked.figures()
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: 10**15 + module.FIGURES_PERIOD_NS)
    assert asked.figures() is not before


def test_figures_describe_the_tables() -> None:
    (table,) = ask(inspector(service("one", opened=lambda *_: None), service("two")), "figures")["tables"]
    assert (table["name"], table["protocol"], table["sorts"]) == ("things_one", "one", ["amount"])
    assert [(column["name"], column["kind"]) for column in table["columns"]] == [
        ("name", "name"), ("holder", "connection"), ("peer", "text"), ("age_seconds", "seconds"), ("amount", "integer")
    ]  # fmt: skip


def test_ping_reports_the_state() -> None:
    assert ask(inspector(), "ping") == {"state": "ready"}


def test_an_unknown_question_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown question 'more'"):
        ask(inspector(), "more")


@pytest.mark.parametrize(
    "arguments",
    [
        {"connection": 5},
        {"protocol": 5},
        {"table": ["x"]},
        {"parameters": {"limit": 5}},
        {"parameters": ["x"]},
        {"parameters": None},
    ],
)
def test_questions_are_made_of_text(arguments: dict[str, Any]) -> None:
    question = {"connection": "x", "table": "things_one", "parameters": {}, **arguments}
    for what in ("close", "table", "connections"):
        with pytest.raises((TypeError, AttributeError)):
            inspector(service("one", opened=lambda *_: Walk([]))).answer({"ask": what, **question})


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_rows_of_a_table() -> None:
    tenths = time.monotonic_ns() // 100_000_000
    rows = [(bytes(range(256)), 1, tenths - 25, 3), (b"", 2, tenths + 1, 4)]
    given: list[tuple[Any, Mapping[str, Any]]] = []

    def opened(store: Any, parameters: Mapping[str, Any]) -> Walk:
        given.append((store, parameters))
        return Walk(rows)

    one = service("one", [Connection(1, 77)], opened)
    answer = ask(inspector(one), "table", table="things_one", parameters={"limit": "5"})
    assert given == [(one.store, {"limit": 5})]
    assert (answer["table"], answer["protocol"], answer["total"]) == ("things_one", "one", 9)
    assert answer["columns"] == ["name", "holder", "peer", "age_seconds", "amount"]
    first, second = answer["rows"]
    assert unquote_to_bytes(first["name"]) == bytes(range(256))
    assert (first["holder"], first["peer"], first["amount"]) == ("one-1-77", "127.0.0.1:5001", 3)
    assert 2.5 <= first["age_seconds"] < 30
    assert second == {"name": "", "holder": "", "peer": "", "age_seconds": 0.0, "amount": 4}
    assert "truncated" not in answer


def test_a_connection_newer_than_the_walk_is_not_shown_as_a_holder() -> None:
    """The number of a connection that has ended is given to another."""
    later = Connection(1, 78, since_ns=time.monotonic_ns() + 60_000_000_000)
    asked = inspector(service("one", [later], lambda *_: Walk([(b"x", 1, 0, 1)])))
    (row,) = ask(asked, "table", table="things_one", parameters={})["rows"]
    assert (row["holder"], row["peer"]) == ("", "")


def test_a_protocol_that_holds_permits_is_shown_by_its_name() -> None:
    asked = inspector(lender := service("one", opened=lambda *_: Walk([(b"x", 1, 0, 1)])))
    lender.borrowers[1] = "two"
    (row,) = ask(asked, "table", table="things_one", parameters={})["rows"]
    assert (row["holder"], row["peer"]) == ("", "two")


def test_a_connection_in_its_grace_time() -> None:
    """It has the serial number 0, under which it is ended, or asked what it holds."""
    until = time.monotonic_ns() // 100_000_000 + 600
    columns = (Column("holder", "connection", "who has it"), Column("grace", "until", "for how long"))
    one = service("one", [], lambda *_: Walk([(5, until), (6, None)]), columns=columns)
    asked = inspector(one)
    answer = ask(asked, "table", table="things_one", parameters={})
    assert answer["columns"] == ["holder", "peer", "grace_seconds"]
    assert 30 < answer["rows"][0].pop("grace_seconds") <= 60
    assert answer["rows"] == [{"holder": "one-5-0", "peer": ""}, {"holder": "", "peer": "", "grace_seconds": None}]
    assert len(ask(asked, "table", table="things_one", parameters={"connection": "one-5-0"})["rows"]) == 2
    assert ask(asked, "close", connection="one-5-0") == {"closed": "one-5-0"}
    assert one.server.killed == ["5-0"]
    for wrong in ("one-6-0", "one-05-0", "one-5-1", "two-5-0", "one-x-0", "one-9999999999-0"):
        assert refused(asked, "close", connection=wrong)[0] == 404


def test_a_walk_pauses_after_each_step() -> None:
    asked = inspector(service("one", opened=lambda *_: Walk([], steps=10)))
    _, pauses = finish(asked.answer({"ask": "table", "table": "things_one", "parameters": {}}))
    assert pauses == 10


def test_rows_are_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_NS", 0)
    asked = inspector(service("one", opened=lambda *_: Walk([(b"x", 0, 0, 1)] * 50)))
    answer, pauses = finish(asked.answer({"ask": "table", "table": "things_one", "parameters": {}}))
    assert len(answer["rows"]) == 50
    assert pauses >= 50


def test_an_answer_is_bounded() -> None:
    """A thousand names of 64 KiB are more than a frame holds."""
    name = bytes([0xFF]) * 65_535
    asked = inspector(service("one", opened=lambda *_: Walk([(name, 0, 0, 1)] * 1000)))
    answer = ask(asked, "table", table="things_one", parameters={})
    assert answer["truncated"] is True
    assert 10 < len(answer["rows"]) < module.ROWS_BYTES_MAX / len(name)
    assert answer["total"] == 1007


def test_unknown_tables_and_invalid_parameters_are_refused() -> None:
    asked = inspector(service("one", opened=lambda *_: Walk([])))
    assert refused(asked, "table", table="nothing", parameters={})[0] == 404
    why = "sort: expected one of amount, not 'size'"
    assert refused(asked, "table", table="things_one", parameters={"sort": "size"}) == (400, why)


def test_a_table_of_one_connection_is_selected_by_its_id() -> None:
    """The store is asked by number: of the connection of that id, and of no other."""
    given: list[Mapping[str, Any]] = []

    def opened(store: Any, parameters: Mapping[str, Any]) -> Walk:
        given.append(parameters)
        return Walk([(b"x", 0, 0, 1)])

    asked = inspector(service("one", [Connection(7, 3)], opened), service("two", [Connection(7, 4)]))
    answer = ask(asked, "table", table="things_one", parameters={"connection": "one-7-3", "limit": "1"})
    assert given == [{"connection": 7, "limit": 1}]
    assert len(answer["rows"]) == 1
    for gone in ("one-7-4", "one-8-3", "three-7-3", "7", ""):
        status, why = refused(asked, "table", table="things_one", parameters={"connection": gone})
        assert (status, why) == (404, "this connection does not exist, or has ended")
    status, why = refused(asked, "table", table="things_one", parameters={"connection": "two-7-4"})
    assert (status, why) == (400, "connection: two-7-4 belongs to two, the table to one")
    assert len(given) == 1


def test_a_walk_fails_if_its_connection_was_replaced() -> None:
    one = service("one", [Connection(7, 3)], lambda *_: Walk([(b"of the next", 0, 0, 1)], steps=2))
    steps = inspector(one).answer({"ask": "table", "table": "things_one", "parameters": {"connection": "one-7-3"}})
    next(steps)
    one.server.connections[7] = Connection(7, 4)
    with pytest.raises(Refused, match="this connection does not exist"):
        finish(steps)


# ---- connections ----------------------------------------------------------------------------------------------------


def test_a_connection_and_its_columns() -> None:
    sealed = Connection(7, 3, time.monotonic_ns() - 2_000_000_000, ("TLSv1.3", "AES", "CN=x"))
    answer = ask(inspector(service("one", [sealed])), "connections", parameters={})
    assert answer["columns"] == connections.COLUMNS
    (row,) = answer["rows"]
    assert 2 <= row["age_seconds"] < 30
    assert 0 <= row["idle_seconds"] < 30
    assert (row["id"], row["peer"], row["tls_subject"]) == ("one-7-3", "127.0.0.1:5007", "CN=x")


@pytest.fixture
def crowded() -> Inspector:
    """Two protocols: connections 0, 3, ... 27 in one; 5, 2000 and one without a number any more in the other."""
    two = service("two", [Connection(2000, 1), Connection(5, 2)])
    one = service("one", [*(Connection(number, 9) for number in range(27, -1, -3)), Connection(-4, 4)])
    return inspector(two, one)


ALL = [*(f"one-{number}-9" for number in range(0, 30, 3)), "two-5-2", "two-2000-1"]


@pytest.mark.parametrize("limit", [1, 2, 3, 10, 11, 12, 13, 1000])
def test_pages_have_every_connection_once(crowded: Inspector, limit: int) -> None:
    seen: list[str] = []
    parameters = {"limit": str(limit)}
    while True:
        page = ask(crowded, "connections", parameters=parameters)
        seen += [row["id"] for row in page["rows"]]
        assert len(page["rows"]) == limit or page["next"] is None
        if page["next"] is None:
            break
        assert page["next"] == seen[-1]
        parameters["after"] = page["next"]
    assert seen == ALL


def test_connections_of_one_protocol(crowded: Inspector) -> None:
    page = ask(crowded, "connections", parameters={"protocol": "two", "limit": "1"})
    assert [row["id"] for row in page["rows"]] == ["two-5-2"]
    page = ask(crowded, "connections", parameters={"protocol": "two", "after": page["next"]})
    assert [row["id"] for row in page["rows"]] == ["two-2000-1"]


def test_a_page_may_begin_after_a_connection_that_has_ended(crowded: Inspector) -> None:
    page = ask(crowded, "connections", parameters={"after": "one-7-1", "limit": "1"})
    assert [row["id"] for row in page["rows"]] == ["one-9-9"]


def test_listing_connections_pauses(crowded: Inspector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_NS", 0)
    _, pauses = finish(crowded.answer({"ask": "connections", "parameters": {}}))
    assert pauses > len(ALL)


@pytest.mark.parametrize(
    "parameters",
    [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"protocol": "three"}, {"after": "one"}, {"after": "one-x-1"},
     {"after": "one-99999999999-1"}, {"after": "one--1"}, {"more": "1"}],
)  # fmt: skip
def test_invalid_parameters_are_refused(crowded: Inspector, parameters: dict[str, str]) -> None:
    assert refused(crowded, "connections", parameters=parameters)[0] == 400


def test_closing_a_connection() -> None:
    one = service("one", [Connection(7, 3)])
    asked = inspector(one)
    with structlog.testing.capture_logs() as logged:
        assert ask(asked, "close", connection="one-7-3") == {"closed": "one-7-3"}
    assert [(line["id"], line["peer"]) for line in logged] == [("one-7-3", "127.0.0.1:5007")]
    assert one.server.killed == ["7-3"]
    assert refused(asked, "close", connection="one-7-3")[0] == 404


def test_drain_mode_is_switched() -> None:
    switched: list[bool] = []
    asked = inspector(service("one", drain_mode=switched.append), service("two"))
    assert ask(asked, "drain", protocol="one", on=True) == {"protocol": "one", "drain_mode": True}
    assert ask(asked, "drain", protocol="one", on=False) == {"protocol": "one", "drain_mode": False}
    assert switched == [True, False]
    for protocol in ("two", "three", ""):
        text = f"no protocol {protocol!r} with a drain mode is enabled"
        assert refused(asked, "drain", protocol=protocol, on=True) == (404, text)
    assert len(switched) == 2


@pytest.mark.parametrize(
    "given", ["one-7-4", "two-7-3", "7-3", "", "one", "one-", "-7-3", "one-7-3 ", "one-7-3-1", "\0"]
)
def test_closing_needs_the_exact_id(given: str) -> None:
    one = service("one", [Connection(7, 3)])
    assert refused(inspector(one), "close", connection=given)[0] == 404
    assert one.server.killed == []


# ---- configuration --------------------------------------------------------------------------------------------------


def test_config_shows_the_values_with_their_origins() -> None:
    config = ask(inspector(), "config")
    assert config["path"] == "/c"
    number, switch, mode, listed, token = config["values"]
    assert number == {
        "key": "a.number", "value": 2, "origin": "f:1", "default": 1, "unit": "things", "reload": True
    }  # fmt: skip
    assert (switch["value"], switch["default"]) == (True, False)
    assert (mode["value"], mode["default"]) == ("0644", "0660")
    assert (listed["value"], listed["default"]) == ("x y", "")
    assert (token["value"], token["default"]) == ("***", "")
    assert "s3cret" not in json.dumps(config)
