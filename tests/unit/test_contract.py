"""The contract is exactly what is called: tests/functional/test_typing.py checks types in Python, this names in
Cython."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from counterd import _core, contract
from counterd.net.connection import Connection

SOURCES = Path(__file__).parents[2] / "src" / "counterd"
# Fields in C, where a call would cost every read something.
FIELDS = {"session": {"connection"}, "store": {"has_work"}}


def members(face: type[Any]) -> set[str]:
    """The methods and attributes of a Protocol."""
    return {name for name in {*vars(face), *face.__annotations__} if not name.startswith("_")}


def called(folder: str, name: str) -> set[str]:
    """The attributes of objects with this name that the Cython code in a folder uses."""
    texts = [path.read_text("utf-8") for path in (SOURCES / folder).rglob("*.pyx")]
    assert texts
    return {used for text in texts for used in re.findall(rf"(?<!\w){name}\.(\w+)", text)}


@pytest.mark.parametrize(
    ("face", "real"),
    [(contract.Store, _core.Store), (contract.Session, _core.Session), (contract.Peer, Connection)],
)
def test_the_compiled_classes_have_the_members_of_the_contract(face: type[Any], real: type[Any]) -> None:
    assert members(face) - set(dir(real)) == set()


@pytest.mark.parametrize(("name", "face"), [("store", contract.Store), ("session", contract.Session)])
def test_net_calls_only_members_of_the_contract(name: str, face: type[Any]) -> None:
    used = called("net", name)
    assert used - members(face) == FIELDS[name]
    assert len(used) > len(FIELDS[name]) + 1


def test_protocols_use_only_members_of_the_contracts_peer() -> None:
    assert called("protocols", r"session\.owner") == members(contract.Peer)
