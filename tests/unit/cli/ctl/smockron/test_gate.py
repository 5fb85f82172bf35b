"""The addresses that the gate's gatekeeper gets, and the error if a package is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from click.testing import CliRunner

from counterd.cli.ctl import main
from counterd.cli.ctl.smockron.gate import url_of
from counterd.client._addresses import Address, Tls
from counterd.client.smockron._masters import read_masters


@pytest.mark.parametrize(
    "address",
    [
        Address("127.0.0.1", 10004),
        Address("::1", 10004),
        Address(path="/run/a b%/c\udcff"),
        Address("m1.example.org", 10004, tls=Tls()),
        Address("m1.example.org", 10004, tls=Tls("/a b/ca.pem", "/cert", "/k&y")),
    ],
)
def test_a_gatekeeper_understands_the_addresses_of_the_options(address: Address) -> None:
    pair, _ = read_masters((url_of(address), url_of(address)), tls=False)
    assert pair == (address, address)


def test_a_missing_aiohttp_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "aiohttp" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    done = CliRunner().invoke(main, ["smockron", "gate"])
    assert (done.exit_code, done.stderr) == (
        1,
        "counterctl: gate needs aiohttp: in the source tree, run `make setup` or pip install '.[admin]'\n",
    )
