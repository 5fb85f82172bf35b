"""Runs the examples in a page of documentation, and compares what they print with what the page says they do.

The info string of a fence says what becomes of its block:

    python              runs, after those before it, in one process for the page
    python fresh        runs in a process of its own
    sh run              runs in a shell of its own, after all that is Python
    python not-run: why
    sh not-run: why     is for reading, and says why

What a block prints is in its comments that begin with `# -> `, a line each, or in the ```text block that follows it.
`...` there stands for anything within the line. All that is printed has to be there. Whatever else there is, `sh`
without a word, an error, an exit status, a line on standard error, is a mistake.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import daemon
import machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REDIRECTED = Path(__file__).parent / "redirected"
PAGE_PATIENCE = 2 * machine.PATIENCE  # for all of a page's Python, or a block of shell
END = "\x1e"  # is printed where a block ends

FENCE = re.compile(r"```+")
EXPECTED = re.compile(r"# -> (.*)$")
RUNS = {"python", "python fresh", "sh run"}
QUIET = {"text", "toml", "ini", "json", ""}  # languages of blocks that nobody could run
NOT_RUN = re.compile(r"(python|sh) not-run: (\S.*)")


class Block(NamedTuple):
    """A fenced block: its first line in the page, its info string, its text, and the lines it is to print."""

    line: int
    info: str
    text: str
    expected: tuple[str, ...] = ()

    @property
    def is_run(self) -> bool:
        return self.info in RUNS


def blocks(text: str) -> list[Block]:
    """The blocks of a page, in order. Raises AssertionError for what the rules above do not know."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    between = ""  # what stands between a block and the one before
    while number < len(lines):
        line = lines[number]
        number += 1
        assert FENCE.match(line) or not FENCE.match(line.lstrip()), f"line {number}: an indented fence hides its block"
        if not FENCE.match(line):
            between += line
            continue
        info, start = line.lstrip("`").strip(), number
        fence = line[: len(line) - len(line.lstrip("`"))]
        while number < len(lines) and lines[number] != fence:
            number += 1
        assert number < len(lines), f"line {start}: this fence is not closed"
        known = info in RUNS or info in QUIET or NOT_RUN.fullmatch(info)
        assert known, f"line {start}: {info!r} does not say whether it is run, or why not"
        code = lines[start:number]
        if info == "text" and not between and found and found[-1].is_run:
            assert not found[-1].expected, f"line {start}: what is printed is said twice"
            found[-1] = found[-1]._replace(expected=tuple(code))
        else:
            said = (EXPECTED.search(each) for each in code) if info in RUNS else ()
            found.append(Block(start + 1, info, "\n".join(code) + "\n", tuple(each[1] for each in said if each)))
        number += 1
        between = ""
    return found


def run(name: str, text: str, directory: Path, ports: Mapping[int, int]) -> None:
    """Runs the examples of a page. AssertionError if one does not do what the page says.

    directory: for what is written on the way. ports: by the port in the examples, that of the server that is meant.
    """
    here = [block for block in blocks(text) if block.is_run]
    parts = [[block for block in here if block.info == "python"]]
    parts += [[block] for block in here if block.info == "python fresh"]
    for part in filter(None, parts):
        script = directory / Path(name).name  # the page's name, as its line numbers are the page's: for tracebacks
        script.write_text(as_script(part))
        outputs = _output([sys.executable, "-W", "error", str(script)], name, directory, ports).split(END + "\n")
        for block, output in zip(part, outputs, strict=False):  # one more: what is printed after the last
            _compare(name, block, output)
        assert not outputs[-1], f"{name}: printed after all examples were over: {outputs[-1]!r}"
    for block in here:
        if block.info == "sh run":
            _compare(name, block, _output(["sh", "-euc", block.text], f"{name}:{block.line}", directory, ports))


def as_script(part: Sequence[Block]) -> str:
    """The blocks as one program, in which each line has the number it has in the page."""
    lines: list[str] = []
    for block in part:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
        lines.append(f"print({END!r}, flush=True)")  # where the fence was
    return "\n".join(lines) + "\n"


def _output(command: list[str], what: str, directory: Path, ports: Mapping[int, int]) -> str:
    extra = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REDIRECTED),
        "PYTHONUNBUFFERED": "1",  # or what a child prints is out of its place
        "COUNTERD_EXAMPLES_SERVERS": " ".join(f"{said}={meant}" for said, meant in ports.items()),
    }
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PAGE_PATIENCE,
        env=daemon.environment(extra),
        cwd=directory,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), f"{what}: exit status {ended.returncode}\n{ended.stderr}"
    return ended.stdout


def _compare(name: str, block: Block, output: str) -> None:
    printed = output.splitlines()
    patterns = [".*".join(map(re.escape, line.split("..."))) for line in block.expected]
    same = len(printed) == len(patterns) and all(map(re.fullmatch, patterns, printed))
    assert same, f"{name}:{block.line}: the page says {list(block.expected)}, and it prints {printed}"
