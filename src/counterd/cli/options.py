"""Options that several commands share, and a type for options whose value a function reads.

Floor 5 (ARCHITECTURE.md). This file needs click, as do the commands that import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # cannot be subscripted in older versions of click


F = TypeVar("F", bound="Callable[..., Any]")

PEM = click.Path(exists=True, dir_okay=False)
TLS_OPTIONS = (
    click.option("--tls", is_flag=True, help="Use TLS. The options --cacert, --cert and --key imply it."),
    click.option(
        "--cacert", type=PEM, metavar="FILE", help="The CA certificates to trust.  [default: those of this system]"
    ),
    click.option("--cert", type=PEM, metavar="FILE", help="The client certificate, for a server that asks for one."),
    click.option(
        "--key", type=PEM, metavar="FILE", help="The private key of --cert.  [default: in the file of --cert]"
    ),
)


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Returns a decorator that adds all these options to a command, in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class Reads(ParamType):
    """The type of an option whose value a function reads."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def at_least(minimum: float, read: Callable[[str], float]) -> Callable[[str], float]:
    def checked(text: str) -> float:
        value = read(text)
        if value < minimum:
            raise ValueError(f"expected {minimum:g} or more, not {text!r}")
        return value

    return checked
