"""Calls of the store go to an extension and come back checked. The store is real; jobs run when the test says."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from counterd.contract import Busy, Context
from counterd.protocols.sentinel import PROTOCOL, SentinelSettings, extensions, wire
from counterd.protocols.sentinel._session import open_store
from counterd.protocols.sentinel.extending import checked, extend, judge
from counterd.protocols.sentinel.extensions import DefaultTokenService, FileRuleSource, TokenResult
from counterd.protocols.sentinel.rules import RulesError, parse_rules
from counterd.protocols.sentinel.wire import LEASE_MAX, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.contract import Plugin

MS = 1_000_000
RULES = b"""{"shop": {"flowRules": [{"resource": "pay", "grade": 0, "count": 2, "clusterMode": true,
    "clusterConfig": {"flowId": 7, "thresholdType": 1, "resourceTimeout": 100, "clientOfflineTime": 50}}]}}"""


class Bench:
    """The store with a connection, and the host of its extensions.

    now: ms. asked: calls that are to be made in a thread. made: the extensions by key; fetched: rules that are to be
    fetched periodically.
    """

    def __init__(self) -> None:
        self.store = open_store(
            max_tokens=100,
            max_param_values=100,
            max_allowed_qps=1e9,
            sweep_interval_ns=10 * MS,
            sweep_max_tokens=0,
            sweep_max_duration_ns=1000 * MS,
            hash_key=bytes(16),
            token_key=bytes(16),
            now_ns=0,
        )
        self.store.load_rules(parse_rules(RULES))
        self.now = 1000
        self.session = self.store.session(self.now_ns)
        self.session.owner = SimpleNamespace(origin=lambda: "10.0.0.7:40112")
        self.asked: list[tuple[str, Callable[[], Any], Callable[[Any, int], None]]] = []
        self.made: dict[str, Any] = {}
        self.fetched: list[tuple[str, Callable[[], Any], Callable[[Any], None], str]] = []
        self.defaults: dict[str, Any] = {}
        self.busy = False
        self.file = b""

    @property
    def now_ns(self) -> int:
        return self.now * MS

    # ---- as the plugin host, and its plugins ----

    def make(self, key: str, default: object, timeout: float) -> Plugin | None:
        self.defaults[key] = Context(default, timeout)
        if key not in self.made:
            return None
        plugin: Any = SimpleNamespace(
            extension=self.made[key], ask=self.ask, refresh=lambda *words: self.fetched.append(words)
        )
        return plugin

    def ask(self, call: str, job: Callable[[], Any], then: Callable[[Any, int], None]) -> None:
        self.asked.append((call, job, then))

    def on_loop(self, function: Callable[[int], Any], _timeout: float) -> Any:
        return function(self.now_ns)

    def read(self, key: str) -> bytes:
        assert key == "sentinel.rules"
        return self.file

    # ---- for tests ----

    def extend(self, **made: Any) -> None:
        self.made = {f"sentinel.{name}": extension for name, extension in made.items()}
        host: Any = self
        extend(self.store, host, 500)

    def work(self) -> list[str]:
        """Makes the requested calls; returns them."""
        asked, self.asked = self.asked, []
        for _, job, then in asked:
            try:
                outcome = Busy() if self.busy else job()
            except Exception as error:  # noqa: BLE001 - as the real one
                outcome = error
            then(outcome, self.now_ns)
        return [call for call, _, _ in asked]

    def tick(self, after: int = 0) -> None:
        self.now += after
        self.store.tick(self.now_ns)

    def send(self, request: bytes) -> None:
        assert self.session.receive(request, self.now_ns) == b""
        self.tick()

    def response(self) -> wire.Response:
        """Returns the only response since the last call."""
        sessions = self.store.take_dirty()
        assert sessions == [self.session]
        (response,) = wire.ResponseParser().feed(self.session.take_output(self.now_ns))
        return response

    def exchange(self, request: bytes) -> wire.Response:
        self.send(request)
        self.work()
        return self.response()


@pytest.fixture
def bench() -> Bench:
    return Bench()


class Recorder:
    """A token service that answers as a test says."""

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.calls: list[tuple[object, ...]] = []

    def _says(self, *call: object) -> Any:
        self.calls.append(call)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def request_token(self, flow_id: int, count: int, prioritized: bool, client: str) -> Any:
        return self._says("request", flow_id, count, prioritized, client)

    def release_token(self, token_id: int) -> Any:
        return self._says("release", token_id)

    def keep_token(self, token_id: int) -> Any:
        return self._says("keep", token_id)


def test_without_extensions_the_store_decides(bench: Bench) -> None:
    bench.extend()
    assert list(bench.defaults) == list(PROTOCOL.extensions.methods)
    assert {context.timeout for context in bench.defaults.values()} == {0.5}
    (response,) = wire.ResponseParser().feed(bench.session.receive(wire.acquire(1, 7, 1), bench.now_ns))
    assert response.status == Status.OK
    assert bench.asked == []


def test_a_token_service_gets_the_calls_and_its_answers_are_sent(bench: Bench) -> None:
    service = Recorder(TokenResult(Status.OK, token_id=-5, left_ms=70))
    bench.extend(token_service=service)
    assert bench.exchange(wire.acquire(1, 7, 2, True)) == wire.Response(1, 3, Status.OK, token_id=-5)
    assert bench.exchange(wire.keep(2, -5)) == wire.Response(2, 5, Status.OK, left_ms=70)
    service.result = TokenResult(Status.RELEASE_OK)
    assert bench.exchange(wire.release(3, -5)) == wire.Response(3, 4, Status.RELEASE_OK)
    assert service.calls == [("request", 7, 2, True, "10.0.0.7:40112"), ("keep", -5), ("release", -5)]


@pytest.mark.parametrize("result", [None, (0, 5), ValueError("x"), TokenResult(8), TokenResult(0, token_id=0)])
def test_a_failed_call_of_a_token_service_answers_fail(bench: Bench, result: object) -> None:
    bench.extend(token_service=Recorder(result))
    assert bench.exchange(wire.acquire(1, 7, 1)) == wire.Response(1, 3, Status.FAIL)


def test_a_busy_token_service_answers_not_available(bench: Bench) -> None:
    bench.extend(token_service=Recorder())
    bench.busy = True
    assert bench.exchange(wire.acquire(1, 7, 1)) == wire.Response(1, 3, Status.NOT_AVAILABLE)


def test_a_token_granted_after_the_timeout_is_released(bench: Bench) -> None:
    service = Recorder(TokenResult(Status.OK, token_id=9))
    bench.extend(token_service=service)
    bench.send(wire.acquire(1, 7, 1))
    bench.tick(600)
    assert bench.response() == wire.Response(1, 3, Status.NOT_AVAILABLE)
    assert bench.work() == ["request_token"]
    bench.tick()
    assert bench.work() == ["release_token"]
    assert service.calls[-1] == ("release", 9)


@pytest.mark.parametrize("overdue", [False, True])
def test_a_half_closed_connection_gets_its_answers_before_it_ends(bench: Bench, overdue: bool) -> None:
    bench.extend(token_service=Recorder(TokenResult(Status.BLOCKED)))
    bench.send(wire.acquire(1, 7, 1) + wire.acquire(2, 7, 1))
    assert (bench.session.eof(bench.now_ns), bench.session.awaited) == (b"", 2)
    assert not bench.session.closing
    assert not bench.session.more
    if overdue:
        bench.tick(600)
    else:
        bench.work()
    assert bench.store.take_dirty() == [bench.session]
    answers = wire.ResponseParser().feed(bench.session.take_output(bench.now_ns))
    assert [answer.status for answer in answers] == [Status.NOT_AVAILABLE if overdue else Status.BLOCKED] * 2
    assert bench.session.take_output(bench.now_ns) == b""
    assert (bench.session.closing, bench.session.awaited) == (True, 0)


@pytest.mark.parametrize(
    ("kind", "result", "found"),
    [
        ("request", TokenResult(0, token_id=(1 << 63) - 1), (0, (1 << 63) - 1)),
        ("request", TokenResult(1, token_id=5), (1, 0)),
        ("release", TokenResult(6, token_id=5), (6, 0)),
        ("keep", TokenResult(0, left_ms=1 << 40), (0, LEASE_MAX)),
        ("keep", TokenResult(7, left_ms=5), (7, 0)),
        (
            "request",
            TokenResult(0, token_id=1 << 63),
            "a token id must be a 64-bit number other than 0, not 9223372036854775808",
        ),
        ("request", TokenResult(0, token_id=True), "a token id must be a 64-bit number other than 0, not True"),
        ("request", TokenResult(0), "a token id must be a 64-bit number other than 0, not 0"),
        ("keep", TokenResult(0, left_ms=-1), "left_ms must be a number of milliseconds, not -1"),
        ("keep", TokenResult(0, left_ms=0.5), "left_ms must be a number of milliseconds, not 0.5"),  # type: ignore[arg-type]
        ("keep", TokenResult(-3), "unknown status -3"),
        ("keep", TokenResult("OK"), "unknown status 'OK'"),  # type: ignore[arg-type]
        ("keep", 0, "expected a TokenResult, not int"),
    ],
)
def test_results_of_a_token_service_are_checked(kind: str, result: Any, found: object) -> None:
    if isinstance(found, str):
        with pytest.raises((TypeError, ValueError)) as caught:
            checked(kind, result)
        assert str(caught.value) == found
    else:
        assert checked(kind, result) == found


# ---- what is there to begin with -------------------------------------------------------------------------------------


def test_a_service_can_delegate_to_the_engine(bench: Bench) -> None:
    bench.extend()
    default = bench.defaults["sentinel.token_service"].default
    assert isinstance(default, DefaultTokenService)
    bench.extend(token_service=default)
    granted = bench.exchange(wire.acquire(1, 7, 2))
    assert granted.status == Status.OK
    assert bench.exchange(wire.acquire(2, 7, 1)).status == Status.BLOCKED
    assert bench.exchange(wire.acquire(3, 8, 1)).status == Status.NO_RULE
    kept = bench.exchange(wire.keep(4, granted.token_id))
    assert kept == wire.Response(4, 5, Status.OK, left_ms=200)
    assert bench.store.held() == 1
    assert bench.exchange(wire.release(5, granted.token_id)).status == Status.RELEASE_OK
    assert bench.exchange(wire.release(6, granted.token_id)).status == Status.ALREADY_RELEASED


def test_a_token_granted_through_the_default_belongs_to_the_asking_client(bench: Bench) -> None:
    bench.extend()
    bench.extend(token_service=bench.defaults["sentinel.token_service"].default)
    assert bench.exchange(wire.acquire(1, 7, 2)).status == Status.OK
    bench.session.closed(bench.now_ns)
    bench.tick(30)
    assert bench.store.held() == 1
    bench.tick(40)
    assert bench.store.held() == 0, "the client was offline for longer than clientOfflineTime"


def test_the_default_service_grants_nothing_outside_of_a_call(bench: Bench) -> None:
    bench.extend()
    default = bench.defaults["sentinel.token_service"].default
    for call in (lambda: default.request_token(7, 1, False, "x"), lambda: default.keep_token(5)):
        with pytest.raises(RuntimeError, match="no client waits for a token here"):
            call()
    assert default.release_token(5).status == Status.ALREADY_RELEASED


def test_the_defaults_have_the_methods_of_their_interfaces(bench: Bench) -> None:
    bench.extend()
    shapes = (extensions.TokenService, extensions.ExpireStrategy, extensions.RuleSource)
    for (key, methods), shape in zip(PROTOCOL.extensions.methods.items(), shapes, strict=True):
        assert isinstance(bench.defaults[key].default, shape)
        assert [name for name in vars(shape) if not name.startswith("_")] == list(methods)


# ---- an expire strategy ----------------------------------------------------------------------------------------------


class Strategy:
    """An expire strategy that answers as a test says: a function of the leases."""

    def __init__(self, says: Callable[[Any], Any]) -> None:
        self.says = says
        self.seen: list[Any] = []

    def expired(self, tokens: Any) -> Any:
        self.seen += tokens
        return self.says(tokens)


def granted(bench: Bench, count: int) -> list[int]:
    """The ids of two tokens whose leases have ended."""
    (response,) = wire.ResponseParser().feed(bench.session.receive(wire.acquire(1, 7, count), bench.now_ns))
    return [response.token_id]


def test_an_expire_strategy_decides_which_tokens_end(bench: Bench) -> None:
    strategy = Strategy(lambda tokens: [token.token_id for token in tokens[:1]])
    bench.extend(expire_strategy=strategy)
    ids = granted(bench, 1) + granted(bench, 1)
    bench.tick(250)
    assert bench.work() == ["expired"]
    assert [lease.token_id for lease in strategy.seen] == ids
    assert [(lease.flow_id, lease.count, lease.online) for lease in strategy.seen] == [(7, 1, True)] * 2
    assert bench.store.held() == 1
    assert bench.store.keep_token(ids[1], 0, bench.now_ns) == (Status.OK, 200)


def all_of(tokens: Any) -> Any:
    return {token.token_id for token in tokens}


@pytest.mark.parametrize(
    ("says", "busy"),
    [(all_of, False), (lambda _: [5], False), (lambda _: None, False), (lambda _: [[]], False), (lambda _: [], True)],
)
def test_a_failed_expire_strategy_keeps_no_token(bench: Bench, says: Callable[[Any], Any], busy: bool) -> None:
    bench.extend(expire_strategy=Strategy(says))
    granted(bench, 2)
    bench.busy = busy
    bench.tick(250)
    assert bench.work() == ["expired"]
    assert bench.store.held() == 0


def test_the_default_expire_strategy_ends_all_tokens(bench: Bench) -> None:
    bench.extend()
    bench.extend(expire_strategy=bench.defaults["sentinel.expire_strategy"].default)
    granted(bench, 2)
    bench.tick(250)
    assert bench.work() == ["expired"]
    assert bench.store.held() == 0


def test_an_expire_strategy_can_end_only_the_given_tokens() -> None:
    leases: Any = [SimpleNamespace(token_id=number) for number in (1, 2)]
    ids = frozenset((1, 2))
    assert judge(Strategy(lambda _: iter([2])), leases, ids) == {2}
    with pytest.raises(ValueError, match="expected only ids of the tokens that were passed, not 3"):
        judge(Strategy(lambda _: [2, 3]), leases, ids)


# ---- a rule source ---------------------------------------------------------------------------------------------------


def test_rules_of_a_source_are_loaded(bench: Bench) -> None:
    document: dict[str, Any] = {"shop": {"flowRules": [{"resource": "a", "count": 1, "clusterMode": True}]}}
    bench.extend(rule_source=SimpleNamespace(load=lambda: document))
    ((call, job, take, interval),) = bench.fetched
    assert (call, interval) == ("load", "sentinel.rules_interval")
    with pytest.raises(RulesError, match="clusterConfig: is missing"):
        job()
    document["shop"]["flowRules"][0]["clusterConfig"] = {"flowId": 9}
    take(job())
    assert bench.store.flow(9) is not None
    assert bench.store.flow(7) is None


def test_the_rules_file_is_a_source_too(bench: Bench) -> None:
    bench.extend()
    source = bench.defaults["sentinel.rule_source"].default
    assert isinstance(source, FileRuleSource)
    assert source.load() == {}
    bench.file = RULES
    assert list(source.load()) == ["shop"]  # type: ignore[call-overload]
    bench.file = b"{"
    with pytest.raises(RulesError, match="line 1"):
        source.load()


def test_a_source_replaces_the_rules_file(bench: Bench) -> None:
    files = {"sentinel.rules": parse_rules(RULES.replace(b"7", b"9"))}
    PROTOCOL.files.load(bench.store, SentinelSettings(rule_source="x:y"), files)
    assert bench.store.flow(9) is None
    PROTOCOL.files.load(bench.store, SentinelSettings(), files)
    assert bench.store.flow(9) is not None
    PROTOCOL.files.load(bench.store, SentinelSettings(), {})
    assert bench.store.flow(9) is None


def test_a_result_is_made_as_its_documentation_says() -> None:
    assert TokenResult(Status.BLOCKED) == (1, 0, 0)
    assert dataclasses.astuple(Context("default", 1.0)) == ("default", 1.0)
