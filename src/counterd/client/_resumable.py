"""Whether another connection may resume an ended connection, or has resumed it.

Floor: side (ARCHITECTURE.md); shared by the blocking clients and the clients for asyncio. Only the client for the
counter protocol has tokens.
"""

from __future__ import annotations

import time
from typing import Any

from counterd.client._connection import CLOSED, PEER_CLOSED


class Resumable:
    """The base of both kinds of links.

    token: the token with which another connection can resume this one after its end. heir: the connection that has
    resumed this one.
    """

    closed = ""  # why it is not connected any more
    token: Any = None
    heir: Any = None
    _resumable_until = 0.0

    def last(self) -> Any:
        """Returns the connection that has resumed this one, or the one that has resumed that, and so on.

        Returns this connection if no other connection has resumed it.
        """
        link = self
        while link.heir is not None:
            link = link.heir
        return link

    def may_resume(self) -> bool:
        """Returns whether this connection was lost, but another connection can still resume it."""
        return bool(self.closed and self.token is not None and time.monotonic() < self._resumable_until)

    def has_read_all(self, was_open: bool) -> bool:
        """Returns whether the server has read all requests that were sent, although it did not answer each of them.

        The server has ended the connection then, so it has released what a request releases, or takes it back. Nothing
        was lost before. was_open: whether the connection was open when the request was sent.
        """
        return was_open and self.closed == PEER_CLOSED

    def next_token(self) -> Any:
        """Returns the token, with the number of the next attempt to present it; None if it cannot be resumed."""
        if not self.may_resume():
            return None
        self.token = self.token.again()
        return self.token

    def _ended(self, why: str) -> None:
        """Called when the connection ends.

        From now on the server keeps the holdings of the connection for the grace time.
        """
        if self.token is not None:
            self._resumable_until = 0.0 if why == CLOSED else time.monotonic() + self.token.grace_s
