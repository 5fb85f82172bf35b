"""What the dialects of chaos have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

Asked = tuple[Any, bytes]  # a call, or text if it is not recorded; and the bytes

MORE = object()  # of an answer: it has another part
GARBAGE = "garbage"
JOBS = "jobs"  # the dialect of workers whose jobs take permits: the beanstalk protocol, in the daemon of the counters
LENT = {b"lent:0": 3, b"lent:1": 5}  # counters that jobs take permits of, and clients too; and their maxima

PIPELINE = (1, 1, 1, 1, 1, 2, 3)  # requests in one piece; most wait for each answer


class Dialect(Protocol):
    """The client's side of a protocol for one connection. chance: the source of its requests. forgives: whether the
    connection survives garbage.
    """

    chance: random.Random
    forgives: bool

    def hello(self) -> Asked: ...
    def is_welcome(self, told: Any) -> bool: ...
    def batch(self) -> list[Asked]: ...
    def give_back(self) -> list[Asked]: ...
    def much(self) -> list[Asked]: ...
    def all(self) -> list[Asked]: ...
    def feed(self, data: bytes) -> Iterable[Any]: ...
    def take(self, call: Any, answer: Any) -> Any: ...
    def garbage(self) -> bytes: ...
    def truncated(self) -> bytes: ...


def sign_of_life(client: int) -> bytes:
    """The counter, subscription, namespace or tube that a client takes first and never gives back.

    While it is in use, the server has not cleaned up the client.
    """
    return b"alive-%d" % client
