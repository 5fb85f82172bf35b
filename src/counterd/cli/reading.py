"""Options of the commands whose text a function reads.

Floor 5. Needs click, as the commands that use it do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # which older ones of click's versions do not let be subscripted


class Reads(ParamType):
    """An option whose text a function reads."""

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
