"""The connection of a blocking client for the sentinel protocol. While the client's background thread watches the
connection, it takes grants that arrive too late.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from counterd.client._connection import DeadlinePassed
from counterd.client._threadlink import ThreadCall, ThreadLink

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE_S = 0.05  # how long the thread reads for late grants before it checks what else is due
LATE_MAX_S = 10.0  # how long a server may owe the reply to an acquire


class TokenLink(ThreadLink):
    """One connection of the sentinel protocol, registered in its namespace."""

    def __init__(self, *arguments: Any, on_late: Callable[[], object], **named: Any) -> None:
        """on_late: called, by a caller that has the lock, when a grant may arrive while no thread reads."""
        super().__init__(*arguments, **named)
        self._on_late = on_late
        self._late_since = 0.0

    def owes_grants(self) -> bool:
        """Returns whether a grant may arrive whose caller no longer waits.

        Ends the connection if that takes longer than LATE_MAX_S.
        """
        if not self._late():
            self._late_since = 0.0
            return False
        now = time.monotonic()
        self._late_since = self._late_since or now
        if now - self._late_since >= LATE_MAX_S:
            self.close(f"an acquire was not answered within {LATE_MAX_S:g} s")
            return False
        return True

    def collect(self, seconds: float) -> None:
        """Reads for this many seconds, or until no more late grants can arrive, and gives late grants back."""
        late = self._late()
        deadline = time.monotonic() + seconds
        try:
            with suppress(DeadlinePassed):
                for call in late:
                    self._wait(call, deadline)
        finally:
            with self._lock:
                for call in late:
                    call.waiter = None
                self._pass_on()

    def watch(self, wake: int, seconds: float) -> bool:
        """Does the same as ThreadLink.watch(). While grants are owed, reads for them, and returns after SLICE_S at the
        latest."""
        if not self.owes_grants():
            return super().watch(wake, seconds)
        self.collect(min(seconds, SLICE_S))
        return True

    def _late(self) -> list[ThreadCall]:
        with self._lock:
            pending = cast("list[ThreadCall]", list(self.calls.pending.values()))
            return [call for call in pending if call.abandoned and self.calls.may_grant(call)]

    def _expect_late_grants(self) -> None:
        self._on_late()
