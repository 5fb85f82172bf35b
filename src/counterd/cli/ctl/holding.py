"""What the commands share that hold something: `acquire`, `take`, `run` and `sentinel acquire`.

Floor 5 (ARCHITECTURE.md).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from counterd.cli.ctl.common import (
    DURATION,
    Bytes,
    explain,
    interrupted,
    refused,
    say,
    shown,
    terminations_interrupt,
)
from counterd.cli.ctl.output import span
from counterd.cli.options import with_options
from counterd.errors import CounterdError, NotAvailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from counterd.client import Client, Hold, Taken

H = TypeVar("H")

KEY_MAX, WEIGHT_MAX = 255, 1000  # bytes; section "Take" of the protocol
STDIN = 0
POLL_MAX = 2**31 - 1  # ms
SAID_AFTER_S = 1.0  # the waiting time before it is reported


# ---- options ----


# The place of a command in the queue of the server.
place_options = with_options(
    click.option(
        "--fair-key",
        "key",
        metavar="KEY",
        type=Bytes("key", 0, KEY_MAX),
        default="",
        help="Keys that wait take turns.  [default: one for this command alone]",
    ),
    click.option("--weight", type=click.IntRange(1, WEIGHT_MAX), default=1, help="The share of KEY.  [default: 1]"),
    click.option(
        "--priority", type=click.IntRange(0, 255), default=0, help="The highest priority is served first.  [default: 0]"
    ),
)

# How long permits are waited for and held, and the place in the queue of those that are waited for.
holding_options = with_options(
    click.option(
        "-w",
        "--wait",
        "patience",
        type=DURATION,
        default=0.0,
        help="How long to wait until everything is available.  [default: do not wait]",
    ),
    click.option(
        "--for", "duration", type=DURATION, help="Hold the permits for this time; 0 gives them back immediately."
    ),
    click.option("--until-stdin-closes", "stdin", is_flag=True, help="Hold the permits until standard input ends."),
    place_options,
)


class Permits(NamedTuple):
    """How many permits of a counter to take, and the maximum of the counter."""

    name: bytes
    amount: int = 1
    maximum: int = 1

    def __str__(self) -> str:
        return f"{self.amount} of {shown(self.name)}"


# ---- from the first request to the last ----


def unavailable(error: NotAvailable, patience: float | None) -> str:
    """Returns what was not available, and why, as far as the server says it."""
    line = f"{error.resources} of {shown(error.name)} not available"
    if error.limit is not None:
        return f"{line}: the server's limit is {error.limit}"
    if patience:
        line += f" within {patience:.12g} s"
    if error.draining:
        return f"{line}: the server is draining"
    if error.consumption is not None:
        line += f": {error.consumption} of {error.maximum} are in use"
    if error.retry_after is not None:
        line += f"; enough units may be available in {span(error.retry_after)}"
    return line


@contextlib.contextmanager
def held(
    target: Any,
    enter: Callable[[Any], AbstractContextManager[H]],
    asked: Sequence[object],
    patience: float = 0.0,
    charged: Sequence[object] = (),
    why: Callable[[NotAvailable, float], str] = unavailable,
) -> Iterator[tuple[Any, H]]:
    """Connects, and holds what enter() takes while the block runs. The block gets the client and the hold.

    Ctrl-C and SIGTERM end the block, and then the command, with their exit status. asked: what is held, for messages.
    patience: how long enter() may wait. charged: what is taken together with it and not given back. why: returns the
    message for a refusal.
    """
    status = 0
    with terminations_interrupt(), target.connect() as client, contextlib.ExitStack() as stack:
        try:
            with waiting_is_said(client, [*asked, *charged], patience):
                hold = stack.enter_context(enter(client))
        except NotAvailable as error:
            refused(why(error, patience))
        try:
            yield client, hold
        except KeyboardInterrupt as error:
            status = interrupted(error)
        stack.close()
        if asked:
            say(f"released {', '.join(map(str, asked))}")
    click.get_current_context().exit(status)


@contextlib.contextmanager
def waiting_is_said(client: Client, asked: Sequence[object], patience: float | None) -> Iterator[None]:
    """If the block lasts longer than SAID_AFTER_S, says what it waits for. The block may last for `patience`."""
    if patience is not None and patience <= SAID_AFTER_S:
        yield
        return
    saying = threading.Timer(SAID_AFTER_S, say_waiting, (client, asked))
    # That thread may exist for some moments after join(). If a signal came to it then, nobody would learn of that.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    saying.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield
    finally:
        saying.cancel()
        saying.join()


def say_waiting(client: Client, asked: Sequence[object]) -> None:
    """Called in another thread, while the hold waits in the server's queue."""
    for each in asked:
        used = ""
        if isinstance(each, Permits):
            try:
                used = f": {client.get(each.name, default=0)} of {each.maximum} are in use"
            except CounterdError as error:
                used = f": {explain(error, None)[0]}"
        say(f"waiting for {each}{used}")


def wait(
    client: Client,
    permits: Hold | Taken,
    duration: float | None,
    *,
    stdin: bool,
    told: Callable[[bytes], object] = len,
) -> None:
    """Waits until the hold ends. Raises ConnectionLost if the permits are lost before the hold ends.

    stdin: whether the hold ends when standard input ends. told: is called with the bytes that are read from there, and
    with b"" at the end.
    """
    if stdin and sys.stdin is None:
        return  # it was closed before the start; the connection may have its descriptor's number
    deadline = math.inf if duration is None else time.monotonic() + duration
    poller = select.poll()
    poller.register(client.fileno(), select.POLLRDHUP)
    if stdin:
        poller.register(STDIN, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(None if left == math.inf else min(math.ceil(left * 1000), POLL_MAX)))
        permits.raise_if_lost()
        if STDIN in ready:
            data = os.read(STDIN, 65536) if ready[STDIN] & select.POLLIN else b""
            told(data)
            if not data:
                return
