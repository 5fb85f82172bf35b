"""The answers of the gate, with a gatekeeper whose decisions the test sets."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from multidict import CIMultiDict

from counterd.cli.ctl.smockron.answers import Gate
from counterd.client.smockron import AsyncAdmission
from counterd.client.smockron._gatekeeping import PASSED, Core, Decision, Options, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

BY_ADDRESS = ("header:X-Real-IP",)
LONG_S = 1e6


class Gatekeeper:
    """A gatekeeper that decides the same for all. asked: the identifiers; gone: the decisions whose requests do not
    wait any more.
    """

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.asked: list[bytes] = []
        self.gone: list[Decision] = []

    def admit(self, identifier: bytes) -> AsyncAdmission:
        return AsyncAdmission(self, identifier, None, b"")  # type: ignore[arg-type]

    def decide(self, identifier: bytes, domain: None, log_info: bytes) -> Decision:
        self.asked.append(identifier)
        return self.decision

    @property
    def _core(self) -> Core:
        return Core("127.0.0.1", "d", tls=False, options=Options())

    def gave_up(self, decision: Decision) -> None:
        self.gone.append(decision)


def gate(decision: Decision, identifiers: Sequence[str] = BY_ADDRESS, status: int = 503) -> tuple[Gate, Gatekeeper]:
    gatekeeper: Any = Gatekeeper(decision)
    return Gate(gatekeeper, identifiers, status), gatekeeper


def request(path: str = "/", *headers: tuple[str, str], remote: str = "127.0.0.9") -> Any:
    """The parts of an aiohttp.web.BaseRequest that the gate examines."""
    return SimpleNamespace(raw_path=path, headers=CIMultiDict(headers), remote=remote)


ADDRESSED = ("X-Real-IP", "10.0.0.1")


def test_an_admitted_request_gets_200() -> None:
    made, gatekeeper = gate(PASSED)
    answer = asyncio.run(made.answer(request("/any", ADDRESSED)))
    assert (answer.status, answer.body) == (200, None)
    assert gatekeeper.asked == [b"10.0.0.1"]


@pytest.mark.parametrize(("delay_s", "after"), [(0.001, "1"), (1.0, "1"), (59.2, "60")])
def test_a_rejected_request_gets_retry_after(delay_s: float, after: str) -> None:
    made, _ = gate(Decision(Verdict.REJECT, delay_s, 1), status=403)
    answer = asyncio.run(made.answer(request("/", ADDRESSED)))
    assert (answer.status, answer.headers["Retry-After"]) == (403, after)


def test_a_delayed_request_passes() -> None:
    decision = Decision(Verdict.DELAY, 0.001, 1, 7)
    made, gatekeeper = gate(decision)
    assert asyncio.run(made.answer(request("/", ADDRESSED))).status == 200
    assert gatekeeper.gone == [decision]


def test_a_disconnected_proxy_ends_the_delay() -> None:
    decision = Decision(Verdict.DELAY, LONG_S, 1, 7)
    made, gatekeeper = gate(decision)

    async def scene() -> None:
        asking = asyncio.ensure_future(made.answer(request("/", ADDRESSED)))
        await asyncio.sleep(0)
        assert (gatekeeper.asked, gatekeeper.gone) == ([b"10.0.0.1"], [])
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert gatekeeper.gone == [decision]

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("identifiers", "asked", "expected"),
    [
        (["path"], request("/a%20b?c=d"), b"/a%20b"),
        (["path"], request("/", ("X-Original-URI", "/a?b")), b"/a"),
        (["path"], request("/", ("X-Original-URI", "/a"), ("x-forwarded-uri", "/b?c")), b"/b"),
        (["path"], request("/", ("X-Forwarded-Uri", "/\udcff")), b"/\xff"),
        (["header:x-api-key"], request("/", ("X-Api-Key", "k\udcff"), ("x-api-key", "l")), b"k\xff, l"),
        (["header:A", "path"], request("/p", ("A", "\udcff b")), b"\xff%20b /p"),
        (["header:A", "header:B"], request("/", ("B", "b")), b" b"),
        (["client"], request("/"), b"127.0.0.9"),
        (["header:A", "client"], request("/"), b" 127.0.0.9"),
    ],
)
def test_the_identifier_of_a_request(identifiers: list[str], asked: Any, expected: bytes) -> None:
    made, gatekeeper = gate(PASSED, identifiers)
    asyncio.run(made.answer(asked))
    assert gatekeeper.asked == [expected]


def test_a_client_of_a_unix_socket_has_no_address() -> None:
    made, gatekeeper = gate(Decision(Verdict.REJECT, 1.0, 1), ["client"])
    assert asyncio.run(made.answer(request(remote=""))).status == 200
    assert gatekeeper.asked == []


@pytest.mark.parametrize("headers", [[], [("X-Real-IP", "")], [("X-Other", "x")]])
def test_requests_without_an_identifier_pass_and_the_first_is_logged(
    headers: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    made, gatekeeper = gate(Decision(Verdict.REJECT, 1.0, 1), ["header:X-Real-IP", "header:X-Key", "path"])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert asyncio.run(made.answer(request("/", *headers))).status == 200
    assert gatekeeper.asked == []
    said = "requests without X-Real-IP or X-Key pass without a limit (logged once)"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_invalid_kinds_of_identifiers_are_refused() -> None:
    for identifiers in ([], ["name"], ["header:"]):
        with pytest.raises(ValueError, match="identifier: "):
            gate(PASSED, identifiers)
