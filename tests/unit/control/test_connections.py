"""The columns of the table of connections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from counterd.control.connections import CELLS, COLUMNS, row_of

SECOND_NS = 1_000_000_000


def row(tls: tuple[str, str, str] | None) -> dict[str, Any]:
    connection: Any = SimpleNamespace(
        id="7-3", number=7, requests=70, since_ns=SECOND_NS, active_ns=3 * SECOND_NS,
        origin=lambda: "127.0.0.1:5007", tls=lambda: tls,
    )  # fmt: skip
    service: Any = SimpleNamespace(
        spec=SimpleNamespace(name="one"),
        store=SimpleNamespace(holdings_of=lambda number: number + 1, about=lambda number: (f"client {number}", None)),
    )
    return row_of(service, connection, 4 * SECOND_NS)


@pytest.mark.parametrize(
    ("tls", "cells"),
    [
        (None, (None, None, None)),
        (("TLSv1.3", "AES", ""), ("TLSv1.3", "AES", None)),
        (("TLSv1.3", "AES", "CN=x"), ("TLSv1.3", "AES", "CN=x")),
    ],
)
def test_a_row_of_the_table(tls: tuple[str, str, str] | None, cells: tuple[str | None, ...]) -> None:
    assert row(tls) == {
        "id": "one-7-3",
        "peer": "127.0.0.1:5007",
        "holdings": 8,
        "requests": 70,
        "age_seconds": 3.0,
        "idle_seconds": 1.0,
        "protocol": "one",
        "name": "client 7",
        **dict(zip(("tls", "tls_cipher", "tls_subject"), cells, strict=True)),
    }


def test_the_columns_are_described() -> None:
    assert [column["name"] for column in COLUMNS] == list(row(None))
    kinds = {"text": str, "integer": int, "seconds": float}
    for column in CELLS:
        value = row(("TLSv1.3", "AES", "CN=x"))[column.name]
        assert type(value) is kinds[column.kind], column
        assert column.help
    assert [column["name"] for column in COLUMNS if column["detail"]] == ["tls_cipher", "tls_subject"]
