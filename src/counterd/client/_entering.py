"""What clients and holds say when they are not entered, or in the wrong way.

Floor: side (ARCHITECTURE.md). A hold does nothing before it is entered, so one whose `with` was forgotten limits
nothing. Python warns of it, as it does of a coroutine that was never awaited.
"""

from __future__ import annotations

import sys
import warnings
from opcode import opmap
from typing import NoReturn

# The instruction that throws the result of a call away, and those that call.
_POP_TOP = opmap["POP_TOP"]
_CALLS = {code for name, code in opmap.items() if name.startswith("CALL") and "INTRINSIC" not in name}


class _Alone:
    """Tells how many references an object has in its __del__() if no other object refers to it."""

    references = 0

    def __del__(self) -> None:
        _Alone.references = sys.getrefcount(self)


_Alone()


class Entering:
    """An object that is to be entered. A caller that throws it away instead, like `client.hold("db", maximum=2)` as a
    statement, is warned.

    The warning must not come if the caller is interrupted between making the object and entering it. So what counts is
    where the object dies: at the instruction that throws away the result of the call before it. An object that others
    still refer to dies of a garbage collection, which can happen at any instruction.
    """

    _is_used = False  # it was entered, or an attempt was made

    def __del__(self) -> None:
        if self._is_used or sys.getrefcount(self) > _Alone.references:
            return
        if (frame := sys._getframe().f_back) is not None:
            code, at = frame.f_code.co_code, frame.f_lasti
            if at >= 0 and code[at] == _POP_TOP and _before(code, at) in _CALLS:
                text = f"{self!r} was never entered, so nothing was taken: use it in a `with` or `async with`"
                warnings.warn(text, RuntimeWarning, stacklevel=2)


def _before(code: bytes, at: int) -> int:
    """Returns the instruction before this one. Between two there may be room for the interpreter's caches: zeros."""
    at -= 2
    while at > 0 and not code[at]:
        at -= 2
    return code[at]


class WrongWith(TypeError, AttributeError):
    """The error for a `with` that should be an `async with`, or the other way round.

    An AttributeError, because hasattr() has to return False.
    """


class _Instead:
    """In the place of a method that a class lacks."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, entered: object, cls: type) -> NoReturn:
        raise WrongWith(f"{cls.__name__} {self._text}")


class ForWith:
    """The base of what is entered by `with`."""

    __aenter__ = _Instead("is blocking: use `with`, or a client for asyncio, such as AsyncClient")


class ForAsyncWith:
    """The base of what is entered by `async with`."""

    __enter__ = _Instead("is for asyncio: use `async with`, or a blocking client, such as Client")
