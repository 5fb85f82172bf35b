"""What a connection knows about its end: whether another one may go on with it, or has.

Floor: side; shared by the blocking clients and those for asyncio. Only the client for the counter protocol has tokens.
"""

from __future__ import annotations

import time
from typing import Any

from counterd.client._connection import CLOSED


class Resumable:
    """The base of both kinds of links.

    token: with which another connection can go on with this one, after its end. heir: the connection that has.
    """

    closed = ""  # why it is not connected any more
    token: Any = None
    heir: Any = None
    _resumable_until = 0.0

    def may_resume(self) -> bool:
        """Returns whether it was lost, and another connection may still go on with it."""
        return bool(self.closed and self.token is not None and time.monotonic() < self._resumable_until)

    def _ended(self, why: str) -> None:
        """Called when it ends. From now on the server keeps what is held, for the grace time."""
        if self.token is not None:
            self._resumable_until = 0.0 if why == CLOSED else time.monotonic() + self.token.grace_s
