"""The messages of commands that wait for permits or get none; tests/functional/test_counterctl.py has real ones."""

from __future__ import annotations

import pytest

from counterd.cli.ctl import holding
from counterd.cli.ctl.holding import Permits, say_waiting, unavailable
from counterd.errors import ConnectionLost, NotAvailable


def refusal(**said: object) -> NotAvailable:
    """The refusal of 2 permits of db:\xff."""
    error = NotAvailable(0x21, "Resource not available")
    error.name, error.resources = b"db:\xff", 2
    for name, value in said.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("said", "patience", "line"),
    [
        ({}, 0.0, ""),
        ({}, None, ""),
        ({"consumption": 9, "maximum": 10}, 0.0, ": 9 of 10 are in use"),
        ({"consumption": 9, "maximum": 10}, 90.0, " within 90 s: 9 of 10 are in use"),
        ({"consumption": 9, "maximum": 10, "retry_after": 0.333}, 2e6,
         " within 2000000 s: 9 of 10 are in use; enough units may be available in 333 ms"),
        ({"text": "Draining"}, 0.5, " within 0.5 s: the server is draining"),
        ({"consumption": 9, "maximum": 10, "limit": 1}, 90.0, ": the server's limit is 1"),
    ],
)  # fmt: skip
def test_the_reason_of_a_refusal(said: dict[str, object], patience: float | None, line: str) -> None:
    assert unavailable(refusal(**said), patience) == rf"2 of db:\xff not available{line}"


def test_the_message_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def get(self, name: bytes, default: int) -> int:
            if name == b"b":
                raise ConnectionLost("lost")
            return {b"a": 7}.get(name, default)

    lines: list[str] = []
    monkeypatch.setattr(holding, "say", lines.append)
    say_waiting(Client(), [Permits(b"a", 2, 9), Permits(b"b"), Permits(b"\n", 1, 3), "5 of a rate"])  # type: ignore[arg-type]
    assert lines == [
        "waiting for 2 of a: 7 of 9 are in use",
        "waiting for 1 of b: lost",
        r"waiting for 1 of \x0a: 0 of 3 are in use",
        "waiting for 5 of a rate",
    ]
