"""A fact about a protocol is written once; where a C header and Python both need it, the two copies are compared here.

What is compared follows from names: an enum of a header and the IntEnum of that name in wire.py; a constant of a header
and the constant of that name in any Python file of the protocol; the orders that a command of counterctl offers, and
those of the table of that name.
"""

from __future__ import annotations

import importlib
import re
from enum import IntEnum
from pathlib import Path
from typing import Any

import click
import pytest

from counterd.cli.ctl import OF_PROTOCOLS, common, main
from counterd.protocols import find_protocols

PACKAGE = Path(__file__).parents[2] / "src" / "counterd"
PROTOCOLS = {spec.name: spec for spec in find_protocols()}

ENUM = re.compile(r"^cdef enum ?(\w*):.*\n((?: {4}.*\n|\n)+)", re.MULTILINE)
DEFINED = re.compile(r"^ *#define COUNTERD_(\w+) U?INT64_C\((\d+)\)$", re.MULTILINE)

# Files outside wire.py that have default ports of their own. counterctl has to start also without the counter protocol.
PORTS_ELSEWHERE = {"cli/ctl/common.py"}


def members(body: str) -> dict[str, int]:
    """The members of an enum of Cython: without a value, a member is one more than the one before."""
    found: dict[str, int] = {}
    following = 0
    for line in body.splitlines():
        name, _, value = line.partition("#")[0].partition("=")
        if name.strip():
            following = (eval(value, {}, dict(found)) if value.strip() else following) + 1
            found[name.strip()] = following - 1
    return found


def header_enums(protocol: str) -> dict[str, dict[str, int]]:
    """The enums in a protocol's headers, by name; "" has the constants of all that have none."""
    found: dict[str, dict[str, int]] = {"": {}}
    for path in sorted((PACKAGE / "protocols" / protocol).glob("*.pxd")):
        text = path.read_text("utf-8")
        for name, body in ENUM.findall(text):
            assert not name or name not in found, f"{protocol} has two enums {name}"
            found.setdefault(name, {}).update(members(body))
        found[""].update({name: int(value) for name, value in DEFINED.findall(text)})
    return found


def modules(protocol: str) -> list[Any]:
    folder = PACKAGE / "protocols" / protocol
    names = ("" if path.stem == "__init__" else f".{path.stem}" for path in sorted(folder.glob("*.py")))
    return [importlib.import_module(f"counterd.protocols.{protocol}{name}") for name in names]


def enum_differences(name: str, header: dict[str, int], known: type[IntEnum]) -> list[str]:
    """The members that only the header has, or has with another value. Its last one may be the number of the others."""
    count = (max(header.values()), list(header)[-1])
    wrong = [each for each, value in header.items() if known.__members__.get(each) != value]
    return [f"{name}.{each}" for each in wrong if (header[each], each) != count or each in known.__members__]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_header_has_the_enums_of_the_wire(protocol: str) -> None:
    wire = importlib.import_module(f"counterd.protocols.{protocol}.wire")
    for name, header in header_enums(protocol).items():
        known = getattr(wire, name, None) if name else None
        if isinstance(known, type) and issubclass(known, IntEnum):
            assert enum_differences(name, header, known) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_constant_of_a_header_is_the_same_in_python(protocol: str) -> None:
    constants = header_enums(protocol)[""]
    compared = {
        f"{module.__name__}.{name}": (value, constants[name])
        for module in modules(protocol)
        for name, value in vars(module).items()
        if name in constants and type(value) is int
    }
    assert compared
    assert {name: pair for name, pair in compared.items() if len({*pair}) > 1} == {}


def test_different_enums_are_found() -> None:
    class Opcode(IntEnum):
        GET = 1
        SET = 2

    body = "    GET = 1     # a comment\n    SET\n    OPCODES\n"
    assert members(body) == {"GET": 1, "SET": 2, "OPCODES": 3}
    assert members("    A = 1 << 4\n    B = A\n") == {"A": 16, "B": 16}
    assert enum_differences("Opcode", members(body), Opcode) == []
    assert enum_differences("Opcode", {"GET": 1, "SET": 3}, Opcode) == ["Opcode.SET"]
    assert enum_differences("Opcode", {"PUT": 0, "GET": 1, "SET": 2}, Opcode) == ["Opcode.PUT"]


def test_a_default_port_is_written_only_in_wire() -> None:
    ports = re.compile(rf"\b(?:{'|'.join(str(spec.default_port) for spec in PROTOCOLS.values())})\b")
    sources = (path for pattern in ("*.py", "*.pyx", "*.pxd") for path in PACKAGE.rglob(pattern))
    found = {path.relative_to(PACKAGE).as_posix() for path in sources if ports.search(path.read_text("utf-8"))}
    assert found - PORTS_ELSEWHERE == {f"protocols/{name}/wire.py" for name in PROTOCOLS}
    assert PROTOCOLS["counter"].default_port == common.PORT


@pytest.mark.parametrize("protocol", OF_PROTOCOLS)
def test_a_command_offers_the_orders_of_its_table(protocol: str) -> None:
    group = main.get_command(click.Context(main), protocol)
    assert isinstance(group, click.Group)
    for table in PROTOCOLS[protocol].tables():
        command = group.commands.get(table.name)
        options = {each.name: each for each in command.params} if command else {}
        if {"admin", "sort"} <= options.keys():  # it shows the server's table, and makes none of its own
            kind = options["sort"].type
            assert isinstance(kind, click.Choice)
            assert {*kind.choices} == {*table.sorts}
            assert options["sort"].default == table.sorts[0]
