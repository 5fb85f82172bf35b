"""The connections and threads of this process, as the kernel tells of them: no test looks into a client for that."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from counterd.errors import ConnectionLost

if TYPE_CHECKING:
    from counterd.client import Client

FUTEX = "202" if platform.machine() == "x86_64" else "98"  # the number of the system call
UNTIMED = "0x0"  # its deadline
CONNECTING = "02"  # SYN_SENT, in /proc/net/tcp


def descriptors(kind: str) -> set[str]:
    """Returns what this process has open of a kind: "socket", or "anon_inode". A socket's name is not used again."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            if (name := str(path.readlink())).startswith(f"{kind}:"):
                found.add(name)
    return found


def sockets() -> set[str]:
    return descriptors("socket")


def name_of(opened: socket.socket) -> str:
    """Returns the name of a socket, as sockets() lists it."""
    return str(Path(f"/proc/self/fd/{opened.fileno()}").readlink())


def is_connecting(port: int) -> bool:
    """Returns whether a connection to this port is being made, and not answered yet."""
    lines = (line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:])
    return any(line[2].endswith(f":{port:04X}") and line[3] == CONNECTING for line in lines)


def is_asleep(thread_id: int) -> bool:
    """Returns whether a thread waits for another one without a deadline. A thread that waits for the GIL has one.

    thread_id: its native_id.
    """
    number, *arguments = Path(f"/proc/self/task/{thread_id}/syscall").read_text().split()
    return number == FUTEX and arguments[3] == UNTIMED


def cut(client: Client) -> None:
    """Ends the connection of a client as a server does that closes it: both sides see that the other one has ended."""
    with socket.socket(fileno=os.dup(client.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def hears_of_loss(client: Client) -> bool:
    """Ends the connection of a client. Returns whether its next call raises that permits of no hold were lost."""
    cut(client)
    try:
        client.noop()
    except ConnectionLost:
        return True
    return False


def fill(listening: socket.socket, stack: contextlib.ExitStack) -> None:
    """Fills the queue of a socket that accepts nothing: the kernel leaves further connections unanswered."""
    listening.listen(0)
    for _ in range(3):
        connection = stack.enter_context(socket.socket())
        connection.setblocking(False)
        connection.connect_ex(listening.getsockname())
