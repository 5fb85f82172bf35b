"""`python -m counterd.admin LISTENING LINK DAEMON`: the admin process, which only the daemon starts.

Floor: side (ARCHITECTURE.md). LISTENING and LINK are the descriptors of two inherited sockets: the listening socket,
and the socket to the daemon. DAEMON is the daemon's pid. The process ends when the daemon ends. It ignores signals that
go to all processes of the service, so that people can still watch how the daemon drains.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys

PRIORITY = 10  # nice value: the daemon's requests have priority
PING_PERIOD_S = 5.0
PR_SET_PDEATHSIG = 1


def prepare_process(daemon: int) -> None:
    """Makes this process end with the daemon, ignore other signals, and run with a lower priority than the daemon."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != daemon:  # the daemon ended before prctl() was called
        sys.exit(0)
    os.nice(PRIORITY)


def inherited(descriptor: str) -> socket.socket:
    """Returns the inherited socket with this descriptor.

    Child processes of the admin process do not inherit the socket.
    """
    given = socket.socket(fileno=int(descriptor))
    given.set_inheritable(False)
    given.setblocking(False)
    return given


async def serve(listening: socket.socket, connected: socket.socket) -> None:
    """Serves HTTP requests until the daemon has ended."""
    # Imported after the process is prepared, because these imports take half of the time of its start.
    from counterd.admin.link import Link, keep_alive  # noqa: PLC0415
    from counterd.admin.site import Site  # noqa: PLC0415
    from counterd.protocols import find_protocols  # noqa: PLC0415

    settings: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    link = await Link.open(connected, settings.put_nowait)
    site = Site(link, find_protocols())
    site.configure(await settings.get())

    async def reconfigure() -> None:
        while True:
            site.configure(await settings.get())

    working = asyncio.gather(site.serve(listening), reconfigure(), keep_alive(link, PING_PERIOD_S))
    ended = asyncio.ensure_future(link.ended.wait())
    await asyncio.wait((working, ended), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        working.result()  # raises: after a bug this process ends, and the daemon starts another one
    os._exit(0)  # without waiting for connections of clients, because the daemon has ended already


def main() -> None:
    listening, connected, daemon = sys.argv[1:]
    prepare_process(int(daemon))
    asyncio.run(serve(inherited(listening), inherited(connected)))


if __name__ == "__main__":
    main()
