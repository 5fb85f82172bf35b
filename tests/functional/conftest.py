"""Fixtures: a daemon for one test, and a relay to it that the test cuts. A module may have other fixtures with these
names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.cuts import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd.client import Client
    from kit.daemon import Daemon


@pytest.fixture
def counterd(start: Callable[..., Daemon]) -> Daemon:
    return start()


@pytest.fixture
def relay(counterd: Daemon) -> Iterator[Relay]:
    made = Relay(counterd.address)
    yield made
    made.close()


@pytest.fixture
def other(counterd: Daemon) -> Iterator[Client]:
    """A client that is connected to the daemon itself."""
    with counterd.client() as made:
        yield made
