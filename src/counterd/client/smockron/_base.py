"""What the gatekeeper for threads and the gatekeeper for asyncio have in common.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Literal

from counterd.client._connection import forked
from counterd.client.smockron._gatekeeping import ALL, Core, Decision, Options, Stats, Verdict

if TYPE_CHECKING:
    import ssl

    from counterd.client.smockron._masters import Masters


class GatekeeperBase:
    """The class Gatekeeper describes the arguments."""

    decide: Any  # a method

    def __init__(
        self,
        masters: Masters = "127.0.0.1",
        domain: str | bytes = "default",
        *,
        tls: bool | ssl.SSLContext = False,
        max_delay_s: float = 5.0,
        max_delayed: int = 1000,
        rejected: Literal["all", "none"] | float = ALL,
        max_remembered: int = 100_000,
        max_held: int = 10_000,
        heartbeat: float = 5.0,
        timeout: float = 5.0,
    ) -> None:
        options = Options(max_delay_s, max_delayed, rejected, max_remembered, max_held, heartbeat, timeout)
        self._core = Core(masters, domain, tls, options)
        self._timeout = timeout
        self._closed = False
        self._make_locks()
        forked.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._core.where}>"

    def gave_up(self, decision: Decision) -> None:
        """Call this when a delayed request stops waiting, because its client has disconnected or its delay is over."""
        with self._lock:
            self._core.gave_up(decision)

    def stats(self) -> Stats:
        """Returns how requests were decided, and what happened to the messages. stats() asks no master."""
        with self._lock:
            return self._core.stats(monotonic_ns())

    def _make_locks(self) -> None:
        """Makes the lock. The lock is reentrant, because a signal handler may interrupt a thread that has it."""
        self._lock: Any = threading.RLock()

    def _after_fork(self) -> None:
        """Called in the child of a fork, where no thread and no task of the parent runs."""
        self._make_locks()
        self._core.reset()


class AdmissionBase:
    """One request at a gatekeeper."""

    def __init__(
        self, gatekeeper: GatekeeperBase, identifier: str | bytes, domain: str | bytes | None, log_info: str | bytes
    ) -> None:
        self._gatekeeper = gatekeeper
        self._asked = identifier, domain, log_info

    def _decide(self) -> Decision:
        """Returns the decision. Raises Rejected if the request is rejected."""
        decision: Decision = self._gatekeeper.decide(*self._asked)
        if decision.verdict is Verdict.REJECT:
            raise self._gatekeeper._core.rejection(*self._asked[:2], decision)
        return decision
