"""A pseudo-terminal with a process that has it as its own: in a session and in the foreground, as a shell would do."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

from rich.cells import cell_len

from kit.daemon import PATIENCE, environment, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# The terminal becomes that of the session, and then the command is what runs there.
TAKES_IT = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

SCREEN_ON, SCREEN_OFF = b"\x1b[?1049h", b"\x1b[?1049l"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
UNKNOWN = "?"
LINE = re.compile(r"\x1b\[(\d+);1H([^\x1b]*)")

END = b"\0end\0"  # written behind all that the process wrote


class Terminal:
    """The user's end of a terminal. shown: everything that was written to it so far."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int) -> None:
        self.process = process
        self.shown = b""
        self._master = master
        self._slave = slave
        self._spoilt = 0  # what was written before this does not tell what is seen

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read(self) -> bytes:
        """Returns what was written until now."""
        while select.select([self._master], [], [], 0)[0]:
            self.shown += os.read(self._master, 1 << 16)
        return self.shown

    def screen(self) -> list[str]:
        """Returns what the terminal shows of a program that only moves the cursor to the beginning of lines, and writes
        whole lines.

        The lines are without colours, and without blanks at their ends. UNKNOWN stands for a line that was not written
        yet.
        """
        columns, rows = self.size
        shown = self.read()
        text = shown[max(self._spoilt, shown.rfind(SCREEN_ON)) :].decode("utf-8", "replace")
        lines = [UNKNOWN] * rows
        for row, line in LINE.findall(COLOUR.sub("", text)):
            if cell_len(line) == columns and int(row) <= rows:  # else it is of another size, or only a part came so far
                lines[int(row) - 1] = line.rstrip()
        return lines

    @property
    def size(self) -> tuple[int, int]:
        """Returns columns and rows."""
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(self._slave, termios.TIOCGWINSZ, bytes(8)))
        return columns, rows

    def spoil(self) -> None:
        """Forgets what the terminal shows, as when another program writes to it."""
        self._spoilt = len(self.read())

    def wait_for(self, text: bytes, after: int = 0) -> int:
        """Waits until this is written, beyond so many bytes; returns how many there are up to its end."""
        try:
            wait_until(lambda: text in self.read()[after:], f"{text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}; there is {self.shown[after:][-3000:]!r}") from None
        return self.shown.index(text, after) + len(text)

    def resize(self, columns: int, rows: int) -> None:
        """Changes the size. What is seen then differs among terminals, so it does not count."""
        self.spoil()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def attributes(self) -> list[object]:
        """Returns the settings of the terminal: echo, line mode and so on."""
        return list(termios.tcgetattr(self._slave))

    def ended(self) -> int:
        """Waits until the process has ended, and returns its exit status."""

        def has_ended() -> bool:
            self.read()  # or it may wait for that
            return self.process.poll() is not None

        wait_until(has_ended, "its end")
        os.write(self._slave, END)  # the kernel may not have passed on all that came before
        self.wait_for(END)
        self.shown = self.shown.removesuffix(END)
        return self.process.returncode


@contextlib.contextmanager
def terminal(
    command: Sequence[object], *, columns: int = 80, rows: int = 24, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Runs a command, given with its path, in a terminal during the block."""
    with contextlib.ExitStack() as stack:
        master, slave = pty.openpty()
        stack.callback(os.close, slave)
        stack.callback(os.close, master)
        variables = environment({"TERM": "xterm-256color", **(env or {})})
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-c", TAKES_IT, *map(str, command)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=variables,
        )
        try:
            yield Terminal(process, master, slave)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)
