"""Fixture: the server for scenarios that do not stop it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scenarios.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server") / "daemon") as running:
        yield running
