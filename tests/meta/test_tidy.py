"""Style rules that a program can check, for every file of this project. ruff and cython-lint check line length and
layout."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).parents[2]
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
FOLDERS = ("src", "tests", "benchmarks", "conf", "docs", "tools", ".ci", "deploy", "man")
CODE = {".py", ".pyx", ".pxd", ".pyi"}
TEXT = CODE | {".md", ".toml", ".cfg", ".conf", ".json", ".yml", ".yaml", ".sh", ".txt"}
TEXT |= {".service", ".socket", ".sysusers", ".lock", ".in", ".1", ".5"}
# Spelled so that this file does not have them.
UNFINISHED = re.compile(rf"\b(?:{'|'.join(('TO' + 'DO', 'FIX' + 'ME', 'X' * 3, 'HA' + 'CK'))})\b")
CYTHON_FUNCTION = re.compile(r"^(\s*)(?:cp?def|def)\s(?!class\b|struct\b|enum\b|extern\b|packed\b)[^=]*?\b(\w+)\(")
SKIPPING = {"skip", "skipif", "xfail", "importorskip"}


@functools.cache
def ours(root: Path) -> list[str]:
    """The files that git tracks; without git (in a source distribution), those in folders that git tracks."""
    listed = None
    if (root / ".git").exists():
        with contextlib.suppress(OSError):
            command = ["git", "-c", f"safe.directory={root}", "-C", root, "ls-files", "-z"]
            listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if listed is not None and listed.returncode == 0:
        found = [root / name for name in listed.stdout.split("\0") if name]
    else:
        found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if "__pycache__" not in path.parts]
    return sorted(path.relative_to(root).as_posix() for path in found if path.is_file())


def files(suffixes: set[str]) -> list[str]:
    return [name for name in ours(ROOT) if Path(name).suffix in suffixes]


def functions(source: str, text: str) -> Iterator[tuple[str, int]]:
    """Each function's name and number of lines, counted from its def."""
    if not source.endswith((".pyx", ".pxd")):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1
        return
    lines = text.splitlines()
    for start, line in enumerate(lines):
        if match := CYTHON_FUNCTION.match(line):
            yield match[2], cython_function_end(lines, start, len(match[1])) - start + 1


def cython_function_end(lines: list[str], start: int, indent: int) -> int:
    """The last line of the function: of what follows its signature and is indented more."""
    signature = start
    while signature < len(lines) and lines[start : signature + 1].count("") == 0:
        joined = " ".join(lines[start : signature + 1])
        if joined.count("(") == joined.count(")"):
            break
        signature += 1
    end = signature
    for number in range(signature + 1, len(lines)):
        stripped = lines[number].strip()
        if stripped and len(lines[number]) - len(lines[number].lstrip()) <= indent:
            break
        if stripped:
            end = number
    return end


def reasonless(text: str) -> list[str]:
    """The skips and expected failures without a reason."""
    found = []
    tree = ast.parse(text)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in SKIPPING:
            continue
        if not ast.unparse(node).startswith(("pytest.", "unittest.")):
            continue
        call = called.get(id(node))
        given = [] if call is None else [word for word in call.keywords if word.arg in ("reason", "msg")]
        positional = call is not None and bool(call.args) and not ast.unparse(node).startswith("pytest.mark.skipif")
        if not given and not positional:
            found.append(f"line {node.lineno}: {ast.unparse(call or node)}")
    return found


def wrong(sources: Iterable[str], rule: Callable[[str, str], object]) -> dict[str, object]:
    """Returns {file: what a rule says of its text}, without files that keep it."""
    found = ((source, rule(source, (ROOT / source).read_text("utf-8"))) for source in sources)
    return {source: said for source, said in found if said}


def too_long(source: str, text: str) -> list[tuple[str, int]]:
    lines = len(text.splitlines())
    whole = [("the file", lines)] if lines > FILE_LINES_MAX else []
    return whole + [(name, count) for name, count in functions(source, text) if count > FUNCTION_LINES_MAX]


def says_nothing(_: str, text: str) -> str:
    first = next((line for line in text.splitlines() if not line.startswith("#!")), "")
    return "" if first.startswith(('"""', 'r"""', "# ")) and len(first) > len('"""') else first or "empty"


def unclean(_: str, text: str) -> list[str]:
    found = [
        f"line {number} ends with a space" for number, line in enumerate(text.split("\n"), 1) if line != line.rstrip()
    ]
    found += ["a tab"] * ("\t" in text) + ["a carriage return"] * ("\r" in text)
    found += ["its end"] * (bool(text) and (not text.endswith("\n") or text.endswith("\n\n")))
    return found + UNFINISHED.findall(text)


def test_files_and_functions_are_short() -> None:
    assert wrong(files(CODE), too_long) == {}


def test_files_begin_with_a_description() -> None:
    assert wrong((source for source in files(CODE) if not source.endswith(".pyi")), says_nothing) == {}


def test_text_has_no_stray_whitespace() -> None:
    assert wrong(files(TEXT), unclean) == {}


def test_nothing_is_skipped_without_a_reason() -> None:
    sources = [source for source in files({".py"}) if source.startswith(("tests/", "benchmarks/"))]
    assert wrong(sources, lambda _, text: reasonless(text)) == {}


def test_patience_is_defined_once() -> None:
    """A wait that is long enough on an idle machine is too short on a busy one; tests/kit/machine.py has one for
    both."""
    own = re.compile(r"^PATIENCE\b[^=]* = [0-9.]+ *(?:#.*)?$", re.MULTILINE)
    sources = [source for source in files({".py"}) if source.startswith("tests/")]
    assert [source for source in sources if own.search((ROOT / source).read_text("utf-8"))] == ["tests/kit/machine.py"]


# ---- that these rules bite ------------------------------------------------------------------------------------------


def test_files_are_found() -> None:
    assert {"src/counterd/_core.pyx", "src/counterd/net/server.py", "tests/meta/test_tidy.py"} <= set(files(CODE))
    assert "src/counterd/counterd.conf" in files(TEXT)


def test_files_of_the_user_are_ignored(tmp_path: Path) -> None:
    """README.md lets people write try.py; a source distribution, and a copy that git refuses to read, have no list."""
    (tmp_path / "src").mkdir()
    for name in ("try.py", "src/it.py", "src/notes.py"):
        (tmp_path / name).touch()
    assert ours(tmp_path) == ["src/it.py", "src/notes.py"]
    ours.cache_clear()
    for arguments in (["init", "-q"], ["add", "src/it.py"]):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True)
    assert ours(tmp_path) == ["src/it.py"]


CYTHON = """\
cdef class Thing:
    cdef int first(self,
                   int x) noexcept:
        return x

    cpdef bytes second(self):

        a = (1,
2)
        return b""


cdef extern from "x.h":
    int third(int)


cdef inline uint32_t* fourth(
    int x
) noexcept nogil:
    return 1

def fifth(): return 1
cdef int sixth = f(1)
"""


def test_functions_of_cython_are_measured() -> None:
    expected = [("first", 3), ("second", 3), ("fourth", 4), ("fifth", 1)]
    assert list(functions("x.pyx", CYTHON)) == expected
    assert dict(functions("src/counterd/_core.pyx", (ROOT / "src/counterd/_core.pyx").read_text("utf-8")))["run"] > 20


def test_functions_of_python_are_measured() -> None:
    assert list(functions("x.py", "def a():\n    x\n\n    def b():\n        y\n")) == [("a", 5), ("b", 2)]


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.skip\ndef test(): ...",
        "@pytest.mark.skip()\ndef test(): ...",
        "@pytest.mark.skipif(x)\ndef test(): ...",
        "@pytest.mark.xfail\ndef test(): ...",
        "pytest.skip()",
        "a = pytest.param(1, marks=pytest.mark.xfail)",
    ],
)
def test_a_skip_without_a_reason_is_found(text: str) -> None:
    assert len(reasonless(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "pytest.skip('no yrmcdsd')",
        "x = pytest.mark.skipif(y, reason='no IPv6')",
        "pytest.importorskip('zmq')",
        "skip()",
    ],
)
def test_a_skip_with_a_reason_is_accepted(text: str) -> None:
    assert reasonless(text) == []
