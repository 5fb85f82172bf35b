"""The methods of a client, each written once for both shapes: a command makes a request, and the client runs it.

A blocking client returns the result, one for asyncio a coroutine of it, a pipeline adds the request to its others.

Stands beside the floors.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar, cast, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from typing import Concatenate

T = TypeVar("T")
Steps: TypeAlias = "Generator[tuple[Any, ...], Any, T]"  # for a driver of _waiting
P = ParamSpec("P")
RecordingT = TypeVar("RecordingT", bound="Recording")


class Request(Generic[T]):
    """What is asked of a server whose replies come in the order of the requests.

    frame: what is sent. read: makes the result of the replies, mostly one; raises ServerError for a refusal.
    patience: seconds that the server may take to reply, beyond the client's timeout.
    is_repeatable: nothing is different if it is done twice, so it may be sent again through another connection.
    """

    __slots__ = ("frame", "is_repeatable", "patience", "read")

    def __init__(
        self, frame: bytes, read: Callable[[list[Any]], T], *, patience: float = 0.0, is_repeatable: bool = False
    ) -> None:
        self.frame = frame
        self.read = read
        self.patience = patience
        self.is_repeatable = is_repeatable


class Shape:
    """Who runs commands."""

    def _run_command(self, made: Any) -> Any:
        raise NotImplementedError


class Blocking(Shape):
    """Its commands return results."""


class Awaiting(Shape):
    """Its commands return coroutines."""


class Recording(Shape):
    """Its commands return it, with the request added."""


class Command(Generic[P, T]):
    """What a method is for each shape. At run time it is a function like any other."""

    if TYPE_CHECKING:

        @overload
        def __get__(self, client: Blocking, owner: object = None) -> Callable[P, T]: ...
        @overload
        def __get__(self, client: Awaiting, owner: object = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
        @overload
        def __get__(self, client: RecordingT, owner: object = None) -> Callable[P, RecordingT]: ...
        def __get__(self, client: Any, owner: object = None) -> Any: ...


def command(make: Callable[Concatenate[Any, P], Request[T] | Steps[T]]) -> Command[P, T]:
    """The method that runs what the function makes of its arguments: a request, or steps."""
    said: str = make.__annotations__["return"]
    make.__annotations__["return"] = said.partition("[")[2].removesuffix("]")  # for help()

    @functools.wraps(make)
    def run(client: Shape, /, *arguments: P.args, **named: P.kwargs) -> Any:
        return client._run_command(make(client, *arguments, **named))

    return cast("Command[P, T]", run)
