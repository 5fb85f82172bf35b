"""`python -m counterd.admin LISTENING LINK DAEMON`: the admin process, which only the daemon starts.

A side. Its arguments are the numbers of two descriptors it was given, a listening socket and the socket to the daemon,
and the daemon's pid. It ends when the daemon does, and only then: a signal that is meant for all processes of a service
comes here too, while the daemon drains and somebody wants to know how far it is.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys

PRIORITY = 10  # nice: requests go first
PING_PERIOD_S = 5.0
PR_SET_PDEATHSIG = 1


def prepare_process(daemon: int) -> None:
    """Lets this process end with the daemon, and for no other reason; it gets what processor time the daemon leaves."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != daemon:  # it ended before that was said
        sys.exit(0)
    os.nice(PRIORITY)


def inherited(descriptor: str) -> socket.socket:
    """The socket behind a number, for nobody else to inherit."""
    given = socket.socket(fileno=int(descriptor))
    given.set_inheritable(False)
    given.setblocking(False)
    return given


async def serve(listening: socket.socket, connected: socket.socket) -> None:
    """Serves until the daemon is gone."""
    # Imported once the process is prepared: together they take as long as all the rest of its start.
    from counterd.admin.link import Link, keep_alive  # noqa: PLC0415
    from counterd.admin.site import Site  # noqa: PLC0415
    from counterd.protocols import find_rooms  # noqa: PLC0415

    settings: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    link = await Link.open(connected, settings.put_nowait)
    site = Site(link, find_rooms())
    site.configure(await settings.get())

    async def reconfigure() -> None:
        while True:
            site.configure(await settings.get())

    working = asyncio.gather(site.serve(listening), reconfigure(), keep_alive(link, PING_PERIOD_S))
    ended = asyncio.ensure_future(link.ended.wait())
    await asyncio.wait((working, ended), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        working.result()  # a bug: the process ends with it, and the daemon starts another one
    os._exit(0)  # connections of clients are not waited for: the daemon is gone already


def main() -> None:
    listening, connected, daemon = sys.argv[1:]
    prepare_process(int(daemon))
    asyncio.run(serve(inherited(listening), inherited(connected)))


if __name__ == "__main__":
    main()
