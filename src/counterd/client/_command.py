"""The methods of clients, written once for both kinds of clients, blocking and asyncio. A command makes a request,
which the client then runs.

A blocking client returns the result, a client for asyncio returns a coroutine, and a pipeline collects the requests.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar, cast, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Concatenate

    from counterd.client._steps import Steps

T = TypeVar("T")
P = ParamSpec("P")
PipelineT = TypeVar("PipelineT", bound="PipelineBase")


class Request(Generic[T]):
    """A request to a server that replies in the order of the requests.

    frame: the bytes to send. read: makes the result from the replies, usually one; raises ServerError for a refusal.
    patience: how many seconds the server may take to reply, in addition to the client's timeout.
    is_repeatable: executing the request twice has the same effect as once, so it may be sent again on another
    connection.
    """

    __slots__ = ("frame", "is_repeatable", "patience", "read")

    def __init__(
        self, frame: bytes, read: Callable[[list[Any]], T], *, patience: float = 0.0, is_repeatable: bool = False
    ) -> None:
        self.frame = frame
        self.read = read
        self.patience = patience
        self.is_repeatable = is_repeatable


# An encoder of a wire module and its arguments except the opaque: a tuple. Request only says the type of the result.
Encoded: TypeAlias = tuple[Any, ...] | Request[T]


class CommandBase:
    """The base of the classes that run commands."""

    def _run_command(self, made: Any) -> Any:
        raise NotImplementedError


class SyncBase(CommandBase):
    """A class whose commands return results."""


class AsyncBase(CommandBase):
    """A class whose commands return coroutines."""


class PipelineBase(CommandBase):
    """A class whose commands collect their requests, and return the collecting object: a pipeline."""

    def __init__(self) -> None:
        self._requests: list[Any] = []

    def _run_command(self, request: Any) -> Any:
        self._requests.append(request)
        return self

    def _taken(self) -> list[Any]:
        """Removes all requests from the pipeline, and returns them."""
        requests, self._requests = self._requests, []
        return requests


class Command(Generic[P, T]):
    """The type of a method in each of the three kinds of classes. At run time a command is an ordinary function."""

    if TYPE_CHECKING:

        @overload
        def __get__(self, client: SyncBase, owner: object = None) -> Callable[P, T]: ...
        @overload
        def __get__(self, client: AsyncBase, owner: object = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
        @overload
        def __get__(self, client: PipelineT, owner: object = None) -> Callable[P, PipelineT]: ...
        def __get__(self, client: Any, owner: object = None) -> Any: ...


def command(make: Callable[Concatenate[Any, P], Encoded[T] | Steps[T]]) -> Command[P, T]:
    """Returns a method that runs the request, or the steps, that the function makes from its arguments."""
    said: str = make.__annotations__["return"]
    make.__annotations__["return"] = said.partition("[")[2].removesuffix("]")  # for help()
    code = make.__code__
    positional = code.co_varnames[: code.co_argcount]
    keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    declared = ", ".join([*positional, "*", *keywords] if keywords else positional)
    passed = ", ".join([*positional, *(f"{each}={each}" for each in keywords)])
    # With the function's own parameters, because *arguments and **named take a tenth of the time of a call.
    source = f"lambda {declared}: {positional[0]}._run_command(make({passed}))"
    run = eval(compile(source, __file__, "eval"), {"make": make})
    run.__defaults__, run.__kwdefaults__ = make.__defaults__, make.__kwdefaults__
    return cast("Command[P, T]", functools.update_wrapper(run, make))
