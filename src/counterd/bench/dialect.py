"""What a protocol tells the load about itself: its requests as bytes, its bounds, and its words in reports.

A side, pure Python. A dialect is a module that exports DIALECT, with a Codec beside it (_codec.pxd) that writes the
requests and reads the replies. dialects/__init__.py finds them. The load itself knows kinds of requests and three kinds
of work, and asks nobody for the name of a protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.bench._board import Board
    from counterd.bench.asking import Place
    from counterd.bench.plan import Plan

PAIRS = "acquire-release"
COUNTING = ("noop", "get", "acquire", "release")
KEEPING = ("query", "update", "insert", "purge", "set")
JOBS = ("put", "cycle", "fan")
MESSAGES = ("account", "control")
OPS = (*COUNTING, *KEEPING, "flow", "param", "keep", "counts", *JOBS, *MESSAGES)  # all that a mix can have
NAMED = frozenset({"names", "keys", "name-size"})  # options of a load that chooses among names
NUMBER_SIZES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}  # bytes of --number-type
NUMBERED_SIZE = 8  # bytes of a body that has a job's number,
STAMPED_SIZE = 24  # and of one that has the time too
DIGITS_MAX = 8  # of a name's number, in hexadecimal
VALUE = b"v"  # what buffers are full of: no digit of a name is in it

Mistakes = list[tuple[bool, str]]  # each: whether it was made, and what is wrong about it


@dataclass(frozen=True)
class Checks:
    """What --verify looks at: once the load is over, and once its connections are closed. Both return violations."""

    while_held: Callable[[Board], list[str]]
    when_gone: Callable[[Board], list[str]]


@dataclass(frozen=True)
class Rules:
    """What `counterbench rules` writes.

    write: a file for so many names with that maximum. May raise ValueError.
    """

    write: Callable[[int, int], str]
    help: str


def names_of(plan: Plan, run: int) -> dict[str, bytes]:
    """The name in each kind of request but for its last digits: of numbers, of buffers, and of what is new each time.

    run: its low 28 bits keep the names that one run inserts or is told of from those of others.
    """
    size = plan.name_size - min(plan.name_size, DIGITS_MAX)
    fresh = (b"i" + (b"%07x" % (run & 0xFFFFFFF))[::-1] + b"i" * size)[:size]
    kinds = {"insert": fresh, "purge": fresh, "control": fresh, "set": b"b" * size, "fetch": b"b" * size}
    return {**kinds, "": b"n" * size}


@dataclass(frozen=True)
class Dialect:
    """A protocol, as the load speaks it.

    order: where it stands in lists for people. codec: the module whose LoadCodec writes and reads.
    ops: of OPS those that it has. requests: each kind of request for a name, as bytes that the codec completes.
    kind: of the work. names: the name in each kind of request but for its last digits; the key "" is for all others.
    fill: the requests that make a name exist; none if there is nothing to make. needs_fill: they are always sent.
    opening: what each connection asks first; listening: the same of one that control messages come by.
    options: of the options that not all protocols know, those that this one does.
    tokens: whether a permit has one, chosen by the server when it is granted, or by the load when it is asked for.
    fetches: whether a get is of a buffer, not of a number. mistakes: what of a plan this protocol cannot do.
    counts: it says how much of a name is in use. prepare, checks and tidy: before a load, for --verify, and after it.
    checks raises LoadError or CounterdError if it cannot be verified. broken, kept: what --verify calls its promises.
    doubt: what to ask oneself where nothing was answered.
    """

    name: str
    order: int
    port: int
    codec: str
    ops: tuple[str, ...]
    requests: Callable[[Plan, bytes], dict[str, bytes]]
    name_size_max: int
    work: str = PAIRS
    help: str = ""
    ops_help: str = ""
    kind: Literal["permits", "jobs", "messages"] = "permits"
    names: Callable[[Plan, int], dict[str, bytes]] = names_of
    fill: tuple[str, ...] = ()
    needs_fill: bool = False
    opening: tuple[str, ...] = ()
    listening: tuple[str, ...] = ()
    options: frozenset[str] = NAMED
    tokens: Literal["", "granted", "chosen"] = ""
    fetches: Callable[[Plan], bool] = lambda _: False
    mistakes: Callable[[Plan], Mistakes] = lambda _: []
    counts: bool = False
    prepare: Callable[[Place], None] | None = None
    checks: Callable[[Plan], Checks] | None = None
    tidy: Callable[[Plan], None] | None = None
    broken: str = ""
    kept: str = "nothing was granted twice, and everything came back"
    doubt: str = "does the server speak the {protocol} protocol?"
    rules: Rules | None = None
