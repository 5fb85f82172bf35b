"""Runs the examples in a page of documentation, and compares their output with that in the page.

The info string of a fence says how its block is run:

    python              after the earlier blocks, in one process for the page
    python fresh        in a separate process
    sh run              in a separate shell, after all Python blocks
    python not-run: why
    sh not-run: why     not at all, for the stated reason

The expected output of a block is in its comments that begin with `# -> `, one per line, or in the ```text block that
follows it. `...` in it stands for anything within the line. All output must be expected. A fence `sh` without a word,
an error, an exit status other than 0, and output to standard error are mistakes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kit import daemon, machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REDIRECTED = Path(__file__).parents[1] / "redirected"
PAGE_PATIENCE = 2 * machine.PATIENCE  # for all Python blocks of a page, or for one shell block
END = "\x1e"  # printed at the end of each block

FENCE = re.compile(r"```+")
EXPECTED = re.compile(r"# -> (.*)$")
RUNS = {"python", "python fresh", "sh run"}
QUIET = {"text", "toml", "ini", "json", ""}  # languages of blocks that cannot be run
NOT_RUN = re.compile(r"(python|sh) not-run: (\S.*)")


class Block(NamedTuple):
    """A fenced block: its first line in the page, its info string, its text, and its expected output."""

    line: int
    info: str
    text: str
    expected: tuple[str, ...] = ()

    @property
    def is_run(self) -> bool:
        return self.info in RUNS


def blocks(text: str) -> list[Block]:
    """Returns the blocks of a page, in order. Raises AssertionError for a block that breaks the rules above."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    between = ""  # the text between a block and the previous one
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
    """Runs the examples of a page. Raises AssertionError if the output of one is not as expected.

    directory: for temporary files. ports: {port in the examples: port of the server to use}.
    """
    here = [block for block in blocks(text) if block.is_run]
    parts = [[block for block in here if block.info == "python"]]
    parts += [[block] for block in here if block.info == "python fresh"]
    for part in filter(None, parts):
        script = directory / Path(name).name  # tracebacks show the page's name and line numbers
        script.write_text(as_script(part))
        outputs = _output([sys.executable, "-W", "error", str(script)], name, directory, ports).split(END + "\n")
        for block, output in zip(part, outputs, strict=False):  # outputs has one more: that after the last block
            _compare(name, block, output)
        assert not outputs[-1], f"{name}: printed after all examples were over: {outputs[-1]!r}"
    for block in here:
        if block.info == "sh run":
            _compare(name, block, _output(["sh", "-euc", block.text], f"{name}:{block.line}", directory, ports))


def as_script(part: Sequence[Block]) -> str:
    """Joins the blocks to one program in which each line has the same number as in the page."""
    lines: list[str] = []
    for block in part:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
        lines.append(f"print({END!r}, flush=True)")  # in the line of the closing fence
    return "\n".join(lines) + "\n"


def _output(command: list[str], what: str, directory: Path, ports: Mapping[int, int]) -> str:
    extra = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REDIRECTED),
        "PYTHONUNBUFFERED": "1",  # keeps output in order with that of child processes
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
