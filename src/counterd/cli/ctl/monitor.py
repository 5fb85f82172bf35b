"""The loop of `counterctl top`.

Floor 5 (ARCHITECTURE.md). The loop waits for keys, for signals, and for replies that three threads get from the server.
screen.py draws the screen. The third thread asks the admin endpoint if a page needs its tables, and closes connections.
When the loop ends for any reason, it restores the terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.console import Console

from counterd.cli.ctl.admin import (
    PAGE,
    Endpoint,
    Table,
    columns_of,
    end_connection,
    other_tables,
    table_of,
    tables_of,
    understood,
)
from counterd.cli.ctl.common import EXIT_SIGNAL, explain
from counterd.cli.ctl.screen import Listing, Sample, Shown, Told, draw, remember, summary
from counterd.cli.ctl.top_state import CONNECTIONS, COUNTERS, HOLDERS, HOLDINGS, QUEUE, WAITS, Keys, TopState
from counterd.errors import CounterdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.segment import Segment

    from counterd.cli.ctl.common import Target
    from counterd.client import Client

REDRAWN_S = 1.0  # the screen is drawn at least this often, because it shows the age of the data
ESCAPE_S = 0.05  # an escape character after which nothing comes for this time is the Esc key
RETRY_S = 2.0  # the longest pause after a failure
LIST_TIMEOUT_S = 60.0  # for a Dump: a million counters take seconds
LIST_SHARE = 0.2  # the largest share of the time during which a Dump may be in progress
CTRL_L = "\x0c"

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class PollingThread(threading.Thread):
    """A thread that repeatedly asks the server something, so that a slow server does not delay the loop."""

    def __init__(
        self, state: TopState, ask: Callable[[], Any], tell: Callable[[Any], None], share: float = 1.0
    ) -> None:
        """share: the largest share of the time in which a request may be in progress."""
        super().__init__(daemon=True)
        self._state = state
        self._ask = ask
        self._tell = tell
        self._share = share
        self._looks = threading.Event()
        self._hurries = self._jumps = False

    def look(self, *, hurries: bool = False, jumps: bool = False) -> None:
        """Called when the user has chosen another page or order.

        hurries: the next request is sent one interval after the last one. jumps: the next request is sent immediately,
        even in a pause.
        """
        self._hurries |= hurries
        self._jumps |= jumps
        self._looks.set()

    def run(self) -> None:
        while True:
            began = time.monotonic()
            self._hurries = False
            result: Any
            try:
                result = self._ask()
            except (CounterdError, OSError) as error:
                result = error
            self._tell(result)
            self._rest(began, time.monotonic() - began, failed=isinstance(result, Exception))

    def _rest(self, began: float, took: float, *, failed: bool) -> None:
        while True:
            pause = min(self._state.interval, RETRY_S) if failed else self._state.interval
            left = began + max(pause, 0 if self._hurries else took / self._share) - time.monotonic()
            if self._jumps or (left <= 0 and not self._state.paused):
                self._jumps = False
                return
            self._looks.wait(None if self._state.paused else left)
            self._looks.clear()


class Monitor:
    """The loop of `counterctl top`, and the threads for whose replies it waits."""

    def __init__(self, target: Target, client: Client, endpoint: Endpoint | str, state: TopState) -> None:
        """endpoint: the admin endpoint, or the reason why its address is not known."""
        self._target = target
        self._endpoint = endpoint
        self._state = state
        self._shown = Shown(str(target.address), state)
        self._client = client
        self._lister: Client | None = None
        self._problems: dict[str, str] = {}
        self._told: deque[tuple[str, Any]] = deque()
        self._wake, self._wakes = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wakes, False)
        self._suspended = False
        self._spoilt = False  # whether the terminal may not show any more what was drawn
        self._drawn: list[list[Segment]] = []  # the lines that the terminal shows
        self._keys = Keys()
        self._threads = [
            PollingThread(state, self._ask_stats, lambda result: self._tell("stats", result)),
            PollingThread(state, self._ask_dump, lambda result: self._tell("dump", result), LIST_SHARE),
            PollingThread(state, self._ask_page, lambda result: self._tell("page", result)),
        ]

    def run(self) -> None:
        """Runs until the user quits or a signal ends the loop."""
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        for number in ENDING:
            signal.signal(number, end)
        for number in (signal.SIGWINCH, signal.SIGCONT):
            signal.signal(number, self._spoil)
        for thread in self._threads:
            thread.start()
        while not self._state.quits:
            signal.signal(signal.SIGTSTP, self._suspend)
            with screen() as console:
                self._spoil()
                self._attend(console)
            if self._suspended:
                self._suspended = False
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTSTP)  # returns when the shell continues this process

    # ---- in the threads ----

    def _ask_stats(self) -> Sample:
        figures = self._client.stats()
        return Sample(time.monotonic(), figures)

    def _ask_dump(self) -> Listing:
        if self._lister is None:  # not self._client, whose replies would have to wait for a million counters
            timeout = max(self._target.timeout, LIST_TIMEOUT_S)
            self._lister = self._target.connect(timeout=timeout, connect_timeout=self._target.timeout)
        began = time.monotonic()
        entries = self._lister.dump()
        return summary(entries, self._state.listed(), began, time.monotonic() - began)

    def _ask_page(self) -> Told | None:
        """Returns None if the page needs no data from the admin endpoint."""
        page, name = self._state.page, self._state.name
        try:
            self._end_connections()
            if page == COUNTERS:
                return None
            endpoint = self._known_endpoint()
            return told(endpoint, page, name, self._state.tables)
        except (CounterdError, OSError) as error:
            return Told(page, name, [], problem=explain(error, None)[0])

    def _end_connections(self) -> None:
        while self._state.kills:
            connection = self._state.kills.pop(0)
            try:
                ended = end_connection(self._known_endpoint(), connection)
                self._state.note = f"ended {connection}" if ended else f"not found: {connection}"
            except (CounterdError, OSError) as error:
                self._state.note = explain(error, None)[0]

    def _known_endpoint(self) -> Endpoint:
        if isinstance(self._endpoint, str):
            raise OSError(self._endpoint)
        return self._endpoint

    def _tell(self, who: str, what: Any) -> None:
        self._told.append((who, what))
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the loop wakes anyway
            os.write(self._wakes, b"\0")

    # ---- the loop ----

    def _suspend(self, *_: object) -> None:
        self._suspended = True

    def _spoil(self, *_: object) -> None:
        self._spoilt = True

    def _attend(self, console: Console) -> None:
        poller = select.poll()
        poller.register(sys.stdin, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while not (self._state.quits or self._suspended):
            self._draw(console)
            timeout = ESCAPE_S if self._keys.waits else REDRAWN_S
            ready = {number for number, _ in poller.poll(timeout * 1000)}
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._take()
            if sys.stdin.fileno() in ready:
                data = os.read(sys.stdin.fileno(), 4096)
                if not data:
                    raise SystemExit(EXIT_SIGNAL + signal.SIGHUP)  # the terminal was closed
                self._press(self._keys.feed(data))
            elif self._keys.waits:
                self._press(self._keys.feed(b"", final=True))

    def _draw(self, console: Console) -> None:
        """Draws the lines that have changed, or the whole screen if it was spoilt."""
        if self._spoilt:
            self._spoilt = False  # before the size is read, which may change again at any time
            self._drawn = []
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
        console.size = (columns or 80, rows or 24)
        self._shown.now = time.monotonic()
        plain = not (console.encoding or "").lower().startswith("utf")
        lines = console.render_lines(draw(self._shown, console.width, console.height, plain=plain))
        with console:  # one write
            for y, (line, before) in enumerate(zip_longest(lines, self._drawn[: len(lines)])):
                if line != before:
                    console.update_screen_lines([line], y=y)
        self._drawn = lines

    def _take(self) -> None:
        """Processes the replies that the threads have got."""
        while self._told:
            who, what = self._told.popleft()
            self._problems.pop(who, None)
            if isinstance(what, Sample):
                self._shown.before, self._shown.sample = self._shown.sample, what
            elif isinstance(what, Listing):
                self._shown.listing = what
                self._shown.history = remember(self._shown.history, what)
            elif isinstance(what, Told):
                self._shown.told = what
                if what.tables is not None and self._state.table is None:
                    self._state.tables = what.tables
            elif what is not None:
                self._problems[who] = explain(what, self._target)[0]
        self._shown.problem = next(iter(self._problems.values()), "")

    def _press(self, keys: list[str]) -> None:
        state, listing = self._state, self._shown.listing
        order, page = state.listed(), (state.page, state.name)
        for key in keys:
            state.press(key)
            self._spoilt |= key == CTRL_L
        stats, dump, pages = self._threads
        stats.look()
        dump.look(hurries=state.listed() != order and listing is not None and not listing.is_complete())
        pages.look(jumps=(state.page, state.name) != page or bool(state.kills))


@understood()
def told(endpoint: Endpoint, page: str, name: bytes, tables: Sequence[Table]) -> Told | None:
    """Asks the admin endpoint for the data of a page. tables: the tables that can be pages.

    Returns None if the page no longer exists.
    """
    if page == CONNECTIONS:
        answer = endpoint.ask("GET", "/connections", limit=PAGE)
        total = None if answer["next"] is not None else len(answer["rows"])
        return Told(page, name, answer["rows"], total, columns=columns_of(answer), tables=other_tables(endpoint))
    asked: dict[str, Any]
    if page in (HOLDINGS, WAITS):
        asked = {"connection": name.decode("utf-8", "replace")}
        held = table_of(endpoint, asked["connection"], page == WAITS)
        if held is None:
            return Told(page, name, [], 0)
        table = held
    else:
        asked = {"name": name} if page in (HOLDERS, QUEUE) else {"sort": name.decode()}
        known = tables_of(endpoint) if page in (HOLDERS, QUEUE) else tables
        found = next((each for each in known if each.name == page), None)
        if found is None:  # the user has just chosen this page; the next request is for it
            return None
        table = found
    answer = table.ask(endpoint, **asked, limit=PAGE)
    return Told(page, name, answer["rows"], answer["total"], columns=table.columns)


def end(number: int, _: object) -> None:
    """Ends the loop. The contexts around the loop then restore the terminal."""
    raise SystemExit(EXIT_SIGNAL + number)


@contextlib.contextmanager
def screen() -> Iterator[Console]:
    """Takes over the terminal and reads single keys; restores the terminal at the end."""
    attributes = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        console = Console(force_terminal=True)  # whatever the environment says, as it was seen to be one
        with console.screen():
            yield console
    finally:
        with contextlib.suppress(termios.error):  # the terminal does not exist any more
            termios.tcsetattr(sys.stdin, termios.TCSANOW, attributes)
