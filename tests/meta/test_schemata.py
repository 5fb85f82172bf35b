"""The mutants of tools/mutants.py: each changes code that runs, behind its switch; all else is unchanged."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

TOOL = Path(__file__).parents[2] / "tools" / "schemata.py"
HEAD = "from libc.stdint cimport uint32_t\n\n"
SWITCHED = "from counterd._mutant cimport mutant\n" + HEAD


@pytest.fixture(scope="module")
def schemata() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("schemata", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["schemata"] = module  # which its dataclasses look for
    spec.loader.exec_module(module)
    yield module
    del sys.modules["schemata"]


def function(*lines: str) -> str:
    return "".join((HEAD, "cdef int f(int a, int b) noexcept nogil:\n", *(f"    {line}\n" for line in lines)))


def changes(schemata: ModuleType, source: str) -> list[tuple[str, str]]:
    return [(mutant.before, mutant.after) for mutant in schemata.rewritten({"a.pyx": source})[0]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cdef bint c = a < b", [("a < b", "a <= b")]),
        ("cdef int c = a, d = min(a, b)", [("min(a, b)", "max(a, b)")]),
        ("return <uint32_t>a << b", [("<uint32_t>a << b", "<uint32_t>a >> b")]),
        ("return a[b - c].d", [("b - c", "b + c")]),
        ("return f(&a) or b", [("f(&a) or b", "f(&a) and b")]),
        ("return a if b else c", [("a if b else c", "a if not (b) else c")]),
        ("a += b", [("a += b", "a -= b"), ("a += b", "(nothing)")]),
        ("g(a)", [("g(a)", "(nothing)")]),
        ("a = True", [("True", "False"), ("a = True", "(nothing)")]),
    ],
)
def test_which_code_is_changed(schemata: ModuleType, line: str, expected: list[tuple[str, str]]) -> None:
    assert changes(schemata, function(line)) == expected


@pytest.mark.parametrize(
    "source",
    [
        HEAD + "cdef enum:\n    A = 1 + 1\n",
        HEAD + "cdef uint32_t[2] TABLE = [1, 2]\n",
        function('"""One < two."""'),
        function("cdef uint32_t[2] names"),
        function("debug_check(a < b)"),
        HEAD + "cdef void f_prefetch(int a) noexcept nogil:\n    g(a + 1)\n",
    ],
)
def test_declarations_and_hints_are_not_changed(schemata: ModuleType, source: str) -> None:
    mutants, texts = schemata.rewritten({"a.pyx": source})
    assert mutants == []
    assert texts["a.pyx"].removeprefix(SWITCHED) == source.removeprefix(HEAD)


def test_an_early_return_can_be_dropped_but_not_the_last(schemata: ModuleType) -> None:
    assert changes(schemata, function("if a == b:", "    return a", "return b")) == [
        ("a == b", "a != b"),
        ("return a", "(nothing)"),
    ]


def test_each_mutant_is_behind_its_switch_and_dropped_ones_are_left_out(schemata: ModuleType) -> None:
    source = function("if a < b:", "    a -= b")
    mutants, texts = schemata.rewritten({"a.pyx": source}, dropped={2})
    assert [mutant.number for mutant in mutants] == [1, 2, 3, 4]
    assert texts["a.pyx"] == SWITCHED + source.removeprefix(HEAD).replace(
        "a < b:", "(\n(a <= b) if mutant(1) else\n(a < b)):"
    ).replace("a -= b", "if mutant(3): a += b\n        elif not mutant(4): a -= b")


def test_listed_equivalent_mutants_exist() -> None:
    """Else the tool runs none."""
    listed = subprocess.run(
        [sys.executable, TOOL.with_name("mutants.py"), "--list"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "equivalent: " in listed.stdout
