"""Fixtures for tests of more than one folder."""

from __future__ import annotations

import contextlib
import gc
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from certificates import Files


def pytest_configure() -> None:
    """What a shell starts behind itself ignores SIGINT, and so would all that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """The tests themselves, some million objects, stay to the end: no collection has to look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., daemon.Daemon]]:
    """Starts a counterd with these settings (see daemon.running), which ends with the test."""
    with contextlib.ExitStack() as stack:
        count = 0

        def started(settings: Mapping[str, Any] | None = None, **options: Any) -> daemon.Daemon:
            nonlocal count
            count += 1
            return stack.enter_context(daemon.running(tmp_path / f"daemon{count}", settings, **options))

        yield started


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for Unix sockets, whose addresses are bounded: pytest's own has the name of the test in it."""
    directory = Path(tempfile.mkdtemp(prefix="counterd-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Certificates and keys of a server and of a client."""
    import certificates

    return certificates.Files(tmp_path_factory.mktemp("pem"))
