"""What a history is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable


class Closed(NamedTuple):
    """The call that stands for the end of a connection. It takes place at each object that the connection has called.

    part: of the object, if it has several (Model.parts): it takes place at each by itself. The checker fills it in.
    """

    part: Hashable = None


class Operation(NamedTuple):
    """A call of a client, and what came of it.

    client: a connection, not a process: whoever connects again is another one.
    call: a hashable value of the model's, or Closed().
    started: ns of the monotonic clock, before the request's first byte could leave.
    ended: ns, after the answer's last byte was there. None: there never was an answer. Of what has no answer: it has
    taken effect by then, or never does.
    answer: a value of the model's; None of what has no answer.
    """

    client: int
    call: Any
    started: int
    ended: int | None = None
    answer: Any = None
