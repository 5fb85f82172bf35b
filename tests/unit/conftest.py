"""What tests of several folders need: a configuration file, and the mistakes in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterd.control.config.loading import ConfigError, load
from counterd.protocols.counter import PROTOCOL as COUNTER


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file named F in the working directory, so that messages begin with `F:`."""
    monkeypatch.chdir(tmp_path)

    def write(content: str | bytes) -> Path:
        path = Path("F")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def problems(write):
    """The problems that are found in a file and overrides."""

    def problems(content: str | bytes, *overrides: str, specs=(COUNTER,)) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(write(content), overrides, specs)
        assert str(caught.value) == "\n".join(caught.value.problems)
        return list(caught.value.problems)

    return problems
