"""The arguments that `counterctl top` refuses before it queries a server."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from counterd.cli.ctl import main


def test_top_needs_a_terminal() -> None:
    found = CliRunner().invoke(main, ["-p", "1", "top"])
    assert found.exit_code == 2
    assert found.output.startswith("counterctl: top needs a terminal; ")


@pytest.mark.parametrize("interval", ["0s", "10ms", "often"])
def test_an_invalid_interval_is_refused(interval: str) -> None:
    found = CliRunner().invoke(main, ["-p", "1", "top", "--interval", interval])
    assert found.exit_code == 2
    assert "--interval" in found.output
