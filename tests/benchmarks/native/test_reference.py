"""The reference for the engine's times uses nothing of the engine, or both would become slower together."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "benchmarks" / "native" / "_reference.pyx"
IMPORT = re.compile(r"^[ \t]*(?:from|cimport|import|include)[ \t]+(\S+)", re.MULTILINE)


def test_the_reference_uses_nothing_of_counterd():
    assert set(IMPORT.findall(SOURCE.read_text("utf-8"))) == {"libc.stdint", "libc.stdlib", "libc.string", "posix.mman"}


def test_imports_are_found():
    text = "from counterd.engine.siphash cimport x\ncimport a.b\nimport c\n    from d import (\ninclude 'x.pxi'\n"
    assert IMPORT.findall(text) == ["counterd.engine.siphash", "a.b", "c", "d", "'x.pxi'"]
