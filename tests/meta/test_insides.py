"""Tests of what users see use no private parts of the clients, so that they guard a rewrite of these. Unit tests
may."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "src" / "counterd" / "client"
FOLDERS = ("chaos", "drills", "functional", "history", "kit", "property", "scenarios")
FILES = sorted(path.relative_to(ROOT).as_posix() for each in FOLDERS for path in (ROOT / "tests" / each).rglob("*.py"))
MODULE = re.compile(r"counterd\.client(\.\w+)*\._[a-z]\w*")
PATH = re.compile(r"_\w+(\.\w+)*")  # of attributes
EXCEPT = {
    "tests/property/test_smockron_start.py": "tries every order of what arrives, which only parts without sockets can",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def insides() -> frozenset[str]:
    """Returns the names of the private attributes and functions of the clients."""
    found = set()
    for path in CLIENT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
    return frozenset(filter(is_private, found)) - {"_replace", "_asdict", "_fields", "_make"}  # of any NamedTuple


def accessed(text: str) -> Iterator[str]:
    """Yields what a test accesses of the insides: modules, their private names, and attributes of other objects."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if MODULE.fullmatch(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if MODULE.match(name))
        elif isinstance(node, ast.Attribute) and node.attr in insides():
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()"):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call):  # getattr(), attrgetter(), setattr()
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            yield from (text for text in texts if PATH.fullmatch(text) and text.partition(".")[0] in insides())
            yield from (text for text in texts if MODULE.match(text))


@pytest.mark.parametrize("file", FILES)
def test_no_private_part_is_used(file: str) -> None:
    found = list(accessed((ROOT / file).read_text("utf-8")))
    assert bool(found) == (file in EXCEPT), found


@pytest.mark.parametrize(
    "text",
    [
        "client._link.close()",
        "setattr(client, '_connecting', None)",
        "attrgetter('_link._lock')(client)",
        "from counterd.client import _link",
        "from counterd.client.counter._permits import PermitCalls",
        "import counterd.client._wait_queues",
        "monkeypatch.setattr('counterd.client._link', None)",
    ],
)
def test_uses_of_private_parts_are_found(text: str) -> None:
    assert list(accessed(text))


@pytest.mark.parametrize("text", ["self._link = 1", "entry._replace(name=b'a')", "from counterd.client import aio"])
def test_allowed_uses_are_not_reported(text: str) -> None:
    assert not list(accessed(text))
